"""Which forward pass of a layer this is: a new one, or one that activation checkpointing runs again.

What is checkpointed runs twice: in the forward pass, and in the backward pass, in the same order.  The second time a
layer has to round as it did the first time: with the same random bits, and with the scale that it took from the past.
So every pass is written down for what may run it again, and read off there when it does.  What may run it again is

- the frame of ``torch.utils.checkpoint`` with ``use_reentrant=False``, which torch's hooks for saved tensors know;
- the node of an ``autograd.Function`` whose ``forward(ctx, ...)`` is running: ``use_reentrant=True``, and what other
  libraries make in its likeness.

The notes live as long as these do, which autograd's graph decides.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fp8manifold._base.reading import eager_only
from fp8manifold._encoded.dispatch import is_backward
from fp8manifold.nn._scalers import Scaler


@dataclass(eq=False)
class Pass:
    """One forward pass of a layer.

    Args:
        draw: number of its random bits.
        repeats: whether it is one that was there before; nothing is remembered in it then.
        delayed: by operand, the scales that came from the past, which has gone on since.
    """

    draw: int
    repeats: bool = False
    delayed: dict[str, Tensor] = field(default_factory=dict)

    def scale(self, operand: str, scaler: Scaler, x: Tensor) -> Tensor:
        """The scale of an operand in this pass."""
        if self.repeats:
            return self.delayed[operand] if operand in self.delayed else scaler.preview(x)
        scale: Tensor = scaler(x)
        if scaler.remembers:
            self.delayed[operand] = scale
        return scale


class _Notes:
    """The passes of one region, layer by layer, and how many of them each run of it has repeated."""

    def __init__(self) -> None:
        self.passes: defaultdict[nn.Module, list[Pass]] = defaultdict(list)
        self.repeated: defaultdict[Any, Counter[nn.Module]] = defaultdict(Counter)

    def next(self, layer: nn.Module, run: Any) -> Pass | None:
        """The pass of the layer that comes next in a run; None if there were fewer."""
        index, passes = self.repeated[run][layer], self.passes[layer]
        if index >= len(passes):
            return None
        self.repeated[run][layer] += 1
        noted = passes[index]
        return Pass(noted.draw, True, noted.delayed)


_NOTES: Final[WeakKeyDictionary[Any, _Notes]] = WeakKeyDictionary()


def pass_of(layer: nn.Module, draws: Callable[[], int], remembers: bool) -> Pass:
    """The forward pass that a layer begins.

    Args:
        layer: the layer.
        draws: gives a new pass its number, and counts it.
        remembers: whether the layer draws random bits in this pass, or takes scales from the past.

    Raises:
        RuntimeError: the layer remembers, and is run within a backward pass by something unknown.
    """
    if remembers:
        return _remembered_pass(layer, draws)
    in_backward = not torch.compiler.is_compiling() and is_backward()
    return Pass(draws(), repeats=in_backward)


@eager_only  # a graph would do the same whether or not it is run again
def _remembered_pass(layer: nn.Module, draws: Callable[[], int]) -> Pass:
    in_backward = is_backward()
    regions, again = _regions()
    if again is None and in_backward:
        again = _of_node()
    this = Pass(draws()) if again is None else again[0].next(layer, again[1])
    if this is None or (again is None and in_backward and torch.is_grad_enabled()):
        raise RuntimeError(
            f"{type(layer).__name__}({layer.extra_repr()}) runs in a backward pass, where it is not known to repeat a "
            "forward pass, whose random bits and scales it would need: checkpoint with torch.utils.checkpoint, and run "
            "what is new there under torch.no_grad()"
        )
    for region in regions:
        _NOTES.setdefault(region, _Notes()).passes[layer].append(this)
    return this


def _regions() -> tuple[list[Any], tuple[_Notes, Any] | None]:
    """What may run this forward pass again; and the notes of what runs it again now, with the run, if that is known."""
    regions = [] if torch.is_grad_enabled() else list(_functions())
    for pack in _hooks():
        cells = _cells(pack)
        if "target_frame_ref" in cells:
            notes = _NOTES.get(cells["target_frame_ref"]())
            return regions, (_Notes() if notes is None else notes, cells["gid"])
        if "frame" in cells:
            regions.append(cells["frame"])
    return regions, None


def _of_node() -> tuple[_Notes, Any] | None:
    """The notes of the function whose backward is running."""
    node = torch._C._current_autograd_node()
    notes = _NOTES.get(node) if isinstance(node, torch.autograd.function.FunctionCtx) else None
    return None if notes is None else (notes, torch._C._current_graph_task_id())


def _hooks() -> list[Callable[..., Any]]:
    """The hooks that pack saved tensors, the innermost first: torch shows that one only, and puts them back."""
    hooks = torch._C._autograd
    found = []
    try:
        while (top := hooks._top_saved_tensors_default_hooks(True)) is not None:
            hooks._pop_saved_tensors_default_hooks()
            found.append(top)
    finally:
        for pack, unpack in reversed(found):
            hooks._push_saved_tensors_default_hooks(pack, unpack)
    return [pack for pack, _ in found]


def _cells(pack: Any) -> dict[str, Any]:
    """What a hook of ``torch.utils.checkpoint`` closes over, by name."""
    while hasattr(pack, "__wrapped__"):
        pack = pack.__wrapped__
    if getattr(pack, "__module__", None) != "torch.utils.checkpoint" or not pack.__closure__:
        return {}
    return {name: cell.cell_contents for name, cell in zip(pack.__code__.co_freevars, pack.__closure__, strict=True)}


def _functions() -> Iterator[Any]:
    """The nodes of the functions whose forward is running, up to what runs something again."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "unpack_hook":
        if frame.f_code.co_name in ("forward", "backward") and frame.f_code.co_argcount:
            first = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(first, torch.autograd.function.FunctionCtx):
                if frame.f_code.co_name == "backward":
                    return
                yield first
        frame = frame.f_back  # type: ignore[assignment]
