"""The Fisher metric of linear layers, measured by nngeometry.

    loss of drawn labels --> backward pass --> rows of inputs x (N, I)
                                               and of output gradients y (N, O)
    rows of each layer   --> nngeometry    --> F: its diagonal, or its two factors
    T F T + damping      --> nngeometry    --> what `natural_gradient` solves with

nngeometry's hooks look for ``nn.Linear`` with float weights and 2-D inputs, called once
in a pass. Layers here may be quantised, called several times, or take inputs of any
shape. So hooks of ours take the rows of every call (`_recorded_calls`), and nngeometry
measures a plain layer of the same shape on them (`_sum_over_rows`).

``T``, here ``stretch``, is the derivative of value by code coordinate. A metric is a
dict of entries for the parameter's state: `measure` makes them, `natural_gradient`
reads them. `FisherNaturalGradient` calls both, and draws batches and labels here.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fp8manifold._base.checks import import_optional
from fp8manifold.nn._linear import QuantizedLinear
from fp8manifold.random_bits import RANDOM_BITS, random_bits


class Representation(StrEnum):
    """How the metric of a layer is stored; the option ``representation`` is the word."""

    DIAGONAL = "diagonal"
    #: factors of inputs and of output gradients
    KFAC = "kfac"
    #: eigenvalues in the eigenbasis of these factors
    EKFAC = "ekfac"


ENTRY_OF_METRIC: Final = {
    Representation.DIAGONAL.value: "fisher_diagonal",
    Representation.KFAC.value: "inverse_inputs",
    Representation.EKFAC.value: "eigenvalues",
}
"""An entry that a parameter's state has once it has a metric, by representation."""
METRIC_PREFIXES: Final = ("fisher_", "inverse_", "basis_", "eigenvalues")
"""Beginnings of the names of a metric's entries in a parameter's state."""
_MATRIX_CLASSES: Final = {
    Representation.DIAGONAL.value: "PMatDiag",
    Representation.KFAC.value: "PMatKFAC",
    Representation.EKFAC.value: "PMatEKFAC",
}
#: The name of the only layer of one of nngeometry's matrices, as a module names itself.
_LAYER: Final = ""
#: Added to the seed, so that labels and batches have other draws than the write-back.
_LABEL_WORD: Final = 0xF15E12_0000_0000
_BATCH_WORD: Final = 0xBA7C4E_0000_0000
#: Logits from which labels are drawn at once; a bound of the memory in float64.
_LOGITS_AT_ONCE: Final = 1 << 22


def load_nngeometry() -> Any:
    """Return the package, or raise ImportError."""
    return import_optional("nngeometry", "fisher", "FisherNaturalGradient")


class Layer(NamedTuple):
    """A layer to be measured."""

    name: str
    module: nn.Linear
    #: ``T`` (O, I), the derivative of value by code coordinate.
    stretch: Tensor
    #: The layer's state, whose averages the new measurement joins.
    earlier: dict[str, Any]


class Sides(NamedTuple):
    """A tensor for the inputs of a layer, and one for its outputs.

    Factors of a Kronecker product, their eigenvectors or inverses are (I, I) and
    (O, O), factors of ``T`` are (I,) and (O,).
    """

    inputs: Tensor
    outputs: Tensor


