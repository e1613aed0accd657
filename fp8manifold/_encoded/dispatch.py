"""Dispatch of torch's operators over tensors of codes.

Torch calls ``EncodedTensor.__torch_dispatch__`` for every operator that has an encoded
argument, and ``_run_operator`` takes the first way that fits:

1. copy_, embedding, detach, ...: a handler that ``implements`` has registered;
2. a view, as ``w[0]`` or ``w.t()``: a ``View``, which replays the operator when read;
3. a factory, as ``zeros_like(w)``: a plain tensor;
4. an operator that writes, as ``w.add_(g)``: ``_run_writing`` decodes w to float32,
   adds g to that copy, and has ``w.write`` round the sum to codes, in place;
5. any other, as ``w + g``: on the decoded values; the result is a plain tensor.

Handlers are in ``operators.py`` and ``_shards.py``; ``write`` is in ``tensor.py``.
Operators that send a tensor, or change its shape in place, are refused.
"""

import sys
from collections.abc import Callable, Iterator
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
    """Return the codes of a tensor of a float8 dtype, and any other tensor as it is."""
    return tensor.view(torch.uint8) if tensor.dtype in FLOAT8.values() else tensor


def float8_format(dtype: torch.dtype) -> FloatFormat | None:
    """Return the format whose codes a dtype has, or None."""
    for fmt, float8 in FLOAT8.items():
        if float8 == dtype:
            return fmt
    return None


def codes_after(gradient: Tensor, codes: Tensor) -> Tensor:
    """Return the codes as a result that depends on a gradient.

    A graph then decodes them no earlier than in its backward pass, and stores no values
    for that pass.
    """
    if not gradient.numel():
        return codes
    entry = gradient[(0,) * gradient.dim()]
    # a bool shifted by one is 0, which no compiler removes
    zero = entry.isnan().to(torch.uint8) >> 1
    return codes | zero


def is_backward() -> bool:
    """Return True if autograd is in a backward pass, in this thread."""
    graph_task: Any = torch._C._current_graph_task_id()
    return bool(graph_task != -1)


_aten = torch.ops.aten


def overloads_of(*names: str) -> Iterator[Any]:
    """Yield every overload of torch's operators of these names."""
    for name in names:
        packet = getattr(_aten, name)
        for overload in packet.overloads():
            yield getattr(packet, overload)


# One more whenever what operators are traced to changes.
TRACED_AS: Final = 6
"""The version of what operators are traced to.

With another version, code that a compiler has on disk is not used.
"""

# States have a dtype by its index here: append, and never reorder.
DTYPES: Final = (torch.float32, torch.bfloat16)
"""The dtypes that an encoded tensor may appear as."""

Handler = Callable[..., Any]
_HANDLERS: Final[dict[Any, Handler]] = {}

_ARITHMETIC_NAMES: Final = ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv")
_ARITHMETIC: Final = frozenset(
    [
        *overloads_of(*_ARITHMETIC_NAMES),
        *overloads_of(*(f"{name}_" for name in _ARITHMETIC_NAMES)),
        *overloads_of(*(f"_foreach_{name}" for name in _ARITHMETIC_NAMES)),
        *overloads_of(*(f"_foreach_{name}_" for name in _ARITHMETIC_NAMES)),
    ]
)
"""Operators whose results depend on the values of all arguments, as an average does."""

