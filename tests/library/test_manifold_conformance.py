"""The laws that geoopt asks of its manifolds, for ours, scaled and not; and geoopt's own optimizers on them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import geoopt
import pytest
import torch
from manifold_cases import METRICS, lands_on_grid, ruler, same_bits, spread

import fp8manifold as fm

Tensor = torch.Tensor
SHAPE = (5, 7)


@dataclass
class Case:
    """Points x, y and tangent vectors v, w at x, all well inside the range; the manifold and what scales it."""

    manifold: geoopt.Manifold
    factor: float
    outside: Tensor
    x: Tensor
    y: Tensor
    v: Tensor
    w: Tensor

    @property
    def base(self) -> fm.StiffnessManifold:
        return self.manifold.base if isinstance(self.manifold, geoopt.Scaled) else self.manifold


def make_case(base: fm.StiffnessManifold, seed: int, factor: float | None) -> Case:
    """Points uniform in the chart over half of the range, steps of up to a quarter of it."""
    torch.manual_seed(seed)
    end = base.to_chart(torch.full(SHAPE, base.format.max, dtype=torch.float64) * base.scale.double())

    def uniform(share: float) -> Tensor:
        return (torch.rand(SHAPE, dtype=torch.float64) * 2 - 1) * share * end

    x, y = (base.projx(base.from_chart(uniform(0.5))) for _ in range(2))
    v, w = (base.stiffness(x) * uniform(0.25) for _ in range(2))
    outside = base.from_chart(uniform(1.0)) * 1.5
    outside[:, 0] = 2 * base.from_chart(end)[:, 0]
    manifold = base if factor is None else geoopt.Scaled(base, factor)
    return Case(manifold, factor or 1.0, outside, x, y, v, w)


ROWS = torch.tensor([[0.25], [1.7], [3.0], [1.0], [2.0**-9]])
CONTINUOUS: dict[str, Callable[[], fm.StiffnessManifold]] = {
    f"{name}-{metric}": lambda name=name, metric=metric: fm.StiffnessManifold(name, 0.5, METRICS[metric])
    for name in ("E4M3", "E5M2", "E1M6")
    for metric in METRICS
} | {
    "E3M4-ulp-rows": lambda: fm.StiffnessManifold("E3M4", ROWS),
    "E7M0-ulp": lambda: fm.StiffnessManifold("E7M0"),
    "E4M3-log-rows": lambda: fm.StiffnessManifold("E4M3", ROWS, "log"),
}
GRIDS: dict[str, Callable[[], fm.StiffnessManifold]] = {
    f"FP8-{name}-{rounding}": lambda name=name, rounding=rounding: fm.FP8Manifold(name, ROWS, rounding, seed=1)
    for name in ("E4M3", "E5M2", "E7M0")
    for rounding in ("nearest", "stochastic")
}


def cases(makers: dict[str, Callable[[], fm.StiffnessManifold]]) -> pytest.MarkDecorator:
    expanded = [
        pytest.param((make, seed, factor), id=f"{name}-{'unscaled' if factor is None else 'scaled'}-{seed}")
        for name, make in makers.items()
        for seed in range(5)
        for factor in (None, 2.0)  # geoopt keeps the factor and its reciprocal in float32
    ]
    return pytest.mark.parametrize("case", expanded, indirect=True)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    make, seed, factor = request.param
    return make_case(make(), seed, factor)


everywhere = cases(CONTINUOUS | GRIDS)
continuous = cases(CONTINUOUS)
grids = cases(GRIDS)


def close(a: Tensor, b: Tensor, base: fm.StiffnessManifold, at: Tensor) -> bool:
    """Tangent vectors at a point, equal to 1e-9 ULP plus 1e-10 of themselves."""
    return bool(((a - b).abs() <= 1e-10 * b.abs() + 1e-9 * base.stiffness(at)).all())


def same_point(a: Tensor, b: Tensor, base: fm.StiffnessManifold) -> bool:
    return bool((base.dist(a, b) <= 1e-9 * (1 + base.to_chart(b).abs())).all())


# ------------------------------------------------------------------------------------- points, vectors
@everywhere
def test_projx_lands_on_the_manifold_and_keeps_its_points(case: Case) -> None:
    projected = case.manifold.projx(case.outside)
    assert case.manifold.check_point_on_manifold(projected, explain=True) == (True, None)
    assert not case.manifold.check_point_on_manifold(case.outside)
    assert same_bits(case.manifold.projx(case.x), case.x)
    assert case.manifold.check_point_on_manifold(case.x)


@everywhere
def test_every_vector_is_tangent(case: Case) -> None:
    assert same_bits(case.manifold.proju(case.x, case.v), case.v)
    assert case.manifold.check_vector_on_tangent(case.x, case.v, explain=True) == (True, None)
    ok, reason = case.manifold.check_vector_on_tangent(case.x, case.v * torch.nan, explain=True)
    assert not ok
    assert "NaN" in reason


def test_checks_of_points_explain_themselves() -> None:
    continuous, grid = fm.StiffnessManifold("E4M3", ROWS), fm.FP8Manifold("E4M3")
    assert continuous.check_point(torch.ones(5, 2), explain=True) == (True, None)
    for wrong in (torch.ones(4, 2), torch.ones(5), torch.ones(()), torch.ones(1, 2)):
        ok, reason = continuous.check_point(wrong, explain=True)
        assert not ok
        assert str(tuple(wrong.shape)) in reason
        assert "(5, 1)" in reason
        assert not continuous.check_vector(wrong)
        with pytest.raises(ValueError, match="scale of shape"):
            continuous.assert_check_point(wrong)
    ok, reason = grid.check_point_on_manifold(torch.tensor([1.0, 1.01, 500.0]), explain=True)
    assert not ok
    assert "2 of 3" in reason
    ok, reason = fm.StiffnessManifold("E4M3").check_point_on_manifold(torch.tensor([449.0]), explain=True)
    assert not ok
    assert "448" in reason
    for manifold in (grid, fm.StiffnessManifold("E4M3")):
        assert not manifold.check_point_on_manifold(torch.tensor(torch.nan))
        with pytest.raises(ValueError, match="not lying on"):
            manifold.assert_check_point_on_manifold(torch.tensor(torch.nan))


# ---------------------------------------------------------------------------------- exp, retr, log
@everywhere
def test_exp_and_its_inverse(case: Case) -> None:
    reached = case.manifold.expmap(case.x, case.v)
    assert close(case.manifold.logmap(case.x, reached), case.v, case.base, case.x)
    assert same_point(case.manifold.expmap(case.x, case.manifold.logmap(case.x, case.y)), case.y, case.base)


@continuous
def test_exp_and_retr_land_on_the_manifold(case: Case) -> None:
    """The law that geoopt's own suite lacks; far beyond the end, too."""
    for reach in (1.0, 1e6, 1e300):
        for move in (case.manifold.expmap, case.manifold.retr):
            assert case.manifold.check_point_on_manifold(move(case.x, case.v * reach))


