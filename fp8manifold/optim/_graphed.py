"""Whole training steps as CUDA graphs: one before the optimizer's step, one of its
kernels, and one after it.
"""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from fp8manifold._base.reading import PendingValues
from fp8manifold._triton.launch import Tables
from fp8manifold.optim._checks import are_same
from fp8manifold.optim._optimizer import ManifoldOptimizer
from fp8manifold.optim._slot import Slot, count_on_gpu
from fp8manifold.optim._triton_step import TritonStep
from fp8manifold.tensor import FP8Tensor

__all__ = ["graphed"]

_WARMUP: Final = 3  #: Calls before a recording: libraries choose and load their kernels in them.


class _Graphs:
    """Recordings of launches that are replayed in their order, on the same memory."""

    def __init__(self) -> None:
        self._graphs = list[torch.cuda.CUDAGraph]()
        self._pool: Any = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        gc.collect()  # so that no memory of the GPU is freed during the recording
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Begin another graph, with the memory of those before."""
        torch.cuda.synchronize()
        self._graphs.append(torch.cuda.CUDAGraph())
        if self._pool is None:  # a graph tells its own pool only when it has ended
            self._pool = torch.cuda.graph_pool_handle()
        self._graphs[-1].capture_begin(self._pool)

    def end(self) -> None:
        with warnings.catch_warnings():  # the graph after the step often is empty
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            self._graphs[-1].capture_end()

    def replay(self, which: int) -> None:
        self._graphs[which].replay()


class _StepGraph:
    """A graph of the kernels of an optimizer's steady step, which read tables that stay
    where they are.
    """

    def __init__(self) -> None:
        self._signature: Any = None

    def __call__(self, step: TritonStep, slots: list[Slot]) -> PendingValues:
        """Take and count a step; record it if its launches differ from those before."""
        if self._signature != step.signature:
            self._tables, self._graphs = Tables(step.launches, step.words()), _Graphs()
            with self._graphs.recording():
                self._tables.launch()
                count_on_gpu([slot.state["step"] for slot in slots], self._tables.report)
            self._signature = step.signature
        step.fill(slots, self._tables.report)
        self._tables.fill(step.launches)
        self._graphs.replay(0)
        return PendingValues(self._tables.report)


class _Passes:
    """The graphs of a training step before and after the optimizer's, and the memory of
    their inputs.
    """

    def __init__(
        self, train_step: Callable[..., Any], optimizer: ManifoldOptimizer, inputs: tuple[Any, ...]
    ) -> None:
        self._graphs, self._cuts, before = (
            _Graphs(),
            list[list[Tensor | None]](),
            _options(optimizer),
        )
        self.inputs: tuple[Any, ...] = tree_map_only(Tensor, torch.clone, inputs)
        self._parameters = _parameters(optimizer)
        optimizer._recorder = self._cut
        try:
            with self._graphs.recording():
                self._outputs = train_step(*self.inputs)
        finally:
            optimizer._recorder = None
        if len(self._cuts) != 1:
            raise ValueError(
                f"train_step calls the optimizer's step() {len(self._cuts)} times: it has to call "
                f"it once"
            )
        if not are_same(before, _options(optimizer)):
            raise ValueError(
                "train_step changes options of the optimizer, which a graph would not do again: "
                "call the scheduler's step() after the graphed step"
            )
        #: as the recording has left them
        self.gradients = [p.grad for p in self._parameters]

    def _cut(self) -> None:
        self._graphs.end()
        self._graphs.begin()
        self._cuts.append([p.grad for p in self._parameters])

    def replay(self, inputs: tuple[Any, ...], step: Callable[[], Any]) -> Any:
        """Replay both graphs with other inputs, the optimizer's step between them;
        return a copy of the results.
        """
        for ours, given in zip(tree_flatten(self.inputs)[0], tree_flatten(inputs)[0], strict=True):
            if isinstance(ours, Tensor):
                ours.copy_(given)
        self._graphs.replay(0)
        self._put(self._cuts[0])
        step()
        self._graphs.replay(1)
        self._put(self.gradients)
        return tree_map_only(Tensor, lambda x: x.detach().clone(), self._outputs)

    def _put(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient


class GraphedStep:
    """A training step that runs from CUDA graphs where it can, and counts its replays
    and recordings.
    """

    replayed = recorded = 0

    def __init__(self, train_step: Callable[..., Any], optimizer: ManifoldOptimizer) -> None:
        self._train_step, self._optimizer = train_step, optimizer
        self._passes: _Passes | None = None
        self._calls, self._places, self._left = 0, list[int](), list[Tensor | None]()
        self._stream, self._step_graph = torch.cuda.Stream(), _StepGraph()

    def __call__(self, *inputs: Any) -> Any:
        """Take one training step, and return what ``train_step`` returns."""
        optimizer = self._optimizer
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self._may_replay(inputs):
                assert self._passes is not None
                optimizer._graph = self._step_graph
                try:
                    outputs = self._passes.replay(inputs, optimizer.step)
                finally:
                    optimizer._graph = None
                self.replayed += 1
            else:
                outputs = self._call(inputs)
        torch.cuda.current_stream().wait_stream(self._stream)
        return outputs

    def _call(self, inputs: tuple[Any, ...]) -> Any:
        """Take a step without graphs, and put its gradients where a replay has them."""
        self._calls += 1
        outputs = self._train_step(*inputs)
        if self._passes is not None:
            for parameter, ours in zip(
                _parameters(self._optimizer), self._passes.gradients, strict=True
            ):
                if (
                    ours is not None
                    and parameter.grad is not None
                    and _kind(ours) == _kind(parameter.grad)
                ):
                    parameter.grad = ours.copy_(parameter.grad)
        self._left = [p.grad for p in _parameters(self._optimizer)]
        return outputs

    def _may_replay(self, inputs: tuple[Any, ...]) -> bool:
        """True if a replay does the same as the call; records passes where there are
        none, or memory has moved.
        """
        optimizer, found = self._optimizer, [p.grad for p in _parameters(self._optimizer)]
        if self._calls < _WARMUP or len(found) != len(self._left):
            return False
        if any(one is not other for one, other in zip(found, self._left, strict=True)):
            return False
        if self._passes is None or self._places != _places(optimizer):
            self._passes = None
            self._passes, self._places = (
                _Passes(self._train_step, optimizer, inputs),
                _places(optimizer),
            )
            self._left = self._passes.gradients
            self.recorded += 1
        return _alike(self._passes.inputs, inputs)


def graphed(train_step: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Record a whole training step in CUDA graphs, and replay them with the bits of the
    same calls without graphs.

    One graph has all before the optimizer's step, one its kernels, one all after it;
    the host writes what changes from step to step (learning rate, bias corrections,
    keys of random bits) while the first runs, so any scheduler works. Without graphs
    run the first calls, those with inputs of another shape, and one after gradients
    were replaced; if weights have moved, the graphs are recorded again.

    Args:
        train_step: a function of tensors and constants that clears gradients, runs both
            passes, and calls ``optimizer.step()`` once, without a closure. A replay
            runs its kernels, not its Python: schedulers, counters and printing belong
            outside, and memory that it reads must not move.
        optimizer: of this library, all of whose parameters are on one CUDA device.

    Returns:
        A function called like ``train_step`` that returns copies of its results and
        counts ``replayed``, ``recorded``.

    Raises:
        TypeError: another optimizer.
        ValueError: the optimizer steps in the backward pass, or its parameters are not
            on one GPU; when recording, ``train_step`` does not call ``step()`` once, or
            changes options.
        RuntimeError: when recording, ``train_step`` synchronises, or a layer draws
            random bits.

    Example:
        >>> import fp8manifold as fm
        >>> optimizer = fm.optim.StiffnessAdamW([fm.FP8Parameter(torch.eye(2), "E4M3")], lr=1e-3)
        >>> train_step = lambda x, y: None
        >>> fm.optim.graphed(train_step, optimizer)
        Traceback (most recent call last):
        ...
        ValueError: the parameters of this StiffnessAdamW are on cpu: a CUDA graph takes those of one CUDA device

        >>> loss = fm.optim.graphed(train_step, optimizer)(x, y)  # doctest: +SKIP

    Source: PyTorch's CUDA graphs,
    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
    """
    if not isinstance(optimizer, ManifoldOptimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}: graphed takes those of fp8manifold.optim"
        )
    name = type(optimizer).__name__
    if optimizer._in_backward is not None:
        raise ValueError(
            f"this {name} steps in the backward pass: graphed takes steps between two passes"
        )
    devices = {p.device for p in _parameters(optimizer)}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        places = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"the parameters of this {name} are on {places}: a CUDA graph takes those of one CUDA "
            f"device"
        )
    return GraphedStep(train_step, optimizer)


