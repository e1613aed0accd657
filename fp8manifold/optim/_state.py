"""State of a parameter: where it lives, its residual and moments, its stream of random bits, its rows."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final

import geoopt
import torch
from torch import Tensor

from fp8manifold._encoded.storage import packed_length, packed_width, void_remainder
from fp8manifold._native._arrays import content, spacings
from fp8manifold._numerics.blocks import block_on
from fp8manifold._numerics.charts import Metric, chart_of
from fp8manifold._numerics.codec import decode_bits, decode_with_ulp
from fp8manifold._numerics.eager import eager_only
from fp8manifold._numerics.float_bits import working_dtype
from fp8manifold._numerics.known import known
from fp8manifold._ranks import ALONE, Ranks, Share, local_of, share_of, spread
from fp8manifold.distributed import rows_of
from fp8manifold.formats import LAYOUTS, FloatFormat
from fp8manifold.manifolds import FP8Manifold, StiffnessManifold
from fp8manifold.optim._slot import Slot, View, view_of
from fp8manifold.optim._spec import BOUND_NAMES, Spec, Storage
from fp8manifold.random_bits import mixed_word, word_range
from fp8manifold.tensor import FP8Tensor


def pack_residual(values: Tensor, bits: int, *, in_rows: bool = False) -> Tensor:
    """Signed values (int8) of 8 bits as they are; of 4 or 2 bits uint8, the first in a byte's lowest bits.

    They are packed flat, or each row in bytes of its own.
    """
    if bits == 8:
        return values
    flat = values.reshape(values.shape[0], values.shape[1:].numel()) if in_rows else values.reshape(-1)
    length, each = flat.shape[-1], 8 // bits
    padding = each * packed_length(length, bits) - length
    if padding:
        flat = torch.cat([flat, flat.new_zeros((*flat.shape[:-1], padding))], dim=-1)
    fields = flat.to(torch.int16) & ((1 << bits) - 1)
    packed = fields[..., 0::each]
    for place in range(1, each):
        packed = packed | (fields[..., place::each] << (bits * place))
    return packed.to(torch.uint8)


def unpack_residual(packed: Tensor, shape: torch.Size, bits: int) -> Tensor:
    """The way back, as int8, contiguous."""
    if bits == 8:
        return packed.view(shape)
    fields = [(packed << (8 - bits - place)).view(torch.int8) >> (8 - bits) for place in range(0, 8, bits)]
    length = shape.numel() if packed.dim() == 1 else shape[1:].numel()
    return torch.stack(fields, dim=-1).flatten(-2)[..., :length].reshape(shape).contiguous()


def first_residual(parameter: Tensor, bits: int) -> Tensor:
    """What the rounding of the float weights left, where the parameter has kept it; zeros elsewhere."""
    held: Any = local_of(parameter)
    start = torch.zeros(held.shape, dtype=torch.int8, device=held.device)
    if isinstance(held, FP8Tensor) and held.remainder is not None:
        start = held.remainder.clone()
        void_remainder(held)
    return spread(parameter, pack_residual(_coarser(start, bits), bits, in_rows=held is not parameter))


def _coarser(remainder: Tensor, bits: int) -> Tensor:
    """Parts of 1/256 of a step as parts of ``2^-bits``, half up."""
    if bits == 8:
        return remainder
    cut, end = 8 - bits, 1 << (bits - 1)
    return ((remainder.to(torch.int16) + (1 << (cut - 1))) >> cut).clamp_(-end, end - 1).to(torch.int8)


@contextmanager
def unpacked(slots: Sequence[Slot], state: dict[Tensor, Any]) -> Iterator[None]:
    """Hold them as int8 while the steps are taken."""
    packed = [(slot, local_of(state[slot.parameter]["residual"])) for slot in slots if slot.spec.rule.packs]
    for slot, kept in packed:
        rows = kept if slot.share is None else slot.share.gathered(kept)
        slot.tensors["residual"] = unpack_residual(rows, slot.tensors["weight"].shape, slot.spec.residual_bits)
    yield
    for slot, kept in packed:
        residual = slot.tensors["residual"] if slot.share is None else slot.share.own(slot.tensors["residual"])
        kept.copy_(pack_residual(residual, slot.spec.residual_bits, in_rows=kept.dim() > 1))


# ----------------------------------------------------------------------------------------------------------------- plan


def manifold_of(parameter: Tensor) -> geoopt.Manifold | None:
    """The manifold a parameter lives on, or None for an ordinary one."""
    return parameter.manifold if isinstance(parameter, geoopt.ManifoldTensor) else None


def own_manifold(parameter: Tensor) -> StiffnessManifold | None:
    """The parameter's manifold where it is one of this library's."""
    manifold = manifold_of(parameter)
    return manifold if isinstance(manifold, StiffnessManifold) else None


def is_quantized(parameter: Tensor) -> bool:
    """Whether it is stored in codes or lives on one of this library's manifolds."""
    return isinstance(local_of(parameter), FP8Tensor) or own_manifold(parameter) is not None


