"""What codes are multiplied by: float32 powers of two, of which blocks keep the exponents alone, a byte each."""

from typing import Any, Self

from torch import Tensor

from fp8manifold._encoded.dispatch import EncodedTensor
from fp8manifold._encoded.exponents import decoded_scale, expand_kept, exponents_of
from fp8manifold._encoded.lent import Lent, check_own
from fp8manifold._encoded.squares import BlockSize
from fp8manifold._encoded.storage import largest_magnitude
from fp8manifold._encoded.stored_scale import broadcasts_to, power_of_two, scale_in_float32
from fp8manifold.formats import FloatFormat

__all__ = ["ScaledTensor", "as_kept"]


class ScaledTensor(EncodedTensor):
    """Codes of a format, and their scales."""

    codes: Tensor
    exponents: Tensor | None
    format: FloatFormat
    block_size: BlockSize
    lent_from: Lent | None
    """Of a cast under autocast, whose codes they are, and their versions."""
    _scale: Tensor | None

    def _keep_scale(self, kept: Tensor, block_size: BlockSize) -> None:
        """Hold the memory of scales, uint8 where blocks have them."""
        self.block_size, self.lent_from = block_size, None
        self._scale, self.exponents = (kept, None) if block_size is None else (None, kept)

    @property
    def kept_scale(self) -> Tensor:
        """The memory of the scales: ``exponents`` of blocks, otherwise ``scale`` itself."""
        kept = self.exponents if self.block_size else self._scale
        assert kept is not None
        return kept

    @property
    def scale(self) -> Tensor:
        """The scales, float32; of blocks a copy, made when it is asked for."""
        return decoded_scale(self.kept_scale) if self.block_size else self.kept_scale

    @scale.setter
    def scale(self, scale: Tensor) -> None:
        if self.block_size:
            self.set_scale_(scale)
        else:
            self._scale = scale

    @property
    def granularity(self) -> str:
        """``tensor``, ``channel``, ``row``, ``block`` or ``square``: what shares a scale."""
        if isinstance(self.block_size, tuple):
            return "square"
        if self.block_size or not self.kept_scale.dim():
            return "block" if self.block_size else "tensor"
        return "row" if any(size != 1 for size in self.kept_scale.shape[1:]) else "channel"

    def expanded_scale(self) -> Tensor:
        """The scale in a shape that broadcasts against the values."""
        return expand_kept(self.kept_scale, self.block_size, self.codes.shape)

    def largest(self) -> Tensor:
        """The largest stored magnitude under each scale, in value; of the shape of ``scale``."""
        return largest_magnitude(self.codes, self.scale, self.format, self.block_size)

    def set_scale_(self, scale: float | Tensor) -> Self:
        """Write other scales, for all that share them; the codes stay, so that their values change with the scales.

        Args:
            scale: powers of two, of blocks from 2^-126 to 2^127; a number, or a tensor that broadcasts to the shape of
                ``scale``.

        Raises:
            TypeError: uint8, which might be exponents.
            ValueError: a scale that is no such power of two, or does not fit.

        Example:
            >>> import torch
            >>> from fp8manifold import FP8Tensor
            >>> w = FP8Tensor(torch.ones(1, 64), "E4M3", granularity="block", scale=0.5)
            >>> w.set_scale_(torch.tensor([[0.5, 1.0]])).unique().tolist(), w.exponents.tolist()
            ([1.0, 2.0], [[126, 127]])
        """
        check_own(self)
        new, kept = scale_in_float32(scale, self.device), self.kept_scale
        if not broadcasts_to(new.shape, kept.shape):
            raise ValueError(f"scale has shape {tuple(new.shape)}: it must fit {tuple(kept.shape)}")
        kept.copy_(as_kept(self, new))
        self._changed()
        return self

    def _changed(self) -> None:
        """After every write."""
        raise NotImplementedError


def as_kept(own: Any, scale: Tensor) -> Tensor:
    """A float32 scale as a tensor of codes keeps its own.

    Raises:
        ValueError: an entry that is no power of two, or of blocks one beyond 2^-126 to 2^127.
    """
    return exponents_of(scale) if own.block_size else power_of_two(scale)
