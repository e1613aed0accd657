"""RiemannianAdam and RiemannianSGD on our manifolds: torch's optimizers in the chart."""

import copy
import math
from functools import partial

import geoopt
import pytest
import torch
from manifold_cases import ruler
from optimizer_cases import ROWS, free_weight, grid_weight, normal, on, on_grid, step_from, values
from paths import PATHS, by
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
        self.ruler, self.scale = (
            ruler(fm.FloatFormat.from_string(name)),
            torch.as_tensor(scale, dtype=double),
        )

    def code(self, w):
        return torch.from_numpy(self.ruler.chart((w / self.scale).numpy()))

    def value(self, c):
        return torch.from_numpy(self.ruler.inverse(c.detach().numpy())) * self.scale

    def stiffness(self, w):
        return torch.from_numpy(self.ruler.stiffness((w / self.scale).numpy())) * self.scale


def start_and_targets(chart):
    """Codes in the middle of the range, a few of them near zero, with targets on the
    other side or beyond a binade.
    """
    reach = min(chart.ruler.codes[-1] / 4, 20.0)
    codes = normal(3, 8, seed=11, dtype=double).clamp(-2, 2) * reach / 2
    return chart.value(codes), chart.value(codes.flip(1) * -0.7 + 0.3)


def follow(name, scale, ours, theirs, steps=200):
    """Largest distance in codes between ours on the manifold and torch's on codes with
    gradient S g; crossings.
    """
    chart = Chart(name, scale)
    start, targets = start_and_targets(chart)
    weight = free_weight(start, name, scale)
    codes = nn.Parameter(chart.code(start))
    optimizer, reference = ours([weight]), theirs([codes])
    worst, crossings = 0.0, 0
    for _ in range(steps):
        weight.grad = values([weight])[0] - targets
        w = chart.value(codes)
        codes.grad = chart.stiffness(w) * (w - targets)
        sign = weight.detach().sign()
        optimizer.step()
        reference.step()
        crossings += int((weight.detach().sign() != sign).sum())
        worst = max(worst, (chart.code(weight.detach()) - codes).abs().max().item())
    return worst, crossings


@pytest.mark.covering(1)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", FORMATS)
def test_adam_is_adam_on_codes(name, scale):
    """The theorem: 200 steps, 1e-10 codes."""
    ours, theirs = (
        partial(RiemannianAdam, lr=0.5, eps=0.0, **UNBOUNDED),
        partial(torch.optim.Adam, lr=0.5, eps=0.0),
    )
    worst, crossings = follow(name, SCALES[scale], ours, theirs)
    assert worst < 1e-10
    assert crossings >= 5


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.7, "dampening": 0.4},
    ],
)
@pytest.mark.parametrize("name", FORMATS)
def test_sgd_is_sgd_on_codes(name, options):
    """Momentum starts from the first gradient in codes, as torch's does. The step is
    kept below the curvature, S^2.
    """
    chart = Chart(name, SCALES["0.3"])
    lr = 0.1 / max(chart.stiffness(x).max().item() for x in start_and_targets(chart)) ** 2
    ours, theirs = (
        partial(RiemannianSGD, lr=lr, **options, **UNBOUNDED),
        partial(torch.optim.SGD, lr=lr, **options),
    )
    worst, crossings = follow(name, SCALES["0.3"], ours, theirs)
    assert worst < 1e-10
    assert crossings >= 1 or name == "E7M0"  # near zero its steps are all but nothing


def test_default_learning_rates():
    for kind in (RiemannianAdam, RiemannianSGD):
        assert kind([grid_weight()]).param_groups[0]["lr"] == 0.5
        assert kind([nn.Parameter(torch.ones(2))]).param_groups[0]["lr"] == 1e-3
        assert kind([on(geoopt.Sphere(), normal(4))]).param_groups[0]["lr"] == 1e-3
        groups = kind(
            [{"params": [nn.Parameter(torch.ones(2))]}, {"params": grid_weight()}]
        ).param_groups
        assert [g["lr"] for g in groups] == [1e-3, 0.5]


@pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])
def test_a_mixed_list_needs_float_lr(kind):
    """Groups that share an lr in ULPs are one, too."""
    grid, plain = {"params": [grid_weight()]}, {"params": [nn.Parameter(torch.ones(2))]}
    mixed = [*grid["params"], *plain["params"]]
    refused = [(given, lr) for given in (mixed, [{"params": mixed}]) for lr in (None, 0.5)]
    for given, lr in [*refused, ([grid, plain], 0.5), ([plain, grid], 0.5)]:
        with pytest.raises(ValueError, match="float_lr"):
            kind([dict(g) if isinstance(g, dict) else g for g in given], lr)
    for lr in (None, 0.5):
        kind(mixed, lr, float_lr=1e-3)
        kind([{"params": mixed, "float_lr": 1e-3}], lr)
    kind([dict(grid), {**plain, "lr": 1e-3}], 0.5)
    optimizer = kind([dict(grid)], 0.5)
    with pytest.raises(ValueError, match="float_lr"):
        optimizer.add_param_group(dict(plain))
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({**plain, "float_lr": 1e-3})


def float_step(optimizer, plain):
    before = plain.detach().clone()
    step_from(optimizer, plain, torch.ones_like(plain))
    return float((before - plain.detach()).max())


@pytest.mark.parametrize("kind", [RiemannianSGD, RiemannianAdam])
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_float_lr_follows_the_schedule_of_lr(tensor, kind):
    """From the lr it was given with: OneCycleLR begins at a 25th of its peak."""
    plain = nn.Parameter(torch.zeros(3, dtype=double))
    optimizer = kind([grid_weight(), plain], torch.tensor(0.5) if tensor else 0.5, float_lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 / (t + 1))
    seen = []
    for _ in range(4):
        seen.append(float_step(optimizer, plain))
        scheduler.step()
    assert seen == pytest.approx([0.01, 0.005, 0.01 / 3, 0.0025], rel=1e-6)
    optimizer = kind([grid_weight(), plain], 0.5, float_lr=0.01)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    assert float_step(optimizer, plain) == pytest.approx(0.01 / 25, rel=1e-6)


@pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_decay_follows_the_schedule_and_not_the_size_of_lr(kind, tensor):
    """w (1 - wd lr / initial_lr), with no gradient left."""
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
def test_weights_of_any_size_take_the_same_steps(amsgrad, path):
    """Weights times a power of two have the same codes and so the same steps, to the
    last bit; draws follow values.
    """
    taken = []
    for exponent in (0, -40, -64, -80, -100, 60, 90):
        p = fm.FP8Parameter(normal(8, 32) * 2.0**exponent, "E4M3", seed=0)
        optimizer = by(
            path, RiemannianAdam([p], lr=0.7, writeback="nearest", refresh_every=2, amsgrad=amsgrad)
        )
        for t in range(6):
            step_from(optimizer, p, normal(8, 32, seed=t))
        state = optimizer.state[p]
        assert optimizer.skipped_steps == 0
        taken.append([p.codes, state["exp_avg"], state["exp_avg_sq"]])
    assert all(
        torch.equal(x, y) for other in taken[1:] for x, y in zip(taken[0], other, strict=True)
    )


FOREIGN = {
    "sphere": (geoopt.Sphere(), (4, 5)),
    "stiefel": (geoopt.Stiefel(), (5, 3)),
    "ball": (geoopt.PoincareBall(), (4, 3)),
    "euclidean": (geoopt.Euclidean(), (3, 3)),
    "plain": (None, (4,)),
}


def assert_follows_geoopt(manifold, shape, ours, theirs, **options):
    x, target = normal(*shape, seed=1, dtype=double, std=0.3), normal(*shape, seed=2, dtype=double)
    mine, peer = (
        nn.Parameter(x.clone()) if manifold is None else on(copy.deepcopy(manifold), x)
        for _ in "ab"
    )
    begin = values([mine])[0]
    optimizer, reference = ours([mine], 0.02, **options), theirs([peer], 0.02, **options)
    for t in range(100):
        noise = normal(*shape, seed=50 + t, dtype=double, std=0.1)
        for p in (mine, peer):
            p.grad = p.detach().as_subclass(Tensor) - target + noise
        optimizer.step()
        reference.step()
        assert (mine - peer).abs().max() < 1e-12
    assert (mine.detach().as_subclass(Tensor) - begin).abs().max() > 0.01


