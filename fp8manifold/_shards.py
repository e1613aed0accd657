"""The rows of a tensor of codes that one of several processes holds, as FSDP2 asks for them: one byte a weight."""

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from fp8manifold._encoded.dispatch import implements
from fp8manifold._encoded.refusals import is_sharded_by_torch, is_staged, is_taken_whole
from fp8manifold._encoded.stored_scale import ONE
from fp8manifold._ranks import Ranks, bytes_of
from fp8manifold.parameter import FP8Parameter
from fp8manifold.scaling import BLOCK_SIZE
from fp8manifold.tensor import FP8Tensor

_aten = torch.ops.aten


class FP8Shard(FP8Tensor):
    """Rows of an :class:`FP8Tensor`: codes, the scales of these rows (or the one of all), and the rest of it as it is.

    It is read as any other.  Only an optimizer of this library writes into it, as draws and scales are the whole's.
    """

    is_share = True

    def check_writable(self) -> NoReturn:
        """Refuse what knows nothing of the other rows."""
        raise RuntimeError(
            "a sharded FP8Tensor is written by the optimizers of fp8manifold.optim, by load_state_dict and by "
            "distributed checkpoints only, as its random bits and scales are those of the whole: fill it, or change "
            "its scale, before fully_shard, or take storage='master'"
        )

    def rescale_(self, scale: float | Tensor) -> NoReturn:
        """Refused, as :meth:`check_writable` says."""
        self.check_writable()

    def adopt(self, other: FP8Tensor) -> None:
        """As any other does; what the first rounding left stays in its memory, which may be that of padding."""
        memory = self.remainder
        super().adopt(other)
        if memory is not None and self.remainder is not None:
            self.remainder = memory.copy_(self.remainder)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What is sent: the codes, and as bytes the scales of rows; of blocks they are bytes already.

        FSDP takes nothing but codes where the last processes have fewer rows: scales are gathered here then.  A single
        process has all of them.
        """
        ranks = Ranks(mesh.get_group())
        rows = -(-outer_size[0] // ranks.size)
        codes = _padded(self.codes, rows, 0)
        kept = self.kept_scale
        if not kept.dim() or ranks.size == 1:
            return (codes,), (outer_size, kept)
        if outer_size[0] % ranks.size == 0:
            *dims, last = kept.shape
            return (codes, bytes_of(kept).view(*dims, last * kept.itemsize)), (outer_size, None)
        return (codes,), (outer_size, ranks.gathered(_padded(kept, rows, _one_in(kept)))[: outer_size[0]])

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: FP8Tensor | None = None,
    ) -> tuple[FP8Tensor, tuple[Tensor, ...]] | None:
        """The whole on the memory that has been filled; that memory is the same in every pass."""
        size, scale = metadata
        if scale is None:
            scale = outputs[1].view(self.kept_scale.dtype)[: size[0]]
        if out is None:
            counter = self.counter.clone()
            own = scale if len(outputs) > 1 else scale.clone()
            return FP8Parameter._wrap(outputs[0][: size[0]], own, counter, None, self._traits(param_dtype)), ()
        # as FSDP fills the codes: to graphs that keep the parts for their backward pass these are what they were
        with _unsafe_preserve_version_counter(out.kept_scale), _unsafe_preserve_version_counter(out.counter):
            if len(outputs) == 1:
                out.kept_scale.copy_(scale)
            out.counter.copy_(self.counter)
        out.seed, out.by_operator, out.draws = self.seed, self.by_operator, self.draws
        return None


torch.serialization.add_safe_globals([FP8Shard])


def _padded(part: Tensor, rows: int, value: float) -> Tensor:
    short = rows - part.shape[0]
    return F.pad(part, [0, 0] * (part.dim() - 1) + [0, short], value=value) if short else part.contiguous()


def _one_in(kept: Tensor) -> float:
    """A scale of 1 as it is kept."""
    return ONE if kept.dtype == torch.uint8 else 1.0


def _is_by_rows(x: Any) -> bool:
    return isinstance(x, FP8Tensor) and (x.is_share or is_sharded_by_torch())


def _in_rows(
    x: FP8Tensor,
    change: Callable[[Tensor, float], Tensor],
    counter: Tensor | None = None,
    kind: type[FP8Tensor] = FP8Shard,
) -> FP8Tensor:
    """The tensor with ``change`` of every part that has rows; it is told what stands in a row that is new."""
    if isinstance(x.block_size, tuple):
        raise RuntimeError(
            f"a tensor of shape {tuple(x.shape)} with a scale for each square of 128 x 128 can't be sharded, as its "
            "rows share scales: take granularity='channel' or 'block'"
        )
    if x.block_size and x.dim() == 1:
        raise RuntimeError(
            f"a tensor of shape {tuple(x.shape)} with a scale for each block of {BLOCK_SIZE} can't be sharded, as its "
            "rows are single numbers: take granularity='tensor'"
        )
    _register_gathering()
    scale = x.kept_scale
    if scale.dim():
        scale = change(scale, _one_in(scale))
    elif counter is not None:
        scale = scale.clone()
    remainder = None if x.remainder is None else change(x.remainder, 0)
    counter = x.counter if counter is None else counter
    return kind._wrap(change(x.codes, 0), scale, counter, remainder, x._traits())


def rows_between(x: FP8Tensor, first: int, count: int) -> FP8Tensor:
    """Some rows of a whole tensor, in memory of their own."""
    rows = _in_rows(x, lambda part, _: part[first : first + count].clone(), x.counter.clone())
    if x.remainder is not None:
        rows.remainder = x.remainder[first : first + count].clone()
    return rows


@cache
def _register_gathering() -> None:
    """Once there are shards: only then has torch defined these operators."""
    functional = torch.ops._c10d_functional

    @implements(functional.all_gather_into_tensor.default)
    def _gather(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The whole of a tensor whose rows are gathered, as ``full_tensor`` and full state dicts have it.

        What the first rounding left is part of it where all processes hold it: if one did not, the others would wait.
        """
        x, *group = args

        def gathered(part: Tensor, _: float) -> Tensor:
            whole: Tensor = functional.wait_tensor(func(part.contiguous(), *group))
            return whole

        kept = x.counter.new_full((1,), x.remainder is not None)
        if not bool(functional.wait_tensor(functional.all_reduce(kept, "min", group[-1]))):
            x = x._wrap(x.codes, x.kept_scale, x.counter, None, x._traits())
        return _as_whole(_in_rows(x, gathered, x.counter.clone()))

    names = [name for name in ("wait_tensor", "_wrap_tensor_autograd") if hasattr(functional, name)]

    @implements(*(getattr(functional, name).default for name in names))
    def _wait(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0]


