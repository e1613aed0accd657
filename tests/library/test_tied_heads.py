"""Layers that share their weight with another module: untied or left."""

from __future__ import annotations

import torch
from torch import nn

import fp8manifold as fm
from fp8manifold import quantize_model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.lm_head.weight = self.embedding.weight


def test_a_tied_head_is_untied_or_left() -> None:
    model = quantize_model(Tied(), "E4M3", "fp8", tied="untie")
    assert isinstance(model.lm_head.weight, fm.FP8Parameter)  # type: ignore[union-attr]
    assert type(model.embedding.weight) is nn.Parameter  # type: ignore[union-attr]
    model = quantize_model(Tied(), "E4M3", tied="untie")
    assert model.lm_head.weight is not model.embedding.weight  # type: ignore[union-attr]
    assert torch.equal(model.lm_head.weight, model.embedding.weight)  # type: ignore[arg-type,union-attr]
    model = quantize_model(Tied(), "E4M3", tied="leave")
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.embedding.weight  # type: ignore[union-attr]
