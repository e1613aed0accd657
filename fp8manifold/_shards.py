"""The rows of a tensor of codes that one of several processes has, one byte per weight.

Of n rows over p processes, process r has ``ceil(n / p)`` from row ``r * ceil(n / p)``
on, and the last ones fewer (``Share`` in ``_ranks.py``). ``fully_shard`` (FSDP2) knows
no codes: it cuts a parameter by torch's operators, and asks its class for what to send.
So a weight becomes rows, and is whole again for a pass:

1. FSDP2 splits the weight, makes memory for padded rows (``_new_zeros``), copies one
   part of the split into it (``FP8Shard.adopt``), and cuts the padding off
   (``_slice``). Each result is an ``FP8Shard``: codes of rows, and their scales.
2. Before a pass ``fsdp_pre_all_gather`` gives the bytes to send.
3. ``fsdp_post_all_gather`` wraps the bytes of all processes as the whole weight, which
   the layer uses. FSDP2 frees their memory after the pass.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

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
    """Rows of an :class:`FP8Tensor`: codes, their scales, and all other attributes.

    Only this library's optimizers and ``load_state_dict`` write into it, as draws and
    scales are those of the whole.
    """

    is_shard = True

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
        """Take the parts of another tensor, or of its view, as :meth:`FP8Tensor.adopt`.

        The remainder stays in its memory, which may be part of a padded tensor's.
        """
        memory = self.remainder
        super().adopt(_rows_of_view(other) if isinstance(other, View) else other)
        if memory is not None and self.remainder is not None:
            self.remainder = memory.copy_(self.remainder)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return the tensors to send, and what the other end needs beside them.

        Codes are sent, and the scales of rows as bytes, which those of blocks are
        already. Where the last processes have fewer rows, FSDP takes codes only: the
        scales of all rows are gathered here. A single process has all of them.
        """
        ranks = Ranks(mesh.get_group())
        whole_rows = outer_size[0]
        rows = -(-whole_rows // ranks.size)
        codes = _padded(self.codes, rows, 0)
        kept_scale = self.kept_scale
        if not kept_scale.dim() or ranks.size == 1:
            return (codes,), _Whole(outer_size, kept_scale)
        if whole_rows % ranks.size == 0:
            *dims, columns = kept_scale.shape
            scale_bytes = bytes_of(kept_scale).view(*dims, columns * kept_scale.itemsize)
            return (codes, scale_bytes), _Whole(outer_size, None)
        padded_scale = _padded(kept_scale, rows, _stored_one(kept_scale))
        return (codes,), _Whole(outer_size, ranks.gather(padded_scale)[:whole_rows])

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: FP8Tensor | None = None,
    ) -> tuple[FP8Tensor, tuple[Tensor, ...]] | None:
        """Wrap the memory that has been filled as the whole weight.

        That memory is the same in every pass: with ``out``, the wrapper of an earlier
        pass, only what FSDP does not fill is written.
        """
        rows = metadata.size[0]
        kept_scale = metadata.kept_scale
        scale_was_sent = kept_scale is None
        if scale_was_sent:
            kept_scale = outputs[1].view(self.kept_scale.dtype)[:rows]
        if out is None:
            whole = FP8Parameter._wrap(
                outputs[0][:rows],
                kept_scale if scale_was_sent else kept_scale.clone(),
                self.counter.clone(),
                None,
                self._traits(param_dtype),
            )
            return whole, ()
        # as FSDP does for codes: graphs that saved the parts for their backward pass
        # must see no new version
        with (
            _unsafe_preserve_version_counter(out.kept_scale),
            _unsafe_preserve_version_counter(out.counter),
        ):
            if not scale_was_sent:
                out.kept_scale.copy_(kept_scale)
            out.counter.copy_(self.counter)
        out.seed = self.seed
        out.by_operator = self.by_operator
        out.draws = self.draws
        out.retraction = self.retraction
        return None


class _Whole(NamedTuple):
    """What the whole weight is, beside the tensors that FSDP sends."""

    size: torch.Size
    #: None if it is sent with the codes
    kept_scale: Tensor | None


torch.serialization.add_safe_globals([FP8Shard])


def _padded(part: Tensor, rows: int, value: float) -> Tensor:
    """Return a part padded to ``rows`` rows of one value, contiguous."""
    missing = rows - part.shape[0]
    if not missing:
        return part.contiguous()
    # pairs of paddings, the last dimension first
    padding = [0, 0] * (part.dim() - 1) + [0, missing]
    return F.pad(part, padding, value=value)


def _stored_one(kept_scale: Tensor) -> float:
    """Return a scale of 1 as it is stored."""
    return ONE if kept_scale.dtype == torch.uint8 else 1.0


