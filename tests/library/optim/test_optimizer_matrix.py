"""Every optimizer x write-back x moments of the registry over one parameter of every kind, in one list."""

import itertools
import math
import weakref
from typing import Any

import pytest
import torch
from family_cases import COMBINATIONS, INVALID, NAMES, OPTIONS, RIEMANNIAN_NAMES, VALID, ids, is_layer, make, moves, zoo
from optimizer_cases import (
    bits_of,
    normal,
    on,
    on_grid,
    put_gradients,
    same_bits,
    snapshot,
    stored_weight,
    value_of,
    values,
)
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.optim._spec import MOMENTS
from fp8manifold.optim._writeback import WRITEBACKS

valid = pytest.mark.parametrize(("name", "writeback", "moments"), VALID, ids=ids(VALID))
by_name = pytest.mark.parametrize("name", NAMES)


def test_the_matrix_is_the_registry() -> None:
    """Every row is an optimizer of the public surface, and almost every combination is one."""
    steps = {name for name in fm.optim.__all__ if hasattr(getattr(fm.optim, name), "step")}
    assert set(NAMES) == steps - {"StiffnessWrapper"}
    assert set(NAMES) == set(OPTIONS)
    assert len(COMBINATIONS) == len(WRITEBACKS) * len(MOMENTS) * len(NAMES) == len(VALID) + len(INVALID)
    assert len(VALID) >= 80
    assert {c[0] for c in VALID} == set(NAMES)


# ------------------------------------------------------------------------------------------------- valid and invalid
def distances(parameters: list[Tensor], targets: list[Tensor]) -> list[float]:
    pairs = zip(parameters, targets, strict=True)
    return [(value_of(p).double() - target.double()).square().sum().item() for p, target in pairs if moves(p)]


def targets_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [normal(*p.shape, seed=100 + i, std=0.1).to(p.dtype) for i, p in enumerate(parameters)]


@pytest.mark.covering(2)
@valid
def test_a_valid_combination_learns(name: str, writeback: str, moments: str) -> None:
    """20 steps towards a target: every kind comes nearer, stays on its grid, and no gradient is touched."""
    kinds = zoo()
    parameters = list(kinds.values())
    targets, still = targets_of(parameters), [p for p in parameters if not moves(p)]
    fixed, start = values(still), distances(parameters, targets)
    optimizer = make(name, parameters, writeback=writeback, moments=moments)
    for _ in range(20):
        for p, target in zip(parameters, targets, strict=True):
            p.grad = value_of(p) - target if p.requires_grad else None
        gradients = [(p.grad, bits_of(p.grad)) for p in parameters if p.grad is not None]
        optimizer.step()
        assert all(bits_of(gradient) == before for gradient, before in gradients)
    left = [b / a for a, b in zip(start, distances(parameters, targets), strict=True)]
    share = dict(zip([kind for kind, p in kinds.items() if moves(p)], left, strict=True))
    if (
        writeback == "nearest"
    ):  # where steps are shorter than half an ULP it may stall, which is what the others are for
        assert max(share.values()) <= 1.0, share
        assert sum(share.values()) < 0.8 * len(share)
    else:
        assert max(share.values()) < 0.9, share
    assert all(value_of(p).isfinite().all() for p in parameters)
    assert all(on_grid(p) for p in parameters if isinstance(getattr(p, "manifold", None), fm.FP8Manifold))
    assert same_bits(fixed, values(still))
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize(("name", "writeback", "moments"), INVALID, ids=ids(INVALID))
def test_an_invalid_combination_is_refused(name: str, writeback: str, moments: str) -> None:
    """With what does not go together, the reason, and what does: in the constructor, a group, and one added later."""
    options = {"writeback": writeback, "moments": moments}
    message = rf"writeback='{writeback}' does not go with (moments='{moments}'|{name}): .{{20,}}(one of|use) "
    with pytest.raises(ValueError, match=message):
        make(name, zoo().values(), **options)
    with pytest.raises(ValueError, match=message):
        make(name, [{"params": list(zoo().values()), **options}])
    optimizer = make(name, zoo().values())
    groups = len(optimizer.param_groups)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [stored_weight(seed=30)], **options})
    assert len(optimizer.param_groups) == groups