class _Call(NamedTuple):
    """One call of a layer in a forward pass."""

    #: The index of the layer.
    layer: int
    #: Rows of inputs (N, I), detached.
    rows: Tensor
    #: The output, of which gradients are taken.
    output: Tensor


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
    """Measure the metric of each layer, and return its entries for the layer's state.

    Args:
        model: the model that ``loss`` calls.
        layers: the layers to measure.
        loss: function of the index of a pass, to the sum of the labels' negative
            log-likelihoods.
        passes: the number of passes.
        representation: ``diagonal``, ``kfac`` or ``ekfac``.
        damping: added to each eigenvalue of ``T F T``, in units of their mean.
        decay: weight of earlier measurements in the running average of ``F``; at 0
            kfac and ekfac store no average.

    Raises:
        FloatingPointError: no pass reaches a layer, or a damped metric is not positive
            definite.
    """
    is_diagonal = representation == Representation.DIAGONAL
    names = ("fisher_diagonal",) if is_diagonal else ("fisher_inputs", "fisher_outputs")
    measured = _mean_over_tokens(model, layers, loss, passes, "diagonal" if is_diagonal else "kfac")
    entries: list[dict[str, Any]] = []
    for layer, tensors in zip(layers, measured, strict=True):
        averages = _averages(layer, dict(zip(names, tensors, strict=True)), decay)
        if is_diagonal:
            eigenvalues = averages["fisher_diagonal"] * layer.stretch * layer.stretch
            entry = averages | {"fisher_damping": _added(layer, eigenvalues, damping)}
        else:
            factors = Sides(averages["fisher_inputs"], averages["fisher_outputs"])
            entry = averages if decay else {}
            entry |= _kronecker_entries(layer, factors, representation, damping)
        entries.append(entry)
    if representation == Representation.EKFAC:
        bases = [Sides(entry["basis_inputs"], entry["basis_outputs"]) for entry in entries]
        measured = _mean_over_tokens(model, layers, loss, passes, "ekfac", bases)
        for layer, entry, (eigenvalues,) in zip(layers, entries, measured, strict=True):
            entry["eigenvalues"] = eigenvalues
            entry["fisher_damping"] = _added(layer, eigenvalues, damping)
    return [_with_contiguous_tensors(entry) for entry in entries]


def _averages(layer: Layer, tensors: dict[str, Tensor], decay: float) -> dict[str, Any]:
    """Return the running averages after a measurement, by name."""
    averages: dict[str, Any] = {}
    for name, new in tensors.items():
        if decay and name in layer.earlier:
            averages[name] = layer.earlier[name] * decay + new * (1 - decay)
        else:
            averages[name] = new
    return averages


