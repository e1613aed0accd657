"""StiffnessWrapper: any torch optimizer, with steps scaled by the stiffness.

A step of the wrapper goes around a step of the wrapped optimizer:

    values before, and factors f = scale (S / S_ref)^exponent, of every parameter
    the wrapped optimizer's step          (on="gradient": with gradients times f)
    before + f (after - before)           (on="update")
    one rounding, to the grid of a manifold or to a float of 16 bits

The wrapped optimizer has the groups, the state and the learning rate. The wrapper has
the step count, S_ref, and a stream of random bits for each parameter that it rounds.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fp8manifold._base.checks import check_choice, check_int, check_number
from fp8manifold._base.float_bits import working_dtype
from fp8manifold._base.param_groups import parameters_of
from fp8manifold._base.reading import eager_only
from fp8manifold._numerics.charts import Metric, chart_of
from fp8manifold._numerics.stiffness import Field, power_of_ratio, reference_stiffness
from fp8manifold.formats import FloatFormat
from fp8manifold.grid import round_to_grid
from fp8manifold.manifolds import FP8Manifold, StiffnessManifold
from fp8manifold.optim._checks import refuse_sharded
from fp8manifold.optim._slot import stiffness_manifold_of
from fp8manifold.optim._step_numbers import Schedule, scheduled
from fp8manifold.optim._streams import new_stream, twins
from fp8manifold.optim._writeback import WRITEBACKS, rounds_at_random, to_half
from fp8manifold.random_bits import Draws, mixed_word, random_bits
from fp8manifold.tensor import FP8Tensor

__all__ = ["StiffnessWrapper"]

_WRITEBACKS = tuple(rule.name for rule in WRITEBACKS.values() if not (rule.state or rule.injects))
"""Write-backs that need neither state nor moments."""
_SECOND_ROUNDING = 3
"""A key word for parameters that the wrapped optimizer rounds too.

