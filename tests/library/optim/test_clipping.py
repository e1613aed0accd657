"""Clipping while gradients are freed: the numbers of clip_grad_norm_, and by the norm of the step before."""

import copy
import math

import pytest
import torch
from in_backward_cases import OPTIMIZERS, everything, loss, measure, network, ordinary, stepping, train
from laws import each
from optimizer_cases import everyone
from torch import Tensor, nn

from fp8manifold import optim
from fp8manifold.optim._in_backward.gradients import clip_factor

SMALL = 1e-3
"""What every gradient of the network is clipped by."""


def without_norms(saved):
    """:func:`everything` but for the norm that an ordinary optimizer's groups don't have."""
    for group in saved[1]["param_groups"]:
        group.pop("previous_norm", None)
    return saved


@each("storage", ["fp8", None])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_passes_are_clip_grad_norm_to_the_bit(name, storage):
    plain, whole = ordinary(name, storage)
    norms = []
    for _ in range(3):
        whole.zero_grad()
        loss(plain).backward()
        norms.append(nn.utils.clip_grad_norm_(everyone(whole), SMALL))
        whole.step()
    model, optimizer, handle = stepping(name, storage, clip="exact", max_norm=SMALL)
    for i in range(3):
        optimizer.zero_grad()
        measure(model, handle)
        assert all(p.grad is None for p in model.parameters())
        loss(model).backward()
        assert torch.equal(nn.utils.clip_grad_norm_(everyone(optimizer), SMALL), norms[i])  # for its result
        optimizer.step()
    assert everything(model, optimizer) == everything(plain, whole)
    assert float(norms[0]) > 10 * SMALL


def clipped_by_hand(model, optimizer, steps, previous, max_norm):
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        gradients = [p.grad for p in everyone(optimizer) if p.grad is not None]
        total = nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.mul_(clip_factor(previous, max_norm))
        optimizer.step()
        previous = total
    return previous


@pytest.mark.parametrize("name", ["muon", "adamw", "sgd"])
@each("max_norm", [SMALL, 0.4, 1e9])
def test_one_pass_clips_by_the_norm_of_the_step_before(name, max_norm):
    plain, whole = ordinary(name)
    loss(plain).backward()
    first = nn.utils.get_total_norm([p.grad for p in everyone(whole) if p.grad is not None])
    last = clipped_by_hand(plain, whole, 4, first, max_norm)
    model, optimizer, _ = stepping(name, clip="previous", max_norm=max_norm, measured=True)
    train(model, optimizer, 4)
    assert {group["previous_norm"] for group in optimizer.param_groups} == {float(last)}
    assert without_norms(everything(model, optimizer)) == everything(plain, whole)


def test_the_norm_is_in_the_state_and_a_resumed_run_is_the_whole_one():
    whole, uninterrupted, _ = stepping("muon", clip="previous", max_norm=0.4, measured=True)
    train(whole, uninterrupted, 2)
    saved = copy.deepcopy([whole.state_dict(), uninterrupted.state_dict()])
    assert all(group["previous_norm"] > 0 for group in saved[1]["param_groups"])
    train(whole, uninterrupted, 3)
    model, optimizer, _ = stepping("muon", clip="previous", max_norm=0.4)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, 3)
    assert everything(model, optimizer) == everything(whole, uninterrupted)
    saved[1]["param_groups"][0]["previous_norm"] = math.nan
    with pytest.raises(ValueError, match="previous_norm=nan is out of range"):
        optimizer.load_state_dict(saved[1])


def test_a_first_pass_without_a_norm_is_refused_or_measured():
    model, optimizer, handle = stepping(clip="previous", max_norm=SMALL)
    assert [group["previous_norm"] for group in optimizer.param_groups] == [None]
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match=r"clip='previous' has no norm to clip by: .*with handle.measure\(\)"):
        loss(model).backward()
    optimizer.zero_grad()
    assert everything(model, optimizer) == before
    handle.remove()
    optim.step_in_backward(optimizer, clip="previous", max_norm=SMALL, first="measure")
    train(model, optimizer, 1)
    assert not optimizer.state
    norm = optimizer.param_groups[0]["previous_norm"]
    train(model, optimizer, 1)
    other, whole = ordinary()
    clipped_by_hand(other, whole, 1, torch.tensor(norm), SMALL)
    assert without_norms(everything(model, optimizer)) == everything(other, whole)


