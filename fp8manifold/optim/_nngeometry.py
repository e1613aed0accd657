"""nngeometry over linear layers that its own hooks do not see: of one byte, of 3-D inputs, called more than once."""

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fp8manifold.nn._linear import QuantizedLinear
from fp8manifold.random_bits import RANDOM_BITS, random_bits

Pair = tuple[Tensor, Tensor]
"""Of inputs (I, I) and of output gradients (O, O)."""
NEEDED: Final = {"diagonal": "fisher_diagonal", "kfac": "inverse_inputs", "ekfac": "eigenvalues"}
"""Representations, with a name in a parameter's state of each."""
METRIC: Final = ("fisher_", "inverse_", "basis_", "eigenvalues")
"""How the names in a parameter's state begin that a metric consists of."""
_KINDS: Final = {"diagonal": "PMatDiag", "kfac": "PMatKFAC", "ekfac": "PMatEKFAC"}
_LAYER: Final = "0"  # the only one of a matrix of one layer

_LABELS = 0xF15E12_0000_0000  # keeps the draws of labels apart from those of the write-back
_BATCHES = 0xBA7C4E_0000_0000
_CHUNK = 1 << 22


def load_nngeometry() -> Any:
    """The package.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module("nngeometry")
    except ImportError as error:
        raise ImportError("FisherNaturalGradient needs nngeometry: pip install 'fp8manifold[fisher]'") from error


class Layer(NamedTuple):
    """A layer to be measured."""

    name: str
    module: nn.Linear
    stretch: Tensor | None
    """``T`` (O, I), the derivative of value by coordinate; None where the coordinates are the values."""
    earlier: dict[str, Any]
    """What its state holds of earlier measurements."""


def measure(
    model: nn.Module,
    layers: Sequence[Layer],
    loss: Callable[[int], Tensor],
    passes: int,
    *,
    representation: str,
    damping: float,
    decay: float,
) -> list[dict[str, Any]]:
    """New metrics, as entries for the layers' states; ``decay`` is the weight of earlier measurements.

    Raises:
        FloatingPointError: a damped metric is not positive definite, or a layer was not reached.
    """
    mean = partial(_mean_over_tokens, model, layers, loss, passes)
    entries: list[dict[str, Any]] = []
    if representation == "diagonal":
        for layer, new in zip(layers, mean("diagonal"), strict=True):
            found = _blended(layer, ("fisher_diagonal",), new, decay)
            in_codes = found[0] if layer.stretch is None else found[0] * layer.stretch * layer.stretch
            entries.append({"fisher_diagonal": found[0], "fisher_damping": _added(layer, in_codes, damping)})
        return entries
    names = ("fisher_inputs", "fisher_outputs")
    kept = [_blended(layer, names, new, decay) for layer, new in zip(layers, mean("kfac"), strict=True)]
    sides = [_rank_one(layer.stretch) for layer in layers]
    charted = [_times(_times(pair, of), of, 1) for pair, of in zip(kept, sides, strict=True)]
    if representation == "kfac":
        for layer, factors, of in zip(layers, charted, sides, strict=True):
            x, y = _times(_times(_inverses(layer, factors, damping), of), of, 1)
            entries.append({"inverse_inputs": x, "inverse_outputs": y})
    else:
        vectors = [_eigenvectors(layer, factors) for layer, factors in zip(layers, charted, strict=True)]
        bases = [_times(pair, of) for pair, of in zip(vectors, sides, strict=True)]
        for layer, (x, y), (values,) in zip(layers, bases, mean("ekfac", bases), strict=True):
            added = _added(layer, values, damping)
            entries.append({"basis_inputs": x, "basis_outputs": y, "eigenvalues": values, "fisher_damping": added})
    if decay:
        for entry, pair in zip(entries, kept, strict=True):
            entry |= zip(names, pair, strict=True)
    return entries


def natural_gradient(kind: str, metric: dict[str, Any], g: Tensor, stretch: Tensor | None) -> Tensor:
    """``T (T F T + damping)^-1 T g``: minus the step, in values, that a unit of lr takes.

    ``stretch`` is ``T`` for the diagonal; what a Kronecker product has of it was folded into the metric.
    """
    if kind == "kfac":
        return _product(kind, {_LAYER: (metric["inverse_inputs"], metric["inverse_outputs"])}, g)
    if kind == "ekfac":
        data = {_LAYER: (metric["basis_inputs"], metric["basis_outputs"])}, {_LAYER: metric["eigenvalues"]}
        return _product(kind, data, g, regul=metric["fisher_damping"])
    square = 1.0 if stretch is None else stretch * stretch
    diagonal = metric["fisher_diagonal"] * square
    return _product(kind, diagonal.reshape(-1), g * square, regul=metric["fisher_damping"])


def _blended(layer: Layer, names: tuple[str, ...], measured: tuple[Tensor, ...], decay: float) -> tuple[Tensor, ...]:
    """``decay * earlier + (1 - decay) * measured``; the first measurement counts in full."""
    return tuple(
        layer.earlier[name] * decay + new * (1 - decay) if decay and name in layer.earlier else new
        for name, new in zip(names, measured, strict=True)
    )


def _rank_one(stretch: Tensor | None) -> Pair | None:
    """Factors (I,) and (O,) whose product is nearest to ``stretch`` (O, I) in the logarithm."""
    if stretch is None:
        return None
    logarithm = stretch.double().log2()
    return (logarithm.mean(0) - logarithm.mean()).exp2().float(), logarithm.mean(1).exp2().float()


def _times(pair: Any, sides: Pair | None, dim: int = 0) -> Any:
    """Both matrices, their rows times the factors (dim 0), or their columns (dim 1)."""
    return pair if sides is None else tuple(x * s.unsqueeze(1 - dim) for x, s in zip(pair, sides, strict=True))


def _matrix(kind: str, outputs: int, inputs: int, data: Any) -> Any:
    """nngeometry's matrix of one layer, made of its data."""
    package = load_nngeometry()
    layers = package.layercollection.LayerCollection()
    layers.add_layer(_LAYER, package.layercollection.LinearLayer(inputs, outputs, bias=False))
    return getattr(package.object, _KINDS[kind])(package.backend.DummyGenerator(layers, None), data=data)


