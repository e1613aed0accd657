"""What a Fisher metric is measured from: the inputs of linear layers, and gradients under labels of the model's own."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.data import DataLoader, Dataset

from fp8manifold.nn._linear import QuantizedLinear
from fp8manifold.random_bits import RANDOM_BITS, random_bits

Logits = Callable[[nn.Module, Any], Tensor]
"""From a model and a batch of the loader to the logits (..., V)."""
_LAYER: Final = "layer"
_MARGIN: Final = torch.finfo(torch.float32).eps
Rows = list[tuple[Tensor, Tensor]]
"""For each use of a layer: its inputs (N, C_in) and the gradients at its outputs (N, C_out), in float32."""

_LABELS = 0xF15E12_0000_0000  # keeps the draws of labels apart from those of the write-back
_BATCHES = 0xBA7C4E_0000_0000
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Draws:
    """The key of a measurement's random labels."""

    seed: int
    step: int
    samples: int
    """Labels drawn for each token."""


def linear_layers(
    model: nn.Module, parameters: Iterable[Tensor], max_features: int
) -> dict[Tensor, tuple[str, nn.Linear]]:
    """Name and layer of every parameter that is the weight of one linear layer and of nothing else.

    Weights shared with an embedding or with a second layer have no metric of their own, empty ones need none, and
    layers wider than ``max_features`` on either side are left out.
    """
    owners: dict[Tensor, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter] = owners.get(parameter, 0) + 1
    wanted = set(parameters)
    return {
        module.weight: (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module.weight in wanted
        and owners[module.weight] == 1
        and module.weight.numel()
        and max(module.in_features, module.out_features) <= max_features
    }


def call_model(model: nn.Module, batch: Any) -> Tensor:
    """The logits of a model that takes the batch, or its first entry; tensors are moved to the model's device."""
    inputs = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(inputs, Tensor):
        raise TypeError(f"the loader gave a {type(inputs).__name__}, not tensors: say with logits= what to do with it")
    output = model(inputs.to(next(model.parameters()).device))
    return getattr(output, "logits", output)  # type: ignore[no-any-return]


def take_batches(loader: Any, count: int, *, seed: int, step: int) -> list[Any]:
    """The first batches of the loader, begun anew; a function is called with the number of steps taken.

    A ``DataLoader`` draws its order from torch's global generator: it sees one that depends on seed and step, and
    the caller's is put back.
    """
    generator = torch.default_generator
    kept = generator.get_state()
    generator.manual_seed((seed ^ _BATCHES ^ (step * 0x9E3779B97F4A7C15)) % 2**64)
    try:
        return list(islice(iter(loader(step) if callable(loader) else loader), count))
    finally:
        generator.set_state(kept)


def rows_of_batches(
    model: nn.Module, layers: Sequence[nn.Linear], batches: Sequence[Any], logits: Logits, draws: Draws
) -> Iterator[dict[nn.Linear, Rows]]:
    """Inputs and gradients of every layer, for every batch and draw of labels.

    The model runs in evaluation mode and eagerly; its parameters, their gradients and its mode are as they were.

    Raises:
        ValueError: logits of another shape or type.
    """
    for index, batch in enumerate(batches):
        with _measured(model), _recorded(layers) as record:
            scores = _flat_logits(logits(model, batch))
            for sample in range(draws.samples):
                labels = sample_labels(
                    scores.detach(), seed=draws.seed, step=draws.step, stream=index * draws.samples + sample
                )
                loss = F.cross_entropy(scores, labels, reduction="sum")
                rows = _gradients(record, loss, retain=sample + 1 < draws.samples)
                yield rows


@torch.no_grad()
def sample_labels(scores: Tensor, *, seed: int, step: int, stream: int) -> Tensor:
    """One label for every row of logits (N, V), drawn from its softmax by inverting the cumulative distribution.

    The draws are a pure function of the key; a label of probability 0 is never drawn, and one below 2^-24 is drawn
    less often than it should be.
    """
    draws = random_bits(len(scores), seed=seed ^ _LABELS, step=step, stream=stream, device=scores.device)
    labels = []
    for part, bits in zip(
        scores.split(max(_CHUNK // max(scores.shape[1], 1), 1)),
        draws.split(max(_CHUNK // max(scores.shape[1], 1), 1)),
        strict=True,
    ):
        cumulative = part.double().softmax(1).cumsum(1)
        threshold = cumulative[:, -1:] * (bits.double()[:, None] * 2.0**-RANDOM_BITS)
        labels.append(torch.searchsorted(cumulative, threshold, right=True)[:, 0])
    return torch.cat(labels).clamp_(max=scores.shape[1] - 1)


def _flat_logits(scores: Any) -> Tensor:
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.dim() < 2 or scores.shape[-1] < 2:
        shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"the model gave {shape}: logits (..., V) of at least two classes are needed; see logits=")
    return scores.flatten(0, -2).float()


@contextmanager
def _measured(model: nn.Module) -> Iterator[None]:
    """Gradients on, evaluation mode, nothing compiled (compiled code would not see the hooks)."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def _recorded(layers: Sequence[nn.Linear]) -> Iterator[dict[nn.Linear, list[tuple[Tensor, GradientEdge]]]]:
    """For each layer the inputs of every call, and where the gradient of its output will appear."""
    record: dict[nn.Linear, list[tuple[Tensor, GradientEdge]]] = {layer: [] for layer in layers}

    def remember(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, nn.Linear)
        # the edge, not the tensor: an activation may overwrite the output in place
        record[layer].append((_rows(_multiplied(layer, inputs[0])), get_gradient_edge(output)))

    hooks = [layer.register_forward_hook(remember) for layer in layers]
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()


def _multiplied(layer: nn.Linear, x: Tensor) -> Tensor:
    """What the layer's weight is multiplied by: the input, quantised with the scale that was just used."""
    x = x.detach()
    return layer.quantized_input(x) if isinstance(layer, QuantizedLinear) else x


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).float()


def _gradients(
    record: dict[nn.Linear, list[tuple[Tensor, GradientEdge]]], loss: Tensor, *, retain: bool
) -> dict[nn.Linear, Rows]:
    """Gradients of the loss at the outputs of all calls; zero where the loss does not depend on one."""
    edges = [edge for calls in record.values() for _, edge in calls]
    found = iter(torch.autograd.grad(loss, edges, retain_graph=retain, allow_unused=True) if edges else ())
    return {layer: [_pair(layer, x, next(found)) for x, _ in calls] for layer, calls in record.items()}


def _pair(layer: nn.Linear, x: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor]:
    return x, x.new_zeros(len(x), layer.out_features) if gradient is None else _rows(gradient)


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
