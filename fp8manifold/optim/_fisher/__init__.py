"""FisherNaturalGradient: natural gradient steps of linear layers, damped in the metric
of the format.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp8manifold._base.checks import check_choice, check_int, check_number
from fp8manifold._numerics.charts import Metric
from fp8manifold._numerics.stiffness import power_of_ratio, reference_stiffness
from fp8manifold.optim._checks import Schedule, check_finite, check_unshared, lr_of, options_in
from fp8manifold.optim._fisher import nngeometry as fisher
from fp8manifold.optim._slot import Parameters, Slot, stiffness_field
from fp8manifold.optim._writeback import rule_of
from fp8manifold.optim.stiffness import StiffnessOptimizer, adam_numbers, momentum_numbers
from fp8manifold.random_bits import Draws

__all__ = ["FisherNaturalGradient"]


class FisherNaturalGradient(StiffnessOptimizer):
    """Natural gradient for linear layers, computed in the coordinates of their codes;
    StiffnessAdamW for the rest.

    With the chart's derivative ``T`` (value by code, relative to the tensor's mean) and
    the layer's Fisher matrix ``F`` the gradient ``g`` becomes

    .. math:: \\Delta = T (T F T + \\delta \\bar f I)^{-1} T g = (F + \\delta \\bar f \\, T^{-2})^{-1} g, \\qquad
              T = \\mathrm{clamp}(S / S_{ref}, floor, clip)^k

    where ``f`` is the mean eigenvalue of ``T F T`` and ``delta`` the damping: little of
    it gives ``F^-1 g``, much of it the Riemannian gradient ``S^2 g``; ``k = 0`` and
    ordinary parameters give the usual natural gradient. Then

    .. math:: d = \\Delta / \\mathrm{rms}(\\Delta), \\qquad m \\leftarrow \\mu m + (1 - \\mu) d, \\qquad
              w \\leftarrow \\mathrm{round} \\left( (1 - \\eta \\lambda) w - \\eta \\, m / (1 - \\mu^t) \\right)

    ``F`` is the Fisher information per token under labels drawn from the model's own
    softmax, layer by layer: its ``diagonal``, a Kronecker product (``kfac``), or that
    product's eigenbasis (``ekfac``). It is computed by nngeometry in float32, in
    evaluation mode, and changes neither model, nor gradients, nor the global generator.
    Weights of linear layers that belong to no other module take natural steps, and
    everything else
    :class:`StiffnessAdamW`'s.

    Args:
        params: parameters, or groups of them with options of their own.
        model: what the gradients are taken of, before ``torch.compile``.
        loader: batches to measure ``F`` with, an iterable that is used again and again,
            or a function from the number of steps taken to one.
        lr: learning rate: AdamW's; with ``normalize=False`` a fraction of the natural
            step.
        momentum: decay rate of the running average of directions.
        betas, eps, weight_decay: as in :class:`StiffnessAdamW`.
        representation: ``diagonal``, ``kfac`` or ``ekfac``.
        refresh: steps between two measurements of ``F``.
        damping: added to each eigenvalue of ``T F T``, in units of their mean.
        decay: weight of earlier measurements in the running average of ``F``.
        batches: batches for one measurement: the first of the loader.
        samples: labels drawn for each token.
        normalize: divide each natural gradient by its root mean square.
        max_features: kfac and ekfac leave layers that are wider, on either side, to
            StiffnessAdamW.
        logits: function (model, batch) to the logits (..., V), or to what has them as
            ``.logits``.
        stiffness, metric, writeback, draws, moments, seed, clip, refresh_every,
            maximize, stabilize_every, flags: as in
            :class:`StiffnessAdamW`; the labels depend on ``seed`` too.
        floor: lower bound of S / S_ref, ``damping`` in :class:`StiffnessAdamW`.
        on_nonfinite: for gradients, and for a damped ``F`` that is not positive
            definite: ``skip``, with a ``RuntimeWarning`` because of ``F``, or
            ``raise``.
        reset_every: forget momentum, running averages and ``F`` every so many steps.

    Raises:
        TypeError: an option of another type, a loader to iterate over once only.
        ValueError: an option out of range, no linear layer that can take a natural
            step, an empty loader, no logits.
        FloatingPointError, ImportError: as ``on_nonfinite`` says; nngeometry is missing
            (``fp8manifold[fisher]``).

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
    damping_option = "floor"
    _metrics: dict[Tensor, dict[str, Any]]  # what a step has measured and not taken yet
    steps_alone = False  # the gradients of a layer's weight and bias go together

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
        model, loader, logits = (options.pop(name) for name in ("model", "loader", "logits"))
        fisher.check_sources(model, loader, logits)
        fisher.load_nngeometry()
        self.model, self.loader, self.logits = model, loader, logits
        super().__init__(params, options)
        if not any(self._layers(group) for group in self.param_groups):
            raise ValueError(
                "none of the parameters is the weight of a linear layer of model (tied and very "
                "wide layers do not count), so none can take a natural step: use StiffnessAdamW"
            )

    def __getstate__(self) -> dict[str, Any]:
        """The base's part, and what ``F`` is measured with."""
        return super().__getstate__() | {
            "model": self.model,
            "loader": self.loader,
            "logits": self.logits,
        }

    def _check_group(self, group: dict[str, Any]) -> None:
        check_unshared(type(self).__name__, group["params"])
        check_number("momentum", group["momentum"], 0.0, 1.0, open_high=True)
        check_choice("representation", group["representation"], tuple(fisher.NEEDED))
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
        if group["moments"] != "float32" and not group["momentum"]:
            raise ValueError(
                f"moments={group['moments']!r} needs momentum > 0: without it there is none to "
                f"store"
            )

    def _fields(self, slot: Slot) -> dict[str, Any]:
        fields = super()._fields(slot)
        if "gradient" not in slot.tensors:
            return fields
        # the stiffness is in the natural gradient already
        return fields | {"direction": "sgd", "stiffness": "none"}

    def _numbers(self, slot: Slot) -> dict[str, float]:
        group, lr, momentum = slot.group, lr_of(slot.group), slot.group["momentum"]
        if slot.spec.direction == "adam":
            numbers = adam_numbers(lr, tuple(group["betas"]), group["eps"], slot.age)
        else:
            numbers = momentum_numbers(lr / (1 - momentum**slot.age), momentum, 1 - momentum)
        return numbers | self._shared_numbers(slot)

    def _prepare(self, slot: Slot) -> None:
        if metric := self._metrics.pop(slot.parameter, None):
            for name in [name for name in slot.state if name.startswith(fisher.METRIC)]:
                del slot.state[name]
            slot.state.update(metric)
        super()._prepare(slot)

    def _may_step(self, slots: list[Slot]) -> bool:
        """Check gradients, then make natural ones of them: nothing of the state has
        changed when that fails.
        """
        self._metrics = {}
        if not super()._may_step(slots):
            return False
        for group in self.param_groups:
            try:
                self._precondition(group, {slot.parameter: slot for slot in slots})
            except FloatingPointError as error:
                if group["on_nonfinite"] == "raise":
                    raise
                warnings.warn(f"skipped a step: {error}", RuntimeWarning, stacklevel=5)
                return False
        return True

    def _precondition(self, group: dict[str, Any], slots: dict[Tensor, Slot]) -> None:
        """Replace the gradients of a group's layers by natural ones, measuring the
        Fisher metric where it is due.
        """
        layers = {
            slots[weight]: found for weight, found in self._layers(group).items() if weight in slots
        }
        due: dict[int, list[Slot]] = {}
        for slot in layers:
            renewed = slot.done % group["refresh"] == 0 or _resets(slot)
            if renewed or fisher.NEEDED[group["representation"]] not in slot.state:
                due.setdefault(slot.done, []).append(slot)
        for done, together in due.items():
            self._measure(group, {slot: layers[slot] for slot in together}, done)
        for slot, (name, _) in layers.items():
            slot.tensors["gradient"] = self._natural(name, slot)

    def _layers(self, group: dict[str, Any]) -> dict[Tensor, tuple[str, nn.Linear]]:
        """Name and layer of each weight of the group that belongs to one linear layer
        of the model alone.
        """
        widest = 2**62 if group["representation"] == "diagonal" else group["max_features"]
        owners: Counter[Tensor] = Counter(
            p for m in self.model.modules() for p in m.parameters(recurse=False)
        )
        wanted = set(group["params"])
        return {
            module.weight: (name, module)
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear)
            and module.weight in wanted
            and owners[module.weight] == 1
            if module.weight.numel() and max(module.in_features, module.out_features) <= widest
        }

    def _measure(
        self, group: dict[str, Any], layers: dict[Slot, tuple[str, nn.Linear]], done: int
    ) -> None:
        batches = fisher.first_batches(self.loader, group["batches"], seed=group["seed"], step=done)
        if not batches:
            raise ValueError("the loader gave no batch to measure the Fisher metric with")
        samples = group["samples"]

        def loss(index: int) -> Tensor:
            scores = self.logits(self.model, batches[index // samples])
            return fisher.likelihood(scores, seed=group["seed"], step=done, stream=index)

        found = fisher.measure(
            self.model,
            [
                fisher.Layer(*x, self._stretch(s), {} if _resets(s) else s.state)
                for s, x in layers.items()
            ],
            loss,
            len(batches) * samples,
            representation=group["representation"],
            damping=float(group["damping"]),
            decay=float(group["decay"]),
        )
        self._metrics |= {
            slot.parameter: metric for slot, metric in zip(layers, found, strict=True)
        }

    def _natural(self, name: str, slot: Slot) -> Tensor:
        group = slot.group
        assert slot.parameter.grad is not None
        metric, kind = self._metrics.get(slot.parameter) or slot.state, group["representation"]
        gradient = slot.parameter.grad.float()
        gradient = fisher.natural_gradient(
            kind, metric, gradient, self._stretch(slot) if kind == "diagonal" else 1.0
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
        """``T``, in float32."""
        group = slot.group
        if slot.storage == "plain" or slot.power == 0:
            return torch.ones((), device=slot.device).expand(slot.weight.shape)
        stiffness = stiffness_field(slot, group["metric"])
        renewed = slot.done % group["refresh_every"] == 0
        reference = reference_stiffness(stiffness) if renewed else slot.state["reference"]
        ratio = power_of_ratio(stiffness, reference, slot.power, group["floor"], group["clip"])
        assert isinstance(ratio, Tensor)
        return ratio.to(torch.float32).expand(slot.weight.shape)


def _resets(slot: Slot) -> bool:
    every = slot.group["reset_every"]
    return bool(slot.done and every and slot.done % every == 0)
