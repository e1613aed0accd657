"""States of plain tensors: through safetensors and back to the bit, files of other libraries, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_cases import normal
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tensor_cases import every_format, every_granularity, parameter, same_store
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import exported_state_dict, flatten_state_dict, quantize_model, unflatten_state_dict, use_plain_state

# ---------------------------------------------------------------------------------------------- States of plain tensors
GRANULARITIES = pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])


def made(fmt: str = "E4M3", seed: int = 0, storage: Any = "fp8", width: int = 64, **options: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(width, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))
    formats = {"0": fm.LayerSpec(fmt, granularity=options.pop("granularity", "channel")), "2": fmt}
    return use_plain_state(quantize_model(net, formats, storage, seed=seed, **options))


def through_file(model: nn.Module, path: Path) -> dict[str, Tensor]:
    save_file(model.state_dict(), path)
    return load_file(path)


@every_format
@GRANULARITIES
@pytest.mark.parametrize("assign", [False, True])
def test_a_model_survives_a_file(name: str, granularity: Any, assign: bool, tmp_path: Path) -> None:
    model, other = (made(name, granularity=granularity, seed=seed) for seed in (0, 1))
    with torch.no_grad():
        model[0].weight.mul_(0.7)
    before = copy.deepcopy(model)
    assert other.load_state_dict(through_file(model, tmp_path / "m"), assign=assign).missing_keys == []
    for ours, theirs in ((model, other), (before, other)):
        assert same_store(ours[0].weight, theirs[0].weight)
        assert same_store(ours[2].weight, theirs[2].weight)
    own, others = model[0].weight, other[0].weight
    assert (own.seed, int(own.counter), own.by_operator) == (others.seed, int(others.counter), others.by_operator)
    for weight in (own, others):  # the same draws follow
        with torch.no_grad():
            weight.add_(normal(4, 64) * 1e-3)
    assert same_store(own, others)


def test_every_trait_survives(tmp_path: Path) -> None:
    model = made("P3109_8P3F", rounding="nearest").bfloat16()
    model[0].weight.by_operator = False
    model[2].weight = fm.FP8Parameter(normal(4, 4), "P3109_8P3F", seed=2**63 - 1)
    other = made("P3109_8P3F", seed=1).bfloat16()
    other.load_state_dict(through_file(model, tmp_path / "m"), assign=True)
    for index in (0, 2):
        assert other[index].weight._traits() == model[index].weight._traits()
        assert other[index].weight.requires_grad


def test_the_names_and_what_is_left_as_it_is() -> None:
    model = made()
    names = ["weight", "bias", "weight_scale", "weight_counter", "weight_traits"]
    assert set(model.state_dict()) == {
        *(f"0.{name}" for name in names),
        *(f"2.{name}" for name in names if name != "bias"),
    }
    assert all(type(x) is Tensor for x in model.state_dict().values())
    assert model.state_dict(keep_vars=True)["0.weight"] is model[0].weight
    assert model.state_dict()["0.weight_scale"].data_ptr() == model[0].weight.scale.data_ptr()
    for storage in ("grid", "master"):
        plain = made(storage=storage)
        assert (
            plain.state_dict().keys() == quantize_model(fm.dequantize_model(plain), "E4M3", storage).state_dict().keys()
        )  # type: ignore[arg-type]


@pytest.mark.parametrize("storage", ["grid", "master", "fp8"])
def test_every_storage_takes_them(storage: Any) -> None:
    model, other = made(), made(storage=storage, seed=1)
    state = model.state_dict()
    if storage == "master":
        state |= {key: x for key, x in other.state_dict().items() if "scaler" in key}
    other.load_state_dict(state)
    for index in (0, 2):
        value = other[index].weight.detach()
        value = value.dequantize() if storage == "fp8" else value.as_subclass(Tensor)
        assert torch.equal(value, model[index].weight.dequantize())


@GRANULARITIES
def test_codes_and_scales_alone_are_taken(granularity: Any) -> None:
    model, other = made(granularity=granularity), made(granularity=granularity, seed=1)
    tensors, _ = exported_state_dict(model)
    assert tensors["0.weight_scale"].dtype == (torch.uint8 if granularity == "block" else torch.float32)
    other.load_state_dict(tensors)
    assert same_store(other[0].weight, model[0].weight)
    assert (other[0].weight.seed, int(other[0].weight.counter)) == (1 << 32, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"0.weight_scale": None}, "0.weight holds codes .*, and 0.weight_scale is missing"),
        ({"0.weight_scale": torch.full((4, 1), 0.3)}, "0.weight can't be put together from its parts: scale holds 0.3"),
        ({"0.weight_scale": torch.ones(3, 1)}, r"scale has shape \(3, 1\)"),
        ({"0.weight_traits": torch.zeros(10, dtype=torch.int64)}, "0.weight_traits can't be read: .*exponent_bits=0"),
        ({"0.weight_traits": torch.zeros(9, dtype=torch.int64)}, "0.weight_traits can't be read: .*expected 10"),
        ({"0.weight_traits": torch.tensor([4, 3, 7, 9, 0, 0, 0, 0, 1, 0])}, "9 is out of range: 0 to 5"),
        ({"0.weight_traits": torch.tensor([4, 3, 7, 1, 0, -1, 0, 0, 1, 0])}, "seed=-1"),
        ({"0.weight_counter": torch.zeros(2, dtype=torch.int64)}, "counter has shape"),
        ({"0.weight": torch.zeros(4, 64, dtype=torch.uint8), "0.weight_traits": None}, "which say of which format"),
        (
            {"0.weight": torch.zeros(4, 64).to(torch.float8_e5m2), "0.weight_traits": None},
            "is of E5M2, but this layer's",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    model = made()
    kept = copy.deepcopy(model[0].weight)
    state = {name: x for name, x in (model.state_dict() | changes).items() if x is not None}
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(state)
    assert same_store(model[0].weight, kept)


def test_another_format_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"0.weight is of E3M4, but this layer's is of E4M3"):
        made().load_state_dict(made("E3M4").state_dict())
    with pytest.raises(TypeError, match=r"must be an nn\.Module, not dict"):
        use_plain_state({})  # type: ignore[arg-type]


# ----------------------------------------------------------------------------- State dicts as plain tensors and strings
def through_safetensors(state: dict[str, Any], path: Path) -> dict[str, Tensor]:
    tensors, metadata = flatten_state_dict(state)
    save_file(tensors, path, metadata)
    with safe_open(path, "pt") as file:
        return unflatten_state_dict(load_file(path), file.metadata(), like=state)


@every_granularity
@every_format
def test_weights_survive_a_file(name: str, granularity: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"granularity": granularity, "rounding": "nearest", "dtype": torch.bfloat16}
    p = parameter(name, seed=2**40 + 1, keep_remainder=True, **options)
    p.rescale_(p.scale * 2)
    q = through_safetensors({"w": p}, tmp_path / "w.safetensors")["w"]
    assert isinstance(q, fm.FP8Parameter)
    assert same_store(p, q)
    assert (q.rounding, q.seed, q.dtype, int(q.counter)) == ("nearest", 2**40 + 1, torch.bfloat16, 1)
    assert (q.remainder, q.requires_grad) == (None, False)


def test_what_a_file_holds(tmp_path: Path) -> None:
    """Names, dtypes and a description anyone can read without this library: value = scale * decode(codes)."""
    w = parameter("E5M2", (3, 4))
    tensors, metadata = flatten_state_dict({"a.w": w, "b": normal(2)[::2]})
    assert {name: str(t.dtype) for name, t in tensors.items()} == {
        "a.w": "torch.float8_e5m2",
        "a.w_scale": "torch.float32",
        "a.w_counter": "torch.int64",
        "b": "torch.float32",
    }
    assert json.loads(metadata["fp8:a.w"])["format"] == "E5M2"
    assert all(isinstance(text, str) for text in metadata.values())
    assert all(t.is_contiguous() and type(t) is Tensor for t in tensors.values())
    assert torch.equal(tensors["a.w"].float() * tensors["a.w_scale"], w.dequantize())
    others = ("E3M4", "E4M3FNUZ", "E2M1", "E4M3_B8")  # of which safetensors, or torch, has no dtype
    assert {flatten_state_dict({"w": parameter(name)})[0]["w"].dtype for name in others} == {torch.uint8}


def test_without_stored_weights_nothing_changes() -> None:
    state = {"b": normal(3)}
    tensors, metadata = flatten_state_dict(state)
    assert metadata == {}
    assert torch.equal(unflatten_state_dict(tensors, None)["b"], state["b"])
    assert unflatten_state_dict(tensors, {"fp8": "no prefix", "format": "pt"}).keys() == state.keys()


# --------------------------------------------------------------------------------------------------------- refusals
def flat() -> tuple[dict[str, Tensor], dict[str, str]]:
    return flatten_state_dict({"w": parameter()})


def described(**changes: Any) -> dict[str, str]:
    description = json.loads(flat()[1]["fp8:w"]) | changes
    return {"fp8:w": json.dumps({key: value for key, value in description.items() if value != "gone"})}


def test_a_file_of_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'w' is of E4M3, but E5M2 is expected"):
        unflatten_state_dict(*flat(), like={"w": parameter("E5M2")})
    with pytest.raises(ValueError, match="'w' is of E4M3, but E4M3FNUZ is expected"):
        unflatten_state_dict(*flat(), like={"w": parameter("E4M3FNUZ")})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (described(format="E9M9"), "'w' can't be put together.*E9M9"),
        (described(format=8), "must be a str, not int"),
        (described(format="E2M1"), r"code \d+ is out of range for E2M1"),
        (described(block_size=32), r"needs \(4, 2\)"),
        (described(block_size="32"), r"block_size='32' must be 32, \(128, 128\) or None"),
        (described(rounding="up"), "rounding='up'"),
        (described(seed=-1), "seed=-1"),
        (described(seed="1"), "seed='1'"),
        (described(dtype="float16"), "dtype='float16' is unknown: one of float32, bfloat16"),
        (described(dtype="gone"), "expected the keys format, block_size"),
        (described(more=1), "expected the keys format, block_size"),
        (described(by_operator="gone"), "expected the keys format, block_size"),
        (described(draws="gone"), "expected the keys format, block_size"),
        ({"fp8:w": "{"}, "'w' can't be put together from '{'"),
        ({"fp8:w": "[]"}, "expected the keys"),
        ({"fp8:v": described()["fp8:w"]}, "lack 'v'"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(metadata: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unflatten_state_dict(flat()[0], metadata)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w": torch.zeros(4, 64)}, "codes must be a uint8 tensor, not torch.float32"),
        ({"w_scale": torch.full((4, 1), 0.3)}, r"scale holds 0\.3"),
        ({"w_scale": torch.ones(3, 1)}, r"\(3, 1\).*needs \(4, 1\)"),
        ({"w": torch.zeros(5, 64, dtype=torch.uint8)}, r"needs \(5, 1\)"),
        ({"w_counter": torch.zeros(2, dtype=torch.int64)}, "counter"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes: dict[str, Tensor], message: str) -> None:
    tensors, metadata = flat()
    with pytest.raises(ValueError, match=message):
        unflatten_state_dict(tensors | changes, metadata)


def test_what_can_not_be_exported_is_refused() -> None:
    with pytest.raises(TypeError, match=r"state\['step'\] is of int"):
        flatten_state_dict({"step": 3})
    for part in ("w_scale", "w_counter", "w_remainder"):
        for state in ({"w": parameter(), part: torch.ones(1)}, {part: torch.ones(1), "w": parameter()}):
            with pytest.raises(ValueError, match="called like a part of it"):
                flatten_state_dict(state)


def test_safetensors_writes_a_whole_model(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, other = made(), made(seed=1)
    safetensors.save_model(model, str(tmp_path / "m"))
    assert safetensors.load_model(other, str(tmp_path / "m")) == (set(), [])
    assert same_store(other[0].weight, model[0].weight)


@pytest.mark.filterwarnings("ignore")  # what other libraries announce is their own business
def test_accelerate_writes_and_reads_a_model(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, other, placed = made(), made(seed=1), made(seed=2)
    kept = copy.deepcopy(placed[0].weight)
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    accelerate.load_checkpoint_in_model(other, tmp_path)
    assert same_store(other[0].weight, model[0].weight)
    with pytest.raises(ValueError, match="does not have a parameter or a buffer named weight_counter"):
        accelerate.load_checkpoint_in_model(placed, tmp_path, device_map={"": "cpu"})
    assert placed[0].weight.seed == kept.seed
