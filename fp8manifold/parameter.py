"""A parameter that takes one byte per weight, on the manifold of its format."""

from typing import Any, Self

import torch
from torch import Tensor

from fp8manifold._geoopt_import import ManifoldParameter
from fp8manifold.formats import FormatLike
from fp8manifold.tensor import FP8Tensor

__all__ = ["FP8Parameter"]


class FP8Parameter(FP8Tensor, ManifoldParameter):  # type: ignore[misc]  # geoopt is untyped
    r"""An :class:`FP8Tensor` to train: a parameter for torch and for geoopt.

    .. math:: w = s \cdot \operatorname{decode}(code)

    Gradients are ordinary tensors of the apparent dtype. ``manifold`` is the
    :class:`FP8Manifold` of its format and scale, so geoopt's RiemannianAdam and
    RiemannianSGD step it on the grid. NaN, Inf, -0 and empty tensors are treated as in
    :class:`FP8Tensor`.

    Args:
        w, fmt: as in :class:`FP8Tensor`.
        options: ``granularity``, ``headroom``, ``scale``, ``rounding``, ``draws``,
            ``retraction``, ``seed``, ``dtype`` and ``keep_remainder``, as in
            :class:`FP8Tensor`, and ``requires_grad``, True by default.

    An :class:`FP8Tensor` without options, or with a parameter's attributes as options,
    shares its codes and scales.

    Raises:
        TypeError, ValueError: as :class:`FP8Tensor`.

    Example:
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight = FP8Parameter(torch.tensor([[0.5, -0.25]]), "E4M3")
        >>> layer(torch.ones(1, 2)).backward()
        >>> layer.weight.grad.tolist(), layer.weight.codes.dtype
        ([[1.0, 1.0]], torch.uint8)
    """

    @staticmethod
    def __new__(cls: type[Self], w: Tensor, fmt: FormatLike | None = None, **options: Any) -> Self:
        # accelerate and PEFT remake a parameter as type(p)(p, **vars(p)): the options
        # are then its own attributes, codes among them
        shares_codes = "codes" in options or not options.keys() - {"requires_grad"}
        if isinstance(w, FP8Tensor) and fmt is None and shares_codes:
            requires_grad = bool(options.get("requires_grad", True))
            return cls._wrap(
                w.codes, w.kept_scale, w.counter, w.remainder, w._traits(), requires_grad
            )
        return FP8Tensor.__new__(cls, w, fmt, **{"requires_grad": True, **options})


torch.serialization.add_safe_globals([FP8Parameter])
