"""Dispatch of torch's operators over tensors of codes."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final, NoReturn, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fp8manifold._base.reading import eager_only
from fp8manifold._encoded.storage import is_traced
from fp8manifold.formats import FloatFormat, as_format

FLOAT8: Final[dict[FloatFormat, torch.dtype]] = {
    as_format("E4M3"): torch.float8_e4m3fn,
    as_format("E5M2"): torch.float8_e5m2,
    as_format("E4M3FNUZ"): torch.float8_e4m3fnuz,
    as_format("E5M2FNUZ"): torch.float8_e5m2fnuz,
}
"""The formats whose codes torch reads as numbers, and the dtypes in which it does."""


def as_codes(tensor: Tensor) -> Tensor:
    """The codes of a tensor of one of the float8 dtypes; any other stays as it is."""
    return tensor.view(torch.uint8) if tensor.dtype in FLOAT8.values() else tensor


def float8_format(dtype: torch.dtype) -> FloatFormat | None:
    """The format whose codes a dtype has, or None."""
    return next((fmt for fmt, known in FLOAT8.items() if known == dtype), None)


def recalled(codes: Tensor, gradient: Tensor) -> Tensor:
    """The same codes, made to depend on a gradient, so that a graph decodes them no
    earlier and stores no values.
    """
    if not gradient.numel():
        return codes
    first = gradient[(0,) * gradient.dim()]
    return codes | (first.isnan().to(torch.uint8) >> 1)


def is_backward() -> bool:
    """True if autograd is in a backward pass, in this thread."""
    running: Any = torch._C._current_graph_task_id()
    return bool(running != -1)


TRACED_AS: Final = 6
"""The version of what operators are traced to: with another one, code that a compiler
has on disk is not used.
"""
DTYPES: Final = (torch.float32, torch.bfloat16)  #: The dtypes that an encoded tensor may appear as.
_aten = torch.ops.aten
Handler = Callable[..., Any]
_HANDLERS: Final[dict[Any, Handler]] = {}
_ARITHMETIC: Final = frozenset(
    getattr(getattr(_aten, start + name), overload)
    for start in ("", "_foreach_")
    for name in (
        *("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv"),
        *("add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_"),
    )
    for overload in getattr(_aten, start + name).overloads()
)
"""Operators whose results depend on the values of all arguments, as those of an average do."""
_FACTORIES: Final = {
    getattr(_aten, name).default
    for name in (
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
    )
}


def _without_memory(name: str) -> Any:
    """A method that raises RuntimeError."""
    return lambda self, **options: refuse_memory(name)


class EncodedTensor(torch.Tensor):
    """A tensor whose values are stored in another form; every operator on it goes
    through :func:`_run`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    is_share = False  #: True if it holds one process's rows of a sharded tensor.

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, hidden from a compiler once it is loaded, which would trace
        this code as a user's.
        """
        if "torch._dynamo" in sys.modules:
            EncodedTensor.__torch_dispatch__ = classmethod(_hidden)  # type: ignore[assignment]
        check_not_sent(func)
        return _run(func, args, kwargs or {})

    def dequantize(self) -> Tensor:
        """The values as a plain tensor."""
        raise NotImplementedError

    def _in_float32(self) -> Tensor:
        """The values in float32, not rounded to the apparent dtype."""
        raise NotImplementedError

    def _dequantized_view(self, replay: "Replay") -> Tensor:
        """The values of a view of this tensor as a plain tensor."""
        viewed: Tensor = replay(self.dequantize())
        return viewed

    def write(self, values: Tensor, operator: str = "write") -> None:
        """Encode values of the tensor's shape in place of the present ones;
        ``operator`` names what writes.
        """
        raise NotImplementedError

    def check_writable(self) -> None:
        """Raise RuntimeError if operators may not write values into this tensor."""

    def note_read(self) -> None:
        """Note that arithmetic has read the values."""

    def note_change(self, operator: str) -> None:
        """Note that arithmetic has changed the values, by an operator of that name."""

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """The parts that a compiler sees, by name, and everything else that makes the
        tensor.
        """
        raise NotImplementedError

    @property
    def data(self) -> Tensor:
        """The tensor without its history, sharing its codes; assigning writes into
        them, and warns where it rounds.
        """
        twin: Any = self.detach()
        twin.writes_before = self._writes()
        return twin  # type: ignore[no-any-return]

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.dtype not in DTYPES:
            raise TypeError(
                f"the dtype of an {type(self).__name__} is float32 or bfloat16, not {values.dtype}"
            )
        refuse_part_of_buffer(values)
        if values.shape != self.shape:
            shapes = f"of shape {tuple(self.shape)} can't take data of shape {tuple(values.shape)}"
            raise RuntimeError(
                f"an {type(self).__name__} {shapes}: resize layers before quantize_model"
            )
        before: int | None = getattr(
            values, "writes_before", None
        )  # set for x.data += y, and for a changed clone
        rounded = isinstance(values, EncodedTensor) and before not in (None, values._writes())
        with torch.no_grad():
            self.copy_(values)
        if rounded or not torch.equal(plain(values), self.dequantize()):
            self._warn_of_rounding()

    def _writes(self) -> int:
        """The number of writes into it."""
        return 0

    def _warn_of_rounding(self) -> None:
        """Warn that values assigned to ``data`` were rounded."""

    def share_memory_(self) -> Self:
        """Move every part into memory that processes share."""
        for name in self.__tensor_flatten__()[0]:
            getattr(self, name).share_memory_()
        return self

    def is_shared(self) -> bool:
        """True if processes share the parts."""
        return all(bool(getattr(self, name).is_shared()) for name in self.__tensor_flatten__()[0])

    def untyped_storage(self) -> Any:
        """A storage with a size and no memory: there are no floats."""
        return NoStorage(super().untyped_storage())

    storage, data_ptr = _without_memory("storage"), _without_memory("address")
    __dlpack__ = __dlpack_device__ = _without_memory("memory")

    def tolist(self) -> Any:
        """The values as nested lists."""
        return self.dequantize().tolist()

    def __format__(self, spec: str) -> str:
        """A single value as the number that it is, anything else as its representation."""
        if self.dim() or is_traced(value := self.dequantize()):
            return object.__format__(self, spec)
        return format(value.item(), spec)

    def numpy(self, *, force: bool = False) -> Any:
        """The values as an array."""
        return self.dequantize().numpy(force=force)


@dataclass(frozen=True)
class Replay:
    """An operator that makes a view, with its arguments: comparable, so that compiled
    code recognises a view.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    part: int | None = None

    def __call__(self, x: Tensor) -> Any:
        """The view of ``x``, or the chosen one if the operator makes several."""
        made = self.func(x, *self.args, **self.kwargs)
        return made if self.part is None else made[self.part]

    def __reduce__(self) -> tuple[Any, ...]:
        """A replay by the operator's name, as it can't be pickled itself."""
        return _replay_named, (str(self.func), self.args, self.kwargs, self.part)


