"""What flows through the layers in the steps that are looked at: inputs, gradients at the outputs, residual outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import fp8manifold as fm
from nanogpt_bench.model.gpt import Block
from nanogpt_bench.observers.turns import ALL, Turns
from nanogpt_bench.step.layers import linear_layers
from nanogpt_bench.step.points import Observer, Step


class Capture(Observer):
    """Keeps the last micro-batch's tensors of every step that is due, from its forward pass until the step is over.

    They are those of the layers and blocks whose turn it is.

    Between these steps the model has no hooks, and the tensors are those of the passes themselves, not copies.
    """

    def __init__(self, interval: int, turns: Turns = ALL) -> None:
        self._interval, self._turns = interval, turns
        self._handles: list[RemovableHandle] = []
        self._backward_handles: list[RemovableHandle] = []
        #: inputs of the linear layers by the layer's name
        self.inputs: dict[str, Tensor] = {}
        #: gradients of the loss with respect to their outputs
        self.gradients: dict[str, Tensor] = {}
        #: gradients with respect to their weights, where these are quantised
        self.weight_gradients: dict[str, Tensor] = {}
        #: outputs of the blocks, by the block's name
        self.residuals: dict[str, Tensor] = {}
        #: dtypes of the layers' outputs
        self.output_dtypes: dict[str, Any] = {}

    def before_forward(self, step: Step) -> None:
        if not step.due(self._interval) or not step.at_last_micro_step:
            return
        for name, layer in linear_layers(step.model).items():
            if not self._turns.takes(step, self._interval, name):
                continue
            self._handles.append(layer.register_forward_hook(self._keep_layer(name)))
            if isinstance(layer, fm.QuantizedLinear) and layer.weight_gradient_scaler is not None:
                hook = self._keep_weight_gradient(name)
                self._backward_handles.append(layer.weight_gradient_scaler.register_forward_pre_hook(hook))
        for name, module in step.model.named_modules():
            if isinstance(module, Block) and self._turns.takes(step, self._interval, name):
                self._handles.append(module.register_forward_hook(self._keep_residual(name)))

    def after_forward(self, step: Step) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def after_backward(self, step: Step) -> None:
        """Observers that come later read the tensors here."""
        for handle in self._backward_handles:
            handle.remove()
        self._backward_handles = []

    def written(self, step: Step) -> None:
        for kept in (self.inputs, self.gradients, self.weight_gradients, self.residuals, self.output_dtypes):
            kept.clear()

    def _keep_layer(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self.inputs[name] = inputs[0].detach()
            self.output_dtypes[name] = output.dtype
            if output.requires_grad:  # of layers below all that is trained nobody asks
                output.register_hook(keep_gradient)

        def keep_gradient(gradient: Tensor) -> None:
            self.gradients[name] = gradient.detach()

        return keep

    def _keep_weight_gradient(self, name: str) -> Callable[..., None]:
        def keep(scaler: nn.Module, measured: tuple[Tensor, ...]) -> None:
            self.weight_gradients[name] = measured[0].detach()

        return keep

    def _keep_residual(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self.residuals[name] = output.detach()

        return keep
