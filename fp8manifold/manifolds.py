"""A float format as a geoopt manifold: the continuous one of its stiffness, and the
grid itself.
"""

from typing import Any, Literal, get_args

import geoopt
import torch
from torch import Tensor

from fp8manifold._base.checks import check_choice, check_int
from fp8manifold._base.float_bits import working_dtype
from fp8manifold._numerics.charts import RETRACTIONS, Metric, Retraction, chart_of, clamp_to_ends
from fp8manifold.formats import LAYOUTS, FloatFormat, FormatLike, as_format
from fp8manifold.grid import round_to_grid
from fp8manifold.random_bits import Draws
from fp8manifold.scaling import broadcasts_to, check_is_scale, check_positive

__all__ = ["FP8Manifold", "StiffnessManifold"]

ScaleLike = float | Tensor


class StiffnessManifold(geoopt.Manifold):  # type: ignore[misc]  # geoopt is untyped
    """The interval ``[-s max, s max]`` with the metric ``1 / S^2``: lengths are counted
    in ULPs.

    With chart phi and spacing ``S_1`` of the metric at scale 1 (for ``ulp``
    :func:`fp8manifold.to_chart` and
    :func:`fp8manifold.ulp`), scale ``s``, and ``u``, ``v`` tangent at ``x``:

    .. math::

        S(x) &= s \\, S_1(x / s), & \\langle u, v \\rangle_x &= u v / S(x)^2, \\\\
        \\exp_x(u) &= s \\varphi^{-1}(\\varphi(x/s) + u / S(x)), &
        \\log_x(y) &= S(x) (\\varphi(y/s) - \\varphi(x/s)), \\\\
        d(x, y) &= |\\varphi(x/s) - \\varphi(y/s)|, & \\Gamma_{x \\to y} u &= u \\, S(y) / S(x), \\\\
        \\operatorname{grad} f &= S(x)^2 \\nabla f.

    It is one-dimensional in every element (``ndim = 0``), and ends at ``+-s max``,
    where ``expmap`` and ``projx`` stop, Inf included. Under ``ulp`` it is piecewise
    flat, not smooth: ``S`` jumps at powers of two, where ``exp_x`` has a derivative of
    1 away from zero and of 1/2 towards it. +0 and -0 are one point. NaN stays NaN, and
    an empty tensor empty.

    Args:
        fmt: a format or its name.
        scale: positive; a number, or a tensor that broadcasts against the points (for
            example one entry per row).
        metric: ``ulp`` (the format's own spacing), ``log``
            (``S = max(|x|, 2^emin) 2^-M``), ``euclidean`` (``S = 1``), or a positive
            function ``S(x, fmt)``, taken midway between neighbours of the grid.

    Raises:
        TypeError, ValueError: a format, scale or metric of another type or unknown, or
            a scale that is not positive.

    Example:
        >>> manifold = StiffnessManifold("E4M3")
        >>> x, y = torch.tensor([1.0, -0.5]), torch.tensor([2.0, 0.25])
        >>> manifold.dist(x, y).tolist()  # representable steps
        [8.0, 88.0]
        >>> manifold.expmap(x, manifold.logmap(x, y)).tolist()
        [2.0, 0.25]

    Source: Amid and Warmuth 2020 (a mirror-descent potential); geoopt (Kochurov et al.
    2020) for the interface.
    """

    __scaling__ = geoopt.Manifold.__scaling__.copy()
    name = "Stiffness"
    ndim = 0
    reversible = True

    scale: Tensor
    format_fields: Tensor

    def __init__(self, fmt: FormatLike, scale: ScaleLike = 1.0, metric: Metric = "ulp") -> None:
        super().__init__()
        self.format = as_format(fmt)
        self.metric = metric
        self._chart = chart_of(self.format, metric)
        end = torch.tensor(self.format.max, dtype=torch.float64, device="cpu")
        self._steps_to_end = float(self._chart.forward(end))
        self.register_buffer("scale", _checked_scale(scale))
        self.register_buffer("format_fields", torch.tensor(_fields(self.format)))

    def stiffness(self, x: Tensor) -> Tensor:
        """One ULP at ``x``, in value, in the shape of ``x`` and the scale together; at
        NaN the largest, or NaN.
        """
        wide, scale = self._working(x)
        return (self._chart.stiffness(self._inside(wide / scale)) * scale).to(x.dtype)

    def to_chart(self, x: Tensor) -> Tensor:
        """The coordinate of ``x``: steps from zero."""
        wide, scale = self._working(x)
        return self._chart.forward(self._inside(wide / scale)).to(x.dtype)

    def from_chart(self, c: Tensor) -> Tensor:
        """The point at the coordinate ``c``, in steps from zero; ``+-s max`` beyond the
        ends.
        """
        wide, scale = self._working(c, "c")
        return (self._inside(self._chart.inverse(wide)) * scale).to(c.dtype)

    def inner(
        self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False
    ) -> Tensor:
        """``u v / S(x)^2``, element by element (``keepdim`` changes nothing, as
        ``ndim`` is 0).
        """
        return self.component_inner(x, u, v)

    def component_inner(self, x: Tensor, u: Tensor, v: Tensor | None = None) -> Tensor:
        """``(u / S)(v / S)``: divided first, because S^2 can leave the range of
        float32.
        """
        _check_vectors(u, u if v is None else v)
        stiffness = self.stiffness(x)
        steps = u / stiffness
        return steps * (steps if v is None else v / stiffness)

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """``|u| / S(x)``: the length of ``u`` in ULPs."""
        _check_vectors(u)
        return (u / self.stiffness(x)).abs()

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """``S(x)^2 u``."""
        _check_vectors(u)
        stiffness = self.stiffness(x)
        return u * stiffness * stiffness

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """``u``: every number is a tangent vector."""
        return u.expand(torch.broadcast_shapes(x.shape, u.shape))

    def projx(self, x: Tensor) -> Tensor:
        """The nearest point of the interval."""
        scale = self._scale_for(x)
        return torch.minimum(torch.maximum(x, -scale * self.format.max), scale * self.format.max)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """``u / S(x)`` steps from ``x``, stopping at the ends; ``x`` itself, bit for
        bit, where ``u`` is 0.
        """
        _check_vectors(u)
        still = x - (u.detach() - u)  # x to the bit where u is 0, with derivative 1 to u
        return torch.where(u == 0, still, (self._moved(x, u) * self._working(x)[1]).to(x.dtype))

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """The exponential map."""
        return self.expmap(x, u)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """``S(x) (phi(y) - phi(x))``."""
        return self.stiffness(x) * (self.to_chart(y) - self.to_chart(x))

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """``|phi(x) - phi(y)|``: between points of the grid, the number of
        representable steps.
        """
        return (self.to_chart(x) - self.to_chart(y)).abs()

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """``v S(y) / S(x)``: the same number of ULPs at ``y``."""
        _check_vectors(v)
        return v * (self.stiffness(y) / self.stiffness(x))

    def random(
        self, *size: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> geoopt.ManifoldTensor:
        """Points uniform in the metric's own volume: every step between neighbours is
        as likely.
        """
        top = self.to_chart(
            self.scale.to(dtype=dtype or torch.get_default_dtype(), device=device) * self.format.max
        )
        uniform = torch.rand(*size, dtype=dtype, device=device) * 2 - 1
        self._assert_check_shape(uniform.shape, "x")
        return geoopt.ManifoldTensor(self.projx(self.from_chart(uniform * top)), manifold=self)

    def origin(
        self,
        *size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        seed: int | None = 42,
    ) -> geoopt.ManifoldTensor:
        """Zeros, the fixed point of the symmetry (``seed`` is part of geoopt's
        signature; nothing is drawn).
        """
        return geoopt.ManifoldTensor(torch.zeros(*size, dtype=dtype, device=device), manifold=self)

    def extra_repr(self) -> str:
        """Format, scale and metric."""
        scale = (
            f"{self.scale.item():g}"
            if self.scale.numel() == 1
            else f"tensor of shape {tuple(self.scale.shape)}"
        )
        metric = getattr(self.metric, "__name__", self.metric)
        return f"{self.format.name}, scale={scale}, metric={metric}"

    def _moved(self, x: Tensor, u: Tensor) -> Tensor:
        """``exp_x(u)`` in units of the scale, in the dtype that the chart is computed
        in.
        """
        wide, scale = self._working(x)
        inside = self._inside(wide / scale)
        beyond = 2 * self._steps_to_end + 1  # past either end from anywhere, and far from overflow
        steps = (u / (self._chart.stiffness(inside) * scale)).clamp(-beyond, beyond)
        return self._inside(self._chart.shift(inside, steps))

    def _inside(self, x: Tensor) -> Tensor:
        return clamp_to_ends(x, self.format.max)

    def _working(self, x: Tensor, name: str = "x") -> tuple[Tensor, Tensor]:
        """``x`` and the scale in the dtype that the chart is computed in."""
        work = working_dtype(x, name)
        return x.to(work), self.scale.to(work)

    def _scale_for(self, x: Tensor) -> Tensor:
        working_dtype(x)  # refuses integers, which would truncate the scale
        return self.scale.to(x.dtype)

    def _check_shape(self, shape: Any, name: str) -> tuple[bool, str | None]:
        """A point must have a shape that the scale broadcasts to without widening it."""
        if broadcasts_to(self.scale.shape, torch.Size(shape)):
            return True, None
        return (
            False,
            f"{name} has shape {tuple(shape)}: the scale of shape {tuple(self.scale.shape)} does "
            f"not fit",
        )

    def _check_point_on_manifold(
        self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        limit = self._scale_for(x) * self.format.max
        if bool((x.abs() <= limit * (1 + rtol) + atol).all()):
            return True, None
        return False, f"a value is NaN or beyond scale * {self.format.max:g}"

    def _check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        return (False, "the vector holds NaN") if bool(u.isnan().any()) else (True, None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Refuse the state of another format: its points are not on this grid."""
        saved = state_dict.get(prefix + "format_fields")
        if saved is not None and saved.tolist() != _fields(self.format):
            exponent_bits, mantissa_bits, bias, layout = saved.tolist()
            other = FloatFormat(exponent_bits, mantissa_bits, bias, LAYOUTS[layout])
            args[-1].append(
                f"{prefix}format_fields is of {other.name}, but this manifold is of "
                f"{self.format.name}"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *args)


class FP8Manifold(StiffnessManifold):
    """The representable numbers of a format as the points, inside the continuous
    manifold around them.

    ``retr`` rounds to the grid; ``expmap``, ``logmap``, ``dist`` and ``transp`` are the
    ambient
    :class:`StiffnessManifold`'s.

    .. math:: R_x(u) = s \\, \\mathrm{round}(\\exp_x(u) / s), \\qquad \\mathrm{projx}(x) = s \\, \\mathrm{round}(x / s)

    NaN, Inf and empty tensors are treated as there; -0 becomes +0 where the layout has
    none. ``nearest`` violates ``dR_x(0) = id``, a part of the definition of a
    retraction, because a step below half an ULP does nothing (stall). ``stochastic``
    has ``E[R_x(u)] = exp_x(u)`` away from the ends of the range, and so ``dR_x(0) = id``
    in the mean, but for powers of two, where small steps towards zero go half as far.
    With the ``euclidean`` retraction ``E[R_x(u)] = x + u`` everywhere.

    Args:
        fmt: a format or its name.
        scale: positive; points are ``scale`` times a value of the format.
        rounding: how ``retr`` rounds, ``nearest`` or ``stochastic``.
        seed: key of the random bits; give every parameter its own manifold with another
            seed.
        metric: as in :class:`StiffnessManifold`.
        retraction: ``exponential`` rounds ``exp_x(u)``; ``euclidean`` rounds ``x + u``.
        draws: ``independent`` in every retraction, or ``dither``: spread evenly
            (:func:`fp8manifold.random_bits`).

    The stochastic manifold counts its retractions in the buffer ``counter``, part of
    ``state_dict``.

    Raises:
        TypeError, ValueError: as :class:`StiffnessManifold`; an unknown rounding,
            retraction or kind of draws.

    Example:
        >>> manifold = FP8Manifold("E4M3", rounding="stochastic", seed=1)
        >>> weight = geoopt.ManifoldParameter(manifold.projx(torch.tensor([0.3, -0.7])), manifold=manifold)
        >>> weight.tolist()
        [0.3125, -0.6875]
        >>> bool((manifold.retr(weight, torch.zeros(2)) == weight).all())
        True

    Source: Absil, Mahony and Sepulchre 2008 for retractions; the rounded ones are this
    library's.
    """

    __scaling__ = geoopt.Manifold.__scaling__.copy()
    name = "FP8"
    reversible = False

    counter: Tensor
    seed_word: Tensor

    def __init__(
        self,
        fmt: FormatLike,
        scale: ScaleLike = 1.0,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        seed: int = 0,
        *,
        metric: Metric = "ulp",
        retraction: Retraction = "exponential",
        draws: Draws = "independent",
    ) -> None:
        super().__init__(fmt, scale, metric)
        check_choice("rounding", rounding, ("nearest", "stochastic"))
        check_choice("retraction", retraction, RETRACTIONS)
        check_int("seed", seed, 0, 2**63 - 1)
        check_choice("draws", draws, get_args(Draws))
        self.rounding, self.retraction, self.draws = rounding, retraction, draws
        self.register_buffer("seed_word", torch.tensor(seed))
        self.register_buffer("counter", torch.tensor(0))

    def projx(self, x: Tensor) -> Tensor:
        """The nearest point of the grid (ties to the even code)."""
        wide, scale = self._working(x)
        return (round_to_grid(wide / scale, self.format) * scale).to(x.dtype)

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """``round(exp_x(u))``: on the grid, and ``x`` itself, bit for bit, where ``u``
        is 0.
        """
        _check_vectors(u)
        wide, scale = self._working(x)
        moved = self._moved(x, u) if self.retraction == "exponential" else (wide + u) / scale
        return torch.where(u == 0, x, (self.round(moved) * scale).to(x.dtype))

    def round(self, x: Tensor) -> Tensor:
        """Round ``x``, in units of the scale, in the manifold's own mode; stochastic
        rounding advances ``counter``.
        """
        if self.rounding == "nearest":
            return round_to_grid(x, self.format)
        key: dict[str, Any] = {"seed": int(self.seed_word.item()), "step": int(self.counter.item())}
        rounded = round_to_grid(x, self.format, "stochastic", **key, draws=self.draws)
        self.counter += 1
        return rounded

    def extra_repr(self) -> str:
        """Format, scale, metric and rounding, and draws and retraction unless they are
        the defaults.
        """
        draws = "" if self.draws == "independent" else f", draws={self.draws}"
        moved = "" if self.retraction == "exponential" else f", retraction={self.retraction}"
        return f"{super().extra_repr()}, rounding={self.rounding}{draws}{moved}"

    def _check_point_on_manifold(
        self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        off = int((self.projx(x) != x).sum())
        return (
            (True, None) if off == 0 else (False, f"{off} of {x.numel()} values are off the grid")
        )


def _check_vectors(*vectors: Tensor) -> None:
    for vector in vectors:
        working_dtype(vector, "a tangent vector")


def _fields(fmt: FloatFormat) -> list[int]:
    return [fmt.exponent_bits, fmt.mantissa_bits, fmt.bias, LAYOUTS.index(fmt.layout)]


def _checked_scale(scale: ScaleLike) -> Tensor:
    check_is_scale(scale)
    tensor = torch.as_tensor(scale).detach().clone()
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype())
    check_positive(tensor)
    return tensor
