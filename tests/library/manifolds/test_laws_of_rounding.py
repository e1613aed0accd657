"""The laws of `docs/laws.md`, measured on toys by the library's own steps, without a
free parameter.

Every toy has thousands of independent weights. What a law says is compared with the
mean over them, and may differ by four standard errors of that mean. Each test also
holds that a factor of two would be farther away than that.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import geoopt
import pytest
import torch
from torch import Tensor

import fp8manifold as fm

#: standard errors by which a measured mean may differ
ERRORS = 4.0
WEIGHTS = 3000
#: rate times curvature of the toys: they forget within some tens of steps
RATE = 0.05


def on_grid(values: Tensor, fmt: str) -> geoopt.ManifoldParameter:
    manifold = fm.FP8Manifold(fmt, rounding="stochastic")
    return geoopt.ManifoldParameter(manifold.projx(values), manifold=manifold)


def spacing_towards(w: Tensor, step: Tensor, fmt: str) -> Tensor:
    """Return the distance from numbers of the grid to the neighbour that a step points
    to.
    """
    return fm.ulp(torch.nextafter(w, w + step.sign()), fmt)


def agrees(measured: Tensor, predicted: Tensor | float) -> None:
    """Hold that the means over independent weights agree, and that the measurement would
    tell a factor of two.
    """
    difference = measured - predicted
    error = difference.std() / difference.numel() ** 0.5
    scale = torch.as_tensor(predicted).mean().abs()
    assert difference.mean().abs() < ERRORS * error, (measured.mean(), scale, error)
    assert 2 * ERRORS * error < scale / 2, "too few samples to tell a factor of two"


@dataclass
class Toy:
    """Independent weights on a grid, each with a minimum and a noisy gradient."""

    fmt: str
    minimum: Tensor
    #: deviation of the gradient's noise, by weight
    noise: Tensor
    curvature: float | Tensor = 1.0
    rate: float = RATE
    momentum: float = 0.0
    #: the direction of descent, from the gradient
    direction: Callable[[Tensor], Tensor] = lambda gradient: gradient

    def run(self, steps: int, burn_in: int) -> "Averages":
        """Take steps from the minima; average over those after `burn_in`."""
        weight = on_grid(self.minimum, self.fmt)
        optimizer = fm.optim.StiffnessSGD(
            [weight], lr=self.rate, momentum=self.momentum, dampening=self.momentum
        )
        generator = torch.Generator().manual_seed(1)
        zero = torch.zeros_like(self.minimum)
        averages = Averages(zero, zero, zero, zero)
        step = zero
        for number in range(steps):
            away = weight.detach() - self.minimum
            noise = self.noise * torch.randn(zero.shape, generator=generator)
            gradient = self.curvature * away + noise
            new = self.direction(gradient)
            step = self.momentum * step + (1 - self.momentum) * new if number else new
            if number >= burn_in:
                spacing = spacing_towards(weight.detach(), -step, self.fmt)
                assert bool((self.rate * step.abs() < spacing).all()), "a step beyond one ULP"
                averages += Averages(
                    self.curvature * away.square() / 2,
                    spacing * gradient.abs() / 4,
                    spacing * step.abs(),
                    2 * away * step,
                )
            weight.grad = new
            optimizer.step()
        return averages / (steps - burn_in)


@dataclass(frozen=True)
class Averages:
    """Means over time, by weight."""

    #: what the loss exceeds its minimum by
    excess: Tensor
    #: ``S |g| / 4``
    floor: Tensor
    #: ``S |d|``, rounding's part of the balance of second moments
    rounding: Tensor
    #: ``2 x d``, the steps' part of it
    descent: Tensor

    def __add__(self, added: "Averages") -> "Averages":
        pairs = zip(vars(self).values(), vars(added).values(), strict=True)
        return Averages(*(mine + new for mine, new in pairs))

    def __truediv__(self, number: float) -> "Averages":
        return Averages(*(value / number for value in vars(self).values()))


def toy(fmt: str, **settings) -> Toy:
    """Weights in the middle of the binade from 1 to 2, with noise of about an ULP."""
    generator = torch.Generator().manual_seed(0)
    minimum = 1.3 + 0.4 * torch.rand(WEIGHTS, generator=generator)
    return Toy(fmt, minimum, fm.ulp(minimum, fmt), **settings)


def pair_mixture(correlation: float, gradient: Tensor) -> Tensor:
    """Return ``P g`` for a preconditioner that mixes weights by twos."""
    first, second = gradient.view(-1, 2).unbind(1)
    mixed = [first + correlation * second, second + correlation * first]
    return torch.stack(mixed, 1).view(-1)


@pytest.mark.parametrize("fmt", ["E4M3", "E5M2", "E2M5"])
def test_the_floor_is_a_quarter_of_the_gradient_in_codes_for_every_rate(fmt) -> None:
    fast = toy(fmt).run(600, 100)
    slow = toy(fmt, rate=RATE / 4).run(1600, 400)
    agrees(fast.excess, fast.floor)
    agrees(slow.excess, slow.floor)
    agrees(fast.excess, slow.excess)


@pytest.mark.parametrize(
    "settings",
    [{"momentum": 0.9}, {"direction": torch.sign, "rate": 0.02}],
    ids=["momentum", "sign of the gradient"],
)
def test_any_direction_balances_its_own_rounding(settings) -> None:
    averages = toy("E4M3", **settings).run(800, 200)
    agrees(averages.descent, averages.rounding)


def test_the_sign_of_a_noisy_gradient_has_a_floor_higher_by_half_pi() -> None:
    spacing = 1 / 32
    noise = torch.full((WEIGHTS,), 40 * spacing)
    averages = Toy("E1M6", torch.zeros(WEIGHTS), noise, direction=torch.sign, rate=spacing / 4).run(
        1500, 500
    )
    agrees(averages.excess, averages.floor * math.pi / 2)


def test_a_preconditioner_that_mixes_weights_has_another_floor() -> None:
    """The floor has ``(P^-1)_ii E|(P g)_i|`` in place of ``E|g_i|``."""
    correlation, spacing = 0.8, 1 / 32
    noise = torch.full((WEIGHTS,), 4 * spacing)
    averages = Toy(
        "E1M6",
        torch.zeros(WEIGHTS),
        noise,
        direction=partial(pair_mixture, correlation),
        rate=0.01,
    ).run(2000, 1000)
    of_pairs = averages.rounding.view(-1, 2).mean(1) / (1 - correlation**2) / 4
    excess = averages.excess.view(-1, 2).mean(1)
    # what the law leaves out is of the order of the step in ULPs, 0.01 * 4 here
    agrees(excess, of_pairs)
    assert excess.mean() > 2 * averages.floor.mean()


def test_of_a_short_training_only_the_share_at_equilibrium_arrives() -> None:
    steps, spacing = 160, 1 / 32
    curvatures = torch.tensor([0.25, 1.0, 4.0]).repeat(WEIGHTS)
    noise = torch.full_like(curvatures, 40 * spacing)
    rate = spacing / (8 * noise[0].item())
    end = Toy("E1M6", torch.zeros_like(noise), noise, curvatures, rate).run(steps + 1, steps)
    full = spacing * noise * math.sqrt(2 / math.pi) / 4
    share = 1 - (1 - 2 * rate * curvatures) ** steps
    assert share[:3].tolist() == pytest.approx([0.22, 0.63, 0.98], abs=0.01)
    agrees(end.excess[0::3], (full * share)[0::3])
    agrees(end.excess[1::3], (full * share)[1::3])
    agrees(end.excess[2::3], (full * share)[2::3])
    agrees(end.excess, full * share)


@pytest.mark.parametrize(
    ("retraction", "proportional", "upper", "top"),
    [
        ("euclidean", False, 1, 1),
        ("euclidean", True, 1 / 2, 1 / 4),
        ("exponential", True, 1, 1),
    ],
)
def test_zero_mean_steps_come_to_rest_uniform_over_codes(
    retraction, proportional, upper, top
) -> None:
    """Even steps, and steps in ULPs along the chart, spread evenly over codes; steps in
    ULPs straight in value have half the mass for each binade up.
    """
    count = 20_000
    manifold = fm.FP8Manifold("E2M1", rounding="stochastic", retraction=retraction)
    codes = manifold.from_chart(torch.arange(-7.0, 8.0))
    weight = torch.zeros(count)
    generator = torch.Generator().manual_seed(2)
    for _ in range(1000):
        sign = 2.0 * torch.randint(2, (count,), generator=generator) - 1
        size = manifold.stiffness(weight) if proportional else 0.5
        weight = manifold.retr(weight, 0.45 * size * sign)
    mass = torch.where(codes.abs() >= 4, top, torch.where(codes.abs() >= 2, upper, 1.0))
    predicted = mass / mass.sum()
    share = (weight[:, None] == codes).float().mean(0)
    errors = (share - predicted) / (predicted * (1 - predicted) / count).sqrt()
    assert errors.abs().max() < ERRORS, (share, predicted)


@pytest.mark.parametrize("length", [0.01, 0.1])
def test_of_a_smooth_chart_the_exponential_map_drifts_by_half_the_slope_of_log_s(length) -> None:
    manifold = fm.StiffnessManifold("E4M3", metric="log")
    x = torch.linspace(0.1, 100, 1000, dtype=torch.float64)
    u = length * x
    drift = (manifold.expmap(x, u) + manifold.expmap(x, -u)) / 2 - x
    # S'/S is 1/x, and the next term of the even part is of the fourth order
    torch.testing.assert_close(drift, u.square() / x / 2, rtol=length**2 / 10, atol=0)


@pytest.mark.parametrize(("fmt", "mantissa_bits"), [("E5M2", 2), ("E4M3", 3), ("E3M4", 4)])
def test_of_a_grid_the_drift_is_that_of_the_rounded_step(fmt, mantissa_bits) -> None:
    """Over the codes from 1 to 2, ``S'/S E[D^2] / 2`` with ``E[D^2] = S E|u|`` is an
    eighth of an ULP, at 1 alone, for steps of half an ULP.
    """
    codes = 2**mantissa_bits
    x = (1 + torch.arange(codes) / codes).repeat(800_000 // codes)
    sign = 2.0 * torch.randint(2, x.shape, generator=torch.Generator().manual_seed(3)) - 1
    ends = []
    for retraction in ("exponential", "euclidean"):
        manifold = fm.FP8Manifold(fmt, rounding="stochastic", retraction=retraction, seed=4)
        ends.append(manifold.retr(x, sign / codes / 2))
    difference = ends[0] - ends[1]
    agrees(difference[::codes], 1 / 8 / codes)
    agrees(difference, 1 / 8 / codes**2)


@pytest.mark.parametrize(("fmt", "mantissa_bits"), [("E4M3", 3), ("E5M2", 2)])
def test_steps_of_zero_mean_in_ulps_drive_weights_outwards_along_the_chart_alone(
    fmt, mantissa_bits
) -> None:
    growth = math.exp(100 / 4 * (math.log(2) / 2**mantissa_bits) ** 2)
    for retraction, predicted in (("exponential", growth), ("euclidean", 1.0)):
        manifold = fm.FP8Manifold(fmt, rounding="stochastic", retraction=retraction)
        generator = torch.Generator().manual_seed(5)
        weight = manifold.projx(torch.rand(40_000, generator=generator) + 0.5)
        means = []
        for number in range(200):
            if number == 100:
                means.append(weight.abs())
            sign = 2.0 * torch.randint(2, weight.shape, generator=generator) - 1
            weight = manifold.retr(weight, sign * manifold.stiffness(weight) / 2)
        agrees(weight.abs(), predicted * means[0])
