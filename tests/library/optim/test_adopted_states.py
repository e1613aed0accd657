"""States of torch's AdamW, and those saved with other moments, go into an optimizer,
and back into torch's.
"""

import math

import pytest
import torch
from optimizer_cases import normal, through_disk

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


def saved(optimizer):
    return through_disk(optimizer.state_dict())


def of_torch(steps=4):
    net = model()
    split = [
        {"params": [p for p in net.parameters() if (p.dim() > 1) is decays]}
        for decays in (True, False)
    ]
    adamw = torch.optim.AdamW(split, lr=LR, weight_decay=DECAY)
    train(net, adamw, steps)
    return net, adamw


def like(net, moments="float32", eps=1e-8):
    split = [
        {"params": [p for p in net.parameters() if (p.dim() > 1) is decays]}
        for decays in (True, False)
    ]
    return optim.StiffnessAdamW(split, lr=9.0, betas=(0.5, 0.5), eps=eps, moments=moments, seed=3)


@pytest.mark.parametrize("steps", [0, 4])
def test_training_goes_on_where_torch_left_off(steps):
    net, adamw = of_torch(steps)
    other = model()
    other.load_state_dict(net.state_dict())
    optimizer = like(other, eps=0.1)
    given = saved(adamw)
    with pytest.warns(UserWarning, match=r"eps=1e-08 in place of 0\.1"):
        optimizer.load_state_dict(optim.adopted_state(given, optimizer))
    assert optimizer.param_groups[0]["seed"] == 3
    assert len({entry["stream"] for entry in optimizer.state.values()}) == (6 if steps else 0)
    train(net, adamw, 3)
    train(other, optimizer, 3)
    for p, q in zip(other.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-7)
    back = torch.optim.AdamW(like(model()).param_groups)  # and back into torch's
    back.load_state_dict(optim.adamw_state(saved(optimizer)))
    assert back.param_groups[0]["lr"] == LR
    for (mine, its), (ours, theirs) in zip(
        zip(adamw.state.items(), back.state.items(), strict=True),
        optimizer.state.items(),
        strict=True,
    ):
        assert mine[1].keys() == its[1].keys()
        assert all(torch.equal(its[1][name], theirs[name]) for name in its[1])
        assert its[1]["step"] == steps + 3
        assert ours.shape == mine[0].shape


@pytest.mark.parametrize("storage", ["fp8", "grid"])
@pytest.mark.parametrize("moments", MOMENTS)
def test_averages_of_torch_are_rounded_once(storage, moments):
    net, adamw = of_torch()
    optimizer = like(fm.quantize_model(net, "E4M3", storage), moments)
    given = saved(adamw)
    optimizer.load_state_dict(optim.adopted_state(given, optimizer))
    back = optim.adamw_state(saved(optimizer))["state"]
    for index, entry in given["state"].items():
        first, second = (back[index][name] for name in ("exp_avg", "exp_avg_sq"))
        if moments != "8bit":
            for found, name in ((first, "exp_avg"), (second, "exp_avg_sq")):
                assert torch.equal(found, entry[name].to(getattr(torch, moments)).float())
            continue
        exact = torch.stack(
            [nearest_in_blocks(entry["exp_avg"]), nearest_in_blocks(entry["exp_avg_sq"].sqrt())]
        )
        assert torch.equal(first, exact[0])
        assert (
            second.sqrt() == exact[1]
        ).float().mean() > 0.98  # the odds of a root are not quite a half there
        torch.testing.assert_close(
            second.sqrt(), exact[1], rtol=0.13, atol=float(exact[1].max()) * 2.0**-16
        )
    train(net, optimizer, 1)