_FACTORIES: Final = frozenset(
    {
        _aten.zeros_like.default,
        _aten.ones_like.default,
        _aten.full_like.default,
        _aten.empty_like.default,
        _aten.rand_like.default,
        _aten.randn_like.default,
        _aten.new_zeros.default,
        _aten.new_ones.default,
        _aten.new_full.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)
"""Operators that read the shape and dtype of their first argument, and no values."""


def _refusing_method(name: str) -> Any:
    """Return a method that raises RuntimeError."""
    return lambda self, **options: refuse_memory(name)


class EncodedTensor(torch.Tensor):
    """A tensor whose values are stored in another form.

    Every operator on it goes through :func:`_run_operator`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    #: True if it holds one process's rows of a sharded tensor.
    is_shard = False

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator.

        Once a compiler is loaded, this code is hidden from it: it would be traced as a
        user's.
        """
        if "torch._dynamo" in sys.modules:
            EncodedTensor.__torch_dispatch__ = classmethod(_hidden_dispatch)  # type: ignore[assignment]
        check_not_sent(func)
        return _run_operator(func, args, kwargs or {})

    def dequantize(self) -> Tensor:
        """Return the values as a plain tensor."""
        raise NotImplementedError

    def _in_float32(self) -> Tensor:
        """Return the values in float32, not rounded to the apparent dtype."""
        raise NotImplementedError

    def _dequantized_view(self, replay: "Replay") -> Tensor:
        """Return the values of a view of this tensor as a plain tensor."""
        viewed: Tensor = replay(self.dequantize())
        return viewed

    def write(self, values: Tensor, operator: str = "write") -> None:
        """Encode values of the tensor's shape in place of the present ones.

        Args:
            values: in float32, or in the apparent dtype.
            operator: the name of what writes.
        """
        raise NotImplementedError

    def check_writable(self) -> None:
        """Raise RuntimeError if operators may not write values into this tensor."""

    def note_read(self) -> None:
        """Note that arithmetic has read the values."""

    def note_change(self, operator: str) -> None:
        """Note that arithmetic has changed the values, by an operator of that name."""

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """Return the names of parts that a compiler sees, and all other attributes."""
        raise NotImplementedError

    @property
    def data(self) -> Tensor:
        """The tensor without its history, which shares its codes.

        Assigning to it writes into the codes, and warns where values are rounded.
        """
        twin: Any = self.detach()
        twin.writes_before = self._write_count()
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
        # ``x.data += y`` assigns a tensor of codes that the sum was rounded into
        was_rounded = isinstance(values, EncodedTensor) and values._has_been_written()
        with torch.no_grad():
            self.copy_(values)
        if was_rounded or not torch.equal(plain(values), self.dequantize()):
            self._warn_of_rounding()

    def _write_count(self) -> int:
        """Return the number of writes into the tensor."""
        return 0

    def _has_been_written(self) -> bool:
        """Return True if a detached tensor, or a clone of one, was written to since."""
        writes: int | None = getattr(self, "writes_before", None)
        return writes is not None and writes != self._write_count()

    def _warn_of_rounding(self) -> None:
        """Warn that values assigned to ``data`` were rounded."""

    def share_memory_(self) -> Self:
        """Move every part into memory that processes share."""
        names, _ = self.__tensor_flatten__()
        for name in names:
            getattr(self, name).share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return True if processes share the parts."""
        names, _ = self.__tensor_flatten__()
        return all(bool(getattr(self, name).is_shared()) for name in names)

    def untyped_storage(self) -> Any:
        """Return a storage with a size and no memory: there are no floats."""
        return NoStorage(super().untyped_storage())

    storage = _refusing_method("storage")
    data_ptr = _refusing_method("address")
    __dlpack__ = _refusing_method("memory")
    __dlpack_device__ = _refusing_method("memory")

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.dequantize().tolist()

    def __format__(self, spec: str) -> str:
        """Return a single value as a number, anything else as its representation."""
        if self.dim():
            return object.__format__(self, spec)
        value = self.dequantize()
        if is_traced(value):
            return object.__format__(self, spec)
        return format(value.item(), spec)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array."""
        return self.dequantize().numpy(force=force)


@dataclass(frozen=True)
class Replay:
    """An operator that makes a view, with its arguments.

    Replays are compared, so that compiled code recognises a view.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: which of the views, for an operator that makes several
    part: int | None = None

    def __call__(self, x: Tensor) -> Any:
        """Return the view of ``x``, or the chosen one if the operator makes several."""
        views = self.func(x, *self.args, **self.kwargs)
        return views if self.part is None else views[self.part]

    def __reduce__(self) -> tuple[Any, ...]:
        """Name the operator, which can't be pickled itself."""
        return _replay_named, (str(self.func), self.args, self.kwargs, self.part)


def _replay_named(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], part: int | None
) -> Replay:
    func = reduce(getattr, name.split("."), torch.ops)
    return Replay(func, args, kwargs, part)


_OPERATORS_OF_ROWS: Final = (
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.unbind.int,
)


def takes_rows(replay: Replay) -> bool:
    """Return True if a view takes all entries of some indices of dimension 0."""
    # among the arguments after the tensor, where split has its size first
    place = 1 if replay.func is _aten.split.Tensor else 0
    is_positional = len(replay.args) > place
    dimension = replay.args[place] if is_positional else replay.kwargs.get("dim", 0)
    return replay.func in _OPERATORS_OF_ROWS and dimension == 0