# -------------------------------------------------------------------------------------------------------- the state
AVERAGES = {"RiemannianSGD": ["momentum_buffer"], "StiffnessSGD": ["momentum_buffer"], "StiffnessLion": ["exp_avg"]}
WIDTH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}


def averages_of(name: str, p: Tensor) -> list[str]:
    if name == "FisherNaturalGradient" and is_layer(p):
        return ["momentum_buffer"]
    if name == "StiffnessMuon" and p.dim() > 1:
        return ["momentum_buffer"]
    if name == "Madam" and hasattr(p, "manifold"):
        return ["exp_avg_sq"]
    return AVERAGES.get(name, ["exp_avg", "exp_avg_sq"])


def expected_bytes(name: str, p: Tensor, writeback: str, moments: str) -> tuple[int, set[str]]:
    """Bytes of what has one value a weight, and the names of it."""
    averages, n = averages_of(name, p), p.numel()
    if name in RIEMANNIAN_NAMES and not hasattr(p, "manifold"):
        moments = "float32"
    wide = 8 if p.dtype == torch.float64 else 4
    total, names = len(averages) * n * {"float32": wide, "bfloat16": 2, "8bit": 1}[moments], set(averages)
    if WRITEBACKS[writeback].residual_bits and isinstance(getattr(p, "manifold", None), fm.FP8Manifold):
        total, names = total + n, names | {"residual"}
    return total, names


