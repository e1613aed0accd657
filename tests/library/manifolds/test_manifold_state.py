"""Manifolds as modules: state, copies, dtypes, parameters of every shape, and what is
refused.
"""

import copy

import geoopt
import pytest
import torch
from manifold_cases import same_bits, ulp_as_function
from optimizer_cases import step_from, through_disk

import fp8manifold as fm

ROWS = torch.tensor([[0.25], [2.0]])
MAKERS = {
    "continuous": lambda: fm.StiffnessManifold("E4M3", ROWS),
    "continuous-log": lambda: fm.StiffnessManifold("E5M2", 0.5, "log"),
    "function": lambda: fm.StiffnessManifold("E4M3", 0.5, ulp_as_function),
    "nearest": lambda: fm.FP8Manifold("E3M4", 0.5),
    "stochastic": lambda: fm.FP8Manifold("E4M3", ROWS, "stochastic", seed=2**40 + 3),
    "euclidean": lambda: fm.FP8Manifold("E7M0", 2.0, "stochastic", retraction="euclidean"),
}
every_manifold = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def walk(manifold: geoopt.Manifold, steps: int = 3) -> torch.Tensor:
    x = torch.full((2, 50), 0.5)
    for _ in range(steps):
        x = manifold.retr(x, 0.3 * manifold.stiffness(x))
    return x


class Layer(torch.nn.Module):
    def __init__(self, manifold: geoopt.Manifold) -> None:
        super().__init__()
        self.manifold = manifold
        self.weight = geoopt.ManifoldParameter(
            manifold.projx(torch.randn(2, 50)), manifold=manifold
        )


def move_a_little(layer: Layer) -> None:
    layer.weight.data = layer.manifold.retr(layer.weight.data, torch.full((2, 50), 0.01))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@every_manifold
def test_deepcopy_is_equal_and_apart(make) -> None:
    manifold = make()
    walk(manifold)
    twin = copy.deepcopy(manifold)
    assert same_bits(walk(twin), walk(manifold))
    twin.scale.mul_(2)
    assert (twin.scale == 2 * manifold.scale).all()


@every_manifold
def test_state_survives_a_file_without_pickle(make) -> None:
    manifold, fresh = make(), make()
    walk(manifold, 5)
    state = through_disk(manifold.state_dict())
    fresh.scale.fill_(9.0)
    assert str(fresh.load_state_dict(state)) == "<All keys matched successfully>"
    assert same_bits(fresh.scale, manifold.scale)
    assert same_bits(walk(fresh), walk(manifold))


def test_seed_and_counter_are_int64_and_in_the_state() -> None:
    manifold = MAKERS["stochastic"]()
    walk(manifold, 4)
    state = manifold.state_dict()
    assert (int(state["counter"]), int(state["seed_word"])) == (4, 2**40 + 3)
    assert state["counter"].dtype == state["seed_word"].dtype == torch.int64
    assert set(state) == {"scale", "format_fields", "seed_word", "counter"}


def test_a_layer_registers_its_manifold() -> None:
    layer = Layer(fm.FP8Manifold("E4M3", ROWS, "stochastic", seed=5))
    assert dict(layer.named_modules())["manifold"] is layer.manifold
    assert {"manifold.scale", "manifold.counter"} <= set(layer.state_dict())
    optimizer = geoopt.optim.RiemannianAdam(layer.parameters(), lr=0.5)
    for _ in range(3):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    loaded = Layer(fm.FP8Manifold("E4M3", ROWS, "stochastic"))
    loaded.load_state_dict(through_disk(layer.state_dict()))
    assert torch.equal(loaded.weight, layer.weight)
    assert int(loaded.manifold.counter) == 3
    copied = copy.deepcopy(loaded)
    assert layer.weight.manifold is layer.manifold
    assert copied.weight.manifold is copied.manifold
    move_a_little(layer)
    move_a_little(copied)
    assert torch.equal(copied.weight, layer.weight)


