"""The Fisher metric of linear layers, measured by nngeometry on rows of plain linear
layers.

nngeometry's hooks look for ``nn.Linear`` with float weights and 2-D inputs, called
once: a hook of ours takes the rows of each call, and nngeometry measures a plain layer
of the same shape on them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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

Pair = tuple[Tensor, Tensor]  #: Moments of inputs (I, I) and of output gradients (O, O).
NEEDED: Final = {"diagonal": "fisher_diagonal", "kfac": "inverse_inputs", "ekfac": "eigenvalues"}
"""A name that a parameter's state has under each representation."""
METRIC: Final = ("fisher_", "inverse_", "basis_", "eigenvalues")
"""Beginnings of the names in a parameter's state that make a metric."""
_KINDS: Final = {"diagonal": "PMatDiag", "kfac": "PMatKFAC", "ekfac": "PMatEKFAC"}
_LAYER: Final = ""  # the name that a module has in itself: a matrix is of one layer
_LABELS = 0xF15E12_0000_0000  # keeps the draws of labels apart from those of the write-back
_BATCHES = 0xBA7C4E_0000_0000
_CHUNK = 1 << 22


def load_nngeometry() -> Any:
    """The package, or ImportError."""
    return import_optional("nngeometry", "fisher", "FisherNaturalGradient")


class Layer(NamedTuple):
    """A layer to be measured, with ``T`` (O, I), the derivative of value by coordinate,
    and its state so far.
    """

    name: str
    module: nn.Linear
    stretch: Tensor
    earlier: dict[str, Any]


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
    """New metrics, as entries for the layers' states; ``decay`` is the weight of
    earlier measurements.
    """
    diagonal = representation == "diagonal"
    names = ("fisher_diagonal",) if diagonal else ("fisher_inputs", "fisher_outputs")
    found = _mean_over_tokens(model, layers, loss, passes, "diagonal" if diagonal else "kfac")
    entries: list[dict[str, Any]] = []
    for layer, new in zip(layers, found, strict=True):
        known = [layer.earlier[name] if decay and name in layer.earlier else None for name in names]
        mean = [
            x if old is None else old * decay + x * (1 - decay)
            for x, old in zip(new, known, strict=True)
        ]
        entry = dict(zip(names, mean, strict=True)) if diagonal or decay else {}
        if diagonal:
            entry["fisher_damping"] = _added(
                layer, mean[0] * layer.stretch * layer.stretch, damping
            )
        else:
            entry |= _in_codes(layer, mean, representation, damping)
        entries.append(entry)
    if representation == "ekfac":
        bases = [(entry["basis_inputs"], entry["basis_outputs"]) for entry in entries]
        values = _mean_over_tokens(model, layers, loss, passes, "ekfac", bases)
        for layer, entry, (each,) in zip(layers, entries, values, strict=True):
            entry |= {"eigenvalues": each, "fisher_damping": _added(layer, each, damping)}
    # some checkpoints drop strides, and a product's last bits depend on them
    return [
        {name: x.contiguous() if isinstance(x, Tensor) else x for name, x in each.items()}
        for each in entries
    ]


def natural_gradient(
    kind: str, metric: dict[str, Any], g: Tensor, stretch: Tensor | float = 1.0
) -> Tensor:
    """``T (T F T + damping)^-1 T g``, with ``stretch`` for ``T`` of a diagonal; a
    Kronecker metric has it inside.
    """
    if kind == "kfac":
        matrix = _matrix(kind, g, {_LAYER: (metric["inverse_inputs"], metric["inverse_outputs"])})
    elif kind == "ekfac":
        bases = {_LAYER: (metric["basis_inputs"], metric["basis_outputs"])}
        matrix = _matrix(kind, g, (bases, {_LAYER: metric["eigenvalues"]}))
    else:
        square = stretch * stretch
        matrix, g = _matrix(kind, g, (metric["fisher_diagonal"] * square).reshape(-1)), g * square
    vector = load_nngeometry().object.PVector(
        matrix.generator.layer_collection, vector_repr=g.reshape(-1)
    )
    solved = (
        matrix.mv(vector)
        if kind == "kfac"
        else matrix.solve(vector, regul=metric["fisher_damping"])
    )
    result: Tensor = solved.to_torch()
    return result.view(g.shape)


