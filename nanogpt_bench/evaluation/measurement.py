"""Measuring one model on windows of a text, with float weights and rounded to formats.

`Measurement.row` makes an `Evaluation` for one set of formats. The weights get into the
formats in one of two ways:

- `rounded` quantises the layers of the model in memory, within a block, and puts the
  float layers back behind it.
- A reader reads the model again, into codes, where the floats need not stay in memory.

There are also the tables of evaluations (`rows_table`) and of the gaps of layer
patterns by format (`gaps_table`, of sensitivity.json), and the mixture with the lowest
gaps.
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
from typing import Any, Literal, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config.metrics import OF_LABELS
from nanogpt_bench.config.schema import NO_FORMAT
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
    """Round layers and embeddings within the block; yield the bytes of the whole model.

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
    linear_formats = {pattern: value for pattern, value in formats.items() if pattern != EMBEDDINGS}
    embedding_format = formats.get(EMBEDDINGS, NO_FORMAT)
    float_modules = dict(model.named_modules())
    # `quantize_model` keeps the parameters' objects, which then hold codes.
    float_weights = {
        name: module.weight.detach() for name, module in float_modules.items() if is_linear(module)
    }
    try:
        with ExitStack() as stack:
            saved_bytes = 0
            if embedding_format != NO_FORMAT:
                saved_bytes = stack.enter_context(
                    _rounded_embeddings(model, embedding_format, options)
                )
            if linear_formats:
                quantized(model, linear_formats, tied=tied, **options)
            yield memory_of([*model.parameters(), *model.buffers()]) - saved_bytes
    finally:
        for name, module in list(model.named_modules()):
            # A layer that held codes before stays as it was.
            if isinstance(module, fm.QuantizedLinear) and name in float_weights:
                parent, _, child = name.rpartition(".")
                linear = float_modules[name]
                linear.weight = nn.Parameter(float_weights[name], module.weight.requires_grad)
                setattr(model.get_submodule(parent), child, linear)


