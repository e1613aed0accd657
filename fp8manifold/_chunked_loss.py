"""The loss of a language model, a chunk of tokens at a time.

    chunked_loss(model)   a ChunkedLoss, which puts `_forward_in_chunks` in the place of
                          the model's ``forward``
    a forward pass        is the model's own, but its output layer returns
                          `ChunkedLogits`: the layer's input, from which logits follow
    cross_entropy         of these computes the logits of a chunk, sums its loss, and
                          drops them; the backward pass computes them again

Before it they may be multiplied, divided and capped by tanh, as some models do, which
is done to each chunk. A model that asks for more is refused by the name of what it asks.
"""

import functools
import importlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from types import MethodType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8manifold._base.checks import check_int
from fp8manifold._base.wrappers import unwrapped
from fp8manifold._doors.exchange import is_transformers_model
from fp8manifold.nn import QuantizedLinear
from fp8manifold.nn._products import is_on_card, linear
from fp8manifold.nn._spec import OPERANDS
from fp8manifold.tensor import FP8Tensor

__all__ = ["ChunkedLoss", "chunked_loss"]

_HANDLE: Final = "_fp8_chunked_loss"
"""The attribute of a model with its handle."""
_MOST_TOKENS: Final = 2**20
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")
"""The attributes of a module with the hooks of its calls."""
Change = Callable[[Tensor], Tensor]


class ChunkedLoss:
    """A handle on the loss of a model in chunks, which removes it again.

    :func:`chunked_loss` returns it. It is a context manager that removes it at its end.

    Args:
        model: a language model of transformers.
        tokens: the number per chunk.

    Example:
        >>> import fp8manifold as fm
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=20))
        >>> with fm.huggingface.chunked_loss(model) as handle:
        ...     handle.tokens
        256
    """

    def __init__(self, model: Any, tokens: int) -> None:
        self.model = model
        self.tokens = tokens
        self._previous: Any = model.forward
        self._previous_in_place: Any = vars(model).get("forward")
        self._forward: Any = MethodType(_forward_like(model.forward), model)
        self._is_on = True

    def __enter__(self) -> "ChunkedLoss":
        """Return the handle, which is in use already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove it."""
        self.remove()

    def remove(self) -> None:
        """Compute the loss from all logits again.

        A second call changes nothing. A ``forward`` that has replaced the chunked one
        since then stays.
        """
        if vars(self.model).get(_HANDLE) is not self:
            return
        self._is_on = False
        forward = vars(self.model).get("forward")
        if forward is not None and forward is not self._forward:
            # it may call this handle's forward, which needs the handle
            return
        vars(self.model).pop(_HANDLE)
        vars(self.model).pop("forward", None)
        if forward is not None and self._previous_in_place is not None:
            self.model.forward = self._previous_in_place


def chunked_loss(model: Any, tokens: int = 256) -> ChunkedLoss:
    r"""Let a language model of transformers compute its loss in chunks of tokens.

    .. math:: L = \frac{1}{n} \sum_{\text{chunks}} \sum_{i \in \text{chunk}}
              -\log \operatorname{softmax}(W h_i)_{y_i}

    ``model(..., labels=labels)`` returns the same loss, up to the order of its sums,
    and ``num_items_in_batch``, ``shift_labels`` and ignored labels count as before. The
    logits of a chunk exist while its loss is computed, and once more in the backward
    pass: they take memory for ``tokens`` instead of all tokens, and the output layer
    multiplies four times instead of three. On a GPU with Liger installed its fused
    linear cross-entropy takes the place of this loop, with chunks of its own size,
    where the output layer only multiplies by its weight.

    The ``logits`` of the result can't be used. Without ``labels`` the model computes
    logits as before, except in training with gradients, which is refused. Logits that
    the model scales or caps before its loss are scaled and capped by chunks.

    Args:
        model: changed in place. It may be quantised, have adapters, and tie its output
            layer to the embedding.
        tokens: the number per chunk, over all sequences together.

    Returns:
        A handle with ``remove()``, which is a context manager too.

    Raises:
        TypeError: not a transformers model, or one without an output layer.
        ValueError: a number of tokens out of range, or an output layer that scales its
            operands by the tokens that it sees together.
        RuntimeError: the model's loss is in chunks already. In a forward pass: a model
            that asks more of its logits than a chunk has, or no labels.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=20))
        >>> text = torch.arange(12).view(1, 12)
        >>> whole = model.eval()(input_ids=text, labels=text).loss
        >>> handle = chunked_loss(model, tokens=4)
        >>> torch.allclose(model(input_ids=text, labels=text).loss, whole)
        True

    Source: Hsu et al. 2024 (Liger kernel, arXiv 2410.10989) for the loss by chunks.
    """
    check_int("tokens", tokens, 1, _MOST_TOKENS)
    inner = _model_within(model)
    present: ChunkedLoss | None = vars(inner).get(_HANDLE)
    if present is not None and not present._is_on:
        # what was in the place of its forward may be gone
        present.remove()
        if _HANDLE in vars(inner):
            raise RuntimeError(
                "this model's forward was replaced after chunked_loss: put back the forward "
                "that it had, then call remove() of the handle"
            )
    elif present is not None:
        raise RuntimeError(
            "this model computes its loss in chunks already: call remove() of that handle first"
        )
    _check_head(_head_of(inner))
    if "labels" not in inspect.signature(inner.forward).parameters:
        raise TypeError(f"{type(inner).__name__}.forward takes no labels, so it computes no loss")
    handle = ChunkedLoss(inner, tokens)
    setattr(inner, _HANDLE, handle)
    inner.forward = handle._forward
    return handle


