"""States of one-byte weights: through safetensors and back to the bit, files of other
libraries, what is refused.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_cases import frozen, normal
from safetensors.torch import load_file, save_file
from tensor_cases import FORMATS, GRANULARITIES, same_store
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import quantize_model
from fp8manifold.files import layout_state_dict


def quantized_net(
    fmt: str = "E4M3", seed: int = 0, storage: Any = "codes", width: int = 64, **options: Any
) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(width, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))
    formats = {"0": fm.LayerSpec(fmt, granularity=options.pop("granularity", "channel")), "2": fmt}
    return quantize_model(net, formats, storage, seed=seed, **options)


def through_file(model: nn.Module, path: Path) -> dict[str, Tensor]:
    save_file(model.state_dict(), path)
    return load_file(path)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("assign", [False, True])
def test_a_model_survives_a_file(name: str, granularity: Any, assign: bool, tmp_path: Path) -> None:
    model = quantized_net(name, granularity=granularity, seed=0)
    loaded = quantized_net(name, granularity=granularity, seed=1)
    with torch.no_grad():
        model[0].weight.mul_(0.7)
    original = copy.deepcopy(model)
    state = through_file(model, tmp_path / "m")
    assert loaded.load_state_dict(state, assign=assign).missing_keys == []
    for index in (0, 2):
        assert same_store(model[index].weight, original[index].weight), index
        assert same_store(loaded[index].weight, original[index].weight), index
    weight = model[0].weight
    loaded_weight = loaded[0].weight
    assert loaded_weight.seed == weight.seed
    assert int(loaded_weight.counter) == int(weight.counter)
    assert loaded_weight.by_operator == weight.by_operator
    # The same draws follow.
    with torch.no_grad():
        weight.add_(normal(4, 64) * 1e-3)
        loaded_weight.add_(normal(4, 64) * 1e-3)
    assert same_store(weight, loaded_weight)


def test_every_trait_survives(tmp_path: Path) -> None:
    model = quantized_net("P3109_8P3F", rounding="nearest").bfloat16()
    model[0].weight.by_operator = False
    model[0].weight.retraction = "euclidean"
    traits = {"seed": 2**63 - 1, "draws": "dither", "retraction": "euclidean"}
    model[2].weight = fm.FP8Parameter(normal(4, 4), "P3109_8P3F", **traits)
    loaded = quantized_net("P3109_8P3F", seed=1).bfloat16()
    loaded.load_state_dict(through_file(model, tmp_path / "m"), assign=True)
    for index in (0, 2):
        assert loaded[index].weight._traits() == model[index].weight._traits(), index
        assert loaded[index].weight.requires_grad, index


@pytest.mark.parametrize("own", [{}, {"rounding": "nearest"}, {"draws": "dither"}], ids=str)
@pytest.mark.parametrize("saved", [{}, {"rounding": "nearest"}, {"draws": "dither"}], ids=str)
def test_options_of_rounding_are_those_of_the_state(own: Any, saved: Any) -> None:
    model, loaded = quantized_net(**saved), quantized_net(seed=1, **own)
    loaded.load_state_dict(model.state_dict())
    for index in (0, 2):
        assert loaded[index].weight._traits() == model[index].weight._traits(), index


@pytest.mark.parametrize("name", ["0.weight", "2.weight"])
def test_a_state_without_a_count_is_refused(name: str) -> None:
    state = quantized_net().state_dict()
    del state[f"{name}_counter"]
    with pytest.raises(RuntimeError, match=f"{name} has {name}_traits but no {name}_counter"):
        quantized_net().load_state_dict(state)


def test_the_names_and_what_is_left_as_it_is() -> None:
    model = quantized_net()
    state = model.state_dict()
    parts = ["weight", "weight_scale", "weight_counter", "weight_traits"]
    names = [*(f"0.{part}" for part in parts), *(f"2.{part}" for part in parts)]
    assert set(state) == {"0.bias", *names}
    assert all(type(x) is Tensor for x in state.values())
    assert state["0.weight"].dtype == torch.uint8
    assert state["0.weight_scale"].data_ptr() == model[0].weight.scale.data_ptr()
    assert model.state_dict(keep_vars=True)["0.weight"] is model[0].weight


@pytest.mark.parametrize("storage", ["grid", "master"])
def test_names_are_those_after_a_way_to_floats_and_back(storage: Any) -> None:
    model = quantized_net(storage=storage)
    names = model.state_dict().keys()
    again = quantize_model(fm.dequantize_model(model), "E4M3", storage)
    assert names == again.state_dict().keys()


@pytest.mark.parametrize("storage", ["grid", "master", "codes"])
def test_every_storage_takes_them(storage: Any) -> None:
    model, loaded = quantized_net(), quantized_net(storage=storage, seed=1)
    state = model.state_dict()
    if storage == "master":
        state |= {key: x for key, x in loaded.state_dict().items() if "scaler" in key}
    loaded.load_state_dict(state)
    for index in (0, 2):
        value = loaded[index].weight.detach()
        value = value.dequantize() if storage == "codes" else value.as_subclass(Tensor)
        assert torch.equal(value, model[index].weight.dequantize()), index


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_codes_and_scales_alone_are_taken(granularity: Any) -> None:
    model, loaded = (
        quantized_net(granularity=granularity),
        quantized_net(granularity=granularity, seed=1),
    )
    tensors, _ = layout_state_dict(model)
    assert tensors["0.weight_scale"].dtype == (
        torch.uint8 if granularity == "block" else torch.float32
    )
    loaded.load_state_dict(tensors)
    assert same_store(loaded[0].weight, model[0].weight)
    assert (loaded[0].weight.seed, int(loaded[0].weight.counter)) == (1 << 32, 0)


@pytest.mark.filterwarnings("ignore")  # what other libraries announce is their own business
def test_accelerate_writes_and_reads_a_model(tmp_path: Path) -> None:
    import accelerate

    model, loaded, placed = quantized_net(), quantized_net(seed=1), quantized_net(seed=2)
    old_weight = copy.deepcopy(placed[0].weight)
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    accelerate.load_checkpoint_in_model(loaded, tmp_path)
    assert same_store(loaded[0].weight, model[0].weight)
    with pytest.raises(
        ValueError, match="does not have a parameter or a buffer named weight_counter"
    ):
        accelerate.load_checkpoint_in_model(placed, tmp_path, device_map={"": "cpu"})
    assert placed[0].weight.seed == old_weight.seed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", ["8bit", "residual8", "momentum"])
def test_accelerate_goes_on_to_the_same_bits(optimizer: str, tmp_path: Path) -> None:
    import accelerate

    options: Any = {"moments": "8bit"} if optimizer == "8bit" else {"writeback": optimizer}
    ended = []
    for load in (False, True):
        accelerator = accelerate.Accelerator(cpu=True)
        model = quantized_net()
        model, steps = accelerator.prepare(
            model, fm.optim.StiffnessAdamW(model.parameters(), lr=0.1, **options)
        )
        if load:
            accelerator.load_state(tmp_path)
        for step in range(2, 4) if load else range(4):
            if step == 2 and not load:
                accelerator.save_state(tmp_path)
            steps.zero_grad()
            accelerator.backward(model(normal(8, 64) * (step + 1)).square().sum())
            steps.step()
        ended.append(frozen((model.state_dict(), steps.state_dict()["state"])))
        accelerator.free_memory()
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert ended[0] == ended[1]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("storage", ["codes", "grid", "master", "embedded"])
@pytest.mark.parametrize("name", ["E4M3", "E2M5"])
def test_codes_that_were_averaged_are_refused(name: str, storage: Any, strict: bool) -> None:
    """An average over states averages the codes, which mean nothing as numbers.

    They used to be taken for floats where ``strict=False`` let the other parts pass.
    """
    model: Any = nn.Sequential(nn.Embedding(8, 32), nn.Linear(32, 4))
    if storage == "embedded":
        first = second = quantize_model(model, name, "codes", embeddings=name).state_dict()
    else:
        model = quantized_net(name, storage=storage)
        first, second = (quantized_net(name, seed).state_dict() for seed in (0, 1))
    averaged = {key: (first[key].float() + second[key].float()) / 2 for key in first}
    old_weight = model[0].weight.detach().clone()
    line = r"0\.weight holds torch\.float32, but 0\.weight_traits says codes, .* average decoded weights \(fm\.aver"
    with pytest.raises(RuntimeError, match=line):
        model.load_state_dict(averaged, strict=strict)
    assert torch.equal(model[0].weight.detach(), old_weight)


def test_states_of_any_module_and_their_weights_without_a_model(tmp_path: Path) -> None:
    """Codes in a module of somebody else's, and values of a float model from its state."""
    first, second = (nn.Linear(4, 2, bias=False) for _ in range(2))
    first.weight, second.weight = (
        fm.FP8Parameter(normal(2, 4, seed=i), "E3M4", seed=i) for i in range(2)
    )
    state = through_file(first, tmp_path / "m")
    second.load_state_dict(state)
    assert same_store(first.weight, second.weight)
    floats = nn.Linear(4, 2, bias=False)
    floats.load_state_dict(fm.files.unflatten(state | {"other": torch.ones(1)}), strict=False)
    assert torch.equal(floats.weight.detach(), first.weight.dequantize())
    with pytest.raises(RuntimeError, match=r"Unexpected key.* .weight_scale"):
        floats.load_state_dict(state)
    assert fm.files.unflatten(
        {"b": torch.ones(1)}, {"fp8": "no prefix", "format": "pt"}
    ).keys() == {"b"}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_files_of_earlier_versions_are_read(name: str, granularity: Any) -> None:
    """Whose header has in JSON what the numbers of a state say, and whose codes have a
    dtype of torch's.
    """
    p = quantized_net(name, granularity=granularity, rounding="nearest")[0].weight
    description = {
        "format": name,
        "block_size": p.block_size,
        "rounding": "nearest",
        "seed": p.seed,
        "by_operator": True,
    }
    header = {
        "fp8:a.w": json.dumps(
            description | {"draws": "independent", "dtype": "float32", "remainder": True}
        )
    }
    codes = p.codes.view(torch.float8_e4m3fn) if name == "E4M3" else p.codes
    remainder = torch.ones(4, 64, dtype=torch.int8)
    tensors = {
        "a.w": codes,
        "a.w_scale": p.kept_scale,
        "a.w_counter": torch.tensor(3),
        "a.w_remainder": remainder,
    }
    state = fm.files.unflatten(tensors, header)
    weight: Any = state.pop("a.w")
    assert state == {}
    # The counter is the file's, and p's own is another.
    assert same_store(weight, p) is (int(p.counter) == 3)
    assert torch.equal(weight.codes, p.codes)
    assert weight._traits() == p._traits()
    assert (int(weight.counter), torch.equal(weight.remainder, remainder)) == (3, True)


def test_published_scales_are_looked_up_by_name() -> None:
    """Parameters of one module, whose names begin with another's."""
    module, state, names = nn.Module(), {}, ["w", "w_b", "w_b_c"]
    for name in names:
        module.register_parameter(name, fm.FP8Parameter(normal(4, 32), "E4M3"))
        state[name] = normal(4, 32).to(torch.float8_e4m3fn)
        state[f"{name}_scale"] = torch.rand(4, 1) + 0.5
    module.load_state_dict(state)
    for name in names:
        assert torch.equal(
            module.get_parameter(name).dequantize(), state[name].float() * state[f"{name}_scale"]
        ), name
