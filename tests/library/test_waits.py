"""What the host reads of a card: numbers that it knows already are not read again, and nothing is read of codes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from optimizer_cases import normal
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8manifold as fm
from fp8manifold import grid, optim
from fp8manifold._encoded import storage
from fp8manifold._numerics import known
from fp8manifold.nn import _codes_linear, _scalers
from fp8manifold.optim import _backends


class Reads(TorchDispatchMode):
    """Counts operators by name; those over codes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        inputs = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        coded = any(x.dtype is torch.uint8 for x in inputs)
        self.counts.update([name, *([f"{name} of codes"] if coded else [])])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number is one that the host would wait for."""
    monkeypatch.setattr(known, "is_read_at_once", lambda x: False)
    monkeypatch.setattr(_scalers, "is_read_at_once", lambda x: False)


def stochastic_layer() -> Any:
    """Stochastic operands, the scale of the input frozen."""
    gradient = {"activation": "E5M2"}
    spec = fm.LayerSpec("E4M3", "E4M3", policy="static", rounding="stochastic", gradient=gradient)
    return fm.quantize_model(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16)), spec, seed=1)


def losses(model: nn.Module, scale: float, steps: int) -> list[float]:
    made = []
    for step in range(steps):
        y = model(normal(4, 32, seed=step) * scale)
        y.square().sum().backward()
        made.append(y.detach().sum())
    return [float(x) for x in made]


@pytest.mark.filterwarnings("ignore:a frozen E.M. scale saturates")
def test_a_layer_with_stochastic_operands_and_a_frozen_scale_reads_nothing(on_a_card: None) -> None:
    model = stochastic_layer()
    losses(model, 1.0, 2)
    x = normal(4, 32) * 0.1
    with Reads() as reads:
        model(x).square().sum().backward()
    assert not reads.counts["_local_scalar_dense"], reads.counts
    assert not reads.counts["is_nonzero"]


CHANGES: dict[str, Any] = {
    "none": lambda model, saved: None,
    "by hand": lambda model, saved: model[0].draws.fill_(7),
    "loaded": lambda model, saved: model.load_state_dict(saved),
    "begun anew": lambda model, saved: model[0].draws.zero_(),
}


@pytest.mark.filterwarnings("ignore:a frozen E.M. scale saturates")
@pytest.mark.parametrize("change", CHANGES)
def test_its_numbers_are_those_of_a_layer_that_reads(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = stochastic_layer(), stochastic_layer()
    other.load_state_dict(model.state_dict())
    saved = {name: x.clone() for name, x in model.state_dict().items()}
    expected = losses(other, 0.1, 2)
    CHANGES[change](other, saved)
    expected += losses(other, 0.1, 2)
    monkeypatch.setattr(known, "is_read_at_once", lambda x: False)
    monkeypatch.setattr(_scalers, "is_read_at_once", lambda x: False)
    got = losses(model, 0.1, 2)
    CHANGES[change](model, saved)
    assert got + losses(model, 0.1, 2) == expected
    assert int(model[0].draws) == int(other[0].draws)


def test_a_frozen_scale_that_saturates_is_warned_of_with_the_next_tensor(on_a_card: None) -> None:
    scale = _scalers.Scale("E4M3", policy="static")
    scale(torch.tensor([448.0]))
    scale(torch.tensor([4480.0]))
    with pytest.warns(fm.SaturationWarning, match="10 times its range"):
        scale(torch.tensor([1.0]))


def test_steps_on_the_grid_read_no_scale(on_a_card: None) -> None:
    layer = fm.quantize_model(nn.Linear(32, 8), "E4M3", storage="grid")
    optimizer = optim.StiffnessAdamW(layer.parameters(), 1e-3)
    for p in layer.parameters():
        p.grad = torch.ones(p.shape)
    optimizer.step()
    with Reads() as reads:
        optimizer.step()
    assert not reads.counts["frexp"]


def test_stored_codes_are_decoded_without_a_look_at_their_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of formats below 8 bits were checked when they were stored."""
    monkeypatch.setattr(grid, "decoded", lambda *_, **__: None)
    monkeypatch.setattr(storage, "decoded", lambda *_, **__: None)
    w = fm.FP8Tensor(normal(4, 8), "E2M1")
    expected = fm.decode(w.codes, "E2M1") * w.scale
    with Reads() as reads:
        values = w.dequantize()
    assert not reads.counts["_local_scalar_dense"]
    assert torch.equal(values, expected)


def test_what_steps_are_told_is_uploaded_once_and_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = []
    original = _backends.uploaded
    monkeypatch.setattr(_backends, "uploaded", lambda rows, device: uploads.append(rows.shape) or rows)
    weights = [fm.FP8Parameter(normal(4, 8 + i), "E4M3", seed=i) for i in range(3)]
    for p in weights:
        p.grad = torch.ones(p.shape)
    optim.StiffnessAdamW(weights, 1e-3, compile=False).step()
    assert [shape[0] for shape in uploads] == [3, 3]
    for shape, dtype in zip(uploads, (torch.float32, torch.int32), strict=True):
        there = original(torch.ones(shape, dtype=dtype), torch.device("meta"))
        assert there.shape == shape
        assert there.stride(0) * there.itemsize % 16 == 0


def test_a_learning_rate_on_a_card_is_read_once_each_time_it_is_set(on_a_card: None) -> None:
    weights = [fm.FP8Parameter(normal(4, 8), "E4M3", seed=i) for i in range(3)]
    lr = torch.tensor(1e-3)
    optimizer = optim.StiffnessAdamW(weights, lr)
    for p in weights:
        p.grad = torch.ones(p.shape)
    optimizer.step()
    read = []
    for change in (lambda: None, lambda: lr.fill_(2e-3)):
        change()
        with Reads() as reads:
            optimizer.step()
        read.append(reads.counts["_local_scalar_dense"])
    unread = _reads_of_a_number(weights)
    assert [count - unread for count in read] == [0, 1]


def _reads_of_a_number(weights: list[Any]) -> int:
    """What a step reads of the CPU, with a learning rate that is a number."""
    optimizer = optim.StiffnessAdamW(weights, 1e-3)
    optimizer.step()
    with Reads() as reads:
        optimizer.step()
    return reads.counts["_local_scalar_dense"]


# ------------------------------------------------------------------------------------------------------------ autocast
@pytest.mark.parametrize("gradients", [False, True])
def test_under_autocast_codes_are_decoded_and_not_copied(gradients: bool) -> None:
    spec = fm.LayerSpec("E4M3", gradient={"activation": "E5M2"} if gradients else None)
    model = fm.quantize_model(nn.Sequential(nn.Linear(32, 16)), spec, storage="fp8")
    x = normal(4, 32)
    with Reads() as reads, torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    y.float().sum().backward()
    copied = [name for name in reads.counts if name.endswith("of codes") and name.split()[0] not in ("detach", "alias")]
    assert copied == []


def test_the_dtype_of_a_product_is_that_of_autocast_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, asked = fm.FP8Parameter(normal(4, 8), "E4M3"), []
    x, bias = torch.ones(2, 8), torch.ones(4)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: asked.append(device) or True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: asked.append(device) or torch.bfloat16)
    cast = _codes_linear._in_one_dtype(x, weight, bias)
    assert cast is not None
    assert [c.dtype for c in cast if c is not None] == [torch.bfloat16] * 2
    assert asked == ["cpu", "cpu"]
    assert "cuda" in _codes_linear._DEVICES
