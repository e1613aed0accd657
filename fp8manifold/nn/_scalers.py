"""Scales of activations and gradients over time, agreed on by several processes."""

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


class Operand(NamedTuple):
    """An operand whose magnitudes processes share: the same number and name in each of
    them.
    """

    ranks: Ranks
    number: int
    name: str

    def __deepcopy__(self, memo: dict[int, Any]) -> "Operand":
        return self

    def largest(self, amax: Tensor, member: int = 0) -> Tensor:
        """The largest of each element over the processes; NaN becomes Inf, as it has no
        order.
        """
        if self.ranks.size == 1:
            return amax
        amax = torch.where(amax.isnan(), torch.inf, amax)
        if torch.compiler.is_compiling():  # a graph is the same in all processes
            return self.ranks.largest(amax)
        first = amax if amax.numel() == 1 else amax.new_zeros(())
        said = self._agreed(first.double().reshape(1), member, amax.numel())
        return (
            said.to(amax.dtype).reshape(amax.shape)
            if amax.numel() == 1
            else self.ranks.largest(amax)
        )

    def announce(self, device: torch.device, member: int = 0) -> None:
        """Agree with other processes that a pass has come to this operand, whose
        magnitude the backward pass shares.
        """
        if self.ranks.size > 1 and not torch.compiler.is_compiling():
            self._agreed(torch.zeros(1, dtype=torch.float64, device=device), member, -1)

    def _agreed(self, value: Tensor, member: int, count: int) -> Tensor:
        own = torch.tensor([self.number, member, count], dtype=torch.float64, device=value.device)
        said = self.ranks.largest(torch.cat([own, -own, value]))
        if not torch.equal(said[:3], -said[3:6]):
            raise RuntimeError(
                f"another process does not run {self.name} now, or has another shape of magnitudes "
                f"there: processes "
                "that run different layers can't share scales; take policy='dynamic'"
            )
        return said[6:]


UNSHARED = Operand(ALONE, 0, "")  #: The operand of a single process.


class _End:
    """A forward hook that announces the end of a model's pass in training, as operands
    are announced.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.operand = Operand(ranks, -1, "the end of the forward pass")

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        if module.training and not torch.compiler.is_compiling() and not is_backward():
            parameter = next(module.parameters(), None)
            self.operand.announce(torch.device("cpu") if parameter is None else parameter.device)


Policy = Literal["dynamic", "static", "delayed"]
POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)
HISTORY: Final = 16  #: The default number of past tensors that a delayed scale follows from.


class Scaler(nn.Module):
    """The source of a tensor's scale; the last one is in the buffer ``value``, for
    logging.
    """

    value: Tensor
    remembers = False  #: True if the scales of later tensors depend on a tensor.
    shared: Operand = UNSHARED  #: The operand of the processes that share what it remembers.

    def preview(self, x: Tensor) -> Tensor:
        """The scale that ``x`` would get; nothing is remembered."""
        raise NotImplementedError

    def announce(self, device: torch.device) -> None:
        """Announce in a forward pass that processes will share a magnitude in the
        backward pass.
        """
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
        """Take what was saved; of a state of floats, or of codes, nothing: the next
        tensor is the first one.
        """
        if any(key.startswith(prefix) for key in state_dict):
            super()._load_from_state_dict(state_dict, prefix, *args)
        else:
            self.reset_parameters()


_LATER: Final[WeakKeyDictionary[nn.Module, PendingMaximum]] = WeakKeyDictionary()
"""By frozen scale on a GPU: how far its last tensors have exceeded it, once that is
known.
"""


class Scale(Scaler):
    """The amax scale of one tensor through training: fresh, frozen, or from the
    magnitudes of the past.

    Args:
        fmt: a format or its name.
        granularity, axis, pow2: as in :func:`amax_scale`.
        policy: ``dynamic`` measures every tensor; ``static`` uses the scale of the
            first tensor, and warns with
            :class:`SaturationWarning` when a later one exceeds it; ``delayed`` uses the largest magnitude of the last
            ``history`` tensors before this one, and values beyond it saturate.
        history: the number of tensors for ``delayed``; NaN and Inf count as 0, tensors
            in evaluation mode don't count.

    The last scale is in the buffer ``value``, for logging. A delayed scale without past
        magnitudes is measured. The
    measured scale of a tensor that is empty, all zeros (+0 or -0), or contains NaN or
        Inf is 1.

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
        self.granularity, self.policy, self.axis = granularity, policy, axis
        self.remembers = policy == "delayed"
        self.pow2 = pow2 or granularity == "block"
        self.register_buffer("value", torch.ones(()))
        self.register_buffer("frozen", torch.tensor(False))
        self._was_frozen = False  # when it was last read: a tracer's buffer has no value
        self._length = history
        if policy == "delayed":
            self.register_buffer("history", torch.zeros(history))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """The scale for ``x``."""
        working_dtype(x, "x")
        if self.policy == "delayed":
            amax = self._amax(x)
            if self.training:
                amax = self.shared.largest(amax)
            self.value = self._delayed(amax)
            if self.training:
                past = self.history
                if (
                    past.dim() == 1 and amax.dim()
                ):  # made without knowing the shape of the magnitudes
                    past = past.view(-1, *(1 for _ in amax.shape)).expand(-1, *amax.shape)
                finite = torch.where(amax.isfinite(), amax, 0.0)
                self.history = torch.cat([past[1:], finite.unsqueeze(0)])
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
        elif not is_exporting():  # a program has no warnings
            self._warn_if_saturated(x)
        return self.value

    @torch.no_grad()
    def preview(self, x: Tensor) -> Tensor:
        """The scale that ``x`` would get; nothing is remembered."""
        if self.policy == "delayed":
            return self._delayed(self._amax(x))
        return self.value if self.policy == "static" and self._is_frozen() else self._fresh(x)

    def freeze(self, scale: Tensor) -> None:
        """Take a scale, such as one from a file, for all tensors from now on.

        Raises:
            TypeError: ``scale`` is no float tensor.
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
        """Format, granularity and policy."""
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

    @eager_only  # a message can't be compiled
    def _warn_if_saturated(self, x: Tensor) -> None:
        """Warn at once, or on a GPU, so as not to wait, when a later tensor comes."""
        limit = self.value * (self.format.max * scaling.ROUNDING_OF_SCALES)
        amax = self._amax(x)
        worst: float | None = None
        if not has_values(amax):
            return
        if not is_read_at_once(amax):
            worst = _LATER.setdefault(self, PendingMaximum()).add(
                torch.where(amax > limit, amax / limit, 0.0).max()
            )
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
        """Take the saved shapes: a scale that has seen no tensor yet does not know its
        own.
        """
        for name in ("value", "history"):
            saved, own = state_dict.get(prefix + name), getattr(self, name, None)
            if saved is not None and own is not None:
                setattr(self, name, torch.empty_like(saved, device=own.device))
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.policy == "static":
            self._is_frozen()


class FixedScale(Scaler):
    """A given scale, whatever the tensor: values beyond its range saturate."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._given = scale
        self.register_buffer("value", torch.tensor(scale))

    def reset_parameters(self) -> None:
        self.value.fill_(self._given)

    def forward(self, x: Tensor) -> Tensor:
        return self.value

    preview = forward


