"""Times of a step of the optimizers, on the GPU and in Python, and the calls of the
driver.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import nn

import fp8manifold as fm
from _gpu.session import Session, on_card

__all__ = [
    "PEERS",
    "WAYS",
    "fused",
    "launches",
    "muon",
    "peer",
    "rivals",
    "step_calls",
    "step_times",
]

WAYS: Final = (
    ("stochastic", "8bit"),
    ("stochastic", "float32"),
    ("stochastic", "bfloat16"),
    ("residual8", "8bit"),
    ("nearest", "8bit"),
)


#: other packages' optimizers with 8-bit state: the package, the name, and options
PEERS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "torchao's AdamW8bit": ("torchao.optim", "AdamW8bit", {"bf16_stochastic_round": True}),
    "torchao's AdamWFp8": ("torchao.optim", "AdamWFp8", {"bf16_stochastic_round": True}),
    "bitsandbytes' AdamW8bit": ("bitsandbytes.optim", "AdamW8bit", {}),
}
Made = Callable[[Any], Any]


def weights(
    session: Session, shapes: Iterable[tuple[int, int]], one_byte: bool, dtype: torch.dtype
) -> list[Any]:
    """Parameters with gradients."""
    made: list[Any] = []
    for shape in shapes:
        x = session.normal(*shape, deviation=0.02, dtype=dtype)
        made.append(fm.FP8Parameter(x, "E4M3", seed=len(made)) if one_byte else nn.Parameter(x))
        made[-1].grad = session.normal(*shape, dtype=dtype)
    return made


def of_count(session: Session, count: int) -> Iterator[tuple[int, int]]:
    """Rows of 4096 in tensors of 16M at most."""
    width = 256 if session.dry else 4096
    while count > 0:
        rows = max(min(count // width, 4096), 1)
        yield rows, width
        count -= rows * width


def timed(
    session: Session,
    count: int,
    make: Made,
    one_byte: bool = True,
    dtype: torch.dtype = torch.float32,
) -> dict[str, float]:
    """Milliseconds per step over so many weights, and the bytes per weight that torch
    has allocated for it.
    """
    before = 0 if session.dry else torch.cuda.memory_allocated()
    optimizer = make(weights(session, of_count(session, count), one_byte, dtype))
    optimizer.step()
    used = 0 if session.dry else torch.cuda.memory_allocated() - before
    return session.times(optimizer.step) | {"bytes": used / count}


def sizes(session: Session) -> tuple[int, ...]:
    """Numbers of weights."""
    return (2**13,) if session.dry else (124_000_000, 1_000_000_000)


def millions(count: int) -> str:
    """A number of weights as the rows of the table write it."""
    return f"{count // 10**6:,}M weights"


def fused(session: Session) -> Made:
    """torch's fused AdamW; in a dry run, on a CPU, not the fused one, which lacks
    bfloat16.
    """
    return partial(torch.optim.AdamW, fused=not session.dry)


def step_times(session: Session) -> dict[str, Any]:
    """Steps at each size; gradients are float32, the apparent dtype of weights of one
    byte.
    """
    found: dict[str, Any] = {}
    for count in sizes(session):
        for writeback, moments in WAYS:
            ours: Any = partial(
                fm.optim.StiffnessAdamW, lr=1e-3, writeback=writeback, moments=moments
            )
            with on_card(session):
                name = f"{millions(count)}, {writeback}, {moments} moments"
                session.case(found, name, partial(timed, session, count, ours))
        found[f"{millions(count)}, torch's fused AdamW"] = timed(
            session, count, fused(session), one_byte=False
        )
    return found


def step_calls(session: Session) -> dict[str, Any]:
    """Time that Python adds to a step of so many parameters of 256 x 1024."""
    found: dict[str, Any] = {}
    for count in (3,) if session.dry else (8, 60, 172, 290):
        shapes = [(8, 256) if session.dry else (256, 1024)] * count
        with on_card(session):
            ours = fm.optim.StiffnessAdamW(
                weights(session, shapes, True, torch.float32), 1e-3, moments="8bit"
            )
            found[f"{count} parameters, StiffnessAdamW"] = session.times(ours.step)
        theirs = fused(session)(weights(session, shapes, False, torch.float32))
        found[f"{count} parameters, torch's fused AdamW"] = session.times(theirs.step)
    return found


def muon(session: Session) -> dict[str, Any]:
    """Muon's step, whose products are most of it."""
    count = sizes(session)[0]
    with on_card(session):
        ours = timed(session, count, partial(fm.optim.StiffnessMuon, lr=1e-3))
    theirs = timed(session, count, partial(torch.optim.Muon, lr=1e-3), one_byte=False)
    return {f"{millions(count)}, StiffnessMuon": ours, f"{millions(count)}, torch Muon": theirs}


def rivals(session: Session) -> dict[str, Any]:
    """Optimizers of 8-bit state over bfloat16 weights and gradients, as people use
    them, beside one byte and ours.
    """
    count, found = sizes(session)[0], {}
    for one_byte in (True, False):
        with on_card(session):
            ours: Any = partial(fm.optim.StiffnessAdamW, lr=1e-3, moments="8bit")
            what = "one byte" if one_byte else "bfloat16 weights"
            found[
                f"{millions(count)}, {what}, StiffnessAdamW, 8bit moments, bfloat16 gradients"
            ] = timed(session, count, ours, one_byte, torch.bfloat16)
    for label, (package, name, options) in PEERS.items():
        if (kind := peer(package, name)) is not None:
            measure = partial(
                timed, session, count, partial(kind, lr=1e-3, **options), False, torch.bfloat16
            )
            session.case(found, f"{millions(count)}, bfloat16 weights, {label}", measure)
    return found


def peer(package: str, name: str) -> Any:
    """Another package's class, or None."""
    try:
        return getattr(import_module(package), name)
    except ImportError as error:
        print(f"{package}.{name} is left out: {error}", flush=True)
        return None


def launches(session: Session) -> dict[str, Any]:
    """Calls of the driver in a steady step of 290 parameters.

    The step waits for events of the step before: its verdict, and its uploads.
    """
    count = 3 if session.dry else 290
    parameters = [
        fm.FP8Parameter(torch.randn(8, 256, device=session.device), "E4M3", seed=i)
        for i in range(count)
    ]
    optimizer = fm.optim.StiffnessAdamW(parameters, 1e-3, moments="8bit")
    for p in parameters:
        p.grad = torch.randn(8, 256, device=session.device)
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
    wanted = {
        "launches": "LaunchKernel",
        "waits": "StreamSynchronize",
        "events": "EventSynchronize",
    }
    wanted["copies"] = "MemcpyAsync"
    return {name: sum(e.count for e in events if key in e.key) for name, key in wanted.items()}