def _replay_named(name: str, *rest: Any) -> Replay:
    return Replay(reduce(getattr, name.split("."), torch.ops), *rest)


_ROWS: Final = (_aten.select.int, _aten.slice.Tensor, _aten.split.Tensor, _aten.unbind.int)


def takes_rows(replay: Replay) -> bool:
    """True if a view takes some indices of the first dimension, and all entries under
    these.
    """
    place = 1 if replay.func is _aten.split.Tensor else 0
    dimension = replay.args[place] if len(replay.args) > place else replay.kwargs.get("dim", 0)
    return replay.func in _ROWS and dimension == 0


class View(EncodedTensor):
    """A view of an encoded tensor, as the operator that makes it."""

    base: Any
    replay: Replay
    is_turned = (
        False  #: True for transposed matrices, whose values are decoded into contiguous memory.
    )

    @staticmethod
    def __new__(
        cls, base: EncodedTensor, replay: Replay, size: Any, stride: Any, offset: Any = 0
    ) -> "View":
        """``replay(base)``, of a size, stride and offset that are known."""
        view: View = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, storage_offset=offset, dtype=base.dtype, device=base.device
        )
        view.base, view.replay = base, replay
        guard_memory(view)
        return view

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["base"], (self.replay, self.storage_offset())

    def _stable_hash_for_caching(self) -> str:
        """A key that compiled code on disk is found by."""
        return f"{self.base._stable_hash_for_caching()} {self.replay} {self.shape} {self.requires_grad}"

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Any], rest: tuple[Any, ...], size: Any, stride: Any
    ) -> "View":
        return cls(parts["base"], rest[0], size, stride, rest[1])

    def dequantize(self) -> Tensor:
        values: Tensor = self.base._dequantized_view(self.replay)
        return values.contiguous() if self.is_turned else values

    def _dequantized_view(self, replay: Replay) -> Tensor:
        """The values of a view of this view; of a turned one that takes some matrices
        only these are decoded.
        """
        if self.is_turned and takes_rows(replay):
            turned: Tensor = self.replay(self.base._dequantized_view(replay))
            return turned.contiguous()
        return super()._dequantized_view(replay)

    def _in_float32(self) -> Tensor:
        viewed: Tensor = self.replay(self.base._in_float32())
        return viewed

    def check_writable(self) -> None:
        self.base.check_writable()

    def note_read(self) -> None:
        self.base.note_read()

    def note_change(self, operator: str) -> None:
        self.base.note_change(operator)

    def write(self, values: Tensor, operator: str = "write") -> None:
        """Write into the base, where all other values are on the grid already and stay."""
        whole = self.base._in_float32()
        self.replay(whole).copy_(values)
        self.base.write(whole, operator)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """The values: a copy views nothing."""
        return self.dequantize()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The values, copied."""
        return self.dequantize().clone().__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"View({self.dequantize()!r})"


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator over any mixture of plain and encoded arguments."""
    if handler := _HANDLERS.get(func):
        result = handler(func, args, kwargs)
        if result is not NotImplemented:
            return result
    if func.is_view and isinstance(args[0], EncodedTensor):
        return _view(func, args, kwargs)
    if func in _FACTORIES:
        x = args[0]
        return func(
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device),
            *args[1:],
            **kwargs,
        )
    if torch.Tag.inplace_view in func.tags:
        raise RuntimeError(
            f"{func}: the shape of an FP8Tensor can't be changed in place; use {func} without the _"
        )
    written = _written(func, args, kwargs)
    if any(isinstance(x, EncodedTensor) for x in written):
        return _run_writing(func, args, kwargs, written)
    if func in _ARITHMETIC:
        for x in pytree.tree_leaves((args, kwargs)):
            if isinstance(x, EncodedTensor):
                x.note_read()
    if is_backward():
        args = _decoded_after_gradient(args)
    return func(*plain(args), **plain(kwargs))


