"""Activation checkpointing: a layer that remembers nothing repeats itself to the bit, one that does is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from laws import each
from optimizer_cases import frozen, normal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8manifold import LayerSpec, QuantizedLinear, quantize_model

SPECS: dict[str, Any] = {
    "stochastic": LayerSpec("E4M3", activation="E4M3", gradient="E5M2", rounding="stochastic"),
    "delayed": LayerSpec("E4M3", activation="E4M3", policy="delayed", history=3),
}
DYNAMIC = LayerSpec("E4M3", activation="E4M3")
ways = each("reentrant", [False, True], ids=["graph", "reentrant"])


def net(spec: LayerSpec) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    for i, p in enumerate(model.parameters()):
        p.data = normal(*p.shape, seed=i, std=0.3)
    return quantize_model(model, spec, storage="master")


@ways
def test_a_pass_that_remembers_nothing_is_repeated(reentrant: bool) -> None:
    found = []
    for run in (lambda model, x: model(x), partial(checkpoint, use_reentrant=reentrant)):
        model = net(DYNAMIC)
        run(model, normal(3, 8).requires_grad_()).square().sum().backward()
        found.append(frozen((model.state_dict(), [p.grad for p in model.parameters()])))
    assert found[0] == found[1]


@ways
@each("spec", SPECS)
def test_one_that_would_round_otherwise_is_refused(spec: str, reentrant: bool) -> None:
    out = checkpoint(net(SPECS[spec]), normal(3, 8).requires_grad_(), use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match=r"QuantizedLinear\(in_features=8.* leave it out of activation") as refusal:
        out.sum().backward()
    assert "\n" not in str(refusal.value)


def test_a_new_pass_within_the_backward_pass_is_one_more() -> None:
    layer = QuantizedLinear(nn.Linear(8, 8), SPECS["stochastic"], storage="master")
    x = normal(3, 8).requires_grad_()

    def once_more(gradient: Tensor) -> None:
        with torch.no_grad():
            layer(normal(3, 8))

    x.register_hook(once_more)
    layer(x).sum().backward()
    assert int(layer.draws) == 2


def test_without_gradients_nothing_changes() -> None:
    layer = QuantizedLinear(nn.Linear(8, 8), SPECS["delayed"], storage="master")
    with torch.no_grad():
        layer(normal(3, 8))
        layer(normal(3, 8))
    assert layer.activation_scaler.history.count_nonzero() == 2  # type: ignore[union-attr]
