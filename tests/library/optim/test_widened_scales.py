"""Scales of one-byte weights that double as soon as a step leaves a weight at the end of their range."""

import logging
from typing import Any

import pytest
import torch
from optimizer_cases import step_from
from torch import Tensor

import fp8manifold as fm
from fp8manifold.optim import StiffnessAdamW
from fp8manifold.random_bits import word_range, words_at

ROWS, COLUMNS = 6, 64


def at_the_end(fmt: str = "E2M5", granularity: Any = "channel", seed: int = 0) -> fm.FP8Parameter:
    """Random weights, of which one in row 1, one in row 4 and none elsewhere is a spacing below the end."""
    made = fm.FloatFormat.from_string(fmt)
    codes = torch.randint(0, made.max_code - 8, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(seed))
    codes[1, 3] = codes[4, 60] = made.max_code - 1
    shape = {"tensor": (), "channel": (ROWS, 1), "block": (ROWS, COLUMNS // 32)}[granularity]
    scale = torch.full(shape, 2.0**-6)
    stored: Any = {"block_size": 32 if granularity == "block" else None, "requires_grad": True, "seed": seed}
    return fm.FP8Parameter.from_codes(codes.to(torch.uint8), scale, made, **stored)


def upwards(p: Tensor, size: float = 1.0) -> Tensor:
    return torch.full_like(p.dequantize(), -size)  # type: ignore[operator]


def test_one_scale_for_all_renews_the_reference() -> None:
    """The spacing of all weights doubles, and S_ref with it; of rows it waits for the next refresh."""
    for granularity, renewed in (("tensor", True), ("channel", False)):
        p = at_the_end(granularity=granularity)
        optimizer = StiffnessAdamW([p], lr=0.0, stiffness=1.0, weight_decay=0.0)
        step_from(optimizer, p, upwards(p))
        first = optimizer.state[p]["reference"]
        p.codes[1, 3] = p.format.max_code
        optimizer.step()
        assert optimizer.widened_scales == 1
        assert (optimizer.state[p]["reference"] != first) == renewed


def test_a_change_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    p = at_the_end()
    p.codes[1, 3] = p.format.max_code
    optimizer = StiffnessAdamW([p], lr=0.0, weight_decay=0.0)
    p.grad = upwards(p)
    with caplog.at_level(logging.INFO, logger="fp8manifold"):
        optimizer.step()
    assert "1 of 6 scales changed, by 2^+0 to 2^+1" in caplog.text


def test_a_nan_code_is_not_an_end() -> None:
    p = at_the_end("E4M3")
    p.codes[2, 2] = 0x7F
    optimizer = StiffnessAdamW([p], lr=0.0, weight_decay=0.0)
    step_from(optimizer, p, upwards(p))
    assert optimizer.widened_scales == 0
    assert p.codes[2, 2] == 0x7F


def test_words_at_positions_are_those_of_the_range() -> None:
    words = (3, 2**40 + 1, 7, 2)
    start = 2**32 - 5
    positions = torch.arange(start, start + 11)[torch.randperm(11, generator=torch.Generator().manual_seed(0))]
    assert torch.equal(words_at(positions, words), word_range(start, 11, words, "cpu")[positions - start])
    assert words_at(positions.view(1, 11)[:, :0], words).shape == (1, 0)
