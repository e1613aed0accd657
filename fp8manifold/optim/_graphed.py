"""Whole training steps as CUDA graphs, with the bits of calls without graphs.

A graph replays launches, not Python. But some numbers of an optimizer's step are new in
every step: learning rate, bias corrections, keys of random bits. So a training step is cut
into three graphs, and the host writes these numbers while the first runs::

    train_step(x, y)        zero_grad, forward, backward   graph 0 of `_TrainingGraphs`
      optimizer.step()      tables with the new numbers    uploaded by the host
                            the kernels of the step        `_StepGraph`
      ...                   whatever follows the step      graph 1 of `_TrainingGraphs`

To record, `train_step` is called once with ``optimizer._recorder`` set. Its ``step()`` ends
graph 0 and begins graph 1 in place of stepping. To replay, ``optimizer._graph`` is set:
the optimizer then checks and counts its steady step as ever (`_plan.py`), and launches it
by the graph. A step that is not steady is taken as ever, between the two graphs.

Graphs read fixed memory. Inputs are copied into it. If weights have moved, the passes are
recorded again. If gradients are other tensors than the last step left, the step is called
without graphs.
"""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from fp8manifold._base.param_groups import parameters_of
from fp8manifold._base.reading import PendingValues
from fp8manifold._triton.launch import Tables
from fp8manifold.optim._optimizer import ManifoldOptimizer
from fp8manifold.optim._plan import are_same
from fp8manifold.optim._slot import Slot, count_on_gpu
from fp8manifold.optim._triton_step import TritonStep
from fp8manifold.tensor import FP8Tensor

__all__ = ["graphed"]

_WARMUP: Final = 3
"""Calls before a recording: libraries choose and load their kernels in them."""


