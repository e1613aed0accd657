"""A model's weights rounded for as long as a measurement takes, then put back, without a second copy of its floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.step.calibration import calibrate
from nanogpt_bench.step.memory import memory_of
from nanogpt_bench.system.errors import BenchError, one_line

#: the key, beside layer patterns, by which formats say what becomes of embeddings
EMBEDDINGS = "embeddings"


@contextmanager
def rounded(
    model: nn.Module,
    formats: Mapping[str, Any],
    *,
    tied: Literal["refuse", "untie", "leave"] = "leave",
    energies: Mapping[str, Tensor] = MappingProxyType({}),
    **options: Any,
) -> Iterator[int]:
    """Round the layers that patterns name, and the embeddings; yield the bytes that the weights take meanwhile.

    A head that shares the embedding's weight has the rounded one, too, unless it is untied. Buffers, such as rotary
    caches, are left alone.

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
                _try(lambda: fm.quantize_model(model, linear, "fp8", tied=tied, **options))
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
            codes = _codes(values, fmt, options)
            saved += values.nbytes - memory_of([codes])
            table.data = codes.dequantize()
        yield saved
    finally:
        for table, values in kept:
            table.data = values


def _codes(values: Tensor, fmt: Any, options: Mapping[str, Any]) -> Any:
    linear = nn.Linear(values.shape[1], values.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(values, requires_grad=False)
    made: Any = _try(lambda: fm.quantize_model(linear, fmt, "fp8", **options))
    return made.weight.detach()


def _try(act: Any) -> Any:
    try:
        return act()
    except (ValueError, TypeError) as error:
        raise BenchError(f"formats: {one_line(error)}") from None
