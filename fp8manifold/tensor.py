"""Weights that live in one byte each, usable as any tensor is.

An ``FP8Tensor`` has no floats. It is a wrapper around four tensors, its parts:
``codes`` (uint8), ``kept_scale``, ``counter`` (of stochastic writes) and ``remainder``
(or None). Its constants (format, rounding, seed, ...) are its ``Traits``.

- Making one: the constructor rounds floats, ``from_codes`` takes codes, and ``_wrap``
  puts the parts together.
- Reading: ``dequantize`` decodes all, ``decoded_rows`` some rows.
- Writing: ``write`` rounds values at the present scale, ``adopt`` copies another
  tensor's codes, ``rescale_`` changes the scale. Each ends with ``_changed``, which
  tells autograd.

What torch's operators do with it is in ``_encoded/dispatch.py``.
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
    ScaledTensor,
    Traits,
    WriteRounding,
    check_current,
    check_not_lent,
    write_scale,
)
from fp8manifold._numerics.charts import Retraction
from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.manifolds import FP8Manifold
from fp8manifold.random_bits import Draws, fresh_seed

__all__ = ["FP8Tensor"]

_LOG: Final = logging.getLogger("fp8manifold")
_NAMES_OF_KEPT_SCALE: Final = ("kept_scale", "exponents", "scale")
"""The name of that part, and those in files of earlier versions."""
_BLOCK_SIZES_BY_GRANULARITY: Final[dict[str, storage.BlockSize]] = {
    "block": scaling.BLOCK_SIZE,
    "square": storage.SQUARE,
}


class FP8Tensor(ScaledTensor):
    r"""A tensor of codes of at most eight bits, and of scales that its values share.

    .. math:: w = s \cdot \operatorname{decode}(code)

    By default scales are powers of two, so the product is exact. With a given ``scale``
    it is rounded to float32, and from there to bfloat16. To torch this is a float32 or
    bfloat16 tensor, which operators decode when they run. In-place operators (``add_``,
    a torch optimizer's) run in float32 and round the result at the same scale. Writes
    that replace all values may choose a new scale: ``normal_`` does, and so do copied
    floats that would saturate or vanish.

    Args:
        w: float tensor of any shape; rounded to nearest.
        fmt: a format or its name. None takes the format of ``w`` if ``w`` is in codes,
            and E4M3 otherwise.
        granularity: one scale for the ``tensor``, each ``channel`` (index of the first
            dimension), each ``row`` of the last dimension, each ``block`` of 32 along
            it, or each ``square`` of 128 x 128 in the last two.
        headroom: how many times the largest value may grow before it saturates, as in
            :func:`fp8manifold.storage_scale`. Here None may go down to 1 in a format of
            few binades; other libraries' optimizers need 2 or more.
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
    code and Inf saturates. -0 is preserved if the layout has it. An empty tensor has no
    codes and a scale of 1.

    Raises:
        TypeError: ``w`` is not a float tensor, or an option has another type.
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
    rounding: WriteRounding
    seed: int
    by_operator: bool
    draws: Draws
    retraction: Retraction
    filled: int | None = None
    """The version of ``codes`` at which every scale had a weight other than 0.

    An optimizer sets it, and does not look again at that version.
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
        rounding: WriteRounding = "stochastic",
        seed: int | None = None,
        dtype: torch.dtype | None = None,
        keep_remainder: bool = False,
        draws: Draws = "independent",
        retraction: Retraction = "exponential",
        requires_grad: bool = False,
    ) -> Self:
        working_dtype(w, "w")
        check_choice("granularity", granularity, scaling.STORED_GRANULARITIES)
        w = w.detach()
        fmt = as_format(fmt or (w.format if isinstance(w, FP8Tensor) else "E4M3"))
        if dtype is None:
            dtype = w.dtype if w.dtype in DTYPES else torch.float32
        granularity = _granularity_of_shape(granularity, w)
        headroom = stored_scale.headroom_or_usual(fmt, headroom)
        if scale is None:
            kept_scale = stored_scale.fresh_scale(w, fmt, granularity, headroom)
        else:
            kept_scale = stored_scale.chosen_scale(scale, w, granularity)
        block_size = _BLOCK_SIZES_BY_GRANULARITY.get(granularity)
        expanded_scale = storage.expand_scale(
            stored_scale.decoded_scale(kept_scale), block_size, w.shape
        )
        codes, remainder = storage.codes_of(w, expanded_scale, fmt, keep_remainder=keep_remainder)
        traits = Traits(
            fmt,
            rounding,
            fresh_seed() if seed is None else seed,
            dtype,
            block_size,
            draws=draws,
            retraction=retraction,
        )
        counter = w.new_zeros((), dtype=torch.int64)
        return cls._wrap(codes, kept_scale, counter, remainder, traits, requires_grad)

    @classmethod
    def from_float(cls, w: Tensor, fmt: FormatLike | None = None, **options: Any) -> Self:
        """Make a tensor in codes by rounding floats, with the constructor's options."""
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
        rounding: WriteRounding = "stochastic",
        seed: int | None = None,
        dtype: torch.dtype = torch.float32,
        by_operator: bool = True,
        draws: Draws = "independent",
        retraction: Retraction = "exponential",
        requires_grad: bool = False,
    ) -> Self:
        """Make a tensor of codes and scales.

        They are not copied, except for scales of blocks that are powers of two.

        Args:
            codes: uint8, contiguous.
            scale: float32, positive and normal, in a shape of the attribute, or uint8
                exponents (E8M0) of blocks.
            fmt: as in the constructor.
            block_size: 32 for one scale per block, ``(128, 128)`` for one per square,
                otherwise None.
            counter: stochastic writes so far.
            rounding: as in the constructor.
            seed: as in the constructor.
            dtype: as in the constructor.
            by_operator: whether random bits depend on the name of the operator that
                writes.
            draws: as in the constructor.
            retraction: as in the constructor.
            requires_grad: as in the constructor.

        Raises:
            TypeError: ``codes`` is not uint8.
            ValueError: a code that is Inf or beyond the format's width, or a scale that
                does not fit.

        Example:
            >>> codes = torch.tensor([56], dtype=torch.uint8)
            >>> FP8Tensor.from_codes(codes, torch.tensor(0.5), "E4M3").tolist()
            [0.5]
        """
        fmt = as_format(fmt)
        codes = storage.checked_codes(codes, fmt)
        # files of JSON have lists
        if isinstance(block_size, list):
            block_size = tuple(block_size)  # type: ignore[assignment]
        if block_size not in (None, scaling.BLOCK_SIZE, storage.SQUARE):
            raise ValueError(
                f"block_size={block_size!r} must be {scaling.BLOCK_SIZE}, {storage.SQUARE} or None"
            )
        granularity = _granularity_of_scale(scale, codes, block_size)
        kept_scale = stored_scale.chosen_scale(scale, codes, granularity)
        if codes.dim() < 2 and kept_scale.numel() == 1:
            kept_scale = kept_scale.reshape(())
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
        return cls._wrap(codes, kept_scale, count, None, traits, requires_grad)

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
        """Make the tensor around its parts.

        All attributes are set here: there is no ``__init__``, as ``torch.nn.Parameter``
        would call it with other arguments.
        """
        traits.check()
        if traits.dtype not in DTYPES:
            raise TypeError(
                f"dtype={traits.dtype}: that of an {cls.__name__} is torch.float32 or "
                f"torch.bfloat16"
            )
        self: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            codes.shape,
            strides=codes.stride(),
            dtype=traits.dtype,
            device=codes.device,
            requires_grad=requires_grad,
        )
        self.codes = codes
        self.kept_scale = kept_scale
        self.counter = counter
        self.remainder = remainder
        self.format = traits.format
        self.rounding = traits.rounding
        self.seed = traits.seed
        self.block_size = traits.block_size
        self.by_operator = traits.by_operator
        self.draws = traits.draws
        self.retraction = traits.retraction
        self.lent_from = None
        guard_memory(self)
        return self

    def _traits(self, dtype: torch.dtype | None = None) -> Traits:
        """Return the constants of this tensor, or of one like it of another dtype."""
        return Traits(
            self.format,
            self.rounding,
            self.seed,
            dtype or self.dtype,
            self.block_size,
            self.by_operator,
            self.draws,
            self.retraction,
        )

    def with_parts(
        self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> Self:
        """Return a tensor whose parts are ``change(part)``, such as clones.

        It requires no gradient.
        """
        check_current(self)
        remainder = None if self.remainder is None else change(self.remainder)
        changed = self._wrap(
            change(self.codes),
            change(self.kept_scale),
            change(self.counter),
            remainder,
            self._traits(dtype),
        )
        changed.stepped_by = self.stepped_by
        return changed

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """Return the names of the parts that a compiler sees, and the constants.

        The remainder is no such part: it is of no use to a graph.
        """
        if self.lent_from is not None:
            check_current(self)
        return ["codes", "kept_scale", "counter"], self._traits().flat

    @classmethod
    def __metadata_guard__(cls, compiled: tuple[Any, ...], present: tuple[Any, ...]) -> bool:
        """Return True if code compiled for one tensor serves another.

        Seeds, which differ from layer to layer, don't count.
        """
        # format and rounding, dtype and block size
        return compiled[:2] == present[:2] and compiled[3:5] == present[3:5]

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Tensor], rest: tuple[Any, ...], size: Any, stride: Any
    ) -> Self:
        kept_scale = next(parts[name] for name in _NAMES_OF_KEPT_SCALE if name in parts)
        return cls._wrap(
            parts["codes"],
            kept_scale,
            parts["counter"],
            parts.get("remainder"),
            Traits.from_flat(rest),
        )

    def _stable_hash_for_caching(self) -> str:
        """Return a key of all that compiled code on disk may depend on."""
        facts = (
            TRACED_AS,
            type(self).__name__,
            tuple(self.shape),
            tuple(self.kept_scale.shape),
            str(self.kept_scale.dtype),
            str(self.device),
            self.requires_grad,
            self._traits().flat,
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def dequantize(self) -> Tensor:
        """Return the values in the apparent dtype; no gradient flows through them."""
        check_current(self)
        return storage.dequantize_codes(
            self.codes, self.scale, self.format, self.dtype, self.block_size
        )

    def _in_float32(self) -> Tensor:
        check_current(self)
        return storage.dequantize_codes(
            self.codes, self.scale, self.format, torch.float32, self.block_size
        )

    def _dequantized_view(self, replay: Replay) -> Tensor:
        """Return the values of a view, decoding only its rows if it is of rows."""
        if not takes_rows(replay) or self.dim() < 2 or storage.is_traced(self.codes):
            return super()._dequantized_view(replay)
        return self.decoded_rows(replay)

    def decoded_rows(self, take: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the values of the rows (dimension 0) that ``take`` selects."""
        check_current(self)
        codes = take(self.codes).contiguous()
        if isinstance(self.block_size, tuple) and self.dim() == 2:
            rows = take(torch.arange(self.shape[0], device=self.device))
            square_scale = self.kept_scale[rows // scaling.SQUARE_SIZE]
            runs = storage.runs_of_rows(stored_scale.decoded_scale(square_scale), self.shape[1])
            return storage.decode_runs(codes, runs, self.format, self.dtype)
        kept_scale = take(self.kept_scale) if self.kept_scale.dim() else self.kept_scale
        scale = stored_scale.decoded_scale(kept_scale)
        return storage.dequantize_codes(codes, scale, self.format, self.dtype, self.block_size)

    def write(self, values: Tensor, operator: str = "write") -> None:
        """Round ``values`` as ``rounding`` says, at the present scale, in place.

        Warns if values saturate, or if all values under a scale are too small for it.
        """
        check_not_lent(self)
        scale = self.expanded_scale()
        stored_scale.warn_if_saturated(values, scale, self.format)
        stored_scale.warn_if_lost(values, self.scale, self.format, self.granularity)
        units = storage.divided(values, scale)
        codes = storage.next_codes(self, units, self.rounding, operator)
        if self.rounding == "stochastic" and not self._divides_exactly():
            # division leaves values that were on the grid a hair off it
            codes = torch.where(self._has_values(values), self.codes, codes)
        self.codes.copy_(codes)
        self._changed()

    def _divides_exactly(self) -> bool:
        """Return True if division by the scale rounds nothing."""
        return self.exponents is not None or stored_scale.are_powers_of_two(self.scale)

    def _has_values(self, values: Tensor) -> Tensor:
        """Return a mask of values that are the tensor's already, to the sign of a zero.

        They may be as it appears, or in float32.
        """
        bits = values.float().view(torch.int32)
        present = self._in_float32()
        apparent = present.to(self.dtype).float()
        return (present.view(torch.int32) == bits) | (apparent.view(torch.int32) == bits)

    def adopt(self, other: "FP8Tensor") -> None:
        """Take codes, scale and remainder of another tensor, in place and exactly.

        ``copy_`` of a tensor in codes does this. The counter becomes the larger of the
        two, so that no draw is used twice; in ``Module.load_state_dict`` it becomes the
        other tensor's.

        Raises:
            TypeError: the source has no codes.
            ValueError: another format or shape, or scales finer than this tensor's.
        """
        check_not_lent(self)
        kept_scale = self._scale_to_adopt(other)
        counter = other.counter
        if other.resumes:
            self.seed = other.seed
            self.by_operator = other.by_operator
            self.rounding = other.rounding
            self.draws = other.draws
            self.retraction = other.retraction
        else:
            counter = torch.maximum(self.counter, counter.to(self.counter.device))
        self.codes.copy_(other.codes)
        write_scale(self.kept_scale, kept_scale)
        self.counter.copy_(counter)
        remainder = other.remainder
        if remainder is not None:
            remainder = remainder.to(self.codes.device, copy=True)
        self._changed()
        self.remainder = remainder

    def _scale_to_adopt(self, source: "FP8Tensor") -> Tensor:
        """Return the scale of another tensor as this one stores it, or raise."""
        if not isinstance(source, FP8Tensor):
            raise TypeError(f"other must be an FP8Tensor, not {type(source).__name__}: use copy_")
        if source.format != self.format:
            raise ValueError(
                f"the other tensor is in {source.format.name}, but this one is in "
                f"{self.format.name}"
            )
        if source.shape != self.shape:
            raise ValueError(
                f"the other tensor has shape {tuple(source.shape)}, but this one has "
                f"{tuple(self.shape)}"
            )
        has_other_blocks = source.block_size != self.block_size
        scale = source.expanded_scale() if has_other_blocks else source.kept_scale
        if not scaling.broadcasts_to(scale.shape, self.kept_scale.shape):
            raise ValueError(
                f"the other tensor has a scale for each {source.granularity}, but this one for "
                f"each {self.granularity}"
            )
        if has_other_blocks and self.exponents is not None and not self.is_shard:
            return stored_scale.as_kept(scale, blocks=True)
        return scale

    def _write_count(self) -> int:
        return self.codes._version

    def _warn_of_rounding(self) -> None:
        stored_scale.warn_of_rounding(self.format)

    def _changed(self) -> None:
        """Do what is due after every write.

        Autograd, which knows of no codes, then refuses to use what it saved of this
        tensor. The last remainder is void.
        """
        if not storage.is_traced(self.codes):
            parts = [part for part in (self.codes, self.kept_scale) if not part.is_inference()]
            torch.autograd.graph.increment_version([self, *parts])
        storage.void_remainder(self)

    @property
    def manifold(self) -> FP8Manifold:
        """The manifold of the format at the tensor's scale.

        It counts its draws in the tensor's own counter.
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
        """Change the scale, by one unbiased (stochastic) rounding.

        Values that are on the new grid do not change.

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
        state = stored_scale.optimizer_state_of(self)
        residual = state.get("residual")
        new = stored_scale.replacement_scale(self, scale).expand(self.kept_scale.shape)
        largest = stored_scale.largest_with_residual(self, residual)
        stored_scale.check_covers(new, largest, self.format)
        _LOG.info(
            "%s of shape %s: %s",
            self.format.name,
            tuple(self.shape),
            stored_scale.describe_change(self.scale, new),
        )
        if residual is not None:
            stored_scale.rewrite_with_residual(self, residual, new)
        else:
            units = storage.dequantize_codes(
                self.codes, self.scale / new, self.format, torch.float32, self.block_size
            )
            self.codes.copy_(storage.next_codes(self, units, "stochastic", "rescale_"))
        # S_ref is of the old spacing: the next step computes it again
        state.pop("reference", None)
        return self.set_scale_(new)

    def adapt_scale_(self, headroom: float | None = None) -> bool:
        """Widen or narrow each scale as :func:`fp8manifold.widened_scale` does.

        Args:
            headroom: as in the constructor, 1 or more.

        Returns:
            True if a scale changed.

        Example:
            >>> w = FP8Tensor(torch.tensor([448.0, 1.0]), "E4M3", scale=1.0)
            >>> w.adapt_scale_(headroom=2.0), w.scale.item(), w.tolist()
            (True, 2.0, [448.0, 1.0])
            >>> w.adapt_scale_(headroom=2.0)
            False
        """
        residual = stored_scale.optimizer_state_of(self).get("residual")
        largest = stored_scale.largest_with_residual(self, residual)
        headroom = stored_scale.headroom_or_usual(self.format, headroom)
        new = scaling.widened_scale(largest, self.scale, self.format, headroom)
        changes = bool((new != self.scale).any())
        if changes:
            self.rescale_(new)
        return changes

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.with_parts(Tensor.clone)
        twin.stepped_by = None
        twin.arithmetic = Arithmetic()
        twin.is_detached = self.is_bare
        twin.requires_grad_(self.requires_grad)
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle parts and constants, in types that ``weights_only=True`` loads."""
        names, constants = self.__tensor_flatten__()
        parts = {name: getattr(self, name) for name in names}
        if self.remainder is not None:
            parts["remainder"] = self.remainder
        return _rebuild, (type(self), parts, constants, self.requires_grad)

    # Torch has no annotation
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        values = "..."
        if not storage.is_traced(self.codes):
            values = repr(self.dequantize()).removeprefix("tensor(").removesuffix(")")
        facts = [
            values,
            f"format={self.format.name}",
            f"scale={stored_scale.describe_scale(self.scale)}",
            f"shape={tuple(self.shape)}",
            f"dtype={self.dtype}",
            f"device={self.device}",
        ]
        if self.requires_grad:
            facts.append("requires_grad=True")
        return f"{type(self).__name__}({', '.join(facts)})"


def _granularity_of_shape(
    granularity: scaling.StoredGranularity, w: Tensor
) -> scaling.StoredGranularity:
    """Return the simplest granularity that is the same for the shape of ``w``."""
    if granularity not in ("channel", "row") or w.dim() > 2:
        return granularity
    return "channel" if w.dim() == 2 else "tensor"


def _granularity_of_scale(
    scale: float | Tensor, codes: Tensor, block_size: storage.BlockSize
) -> scaling.StoredGranularity:
    """Return the granularity that a scale of this block size and shape has."""
    if block_size == scaling.BLOCK_SIZE:
        return "block"
    if block_size == storage.SQUARE:
        return "square"
    if not isinstance(scale, Tensor):
        return "tensor"
    if scale.shape == (*codes.shape[:-1], 1):
        return "row"
    return "channel" if scale.dim() else "tensor"


def _rebuild(
    cls: type[FP8Tensor], parts: dict[str, Tensor], rest: tuple[Any, ...], requires_grad: bool
) -> FP8Tensor:
    tensor = cls.__tensor_unflatten__(parts, rest, None, None)
    tensor.requires_grad_(requires_grad)
    return tensor


torch.serialization.add_safe_globals([_rebuild, FP8Tensor])
