"""Scales of activations and gradients over time, agreed on by several processes.

A `Scaler` gives a tensor its scale: `FixedScale` a given one, `Scale` one by the
tensor's own magnitude or those of the past, and `GlobalScale` one by a magnitude that
the gradients of a model share (`SharedAmax`).

Processes that train one model share the magnitudes that their scalers remember. Before
each magnitude they exchange which operand it is of (`SharedOperand`), and raise RuntimeError
where they differ, since they would wait for each other forever. A magnitude of the
backward pass is announced in the forward pass, so that a process that skips a layer is
known before that.
"""

import warnings
from typing import Any, Final, Literal, NamedTuple, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fp8manifold import scaling
from fp8manifold._base.checks import check_choice, check_int
from fp8manifold._base.float_bits import working_dtype
from fp8manifold._base.reading import (
    PendingMaximum,
    eager_only,
    has_values,
    is_exporting,
    is_read_at_once,
    read_cached,
)
from fp8manifold._encoded.dispatch import is_backward
from fp8manifold._ranks import ALONE, Ranks
from fp8manifold.formats import FloatFormat, FormatLike, as_format


class SharedOperand(NamedTuple):
    """An operand whose magnitudes processes share.

    It has the same number and name in each of them.
    """

    ranks: Ranks
    number: int
    name: str

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedOperand":
        return self

    def largest(self, amax: Tensor, member: int = 0) -> Tensor:
        """Return the largest of each element over the processes.

        NaN becomes Inf, as it has no order. ``member`` tells the tensors of one
        :class:`SharedAmax` apart.
        """
        if self.ranks.size == 1:
            return amax
        amax = torch.where(amax.isnan(), torch.inf, amax)
        # a graph is the same in all processes
        if torch.compiler.is_compiling():
            return self.ranks.largest(amax)
        if amax.numel() == 1:
            # sent together with what it is of
            largest = self._agreed(amax.double().reshape(1), member, 1)
            return largest.to(amax.dtype).reshape(amax.shape)
        nothing = amax.new_zeros(()).double().reshape(1)
        self._agreed(nothing, member, amax.numel())
        return self.ranks.largest(amax)

    def announce(self, device: torch.device, member: int = 0) -> None:
        """Agree with other processes that a pass has come to this operand.

        The backward pass shares its magnitude.
        """
        if self.ranks.size > 1 and not torch.compiler.is_compiling():
            nothing = torch.zeros(1, dtype=torch.float64, device=device)
            self._agreed(nothing, member, _ANNOUNCED)

    def _agreed(self, value: Tensor, member: int, count: int) -> Tensor:
        """Return the largest value; raise RuntimeError if another operand's is sent."""
        identity = torch.tensor(
            [self.number, member, count], dtype=torch.float64, device=value.device
        )
        # the largest of the negative numbers is minus the smallest number
        largest = self.ranks.largest(torch.cat([identity, -identity, value]))
        if not torch.equal(largest[:3], -largest[3:6]):
            raise RuntimeError(
                f"another process does not run {self.name} now, or has another shape of magnitudes "
                "there: processes that run different layers can't share scales; take "
                "policy='dynamic'"
            )
        return largest[6:]


#: In place of a count of magnitudes, where none is sent.
_ANNOUNCED: Final = -1
#: The operand of a single process.
UNSHARED: Final = SharedOperand(ALONE, 0, "")