def test_exact_without_a_measured_pass_is_refused_in_every_step():
    model, optimizer, _ = stepping(clip="exact", max_norm=SMALL, measured=True)
    train(model, optimizer, 1)
    with pytest.raises(RuntimeError, match="clip='exact' has no norm to clip by: before each step"):
        train(model, optimizer, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_norm_that_is_not_finite_is_no_norm_to_clip_by(bad):
    """The step of the parameter at fault is left out, and the next clips by the last norm that was one."""
    model, optimizer, _ = stepping(clip="previous", max_norm=SMALL, measured=True)
    train(model, optimizer, 1)
    norm = optimizer.param_groups[0]["previous_norm"]
    hook = model[3].weight.register_hook(lambda g: torch.full_like(g, bad))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.warns(RuntimeWarning, match=r"parameter 3 of group 0 \(shape \(16, 16\)\) is not finite: its step"):
        train(model, optimizer, 1)
    hook.remove()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p.detach(), before[name])}
    assert "3.weight" not in moved
    assert {"1.weight", "5.weight"} <= moved
    assert optimizer.param_groups[0]["previous_norm"] == norm
    assert optimizer.skipped_steps == 1
    assert int(optimizer.state[model[3].weight]["step"]) == 1
    train(model, optimizer, 1)
    assert int(optimizer.state[model[3].weight]["step"]) == 2
    assert optimizer.param_groups[0]["previous_norm"] != norm


@each("bad", [math.nan, math.inf])
@pytest.mark.parametrize("raises", [False, True])
def test_an_exact_norm_that_is_not_finite_leaves_out_the_step(bad, raises):
    """As clip_grad_norm_ and a step of all would."""
    model = network("fp8")
    optimizer = optim.StiffnessAdamW(model.parameters(), on_nonfinite="raise" if raises else "skip")
    handle = optim.step_in_backward(optimizer, clip="exact", max_norm=SMALL)
    model[3].weight.register_hook(lambda g: torch.full_like(g, bad))
    before = everything(model, optimizer)
    measure(model, handle)
    loss(model).backward()
    if raises:
        with pytest.raises(FloatingPointError, match="the norm of the whole gradient is not finite"):
            optimizer.step()
        return
    with pytest.warns(RuntimeWarning, match="the norm of the whole gradient is not finite: the step was skipped"):
        optimizer.step()
    assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (1, 1)
    optimizer.skipped_steps = optimizer.skipped_in_row = 0
    assert everything(model, optimizer) == before


def test_infinity_takes_norms_and_clips_nothing():
    """A trainer wants the norm for its log: no first pass, and the numbers of steps that are not clipped."""
    (plain, whole), (model, optimizer, _) = ordinary(), stepping(clip="previous", max_norm=math.inf)
    for _ in range(3):
        for net, by in ((plain, whole), (model, optimizer)):
            by.zero_grad()
            loss(net).backward()
        assert torch.equal(*(nn.utils.clip_grad_norm_(net.parameters(), math.inf) for net in (plain, model)))
        whole.step()
        optimizer.step()
    assert without_norms(everything(model, optimizer)) == everything(plain, whole)


@each("foreach", [None, False])
@pytest.mark.parametrize("kind", ["previous", "exact"])
def test_another_clipping_is_refused(kind, foreach):
    model, optimizer, _ = stepping(clip=kind, max_norm=SMALL, measured=True)
    loss(model).backward()
    parameters = list(model.parameters())
    with pytest.raises(RuntimeError, match="it was called with another factor"):
        nn.utils.clip_grad_norm_(parameters, SMALL / 2, foreach=foreach)
    with pytest.raises(RuntimeError, match="it was called with another factor"):
        nn.utils.clip_grad_norm_(parameters[:3], SMALL, foreach=foreach)  # not the whole gradient
    with pytest.raises(RuntimeError, match="used and freed"):
        nn.utils.clip_grad_norm_(parameters, SMALL, norm_type=1, foreach=foreach)
    for use in (lambda g: g + 1, lambda g: g.mul_(2), lambda g: g.abs(), lambda g: g.sum(), lambda g: g.norm(dim=0)):
        with pytest.raises(RuntimeError, match="used and freed"):
            use(parameters[1].grad)
    assert float(nn.utils.clip_grad_norm_(parameters, SMALL, foreach=foreach)) > SMALL
    optimizer.step()


