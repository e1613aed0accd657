"""Floats read into codes a tensor at a time, and files of which only floats are taken."""

import gc
import json
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import torch as safetensors
from surgery_models import model_bits
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import quantize_model
from fp8manifold.files import load_into


class Small(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, tied: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 32, dtype=dtype)
        self.one = nn.Linear(32, 64, dtype=dtype)
        self.two = nn.Linear(64, 32, bias=False, dtype=dtype)
        self.norm = nn.LayerNorm(32, dtype=dtype)
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.head = nn.Linear(32, 12, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.two(self.one(self.tokens(tokens)))))


def valued_model(dtype: torch.dtype = torch.float32, tied: bool = True) -> Small:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Small(dtype, tied)
    model.count.copy_(torch.tensor([1, 2, 3]))
    model.norm.weight.requires_grad_(False)
    return model


def bare(dtype: torch.dtype = torch.float32, tied: bool = True) -> Small:
    """Return the model of `valued_model` on meta, without values."""
    with torch.device("meta"):
        model = Small(dtype, tied)
    model.norm.weight.requires_grad_(False)
    return model


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", ["leave", "untie", "was not"])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block", "square"])
@pytest.mark.parametrize("kind", ["state", "folder", "file"])
def test_the_bits_of_quantising_the_float_model(
    dtype: Any, tied: Any, granularity: Any, kind: str, tmp_path: Path
) -> None:
    options = {"granularity": granularity, "seed": 3, "keep_remainder": True, "headroom": 4.0}
    if tied != "was not":
        options["tied"] = tied
    formats = {"*": "E4M3", "two": {"weight": "E5M2", "activation": "E4M3"}}
    model = valued_model(dtype, tied != "was not")
    state = state_of(model)
    file_state = {
        name: x for name, x in state.items() if name != "head.weight" or tied == "was not"
    }
    safetensors.save_file(file_state, tmp_path / "model.safetensors")
    wanted = quantize_model(model, formats, "codes", **options)
    sources = {"state": state, "folder": tmp_path, "file": tmp_path / "model.safetensors"}
    loaded = load_into(bare(dtype, tied != "was not"), sources[kind], formats, **options)
    assert model_bits(loaded) == model_bits(wanted)
    assert (loaded.head.weight is loaded.tokens.weight) == (tied == "leave")
    assert not any(p.is_meta for p in loaded.parameters())
    state["norm.bias"].fill_(7.0)
    assert model_bits(loaded) == model_bits(wanted)  # nothing is shared with what was given


