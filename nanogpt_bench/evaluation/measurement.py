"""One model measured on windows of a text, as floats and with its weights rounded: a row for each set of formats."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.model.causal import is_linear, rows_of_outputs, window_losses
from nanogpt_bench.model.weights import save_weights
from nanogpt_bench.setup.memory import memory_of
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.training.trainer import mean_and_error

#: the key, beside layer patterns, by which formats name the embeddings
EMBEDDINGS = "embeddings"
#: powers of two that a scale is multiplied by; the headroom that weights are trained with is 16 at most
SHIFTS = (0, -1, -2, -3, -4, -5, -6, 1)


@contextmanager
def rounded(
    model: nn.Module,
    formats: Mapping[str, Any],
    *,
    tied: Literal["refuse", "untie", "leave"] = "leave",
    energies: Mapping[str, Tensor] = MappingProxyType({}),
    **options: Any,
) -> Iterator[int]:
    """Round the layers that patterns name, and the embeddings; yield the bytes of the rounded weights.

    A head that shares the embedding's weight has the rounded one, too, unless it is untied. Buffers, such as rotary
    caches, are left alone. The floats are kept, not copied.

    Args:
        model: of float weights, as it is again afterwards.
        formats: layer pattern, or `embeddings`, to format or specification; nothing is rounded without any.
        tied: `untie` or `leave`, of a head that shares the embedding's weight.
        energies: `mean_squares` of the layers' inputs, by which scales are chosen; those of the largest weight without.
        options: of `fm.quantize_model`.

    Raises:
        BenchError: formats that can't be used with this model.
    """
    linear = {pattern: value for pattern, value in formats.items() if pattern != EMBEDDINGS}
    fmt = formats.get(EMBEDDINGS, "none")
    before = dict(model.named_modules())
    try:
        with ExitStack() as stack:
            saved = stack.enter_context(_embeddings_rounded(model, fmt, options)) if fmt != "none" else 0
            if linear:
                _quantized(model, linear, tied=tied, **options)
                if energies:
                    calibrate(model, before, energies)
            yield memory_of([*model.parameters(), *model.buffers()]) - saved
    finally:
        for name, module in list(model.named_modules()):
            if isinstance(module, fm.QuantizedLinear):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, before[name])


@contextmanager
def _embeddings_rounded(model: nn.Module, fmt: Any, options: Mapping[str, Any]) -> Iterator[int]:
    """Round embeddings a row at a time, as a linear layer's weight; yield the bytes that their codes would save."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    kept = [(table, table.data) for table in tables]
    saved = 0
    try:
        for table, values in kept:
            linear = nn.Linear(values.shape[1], values.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(values, requires_grad=False)
            codes = _quantized(linear, fmt, **options).weight.detach()
            saved += values.nbytes - memory_of([codes])
            table.data = codes.dequantize()
        yield saved
    finally:
        for table, values in kept:
            table.data = values


def _quantized(model: nn.Module, formats: Any, **options: Any) -> Any:
    """Quantise in place to one byte a weight.

    Raises:
        BenchError: formats that can't be used with this model.
    """
    try:
        return fm.quantize_model(model, formats, "fp8", **options)
    except (ValueError, TypeError) as error:
        raise BenchError(f"formats: {one_line(error)}") from None


@torch.no_grad()
def mean_squares(model: nn.Module, windows: Tensor, batch: int) -> dict[str, Tensor]:
    """Return the mean square of every input of each linear layer, (in,), by the layer's name, over windows of text."""
    sums: dict[str, Tensor] = {}

    def add(_: nn.Module, inputs: tuple[Any, ...], *, name: str) -> None:
        rows = inputs[0].detach().flatten(0, -2).double()
        sums[name] = sums.get(name, torch.zeros(())) + rows.square().sum(0).cpu()

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if is_linear(module):
                hook = module.register_forward_pre_hook(partial(add, name=name))
                stack.callback(hook.remove)
        for rows in windows.split(batch):
            model.eval()(rows[:, :-1])
    count = windows.shape[0] * (windows.shape[1] - 1)
    return {name: (total / count).float() for name, total in sums.items()}


@torch.no_grad()
def calibrate(model: nn.Module, before: Mapping[str, nn.Module], energies: Mapping[str, Tensor]) -> None:
    """Scale the one-byte weights of a model for the least expected error of their layers' outputs.

    .. math:: \\min_k \\sum_j (w_{ij} - Q_{2^k s}(w_{ij}))^2 \\, E[x_j^2]

    over each group of weights that share a scale, the inputs taken as independent of each other and of mean 0.

    Args:
        model: with `fm.QuantizedLinear` layers whose weights are stored in codes, scaled by their largest.
        before: the float layers that they were made from, by name.
        energies: what `mean_squares` returns.

    Source: the diagonal of the second moments of the inputs is what llama.cpp calls an importance matrix.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, fm.QuantizedLinear) and isinstance(layer.weight, fm.FP8Tensor) and name in energies:
            values = rows_of_outputs(before[name]).detach()
            layer.weight = _least(layer.weight, values, energies[name].to(layer.weight.device))


def _least(weight: Any, values: Tensor, energy: Tensor) -> fm.FP8Parameter:
    """The parameter with, for each scale, the power of two of the least error."""
    scale, granularity = weight.scale, weight.granularity
    best = torch.full_like(scale, torch.inf)
    chosen = scale.clone()
    for shift in SHIFTS:
        tried = scale * 2.0**shift
        codes = fm.FP8Tensor(values, weight.format, granularity=granularity, scale=tried, seed=0)
        error = _summed((codes.dequantize() - values).square() * energy, weight)
        chosen = torch.where(error < best, tried, chosen)
        best = torch.minimum(error, best)
    options = {"granularity": granularity, "scale": chosen, "rounding": weight.rounding, "seed": weight.seed}
    return fm.FP8Parameter(values, weight.format, **options)


def _summed(errors: Tensor, weight: Any) -> Tensor:
    """The sum over each group that shares a scale, in the scale's shape."""
    if weight.granularity == "square":
        size, (rows, columns) = weight.block_size[0], errors.shape
        whole = nn.functional.pad(errors, (0, -columns % size, 0, -rows % size))
        return whole.unflatten(1, (-1, size)).sum(-1).unflatten(0, (-1, size)).sum(1)
    if weight.granularity == "block":
        return errors.unflatten(-1, (-1, weight.block_size)).sum(-1)
    return errors.sum(-1, keepdim=True) if weight.scale.dim() else errors.sum()


@dataclass(frozen=True)
class Row:
    """The model in one set of formats; losses in nats a token, `gap` to its weights as floats, window by window."""

    format: str
    scale: str
    formats: Mapping[str, Any]
    val_loss: float
    val_loss_se: float | None
    gap: float | None
    gap_se: float | None
    perplexity: float | None
    bits_per_byte: float
    bytes_per_parameter: float
    quantized_parameters: int
    seconds: float


@dataclass
class Measurement:
    """A model on windows of a text: rows are measured one after the other, on the same weights."""

    #: the path that a reader knows the model by
    name: str
    model: nn.Module
    windows: Tensor
    tokens_per_byte: float
    batch: int
    options: Mapping[str, Any]
    #: windows of other text, by which scales are chosen
    calibration: Tensor | None = None
    #: where every row's weights are written
    save: Path | None = None
    #: reads the model in formats, where each row has a model of its own
    reader: Callable[[Mapping[str, Any], Mapping[str, Any]], nn.Module] | None = None
    #: loss of each window with float weights
    floats: list[float] = field(default_factory=list)
    #: loss of each window in the row before
    losses: list[float] = field(default_factory=list)
    #: what was not quantised in the row before, and why
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Find the layers, the size and the energies, which all rows share."""
        owners = Counter(id(each) for _, each in self.model.named_parameters(remove_duplicate=False))
        #: the linear layers with a weight of their own
        self.layers = [
            name for name, module in self.model.named_modules() if is_linear(module) and owners[id(module.weight)] == 1
        ]
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.energies: Mapping[str, Tensor] = (
            {} if self.calibration is None else mean_squares(self.model, self.calibration, self.batch)
        )

    def row(
        self,
        name: str,
        formats: Mapping[str, Any],
        scale: str = "",
        *,
        saves: bool = True,
        against: Sequence[float] = (),
    ) -> Row:
        """Measure one set of formats; the first of all has none. Where weights are written, those of rows that save.

        The gap is to the losses that are given, window by window; to those of the float weights without any.

        Raises:
            BenchError: formats that can't be used with this model.
        """
        begun = time.perf_counter()
        options = {**self.options, **({"granularity": scale} if scale else {})}
        with self._in(formats, options) as size:
            losses = window_losses(self.model, self.windows, self.batch)
            report = fm.quantization_report(self.model)
            if self.save is not None and saves:
                save_weights(self.model, self.save / f"{'-'.join(filter(None, (name, scale)))}.safetensors")
        self.floats = self.floats or losses
        tables = list(self.model.modules()) if formats.get(EMBEDDINGS, "none") != "none" else []
        also = {id(table.weight): table.weight.numel() for table in tables if isinstance(table, nn.Embedding)}
        self.left = [
            f"{layer.name} ({layer.parameters:,}): {layer.detail}"
            for layer in report.left
            if not any(id(weight) in also for weight in self.model.get_submodule(layer.name).parameters(recurse=False))
        ]
        self.losses = losses
        differences = [one - other for one, other in zip(losses, against or self.floats, strict=True)]
        loss, error = mean_and_error(losses)
        gap, gap_error = mean_and_error(differences) if formats else (None, None)
        return Row(
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
        """The model in formats, and the bytes of its weights."""
        if self.reader is None:
            with rounded(self.model, formats, energies=self.energies, **options) as size:
                yield size
            return
        if formats:
            self.model = nn.Identity()  # so that what was there is gone
            self.model = self.reader(formats, options)
        held = [*self.model.parameters(), *self.model.buffers()]
        narrow = sum(x.nbytes for x in held if x.dtype in (torch.bfloat16, torch.float16))
        yield memory_of(held) + narrow  # float32 is what they stand for