class View(EncodedTensor):
    """A view of an encoded tensor, as the operator that makes it."""

    base: Any
    replay: Replay
    #: True for matrices that a ``Turned`` module (``nn/_carried.py``) transposes. Their
    #: values are decoded into contiguous memory.
    is_turned = False

    @staticmethod
    def __new__(
        cls, base: EncodedTensor, replay: Replay, size: Any, stride: Any, offset: Any = 0
    ) -> "View":
        """Make ``replay(base)``, of a size, stride and offset that are known."""
        view: View = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, storage_offset=offset, dtype=base.dtype, device=base.device
        )
        view.base = base
        view.replay = replay
        guard_memory(view)
        return view

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["base"], (self.replay, self.storage_offset())

    def element_size(self) -> int:
        """Return the bytes of a weight's code."""
        return int(self.base.element_size())

    @property
    def itemsize(self) -> int:  # type: ignore[override]  # a field of torch's stubs
        """The bytes of a weight's code."""
        return self.element_size()

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # the same
        """The bytes of the codes that are viewed."""
        return self.numel() * self.element_size()

    def _stable_hash_for_caching(self) -> str:
        """Return a key that compiled code on disk is found by."""
        key = self.base._stable_hash_for_caching()
        return f"{key} {self.replay} {self.shape} {self.requires_grad}"

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Any], rest: tuple[Any, ...], size: Any, stride: Any
    ) -> "View":
        replay, offset = rest
        return cls(parts["base"], replay, size, stride, offset)

    def dequantize(self) -> Tensor:
        values: Tensor = self.base._dequantized_view(self.replay)
        return values.contiguous() if self.is_turned else values

    def _dequantized_view(self, replay: Replay) -> Tensor:
        """Return the values of a view of this view.

        Where transposed matrices are stacked, and the view takes some, only these are
        decoded.
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
        """Write into the base, whose other values are on the grid and stay."""
        base_values = self.base._in_float32()
        self.replay(base_values).copy_(values)
        self.base.write(base_values, operator)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return the values: a copy views nothing."""
        return self.dequantize()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a copy of the values."""
        return self.dequantize().clone().__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"View({self.dequantize()!r})"


def _run_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator over any mixture of plain and encoded arguments."""
    handler = _HANDLERS.get(func)
    if handler is not None:
        result = handler(func, args, kwargs)
        if result is not NotImplemented:
            return result
    if func.is_view and isinstance(args[0], EncodedTensor):
        return _run_view(func, args, kwargs)
    if func in _FACTORIES:
        return _run_factory(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags:
        raise RuntimeError(
            f"{func}: the shape of an FP8Tensor can't be changed in place; use {func} without the _"
        )
    targets = _targets(func, args, kwargs)
    if any(isinstance(target, EncodedTensor) for target in targets):
        return _run_writing(func, args, kwargs, targets)
    return _run_decoded(func, args, kwargs)


@eager_only
def _hidden_dispatch(
    cls: type[EncodedTensor], func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """Run an operator where a compiler does not see it."""
    check_not_sent(func)
    return _run_operator(func, args, kwargs or {})


def _run_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a view of the first argument, or a list of views, as the operator does.

    A view under another dtype is of the decoded values.
    """
    base, replay = args[0], Replay(func, args[1:], kwargs)
    # the operator on memory without values tells the shape of each view
    empty = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    layouts = replay(empty)
    if not isinstance(layouts, Tensor):
        return [
            view_of(base, replace(replay, part=part), layout) for part, layout in enumerate(layouts)
        ]
    if layouts.dtype != base.dtype:
        return func(*plain(args), **kwargs)
    return view_of(base, replay, layouts)


def view_of(base: EncodedTensor, replay: Replay, layout: Tensor) -> View:
    """Return ``replay(base)``, of the shape, strides and offset of ``layout``."""
    return View(base, replay, layout.shape, layout.stride(), layout.storage_offset())


def _run_factory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a new plain tensor in the shape and dtype of the first argument."""
    x = args[0]
    empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return func(empty, *args[1:], **kwargs)


def _targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that the operator's schema says it writes to."""
    parameters = func._schema.arguments
    names = [parameter.name for parameter in parameters]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    targets = []
    for parameter in parameters:
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            targets.append(arguments.get(parameter.name))
    return [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, Tensor)]


def _run_writing(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], targets: list[Tensor]
) -> Any:
    """Run an operator on decoded copies of its targets, and encode these afterwards.

    The copies are in float32. A fused optimizer, which wants one dtype for all, gets
    them in the apparent dtype.
    """
    in_float32 = not func._schema.name.startswith("aten::_fused")
    encoded = [target for target in targets if isinstance(target, EncodedTensor)]
    stand_ins: dict[int, Tensor] = {id(target): target for target in targets}
    for target in encoded:
        target.check_writable()
        stand_ins[id(target)] = target._in_float32() if in_float32 else target.dequantize()

    def operand(x: Tensor) -> Tensor:
        if id(x) in stand_ins:
            return stand_ins[id(x)]
        values = x.dequantize() if isinstance(x, EncodedTensor) else x
        if in_float32 and values.dtype == torch.bfloat16:
            return values.float()
        return values

    result = func(
        *pytree.tree_map_only(Tensor, operand, args),
        **pytree.tree_map_only(Tensor, operand, kwargs),
    )
    for target in encoded:
        target.write(stand_ins[id(target)], name_of(func))
        if func in _ARITHMETIC:
            target.note_change(name_of(func))
    # an operator returns its target: here that is the tensor of codes, not its copy
    owners = {id(stand_ins[id(target)]): target for target in targets}
    return pytree.tree_map_only(Tensor, lambda x: owners.get(id(x), x), result)