def _model_within(model: Any) -> Any:
    """Return the model of transformers inside torch's and PEFT's wrappers."""
    inner: Any = unwrapped(model) if isinstance(model, nn.Module) else model
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if not is_transformers_model(inner):
        raise TypeError(f"model is a {type(model).__name__}, not a transformers model")
    return inner


def _head_of(model: Any) -> nn.Module:
    """Return the output layer, as it is now: wrappers replace it."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise TypeError(
            f"{type(model).__name__} has no output layer to compute a loss from "
            f"(get_output_embeddings() is {head!r})"
        )
    return head


def _check_head(head: nn.Module) -> None:
    """Refuse an output layer whose scales depend on how many tokens it sees."""
    for module in head.modules():
        if not isinstance(module, QuantizedLinear):
            continue
        names = [name for name in OPERANDS if getattr(module, f"{name}_scaler") is not None]
        if names:
            raise ValueError(
                f"the output layer quantises its {names[0]} anew in each call, and each chunk "
                'is a call: leave it out of the formats ({"lm_head": "none"}), or '
                "quantise only its stored weight"
            )


def _forward_like(previous: Any) -> Callable[..., Any]:
    """Return `_forward_in_chunks` with the signature of a forward, by which Trainer goes.

    ``__wrapped__`` is left out: accelerate would unwrap it.
    """

    def forward(model: Any, *args: Any, **options: Any) -> Any:
        return _forward_in_chunks(model, *args, **options)

    signature = inspect.signature(previous)
    model = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [model, *signature.parameters.values()]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return forward


def _forward_in_chunks(model: Any, *args: Any, **options: Any) -> Any:
    handle: ChunkedLoss = vars(model)[_HANDLE]
    if not handle._is_on:
        return handle._previous(*args, **options)
    if options.get("labels") is None:
        if model.training and torch.is_grad_enabled():
            raise RuntimeError(
                "the loss of this model is computed in chunks (chunked_loss): pass labels by "
                "name (labels=...); for all logits, which Trainer's label smoothing needs, call "
                "remove() of the handle"
            )
        return handle._previous(*args, **options)
    with _logits_in_chunks(_head_of(model), handle.tokens):
        return handle._previous(*args, **options)


@contextmanager
def _logits_in_chunks(head: nn.Module, tokens: int) -> Iterator[None]:
    """Let the first call of an output layer return `ChunkedLogits`.

    Its hooks are for logits: each chunk's call runs them, and this one does not.
    """
    names = vars(head)
    previous = names.get("forward")
    hooks = {name: names[name] for name in _HOOKS}

    def restore() -> None:
        if previous is None:
            names.pop("forward", None)
        else:
            names["forward"] = previous

    def give_hooks_back() -> None:
        names.update(hooks)

    def forward(hidden: Tensor) -> ChunkedLogits:
        restore()
        return ChunkedLogits(head, hidden, tokens, give_hooks_back)

    names.update({name: OrderedDict() for name in _HOOKS})
    names["forward"] = forward
    try:
        yield
        if names.get("forward") is forward:
            raise RuntimeError(
                "the model did not call its output layer, so no loss was computed in chunks "
                "(chunked_loss): call remove() of the handle"
            )
    finally:
        restore()
        give_hooks_back()


class ChunkedLogits:
    """Logits that are computed by chunks, where a cross-entropy asks for them.

    They stand for a tensor of logits (..., vocabulary), of which only the device is known.
    """

    def __init__(
        self,
        head: nn.Module,
        hidden: Tensor,
        tokens: int,
        before_use: Callable[[], None],
        changes: tuple[Change, ...] = (),
    ) -> None:
        self._head = head
        #: of the output layer, (..., width)
        self._hidden = hidden
        self._tokens = tokens
        #: called before the output layer is
        self._before_use = before_use
        #: to the logits of each chunk, in turn
        self._changes = changes

    @property
    def device(self) -> torch.device:
        """The device of the hidden states."""
        return self._hidden.device

    def float(self) -> "ChunkedLogits":
        """Return the logits in float32."""
        return self._changed(Tensor.float)

    def view(self, *shape: Any) -> "ChunkedLogits":
        """Return the logits as rows; any other shape is refused."""
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        head: Any = self._head
        allowed = (-1, self._hidden.shape[:-1].numel()), (-1, head.weight.shape[0])
        is_rows = len(sizes) == 2 and sizes[0] in allowed[0] and sizes[1] in allowed[1]
        if not is_rows:
            raise RuntimeError(_refusal(f"view{tuple(sizes)}"))
        rows = self._hidden.reshape(-1, self._hidden.shape[-1])
        return ChunkedLogits(self._head, rows, self._tokens, self._before_use, self._changes)

    reshape = view

    def __mul__(self, factor: Any) -> "ChunkedLogits":
        """Return the logits times a number."""
        return self._by_number(torch.mul, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "ChunkedLogits":
        """Return the logits divided by a number."""
        return self._by_number(torch.div, divisor)

    def _by_number(self, operator: Any, number: Any) -> "ChunkedLogits":
        is_scalar = isinstance(number, Real) or (isinstance(number, Tensor) and number.dim() == 0)
        if not is_scalar:
            raise RuntimeError(_refusal(f"{operator.__name__} by a {type(number).__name__}"))
        return self._changed(lambda logits: operator(logits, number))

    def _changed(self, change: Change) -> "ChunkedLogits":
        changes = (*self._changes, change)
        return ChunkedLogits(self._head, self._hidden, self._tokens, self._before_use, changes)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what `_FUNCTIONS` has of torch's functions, and refuse any other."""
        function = _FUNCTIONS.get(func)
        if function is None or not isinstance(args[0], cls):
            raise RuntimeError(_refusal(getattr(func, "__name__", str(func))))
        return function(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_refusal(name))

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError(_refusal("indexing"))


