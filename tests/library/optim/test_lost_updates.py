"""What `lost_updates` foresees is what the next step does, and nothing changes by asking."""

import io

import geoopt
import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import fp8manifold as fm
from fp8manifold import optim

#: a rate at which rounding loses updates of weights around 1 in one direction, or in both
RATES = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 5e-8}
MAKERS = {
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.0),
    "adam": lambda p, lr: torch.optim.Adam(p, lr),
    "sgd": lambda p, lr: torch.optim.SGD(p, lr),
    "ours": lambda p, lr: optim.StiffnessAdamW(p, lr, weight_decay=0.0, writeback="nearest"),
}


def network(dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)).to(dtype)
    nn.init.normal_(model[0].weight, 1.0, 0.2)
    return model


def give_gradients(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def values(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def decoded(model):
    return {n: p.dequantize() for n, p in model.named_parameters() if isinstance(p, fm.FP8Tensor)}


@pytest.mark.parametrize("dtype", RATES)
@pytest.mark.parametrize("kind", MAKERS)
def test_a_step_loses_what_was_foreseen(kind, dtype):
    model = network(dtype)
    optimizer = MAKERS[kind](model.parameters(), RATES[dtype])
    give_gradients(model)
    report = fm.lost_updates(model, optimizer)
    before = values(model)
    optimizer.step()
    after = values(model)
    unmoved = {name: int((after[name] == before[name]).sum()) for name in before}
    assert {row.name: row.lost for row in report.parameters} == unmoved
    assert 0.2 < report.lost_share < 0.95


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_codes_stay_where_it_was_foreseen(kind):
    model = fm.quantize_model(network(torch.float32), "E4M3", rounding="nearest")
    options = {"weight_decay": 0.0}
    if kind == "ours":
        optimizer = optim.StiffnessAdamW(model.parameters(), 3e-2, writeback="nearest", **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 3e-2, **options)
    give_gradients(model)
    report = fm.lost_updates(model, optimizer)
    before = decoded(model)
    optimizer.step()
    after = decoded(model)
    rows = {row.name: row for row in report.parameters if row.dtype == "E4M3"}
    unmoved = {name: int((after[name] == before[name]).sum()) for name in before}
    assert {name: row.lost for name, row in rows.items()} == unmoved
    assert 0 < rows["0.weight"].lost < rows["0.weight"].weights


def test_stochastic_rounding_and_residuals_lose_nothing():
    model = network()
    give_gradients(model)
    report = fm.lost_updates(model, optim.StiffnessAdamW(model.parameters(), 1e-3))
    norm = next(row for row in report.parameters if row.name == "1.weight")
    assert (norm.below_share, norm.lost_share, norm.rounding) == (1.0, 0.0, "stochastic")
    coded = fm.quantize_model(network(torch.float32), "E4M3", keep_remainder=True)
    give_gradients(coded)
    optimizer = optim.StiffnessAdamW(coded.parameters(), 1e-3, writeback="residual8")
    row = fm.lost_updates(coded, optimizer).parameters[0]
    assert (row.rounding, row.lost) == ("residual8", 0)
    assert row.below > 0


def test_norms_of_16_bits_come_first():
    model = network()
    model[2].float()
    give_gradients(model)
    report = fm.lost_updates(model, torch.optim.AdamW(model.parameters()))
    names = [row.name for row in report.parameters]
    assert names == ["0.bias", "1.weight", "1.bias", "0.weight", "2.weight", "2.bias"]


def test_updates_follow_from_the_rate_where_there_is_no_gradient():
    model = nn.LayerNorm(16, dtype=torch.bfloat16)
    shares = {}
    for rate in (1e-3, 3e-3, 1e-2):
        report = fm.lost_updates(model, torch.optim.AdamW(model.parameters(), rate))
        assert not report.has_gradients
        shares[rate] = report.parameters[0].lost_share
    assert shares[1e-3] == 1.0
    # half a spacing is 0.002 downwards and 0.004 upwards
    assert 0.2 < shares[3e-3] < 0.8
    assert shares[1e-2] == 0.0


def test_weights_without_an_update_are_not_counted():
    model = nn.LayerNorm(4, dtype=torch.bfloat16)
    model.weight.grad = torch.tensor([0, 0, 0, 1.0], dtype=torch.bfloat16)
    (row,) = fm.lost_updates(model, torch.optim.SGD(model.parameters(), 1e-3)).parameters
    assert (row.weights, row.updated, row.lost, row.lost_share) == (4, 1, 1, 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_below_the_spacing_of_float32_are_lost(dtype):
    model = nn.LayerNorm(4, dtype=dtype)
    model.weight.grad = torch.full_like(model.weight, 1e-5)
    (row,) = fm.lost_updates(model, torch.optim.SGD(model.parameters(), 1e-4)).parameters
    assert (row.updated, row.lost) == (4, 4)


ADAFACTORS = {
    "torch-bfloat16": (lambda p: torch.optim.Adafactor(p, 1e-2), torch.bfloat16, 1e-5),
    "torch-float32": (lambda p: torch.optim.Adafactor(p, 1e-6), torch.float32, 1e-9),
    "ours-bfloat16": (
        lambda p: optim.StiffnessAdafactor(p, 1e-2, writeback="nearest", momentum=0.9),
        torch.bfloat16,
        1e-8,
    ),
    "ours-float32": (lambda p: optim.StiffnessAdafactor(p, 1e-6), torch.float32, 1e-9),
}


@pytest.mark.parametrize("kind", ADAFACTORS)
def test_adafactor_without_eps_takes_that_of_the_stored_dtype(kind):
    make, dtype, size = ADAFACTORS[kind]
    norm = nn.LayerNorm(64, bias=False, dtype=dtype)
    optimizer = make(norm.parameters())
    norm.weight.grad = torch.full_like(norm.weight, size)
    (row,) = fm.lost_updates(norm, optimizer).parameters
    before = norm.weight.detach().clone()
    optimizer.step()
    assert row.lost == int((norm.weight == before).sum()) == 64


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_codes_whose_step_is_skipped_have_no_update(value, recwarn):
    model = fm.quantize_model(network(torch.float32), "E4M3")
    optimizer = optim.StiffnessAdamW(model.parameters(), 1e-3)
    optimizer.warn_after = 1
    give_gradients(model)
    model[0].weight.grad[0, 0] = value
    row = next(r for r in fm.lost_updates(model, optimizer).parameters if r.name == "0.weight")
    assert (row.dtype, row.weights, row.updated, row.below) == ("E4M3", 256, 0, 0)
    assert not recwarn


@pytest.mark.parametrize("has_gradient", [True, False])
def test_codes_without_weights_have_no_update(has_gradient):
    model = nn.Module()
    model.weight = fm.FP8Parameter(torch.zeros(0, 4), "E4M3", seed=0)
    if has_gradient:
        model.weight.grad = torch.zeros(0, 4)
    (row,) = fm.lost_updates(model, optim.StiffnessAdamW(model.parameters(), 1e-3)).parameters
    assert (row.dtype, row.weights, row.updated, row.lost_share) == ("E4M3", 0, 0, 0.0)


class Scaled(torch.optim.SGD):
    """SGD with an attribute of its own, which its step reads."""

    def __init__(self, params, lr, factor):
        super().__init__(params, lr)
        self.factor = factor

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * self.factor[0] * parameter.grad


@pytest.mark.parametrize("factor", [1.0, 1e-3])
def test_a_subclass_keeps_its_attributes(factor):
    model = nn.LayerNorm(4, bias=False, dtype=torch.bfloat16)
    model.weight.grad = torch.ones_like(model.weight)
    (row,) = fm.lost_updates(model, Scaled(model.parameters(), 0.1, (factor,))).parameters
    assert (row.updated, row.lost_share) == (4, 0.0 if factor == 1.0 else 1.0)


def test_hooks_of_steps_are_not_called():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    give_gradients(model)
    calls = []
    handles = [
        register(lambda *arguments: calls.append(arguments))
        for register in (
            register_optimizer_step_pre_hook,
            register_optimizer_step_post_hook,
            optimizer.register_step_pre_hook,
        )
    ]
    try:
        fm.lost_updates(model, optimizer)
        assert not calls
        optimizer.step()
        assert len(calls) == 3
    finally:
        for handle in handles:
            handle.remove()


class SignDescent(torch.optim.SGD):
    """A step that makes no tensor, whose device could be the default one."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad.sign()


def test_another_default_device_changes_nothing():
    model = network()
    optimizer = SignDescent(model.parameters(), 1e-3)
    expected = fm.lost_updates(model, optimizer)
    with torch.device("meta"):
        assert fm.lost_updates(model, optimizer) == expected


def everything(model, optimizer):
    """Return all that a step depends on or changes, as bytes."""
    gradients = [p.grad for p in model.parameters()]
    versions = [(id(p), p._version) for p in model.parameters()]
    memory = io.BytesIO()
    parts = [model.state_dict(), gradients, optimizer.state_dict(), torch.get_rng_state()]
    torch.save([*parts, versions, sorted(vars(optimizer))], memory)
    return memory.getvalue()


STEPPED = MAKERS | {
    "8bit": lambda p, lr: optim.StiffnessAdamW(p, lr, moments="8bit"),
    "lion": lambda p, lr: optim.StiffnessLion(p, lr, moments="bfloat16"),
    "adafactor": lambda p, lr: optim.StiffnessAdafactor(p, lr),
    "fused": lambda p, lr: torch.optim.AdamW(p, lr, fused=True),
    "amsgrad": lambda p, lr: torch.optim.AdamW(p, lr, amsgrad=True, foreach=True),
}


@pytest.mark.parametrize("storage", ["floats", "codes"])
@pytest.mark.parametrize("kind", STEPPED)
def test_nothing_changes_by_asking(kind, storage):
    models = []
    for asks in (True, False):
        model = network(torch.float32 if storage == "codes" else torch.bfloat16)
        if storage == "codes":
            fm.quantize_model(model, "E4M3")
        optimizer = STEPPED[kind](model.parameters(), 1e-3)
        for seed in range(3):
            give_gradients(model, seed)
            if asks:
                before = everything(model, optimizer)
                fm.lost_updates(model, optimizer)
                assert everything(model, optimizer) == before
            optimizer.step()
        models.append(model)
    first, second = map(values, models)
    assert all(torch.equal(first[name].float(), second[name].float()) for name in first)


def wrapped(model):
    return optim.StiffnessWrapper(torch.optim.SGD(model.parameters(), 0.1))


def off_the_model(model):
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)


#: name: (a model, an optimizer, the error, its message)
REFUSALS = {
    "sgd without gradients": (
        network,
        lambda m: torch.optim.SGD(m.parameters(), 0.1),
        ValueError,
        "no gradient, and the update of SGD depends on its magnitude",
    ),
    "closure": (network, lambda m: torch.optim.LBFGS(m.parameters()), TypeError, "several losses"),
    "wrapper": (network, wrapped, TypeError, "pass that one, SGD"),
    "geoopt": (
        network,
        lambda m: geoopt.optim.RiemannianAdam(m.parameters()),
        TypeError,
        "steps on manifolds",
    ),
    "other parameters": (network, off_the_model, ValueError, "trains no parameter of the model"),
    "no optimizer": (network, lambda m: m, TypeError, "not Sequential"),
    "attribute": (
        network,
        lambda m: Scaled(m.parameters(), 0.1, [1.0]),
        TypeError,
        "Scaled uses its attribute 'factor' in a step",
    ),
    "float64": (
        lambda: network(torch.float64),
        lambda m: torch.optim.Adam(m.parameters()),
        ValueError,
        r"'0.weight' is in torch.float64",
    ),
    "grid": (
        lambda: fm.quantize_model(network(torch.float32), "E4M3", storage="grid"),
        lambda m: optim.StiffnessAdamW(m.parameters(), 1e-3),
        ValueError,
        r"'0.weight' is on a manifold in floats",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_can_not_be_foreseen_is_refused(name):
    make, optimizer_of, error, message = REFUSALS[name]
    model = make()
    with pytest.raises(error, match=message):
        fm.lost_updates(model, optimizer_of(model))