@pytest.mark.parametrize("kind", ["folder", "files", "index"])
def test_shards_of_another_dtype(kind: str, tmp_path: Path) -> None:
    state = {
        name: x.bfloat16() if x.is_floating_point() else x
        for name, x in state_of(valued_model(tied=False)).items()
    }
    names = sorted(state)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    weight_map = {}
    for file, members in parts.items():
        safetensors.save_file({name: state[name] for name in members}, tmp_path / file)
        weight_map |= dict.fromkeys(members, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = valued_model(tied=False)
    model.load_state_dict(state)
    wanted = model_bits(quantize_model(model, "E4M3", "codes"))
    sources = {
        "folder": tmp_path,
        "files": [tmp_path / file for file in parts],
        "index": tmp_path / "model.safetensors.index.json",
    }
    assert model_bits(load_into(bare(tied=False), sources[kind])) == wanted


class Watched(Mapping[str, Tensor]):
    """Makes each tensor when it is asked for, and counts how many floats of those are
    alive then.
    """

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state, self.alive, self.most = state, [], 0

    def __getitem__(self, name: str) -> Tensor:
        gc.collect()
        self.alive = [ref for ref in self.alive if ref() is not None]
        value = self.state[name].clone()
        self.alive.append(weakref.ref(value))
        self.most = max(self.most, len(self.alive))
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def test_no_more_than_one_float_tensor_is_alive() -> None:
    layers = [nn.Linear(16, 16) for _ in range(6)]
    state = state_of(nn.Sequential(*layers))
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    watched = Watched(state)
    loaded = load_into(model, watched)
    assert watched.most == 1
    assert model_bits(loaded) == model_bits(quantize_model(nn.Sequential(*layers), "E4M3", "codes"))


#: what replaces tensors of a state, where None removes one, and the refusal
UNFIT: list[tuple[dict[str, Tensor | None], str]] = [
    ({"two.weight": None}, "the model has 'two.weight', which the source lacks"),
    (
        {"two.weight": None, "tow.weight": torch.zeros(1)},
        "the model has 'two.weight', which the source lacks (it has 'tow.weight', which the model "
        "lacks)",
    ),
    ({"extra": torch.zeros(1)}, "the source has 'extra', which the model lacks"),
    (
        {"one.weight": torch.zeros(64, 31)},
        "'one.weight' has shape (64, 31) in the source, but (64, 32) in the model",
    ),
    (
        {"count": torch.zeros(3)},
        "'count' holds floats in the source, but other numbers in the model",
    ),
    (
        {"two.weight": torch.full((32, 64), float("nan"))},
        "the weight of 'two': weights of shape (32, 64) hold NaN or Inf: they can't be stored in "
        "E4M3",
    ),
    (
        {"head.weight": torch.zeros(12, 32)},
        "'tokens.weight' and 'head.weight' differ in the source, but are one tensor in the model",
    ),
]


def from_memory(state: dict[str, Tensor], folder: Path) -> Any:
    return state


def one_by_one(state: dict[str, Tensor], folder: Path) -> Any:
    return Watched(state)


def from_folder(state: dict[str, Tensor], folder: Path) -> Any:
    safetensors.save_file(state, folder / "part.safetensors")
    return folder


SOURCES = pytest.mark.parametrize("source_of", [from_memory, one_by_one, from_folder])


@SOURCES
@pytest.mark.parametrize(("changes", "line"), UNFIT)
def test_what_does_not_fit_is_one_line_and_nothing_is_loaded(
    changes: Any, line: str, source_of: Any, tmp_path: Path
) -> None:
    changed = state_of(valued_model()) | {"head.weight": None} | changes
    state = {name: x for name, x in changed.items() if x is not None}
    model = bare()
    old_parameters = [(name, id(p)) for name, p in model.named_parameters()]
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        load_into(model, source_of(state, tmp_path), tied="leave")
    assert [(name, id(p)) for name, p in model.named_parameters()] == old_parameters
    assert type(model.one) is nn.Linear


def test_what_else_is_refused(tmp_path: Path) -> None:
    model = bare()
    model.register_buffer("angles", torch.zeros(2, device="meta"), persistent=False)
    model.angles = torch.zeros(2)
    assert load_into(model, state_of(valued_model()), tied="leave").angles.tolist() == [0, 0]
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        load_into(bare(), tmp_path, tied="leave")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_into(bare(), tmp_path / "none.safetensors", tied="leave")
    for name in ("a", "b"):
        safetensors.save_file({"w": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match="give one of them"):
        load_into(bare(), [tmp_path / "a.safetensors", tmp_path / "b.safetensors"], tied="leave")


def test_a_layer_alone_and_a_model_of_several_pieces() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        linear = nn.Linear(1100, 2000)  # rounded some rows at a time
    with torch.device("meta"):
        model = nn.Linear(1100, 2000)
    loaded = load_into(model, state_of(linear), "E4M3", keep_remainder=True)
    assert model_bits(loaded) == model_bits(
        quantize_model(linear, "E4M3", "codes", keep_remainder=True)
    )
    assert isinstance(loaded, fm.QuantizedLinear)


WANTED = "here a weight must be float64, float32, float16 or bfloat16; decode it and multiply by its scales first"
NAME = "one.weight"


def codes(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x / x.abs().max() * 100).round().to(dtype)


def filled(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.full(shape, value).to(dtype)


#: scales as the layouts have them: of squares, of rows, of the tensor, of blocks as
#: E8M0, of bitsandbytes' rows
SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda x: filled(0.0003, torch.float32, -(-x.shape[0] // 128), -(-x.shape[1] // 128)),
    "row": lambda x: filled(0.0003, torch.bfloat16, x.shape[0], 1),
    "tensor": lambda x: torch.tensor(0.0003),
    "block": lambda x: filled(115, torch.uint8, x.shape[0], x.shape[1] // 32),
    "flat": lambda x: filled(0.0003, torch.float32, x.shape[0]),
}
F8, F8_5, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
#: by name: what a weight is, how a file calls that, and its scales' name and kind
LAYOUTS: dict[str, tuple[torch.dtype, str, str, str]] = {
    "DeepSeek, Qwen": (F8, "F8_E4M3", "weight_scale_inv", "square"),
    "compressed-tensors, rows": (F8, "F8_E4M3", "weight_scale", "row"),
    "compressed-tensors, ModelOpt, tensor": (F8, "F8_E4M3", "weight_scale", "tensor"),
    "MXFP8": (F8, "F8_E4M3", "weight_scale", "block"),
    "E5M2": (F8_5, "F8_E5M2", "weight_scale", "row"),
    "compressed-tensors, int8": (torch.int8, "I8", "weight_scale", "row"),
    "bitsandbytes": (torch.int8, "I8", "SCB", "flat"),
    "raw E4M3": (F8, "F8_E4M3", "", ""),
    "raw E5M2": (F8_5, "F8_E5M2", "", ""),
    "raw E8M0": (E8M0, "F8_E8M0", "", ""),
    "raw int8": (torch.int8, "I8", "", ""),
    "raw uint8": (torch.uint8, "U8", "", ""),
    "raw int32": (torch.int32, "I32", "", ""),
}


def in_codes(state: Mapping[str, Tensor], layout: str, end: str) -> dict[str, Tensor]:
    """Return a state with codes and scales in place of the floats whose names end so."""
    dtype, _, scale_name, kind = LAYOUTS[layout]
    chosen = {name: value for name, value in state.items() if name.endswith(end)}
    scales = {
        name.removesuffix("weight") + scale_name: SCALES[kind](x)
        for name, x in chosen.items()
        if scale_name
    }
    return {**state, **{name: codes(x, dtype) for name, x in chosen.items()}, **scales}


def refusal_line(layout: str, name: str, file: str = "") -> str:
    """Return the message about a weight in codes, of a file or in memory."""
    dtype, dtype_in_file, scale_name, _ = LAYOUTS[layout]
    of_file = f" of {file!r}" if file else ""
    kind = dtype_in_file if file else str(dtype)
    reason = f"and {name}_scale is missing"
    if scale_name:
        scales = name.removesuffix("weight") + scale_name
        reason = f"with the scales {scales!r}, which fm.load can read"
    return f"{name}{of_file} holds codes ({kind}), {reason}: {WANTED}"


@pytest.mark.parametrize(
    ("source_of", "file"),
    [(from_memory, ""), (from_folder, "part.safetensors")],
    ids=["memory", "folder"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_into(layout: str, source_of: Any, file: str, tmp_path: Path) -> None:
    """It refuses codes where it would quantise floats, and the model stays without values."""
    state = in_codes(state_of(valued_model(tied=False)), layout, NAME)
    model = bare(tied=False)
    with pytest.raises(ValueError, match=f"^{re.escape(refusal_line(layout, NAME, file))}$"):
        load_into(model, source_of(state, tmp_path), "E4M3")
    assert model.one.weight.is_meta


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("raw")])
def test_load_into_of_tensors_that_are_made_when_asked_for(layout: str) -> None:
    """It refuses codes without scales, too."""
    state = in_codes(state_of(valued_model(tied=False)), layout, NAME)
    model = bare(tied=False)
    with pytest.raises(ValueError, match=f"^{re.escape(refusal_line(layout, NAME))}$"):
        load_into(model, Watched(state), "E4M3")
    assert model.one.weight.is_meta


@pytest.mark.parametrize("storage", ["codes", "grid", "master", "embedded"])
@pytest.mark.parametrize(
    "layout", [name for name in LAYOUTS if "weight_scale" not in LAYOUTS[name][2] or "int8" in name]
)
def test_load_state_dict(layout: str, storage: Any) -> None:
    """It refuses codes that it can't read, and the weights stay.

    Float8 with scales beside it that are called ``weight_scale`` or ``weight_scale_inv`` is
    read, and left out here.
    """
    net, embedded = valued_model(tied=False), storage == "embedded"
    net.one = nn.Embedding(64, 32) if embedded else net.one
    state = in_codes(state_of(net), layout, NAME)
    model: Any = quantize_model(
        net, "E4M3", "codes" if embedded else storage, embeddings="E4M3" if embedded else None
    )
    old_weight = torch.as_tensor(model.one.weight.detach()).clone()
    with pytest.raises(RuntimeError, match=re.escape(refusal_line(layout, NAME))):
        model.load_state_dict(state, strict=False)
    assert torch.equal(torch.as_tensor(model.one.weight.detach()), old_weight)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, F8, E8M0])
@pytest.mark.parametrize("storage", ["codes", "grid", "master"])
def test_layers_of_codes_are_not_quantised(dtype: torch.dtype, storage: Any) -> None:
    layer = nn.Linear(32, 4)
    layer.weight = nn.Parameter(codes(torch.ones(4, 32), dtype), requires_grad=False)
    with pytest.raises(
        TypeError, match=f"a weight has dtype {re.escape(str(dtype))}: float64, float32"
    ):
        quantize_model(nn.Sequential(layer), "E4M3", storage)