def _refusal(what: str) -> str:
    return (
        f"{what}: the logits of this model exist only in chunks, for a cross-entropy from labels "
        "(chunked_loss); call remove() of its handle to have all of them"
    )


def _cross_entropy(
    logits: ChunkedLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return ``torch.nn.functional.cross_entropy`` of logits in chunks.

    Only a chunk's logits exist at a time, in the backward pass too.
    """
    if weight is not None or reduction not in ("mean", "sum") or target.dim() != 1:
        raise RuntimeError(
            _refusal("a cross-entropy with weights of classes, of probabilities, or not reduced")
        )
    logits._before_use()
    fused = _fused_sum(logits, target, ignore_index) if label_smoothing == 0 else None
    if fused is None:
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        fused = _sum_over_chunks(logits, target, options)
    if reduction == "sum":
        return fused
    return fused / (target != ignore_index).sum()


def _sum_over_chunks(logits: ChunkedLogits, target: Tensor, options: dict[str, Any]) -> Tensor:
    def sum_of(hidden: Tensor, target: Tensor) -> Tensor:
        values = _product(logits._head, hidden)
        for change in logits._changes:
            values = change(values)
        return F.cross_entropy(values, target, reduction="sum", **options)

    rows = logits._hidden.reshape(-1, logits._hidden.shape[-1])
    chunks = zip(rows.split(logits._tokens), target.split(logits._tokens), strict=True)
    sums = [checkpoint(sum_of, hidden, part, use_reentrant=False) for hidden, part in chunks]
    return torch.stack(sums).sum()


def _product(head: nn.Module, hidden: Tensor) -> Tensor:
    """Return the output layer's result.

    A plain layer whose weight is in codes, as one that is tied to an embedding, computes
    the same here with a gradient that autograd can sum in place.
    """
    if type(head) is nn.Linear and isinstance(head.weight, FP8Tensor) and not _has_hooks(head):
        return linear(hidden, head.weight, head.bias)
    result: Tensor = head(hidden)
    return result


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _fused_sum(logits: ChunkedLogits, target: Tensor, ignore_index: int) -> Tensor | None:
    """Return the sum of the losses by Liger's kernel, or None where it is not for these.

    It is for a GPU, and for an output layer that only multiplies by its weight.
    """
    hidden, head = logits._hidden, logits._head
    if not is_on_card(hidden) or logits._changes not in ((), (Tensor.float,)):
        return None
    is_decoded = type(head) is QuantizedLinear and head._units is None
    if not (is_decoded or type(head) is nn.Linear) or _has_hooks(head):
        return None
    kernel = _liger()
    weight: Any = head.weight
    if kernel is None or weight.dtype != hidden.dtype or torch.is_autocast_enabled("cuda"):
        return None
    if isinstance(weight, FP8Tensor):
        weight = weight.to(weight.dtype)
    rows = hidden.reshape(-1, hidden.shape[-1])
    total: Tensor = kernel(ignore_index=ignore_index, reduction="sum")(
        weight, rows, target, head.bias
    )
    return total


@functools.cache
def _liger() -> Any:
    """Return Liger's module of the linear cross-entropy, or None if it is not installed."""
    try:
        module = importlib.import_module("liger_kernel.transformers")
    except ImportError:
        return None
    return module.LigerFusedLinearCrossEntropyLoss


_FUNCTIONS: Final[dict[Any, Callable[..., Any]]] = {
    F.cross_entropy: _cross_entropy,
    torch.tanh: lambda logits: logits._changed(torch.tanh),
    torch.mul: ChunkedLogits.__mul__,
    torch.div: ChunkedLogits.__truediv__,
}
"""What may be done with logits in chunks, by torch's functions."""