Its stream is made of the same values, and would draw the same bits.
"""
_OPTIONS_OF_NORMALISING = {"betas", "etas", "rho", "centered", "lr_decay", "beta2_decay"}
"""An option of each optimizer of torch that normalises the gradient."""


class StiffnessWrapper(torch.optim.Optimizer):
    r"""Any torch optimizer, with its updates scaled by the stiffness of the weights.

    .. math:: w \leftarrow \mathrm{round}(w + f \, \Delta), \qquad
              f = scale(t) \left( \mathrm{clamp}(S(w) / S_{ref}, damping, clip) \right)^{exponent}

    where ``Delta`` is the wrapped optimizer's update and ``S`` the spacing of the grid,
    element by element. With ``on="gradient"`` ``f`` multiplies the gradient instead,
    and the update is taken as it is. Ordinary parameters have ``f = scale(t)``.

    Points of an :class:`~fp8manifold.FP8Manifold` are written back to their grid once,
    after the step. An :class:`~fp8manifold.FP8Parameter` has rounded the wrapped
    optimizer's writes already, so ``writeback`` is a second rounding there.

    Around a schedule-free optimizer :meth:`train` and :meth:`eval` pass to it, and the
    weights stay on their grid in both modes.

    Args:
        optimizer: any ``torch.optim.Optimizer``. Its groups, state and learning rate
            stay in use.
        scale: a number, or a function of the number of steps taken.
        exponent: likewise, in [-8, 8].
        on: what is multiplied by the factor, ``update`` or ``gradient``.
        metric, damping, clip, refresh_every, seed: as in :class:`StiffnessAdamW`.
        writeback: ``nearest`` or ``stochastic``; None takes each manifold's own
            rounding. Ordinary bfloat16 and float16 parameters whose update is scaled
            are rounded stochastically, unless this is ``nearest``.
        draws: ``independent`` or ``dither``; None takes each manifold's own, and
            independent ones for ordinary parameters.

    Attributes:
        steps_taken: the number of steps.
        references: the reference stiffness ``S_ref`` of each quantised parameter.
        streams: the key word of each parameter that has been rounded stochastically.
        streams_begun: the number of streams begun, also those of parameters that have
            been removed.

    Raises:
        TypeError: ``optimizer`` is not a torch optimizer, or an option of another type.
        ValueError: an option out of range.

    Warns:
        UserWarning: ``on="gradient"`` around an optimizer that normalises the gradient,
            such as Adam and RMSprop: the factor nearly cancels. Such an optimizer is
            known by options such as ``betas``.

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
        refuse_sharded(type(self).__name__, parameters_of(optimizer))
        check_choice("on", on, ("update", "gradient"))
        if writeback is not None:
            check_choice("writeback", writeback, _WRITEBACKS)
        if draws is not None:
            check_choice("draws", draws, get_args(Draws))
        check_number("damping", damping, 0.0, 1.0)
        check_number("clip", clip, 1.0)
        check_int("refresh_every", refresh_every, 1, 2**62)
        check_int("seed", seed, 0, 2**64 - 1)
        chart_of(FloatFormat(4, 3), metric)
        scheduled("scale", scale, 0, 0.0, float("inf"))
        scheduled("exponent", exponent, 0, -8.0, 8.0)
        if on == "gradient" and _OPTIONS_OF_NORMALISING & optimizer.defaults.keys():
            warnings.warn(
                f"a stiffness factor on the gradient of {type(optimizer).__name__} cancels in its "
                "normalisation: use on='update'",
                UserWarning,
                stacklevel=2,
            )
        self.optimizer = optimizer
        self.scale = scale
        self.exponent = exponent
        self.on = on
        self.metric = metric
        self.damping = damping
        self.clip = clip
        self.refresh_every = refresh_every
        self.writeback = writeback
        self.draws = draws
        self.seed = seed
        self.steps_taken = 0
        self.references: dict[Tensor, float] = {}
        self.streams: dict[Tensor, int] = {}
        self.streams_begun = 0
        self._training_points: dict[Tensor, _TrainingPoint] = {}
        # makes torch's hooks; its constructor would make groups too
        self.__setstate__({"defaults": dict(optimizer.defaults)})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The wrapped optimizer's state."""
        return self.optimizer.state

    def __getstate__(self) -> dict[str, Any]:
        """Return all but groups and state, which are those of the wrapped optimizer."""
        return dict(self.__dict__)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state and the wrapper's.

        The latter is the step count, and S_ref and the stream of each parameter.
        """
        self._call_state_hooks("state_dict_pre")
        parameters = parameters_of(self)
        saved = {
            "optimizer": self.optimizer.state_dict(),
            "steps_taken": self.steps_taken,
            "references": [self.references.get(p) for p in parameters],
            "streams": [self.streams.get(p) for p in parameters],
            "streams_begun": self.streams_begun,
        }
        changed: dict[str, Any] = self._call_state_hooks("state_dict_post", saved)
        return changed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the :meth:`state_dict` of another wrapper.

        Raises:
            ValueError: the state of another kind of optimizer, or of another number of
                parameters.
        """
        state_dict = self._call_state_hooks("load_state_dict_pre", state_dict.copy())
        entries = {"optimizer", "steps_taken", "references", "streams", "streams_begun"}
        missing = entries - state_dict.keys()
        if missing:
            raise ValueError(
                f"this state is not one of StiffnessWrapper: it lacks {', '.join(sorted(missing))}"
            )
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.steps_taken = int(state_dict["steps_taken"])
        parameters = parameters_of(self)
        references = zip(parameters, state_dict["references"], strict=True)
        streams = zip(parameters, state_dict["streams"], strict=True)
        self.references = {p: reference for p, reference in references if reference is not None}
        self.streams = {p: int(stream) for p, stream in streams if stream is not None}
        self.streams_begun = max(int(state_dict["streams_begun"]), len(self.streams))
        self._call_state_hooks("load_state_dict_post")

    def _call_state_hooks(self, when: str, *state_dict: dict[str, Any]) -> Any:
        """Call torch's hooks of one kind, and return the state as they leave it.

        Hooks that are called before saving and after loading get no state.
        """
        for hook in getattr(self, f"_optimizer_{when}_hooks").values():
            changed = hook(self, *state_dict)
            if state_dict and changed is not None:
                state_dict = (changed,)
        return state_dict[0] if state_dict else None

    # eager, as it writes codes, and counts
    @eager_only
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the wrapped optimizer, scale it and write it back.

        Args:
            closure: as for any torch optimizer: it computes and returns the loss.

        Returns:
            What the step of the wrapped optimizer returns.

        Raises:
            TypeError: no ``closure`` for an optimizer that needs one, such as LBFGS.
        """
        if closure is None and needs_closure(self.optimizer):
            name = type(self.optimizer).__name__
            raise TypeError(
                "step() needs a closure that clears the gradients, computes the loss, calls its "
                f"backward() and returns it: {name} calls it in each step"
            )
        before = [p.detach().clone() for p in parameters_of(self)]
        self._training_points.clear()
        factors = [self._factor(p) for p in parameters_of(self)]
        if self.on == "update":
            result = self.optimizer.step(closure)
        else:
            result = self._step_on_scaled_gradients(factors, closure)
            factors = [1.0] * len(factors)
        self._keep_floats()
        self._begin_streams(before)
        for parameter, old, factor in zip(parameters_of(self), before, factors, strict=True):
            self._finish(parameter, old, factor)
        self.steps_taken += 1
        return result

    @torch.no_grad()
    def eval(self) -> None:
        """Let a schedule-free optimizer put its average into the weights.

        Weights on a grid are rounded to it, to nearest, and :meth:`train` brings back
        exactly those that were trained. An optimizer without modes has the same weights
        in both.
        """
        evaluate = getattr(self.optimizer, "eval", None)
        if evaluate is None:
            return
        points = [(p, p.detach().clone(), _version(p)) for p in parameters_of(self)]
        evaluate()
        for parameter, values, version in points:
            if stiffness_manifold_of(parameter) is None or _version(parameter) == version:
                continue
            _to_grid(parameter)
            self._training_points[parameter] = _TrainingPoint(values, _version(parameter))

    @torch.no_grad()
    def train(self) -> None:
        """Let a schedule-free optimizer put back the weights that it trains.

        Where weights were changed since :meth:`eval`, or loaded, they are computed from
        the average and rounded to the grid.
        """
        begin = getattr(self.optimizer, "train", None)
        if begin is None:
            return
        versions = {p: _version(p) for p in parameters_of(self)}
        begin()
        for parameter, version in versions.items():
            if stiffness_manifold_of(parameter) is None or _version(parameter) == version:
                continue
            point = self._training_points.get(parameter)
            if point is not None and point.version == version:
                parameter.copy_(point.values)
            else:
                _to_grid(parameter)
        self._training_points.clear()

    def _keep_floats(self) -> None:
        """Turn copies of codes in the wrapped optimizer's state into floats.

        Schedule-free optimizers begin a sequence with a copy of the weights, whose
        updates are far below a step of the grid.
        """
        for parameter in parameters_of(self):
            state = self.optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, FP8Tensor):
                    state[name] = value.dequantize()

    def _rounding(self, manifold: StiffnessManifold) -> str:
        return self.writeback or str(getattr(manifold, "rounding", "nearest"))

    def _rounds_at_random(self, parameter: Tensor) -> bool:
        """Return True if the wrapper needs random bits for a parameter."""
        manifold = stiffness_manifold_of(parameter)
        if isinstance(manifold, FP8Manifold):
            return self._rounding(manifold) == "stochastic"
        if isinstance(parameter, FP8Tensor):
            return False
        return rounds_at_random(parameter, {"writeback": self.writeback})

    def _begin_streams(self, before: list[Tensor]) -> None:
        """Give a stream to parameters that are rounded at random for the first time.

        Those that were removed from the groups are forgotten. ``before`` has the values
        before the step.
        """
        parameters = parameters_of(self)
        for entries in (self.references, self.streams):
            for removed in entries.keys() - set(parameters):
                del entries[removed]
        begins = [
            p not in self.streams and self._rounds_at_random(p) and p.grad is not None
            for p in parameters
        ]
        twin_numbers = twins(parameters) if any(begins) else {}
        for p, values, begins_now in zip(parameters, before, begins, strict=True):
            if not begins_now:
                continue
            states = {other: {"stream": stream} for other, stream in self.streams.items()}
            stream = new_stream(
                p,
                twin_numbers[p],
                states,
                self.streams_begun,
                draws=True,
                alone=len(parameters) == 1,
                values=values,
            )
            # an optimizer of this library has made the same stream of the same values
            is_rounded_twice = "stream" in self.optimizer.state.get(p, {})
            self.streams[p] = mixed_word(stream, _SECOND_ROUNDING) if is_rounded_twice else stream
            self.streams_begun += 1

    def _factor(self, parameter: Tensor) -> Tensor | float:
        """Return what a parameter's update, or its gradient, is multiplied by."""
        scale = scheduled("scale", self.scale, self.steps_taken, 0.0, float("inf"))
        exponent = scheduled("exponent", self.exponent, self.steps_taken, -8.0, 8.0)
        manifold = stiffness_manifold_of(parameter)
        if manifold is None or exponent == 0 or not parameter.numel():
            return scale
        x = parameter.detach().to(working_dtype(parameter))
        unit = manifold.scale.to(x.dtype)
        stiffness = chart_of(manifold.format, self.metric).stiffness(x / unit) * unit
        if parameter not in self.references or self.steps_taken % self.refresh_every == 0:
            self.references[parameter] = reference_stiffness(Field(stiffness))
        reference = self.references[parameter]
        return power_of_ratio(stiffness, reference, exponent, self.damping, self.clip) * scale

    def _step_on_scaled_gradients(
        self, factors: list[Tensor | float], closure: Callable[[], Any] | None
    ) -> Any:
        """Step with scaled copies of the gradients, and put the gradients back."""
        gradients: dict[Tensor, Tensor | None] = {}

        def scale_gradients() -> None:
            for parameter, factor in zip(parameters_of(self), factors, strict=True):
                gradients[parameter] = parameter.grad
                if parameter.grad is not None:
                    parameter.grad = (parameter.grad * factor).to(parameter.grad.dtype)

        def restore_gradients() -> None:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

        def scaled_closure() -> Any:
            assert closure is not None
            restore_gradients()
            with torch.enable_grad():
                loss = closure()
            scale_gradients()
            return loss

        try:
            if closure is None:
                scale_gradients()
            return self.optimizer.step(None if closure is None else scaled_closure)
        finally:
            restore_gradients()

    def _finish(self, parameter: Tensor, old: Tensor, factor: Tensor | float) -> None:
        """Scale the update of a parameter and write it back, rounded.

        Elements that have not moved stay, bit for bit.
        """
        if parameter.grad is None:
            return
        manifold = stiffness_manifold_of(parameter)
        is_half = manifold is None and self._rounds_at_random(parameter)
        if is_half and isinstance(factor, float) and factor == 1.0:
            # the wrapped optimizer has written and rounded it
            return
        dtype = working_dtype(parameter)
        start = old.to(dtype)
        update = parameter.detach().to(dtype) - start
        target = torch.where(update == 0, start, start + update * factor)
        key = {
            "seed": self.seed,
            "step": self.steps_taken,
            "stream": self.streams.get(parameter, 0),
        }
        if manifold is not None:
            draws = self.draws or _draws_of(manifold)
            target = _write_back(target, manifold, self._rounding(manifold), draws, **key)
        elif is_half:
            bits = random_bits(
                target.shape, device=target.device, draws=self.draws or "independent", **key
            )
            target = to_half(target.contiguous(), parameter.dtype, bits)
        parameter.copy_(target)


