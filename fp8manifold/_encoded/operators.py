"""Operators that work on codes and scales themselves, in place of decoded values.

``dispatch.py`` asks the handlers here first. One that returns NotImplemented leaves its
operator to the ordinary way: decode, run, encode what was written.

- detach, clone, to: another tensor of codes;
- copy_: an exact copy from a tensor of codes, otherwise one rounding at a scale that
  suits the new values;
- zero_, normal_, ...: one rounding at a fresh scale;
- broadcast: every part is sent;
- empty_like of a meta tensor: codes, for ``Module.to_empty``;
- embedding: only the rows that are looked up are decoded.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._encoded import dispatch
from fp8manifold._encoded.scaled import Arithmetic, lend, may_lend, note_gradient
from fp8manifold._encoded.storage import is_traced
from fp8manifold._encoded.stored_scale import refit_scale_


def checked_remainder(remainder: Tensor | None, codes: Tensor) -> Tensor | None:
    """Return the remainder of a saved tensor; raise ValueError if it does not fit."""
    if remainder is None:
        return None
    if remainder.dtype != torch.int8 or remainder.shape != codes.shape:
        raise ValueError(
            f"remainder is {remainder.dtype} of shape {tuple(remainder.shape)}: it must be "
            f"torch.int8 of shape {tuple(codes.shape)}"
        )
    return remainder


_aten = torch.ops.aten
_FILLS: Final = frozenset(
    dispatch.overloads_of(
        "fill_",
        "zero_",
        "normal_",
        "uniform_",
        "log_normal_",
        "exponential_",
        "cauchy_",
        "geometric_",
        "random_",
        "bernoulli_",
    )
)
"""Operators whose result does not depend on the values that they replace."""


def _stores_codes(x: Any) -> bool:
    # A view has none: it reads those of its base.
    return isinstance(x, dispatch.EncodedTensor) and not isinstance(x, dispatch.View)


@dispatch.implements(_aten.detach.default, _aten.alias.default)
def alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the tensor without its history, on the same parts."""
    x = args[0]
    if isinstance(x, dispatch.View):
        return dispatch.view_of(x.base, x.replay, x)
    # in eager mode the twin has the very parts, which count the writes of both
    twin = x.with_parts(func if is_traced(x.codes) else lambda part: part)
    twin.lent_from = x.lent_from
    note_gradient(x)
    twin.arithmetic = x.arithmetic
    twin.is_detached = True
    return twin


@dispatch.implements(_aten.clone.default)
def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not _stores_codes(x):
        return NotImplemented
    twin = x.with_parts(Tensor.clone)
    # The optimizer steps the weight, and not its copy.
    twin.stepped_by = None
    twin.arithmetic = Arithmetic()
    twin.is_detached = True
    if hasattr(x, "writes_before"):
        twin.writes_before = twin._write_count()
    return twin


@dispatch.implements(_aten._to_copy.default)
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy to a device or apparent dtype; to any other dtype as a plain tensor."""
    x, dtype = args[0], kwargs.get("dtype")
    if dtype in dispatch.DTYPES and kwargs.get("device") in (None, x.device) and may_lend(x):
        return lend(x, dtype)
    if x.is_shard and dtype not in (None, *dispatch.DTYPES):
        raise TypeError(f"the dtype of a sharded FP8Tensor is float32 or bfloat16, not {dtype}")
    if not _stores_codes(x) or dtype not in (None, *dispatch.DTYPES):
        return NotImplemented
    options_of_parts = {
        name: value
        for name, value in kwargs.items()
        if name in ("device", "non_blocking", "pin_memory")
    }
    twin = x.with_parts(lambda part: func(part, **options_of_parts), dtype)
    twin.is_detached = True
    # A weight that moves, as by Module.to, is no copy: nobody averages it
    if not x.requires_grad:
        twin.stepped_by = None
        twin.arithmetic = Arithmetic()
    return twin


@dispatch.implements(_aten.copy_.default)
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy another FP8Tensor exactly; round anything else, at a scale that suits it."""
    x, source = args[0], args[1]
    if _stores_codes(x) and _stores_codes(source):
        x.adopt(source)
        return x
    # FSDP2 copies one part of a split weight, a view, into memory for rows
    if _stores_codes(x) and x.is_shard and isinstance(source, dispatch.View):
        x.adopt(source)
        return x
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    # DDP copies like this, after sync, values that are there already
    if non_blocking and _stores_codes(x) and not is_traced(x.codes) and _has_values_of(x, source):
        return x
    copied = _replace(func, x, lambda values: values.copy_(dispatch.plain(source)), fresh=False)
    arithmetic = root_arithmetic(x)
    if arithmetic is not None and arithmetic.is_read:
        x.note_change("copy_")
    return copied