def _in_codes(
    layer: Layer, factors: Sequence[Tensor], representation: str, damping: float
) -> dict[str, Tensor]:
    """Inverses (kfac) or eigenvectors (ekfac) of ``T F T``, times ``T`` on the sides
    that gradients come from.
    """
    sides = rank_one(layer.stretch)
    x, y = (factor * side[:, None] * side for factor, side in zip(factors, sides, strict=True))
    matrix = _matrix("kfac", layer.stretch, {_LAYER: (x, y)})
    if representation == "kfac":
        means = [factor.diagonal().double().mean().item() for factor in (x, y)]
        for factor, mean, side in zip((x, y), means, ("inputs", "output gradients"), strict=True):
            check_definite(f"layer {layer.name!r}, {side}", factor, damping**0.5 * mean, mean)
        pair = matrix.inverse(regul=damping * means[0] * means[1]).data[_LAYER]
        names = ("inverse_inputs", "inverse_outputs")
        return {
            name: inverse * side[:, None] * side
            for name, inverse, side in zip(names, pair, sides, strict=True)
        }
    if not (x.isfinite().all() and y.isfinite().all()):
        raise FloatingPointError(
            f"layer {layer.name!r}: its Fisher metric is not finite; look for Inf and NaN in the "
            f"model's activations"
        )
    matrix.compute_eigendecomposition()
    pair, names = matrix.evecs[_LAYER], ("basis_inputs", "basis_outputs")
    return {
        name: vectors * side[:, None]
        for name, vectors, side in zip(names, pair, sides, strict=True)
    }


def rank_one(stretch: Tensor) -> Pair:
    """Factors (I,) and (O,) whose product is nearest to ``stretch`` (O, I) in the
    logarithm.
    """
    logarithm = stretch.double().log2()
    return (logarithm.mean(0) - logarithm.mean()).exp2().float(), logarithm.mean(1).exp2().float()


def _matrix(kind: str, weight: Tensor, data: Any) -> Any:
    """nngeometry's matrix of a layer with a weight of this shape, made of its data."""
    package = load_nngeometry()
    return getattr(package.object, _KINDS[kind])(
        package.backend.DummyGenerator(_layer_of(weight), None), data=data
    )


def _layer_of(weight: Tensor) -> Any:
    package = load_nngeometry().layercollection
    layers = package.LayerCollection()
    layers.add_layer(_LAYER, package.LinearLayer(weight.shape[1], weight.shape[0], bias=False))
    return layers


def _added(layer: Layer, values: Tensor, damping: float) -> float:
    """``damping`` times the mean eigenvalue, which is added to each."""
    mean = values.double().mean().item()
    check_definite(f"layer {layer.name!r}", values.flatten(), damping * mean, mean)
    return damping * mean


def check_definite(what: str, values: Tensor, added: float, mean: float) -> None:
    """Raise unless the eigenvalues, or a matrix, are positive by float32's precision
    once ``added`` is on top.
    """
    margin = added - torch.finfo(torch.float32).eps * mean
    if values.dim() == 1:
        fine = bool((values + margin > 0).all())
    else:
        shifted = values.double()  # the factorisation's own rounding must not decide
        shifted.diagonal().add_(margin)
        fine = int(torch.linalg.cholesky_ex(shifted).info) == 0
    if not (fine and 0 < mean < math.inf):
        raise FloatingPointError(
            f"{what}: the damped Fisher metric is not positive definite (mean eigenvalue "
            f"{mean:.3g}, damping adds {added:.3g}): raise damping, batches or samples, or leave "
            f"the layer out"
        )


def _mean_over_tokens(
    model: nn.Module,
    layers: Sequence[Layer],
    loss: Callable[[int], Tensor],
    passes: int,
    kind: str,
    bases: Sequence[Pair] = (),
) -> list[list[Tensor]]:
    """Each layer's diagonal (O, I), factors of inputs and output gradients (kfac), or
    eigenvalues in ``bases``.
    """
    sums: list[list[Tensor]] = [[] for _ in layers]
    tokens = [0] * len(layers)
    with _watched(model, layers) as calls:
        for index in range(passes):
            calls.clear()
            value = loss(index)
            made = [
                call for call in calls if value.requires_grad
            ]  # checkpointing calls layers in the backward pass
            gradients = (
                torch.autograd.grad(value, [output for _, _, output in made], allow_unused=True)
                if made
                else ()
            )
            for (i, x, _), y in zip(made, gradients, strict=True):
                if y is not None:
                    new = _sum_over_rows(
                        kind, x, y.reshape(-1, y.shape[-1]).float(), bases[i] if bases else None
                    )
                    sums[i] = [a + b for a, b in zip(sums[i], new, strict=True)] if sums[i] else new
                    tokens[i] += len(x)
    for layer, count in zip(layers, tokens, strict=True):
        if not count:
            raise FloatingPointError(
                f"layer {layer.name!r} was not reached by any batch: its Fisher metric is "
                f"undefined; leave it out of "
                "the parameters, or give batches that reach it"
            )
    # a mean over passes, then over tokens, in the order in which resumed runs have to
    # round
    return [
        [x / passes * (passes / count) for x in each]
        for each, count in zip(sums, tokens, strict=True)
    ]


