"""Modules around a quantised layer call it: no fused operator reads its weight, and nested tensors are taken."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from laws import each
from optimizer_cases import normal
from torch import Tensor, nn

from fp8manifold import LayerSpec, QuantizedLinear, quantize_model

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
X = normal(3, 5, 32, seed=3)
PADDING = torch.arange(5).expand(3, 5) >= torch.tensor([[5], [3], [4]])
#: one scale a token, so that padding has no say in those of the others
TOKENS = LayerSpec("E4M3", activation={"format": "E4M3", "granularity": "channel"}, gradient="E5M2")


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    stack = nn.TransformerEncoder(layer, 2)
    for i, p in enumerate(stack.parameters()):
        p.data = p.data + normal(*p.shape, seed=i, std=0.1)
    return stack.eval()


@contextmanager
def without_fused_operators() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@each("padding", [None, PADDING], ids=["whole", "nested"])
@each("pattern", ["*", "layers.1"])
@each("storage", ["master", "grid", "fp8", "bare"])
@each("mode", [torch.no_grad, torch.inference_mode])
def test_an_encoder_in_evaluation_calls_its_layers(mode: Any, storage: Any, pattern: str, padding: Any) -> None:
    stored = "fp8" if storage == "bare" else storage
    made = quantize_model(encoder(), {pattern: LayerSpec("E4M3") if storage == "bare" else TOKENS}, stored)
    for model in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        with mode():
            seen = model(X, src_key_padding_mask=padding)
            with without_fused_operators():
                expected = model(X, src_key_padding_mask=padding)
        tokens = torch.ones(3, 5, dtype=torch.bool) if padding is None else ~padding
        torch.testing.assert_close(seen[tokens], expected[tokens], rtol=1e-5, atol=1e-5)


@each("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_rows_are_quantised_as_one_tensor(layout: torch.layout) -> None:
    layer = QuantizedLinear(nn.Linear(32, 8), LayerSpec("E4M3", activation="E4M3", gradient="E5M2"), storage="master")
    parts = [normal(n, 32, seed=n, std=n) for n in (2, 5, 1)]
    rows = torch.cat(parts).requires_grad_()
    expected = layer(rows)
    expected.sum().backward()
    grads = [rows.grad, layer.weight.grad]
    layer.zero_grad()
    leaves = [part.clone().requires_grad_() for part in parts]
    out = layer(torch.nested.as_nested_tensor(leaves, layout=layout))
    assert out.layout == layout
    assert [tuple(part.shape) for part in out.unbind()] == [(2, 8), (5, 8), (1, 8)]
    assert torch.equal(torch.cat(out.unbind()), expected)
    torch.cat(out.unbind()).sum().backward()
    again: list[Tensor] = [torch.cat([leaf.grad for leaf in leaves]), layer.weight.grad]  # type: ignore[misc,list-item]
    assert all(torch.equal(x, y) for x, y in zip(grads, again, strict=True))  # type: ignore[arg-type]