def root_arithmetic(x: Any) -> Arithmetic | None:
    """Return what arithmetic has done to the copy that ``x`` is, or views; or None."""
    arithmetic: Arithmetic | None = getattr(dispatch.root_of(x), "arithmetic", None)
    return arithmetic


def _has_values_of(x: Any, source: Any) -> bool:
    """Return True if two tensors have the same values, to the sign of a zero."""
    new = source.dequantize() if isinstance(source, dispatch.EncodedTensor) else source
    if new.shape != x.shape or new.device != x.device:
        return False
    present = x.dequantize().float()
    is_same = (present == new) & (present.signbit() == new.signbit())
    is_nan = present.isnan() & new.isnan()
    return bool((is_same | is_nan).all())


@dispatch.implements(*_FILLS)
def _fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fill a tensor at a fresh scale, which owes nothing to the values before."""

    def fill(values: Tensor) -> None:
        func(values, *dispatch.plain(args[1:]), **dispatch.plain(kwargs))

    return _replace(func, args[0], fill, fresh=True)


def _replace(func: Any, x: Any, put: Callable[[Tensor], Any], *, fresh: bool) -> Any:
    """Replace all values of a tensor, also through a view of all of them.

    Return NotImplemented for a view of a part of them, which leaves the scale alone.

    Args:
        func: the operator that replaces.
        x: a tensor of codes or a view of one; for any other NotImplemented is returned.
        put: writes the new values into a float32 tensor, of the shape of ``x``.
        fresh: the new scale does not depend on the present one.
    """
    if not isinstance(x, dispatch.EncodedTensor):
        return NotImplemented
    root: Any = x
    replays: list[dispatch.Replay] = []
    while isinstance(root, dispatch.View):
        replays.append(root.replay)
        root = root.base
    if x.numel() != root.numel() or is_traced(root.codes):
        return NotImplemented
    root.check_writable()
    values = root._in_float32()
    viewed = values
    for replay in reversed(replays):
        viewed = replay(viewed)
    put(viewed)
    refit_scale_(root, values, fresh=fresh)
    root.write(values, dispatch.name_of(func))
    return x


def _broadcast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Broadcast every part of a whole tensor, but not format, seed and rounding."""
    tensors, options = args[0], args[1:]
    (x,) = tensors
    # DDP sends a single parameter as a flat view
    if isinstance(x, dispatch.View) and x.numel() == x.base.numel():
        x = x.base
    if not _stores_codes(x):
        dispatch.refuse_collective(func)
    for part in (x.kept_scale, x.counter):
        _, work = func([part], *options, **kwargs)
        work.wait()
    _, work = func([x.codes], *options, **kwargs)
    x._changed()
    return tensors, work


if torch.distributed.is_available():
    dispatch.implements(torch.ops.c10d.broadcast_.default)(_broadcast)


@dispatch.implements(_aten.empty_like.default)
def _empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return memory for a meta tensor, as ``Module.to_empty`` asks for it."""
    x = args[0]
    if not _stores_codes(x) or not x.is_meta or kwargs.get("dtype") not in (None, *dispatch.DTYPES):
        return NotImplemented
    device = kwargs.get("device")
    zeros = x.with_parts(lambda part: torch.zeros_like(part, device=device), kwargs.get("dtype"))
    # zero is a valid code, and no valid scale
    zeros.set_scale_(1.0)
    return zeros


@dispatch.implements(_aten.embedding.default)
def _embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Look up rows, decoding only these."""
    x, indices = args[:2]
    if not _stores_codes(x) or is_traced(x.codes):
        return NotImplemented
    flat_indices = indices.reshape(-1)
    rows = x.decoded_rows(lambda part: part.index_select(0, flat_indices))
    return rows.view(*indices.shape, x.shape[1])
