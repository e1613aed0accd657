"""The host's time for small layers and steps, as ratios to ``nn.Linear`` and fused
AdamW in the same run.

    python benchmarks/overhead.py [--parts layer compiled step] [--pairs 60] [--calls
    50] [--markdown] [--record]

One thread, forward and backward over a few tokens, so that nearly all of it is Python
and torch's dispatcher:

    a card's path a layer under autocast as on a GPU, with kernels that do nothing; its
                     scale is in bfloat16, as a GPU multiplies two dtypes in one launch,
                     where this CPU makes a copy first
    a CPU's a layer in float32 compiled a stack of layers with a GELU after each,
    compiled whole; the times are of one layer a step `step()` of StiffnessAdamW over
    one-byte weights, with kernels that do nothing and on a CPU, beside
                     torch's fused AdamW over as many in float32; the times are of one
                     parameter, and so is the goal

Both sides take their calls in turn; process CPU time. The ratio is that of the least
times, as whatever else the machine does only adds to them; beside it are the ratios of
the pairs: median, smallest and largest.
"""

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import torch
from _forms import add_form_options, text_table
from _overhead_step import cases
from _record import add_option, record
from _timing import paired_seconds
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold._encoded import storage
from fp8manifold.nn import _products

Step = Callable[[], object]
#: of a small layer, and of one whose kernels do next to nothing on this CPU either, as
#: none of a card's do
SMALL, TINY = 32, 8
TOKENS: Final = 4
DEPTH: Final = 12


@dataclass(frozen=True)
class Case:
    """Two functions that are called in turn, and the number of layers or parameters of
    a call.
    """

    what: str
    format: str
    ours: Step
    theirs: Step
    size: int
    goal: float | None
    goal_us: float | None = None


@dataclass(frozen=True)
class Figure:
    """The ratio of the least times, those of the pairs, and microseconds per layer or
    parameter.
    """

    what: str
    format: str
    ratio: float
    pairs: tuple[float, float, float]
    ours_us: float
    theirs_us: float
    goal: float | None
    goal_us: float | None = None


def both(model: nn.Module, x: Tensor, *, autocast: bool) -> Step:
    """Forward and backward."""
    parameters = list(model.parameters())

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        y.backward(gradient if y.dtype == gradient.dtype else half)
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    gradient = torch.randn(x.shape)
    half = gradient.bfloat16()
    return step


def pair(
    fmt: str,
    features: int,
    depth: int = 1,
    *,
    autocast: bool,
    compiled: bool = False,
    halved: bool = False,
) -> tuple[Step, Step]:
    """Layers with one-byte weights, if ``halved`` with scales in bfloat16, and the
    ``nn.Linear`` they are made from.
    """
    x = torch.randn(TOKENS, features, requires_grad=True)
    stack = [nn.Linear(features, features) for _ in range(depth)]
    dense = nn.Sequential(
        *(part for layer in stack for part in ((layer, nn.GELU()) if depth > 1 else (layer,)))
    )
    ours: Any = fm.quantize_model(copy.deepcopy(dense), fmt, storage="fp8")
    models: list[Any] = [ours, dense] if depth > 1 else [ours[0], dense[0]]
    if compiled:
        models = [torch.compile(model, fullgraph=True) for model in models]
    if halved:
        ours[0].weight.kept_scale = ours[0].weight.kept_scale.bfloat16()
    first, second = (both(model, x, autocast=autocast) for model in models)
    return first, second


def layers(on_card: ExitStack) -> Iterator[Case]:
    """One layer, eager."""
    yield Case(
        "a layer, a CPU's path, float32", "E4M3", *pair("E4M3", SMALL, autocast=False), 1, 1.5
    )
    pretend_a_card(on_card)
    for fmt, bound in (("E4M3", 1.25), ("E2M5", None)):
        yield Case(
            "a layer, a card's path, autocast",
            fmt,
            *pair(fmt, TINY, autocast=True, halved=fmt == "E4M3"),
            1,
            bound,
        )


def compiled_layers(on_card: ExitStack) -> Iterator[Case]:
    """A stack of them, compiled."""
    for name, autocast in (("layers, compiled", False), ("layers, compiled, autocast", True)):
        yield Case(
            name, "E4M3", *pair("E4M3", TINY, DEPTH, autocast=autocast, compiled=True), DEPTH, 1.3
        )


def steps(on_card: ExitStack) -> Iterator[Case]:
    """The step of an optimizer."""
    for what, ours, theirs, count, goal_us in cases(on_card):
        yield Case(f"step() of {what}", "E4M3", ours, theirs, count, None, goal_us)


PARTS: Final[dict[str, Callable[[ExitStack], Iterator[Case]]]] = {
    "layer": layers,
    "compiled": compiled_layers,
    "step": steps,
}
"""The parts by the names that ``--parts`` takes: each makes its cases, and may pretend
that there is a GPU.
"""


