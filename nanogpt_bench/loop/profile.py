"""What a training step costs over batch sizes, and what the tensors of a float training need of a format."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import fp8manifold as fm
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import Resolved, build_config
from nanogpt_bench.data.batches import Corpus, open_corpus
from nanogpt_bench.setup.fits import check_fits
from nanogpt_bench.setup.formats import format_name
from nanogpt_bench.setup.layers import forward_weight, linear_layers
from nanogpt_bench.setup.memory import held_bytes, plain_tensors
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.runtime import runtime
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.words import counted
from nanogpt_bench.training.points import Observer, Step
from nanogpt_bench.training.trainer import Trainer

WARMUP_STEPS = 2
BATCH_COLUMNS = ("batch size", "tokens/step", "ms/step", "tokens/s", "weights+state", "gradients", "saved", "peak")
MIB = 2**20
FORMATS = ("E4M3", "E5M2", "E3M4", "E2M5", "E1M6", "E6M1", "E7M0")
#: how often the tensors are looked at, first and last step included
LOOKS = 5
WEIGHT, ACTIVATION, RESIDUAL = "weight", "activation", "residual"
WEIGHT_GRADIENT, ACTIVATION_GRADIENT = "weight gradient", "activation gradient"
OPERANDS = (WEIGHT, ACTIVATION, RESIDUAL, WEIGHT_GRADIENT, ACTIVATION_GRADIENT)
RANGE_COLUMNS = ("tensor", "amax", "min nonzero", "binades", "kurtosis", "held by")


# Batch sizes


def profile_batch_sizes(
    settings: Mapping[str, Any], sizes: Sequence[int], steps: int, *, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return a row a batch size: median seconds of a step over `steps`, and the bytes it needs.

    A size that does not fit into the device's memory has a row without figures, and the larger ones are not tried.

    Raises:
        BenchError: settings or a corpus that can't be used.
    """
    configs = configs_of(settings, sizes)
    rows: list[dict[str, Any]] = []
    for config in configs:
        say(f"batch size {config.train.batch_size}: {WARMUP_STEPS + steps} steps")
        with runtime(config) as device:
            corpus = open_corpus(config)
            try:
                rows.append(_measure(config, corpus, device, steps))
            except torch.OutOfMemoryError:
                rows.append(_out_of_memory(config))
                return rows
    return rows


def configs_of(settings: Mapping[str, Any], sizes: Sequence[int]) -> list[Resolved]:
    """Return a configuration a batch size, resolved.

    Raises:
        BenchError: settings that can't be used, or more than there is memory for.
    """
    configs = [resolve(build_config({**settings, "train.batch_size": size})) for size in sizes]
    for config in configs:
        check_fits(config)
    return configs


def _measure(config: Resolved, corpus: Corpus, device: torch.device, steps: int) -> dict[str, Any]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    check_fits(config, corpus)
    trainer = Trainer(config, corpus, device)
    # The first step makes the optimizer's state and what the library compiles or looks up once.
    _take_step(trainer, 1)
    saved = SavedBytes(trainer.model)
    _take_step(trainer, 2, saved)
    gradients = sum(_bytes(p.grad) for p in trainer.model.parameters() if p.grad is not None)
    seconds = [_timed(trainer, WARMUP_STEPS + number) for number in range(1, steps + 1)]
    return {
        **_facts(config),
        "seconds_per_step": statistics.median(seconds),
        "tokens_per_s": _facts(config)["tokens_per_step"] / statistics.median(seconds),
        "held_bytes": held_bytes(trainer.model, trainer.optimizer),
        "gradient_bytes": gradients,
        "saved_bytes": saved.most,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "steps": steps,
        "device": str(device),
    }


def _facts(config: Config) -> dict[str, Any]:
    train = config.train
    tokens = train.batch_size * train.accumulation * (config.model.block_size or 0)
    return {"batch_size": train.batch_size, "tokens_per_step": tokens}


def _out_of_memory(config: Config) -> dict[str, Any]:
    figures = ("seconds_per_step", "tokens_per_s", "held_bytes", "gradient_bytes", "saved_bytes", "peak_bytes")
    return {**_facts(config), **dict.fromkeys(figures), "steps": 0, "device": "out of memory"}


def _take_step(trainer: Trainer, number: int, *observers: Observer) -> None:
    trainer.train_step(trainer.new_step(number, last=False), observers)
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)


def _timed(trainer: Trainer, number: int) -> float:
    begun = perf_counter()
    _take_step(trainer, number)
    return perf_counter() - begun


