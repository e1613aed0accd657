"""RiemannianAdam and RiemannianSGD on our manifolds: torch's optimizers in the chart."""

import copy
import math
from functools import partial
from typing import NamedTuple

import geoopt
import pytest
import torch
from manifold_cases import ruler
from optimizer_cases import (
    ROWS,
    free_weight,
    frozen,
    grid_weight,
    manifold_parameter,
    normal,
    on_grid,
    step_from,
    values,
)
from paths import PATHS, on_path
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.optim import RiemannianAdam, RiemannianSGD

double = torch.float64
UNBOUNDED = {"damping": 0.0, "clip": math.inf}
FORMATS = ("E4M3", "E5M2", "E3M4", "E7M0")
SCALES = {
    "1": 1.0,
    "2^-5": 2.0**-5,
    "0.3": torch.tensor(0.3, dtype=double),
    "rows-pow2": ROWS.double(),
    "rows": torch.tensor([[0.011], [0.3], [1.7]], dtype=double),
}


class Chart:
    """Codes, values and spacings by interpolation over a format's list of values."""

    def __init__(self, name, scale):
        self.ruler = ruler(fm.FloatFormat.from_string(name))
        self.scale = torch.as_tensor(scale, dtype=double)

    def code(self, w):
        return torch.from_numpy(self.ruler.chart((w / self.scale).numpy()))

    def value(self, c):
        return torch.from_numpy(self.ruler.inverse(c.detach().numpy())) * self.scale

    def stiffness(self, w):
        return torch.from_numpy(self.ruler.stiffness((w / self.scale).numpy())) * self.scale


def start_and_targets(chart):
    """Return weights in the middle of the range, and targets.

    A few weights are near zero; targets have the other sign or lie beyond a binade.
    """
    reach = min(chart.ruler.codes[-1] / 4, 20.0)
    codes = normal(3, 8, seed=11, dtype=double).clamp(-2, 2) * reach / 2
    return chart.value(codes), chart.value(codes.flip(1) * -0.7 + 0.3)


class Distance(NamedTuple):
    """Largest distance in codes, and how many weights went through zero on the way."""

    codes: float
    crossings: int


def distance_from_torch(name, scale, make, make_torch, steps=200):
    """Step ours on the manifold, and torch's on codes with the gradient S g."""
    chart = Chart(name, scale)
    start, targets = start_and_targets(chart)
    weight = free_weight(start, name, scale)
    codes = nn.Parameter(chart.code(start))
    optimizer, reference = make([weight]), make_torch([codes])
    largest, crossings = 0.0, 0
    for _ in range(steps):
        weight.grad = values([weight])[0] - targets
        w = chart.value(codes)
        codes.grad = chart.stiffness(w) * (w - targets)
        sign = weight.detach().sign()
        optimizer.step()
        reference.step()
        crossings += int((weight.detach().sign() != sign).sum())
        largest = max(largest, (chart.code(weight.detach()) - codes).abs().max().item())
    return Distance(largest, crossings)


@pytest.mark.covering(1)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", FORMATS)
def test_adam_is_adam_on_codes(name, scale):
    """The theorem: 200 steps, 1e-10 codes."""
    riemannian = partial(RiemannianAdam, lr=0.5, eps=0.0, **UNBOUNDED)
    adam = partial(torch.optim.Adam, lr=0.5, eps=0.0)
    distance = distance_from_torch(name, SCALES[scale], riemannian, adam)
    assert distance.codes < 1e-10
    assert distance.crossings >= 5


SGD_OPTIONS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "dampening": {"momentum": 0.7, "dampening": 0.4},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", SGD_OPTIONS.values(), ids=SGD_OPTIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_sgd_is_sgd_on_codes(name, options):
    """Momentum starts from the first gradient in codes, as torch's does.

    The step stays below what the curvature, S^2, allows.
    """
    chart = Chart(name, SCALES["0.3"])
    lr = 0.1 / max(chart.stiffness(x).max().item() for x in start_and_targets(chart)) ** 2
    riemannian = partial(RiemannianSGD, lr=lr, **options, **UNBOUNDED)
    sgd = partial(torch.optim.SGD, lr=lr, **options)
    distance = distance_from_torch(name, SCALES["0.3"], riemannian, sgd)
    assert distance.codes < 1e-10
    # Near zero the steps of E7M0 are all but nothing.
    assert distance.crossings >= 1 or name == "E7M0"