@contextmanager
def _watched(
    model: nn.Module, layers: Sequence[Layer]
) -> Iterator[list[tuple[int, Tensor, Tensor]]]:
    """A list that each call of a layer adds its place, rows of inputs (N, I) and output
    to, in evaluation mode.
    """
    calls: list[tuple[int, Tensor, Tensor]] = []

    def keep(i: int, layer: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x = inputs[0].detach()
        x = layer.quantized_input(x) if isinstance(layer, QuantizedLinear) else x
        output = output if output.requires_grad else output.detach().requires_grad_()
        calls.append((i, x.reshape(-1, x.shape[-1]).float(), output))
        return output.clone()  # an activation may overwrite it

    modes = {module: module.training for module in model.modules()}
    hooks = [layer.module.register_forward_hook(partial(keep, i)) for i, layer in enumerate(layers)]
    model.eval()
    try:
        with (
            torch.enable_grad(),
            torch.compiler.set_stance("force_eager"),
        ):  # compiled code would not see the hooks
            yield calls
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training


def _sum_over_rows(kind: str, x: Tensor, y: Tensor, basis: Pair | None) -> list[Tensor]:
    """nngeometry's measurement of a plain layer with inputs (N, I) whose outputs have
    the gradients (N, O).
    """
    layer = nn.utils.skip_init(nn.Linear, x.shape[1], y.shape[1], bias=False, device=x.device)
    backend = load_nngeometry().backend.TorchHooksJacobianBackend(
        layer, lambda x, y: (layer(x) * y).sum(1), layer_collection=_layer_of(layer.weight)
    )
    one: Any = [(x, y)]  # a single example: sums are divided by one
    rows: DataLoader[Any] = DataLoader(one, batch_size=None, generator=torch.Generator())
    if kind == "diagonal":
        return [backend.get_covariance_diag(rows).view(layer.weight.shape)]
    if kind == "kfac":
        return list(backend.get_kfac_blocks(rows)[_LAYER])
    return [backend.get_kfe_diag({_LAYER: basis}, rows)[_LAYER]]


def call_model(model: nn.Module, batch: Any) -> Tensor:
    """The logits of a model that takes the batch, or its first entry; tensors are moved
    to the model's device.
    """
    inputs = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(inputs, Tensor):
        raise TypeError(
            f"the loader gave a {type(inputs).__name__}, not tensors: say with logits= what to do "
            f"with it"
        )
    output = model(inputs.to(next(model.parameters()).device))
    return getattr(output, "logits", output)  # type: ignore[no-any-return]


def first_batches(loader: Any, count: int, *, seed: int, step: int) -> list[Any]:
    """The first batches of the loader, in an order that depends on seed and step and on
    no global generator.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed((seed ^ _BATCHES ^ (step * 0x9E3779B97F4A7C15)) % 2**64)
        return list(islice(iter(loader(step) if callable(loader) else loader), count))


def likelihood(scores: Any, *, seed: int, step: int, stream: int) -> Tensor:
    """The negative log-likelihood of labels that are drawn from the softmax of logits
    (..., V).
    """
    if (
        not isinstance(scores, Tensor)
        or not scores.is_floating_point()
        or scores.dim() < 2
        or scores.shape[-1] < 2
    ):
        shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(
            f"the model gave {shape}: logits (..., V) of at least two classes are needed; see "
            f"logits="
        )
    flat = scores.flatten(0, -2).float()
    labels = sample_labels(flat.detach(), seed=seed, step=step, stream=stream)
    return F.cross_entropy(flat, labels, reduction="sum")


@torch.no_grad()
def sample_labels(scores: Tensor, *, seed: int, step: int, stream: int) -> Tensor:
    """One label for every row of logits (N, V), drawn from its softmax by inverting the
    cumulative distribution.

    A label of probability 0 is never drawn, and one below 2^-24 less often than it
    should be.
    """
    draws = random_bits(
        len(scores), seed=seed ^ _LABELS, step=step, stream=stream, device=scores.device
    )
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
            f"list"
        )
