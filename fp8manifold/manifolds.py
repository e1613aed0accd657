"""A float format as a manifold of geoopt's: the interval around its grid, and the grid.

    x  --divide by scale-->  units of the scale  --chart phi-->  steps from zero

`StiffnessManifold` is the continuous interval ``[-s max, s max]``. Its chart counts
representable steps from zero, so a tangent vector ``u`` at ``x`` is ``u / S(x)`` steps
long, where ``S(x)`` is one ULP there. ``expmap`` goes that many steps along the chart
and returns the value there; lengths and distances are numbers of steps.

`FP8Manifold` has the numbers of the grid as its points: it inherits the interval's
geometry, but ``projx`` and ``retr`` round.

Everything is computed in units of the scale, in float32 or float64, and cast back to
the dtype of the argument once. geoopt's optimizers call these methods. This library's
optimizers read format, scale, metric and rounding, and do their own arithmetic.
"""

from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from fp8manifold._base.checks import check_choice, check_int
from fp8manifold._base.float_bits import working_dtype
from fp8manifold._geoopt_import import Manifold, load_geoopt
from fp8manifold._numerics.charts import RETRACTIONS, Metric, Retraction, chart_of, clamp_to_ends
from fp8manifold.formats import LAYOUTS, FloatFormat, FormatLike, as_format
from fp8manifold.grid import round_to_grid
from fp8manifold.random_bits import Draws
from fp8manifold.scaling import broadcasts_to, check_is_scale, check_positive

if TYPE_CHECKING:
    import geoopt

__all__ = ["FP8Manifold", "StiffnessManifold"]

ScaleLike = float | Tensor