by_kind = pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])


@by_kind
def test_default_learning_rates(kind):
    assert kind([grid_weight()]).param_groups[0]["lr"] == 0.5
    assert kind([nn.Parameter(torch.ones(2))]).param_groups[0]["lr"] == 1e-3
    assert kind([manifold_parameter(geoopt.Sphere(), normal(4))]).param_groups[0]["lr"] == 1e-3
    groups = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": grid_weight()}]
    assert [group["lr"] for group in kind(groups).param_groups] == [1e-3, 0.5]


def grid_group(**options):
    return {"params": [grid_weight()], **options}


def plain_group(**options):
    return {"params": [nn.Parameter(torch.ones(2))], **options}


def mixed_group(**options):
    return {"params": [grid_weight(), nn.Parameter(torch.ones(2))], **options}


#: name: (functions that make parameters or groups, the lr) of mixed lists
MIXED = {
    "list, default lr": (lambda: mixed_group()["params"], None),
    "list, lr": (lambda: mixed_group()["params"], 0.5),
    "group, default lr": (lambda: [mixed_group()], None),
    "group, lr": (lambda: [mixed_group()], 0.5),
    "two groups of one lr": (lambda: [grid_group(), plain_group()], 0.5),
    "two groups of one lr, plain first": (lambda: [plain_group(), grid_group()], 0.5),
}


@by_kind
@pytest.mark.parametrize(("make", "lr"), MIXED.values(), ids=MIXED)
def test_a_mixed_list_needs_float_lr(kind, make, lr):
    """Groups that share an lr in ULPs are one, too."""
    with pytest.raises(ValueError, match="float_lr"):
        kind(make(), lr)


@by_kind
@pytest.mark.parametrize("lr", [None, 0.5])
def test_a_mixed_list_with_float_lr_is_accepted(kind, lr):
    kind(mixed_group()["params"], lr, float_lr=1e-3)
    kind([mixed_group(float_lr=1e-3)], lr)
    kind([grid_group(), plain_group(lr=1e-3)], 0.5)


@by_kind
def test_a_plain_group_that_is_added_needs_float_lr(kind):
    grid, plain = grid_group(), plain_group()
    optimizer = kind([dict(grid)], 0.5)
    with pytest.raises(ValueError, match="float_lr"):
        optimizer.add_param_group(dict(plain))
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({**plain, "float_lr": 1e-3})


def float_step(optimizer, plain):
    old_values = plain.detach().clone()
    step_from(optimizer, plain, torch.ones_like(plain))
    return float((old_values - plain.detach()).max())


@pytest.mark.parametrize("kind", [RiemannianSGD, RiemannianAdam])
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_float_lr_follows_the_schedule_of_lr(tensor, kind):
    """From the lr it was given with: OneCycleLR begins at a 25th of its peak."""
    plain = nn.Parameter(torch.zeros(3, dtype=double))
    optimizer = kind([grid_weight(), plain], torch.tensor(0.5) if tensor else 0.5, float_lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 / (t + 1))
    steps = []
    for _ in range(4):
        steps.append(float_step(optimizer, plain))
        scheduler.step()
    assert steps == pytest.approx([0.01, 0.005, 0.01 / 3, 0.0025], rel=1e-6)
    optimizer = kind([grid_weight(), plain], 0.5, float_lr=0.01)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    assert float_step(optimizer, plain) == pytest.approx(0.01 / 25, rel=1e-6)


@pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_decay_follows_the_schedule_and_not_the_size_of_lr(kind, tensor):
    """Without a gradient a step leaves ``w (1 - wd lr / initial_lr)``."""
    x = normal(20, dtype=double)
    weight = free_weight(x, "E4M3", 0.3)
    optimizer = kind([weight], torch.tensor(0.5) if tensor else 0.5, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 / 2**t)
    for _ in range(3):
        step_from(optimizer, weight, torch.zeros_like(weight).as_subclass(Tensor))
        scheduler.step()
    assert torch.allclose(weight.detach(), x * 0.9 * 0.95 * 0.975, rtol=1e-13, atol=0)
    still = free_weight(x, "E4M3", 0.3)
    step_from(
        kind([still], 0.0, weight_decay=0.1), still, torch.zeros_like(still).as_subclass(Tensor)
    )
    assert torch.equal(still.detach(), x)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("exponent", [-40, -64, -80, -100, 60, 90])