def stabilize(parameter: Tensor) -> None:
    """Project onto the manifold; codes are on their grid always."""
    if isinstance(parameter, FP8Tensor):
        return
    if (manifold := manifold_of(parameter)) is not None:
        parameter.copy_(manifold.projx(parameter))


STORED = {"float32": None, "bfloat16": torch.bfloat16, "8bit": torch.uint8}


@dataclass(slots=True)
class Grid:
    """What a step has to know of where a parameter lives; ``fmt`` is None for an ordinary one."""

    storage: Storage
    weight: Tensor
    fmt: FloatFormat | None = None
    scale: Tensor | None = None
    block_size: int | None = None
    metric: Metric = "ulp"
    rounding: str = "nearest"
    draws: str = "independent"
    retraction: str = "exponential"
    #: whether ``weight`` is the parameter's own memory, and not a contiguous copy of it
    in_place: bool = True
    #: where ``weight`` is a part of what several processes hold
    share: Share | None = None

    @property
    def ranks(self) -> Ranks:
        """The processes that hold a part each."""
        return ALONE if self.share is None else self.share.ranks

    @property
    def fields(self) -> tuple[int, ...]:
        """Format and granularity as numbers: what a state has to have been made for."""
        assert self.fmt is not None
        scales = 0 if self.scale is None else self.scale.numel()
        if self.share is not None and self.scale is not None and self.scale.dim():
            scales = self.share.shape[0]
        per_channel = int(scales > 1)
        layout = LAYOUTS.index(self.fmt.layout)
        fields = (self.fmt.exponent_bits, self.fmt.mantissa_bits, self.fmt.bias, layout)
        return (*fields, self.block_size or per_channel)

    @property
    def rounds(self) -> bool:
        """Whether what is stored are numbers of the format."""
        return self.storage in ("codes", "grid")

    @property
    def scale_is_power_of_two(self) -> bool:
        """Whether dividing by the scale is exact, as it is by those of codes."""
        if self.storage in ("codes", "plain"):
            return True
        assert self.scale is not None
        return bool(known(self.scale, _are_powers_of_two))

    def view(self, *, blocks: bool) -> View:
        """The view it is stepped in; of no rows that of one."""
        shape, scale_shape = tuple(self.weight.shape), None if self.scale is None else tuple(self.scale.shape)
        if self.share is not None and not shape[0]:
            shape, scale_shape = (1, *shape[1:]), (1, *scale_shape[1:]) if scale_shape else scale_shape
        return view_of(shape, scale_shape, self.block_size, blocks)

    @property
    def whole(self) -> "Grid":
        """All rows, gathered in memory of their own; one scale serves them all."""
        assert self.share is not None
        return replace(self, weight=self.share.gathered(self.weight))


def _are_powers_of_two(scale: Tensor) -> bool:
    return bool((torch.frexp(scale).mantissa == 0.5).all())


def described(fields: tuple[int, ...] | None) -> str:
    """What :attr:`Grid.fields` stand for."""
    if fields is None:
        return "an ordinary parameter"
    exponent_bits, mantissa_bits, bias, layout, shares = fields
    shared = {0: "tensor", 1: "channel"}.get(shares, f"block of {shares}")
    return f"{FloatFormat(exponent_bits, mantissa_bits, bias, LAYOUTS[layout]).name}, one scale a {shared}"


def grid_of(parameter: Tensor) -> Grid:
    """Where a parameter lives, or what this process holds of it, without making a manifold for it."""
    if (share := share_of(parameter)) is not None:
        parameter = share.local
    if isinstance(parameter, FP8Tensor):
        return Grid(
            "codes",
            parameter.codes,
            parameter.format,
            parameter.scale,
            parameter.block_size,
            rounding=parameter.rounding,
            draws=parameter.draws,
            share=share,
        )
    weight = parameter.detach().as_subclass(Tensor)
    in_place = weight.is_contiguous() and not weight.is_neg()
    weight = weight.contiguous().resolve_neg()
    manifold = own_manifold(parameter)
    if manifold is None:
        return Grid("plain", weight, in_place=in_place, share=share)
    storage: Storage = "grid" if isinstance(manifold, FP8Manifold) else "free"
    return Grid(
        storage,
        weight,
        manifold.format,
        manifold.scale.to(working_dtype(weight)),
        metric=manifold.metric,
        rounding=getattr(manifold, "rounding", "nearest"),
        draws=getattr(manifold, "draws", "independent"),
        retraction=getattr(manifold, "retraction", "exponential"),
        in_place=in_place,
    )