class StiffnessManifold(Manifold):  # type: ignore[misc]  # geoopt is untyped
    r"""The interval of a format's values, with lengths counted in ULPs.

    With scale ``s`` it is ``[-s max, s max]``, and its metric is ``1 / S^2``, where
    ``S`` is the spacing of the grid. ``phi`` and ``S_1`` are the chart and the spacing
    at scale 1; for the metric ``ulp`` they are :func:`fp8manifold.to_chart` and
    :func:`fp8manifold.ulp`. For ``u`` and ``v`` tangent at ``x``:

    .. math::

        S(x) &= s \, S_1(x / s), & \langle u, v \rangle_x &= u v / S(x)^2, \\
        \exp_x(u) &= s \varphi^{-1}(\varphi(x/s) + u / S(x)), &
        \log_x(y) &= S(x) (\varphi(y/s) - \varphi(x/s)), \\
        d(x, y) &= |\varphi(x/s) - \varphi(y/s)|, & \Gamma_{x \to y} u &= u \, S(y) / S(x), \\
        \operatorname{grad} f &= S(x)^2 \nabla f.

    Every element is a manifold of one dimension (``ndim = 0``). ``expmap`` and
    ``projx`` stop at the ends ``+-s max``, also for Inf. +0 and -0 are one point. NaN
    stays NaN, and an empty tensor stays empty.

    Under the metric ``ulp`` the manifold is piecewise flat, not smooth: ``S`` jumps at
    powers of two, where ``exp_x`` has a derivative of 1 away from zero and of 1/2
    towards it.

    Args:
        fmt: a format or its name.
        scale: a positive number, or a positive tensor that broadcasts against the
            points, for example with one entry per row.
        metric: what ``S`` is. ``ulp``: the format's own spacing; ``log``:
            ``max(|x|, 2^emin) 2^-M``; ``euclidean``: 1; or a positive function
            ``S(x, fmt)``, which is evaluated midway between neighbours of the grid.

    Raises:
        TypeError: a format, scale or metric of another type.
        ValueError: an unknown format or metric, or a scale that is not positive.

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
        self.register_buffer("format_fields", torch.tensor(_format_as_numbers(self.format)))

    def stiffness(self, x: Tensor) -> Tensor:
        """Return the spacing at ``x``: one ULP, in value.

        The shape is that of ``x`` broadcast against the scale. At NaN it is the
        format's largest spacing, or NaN under a metric that gives NaN there.
        """
        points, scale = self._in_working_dtype(x)
        return (self._chart.stiffness(self._inside(points / scale)) * scale).to(x.dtype)

    def to_chart(self, x: Tensor) -> Tensor:
        """Return the coordinate of ``x``: its number of steps from zero."""
        points, scale = self._in_working_dtype(x)
        return self._chart.forward(self._inside(points / scale)).to(x.dtype)

    def from_chart(self, c: Tensor) -> Tensor:
        """Return the point ``c`` steps from zero, or ``+-s max`` beyond the ends."""
        coordinates, scale = self._in_working_dtype(c, "c")
        return (self._inside(self._chart.inverse(coordinates)) * scale).to(c.dtype)

    def inner(
        self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False
    ) -> Tensor:
        """Return ``u v / S(x)^2``, element by element.

        ``keepdim`` is part of geoopt's signature and changes nothing, as ``ndim`` is 0.
        """
        return self.component_inner(x, u, v)

    def component_inner(self, x: Tensor, u: Tensor, v: Tensor | None = None) -> Tensor:
        """Return ``(u / S)(v / S)``; without ``v``, ``(u / S)^2``."""
        _check_vectors(u, u if v is None else v)
        stiffness = self.stiffness(x)
        # divided first: S^2 can leave the range of float32
        steps = u / stiffness
        return steps * (steps if v is None else v / stiffness)

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """Return ``|u| / S(x)``: the length of ``u`` in ULPs."""
        _check_vectors(u)
        return (u / self.stiffness(x)).abs()

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """Return ``S(x)^2 u``, the Riemannian gradient of a Euclidean one."""
        _check_vectors(u)
        stiffness = self.stiffness(x)
        return u * stiffness * stiffness

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """Return ``u`` in the shape of a vector at ``x``: every number is tangent."""
        return u.expand(torch.broadcast_shapes(x.shape, u.shape))

    def projx(self, x: Tensor) -> Tensor:
        """Return the nearest point of the interval."""
        scale = self._scale_in_dtype_of(x)
        return torch.minimum(torch.maximum(x, -scale * self.format.max), scale * self.format.max)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """Return the point ``u / S(x)`` steps from ``x``, at most an end.

        Where ``u`` is 0 it is ``x`` itself, bit for bit.
        """
        _check_vectors(u)
        _, scale = self._in_working_dtype(x)
        moved = (self._exponential_in_units(x, u) * scale).to(x.dtype)
        # where u is 0 this is x to the bit, and its derivative with respect to u is 1
        unmoved = x - (u.detach() - u)
        return torch.where(u == 0, unmoved, moved)

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """Return the exponential map."""
        return self.expmap(x, u)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``S(x) (phi(y) - phi(x))``, the vector that takes ``x`` to ``y``."""
        return self.stiffness(x) * (self.to_chart(y) - self.to_chart(x))

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Return ``|phi(x) - phi(y)|``.

        Between points of the grid it is the number of representable steps.
        """
        return (self.to_chart(x) - self.to_chart(y)).abs()

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Return ``v S(y) / S(x)``: the same number of ULPs at ``y``."""
        _check_vectors(v)
        return v * (self.stiffness(y) / self.stiffness(x))

    def random(
        self, *size: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> "geoopt.ManifoldTensor":
        """Return points that are uniform in the volume of the metric.

        Every step between neighbours is as likely as any other.
        """
        scale = self.scale.to(dtype=dtype or torch.get_default_dtype(), device=device)
        steps_to_end = self.to_chart(scale * self.format.max)
        uniform = torch.rand(*size, dtype=dtype, device=device) * 2 - 1
        self._assert_check_shape(uniform.shape, "x")
        points = self.projx(self.from_chart(uniform * steps_to_end))
        return load_geoopt().ManifoldTensor(points, manifold=self)

    def origin(
        self,
        *size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        seed: int | None = 42,
    ) -> "geoopt.ManifoldTensor":
        """Return zeros, the fixed point of the symmetry ``x -> -x``.

        ``seed`` is part of geoopt's signature; nothing is drawn.
        """
        return load_geoopt().ManifoldTensor(
            torch.zeros(*size, dtype=dtype, device=device), manifold=self
        )

    def extra_repr(self) -> str:
        """Return format, scale and metric, as they are printed."""
        if self.scale.numel() == 1:
            scale = f"{self.scale.item():g}"
        else:
            scale = f"tensor of shape {tuple(self.scale.shape)}"
        metric = getattr(self.metric, "__name__", self.metric)
        return f"{self.format.name}, scale={scale}, metric={metric}"

    def _exponential_in_units(self, x: Tensor, u: Tensor) -> Tensor:
        """Return ``exp_x(u)`` in units of the scale, in the working dtype."""
        points, scale = self._in_working_dtype(x)
        start = self._inside(points / scale)
        # so many steps pass either end from anywhere, and are far from overflow
        longest = 2 * self._steps_to_end + 1
        steps = (u / (self._chart.stiffness(start) * scale)).clamp(-longest, longest)
        return self._inside(self._chart.shift(start, steps))

    def _inside(self, x: Tensor) -> Tensor:
        return clamp_to_ends(x, self.format.max)

    def _in_working_dtype(self, x: Tensor, name: str = "x") -> tuple[Tensor, Tensor]:
        """Return ``x`` and the scale in the dtype that the chart is computed in."""
        dtype = working_dtype(x, name)
        return x.to(dtype), self.scale.to(dtype)

    def _scale_in_dtype_of(self, x: Tensor) -> Tensor:
        # refuses integers, which would truncate the scale
        working_dtype(x)
        return self.scale.to(x.dtype)

    def _check_shape(self, shape: Any, name: str) -> tuple[bool, str | None]:
        """Check that the scale broadcasts to a point's shape without widening it."""
        if broadcasts_to(self.scale.shape, torch.Size(shape)):
            return True, None
        reason = (
            f"{name} has shape {tuple(shape)}: the scale of shape {tuple(self.scale.shape)} does "
            "not fit"
        )
        return False, reason

    def _check_point_on_manifold(
        self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        limit = self._scale_in_dtype_of(x) * self.format.max
        if bool((x.abs() <= limit * (1 + rtol) + atol).all()):
            return True, None
        return False, f"a value is NaN or beyond scale * {self.format.max:g}"

    def _check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        if bool(u.isnan().any()):
            return False, "the vector holds NaN"
        return True, None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Refuse the state of another format: its points are not on this grid.

        The last of ``args`` is torch's list of error messages.
        """
        saved = state_dict.get(prefix + "format_fields")
        if saved is not None and saved.tolist() != _format_as_numbers(self.format):
            exponent_bits, mantissa_bits, bias, layout = saved.tolist()
            other = FloatFormat(exponent_bits, mantissa_bits, bias, LAYOUTS[layout])
            errors = args[-1]
            errors.append(
                f"{prefix}format_fields is for {other.name}, but this manifold is in "
                f"{self.format.name}"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *args)


class FP8Manifold(StiffnessManifold):
    r"""The representable numbers of a format, in the interval around them.

    ``retr`` and ``projx`` round to the grid. ``expmap``, ``logmap``, ``dist`` and
    ``transp`` are those of the :class:`StiffnessManifold` around it.

    .. math:: R_x(u) = s \, \mathrm{round}(\exp_x(u) / s), \qquad
              \mathrm{projx}(x) = s \, \mathrm{round}(x / s)

    A retraction must fulfil ``dR_x(0) = id``. Rounding to ``nearest`` does not: a step
    below half an ULP does nothing, and training stalls. Under ``stochastic`` rounding
    ``E[R_x(u)] = exp_x(u)`` away from the ends of the range, so ``dR_x(0) = id`` holds
    in the mean. Powers of two are an exception: there ``exp_x`` takes small steps
    towards zero half as far. With the ``euclidean`` retraction ``E[R_x(u)] = x + u`` at
    powers of two as well.

    NaN, Inf and empty tensors are treated as in :class:`StiffnessManifold`. -0 becomes
    +0 if the format's layout has no -0.

    Args:
        fmt: a format or its name.
        scale: positive; points are ``scale`` times a value of the format.
        rounding: how ``retr`` rounds, ``nearest`` or ``stochastic``.
        seed: key of the random bits. Give every parameter a manifold with another seed.
        metric: as in :class:`StiffnessManifold`.
        retraction: ``exponential`` rounds ``exp_x(u)``; ``euclidean`` rounds ``x + u``.
        draws: ``independent`` in every retraction, or ``dither``, which spreads them
            evenly over retractions (see :func:`fp8manifold.random_bits`).

    Attributes:
        counter: the number of stochastic retractions so far, a buffer and part of
            ``state_dict``, so that no draw is used twice.

    Raises:
        TypeError: as :class:`StiffnessManifold`.
        ValueError: as :class:`StiffnessManifold`, or an unknown rounding, retraction or
            kind of draws.

    Example:
        >>> import geoopt
        >>> manifold = FP8Manifold("E4M3", rounding="stochastic", seed=1)
        >>> points = manifold.projx(torch.tensor([0.3, -0.7]))
        >>> weight = geoopt.ManifoldParameter(points, manifold=manifold)
        >>> weight.tolist()
        [0.3125, -0.6875]
        >>> bool((manifold.retr(weight, torch.zeros(2)) == weight).all())
        True

    Source: Absil, Mahony and Sepulchre 2008 for retractions; the rounded ones are this
    library's.
    """

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
        self.rounding = rounding
        self.retraction = retraction
        self.draws = draws
        self.register_buffer("seed_word", torch.tensor(seed))
        self.register_buffer("counter", torch.tensor(0))

    def projx(self, x: Tensor) -> Tensor:
        """Return the nearest point of the grid. A tie goes to the even code."""
        points, scale = self._in_working_dtype(x)
        return (round_to_grid(points / scale, self.format) * scale).to(x.dtype)

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """Return ``exp_x(u)`` rounded, or ``x + u`` if ``retraction`` is euclidean.

        Where ``u`` is 0 it is ``x`` itself, bit for bit.
        """
        _check_vectors(u)
        points, scale = self._in_working_dtype(x)
        if self.retraction == "exponential":
            moved = self._exponential_in_units(x, u)
        else:
            moved = (points + u) / scale
        return torch.where(u == 0, x, (self.round(moved) * scale).to(x.dtype))

    def round(self, x: Tensor) -> Tensor:
        """Round ``x``, in units of the scale, as ``rounding`` says.

        Stochastic rounding advances ``counter``.
        """
        if self.rounding == "nearest":
            return round_to_grid(x, self.format)
        rounded = round_to_grid(
            x,
            self.format,
            "stochastic",
            seed=int(self.seed_word.item()),
            step=int(self.counter.item()),
            draws=self.draws,
        )
        self.counter += 1
        return rounded

    def extra_repr(self) -> str:
        """Return what is printed: draws and retraction unless they are the defaults."""
        facts = [super().extra_repr(), f"rounding={self.rounding}"]
        if self.draws != "independent":
            facts.append(f"draws={self.draws}")
        if self.retraction != "exponential":
            facts.append(f"retraction={self.retraction}")
        return ", ".join(facts)

    def _check_point_on_manifold(
        self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        off_grid = int((self.projx(x) != x).sum())
        if off_grid:
            return False, f"{off_grid} of {x.numel()} values are off the grid"
        return True, None


def _check_vectors(*vectors: Tensor) -> None:
    for vector in vectors:
        working_dtype(vector, "a tangent vector")


def _format_as_numbers(fmt: FloatFormat) -> list[int]:
    return [fmt.exponent_bits, fmt.mantissa_bits, fmt.bias, LAYOUTS.index(fmt.layout)]


def _checked_scale(scale: ScaleLike) -> Tensor:
    check_is_scale(scale)
    tensor = torch.as_tensor(scale).detach().clone()
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype())
    check_positive(tensor)
    return tensor