def test_weights_of_any_size_take_the_same_steps(exponent, amsgrad, path):
    """Weights times a power of two have the same codes, and so the same steps, to the bit."""
    results = []
    for factor in (1.0, 2.0**exponent):
        p = fm.FP8Parameter(normal(8, 32) * factor, "E4M3", seed=0)
        optimizer = on_path(
            path, RiemannianAdam([p], lr=0.7, writeback="nearest", refresh_every=2, amsgrad=amsgrad)
        )
        for t in range(6):
            step_from(optimizer, p, normal(8, 32, seed=t))
        state = optimizer.state[p]
        assert optimizer.skipped_steps == 0, factor
        results.append(frozen([p.codes, state["exp_avg"], state["exp_avg_sq"]]))
    assert results[0] == results[1]


FOREIGN = {
    "sphere": (geoopt.Sphere(), (4, 5)),
    "stiefel": (geoopt.Stiefel(), (5, 3)),
    "ball": (geoopt.PoincareBall(), (4, 3)),
    "euclidean": (geoopt.Euclidean(), (3, 3)),
    "plain": (None, (4,)),
}


def assert_follows_geoopt(manifold, shape, kind, **options):
    """Compare 100 steps of our and geoopt's optimizer called `kind`, to 1e-12."""
    x, target = normal(*shape, seed=1, dtype=double, std=0.3), normal(*shape, seed=2, dtype=double)
    point, peer = (
        nn.Parameter(x.clone())
        if manifold is None
        else manifold_parameter(copy.deepcopy(manifold), x)
        for _ in "ab"
    )
    start = values([point])[0]
    optimizer = getattr(fm.optim, kind)([point], 0.02, **options)
    reference = getattr(geoopt.optim, kind)([peer], 0.02, **options)
    for t in range(100):
        noise = normal(*shape, seed=50 + t, dtype=double, std=0.1)
        for p in (point, peer):
            p.grad = p.detach().as_subclass(Tensor) - target + noise
        optimizer.step()
        reference.step()
        assert (point - peer).abs().max() < 1e-12, t
    assert (point.detach().as_subclass(Tensor) - start).abs().max() > 0.01


#: name: (the optimizer of both, its options)
RULES = {
    "adam": ("RiemannianAdam", {"betas": (0.8, 0.99), "eps": 1e-7, "amsgrad": False}),
    "amsgrad": ("RiemannianAdam", {"betas": (0.8, 0.99), "eps": 1e-7, "amsgrad": True}),
    "adam, decay": ("RiemannianAdam", {"weight_decay": 0.3}),
    "sgd": ("RiemannianSGD", {"weight_decay": 0}),
    "sgd, decay": ("RiemannianSGD", {"weight_decay": 0.3}),
}


