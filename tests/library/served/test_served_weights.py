"""What a server is handed: the bytes of the folder that `fm.save` writes, as views, and
without a trace in the model.
"""

import copy
import hashlib
import json
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import pytest
import torch
from fp8_folders import float_model, make, tensors_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fp8manifold as fm

#: what other libraries announce is their own business
pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = torch.arange(24).view(2, 12)
PUBLISHED = [
    "squares",
    "squares, shards",
    "squares, experts",
    "rows",
    "tensor",
    "tensor, shared",
    "mxfp8",
    "gpt-oss",
    "modelopt, kv",
]
#: granularity, further options of `quantize_model`, and the kind of model
QUANTIZED: dict[str, tuple[str, dict[str, Any], str]] = {
    "rows": ("channel", {}, "llama"),
    "rows, tied": ("channel", {"tied": "leave"}, "llama tied"),
    "rows, embeddings in codes": ("channel", {"embeddings": "E4M3"}, "llama"),
    "rows, from a master copy": ("channel", {"storage": "master"}, "llama"),
    "blocks": ("block", {}, "llama"),
    "blocks, from a master copy": ("block", {"storage": "master"}, "llama"),
    "tensor": ("tensor", {}, "llama"),
    "squares": ("square", {}, "llama"),
    "rows, experts in codes": ("channel", {"parameters": {"*experts*": "E4M3"}}, "mixtral"),
    "rows, gpt-oss": ("channel", {}, "gpt-oss"),
}


def bytes_of(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.numpy())


def all_bytes(tensors: Any) -> dict[str, Any]:
    return {name: bytes_of(tensor) for name, tensor in dict(tensors).items()}


def quantized(case: str) -> Any:
    granularity, options, kind = QUANTIZED[case]
    options = {"tied": "untie", **options}
    return fm.quantize_model(
        float_model(kind), {"*": "E4M3", "lm_head": "none"}, granularity=granularity, **options
    )


def train(model: Any, steps: int = 1, lr: float = 1e-2) -> Any:
    optimizer = fm.optim.StiffnessAdamW(model.train().parameters(), lr=lr)
    for _ in range(steps):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


class Storages(TorchDispatchMode):
    """Counts the bytes of memory that operators make, and that lives at a time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.known = {address(x) for x in parts_of(model)}
        self.living: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.peak = 0
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if type(x) is Tensor and not x.is_meta and address(x) not in self.known:
                storage = x.untyped_storage()
                self.made += storage.data_ptr() not in self.living
                self.living[storage.data_ptr()] = storage
        self.peak = max(self.peak, sum(s.nbytes() for s in self.living.values()))
        return result


def parts_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield the plain tensors that a model is made of."""
    for x in (*model.parameters(), *model.buffers()):
        yield from [x.codes, x.kept_scale] if isinstance(x, fm.FP8Tensor) else [x]


def address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def assert_declared(weights: fm.ServedWeights) -> None:
    """Metadata and groups are those of the iteration, and a layer is one group."""
    tensors = list(weights)
    assert weights.metadata() == [(name, x.dtype, tuple(x.shape)) for name, x in tensors]
    groups = weights.groups()
    assert list(chain.from_iterable(groups)) == [name for name, _ in tensors]
    (layer,) = [group for group in groups if ".layers.0." in group[0]]
    assert all(".layers.0." in name for name in layer)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_server_gets_the_bytes_of_the_folder_and_of_a_save_after_steps(
    name: str, tmp_path: Path
) -> None:
    folder = make(name, tmp_path / "published")
    model = fm.load(folder)
    weights = fm.served_weights(model)
    assert all_bytes(weights) == all_bytes(tensors_of(folder))
    assert weights.config == json.loads((folder / "config.json").read_text()).get(
        "quantization_config"
    ) or (name == "modelopt, kv" and weights.config["quant_method"] == "modelopt")
    assert_declared(weights)
    before = weights.digest()
    train(model)
    weights.share_scales_()
    fm.save(model, tmp_path / "saved")
    after = all_bytes(weights)
    assert after == all_bytes(tensors_of(tmp_path / "saved"))
    digest = {name: hashlib.sha256(data).hexdigest() for name, (_, _, data) in after.items()}
    assert weights.digest() == digest != before


