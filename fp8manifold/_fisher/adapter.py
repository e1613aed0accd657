"""The Fisher matrix of one linear layer: nngeometry's representations, fed with rows and held as plain tensors."""

import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fp8manifold._fisher.capture import Rows

__all__ = ["LayerFisher", "check_definite", "load_nngeometry"]

_LAYER: Final = "layer"
_MARGIN: Final = torch.finfo(torch.float32).eps


def load_nngeometry() -> Any:
    """The package.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module("nngeometry")
    except ImportError as error:
        raise ImportError("FisherNaturalGradient needs nngeometry: pip install 'fp8manifold[fisher]'") from error


class LayerFisher:
    """One linear layer as nngeometry sees it, for activations ``x`` and output gradients ``y`` of ``N`` tokens.

    .. math:: F_{diagonal} = \\mathrm{diag} \\left( \\tfrac1N \\sum y^2 \\otimes x^2 \\right), \\qquad
              F_{kfac} = \\tfrac1N \\sum y y^T \\otimes \\tfrac1N \\sum x x^T, \\qquad
              F_{ekfac} = U \\, \\mathrm{diag} \\left( \\tfrac1N \\sum (U_y^T y)^2 \\otimes (U_x^T x)^2 \\right) U^T

    with ``U`` the eigenvectors of kfac's two factors.  nngeometry hooks modules of classes it knows, wants their
    activations 2-D, and differentiates with respect to their input.  So it gets a module of its own for each layer, in
    an explicit collection of one, whose output has the gradient ``y`` and whose values nobody asks for.
    """

    def __init__(self, name: str, weight: Tensor) -> None:
        package = load_nngeometry()
        self.name, self.shape, self.device = name, tuple(weight.shape), weight.device
        self._objects = package.object
        outputs, inputs = self.shape
        collection = package.layercollection
        self._layers = collection.LayerCollection()
        self._layers.add_layer(_LAYER, collection.LinearLayer(inputs, outputs, bias=False))
        root = nn.ModuleDict({_LAYER: Linear(inputs, outputs, weight.device)})
        self._backend = package.backend.TorchHooksJacobianBackend(
            model=root, function=lambda x, y: (root[_LAYER](x) * y).sum(1, keepdim=True), layer_collection=self._layers
        )

    def diagonal(self, rows: Rows) -> Tensor:
        """Second moments (O, I) of the gradient."""
        moments: Tensor = self._objects.PMatDiag(self._backend, examples=_loader(rows)).data
        return moments.view(self.shape)

    def factors(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Second moments of inputs (I, I) and output gradients (O, O)."""
        pair: tuple[Tensor, Tensor] = self._objects.PMatKFAC(self._backend, examples=_loader(rows)).data[_LAYER]
        return pair

    def eigenvectors(self, factors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Those of both factors, as columns."""
        matrix = self._objects.PMatKFAC(self._backend, data={_LAYER: factors})
        matrix.compute_eigendecomposition()
        pair: tuple[Tensor, Tensor] = matrix.evecs[_LAYER]
        return pair

    def eigenvalues(self, eigenvectors: tuple[Tensor, Tensor], rows: Rows) -> Tensor:
        """Second moments (O I) of the gradient in the eigenbasis."""
        matrix = self._objects.PMatEKFAC(self._backend, data=({_LAYER: eigenvectors}, {_LAYER: None}))
        matrix.update_diag(_loader(rows))
        values: Tensor = matrix.data[1][_LAYER]
        return values

    def inverse_factors(self, factors: tuple[Tensor, Tensor], damping: float) -> tuple[Tensor, Tensor]:
        """Inverses of both factors, each damped with ``sqrt(damping)`` of its own mean eigenvalue.

        Raises:
            FloatingPointError: a damped factor is not positive definite.
        """
        means = [matrix.diagonal().double().mean().item() for matrix in factors]
        for matrix, mean, side in zip(factors, means, ("inputs", "output gradients"), strict=True):
            check_definite(matrix, damping**0.5 * mean, mean, f"layer {self.name!r}, {side}")
        matrix = self._objects.PMatKFAC(self._backend, data={_LAYER: factors})
        pair: tuple[Tensor, Tensor] = matrix.inverse(regul=damping * means[0] * means[1]).data[_LAYER]
        return pair

    def solve_diagonal(self, diagonal: Tensor, v: Tensor, added: float) -> Tensor:
        """``v / (diagonal + added)``."""
        matrix = self._objects.PMatDiag(self._backend, data=diagonal.reshape(-1))
        return self._product(lambda vector: matrix.solve(vector, regul=added), v)

    def times_factors(self, factors: tuple[Tensor, Tensor], v: Tensor) -> Tensor:
        """``Y v X`` of the factors X (I, I) and Y (O, O)."""
        return self._product(self._objects.PMatKFAC(self._backend, data={_LAYER: factors}).mv, v)

    def solve_eigen(self, eigenvectors: tuple[Tensor, Tensor], values: Tensor, v: Tensor, added: float) -> Tensor:
        """``U (U^T v / (values + added))``."""
        matrix = self._objects.PMatEKFAC(self._backend, data=({_LAYER: eigenvectors}, {_LAYER: values}))
        return self._product(lambda vector: matrix.solve(vector, regul=added), v)

    def _product(self, operation: Callable[[Any], Any], v: Tensor) -> Tensor:
        """An operation on nngeometry's vectors; one over the layer's dictionary, or flat."""
        vector = self._objects.PVector(self._layers, vector_repr=v.reshape(-1))
        result: Tensor = operation(vector).to_torch()
        return result.view(self.shape)


def check_definite(values: Tensor, added: float, mean: float, what: str) -> None:
    """Raise FloatingPointError unless a damped metric is safely positive definite.

    Args:
        values: eigenvalues, or a symmetric matrix.
        added: what damping adds to each eigenvalue.
        mean: of the eigenvalues; the smallest must exceed float32's precision at it.
        what: for the message.
    """
    margin = added - _MARGIN * mean
    if values.dim() == 1:
        fine = bool((values + margin > 0).all())
    else:
        shifted = values.double()  # the factorisation's own rounding must not decide
        shifted.diagonal().add_(margin)
        fine = int(torch.linalg.cholesky_ex(shifted).info) == 0
    if not (fine and 0 < mean < float("inf")):
        raise FloatingPointError(
            f"{what}: the damped Fisher metric is not positive definite (mean eigenvalue {mean:.3g}, damping adds "
            f"{added:.3g}): raise damping, batches or samples, or leave the layer out"
        )


class Linear(nn.Linear):
    """A linear layer in name and shape, the two things nngeometry reads; it multiplies nothing."""

    def __init__(self, in_features: int, out_features: int, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.zeros((), device=device).expand(out_features, in_features), False)
        self.bias = None  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # nn.Linear's own name
        """Any (N, O) tensor that depends on the input (N, I): its gradient is what is wanted."""
        return input[:, :1].expand(-1, self.out_features)


class _WholeBatch(Dataset[tuple[Tensor, Tensor]]):
    """All rows at once, instead of one by one."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._tensors = x, y

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        assert len(indices) == len(self)
        return self._tensors


def _loader(rows: Rows) -> DataLoader[Any]:
    """The rows as the only batch of a loader, with a generator of its own so that torch's stays where it is."""
    x, y = (torch.cat(parts).detach() for parts in zip(*rows, strict=True))
    return DataLoader(_WholeBatch(x, y), len(x), collate_fn=_as_it_is, generator=torch.Generator())


def _as_it_is(batch: Any) -> Any:
    return batch