def name_of(func: Any) -> str:
    """Return the name of an operator, over one tensor or many."""
    name: str = func._schema.name
    return name.removeprefix("aten::").removeprefix("_foreach_")


def _run_decoded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the decoded values of its arguments."""
    if func in _ARITHMETIC:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, EncodedTensor):
                leaf.note_read()
    if is_backward():
        args = _decoded_after_gradient(args)
    return func(*plain(args), **plain(kwargs))


def plain(tree: Any) -> Any:
    """Return a nest of arguments with every encoded tensor decoded."""
    return pytree.tree_map_only(EncodedTensor, lambda x: x.dequantize(), tree)


def _decoded_after_gradient(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an operator in a backward pass, decoded.

    In a graph they are decoded no earlier than the first plain argument, a gradient, is
    computed.
    """
    plain_tensors = [x for x in args if isinstance(x, Tensor) and not isinstance(x, EncodedTensor)]
    if not plain_tensors:
        return args
    gradient = plain_tensors[0]
    return tuple([_decoded_after(gradient, x) if isinstance(x, EncodedTensor) else x for x in args])


def _decoded_after(gradient: Tensor, x: Any) -> Tensor:
    if isinstance(x, View):
        if not is_traced(root_of(x).codes):
            return x.dequantize()
        viewed: Tensor = x.replay(_decoded_after(gradient, x.base))
        return viewed
    if is_traced(x.codes):
        x = x.with_parts(
            lambda part: codes_after(gradient, part) if part.dtype == torch.uint8 else part
        )
    decoded: Tensor = x.dequantize()
    return decoded


def root_of(x: Any) -> Any:
    """Return the tensor under a view, or under a view of a view."""
    while isinstance(x, View):
        x = x.base
    return x


def implements(*overloads: Any) -> Callable[[Handler], Handler]:
    """Register a handler of operators, called as ``handler(func, args, kwargs)``.

    A handler that returns NotImplemented leaves its arguments to :func:`_run_operator`.
    """

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
    """Raise RuntimeError for a collective; a broadcast is allowed, of all parts."""
    if func.namespace in _COLLECTIVES and func._schema.name != "c10d::broadcast_":
        refuse_collective(func)


def refuse_collective(func: Any) -> NoReturn:
    """Raise RuntimeError: it would send floats, or nothing."""
    raise RuntimeError(
        f"{func} can't take an FP8Tensor, which stores codes and scales: use "
        "torch.distributed.broadcast, which sends all its parts, or send the module's "
        "state_dict(), or the values of dequantize()"
    )


def refuse_part_of_buffer(values: Tensor) -> None:
    """Raise RuntimeError for part of a buffer of floats, which has no codes.

    ``ZeroRedundancyOptimizer`` assigns such parts to the data of weights.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if isinstance(values, EncodedTensor):
        return
    if values._base is not None or values.untyped_storage().nbytes() > values.nbytes:
        raise RuntimeError(
            "an FP8Tensor can't become part of a buffer of floats, because it stores codes: give "
            "parameters_as_bucket_view=False, or use copy_() where only the values are meant"
        )


def guard_memory(x: Tensor) -> None:
    """Make C++ code raise that asks for the values' address.

    There is no memory to which it could write.
    """
    torch._C._set_throw_on_mutable_data_ptr(x)


class NoStorage:
    """The storage of a tensor without memory.

    It has a size, which libraries compare, and an identity, which compilers need.
    """

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def size(self) -> int:
        """Return the bytes that the values would take as floats."""
        return int(self._storage.size())

    nbytes = size

    def __getattr__(self, name: str) -> Any:
        # compilers ask for private names; `_share_*` hand memory to other processes
        if not name.startswith("_") or name.startswith("_share"):
            refuse_memory("storage")
        return getattr(self._storage, name)


def refuse_memory(name: str) -> NoReturn:
    """Raise NotImplementedError, a RuntimeError: there is no memory full of floats."""
    message = (
        f"an FP8Tensor has no {name} of floats, because it stores codes and scales: to save it, "
        "use its module's state_dict(), whose entries are plain tensors; for plain floats call "
        "dequantize()"
    )
    if name == "address":
        # Accelerate's plugin tells parameters apart by their addresses
        message += "; to shard it, call fully_shard in place of Accelerate's FSDP2 plugin"
    raise NotImplementedError(message)
