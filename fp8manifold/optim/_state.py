"""State of a parameter between steps: residual and moments, its stream of random bits, its rows, a wider scale."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._base.blocks import block_on
from fp8manifold._base.float_bits import working_dtype
from fp8manifold._base.reading import eager_only
from fp8manifold._encoded.storage import void_remainder
from fp8manifold._native._arrays import content, spacings
from fp8manifold._numerics.charts import Metric, chart_of
from fp8manifold._numerics.codec import decode_bits, decode_with_ulp
from fp8manifold._ranks import Share, local_of, share_of, spread
from fp8manifold.distributed import rows_of
from fp8manifold.formats import LAYOUTS, FloatFormat
from fp8manifold.manifolds import FP8Manifold
from fp8manifold.optim._slot import Slot, own_manifold, slot_of
from fp8manifold.optim._spec import BOUND_NAMES
from fp8manifold.optim._writeback import rule_of
from fp8manifold.random_bits import mixed_word, word_range
from fp8manifold.scaling import SQUARE_SIZE
from fp8manifold.tensor import FP8Tensor


def first_residual(parameter: Tensor) -> Tensor:
    """The remainder that the parameter has kept from rounding its float weights; zeros where it has none."""
    held: Any = local_of(parameter)
    start = torch.zeros(held.shape, dtype=torch.int8, device=held.device)
    if isinstance(held, FP8Tensor) and held.remainder is not None:
        start = held.remainder.clone()
        void_remainder(held)
    return spread(parameter, start)


def claim(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    """Let a tensor of codes find its state, which has to follow where somebody else changes its scale."""
    if isinstance(parameter, FP8Tensor):
        parameter.stepped_by = weakref.ref(optimizer)


def take_remainder(group: dict[str, Any], parameter: Tensor, state: dict[Tensor, Any]) -> None:
    """Move the remainder of the first rounding into the state, before anything can be saved without it."""
    held = local_of(parameter)
    if not rule_of(group).state or not isinstance(held, FP8Tensor) or held.remainder is None:
        return
    entry = state.setdefault(parameter, {})
    if "residual" in entry:  # a loaded state knows better
        void_remainder(held)
    else:
        entry["grid"] = torch.tensor(slot_of(group, parameter, entry).fields)
        entry["residual"] = first_residual(parameter)


@contextmanager
def gathered(slots: Sequence[Slot]) -> Iterator[None]:
    """Gather all rows of each slot that is stepped whole, and put them back after the step.

    Collectives follow the order of the slots and of their tensors.  Bounds are whole in every process.
    """
    homes = {slot: slot.tensors for slot in slots if slot.whole}
    for slot, home in homes.items():
        assert slot.share is not None
        slot.tensors = {n: own if n in BOUND_NAMES else slot.share.gathered(own) for n, own in home.items()}
    yield
    for slot, home in homes.items():
        assert slot.share is not None
        for name in home.keys() - {"gradient"} - BOUND_NAMES:
            home[name].copy_(slot.share.own(slot.tensors[name]))
        slot.tensors = home
    for slot in slots:
        if not slot.in_place:
            local_of(slot.parameter).copy_(slot.weight)


def described(fields: tuple[int, ...] | None) -> str:
    """Format and granularity in words, of the numbers of :attr:`Slot.fields`."""
    if fields is None:
        return "an ordinary parameter"
    exponent_bits, mantissa_bits, bias, layout, shares = fields
    squares = {SQUARE_SIZE**2: f"square of {SQUARE_SIZE} x {SQUARE_SIZE}"}
    shared = ({0: "tensor", 1: "channel"} | squares).get(shares, f"block of {shares}")
    return f"{FloatFormat(exponent_bits, mantissa_bits, bias, LAYOUTS[layout]).name}, one scale a {shared}"


STORED: Final = {"float32": None, "bfloat16": torch.bfloat16, "8bit": torch.uint8}
"""The dtype of moments; None is the one that is computed in."""


def make_state(slot: Slot) -> None:
    """Add what the step keeps and the state lacks."""
    spec, parameter, state = slot.spec, slot.parameter, slot.state
    if slot.fmt is not None and "grid" not in state:
        state["grid"] = torch.tensor(slot.fields)
    if all(map(state.__contains__, spec.keeps)):
        return
    held = local_of(parameter)
    for name in spec.stores:
        if name not in state:
            dtype = STORED[spec.moments] or slot.dtype
            state[name] = spread(parameter, torch.zeros(held.shape, dtype=dtype, device=held.device))
        if name in spec.bounds and spec.bounds[name] not in state:
            state[spec.bounds[name]] = _first_bounds(slot)
    if spec.residual_bits and "residual" not in state:
        state["residual"] = first_residual(parameter)


def _first_bounds(slot: Slot) -> Tensor:
    """One a block; of a sharded matrix with a row for each of its rows, of a sharded vector all in every process."""
    held, in_rows = local_of(slot.parameter), slot.parameter.dim() > 1 and slot.share is not None
    shape = (held.shape[0], held.shape[1:].numel() // slot.view.dims[-1]) if in_rows else slot.view.block_dims
    bounds = torch.zeros(shape, dtype=torch.float32, device=held.device)
    return spread(slot.parameter, bounds) if in_rows else bounds


def _values_of(slot: Slot) -> Tensor:
    if slot.storage == "codes":
        assert slot.fmt is not None
        return decode_bits(slot.weight, slot.fmt)
    x = slot.weight.to(working_dtype(slot.weight))
    return x if slot.scale is None else x / slot.scale


def stiffness_field(slot: Slot, metric: Metric) -> Tensor:
    """The field S of a metric over all weights, in value."""
    assert slot.fmt is not None
    assert slot.scale is not None
    if slot.storage == "codes" and metric == "ulp":
        if (native := spacings(slot.weight, slot.fmt, slot.scale)) is not None:
            return native
        stiffness = decode_with_ulp(slot.weight, slot.fmt)[1]
    else:
        stiffness = chart_of(slot.fmt, metric).stiffness(_values_of(slot))
    return stiffness * expanded(slot.scale, slot.weight.shape, slot.block_size)


def expanded(scale: Tensor, shape: torch.Size, block_size: int | None) -> Tensor:
    return scale if block_size is None else scale.repeat_interleave(block_size, dim=-1).view(shape)


_SEEDED, _FLOATS = 1, 2
_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_VALUES: Final = (0x5EED, 0, 0)
_GRADIENT: Final = (0x5EED, 1, 0)


def new_stream(
    parameter: Tensor,
    twin: int,
    state: dict[Tensor, Any],
    begun: int,
    *,
    draws: bool,
    alone: bool,
    values: Tensor | None = None,
) -> int:
    """A stream of 63 bits from what is the parameter's own, which no other parameter of the state has or had.

    Its own are its first values, and the seed of a one-byte tensor or of a grid's manifold, so that the two
    storages draw the same bits.  Those that share both are told apart by their order in the optimizer, or, without a
    seed and in an optimizer each, by their first gradients: these differ between machines in the last bits, so they
    enter nowhere else.

    Args:
        parameter: with its gradient.
        twin: how many before it share its seed, as :func:`twins` has it.
        state: the optimizer's, with the streams in use.
        begun: how many streams have been given: more than are in use where parameters or states were removed.
        draws: whether random bits are drawn for an ordinary parameter.
        alone: whether it is the optimizer's only parameter.
        values: the first values, where the parameter has others by now.
    """
    used = [entry["stream"] for entry in state.values() if "stream" in entry]
    removed = max(begun - len(used), 0)
    seed = _seed_of(parameter)
    first = parameter if values is None else values
    content = _content(first, parameter.grad if alone and not seed else None) if draws or seed is not None else ()
    words = (*_seed_words(parameter), *content)
    return next(stream for i in count(twin) if (stream := mixed_word(*words, removed, i)) not in used)


def twins(parameters: Iterable[Tensor]) -> dict[Tensor, int]:
    """For each parameter the number of earlier ones with its seed, or of ordinary ones with its shape."""
    seen: Counter[tuple[int, ...]] = Counter()
    numbers = {}
    for parameter in parameters:
        words = _seed_words(parameter)
        numbers[parameter] = seen[words]
        seen[words] += 1
    return numbers


def _seed_words(parameter: Tensor) -> tuple[int, ...]:
    seed = _seed_of(parameter)
    return (_FLOATS, *parameter.shape) if seed is None else (_SEEDED, seed)


def _seed_of(parameter: Tensor) -> int | None:
    if isinstance(held := local_of(parameter), FP8Tensor):
        return held.seed
    manifold = own_manifold(parameter)
    return int(manifold.seed_word) if isinstance(manifold, FP8Manifold) else None


def _content(first: Tensor, gradient: Tensor | None) -> tuple[int, ...]:
    """Words of the first values, and of the first gradient."""
    held = local_of(first)
    values = held.dequantize() if isinstance(held, FP8Tensor) else held.detach().as_subclass(Tensor)
    words = (_whole_word(first, values, _VALUES),)
    return words if gradient is None else (*words, _whole_word(first, local_of(gradient.detach()), _GRADIENT))


def _whole_word(parameter: Tensor, held: Tensor, key: tuple[int, int, int]) -> int:
    """:func:`content_word`, of what processes hold together: the sum of theirs."""
    share = share_of(parameter)
    if share is None:
        return content_word(held, key)
    word = content_word(held, key, share.offset)
    signed = torch.tensor([word - 2**64 if word >= 2**63 else word], device=held.device)
    return int(share.ranks.total(signed)) % 2**64


@eager_only
def content_word(x: Tensor, key: tuple[int, int, int], offset: int = 0) -> int:
    """``sum(bits_i r_i) mod 2^64`` over all elements, with ``r`` drawn by position: that of parts is their sum.

    Every NaN counts as the quiet one, for a GPU's arithmetic gives other bits than a CPU's.

    Args:
        x: float tensor of any shape; positions count in row-major order.
        key: of ``r``.
        offset: position of the first element.
    """
    if (native := content(x, key, offset)) is not None:
        return native
    flat = x.reshape(-1).resolve_neg()
    total = torch.zeros((), dtype=torch.int64, device=x.device)  # where x is: it is waited for once
    size = block_on(x.device)
    quiet = int(torch.tensor(torch.nan, dtype=flat.dtype).view(integer := _INTEGERS[flat.element_size()]))
    for start in range(0, flat.numel(), size):
        values = flat[start : start + size]
        part = values.view(integer).masked_fill(values.isnan(), quiet).to(torch.int64)
        words = word_range(offset + start, part.numel(), key, x.device).to(torch.int64)
        total += (part * words).sum()
    return int(total) % 2**64


@torch.no_grad()
def rows_of_state(state_dict: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's whole state as one of its sharded parameters: what their ``load_state_dict`` takes.

    What has a row for each of the parameter's is cut, as :func:`~fp8manifold.distributed.rows_of` does: moments with
    the magnitudes of their blocks, and residuals.  Counts, and what belongs to a parameter that is not sharded, stay as
    they are.

    Args:
        state_dict: of an optimizer of the same groups in one process, or gathered; the same in every process.
        optimizer: of this library or of torch's, over parameters after ``fully_shard``.

    Raises:
        ValueError: entries with other rows than the parameter's.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        >>> rows_of_state(optimizer.state_dict(), optimizer)["state"]
        {}
    """
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    state = dict(state_dict["state"])
    for index, parameter in zip(saved, everyone, strict=True):
        share = share_of(parameter)
        if share is not None and index in state:
            state[index] = {name: _entry(name, value, parameter, share) for name, value in state[index].items()}
    return state_dict | {"state": state}


def _entry(name: str, value: Any, parameter: Tensor, share: Share) -> Any:
    if not isinstance(value, Tensor):
        return value
    if name in BOUND_NAMES:
        in_rows = value.reshape(share.shape[0], -1) if len(share.shape) > 1 else None
    else:
        in_rows = value if value.shape == share.shape else None
    return value if in_rows is None else rows_of(in_rows, parameter)