def _parameters(optimizer: ManifoldOptimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _places(optimizer: ManifoldOptimizer) -> list[int]:
    """Addresses of everything that the passes read of the parameters."""
    places: list[int] = []
    for parameter in _parameters(optimizer):
        held = (
            (parameter.codes, parameter.kept_scale)
            if isinstance(parameter, FP8Tensor)
            else (parameter,)
        )
        places += [each.data_ptr() for each in held]
    return places


def _options(optimizer: ManifoldOptimizer) -> list[dict[str, Any]]:
    groups = [
        {name: value for name, value in g.items() if name != "params"}
        for g in optimizer.param_groups
    ]
    return [tree_map_only(Tensor, Tensor.tolist, group) for group in groups]


def _kind(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.shape, x.stride(), x.dtype, x.device


def _alike(ours: tuple[Any, ...], given: tuple[Any, ...]) -> bool:
    """True for inputs of the same kinds, and of the same values where they are no
    tensors.
    """
    (mine, form), (theirs, other) = tree_flatten(ours), tree_flatten(given)
    return form == other and all(
        _kind(x) == _kind(y)
        if isinstance(x, Tensor) and isinstance(y, Tensor)
        else type(x) is type(y) and x == y
        for x, y in zip(mine, theirs, strict=True)
    )
