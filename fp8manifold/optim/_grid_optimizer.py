"""Optimizers over weights on a grid: a step's slot, scales that double, and what the stiffness family shares."""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._encoded.stored_scale import describe_change
from fp8manifold._numerics.charts import Metric, chart_of
from fp8manifold._numerics.checks import check_choice, check_int, check_number
from fp8manifold._numerics.codec import encode_finite, encode_signed
from fp8manifold._ranks import Ranks, local_of, share_of
from fp8manifold._triton.kinds import widest_scale
from fp8manifold.formats import FloatFormat
from fp8manifold.optim._checks import check_combination, scheduled
from fp8manifold.optim._geometry import (
    bounded_share,
    end_exponents,
    load_weights,
    log2_bounded,
    power_mode,
    reference_stiffness,
)
from fp8manifold.optim._optimizer import ManifoldOptimizer
from fp8manifold.optim._slot import FOR_RESCALING, Key, Slot, row_view
from fp8manifold.optim._spec import Spec, spec_of
from fp8manifold.optim._state import (
    Grid,
    grid_of,
    make_state,
    manifold_of,
    own_manifold,
    pack_residual,
    stiffness_field,
    unpack_residual,
)
from fp8manifold.optim._writeback import WRITEBACKS, rounds_at_random, split_codes, unless_special
from fp8manifold.random_bits import draw_of, words_at
from fp8manifold.tensor import FP8Tensor

_LOG: Final = logging.getLogger("fp8manifold")


def at_an_end(slots: Sequence[Slot]) -> list[Slot]:
    """The steps of one-byte parameters that have left a weight at the end of its range.

    Rows that a process holds are its own to widen.  Of one scale for the rows of several processes all of these
    processes are told.
    """
    kept = [slot for slot in slots if slot.spec.storage == "codes"]
    found = [_holds_last(slot) for slot in kept]
    shared: dict[int, tuple[Ranks, list[int]]] = {}
    for i, slot in enumerate(kept):
        if slot.scale is not None and not slot.scale.dim() and (share := share_of(slot.parameter)) is not None:
            shared.setdefault(id(share.ranks.group), (share.ranks, []))[1].append(i)
    for ranks, places in shared.values():
        flags = torch.tensor(
            [found[i] for i in places], dtype=torch.int32, device=kept[places[0]].tensors["weight"].device
        )
        for i, flag in zip(places, ranks.largest(flags).tolist(), strict=True):
            found[i] = bool(flag)
    return [slot for slot, here in zip(kept, found, strict=True) if here]


def _holds_last(slot: Slot) -> bool:
    """Whether one of the codes is that of the largest magnitude; native code has looked already."""
    codes, fmt = slot.tensors["weight"], slot.spec.fmt
    if slot.reached or not codes.numel():
        return any(slot.reached)
    assert fmt is not None
    return bool(((codes & (fmt.sign_bit - 1)) == fmt.max_code).any())


def widen(state: dict[str, Any], grid: Grid, held: FP8Tensor, spec: Spec, key: Key) -> int:
    """Double each scale whose largest weight is the format's, and return how many there were.

    Their weights, with the residual kept beside them, are rounded stochastically once, which moves none that the wider
    grid holds.  No scale becomes narrower: that is :meth:`FP8Tensor.adapt_scale_`.
    """
    old, fmt = held.scale, held.format
    widest = widest_scale(fmt)
    largest = held.largest() if old.dim() else grid.ranks.largest(held.largest())
    new = torch.where(largest >= old * fmt.max, old * 2, old).clamp(max=widest).maximum(old)
    if not (count := int((new != old).sum())):
        return 0
    _LOG.info("%s of shape %s saturates: %s", fmt.name, tuple(held.shape), describe_change(old, new))
    if held.numel():
        _rewrite(state, grid, new, spec, key)
    held.set_scale_(new)
    return count


