"""Draws that keep their distance: uniform each, evenly spread in time, and the same bits wherever they are drawn."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from laws import each
from numpy.typing import NDArray
from optimizer_cases import normal, put_gradients, same_bits, snapshot
from paths import PATHS, by
from torch import Tensor

import fp8manifold as fm
from fp8manifold import reference
from fp8manifold.random_bits import EPOCH

N = 2048
Updates = Callable[[int, NDArray[np.float64]], NDArray[np.float64]]


def dithered(step: int, n: int = N, **words: int) -> NDArray[np.int64]:
    return fm.random_bits(n, step=step, draws="dither", **{"seed": 5, **words}).numpy().astype(np.int64)


def test_a_draw_is_the_epochs_word_and_a_phase() -> None:
    """The rule, in whole numbers, over the end of an epoch."""
    first = fm.random_bits(N, seed=5, step=0, draws="dither").to(torch.int64)
    for step in (1, 2, EPOCH - 1):
        moved = dithered(step) - first.numpy()
        asked = 0x9E3779B9 * step % 2**32 / 256
        assert set((moved - np.floor(asked).astype(np.int64)) % 2**24) <= {0, 1}  # the low byte carries
    assert (dithered(EPOCH) != dithered(0)).mean() > 0.99
    assert abs(np.corrcoef(dithered(EPOCH), dithered(0))[0, 1]) < 4 / N**0.5


@each("step", [0, 1, 17, EPOCH, 2**40])
def test_each_draw_is_uniform(step: int) -> None:
    draws = dithered(step, 2**16)
    for bit in range(24):
        assert abs(((draws >> bit) & 1).mean() - 0.5) < 4 * 0.5 / 2**8
    assert abs(draws.mean() / 2**24 - 0.5) < 4 / 12**0.5 / 2**8


def test_draws_of_elements_streams_and_seeds_are_independent() -> None:
    base = dithered(3).astype(float)
    others = [dithered(3, stream=1), dithered(3, seed=6), dithered(3, seed=5, stream=2**40), np.roll(base, 1)]
    others += [fm.random_bits(N, seed=5, step=3).numpy(), np.roll(dithered(4), 1)]
    for other in others:
        assert abs(np.corrcoef(base, other.astype(float))[0, 1]) < 4 / N**0.5


def test_parts_have_the_draws_of_the_whole() -> None:
    whole = fm.random_bits(100, seed=1, step=300, stream=2, offset=2**32 - 50, draws="dither")
    parts = [
        fm.random_bits(10, seed=1, step=300, stream=2, offset=2**32 - 50 + k, draws="dither") for k in range(0, 100, 10)
    ]
    assert torch.equal(whole, torch.cat(parts))


def constant(size: float) -> Updates:
    return lambda t, noise: np.full(N, size)


def periodic(period: int, size: float) -> Updates:
    return lambda t, noise: np.full(N, 0.01 + size * np.cos(2 * np.pi * t / period))


def alternating(size: float) -> Updates:
    return lambda t, noise: np.full(N, size * (-1.0) ** t)


STREAMS: dict[str, Updates] = {
    "constant": constant(0.01),
    "a tenth": constant(0.1),
    "white, 0.3": lambda t, noise: 0.3 * noise,
    "white, 0.02": lambda t, noise: 0.02 * noise,
    **{f"period {p}, {size}": periodic(p, size) for p in (2, 3, 5, 7) for size in (0.003, 0.03, 0.3)},
    **{f"alternating, {size}": alternating(size) for size in (0.01, 0.1, 0.4)},
}


def errors(updates: Updates, steps: int, draws: str) -> NDArray[np.float64]:
    """The errors that rounding in every step leaves of each element, in ULPs of a uniform grid."""
    generator = np.random.default_rng(3)
    codes, exact = np.zeros(N), np.zeros(N)
    for t in range(steps):
        asked = updates(t, generator.standard_normal(N))
        drawn = fm.random_bits(N, seed=1, step=t + 1, stream=9, draws=draws).numpy() / 2**24  # type: ignore[arg-type]
        exact += asked
        codes = np.floor(codes + asked + 1 - drawn - 2.0**-25)  # away from zero where the draw is below the fraction
    return codes - exact


@each("name", STREAMS)
@each("steps", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_stream_of_updates_is_worse_or_biased(name: str, steps: int) -> None:
    left, before = (errors(STREAMS[name], steps, draws) for draws in ("dither", "independent"))
    rms, rms_before = (float(np.sqrt((e**2).mean())) for e in (left, before))
    assert rms <= rms_before * (1 + 4 / (2 * N) ** 0.5)
    assert abs(left.mean()) < 4 * left.std() / N**0.5 + 1e-9


@each("fmt", ["E4M3", "E5M2", "E2M5", "E4M3FNUZ"])
@each("way", [1, -1], ids=["down", "up"])
def test_a_weight_that_crosses_0_goes_no_further_than_asked(fmt: str, way: int) -> None:
    ulp = fm.FloatFormat.from_string(fmt).ulp_min
    for draws, spread in (("dither", 0.75), ("independent", 2.0)):
        w = torch.full((20_000,), way * ulp)
        for t in range(20):
            w = fm.round_to_grid(w - way * 0.1 * ulp, fmt, "stochastic", seed=0, step=t, draws=draws)  # type: ignore[arg-type]
        moved = way - w.double() / ulp
        assert float(moved.mean()) == pytest.approx(2.0 * way, abs=4 * float(moved.std()) / 20_000**0.5)
        assert float(moved.std()) < spread


@each("fmt", ["E4M3", "E5M2", "E2M5", "E7M0", "E2M1"])
def test_rounding_is_the_oracles_and_right_in_the_mean(fmt: str) -> None:
    x = torch.cat([normal(300, seed=1), torch.tensor([0.0, -0.0, 1e-3, -(2.0**-9), 7.0, 1e30, -1e30])])
    bits = fm.random_bits(x.shape, seed=2, step=77, stream=3, draws="dither")
    ours = fm.round_to_grid(x, fmt, "stochastic", seed=2, step=77, stream=3, draws="dither")
    theirs = [
        reference.round_to_grid(v, fmt, "stochastic", bits=d) for v, d in zip(x.tolist(), bits.tolist(), strict=True)
    ]
    assert same_bits(ours, torch.tensor(theirs))
    value = torch.full((N,), 1.03)
    total = sum(fm.round_to_grid(value, fmt, "stochastic", seed=4, step=t, draws="dither").double() for t in range(200))
    assert isinstance(total, Tensor)
    mean = float(total.mean()) / 200
    assert mean == pytest.approx(1.03, abs=4 * float((total / 200).std()) / N**0.5 + 1e-6)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (fm.optim.StiffnessAdamW, {"lr": 0.01, "moments": "8bit"}),
    "adamw, residual8": (fm.optim.StiffnessAdamW, {"lr": 0.01, "writeback": "residual8", "stiffness": 1.0}),
    "sgd": (fm.optim.StiffnessSGD, {"lr": 0.1, "momentum": 0.9, "moments": "bfloat16"}),
    "muon": (fm.optim.StiffnessMuon, {"lr": 0.02, "moments": "8bit"}),
    "riemannian": (fm.optim.RiemannianAdam, {"lr": 1.3, "writeback": "stochastic"}),
}


def stepped(name: str, steps: int, draws: str | None, path: str, own: str = "independent") -> Any:
    kind, options = CASES[name]
    weights = [fm.FP8Parameter(normal(33, 64, seed=k), "E4M3", seed=k, draws=own) for k in range(2)]
    given = {} if draws is None else {"draws": draws}
    optimizer = by(path, kind(weights, **options, **given))
    for t in range(steps):
        put_gradients(weights, t)
        optimizer.step()
    return optimizer


@each("name", CASES)
def test_native_and_eager_steps_have_the_same_bits(name: str) -> None:
    ours = [snapshot(stepped(name, 3, "dither", path)) for path in PATHS]
    assert all(each["parameters"] == ours[0]["parameters"] for each in ours)
    assert ours[0]["parameters"] != snapshot(stepped(name, 3, "independent", "native"))["parameters"]


def test_operators_write_into_codes_with_independent_draws() -> None:
    moved = {}
    for draws in ("dither", "independent"):
        weight = fm.FP8Parameter(torch.full((1, 4000), 1.0), "E2M5", scale=1.0, seed=1, draws=draws)  # type: ignore[arg-type]
        before = weight.dequantize()
        for _ in range(40):
            weight.grad = torch.full((1, 4000), -0.1 / 32)
            torch.optim.SGD([weight], lr=1.0).step()
        moved[draws] = (weight.dequantize() - before) * 32
    assert torch.equal(moved["dither"], moved["independent"])
    assert float(moved["dither"].std()) == pytest.approx((40 * 0.1 * 0.9) ** 0.5, rel=0.05)


def test_the_manifold_and_a_saved_weight_keep_their_draws(tmp_path: Any) -> None:
    weight = fm.FP8Parameter(normal(4, 32, seed=0), "E4M3", draws="dither")
    assert weight.manifold.draws == "dither"
    torch.save(weight, tmp_path / "weight.pt")
    for copy in (weight.clone(), weight.to(torch.bfloat16), torch.load(tmp_path / "weight.pt", weights_only=True)):
        assert copy.draws == "dither"