class _EndOfPass:
    """A forward hook that announces the end of a model's pass in training.

    It is announced as operands are.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.operand = SharedOperand(ranks, -1, "the end of the forward pass")

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        if not module.training or torch.compiler.is_compiling() or is_backward():
            return
        parameter = next(module.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        self.operand.announce(device)


Policy = Literal["dynamic", "static", "delayed"]
POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)
#: The default number of past tensors that a delayed scale follows from.
HISTORY: Final = 16


class Scaler(nn.Module):
    """The source of a tensor's scale.

    The last one is in the buffer ``value``, for logging.

    Attributes:
        remembers: True if the scales of later tensors depend on a tensor.
        shared: the operand of the processes that share what it remembers.
    """

    value: Tensor
    remembers = False
    shared: SharedOperand = UNSHARED

    def preview(self, x: Tensor) -> Tensor:
        """Return the scale that ``x`` would get; nothing is remembered."""
        raise NotImplementedError

    def announce(self, device: torch.device) -> None:
        """Announce that processes will share a magnitude in the backward pass."""
        if self.remembers:
            self.shared.announce(device)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Return to the state before the first tensor."""
        self.value = torch.ones((), device=self.value.device)

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: object
    ) -> None:
        """Take what was saved.

        A state of floats or of codes has nothing: the next tensor is the first one.
        """
        if any(key.startswith(prefix) for key in state_dict):
            super()._load_from_state_dict(state_dict, prefix, *args)
        else:
            self.reset_parameters()


#: By frozen scale on a GPU: how far its last tensors have exceeded it, once that is
#: known.
_EXCESS: Final[WeakKeyDictionary[nn.Module, PendingMaximum]] = WeakKeyDictionary()