def _shard_of(
    x: FP8Tensor, change: Callable[[Tensor, float], Tensor], counter: Tensor | None = None
) -> FP8Tensor:
    """Return rows of a tensor.

    Args:
        x: whole, or rows.
        change: makes the rows of a part, given the part and the value for a new row. It
            is called for codes and remainder, and for a scale that has rows.
        counter: a new one, for rows that share nothing with ``x``.
    """
    _check_rows_have_scales(x)
    kept_scale = x.kept_scale
    if kept_scale.dim():
        kept_scale = change(kept_scale, _stored_one(kept_scale))
    elif counter is not None:
        kept_scale = kept_scale.clone()
    remainder = None if x.remainder is None else change(x.remainder, 0)
    return FP8Shard._wrap(
        change(x.codes, 0),
        kept_scale,
        x.counter if counter is None else counter,
        remainder,
        x._traits(),
    )


def _check_rows_have_scales(x: FP8Tensor) -> None:
    """Raise RuntimeError if a scale is for weights of several rows."""
    if isinstance(x.block_size, tuple):
        raise RuntimeError(
            f"a tensor of shape {tuple(x.shape)} with a scale for each square of 128 x 128 can't "
            "be sharded, since its rows share scales: take granularity='channel' or 'block'"
        )
    if x.block_size and x.dim() == 1:
        raise RuntimeError(
            f"a tensor of shape {tuple(x.shape)} with a scale for each block of {BLOCK_SIZE} can't "
            "be sharded, since its rows are single numbers: take granularity='tensor'"
        )


def _rows_of_view(view: View) -> FP8Tensor:
    """Return the rows of a whole tensor that a view shows, on the same memory."""
    whole = view.base
    if not isinstance(whole, FP8Tensor) or not takes_rows(view.replay):
        raise RuntimeError(
            f"a view of shape {tuple(view.shape)} can't become rows of a sharded FP8Tensor, which "
            "has scales by row: shard along the first dimension, and leave shard_placement_fn out"
        )
    return _shard_of(whole, lambda part, _: view.replay(part))


@implements(_aten.slice.Tensor)
def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return rows of rows, as FSDP2 cuts its padding off."""
    x = args[0]
    if not x.is_shard:
        return NotImplemented
    defaults: tuple[Any, ...] = (0, None, None, 1)
    dim, start, end, step = args[1:] + defaults[len(args) - 1 :]
    if dim % max(x.dim(), 1) or step != 1:
        raise RuntimeError(
            f"an FP8Tensor of shape {tuple(x.shape)} has scales by row, so it can be sharded along "
            f"its first dimension only, not along {dim}: leave shard_placement_fn out"
        )
    rows = slice(start or 0, x.shape[0] if end is None else end)
    return _shard_of(x, lambda part, _: part[rows])


@implements(_aten.new_zeros.default)
def _new_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return rows of zeros like those of the tensor, at a scale of 1.

    FSDP2 makes them of a parameter and copies its rows into them. After that only an
    optimizer or ``load_state_dict`` writes into them. Of another shape or dtype the
    result is a plain tensor.
    """
    x, size = args[:2]
    if not isinstance(x, FP8Tensor):
        return NotImplemented
    has_rows_like_x = len(size) == x.dim() and tuple(size[1:]) == tuple(x.shape[1:])
    if not has_rows_like_x or kwargs.get("dtype") not in (None, x.dtype):
        return NotImplemented
    rows = size[0]
    device = kwargs.get("device")

    def new_rows(part: Tensor, value: float) -> Tensor:
        return part.new_full((rows, *part.shape[1:]), value, device=device)

    return _shard_of(x, new_rows, counter=x.counter.new_zeros((), device=device))


@implements(_aten.as_strided.default, _aten.view.default)
def _same_geometry(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the tensor itself, if its geometry stays.

    FSDP2 also asks for rows as a flat tensor, by which it recognises their memory.
    """
    x, size, *geometry = args
    if not isinstance(x, FP8Tensor):
        return NotImplemented
    is_flat_shard = x.is_shard and tuple(size) == (-1,)
    if not is_flat_shard and not _has_geometry(x, size, geometry):
        return NotImplemented
    return alias(_aten.detach.default, (x,), {})


def _has_geometry(x: FP8Tensor, size: Any, geometry: list[Any]) -> bool:
    """Return True if a tensor has a size, and strides and offset if they are given."""
    if tuple(size) != tuple(x.shape):
        return False
    if not geometry:
        return True
    strides, *offset = geometry
    return tuple(strides) == x.stride() and offset in ([], [0], [None])
