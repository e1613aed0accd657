"""Operators that are implemented for tensors of codes, not by decoding them."""

from collections.abc import Callable
from functools import reduce
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._encoded import dispatch
from fp8manifold._encoded.scaled import Arithmetic, is_lent_here, lent, note_gradient
from fp8manifold._encoded.storage import is_traced
from fp8manifold._encoded.stored_scale import refit_scale_


def checked_remainder(left: Tensor | None, codes: Tensor) -> Tensor | None:
    """The remainder of a saved tensor, or None."""
    if left is not None and (left.dtype != torch.int8 or left.shape != codes.shape):
        raise ValueError(
            f"remainder is {left.dtype} of shape {tuple(left.shape)}: it must be torch.int8 of "
            f"{tuple(codes.shape)}"
        )
    return left


_aten = torch.ops.aten
_FILLS: Final = {
    getattr(getattr(_aten, name), overload)
    for name in (
        *(
            "normal_",
            "uniform_",
            "log_normal_",
            "exponential_",
            "cauchy_",
            "geometric_",
            "random_",
            "bernoulli_",
        ),
        *("fill_", "zero_"),
    )
    for overload in getattr(_aten, name).overloads()
}
"""Operators whose result does not depend on the values that they replace."""


def _is_whole(x: Any) -> bool:
    return isinstance(x, dispatch.EncodedTensor) and not isinstance(x, dispatch.View)


@dispatch.implements(_aten.detach.default, _aten.alias.default)
def alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor without its history."""
    x = args[0]
    if isinstance(x, dispatch.View):
        return dispatch.view_of(x.base, x.replay, x)
    twin = x.with_parts(
        func if is_traced(x.codes) else lambda part: part
    )  # the parts count their writes themselves
    twin.lent_from = x.lent_from
    note_gradient(x)
    twin.arithmetic, twin.is_detached = x.arithmetic, True
    return twin


@dispatch.implements(_aten.clone.default)
def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not _is_whole(x):
        return NotImplemented
    twin = x.with_parts(Tensor.clone)
    twin.arithmetic, twin.is_detached = Arithmetic(), True
    if hasattr(x, "writes_before"):
        twin.writes_before = twin._writes()
    return twin


@dispatch.implements(_aten._to_copy.default)
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A copy on another device or with another apparent dtype; a plain tensor for any
    other dtype.
    """
    x, dtype = args[0], kwargs.get("dtype")
    if dtype in dispatch.DTYPES and kwargs.get("device") in (None, x.device) and is_lent_here(x):
        return lent(x, dtype)
    if x.is_share and dtype not in (None, *dispatch.DTYPES):
        raise TypeError(f"the dtype of a sharded FP8Tensor is float32 or bfloat16, not {dtype}")
    if not _is_whole(x) or dtype not in (None, *dispatch.DTYPES):
        return NotImplemented
    places = {
        name: value
        for name, value in kwargs.items()
        if name in ("device", "non_blocking", "pin_memory")
    }
    twin = x.with_parts(lambda part: func(part, **places), dtype)
    twin.is_detached = True
    if not x.requires_grad:  # else a weight that moves, as of Module.to
        twin.arithmetic = Arithmetic()
    return twin


@dispatch.implements(_aten.copy_.default)
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy another FP8Tensor exactly; round anything else, at a scale that suits it."""
    x, source = args[0], args[1]
    if _is_whole(x) and _is_whole(source):
        x.adopt(source)
        return x
    if _is_whole(x) and x.is_share and isinstance(source, dispatch.View):
        x.adopt(source)
        return x
    not_waiting = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    if not_waiting and _is_whole(x) and not is_traced(x.codes) and _is_there(x, source):
        return x
    copied = _replace(func, x, lambda values: values.copy_(dispatch.plain(source)), fresh=False)
    done = root_arithmetic(x)
    if done is not None and done.is_read:
        x.note_change("copy_")
    return copied


def root_arithmetic(x: Any) -> Arithmetic | None:
    """What arithmetic has done to the copy that ``x`` is, or views; None for no copy."""
    done: Arithmetic | None = getattr(dispatch.root_of(x), "arithmetic", None)
    return done


def _is_there(x: Any, source: Any) -> bool:
    """True if the tensor has these values already, to the sign of a zero, as when DDP
    copies after a ``sync``.
    """
    values = source.dequantize() if isinstance(source, dispatch.EncodedTensor) else source
    if values.shape != x.shape or values.device != x.device:
        return False
    own = x.dequantize().float()
    return bool(
        (
            (own == values) & (own.signbit() == values.signbit()) | (own.isnan() & values.isnan())
        ).all()
    )


@dispatch.implements(*_FILLS)
def _fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fill a tensor at a fresh scale, which owes nothing to the values before."""
    return _replace(
        func,
        args[0],
        lambda values: func(values, *dispatch.plain(args[1:]), **dispatch.plain(kwargs)),
        fresh=True,
    )


def _replace(func: Any, x: Any, put: Callable[[Tensor], Any], *, fresh: bool) -> Any:
    """Replace all values of a tensor, also through a view of all of them;
    NotImplemented for a part of them.
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
    put(reduce(lambda viewed, replay: replay(viewed), reversed(replays), values))
    refit_scale_(root, values, fresh=fresh)
    root.write(values, dispatch.name_of(func))
    return x


def _broadcast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Broadcast every part of a whole tensor; format, seed and rounding are not sent."""
    (x,), rest = args[0], args[1:]
    if (
        isinstance(x, dispatch.View) and x.numel() == x.base.numel()
    ):  # flat, as DDP starts with a single parameter
        x = x.base
    if not _is_whole(x):
        dispatch.refuse_collective(func)
    for part in (x.kept_scale, x.counter):
        func([part], *rest, **kwargs)[1].wait()
    _, work = func([x.codes], *rest, **kwargs)
    x._changed()
    return args[0], work


if torch.distributed.is_available():
    dispatch.implements(torch.ops.c10d.broadcast_.default)(_broadcast)


@dispatch.implements(_aten.empty_like.default)
def _empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Memory for a meta tensor (``Module.to_empty``); for any other a plain tensor."""
    x = args[0]
    if not _is_whole(x) or not x.is_meta or kwargs.get("dtype") not in (None, *dispatch.DTYPES):
        return NotImplemented
    made = x.with_parts(
        lambda part: torch.zeros_like(part, device=kwargs.get("device")), kwargs.get("dtype")
    )
    made.set_scale_(
        1.0
    )  # zeros at a valid scale: a scale without a value could not be told from another
    return made


@dispatch.implements(_aten.embedding.default)
def _embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Look up rows, decoding only these."""
    x, rows = args[:2]
    if not _is_whole(x) or is_traced(x.codes):
        return NotImplemented
    return x.decoded_rows(lambda part: part.index_select(0, rows.reshape(-1))).view(
        *rows.shape, x.shape[1]
    )