#: the optimizer of both and its options
RULES = [
    *(
        ("RiemannianAdam", {"betas": (0.8, 0.99), "eps": 1e-7, "amsgrad": amsgrad})
        for amsgrad in (False, True)
    ),
    ("RiemannianAdam", {"weight_decay": 0.3}),
    *(("RiemannianSGD", {"weight_decay": weight_decay}) for weight_decay in (0, 0.3)),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", FOREIGN)
def test_steps_elsewhere_are_geoopts(name, rule):
    ours, theirs = (getattr(house, rule[0]) for house in (fm.optim, geoopt.optim))
    assert_follows_geoopt(*FOREIGN[name], ours, theirs, **rule[1])


class Projecting(type(geoopt.Stiefel())):  # the class of the canonical one
    """Stiefel with a projection of vectors; geoopt's ``x (x^T u - u^T x) + ...``
    doubles a part of what is tangent.
    """

    def proju(self, x, u):
        symmetric = x.mT @ u
        return u - x @ (symmetric + symmetric.mT) / 2


STABLE = {
    **FOREIGN,
    "stiefel": (Projecting(), (5, 3)),
    "euclidean stiefel": (geoopt.EuclideanStiefel(), (5, 3)),
}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", STABLE)
def test_stabilising_elsewhere_is_geoopts(name, every):
    for kind in (RiemannianAdam, RiemannianSGD):
        assert_follows_geoopt(
            *STABLE[name], kind, getattr(geoopt.optim, kind.__name__), stabilize=every
        )


@pytest.mark.parametrize(
    "options", [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}], ids=str
)
def test_sgd_elsewhere_starts_momentum_from_the_riemannian_gradient(options):
    """On a sphere the first step is along the projected gradient; geoopt's starts from
    the raw one.
    """
    sphere = geoopt.Sphere()
    x = sphere.projx(normal(4, seed=1, dtype=double))
    point = geoopt.ManifoldParameter(x.clone(), manifold=sphere)
    point.grad = normal(4, seed=2, dtype=double)
    tangent = sphere.egrad2rgrad(x, point.grad)
    RiemannianSGD([point], 0.1, **options).step()
    factor = 1.9 if "nesterov" in options else 1.0
    assert (point.detach() - sphere.retr(x, -0.1 * factor * tangent)).abs().max() < 1e-15


@pytest.mark.parametrize("make", [fm.optim.RiemannianAdam, fm.optim.RiemannianSGD])
def test_the_manifolds_own_retraction_is_taken(make):
    """One code inwards from a power of two is half as far as one ULP: the two
    retractions differ there.
    """
    landed = {}
    for retraction in ("exponential", "euclidean"):
        manifold = fm.FP8Manifold("E4M3", retraction=retraction)
        weight = geoopt.ManifoldParameter(torch.tensor([2.0]), manifold=manifold)
        weight.grad = torch.tensor([4.0])  # S g = 1: Adam's first direction and SGD's alike
        make([weight], lr=1.0).step()
        landed[retraction] = weight.item()
    assert landed == {"exponential": 1.875, "euclidean": 1.75}


HOLDERS = {
    "codes": lambda how: fm.FP8Parameter(torch.tensor([2.0]), "E4M3", rounding="nearest", **how),
    "grid": lambda how: geoopt.ManifoldParameter(
        torch.tensor([2.0]), manifold=fm.FP8Manifold("E4M3", **how)
    ),
    "quantize_model, fp8": lambda how: _one_weight("fp8", how),
    "quantize_model, grid": lambda how: _one_weight("grid", how),
    "quantize_model, parameters": lambda how: _one_weight("fp8", how, parameters="*"),
}