def pretend_a_card(until: ExitStack) -> None:
    """Decode as on a GPU, launched by Triton itself, with a driver and a compiled
    kernel that do nothing.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from fp8manifold._triton.arrays import decode_kernel
    from fp8manifold._triton.whole import array_on_gpu

    def compiled(key: Any, signature: Any, device: int, *rest: Any) -> Any:
        return decode_kernel.device_caches[device][0].setdefault(key, KERNEL)

    def decode(
        codes: Tensor, fmt: Any, dtype: torch.dtype, scale: Tensor | None = None
    ) -> Tensor | None:
        given = codes.detach().contiguous().resolve_neg()
        return array_on_gpu("decode", given, fmt, dtype, scale)

    idle = {"get_current_device": lambda: 0, "get_current_stream": lambda device: 0}
    driver.set_active(SimpleNamespace(**idle, get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    until.callback(driver.set_active, None)  # which is asked for anew
    places: list[tuple[Any, str, Any]] = [
        (decode_kernel, "_do_compile", compiled),
        (storage, "decoded", decode),
    ]
    places += [(torch.cuda, "device", lambda device: nullcontext())]
    places += [(_products, "decoded", decode), (_products, "is_on_card", lambda codes: True)]
    for owner, name, instead in places:
        until.enter_context(patch.object(owner, name, instead))


KERNEL: Final = SimpleNamespace(
    function=0, packed_metadata=(), launch_metadata=lambda *facts: None, run=lambda *arguments: None
)


def measure(case: Case, pairs: int, calls: int) -> Figure:
    """The figure of one case."""

    def many(step: Step) -> Step:
        def run() -> None:
            for _ in range(calls):
                step()

        return run

    device = torch.device("cpu")
    ours, theirs = many(case.ours), many(case.theirs)
    paired_seconds(ours, theirs, 1, device)
    times = paired_seconds(ours, theirs, pairs, device)
    ratios = [a / b for a, b in times]
    own, reference = (1e6 * min(column) / calls / case.size for column in zip(*times, strict=True))
    spread = (statistics.median(ratios), min(ratios), max(ratios))
    return Figure(
        case.what, case.format, own / reference, spread, own, reference, case.goal, case.goal_us
    )


def goal(one: Figure) -> str:
    """The goal, and whether it is met."""
    if one.goal_us is not None:
        return f"<= {one.goal_us:.0f} µs, {'met' if one.ours_us <= one.goal_us else 'NOT met'}"
    return (
        "none"
        if one.goal is None
        else f"<= {one.goal}, {'met' if one.ratio <= one.goal else 'NOT met'}"
    )


HEADER: Final = (
    "what",
    "format",
    "ratio of the least",
    "of the pairs",
    "goal",
    "µs",
    "reference, µs",
)
RULE: Final = ("---", "---", "---:", "---:", "---", "---:", "---:")


def lines(figures: list[Figure]) -> list[tuple[str, ...]]:
    """The table's rows."""
    rows: list[tuple[str, ...]] = [HEADER]
    rows += [
        (
            *(
                one.what,
                one.format,
                f"{one.ratio:.2f}x",
                "{:.2f}x ({:.2f} .. {:.2f})".format(*one.pairs),
            ),
            *(goal(one), f"{one.ours_us:.1f}", f"{one.theirs_us:.1f}"),
        )
        for one in figures
    ]
    return rows


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pairs", type=int, default=60, help="pairs of each case")
    parser.add_argument("--calls", type=int, default=50, help="calls of each side of a pair")
    add_form_options(parser)
    add_option(parser)
    return parser


def main() -> None:
    """Print the table."""
    parser = build_parser()
    options = parser.parse_args()
    for name in ("pairs", "calls"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least 1")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures = []
    for name in options.parts:
        with ExitStack() as on_card:
            for case in PARTS[name](on_card):
                print(f"{case.what}: {case.format}", file=sys.stderr, flush=True)
                figures.append(measure(case, options.pairs, options.calls))
    title = f"torch {torch.__version__}, CPU, one thread, process CPU time"
    if options.json:
        print(json.dumps({"title": title, "figures": [asdict(one) for one in figures]}, indent=1))
    else:
        print(
            title,
            text_table(lines(figures), RULE, options.markdown),
            sep="\n" * (1 + options.markdown),
        )
    if options.record:
        rows = [
            (one.what, one.format, one.ratio, one.pairs, goal(one), one.ours_us) for one in figures
        ]
        record(
            "`nn.Linear` of the same shape, or fused AdamW over as many parameters",
            HEADER[:6],
            rows,
        )


if __name__ == "__main__":
    main()
