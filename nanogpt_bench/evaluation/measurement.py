"""Measuring one model on windows of a text, with float weights and rounded to formats:
an evaluation for each.

Also their table, the gaps of layer patterns by format (sensitivity.json), and mixtures
of formats chosen from these.
"""

import json
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config.metrics import OF_LABELS
from nanogpt_bench.loop.trainer import mean_and_error
from nanogpt_bench.model.causal import is_linear, window_losses
from nanogpt_bench.model.weights import save_weights
from nanogpt_bench.setup.memory import memory_of
from nanogpt_bench.system.errors import refusals

#: the key of the embeddings in mappings from layer patterns to formats
EMBEDDINGS = "embeddings"


@contextmanager
def rounded(
    model: nn.Module,
    formats: Mapping[str, Any],
    *,
    tied: Literal["refuse", "untie", "leave"] = "leave",
    **options: Any,
) -> Iterator[int]:
    """Round the layers that patterns name, and the embeddings, within the block; yield
    the bytes of the whole model.

    A head that shares the embedding's weight shares the rounded one, unless it is
    untied. Buffers, such as rotary caches, are left alone. The float weights stay in
    memory and are not copied.

    Args:
        model: a model of float weights, which are restored afterwards.
        formats: layer pattern, or `embeddings`, to format or specification; nothing is
            rounded without any.
        tied: `untie` or `leave`, for a head that shares the embedding's weight.
        options: further arguments of `fm.quantize_model`.
    """
    linear = {pattern: value for pattern, value in formats.items() if pattern != EMBEDDINGS}
    fmt = formats.get(EMBEDDINGS, "none")
    before = dict(model.named_modules())
    try:
        with ExitStack() as stack:
            saved = (
                stack.enter_context(_embeddings_rounded(model, fmt, options))
                if fmt != "none"
                else 0
            )
            if linear:
                quantized(model, linear, tied=tied, **options)
            yield memory_of([*model.parameters(), *model.buffers()]) - saved
    finally:
        for name, module in list(model.named_modules()):
            if isinstance(module, fm.QuantizedLinear):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, before[name])