def _with_contiguous_tensors(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry with contiguous tensors.

    Some checkpoints drop strides, and the last bits of a product depend on them.
    """
    return {
        name: value.contiguous() if isinstance(value, Tensor) else value
        for name, value in entry.items()
    }


def natural_gradient(
    representation: str,
    metric: dict[str, Any],
    gradient: Tensor,
    stretch: Tensor | float = 1.0,
) -> Tensor:
    """Return ``T (T F T + damping)^-1 T g`` of a layer's gradient (O, I).

    Args:
        representation: ``diagonal``, ``kfac`` or ``ekfac``.
        metric: entries of a state, as :func:`measure` makes them.
        gradient: ``g``.
        stretch: ``T`` of a diagonal; the other metrics have it inside.
    """
    if representation == Representation.KFAC:
        inverses = Sides(metric["inverse_inputs"], metric["inverse_outputs"])
        matrix = _matrix("kfac", gradient, {_LAYER: inverses})
        solution = matrix.mv(_vector(matrix, gradient))
    elif representation == Representation.EKFAC:
        bases = Sides(metric["basis_inputs"], metric["basis_outputs"])
        data = ({_LAYER: bases}, {_LAYER: metric["eigenvalues"]})
        matrix = _matrix("ekfac", gradient, data)
        solution = matrix.solve(_vector(matrix, gradient), regul=metric["fisher_damping"])
    else:
        square = stretch * stretch
        matrix = _matrix("diagonal", gradient, (metric["fisher_diagonal"] * square).reshape(-1))
        solution = matrix.solve(_vector(matrix, gradient * square), regul=metric["fisher_damping"])
    result: Tensor = solution.to_torch()
    return result.view(gradient.shape)


def _kronecker_entries(
    layer: Layer, factors: Sides, representation: str, damping: float
) -> dict[str, Tensor]:
    """Return what a Kronecker product ``F`` is solved with.

    These are inverses (kfac) or eigenvectors (ekfac) of ``T F T``, multiplied by ``T``
    on the sides that gradients come from.
    """
    stretches = rank_one(layer.stretch)
    stretched = Sides(
        factors.inputs * stretches.inputs[:, None] * stretches.inputs,
        factors.outputs * stretches.outputs[:, None] * stretches.outputs,
    )
    if representation == Representation.KFAC:
        inverses = _damped_inverses(layer, stretched, damping)
        return {
            "inverse_inputs": inverses.inputs * stretches.inputs[:, None] * stretches.inputs,
            "inverse_outputs": inverses.outputs * stretches.outputs[:, None] * stretches.outputs,
        }
    bases = _eigenvectors(layer, stretched)
    return {
        "basis_inputs": bases.inputs * stretches.inputs[:, None],
        "basis_outputs": bases.outputs * stretches.outputs[:, None],
    }


def _damped_inverses(layer: Layer, factors: Sides, damping: float) -> Sides:
    """Return the inverses of both factors; the damping is shared between them."""
    mean_inputs = factors.inputs.diagonal().double().mean().item()
    mean_outputs = factors.outputs.diagonal().double().mean().item()
    root = damping**0.5
    check_definite(f"layer {layer.name!r}, inputs", factors.inputs, root * mean_inputs, mean_inputs)
    check_definite(
        f"layer {layer.name!r}, output gradients",
        factors.outputs,
        root * mean_outputs,
        mean_outputs,
    )
    matrix = _matrix("kfac", layer.stretch, {_LAYER: factors})
    # nngeometry shares regul by the means: it adds root times its own to each factor
    return Sides(*matrix.inverse(regul=damping * mean_inputs * mean_outputs).data[_LAYER])


def _eigenvectors(layer: Layer, factors: Sides) -> Sides:
    if not (factors.inputs.isfinite().all() and factors.outputs.isfinite().all()):
        raise FloatingPointError(
            f"layer {layer.name!r}: its Fisher metric is not finite; look for Inf and NaN in the "
            "model's activations"
        )
    matrix = _matrix("kfac", layer.stretch, {_LAYER: factors})
    matrix.compute_eigendecomposition()
    return Sides(*matrix.evecs[_LAYER])


def rank_one(stretch: Tensor) -> Sides:
    """Return factors of ``stretch`` (O, I): (I,) and (O,).

    Their outer product is the nearest to it in the logarithm.
    """
    logarithm = stretch.double().log2()
    inputs = (logarithm.mean(0) - logarithm.mean()).exp2().float()
    return Sides(inputs, logarithm.mean(1).exp2().float())


def _matrix(representation: str, weight: Tensor, data: Any) -> Any:
    """Return nngeometry's matrix of a layer whose weight has this shape."""
    package = load_nngeometry()
    matrix_class = getattr(package.object, _MATRIX_CLASSES[representation])
    return matrix_class(package.backend.DummyGenerator(_collection(weight), None), data=data)


def _vector(matrix: Any, gradient: Tensor) -> Any:
    """Return nngeometry's vector of a gradient, for products with a matrix."""
    collection = matrix.generator.layer_collection
    return load_nngeometry().object.PVector(collection, vector_repr=gradient.reshape(-1))


def _collection(weight: Tensor) -> Any:
    """Return nngeometry's collection of one layer, whose weight has this shape."""
    package = load_nngeometry().layercollection
    layers = package.LayerCollection()
    layers.add_layer(_LAYER, package.LinearLayer(weight.shape[1], weight.shape[0], bias=False))
    return layers


def _added(layer: Layer, eigenvalues: Tensor, damping: float) -> float:
    """Return what is added to each eigenvalue: ``damping`` times their mean."""
    mean = eigenvalues.double().mean().item()
    check_definite(f"layer {layer.name!r}", eigenvalues.flatten(), damping * mean, mean)
    return damping * mean


def check_definite(name: str, values: Tensor, added: float, mean: float) -> None:
    """Raise FloatingPointError unless a damped matrix is positive definite.

    Its eigenvalues must be positive by the precision of float32.

    Args:
        name: of the matrix, for the message.
        values: the eigenvalues (N,), or the matrix (N, N), before damping.
        added: the damping, which is added to each eigenvalue.
        mean: the mean eigenvalue.
    """
    margin = added - torch.finfo(torch.float32).eps * mean
    if values.dim() == 1:
        is_definite = bool((values + margin > 0).all())
    else:
        # in float64: the rounding of the factorisation must not decide
        shifted = values.double()
        shifted.diagonal().add_(margin)
        is_definite = int(torch.linalg.cholesky_ex(shifted).info) == 0
    if not (is_definite and 0 < mean < math.inf):
        raise FloatingPointError(
            f"{name}: the damped Fisher metric is not positive definite (mean eigenvalue "
            f"{mean:.3g}, damping adds {added:.3g}): raise damping, batches or samples, or leave "
            "the layer out"
        )


def _mean_over_tokens(
    model: nn.Module,
    layers: Sequence[Layer],
    loss: Callable[[int], Tensor],
    passes: int,
    kind: str,
    bases: Sequence[Sides] = (),
) -> list[list[Tensor]]:
    """Return the measured tensors of each layer, as means over tokens.

    They are its diagonal (O, I); for ``kfac`` the factors of inputs and of output
    gradients; or for ``ekfac`` the eigenvalues in the layer's entry of ``bases``.
    """
    sums: list[list[Tensor]] = [[] for _ in layers]
    tokens = [0] * len(layers)
    with _recorded_calls(model, layers) as calls:
        for index in range(passes):
            calls.clear()
            value = loss(index)
            for call, gradient in _with_gradients(calls, value):
                y = gradient.reshape(-1, gradient.shape[-1]).float()
                basis = bases[call.layer] if bases else None
                new = _sum_over_rows(kind, call.rows, y, basis)
                earlier = sums[call.layer]
                if earlier:
                    new = [old + added for old, added in zip(earlier, new, strict=True)]
                sums[call.layer] = new
                tokens[call.layer] += len(call.rows)
    for layer, count in zip(layers, tokens, strict=True):
        if not count:
            raise FloatingPointError(
                f"layer {layer.name!r} was not reached by any batch: its Fisher metric is "
                "undefined; leave it out of the parameters, or give batches that reach it"
            )
    means = []
    for tensors, count in zip(sums, tokens, strict=True):
        # the mean over passes comes first: resumed runs have to round in this order
        means.append([x / passes * (passes / count) for x in tensors])
    return means


def _with_gradients(calls: list[_Call], value: Tensor) -> list[tuple[_Call, Tensor]]:
    """Return the calls that ``value`` depends on, with the gradients of their outputs."""
    if not calls or not value.requires_grad:
        return []
    # a copy: under checkpointing the backward pass calls layers again
    forward_calls = list(calls)
    outputs = [call.output for call in forward_calls]
    gradients = torch.autograd.grad(value, outputs, allow_unused=True)
    pairs = zip(forward_calls, gradients, strict=True)
    return [(call, gradient) for call, gradient in pairs if gradient is not None]


@contextmanager
def _recorded_calls(model: nn.Module, layers: Sequence[Layer]) -> Iterator[list[_Call]]:
    """Put the model in evaluation mode, and record the calls of layers in a list."""
    calls: list[_Call] = []

    def record(i: int, layer: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x = inputs[0].detach()
        if isinstance(layer, QuantizedLinear):
            x = layer.quantized_input(x)
        if not output.requires_grad:
            output = output.detach().requires_grad_()
        calls.append(_Call(i, x.reshape(-1, x.shape[-1]).float(), output))
        # a copy: an activation in place may overwrite it
        return output.clone()

    modes = {module: module.training for module in model.modules()}
    hooks = [
        layer.module.register_forward_hook(partial(record, i)) for i, layer in enumerate(layers)
    ]
    model.eval()
    try:
        # eager: compiled code would not see the hooks
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            yield calls
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training


def _sum_over_rows(kind: str, x: Tensor, y: Tensor, basis: Sides | None) -> list[Tensor]:
    """Return nngeometry's measurement of a plain layer.

    Args:
        kind: what is measured, as in `_mean_over_tokens`.
        x: inputs (N, I).
        y: gradients of the outputs (N, O).
        basis: eigenvectors, for ``ekfac``.
    """
    layer = nn.utils.skip_init(nn.Linear, x.shape[1], y.shape[1], bias=False, device=x.device)
    # the gradient of this function with respect to outputs is y
    backend = load_nngeometry().backend.TorchHooksJacobianBackend(
        layer, lambda x, y: (layer(x) * y).sum(1), layer_collection=_collection(layer.weight)
    )
    # all rows are a single example: nngeometry divides its sums by the number of these
    examples: Any = [(x, y)]
    loader: DataLoader[Any] = DataLoader(examples, batch_size=None, generator=torch.Generator())
    if kind == Representation.DIAGONAL:
        return [backend.get_covariance_diag(loader).view(layer.weight.shape)]
    if kind == Representation.KFAC:
        return list(backend.get_kfac_blocks(loader)[_LAYER])
    return [backend.get_kfe_diag({_LAYER: basis}, loader)[_LAYER]]


def call_model(model: nn.Module, batch: Any) -> Tensor:
    """Return the logits of a model that takes the batch, or the first entry of it.

    Tensors are moved to the model's device.
    """
    inputs = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(inputs, Tensor):
        raise TypeError(
            f"the loader gave a {type(inputs).__name__}, not tensors: say with logits= what to do "
            "with it"
        )
    output = model(inputs.to(next(model.parameters()).device))
    return getattr(output, "logits", output)  # type: ignore[no-any-return]


def first_batches(loader: Any, count: int, *, seed: int, step: int) -> list[Any]:
    """Return the first batches of the loader.

    A loader that shuffles has an order that depends on seed and step alone: the global
    generator is neither read nor advanced.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(
            (seed ^ _BATCH_WORD ^ (step * 0x9E3779B97F4A7C15)) % 2**64
        )
        batches = loader(step) if callable(loader) else loader
        return list(islice(iter(batches), count))


def likelihood(scores: Any, *, seed: int, step: int, stream: int) -> Tensor:
    """Return the negative log-likelihood of labels drawn from the model's softmax.

    Args:
        scores: logits (..., V).
        seed: key of the draws, with ``step`` and ``stream``.
        step: the steps taken.
        stream: the index of the pass.
    """
    is_tensor = isinstance(scores, Tensor)
    if not is_tensor or not scores.is_floating_point() or scores.dim() < 2 or scores.shape[-1] < 2:
        shape = tuple(scores.shape) if is_tensor else type(scores).__name__
        raise ValueError(
            f"the model gave {shape}: logits (..., V) of at least two classes are needed; see "
            "logits="
        )
    flat = scores.flatten(0, -2).float()
    labels = sample_labels(flat.detach(), seed=seed, step=step, stream=stream)
    return F.cross_entropy(flat, labels, reduction="sum")


@torch.no_grad()
def sample_labels(scores: Tensor, *, seed: int, step: int, stream: int) -> Tensor:
    """Draw a label for every row of logits (N, V), from its softmax.

    The cumulative distribution is inverted. A label of probability 0 is never drawn,
    and one below 2^-24 less often than it should be.
    """
    draws = random_bits(
        len(scores), seed=seed ^ _LABEL_WORD, step=step, stream=stream, device=scores.device
    )
    rows = max(_LOGITS_AT_ONCE // scores.shape[1], 1)
    labels = []
    for logits, bits in zip(scores.split(rows), draws.split(rows), strict=True):
        cumulative = logits.double().softmax(1).cumsum(1)
        threshold = cumulative[:, -1:] * (bits.double()[:, None] * 2.0**-RANDOM_BITS)
        labels.append(torch.searchsorted(cumulative, threshold, right=True)[:, 0])
    return torch.cat(labels).clamp_(max=scores.shape[1] - 1)


def check_sources(model: Any, loader: Any, logits: Any) -> None:
    """Raise TypeError unless a metric can be measured with these, again and again."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    if not callable(logits):
        raise TypeError(
            f"logits must be a function (model, batch) -> Tensor, not {type(logits).__name__}"
        )
    if not callable(loader) and not isinstance(loader, Iterable):
        raise TypeError(
            f"loader must be iterable, or a function of the step, not {type(loader).__name__}"
        )
    if isinstance(loader, Iterator):
        raise TypeError(
            f"loader is a {type(loader).__name__}, used up after one pass: give a DataLoader or a "
            "list"
        )
