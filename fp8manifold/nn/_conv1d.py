"""The linear layer of transformers' GPT-2, quantised: its weight is the transposed one of ``nn.Linear``."""

from typing import Any

import torch
from torch import Tensor, nn

from fp8manifold.nn._linear import QuantizedLinear, Storage
from fp8manifold.nn._parts import holds_codes
from fp8manifold.nn._spec import LayerSpec

__all__ = ["QuantizedConv1D", "linear_of"]


class QuantizedConv1D(QuantizedLinear):
    """A :class:`QuantizedLinear` in place of a ``Conv1D``, whose weight is ``(in, out)``.

    Its own is ``(out, in)``, so that an output has a row, and with it a scale.  A state dict has a float weight as
    ``Conv1D`` has it, and takes it so, too; only codes lie in a state dict as they lie here.
    """

    def __init__(self, conv: nn.Module, spec: LayerSpec, storage: Storage = "master", **options: Any) -> None:
        linear = conv if options.get("codes") is None else _without_values(conv)
        super().__init__(linear_of(linear), spec, storage, **options)
        self._restores, self.nf, self.nx = type(conv), self.out_features, self.in_features
        self._own_names |= {"_restores", "nf", "nx"}

    def restored(self, values: Tensor) -> nn.Module:
        """A ``Conv1D`` with these values, ``(out, in)``, as its weight, and this layer's bias."""
        conv = self._restores.__new__(self._restores)
        nn.Module.__init__(conv)  # its own __init__ would draw random numbers
        conv.nf, conv.nx = self.nf, self.nx  # type: ignore[assignment]
        conv.weight = nn.Parameter(values.t().contiguous(), requires_grad=self.weight.requires_grad)
        conv.bias = self.bias
        return conv.train(self.training)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = destination[prefix + "weight"]
        destination[prefix + "weight"] = weight if holds_codes(weight) else weight.t()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight = state_dict.get(prefix + "weight")
        if isinstance(weight, Tensor) and not holds_codes(weight):
            state_dict[prefix + "weight"] = weight.t().contiguous()
        super()._load_from_state_dict(state_dict, prefix, *args)


def _without_values(conv: Any) -> nn.Module:
    """The same layer, whose weight has only a shape: codes come from elsewhere."""
    bare: Any = conv.__class__.__new__(conv.__class__)
    nn.Module.__init__(bare)
    bare.weight = nn.Parameter(torch.empty(conv.nx, conv.nf, device="meta"), requires_grad=conv.weight.requires_grad)
    bare.bias = conv.bias
    kept: nn.Module = bare.train(conv.training)
    return kept


def linear_of(layer: nn.Module) -> nn.Linear:
    """An ``nn.Linear`` with a weight of its own, of the values of a linear layer or ``Conv1D``, and with its bias."""
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    values = weight.detach().clone() if isinstance(layer, nn.Linear) else weight.detach().t().contiguous()
    linear = nn.Linear(values.shape[1], values.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(values, requires_grad=weight.requires_grad)
    linear.bias = bias  # type: ignore[assignment]
    return linear.train(layer.training)
