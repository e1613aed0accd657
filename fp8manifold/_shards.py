"""The rows of a tensor of codes that one of several processes holds, as FSDP2 asks for
them: one byte per weight.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from fp8manifold._encoded.dispatch import View, implements, takes_rows
from fp8manifold._encoded.operators import alias
from fp8manifold._encoded.stored_scale import ONE
from fp8manifold._ranks import Ranks, bytes_of
from fp8manifold.parameter import FP8Parameter
from fp8manifold.scaling import BLOCK_SIZE
from fp8manifold.tensor import FP8Tensor

_aten = torch.ops.aten


class FP8Shard(FP8Tensor):
    """Rows of an :class:`FP8Tensor`: codes, the scales of these rows (or the one of
    all), and all other attributes.

    Only this library's optimizers and ``load_state_dict`` write into it, as draws and
    scales are those of the whole.
    """

    is_share = True

    def check_writable(self) -> NoReturn:
        raise RuntimeError(
            "only the optimizers of fp8manifold.optim and load_state_dict write to a sharded "
            "FP8Tensor, whose random bits and scales are those of the whole tensor: set values and "
            "scales before fully_shard, or take storage='master'; for plain zeros use "
            "torch.zeros_like and not new_zeros"
        )

    def rescale_(self, scale: float | Tensor) -> NoReturn:
        self.check_writable()

    def adopt(self, other: FP8Tensor | View) -> None:
        """As :meth:`FP8Tensor.adopt`; the remainder stays in its memory, which may be
        part of a padded tensor's.
        """
        memory = self.remainder
        super().adopt(_rows_of(other) if isinstance(other, View) else other)
        if memory is not None and self.remainder is not None:
            self.remainder = memory.copy_(self.remainder)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The tensors to send: codes, and the scales of rows as bytes, which those of
        blocks are already.

        FSDP takes nothing but codes where the last processes have fewer rows: scales
        are gathered here then. A single process has all of them.
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
        return (codes,), (
            outer_size,
            ranks.gathered(_padded(kept, rows, _one_in(kept)))[: outer_size[0]],
        )

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: FP8Tensor | None = None,
    ) -> tuple[FP8Tensor, tuple[Tensor, ...]] | None:
        """The whole on the memory that has been filled; that memory is the same in
        every pass.
        """
        size, scale = metadata
        if scale is None:
            scale = outputs[1].view(self.kept_scale.dtype)[: size[0]]
        if out is None:
            counter = self.counter.clone()
            own = scale if len(outputs) > 1 else scale.clone()
            return FP8Parameter._wrap(
                outputs[0][: size[0]], own, counter, None, self._traits(param_dtype)
            ), ()
        # as FSDP does for codes: graphs that saved the parts for their backward pass
        # must see no new version
        with (
            _unsafe_preserve_version_counter(out.kept_scale),
            _unsafe_preserve_version_counter(out.counter),
        ):
            if len(outputs) == 1:
                out.kept_scale.copy_(scale)
            out.counter.copy_(self.counter)
        out.seed, out.by_operator = self.seed, self.by_operator
        out.draws, out.retraction = self.draws, self.retraction
        return None


torch.serialization.add_safe_globals([FP8Shard])


def _padded(part: Tensor, rows: int, value: float) -> Tensor:
    short = rows - part.shape[0]
    return (
        F.pad(part, [0, 0] * (part.dim() - 1) + [0, short], value=value)
        if short
        else part.contiguous()
    )


def _one_in(kept: Tensor) -> float:
    return ONE if kept.dtype == torch.uint8 else 1.0


def _in_rows(
    x: FP8Tensor, change: Callable[[Tensor, float], Tensor], counter: Tensor | None = None
) -> FP8Tensor:
    """The tensor with ``change`` of every part that has rows, called with the value for
    a new row.
    """
    squares = isinstance(x.block_size, tuple)
    if squares or (x.block_size and x.dim() == 1):
        each = "square of 128 x 128" if squares else f"block of {BLOCK_SIZE}"
        why = "share scales: take granularity='channel' or 'block'"
        raise RuntimeError(
            f"a tensor of shape {tuple(x.shape)} with a scale for each {each} can't be sharded, as "
            f"its rows " + (why if squares else "are single numbers: take granularity='tensor'")
        )
    scale = x.kept_scale
    if scale.dim():
        scale = change(scale, _one_in(scale))
    elif counter is not None:
        scale = scale.clone()
    remainder = None if x.remainder is None else change(x.remainder, 0)
    counter = x.counter if counter is None else counter
    return FP8Shard._wrap(change(x.codes, 0), scale, counter, remainder, x._traits())


def _rows_of(view: View) -> FP8Tensor:
    """The rows of a whole tensor that a view shows, on the same memory."""
    whole = view.base
    if not isinstance(whole, FP8Tensor) or not takes_rows(view.replay):
        raise RuntimeError(
            f"a view of shape {tuple(view.shape)} can't become rows of a sharded FP8Tensor, whose "
            f"scales are those of "
            "rows: shard along the first dimension, and leave shard_placement_fn out"
        )
    return _in_rows(whole, lambda part, _: view.replay(part))


@implements(_aten.slice.Tensor)
def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of rows, as FSDP2 cuts its padding off."""
    x = args[0]
    if not x.is_share:
        return NotImplemented
    defaults: tuple[Any, ...] = (0, None, None, 1)
    dim, start, end, step = args[1:] + defaults[len(args) - 1 :]
    if dim % max(x.dim(), 1) or step != 1:
        raise RuntimeError(
            f"an FP8Tensor of shape {tuple(x.shape)} can be sharded along its first dimension "
            f"only, not along {dim}: "
            "its scales are those of rows; leave shard_placement_fn out"
        )
    return _in_rows(x, lambda part, _: part[slice(start or 0, x.shape[0] if end is None else end)])


@implements(_aten.new_zeros.default)
def _new_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows like those that the tensor has, of zeros, at a scale of 1: what FSDP2 makes
    of a parameter.

    Only an optimizer writes into them; any other shape or dtype is a plain tensor.
    """
    x, size = args[:2]
    alike = (
        isinstance(x, FP8Tensor) and len(size) == x.dim() and tuple(size[1:]) == tuple(x.shape[1:])
    )
    if not alike or kwargs.get("dtype") not in (None, x.dtype):
        return NotImplemented
    rows, device = size[0], kwargs.get("device")
    fresh = x.counter.new_zeros((), device=device)
    return _in_rows(
        x, lambda part, value: part.new_full((rows, *part.shape[1:]), value, device=device), fresh
    )


@implements(_aten.as_strided.default, _aten.view.default)
def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor itself, if its geometry stays, or flat rows, by which FSDP2 recognises
    their memory.
    """
    x, size, *strides = args
    unmoved = (
        (x.stride(),),
        (x.stride(), 0),
        (x.stride(), None),
    )  # how as_strided is asked for what is there already
    stays = tuple(size) == tuple(x.shape) and (
        not strides or (tuple(strides[0]), *strides[1:]) in unmoved
    )
    if not isinstance(x, FP8Tensor) or not (stays or (x.is_share and tuple(size) == (-1,))):
        return NotImplemented
    return alias(_aten.detach.default, (x,), {})
