"""Native and compiled steps have the bits of eager ones: weights, residuals and averages, for every kind of step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from optimizer_cases import free_weight, grid_weight, normal, snapshot
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold._numerics.charts import UlpChart
from fp8manifold._numerics.stiffness import exp2_exact
from fp8manifold.optim import CompileUnavailableWarning, _backends, anneal
from fp8manifold.optim._directions import adam, madam, named
from fp8manifold.optim._slot import row_of

#: Rows that share nothing, square, long, short, odd: all of them one spec, whose graph has no size in it.
SHAPES = ((5, 7), (64, 33), (2, 300), (96, 96))

#: ``compile`` of what is compared with plain PyTorch
NATIVE, COMPILED = None, True


@pytest.fixture
def compiler(cpp_compiler: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A compiler that nobody has used, and no limit that is passed without a word."""
    monkeypatch.setattr(_backends, "_functions", {})
    monkeypatch.setattr(_backends, "_failed", set())
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def of_codes(name: str = "E4M3", granularity: Any = "channel", shapes: Any = SHAPES, **options: Any) -> list[Tensor]:
    return [
        fm.FP8Parameter(normal(*shape, seed=i, std=0.1), name, granularity=granularity, **{"seed": i, **options})
        for i, shape in enumerate(shapes)
    ]


def take(optimizer: Any, t: int) -> None:
    """A step with gradients over a few binades and some zeros."""
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        g = normal(*p.shape, seed=1000 * t + i) * torch.exp2(normal(*p.shape, seed=t).mul(2).round())
        p.grad = torch.where(g.abs() < 0.05, 0.0, g).to(p.dtype)
    optimizer.step()


def same_steps(kind: str, make: Any, options: dict[str, Any], way: bool | None, steps: int = 4) -> None:
    """Everything that a step may change, after each step."""
    eager = getattr(optim, kind)(make(), compile=False, **options)
    ours = getattr(optim, kind)(make(), compile=way, **options)
    first = snapshot(ours)["parameters"]
    for t in range(steps):
        take(eager, t)
        take(ours, t)
        expected, found = everything(eager), everything(ours)
        different = [name for name in expected if expected[name] != found[name]]
        assert not different, f"step {t + 1}"
        assert expected.keys() == found.keys()
    assert all(a != b for a, b in zip(first, snapshot(ours)["parameters"], strict=True))


def everything(optimizer: Any) -> dict[tuple[int, str], Any]:
    """Weights and state by parameter and name, as bytes."""
    saved = snapshot(optimizer)
    found = {(i, "weight"): bits for i, bits in enumerate(saved["parameters"])}
    for i, state in saved["state"]["state"].items():
        found |= {(i, name): value for name, value in state.items()}
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        if isinstance(p, fm.FP8Tensor):
            found[i, "codes"] = p.codes.numpy().tobytes()
    return found