@grids
def test_retr_lands_on_the_grid(case: Case) -> None:
    for reach in (1e-12, 1.0, 1e6, 1e300):
        moved = case.manifold.retr(case.x, case.v * reach)
        assert case.manifold.check_point_on_manifold(moved)
        assert lands_on_grid(moved, case.base.format, case.base.scale.double())


@continuous
def test_retr_is_exp(case: Case) -> None:
    assert same_bits(case.manifold.retr(case.x, case.v), case.manifold.expmap(case.x, case.v))


@continuous
def test_exp_is_a_retraction(case: Case) -> None:
    """R_x(0) = x and dR_x(0) = id, by central differences off the kinks and by autograd."""
    x = case.base.projx(case.base.from_chart(torch.floor(case.base.to_chart(case.x)) + 0.4))
    assert same_bits(case.manifold.expmap(x, case.v * 0), x)
    t = torch.tensor(1e-6, dtype=torch.float64)
    u = case.v / case.base.norm(x, case.v)
    slope = (case.manifold.expmap(x, t * u) - case.manifold.expmap(x, -t * u)) / (2 * t)
    assert torch.allclose(slope * case.factor, u, rtol=1e-5)


@grids
def test_retr_is_within_a_step_of_exp(case: Case) -> None:
    bound = 0.5 if case.base.rounding == "nearest" else 1.0
    distance = case.base.dist(case.manifold.retr(case.x, case.v), case.manifold.expmap(case.x, case.v))
    assert (distance <= bound + 1e-9).all()