def _one_weight(storage, how, **more):
    layer = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(2.0)
    formats = None if more else "E4M3"
    more = {"parameters": {"*": "E4M3"}} if more else {}
    model = fm.quantize_model(
        nn.Sequential(layer), formats, storage, rounding="nearest", **how, **more
    )
    return model[0].weight


def _landed(weight, make, **options):
    weight.grad = torch.full_like(weight, 4.0)
    make([weight], lr=1.0, **options).step()
    return weight.detach().reshape(()).item()


@pytest.mark.parametrize("make", [fm.optim.RiemannianAdam, fm.optim.RiemannianSGD])
@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_the_weights_retraction_is_taken_unless_the_optimizer_has_another(holder, make):
    euclidean, exponential = ({"retraction": name} for name in ("euclidean", "exponential"))
    assert _landed(holder({}), make) == 1.875
    assert _landed(holder(euclidean), make) == 1.75
    assert _landed(holder({}), make, **euclidean) == 1.75
    assert _landed(holder(euclidean), make, **exponential) == 1.875


def test_geoopts_optimizer_takes_a_code_weights_retraction():
    """``S^2 g`` is one ULP here, too."""
    made = HOLDERS["codes"]({"retraction": "euclidean"})
    assert _landed_by_geoopt(made) == 1.75
    assert _landed_by_geoopt(HOLDERS["codes"]({})) == 1.875


def _landed_by_geoopt(weight):
    weight.grad = torch.tensor([4.0])
    geoopt.optim.RiemannianSGD([weight], lr=1.0).step()
    return weight.item()


def test_an_unknown_retraction_is_refused():
    for made in (HOLDERS["codes"], HOLDERS["grid"], HOLDERS["quantize_model, fp8"]):
        with pytest.raises(ValueError, match=r"retraction='exp'.*exponential"):
            made({"retraction": "exp"})
    with pytest.raises(ValueError, match=r"retraction='exp'.*exponential"):
        RiemannianAdam([HOLDERS["codes"]({})], retraction="exp")
    with pytest.raises(ValueError, match="retraction='euclidean' needs storage='fp8' or 'grid'"):
        _one_weight("master", {"retraction": "euclidean"})


@pytest.mark.filterwarnings(
    "ignore::geoopt.optim.rlinesearch.LineSearchWarning"
)  # of the last steps, on a grid
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
    """Its ``proju`` is no projection there, and geoopt's own steps with ``stabilize``
    end elsewhere.
    """
    x, target = (
        geoopt.Stiefel().projx(normal(5, 3, seed=1, dtype=double)),
        normal(5, 3, seed=2, dtype=double),
    )
    mine, peer = (on(geoopt.Stiefel(), x.clone()) for _ in range(2))
    optimizer = RiemannianAdam([mine], 0.02, stabilize=1)
    theirs = geoopt.optim.RiemannianAdam([peer], 0.02, stabilize=1)
    for t in range(20):
        for p in (mine, peer):
            p.grad = (
                p.detach().as_subclass(Tensor)
                - target
                + normal(5, 3, seed=t, dtype=double, std=0.1)
            )
        optimizer.step()
        theirs.step()
    momentum, point = optimizer.state[mine]["exp_avg"], mine.detach().as_subclass(Tensor)
    assert (point.mT @ momentum + momentum.mT @ point).abs().max() < 1e-12
    assert (
        mine.manifold.proju(point, momentum) - momentum
    ).abs().max() > 0.1 * momentum.abs().max()
    assert (mine - peer).abs().max() > 0.01


@pytest.mark.parametrize("kind", [RiemannianSGD, fm.optim.StiffnessSGD])
def test_after_a_reset_the_first_gradient_is_not_damped(kind):
    p = nn.Parameter(torch.zeros(1))
    optimizer = kind([p], lr=1.0, momentum=0.9, dampening=0.5, reset_every=1)
    for moved in (-1.0, -2.0, -3.0):
        step_from(optimizer, p, torch.ones(1))
        assert p.item() == moved
