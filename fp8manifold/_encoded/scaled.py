"""The parts of a tensor beside its codes: constant traits, scales, and the weight whose
codes autocast lent it.
"""

import warnings
import weakref
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor

from fp8manifold import scaling
from fp8manifold._base.checks import check_choice, check_int
from fp8manifold._encoded.dispatch import EncodedTensor, View, root_of
from fp8manifold._encoded.storage import BlockSize, expand_scale, is_traced, largest_magnitude
from fp8manifold._encoded.stored_scale import decoded_scale, other_scale
from fp8manifold._numerics.charts import RETRACTIONS, Retraction
from fp8manifold.formats import FloatFormat
from fp8manifold.random_bits import Draws

Rounding = Literal["nearest", "stochastic"]
ROUNDINGS: Final = ("nearest", "stochastic")
DRAWS: Final = get_args(Draws)
_REPEATED: Final = 4
"""Changes of a copy by arithmetic that are a running average: merging a few weights takes
fewer.
"""


class Traits(NamedTuple):
    """Format, options and apparent dtype."""

    format: FloatFormat
    rounding: Rounding
    seed: int
    dtype: torch.dtype
    block_size: BlockSize
    #: whether the name of the operator that writes is a key word of its draws
    by_operator: bool = True
    #: how the draws of one weight follow each other in an optimizer's steps; operators
    #: always draw independently
    draws: Draws = "independent"
    #: where a Riemannian step goes: along the chart, or along its tangent in value
    retraction: Retraction = "exponential"

    @property
    def flat(self) -> tuple[Any, ...]:
        """The traits as plain values, the format by name: what can be compared, hashed
        and unpickled.
        """
        return (self.format.name, *self[1:])

    def check(self) -> None:
        check_choice("rounding", self.rounding, ROUNDINGS)
        check_choice("draws", self.draws, DRAWS)
        check_choice("retraction", self.retraction, RETRACTIONS)
        check_int("seed", self.seed, 0, 2**63 - 1)

    @classmethod
    def from_flat(cls, flat: tuple[Any, ...]) -> Self:
        # tensors that an earlier version pickled lack the last trait
        if len(flat) not in (len(cls._fields) - 1, len(cls._fields)):
            raise ValueError(
                f"{flat!r} must be the {len(cls._fields)} traits of a tensor: "
                f"{', '.join(cls._fields)}"
            )
        return cls(_format_named(flat[0]), *flat[1:])


_format_named = lru_cache(maxsize=256)(FloatFormat.from_string)


def is_lent_here(x: Any) -> bool:
    """True if a cast may share the codes: in a forward pass under autocast, of a tensor
    neither sharded nor traced.
    """
    root = root_of(x)
    if root.is_share or is_traced(root.codes) or root.codes.is_inference():
        return False
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return (
        nesting > 0 and torch.is_grad_enabled()
    )  # a module that is cast has no gradients, and keeps what it gets


def lent(x: Any, dtype: torch.dtype) -> Any:
    """A tensor of codes, or a view of one, under another dtype, on the same memory."""
    if isinstance(x, View):
        return View(lent(x.base, dtype), x.replay, x.size(), x.stride(), x.storage_offset())
    twin = x.with_parts(lambda part: part, dtype)
    twin.remainder = None
    twin.lent_from = x.lent_from or tuple((part, part._version) for part in (x.codes, x.kept_scale))
    return twin


def check_current(x: Any) -> None:
    """Raise RuntimeError if codes were lent by a cast, and have changed since."""
    if x.lent_from is not None and any(part._version != version for part, version in x.lent_from):
        raise RuntimeError(
            f"an {type(x).__name__} was cast under autocast, and the weight whose codes it shares "
            f"has changed since: "
            "take the optimizer's step after the backward pass and outside of autocast, or cast a "
            "clone()"
        )


def check_own(x: Any) -> None:
    """Raise RuntimeError if codes are lent: writing to them would change the weight
    that was cast.
    """
    if x.lent_from is not None:
        raise RuntimeError(
            f"an {type(x).__name__} that was cast under autocast shares the codes of the weight: "
            f"write to the weight, "
            "or to a clone() of the cast"
        )


@dataclass
class Arithmetic:
    """What arithmetic has done to a copy of a weight, whatever tensors share its memory."""

    changes: int = 0  #: Times that its values were changed.
    #: True if values were read that a later ``copy_`` may put back, changed.
    is_read: bool = False
    #: True once the copy has had a gradient: a weight that an optimizer steps.
    is_trained: bool = False


Lent = tuple[
    tuple[Tensor, int], ...
]  #: Parts of the tensor that was cast, and their versions then.


