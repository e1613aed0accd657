"""StiffnessWrapper: any torch optimizer, with its updates or gradients scaled by the
stiffness field.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fp8manifold._base.checks import check_choice, check_int, check_number
from fp8manifold._base.float_bits import working_dtype
from fp8manifold._base.reading import eager_only
from fp8manifold._numerics.charts import Metric, chart_of
from fp8manifold._numerics.stiffness import power_of_ratio, reference_stiffness
from fp8manifold.formats import FloatFormat
from fp8manifold.grid import round_to_grid
from fp8manifold.manifolds import FP8Manifold, StiffnessManifold
from fp8manifold.optim._checks import Schedule, check_unshared, scheduled
from fp8manifold.optim._slot import stiffness_manifold_of
from fp8manifold.optim._streams import new_stream, twins
from fp8manifold.optim._writeback import WRITEBACKS, rounds_at_random, to_half
from fp8manifold.random_bits import Draws, mixed_word, random_bits
from fp8manifold.tensor import FP8Tensor

__all__ = ["StiffnessWrapper"]

_ALONE = tuple(rule.name for rule in WRITEBACKS.values() if not (rule.state or rule.injects))
"""Write-backs that need nothing of the optimizer around them."""
_OVER_DRAWN = 3
"""A key word for parameters that the wrapped optimizer rounds too, with a stream made
of the same values.
"""
_NORMALISE = {
    "betas",
    "etas",
    "rho",
    "centered",
    "lr_decay",
    "beta2_decay",
}  #: Options of those that do, one of each.


class StiffnessWrapper(torch.optim.Optimizer):
    r"""Scale another optimizer's updates, element by element, by the stiffness of the
    weights.

    .. math:: w \leftarrow \mathrm{round}(w + f \, \Delta), \qquad
              f = scale(t) \left( \mathrm{clamp}(S(w) / S_{ref}, damping, clip) \right)^{exponent}

    where ``Delta`` is the wrapped optimizer's own update (``on="update"``), or ``f``
    multiplies its gradient (``on="gradient"``). Points of an
    :class:`~fp8manifold.FP8Manifold` are written back to their grid once, after the
    step; ordinary parameters have ``f = scale(t)``. Writes into an
    :class:`~fp8manifold.FP8Parameter` are rounded by the parameter already, so
    ``writeback`` is a second rounding there.

    Args:
        optimizer: any ``torch.optim.Optimizer``, with its own groups, state and
            learning rate.
        scale, exponent: numbers, or functions of the number of steps taken.
        on: ``update`` or ``gradient``.
        metric, damping, clip, refresh_every, seed: as in :class:`StiffnessAdamW`.
        writeback: ``nearest`` or ``stochastic``; None takes each manifold's own
            rounding. Ordinary bfloat16 and float16 parameters whose update is scaled
            are rounded stochastically unless this is ``nearest``.
        draws: ``independent`` or ``dither``; None takes each manifold's own, or
            independent ones.

    Attributes:
        steps_taken: the number of steps.
        references: the reference stiffness of each quantised parameter.
        streams: the key word of each parameter that has been rounded stochastically.
        streams_begun: the number of streams given, also to parameters that have been
            removed.

    Raises:
        TypeError, ValueError: ``optimizer`` is not a torch optimizer; an option of
            another type or out of range.

    Warns:
        UserWarning: ``on="gradient"`` around an optimizer of torch that normalises the
            gradient, such as Adam and RMSprop, or another one with ``betas``: the
            factor nearly cancels.

    Example:
        >>> import fp8manifold as fm
        >>> model = fm.quantize_model(torch.nn.Linear(4, 1), "E4M3", storage="grid")
        >>> optimizer = StiffnessWrapper(torch.optim.SGD(model.parameters(), lr=0.1), exponent=1.0)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> bool((model.manifold.projx(model.weight) == model.weight).all())
        True

    Source: the factor is that of :class:`StiffnessAdamW`, around another optimizer's
    step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scale: Schedule = 1.0,
        exponent: Schedule = 0.0,
        on: Literal["update", "gradient"] = "update",
        *,
        metric: Metric = "ulp",
        damping: float = 2.0**-8,
        clip: float = 2.0**4,
        refresh_every: int = 100,
        writeback: str | None = None,
        draws: Draws | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
            )
        check_unshared(
            type(self).__name__, [p for group in optimizer.param_groups for p in group["params"]]
        )
        check_choice("on", on, ("update", "gradient"))
        if writeback is not None:
            check_choice("writeback", writeback, _ALONE)
        if draws is not None:
            check_choice("draws", draws, get_args(Draws))
        check_number("damping", damping, 0.0, 1.0)
        check_number("clip", clip, 1.0)
        check_int("refresh_every", refresh_every, 1, 2**62)
        check_int("seed", seed, 0, 2**64 - 1)
        chart_of(FloatFormat(4, 3), metric)
        scheduled("scale", scale, 0, 0.0, float("inf"))
        scheduled("exponent", exponent, 0, -8.0, 8.0)
        if on == "gradient" and _NORMALISE & optimizer.defaults.keys():
            warnings.warn(
                f"a stiffness factor on the gradient of {type(optimizer).__name__} cancels in its "
                "normalisation: "
                "use on='update'",
                UserWarning,
                stacklevel=2,
            )
        self.optimizer = optimizer
        self.scale, self.exponent, self.on = scale, exponent, on
        self.metric, self.damping, self.clip, self.refresh_every = (
            metric,
            damping,
            clip,
            refresh_every,
        )
        self.writeback, self.draws, self.seed = writeback, draws, seed
        self.steps_taken = 0
        self.references: dict[Tensor, float] = {}
        self.streams: dict[Tensor, int] = {}
        self.streams_begun = 0
        self.__setstate__(
            {"defaults": dict(optimizer.defaults)}
        )  # torch's hooks, without groups of its own

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The wrapped optimizer's state."""
        return self.optimizer.state

    def __getstate__(self) -> dict[str, Any]:
        """All but torch's groups and state, which are the wrapped optimizer's."""
        return dict(self.__dict__)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, the step count, reference stiffness and stream
        of each parameter.
        """
        self._hooked("state_dict_pre")
        parameters = self._parameters()
        saved = {
            "optimizer": self.optimizer.state_dict(),
            "steps_taken": self.steps_taken,
            "references": [self.references.get(p) for p in parameters],
            "streams": [self.streams.get(p) for p in parameters],
            "streams_begun": self.streams_begun,
        }
        changed: dict[str, Any] = self._hooked("state_dict_post", saved)
        return changed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the :meth:`state_dict` of another wrapper.

        Raises:
            ValueError: the state of another kind of optimizer, or of another number of
                parameters.
        """
        state_dict = self._hooked("load_state_dict_pre", state_dict.copy())
        if (
            missing := {"optimizer", "steps_taken", "references", "streams", "streams_begun"}
            - state_dict.keys()
        ):
            raise ValueError(
                f"this state is not one of StiffnessWrapper: it lacks {', '.join(sorted(missing))}"
            )
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.steps_taken, parameters = int(state_dict["steps_taken"]), self._parameters()
        known = {
            name: zip(parameters, state_dict[name], strict=True)
            for name in ("references", "streams")
        }
        self.references = {
            p: reference for p, reference in known["references"] if reference is not None
        }
        self.streams = {p: int(stream) for p, stream in known["streams"] if stream is not None}
        self.streams_begun = max(int(state_dict["streams_begun"]), len(self.streams))
        self._hooked("load_state_dict_post")

    def _hooked(self, when: str, *state_dict: dict[str, Any]) -> Any:
        """Call torch's hooks of a state, which may change it; some get the wrapper
        alone.
        """
        for hook in getattr(self, f"_optimizer_{when}_hooks").values():
            changed = hook(self, *state_dict)
            state_dict = (changed,) if state_dict and changed is not None else state_dict
        return state_dict[0] if state_dict else None

    @eager_only  # it writes codes, and counts
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the wrapped optimizer, scale it and write it back; returns
        what that step returns.

        Raises:
            TypeError: no ``closure`` for an optimizer that needs one, such as LBFGS.
        """
        if closure is None and _needs_closure(self.optimizer):
            name = type(self.optimizer).__name__
            raise TypeError(
                "step() needs a closure that clears the gradients, computes the loss, calls its "
                f"backward() and returns it: {name} calls it in each step"
            )
        before = [p.detach().clone() for p in self._parameters()]
        factors = [self._factor(p) for p in self._parameters()]
        if self.on == "update":
            result = self.optimizer.step(closure)
        else:
            result = self._step_on_scaled_gradients(factors, closure)
            factors = [1.0] * len(factors)
        self._begin_streams(before)
        for parameter, old, factor in zip(self._parameters(), before, factors, strict=True):
            self._finish(parameter, old, factor)
        self.steps_taken += 1
        return result

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _rounding(self, manifold: StiffnessManifold) -> str:
        return self.writeback or str(getattr(manifold, "rounding", "nearest"))

    def _draws(self, parameter: Tensor) -> bool:
        manifold = stiffness_manifold_of(parameter)
        if isinstance(manifold, FP8Manifold):
            return self._rounding(manifold) == "stochastic"
        return not isinstance(parameter, FP8Tensor) and rounds_at_random(
            parameter, {"writeback": self.writeback}
        )

    def _begin_streams(self, before: list[Tensor]) -> None:
        """Give parameters that are rounded stochastically for the first time a stream;
        forget removed ones.
        """
        parameters = self._parameters()
        for known in (self.references, self.streams):
            for gone in known.keys() - set(parameters):
                del known[gone]
        new = [p not in self.streams and self._draws(p) and p.grad is not None for p in parameters]
        numbers = twins(parameters) if any(new) else {}
        for p, values, is_new in zip(parameters, before, new, strict=True):
            if not is_new:
                continue
            used = {each: {"stream": stream} for each, stream in self.streams.items()}
            stream = new_stream(
                p,
                numbers[p],
                used,
                self.streams_begun,
                draws=True,
                alone=len(parameters) == 1,
                values=values,
            )
            drawn = "stream" in self.optimizer.state.get(
                p, {}
            )  # by an optimizer of this library: it is the same word
            self.streams[p] = mixed_word(stream, _OVER_DRAWN) if drawn else stream
            self.streams_begun += 1

    def _factor(self, parameter: Tensor) -> Tensor | float:
        scale = scheduled("scale", self.scale, self.steps_taken, 0.0, float("inf"))
        exponent = scheduled("exponent", self.exponent, self.steps_taken, -8.0, 8.0)
        manifold = stiffness_manifold_of(parameter)
        if manifold is None or exponent == 0 or not parameter.numel():
            return scale
        x = parameter.detach().to(working_dtype(parameter))
        unit = manifold.scale.to(x.dtype)
        stiffness = chart_of(manifold.format, self.metric).stiffness(x / unit) * unit
        if parameter not in self.references or self.steps_taken % self.refresh_every == 0:
            self.references[parameter] = reference_stiffness(stiffness)
        return (
            power_of_ratio(stiffness, self.references[parameter], exponent, self.damping, self.clip)
            * scale
        )

    def _step_on_scaled_gradients(
        self, factors: list[Tensor | float], closure: Callable[[], Any] | None
    ) -> Any:
        kept: dict[Tensor, Tensor | None] = {}

        def scale_gradients() -> None:
            for parameter, factor in zip(self._parameters(), factors, strict=True):
                kept[parameter] = parameter.grad
                if parameter.grad is not None:
                    parameter.grad = (parameter.grad * factor).to(parameter.grad.dtype)

        def scaled_closure() -> Any:
            assert closure is not None
            for parameter, gradient in kept.items():
                parameter.grad = gradient
            with torch.enable_grad():
                loss = closure()
            scale_gradients()
            return loss

        try:
            if closure is None:
                scale_gradients()
            return self.optimizer.step(None if closure is None else scaled_closure)
        finally:
            for parameter, gradient in kept.items():
                parameter.grad = gradient

    def _finish(self, parameter: Tensor, old: Tensor, factor: Tensor | float) -> None:
        """Scale what has moved and round it to the grid; what has not moved stays, bit
        for bit.
        """
        if parameter.grad is None:
            return
        is_half = stiffness_manifold_of(parameter) is None and self._draws(parameter)
        if is_half and isinstance(factor, float) and factor == 1.0:
            return  # it is what the wrapped optimizer has made of it
        work = working_dtype(parameter)
        start = old.to(work)
        update = parameter.detach().to(work) - start
        target = torch.where(update == 0, start, start + update * factor)
        manifold = stiffness_manifold_of(parameter)
        words = {
            "seed": self.seed,
            "step": self.steps_taken,
            "stream": self.streams.get(parameter, 0),
        }
        if manifold is not None:
            own: Draws = manifold.draws if isinstance(manifold, FP8Manifold) else "independent"
            target = _write_back(
                target, manifold, self._rounding(manifold), self.draws or own, **words
            )
        elif is_half:
            drawn = random_bits(
                target.shape, device=target.device, draws=self.draws or "independent", **words
            )
            target = to_half(target.contiguous(), parameter.dtype, drawn)
        parameter.copy_(target)


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer's ``step`` can't be called without arguments."""
    parameters = inspect.signature(optimizer.step).parameters
    return "closure" in parameters and parameters["closure"].default is inspect.Parameter.empty


def _write_back(
    target: Tensor,
    manifold: StiffnessManifold,
    writeback: str,
    draws: Draws,
    *,
    seed: int,
    step: int,
    stream: int,
) -> Tensor:
    """``scale * round(target / scale)`` on a grid, the nearest point of the interval on
    the continuous manifold.
    """
    if not isinstance(manifold, FP8Manifold):
        return manifold.projx(target)
    scale = manifold.scale.to(target.dtype)
    if writeback == "nearest":
        return round_to_grid(target / scale, manifold.format) * scale
    words: dict[str, Any] = {"seed": seed, "step": step, "stream": stream}
    after = (
        round_to_grid(target / scale, manifold.format, "stochastic", **words, draws=draws) * scale
    )
    if bool((torch.frexp(scale).mantissa == 0.5).all()):
        return after
    # dividing by any other scale puts points of the grid a hair off it, where a draw
    # could move them
    nearest = round_to_grid(target / scale, manifold.format) * scale
    return torch.where(nearest == target, target, after)
