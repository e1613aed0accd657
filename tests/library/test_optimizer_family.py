"""What every optimizer of the registry keeps to: signatures, groups, ascent, loss scaling, hooks, rescaled weights."""

from __future__ import annotations

import copy
import inspect
import math
import re
from typing import Any

import pytest
import torch
from family_cases import NAMES, OPTIONS, RIEMANNIAN_NAMES, make, zoo
from optimizer_cases import (
    RIEMANNIAN,
    ROWS,
    bits_of,
    every_class,
    free_weight,
    grid_weight,
    normal,
    on,
    ours,
    put_gradients,
    record,
    same_bits,
    snapshot,
    stochastic,
    stored_weight,
    values,
)
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold.optim import RiemannianAdam, RiemannianSGD, StiffnessAdamW

# ------------------------------------------------------------------------ What every optimizer of the registry keeps to
by_name = pytest.mark.parametrize("name", NAMES)


@by_name
def test_ascending_is_descending_on_the_negated_gradient(name: str) -> None:
    kinds, others = zoo(), zoo()
    up, down = make(name, kinds.values(), maximize=True), make(name, others.values())
    for t in range(4):
        put_gradients(kinds.values(), t, 0.1)
        put_gradients(others.values(), t, 0.1)
        for p in others.values():
            p.grad = None if p.grad is None else -p.grad
        up.step()
        down.step()
        assert same_bits(values(kinds.values()), values(others.values()))


@by_name
def test_groups_of_different_options_step_as_optimizers_of_their_own(name: str) -> None:
    """Position in the whole list keys the noise, so the others are there too, held still by having no gradient."""
    lr = OPTIONS[name]["lr"]
    chosen: list[dict[str, Any]] = [
        {"lr": 0.5 * lr, "writeback": "residual4", "moments": "8bit"},
        {"weight_decay": 0.1, "maximize": True, "seed": 4},
        {"writeback": "nearest", "moments": "bfloat16", "refresh_every": 2},
    ]
    shapes = [(3, 7), (2, 9), (4, 5)]
    weights = [stored_weight(shape=s, seed=i) for i, s in enumerate(shapes)]
    grouped = make(name, [{"params": [w], **options} for w, options in zip(weights, chosen, strict=True)])
    for t in range(5):
        put_gradients(weights, t, 0.1)
        grouped.step()
    for i, options in enumerate(chosen):
        alone = [stored_weight(shape=s, seed=j) for j, s in enumerate(shapes)]
        single = make(name, alone, **options)
        for t in range(5):
            put_gradients(alone, t, 0.1)
            for j, p in enumerate(alone):
                p.grad = p.grad if j == i else None
            single.step()
        assert bits_of(alone[i]) == bits_of(weights[i]), options


@by_name
def test_loss_scaling_over_stored_and_ordinary_weights(name: str) -> None:
    """Unscaled and clipped gradients step as such; an overflow is left out by the scaler, a NaN by the optimizer."""
    pair = [[stored_weight(seed=1, granularity="tensor"), nn.Parameter(normal(7, seed=2))] for _ in "ab"]
    scaled, plain = (make(name, parameters) for parameters in pair)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=100)

    def loss(parameters: list[Any], t: int) -> Tensor:
        return ((parameters[0] @ parameters[1]) * normal(3, seed=t)).sum()

    for t in range(4):
        scaled.zero_grad()
        scaler.scale(loss(pair[0], t)).backward()
        scaler.unscale_(scaled)
        torch.nn.utils.clip_grad_norm_(pair[0], 0.5)
        scaler.step(scaled)
        scaler.update()
        plain.zero_grad()
        loss(pair[1], t).backward()
        torch.nn.utils.clip_grad_norm_(pair[1], 0.5)
        plain.step()
        assert same_bits(values(pair[0]), values(pair[1]))
    for bad in (math.inf, math.nan):
        scaled.zero_grad()
        scaler.scale(loss(pair[0], 9) * bad).backward()
        before = snapshot(scaled)
        scaler.step(scaled)
        scaler.update()
        assert snapshot(scaled) == before
    assert scaler.get_scale() == 2.0**12


@by_name
@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_a_weight_rescaled_between_steps_is_stepped_at_its_new_scale(name: str, moments: str) -> None:
    """As one that an optimizer made for it, with the same state, would step."""
    results = []
    for fresh in (False, True):
        p = stored_weight("E4M3", (4, 320), seed=1, headroom=2.0)
        optimizer = make(name, [p], moments=moments, writeback="nearest")
        put_gradients([p], 0)
        optimizer.step()
        p.rescale_(p.scale * torch.tensor([[4.0], [2.0], [8.0], [1.0]]))
        if fresh:
            state = optimizer.state_dict()
            optimizer = make(name, [p], moments=moments, writeback="nearest")
            optimizer.load_state_dict(state)
        for t in range(1, 4):
            put_gradients([p], t)
            optimizer.step()
        results.append(bits_of(p))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", RIEMANNIAN_NAMES)