@pytest.mark.parametrize(("kind", "options"), RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", FOREIGN)
def test_steps_elsewhere_are_geoopts(name, kind, options):
    """On manifolds of geoopt and on ordinary parameters."""
    assert_follows_geoopt(*FOREIGN[name], kind, **options)


# geoopt.Stiefel is a factory; this is the class of the canonical one.
class Projecting(type(geoopt.Stiefel())):
    """Stiefel with a projection of vectors.

    geoopt's ``x (x^T u - u^T x) + ...`` doubles a part of what is tangent.
    """

    def proju(self, x, u):
        symmetric = x.mT @ u
        return u - x @ (symmetric + symmetric.mT) / 2


STABLE = {
    **FOREIGN,
    "stiefel": (Projecting(), (5, 3)),
    "euclidean stiefel": (geoopt.EuclideanStiefel(), (5, 3)),
}


@pytest.mark.parametrize("kind", ["RiemannianAdam", "RiemannianSGD"])
@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("name", STABLE)
def test_stabilising_elsewhere_is_geoopts(name, period, kind):
    assert_follows_geoopt(*STABLE[name], kind, stabilize=period)


@pytest.mark.parametrize("nesterov", [False, True], ids=["momentum", "nesterov"])
def test_sgd_elsewhere_starts_momentum_from_the_riemannian_gradient(nesterov):
    """On a sphere the first step is along the projected gradient; geoopt's takes the raw one."""
    sphere = geoopt.Sphere()
    x = sphere.projx(normal(4, seed=1, dtype=double))
    point = geoopt.ManifoldParameter(x.clone(), manifold=sphere)
    point.grad = normal(4, seed=2, dtype=double)
    tangent = sphere.egrad2rgrad(x, point.grad)
    RiemannianSGD([point], 0.1, momentum=0.9, nesterov=nesterov).step()
    factor = 1.9 if nesterov else 1.0
    assert (point.detach() - sphere.retr(x, -0.1 * factor * tangent)).abs().max() < 1e-15


@pytest.mark.parametrize("make", [fm.optim.RiemannianAdam, fm.optim.RiemannianSGD])
def test_the_manifolds_own_retraction_is_taken(make):
    """Inwards from a power of two one code is half of an ULP: there retractions differ."""
    ends = {}
    for retraction in ("exponential", "euclidean"):
        manifold = fm.FP8Manifold("E4M3", retraction=retraction)
        weight = geoopt.ManifoldParameter(torch.tensor([2.0]), manifold=manifold)
        weight.grad = torch.tensor([4.0])  # S g = 1: Adam's first direction and SGD's alike
        make([weight], lr=1.0).step()
        ends[retraction] = weight.item()
    assert ends == {"exponential": 1.875, "euclidean": 1.75}


def in_codes(**options):
    return fm.FP8Parameter(torch.tensor([2.0]), "E4M3", rounding="nearest", **options)


def on_a_grid(**options):
    manifold = fm.FP8Manifold("E4M3", **options)
    return geoopt.ManifoldParameter(torch.tensor([2.0]), manifold=manifold)


def of_a_layer(storage, **options):
    layer = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(2.0)
    options = {"formats": "E4M3", "storage": storage, "rounding": "nearest", **options}
    return fm.quantize_model(nn.Sequential(layer), **options)[0].weight


#: Functions that make a weight of 2 with a retraction, or with none.
WEIGHTS = {
    "codes": in_codes,
    "grid": on_a_grid,
    "quantize_model, codes": partial(of_a_layer, "codes"),
    "quantize_model, grid": partial(of_a_layer, "grid"),
    "quantize_model, parameters": partial(
        of_a_layer, "codes", formats=None, parameters={"*": "E4M3"}
    ),
}


def after_a_step(weight, kind, **options):
    """Return the weight after a step by one ULP."""
    weight.grad = torch.full_like(weight, 4.0)
    kind([weight], lr=1.0, **options).step()
    return weight.detach().reshape(()).item()


@by_kind
@pytest.mark.parametrize("make", WEIGHTS.values(), ids=WEIGHTS)
def test_the_weights_retraction_is_taken_unless_the_optimizer_has_another(make, kind):
    assert after_a_step(make(), kind) == 1.875
    assert after_a_step(make(retraction="euclidean"), kind) == 1.75
    assert after_a_step(make(), kind, retraction="euclidean") == 1.75
    euclidean = make(retraction="euclidean")
    assert after_a_step(euclidean, kind, retraction="exponential") == 1.875


def test_geoopts_optimizer_takes_a_code_weights_retraction():
    """``S^2 g`` is one ULP here, too."""
    assert after_a_step(in_codes(retraction="euclidean"), geoopt.optim.RiemannianSGD) == 1.75
    assert after_a_step(in_codes(), geoopt.optim.RiemannianSGD) == 1.875


@pytest.mark.parametrize("name", ["codes", "grid", "quantize_model, codes"])
def test_an_unknown_retraction_is_refused(name):
    with pytest.raises(ValueError, match=r"retraction='exp'.*exponential"):
        WEIGHTS[name](retraction="exp")


def test_an_optimizer_refuses_an_unknown_retraction():
    with pytest.raises(ValueError, match=r"retraction='exp'.*exponential"):
        RiemannianAdam([in_codes()], retraction="exp")


def test_master_weights_have_no_retraction():
    with pytest.raises(ValueError, match="retraction='euclidean' needs storage='codes' or 'grid'"):
        of_a_layer("master", retraction="euclidean")


# It warns of its last steps, on a grid.
@pytest.mark.filterwarnings("ignore::geoopt.optim.rlinesearch.LineSearchWarning")
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_geoopts_line_search_takes_a_loss_that_is_a_number(rounding):
    """A loss that is a tensor ends in NumPy, on geoopt's own manifolds too."""
    manifold = fm.FP8Manifold("E4M3", rounding=rounding)
    weight = geoopt.ManifoldParameter(manifold.projx(normal(3, 5, seed=1)), manifold=manifold)
    target = normal(3, 5, seed=2)
    search = geoopt.optim.RiemannianLineSearch([weight])

    def closure():
        search.zero_grad()
        loss = (weight - target).square().sum()
        loss.backward()
        return loss.item()

    first = closure()
    for _ in range(12):
        search.step(closure)
    assert on_grid(weight)
    assert closure() < 0.5 * first


def test_momentum_that_is_tangent_stays_as_it_is_on_geoopts_stiefel():
    """There `proju` is no projection, and geoopt's steps with `stabilize` end elsewhere."""
    x = geoopt.Stiefel().projx(normal(5, 3, seed=1, dtype=double))
    target = normal(5, 3, seed=2, dtype=double)
    point, peer = (manifold_parameter(geoopt.Stiefel(), x.clone()) for _ in range(2))
    optimizer = RiemannianAdam([point], 0.02, stabilize=1)
    reference = geoopt.optim.RiemannianAdam([peer], 0.02, stabilize=1)
    for t in range(20):
        noise = normal(5, 3, seed=t, dtype=double, std=0.1)
        for p in (point, peer):
            p.grad = p.detach().as_subclass(Tensor) - target + noise
        optimizer.step()
        reference.step()
    momentum, x = optimizer.state[point]["exp_avg"], point.detach().as_subclass(Tensor)
    assert (x.mT @ momentum + momentum.mT @ x).abs().max() < 1e-12
    change = point.manifold.proju(x, momentum) - momentum
    assert change.abs().max() > 0.1 * momentum.abs().max()
    assert (point - peer).abs().max() > 0.01


@pytest.mark.parametrize("kind", [RiemannianSGD, fm.optim.StiffnessSGD])
def test_after_a_reset_the_first_gradient_is_not_damped(kind):
    p = nn.Parameter(torch.zeros(1))
    optimizer = kind([p], lr=1.0, momentum=0.9, dampening=0.5, reset_every=1)
    for moved in (-1.0, -2.0, -3.0):
        step_from(optimizer, p, torch.ones(1))
        assert p.item() == moved, moved


@pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])
def test_a_manifold_that_is_given_between_planned_steps_counts(kind):
    codes = fm.FP8Parameter(torch.full((4, 4), 0.5), "E4M3")
    point = geoopt.ManifoldParameter(torch.full((4,), 0.5), manifold=geoopt.Euclidean())
    optimizer = kind([codes, point], lr=0.5, float_lr=0.1)
    for manifold in (None, None, None, geoopt.Sphere(), None, geoopt.Euclidean()):
        point.manifold = manifold
        codes.grad = torch.ones(4, 4)
        point.grad = torch.tensor([1.0, -1.0, 0.5, 0.25])
        optimizer.step()
        on_sphere = abs(point.norm().item() - 1) < 1e-6
        assert on_sphere == isinstance(manifold, geoopt.Sphere)


@pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])
def test_an_attribute_of_an_ordinary_parameter_is_no_manifold(kind):
    """Whoever else writes it there: the step is that of Euclidean space."""
    ends = []
    for name in ("manifold", "other"):
        codes = fm.FP8Parameter(torch.full((4, 4), 0.5), "E4M3")
        ordinary = nn.Parameter(torch.full((4,), 0.5))
        setattr(ordinary, name, geoopt.Sphere())
        optimizer = kind([codes, ordinary], lr=0.5, float_lr=0.1)
        for _ in range(4):
            codes.grad, ordinary.grad = torch.ones(4, 4), torch.ones(4)
            optimizer.step()
        ends.append(ordinary.detach())
    assert torch.equal(*ends)