@everywhere
def test_moving_and_transporting_together(case: Case) -> None:
    """exp with transport in one call equals the two calls; so does retr (draw by draw)."""
    manifold, x, v, w = case.manifold, case.x, case.v, case.w
    y, moved = manifold.expmap_transp(x, v, w)
    assert same_bits(y, manifold.expmap(x, v))
    assert same_bits(moved, manifold.transp(x, y, w))
    assert same_bits(manifold.transp_follow_expmap(x, v, w), moved)
    twin = copy.deepcopy(manifold)
    y, moved = manifold.retr_transp(x, v, w)
    assert same_bits(y, twin.retr(x, v))
    assert same_bits(moved, manifold.transp(x, y, w))
    third = copy.deepcopy(twin)
    assert same_bits(twin.transp_follow_retr(x, v, w), third.transp(x, third.retr(x, v), w))


# ------------------------------------------------------------------------------------ inner, transport
@everywhere
def test_inner_is_an_inner_product(case: Case) -> None:
    """Symmetric, bilinear, positive definite, and the square of the norm."""
    manifold, x, v, w = case.manifold, case.x, case.v, case.w
    inner = manifold.inner(x, v, w)
    assert same_bits(inner, manifold.inner(x, w, v))
    assert torch.allclose(manifold.inner(x, 3 * v - w, w), 3 * inner - manifold.inner(x, w), rtol=1e-10, atol=1e-9)
    assert (manifold.inner(x, v) > 0).all()
    assert same_bits(manifold.inner(x, v), manifold.inner(x, v, v))
    assert torch.allclose(manifold.norm(x, v), manifold.inner(x, v).sqrt(), rtol=1e-14)
    assert (manifold.inner(x, v * 0) == 0).all()


@everywhere
def test_inner_works_element_by_element(case: Case) -> None:
    manifold, x, v, w = case.manifold, case.x, case.v, case.w
    assert manifold.ndim == 0
    assert manifold.inner(x, v, w).shape == SHAPE
    assert same_bits(manifold.component_inner(x, v, w), manifold.inner(x, v, w))
    assert same_bits(manifold.component_inner(x, v), manifold.inner(x, v, keepdim=True))
    assert same_bits(manifold.norm(x, v, keepdim=True), manifold.norm(x, v))


@everywhere
def test_transport_keeps_inner_products_and_is_linear(case: Case) -> None:
    manifold, x, y, v, w = case.manifold, case.x, case.y, case.v, case.w
    moved = manifold.transp(x, y, v)
    assert torch.allclose(manifold.inner(y, moved, manifold.transp(x, y, w)), manifold.inner(x, v, w), rtol=1e-12)
    assert close(manifold.transp(x, y, 2 * v + w), 2 * moved + manifold.transp(x, y, w), case.base, y)
    assert close(manifold.transp(y, x, moved), v, case.base, x)
    assert same_bits(manifold.transp(x, x, v), v)


@everywhere
def test_distance(case: Case) -> None:
    """Length of log, symmetric, squared by dist2, and multiplied by the factor of geoopt.Scaled."""
    manifold, x, y = case.manifold, case.x, case.y
    dist = manifold.dist(x, y)
    assert torch.allclose(dist, case.factor * case.base.dist(x, y), rtol=1e-14)
    assert torch.allclose(dist, manifold.norm(x, manifold.logmap(x, y)), rtol=1e-12)
    assert same_bits(dist, manifold.dist(y, x))
    assert same_bits(manifold.dist2(x, y), dist**2)
    assert same_bits(manifold.dist(x, y, keepdim=True), dist)
    reached = manifold.expmap(x, case.v)
    assert torch.allclose(manifold.dist(x, reached), manifold.norm(x, case.v), rtol=1e-9, atol=1e-9)


