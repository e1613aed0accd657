"""What a tensor of codes has beside its codes.

- ``Traits``: format, rounding, seed and other constants.
- ``ScaledTensor``: the scales, and how they are read and written.
- Loans: under autocast ``weight.to(torch.bfloat16)`` shares the codes of the weight.
  ``lend`` makes such a tensor. It can be read until the weight changes
  (``check_current``), and never written (``check_not_lent``).
- ``Arithmetic``: what was done to a copy, to warn of running averages in codes.
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
from fp8manifold._encoded.stored_scale import decoded_scale, replacement_scale
from fp8manifold._numerics.charts import RETRACTIONS, Retraction
from fp8manifold.formats import FloatFormat
from fp8manifold.random_bits import Draws
from fp8manifold.scaling import StoredGranularity

WriteRounding = Literal["nearest", "stochastic"]
# States have WRITE_ROUNDINGS by index, and DRAWS by that of a pair
# (`_DRAWS_AND_RETRACTIONS` in `nn/_parts.py`): never reorder them.
WRITE_ROUNDINGS: Final = ("nearest", "stochastic")
DRAWS: Final = get_args(Draws)
_CHANGES_OF_AN_AVERAGE: Final = 4
"""Changes of a copy by arithmetic that are a running average.

Merging a few weights takes fewer.
"""


class Traits(NamedTuple):
    """What a tensor of codes is, beside its numbers."""

    format: FloatFormat
    rounding: WriteRounding
    seed: int
    dtype: torch.dtype
    block_size: BlockSize
    #: whether the random bits of a write depend on the name of the operator that writes
    by_operator: bool = True
    #: how the draws of one weight follow each other in an optimizer's steps; operators
    #: always draw independently
    draws: Draws = "independent"
    #: where a Riemannian step goes: along the chart, or along its tangent in value
    retraction: Retraction = "exponential"

    @property
    def flat(self) -> tuple[Any, ...]:
        """The traits as plain values, the format by name.

        These can be compared, hashed and unpickled.
        """
        return (self.format.name, *self[1:])

    def check(self) -> None:
        check_choice("rounding", self.rounding, WRITE_ROUNDINGS)
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


def may_lend(x: Any) -> bool:
    """Return True if a cast may share the codes, instead of copying them.

    It may in a forward pass under autocast, of a tensor neither sharded nor traced.
    """
    root = root_of(x)
    if root.is_shard or is_traced(root.codes) or root.codes.is_inference():
        return False
    # torch tells the depth of autocast contexts only as it is changed
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    # Module.to casts without gradients and keeps what it gets, so it needs a copy
    return depth > 0 and torch.is_grad_enabled()


def lend(x: Any, dtype: torch.dtype) -> Any:
    """Return a tensor of codes, or a view, under another dtype, on the same memory."""
    if isinstance(x, View):
        return View(lend(x.base, dtype), x.replay, x.size(), x.stride(), x.storage_offset())
    twin = x.with_parts(lambda part: part, dtype)
    twin.remainder = None
    twin.lent_from = x.lent_from or tuple(
        LentPart(part, part._version) for part in (x.codes, x.kept_scale)
    )
    return twin


def check_current(x: Any) -> None:
    """Raise RuntimeError if codes were lent by a cast, and have changed since."""
    if x.lent_from is None:
        return
    if any(lent.part._version != lent.version for lent in x.lent_from):
        raise RuntimeError(
            f"an {type(x).__name__} was cast under autocast, and the weight whose codes it shares "
            "has changed since: take the optimizer's step after the backward pass and outside of "
            "autocast, or cast a clone()"
        )


def check_not_lent(x: Any) -> None:
    """Raise RuntimeError if codes are lent: writing to them would change the weight."""
    if x.lent_from is not None:
        raise RuntimeError(
            f"an {type(x).__name__} that was cast under autocast shares the codes of the weight: "
            "write to the weight, or to a clone() of the cast"
        )


class LentPart(NamedTuple):
    """Codes or scales of a tensor that was cast, and their version at that time."""

    part: Tensor
    version: int


@dataclass
class Arithmetic:
    """What arithmetic has done to a copy, through any of the tensors on its memory."""

    #: times that its values were changed
    changes: int = 0
    #: True if values were read that a later ``copy_`` may put back, changed
    is_read: bool = False
    #: True once the copy has had a gradient: a weight that an optimizer steps
    is_trained: bool = False


class ScaledTensor(EncodedTensor):
    """Codes of a format, and their scales."""

    codes: Tensor
    kept_scale: Tensor
    """The memory of the scales.

    It has uint8 exponents for blocks whose scales all are powers of two, and otherwise
    float32.
    """
    format: FloatFormat
    block_size: BlockSize
    #: The parts that a cast under autocast shares; None for any other tensor.
    lent_from: tuple[LentPart, ...] | None
    #: The optimizer whose state has something in units of the scale.
    stepped_by: "weakref.ref[Any] | None" = None
    #: What arithmetic has done to a copy of a weight; None for one that is no copy.
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
    def granularity(self) -> StoredGranularity:
        """What shares a scale.

        It is ``tensor``, ``channel``, ``row``, ``block`` or ``square``.
        """
        if isinstance(self.block_size, tuple):
            return "square"
        if self.block_size:
            return "block"
        if not self.kept_scale.dim():
            return "tensor"
        return "row" if any(size != 1 for size in self.kept_scale.shape[1:]) else "channel"

    def element_size(self) -> int:
        """Return the bytes of a weight's code; scales are counted by ``nbytes`` only."""
        return self.codes.element_size()

    @property
    def itemsize(self) -> int:  # type: ignore[override]  # a field of torch's stubs
        """The bytes of a weight's code."""
        return self.codes.element_size()

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # the same
        """The bytes that are held: of codes and scales, and of a remainder if there is one.

        ``untyped_storage()`` has the size of the floats, by which libraries compare
        tensors.
        """
        parts = (self.codes, self.kept_scale, getattr(self, "remainder", None))
        return sum(part.nbytes for part in parts if part is not None)

    def expanded_scale(self) -> Tensor:
        """Return the scale in a shape that broadcasts against the values."""
        return expand_scale(self.scale, self.block_size, self.codes.shape)

    def largest(self) -> Tensor:
        """Return the largest magnitude under each scale, in the shape of ``scale``."""
        return largest_magnitude(self.codes, self.scale, self.format, self.block_size)

    def set_scale_(self, scale: float | Tensor) -> Self:
        """Write other scales, also for tensors that share them.

        The codes stay, so values change with the scales.

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
        check_not_lent(self)
        new = replacement_scale(self, scale, blocks=self.exponents is not None)
        if self.is_shard and new.dtype is not self.kept_scale.dtype:
            raise RuntimeError(
                "a sharded FP8Tensor has powers of two for scales: set other scales before "
                "fully_shard"
            )
        write_scale(self.kept_scale, new)
        self._changed()
        return self

    @property
    def is_bare(self) -> bool:
        """True for a result of ``detach``, ``clone`` or ``to`` that is no parameter."""
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
        arithmetic = self.arithmetic
        if arithmetic is None or arithmetic.is_trained or is_traced(self.codes):
            return
        arithmetic.changes += 1
        arithmetic.is_read = False
        if arithmetic.changes == _CHANGES_OF_AN_AVERAGE:
            warnings.warn(
                f"{operator} has changed a copy of a weight in {self.format.name} for the "
                f"{_CHANGES_OF_AN_AVERAGE}th time, and each change was rounded to codes: keep a "
                "running average in floats, with fp8manifold.averaged_model(model) or "
                "p.detach().float()",
                scaling.RepeatedRoundingWarning,
                stacklevel=2,
            )

    def _changed(self) -> None:
        """Do what is due after every write."""
        raise NotImplementedError


def note_gradient(x: Any) -> None:
    """Note that a copy of a weight has a gradient, or an optimizer of this library."""
    if x.arithmetic is None or x.arithmetic.is_trained:
        return
    x.arithmetic.is_trained = x.stepped_by is not None or (x.is_leaf and x.grad is not None)


def write_scale(kept_scale: Tensor, new: Tensor) -> None:
    """Write stored scales, also for tensors that share the memory.

    In eager mode floats may replace exponents: the memory then becomes float32.
    """
    if kept_scale.dtype is torch.uint8 and new.dtype is not torch.uint8:
        if is_traced(kept_scale):
            raise RuntimeError(
                "compiled code can't set scales other than powers of two: set them in eager mode"
            )
        kept_scale.data = torch.empty(kept_scale.shape, device=kept_scale.device)
    kept_scale.copy_(decoded_scale(new) if kept_scale.dtype is torch.float32 else new)
