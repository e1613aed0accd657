"""Activation checkpointing: what is run again rounds as it did, and is remembered once."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizer_cases import normal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8manifold import LayerSpec, QuantizedLinear, quantize_model
from fp8manifold.nn._recomputation import _NOTES

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # nested, reentrant
Run = Callable[..., Tensor]
HISTORY = {"policy": "delayed", "history": 3}
SPECS = {
    "stochastic": LayerSpec("E4M3", activation="E4M3", gradient="E5M2", rounding="stochastic"),
    "delayed": LayerSpec("E4M3", activation="E4M3", **HISTORY),  # type: ignore[arg-type]
    "both": LayerSpec("E4M3", activation="E4M3", gradient="E5M2", rounding="stochastic", **HISTORY),  # type: ignore[arg-type]
    "dynamic": LayerSpec("E4M3", activation="E4M3"),
}
specs = pytest.mark.parametrize("spec", SPECS)
ways = pytest.mark.parametrize("reentrant", [False, True], ids=["graph", "reentrant"])


class Net(nn.Module):
    """Layers that are called several times, within a region and in several; one region holds two others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        for i, p in enumerate(self.parameters()):
            p.data = normal(*p.shape, seed=i, std=0.3)

    def block(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(F.gelu(self.b(x)))))  # type: ignore[no-any-return]

    def blocks(self, run: Run, x: Tensor) -> Tensor:
        return run(self.block, self.a(x)) + run(self.block, x.sin())

    def forward(self, x: Tensor, run: Run) -> Tensor:
        return run(self.block, run(partial(self.blocks, run), x))


def plainly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


def checkpointed(reentrant: bool) -> Run:
    return partial(checkpoint, use_reentrant=reentrant)


def trained(spec: str, run: Run) -> tuple[dict[str, Tensor], list[Tensor]]:
    """State and gradients after two passes forward before either goes backward, twice over."""
    model = quantize_model(Net(), SPECS[spec])
    for step in range(2):
        losses = [model(normal(3, 8, seed=step, std=i + 1.0).requires_grad_(), run).square().sum() for i in range(2)]
        for loss in losses:  # the first pass is the first to be run again
            loss.backward()
    return model.state_dict(), [p.grad for p in model.parameters()]  # type: ignore[misc]


def close(x: Tensor, y: Tensor) -> bool:
    """But for the order in which gradients of a layer called twice are added up."""
    return bool((x - y).norm() <= 1e-6 * y.norm())


@specs
@ways
def test_checkpointed_passes_repeat_their_rounding(spec: str, reentrant: bool) -> None:
    (expected, exact), (state, grads) = trained(spec, plainly), trained(spec, checkpointed(reentrant))
    assert [name for name, value in state.items() if not torch.equal(value, expected[name])] == []
    assert all(close(x, y) if reentrant else torch.equal(x, y) for x, y in zip(grads, exact, strict=True))


@ways
def test_equal_inputs_are_told_apart(reentrant: bool) -> None:
    """Two passes of one input: each is run again with its own bits, whichever goes backward first."""
    x = normal(3, 8).requires_grad_()
    for order in ((0, 1), (1, 0)):
        found = []
        for run in (plainly, checkpointed(reentrant)):
            layer = QuantizedLinear(copy.deepcopy(Net().a), SPECS["both"])
            out = [run(layer, x) for _ in range(2)]
            found.append([])
            for i in order:
                layer.zero_grad()
                out[i].square().sum().backward()
                found[-1].append(layer.weight.grad)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]
        assert not torch.equal(*found[0])


@ways
def test_a_graph_that_is_kept_goes_backward_twice(reentrant: bool) -> None:
    layer = QuantizedLinear(Net().a, SPECS["both"])
    loss = checkpoint(layer, normal(3, 8).requires_grad_(), use_reentrant=reentrant).square().sum()
    loss.backward(retain_graph=True)
    first = layer.weight.grad.clone()  # type: ignore[union-attr]
    layer.weight.grad = None
    loss.backward()
    assert torch.equal(layer.weight.grad, first)  # type: ignore[arg-type]
    assert int(layer.draws) == 1


@ways
def test_what_is_noted_goes_with_the_graph(reentrant: bool) -> None:
    layer = QuantizedLinear(Net().a, SPECS["both"])
    out = checkpoint(layer, normal(3, 8).requires_grad_(), use_reentrant=reentrant)
    assert len(_NOTES) == 1
    del out
    gc.collect()
    assert len(_NOTES) == 0
    layer(normal(3, 8)).sum().backward()
    with torch.no_grad():
        layer(normal(3, 8))
    assert len(_NOTES) == 0


def test_a_pass_in_the_backward_that_repeats_none() -> None:
    """It is new where nothing goes backward through it, and refused where it may be a recomputation."""
    layer = QuantizedLinear(Net().a, SPECS["both"])
    x = normal(3, 8).requires_grad_()

    def again(enabled: bool, gradient: Tensor) -> None:
        with torch.set_grad_enabled(enabled):
            layer(x)

    x.register_hook(partial(again, False))
    layer(x).sum().backward()
    assert int(layer.draws) == 2
    x.register_hook(partial(again, True))
    with pytest.raises(RuntimeError, match=r"QuantizedLinear\(in_features=8.*not known to repeat a forward pass"):
        layer(x).sum().backward()


def test_other_hooks_of_saved_tensors_are_put_back() -> None:
    layer, seen = QuantizedLinear(Net().a, SPECS["both"]), []

    def pack(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = checkpoint(layer, normal(3, 8).requires_grad_(), use_reentrant=False)
        before = len(seen)
        layer(normal(3, 8))
    assert len(seen) > before
    out.sum().backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the compiler's
@pytest.mark.parametrize("spec", ["stochastic", "delayed"])
@pytest.mark.parametrize("within", [True, False], ids=["checkpointed-compiled", "compiled-checkpointed"])
def test_compiled_layers_repeat_theirs(spec: str, within: bool) -> None:
    """A compiled model that is checkpointed, and a compiled function that checkpoints one."""
    found: list[Any] = []
    for compiles in (False, True):
        model = quantize_model(nn.Sequential(Net().a, nn.GELU(), Net().b), SPECS[spec])
        made: Any = torch.compile(model, backend="aot_eager") if compiles and within else model
        run: Any = partial(checkpoint, made, use_reentrant=False)
        run = torch.compile(run, backend="aot_eager") if compiles and not within else run
        for i in range(3):
            model.zero_grad()
            run(normal(3, 8, seed=i)).square().sum().backward()
        found.append((model.state_dict(), [p.grad for p in model.parameters()]))
        torch._dynamo.reset()
    (state, grads), (expected, exact) = found
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert all(close(x, y) for x, y in zip(grads, exact, strict=True))


def test_without_gradients_nothing_changes() -> None:
    """Training mode under no_grad draws anew in every pass, as it did."""
    layer = QuantizedLinear(Net().a, SPECS["both"])
    with torch.no_grad():
        layer(normal(3, 8))
        layer(normal(3, 8))
    assert int(layer.draws) == 2
    assert layer.activation_scaler.history.count_nonzero() == 2  # type: ignore[union-attr]