class SavedBytes(Observer):
    """Measures what a forward pass keeps for its backward pass, parameters apart; `most` of all micro-batches.

    Memory that several operations keep counts once.
    """

    def __init__(self, model: nn.Module) -> None:
        held = [inner for parameter in model.parameters() for inner in plain_tensors(parameter)]
        self._own = {inner.untyped_storage().data_ptr() for inner in held}
        self._sizes: dict[int, int] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self.most = 0

    def before_forward(self, step: Step) -> None:
        self._sizes = {}
        self._hooks.__enter__()

    def after_forward(self, step: Step) -> None:
        self._hooks.__exit__(None, None, None)
        self.most = max(self.most, sum(self._sizes.values()))

    def _pack(self, tensor: Tensor) -> Tensor:
        for inner in plain_tensors(tensor):
            storage = inner.untyped_storage()
            if storage.data_ptr() not in self._own:
                self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor


def _bytes(tensor: Tensor) -> int:
    return sum(inner.untyped_storage().nbytes() for inner in plain_tensors(tensor))


def batch_cells(row: Mapping[str, Any]) -> list[str]:
    """Return a row of the table."""
    seconds, speed = row["seconds_per_step"], row["tokens_per_s"]
    if seconds is None:
        return [str(row["batch_size"]), f"{row['tokens_per_step']:,}", "out of memory", *["-"] * 5]
    sizes = [row[key] for key in ("held_bytes", "gradient_bytes", "saved_bytes", "peak_bytes")]
    return [
        str(row["batch_size"]),
        f"{row['tokens_per_step']:,}",
        f"{1e3 * seconds:.1f}",
        f"{speed:,.0f}",
        *("-" if size is None else f"{size / MIB:,.1f} MiB" for size in sizes),
    ]


# Ranges


@dataclass(frozen=True)
class Tolerance:
    """Shares of a tensor's elements that may saturate, and that may become zero."""

    overflow: float
    underflow: float


@dataclass
class Range:
    """The range of one tensor over all looks: extremes, and in every format the worst underflow."""

    operand: str
    layer: str
    amax: float = 0.0
    min_nonzero: float = math.inf
    kurtosis: float | None = None
    nonfinite: float = 0.0
    underflow: dict[str, float] = field(default_factory=dict)

    def take(self, other: Range) -> None:
        """Widen by what another look, or another layer, found."""
        self.amax, self.min_nonzero = max(self.amax, other.amax), min(self.min_nonzero, other.min_nonzero)
        self.nonfinite = max(self.nonfinite, other.nonfinite)
        known = [figure for figure in (self.kurtosis, other.kurtosis) if figure is not None]
        self.kurtosis = max(known, default=None)
        for name, share in other.underflow.items():
            self.underflow[name] = max(share, self.underflow.get(name, 0.0))

    @property
    def binades(self) -> int:
        """Binades from the smallest magnitude above zero to the largest; 0 for a tensor of zeros."""
        if not self.amax:
            return 0
        return math.frexp(self.amax)[1] - math.frexp(self.min_nonzero)[1] + 1

    def held_by(self, tolerance: Tolerance) -> list[str]:
        """The formats in which no more than tolerated underflows, at the scale that `look` gives them."""
        return [name for name, share in self.underflow.items() if share <= tolerance.underflow]


@torch.no_grad()
def look(operand: str, layer: str, x: Tensor, formats: Sequence[fm.FloatFormat], overflow: float) -> Range:
    """Return the range of a tensor at one moment.

    A format gets the smallest scale, one for the tensor, at which at most the share `overflow` lies beyond its largest
    value; what is left to ask is how much then rounds to zero.

    >>> x, formats = torch.tensor([1.0, -2.0, 2.0**-12, 0.0]), [fm.FloatFormat(4, 3), fm.FloatFormat(1, 6)]
    >>> found = look("weight", "a", x, formats, 0.0)
    >>> found.amax, found.min_nonzero, found.binades, found.underflow
    (2.0, 0.000244140625, 14, {'E4M3': 0.0, 'E1M6': 0.25})
    """
    x = x.detach().float().flatten()
    figures = fm.monitor.range_figures(x)
    magnitudes = x[x.isfinite()].abs()
    nonzero = magnitudes[magnitudes > 0]
    if nonzero.numel() == 0:
        return Range(
            operand, layer, nonfinite=figures.nonfinite, underflow=dict.fromkeys((f.name for f in formats), 0.0)
        )
    beyond = min(int(overflow * x.numel()), magnitudes.numel() - 1)
    top = float(magnitudes.topk(beyond + 1).values[-1]) or figures.amax
    shares = {fmt.name: fm.monitor.range_figures(x, fmt, top / fmt.max).underflow or 0.0 for fmt in formats}
    return Range(
        operand, layer, figures.amax, float(nonzero.amin()), figures.kurtosis, figures.nonfinite, underflow=shares
    )