def test_a_code_gradient_whose_square_overflows_does_not_stick(name: str) -> None:
    """E5M2 near its end, where S = 8192: S g overflows in its square though g does not; the weight moves again."""
    p = on(fm.FP8Manifold("E5M2"), torch.full((4,), 40_000.0))
    optimizer = make(name, [p], lr=0.5, momentum=0.0) if name == "RiemannianSGD" else make(name, [p], lr=0.5)
    for t in range(60):
        p.grad = torch.full((4,), 3e17 if t == 3 else 1e-4)
        optimizer.step()
    state = [x for x in optimizer.state[p].values() if isinstance(x, Tensor)]
    assert all(x.isfinite().all() for x in state)
    assert p.isfinite().all()
    assert optimizer.skipped_steps <= 1


@by_name
def test_a_run_that_diverges_stays_finite(name: str) -> None:
    """Steps far too long in formats of few and of many binades: codes of numbers, at scales that hold them."""
    for fmt in ("E7M0", "E4M3", "E5M2", "E1M6", "E4M3FNUZ", "P3109_8P3", "E2M1"):
        p = fm.FP8Parameter(normal(6, 7, std=0.1), fmt, headroom=1.0)
        q = on(fm.FP8Manifold(fmt, p.scale.clone(), "stochastic"), normal(6, 7, std=0.1))
        optimizer = make(name, [p, q], lr=1e5 * OPTIONS[name]["lr"], refresh_every=2)
        for t in range(6):
            put_gradients([p, q], t, 10.0 ** (3 * t - 3))
            optimizer.step()
            assert all(x.isfinite().all() for x in values([p, q])), (fmt, t)
            assert not (p.codes > 2 * p.format.sign_bit - 1).any()
        assert all(x.isfinite().all() for w in (p, q) for x in optimizer.state[w].values() if isinstance(x, Tensor))


# ----------------------------------------------------------------------------------------------------- torch's contract
# -------------------------------------------------------------------------------------------- gradients that fail
@ours
def test_a_large_sum_of_ordinary_gradients_is_not_skipped(make: Any) -> None:
    """Each square is finite, their sum is not."""
    weight, plain = grid_weight("E4M3", (3, 7)), nn.Parameter(torch.zeros(100))
    optimizer = make([weight, plain])
    weight.grad, plain.grad = torch.ones(3, 7), torch.full((100,), 1.5e19)
    assert not torch.dot(plain.grad, plain.grad).isfinite()
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert plain.isfinite().all()
    assert (plain != 0).all()


# ------------------------------------------------------------------------------- stabilize, reset, and observation
@every_class
def test_stabilize_projects_when_due(kind: Any) -> None:
    """A weight that something else has pushed off its grid is back on it; without a step of its own it stays."""
    options = {"stabilize" if kind in RIEMANNIAN else "stabilize_every": 3}
    weight = grid_weight("E4M3", (3, 7), ROWS)
    optimizer = kind([weight], lr=0.0, **options)
    views = record(optimizer)
    off = values([weight])[0] * 1.001
    for t in range(4):
        with torch.no_grad():
            weight.copy_(off)
        put_gradients([weight], t)
        optimizer.step()
    assert [torch.equal(v.before, off) for v in views] == [True, True, True, False]
    assert torch.equal(views[3].before, weight.manifold.projx(off))


@pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])
def test_geoopts_stabilize_is_taken_in_groups_too(kind: Any) -> None:
    groups = kind([{"params": [grid_weight()], "stabilize": 4}, {"params": [grid_weight()]}], stabilize=2).param_groups
    assert [g["stabilize_every"] for g in groups] == [4, 2]
    with pytest.raises(ValueError, match="stabilize"):
        kind([{"params": [grid_weight()], "stabilize": 0}])


@every_class
def test_observing_changes_nothing(kind: Any) -> None:
    parameters, others = [grid_weight("E4M3", (3, 7), ROWS)], [grid_weight("E4M3", (3, 7), ROWS)]
    seen, unseen = stochastic(kind, parameters), stochastic(kind, others)
    record(seen)
    for t in range(5):
        put_gradients(parameters, t)
        put_gradients(others, t)
        seen.step()
        unseen.step()
    assert same_bits(values(parameters), values(others))
    assert unseen.observer is None