class ScaledTensor(EncodedTensor):
    """Codes of a format, and their scales."""

    codes: Tensor
    kept_scale: Tensor
    """The memory of the scales: uint8 exponents for blocks whose scales all are powers
    of two, otherwise float32.
    """
    format: FloatFormat
    block_size: BlockSize
    lent_from: Lent | None
    """The parts that a cast under autocast shares, and their versions; None for any
    other tensor.
    """
    stepped_by: "weakref.ref[Any] | None" = (
        None  #: The optimizer whose state has something in units of the scale.
    )
    #: What arithmetic has done to a copy of a weight; None for a tensor that is none.
    arithmetic: Arithmetic | None = None
    is_detached = False  #: True for what ``detach``, ``clone`` and ``to`` return.
    #: True if it came from a state dict: a tensor that copies it takes over its count
    #: and seed.
    resumes = False

    @property
    def exponents(self) -> Tensor | None:
        """The memory of the scales if it holds exponents, otherwise None."""
        return self.kept_scale if self.kept_scale.dtype is torch.uint8 else None

    @property
    def scale(self) -> Tensor:
        """The scales, float32; decoded from exponents they are a copy."""
        return decoded_scale(self.kept_scale)

    @scale.setter
    def scale(self, scale: float | Tensor) -> None:
        self.set_scale_(scale)

    @property
    def granularity(self) -> str:
        """``tensor``, ``channel``, ``row``, ``block`` or ``square``: what shares a
        scale.
        """
        if isinstance(self.block_size, tuple):
            return "square"
        if self.block_size or not self.kept_scale.dim():
            return "block" if self.block_size else "tensor"
        return "row" if any(size != 1 for size in self.kept_scale.shape[1:]) else "channel"

    def expanded_scale(self) -> Tensor:
        """The scale in a shape that broadcasts against the values."""
        return expand_scale(self.scale, self.block_size, self.codes.shape)

    def largest(self) -> Tensor:
        """The largest stored magnitude under each scale, in value; of the shape of
        ``scale``.
        """
        return largest_magnitude(self.codes, self.scale, self.format, self.block_size)

    def set_scale_(self, scale: float | Tensor) -> Self:
        """Write other scales, also for tensors that share them; the codes stay, so
        values change with the scales.

        Args:
            scale: positive normal, a number or a tensor that broadcasts to the shape of
                ``scale``, rounded to float32. Blocks that have exponents hold float32
                from then on unless all are powers of two.

        Raises:
            TypeError: uint8, which might be exponents.
            ValueError: a scale that is no such number, or does not fit.
            RuntimeError: exponents that would become floats in compiled code, or in one
                process of several.

        Example:
            >>> from fp8manifold import FP8Tensor
            >>> w = FP8Tensor(torch.ones(2), "E4M3", scale=0.5)
            >>> w.set_scale_(1.0).tolist()
            [2.0, 2.0]
        """
        check_own(self)
        new = other_scale(self, scale, blocks=self.exponents is not None)
        if self.is_share and new.dtype is not self.kept_scale.dtype:
            raise RuntimeError(
                "a sharded FP8Tensor has powers of two for scales: set other scales before "
                "fully_shard"
            )
        write_kept(self.kept_scale, new)
        self._changed()
        return self

    @property
    def is_bare(self) -> bool:
        """True for what ``detach``, ``clone`` and ``to`` return, if it is no parameter."""
        return self.is_detached and not getattr(self, "_is_param", False)

    def float(self, **options: Any) -> Tensor:
        """Return a plain tensor in float32 of a copy or a detached tensor.

        A parameter stays one in codes, as ``Module.float`` needs it.
        """
        if not self.is_bare or (self.requires_grad and torch.is_grad_enabled()):
            return super().float(**options)
        return self._in_float32()

    def note_read(self) -> None:
        if self.arithmetic is not None:
            self.arithmetic.is_read = True

    def note_change(self, operator: str) -> None:
        """Count a change of a copy that nothing trains, and warn at the fourth."""
        note_gradient(self)
        done = self.arithmetic
        if done is None or done.is_trained or is_traced(self.codes):
            return
        done.changes += 1
        done.is_read = False
        if done.changes == _REPEATED:
            warnings.warn(
                f"{operator} has changed a copy of a weight in {self.format.name} for the "
                f"{_REPEATED}th time, rounded to codes each time: a running average has to be in "
                "floats, as of fp8manifold.averaged_model(model) or p.detach().float()",
                scaling.RepeatedRoundingWarning,
                stacklevel=2,
            )

    def _changed(self) -> None:
        """After every write."""
        raise NotImplementedError


def note_gradient(x: Any) -> None:
    """Note that a copy of a weight has a gradient, or an optimizer of this library."""
    if x.arithmetic is None or x.arithmetic.is_trained:
        return
    x.arithmetic.is_trained = x.stepped_by is not None or (x.is_leaf and x.grad is not None)


def write_kept(kept: Tensor, new: Tensor) -> None:
    """Write scales, also for tensors that share the memory; in eager mode floats may
    replace exponents.
    """
    if kept.dtype is not new.dtype and kept.dtype is torch.uint8:
        if is_traced(kept):
            raise RuntimeError(
                "compiled code can't set scales other than powers of two: set them in eager mode"
            )
        kept.data = torch.empty(kept.shape, device=kept.device)
    kept.copy_(decoded_scale(new) if kept.dtype is torch.float32 else new)
