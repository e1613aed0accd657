"""Squares of 128 x 128 weights that share a scale: trained, saved and widened as one, by every path with its bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws import each
from optimizer_cases import frozen, normal, snapshot, step_from, with_factors
from paths import PATHS, by
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold.optim._slot import slot_of

#: whole squares, one partial, partial ones of runs of 64, 32 and 1, and matrices of matrices
SHAPES = ((256, 128), (5, 7), (130, 64), (200, 192), (257, 160), (130, 131), (2, 140, 256))


def weight(
    shape: tuple[int, ...], name: str = "E4M3", seed: int = 0, *, factors: bool = False, **options: Any
) -> fm.FP8Parameter:
    w = normal(*shape, seed=seed) * torch.exp2(4 * normal(*shape[:-1], 1, seed=seed + 1).clamp(-1, 1))
    p = fm.FP8Parameter(w, name, granularity="square", **{"seed": seed, **options})
    made: fm.FP8Parameter = with_factors(p, factors)
    return made


def squares(shape: tuple[int, ...]) -> list[tuple[Any, ...]]:
    starts = [(i, j) for i in range(0, shape[-2], 128) for j in range(0, shape[-1], 128)]
    return [((..., slice(i, i + 128), slice(j, j + 128)), (..., i // 128, j // 128)) for i, j in starts]


@each("shape", [*SHAPES, (1, 1), (0, 5), (4200, 260)])
@each("dtype", [torch.float32, torch.bfloat16])
def test_each_square_is_what_it_is_alone(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    w = normal(*shape, seed=2).to(dtype)
    kept = w.numel() < 2**20
    p = fm.FP8Tensor(w, "E4M3", granularity="square", keep_remainder=kept)
    assert (p.granularity, p.block_size) == ("square", (128, 128))
    assert p.exponents is not None
    assert (p.exponents.dtype, p.scale.dtype) == (torch.uint8, torch.float32)
    assert p.scale.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    for where, scale in squares(shape) if len(shape) == 2 else ():
        alone = fm.FP8Tensor(w[where], "E4M3", granularity="tensor", keep_remainder=kept)
        assert torch.equal(p.scale[scale], alone.scale)
        assert torch.equal(p.codes[where], alone.codes)
        assert torch.equal(p.dequantize()[where], alone.dequantize())
        assert torch.equal(p.largest()[scale], alone.largest())
        if p.remainder is not None:
            assert torch.equal(p.remainder[where], alone.remainder)  # type: ignore[arg-type]
    expected = (fm.decode(p.codes, "E4M3") * p.expanded_scale()).to(dtype)
    assert torch.equal(p.dequantize(), expected)


@each("shape", SHAPES)
def test_views_and_rows_are_decoded_alone(shape: tuple[int, ...]) -> None:
    p = weight(shape)
    values = p.dequantize()
    for view in (lambda x: x[1:], lambda x: x[-1], lambda x: x.mT, lambda x: x.split(1)[1], lambda x: x.unbind()[0]):
        assert torch.equal(view(p), view(values))
    if len(shape) == 2:
        rows = torch.tensor([[shape[0] - 1, 0], [3, 3]])
        assert torch.equal(nn.functional.embedding(rows, p), values[rows])
        x = normal(3, shape[-1], seed=5)
        assert torch.equal(nn.functional.linear(x, p), nn.functional.linear(x, values))


def test_nan_is_kept_and_no_scale_sees_it() -> None:
    codes = torch.zeros(130, 130, dtype=torch.uint8)
    codes[0, 0], codes[0, 1], codes[129, 129] = 127, 56, 128
    p = fm.FP8Tensor.from_codes(codes, torch.full((2, 2), 0.5), "E4M3", block_size=(128, 128))
    assert p[0, 0].isnan()
    assert p.largest().tolist() == [[0.5, 0.0], [0.0, 0.0]]


STEPS: dict[str, Callable[..., Any]] = {
    "adamw": lambda p, **o: optim.StiffnessAdamW(p, lr=0.02, stiffness=1.0, **o),
    "adamw bfloat16": lambda p, **o: optim.StiffnessAdamW(p, lr=0.02, moments="bfloat16", **o),
    "adamw 8bit": lambda p, **o: optim.StiffnessAdamW(p, lr=0.02, moments="8bit", **o),
    "residual8": lambda p, **o: optim.StiffnessAdamW(p, lr=0.02, writeback="residual8", **o),
    "muon": lambda p, **o: optim.StiffnessMuon(p, lr=0.05, **o),
    "muon 8bit": lambda p, **o: optim.StiffnessMuon(p, lr=0.05, moments="8bit", **o),
    "lion": lambda p, **o: optim.StiffnessLion(p, lr=0.02, **o),
    "sgd": lambda p, **o: optim.StiffnessSGD(p, lr=0.1, momentum=0.9, **o),
    "madam": lambda p, **o: optim.Madam(p, lr=0.05, **o),
    "riemannian": lambda p, **o: optim.RiemannianAdam(p, lr=1.0, **o),
}


def step(optimizer: Any, parameters: list[Tensor], number: int) -> None:
    for i, p in enumerate(parameters):
        p.grad = normal(*p.shape, seed=100 * number + i)
    optimizer.step()


@pytest.mark.parametrize("factors", [False, True], ids=["", "factors"])
@pytest.mark.parametrize("kind", STEPS)
def test_paths_have_the_same_bits(kind: str, factors: bool) -> None:
    shapes = SHAPES[:-1] if kind.startswith("muon") else SHAPES
    twins = [[weight(shape, seed=i, factors=factors) for i, shape in enumerate(shapes)] for _ in PATHS]
    made = [by(path, STEPS[kind](p, seed=3)) for p, path in zip(twins, PATHS, strict=True)]
    for number in range(4):
        for parameters, optimizer in zip(twins, made, strict=True):
            step(optimizer, parameters, number)  # type: ignore[arg-type]
    for i, (native, eager) in enumerate(zip(*twins, strict=True)):
        assert torch.equal(native.codes, eager.codes)
        assert torch.equal(native.scale, eager.scale)
        assert not torch.equal(native.codes, weight(tuple(native.shape), seed=i).codes)
    states = [frozen(snapshot(each)["state"]["state"]) for each in made]
    assert states[0] == states[1]


def test_scales_in_runs_cost_an_eighth_of_a_byte_at_most() -> None:
    """But where rows of more than 128 have a length that 32 does not divide: each weight has one for the step."""
    for columns, run in ((128, 128), (2048, 128), (576, 64), (160, 32), (100, 100), (131, 1)):
        p = weight((6, columns))
        slot = slot_of({}, p, {})
        assert slot.scale is not None
        assert slot.scale.numel() == p.numel() // run


@each("path", PATHS)
@each("writeback", ["stochastic", "residual8"])
@each("shape", SHAPES)
def test_at_equal_scales_it_is_the_step_of_one_scale(shape: tuple[int, ...], writeback: str, path: str) -> None:
    w = normal(*shape, seed=7).clamp(-3, 3)
    both = [
        fm.FP8Parameter(w, "E4M3", granularity=granularity, scale=2.0**-4, seed=1)  # type: ignore[arg-type]
        for granularity in ("square", "tensor")
    ]
    for p in both:
        optimizer = by(path, optim.StiffnessAdamW([p], lr=0.02, writeback=writeback, seed=5))
        for number in range(3):
            step(optimizer, [p], number)
    assert torch.equal(both[0].codes, both[1].codes)


@each("path", PATHS)
@each("writeback", ["stochastic", "residual8"])
@each("columns", [256, 192, 131])
def test_a_square_widens_as_a_whole(columns: int, writeback: str, path: str) -> None:
    """Whatever else shares its rows stays; values stay on average, and those that the wider grid holds stay all."""
    fmt = fm.FloatFormat.from_string("E4M3")
    codes = torch.full((200, columns), fmt.max_code - 2, dtype=torch.uint8)
    codes[:, 1::2] -= 8  # an even spacing lower
    codes[150, 3] = fmt.max_code
    p = fm.FP8Parameter.from_codes(codes, torch.ones(2, 2), fmt, block_size=(128, 128), requires_grad=True, seed=2)
    before = p.dequantize()
    optimizer = by(path, optim.StiffnessAdamW([p], lr=0.0, weight_decay=0.0, writeback=writeback))
    step_from(optimizer, p, torch.ones(200, columns))
    assert p.scale.tolist() == [[1.0, 1.0], [2.0, 1.0]]
    assert optimizer.widened_scales == 1
    after = p.dequantize()
    assert torch.equal(after, before)  # subnormals apart, each value of E4M3 is one of twice its scale, too


def test_what_a_widened_square_rounds_is_right_on_average() -> None:
    codes = torch.full((256, 256), 1, dtype=torch.uint8)  # the smallest subnormal: half of one at twice the scale
    codes[0, 0] = 126
    p = fm.FP8Parameter.from_codes(codes, torch.ones(2, 2), "E4M3", block_size=(128, 128), requires_grad=True, seed=2)
    before = p.dequantize()
    optimizer = optim.StiffnessAdamW([p], lr=0.0, weight_decay=0.0)
    step_from(optimizer, p, torch.ones(256, 256))
    inside, rest = p.dequantize()[:128, :128].flatten()[1:], p.dequantize()[128:]
    assert torch.equal(rest, before[128:])
    assert set((inside / before[0, 1]).tolist()) == {0.0, 2.0}
    assert abs((inside / before[0, 1]).mean().item() - 1) < 4 / 128