def _as_whole(x: FP8Tensor) -> FP8Tensor:
    """The tensor as any other, on the same parts."""
    return FP8Tensor._wrap(x.codes, x.kept_scale, x.counter, x.remainder, x._traits())


def _refuse_columns(x: Tensor, dim: int) -> None:
    if dim % max(x.dim(), 1):
        raise RuntimeError(
            f"an FP8Tensor of shape {tuple(x.shape)} can be sharded along its first dimension only, not along {dim}: "
            "its scales are those of rows; leave shard_placement_fn out"
        )


@implements(_aten.split.Tensor)
def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, length, *rest = args
    if not _is_by_rows(x):
        return NotImplemented
    _refuse_columns(x, kwargs.get("dim", rest[0] if rest else 0))

    def rows(start: int) -> FP8Tensor:
        return _in_rows(x, lambda part, _: part[start : start + length])

    return [rows(start) for start in range(0, max(x.shape[0], 1), length)]


@implements(_aten.slice.Tensor)
def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not _is_by_rows(x):
        return NotImplemented
    defaults: tuple[Any, ...] = (0, None, None, 1)
    dim, start, end, step = args[1:] + defaults[len(args) - 1 :]
    if dim % max(x.dim(), 1) and (start or 0) == 0 and (end is None or end >= x.shape[dim]) and step == 1:
        return x.with_parts(lambda part: part.detach())
    _refuse_columns(x, dim)
    end = x.shape[0] if end is None else end
    return _in_rows(x, lambda part, _: part[slice(start or 0, end)], kind=type(x))


@implements(_aten.new_zeros.default, _aten.new_empty.default)
def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of the same kind: of zeros, at a scale of 1."""
    x, size = args[:2]
    if isinstance(x, FP8Tensor) and is_staged():
        return x.with_parts(lambda part: torch.empty_like(part, device=kwargs.get("device")))
    if not _is_by_rows(x) or not (len(size) == x.dim() or size[0] == 0) or kwargs.get("dtype") not in (None, x.dtype):
        return NotImplemented
    rows, device = size[0], kwargs.get("device")
    fresh = x.counter.new_zeros((), device=device)
    return _in_rows(x, lambda part, value: part.new_full((rows, *part.shape[1:]), value, device=device), fresh)


@implements(_aten.as_strided.default, _aten.view.default)
def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor itself, where its geometry stays; flat too, where FSDP keeps it to know its memory again."""
    x, size = args[:2]
    if isinstance(x, FP8Tensor) and is_taken_whole():
        return _as_whole(x.with_parts(lambda part: part.detach()))
    if not _is_by_rows(x) or (tuple(size) not in ((-1,), tuple(x.shape))):
        return NotImplemented
    return x.with_parts(lambda part: part.detach())


@implements(_aten.constant_pad_nd.default)
def _pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, padding = args[:2]
    if not _is_by_rows(x) or any(padding[:-1]):
        return NotImplemented
    return _in_rows(x, lambda part, value: _padded(part, part.shape[0] + padding[-1], value))
