"""Waits of the host for a card.

It reads no codes, and no numbers that it knows already. A CPU stands for a card here: the
library is told that no number can be read at once, and reads are counted.
"""

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from optimizer_cases import normal, put_gradients
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8manifold as fm
from fp8manifold import grid, optim
from fp8manifold._base import reading
from fp8manifold._encoded import dispatch
from fp8manifold.formats import as_format
from fp8manifold.nn import _scalers


class Reads(TorchDispatchMode):
    """Counts operators by name; those over codes apart."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        inputs = [
            x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        ]
        coded = any(x.dtype is torch.uint8 for x in inputs)
        self.counts.update([name, *([f"{name} of codes"] if coded else [])])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def on_a_card(monkeypatch):
    """Tell the library that the host would wait for every number."""
    monkeypatch.setattr(reading, "is_read_at_once", lambda x: False)
    monkeypatch.setattr(_scalers, "is_read_at_once", lambda x: False)
    monkeypatch.setattr(grid, "is_read_at_once", lambda x: False)


def stochastic_layer():
    gradient = {"activation": "E5M2"}
    spec = fm.LayerSpec("E4M3", "E4M3", policy="static", rounding="stochastic", gradient=gradient)
    return fm.quantize_model(
        nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16)), spec, seed=1, storage="master"
    )


def losses(model, scale, steps):
    sums = []
    for step in range(steps):
        y = model(normal(4, 32, seed=step) * scale)
        y.square().sum().backward()
        sums.append(y.detach().sum())
    return [float(x) for x in sums]


@pytest.mark.filterwarnings("ignore:a frozen E.M. scale saturates")
def test_a_layer_with_stochastic_operands_and_a_frozen_scale_reads_nothing(on_a_card):
    model = stochastic_layer()
    losses(model, 1.0, 2)
    x = normal(4, 32) * 0.1
    with Reads() as reads:
        model(x).square().sum().backward()
    assert not reads.counts["_local_scalar_dense"], reads.counts
    assert not reads.counts["is_nonzero"]


CHANGES = {
    "none": lambda model, saved: None,
    "by hand": lambda model, saved: model[0].draws.fill_(7),
    "loaded": lambda model, saved: model.load_state_dict(saved),
    "begun anew": lambda model, saved: model[0].draws.zero_(),
}


@pytest.mark.filterwarnings("ignore:a frozen E.M. scale saturates")
@pytest.mark.parametrize("change", CHANGES)
def test_its_numbers_are_those_of_a_layer_that_reads(change, monkeypatch):
    """Also where its count of draws changes in a way that the host has not seen."""
    model, reader = stochastic_layer(), stochastic_layer()
    reader.load_state_dict(model.state_dict())
    saved = {name: x.clone() for name, x in model.state_dict().items()}
    expected = losses(reader, 0.1, 2)
    CHANGES[change](reader, saved)
    expected += losses(reader, 0.1, 2)
    monkeypatch.setattr(reading, "is_read_at_once", lambda x: False)
    monkeypatch.setattr(_scalers, "is_read_at_once", lambda x: False)
    actual = losses(model, 0.1, 2)
    CHANGES[change](model, saved)
    assert actual + losses(model, 0.1, 2) == expected
    assert int(model[0].draws) == int(reader[0].draws)


def test_a_frozen_scale_that_saturates_is_warned_of_with_the_next_tensor(on_a_card):
    scale = _scalers.Scale("E4M3", policy="static")
    scale(torch.tensor([448.0]))
    scale(torch.tensor([4480.0]))
    with pytest.warns(fm.SaturationWarning, match="10 times its range"):
        scale(torch.tensor([1.0]))


ENCODINGS = {
    "nearest": {},
    "stochastic": {"rounding": "stochastic", "seed": 3},
    "inf_or_nan": {"overflow": "inf_or_nan"},
}


@pytest.mark.parametrize("native", [True, False], ids=["native", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["E2M1", "E2M3", "E3M2", "E4M3", "E5M2", "E4M3FNUZ"])
def test_codes_are_made_and_read_without_a_wait(name, dtype, native, on_a_card, monkeypatch):
    x = torch.cat([normal(200).mul(4), torch.tensor([torch.inf, -torch.inf, 0.0, -0.0])]).to(dtype)
    encodings = [ENCODINGS["nearest"], ENCODINGS["stochastic"]]
    if as_format(name).nan_code is not None:
        encodings.append(ENCODINGS["inf_or_nan"])
    with monkeypatch.context() as patch:
        patch.setattr(grid, "is_read_at_once", lambda x: True)
        expected = [fm.encode(x, name, **options) for options in encodings]
    with Reads() as reads, monkeypatch.context() as patch:
        for step in () if native else ("encode_by_kernel", "decode_by_kernel", "round_by_kernel"):
            patch.setattr(grid, step, lambda *_: None)
        codes = [fm.encode(x, name, **options) for options in encodings]
        values = [fm.decode(x, name) for x in codes]
        empty = fm.encode(x[:0], name)
    assert not reads.counts["_local_scalar_dense"], reads.counts
    assert not reads.counts["is_nonzero"]
    assert all(map(torch.equal, codes, expected))
    assert values[0][-1] == 0
    assert not empty.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_has_no_code_stops_the_card(dtype, on_a_card):
    """On a CPU at once."""
    x = torch.tensor([1.0, torch.nan, torch.inf], dtype=dtype)
    message = "x holds NaN, and E2M1 has no code for NaN: remove them first"
    with pytest.raises(RuntimeError, match=message):
        fm.encode(x, "E2M1")


def test_what_is_no_code_stops_the_card(on_a_card):
    with pytest.raises(RuntimeError, match="a code is out of range for E2M1: 0 to 15"):
        fm.decode(torch.tensor([3, 16], dtype=torch.uint8), "E2M1")


PRODUCTS = {
    "linear": lambda x, w: F.linear(x, w),
    "product": lambda x, w: x @ w.t(),
    "twice": lambda x, w: F.linear(x, w) + x @ w.t(),
    "convolution": lambda x, w: F.conv1d(x.unsqueeze(-1), w.unsqueeze(-1)),
    "embedding": lambda x, w: F.embedding(torch.tensor([[3, 0], [1, 3]]), w),
}
COPIES = ("_to_copy", "clone", "copy_", "add_")


@pytest.fixture
def inner(monkeypatch):
    """Count what operators over tensors of codes do to their parts."""
    counts = Counter()
    original = dispatch._run_operator

    def run(*arguments):
        with Reads() as reads:
            result = original(*arguments)
        counts.update(reads.counts)
        return result

    monkeypatch.setattr(dispatch, "_run_operator", run)
    return counts


@pytest.mark.parametrize("granularity", ["channel", "block"])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_whatever_autocast_casts_shares_the_codes(kind, granularity, inner):
    """Values and gradients are those of a weight in floats; no layer of ours is needed."""
    w = fm.FP8Parameter(normal(16, 32), "E4M3", granularity=granularity, seed=1)
    plain, x = nn.Parameter(w.dequantize()), normal(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        y = PRODUCTS[kind](x, w)
    y.float().sum().backward()
    assert inner
    assert not [name for name in COPIES if inner[f"{name} of codes"]], inner
    # These are of exponents, which are decoded, and of no counter.
    clones = inner["clone"] + inner["_to_copy"]
    assert clones <= (4 if granularity == "block" else 0), inner
    with torch.autocast("cpu", torch.bfloat16):
        expected = PRODUCTS[kind](x, plain)
    expected.float().sum().backward()
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)
    assert torch.equal(w.grad, plain.grad)


CHANGED = {
    "step": lambda w: optim.StiffnessAdamW([w], 0.1).step(),
    "write": lambda w: w.data.add_(1.0),
    "adopted": lambda w: w.data.copy_(fm.FP8Tensor(normal(16, 32, seed=2), "E4M3")),
    "scale": lambda w: w.set_scale_(w.scale * 2),
}


@pytest.mark.parametrize("use", ["cast", "transposed cast", "detached", "layer", "backward"])
@pytest.mark.parametrize("change", CHANGED)
def test_a_cast_of_a_weight_that_has_changed_is_refused(change, use):
    """Its codes have other values by now; a clone has its own."""
    w, x = fm.FP8Parameter(normal(16, 32), "E4M3", seed=1), normal(4, 32).requires_grad_()
    w.grad = torch.ones(w.shape)
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, w)
        cast, view = w.to(torch.bfloat16), w.t().to(torch.bfloat16)
        clone = w.to(torch.bfloat16).clone()
        old_values = clone.dequantize()
        assert torch.equal(cast.dequantize(), old_values)
        CHANGED[change](w)
        uses = {
            "cast": cast.dequantize,
            "transposed cast": view.dequantize,
            "detached": cast.detach,
            # Autocast keeps its casts.
            "layer": lambda: F.linear(x, w),
            "backward": y.float().sum().backward,
        }
        with pytest.raises(RuntimeError, match="whose codes it shares has changed since"):
            uses[use]()
    assert torch.equal(clone.dequantize(), old_values)
    with torch.autocast("cpu", torch.bfloat16):
        F.linear(x, w).float().sum().backward()


WRITES = {
    "add_": lambda cast: cast.add_(1.0),
    "detached zero_": lambda cast: cast.detach().zero_(),
    "copy_": lambda cast: cast.copy_(cast.clone()),
    "set_scale_": lambda cast: cast.set_scale_(1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_cast_is_not_written_to(write):
    w = fm.FP8Tensor(normal(16, 32), "E4M3", seed=1)
    codes = w.codes.clone()
    with torch.autocast("cpu", torch.bfloat16):
        cast = w.to(torch.bfloat16)
        with pytest.raises(RuntimeError, match="shares the codes of the weight"):
            write(cast)
    assert torch.equal(w.codes, codes)


def test_a_module_that_is_moved_under_autocast_has_memory_of_its_own():
    module = fm.quantize_model(nn.Sequential(nn.Linear(32, 16)), "E4M3", storage="codes")
    original = copy.deepcopy(module)
    with torch.autocast("cpu", torch.bfloat16):
        module.to(torch.bfloat16)
    module[0].weight.data.add_(1.0)
    assert module[0].weight.dtype is torch.bfloat16
    assert not torch.equal(module[0].weight.codes, original[0].weight.codes)


def test_a_learning_rate_on_a_card_is_read_once_each_time_it_is_set(on_a_card):
    def reads_of(optimizer):
        with Reads() as reads:
            optimizer.step()
        return reads.counts["_local_scalar_dense"]

    weights = [fm.FP8Parameter(normal(4, 8), "E4M3", seed=i) for i in range(3)]
    put_gradients(weights, 0)
    lr = torch.tensor(1e-3)
    optimizer, plain = optim.StiffnessAdamW(weights, lr), optim.StiffnessAdamW(weights, 1e-3)
    optimizer.step()
    plain.step()
    expected = reads_of(plain)
    assert reads_of(optimizer) == expected
    lr.fill_(2e-3)
    assert reads_of(optimizer) == expected + 1


@pytest.mark.parametrize("gradients", [False, True])
def test_under_autocast_codes_are_decoded_and_not_copied(gradients):
    spec = fm.LayerSpec("E4M3", gradient={"activation": "E5M2"} if gradients else None)
    model = fm.quantize_model(nn.Sequential(nn.Linear(32, 16)), spec, storage="codes")
    with Reads() as reads, torch.autocast("cpu", torch.bfloat16):
        model(normal(4, 32)).float().sum().backward()
    of_codes = {name.split()[0] for name in reads.counts if name.endswith("of codes")}
    assert of_codes <= {"detach", "alias", "empty_like"}