def nearest_in_blocks(values):
    """Every value on E4M3's grid, one power of two a block of 150 or 64 with its
    largest at 64 to 128.
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


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("after", MOMENTS)
@pytest.mark.parametrize("before", MOMENTS)
def test_moments_change_over_a_run(name, before, after):
    make = OPTIMIZERS[name]
    net = fm.quantize_model(model(), "E4M3", "fp8")
    first, second = make(net, moments=before), make(net, moments=after)
    train(net, first, 3)
    given = saved(first)
    if before != after:
        with pytest.warns(
            UserWarning, match=r"\(optim\.adopted_state\(state, optimizer\) keeps these\)"
        ):
            make(net, moments=after).load_state_dict(given)
    second.load_state_dict(optim.adopted_state(given, second))
    there = saved(second)
    widest = make(net, moments="float32")
    for entry, own in zip(there["state"].values(), given["state"].values(), strict=True):
        assert entry["stream"] == own["stream"]
        assert all(
            torch.equal(entry[key], own[key]) for key in ("step", "residual", "grid") if key in own
        )
        assert before != after or all(
            torch.equal(torch.as_tensor(entry[key]), torch.as_tensor(own[key])) for key in entry
        )
    again = optim.adopted_state(optim.adopted_state(there, widest), second)
    floats = [
        optim.adopted_state(state, widest)["state"].values() for state in (given, there, again)
    ]
    for ours, theirs, twice in zip(*floats, strict=True):
        for key in ours.keys() & {"exp_avg", "exp_avg_sq", "momentum_buffer"}:
            smallest = 2.0**-15 * float(
                theirs[key].abs().max()
            )  # a spacing below all: the largest was rounded up
            torch.testing.assert_close(theirs[key], twice[key], rtol=0.0, atol=smallest)
            exact = (before, after) in {(before, before), (before, "float32"), ("8bit", "bfloat16")}
            near = 0.0 if exact else 0.13 if after == "8bit" else 2.0**-8
            least = 2.0 ** (-7 if key == "momentum_buffer" else -9) * float(ours[key].abs().max())
            torch.testing.assert_close(
                theirs[key], ours[key], rtol=near, atol=least if near == 0.13 else 0.0
            )
    train(net, second, 1)


def test_steps_count_from_where_the_averages_were_cleared():
    net = model()
    optimizer = optim.StiffnessAdamW(net.parameters(), lr=LR, reset_every=2)
    train(net, optimizer, 3)
    assert {
        float(entry["step"]) for entry in optim.adamw_state(saved(optimizer))["state"].values()
    } == {1.0}


def edited(**entries):
    state = of_torch(1)[1].state_dict()
    state["state"][0] = {
        name: value for name, value in (state["state"][0] | entries).items() if value is not None
    }
    return state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            edited(max_exp_avg_sq=torch.ones(64, 300)),
            "parameter 0 has max_exp_avg_sq, unlike AdamW's",
        ),
        (edited(exp_avg=None), "parameter 0 lacks exp_avg, unlike AdamW's"),
        (
            edited(exp_avg=torch.ones(300, 64)),
            r"parameter 0 has exp_avg of shape \(300, 64\): the parameter's is",
        ),
        (edited(exp_avg_sq=-torch.ones(64, 300)), "exp_avg_sq with values that no average"),
        (edited(exp_avg=torch.full((64, 300), torch.nan)), "exp_avg with values that no average"),
        (edited(exp_avg=torch.ones(64, 300).int()), "exp_avg=tensor"),
        (edited(step=torch.tensor(-1.0)), "step=tensor"),
        (
            {"state": {}, "param_groups": [{"params": [0]}]},
            r"groups of size \[1\], the optimizer of size \[2, 4\]",
        ),
        ({"state": {}}, "lacks param_groups"),
        (
            {"optimizer": "StiffnessLion", "state": {}, "param_groups": []},
            "one of StiffnessLion, not of StiffnessAdamW",
        ),
    ],
)
def test_what_is_no_state_of_adamw_is_refused(state, message):
    net = fm.quantize_model(model(), "E4M3", "fp8")
    with pytest.raises(ValueError, match=message):
        optim.adopted_state(state, like(net, "8bit"))


def test_only_adamws_averages_are_torchs():
    net, adamw = of_torch(1)
    with pytest.raises(ValueError, match="goes into StiffnessAdamW only, not into RiemannianAdam"):
        optim.adopted_state(adamw.state_dict(), optim.RiemannianAdam(net.parameters()))
    with pytest.raises(ValueError, match="one of StiffnessLion, not of StiffnessAdamW"):
        optim.adamw_state(optim.StiffnessLion(net.parameters()).state_dict())
    with pytest.raises(TypeError, match="state_dict must be a dict, not list"):
        optim.adopted_state([], like(net))


def test_decay_that_is_not_decoupled_is_not_adopted():
    net = model()
    for kind in (torch.optim.Adam, torch.optim.RAdam):
        theirs = kind(net.parameters(), LR, weight_decay=DECAY)
        train(net, theirs, 1)
        with pytest.raises(ValueError, match="of Adam with L2 weight decay"):
            optim.adopted_state(theirs.state_dict(), optim.StiffnessAdamW(net.parameters(), LR))
