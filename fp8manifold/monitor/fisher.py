"""The Fisher information of linear layers: its trace and its largest eigenvalues."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from fp8manifold._fisher.capture import (
    Draws,
    LayerFisher,
    Logits,
    call_model,
    linear_layers,
    load_nngeometry,
    rows_of_batches,
)
from fp8manifold._fisher.metric import Layer, mean_over_tokens
from fp8manifold._numerics.checks import check_choice, check_int

__all__ = ["FisherFigures", "eigenvalue_ratios", "fisher_figures", "fisher_ratio"]

_REPRESENTATIONS: Final = ("kfac", "diagonal")


@dataclass(frozen=True)
class FisherFigures:
    """What :func:`fisher_figures` finds of one layer."""

    trace: float
    """Sum of the eigenvalues."""
    eigenvalues: tuple[float, ...]
    """The largest eigenvalues, in decreasing order."""

    @property
    def top(self) -> float:
        """The largest eigenvalue."""
        return self.eigenvalues[0]


def fisher_figures(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    representation: Literal["kfac", "diagonal"] = "kfac",
    samples: int = 1,
    eigenvalues: int = 1,
    seed: int = 0,
    step: int = 0,
    max_features: int = 4096,
    logits: Logits = call_model,
) -> dict[str, FisherFigures]:
    """Trace and largest eigenvalues of the Fisher information of a token, for each linear layer at its present weights.

    .. math:: F_{kfac} = \\tfrac1N \\sum y y^T \\otimes \\tfrac1N \\sum x x^T, \\qquad
              F_{diagonal} = \\mathrm{diag} \\left( \\tfrac1N \\sum y^2 \\otimes x^2 \\right)

    for the layer's inputs x and the gradients y at its outputs, under labels drawn from the model's own softmax.  A
    quantised layer is measured at its quantised weights.  The same seed and step draw the same random numbers, for a
    quantised model and its shadow.

    Args:
        model: what gives the logits; measured in evaluation mode, and left as it was.
        batches: a few batches to measure with.
        representation: ``kfac`` or ``diagonal``.
        samples: labels drawn for each token.
        eigenvalues: how many of the largest to find; a layer with fewer weights has one for each.
        seed, step: key of the draws.
        max_features: layers that are wider on either side are left out.
        logits: function (model, batch) to the logits (..., V); the default calls the model with the batch, or its
            first entry if it is a sequence.

    Returns:
        The figures by the layer's name; layers that share their weight with another module are left out.

    Raises:
        ImportError: nngeometry is not installed (``pip install 'fp8manifold[fisher]'``).
        TypeError, ValueError: an option out of range, no batch, a model without logits.
        FloatingPointError: a layer that the batches do not reach.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False))
        >>> with torch.no_grad():
        ...     _ = model[0].weight.zero_()
        >>> fisher_figures(model, [torch.tensor([[2.0, 0.0], [2.0, 0.0]])])["0"]  # y = +-(1/2, -1/2), x = (2, 0)
        FisherFigures(trace=2.0, eigenvalues=(2.0,))

    Source: Martens and Grosse 2015; Karakida, Akaho and Amari 2019 for the top eigenvalue.
    """
    check_choice("representation", representation, _REPRESENTATIONS)
    for name, value in (("samples", samples), ("eigenvalues", eigenvalues), ("max_features", max_features)):
        check_int(name, value, 1, 2**31)
    load_nngeometry()
    given = list(batches)
    if not given:
        raise ValueError("batches holds no batch to measure the Fisher information with")
    found = linear_layers(model, model.parameters(), max_features)
    if not found:
        return {}
    layers = [Layer(module, LayerFisher(name, weight)) for weight, (name, module) in found.items()]
    rows = rows_of_batches(model, [layer.module for layer in layers], given, logits, Draws(seed, step, samples))
    if representation == "diagonal":
        measured = mean_over_tokens(layers, rows, lambda layer, part: (layer.fisher.diagonal(part),))
        figures = [_of_diagonal(*found, count=eigenvalues) for found in measured]
    else:
        measured = mean_over_tokens(layers, rows, lambda layer, part: layer.fisher.factors(part))
        figures = [_of_factors(*found, count=eigenvalues) for found in measured]
    return {layer.fisher.name: found for layer, found in zip(layers, figures, strict=True)}


def fisher_ratio(quantised: dict[str, FisherFigures], shadow: dict[str, FisherFigures]) -> dict[str, float | None]:
    """How much sharper or flatter the loss is at the quantised weights: the ratio of the traces, layer by layer.

    .. math:: \\mathrm{tr}\\, F(w_8) / \\mathrm{tr}\\, F(w_{32})

    Args:
        quantised, shadow: of :func:`fisher_figures`, for models whose layers have the same names.

    Returns:
        The ratio for every layer that both have; None where the shadow's trace is 0.

    Raises:
        TypeError: a value that is no :class:`FisherFigures`.

    Example:
        >>> fisher_ratio({"fc": FisherFigures(3.0, (2.0,))}, {"fc": FisherFigures(2.0, (1.0,))})
        {'fc': 1.5}
    """
    _check_figures(quantised, shadow)
    both = [name for name in quantised if name in shadow]
    return {name: _over(quantised[name].trace, shadow[name].trace) for name in both}


def eigenvalue_ratios(
    quantised: dict[str, FisherFigures], shadow: dict[str, FisherFigures]
) -> dict[str, tuple[float | None, ...]]:
    """The ratios of the largest eigenvalues, each over that of the same rank, layer by layer.

    .. math:: \\lambda_i(F(w_8)) / \\lambda_i(F(w_{32}))

    Args:
        quantised, shadow: as in :func:`fisher_ratio`.

    Returns:
        For every layer that both have, as many ratios as both have eigenvalues; None where the shadow's is 0.  What is
        not finite gives NaN, Inf or 0, as division does.

    Raises:
        TypeError: a value that is no :class:`FisherFigures`.

    Example:
        >>> eigenvalue_ratios({"fc": FisherFigures(3.0, (2.0, 1.0))}, {"fc": FisherFigures(2.0, (1.0, 0.0))})
        {'fc': (2.0, None)}
    """
    _check_figures(quantised, shadow)
    pairs = {name: (quantised[name].eigenvalues, shadow[name].eigenvalues) for name in quantised if name in shadow}
    return {name: tuple(_over(a, b) for a, b in zip(*pair, strict=False)) for name, pair in pairs.items()}


def _check_figures(quantised: dict[str, FisherFigures], shadow: dict[str, FisherFigures]) -> None:
    for figures in (*quantised.values(), *shadow.values()):
        if not isinstance(figures, FisherFigures):
            raise TypeError(f"{figures!r} must be a FisherFigures, not {type(figures).__name__}")


def _over(a: float, b: float) -> float | None:
    return a / b if b else None


def _of_diagonal(diagonal: Tensor, *, count: int) -> FisherFigures:
    return FisherFigures(float(diagonal.double().sum()), _largest(diagonal.flatten(), count))


def _of_factors(inputs: Tensor, outputs: Tensor, *, count: int) -> FisherFigures:
    """The eigenvalues of a Kronecker product are the products of those of its factors."""
    sides = inputs.double(), outputs.double()
    traces = [float(side.trace()) for side in sides]
    # A side that is not finite has no eigenvalues: one NaN stands for them.
    spectra = [_spectrum(side)[-count:] for side in sides]
    return FisherFigures(traces[0] * traces[1], _largest(torch.outer(*spectra).flatten(), count))


def _spectrum(side: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(side) if bool(side.isfinite().all()) else side.new_full((1,), float("nan"))


def _largest(values: Tensor, count: int) -> tuple[float, ...]:
    return tuple(values.topk(min(count, values.numel())).values.tolist())