@pytest.mark.parametrize("case", QUANTIZED)
def test_a_quantised_model_is_served_as_it_is_exported(case: str, tmp_path: Path) -> None:
    model = quantized(case)
    weights = fm.served_weights(model)
    layout: Any = "fp8" if case == "squares" else "compressed-tensors"
    fm.save(model, tmp_path / "export", layout)
    assert all_bytes(weights) == all_bytes(tensors_of(tmp_path / "export"))
    assert_declared(weights)
    settings = json.loads((tmp_path / "export" / "config.json").read_text())
    assert weights.config == settings["quantization_config"]


class Pass(NamedTuple):
    """What a pass over weights took of memory, in bytes."""

    #: of the tensors that `metadata` made
    at_metadata: int
    #: for each tensor, the most memory at a time until it was there, over its own size
    ratios: dict[str, float]
    #: names of codes that are no views of the model's memory
    copied: list[str]


def passed(model: nn.Module) -> Pass:
    """Go over the weights of a model as a sender does, that keeps no tensor."""
    weights = fm.served_weights(model)
    with Storages(model) as at_metadata:
        weights.metadata()
    ratios, copied = {}, []
    largest = 0
    with Storages(model) as at_pass:
        for name, tensor in weights:
            # scales are made with their codes
            largest = tensor.nbytes if "scale" not in name else max(largest, tensor.nbytes)
            # a scale of one number needs a few numbers
            ratios[name] = at_pass.peak / max(largest, 1024)
            if tensor.dtype is torch.float8_e4m3fn and address(tensor) not in at_pass.known:
                copied.append(name)
            del tensor
            at_pass.peak = 0
    return Pass(at_metadata.made, ratios, copied)


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(name, id=f"published {name}") for name in PUBLISHED),
        *(name for name in QUANTIZED if "master" not in name),
    ],
)
def test_metadata_makes_no_tensor_and_a_pass_at_most_one(
    case: str, is_trained: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    is_published = request.node.callspec.id.startswith("published")
    model = fm.load(make(case, tmp_path / "published")) if is_published else quantized(case)
    if is_trained:
        train(model)
    taken = passed(model)
    assert taken.at_metadata == 0
    assert max(taken.ratios.values()) <= 1.1, max(taken.ratios.items(), key=itemgetter(1))
    # those of E2M1 are packed, two in a byte
    assert taken.copied == []


@pytest.mark.parametrize("case", [name for name in QUANTIZED if "master" in name])
def test_codes_of_a_master_copy_are_made_one_layer_at_a_time(case: str) -> None:
    model = quantized(case)
    taken = passed(model)
    assert taken.at_metadata == 0
    assert len(taken.copied) == 7
    # some float32 tensors of its size, for codes of one byte
    assert max(taken.ratios.values()) <= 4 * 4


@pytest.mark.parametrize(
    "case", ["rows", "blocks, from a master copy", "squares, experts", "mxfp8"]
)
def test_a_pass_leaves_no_trace(case: str, tmp_path: Path) -> None:
    model = quantized(case) if case in QUANTIZED else fm.load(make(case, tmp_path / "published"))
    train(model)
    state, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    weights = fm.served_weights(model)
    for _ in weights:
        pass
    weights.metadata(), weights.groups(), weights.digest(), list(weights.shards())
    assert all_bytes(model.state_dict()) == all_bytes(state)
    assert torch.equal(torch.get_rng_state(), generator)


def fused(tmp_path: Path, factors: tuple[float, float]) -> tuple[Any, fm.FP8Parameter]:
    """Return a model whose fused rows have several scales, and one scale in the files.

    Those of two rows of the first expert are multiplied; its codes are 1 and 1/16.
    """
    model = fm.load(make("tensor, shared", tmp_path / "published"), dtype=torch.float32)
    stack = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    scale = stack.scale.expand(*stack.shape[:2], 1).clone()
    scale[0, 0] *= factors[0]
    scale[0, 1] *= factors[1]
    codes = stack.codes.clone()
    codes[0] = 0x38
    codes[0, :, ::2] = 0x18
    rows = fm.FP8Parameter.from_codes(codes, scale, "E4M3", requires_grad=True)
    owner = model.get_submodule("model.layers.0.mlp.experts")
    owner.gate_up_proj = rows
    return model, rows


def test_rows_that_share_a_scale_in_the_files_do_so_in_a_copy(tmp_path: Path) -> None:
    model, rows = fused(tmp_path, (2.0, 1.0))
    before = all_bytes({"codes": rows.codes, "scale": rows.scale})
    served = dict(fm.served_weights(model))
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    values = served[name].float() * served[name + "_scale"]
    assert torch.equal(values, rows.dequantize()[0, : len(values)])
    assert served[name + "_scale"].item() == rows.scale[0].max().item()
    assert all_bytes({"codes": rows.codes, "scale": rows.scale}) == before


def test_rows_at_one_scale_are_made_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8manifold._base.blocks.PIECE", 2048)
    model, rows = fused(tmp_path, (2.0, 1.0))
    taken = passed(model)
    w1, w3 = (f"model.layers.0.block_sparse_moe.experts.0.{name}.weight" for name in ("w1", "w3"))
    assert w1 in taken.copied
    assert w3 not in taken.copied
    assert taken.ratios[w1] <= 2
    served = dict(fm.served_weights(model))
    values = served[w1].float() * served[w1 + "_scale"]
    assert torch.equal(values, rows.dequantize()[0, : len(values)])


def test_rows_that_no_scale_holds_are_refused_until_they_share_one(tmp_path: Path) -> None:
    model, rows = fused(tmp_path, (2.0**10, 1.0))
    weights = fm.served_weights(model)
    with pytest.raises(ValueError, match=r"experts\.0\.w1\.weight' has one scale.*share_scales_"):
        list(weights)
    weights.share_scales_()
    served = dict(weights)
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    values = served[name].float() * served[name + "_scale"]
    assert torch.equal(values, rows.dequantize()[0, : len(values)])


def test_wrappers_have_no_names(tmp_path: Path) -> None:
    model = quantized("rows")
    expected = all_bytes(fm.served_weights(model))
    wrapped = nn.DataParallel(model)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    assert all_bytes(fm.served_weights(wrapped)) == expected


def test_two_kinds_of_layers_in_one_model_need_one_layout() -> None:
    layers = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    fm.quantize_model(layers, {"0": fm.LayerSpec("E4M3", granularity="square"), "1": "E4M3"})
    with pytest.raises(ValueError, match=r"layer '1' has a scale for .*, but layout='fp8' takes"):
        fm.served_weights(layers)


@pytest.mark.parametrize(
    ("model", "layout", "error"),
    [
        pytest.param("a name", None, "model must be an nn.Module, not str", id="no module"),
        pytest.param(nn.Linear(2, 2), None, "no quantised weight", id="floats"),
        pytest.param(nn.Linear(2, 2), "torchao", "layout='torchao' is unknown", id="layout"),
    ],
)
def test_what_can_not_be_served_is_refused(model: Any, layout: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        fm.served_weights(model, layout)


def test_a_model_that_lost_its_codes_is_refused(tmp_path: Path) -> None:
    model = fm.load(make("rows", tmp_path / "published"))
    weights = fm.served_weights(model)
    layer = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = nn.Linear(layer.in_features, layer.out_features, bias=False)
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight' is no longer"):
        list(weights)
