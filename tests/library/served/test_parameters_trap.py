"""Senders of values under the names of codes refuse a model whose codes are served."""

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fp8manifold as fm

#: what other libraries announce is their own business
pytestmark = pytest.mark.filterwarnings("ignore")
REFUSAL = "would send float values of this Sequential under the names of codes"
GENERATION = "trl.generation.vllm_generation"
VLLM = "vllm.distributed.weight_transfer.base"


def model() -> nn.Module:
    return fm.quantize_model(nn.Sequential(nn.Linear(32, 8)), "E4M3")


class SentByTrl:
    """What a client of TRL without a server would send, and its metadata."""

    def __init__(self) -> None:
        self.metadata: list[Any] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, SentByTrl]:
    """A client of TRL, and what it has sent."""
    from trl.generation.vllm_client import VLLMClient

    sent = SentByTrl()

    def update_named_params(_client: Any, metadata: Any, named_params: Any) -> None:
        sent.metadata += metadata
        sent.tensors += named_params

    monkeypatch.setattr(VLLMClient, "update_named_params", update_named_params)
    return object.__new__(VLLMClient), sent


@pytest.mark.extra("trl")
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_client_of_trl_refuses_a_served_model(
    is_wrapped: bool, trl: tuple[Any, SentByTrl]
) -> None:
    client, sent = trl
    net = model()
    fm.served_weights(net)
    if is_wrapped:
        net = nn.DataParallel(net)
    with pytest.raises(ValueError, match="names of codes") as caught:
        client.update_model_params(net)
    assert "\n" not in str(caught.value)
    assert sent.tensors == []


@pytest.mark.extra("trl")
def test_a_client_of_trl_sends_a_model_that_is_not_served(trl: tuple[Any, SentByTrl]) -> None:
    client, sent = trl
    client.update_model_params(model())
    assert [name for name, _ in sent.tensors] == ["0.weight", "0.bias"]


@pytest.mark.parametrize("is_main_process", [True, False])
def test_what_the_page_sends_by_trl_is_what_it_announces(is_main_process: bool) -> None:
    sent: list[Any] = []
    announced: list[Any] = []

    class Client:
        """As TRL's main process has it; the others have none."""

        def update_named_params(self, metadata: Any, named_params: Any) -> None:
            announced.extend(metadata)
            sent.extend(named_params)

        def reset_prefix_cache(self) -> None:
            sent.append("reset")

    generation: Any = SimpleNamespace(vllm_client=Client()) if is_main_process else None
    trainer = SimpleNamespace(
        model=model(),
        vllm_generation=generation or SimpleNamespace(),
        accelerator=SimpleNamespace(is_main_process=is_main_process),
    )
    page = (Path(__file__).parents[3] / "docs" / "serve.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(def sync_weights.*?)```", page, re.DOTALL)
    exec(block, {"fm": fm, "trainer": trainer})
    trainer.vllm_generation.sync_weights()
    if not is_main_process:
        assert sent == []
        return
    assert sent.pop() == "reset"
    for (name, dtype, shape), (sent_name, tensor) in zip(announced, sent, strict=True):
        assert (name, getattr(torch, dtype), shape) == (sent_name, tensor.dtype, [*tensor.shape])
    assert announced[0] == ("0.weight", "float8_e4m3fn", [8, 32])


@pytest.mark.slow
@pytest.mark.extra("trl")
def test_generation_of_trl_refuses_to_sync_a_served_model() -> None:
    """It takes half a minute to import; a stub is below."""
    from trl.generation.vllm_generation import VLLMGeneration

    generation: Any = object.__new__(VLLMGeneration)
    generation.model = model()
    fm.served_weights(generation.model)
    with pytest.raises(ValueError, match=REFUSAL):
        generation.sync_weights()


#: methods of TRL that send the parameters of `self.model`, by their modules
SENDERS = {
    GENERATION: ("VLLMGeneration", "sync_weights"),
    "trl.experimental.async_grpo.async_grpo_trainer": ("AsyncGRPOTrainer", "_streaming_iter"),
    "trl.experimental.async_distillation.async_distillation_trainer": (
        "AsyncDistillationTrainer",
        "_streaming_iter",
    ),
    "trl.experimental.online_dpo.online_dpo_trainer": ("OnlineDPOTrainer", "_move_model_to_vllm"),
}


@pytest.mark.parametrize("module", SENDERS)
def test_a_stub_of_a_sender_refuses_a_served_model(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind_name, method = SENDERS[module]

    class Sender:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def send(self) -> str:
            return "sent"

    setattr(Sender, method, Sender.send)
    stub: Any = ModuleType(module)
    setattr(stub, kind_name, Sender)
    monkeypatch.setitem(sys.modules, module, stub)
    sender, other = Sender(model()), Sender(model())
    fm.served_weights(sender.model)
    with pytest.raises(ValueError, match=REFUSAL):
        getattr(sender, method)()
    assert getattr(other, method)() == "sent"


@pytest.mark.extra("trl")
@pytest.mark.parametrize("module", SENDERS)
def test_trl_has_the_senders_of_the_stubs(module: str) -> None:
    """Its source is read, as these modules take long to import."""
    kind_name, method = SENDERS[module]
    root = importlib.util.find_spec("trl")
    assert root is not None
    assert root.origin is not None
    parts = module.split(".")[1:]
    source = Path(root.origin).parent.joinpath(*parts).with_suffix(".py")
    (kind,) = [
        node
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == kind_name
    ]
    assert method in [x.name for x in kind.body if isinstance(x, ast.FunctionDef)]
    assert "self.model" in ast.unparse(kind)


def test_a_module_source_of_vllm_refuses_a_served_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class ModuleSource:
        def __init__(self, module: nn.Module) -> None:
            self.module = module

    stub: Any = ModuleType(VLLM)
    stub.ModuleSource = ModuleSource
    monkeypatch.setitem(sys.modules, VLLM, stub)
    net = model()
    assert ModuleSource(net).module is net
    fm.served_weights(net)
    with pytest.raises(ValueError, match=REFUSAL):
        ModuleSource(net)
    with pytest.raises(ValueError, match=REFUSAL):
        ModuleSource(module=net)
    other = model()
    assert ModuleSource(other).module is other
