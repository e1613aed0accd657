"""Tensors of a step for the monitors: operands of layers, and updates of weights.

Operands (inputs, gradients, outputs of blocks) are captured by hooks, which the model
has in measured steps only. Updates of quantised weights come from the optimizer, or
from copies made before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import fp8manifold as fm
from nanogpt_bench.config.metrics import MonitorConfig
from nanogpt_bench.config.schema import ROUNDED, Config, Storage
from nanogpt_bench.model.gpt import Block
from nanogpt_bench.model.weights import dequantized, linear_layers, quantized_layers
from nanogpt_bench.monitors.points import Monitor, Observer, Step, Turns


class Capture(Observer):
    """Holds the tensors of a measured step's last micro-batch until the step is over.

    They are those of the layers and blocks whose turn it is, and not copies. Between
    measurements the model has no hooks.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._handles: list[RemovableHandle] = []
        self._backward_handles: list[RemovableHandle] = []
        #: inputs of the linear layers by the layer's name
        self.inputs: dict[str, Tensor] = {}
        #: gradients with respect to the layers' outputs
        self.gradients: dict[str, Tensor] = {}
        #: gradients with respect to the layers' weights, where these gradients are
        #: quantised
        self.weight_gradients: dict[str, Tensor] = {}
        #: outputs of the blocks, by the block's name
        self.residuals: dict[str, Tensor] = {}
        #: dtypes of the layers' outputs
        self.output_dtypes: dict[str, Any] = {}

    def before_forward(self, step: Step) -> None:
        if not step.due(self._turns.interval) or not step.at_last_micro_step:
            return
        for name, layer in linear_layers(step.model).items():
            if not self._turns.takes(step, name):
                continue
            self._handles.append(layer.register_forward_hook(self._keep_layer(name)))
            if isinstance(layer, fm.QuantizedLinear) and layer.weight_gradient_scaler is not None:
                # The scaler runs in the backward pass, and its input is the gradient.
                hook = _keep_input(self.weight_gradients, name)
                self._backward_handles.append(
                    layer.weight_gradient_scaler.register_forward_pre_hook(hook)
                )
        for name, module in step.model.named_modules():
            if isinstance(module, Block) and self._turns.takes(step, name):
                hook = _keep_output(self.residuals, name)
                self._handles.append(module.register_forward_hook(hook))

    def after_forward(self, step: Step) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def after_backward(self, step: Step) -> None:
        """Remove the hooks; observers called later read the tensors at this point."""
        for handle in self._backward_handles:
            handle.remove()
        self._backward_handles = []

    def complete_record(self, step: Step) -> None:
        for tensors in (
            self.inputs,
            self.gradients,
            self.weight_gradients,
            self.residuals,
            self.output_dtypes,
        ):
            tensors.clear()

    def _keep_layer(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self.inputs[name] = inputs[0].detach()
            self.output_dtypes[name] = output.dtype
            # Layers below everything that is trained have no gradient.
            if output.requires_grad:
                output.register_hook(keep_gradient)

        def keep_gradient(gradient: Tensor) -> None:
            self.gradients[name] = gradient.detach()

        return keep


def _keep_output(tensors: dict[str, Tensor], name: str) -> Callable[..., None]:
    """Return a forward hook that stores a module's output."""

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        tensors[name] = output.detach()

    return keep


def _keep_input(tensors: dict[str, Tensor], name: str) -> Callable[..., None]:
    """Return a hook, called before a module, that stores its last input."""

    def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        tensors[name] = inputs[-1].detach()

    return keep


#: elements that share a scale under granularity "block"
_ELEMENTS_PER_SCALE = 32


@dataclass(frozen=True)
class Operand:
    """One operand of one layer in one step.

    Its kind is weight, activation, gradient, weight_gradient or residual.
    """

    kind: str
    layer: str
    values: Tensor
    #: the format of the operand, or the one that it is measured against; None without
    #: either
    format: fm.FloatFormat | None = None
    scale: Tensor | float = 1.0


def captured_operands(
    layers: Mapping[str, nn.Linear], capture: Capture, monitor: MonitorConfig
) -> Iterator[Operand]:
    """Yield operands before quantisation.

    They are the layers' inputs, the gradients at their outputs and of their weights,
    and the blocks' outputs.
    """
    for name, layer in layers.items():
        if name in capture.inputs:
            inputs = capture.inputs[name]
            yield _operand("activation", name, layer, inputs, monitor.activation_format)
        if name in capture.gradients:
            gradient = capture.gradients[name]
            yield _operand("gradient", name, layer, gradient, monitor.gradient_format)
        if name in capture.weight_gradients:
            gradient = capture.weight_gradients[name]
            yield _operand("weight_gradient", name, layer, gradient, monitor.gradient_format)
    for name, output in capture.residuals.items():
        yield _unquantised("residual", name, _rows(output), monitor.activation_format)


def weight_operand(name: str, layer: nn.Linear, values: Tensor) -> Operand:
    """Return a layer's weight as an operand.

    `values` are its master copy, or a step's result before the write-back.
    """
    if isinstance(layer, fm.QuantizedLinear) and layer.weight_format is not None:
        return Operand("weight", name, values, layer.weight_format, layer.weight_scale().detach())
    return Operand("weight", name, values)


def _operand(
    kind: str, name: str, layer: nn.Linear, values: Tensor, format_to_compare: str | None
) -> Operand:
    # The name that the layer has for the operand.
    layer_kind: Any = "activation_gradient" if kind == "gradient" else kind
    spec = layer.spec.operand(layer_kind) if isinstance(layer, fm.QuantizedLinear) else None
    rows = _rows(values)
    if spec is None:
        return _unquantised(kind, name, rows, format_to_compare)
    scale = getattr(layer, f"{layer_kind}_scaler").value
    if spec.granularity == "block":
        scale = scale.reshape(len(rows), -1).repeat_interleave(_ELEMENTS_PER_SCALE, -1)
    return Operand(kind, name, rows, spec.format, scale)


def _unquantised(kind: str, name: str, rows: Tensor, fmt: str | None) -> Operand:
    """Return an operand that is not quantised, with the scale that `fmt` would have."""
    if fmt is None:
        return Operand(kind, name, rows)
    return Operand(kind, name, rows, fm.FloatFormat.from_string(fmt), fm.amax_scale(rows, fmt))


def _rows(values: Tensor) -> Tensor:
    """Return (batch, time, features) as rows in float32 or wider.

    Scales are computed for rows, and float32 is fast.
    """
    rows = values.reshape(-1, values.shape[-1])
    return rows.float() if rows.dtype.itemsize < 4 else rows


@dataclass(frozen=True)
class Watched:
    """A resolved configuration with its model.

    The function `build` of every monitor takes it.
    """

    config: Config
    model: nn.Module
    device: torch.device
    #: runs the model on one in so many sequences of a validation batch
    look: Callable[[int], object]
    layers: Mapping[str, nn.Linear]
    quantized: Mapping[str, fm.QuantizedLinear]
    turns: Turns
    capture: Capture

    @classmethod
    def from_model(
        cls,
        config: Config,
        model: nn.Module,
        device: torch.device,
        look: Callable[[int], object] = lambda one_in: None,
    ) -> Watched:
        """Return the `Watched` of a model."""
        layers = linear_layers(model)
        blocks = [name for name, module in model.named_modules() if isinstance(module, Block)]
        turns = Turns(config.monitor.turns, [layers, blocks], config.monitor.interval)
        return cls(
            config=config,
            model=model,
            device=device,
            look=look,
            layers=layers,
            quantized=quantized_layers(model),
            turns=turns,
            capture=Capture(turns),
        )


@dataclass(frozen=True)
class Update:
    """One layer's weight before and after a step.

    The tensors are plain, in value, and must not be changed.
    """

    name: str
    layer: fm.QuantizedLinear
    old: Tensor
    #: the step's result before the write-back; equal to `new` where nothing is rounded
    requested: Tensor
    new: Tensor
    #: uint8 codes before the step, if the weight is a master copy
    codes: Tensor | None
    format: fm.FloatFormat
    scale: Tensor

    @cached_property
    def new_codes(self) -> Tensor:
        """uint8 codes of the weight after the step."""
        return self.layer.weight_codes()


class UpdateMonitor(Monitor):
    """A monitor of updates."""

    def measure_update(self, step: Step, update: Update) -> None:
        """Measure one layer's update, whose tensors are freed afterwards."""
        raise NotImplementedError

    def finish(self, step: Step) -> None:
        """Called after the last update of a step."""


@dataclass(frozen=True)
class _WeightCopy:
    """A weight before a step, and its codes if it is a master copy."""

    values: Tensor
    codes: Tensor | None


class UpdateObserver(Observer):
    """Passes quantised weights' updates to monitors at a measurement.

    Weights in codes are handed over by the optimizer. Other weights are copied before
    the step.
    """

    def __init__(self, watched: Watched, monitors: Sequence[UpdateMonitor]) -> None:
        storage = watched.config.model.storage
        self._layers = watched.quantized
        self._monitors = monitors
        self._turns = watched.turns
        self._is_rounded = storage in ROUNDED
        self._has_master = storage == Storage.MASTER
        self._names = {id(layer.weight): name for name, layer in self._layers.items()}
        self._copies: dict[str, _WeightCopy] = {}

    def before_step(self, step: Step) -> None:
        # What an earlier step left that was skipped, so that `after_step` was not called.
        self._let_go(step)
        if not step.due(self._turns.interval):
            return
        if self._is_rounded:
            # The library's optimizers call `observer` with a view of every quantised
            # parameter for which `observes` is true.
            optimizer: Any = step.optimizer
            optimizer.observer = partial(self._take_view, step)
            optimizer.observes = partial(self._observes, step)
            return
        for name, layer in self._layers.items():
            if self._turns.takes(step, name):
                codes = layer.weight_codes() if self._has_master else None
                self._copies[name] = _WeightCopy(dequantized(layer.weight).clone(), codes)

    def after_step(self, step: Step) -> None:
        if not step.due(self._turns.interval):
            return
        for name, copy in self._copies.items():
            new = dequantized(self._layers[name].weight)
            self._pass_on(step, name, copy.values, new, new, copy.codes)
        self._let_go(step)
        for monitor in self._monitors:
            monitor.finish(step)

    def _let_go(self, step: Step) -> None:
        """Take the observer off the optimizer, and let the copies go."""
        if self._is_rounded:
            optimizer: Any = step.optimizer
            optimizer.observer = optimizer.observes = None
        self._copies = {}

    def _observes(self, step: Step, weight: Tensor) -> bool:
        name = self._names.get(id(weight))
        return name is not None and self._turns.takes(step, name)

    def _take_view(self, step: Step, view: Any) -> None:
        name = self._names.get(id(view.parameter))
        if name is not None:
            self._pass_on(step, name, view.before, view.target, view.after)

    @torch.no_grad()
    def _pass_on(
        self,
        step: Step,
        name: str,
        old: Tensor,
        requested: Tensor,
        new: Tensor,
        codes: Tensor | None = None,
    ) -> None:
        layer = self._layers[name]
        assert layer.weight_format is not None
        update = Update(
            name=name,
            layer=layer,
            old=old,
            requested=requested,
            new=new,
            codes=codes,
            format=layer.weight_format,
            scale=layer.weight_scale().detach(),
        )
        for monitor in self._monitors:
            monitor.measure_update(step, update)
