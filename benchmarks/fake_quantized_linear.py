"""The cost of a fake-quantised linear layer, as a ratio to torchao's emulated one.

    python benchmarks/fake_quantized_linear.py [--sizes 512x2048] [--tokens 1024]
                                               [--recipes tensor channel] [--pairs N]
                                               [--record]

One thread, float32. Forward and backward, with gradients of the input, the weight and
the bias: weight and input in E4M3, the output's gradient in E5M2, all at scales
measured in each pass, one for each tensor (``tensor``) or one for each row
(``channel``). The two layers are timed in turn (process CPU time) and the ratio is the
median over the pairs, with the smallest and the largest. The last figures are the ratio
to a plain ``nn.Linear``, and the difference between the results of this layer and
torchao's. With scales of rows torchao quantises all operands again for the backward
pass, where this layer reuses its own.
"""

import argparse
import copy
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Final

import torch
from _forms import check_at_least
from _record import add_option, record
from _timing import CPU, Ratio, Step, paired_seconds
from linear_forward import LayerSize, size_of, step_of
from torch import Tensor, nn

import fp8manifold as fm

TORCHAO_GOAL: Final = 1.0


@dataclass(frozen=True)
class RecipeTimes:
    """One measurement."""

    layer: str
    tokens: int
    recipe: str
    pairs: int
    torchao_ms: float
    ratio: float
    ratio_min: float
    ratio_max: float
    ratio_to_linear: float
    difference: float

    @property
    def met(self) -> bool:
        """True if this layer is no slower than torchao's."""
        return self.ratio <= TORCHAO_GOAL

    @property
    def ratios(self) -> Ratio:
        """The median ratio to torchao's layer, the smallest and the largest."""
        return Ratio(self.ratio, self.ratio_min, self.ratio_max)


def library_layer(linear: nn.Linear, recipe: str) -> nn.Module:
    """Return this library's layer."""
    e4m3 = {"format": "E4M3", "granularity": recipe}
    e5m2 = {"format": "E5M2", "granularity": recipe}
    spec = fm.LayerSpec(e4m3, e4m3, gradient={"activation": e5m2})
    return fm.QuantizedLinear(copy.deepcopy(linear), spec, storage="master")


def torchao_layer(linear: nn.Linear, recipe: str) -> nn.Module:
    """Return torchao's layer, emulated."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.config import CastConfig, ScalingGranularity

    granularity = (
        ScalingGranularity.TENSORWISE if recipe == "tensor" else ScalingGranularity.AXISWISE
    )
    dtypes = {
        "input": torch.float8_e4m3fn,
        "weight": torch.float8_e4m3fn,
        "grad_output": torch.float8_e5m2,
    }
    casts: dict[str, Any] = {
        f"cast_config_{name}": CastConfig(scaling_granularity=granularity, target_dtype=dtype)
        for name, dtype in dtypes.items()
    }
    config = Float8LinearConfig(**casts, emulate=True)
    return convert_to_float8_training(nn.Sequential(copy.deepcopy(linear)), config=config)[0]


def output_and_gradients(layer: nn.Module, tokens: int) -> list[Tensor]:
    """Return the output and the gradients of one pass over a fixed batch."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, layer.in_features, generator=generator).requires_grad_()
    y = layer(x)
    y.backward(torch.randn(y.shape, generator=generator))
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]


def difference(first: nn.Module, second: nn.Module, tokens: int) -> float:
    """Return the largest relative difference, by norm, between the results of two layers."""
    pairs = zip(
        output_and_gradients(first, tokens), output_and_gradients(second, tokens), strict=True
    )
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def measure_recipe(size: LayerSize, tokens: int, recipe: str, pairs: int) -> RecipeTimes:
    """Time our layer against torchao's, and against ``nn.Linear``."""
    linear = nn.Linear(*size)
    layers = [library_layer(linear, recipe), torchao_layer(linear, recipe), linear]
    largest_difference = difference(layers[0], layers[1], tokens)
    steps: list[Step] = [step_of(layer, tokens, size, True, torch.empty(0)) for layer in layers]
    for step in steps:
        step()
    library_step, torchao_step, linear_step = steps
    times = paired_seconds(library_step, torchao_step, pairs, CPU)
    to_linear = Ratio.of_pairs(paired_seconds(library_step, linear_step, pairs, CPU))
    torchao_ms = 1e3 * statistics.median(pair.reference for pair in times)
    return RecipeTimes(
        str(size),
        tokens,
        recipe,
        pairs,
        torchao_ms,
        *Ratio.of_pairs(times),
        ratio_to_linear=to_linear.median,
        difference=largest_difference,
    )


def line(row: RecipeTimes) -> str:
    """Return the row as text."""
    return (
        f"{row.layer}, {row.tokens} tokens, a scale for each {row.recipe}: {row.ratios} "
        f"torchao's {row.torchao_ms:.1f} ms, goal <= {TORCHAO_GOAL:.1f}x: "
        f"{'met' if row.met else 'NOT met'}; {row.ratio_to_linear:.2f}x nn.Linear; "
        f"results {row.difference:.1e} apart"
    )


def recipe_cells(row: RecipeTimes) -> tuple[object, ...]:
    """Return the row as numbers, for the site."""
    return (
        row.layer,
        row.tokens,
        f"one a {row.recipe}",
        row.ratios,
        (row.ratio_to_linear,),
        f"{TORCHAO_GOAL:g}x, {'met' if row.met else 'not met'}",
    )


RECIPE_COLUMNS: Final = (
    "layer",
    "tokens",
    "scales",
    "ratio to torchao's",
    "ratio to nn.Linear",
    "goal",
)


def recipe_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=size_of, nargs="+", default=[LayerSize(512, 2048)])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument(
        "--recipes", nargs="+", choices=("tensor", "channel"), default=["tensor", "channel"]
    )
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    add_option(parser)
    return parser


def main() -> int:
    """Print the table, and return 1 if the goal is missed."""
    parser = recipe_parser()
    options = parser.parse_args()
    check_at_least(parser, options, 1, "tokens", "pairs")
    try:
        import torchao
    except ImportError:
        print("torchao is not installed: pip install 'fp8manifold[torchao]'", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [
        measure_recipe(size, options.tokens, recipe, options.pairs)
        for size, recipe in product(options.sizes, options.recipes)
    ]
    versions = f"torch {torch.__version__}, torchao {torchao.__version__}"
    title = f"{versions}, CPU, one thread, process CPU time, {options.pairs} pairs"
    if options.json:
        facts = [asdict(row) | {"met": row.met} for row in rows]
        print(json.dumps({"title": title, "rows": facts}, indent=1))
    else:
        print(title, *map(line, rows), sep="\n")
    if options.record:
        record(
            "torchao's emulated `Float8Linear`, and to `nn.Linear`",
            RECIPE_COLUMNS,
            map(recipe_cells, rows),
            packages=("torchao",),
        )
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
