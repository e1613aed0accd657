"""Times of an optimizer's step, on the GPU and in Python, and its calls of the driver."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch
from torch import nn

import fp8manifold as fm
from _gpu.session import Session, on_card

__all__ = [
    "ADAFACTOR_WAYS",
    "ADAMW_WAYS",
    "PEERS",
    "Peer",
    "find_peer",
    "fused",
    "launches",
    "muon",
    "rivals",
    "step_calls",
    "step_times",
]


class AdamWWay(NamedTuple):
    """A way of StiffnessAdamW to step."""

    writeback: str
    moments: str


ADAMW_WAYS: Final = (
    AdamWWay("stochastic", "8bit"),
    AdamWWay("stochastic", "float32"),
    AdamWWay("stochastic", "bfloat16"),
    AdamWWay("residual8", "8bit"),
    AdamWWay("nearest", "8bit"),
)


class AdafactorWay(NamedTuple):
    """A way of StiffnessAdafactor to step."""

    name: str
    options: dict[str, Any]


ADAFACTOR_WAYS: Final = (
    AdafactorWay("adafactor", {}),
    AdafactorWay("adafactor, 8bit momentum", {"momentum": 0.9, "moments": "8bit"}),
)


class Peer(NamedTuple):
    """A class or function of another package."""

    package: str
    name: str
    options: dict[str, Any]


#: optimizers with 8-bit state
PEERS: Final = {
    "torchao's AdamW8bit": Peer("torchao.optim", "AdamW8bit", {"bf16_stochastic_round": True}),
    "torchao's AdamWFp8": Peer("torchao.optim", "AdamWFp8", {"bf16_stochastic_round": True}),
    "bitsandbytes' AdamW8bit": Peer("bitsandbytes.optim", "AdamW8bit", {}),
}
MakeOptimizer = Callable[[Any], Any]


def parameters_with_gradients(
    session: Session, shapes: Iterable[tuple[int, int]], one_byte: bool, dtype: torch.dtype
) -> list[Any]:
    """Return parameters with gradients."""
    parameters: list[Any] = []
    for seed, shape in enumerate(shapes):
        x = session.normal(*shape, deviation=0.02, dtype=dtype)
        parameter = fm.FP8Parameter(x, "E4M3", seed=seed) if one_byte else nn.Parameter(x)
        parameter.grad = session.normal(*shape, dtype=dtype)
        parameters.append(parameter)
    return parameters


def shapes_of(session: Session, count: int) -> Iterator[tuple[int, int]]:
    """Yield shapes of so many weights: rows of 4096 in tensors of 16M at most."""
    width = 256 if session.dry else 4096
    while count > 0:
        rows = max(min(count // width, 4096), 1)
        yield rows, width
        count -= rows * width


def step_figures(
    session: Session,
    count: int,
    make_optimizer: MakeOptimizer,
    one_byte: bool = True,
    dtype: torch.dtype = torch.float32,
) -> dict[str, float]:
    """Return milliseconds per step over so many weights, and bytes per weight.

    The bytes are those that torch has allocated.
    """
    memory_before = 0 if session.dry else torch.cuda.memory_allocated()
    optimizer = make_optimizer(
        parameters_with_gradients(session, shapes_of(session, count), one_byte, dtype)
    )
    optimizer.step()
    used = 0 if session.dry else torch.cuda.memory_allocated() - memory_before
    return session.times(optimizer.step) | {"bytes": used / count}


def sizes(session: Session) -> tuple[int, ...]:
    """Return the numbers of weights."""
    return (2**13,) if session.dry else (124_000_000, 1_000_000_000)


def millions(count: int) -> str:
    """Return a number of weights as the rows of the table write it."""
    return f"{count // 10**6:,}M weights"


def fused(session: Session) -> MakeOptimizer:
    """Return torch's fused AdamW.

    A dry run has the one that is not fused: on a CPU the fused one lacks bfloat16.
    """
    return partial(torch.optim.AdamW, fused=not session.dry)


def step_times(session: Session) -> dict[str, Any]:
    """Time steps at each size.

    Gradients are float32, the apparent dtype of weights of one byte.
    """
    figures: dict[str, Any] = {}
    for count in sizes(session):
        for writeback, moments in ADAMW_WAYS:
            stiffness: Any = partial(
                fm.optim.StiffnessAdamW, lr=1e-3, writeback=writeback, moments=moments
            )
            name = f"{millions(count)}, {writeback}, {moments} moments"
            with on_card(session):
                session.case(figures, name, partial(step_figures, session, count, stiffness))
        for way in ADAFACTOR_WAYS[: 1 if session.dry else None]:
            adafactor: Any = partial(fm.optim.StiffnessAdafactor, lr=1e-3, **way.options)
            with on_card(session):
                measure = partial(step_figures, session, count, adafactor)
                session.case(figures, f"{millions(count)}, {way.name}", measure)
        name = f"{millions(count)}, torch's fused AdamW"
        figures[name] = step_figures(session, count, fused(session), one_byte=False)
    return figures


def step_calls(session: Session) -> dict[str, Any]:
    """Time what Python adds to a step of so many parameters of 256 x 1024."""
    figures: dict[str, Any] = {}
    for count in (3,) if session.dry else (8, 60, 172, 290):
        shapes = [(8, 256) if session.dry else (256, 1024)] * count
        with on_card(session):
            coded = parameters_with_gradients(session, shapes, True, torch.float32)
            optimizer = fm.optim.StiffnessAdamW(coded, 1e-3, moments="8bit")
            figures[f"{count} parameters, StiffnessAdamW"] = session.times(optimizer.step)
            coded = parameters_with_gradients(session, shapes, True, torch.float32)
            adafactor = fm.optim.StiffnessAdafactor(coded, 1e-3)
            figures[f"{count} parameters, StiffnessAdafactor"] = session.times(adafactor.step)
        reference = fused(session)(parameters_with_gradients(session, shapes, False, torch.float32))
        figures[f"{count} parameters, torch's fused AdamW"] = session.times(reference.step)
    return figures


def muon(session: Session) -> dict[str, Any]:
    """Time Muon's step, whose products are most of it."""
    count = sizes(session)[0]
    with on_card(session):
        stiffness = step_figures(session, count, partial(fm.optim.StiffnessMuon, lr=1e-3))
    reference = step_figures(session, count, partial(torch.optim.Muon, lr=1e-3), one_byte=False)
    return {
        f"{millions(count)}, StiffnessMuon": stiffness,
        f"{millions(count)}, torch Muon": reference,
    }