def _product(kind: str, data: Any, v: Tensor, **regul: float) -> Tensor:
    """``M v``, or with ``regul`` ``(M + regul)^-1 v``, for a matrix of a layer (O, I)."""
    matrix = _matrix(kind, v.shape[0], v.shape[1], data)
    vector = load_nngeometry().object.PVector(matrix.generator.layer_collection, vector_repr=v.reshape(-1))
    result: Tensor = (matrix.solve(vector, **regul) if regul else matrix.mv(vector)).to_torch()
    return result.view(v.shape)


def _inverses(layer: Layer, factors: Pair, damping: float) -> Pair:
    """Inverses of both factors, each damped with ``sqrt(damping)`` of its own mean eigenvalue."""
    means = [matrix.diagonal().double().mean().item() for matrix in factors]
    for matrix, mean, side in zip(factors, means, ("inputs", "output gradients"), strict=True):
        _check_definite(f"layer {layer.name!r}, {side}", matrix, damping**0.5 * mean, mean)
    inverse = _matrix("kfac", len(factors[1]), len(factors[0]), {_LAYER: factors})
    pair: Pair = inverse.inverse(regul=damping * means[0] * means[1]).data[_LAYER]
    return pair


def _eigenvectors(layer: Layer, factors: Pair) -> Pair:
    """Those of both factors, as columns."""
    if not all(bool(factor.isfinite().all()) for factor in factors):
        raise FloatingPointError(
            f"layer {layer.name!r}: its Fisher metric is not finite; look for Inf and NaN in the model's activations"
        )
    matrix = _matrix("kfac", len(factors[1]), len(factors[0]), {_LAYER: factors})
    matrix.compute_eigendecomposition()
    pair: Pair = matrix.evecs[_LAYER]
    return pair


