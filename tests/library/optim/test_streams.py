"""Words of weights' values: those of pieces add up to that of the whole."""

import pytest
import torch
from optimizer_cases import normal

import fp8manifold as fm
from fp8manifold.optim import _streams
from fp8manifold.scaling import STORED_GRANULARITIES

KEY = (1, 2, 3)


def piece_sizes(patch, size):
    """Decode pieces of at most so many values, and return a list that their sizes go to."""
    sizes = []
    content_word = _streams.content_word

    def counted(x, *arguments):
        sizes.append(x.numel())
        return content_word(x, *arguments)

    patch.setattr(_streams, "content_word", counted)
    patch.setattr(_streams, "block_on", lambda device: size)
    return sizes


@pytest.mark.parametrize("size", [700, 5000, 10**9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("granularity", STORED_GRANULARITIES)
def test_codes_have_the_word_of_their_values(granularity, dtype, size, monkeypatch):
    weight = fm.FP8Tensor.from_float(normal(48, 384, seed=1).to(dtype), granularity=granularity)
    expected = _streams.content_word(weight.dequantize(), KEY, 5)
    sizes = piece_sizes(monkeypatch, size)
    assert _streams._word_of_pieces(weight, KEY, 5) == expected
    assert sum(sizes) == weight.numel()
    assert max(sizes) <= min(size, weight.numel())
    assert len(sizes) > 1 or size >= weight.numel()


def test_floats_have_one_word(monkeypatch):
    x = normal(48, 384, seed=1)
    expected = _streams.content_word(x, KEY, 5)
    sizes = piece_sizes(monkeypatch, 700)
    assert _streams._word_of_pieces(x, KEY, 5) == expected
    assert sizes == [x.numel()]


@pytest.mark.parametrize("shape", [(0,), (0, 4), ()])
def test_few_values_are_decoded_at_once(shape):
    weight = fm.FP8Tensor.from_float(torch.ones(shape))
    word = _streams.content_word(weight.dequantize(), KEY)
    assert _streams._word_of_pieces(weight, KEY, 0) == word


def test_a_first_step_decodes_no_whole_weight(monkeypatch):
    """It took two or four bytes for each weight of the largest layer."""
    shapes = []
    dequantize = fm.FP8Tensor.dequantize

    def counted(self):
        shapes.append(self.shape)
        return dequantize(self)

    monkeypatch.setattr(fm.FP8Tensor, "dequantize", counted)
    sizes = piece_sizes(monkeypatch, 1000)
    parameters = [fm.FP8Parameter(normal(60, 500, seed=seed), "E4M3") for seed in (1, 2)]
    for parameter in parameters:
        parameter.grad = normal(60, 500, seed=3)
    fm.optim.StiffnessAdamW(parameters, 1e-3, moments="8bit").step()
    assert not shapes
    assert len(sizes) == 60