class Scale(Scaler):
    """The amax scale of one tensor through training.

    Args:
        fmt: a format or its name.
        granularity: as in :func:`amax_scale`.
        policy: ``dynamic`` measures every tensor; ``static`` uses the scale of the
            first tensor, and warns with :class:`SaturationWarning` when a later one
            exceeds it; ``delayed`` uses the largest magnitude of the last ``history``
            tensors before this one, and values beyond it saturate.
        axis: as in :func:`amax_scale`.
        pow2: as in :func:`amax_scale`.
        history: the number of tensors for ``delayed``; NaN and Inf count as 0, tensors
            in evaluation mode don't count.

    The last scale is in the buffer ``value``, for logging. A delayed scale without past
    magnitudes is measured. The measured scale of a tensor that is empty, all zeros (+0
    or -0), or contains NaN or Inf is 1.

    Raises:
        TypeError, ValueError: an unknown granularity or policy, or a history that is no
            positive integer.

    Example:
        >>> scale = Scale("E4M3", policy="delayed")
        >>> [scale(torch.tensor([x])).item() for x in (448.0, 896.0, 448.0)]
        [1.0, 1.0, 2.0]

    Source: Micikevicius et al. 2022 (FP8 Formats for Deep Learning) for the history of
    magnitudes.
    """

    frozen: Tensor
    history: Tensor

    def __init__(
        self,
        fmt: FormatLike,
        granularity: scaling.Granularity = "tensor",
        policy: Policy = "dynamic",
        *,
        axis: int = 0,
        pow2: bool = False,
        history: int = HISTORY,
    ) -> None:
        super().__init__()
        check_choice("granularity", granularity, scaling.GRANULARITIES)
        check_choice("policy", policy, POLICIES)
        check_int("history", history, 1, 2**20)
        self.format: FloatFormat = as_format(fmt)
        self.granularity = granularity
        self.policy = policy
        self.axis = axis
        self.remembers = policy == "delayed"
        self.pow2 = pow2 or granularity == "block"
        self.register_buffer("value", torch.ones(()))
        self.register_buffer("frozen", torch.tensor(False))
        # when it was last read: a tracer's buffer has no value
        self._was_frozen = False
        self._length = history
        if policy == "delayed":
            self.register_buffer("history", torch.zeros(history))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return the scale for ``x``."""
        working_dtype(x, "x")
        if self.policy == "delayed":
            amax = self._amax(x)
            if self.training:
                amax = self.shared.largest(amax)
            self.value = self._delayed(amax)
            if self.training:
                self._remember(amax)
        elif self.policy == "dynamic":
            self.value = self._fresh(x)
        elif not self._is_frozen():
            if is_exporting():
                raise RuntimeError(
                    f"a static {self.format.name} scale has seen no tensor yet, and an exported "
                    "program can't freeze it: run the model once before torch.export"
                )
            self.value = self._fresh(x)
            self._freeze()
        # a program has no warnings
        elif not is_exporting():
            self._warn_if_saturated(x)
        return self.value

    def _remember(self, amax: Tensor) -> None:
        """Put magnitudes at the end of the history, and drop those at its start."""
        past = self.history
        # made without knowing the shape of the magnitudes
        if past.dim() == 1 and amax.dim():
            ones = [1] * amax.dim()
            past = past.view(-1, *ones).expand(-1, *amax.shape)
        finite = torch.where(amax.isfinite(), amax, 0.0)
        self.history = torch.cat([past[1:], finite.unsqueeze(0)])

    @torch.no_grad()
    def preview(self, x: Tensor) -> Tensor:
        """Return the scale that ``x`` would get; nothing is remembered."""
        if self.policy == "delayed":
            return self._delayed(self._amax(x))
        if self.policy == "static" and self._is_frozen():
            return self.value
        return self._fresh(x)

    def freeze(self, scale: Tensor) -> None:
        """Take a scale, such as one from a file, for all tensors from now on.

        Raises:
            TypeError: ``scale`` is not a float tensor.
            ValueError: the policy is not ``static``.
        """
        working_dtype(scale, "scale")
        if self.policy != "static":
            raise ValueError(
                f"policy={self.policy!r} measures its scale: freeze takes policy='static'"
            )
        self.value = scale.to(self.value)
        self._freeze()

    def reset_parameters(self) -> None:
        """Return to the state before the first tensor."""
        super().reset_parameters()
        self.frozen.fill_(False)
        self._was_frozen = False
        if self.policy == "delayed":
            self.history = torch.zeros(self._length, device=self.value.device)

    def extra_repr(self) -> str:
        """Return format, granularity and policy."""
        return f"{self.format.name}, {self.granularity}, {self.policy}"

    def _amax(self, x: Tensor) -> Tensor:
        return scaling.amax_of(x, self.granularity, self.axis)

    def _freeze(self) -> None:
        self.frozen.fill_(True)
        if has_values(self.frozen):
            self._was_frozen = True

    def _is_frozen(self) -> bool:
        if is_exporting():
            return self._was_frozen
        if not has_values(self.frozen):
            return False
        frozen = bool(read_cached(self.frozen, bool))
        if not torch.compiler.is_compiling():
            self._was_frozen = frozen
        return frozen

    def _fresh(self, x: Tensor) -> Tensor:
        return scaling.scale_of_amax(self._amax(x), self.format, pow2=self.pow2)

    def _delayed(self, amax: Tensor) -> Tensor:
        past = self.history.amax(0)
        return scaling.scale_of_amax(torch.where(past > 0, past, amax), self.format, pow2=self.pow2)

    # a message can't be compiled
    @eager_only
    def _warn_if_saturated(self, x: Tensor) -> None:
        """Warn at once, or on a GPU, so as not to wait, when a later tensor comes."""
        limit = self.value * (self.format.max * scaling.ROUNDING_OF_SCALES)
        amax = self._amax(x)
        worst: float | None = None
        if not has_values(amax):
            return
        if not is_read_at_once(amax):
            excess = torch.where(amax > limit, amax / limit, 0.0).max()
            worst = _EXCESS.setdefault(self, PendingMaximum()).add(excess)
        elif bool((amax > limit).any()):
            worst = (amax / limit).max().item()
        if worst:
            warnings.warn(
                f"a frozen {self.format.name} scale saturates: the largest magnitude is "
                f"{worst:.3g} times its range",
                scaling.SaturationWarning,
                stacklevel=3,
            )

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: object
    ) -> None:
        """Take what was saved, in the saved shapes.

        A scale that has seen no tensor yet does not know the shapes.
        """
        for name in ("value", "history"):
            saved = state_dict.get(prefix + name)
            buffer = getattr(self, name, None)
            if saved is not None and buffer is not None:
                setattr(self, name, torch.empty_like(saved, device=buffer.device))
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.policy == "static":
            self._is_frozen()


class FixedScale(Scaler):
    """A given scale, whatever the tensor: values beyond its range saturate."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = scale
        self.register_buffer("value", torch.tensor(scale))

    def reset_parameters(self) -> None:
        self.value.fill_(self._scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.value

    preview = forward


class SharedAmax(nn.Module):
    """The largest magnitude of many tensors over one pass, for the next pass.

    A pass is over when a tensor comes again.

    Attributes:
        value: the magnitude of the last whole pass.
        running: the magnitude of the present pass, so far.
        shared: the operand of the processes that share it.
    """

    value: Tensor
    running: Tensor
    shared: SharedOperand = UNSHARED

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(()))
        self.register_buffer("running", torch.zeros(()))
        self._members_in_pass: set[int] = set()
        self._members = 0

    def reset_parameters(self) -> None:
        self.value.zero_()
        self.running.zero_()
        self._members_in_pass.clear()

    def join(self) -> int:
        """Return the number of one more tensor."""
        self._members += 1
        return self._members

    def add(self, member: int, amax: Tensor) -> None:
        """Count a tensor's magnitude; one that is not finite is left out."""
        amax = self.shared.largest(amax, member)
        if member in self._members_in_pass:
            self.value = self.running
            self.running = torch.zeros_like(self.running)
            self._members_in_pass.clear()
        self._members_in_pass.add(member)
        self.running = torch.where(amax.isfinite(), torch.maximum(self.running, amax), self.running)

    def _load_from_state_dict(self, *args: Any) -> None:
        """Take a pass that was saved when it was over: the next tensor begins one."""
        super()._load_from_state_dict(*args)
        self._members_in_pass = set(range(1, self._members + 1))

    def of_last_pass(self, amax: Tensor) -> Tensor:
        """Return the magnitude to scale by: in the first pass, the largest so far."""
        so_far = torch.maximum(self.running, torch.where(amax.isfinite(), amax, 0.0))
        return torch.where(self.value > 0, self.value, so_far)