def _added(layer: Layer, values: Tensor, damping: float) -> float:
    """What damping adds to each eigenvalue: ``damping`` times their mean."""
    mean = values.double().mean().item()
    _check_definite(f"layer {layer.name!r}", values.flatten(), damping * mean, mean)
    return damping * mean


def _check_definite(what: str, values: Tensor, added: float, mean: float) -> None:
    """Raise unless the eigenvalues, or a matrix, are positive by float32's precision once ``added`` is on top."""
    margin = added - torch.finfo(torch.float32).eps * mean
    if values.dim() == 1:
        fine = bool((values + margin > 0).all())
    else:
        shifted = values.double()  # the factorisation's own rounding must not decide
        shifted.diagonal().add_(margin)
        fine = int(torch.linalg.cholesky_ex(shifted).info) == 0
    if not (fine and 0 < mean < math.inf):
        raise FloatingPointError(
            f"{what}: the damped Fisher metric is not positive definite (mean eigenvalue {mean:.3g}, damping adds "
            f"{added:.3g}): raise damping, batches or samples, or leave the layer out"
        )


class Linear(nn.Module):
    """A linear layer as nngeometry looks for it: 2-D float32 inputs, and zeros as output, to add to the layer's own."""

    link: Tensor
    """What nngeometry differentiates by: each output depends on it, whatever the model's inputs are."""
    backend: Any

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.rows = layer.out_features, 0
        self.weight = torch.zeros((), device=layer.weight.device)  # its device and dtype are read

    def forward(self, x: Tensor) -> Tensor:
        """Zeros (N, O) whose gradient is that of the layer's output."""
        zeros = self.link.to(x.device).expand(len(x), self.out_features)
        zeros.register_hook(lambda _: self._pair(x))  # before nngeometry's own, which knows the last call's x only
        return zeros

    def _pair(self, x: Tensor) -> None:
        self.backend.xs[self] = x
        self.rows += len(x)


def _mean_over_tokens(
    model: nn.Module,
    layers: Sequence[Layer],
    loss: Callable[[int], Tensor],
    passes: int,
    kind: str,
    bases: Sequence[Any] = (),
) -> list[tuple[Tensor, ...]]:
    """Each layer's diagonal (O, I), factors of inputs and output gradients (kfac), or eigenvalues in ``bases`` (ekfac).

    The model runs in evaluation mode and eagerly; its parameters, their gradients and its mode are as they were.

    Raises:
        FloatingPointError: a layer that no pass reaches.
    """
    package = load_nngeometry()
    stands, collection = [Linear(layer.module) for layer in layers], package.layercollection.LayerCollection()
    for i, layer in enumerate(layers):
        outputs, inputs = layer.module.weight.shape
        collection.add_layer(str(i), package.layercollection.LinearLayer(inputs, outputs, bias=False))

    def run(link: Tensor, index: Tensor) -> Tensor:
        for stand in stands:
            stand.link = link
        value = loss(int(index))
        return value.reshape(1, 1) + link.to(value)

    backend = package.backend.TorchHooksJacobianBackend(nn.ModuleList(stands), run, layer_collection=collection)
    loader = DataLoader(TensorDataset(torch.zeros(passes, 1), torch.arange(passes)), generator=torch.Generator())
    hooks = [x.module.register_forward_hook(partial(_add_zeros, s)) for x, s in zip(layers, stands, strict=True)]
    try:
        with _measured(model):
            for stand in stands:
                stand.backend = backend
            found = _sums(package.object, backend, loader, kind, bases)
    finally:
        for hook in (*hooks, *backend.handles):
            hook.remove()
    for layer, stand in zip(layers, stands, strict=True):
        if not stand.rows:
            raise FloatingPointError(
                f"layer {layer.name!r} was not reached by any batch: its Fisher metric is undefined; leave it out of "
                "the parameters, or give batches that reach it"
            )
    return [tuple(x * (passes / stand.rows) for x in each) for each, stand in zip(found, stands, strict=True)]


