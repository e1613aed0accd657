"""Weights that live in one byte each: codes of a float format and scales, usable as any
tensor is.
"""

import hashlib
import logging
from collections.abc import Callable
from typing import Any, Final, Self

import torch
from torch import Tensor

import fp8manifold._encoded.operators  # noqa: F401  # registers them
from fp8manifold import scaling
from fp8manifold._base.checks import check_choice
from fp8manifold._base.float_bits import working_dtype
from fp8manifold._encoded import storage, stored_scale
from fp8manifold._encoded.dispatch import DTYPES, TRACED_AS, Replay, guard_memory, takes_rows
from fp8manifold._encoded.scaled import (
    Arithmetic,
    Rounding,
    ScaledTensor,
    Traits,
    check_current,
    check_own,
    write_kept,
)
from fp8manifold._numerics.charts import Retraction
from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.manifolds import FP8Manifold
from fp8manifold.random_bits import Draws, fresh_seed

__all__ = ["FP8Tensor"]

_LOG: Final = logging.getLogger("fp8manifold")
_KEPT_SCALE: Final = ("kept_scale", "exponents", "scale")
"""The name of that part, and those in files of earlier versions."""


class FP8Tensor(ScaledTensor):
    """A tensor that stores a code of at most eight bits for every value, and scales
    that the values share.

    .. math:: w = s \\cdot \\operatorname{decode}(code)

    Scales that it chooses are powers of two, so products are exact; with given scales
    the product is rounded to float32, and from there to bfloat16. To torch it is a
    float32 or bfloat16 tensor, which operators decode when they run. In-place operators
    (``add_``, a torch optimizer's) run in float32 and round the result, at the same
    scale unless all values are replaced: ``normal_`` gives a new scale, as do copied
    floats that would saturate or vanish.

    Args:
        w: float tensor of any shape; rounded to nearest.
        fmt: a format or its name; None: that of ``w`` if it is one of these tensors, or
            E4M3.
        granularity: one scale for the ``tensor``, each ``channel`` (index of the first
            dimension), each ``row`` of the last dimension, each ``block`` of 32 along
            it, or each ``square`` of 128 x 128 in the last two.
        headroom: of the scale, as in :func:`fp8manifold.storage_scale`, except that
            None may go down to 1 in a format of few binades; other libraries'
            optimizers need 2 or more.
        scale: positive and normal: a number, or a tensor of the granularity's shape;
            values beyond its range saturate.
        rounding: how values written in place are rounded: ``stochastic`` or
            ``nearest``.
        seed: key of the random bits, one for each tensor; None: from torch's default
            generator.
        dtype: the apparent dtype, float32 or bfloat16; by default that of ``w``, or
            float32.
        keep_remainder: store the remainder of rounding ``w`` in ``remainder``.
        draws, retraction: as in :func:`fp8manifold.quantize_model`.
        requires_grad: whether autograd records what is done with it.

    Attributes:
        codes: uint8, in the shape of the tensor.
        scale: float32: ``()``, ``(R, 1, .., 1)``, ``(.., 1)``, ``(.., C/32)`` or
            ``(.., R/128, C/128)``, rounded up; written by :meth:`set_scale_`, or by
            :meth:`rescale_`, which preserves values.
        kept_scale: the scale as it is stored: uint8 for powers of two of blocks and
            squares (``127 + log2(scale)``, as in E8M0), otherwise float32.
        exponents: ``kept_scale`` if it is uint8, otherwise None.
        format: the :class:`FloatFormat`.
        block_size: 32 for blocks, ``(128, 128)`` for squares, otherwise None.
        counter: int64, advanced by every stochastic write, so that no draw is used
            twice; part of the state.
        remainder: None, or int8: the remainder of rounding ``w``, in 1/256 of a chart
            step. Writing drops it.

    Without ``scale`` the values must be finite. Otherwise, and in writes, NaN needs a
        code and Inf saturates; -0 is
    preserved if the layout has it, and an empty tensor has no codes and a scale of 1.

    Raises:
        TypeError: ``w`` is no float tensor, or an option of another type.
        ValueError: an unknown format or option, a scale that does not fit, NaN without
            a code, or values not finite.

    Example:
        >>> w = FP8Tensor(torch.tensor([[0.3, -0.7]]), "E4M3")
        >>> w.codes.tolist(), w.scale.item() == 2.0**-5, (w + 1).tolist()
        ([[82, 219]], True, [[1.3125, 0.3125]])

    Source: OCP FP8 specification 1.0 for the codes, OCP Microscaling Formats 1.0 for
    blocks and their scales.
    """

    counter: Tensor
    # The operator of that name stays torch.remainder
    remainder: Tensor | None  # type: ignore[assignment]
    format: FloatFormat
    rounding: Rounding
    seed: int
    by_operator: bool
    draws: Draws
    retraction: Retraction
    filled: int | None = None
    """The version of ``codes`` at which an optimizer knew of a weight other than 0
    under every scale.
    """

    @staticmethod
    def __new__(
        cls: type[Self],
        w: Tensor,
        fmt: FormatLike | None = None,
        *,
        granularity: scaling.StoredGranularity = "channel",
        headroom: float | None = None,
        scale: float | Tensor | None = None,
        rounding: Rounding = "stochastic",
        seed: int | None = None,
        dtype: torch.dtype | None = None,
        keep_remainder: bool = False,
        draws: Draws = "independent",
        retraction: Retraction = "exponential",
        requires_grad: bool = False,
    ) -> Self:
        working_dtype(w, "w")
        check_choice("granularity", granularity, scaling.STORED_GRANULARITIES)
        w, fmt = w.detach(), as_format(fmt or (w.format if isinstance(w, FP8Tensor) else "E4M3"))
        if dtype is None:
            dtype = w.dtype if w.dtype in DTYPES else torch.float32
        if granularity in ("channel", "row"):
            granularity = "tensor" if w.dim() < 2 else "channel" if w.dim() == 2 else granularity
        room = stored_scale.own_headroom(fmt, headroom)
        block_size: storage.BlockSize = (
            scaling.BLOCK_SIZE
            if granularity == "block"
            else storage.SQUARE
            if granularity == "square"
            else None
        )
        kept = (
            stored_scale.kept_fresh_scale(w, fmt, granularity, room)
            if scale is None
            else stored_scale.given_scale(scale, w, granularity)
        )
        wide = storage.expand_scale(stored_scale.decoded_scale(kept), block_size, w.shape)
        codes, remainder = storage.codes_of(w, wide, fmt, keep_remainder=keep_remainder)
        traits = Traits(
            fmt,
            rounding,
            fresh_seed() if seed is None else seed,
            dtype,
            block_size,
            draws=draws,
            retraction=retraction,
        )
        return cls._wrap(
            codes, kept, w.new_zeros((), dtype=torch.int64), remainder, traits, requires_grad
        )

    @classmethod
    def from_float(cls, w: Tensor, fmt: FormatLike | None = None, **options: Any) -> Self:
        """Round a float tensor: the constructor as a method, with its options."""
        return cls(w, fmt, **options)

    @classmethod
    def from_codes(
        cls,
        codes: Tensor,
        scale: float | Tensor,
        fmt: FormatLike,
        *,
        block_size: storage.BlockSize | list[int] = None,
        counter: int | Tensor = 0,
        rounding: Rounding = "stochastic",
        seed: int | None = None,
        dtype: torch.dtype = torch.float32,
        by_operator: bool = True,
        draws: Draws = "independent",
        retraction: Retraction = "exponential",
        requires_grad: bool = False,
    ) -> Self:
        """The tensor of given codes and scales, which it holds without a copy, except
        for powers of two of blocks.

        Args:
            codes: uint8, contiguous.
            scale: float32, positive and normal, in a shape of the attribute, or uint8
                exponents (E8M0) of blocks.
            fmt, rounding, seed, dtype, draws, retraction, requires_grad: as in the
                constructor.
            block_size: 32 for one scale per block, ``(128, 128)`` for one per square,
                otherwise None.
            counter, by_operator: stochastic writes so far; whether the writing
                operator's name enters its key.

        Raises:
            TypeError: ``codes`` is not uint8.
            ValueError: a code that is Inf or beyond the format's width, or a scale that
                does not fit.

        Example:
            >>> FP8Tensor.from_codes(torch.tensor([56], dtype=torch.uint8), torch.tensor(0.5), "E4M3").tolist()
            [0.5]
        """
        fmt = as_format(fmt)
        codes = storage.checked_codes(codes, fmt)
        block_size = tuple(block_size) if isinstance(block_size, list) else block_size  # type: ignore[assignment]
        if block_size not in (None, scaling.BLOCK_SIZE, storage.SQUARE):
            raise ValueError(
                f"block_size={block_size!r} must be {scaling.BLOCK_SIZE}, {storage.SQUARE} or None"
            )
        rows = isinstance(scale, Tensor) and scale.dim() > 0
        of_rows = isinstance(scale, Tensor) and scale.shape == (*codes.shape[:-1], 1)
        plain = "row" if of_rows else "channel" if rows else "tensor"
        scale = stored_scale.given_scale(
            scale,
            codes,
            {scaling.BLOCK_SIZE: "block", storage.SQUARE: "square"}.get(block_size, plain),
        )
        scale = scale.reshape(()) if codes.dim() < 2 and scale.numel() == 1 else scale
        count = torch.as_tensor(counter, dtype=torch.int64, device=codes.device)
        if count.dim():
            raise ValueError(f"counter has shape {tuple(count.shape)}: it must be a single number")
        traits = Traits(
            fmt,
            rounding,
            fresh_seed() if seed is None else seed,
            dtype,
            block_size,
            by_operator,
            draws,
            retraction,
        )
        return cls._wrap(codes, scale, count, None, traits, requires_grad)

    @classmethod
    def _wrap(
        cls,
        codes: Tensor,
        kept_scale: Tensor,
        counter: Tensor,
        remainder: Tensor | None,
        traits: Traits,
        requires_grad: bool = False,
    ) -> Self:
        """The tensor around its parts, all set here, as ``torch.nn.Parameter`` would
        call an ``__init__``.
        """
        traits.check()
        if traits.dtype not in DTYPES:
            raise TypeError(
                f"dtype={traits.dtype}: that of an {cls.__name__} is torch.float32 or "
                f"torch.bfloat16"
            )
        how: dict[str, Any] = {
            "dtype": traits.dtype,
            "device": codes.device,
            "requires_grad": requires_grad,
        }
        self: Self = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), **how
        )
        self.codes, self.counter, self.remainder = codes, counter, remainder
        self.format, self.rounding, self.seed = traits.format, traits.rounding, traits.seed
        self.by_operator, self.draws = traits.by_operator, traits.draws
        self.retraction, self.block_size = traits.retraction, traits.block_size
        self.kept_scale, self.lent_from = kept_scale, None
        guard_memory(self)
        return self

    def _traits(self, dtype: torch.dtype | None = None) -> Traits:
        own = (self.format, self.rounding, self.seed, dtype or self.dtype, self.block_size)
        return Traits(*own, self.by_operator, self.draws, self.retraction)

    def with_parts(
        self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> Self:
        """A tensor with ``change`` of every part, such as ``clone``, that requires no
        gradient.
        """
        check_current(self)
        remainder = None if self.remainder is None else change(self.remainder)
        parts = (change(self.codes), change(self.kept_scale), change(self.counter), remainder)
        changed = self._wrap(*parts, self._traits(dtype))
        changed.stepped_by = self.stepped_by
        return changed

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """The parts that a compiler sees, by name (without the remainder, of no use to
        a graph), and all else.
        """
        if self.lent_from is not None:
            check_current(self)
        rest = (
            self.format.name,
            self.rounding,
            self.seed,
            self.dtype,
            self.block_size,
            self.by_operator,
            self.draws,
            self.retraction,
        )
        return ["codes", "kept_scale", "counter"], rest

    @classmethod
    def __metadata_guard__(cls, seen: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
        """True if code compiled for one tensor serves another: seeds, which differ from
        layer to layer, don't count.
        """
        return seen[:2] == now[:2] and seen[3:5] == now[3:5]

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Tensor], rest: tuple[Any, ...], size: Any, stride: Any
    ) -> Self:
        kept = next(parts[name] for name in _KEPT_SCALE if name in parts)
        return cls._wrap(
            parts["codes"], kept, parts["counter"], parts.get("remainder"), Traits.from_flat(rest)
        )

    def _stable_hash_for_caching(self) -> str:
        """A key that compiled code on disk is found by: all that it may depend on."""
        scales = (tuple(self.kept_scale.shape), str(self.kept_scale.dtype))
        shapes = (tuple(self.shape), *scales, str(self.device), self.requires_grad)
        return hashlib.sha256(
            repr((TRACED_AS, type(self).__name__, *shapes, self._traits().flat)).encode()
        ).hexdigest()

    def dequantize(self) -> Tensor:
        """The values as a plain tensor of the apparent dtype; not differentiable."""
        check_current(self)
        return storage.dequantize_codes(
            self.codes, self.scale, self.format, self.dtype, self.block_size
        )

    def _dequantized_view(self, replay: Replay) -> Tensor:
        """The values of a view; of a view that takes rows, only these are decoded."""
        if not takes_rows(replay) or self.dim() < 2 or storage.is_traced(self.codes):
            return super()._dequantized_view(replay)
        return self.decoded_rows(replay)

    def decoded_rows(self, take: Callable[[Tensor], Tensor]) -> Tensor:
        """The values of the rows (indices of the first dimension) that ``take`` takes."""
        check_current(self)
        codes = take(self.codes).contiguous()
        if isinstance(self.block_size, tuple) and self.dim() == 2:
            squares = take(torch.arange(self.shape[0], device=self.device)) // scaling.SQUARE_SIZE
            runs = storage.runs_of_rows(
                stored_scale.decoded_scale(self.kept_scale[squares]), self.shape[1]
            )
            return storage.decode_runs(codes, runs, self.format, self.dtype)
        scale = take(self.kept_scale) if self.kept_scale.dim() else self.kept_scale
        return storage.dequantize_codes(
            codes, stored_scale.decoded_scale(scale), self.format, self.dtype, self.block_size
        )

    def write(self, values: Tensor, operator: str = "write") -> None:
        """Round ``values`` in the tensor's mode, in place; warns where some saturate,
        or all under a scale are lost.
        """
        check_own(self)
        scale = self.expanded_scale()
        stored_scale.warn_if_saturated(values, scale, self.format)
        stored_scale.warn_if_lost(values, self.scale, self.format, self.granularity)
        codes = storage.next_codes(self, storage.divided(values, scale), self.rounding, operator)
        if (
            self.rounding == "stochastic"
            and self.exponents is None
            and not stored_scale.are_powers_of_two(self.scale)
        ):
            codes = torch.where(
                self._has(values), self.codes, codes
            )  # the division may leave them a hair off the grid
        self.codes.copy_(codes)
        self._changed()

    def adopt(self, other: "FP8Tensor") -> None:
        """Take codes, scale and remainder of ``other``, in place and exactly, as
        ``copy_`` of a tensor does.

        The counter becomes the larger one, so that no draw is used twice; in
        ``Module.load_state_dict`` the other's.

        Raises:
            TypeError: ``other`` has no codes.
            ValueError: another format or shape, or scales finer than this tensor's.
        """
        check_own(self)
        if not isinstance(other, FP8Tensor):
            raise TypeError(f"other must be an FP8Tensor, not {type(other).__name__}: use copy_")
        if other.format != self.format:
            raise ValueError(
                f"the other tensor is of {other.format.name}, but this one is of {self.format.name}"
            )
        if other.shape != self.shape:
            raise ValueError(
                f"the other tensor has shape {tuple(other.shape)}, but this one {tuple(self.shape)}"
            )
        scale = other.expanded_scale() if other.block_size != self.block_size else other.kept_scale
        if not scaling.broadcasts_to(scale.shape, self.kept_scale.shape):
            shares = (other.granularity, self.granularity)
            raise ValueError(
                "the other tensor has a scale for each {}, this one for each {}".format(*shares)
            )
        if other.block_size != self.block_size and self.exponents is not None and not self.is_share:
            scale = stored_scale.as_kept(scale, blocks=True)
        counter = other.counter
        if other.resumes:
            self.seed, self.by_operator = other.seed, other.by_operator
            self.draws, self.retraction = other.draws, other.retraction
        else:
            counter = torch.maximum(self.counter, counter.to(self.counter.device))
        self.codes.copy_(other.codes)
        write_kept(self.kept_scale, scale)
        self.counter.copy_(counter)
        left = None if other.remainder is None else other.remainder.to(self.codes.device, copy=True)
        self._changed()
        self.remainder = left

    def _in_float32(self) -> Tensor:
        check_current(self)
        return storage.dequantize_codes(
            self.codes, self.scale, self.format, torch.float32, self.block_size
        )

    def _has(self, values: Tensor) -> Tensor:
        """A mask of values that are the tensor's already, as it appears or in float32,
        to the sign of a zero.
        """
        own, bits = self._in_float32(), values.float().view(torch.int32)
        return (own.view(torch.int32) == bits) | (
            own.to(self.dtype).float().view(torch.int32) == bits
        )

    def _writes(self) -> int:
        return self.codes._version

    def _warn_of_rounding(self) -> None:
        stored_scale.warn_of_rounding(self.format)

    def _changed(self) -> None:
        """After every write: autograd, which knows of no codes, refuses what it saved;
        the last remainder is void.
        """
        if not storage.is_traced(self.codes):
            parts = [part for part in (self.codes, self.kept_scale) if not part.is_inference()]
            torch.autograd.graph.increment_version([self, *parts])
        storage.void_remainder(self)

    @property
    def manifold(self) -> FP8Manifold:
        """The manifold of the format at the tensor's scale, counting its draws in the
        tensor's own counter.
        """
        manifold = FP8Manifold(
            self.format,
            self.expanded_scale(),
            self.rounding,
            self.seed,
            draws=self.draws,
            retraction=self.retraction,
        )
        manifold.counter = self.counter
        return manifold

    def rescale_(self, scale: float | Tensor) -> Self:
        """Change the scale, by one unbiased (stochastic) rounding, exact for values
        that the new grid has.

        With an optimizer's residual, the sum of weight and residual is preserved,
        rounded to 1/256 of a step.

        Args:
            scale: as in :meth:`set_scale_`, and wide enough for all stored values, or
                ValueError is raised.

        Example:
            >>> w = FP8Tensor(torch.tensor([1.0, 0.25]), "E4M3", scale=0.125)
            >>> w.rescale_(2.0).tolist()
            [1.0, 0.25]
        """
        left = (entry := stored_scale.entry_of(self)).get("residual")
        new = stored_scale.other_scale(self, scale).expand(self.kept_scale.shape)
        stored_scale.check_covers(new, stored_scale.largest_of(self, left), self.format)
        _LOG.info(
            "%s of shape %s: %s",
            self.format.name,
            tuple(self.shape),
            stored_scale.describe_change(self.scale, new),
        )
        if left is not None:
            stored_scale.rewrite_together(self, left, new)
        else:
            units = storage.dequantize_codes(
                self.codes, self.scale / new, self.format, torch.float32, self.block_size
            )
            self.codes.copy_(storage.next_codes(self, units, "stochastic", "rescale_"))
        entry.pop("reference", None)  # S_ref is of the old spacing: the next step computes it again
        return self.set_scale_(new)

    def adapt_scale_(self, headroom: float | None = None) -> bool:
        """Widen or narrow each scale as :func:`fp8manifold.widened_scale` says; True if
        one changed.

        Args:
            headroom: as in the constructor, 1 or more.

        Example:
            >>> w = FP8Tensor(torch.tensor([448.0, 1.0]), "E4M3", scale=1.0)
            >>> w.adapt_scale_(headroom=2.0), w.scale.item(), w.tolist(), w.adapt_scale_(headroom=2.0)
            (True, 2.0, [448.0, 1.0], False)
        """
        largest = stored_scale.largest_of(self, stored_scale.entry_of(self).get("residual"))
        new = scaling.widened_scale(
            largest, self.scale, self.format, stored_scale.own_headroom(self.format, headroom)
        )
        if changes := bool((new != self.scale).any()):
            self.rescale_(new)
        return changes

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.with_parts(Tensor.clone)
        twin.arithmetic, twin.is_detached = Arithmetic(), self.is_bare
        twin.requires_grad_(self.requires_grad)
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Parts and options, in types that ``torch.load(weights_only=True)`` takes."""
        names, rest = self.__tensor_flatten__()
        parts = {
            name: part
            for name in (*names, "remainder")
            if (part := getattr(self, name)) is not None
        }
        return _rebuild, (type(self), parts, rest, self.requires_grad)

    # Torch has no annotation
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        values = (
            "..." if storage.is_traced(self.codes) else repr(self.dequantize())[len("tensor(") : -1]
        )
        store = f"format={self.format.name}, scale={stored_scale.describe_scale(self.scale)}"
        shape = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}"
        return f"{type(self).__name__}({values}, {store}, {shape}{', requires_grad=True' * self.requires_grad})"


def _rebuild(
    cls: type[FP8Tensor], parts: dict[str, Tensor], rest: tuple[Any, ...], requires_grad: bool
) -> FP8Tensor:
    tensor = cls.__tensor_unflatten__(parts, rest, None, None)
    tensor.requires_grad_(requires_grad)
    return tensor


torch.serialization.add_safe_globals([_rebuild, FP8Tensor])
