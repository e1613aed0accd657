"""Fisher metrics in chart coordinates: measured over batches, averaged, damped, and applied to a gradient."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from fp8manifold.optim._fisher_adapter import LayerFisher, check_definite
from fp8manifold.optim._fisher_capture import Rows

__all__ = ["METRIC", "REPRESENTATIONS", "Layer", "measure", "natural_gradient", "rank_one"]

REPRESENTATIONS: Final = ("diagonal", "kfac", "ekfac")
METRIC: Final = frozenset(
    {
        "fisher_diagonal",  # running averages, in value coordinates
        "fisher_inputs",
        "fisher_outputs",
        "inverse_inputs",  # damped, in the chart of the last refresh
        "inverse_outputs",
        "basis_inputs",
        "basis_outputs",
        "eigenvalues",
        "fisher_damping",
    }
)
"""Names in a parameter's state of everything that a metric consists of."""

Passes = Callable[[], Iterator[dict[nn.Linear, Rows]]]
"""Begins anew with what is measured: the rows of every layer, batch by batch, the same each time."""


@dataclass(frozen=True)
class Layer:
    """A layer to be measured: where it is, its chart and what its state holds of earlier measurements."""

    module: nn.Linear
    fisher: LayerFisher
    stretch: Tensor | None
    """``T`` (O, I), the derivative of value by coordinate; None where the coordinates are the values."""
    earlier: dict[str, Any]


def measure(
    representation: str, layers: Sequence[Layer], passes: Passes, *, damping: float, decay: float
) -> list[dict[str, Any]]:
    """New metrics, as entries for the layers' states; ``decay`` is the weight of earlier measurements.

    Raises:
        FloatingPointError: a damped metric is not positive definite, or a layer was not reached.
    """
    if representation == "diagonal":
        averages = _averages(layers, passes(), lambda layer, rows: (layer.fisher.diagonal(rows),))
        moments = _blended(layers, averages, ("fisher_diagonal",), decay)
        return [_diagonal(layer, found[0], damping) for layer, found in zip(layers, moments, strict=True)]
    averages = _averages(layers, passes(), lambda layer, rows: layer.fisher.factors(rows))
    kept = _blended(layers, averages, ("fisher_inputs", "fisher_outputs"), decay)
    charted = [_in_chart(layer, *found) for layer, found in zip(layers, kept, strict=True)]
    if representation == "kfac":
        metrics = [_kfac(layer, factors, damping) for layer, factors in zip(layers, charted, strict=True)]
    else:
        metrics = _ekfac(layers, charted, passes, damping)
    if decay:
        for metric, (inputs, outputs) in zip(metrics, kept, strict=True):
            metric |= {"fisher_inputs": inputs, "fisher_outputs": outputs}
    return metrics


def natural_gradient(
    representation: str, fisher: LayerFisher, metric: dict[str, Any], gradient: Tensor, stretch: Tensor | None
) -> Tensor:
    """``T (T F T + damping)^-1 T g`` in float32: minus the step, in values, that a unit of lr takes."""
    v = gradient.float() if stretch is None else gradient.float() * stretch
    if representation == "diagonal":
        diagonal = metric["fisher_diagonal"] if stretch is None else metric["fisher_diagonal"] * stretch * stretch
        solved = fisher.solve_diagonal(diagonal, v, metric["fisher_damping"])
    elif representation == "kfac":
        solved = fisher.times_factors((metric["inverse_inputs"], metric["inverse_outputs"]), v)
    else:
        bases = (metric["basis_inputs"], metric["basis_outputs"])
        solved = fisher.solve_eigen(bases, metric["eigenvalues"], v, metric["fisher_damping"])
    return solved if stretch is None else solved * stretch


def rank_one(stretch: Tensor) -> tuple[Tensor, Tensor]:
    """Factors r (O,) and c (I,) whose product is nearest to a positive ``stretch`` (O, I) in the logarithm.

    .. math:: \\log r_i = \\overline{\\log T_{i \\cdot}}, \\qquad
              \\log c_j = \\overline{\\log T_{\\cdot j}} - \\overline{\\log T}
    """
    logarithm = stretch.double().log2()
    rows, columns = logarithm.mean(1), logarithm.mean(0) - logarithm.mean()
    return rows.exp2().float(), columns.exp2().float()