def make_state(spec: Spec, view: View, parameter: Tensor, state: dict[str, Any]) -> None:
    """Add what the spec keeps and the state lacks."""
    if all(map(state.__contains__, spec.keeps)) and not spec.rule.packs:
        return
    held = local_of(parameter)
    dtype = STORED[spec.moments] or working_dtype(parameter)
    for name in spec.stores:
        if name not in state:
            state[name] = spread(parameter, torch.zeros(held.shape, dtype=dtype, device=held.device))
        if name in spec.bounds and spec.bounds[name] not in state:
            state[spec.bounds[name]] = _first_bounds(parameter, view)
    if spec.residual_bits and "residual" not in state:
        state["residual"] = first_residual(parameter, spec.residual_bits)


def _first_bounds(parameter: Tensor, view: View) -> Tensor:
    """One a block; of a shared matrix with a row for each of its rows, of a shared vector all in every process."""
    held, in_rows = local_of(parameter), parameter.dim() > 1 and share_of(parameter) is not None
    shape = (held.shape[0], held.shape[1:].numel() // view.dims[-1]) if in_rows else view.block_dims
    bounds = torch.zeros(shape, dtype=torch.float32, device=held.device)
    return spread(parameter, bounds) if in_rows else bounds


def _values_of(grid: Grid) -> Tensor:
    """The weights in units of their scale."""
    if grid.storage == "codes":
        assert grid.fmt is not None
        return decode_bits(grid.weight, grid.fmt)
    x = grid.weight.to(working_dtype(grid.weight))
    return x if grid.scale is None else x / grid.scale


def stiffness_field(grid: Grid, metric: Metric) -> Tensor:
    """The field S of a metric over all weights, in value."""
    assert grid.fmt is not None
    assert grid.scale is not None
    if grid.storage == "codes" and metric == "ulp":
        if (native := spacings(grid.weight, grid.fmt, grid.scale)) is not None:
            return native
        stiffness = decode_with_ulp(grid.weight, grid.fmt)[1]
    else:
        stiffness = chart_of(grid.fmt, metric).stiffness(_values_of(grid))
    return stiffness * expanded(grid.scale, grid.weight.shape, grid.block_size)


def expanded(scale: Tensor, shape: torch.Size, block_size: int | None) -> Tensor:
    """A scale that broadcasts against the weights."""
    return scale if block_size is None else scale.repeat_interleave(block_size, dim=-1).view(shape)


# -------------------------------------------------------------------------------------------------------------- streams


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
    """A stream from what is the parameter's own, 63 bits, which no other parameter of the state has or had.

    What is its own are its first values, and the seed of a one-byte tensor or of a grid's manifold, so that the two
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
    """The seed of what is rounded to a grid."""
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

    Args:
        x: float tensor of any shape; positions count in row-major order.
        key: of ``r``.
        offset: position of the first element.
    """
    if (native := content(x, key, offset)) is not None:
        return native
    flat = x.reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=x.device)  # where x is: it is waited for once
    size = block_on(x.device)
    bits = flat.view(_INTEGERS[flat.element_size()])
    for start in range(0, bits.numel(), size):
        part = bits[start : start + size].to(torch.int64)
        words = word_range(offset + start, part.numel(), key, x.device).to(torch.int64)
        total += (part * words).sum()
    return int(total) % 2**64


# ----------------------------------------------------------------------------------------------------------------- rows


@torch.no_grad()
def rows_of_state(state_dict: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's whole state as one of its sharded parameters: what their ``load_state_dict`` takes.

    What has a row for each of the parameter's is cut, as :func:`~fp8manifold.distributed.rows_of` does: averages with
    the magnitudes of their blocks, and residuals.  Counts, and what belongs to a parameter that is not sharded, stay as
    they are.

    Args:
        state_dict: of an optimizer of the same groups in one process, or gathered; the same in every process.
        optimizer: of this library or of torch's, over parameters after ``fully_shard``.

    Raises:
        ValueError: entries with other rows than the parameter's, or a residual of another size.

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
    elif name == "residual" and value.dtype == torch.uint8:
        in_rows = _residual_in_rows(value, share.shape)
    else:
        in_rows = value if value.shape == share.shape else None
    return value if in_rows is None else rows_of(in_rows, parameter)


def _residual_in_rows(packed: Tensor, shape: torch.Size) -> Tensor:
    if packed.dim() > 1:
        return packed
    bits = packed_width(packed.shape, shape)
    if bits is None:
        raise ValueError(f"a residual of {packed.numel()} bytes is none of a parameter of shape {tuple(shape)}")
    return pack_residual(unpack_residual(packed, shape, bits), bits, in_rows=True)