def _rewrite(state: dict[str, Any], grid: Grid, new: Tensor, spec: Spec, key: Key) -> None:
    """Round the weights of every scale that changes to its new grid."""
    view, shape, bits = grid.view(blocks=False), grid.weight.shape, spec.residual_bits
    assert grid.fmt is not None
    assert grid.scale is not None
    of_rows = [row_view(scale, shape, view).reshape(-1, 1) for scale in (grid.scale, new)]
    rows = (of_rows[0] != of_rows[1]).flatten().nonzero().flatten()
    weight = grid.weight.view(len(of_rows[0]), -1)
    arrays = {"weight": weight[rows]}
    if bits:
        kept = local_of(state["residual"])
        residual = unpack_residual(kept, shape, bits).view(weight.shape)
        arrays["residual"] = residual[rows]
    x = load_weights(spec, arrays, torch.float32).x * (of_rows[0] / of_rows[1])[rows]
    places = (rows * weight.shape[1] + (0 if grid.share is None else grid.share.offset)).unsqueeze(1)
    places = places + torch.arange(weight.shape[1], device=x.device)
    draws = draw_of(words_at(places, (*key, FOR_RESCALING)))
    codes, rest = _rounded(x, grid.fmt, draws, bits)
    weight[rows] = unless_special(codes, arrays["weight"], grid.fmt)
    if bits:
        residual[rows] = rest.to(torch.int8)
        if bits != 8:
            kept.copy_(pack_residual(residual.view(shape), bits, in_rows=kept.dim() > 1))