@pytest.mark.covering(2)
@valid
def test_the_state_is_what_moments_and_write_back_say(name: str, writeback: str, moments: str) -> None:
    """Its names, dtypes and bytes; besides that a few numbers a parameter, and 4 bytes a block for 8-bit averages."""
    kinds = zoo()
    optimizer = make(name, kinds.values(), writeback=writeback, moments=moments)
    put_gradients(kinds.values(), 0, 0.1)
    optimizer.step()
    put_gradients(kinds.values(), 1, 0.1)
    optimizer.step()
    for kind, p in kinds.items():
        if not moves(p):
            assert not optimizer.state.get(p), kind
            continue
        state = dict(optimizer.state[p])
        large = {k: v for k, v in state.items() if isinstance(v, Tensor) and k not in ("step", "grid")}
        bounds = [large.pop(k) for k in ("avg_bound", "sq_bound", "avg_largest") if k in large]
        metric = [large.pop(k) for k in list(large) if k.startswith(("inverse_", "fisher_"))]
        size, names = expected_bytes(name, p, writeback, moments)
        assert set(large) == names, kind
        assert sum(v.nbytes for v in large.values()) == size, kind
        stored = "float32" if name in RIEMANNIAN_NAMES and not hasattr(p, "manifold") else moments
        wide = torch.float64 if p.dtype == torch.float64 and stored == "float32" else WIDTH[stored]
        assert {v.dtype for k, v in large.items() if k != "residual"} == {wide}, kind
        assert all(
            v.dtype == torch.float32 and v.numel() <= max(p.numel() // 32, p.shape[0] if p.dim() else 1) for v in bounds
        )
        assert len(bounds) == (len(averages_of(name, p)) if stored == "8bit" else 0), kind
        assert bool(metric) == (name == "FisherNaturalGradient" and is_layer(p)), kind
        numbers = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
        assert len(repr(numbers)) < 400, kind


def tensors_in(x: Any, seen: dict[int, Any]) -> list[Tensor]:
    """Every tensor that an object leads to through containers and attributes."""
    if id(x) in seen or isinstance(x, type | nn.Module) or (callable(x) and not hasattr(x, "__dict__")):
        return []
    seen[id(x)] = x
    if isinstance(x, Tensor):
        return [x]
    inner: list[Any] = []
    if isinstance(x, dict):
        inner = [*x.keys(), *x.values()]
    elif isinstance(x, list | tuple | set | frozenset):
        inner = list(x)
    elif type(x).__module__.startswith("fp8manifold"):
        inner = list(getattr(x, "__dict__", {}).values())
    return [t for y in inner for t in tensors_in(y, seen)]


def memory(tensors: list[Tensor]) -> dict[int, int]:
    """Bytes by address of what the tensors are views of."""
    plain: list[Tensor] = []
    for t in tensors:
        plain += [t.codes, t.scale, t.counter] if isinstance(t, fm.FP8Tensor) else [t.detach().as_subclass(Tensor)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain if t.numel()}


@valid
def test_nothing_else_is_held(name: str, writeback: str, moments: str) -> None:
    """An optimizer keeps its parameters and their state, a few bytes a row besides, and no gradient."""
    parameters = [stored_weight("E4M3", (16, 256), seed=1), nn.Parameter(normal(64, 32, seed=2))]
    optimizer = make(name, parameters, writeback=writeback, moments=moments)
    for t in range(2):
        put_gradients(parameters, t, 0.1)
        optimizer.step()
    gradients = [weakref.ref(p.grad) for p in parameters]
    optimizer.zero_grad()
    assert [gradient() for gradient in gradients] == [None, None]
    held = memory(tensors_in(optimizer.__dict__, {}))
    known = memory([*parameters, *tensors_in(dict(optimizer.state), {})])
    extra = sum(size for address, size in held.items() if address not in known)
    layer = parameters[0].shape[0] ** 2 + parameters[0].shape[1] ** 2
    assert extra <= 16 * 24 + 256 + (16 * layer if name == "FisherNaturalGradient" else 0)


# --------------------------------------------------------------------------------------------------------- all or none
@pytest.mark.covering(2)
@valid
def test_a_step_is_left_out_as_a_whole(name: str, writeback: str, moments: str) -> None:
    """Before the first step and after it: parameters and state stay, to the bit."""
    kinds, others = zoo(), zoo()
    optimizer, untroubled = (make(name, z.values(), writeback=writeback, moments=moments) for z in (kinds, others))
    for o in (optimizer, untroubled):
        o.step()  # without gradients: takes what the parameters kept of their first rounding
    bad = {"fp8 channel": math.nan, "bfloat16": math.inf, "grid": -math.inf, "float32": 3e19, "float64": 1e160}
    for t in range(2):
        for kind, value in bad.items():
            put_gradients(kinds.values(), t, 0.1)
            kinds[kind].grad.view(-1)[0] = value
            before = snapshot(optimizer)
            optimizer.step()
            after = snapshot(optimizer)
            assert (
                before["state"].pop("skipped_steps") + 1
                == after["state"].pop("skipped_steps")
                == optimizer.skipped_steps
            )
            assert after["state"].pop("skipped_in_row") == before["state"].pop("skipped_in_row") + 1
            assert after == before, kind
        for z, o in ((kinds, optimizer), (others, untroubled)):
            put_gradients(z.values(), t, 0.1)
            o.step()
        assert same_bits(values(kinds.values()), values(others.values()))
    assert optimizer.skipped_steps == 2 * len(bad)


@by_name
def test_what_the_first_rounding_left_survives_a_step_left_out(name: str) -> None:
    """It moves from the parameter into the state, which is saved; no code changes."""
    kept = stored_weight("E4M3", (3, 7), seed=1, keep_remainder=True)
    remainder, codes = kept.remainder.clone(), kept.codes.clone()
    optimizer = make(name, [kept], writeback="residual8")
    kept.grad = torch.full((3, 7), math.nan)
    optimizer.step()
    assert torch.equal(kept.codes, codes)
    assert optimizer.skipped_steps == 1
    if kept.remainder is None:
        state = optimizer.state_dict()["state"][0]
        assert "step" not in state
        assert torch.equal(state["residual"], remainder)
    else:
        assert torch.equal(kept.remainder, remainder)


@by_name
def test_raising_leaves_everything_as_it_was(name: str) -> None:
    """FloatingPointError names the shape; one group that raises is enough."""
    kinds = zoo()
    groups = [{"params": [p for k, p in kinds.items() if k != "fp8 channel"]}, {"params": [kinds["fp8 channel"]]}]
    optimizer = make(name, [groups[0], {**groups[1], "on_nonfinite": "raise"}])
    put_gradients(kinds.values(), 0, 0.1)
    kinds["fp8 channel"].grad[4, 32] = math.nan
    before = snapshot(optimizer)
    with pytest.raises(FloatingPointError, match=r"\(5, 33\)"):
        optimizer.step()
    assert snapshot(optimizer) == before
    assert optimizer.skipped_steps == 0


@by_name
@pytest.mark.parametrize("order", [("skip", "raise"), ("raise", "skip")], ids="-".join)
def test_one_group_that_raises_is_enough(name: str, order: tuple[str, str]) -> None:
    """Where gradients of both groups are bad, whichever comes first; that of a group that skips never raises."""
    weights = [stored_weight(seed=1), stored_weight(seed=2)]
    groups = [{"params": [w], "on_nonfinite": how} for w, how in zip(weights, order, strict=True)]
    optimizer = make(name, groups)
    put_gradients(weights, 0, 0.1)
    weights[order.index("skip")].grad[0, 0] = math.nan
    optimizer.step()
    assert optimizer.skipped_steps == 1
    weights[order.index("raise")].grad[0, 0] = math.nan
    with pytest.raises(FloatingPointError):
        optimizer.step()


# ------------------------------------------------------------------------------------- one result, whatever is around
@pytest.mark.covering(2)
@valid
def test_codes_step_as_the_grid_they_stand_for(name: str, writeback: str, moments: str) -> None:
    """A stored weight and a float one on its manifold: the same codes after every step."""
    granularities = ["tensor", "channel"] + (["block"] if moments != "8bit" else [])  # there blocks follow the scales
    for granularity, factors in itertools.product(granularities, (False, True)):
        kind: dict[str, Any] = {"seed": 2, "granularity": granularity, "headroom": 8.0, "factors": factors}
        stored = stored_weight("E4M3", (6, 64), **kind)
        scale = stored.expanded_scale().clone()
        grid = on(fm.FP8Manifold("E4M3", scale, stored.rounding, stored.seed), stored.dequantize())
        optimizers = [make(name, [p], writeback=writeback, moments=moments, weight_decay=0.01) for p in (stored, grid)]
        for t in range(6):
            for p, optimizer in zip((stored, grid), optimizers, strict=True):
                put_gradients([p], t, 0.1)
                optimizer.step()
            assert torch.equal(fm.encode(grid.detach().as_subclass(Tensor) / scale, "E4M3"), stored.codes), kind
        assert optimizers[0].widened_scales == 0
        assert (stored.codes != stored_weight("E4M3", (6, 64), **kind).codes).any()


@pytest.mark.covering(2)
@valid
def test_global_settings_do_not_enter(name: str, writeback: str, moments: str) -> None:
    """Neither the global generator, which is left alone too, nor torch's default dtype."""
    results = []
    other = torch.float32 if name == "FisherNaturalGradient" else torch.float64  # nngeometry has float32 only
    for seed, dtype in ((0, torch.float32), (1, other)):
        torch.manual_seed(seed)
        expected = torch.get_rng_state()
        kinds = zoo()
        gradients = [
            [normal(*p.shape, seed=100 * t + i).to(p.dtype) for i, p in enumerate(kinds.values())] for t in range(3)
        ]
        torch.set_default_dtype(dtype)
        try:
            optimizer = make(name, kinds.values(), writeback=writeback, moments=moments)
            for step in gradients:
                for p, gradient in zip(kinds.values(), step, strict=True):
                    p.grad = gradient if p.requires_grad else None
                optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(torch.get_rng_state(), expected)
        results.append(snapshot(optimizer))
    assert results[0] == results[1]
