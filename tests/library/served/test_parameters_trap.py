"""Senders of values under the names of codes refuse a model whose codes are served."""

import sys
from types import ModuleType
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


@pytest.mark.extra("trl")
def test_a_client_of_trl_sends_served_weights_as_the_page_says(
    trl: tuple[Any, SentByTrl],
) -> None:
    """By the lines of docs/serve.md."""
    client, sent = trl
    weights = fm.served_weights(model())
    metadata = [
        (name, str(dtype).removeprefix("torch."), list(shape))
        for name, dtype, shape in weights.metadata()
    ]
    client.update_named_params(metadata, iter(weights))
    assert metadata[0] == ("0.weight", "float8_e4m3fn", [8, 32])
    assert sent.metadata == [
        (name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape])
        for name, tensor in sent.tensors
    ]


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


def test_a_stub_of_generation_refuses_to_sync_a_served_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class VLLMGeneration:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def sync_weights(self) -> str:
            return "sent"

    stub: Any = ModuleType(GENERATION)
    stub.VLLMGeneration = VLLMGeneration
    monkeypatch.setitem(sys.modules, GENERATION, stub)
    generation, other = VLLMGeneration(model()), VLLMGeneration(model())
    fm.served_weights(generation.model)
    with pytest.raises(ValueError, match=REFUSAL):
        generation.sync_weights()
    assert other.sync_weights() == "sent"


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