def _sums(objects: Any, backend: Any, loader: Any, kind: str, bases: Sequence[Any]) -> list[tuple[Tensor, ...]]:
    """What nngeometry measures of each layer, over the number of passes."""
    if kind == "diagonal":
        layers = backend.layer_collection.layers.values()
        parts = objects.PMatDiag(backend, examples=loader).data.split([layer.numel() for layer in layers])
        return [(part.view(layer.weight.size),) for part, layer in zip(parts, layers, strict=True)]
    if kind == "kfac":
        return list(objects.PMatKFAC(backend, examples=loader).data.values())
    matrix = objects.PMatEKFAC(backend, data=({str(i): basis for i, basis in enumerate(bases)}, {}))
    matrix.update_diag(loader)
    return [(values,) for values in matrix.data[1].values()]


def _add_zeros(stand: Linear, layer: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Show a call of the layer to nngeometry: what its weight is multiplied by, and the gradient at its output."""
    x = inputs[0].detach()
    x = layer.quantized_input(x) if isinstance(layer, QuantizedLinear) else x
    zeros: Tensor = stand(x.reshape(-1, x.shape[-1]).float())
    return output + zeros.view(output.shape).to(output.dtype)


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


def call_model(model: nn.Module, batch: Any) -> Tensor:
    """The logits of a model that takes the batch, or its first entry; tensors are moved to the model's device."""
    inputs = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(inputs, Tensor):
        raise TypeError(f"the loader gave a {type(inputs).__name__}, not tensors: say with logits= what to do with it")
    output = model(inputs.to(next(model.parameters()).device))
    return getattr(output, "logits", output)  # type: ignore[no-any-return]


def first_batches(loader: Any, count: int, *, seed: int, step: int) -> list[Any]:
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


def likelihood(scores: Any, *, seed: int, step: int, stream: int) -> Tensor:
    """The negative log-likelihood of labels that are drawn from the softmax of logits (..., V).

    Raises:
        ValueError: logits of another shape or type.
    """
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.dim() < 2 or scores.shape[-1] < 2:
        shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"the model gave {shape}: logits (..., V) of at least two classes are needed; see logits=")
    flat = scores.flatten(0, -2).float()
    labels = sample_labels(flat.detach(), seed=seed, step=step, stream=stream)
    return F.cross_entropy(flat, labels, reduction="sum")


@torch.no_grad()
def sample_labels(scores: Tensor, *, seed: int, step: int, stream: int) -> Tensor:
    """One label for every row of logits (N, V), drawn from its softmax by inverting the cumulative distribution.

    The draws are a pure function of the key; a label of probability 0 is never drawn, and one below 2^-24 is drawn
    less often than it should be.
    """
    draws = random_bits(len(scores), seed=seed ^ _LABELS, step=step, stream=stream, device=scores.device)
    rows = max(_CHUNK // scores.shape[1], 1)
    labels = []
    for part, bits in zip(scores.split(rows), draws.split(rows), strict=True):
        cumulative = part.double().softmax(1).cumsum(1)
        threshold = cumulative[:, -1:] * (bits.double()[:, None] * 2.0**-RANDOM_BITS)
        labels.append(torch.searchsorted(cumulative, threshold, right=True)[:, 0])
    return torch.cat(labels).clamp_(max=scores.shape[1] - 1)


def check_sources(model: Any, loader: Any, logits: Any) -> None:
    """Raise unless a metric can be measured with these, again and again."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    if not callable(logits):
        raise TypeError(f"logits must be a function (model, batch) -> Tensor, not {type(logits).__name__}")
    if not callable(loader) and not isinstance(loader, Iterable):
        raise TypeError(f"loader must be iterable, or a function of the step, not {type(loader).__name__}")
    if isinstance(loader, Iterator):
        raise TypeError(f"loader is a {type(loader).__name__}, used up after one pass: give a DataLoader or a list")