def _averages(
    layers: Sequence[Layer],
    batches: Iterator[dict[nn.Linear, Rows]],
    of: Callable[[Layer, Rows], tuple[Tensor, ...]],
) -> list[tuple[Tensor, ...]]:
    """Means over all tokens of all batches of what ``of`` gives for one batch."""
    sums: list[list[Tensor]] = [[] for _ in layers]
    counts = [0] * len(layers)
    for batch in batches:
        for i, layer in enumerate(layers):
            tokens = sum(len(x) for x, _ in batch[layer.module])
            if tokens:
                found = [moments * tokens for moments in of(layer, batch[layer.module])]
                sums[i] = [a + b for a, b in zip(sums[i], found, strict=True)] if counts[i] else found
                counts[i] += tokens
    for layer, count in zip(layers, counts, strict=True):
        if not count:
            raise FloatingPointError(f"layer {layer.fisher.name!r} was not reached: its Fisher metric is undefined")
    return [tuple(s / count for s in total) for total, count in zip(sums, counts, strict=True)]


def _blended(
    layers: Sequence[Layer], measured: list[tuple[Tensor, ...]], names: tuple[str, ...], decay: float
) -> list[tuple[Tensor, ...]]:
    """``decay * earlier + (1 - decay) * measured``; the first measurement counts in full."""
    return [
        tuple(
            layer.earlier[name] * decay + found * (1 - decay) if decay and name in layer.earlier else found
            for name, found in zip(names, new, strict=True)
        )
        for layer, new in zip(layers, measured, strict=True)
    ]


def _diagonal(layer: Layer, diagonal: Tensor, damping: float) -> dict[str, Any]:
    charted = diagonal if layer.stretch is None else diagonal * layer.stretch * layer.stretch
    added = _added(charted, damping, layer)
    return {"fisher_diagonal": diagonal, "fisher_damping": added}


def _kfac(layer: Layer, charted: tuple[Tensor, Tensor], damping: float) -> dict[str, Any]:
    inputs, outputs = layer.fisher.inverse_factors(charted, damping)
    return {"inverse_inputs": inputs, "inverse_outputs": outputs}


def _ekfac(
    layers: Sequence[Layer], charted: list[tuple[Tensor, Tensor]], passes: Passes, damping: float
) -> list[dict[str, Any]]:
    for layer, factors in zip(layers, charted, strict=True):
        if not all(bool(factor.isfinite().all()) for factor in factors):
            raise FloatingPointError(f"layer {layer.fisher.name!r}: its Fisher metric is not finite")
    bases = {id(layer): layer.fisher.eigenvectors(found) for layer, found in zip(layers, charted, strict=True)}
    values = _averages(
        layers, passes(), lambda layer, rows: (layer.fisher.eigenvalues(bases[id(layer)], _stretched(layer, rows)),)
    )
    return [
        {
            "basis_inputs": bases[id(layer)][0],
            "basis_outputs": bases[id(layer)][1],
            "eigenvalues": found,
            "fisher_damping": _added(found, damping, layer),
        }
        for layer, (found,) in zip(layers, values, strict=True)
    ]


def _added(values: Tensor, damping: float, layer: Layer) -> float:
    """What damping adds to each eigenvalue: ``damping`` times their mean."""
    mean = values.double().mean().item()
    check_definite(values.flatten(), damping * mean, mean, f"layer {layer.fisher.name!r}")
    return damping * mean


def _in_chart(layer: Layer, inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    if layer.stretch is None:
        return inputs, outputs
    r, c = rank_one(layer.stretch)
    return inputs * c[:, None] * c, outputs * r[:, None] * r


def _stretched(layer: Layer, rows: Rows) -> Rows:
    if layer.stretch is None:
        return rows
    r, c = rank_one(layer.stretch)
    return [(x * c, y * r) for x, y in rows]
