"""The host's time for small layers and steps, beside ``nn.Linear`` and fused AdamW.

    python benchmarks/overhead.py [--parts layer compiled step muon]
                                  [--pairs 60] [--calls 50] [--markdown | --json] [--record]

One thread, forward and backward over a few tokens, so that nearly all of it is Python
and torch's dispatcher:

    a CPU's path    a layer in float32
    a card's path   a layer under autocast as on a GPU, with kernels that do nothing. Its
                    scale is in bfloat16, because a GPU multiplies two dtypes in one
                    launch, where this CPU makes a copy first.
    compiled        a stack of layers with a GELU after each, compiled whole. The times
                    are of one layer.
    a step          `step()` of StiffnessAdamW over one-byte weights, on a CPU and with
                    kernels that do nothing, beside torch's fused AdamW over as many in
                    float32. The times are of one parameter, and so is the goal.
    Muon            `step()` of StiffnessMuon without its products, beside that of
                    StiffnessAdamW over as many one-byte weights

Both sides take their calls in turn; process CPU time. The ratio is that of the least
times, as whatever else the machine does only adds to them. Next to it are the ratios of
the pairs: median, smallest and largest.
"""

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
from _forms import add_form_options, check_at_least, print_titled, text_table
from _overhead_step import StepCase, muon_cases, step_cases
from _record import add_option, record
from _timing import Ratio, Step, paired_seconds
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold._encoded import storage
from fp8manifold.nn import _products

#: width of a small layer
SMALL: Final = 32
#: width of a layer whose kernels do next to nothing on this CPU
TINY: Final = 8
LAYER_TOKENS: Final = 4
DEPTH: Final = 12


@dataclass(frozen=True)
class Case:
    """Two functions that are called in turn."""

    work: str
    format: str
    step: Step
    reference: Step
    #: layers or parameters of a call
    size: int
    #: the largest ratio
    goal: float | None = None
    #: the largest time of a layer or parameter, in microseconds
    goal_us: float | None = None


@dataclass(frozen=True)
class CaseFigures:
    """What was measured of a case; times are per layer or parameter."""

    work: str
    format: str
    #: of the least times
    ratio: float
    #: of the pairs
    pairs: Ratio
    ours_us: float
    theirs_us: float
    goal: float | None
    goal_us: float | None


def passes_of_model(model: nn.Module, x: Tensor, *, autocast: bool) -> Step:
    """Return a function that goes forward and backward."""
    parameters = list(model.parameters())
    gradient = torch.randn(x.shape)
    gradients = {gradient.dtype: gradient, torch.bfloat16: gradient.bfloat16()}

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        y.backward(gradients[y.dtype])
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    return step


class Layers(NamedTuple):
    """Layers with one-byte weights, and the ``nn.Linear`` that they are made from."""

    coded: Any
    dense: Any

    def steps(self, *, autocast: bool) -> tuple[Step, Step]:
        """Return forward and backward of either."""
        x = torch.randn(LAYER_TOKENS, _width(self.dense), requires_grad=True)
        return (
            passes_of_model(self.coded, x, autocast=autocast),
            passes_of_model(self.dense, x, autocast=autocast),
        )


def _width(model: nn.Module) -> int:
    first = next(layer for layer in model.modules() if isinstance(layer, nn.Linear))
    return first.in_features


def one_layer(fmt: str, width: int) -> Layers:
    """Return a layer and its one-byte twin."""
    dense = nn.Sequential(nn.Linear(width, width))
    coded: Any = fm.quantize_model(copy.deepcopy(dense), fmt, storage="codes")
    return Layers(coded[0], dense[0])


def compiled_stack(fmt: str, width: int, depth: int) -> Layers:
    """Return a compiled stack of layers with a GELU after each, and its one-byte twin."""
    parts: list[nn.Module] = []
    for _ in range(depth):
        parts += [nn.Linear(width, width), nn.GELU()]
    dense = nn.Sequential(*parts)
    coded = fm.quantize_model(copy.deepcopy(dense), fmt, storage="codes")
    return Layers(torch.compile(coded, fullgraph=True), torch.compile(dense, fullgraph=True))


def layer_cases(on_card: ExitStack) -> Iterator[Case]:
    """Yield the cases of one layer, eager."""
    layers = one_layer("E4M3", SMALL)
    steps = layers.steps(autocast=False)
    yield Case("a layer, a CPU's path, float32", "E4M3", *steps, 1, goal=1.5)

    # From here on: the case above has been measured by now.
    pretend_gpu_decodes(on_card)
    layers = one_layer("E4M3", TINY)
    weight = layers.coded.weight
    weight.kept_scale = weight.kept_scale.bfloat16()
    steps = layers.steps(autocast=True)
    yield Case("a layer, a card's path, autocast", "E4M3", *steps, 1, goal=1.25)

    steps = one_layer("E2M5", TINY).steps(autocast=True)
    yield Case("a layer, a card's path, autocast", "E2M5", *steps, 1)


def compiled_cases(on_card: ExitStack) -> Iterator[Case]:
    """Yield the cases of a compiled stack of layers.

    None of them pretends that there is a GPU.
    """
    for name, autocast in (("layers, compiled", False), ("layers, compiled, autocast", True)):
        steps = compiled_stack("E4M3", TINY, DEPTH).steps(autocast=autocast)
        yield Case(name, "E4M3", *steps, DEPTH, goal=1.3)


def optimizer_cases(on_card: ExitStack) -> Iterator[Case]:
    """Yield the cases of a step of StiffnessAdamW."""
    for case in step_cases(on_card):
        yield _case_of_step(case)