@contextmanager
def _rounded_embeddings(model: nn.Module, fmt: Any, options: Mapping[str, Any]) -> Iterator[int]:
    """Round embeddings with a scale per row, as a linear layer's weight.

    Yields the bytes that codes would save.
    """
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    float_values = [table.data for table in tables]
    saved_bytes = 0
    try:
        for table, values in zip(tables, float_values, strict=True):
            linear = nn.Linear(values.shape[1], values.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(values, requires_grad=False)
            codes = quantized(linear, fmt, **options).weight.detach()
            saved_bytes += values.nbytes - memory_of([codes])
            table.data = codes.dequantize()
        yield saved_bytes
    finally:
        for table, values in zip(tables, float_values, strict=True):
            table.data = values


def quantized(model: nn.Module, formats: Any, **options: Any) -> Any:
    """Quantise in place to one byte per weight.

    Formats that can't be used with this model are refused.
    """
    with refusals("formats", ValueError, TypeError):
        return fm.quantize_model(model, formats, "codes", **options)


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of a model's weights in one set of formats.

    Losses are in nats per token or label.
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
        """Return the fields called `names`, and the metrics of labels, for a file."""
        return {name: getattr(self, name) for name in names} | dict(self.of_labels)


class StoredAs(NamedTuple):
    """Formats of a published model's weights, and granularities of its scales."""

    formats: str
    granularities: str


@dataclass
class Measurement:
    """A model and windows of a text, measured in one set of formats after the other."""

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
    #: how a published model is stored that is measured as its files have it
    stored: StoredAs | None = None
    #: loss of each window with float weights
    float_losses: list[float] = field(default_factory=list)
    #: loss of each window in the last row
    losses: list[float] = field(default_factory=list)
    #: what was not quantised in the last row, and why
    unquantised: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Find the layers and the number of parameters."""
        parameters = self.model.named_parameters(remove_duplicate=False)
        owners = Counter(id(parameter) for _, parameter in parameters)
        #: the linear layers whose weight is not shared
        self.layers: list[str] = []
        for name, module in self.model.named_modules():
            if is_linear(module) and owners[id(module.weight)] == 1:
                self.layers.append(name)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def row(
        self,
        name: str,
        formats: Mapping[str, Any],
        scale: str = "",
        *,
        saves: bool = True,
        reference_losses: Sequence[float] = (),
    ) -> Evaluation:
        """Measure one set of formats; the first row has to have none.

        The gap is to `reference_losses`, window by window. Without these it is to the
        losses of the float weights. `saves` allows writing the weights to `save`.
        """
        start = time.perf_counter()
        options = dict(self.options)
        if scale:
            options["granularity"] = scale
        with self._in_formats(formats, options) as size:
            losses = window_losses(self.model, self.windows, self.batch)
            report = fm.quantization_report(self.model)
            if self.save is not None and saves:
                file_name = f"{name}-{scale}" if scale else name
                save_weights(self.model, self.save / f"{file_name}.safetensors")
        if not self.float_losses:
            self.float_losses = losses
        self.losses = losses
        rounded_tables = {}
        if formats.get(EMBEDDINGS, NO_FORMAT) != NO_FORMAT:
            rounded_tables = self._table_sizes()
        self.unquantised = self._lines_of_unquantised(report, rounded_tables)
        differences = []
        base = reference_losses or self.float_losses
        for loss, reference_loss in zip(losses, base, strict=True):
            differences.append(loss - reference_loss)
        mean_loss, loss_error = mean_and_error(losses)
        gap, gap_error = mean_and_error(differences) if formats else (None, None)
        return Evaluation(
            format=name,
            scale=scale,
            formats=dict(formats),
            val_loss=mean_loss,
            val_loss_se=loss_error,
            gap=gap,
            gap_se=gap_error,
            perplexity=math.exp(mean_loss) if mean_loss < 700 else None,
            bits_per_byte=mean_loss / math.log(2) * self.tokens_per_byte,
            bytes_per_parameter=size / self.parameters,
            quantized_parameters=report.quantized_parameters + sum(rounded_tables.values()),
            seconds=time.perf_counter() - start,
        )

    def _table_sizes(self) -> dict[int, int]:
        """Return the parameters of each table of embeddings, by its weight's id."""
        parameters = {}
        for module in self.model.modules():
            if isinstance(module, nn.Embedding):
                parameters[id(module.weight)] = module.weight.numel()
        return parameters

    def _lines_of_unquantised(self, report: Any, rounded_tables: Mapping[int, int]) -> list[str]:
        """Return a line for each layer that a report lists as left in float.

        Embeddings are among these, also where their tables were rounded; such layers are
        left out.
        """
        lines = []
        for layer in report.left:
            weights = self.model.get_submodule(layer.name).parameters(recurse=False)
            if not any(id(weight) in rounded_tables for weight in weights):
                lines.append(f"{layer.name} ({layer.parameters:,}): {layer.detail}")
        return lines

    @contextmanager
    def _in_formats(self, formats: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[int]:
        """Put the weights into formats within the block; yield the model's bytes."""
        if self.reader is None:
            with rounded(self.model, formats, **options) as size:
                yield size
            return
        # Without formats the model is measured as it is.
        if formats:
            # Frees the model before the next is read.
            self.model = nn.Identity()
            self.model = self.reader(formats, options)
        tensors = [*self.model.parameters(), *self.model.buffers()]
        narrow_bytes = 0
        for tensor in tensors:
            if tensor.dtype in (torch.bfloat16, torch.float16):
                narrow_bytes += tensor.nbytes
        # Weights read in 16 bits count as float32.
        yield memory_of(tensors) + narrow_bytes


GAPS_FILE = "sensitivity.json"


def rows_table(rows: Sequence[Evaluation], gap: str = "gap to float") -> Table:
    """Return the rows as a table for the terminal.

    `gap` is the title of the column of gaps.
    """
    is_measured = rows[0].seconds is not None
    label_metrics = OF_LABELS if any(row.of_labels for row in rows) else ()
    table = Table("format", "scales" if is_measured else "storage")
    titles = ["loss" if is_measured else "val loss", gap]
    titles += [metric.title for metric in label_metrics] or ["perplexity", "bits/byte"]
    titles += ["bytes/param", "quantised", "seconds"] if is_measured else ["quantised"]
    for title in titles:
        table.add_column(title, justify="right")
    for row in rows:
        cells = [
            _cell(row.val_loss) + _error(row.val_loss_se),
            _cell(row.gap, "+.4f") + _error(row.gap_se),
        ]
        if label_metrics:
            cells += [_cell(row.of_labels.get(metric.figure)) for metric in label_metrics]
        else:
            cells += [_cell(row.perplexity, ".2f"), _cell(row.bits_per_byte)]
        quantised = f"{row.quantized_parameters:,}"
        if is_measured:
            size = _cell(row.bytes_per_parameter, ".3f")
            table.add_row(row.format, row.scale, *cells, size, quantised, _cell(row.seconds, ".1f"))
        else:
            table.add_row(row.format, row.storage, *cells, quantised)
    return table


def _cell(value: float | None, spec: str = ".4f") -> str:
    return "-" if value is None else format(value, spec)


def _error(error: float | None) -> str:
    return "" if error is None else f" ± {error:.4f}"


def gaps_table(content: Mapping[str, Any]) -> str:
    """Return the gaps as a Markdown table.

    Below it are the settings of the mixture with the lowest gaps.
    """
    formats = content["formats"]
    lines = [
        f"| quantised alone | {' | '.join(formats)} |",
        "|---|" + "---:|" * len(formats),
    ]
    table = zip(content["patterns"], content["gap"], content["status"], strict=True)
    for pattern, gaps, ends in table:
        cells = []
        for gap, end in zip(gaps, ends, strict=True):
            cells.append(end or "-" if gap is None else f"{gap:+.3f}")
        lines.append(f"| {'all layers' if pattern == '*' else pattern} | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    settings = _mixture_settings(content) if content["operand"] == "weight" else []
    return f"{text}\nlowest gaps: {shlex.join(settings)}\n" if settings else text


def _mixture_settings(content: Mapping[str, Any]) -> list[str]:
    """Return the mixture with the lowest gaps as words of a command line.

    The settings under which the gaps were measured are among them.
    """
    keys = content.get("keys", {})
    formats: dict[str, Any] = {}
    for pattern, name in mixture(content).items():
        formats |= dict.fromkeys(keys.get(pattern, (pattern,)), name)
    if not formats:
        return []
    for pattern, value in content.get("given", {}).items():
        if pattern != EMBEDDINGS:
            formats[pattern] = value
    words = []
    for pattern, value in formats.items():
        text = value if isinstance(value, str) else json.dumps(value)
        words += [f"--model.formats.{pattern}", text]
    if content.get("tied"):
        words += ["--model.tied", content["tied"]]
    return words


def mixture(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the format with the lowest gap for each layer pattern.

    `*`, embeddings, and a sweep's blocks are left out.
    """
    formats: dict[str, str] = {}
    for pattern, gaps in zip(content["patterns"], content["gap"], strict=True):
        # The blocks of a sweep have the layers of other patterns.
        is_block = "keys" not in content and pattern.startswith("blocks.")
        if pattern in ("*", EMBEDDINGS) or is_block:
            continue
        names = content["formats"]
        known = [(gap, name) for gap, name in zip(gaps, names, strict=True) if gap is not None]
        if known:
            formats[pattern] = min(known)[1]
    return formats
