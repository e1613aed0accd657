"""States of torch's AdamW, and states saved with other moments, are adopted.

An optimizer goes on with them, and its state goes back into torch's AdamW.
"""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from optimizer_cases import normal, through_disk
from torch import nn

import fp8manifold as fm
from fp8manifold import optim

MOMENTS = ("float32", "bfloat16", "8bit")
LR, DECAY = 1e-3, 0.01


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(300, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)
    )


def train(net, optimizer, steps):
    for seed in range(steps):
        optimizer.zero_grad()
        net(normal(8, 300, seed=seed)).square().sum().backward()
        optimizer.step()


def saved_state(optimizer):
    return through_disk(optimizer.state_dict())


def groups_of(net):
    return [
        {"params": [p for p in net.parameters() if p.dim() > 1]},
        {"params": [p for p in net.parameters() if p.dim() <= 1]},
    ]


def trained_by_torch(steps=4):
    net = model()
    adamw = torch.optim.AdamW(groups_of(net), lr=LR, weight_decay=DECAY)
    train(net, adamw, steps)
    return net, adamw


def with_other_options(net, moments="float32", eps=1e-8):
    """Return an optimizer none of whose options are those of `trained_by_torch`."""
    options = {"lr": 9.0, "betas": (0.5, 0.5), "eps": eps, "moments": moments, "seed": 3}
    return optim.StiffnessAdamW(groups_of(net), **options)


@pytest.mark.parametrize("steps", [0, 4])
def test_training_goes_on_where_torch_left_off(steps):
    net, adamw = trained_by_torch(steps)
    copied = model()
    copied.load_state_dict(net.state_dict())
    optimizer = with_other_options(copied, eps=0.1)
    state = saved_state(adamw)
    with pytest.warns(UserWarning, match=r"eps=1e-08 in place of 0\.1"):
        optimizer.load_state_dict(optim.adopted_state(state, optimizer))
    assert optimizer.param_groups[0]["seed"] == 3
    assert len({entry["stream"] for entry in optimizer.state.values()}) == (6 if steps else 0)
    train(net, adamw, 3)
    train(copied, optimizer, 3)
    for p, q in zip(copied.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-7)
    assert_goes_back_into_torchs(optimizer, adamw, steps + 3)


def assert_goes_back_into_torchs(optimizer, adamw, step):
    back = torch.optim.AdamW(with_other_options(model()).param_groups)
    back.load_state_dict(optim.adamw_state(saved_state(optimizer)))
    assert back.param_groups[0]["lr"] == LR
    assert [p.shape for p in optimizer.state] == [p.shape for p in adamw.state]
    entries = (adamw.state.values(), optimizer.state.values(), back.state.values())
    for index, (original, adopted, returned) in enumerate(zip(*entries, strict=True)):
        assert original.keys() == returned.keys(), index
        assert all(torch.equal(returned[name], adopted[name]) for name in returned), index
        assert returned["step"] == step, index


@pytest.mark.parametrize("storage", ["codes", "grid"])
@pytest.mark.parametrize("moments", MOMENTS)
def test_averages_of_torch_are_rounded_once(storage, moments):
    net, adamw = trained_by_torch()
    optimizer = with_other_options(fm.quantize_model(net, "E4M3", storage), moments)
    state = saved_state(adamw)
    optimizer.load_state_dict(optim.adopted_state(state, optimizer))
    back = optim.adamw_state(saved_state(optimizer))["state"]
    for index, entry in state["state"].items():
        first, second = back[index]["exp_avg"], back[index]["exp_avg_sq"]
        if moments == "8bit":
            assert_nearest_codes(first, second, entry)
        else:
            dtype = getattr(torch, moments)
            assert torch.equal(first, entry["exp_avg"].to(dtype).float()), index
            assert torch.equal(second, entry["exp_avg_sq"].to(dtype).float()), index
    train(net, optimizer, 1)


def assert_nearest_codes(first, second, entry):
    assert torch.equal(first, nearest_in_blocks(entry["exp_avg"]))
    root, exact = second.sqrt(), nearest_in_blocks(entry["exp_avg_sq"].sqrt())
    # The odds of a root are not quite a half in the middle between two codes.
    assert (root == exact).float().mean() > 0.98
    torch.testing.assert_close(root, exact, rtol=0.13, atol=float(exact.max()) * 2.0**-16)