# -------------------------------------------------------------------------------------------- gradient
@everywhere
def test_riemannian_gradient_gives_the_directional_derivative(case: Case) -> None:
    """<rgrad f, v>_x = df(v) for f with a known gradient, and by moving along exp."""
    manifold, base, v = case.manifold, case.base, case.v
    x = base.from_chart(torch.floor(base.to_chart(case.x)) + 0.4)  # off the kinks
    size = spread(torch.tensor(base.format.max, dtype=torch.float64), base.scale.double())

    def f(point: Tensor) -> Tensor:
        return torch.sin(3 * point / size) * size

    egrad = 3 * torch.cos(3 * x / size)
    rgrad = manifold.egrad2rgrad(x, egrad)
    assert torch.allclose(manifold.inner(x, rgrad, v), egrad * v, rtol=1e-12)
    u = v / base.norm(x, v)
    t = torch.tensor(1e-3, dtype=torch.float64)
    slope = (f(base.expmap(x, t * u)) - f(base.expmap(x, -t * u))) / (2 * t)
    assert torch.allclose(slope, manifold.inner(x, rgrad, u), rtol=1e-4, atol=1e-6 * float(egrad.abs().max()))


@everywhere
def test_random_points_and_the_origin_are_on_the_manifold(case: Case) -> None:
    for point in (case.manifold.random(*SHAPE, dtype=torch.float64), case.base.origin(*SHAPE, dtype=torch.float64)):
        assert point.shape == SHAPE
        assert point.dtype == torch.float64
        assert case.manifold.check_point_on_manifold(point)
    with pytest.raises(ValueError, match="scale of shape"):
        fm.StiffnessManifold("E4M3", ROWS).random(3)


# ------------------------------------------------------------------ geoopt's optimizers, continuous
def in_codes(manifold: fm.StiffnessManifold, x: Tensor) -> Tensor:
    """Chart of the ulp metric through the values of the format alone."""
    units = (x / manifold.scale.double()).numpy()
    return torch.from_numpy(ruler(manifold.format).chart(units))


def from_codes(manifold: fm.StiffnessManifold, c: Tensor) -> tuple[Tensor, Tensor]:
    """Value and stiffness at a real-valued code."""
    rule, scale = ruler(manifold.format), manifold.scale.double()
    units = rule.inverse(c.numpy())
    return torch.from_numpy(units) * scale, torch.from_numpy(rule.stiffness(units)) * scale


@dataclass
class Bowl:
    """sum_i a_i (x_i - b_i)^2 / 2 with minima on the other side of zero: its gradient is a few units in codes."""

    start: Tensor
    curvature: Tensor
    minimum: Tensor

    def gradient(self, x: Tensor) -> Tensor:
        return self.curvature * (x - self.minimum)


def bowl(manifold: fm.StiffnessManifold, seed: int, count: int = 64) -> Bowl:
    generator = torch.Generator().manual_seed(seed)
    # in E7M0 the gradient halves with every code on the way to zero, so the way must be short for eps
    reach = min(0.5 * ruler(manifold.format).codes[-1], 60 if manifold.format.mantissa_bits else 10)
    codes = (torch.rand(count, generator=generator, dtype=torch.float64) * 0.75 + 0.1) * reach
    codes = codes * (torch.randint(0, 2, (count,), generator=generator) * 2 - 1)
    start, _ = from_codes(manifold, codes)
    minimum, stiffness = from_codes(manifold, -1.2 * codes)
    return Bowl(start, stiffness.square().reciprocal(), minimum)


def descend(optimizer: torch.optim.Optimizer, parameter: Tensor, gradient: Callable[[Tensor], Tensor]) -> Tensor:
    parameter.grad = gradient(parameter.detach())
    optimizer.step()
    return parameter.detach().clone().as_subclass(torch.Tensor)


@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E3M4", "E7M0"])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_riemannian_adam_is_adam_on_real_valued_codes(name, scale, amsgrad) -> None:
    """The theorem: with gradient S g, to 1e-10 codes over 200 steps, through zero and binades, inside the range."""
    manifold = fm.StiffnessManifold(name, torch.tensor(scale, dtype=torch.float64))
    problem = bowl(manifold, seed=len(name))
    options = {"lr": 0.7, "betas": (0.9, 0.99), "amsgrad": amsgrad}

    weight = geoopt.ManifoldParameter(problem.start.clone(), manifold=manifold)
    riemannian = geoopt.optim.RiemannianAdam([weight], **options)
    codes = torch.nn.Parameter(in_codes(manifold, problem.start))
    euclidean = torch.optim.Adam([codes], **options)

    def pulled_back(c: Tensor) -> Tensor:
        x, stiffness = from_codes(manifold, c)
        return stiffness * problem.gradient(x)

    crossed, binades = torch.zeros(len(codes), dtype=torch.bool), set()
    for _ in range(200):
        x, c = descend(riemannian, weight, problem.gradient), descend(euclidean, codes, pulled_back)
        assert (in_codes(manifold, x) - c).abs().max() <= 1e-10
        assert c.abs().max() < manifold.format.max_code - 1
        crossed |= x * problem.start < 0
        binades |= set(manifold.stiffness(x).unique().tolist())
    print(f"{name}: {int(crossed.sum())} of {len(crossed)} weights crossed zero, {len(binades)} stiffnesses")
    assert crossed.sum() >= len(crossed) // 2
    assert len(binades) >= 2