class _TrainingPoint(NamedTuple):
    """Weights in training, and the version of those that took their place."""

    values: Tensor
    version: int


def _version(parameter: Tensor) -> int:
    return parameter.codes._version if isinstance(parameter, FP8Tensor) else parameter._version


def _to_grid(parameter: Tensor) -> None:
    """Round a parameter to the nearest point of its manifold; codes are on it."""
    manifold = stiffness_manifold_of(parameter)
    if manifold is None or isinstance(parameter, FP8Tensor):
        return
    values = parameter.detach().to(working_dtype(parameter))
    key = {"seed": 0, "step": 0, "stream": 0}
    parameter.copy_(_write_back(values, manifold, "nearest", "independent", **key))


def _draws_of(manifold: StiffnessManifold) -> Draws:
    return manifold.draws if isinstance(manifold, FP8Manifold) else "independent"


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer's ``step`` can't be called without arguments."""
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
    """Return the point of a manifold that a target is written back to.

    On a grid it is ``scale * round(target / scale)``, on the continuous manifold the
    nearest point of the interval.
    """
    if not isinstance(manifold, FP8Manifold):
        return manifold.projx(target)
    scale = manifold.scale.to(target.dtype)
    if writeback == "nearest":
        return round_to_grid(target / scale, manifold.format) * scale
    rounded = round_to_grid(
        target / scale,
        manifold.format,
        "stochastic",
        seed=seed,
        step=step,
        stream=stream,
        draws=draws,
    )
    after = rounded * scale
    is_power_of_two = torch.frexp(scale).mantissa == 0.5
    if bool(is_power_of_two.all()):
        return after
    # dividing by any other scale puts points of the grid a hair off it, where a draw
    # could move them
    nearest = round_to_grid(target / scale, manifold.format) * scale
    return torch.where(nearest == target, target, after)