#: optimizer, parameters, options
Case = tuple[str, Any, dict[str, Any]]
ADAMW, LION, MADAM = "StiffnessAdamW", "StiffnessLion", "Madam"
DECAY = {"weight_decay": 0.1, "seed": 7}
FAST: dict[str, Case] = {
    "adamw stochastic": (ADAMW, of_codes, {"lr": 0.01, **DECAY}),
    "adamw k = 1": (ADAMW, of_codes, {"lr": 0.01, "stiffness": 1.0, **DECAY}),
    "adamw residual8, 8 bits": (ADAMW, of_codes, {"lr": 0.01, "writeback": "residual8", "moments": "8bit"}),
    "adamw injected, bfloat16, k = 1/2": (
        ADAMW,
        lambda: of_codes(granularity="tensor", shapes=SHAPES[1:3]),
        {"lr": 0.01, "writeback": "momentum", "moments": "bfloat16", "stiffness": 0.5},
    ),
    "adamw plain": (
        ADAMW,
        lambda: [nn.Parameter(normal(n, seed=n)) for n in (70_001, 31, 640)],
        {"lr": 0.01, **DECAY},
    ),
    "adamw free": (ADAMW, lambda: [free_weight(normal(801, 97), "E4M3", 2.0**-5)], {"lr": 0.01, "stiffness": 0.37}),
    "lion residual4, k = 1": (LION, lambda: of_codes("E3M4"), {"lr": 0.01, "writeback": "residual4", "stiffness": 1.0}),
    "adamw residual2": (ADAMW, of_codes, {"lr": 0.01, "writeback": "residual2", **DECAY}),
    "riemannian adam residual2, dithered": (
        "RiemannianAdam",
        lambda: of_codes("E2M5"),
        {"lr": 1.7, "writeback": "residual2", "draws": "dither"},
    ),
    "madam": (MADAM, lambda: of_codes("E7M0"), {"lr": 0.1, **DECAY}),
    "riemannian adam free": (
        "RiemannianAdam",
        lambda: [free_weight(normal(801, 97), "E4M3", 2.0**-5)],
        {"lr": 1.7, "amsgrad": True, "weight_decay": 0.01},
    ),
    "riemannian sgd residual8": ("RiemannianSGD", of_codes, {"lr": 90.0, "momentum": 0.9, "writeback": "residual8"}),
    "grid, no power of two": (
        ADAMW,
        lambda: [grid_weight("E4M3", (33, 5), 0.3)],
        {"lr": 0.05, "stiffness": 1.0, **DECAY},
    ),
}
WIDE: dict[str, Case] = {
    "adamw residual4, annealed": (
        ADAMW,
        lambda: of_codes("E5M2"),
        {"lr": 0.01, "writeback": "residual4", "stiffness": anneal(1.0, 0.0, 3)},
    ),
    "sgd, 8 bits": ("StiffnessSGD", of_codes, {"lr": 0.1, "moments": "8bit", "stiffness": 2.0, **DECAY}),
    "madam free": (MADAM, lambda: [free_weight(normal(801, 97), "E7M0", 1.0)], {"lr": 0.1}),
    "riemannian adam, 8 bits": (
        "RiemannianAdam",
        of_codes,
        {"lr": 1.7, "writeback": "stochastic", "moments": "8bit"},
    ),
    "adamw nearest, E7M0": (
        ADAMW,
        lambda: of_codes("E7M0"),
        {"lr": 0.05, "writeback": "nearest", "maximize": True, "stiffness": 1.0},
    ),
    "adamw in blocks": (
        ADAMW,
        lambda: of_codes("E4M3FNUZ", "block", ((3, 64), (5, 32), (64, 64))),
        {"lr": 0.01, "stiffness": 2.0, "moments": "8bit"},
    ),
    "adamw vectors": (
        ADAMW,
        lambda: of_codes(shapes=((7,), (64,), (1001,))),
        {"lr": 0.01, "writeback": "residual8", "stiffness": 1.0},
    ),
    "adamw bfloat16": (ADAMW, lambda: of_codes(dtype=torch.bfloat16), {"lr": 0.01, "moments": "bfloat16", **DECAY}),
    "adamw k = 0, P3109": (ADAMW, lambda: of_codes("P3109_8P3"), {"lr": 0.01}),
    "adamw injected": (ADAMW, of_codes, {"lr": 0.01, "writeback": "momentum", **DECAY}),
    "sgd nesterov, E2M1": ("StiffnessSGD", lambda: of_codes("E2M1"), {"lr": 0.1, "nesterov": True}),
    "sgd injected": ("StiffnessSGD", of_codes, {"lr": 0.1, "writeback": "momentum", "stiffness": 1.0}),
    "lion, 8 bits": (LION, lambda: of_codes("E5M2FNUZ"), {"lr": 0.01, "moments": "8bit", **DECAY}),
    "lion plain": (LION, lambda: [nn.Parameter(normal(n, seed=n)) for n in (70_001, 31)], {"lr": 0.01}),
    "madam residual8, bfloat16": (MADAM, of_codes, {"lr": 0.1, "writeback": "residual8", "moments": "bfloat16"}),
    "madam, 8 bits": (MADAM, of_codes, {"lr": 0.1, "moments": "8bit"}),
    "riemannian adam injected": ("RiemannianAdam", of_codes, {"lr": 1.7, "writeback": "momentum"}),
    "riemannian adam nearest, E7M0": (
        "RiemannianAdam",
        lambda: of_codes("E7M0"),
        {"lr": 1.7, "writeback": "nearest"},
    ),
    "riemannian sgd nesterov, 8 bits": (
        "RiemannianSGD",
        of_codes,
        {"lr": 90.0, "momentum": 0.9, "nesterov": True, "moments": "8bit", "writeback": "stochastic"},
    ),
    "grid residual8": (ADAMW, lambda: [grid_weight("E4M3", (33, 5))], {"lr": 0.01, "writeback": "residual8"}),
}


@pytest.mark.parametrize(("kind", "make", "options"), (FAST | WIDE).values(), ids=FAST | WIDE)
def test_native_steps_have_the_bits_of_eager_ones(kind: str, make: Any, options: dict[str, Any]) -> None:
    same_steps(kind, make, options, NATIVE)


@pytest.mark.parametrize(("kind", "make", "options"), FAST.values(), ids=FAST)
def test_compiled_steps_have_the_bits_of_eager_ones(
    kind: str, make: Any, options: dict[str, Any], compiler: None
) -> None:
    if (kind, options.get("moments")) == ("StiffnessSGD", "8bit") and torch.__version__ < (2, 9):
        pytest.skip("torch 2.8 does not compile this one: it is eager there, after a warning")
    same_steps(kind, make, options, COMPILED)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "make", "options"), WIDE.values(), ids=WIDE)