def rivals(session: Session) -> dict[str, Any]:
    """Time optimizers of 8-bit state over bfloat16 weights and gradients.

    So people use them. StiffnessAdamW steps such weights too, and weights of one byte.
    """
    count = sizes(session)[0]
    figures: dict[str, Any] = {}
    stiffness: Any = partial(fm.optim.StiffnessAdamW, lr=1e-3, moments="8bit")
    for storage, one_byte in (("one byte", True), ("bfloat16 weights", False)):
        name = f"{millions(count)}, {storage}, StiffnessAdamW, 8bit moments, bfloat16 gradients"
        with on_card(session):
            figures[name] = step_figures(session, count, stiffness, one_byte, torch.bfloat16)
    for label, peer in PEERS.items():
        kind = find_peer(peer.package, peer.name)
        if kind is not None:
            make_optimizer = partial(kind, lr=1e-3, **peer.options)
            measure = partial(step_figures, session, count, make_optimizer, False, torch.bfloat16)
            session.case(figures, f"{millions(count)}, bfloat16 weights, {label}", measure)
    return figures


def find_peer(package: str, name: str) -> Any:
    """Return another package's class, or None if the package is missing."""
    try:
        return getattr(import_module(package), name)
    except ImportError as error:
        print(f"{package}.{name} is left out: {error}", flush=True)
        return None


def launches(session: Session) -> dict[str, Any]:
    """Count the calls of the driver in a steady step of 290 parameters.

    The step waits for events of the step before: its verdict, and its uploads.
    """
    parameters = []
    for seed in range(3 if session.dry else 290):
        values = torch.randn(8, 256, device=session.device)
        parameters.append(fm.FP8Parameter(values, "E4M3", seed=seed))
    optimizer = fm.optim.StiffnessAdamW(parameters, 1e-3, moments="8bit")
    for parameter in parameters:
        parameter.grad = torch.randn(8, 256, device=session.device)
    with on_card(session):
        optimizer.step()
        optimizer.step()
        if session.dry:
            optimizer.step()
            return {"steps": int(optimizer.state[parameters[0]]["step"])}
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        optimizer.step()
    events = profile.key_averages()
    calls = {
        "launches": "LaunchKernel",
        "waits": "StreamSynchronize",
        "events": "EventSynchronize",
        "copies": "MemcpyAsync",
    }
    counts = {}
    for name, call in calls.items():
        counts[name] = sum(event.count for event in events if call in event.key)
    return counts