def cases_of_muon(on_card: ExitStack) -> Iterator[Case]:
    """Yield the cases of a step of StiffnessMuon."""
    for case in muon_cases(on_card):
        yield _case_of_step(case)


def _case_of_step(case: StepCase) -> Case:
    return Case(
        f"step() of {case.name}",
        "E4M3",
        case.step,
        case.reference,
        case.parameters,
        goal=case.goal,
        goal_us=case.goal_us,
    )


CASES_OF_PARTS: Final[dict[str, Callable[[ExitStack], Iterator[Case]]]] = {
    "layer": layer_cases,
    "compiled": compiled_cases,
    "step": optimizer_cases,
    "muon": cases_of_muon,
}
"""The parts by the names that ``--parts`` takes.

Each makes its cases, and may pretend that there is a GPU until the stack is closed.
"""


def pretend_gpu_decodes(until: ExitStack) -> None:
    """Decode as on a GPU, with a driver and a compiled kernel that do nothing.

    Triton itself launches the kernel.
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
        plain_codes = codes.detach().contiguous().resolve_neg()
        return array_on_gpu("decode", plain_codes, fmt, dtype, scale)

    idle_driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    driver.set_active(idle_driver)
    # Without an active driver Triton looks for one again.
    until.callback(driver.set_active, None)
    replacements: list[tuple[Any, str, Any]] = [
        (decode_kernel, "_do_compile", compiled),
        (storage, "decode_by_kernel", decode),
        (torch.cuda, "device", lambda device: nullcontext()),
        (_products, "decode_by_kernel", decode),
        (_products, "is_on_card", lambda codes: True),
    ]
    for module, name, replacement in replacements:
        until.enter_context(patch.object(module, name, replacement))


#: a compiled kernel that does nothing
KERNEL: Final = SimpleNamespace(
    function=0, packed_metadata=(), launch_metadata=lambda *facts: None, run=lambda *arguments: None
)


def measure_case(case: Case, pairs: int, calls: int) -> CaseFigures:
    """Measure one case, many calls at a time."""

    def repeated(step: Step) -> Step:
        def run() -> None:
            for _ in range(calls):
                step()

        return run

    device = torch.device("cpu")
    step, reference = repeated(case.step), repeated(case.reference)
    # The first pair warms up.
    paired_seconds(step, reference, 1, device)
    times = paired_seconds(step, reference, pairs, device)
    microseconds = 1e6 / calls / case.size
    ours_us = microseconds * min(pair.measured for pair in times)
    theirs_us = microseconds * min(pair.reference for pair in times)
    return CaseFigures(
        case.work,
        case.format,
        ratio=ours_us / theirs_us,
        pairs=Ratio.of_pairs(times),
        ours_us=ours_us,
        theirs_us=theirs_us,
        goal=case.goal,
        goal_us=case.goal_us,
    )


def case_goal_text(figure: CaseFigures) -> str:
    """Return the goal, and whether it is met."""
    if figure.goal_us is not None:
        met = "met" if figure.ours_us <= figure.goal_us else "NOT met"
        return f"<= {figure.goal_us:.0f} µs, {met}"
    if figure.goal is not None:
        met = "met" if figure.ratio <= figure.goal else "NOT met"
        return f"<= {figure.goal}, {met}"
    return "none"


OVERHEAD_HEADER: Final = (
    "what",
    "format",
    "ratio of the least",
    "of the pairs",
    "goal",
    "µs",
    "reference, µs",
)
OVERHEAD_RULE: Final = ("---", "---", "---:", "---:", "---", "---:", "---:")


def overhead_rows(figures: list[CaseFigures]) -> list[tuple[str, ...]]:
    """Return the table's rows, the header first."""
    rows: list[tuple[str, ...]] = [OVERHEAD_HEADER]
    for figure in figures:
        rows.append(
            (
                figure.work,
                figure.format,
                f"{figure.ratio:.2f}x",
                str(figure.pairs),
                case_goal_text(figure),
                f"{figure.ours_us:.1f}",
                f"{figure.theirs_us:.1f}",
            )
        )
    return rows


def overhead_cells(figure: CaseFigures) -> tuple[object, ...]:
    """Return a figure as numbers, for the site."""
    return (
        figure.work,
        figure.format,
        figure.ratio,
        figure.pairs,
        case_goal_text(figure),
        figure.ours_us,
    )


def overhead_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=CASES_OF_PARTS, default=list(CASES_OF_PARTS))
    parser.add_argument("--pairs", type=int, default=60, help="pairs of each case")
    parser.add_argument("--calls", type=int, default=50, help="calls of each side of a pair")
    add_form_options(parser)
    add_option(parser)
    return parser


def main() -> None:
    """Print the table."""
    parser = overhead_parser()
    options = parser.parse_args()
    check_at_least(parser, options, 1, "pairs", "calls")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures = []
    for name in options.parts:
        with ExitStack() as on_card:
            for case in CASES_OF_PARTS[name](on_card):
                print(f"{case.work}: {case.format}", file=sys.stderr, flush=True)
                figures.append(measure_case(case, options.pairs, options.calls))
    title = f"torch {torch.__version__}, CPU, one thread, process CPU time"
    if options.json:
        print(json.dumps({"title": title, "figures": list(map(asdict, figures))}, indent=1))
    else:
        table = text_table(overhead_rows(figures), OVERHEAD_RULE, options.markdown)
        print_titled(title, table, markdown=options.markdown)
    if options.record:
        peer = "`nn.Linear` of the same shape, or fused AdamW over as many parameters"
        record(peer, OVERHEAD_HEADER[:6], map(overhead_cells, figures))


if __name__ == "__main__":
    main()