@every_manifold
def test_a_manifold_in_float64_has_the_same_figures(make) -> None:
    manifold, wide = make(), make().to(torch.float64)
    assert wide.scale.dtype == torch.float64
    assert wide.format_fields.dtype == torch.int64
    assert wide.dtype == torch.float64
    assert (wide.scale == manifold.scale).all()
    x = manifold.projx(torch.randn(2, 50))
    assert wide.check_point_on_manifold(x.double())
    assert same_bits(wide.stiffness(x.double()), manifold.stiffness(x).double())
    assert same_bits(wide.dist(x, -x), manifold.dist(x, -x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_layer_in_another_dtype_stays_on_its_grid(dtype) -> None:
    """With power-of-two scales every value of E4M3 is a bfloat16."""
    layer = Layer(fm.FP8Manifold("E4M3", ROWS, "stochastic"))
    old_weight = layer.weight.detach().clone()
    layer.to(dtype)
    assert layer.weight.dtype == dtype
    assert (layer.weight.detach().float() == old_weight).all()
    assert layer.manifold.check_point_on_manifold(layer.weight)
    assert int(layer.manifold.counter) == 0
    assert layer.manifold.counter.dtype == torch.int64
    moved = layer.manifold.retr(layer.weight.detach(), torch.ones(2, 50, dtype=dtype))
    assert moved.dtype == dtype
    assert layer.manifold.check_point_on_manifold(moved)


def test_scale_is_copied_and_has_no_gradient() -> None:
    scale = torch.tensor(0.5, requires_grad=True)
    manifold = fm.StiffnessManifold("E4M3", scale)
    with torch.no_grad():
        scale.mul_(4)
    assert float(manifold.scale) == 0.5
    assert not manifold.scale.requires_grad
    assert fm.StiffnessManifold("E4M3", 2).scale.dtype == torch.float32
    assert fm.StiffnessManifold("E4M3", torch.tensor([1, 2])).scale.dtype == torch.float32


@pytest.mark.parametrize("shape", [(), (3,), (1,), (2, 3), (0,), (2, 0), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_parameters_of_every_shape(shape, rounding) -> None:
    manifold = fm.FP8Manifold("E4M3", 0.5, rounding)
    start = manifold.projx(torch.randn(shape) + 3)
    weight = geoopt.ManifoldParameter(start.clone(), manifold=manifold)
    assert weight.shape == shape
    assert same_bits(weight.detach().as_subclass(torch.Tensor), start)
    for optimizer in (
        geoopt.optim.RiemannianAdam([weight], lr=3.0),
        geoopt.optim.RiemannianSGD([weight], lr=100.0),
    ):
        step_from(optimizer, weight, torch.ones(shape))
    assert (weight < start).all()
    assert manifold.check_point_on_manifold(weight)
    assert manifold.dist(weight, start).shape == shape


@pytest.mark.parametrize("scale_shape", [(2, 1), (3,), (1, 3), (2, 3), (1,)], ids=str)
def test_scales_that_broadcast_are_accepted(scale_shape) -> None:
    manifold = fm.FP8Manifold("E4M3", torch.full(scale_shape, 0.5))
    weight = geoopt.ManifoldParameter(manifold.projx(torch.randn(2, 3)), manifold=manifold)
    assert same_bits(
        weight.detach().as_subclass(torch.Tensor),
        fm.FP8Manifold("E4M3", 0.5).projx(weight.detach()),
    )


def test_repr_names_format_scale_metric_and_rounding() -> None:
    assert (
        repr(fm.StiffnessManifold("E4M3", 0.5)) == "Stiffness(E4M3, scale=0.5, metric=ulp) manifold"
    )
    shown = repr(fm.FP8Manifold("e7m0", ROWS, "stochastic", metric="log"))
    assert (
        shown == "FP8(E7M0, scale=tensor of shape (2, 1), metric=log, rounding=stochastic) manifold"
    )
    assert "ulp_as_function" in repr(fm.StiffnessManifold("E4M3", metric=ulp_as_function))
    weight = geoopt.ManifoldParameter(torch.ones(2), manifold=fm.FP8Manifold("E4M3"))
    assert "FP8(E4M3" in repr(weight)