# ----------------------------------------------------------------- Every option of an optimizer stands in its signature
REST = (
    "refresh_every=100, compile=None, maximize=False, on_nonfinite='skip', stabilize_every=None, reset_every=None, "
    "**flags"
)
BOUNDS = f"damping=0.00390625, clip=16.0, {REST}"
ROUNDED = f"writeback='stochastic', draws='independent', moments='float32', seed=0, {BOUNDS}"
CHARTED = f"float_lr=None, writeback=None, draws=None, moments='float32', seed=0, {BOUNDS}"
SIGNATURES = {
    "StiffnessAdamW": "lr=0.001, betas=(0.9, 0.95), eps=1e-08, weight_decay=0.0, *, stiffness=0.0, metric='ulp', "
    + ROUNDED,
    "StiffnessSGD": "lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False, *, stiffness=0.0, "
    "metric='ulp', " + ROUNDED,
    "StiffnessLion": "lr=0.0001, betas=(0.9, 0.99), weight_decay=0.0, *, stiffness=0.0, metric='ulp', " + ROUNDED,
    "StiffnessMuon": "lr=0.001, weight_decay=0.1, momentum=0.95, nesterov=True, "
    "ns_coefficients=(3.4445, -4.775, 2.0315), eps=1e-07, ns_steps=5, adjust_lr_fn=None, *, direction='muon', "
    "matrix_shape='auto', ns_dtype=None, betas=(0.9, 0.95), adam_eps=1e-08, stiffness=0.0, metric='ulp', "
    + ROUNDED.replace("independent", "dither"),
    "Madam": "lr=0.01, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, *, float_lr=0.001, max_direction=10.0, "
    "escape=0.0625, " + ROUNDED,
    "RiemannianAdam": "lr=None, betas=(0.9, 0.999), eps=1e-08, weight_decay=0, amsgrad=False, *, stabilize=None, "
    + CHARTED,
    "RiemannianSGD": "lr=None, momentum=0, dampening=0, weight_decay=0, nesterov=False, stabilize=None, *, " + CHARTED,
    "FisherNaturalGradient": "model, loader, lr=0.001, momentum=0.9, betas=(0.9, 0.95), eps=1e-08, "
    "weight_decay=0.0, *, representation='kfac', refresh=10, damping=1.0, decay=0.9, batches=1, samples=1, "
    "normalize=True, max_features=4096, logits=call_model, floor=0.00390625, stiffness=0.0, metric='ulp', "
    f"writeback='stochastic', draws='independent', moments='float32', seed=0, clip=16.0, {REST}",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_has_every_option(name: str) -> None:
    signature = inspect.signature(getattr(optim, name))
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    shown = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    assert re.sub(r"<function (\w+) at \w+>", r"\1", shown) == f"(params, {SIGNATURES[name]})"
    assert inspect.Parameter.empty not in {p.annotation for p in signature.parameters.values()}
    assert str(signature.parameters["writeback"].annotation) in ("<class 'str'>", "str | None")


@pytest.mark.parametrize("name", [name for name in SIGNATURES if name != "FisherNaturalGradient"])
def test_groups_have_what_the_signature_has(name: str) -> None:
    optimizer = getattr(optim, name)([torch.nn.Parameter(torch.eye(3))])
    options = inspect.signature(type(optimizer)).parameters.keys() - {"params", "flags", "stabilize"}
    assert optimizer.defaults.keys() == options


@pytest.mark.parametrize("name", ["StiffnessAdamW", "Madam", "RiemannianSGD"])
def test_an_option_that_there_is_not_is_refused(name: str) -> None:
    unknown = "metrc" if name == "StiffnessAdamW" else "metric"
    with pytest.raises(TypeError, match=f"{name} got an unexpected keyword argument '{unknown}'"):
        getattr(optim, name)([torch.nn.Parameter(torch.ones(3))], **{unknown: "ulp"})
    with pytest.raises(TypeError, match="unexpected keyword argument 'foreech'; did you mean 'foreach'"):
        getattr(optim, name)([torch.nn.Parameter(torch.ones(3))], foreech=True)


def test_a_subclass_may_have_options_of_its_own() -> None:
    class Mine(optim.StiffnessLion):
        def __init__(self, params: object, speed: float = 2.0) -> None:
            super().__init__(params, 1e-3 * speed, writeback="nearest")  # type: ignore[arg-type]

    (group,) = Mine([torch.nn.Parameter(torch.ones(3))]).param_groups
    assert (group["lr"], group["writeback"], group["moments"]) == (2e-3, "nearest", "float32")


# -------------------------------------- Hooks around an optimizer's loading and saving: what they change is what counts
def stepped(name: str) -> tuple[torch.nn.Parameter, Any]:
    p = stored_weight("E4M3", (3, 8), seed=1)
    optimizer = make(name, [p])
    put_gradients([p], 0)
    optimizer.step()
    return p, optimizer


def averages(entry: dict[str, Any]) -> list[str]:
    return [key for key, value in entry.items() if isinstance(value, torch.Tensor) and value.shape == (3, 8)]


@pytest.mark.parametrize("returns", [True, False], ids=["returned", "in place"])
@by_name
def test_what_a_hook_makes_of_a_state_is_loaded(name: str, returns: bool) -> None:
    p, optimizer = stepped(name)
    saved = copy.deepcopy(optimizer.state_dict())
    names = averages(saved["state"][0])

    def double(_: Any, state: dict[str, Any]) -> Any:
        changed = copy.deepcopy(state)
        for key in names:
            changed["state"][0][key] *= 2
        changed["skipped_steps"] = 7
        state.update(changed)
        return changed if returns else None

    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.load_state_dict(saved)
    assert names
    assert all(torch.equal(optimizer.state[p][key], 2 * saved["state"][0][key]) for key in names)
    assert optimizer.skipped_steps == 7


@by_name
def test_what_a_hook_makes_of_a_state_is_checked(name: str) -> None:
    """A hook may mend a state that would be refused, and one that it breaks is refused before anything changes."""
    p, optimizer = stepped(name)
    saved = copy.deepcopy(optimizer.state_dict())
    key, *_ = averages(saved["state"][0])
    kept = optimizer.state[p][key].clone()
    handle = optimizer.register_load_state_dict_pre_hook(
        lambda _, state: state["state"][0].update({key: torch.ones(2)})
    )
    with pytest.raises(ValueError, match=f"has {key} of shape"):
        optimizer.load_state_dict(copy.deepcopy(saved))
    assert torch.equal(optimizer.state[p][key], kept)
    handle.remove()
    mended = saved["state"][0][key]
    optimizer.register_load_state_dict_pre_hook(lambda _, state: state["state"][0].update({key: mended}))
    foreign = copy.deepcopy(saved)
    foreign["state"][0][key] = torch.ones(2)
    optimizer.load_state_dict(foreign)
    assert torch.equal(optimizer.state[p][key], kept)


def test_a_wrapper_has_hooks_of_its_own() -> None:
    p = torch.nn.Parameter(normal(2, 2))
    wrapper, seen = fm.optim.StiffnessWrapper(torch.optim.SGD([p], lr=0.1)), []
    wrapper.register_state_dict_pre_hook(lambda o: seen.append(type(o)))
    wrapper.register_state_dict_post_hook(lambda _, state: state | {"steps_taken": 3})
    wrapper.register_load_state_dict_pre_hook(lambda _, state: state | {"steps_taken": state["steps_taken"] + 1})
    wrapper.register_load_state_dict_post_hook(lambda o: seen.append(o.steps_taken))
    saved = wrapper.state_dict()
    wrapper.load_state_dict(saved)
    assert (saved["steps_taken"], seen) == (3, [fm.optim.StiffnessWrapper, 4])


@pytest.mark.parametrize("state", [None, [1], "state"])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(TypeError, match="state_dict must be a dict"):
        stepped("StiffnessAdamW")[1].load_state_dict(state)


@pytest.mark.parametrize("kind", [StiffnessAdamW, RiemannianAdam])
def test_a_reset_starts_the_averages_anew(kind: Any) -> None:
    """After it the step is that of a fresh optimizer at the same point (float64, no rounding)."""
    weight = free_weight(normal(30, dtype=torch.float64))
    optimizer = kind([weight], reset_every=4, refresh_every=1)
    for t in range(4):
        put_gradients([weight], t)
        optimizer.step()
    twin = free_weight(values([weight])[0])
    fresh = kind([twin], refresh_every=1)
    for t in range(4, 7):
        put_gradients([weight], t)
        put_gradients([twin], t)
        optimizer.step()
        fresh.step()
        assert torch.equal(weight, twin)


@every_class
def test_a_scheduler_begins_from_the_lr_of_the_moment(kind: Any) -> None:
    """As around torch's optimizers: the lr may have been set by hand before."""
    optimizer = kind([grid_weight()], lr=0.2)
    optimizer.param_groups[0]["lr"] = 0.05
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0)
    assert scheduler.base_lrs == [0.05]