class SharedAmax(nn.Module):
    """The largest magnitude of many tensors over one pass, for the next pass.

    A pass is over when a tensor comes again. ``value`` is that of the last whole pass,
    ``running`` of the present one.
    """

    value: Tensor
    running: Tensor
    shared: Operand = UNSHARED

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(()))
        self.register_buffer("running", torch.zeros(()))
        self._seen: set[int] = set()
        self._members = 0

    def reset_parameters(self) -> None:
        self.value.zero_()
        self.running.zero_()
        self._seen.clear()

    def join(self) -> int:
        """A number for one more tensor."""
        self._members += 1
        return self._members

    def add(self, member: int, amax: Tensor) -> None:
        """Count a tensor's magnitude; one that is not finite is left out."""
        amax = self.shared.largest(amax, member)
        if member in self._seen:
            self.value, self.running = self.running, torch.zeros_like(self.running)
            self._seen.clear()
        self._seen.add(member)
        self.running = torch.where(amax.isfinite(), torch.maximum(self.running, amax), self.running)

    def _load_from_state_dict(self, *args: Any) -> None:
        """A pass is saved when it is over: the next tensor begins a new one."""
        super()._load_from_state_dict(*args)
        self._seen = set(range(1, self._members + 1))

    def of_last_pass(self, amax: Tensor) -> Tensor:
        """The magnitude to scale by: in the first pass, the largest so far."""
        so_far = torch.maximum(self.running, torch.where(amax.isfinite(), amax, 0.0))
        return torch.where(self.value > 0, self.value, so_far)


class GlobalScale(Scaler):
    """A scale from one magnitude for all gradients of a model, as under loss scaling:
    small gradients underflow.

    The magnitude is that of the previous pass; tensors contribute to it in training
    mode.
    """

    def __init__(self, fmt: FormatLike, shared: SharedAmax) -> None:
        super().__init__()
        self.format = as_format(fmt)
        self.register_buffer("value", torch.ones(()))
        self._shared = (
            shared,
        )  # in a tuple: the module belongs to one layer, not to every one that refers to it
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
            module.shared = Operand(ranks, number, repr(name))
            remembers = remembers or isinstance(module, SharedAmax) or module.remembers
    if remembers:  # announce the end of the forward pass, to these processes and no others
        hooks = model._forward_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _End)]:
            del hooks[key]
        model.register_forward_hook(_End(ranks))


def announce_gradients(layer: Any, x: Tensor) -> None:
    """Let processes see in the forward pass that they run the same layers, and will
    measure gradients together.
    """
    sent = (layer.weight_scaler, layer.activation_scaler)
    if not any(scaler is not None and scaler.remembers for scaler in sent):
        for scaler in (layer.activation_gradient_scaler, layer.weight_gradient_scaler):
            if scaler is not None:
                scaler.announce(x.device)