def test_passes_that_are_no_steps_are_refused():
    model, optimizer, handle = stepping(clip="previous", max_norm=SMALL)
    with pytest.raises(RuntimeError, match=r"measure\(\) has seen no gradient"), handle.measure():
        pass
    with pytest.raises(RuntimeError, match=r"measure\(\) takes the norm of one backward pass"), handle.measure():
        list(map(Tensor.backward, [loss(model), loss(model)]))
    optimizer.zero_grad()
    measure(model, handle)
    loss(model).backward()
    with pytest.raises(RuntimeError, match=r"a step is under way, .* save the state afterwards"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match=r"measure\(\) comes between steps"), handle.measure():
        pass
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"under clip='previous': call optimizer.step\(\) after each"):
        loss(model).backward()
    optimizer.zero_grad()
    optimizer.step()
    optimizer.state_dict()
    handle.remove()
    plain = optim.step_in_backward(optimizer)
    with pytest.raises(RuntimeError, match="clip='exact' or 'previous'"), plain.measure():
        pass


def test_loading_a_state_forgets_the_step_under_way():
    model, optimizer, _ = stepping(clip="previous", max_norm=SMALL, measured=True)
    saved = copy.deepcopy(optimizer.state_dict())
    loss(model).backward()
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.param_groups[0]["previous_norm"] == saved["param_groups"][0]["previous_norm"]
    of_others = OPTIMIZERS["adamw"](network("fp8")).state_dict()
    optimizer.load_state_dict(of_others)
    assert optimizer.param_groups[0]["previous_norm"] is None


def test_groups_that_come_later_have_the_norm_too():
    model, optimizer, _ = stepping(clip="previous", max_norm=SMALL, measured=True)
    late = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [late]})
    assert len({group["previous_norm"] for group in optimizer.param_groups}) == 1
    (loss(model) + late.sum()).backward()
    optimizer.step()
    assert int(optimizer.state[late]["step"]) == 1


def test_norms_of_bfloat16_gradients_are_float32():
    model = network("fp8").to(torch.bfloat16)
    optimizer = OPTIMIZERS["adamw"](model)
    optim.step_in_backward(optimizer, clip="previous", max_norm=math.inf)
    loss(model).backward()
    kept = network("fp8").to(torch.bfloat16)
    loss(kept).backward()
    whole = torch.cat([p.grad.float().flatten() for p in kept.parameters() if p.grad is not None])
    torch.testing.assert_close(nn.utils.get_total_norm([p.grad for p in model.parameters()]), whole.norm())


@each(
    ("options", "error", "match"),
    [
        ({"max_norm": 1.0}, ValueError, r"max_norm=1.0 needs clip='previous' \(one backward .* or clip='exact' \(two"),
        ({"clip": "exact"}, ValueError, "clip='exact' needs max_norm"),
        ({"clip": "previus", "max_norm": 1.0}, ValueError, "clip='previus' is unknown: .* did you mean 'previous'"),
        ({"clip": "exact", "max_norm": 0.0}, ValueError, r"max_norm=0.0 is out of range: \(0, inf\]"),
        ({"clip": "exact", "max_norm": math.nan}, ValueError, "max_norm=nan is out of range"),
        ({"clip": "exact", "max_norm": "1"}, TypeError, "max_norm='1' must be a number"),
        ({"clip": "exact", "max_norm": 1.0, "first": "measure"}, ValueError, "first='measure' is for clip='previous'"),
        ({"first": "measure"}, ValueError, "first='measure' is for clip='previous', and nothing is clipped"),
        ({"clip": "previous", "max_norm": 1.0, "first": "mesure"}, ValueError, "did you mean 'measure'"),
        ({"clip": "exact", "max_norm": 1.0, "accumulate": "bfloat16"}, ValueError, "can be clipped by clip_grad_norm_"),
        ({"accumulate": "momentum"}, ValueError, "accumulate='momentum' is unknown: one of bfloat16; did you mean"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, error, match):
    optimizer = OPTIMIZERS["adamw"](network("fp8"))
    with pytest.raises(error, match=match):
        optim.step_in_backward(optimizer, **options)
    optim.step_in_backward(optimizer)
