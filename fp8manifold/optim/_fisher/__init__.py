"""FisherNaturalGradient: natural gradient steps of linear layers.

A step of the base class, with one thing put in between:

    step -> _may_step      all gradients are finite, as everywhere; then in each group
              _precondition  layers whose Fisher matrix is due: _measure it
                             every layer: its gradient <- the natural one
         -> _begin         _prepare puts new metrics into the state
         -> _take          natural gradients by SGD with momentum, all else by Adam

A natural gradient can fail, as a damped matrix may not be positive definite. It is
therefore computed in `_may_step`, which must not change the state: new metrics wait in
``_new_metrics`` until the step begins. Measuring itself is in `nngeometry.py`.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fp8manifold._base.checks import check_choice, check_int, check_number
from fp8manifold._interface import MomentStorage, StiffnessPower, WeightStorage
from fp8manifold._numerics.charts import Metric
from fp8manifold._numerics.stiffness import Field, power_of_ratio, reference_stiffness
from fp8manifold.optim._checks import check_finite, options_in, refuse_sharded
from fp8manifold.optim._fisher import nngeometry as fisher
from fp8manifold.optim._slot import Parameters, Slot
from fp8manifold.optim._step_numbers import (
    Schedule,
    adam_numbers,
    age_of,
    lr_of,
    momentum_numbers,
    shared_numbers,
)
from fp8manifold.optim._stiffness_fields import stiffness_at_weights
from fp8manifold.optim._writeback import rule_of
from fp8manifold.optim.stiffness import StiffnessOptimizer
from fp8manifold.random_bits import Draws

__all__ = ["FisherNaturalGradient"]


class _NamedLayer(NamedTuple):
    """A linear layer, and its name in the model."""

    name: str
    module: nn.Linear


class FisherNaturalGradient(StiffnessOptimizer):
    r"""Natural gradient for linear layers, and StiffnessAdamW for everything else.

    The natural gradient is computed in the coordinates of the codes. Let ``T`` be the
    derivative of value by code, relative to the tensor's mean, and ``F`` the Fisher
    matrix of the layer. Then the gradient ``g`` becomes

    .. math:: \Delta = T (T F T + \delta \bar f I)^{-1} T g
              = (F + \delta \bar f \, T^{-2})^{-1} g, \qquad
              T = \mathrm{clamp}(S / S_{ref}, floor, clip)^k

    where ``f`` is the mean eigenvalue of ``T F T`` and ``delta`` the damping. Little
    damping gives ``F^-1 g``, much damping the Riemannian gradient ``S^2 g``. ``k = 0``
    gives the usual natural gradient, as do ordinary parameters. The step is

    .. math:: d = \Delta / \mathrm{rms}(\Delta), \qquad m \leftarrow \mu m + (1 - \mu) d, \qquad
              w \leftarrow \mathrm{round} \left(
              (1 - \eta \lambda) w - \eta \, m / (1 - \mu^t) \right)

    ``F`` is the Fisher information per token, under labels drawn from the model's own
    softmax. Each layer has its own: the ``diagonal``, a Kronecker product (``kfac``),
    or that product in its eigenbasis (``ekfac``). nngeometry measures it in float32,
    with the model in evaluation mode. Model, gradients and the global generator are
    left as they were.

    The weight of a linear layer takes natural steps, unless another module has it too.

    Args:
        params: parameters, or groups of them with options of their own.
        model: the model whose loss is trained, before ``torch.compile``.
        loader: batches to measure ``F`` with: an iterable that can be iterated over
            again and again, or a function from the number of steps taken to one.
        lr: learning rate, as for AdamW; with ``normalize=False`` a fraction of the
            natural step.
        momentum: decay rate of the running average of directions.
        betas, eps, weight_decay: as in :class:`StiffnessAdamW`.
        representation: ``diagonal``, ``kfac`` or ``ekfac``.
        refresh: steps between two measurements of ``F``.
        damping: added to each eigenvalue of ``T F T``, in units of their mean.
        decay: weight of earlier measurements in the running average of ``F``.
        batches: the number of batches for one measurement, from the start of the
            loader.
        samples: the number of labels drawn for each token.
        normalize: divide each natural gradient by its root mean square.
        max_features: kfac and ekfac leave layers with more inputs or outputs to
            StiffnessAdamW.
        logits: function (model, batch) that returns logits (..., V). By default the
            model is called with the batch, or with the first entry of it, and returns
            logits or an object with ``.logits``.
        stiffness, metric, writeback, draws, moments: as in :class:`StiffnessAdamW`.
        clip, refresh_every, maximize, stabilize_every: as in :class:`StiffnessAdamW`.
        flags: as in :class:`StiffnessAdamW`.
        seed: as in :class:`StiffnessAdamW`; the drawn labels depend on it too.
        floor: lower bound of S / S_ref, called ``damping`` in :class:`StiffnessAdamW`.
        on_nonfinite: what happens if a gradient is not finite, or a damped ``F`` not
            positive definite. ``skip`` skips the step, and because of ``F`` issues a
            ``RuntimeWarning``; ``raise`` raises.
        reset_every: forget momentum, running averages and ``F`` every so many steps.

    Raises:
        TypeError: an option of another type, or a loader that can be iterated over only
            once.
        ValueError: an option out of range, no linear layer that can take a natural
            step, an empty loader, or no logits.
        FloatingPointError: in a step, if ``on_nonfinite`` is ``raise``.
        ImportError: nngeometry is missing (``pip install 'fp8manifold[fisher]'``).

    Example:
        >>> import fp8manifold as fm
        >>> model = fm.quantize_model(nn.Linear(4, 3), "E4M3", storage="grid")
        >>> x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))
        >>> optimizer = FisherNaturalGradient(model.parameters(), model, [(x, y)], lr=0.01)
        >>> nn.functional.cross_entropy(model(x), y).backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["inverse_inputs"].shape
        torch.Size([4, 4])

    Source: Amari 1998; Martens and Grosse 2015 (KFAC); George et al. 2018 (EKFAC);
    Eschenhagen et al. 2023 (shared weights).
    """

    direction = "adam"
    # a step computes natural gradients, and new metrics when they are due
    is_planned = False
    damping_option = "floor"
    # what a step has measured, until it begins
    _new_metrics: dict[Tensor, dict[str, Any]]
    # a measurement runs the model, for all layers that are due
    steps_alone = False

    def __init__(
        self,
        params: Parameters,
        model: nn.Module,
        loader: Iterable[Any] | Callable[[int], Iterable[Any]],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        representation: Literal["diagonal", "kfac", "ekfac"] = "kfac",
        refresh: int = 10,
        damping: float = 1.0,
        decay: float = 0.9,
        batches: int = 1,
        samples: int = 1,
        normalize: bool = True,
        max_features: int = 4096,
        logits: Callable[[nn.Module, Any], Tensor] = fisher.call_model,
        floor: float = 2.0**-8,
        stiffness: Schedule = 0.0,
        metric: Metric = "ulp",
        writeback: str = "stochastic",
        draws: Draws = "independent",
        moments: str = "float32",
        seed: int = 0,
        clip: float = 2.0**4,
        refresh_every: int = 100,
        maximize: bool = False,
        on_nonfinite: str = "skip",
        stabilize_every: int | None = None,
        reset_every: int | None = None,
        **flags: Any,
    ) -> None:
        options = options_in(locals())
        fisher.check_sources(model, loader, logits)
        fisher.load_nngeometry()
        self.model = options.pop("model")
        self.loader = options.pop("loader")
        self.logits = options.pop("logits")
        super().__init__(params, options)
        if not any(self._layers(group) for group in self.param_groups):
            raise ValueError(
                "none of the parameters is the weight of a linear layer of model (tied and very "
                "wide layers do not count), so none can take a natural step: use StiffnessAdamW"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the base's part, and what ``F`` is measured with."""
        return super().__getstate__() | {
            "model": self.model,
            "loader": self.loader,
            "logits": self.logits,
        }

    def _check_group(self, group: dict[str, Any]) -> None:
        refuse_sharded(type(self).__name__, group["params"])
        check_number("momentum", group["momentum"], 0.0, 1.0, open_high=True)
        check_choice("representation", group["representation"], tuple(fisher.ENTRY_OF_METRIC))
        check_finite("damping", group["damping"])
        check_number("decay", group["decay"], 0.0, 1.0, open_high=True)
        check_number("floor", group["floor"], 0.0, 1.0)
        for name in ("refresh", "batches", "samples", "max_features"):
            check_int(name, group[name], 1, 2**31)
        super()._check_group(group)
        if rule_of(group).injects and not (group["betas"][0] and group["momentum"]):
            raise ValueError(
                "writeback='momentum' needs momentum > 0 and betas[0] > 0: errors go into the "
                "momentum"
            )
        if group["moments"] != MomentStorage.FLOAT32 and not group["momentum"]:
            raise ValueError(
                f"moments={group['moments']!r} needs momentum > 0 (momentum=0 keeps no moment to "
                "store)"
            )

    def _fields(self, slot: Slot) -> dict[str, Any]:
        fields = super()._fields(slot)
        # `_precondition` has put it there; `_prepare` adds ordinary ones after this
        has_natural_gradient = "gradient" in slot.tensors
        if not has_natural_gradient:
            return fields
        # the stiffness is in the natural gradient already
        return fields | {"direction": "sgd", "stiffness": StiffnessPower.NONE}

    def _numbers(self, slot: Slot) -> dict[str, float]:
        group = slot.group
        lr = lr_of(group)
        momentum = group["momentum"]
        if slot.spec.direction == "adam":
            numbers = adam_numbers(lr, tuple(group["betas"]), group["eps"], age_of(slot))
        else:
            rate = lr / (1 - momentum ** age_of(slot))
            numbers = momentum_numbers(rate, momentum, 1 - momentum)
        return numbers | shared_numbers(slot, self.damping_option)

    def _prepare(self, slot: Slot) -> None:
        metric = self._new_metrics.pop(slot.parameter, None)
        if metric:
            # those of another representation too
            old_names = [name for name in slot.state if name.startswith(fisher.METRIC_PREFIXES)]
            for name in old_names:
                del slot.state[name]
            slot.state.update(metric)
        super()._prepare(slot)

    def _may_step(self, slots: list[Slot]) -> bool:
        """Check gradients, then make natural ones of them.

        The state is not changed, so that a failure leaves all as it was.
        """
        self._new_metrics = {}
        if not super()._may_step(slots):
            return False
        slot_of_parameter = {slot.parameter: slot for slot in slots}
        for group in self.param_groups:
            try:
                self._precondition(group, slot_of_parameter)
            except FloatingPointError as error:
                if group["on_nonfinite"] == "raise":
                    raise
                warnings.warn(f"skipped a step: {error}", RuntimeWarning, stacklevel=5)
                return False
        return True

    def _precondition(self, group: dict[str, Any], slots: dict[Tensor, Slot]) -> None:
        """Replace the gradients of a group's layers by natural ones.

        The Fisher metric is measured where it is due, for all layers that have taken as
        many steps at once.
        """
        layers = {
            slots[weight]: layer for weight, layer in self._layers(group).items() if weight in slots
        }
        entry = fisher.ENTRY_OF_METRIC[group["representation"]]
        due_by_steps: dict[int, dict[Slot, _NamedLayer]] = {}
        for slot, layer in layers.items():
            is_periodic = slot.steps_done % group["refresh"] == 0
            if is_periodic or _is_reset(slot) or entry not in slot.state:
                due_by_steps.setdefault(slot.steps_done, {})[slot] = layer
        for done, due in due_by_steps.items():
            self._measure(group, due, done)
        for slot, layer in layers.items():
            slot.tensors["gradient"] = self._natural_gradient(layer.name, slot)

    def _layers(self, group: dict[str, Any]) -> dict[Tensor, _NamedLayer]:
        """Return the linear layers of the group that take natural steps, by weight.

        They share their weight with no other module, and are not too wide.
        """
        is_diagonal = group["representation"] == fisher.Representation.DIAGONAL
        widest = math.inf if is_diagonal else group["max_features"]
        owners: Counter[Tensor] = Counter()
        for module in self.model.modules():
            owners.update(module.parameters(recurse=False))
        parameters = set(group["params"])
        layers: dict[Tensor, _NamedLayer] = {}
        for name, module in self.model.named_modules():
            if not isinstance(module, nn.Linear) or module.weight not in parameters:
                continue
            is_alone = owners[module.weight] == 1
            width = max(module.in_features, module.out_features)
            if is_alone and module.weight.numel() and width <= widest:
                layers[module.weight] = _NamedLayer(name, module)
        return layers

    def _measure(self, group: dict[str, Any], layers: dict[Slot, _NamedLayer], done: int) -> None:
        """Measure the metric of layers after ``done`` steps, into ``_new_metrics``."""
        batches = fisher.first_batches(self.loader, group["batches"], seed=group["seed"], step=done)
        if not batches:
            raise ValueError("the loader gave no batch to measure the Fisher metric with")
        samples = group["samples"]

        def loss(index: int) -> Tensor:
            scores = self.logits(self.model, batches[index // samples])
            return fisher.likelihood(scores, seed=group["seed"], step=done, stream=index)

        measured_layers = []
        for slot, layer in layers.items():
            earlier = {} if _is_reset(slot) else slot.state
            stretch = self._stretch(slot)
            measured_layers.append(fisher.Layer(layer.name, layer.module, stretch, earlier))
        metrics = fisher.measure(
            self.model,
            measured_layers,
            loss,
            len(batches) * samples,
            representation=group["representation"],
            damping=float(group["damping"]),
            decay=float(group["decay"]),
        )
        for slot, metric in zip(layers, metrics, strict=True):
            self._new_metrics[slot.parameter] = metric

    def _natural_gradient(self, name: str, slot: Slot) -> Tensor:
        """Return the natural gradient of the layer of this name, in float32."""
        group = slot.group
        assert slot.parameter.grad is not None
        metric = self._new_metrics.get(slot.parameter) or slot.state
        representation = group["representation"]
        stretch = self._stretch(slot) if representation == fisher.Representation.DIAGONAL else 1.0
        gradient = fisher.natural_gradient(
            representation, metric, slot.parameter.grad.float(), stretch
        )
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"layer {name!r}: its natural gradient is not finite; raise damping"
            )
        if group["normalize"] and norm:
            gradient = gradient * (gradient.numel() ** 0.5 / norm)
        return gradient.contiguous().resolve_neg()

    def _stretch(self, slot: Slot) -> Tensor:
        """Return ``T`` of a slot, in float32."""
        group = slot.group
        if slot.storage == WeightStorage.PLAIN or slot.power == 0:
            return torch.ones((), device=slot.device).expand(slot.weight.shape)
        stiffness = stiffness_at_weights(slot, group["metric"])
        # the step that begins will renew S_ref, where that is due, and find the same one
        is_due = slot.steps_done % group["refresh_every"] == 0
        reference = reference_stiffness(Field(stiffness)) if is_due else slot.state["reference"]
        ratio = power_of_ratio(stiffness, reference, slot.power, group["floor"], group["clip"])
        assert isinstance(ratio, Tensor)
        return ratio.to(torch.float32).expand(slot.weight.shape)


def _is_reset(slot: Slot) -> bool:
    """Return True if the step to come begins by clearing the parameter's averages."""
    every = slot.group["reset_every"]
    return bool(slot.steps_done and every and slot.steps_done % every == 0)