class _Graphs:
    """Recordings of launches that are replayed in their order, on the same memory."""

    def __init__(self) -> None:
        self._graphs = list[torch.cuda.CUDAGraph]()
        self._pool: Any = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        # no memory of the GPU may be freed during the recording
        gc.collect()
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Begin another graph, with the memory of those before."""
        torch.cuda.synchronize()
        self._graphs.append(torch.cuda.CUDAGraph())
        # a graph tells its own pool only when it has ended
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self._graphs[-1].capture_begin(self._pool)

    def end(self) -> None:
        # the graph after the step often is empty
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            self._graphs[-1].capture_end()

    def replay(self, i: int) -> None:
        self._graphs[i].replay()


class _StepGraph:
    """A graph of the kernels of an optimizer's steady step.

    The kernels read tables that stay where they are.
    """

    def __init__(self) -> None:
        self._signature: Any = None

    def __call__(self, step: TritonStep, slots: list[Slot]) -> PendingValues:
        """Take and count a step. Record it first if its launches differ from the last."""
        if self._signature != step.signature:
            # A recording that fails leaves no graph that a later step could replay.
            self._signature = None
            self._tables = Tables(step.launches, step.words())
            self._memory = step.memory()
            self._graphs = _Graphs()
            with self._graphs.recording():
                self._tables.launch()
                count_on_gpu([slot.state["step"] for slot in slots], self._tables.report)
            self._signature = step.signature
        step.fill(slots, self._tables.report, memory=self._memory)
        self._tables.fill(step.launches)
        self._graphs.replay(0)
        return PendingValues(self._tables.report)


class _TrainingGraphs:
    """The graphs of a training step before and after the optimizer's.

    Attributes:
        inputs: the memory that the graphs read their inputs from.
        gradients: as the recording has left them, and every replay does.
    """

    def __init__(
        self, train_step: Callable[..., Any], optimizer: ManifoldOptimizer, inputs: tuple[Any, ...]
    ) -> None:
        self._graphs = _Graphs()
        self.inputs: tuple[Any, ...] = tree_map_only(Tensor, torch.clone, inputs)
        self._parameters = parameters_of(optimizer)
        #: the gradients at each call of the optimizer's step
        self._cuts: list[list[Tensor | None]] = []
        options = _options_of(optimizer)
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
        if not are_same(options, _options_of(optimizer)):
            raise ValueError(
                "train_step changes options of the optimizer, which a graph would not do again: "
                "call the scheduler's step() after the graphed step"
            )
        self.gradients = [p.grad for p in self._parameters]

    def _cut(self) -> None:
        """End the graph before the optimizer's step, and begin the one after it."""
        self._graphs.end()
        self._graphs.begin()
        self._cuts.append([p.grad for p in self._parameters])

    def replay(self, inputs: tuple[Any, ...], step: Callable[[], Any]) -> Any:
        """Replay both graphs with other inputs, and the optimizer's step between them.

        Returns:
            A copy of the results.
        """
        for memory, x in zip(tree_flatten(self.inputs)[0], tree_flatten(inputs)[0], strict=True):
            if isinstance(memory, Tensor):
                memory.copy_(x)
        self._graphs.replay(0)
        self._set_gradients(self._cuts[0])
        step()
        self._graphs.replay(1)
        self._set_gradients(self.gradients)
        return tree_map_only(Tensor, lambda x: x.detach().clone(), self._outputs)

    def _set_gradients(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient


class GraphedStep:
    """A training step that runs from CUDA graphs where it can.

    Attributes:
        replayed: calls that were replays.
        recorded: recordings of the passes.
    """

    replayed = recorded = 0

    def __init__(self, train_step: Callable[..., Any], optimizer: ManifoldOptimizer) -> None:
        self._train_step = train_step
        self._optimizer = optimizer
        self._graphs: _TrainingGraphs | None = None
        self._step_graph = _StepGraph()
        self._stream = torch.cuda.Stream()
        #: calls without graphs so far
        self._calls = 0
        #: addresses of the parameters when the graphs were recorded
        self._addresses: list[int] = []
        #: the gradients that the last call left
        self._gradients: list[Tensor | None] = []

    def __call__(self, *inputs: Any) -> Any:
        """Take one training step, and return what ``train_step`` returns."""
        optimizer = self._optimizer
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self._prepare_replay(inputs):
                assert self._graphs is not None
                optimizer._graph = self._step_graph
                try:
                    outputs = self._graphs.replay(inputs, optimizer.step)
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
        parameters = parameters_of(self._optimizer)
        if self._graphs is not None:
            for parameter, memory in zip(parameters, self._graphs.gradients, strict=True):
                gradient = parameter.grad
                if memory is None or gradient is None:
                    continue
                if _kind_of(memory) == _kind_of(gradient):
                    parameter.grad = memory.copy_(gradient)
        self._gradients = [p.grad for p in parameters]
        return outputs

    def _prepare_replay(self, inputs: tuple[Any, ...]) -> bool:
        """Return True if a replay does the same as the call.

        The passes are recorded where they have not been, or memory has moved.
        """
        optimizer = self._optimizer
        gradients = [p.grad for p in parameters_of(optimizer)]
        if self._calls < _WARMUP or len(gradients) != len(self._gradients):
            return False
        for gradient, last in zip(gradients, self._gradients, strict=True):
            if gradient is not last:
                return False
        if self._graphs is None or self._addresses != _addresses_of(optimizer):
            # the old graphs are freed before others are recorded
            self._graphs = None
            self._graphs = _TrainingGraphs(self._train_step, optimizer, inputs)
            self._addresses = _addresses_of(optimizer)
            self._gradients = self._graphs.gradients
            self.recorded += 1
        return _are_alike(self._graphs.inputs, inputs)


def graphed(train_step: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Record a whole training step in CUDA graphs, and replay them.

    A replay gives the bits of the same call without graphs. One graph has everything
    before the optimizer's step, one the kernels of the step, and one everything after
    it. While the first graph runs, the host writes what changes from step to step
    (learning rate, bias corrections, keys of random bits), so any scheduler works.

    These calls run without graphs: the first ones, those with inputs of another shape,
    and the one after gradients were replaced. If weights have moved, the graphs are
    recorded again.

    Args:
        train_step: a function of tensors and constants that clears gradients, runs both
            passes, and calls ``optimizer.step()`` once, without a closure. A replay
            runs its kernels, not its Python: schedulers, counters and printing belong
            outside, and memory that it reads must not move.
        optimizer: one of this library, with all its parameters on one CUDA device.

    Returns:
        A function called like ``train_step`` that returns copies of its results and
        counts ``replayed``, ``recorded``.

    Raises:
        TypeError: another optimizer.
        ValueError: the optimizer steps in the backward pass, or its parameters are not
            on one GPU. When recording: ``train_step`` does not call ``step()`` exactly
            once, or changes options.
        RuntimeError: when recording, ``train_step`` synchronises, or a layer draws
            random bits.

    Example:
        >>> import fp8manifold as fm
        >>> optimizer = fm.optim.StiffnessAdamW([fm.FP8Parameter(torch.eye(2), "E4M3")], lr=1e-3)
        >>> train_step = lambda x, y: None
        >>> fm.optim.graphed(train_step, optimizer)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: the parameters of this StiffnessAdamW are on cpu: a CUDA graph takes ...

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
    devices = {p.device for p in parameters_of(optimizer)}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        places = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"the parameters of this {name} are on {places}: a CUDA graph takes those of one CUDA "
            f"device"
        )
    return GraphedStep(train_step, optimizer)


def _addresses_of(optimizer: ManifoldOptimizer) -> list[int]:
    """Return addresses of everything that the passes read of the parameters."""
    addresses: list[int] = []
    for parameter in parameters_of(optimizer):
        if isinstance(parameter, FP8Tensor):
            addresses += [parameter.codes.data_ptr(), parameter.kept_scale.data_ptr()]
        else:
            addresses.append(parameter.data_ptr())
    return addresses


def _options_of(optimizer: ManifoldOptimizer) -> list[dict[str, Any]]:
    """Return the options of all groups, with the values of tensors."""
    options = []
    for group in optimizer.param_groups:
        without_parameters = {name: value for name, value in group.items() if name != "params"}
        options.append(tree_map_only(Tensor, Tensor.tolist, without_parameters))
    return options


def _kind_of(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.shape, x.stride(), x.dtype, x.device


def _are_alike(inputs: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Return True for tensors of the same kinds, and other inputs of the same values."""
    leaves, structure = tree_flatten(inputs)
    other_leaves, other_structure = tree_flatten(others)
    if structure != other_structure:
        return False
    for x, y in zip(leaves, other_leaves, strict=True):
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            if _kind_of(x) != _kind_of(y):
                return False
        elif not (type(x) is type(y) and x == y):
            return False
    return True