def _rounded(x: Tensor, fmt: FloatFormat, draws: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes, and what is kept beside them."""
    if not bits:
        return (codes := encode_finite(x, fmt, draws)), codes
    return split_codes(encode_signed(x, fmt, draws, bits), fmt, bits)


# ------------------------------------------------------------------------------------------------------- grid optimizer


class GridOptimizer(ManifoldOptimizer):
    """Plans steps for the engine: subclasses name a direction and the traits of the spec, and give its numbers."""

    direction: str

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_number("damping", group["damping"], 0.0, 1.0)
        check_number("clip", group["clip"], 1.0)
        check_int("refresh_every", group["refresh_every"], 1, 2**62)
        check_combination(type(self).__name__, self.direction, group)

    def _traits(self, group: dict[str, Any], parameter: Tensor, grid: Grid | None) -> dict[str, Any]:
        """The spec's fields that follow neither from storage nor from shared options: direction, geometry, ...

        ``grid`` is None for an ordinary parameter.
        """
        raise NotImplementedError

    def _numbers(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], slot: Slot) -> dict[str, float]:
        """The row of hyperparameters of this step."""
        raise NotImplementedError

    def _metric(self, group: dict[str, Any], grid: Grid) -> Metric:
        """The metric whose field S_ref is the mean of."""
        metric: Metric = group["metric"]
        return metric

    def _bounded(self, group: dict[str, Any], grid: Grid, stiffness: Tensor, reference: float) -> float:
        """The share of a field that lies outside the bounds."""
        return bounded_share(stiffness, reference, group["damping"], group["clip"], grid.ranks)

    def _gradient(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """What the direction is taken from; it is not changed."""
        assert parameter.grad is not None
        return parameter.grad

    def _plan(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> Slot | None:
        key = Key(group["seed"], int(state["step"]), state["stream"])
        grid = grid_of(parameter)
        due = (key.step - 1) % group["refresh_every"] == 0 or "reference" not in state
        if due and grid.storage != "plain":
            self._refresh(group, grid, state)
        slot = self._job(group, parameter, state, grid, key)
        gradient = local_of(self._gradient(group, parameter)).contiguous().resolve_neg()  # compilers see memory
        slot.tensors["gradient"] = gradient if slot.share is None else slot.share.gathered(gradient)
        slot.parameter, slot.group, slot.in_place = parameter, group, grid.in_place
        slot.numbers = self._numbers(group, parameter, state, slot)
        return slot

    def _job(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], grid: Grid, key: Key) -> Slot:
        """The step of a parameter, short of its gradient."""
        of_floats = "stochastic" if rounds_at_random(grid.weight, group) else "nearest"
        traits = {
            "writeback": (group["writeback"] or grid.rounding) if grid.rounds else of_floats,
            "moments": group["moments"],
            "decays": bool(group["weight_decay"]),
            "maximize": group["maximize"],
            **self._traits(group, parameter, grid if grid.fmt is not None else None),
        }
        spec = spec_of(storage=grid.storage, fmt=grid.fmt, scale_is_power_of_two=grid.scale_is_power_of_two, **traits)
        in_blocks = traits["moments"] == "8bit"
        # the blocks of a vector's averages are cut by other processes' shares: it is stepped whole in each of them
        share = grid.share if in_blocks and spec.stores and parameter.dim() == 1 else None
        stepped = grid if share is None else grid.whole
        view = stepped.view(blocks=in_blocks)
        make_state(spec, view, parameter, state)
        tensors = {"weight": stepped.weight} | {name: local_of(state[name]) for name in spec.keeps}
        draws = group.get("draws") or grid.draws
        slot = Slot(spec, view, tensors, key, grid.scale, stepped.weight.shape, share=share, draws=draws)
        if share is not None:
            slot.gather()
            slot.back["weight"] = grid.weight
        elif grid.share is not None:
            slot.offset = grid.share.offset
        if grid.fmt is not None:
            if "grid" not in state:
                state["grid"] = torch.tensor(grid.fields)
            if spec.geometry in ("exponential", "tangent") and spec.metric == "ulp":
                bounds = (state["reference"], group["damping"], group["clip"])
                slot.ends = end_exponents(*bounds, grid.fmt.mantissa_bits)
        return slot

    def _widen(self, slots: list[Slot]) -> None:
        for slot in at_an_end(slots):
            state, grid, held = self.state[slot.parameter], grid_of(slot.parameter), local_of(slot.parameter)
            assert isinstance(held, FP8Tensor)
            changed = widen(state, grid, held, slot.spec, slot.key)
            one = not held.scale.dim()
            self.widened_scales += 0 if one and grid.ranks.rank else changed  # of one that all share, the first counts
            if changed and one:
                self._refresh(slot.group, grid, state)

    def _refresh(self, group: dict[str, Any], grid: Grid, state: dict[str, Any]) -> None:
        """Compute S_ref and the bounded share."""
        stiffness = stiffness_field(grid, self._metric(group, grid))
        state["reference"] = reference_stiffness(stiffness, grid.ranks)
        state["bounded"] = self._bounded(group, grid, stiffness, state["reference"])


_LARGEST_POWER = 8.0


class StiffnessOptimizer(GridOptimizer):
    """``w - lr (S / S_ref)^k d``: subclasses name the direction ``d`` and give its numbers."""

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_choice("writeback", group["writeback"], WRITEBACKS)  # None is for manifolds
        if "stiffness" in group:
            scheduled("stiffness", group["stiffness"], 0, -_LARGEST_POWER, _LARGEST_POWER)
            chart_of(FloatFormat(4, 3), group["metric"])
        for parameter in group["params"]:
            if manifold_of(parameter) is not None and own_manifold(parameter) is None:
                raise ValueError(
                    f"{type(self).__name__} can't step a parameter on {manifold_of(parameter)}: "
                    "use fp8manifold.optim.RiemannianAdam"
                )

    def _check_schedules(self, taken: list[tuple[dict[str, Any], int]]) -> None:
        """Ask for every exponent of the step, once, before anything has changed."""
        self._powers: dict[tuple[int, int], float] = {}
        for group, done in taken:
            if "stiffness" in group and (id(group), done) not in self._powers:
                power = scheduled("stiffness", group["stiffness"], done, -_LARGEST_POWER, _LARGEST_POWER)
                self._powers[id(group), done] = power

    def _traits(self, group: dict[str, Any], parameter: Tensor, grid: Grid | None) -> dict[str, Any]:
        if grid is None:
            return {"direction": self.direction}
        k = group["stiffness"]
        power = "power" if callable(k) else power_mode(k)
        return {"direction": self.direction, "metric": group["metric"], "stiffness": power}

    def _shared_numbers(self, group: dict[str, Any], state: dict[str, Any]) -> dict[str, float]:
        """Decay, and the stiffness of a quantised parameter."""
        numbers = {"keep": 1 - float(group["lr"]) * group["weight_decay"]}
        if "reference" in state:
            numbers |= self._stiffness_numbers(group, state, self._powers[id(group), int(state["step"]) - 1])
        return numbers

    def _stiffness_numbers(self, group: dict[str, Any], state: dict[str, Any], power: float) -> dict[str, float]:
        """S_ref, the bounds and the exponent."""
        return _field_numbers(state["reference"], group["damping"], group["clip"], power)


@lru_cache(maxsize=4096)
def _field_numbers(reference: float, damping: float, clip: float, power: float) -> dict[str, float]:
    return {
        "inverse_reference": 1 / reference,
        "log_reference": log2_bounded(reference),
        "low": damping,
        "high": clip,
        "log_low": log2_bounded(damping),
        "log_high": log2_bounded(clip),
        "power": power,
    }


def injected(rate: float, beta: float) -> float:
    """``(1 - beta) / beta / rate``: how much of a rounding error an average is given; nothing at rate 0."""
    return (1 - beta) / beta / rate if rate and beta else 0.0
