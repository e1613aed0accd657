"""Fisher metrics in chart coordinates: measured over batches, averaged, damped, and applied to a gradient."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor, nn

from fp8manifold._fisher.capture import LayerFisher, Rows, check_definite

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

_NEEDED: Final = {"diagonal": "fisher_diagonal", "kfac": "inverse_inputs", "ekfac": "eigenvalues"}

Pair = tuple[Tensor, Tensor]
"""Of inputs and of output gradients."""

Passes = Callable[[], Iterator[dict[nn.Linear, Rows]]]
"""Begins anew with what is measured: the rows of every layer, batch by batch, the same each time."""


@dataclass(frozen=True)
class Layer:
    """A layer to be measured: where it is, its chart and what its state holds of earlier measurements."""

    module: nn.Linear
    fisher: LayerFisher
    stretch: Tensor | None = None
    """``T`` (O, I), the derivative of value by coordinate; None where the coordinates are the values."""
    earlier: dict[str, Any] = field(default_factory=dict)


def measure(
    representation: str, layers: Sequence[Layer], passes: Passes, *, damping: float, decay: float
) -> list[dict[str, Any]]:
    """New metrics, as entries for the layers' states; ``decay`` is the weight of earlier measurements.

    Raises:
        FloatingPointError: a damped metric is not positive definite, or a layer was not reached.
    """
    if representation == "diagonal":
        averages = mean_over_tokens(layers, passes(), lambda layer, rows: (layer.fisher.diagonal(rows),))
        moments = _blended(layers, averages, ("fisher_diagonal",), decay)
        return [_diagonal(layer, found[0], damping) for layer, found in zip(layers, moments, strict=True)]
    averages = mean_over_tokens(layers, passes(), lambda layer, rows: layer.fisher.factors(rows))
    kept = [(a, b) for a, b in _blended(layers, averages, ("fisher_inputs", "fisher_outputs"), decay)]
    sides = [_sides(layer) for layer in layers]
    charted = [_on_both_sides(found, of) for found, of in zip(kept, sides, strict=True)]
    if representation == "kfac":
        metrics = [_kfac(*each, damping) for each in zip(layers, charted, sides, strict=True)]
    else:
        metrics = _ekfac(layers, charted, sides, passes, damping)
    if decay:
        for metric, (inputs, outputs) in zip(metrics, kept, strict=True):
            metric |= {"fisher_inputs": inputs, "fisher_outputs": outputs}
    return metrics


def has_metric(representation: str, state: dict[str, Any]) -> bool:
    """Whether a state holds what :func:`natural_gradient` needs."""
    return _NEEDED[representation] in state


def natural_gradient(
    representation: str, fisher: LayerFisher, metric: dict[str, Any], gradient: Tensor, stretch: Tensor | None
) -> Tensor:
    """``T (T F T + damping)^-1 T g`` in float32: minus the step, in values, that a unit of lr takes.

    ``stretch`` is ``T`` for the diagonal; what a Kronecker product has of it was folded into the metric.
    """
    g = gradient.float()
    if representation == "kfac":
        return fisher.times_factors((metric["inverse_inputs"], metric["inverse_outputs"]), g)
    if representation == "ekfac":
        bases = (metric["basis_inputs"], metric["basis_outputs"])
        return fisher.solve_eigen(bases, metric["eigenvalues"], g, metric["fisher_damping"])
    if stretch is None:
        return fisher.solve_diagonal(metric["fisher_diagonal"], g, metric["fisher_damping"])
    squared = stretch * stretch
    return fisher.solve_diagonal(metric["fisher_diagonal"] * squared, g * squared, metric["fisher_damping"])


def rank_one(stretch: Tensor) -> tuple[Tensor, Tensor]:
    """Factors r (O,) and c (I,) whose product is nearest to a positive ``stretch`` (O, I) in the logarithm.

    .. math:: \\log r_i = \\overline{\\log T_{i \\cdot}}, \\qquad
              \\log c_j = \\overline{\\log T_{\\cdot j}} - \\overline{\\log T}
    """
    logarithm = stretch.double().log2()
    rows, columns = logarithm.mean(1), logarithm.mean(0) - logarithm.mean()
    return rows.exp2().float(), columns.exp2().float()


def mean_over_tokens(
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
            raise FloatingPointError(
                f"layer {layer.fisher.name!r} was not reached by any batch: its Fisher metric is undefined; leave it "
                "out of the parameters, or give batches that reach it"
            )
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


def _kfac(layer: Layer, charted: Pair, sides: Pair | None, damping: float) -> dict[str, Any]:
    inputs, outputs = _on_both_sides(layer.fisher.inverse_factors(charted, damping), sides)
    return {"inverse_inputs": inputs, "inverse_outputs": outputs}


def _ekfac(
    layers: Sequence[Layer], charted: list[Pair], sides: list[Pair | None], passes: Passes, damping: float
) -> list[dict[str, Any]]:
    for layer, factors in zip(layers, charted, strict=True):
        if not all(bool(factor.isfinite().all()) for factor in factors):
            raise FloatingPointError(
                f"layer {layer.fisher.name!r}: its Fisher metric is not finite; look for Inf and NaN in the model's "
                "activations"
            )
    bases = {
        layer.module: _on_the_left(layer.fisher.eigenvectors(found), of)
        for layer, found, of in zip(layers, charted, sides, strict=True)
    }
    values = mean_over_tokens(
        layers, passes(), lambda layer, rows: (layer.fisher.eigenvalues(bases[layer.module], rows),)
    )
    return [
        {
            "basis_inputs": bases[layer.module][0],
            "basis_outputs": bases[layer.module][1],
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


def _sides(layer: Layer) -> Pair | None:
    """What the chart multiplies inputs (I,) and output gradients (O,) with."""
    return None if layer.stretch is None else rank_one(layer.stretch)[::-1]


def _on_both_sides(matrices: Pair, sides: Pair | None) -> Pair:
    if sides is None:
        return matrices
    return matrices[0] * sides[0][:, None] * sides[0], matrices[1] * sides[1][:, None] * sides[1]


def _on_the_left(matrices: Pair, sides: Pair | None) -> Pair:
    return matrices if sides is None else (matrices[0] * sides[0][:, None], matrices[1] * sides[1][:, None])