def test_the_compiled_bits_of_other_variants(kind: str, make: Any, options: dict[str, Any], compiler: None) -> None:
    same_steps(kind, make, options, COMPILED)


@pytest.mark.parametrize("way", [NATIVE, COMPILED], ids=["native", "compiled"])
def test_axes_beyond_two_and_single_rows(way: bool | None, compiler: None) -> None:
    make = lambda: of_codes(shapes=((5, 7), (3, 2, 11), (1, 70), (33, 1), (2, 2, 2, 2)))  # noqa: E731
    same_steps(ADAMW, make, {"lr": 0.01, "writeback": "stochastic"}, way)


def strided(g: Tensor, how: str) -> Tensor:
    """The same values in memory of another kind; of one row's worth, where they are expanded."""
    if how == "transposed":
        return g.t().contiguous().t()
    if how == "sliced":
        return torch.stack([g, -g], -1).flatten(-2)[..., ::2]
    if how == "shifted":
        return torch.cat([g.new_zeros(1), g.flatten()])[1:].view(g.shape)
    return g[:1].expand(g.shape) if how == "expanded" else g


@pytest.mark.parametrize("way", [NATIVE, False, COMPILED], ids=["native", "eager", "compiled"])
def test_what_is_negated_later_is_negated(way: bool | None, compiler: None) -> None:
    """``torch.conj(z).imag`` is memory of ``z`` with a bit for its sign, which no kernel sees: of gradients."""
    z = torch.complex(normal(8, 16, seed=1), normal(8, 16, seed=2))
    found = []
    for negative in (z.conj().imag, -z.imag.clone()):
        weights = [fm.FP8Parameter(normal(8, 16, seed=3), "E4M3", seed=0), nn.Parameter(negative.detach().clone())]
        if negative.is_neg():
            weights[1] = nn.Parameter(torch.empty(8, 16).copy_(z.imag)._neg_view())
            assert weights[1].is_neg()
        for p in weights:
            p.grad = negative
        optim.StiffnessAdamW(weights, lr=0.1, compile=way).step()
        found.append([weights[0].codes, weights[1].detach().resolve_neg()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("way", [NATIVE, COMPILED], ids=["native", "compiled"])
@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_gradients_of_any_strides(moments: str, way: bool | None, compiler: None) -> None:
    """Before and after contiguous ones."""
    order = ["transposed", "", "transposed", "sliced", "shifted", "expanded", "", "expanded", "sliced"]
    for skip in (0, 1):
        eager, ours = (
            optim.StiffnessAdamW(of_codes(shapes=((64, 33), (31, 31))), lr=0.01, moments=moments, compile=c)
            for c in (False, way)
        )
        for t, how in enumerate(order[skip:]):
            for optimizer in (eager, ours):
                for i, p in enumerate(optimizer.param_groups[0]["params"]):
                    p.grad = strided(normal(*p.shape, seed=10 * t + i), how)
                optimizer.step()
            assert everything(eager) == everything(ours), (how, t)


@pytest.mark.parametrize("way", [NATIVE, COMPILED], ids=["native", "compiled"])
def test_options_that_change_between_steps(way: bool | None, compiler: None) -> None:
    """Learning rate, decay, betas, eps, bounds, seed and S_ref are numbers: nothing is compiled anew for them."""
    eager, ours = (optim.StiffnessAdamW(of_codes(), lr=0.01, weight_decay=0.1, compile=c) for c in (False, way))
    take(eager, 0)
    take(ours, 0)
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    changes = ({"lr": 0.02}, {"weight_decay": 0.3}, {"betas": (0.5, 0.8), "eps": 0.1}, {"damping": 0.5, "clip": 1.5})
    for t, change in enumerate((*changes, {"seed": 3, "refresh_every": 1}), 1):
        for optimizer in (eager, ours):
            optimizer.param_groups[0].update(change)
            take(optimizer, t)
        assert everything(eager) == everything(ours), change
    assert counters["unique_graphs"] == before


# ------------------------------------------------------------------------------- intermediate results, bit for bit
MANY = 10_000_000


def any_floats(n: int, seed: int, *, positive: bool = False, top: int = 100) -> Tensor:
    """Random bit patterns: all exponents up to that of 2^top, subnormals and zeros of both signs included."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(0, (top + 127) << 23, (n,), generator=generator, dtype=torch.int32)
    patterns[::97] = torch.randint(0, 1 << 23, patterns[::97].shape, generator=generator, dtype=torch.int32)
    patterns[::1009] = 0
    signs = 0 if positive else torch.randint(0, 2, (n,), generator=generator, dtype=torch.int32) << 31
    return (patterns | signs).view(torch.float32)


def near_one(n: int, seed: int) -> Tensor:
    return normal(n, seed=seed) * torch.exp2(normal(n, seed=seed + 1).mul_(8).round_())


def same_bits_compiled(function: Any, *arguments: Tensor) -> None:
    """Of every tensor that a function returns; NaN is NaN."""
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for ours, eager in zip(compiled(*arguments), function(*arguments), strict=True):
        same = ours.view(torch.int32) == eager.view(torch.int32)
        assert bool((same | (ours.isnan() & eager.isnan())).all()), f"{int((~same).sum())} of {same.numel()} differ"


NUMBERS = {"beta1": 0.9, "gain1": 0.1, "beta2": 0.95, "gain2": 0.05, "eps": 1e-8, "correction": 0.3, "largest": 10.0}


@pytest.mark.parametrize("extreme", [True, False], ids=["all floats", "near one"])
def test_adams_direction_over_ten_million_elements(extreme: bool, compiler: None) -> None:
    numbers = torch.tensor(row_of(NUMBERS, torch.float32), dtype=torch.float32)

    def directions(gradient: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        descent = adam(gradient, {"exp_avg": first, "exp_avg_sq": second}, named(numbers))
        return descent.direction, descent.denominator, descent.root, *descent.moments.values()

    given = any_floats if extreme else near_one
    gradient, first = given(MANY, 1), given(MANY, 2)
    gradient = gradient.clamp(-1e18, 1e18)
    second = any_floats(MANY, 3, positive=True) if extreme else near_one(MANY, 3).square_()
    same_bits_compiled(directions, gradient, first, second)


def test_the_other_intermediate_results(compiler: None) -> None:
    """Madam's direction, powers of two, and the chart's steps, over a million elements each."""
    numbers = torch.tensor(row_of(NUMBERS, torch.float32), dtype=torch.float32)
    chart = UlpChart(3, -6, 8)

    def results(gradient: Tensor, second: Tensor, exponent: Tensor, x: Tensor, steps: Tensor) -> tuple[Tensor, ...]:
        descent = madam(gradient, {"exp_avg_sq": second}, named(numbers))
        moved = chart.shift(x, steps)
        return (
            descent.direction,
            exp2_exact(exponent),
            moved,
            chart.forward(x),
            chart.stiffness(x),
            chart.inverse(steps),
        )

    n = 1_000_000
    gradient = any_floats(n, 1).clamp(-1e18, 1e18)
    second = any_floats(n, 2, positive=True)
    same_bits_compiled(results, gradient, second, normal(n, seed=3, std=40.0), near_one(n, 4), near_one(n, 6))


def test_powers_of_two_are_within_four_ulp() -> None:
    """As documented, over all exponents of normal results."""
    x = torch.linspace(-125.9, 127.4, 2_000_003)
    exact = torch.exp2(x.double())
    ulp = torch.exp2(torch.floor(x.double()) - 23)
    assert ((exp2_exact(x).double() - exact).abs() / ulp).max() < 4
    whole = torch.arange(-126.0, 128.0)
    assert torch.equal(exp2_exact(whole), torch.exp2(whole.double()).float())


# --------------------------------------------------------------------------------------------- without a compiler
@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("c++: command not found\nand a page of output")

    monkeypatch.setattr(_backends, "_functions", {})
    monkeypatch.setattr(_backends, "_failed", set())
    monkeypatch.setattr(torch, "compile", lambda function, **_: failing)


@pytest.mark.parametrize("options", [{}, {"moments": "8bit", "writeback": "residual8"}, {"writeback": "residual4"}])
def test_without_a_compiler_one_warning_and_the_same_results(options: dict[str, Any], no_compiler: None) -> None:
    """Any other warning is an error here."""
    eager, ours = (optim.StiffnessAdamW(of_codes(), lr=0.01, compile=c, **options) for c in (False, True))
    take(eager, 0)
    with pytest.warns(CompileUnavailableWarning, match=r"torch.compile failed with RuntimeError: c\+\+") as caught:
        take(ours, 0)
    assert len(caught) == 1
    other = optim.StiffnessSGD(of_codes(), lr=0.1, compile=True)
    for t in range(1, 4):
        for optimizer in (eager, ours, other):
            take(optimizer, t)
    assert everything(ours) == everything(eager)


@pytest.mark.parametrize("way", [False, None])
def test_no_compiler_is_asked_on_the_cpu_unless_somebody_wants_it(way: bool | None, no_compiler: None) -> None:
    take(optim.StiffnessAdamW(of_codes(shapes=((300, 300),)), compile=way), 0)
    assert not _backends._failed