@contextmanager
def _embeddings_rounded(model: nn.Module, fmt: Any, options: Mapping[str, Any]) -> Iterator[int]:
    """Round embeddings with a scale per row, as a linear layer's weight; yield the
    bytes that codes would save.
    """
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    floats = [(table, table.data) for table in tables]
    saved = 0
    try:
        for table, values in floats:
            linear = nn.Linear(values.shape[1], values.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(values, requires_grad=False)
            codes = quantized(linear, fmt, **options).weight.detach()
            saved += values.nbytes - memory_of([codes])
            table.data = codes.dequantize()
        yield saved
    finally:
        for table, values in floats:
            table.data = values


def quantized(model: nn.Module, formats: Any, **options: Any) -> Any:
    """Quantise in place to one byte per weight, or refuse formats that can't be used
    with this model.
    """
    with refusals("formats", ValueError, TypeError):
        return fm.quantize_model(model, formats, "fp8", **options)


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of a model's weights in one set of formats; losses are in nats per
    token or label.
    """

    format: str
    val_loss: float
    #: loss minus that of the float weights, window by window; in `evaluate_run` minus
    #: that of the weights as trained
    gap: float | None
    perplexity: float | None
    bits_per_byte: float | None
    quantized_parameters: int
    storage: str = ""
    scale: str = ""
    formats: Mapping[str, Any] = field(default_factory=dict)
    val_loss_se: float | None = None
    gap_se: float | None = None
    bytes_per_parameter: float | None = None
    seconds: float | None = None
    #: the checkpoint, if the weights are a run's
    checkpoint: str | None = None
    #: metrics of the task classify, by `config.metrics.Metric.figure`
    of_labels: Mapping[str, float | None] = field(default_factory=dict)

    def facts(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the fields called `names`, and the metrics of labels, as they are
        written to a file.
        """
        return {name: getattr(self, name) for name in names} | dict(self.of_labels)


@dataclass
class Measurement:
    """A model and windows of a text, on which the same weights are measured in one set
    of formats after the other.
    """

    #: the path given by the user
    name: str
    model: nn.Module
    windows: Tensor
    tokens_per_byte: float
    batch: int
    options: Mapping[str, Any]
    #: folder for the weights of every row
    save: Path | None = None
    #: function that reads the model again for every row, into its formats
    reader: Callable[[Mapping[str, Any], Mapping[str, Any]], nn.Module] | None = None
    #: formats and granularities of a published model that is measured as its files have
    #: it
    stored: tuple[str, str] | None = None
    #: loss of each window with float weights
    floats: list[float] = field(default_factory=list)
    #: loss of each window in the last row
    losses: list[float] = field(default_factory=list)
    #: what was not quantised in the last row, and why
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Find the layers and the number of parameters."""
        owners = Counter(
            id(each) for _, each in self.model.named_parameters(remove_duplicate=False)
        )
        #: the linear layers whose weight is not shared
        self.layers = [
            name
            for name, module in self.model.named_modules()
            if is_linear(module) and owners[id(module.weight)] == 1
        ]
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def row(
        self,
        name: str,
        formats: Mapping[str, Any],
        scale: str = "",
        *,
        saves: bool = True,
        against: Sequence[float] = (),
    ) -> Evaluation:
        """Measure one set of formats; the first row has to have none. `saves` allows
        writing the weights to `save`.

        The gap is to the losses `against`, window by window; without these to those of
        the float weights.
        """
        begun = time.perf_counter()
        options = {**self.options, **({"granularity": scale} if scale else {})}
        with self._in(formats, options) as size:
            losses = window_losses(self.model, self.windows, self.batch)
            report = fm.quantization_report(self.model)
            if self.save is not None and saves:
                save_weights(
                    self.model, self.save / f"{'-'.join(filter(None, (name, scale)))}.safetensors"
                )
        self.floats = self.floats or losses
        tables = list(self.model.modules()) if formats.get(EMBEDDINGS, "none") != "none" else []
        also = {
            id(table.weight): table.weight.numel()
            for table in tables
            if isinstance(table, nn.Embedding)
        }
        self.left = [
            f"{layer.name} ({layer.parameters:,}): {layer.detail}"
            for layer in report.left
            if not any(
                id(weight) in also
                for weight in self.model.get_submodule(layer.name).parameters(recurse=False)
            )
        ]
        self.losses = losses
        differences = [
            one - other for one, other in zip(losses, against or self.floats, strict=True)
        ]
        loss, error = mean_and_error(losses)
        gap, gap_error = mean_and_error(differences) if formats else (None, None)
        return Evaluation(
            format=name,
            scale=scale,
            formats=dict(formats),
            val_loss=loss,
            val_loss_se=error,
            gap=gap,
            gap_se=gap_error,
            perplexity=math.exp(loss) if loss < 700 else None,
            bits_per_byte=loss / math.log(2) * self.tokens_per_byte,
            bytes_per_parameter=size / self.parameters,
            quantized_parameters=report.quantized_parameters + sum(also.values()),
            seconds=time.perf_counter() - begun,
        )

    @contextmanager
    def _in(self, formats: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[int]:
        if self.reader is None:
            with rounded(self.model, formats, **options) as size:
                yield size
            return
        if formats:
            self.model = nn.Identity()  # frees the model before the next is read
            self.model = self.reader(formats, options)
        held = [*self.model.parameters(), *self.model.buffers()]
        narrow = sum(x.nbytes for x in held if x.dtype in (torch.bfloat16, torch.float16))
        yield memory_of(held) + narrow  # weights read in 16 bits count as float32


FILE = "sensitivity.json"


def rows_table(rows: Sequence[Evaluation], gap: str = "gap to float") -> Table:
    """Return the rows as a table for the terminal; `gap` is the title of the column of
    gaps.
    """
    labels = [metric for metric in OF_LABELS if any(row.of_labels for row in rows)]
    measured = rows[0].seconds is not None
    table = Table("format", "scales" if measured else "storage")
    beside = [metric.title for metric in labels] or ["perplexity", "bits/byte"]
    more = ["bytes/param", "quantised", "seconds"] if measured else ["quantised"]
    for name in ("loss" if measured else "val loss", gap, *beside, *more):
        table.add_column(name, justify="right")
    for row in rows:
        figures = [_cell(row.of_labels.get(metric.figure)) for metric in labels]
        figures = figures or [_cell(row.perplexity, ".2f"), _cell(row.bits_per_byte)]
        losses = (
            _cell(row.val_loss) + _error(row.val_loss_se),
            _cell(row.gap, "+.4f") + _error(row.gap_se),
        )
        size = [_cell(row.bytes_per_parameter, ".3f")] if measured else []
        time = [_cell(row.seconds, ".1f")] if measured else []
        where = row.scale if measured else row.storage
        table.add_row(
            row.format, where, *losses, *figures, *size, f"{row.quantized_parameters:,}", *time
        )
    return table


def _cell(value: float | None, spec: str = ".4f") -> str:
    return "-" if value is None else format(value, spec)


def _error(error: float | None) -> str:
    return "" if error is None else f" ± {error:.4f}"


def gaps_table(content: Mapping[str, Any]) -> str:
    """Return the gaps as a Markdown table, and below it the settings of the mixture
    with the lowest gaps.
    """
    lines = [
        f"| quantised alone | {' | '.join(content['formats'])} |",
        "|---|" + "---:|" * len(content["formats"]),
    ]
    for pattern, gaps, ends in zip(
        content["patterns"], content["gap"], content["status"], strict=True
    ):
        cells = [
            end or "-" if gap is None else f"{gap:+.3f}"
            for gap, end in zip(gaps, ends, strict=True)
        ]
        lines.append(f"| {'all layers' if pattern == '*' else pattern} | {' | '.join(cells)} |")
    settings = shlex.join(_settings(content)) if content["operand"] == "weight" else ""
    return "\n".join(lines) + "\n" + (f"\nlowest gaps: {settings}\n" if settings else "")


def _settings(content: Mapping[str, Any]) -> list[str]:
    """The mixture with the lowest gaps as words of a command line, with the settings
    behind the table.
    """
    found, keys = mixture(content), content.get("keys", {})
    formats = {
        key: name for pattern, name in found.items() for key in keys.get(pattern, (pattern,))
    }
    if not formats:
        return []
    formats |= {
        pattern: value
        for pattern, value in content.get("given", {}).items()
        if pattern != EMBEDDINGS
    }
    values = [
        (pattern, value if isinstance(value, str) else json.dumps(value))
        for pattern, value in formats.items()
    ]
    tied = ["--model.tied", content["tied"]] if content.get("tied") else []
    return [
        *(word for pattern, value in values for word in (f"--model.formats.{pattern}", value)),
        *tied,
    ]


def mixture(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the format with the lowest gap for each layer pattern; `*`, embeddings, a
    sweep's blocks are left out.
    """
    given = [name for name in content["patterns"] if name not in ("*", EMBEDDINGS)]
    patterns = [name for name in given if "keys" in content or not name.startswith("blocks.")]
    rows = dict(zip(content["patterns"], content["gap"], strict=True))
    known = {
        pattern: [
            (gap, name)
            for gap, name in zip(rows[pattern], content["formats"], strict=True)
            if gap is not None
        ]
        for pattern in patterns
    }
    return {pattern: min(cells)[1] for pattern, cells in known.items() if cells}