class GlobalScale(Scaler):
    """A scale from one magnitude for all gradients of a model.

    Small gradients underflow, as under loss scaling. The magnitude is that of the
    previous pass; tensors contribute to it in training mode.
    """

    def __init__(self, fmt: FormatLike, shared: SharedAmax) -> None:
        super().__init__()
        self.format = as_format(fmt)
        self.register_buffer("value", torch.ones(()))
        # in a tuple: the module belongs to one layer, not to every one that refers to
        # it
        self._shared = (shared,)
        self._member = shared.join()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        amax = scaling.amax_of(x, "tensor")
        if self.training:
            self._shared[0].add(self._member, amax)
        self.value = self._scale(amax)
        return self.value

    @torch.no_grad()
    def preview(self, x: Tensor) -> Tensor:
        return self._scale(scaling.amax_of(x, "tensor"))

    def announce(self, device: torch.device) -> None:
        self._shared[0].shared.announce(device, self._member)

    def extra_repr(self) -> str:
        return self.format.name

    def _scale(self, amax: Tensor) -> Tensor:
        return scaling.scale_of_amax(self._shared[0].of_last_pass(amax), self.format, pow2=False)


def share_magnitudes(model: nn.Module, ranks: Ranks) -> None:
    """Let processes that hold the same model share remembered magnitudes."""
    remembers = False
    for number, (name, module) in enumerate(model.named_modules()):
        if isinstance(module, Scaler | SharedAmax):
            module.shared = SharedOperand(ranks, number, repr(name))
            if isinstance(module, SharedAmax) or module.remembers:
                remembers = True
    if not remembers:
        return
    # announce the end of the forward pass, to these processes and no others
    hooks = model._forward_hooks
    old_hooks = [key for key, hook in hooks.items() if isinstance(hook, _EndOfPass)]
    for key in old_hooks:
        del hooks[key]
    model.register_forward_hook(_EndOfPass(ranks))


def announce_gradients(layer: Any, x: Tensor) -> None:
    """Announce in the forward pass that a layer will measure gradients.

    Processes see there that they run the same layers. A layer whose weight or input has
    a shared magnitude has sent that already.
    """
    scalers = (layer.weight_scaler, layer.activation_scaler)
    if any(scaler is not None and scaler.remembers for scaler in scalers):
        return
    for scaler in (layer.activation_gradient_scaler, layer.weight_gradient_scaler):
        if scaler is not None:
            scaler.announce(x.device)