class RangeObserver(Observer):
    """Looks at every linear layer's weight, input and gradients, and at what the blocks add up, at given steps.

    The first micro-batch stands for the step's activations, its gradients of activations included; gradients of weights
    are those of the whole step, before clipping.
    """

    def __init__(
        self, model: nn.Module, formats: Sequence[fm.FloatFormat], overflow: float, steps: Iterable[int]
    ) -> None:
        self._layers = linear_layers(model)
        self._formats, self._overflow, self._steps = formats, overflow, frozenset(steps)
        self._looking = False
        self.ranges: dict[tuple[str, str], Range] = {}
        self._handles = [layer.register_forward_hook(self._hook(name)) for name, layer in self._layers.items()]

    def before_forward(self, step: Step) -> None:
        self._looking = step.number in self._steps and step.micro_step == 0

    def after_forward(self, step: Step) -> None:
        self._looking = False

    def after_backward(self, step: Step) -> None:
        if step.number not in self._steps or not step.at_last_micro_step:
            return
        for name, layer in self._layers.items():
            self._see(WEIGHT, name, forward_weight(layer))
            if layer.weight.grad is not None:
                self._see(WEIGHT_GRADIENT, name, layer.weight.grad)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def see(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not self._looking:
                return
            self._see(ACTIVATION, name, inputs[0])
            if name.endswith(".proj"):  # what a block adds to its residual path
                self._see(RESIDUAL, name, output)
            output.register_hook(lambda gradient: self._see(ACTIVATION_GRADIENT, name, gradient))

        return see

    def _see(self, operand: str, layer: str, x: Tensor) -> None:
        found = look(operand, layer, x, self._formats, self._overflow)
        self.ranges.setdefault((operand, layer), Range(operand, layer)).take(found)


def read_formats(names: Sequence[str] | None) -> list[fm.FloatFormat]:
    """Return the formats to judge, all of one byte unless named.

    Raises:
        BenchError: no such format.
    """
    canonical = dict.fromkeys(format_name(name, "--formats") for name in names or FORMATS)
    if "none" in canonical:
        raise BenchError("--formats: 'none' is no format to judge; leave it out")
    return [fm.FloatFormat.from_string(name) for name in canonical]


def profile_ranges(
    config: Resolved,
    formats: Sequence[fm.FloatFormat],
    tolerance: Tolerance,
    steps: int,
    *,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Train the first `steps` of a float configuration and return a row a tensor, layer by layer.

    Raises:
        BenchError: a corpus that can't be used.
    """
    moments = sorted({1 + round(place * (steps - 1) / (LOOKS - 1)) for place in range(LOOKS)})
    say(f"{counted(steps, 'step')} in {config.train.precision}, looking at {', '.join(map(str, moments))}")
    with runtime(config) as device:
        corpus = open_corpus(config)
        check_fits(config, corpus)
        trainer = Trainer(config, corpus, device)
        observer = RangeObserver(trainer.model, formats, tolerance.overflow, moments)
        for number in range(1, steps + 1):
            trainer.train_step(trainer.new_step(number, last=number == steps), (observer,))
        observer.close()
    ordered = sorted(observer.ranges.values(), key=lambda found: OPERANDS.index(found.operand))
    return [_row(found, tolerance) for found in ordered]


def _row(found: Range, tolerance: Tolerance) -> dict[str, Any]:
    least = found.min_nonzero if found.amax else None
    return {**asdict(found), "min_nonzero": least, "binades": found.binades, "held_by": found.held_by(tolerance)}


def merged(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with one for the same layer of all blocks, held by the formats that hold that of every block."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["operand"], _pattern(row["layer"])), []).append(row)
    return [_merge(operand, layer, group) for (operand, layer), group in groups.items()]


def _pattern(layer: str) -> str:
    """The layer's name without that of its block.

    >>> _pattern("blocks.11.attn.qkv"), _pattern("lm_head")
    ('attn.qkv', 'lm_head')
    """
    parts = layer.split(".")
    return ".".join(parts[2:]) if parts[0] == "blocks" else layer


def _merge(operand: str, layer: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    whole = Range(operand, layer)
    for row in rows:
        least = math.inf if row["min_nonzero"] is None else row["min_nonzero"]
        whole.take(Range(operand, layer, row["amax"], least, row["kurtosis"], row["nonfinite"], row["underflow"]))
    held = [name for name in rows[0]["held_by"] if all(name in row["held_by"] for row in rows)]
    least = whole.min_nonzero if whole.amax else None
    return {**asdict(whole), "min_nonzero": least, "binades": whole.binades, "held_by": held}


def range_cells(row: Mapping[str, Any]) -> list[str]:
    """Return a row of the table."""
    least, kurtosis = row["min_nonzero"], row["kurtosis"]
    return [
        f"{row['operand']} {row['layer']}",
        f"{row['amax']:.3g}",
        "-" if least is None else f"{least:.3g}",
        str(row["binades"]),
        "-" if kurtosis is None else f"{kurtosis:.3g}",
        " ".join(row["held_by"]) or "none",
    ]