def _decoded_after_gradient(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments in a backward pass, encoded ones in a graph decoded no earlier than a
    plain one is computed.
    """
    gradient = next(
        (x for x in args if isinstance(x, Tensor) and not isinstance(x, EncodedTensor)), None
    )
    if gradient is None:
        return args
    return tuple([_after(gradient, x) if isinstance(x, EncodedTensor) else x for x in args])


def _after(gradient: Tensor, x: Any) -> Tensor:
    if isinstance(x, View):
        if not is_traced(root_of(x).codes):
            return x.dequantize()
        viewed: Tensor = x.replay(_after(gradient, x.base))
        return viewed
    if is_traced(x.codes):
        x = x.with_parts(
            lambda part: recalled(part, gradient) if part.dtype == torch.uint8 else part
        )
    decoded: Tensor = x.dequantize()
    return decoded


def root_of(x: Any) -> Any:
    """The tensor under a view, or under a view of a view."""
    return root_of(x.base) if isinstance(x, View) else x


@eager_only
def _hidden(
    cls: type[EncodedTensor], func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """An operator, run where a compiler does not see it."""
    check_not_sent(func)
    return _run(func, args, kwargs or {})


def plain(tree: Any) -> Any:
    """A nest of arguments with every encoded tensor decoded."""
    return pytree.tree_map_only(EncodedTensor, lambda x: x.dequantize(), tree)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that the operator's schema says it writes to."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    written = [
        given.get(a.name)
        for a in func._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    ]
    return [x for x in pytree.tree_leaves(written) if isinstance(x, Tensor)]


def _run_writing(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
) -> Any:
    """Run on float32 copies of what is written (of the apparent dtype for a fused
    optimizer), and encode these.
    """
    widen = not func._schema.name.startswith("aten::_fused")
    stands_for = {id(x): x for x in written}
    for x in written:
        if isinstance(x, EncodedTensor):
            x.check_writable()
            stands_for[id(x)] = x._in_float32() if widen else x.dequantize()

    def argument(x: Tensor) -> Tensor:
        if id(x) in stands_for:
            return stands_for[id(x)]
        value = x.dequantize() if isinstance(x, EncodedTensor) else x
        return value.float() if widen and value.dtype == torch.bfloat16 else value

    out = func(
        *pytree.tree_map_only(Tensor, argument, args),
        **pytree.tree_map_only(Tensor, argument, kwargs),
    )
    for x in written:
        if isinstance(x, EncodedTensor):
            x.write(stands_for[id(x)], name_of(func))
            if func in _ARITHMETIC:
                x.note_change(name_of(func))
    owners = {id(stands_for[id(x)]): x for x in written}
    return pytree.tree_map_only(Tensor, lambda y: owners.get(id(y), y), out)


def name_of(func: Any) -> str:
    """The name of an operator, over one tensor or many."""
    name: str = func._schema.name
    return name.removeprefix("aten::").removeprefix("_foreach_")


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view, or one for each part, of the first argument."""
    base, replay = args[0], Replay(func, args[1:], kwargs)
    shapes = replay(torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta"))
    if isinstance(shapes, Tensor):
        return (
            view_of(base, replay, shapes)
            if shapes.dtype == base.dtype
            else func(*plain(args), **kwargs)
        )
    return [view_of(base, replace(replay, part=i), shape) for i, shape in enumerate(shapes)]


def view_of(base: EncodedTensor, replay: Replay, like: Tensor) -> View:
    return View(base, replay, like.shape, like.stride(), like.storage_offset())


def implements(*overloads: Any) -> Callable[[Handler], Handler]:
    """Register what an operator does, called as ``handler(func, args, kwargs)``."""

    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(overloads, handler))
        return handler

    return register


_COLLECTIVES: Final = (
    "c10d",
    "_c10d_functional",
    "c10d_functional",
    "_c10d_functional_autograd",
    "symm_mem",
)


def check_not_sent(func: Any) -> None:
    """Raise RuntimeError for any collective except a broadcast, which sends every part."""
    if func.namespace in _COLLECTIVES and func._schema.name != "c10d::broadcast_":
        refuse_collective(func)


def refuse_collective(func: Any) -> NoReturn:
    """Raise RuntimeError: it would send floats, or nothing."""
    raise RuntimeError(
        f"{func} can't take an FP8Tensor, which stores codes and scales: use "
        f"torch.distributed.broadcast, which sends "
        "all its parts, or send the module's state_dict(), or the values of dequantize()"
    )


def refuse_part_of_buffer(values: Tensor) -> None:
    """Raise RuntimeError for part of a buffer of floats, as ``ZeroRedundancyOptimizer``
    sends it: it has no codes.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()) or hasattr(
        values, "is_share"
    ):
        return
    if values._base is not None or values.untyped_storage().nbytes() > values.nbytes:
        raise RuntimeError(
            "an FP8Tensor can't become part of a buffer of floats, because it stores codes: give "
            "parameters_as_bucket_view=False, or use copy_() where only the values are meant"
        )


def guard_memory(x: Tensor) -> None:
    """Make C++ code that asks for the values' address raise, which would write to no
    memory at all.
    """
    torch._C._set_throw_on_mutable_data_ptr(x)


class NoStorage:
    """The storage of a tensor without memory: its size, which libraries compare, and
    its identity, for compilers.
    """

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def size(self) -> int:
        """Bytes that the values would take as floats."""
        return int(self._storage.size())

    nbytes = size

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") or name.startswith("_share"):
            refuse_memory("storage")
        return getattr(self._storage, name)


def refuse_memory(name: str) -> NoReturn:
    """Raise NotImplementedError, a RuntimeError: there is no memory full of floats."""
    # an address is also what Accelerate's plugin tells parameters apart by
    to_shard = "; to shard it, call fully_shard in place of Accelerate's FSDP2 plugin"
    raise NotImplementedError(
        f"an FP8Tensor has no {name} of floats, because it stores codes and scales: to save it, "
        f"use its module's "
        "state_dict(), whose entries are plain tensors; for plain floats call dequantize()"
        f"{to_shard if name == 'address' else ''}"
    )