def nearest_in_blocks(values):
    """Round to E4M3's grid in blocks of 150 or 64.

    The scale of a block is the power of two that puts its largest at 64 to 128.
    """
    rows = values.reshape(-1, 150 if values.shape[-1] == 300 else 64)
    scale = torch.tensor([[2.0 ** (math.frexp(float(row.abs().max()))[1] - 7)] for row in rows])
    return (fm.round_to_grid(rows / scale, "E4M3") * scale).reshape(values.shape)


OPTIMIZERS = {
    "adamw": lambda net, **o: optim.StiffnessAdamW(
        net.parameters(), lr=LR, writeback="residual8", **o
    ),
    "lion": lambda net, **o: optim.StiffnessLion(net.parameters(), lr=LR, **o),
    "sgd": lambda net, **o: optim.StiffnessSGD(net.parameters(), lr=LR, momentum=0.9, **o),
    "muon": lambda net, **o: optim.StiffnessMuon.for_model(net, lr=LR, **o),
    "riemannian": lambda net, **o: optim.RiemannianAdam(net.parameters(), float_lr=LR, **o),
}


every_change = pytest.mark.parametrize(("old", "new"), [*itertools.product(MOMENTS, repeat=2)])
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


class Change(NamedTuple):
    """An optimizer that went on with other moments, and its state before and after."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    state: dict
    adopted: dict


def changed(name, old, new):
    make = OPTIMIZERS[name]
    net = fm.quantize_model(model(), "E4M3", "codes")
    first, second = make(net, moments=old), make(net, moments=new)
    train(net, first, 3)
    state = saved_state(first)
    second.load_state_dict(optim.adopted_state(state, second))
    return Change(net, second, state, saved_state(second))


@every_optimizer
@every_change
def test_a_change_of_moments_changes_nothing_else(name, old, new):
    change = changed(name, old, new)
    entries = (change.adopted["state"].values(), change.state["state"].values())
    for index, (entry, original) in enumerate(zip(*entries, strict=True)):
        assert entry["stream"] == original["stream"], index
        unchanged = entry if old == new else original.keys() & {"step", "residual", "grid"}
        for key in unchanged:
            assert torch.equal(torch.as_tensor(entry[key]), torch.as_tensor(original[key])), key
    train(change.net, change.optimizer, 1)


@every_optimizer
@every_change
def test_moments_are_rounded_once_when_they_change(name, old, new):
    """In floats: to within a spacing of the new moments, and not again by a second change."""
    change = changed(name, old, new)
    widest = OPTIMIZERS[name](change.net, moments="float32")
    twice = optim.adopted_state(optim.adopted_state(change.adopted, widest), change.optimizer)
    is_exact = new in (old, "float32") or (old, new) == ("8bit", "bfloat16")
    is_in_codes = new == "8bit" and not is_exact
    tolerance = 0.13 if is_in_codes else 2.0**-8
    if is_exact:
        tolerance = 0.0
    floats = [
        optim.adopted_state(state, widest)["state"].values()
        for state in (change.state, change.adopted, twice)
    ]
    for original, adopted, again in zip(*floats, strict=True):
        for key in original.keys() & {"exp_avg", "exp_avg_sq", "momentum_buffer"}:
            # A spacing below all values: the largest may have been rounded up.
            smallest = 2.0**-15 * float(adopted[key].abs().max())
            torch.testing.assert_close(adopted[key], again[key], rtol=0.0, atol=smallest)
            largest = float(original[key].abs().max())
            subnormal = 2.0 ** (-7 if key == "momentum_buffer" else -9) * largest
            torch.testing.assert_close(
                adopted[key], original[key], rtol=tolerance, atol=subnormal if is_in_codes else 0.0
            )


@every_optimizer
@pytest.mark.parametrize(("old", "new"), [*itertools.permutations(MOMENTS, 2)])
def test_a_state_of_other_moments_that_is_not_adopted_warns(name, old, new):
    net = fm.quantize_model(model(), "E4M3", "codes")
    optimizer = OPTIMIZERS[name](net, moments=old)
    train(net, optimizer, 3)
    message = r"\(optim\.adopted_state\(state, optimizer\) keeps these\)"
    with pytest.warns(UserWarning, match=message):
        OPTIMIZERS[name](net, moments=new).load_state_dict(saved_state(optimizer))


def test_steps_count_from_where_the_averages_were_cleared():
    net = model()
    optimizer = optim.StiffnessAdamW(net.parameters(), lr=LR, reset_every=2)
    train(net, optimizer, 3)
    entries = optim.adamw_state(saved_state(optimizer))["state"].values()
    assert {float(entry["step"]) for entry in entries} == {1.0}


#: name: (entries that replace those of parameter 0, None to remove one; the message)
EDITS = {
    "one more": (
        {"max_exp_avg_sq": torch.ones(64, 300)},
        "parameter 0 has max_exp_avg_sq, unlike AdamW's",
    ),
    "one less": ({"exp_avg": None}, "parameter 0 lacks exp_avg, unlike AdamW's"),
    "another shape": (
        {"exp_avg": torch.ones(300, 64)},
        r"parameter 0 has exp_avg of shape \(300, 64\): the parameter's is",
    ),
    "squares below 0": (
        {"exp_avg_sq": -torch.ones(64, 300)},
        "exp_avg_sq with values that no average",
    ),
    "NaN": (
        {"exp_avg": torch.full((64, 300), torch.nan)},
        "exp_avg with values that no average",
    ),
    "integers": ({"exp_avg": torch.ones(64, 300).int()}, "exp_avg=tensor"),
    "a step below 0": ({"step": torch.tensor(-1.0)}, "step=tensor"),
}
#: name: (a state, the message)
STATES = {
    "fewer groups": (
        {"state": {}, "param_groups": [{"params": [0]}]},
        r"groups of size \[1\], the optimizer of size \[2, 4\]",
    ),
    "no groups": ({"state": {}}, "lacks param_groups"),
    "of another optimizer": (
        {"optimizer": "StiffnessLion", "state": {}, "param_groups": []},
        "one of StiffnessLion, not of StiffnessAdamW",
    ),
}


@pytest.fixture(scope="module")
def adamw_state():
    return trained_by_torch(1)[1].state_dict()


@pytest.mark.parametrize(("edit", "message"), EDITS.values(), ids=EDITS)
def test_an_edited_state_of_adamw_is_refused(edit, message, adamw_state):
    entry = adamw_state["state"][0] | edit
    entry = {name: value for name, value in entry.items() if value is not None}
    state = adamw_state | {"state": adamw_state["state"] | {0: entry}}
    net = fm.quantize_model(model(), "E4M3", "codes")
    with pytest.raises(ValueError, match=message):
        optim.adopted_state(state, with_other_options(net, "8bit"))


@pytest.mark.parametrize(("state", "message"), STATES.values(), ids=STATES)
def test_what_is_no_state_of_adamw_is_refused(state, message):
    net = fm.quantize_model(model(), "E4M3", "codes")
    with pytest.raises(ValueError, match=message):
        optim.adopted_state(state, with_other_options(net, "8bit"))


def test_only_adamws_averages_are_torchs():
    net, adamw = trained_by_torch(1)
    with pytest.raises(ValueError, match="goes into StiffnessAdamW only, not into RiemannianAdam"):
        optim.adopted_state(adamw.state_dict(), optim.RiemannianAdam(net.parameters()))
    with pytest.raises(ValueError, match="one of StiffnessLion, not of StiffnessAdamW"):
        optim.adamw_state(optim.StiffnessLion(net.parameters()).state_dict())
    with pytest.raises(TypeError, match="state_dict must be a dict, not list"):
        optim.adopted_state([], with_other_options(net))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RAdam])
def test_decay_that_is_not_decoupled_is_not_adopted(kind):
    net = model()
    adam = kind(net.parameters(), LR, weight_decay=DECAY)
    train(net, adam, 1)
    with pytest.raises(ValueError, match="of Adam with L2 weight decay"):
        optim.adopted_state(adam.state_dict(), optim.StiffnessAdamW(net.parameters(), LR))