@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E3M4", "E7M0"])
def test_riemannian_sgd_is_sgd_on_real_valued_codes(name) -> None:
    manifold = fm.StiffnessManifold(name)
    problem = bowl(manifold, seed=3)
    weight = geoopt.ManifoldParameter(problem.start.clone(), manifold=manifold)
    riemannian = geoopt.optim.RiemannianSGD([weight], lr=0.1)
    codes = in_codes(manifold, problem.start)
    crossings = 0
    for _ in range(200):
        x, stiffness = from_codes(manifold, codes)
        codes = codes - 0.1 * stiffness * problem.gradient(x)
        moved = descend(riemannian, weight, problem.gradient)
        assert (in_codes(manifold, moved) - codes).abs().max() <= 1e-10
        crossings += int((moved * x < 0).sum())
    assert crossings > 0


# ------------------------------------------------------------------------ geoopt's optimizers, on the grid
ON_GRID = {
    "adam": lambda p: geoopt.optim.RiemannianAdam(p, lr=0.5),
    "adam-stabilize": lambda p: geoopt.optim.RiemannianAdam(p, lr=0.5, stabilize=3, amsgrad=True),
    "sgd": lambda p: geoopt.optim.RiemannianSGD(p, lr=4.0),
    "sgd-momentum": lambda p: geoopt.optim.RiemannianSGD(p, lr=0.05, momentum=0.8, stabilize=7),
}


@pytest.mark.parametrize("optimizer", ON_GRID.values(), ids=ON_GRID)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E3M4"])
def test_geoopts_optimizers_stay_on_the_grid(optimizer, rounding, name) -> None:
    """100 steps, every point checked; under stochastic rounding the loss falls."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([[0.25], [1.0], [2.0]])
    manifold = fm.FP8Manifold(name, scale, rounding, seed=1)
    minimum = torch.randn(3, 50, generator=generator) * 1.5
    weight = geoopt.ManifoldParameter(
        manifold.projx(minimum + torch.randn(3, 50, generator=generator)), manifold=manifold
    )
    run, first = optimizer([weight]), float((weight.detach() - minimum).square().mean())
    for _ in range(100):
        x = descend(run, weight, lambda x: x - minimum)
        assert lands_on_grid(x, manifold.format, scale.double())
    last = float((x - minimum).square().mean())
    # geoopt starts the momentum from the Euclidean gradient, 1 / S^2 too long: nothing to ask of its loss
    if rounding == "stochastic" and optimizer is not ON_GRID["sgd-momentum"]:
        assert last < 0.5 * first


@pytest.mark.parametrize("name", ["E4M3", "E7M0", "E1M6"])
def test_adam_below_half_an_ulp_a_step_freezes_nearest_and_not_stochastic(name) -> None:
    """lr = 0.4 ULP: nearest returns every weight after 50 steps, stochastic has moved nearly all."""
    frozen, moving = (fm.FP8Manifold(name, 1.0, rounding) for rounding in ("nearest", "stochastic"))
    start = torch.from_numpy(ruler(frozen.format).inverse(ruler(frozen.format).codes[9:-9])).float()
    ends = []
    for manifold in (frozen, moving):
        weight = geoopt.ManifoldParameter(start.clone(), manifold=manifold)
        optimizer = geoopt.optim.RiemannianAdam([weight], lr=0.4, eps=1e-30)
        for _ in range(50):
            # a gradient of a thousand in codes: the square of it in value would leave float32 in E7M0
            end = descend(optimizer, weight, lambda x, manifold=manifold: 1e3 / manifold.stiffness(x))
        ends.append(end)
    assert (ends[0] == start).all()  # zero may turn into -0, the same point
    assert (ends[1] != start).double().mean() > 0.99
