"""Stepping in the backward pass: the numbers of an ordinary step, no gradient kept, and what cannot work refused."""

import copy
import gc
import math
import weakref

import pytest
import torch
from in_backward_cases import OPTIMIZERS, TOKENS, everything, loss, network, ordinary, train
from in_backward_cases import stepping as made
from laws import each
from torch import Tensor, nn

from fp8manifold import optim
from fp8manifold.optim._in_backward.gradients import FOR_SUMS, GradientSum
from fp8manifold.optim._streams import twins
from fp8manifold.optim._writeback import to_half
from fp8manifold.random_bits import Stream, draw_range


@pytest.fixture
def stepping():
    return made("muon")


@each("storage", ["fp8", "grid", "master", None])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_numbers_are_those_of_an_ordinary_step(name, storage):
    ends = []
    for model, optimizer in (ordinary(name, storage), made(name, storage)[:2]):
        train(model, optimizer, 4)
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]


def test_tied_weights_and_recomputation_are_the_same():
    ends = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        embedding, head = nn.Embedding(64, 512), nn.Linear(512, 64, bias=False)
        head.weight = embedding.weight
        body = nn.Linear(512, 512)
        model = nn.ModuleList([embedding, body, head])
        optimizer = optim.StiffnessMuon.for_model(model, 1e-2, others=["2"])
        if in_backward:
            optim.step_in_backward(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            hidden = torch.utils.checkpoint.checkpoint(body, embedding(TOKENS), use_reentrant=False)
            head(hidden).logsumexp(1).mean().backward()
            optimizer.step()
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]


def test_a_state_saved_under_either_goes_on_under_the_other(stepping):
    model, optimizer, handle = stepping
    train(model, optimizer, 2)
    handle.remove()
    handle.remove()
    train(model, optimizer, 2)
    optimizer.zero_grad()
    with optim.step_in_backward(optimizer):
        loss(model).backward()
    optimizer.zero_grad()
    train(model, optimizer, 1)
    plain = network("fp8")
    other = OPTIMIZERS["muon"](plain)
    train(plain, other, 6)
    assert everything(plain, other) == everything(model, optimizer)


def test_no_gradient_outlives_its_step(stepping):
    model, optimizer, _ = stepping
    alive = []

    def count(_):
        kept = [p.grad for p in model.parameters() if p.grad is not None]
        alive.append(sum(type(g) is Tensor for g in kept))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)  # after the step's own
    train(model, optimizer, 2)
    assert alive == [0] * 2 * len(list(model.parameters()))


SPENT = "this gradient has been used and freed"
ZEROS = r"^zero_grad\(set_to_none=False\) .*call zero_grad\(set_to_none=True\)"
#: what needs gradients that are gone, of a model and its optimizer, and what is said
GONE = {
    "another pass": (lambda m, _: loss(m).backward(), SPENT),
    "clipping": (lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 1.0), SPENT),
    "clipping one by one": (lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=False), SPENT),
    "clipping values": (lambda m, _: nn.utils.clip_grad_value_(m.parameters(), 1.0), SPENT),
    "a norm": (lambda m, _: m[1].weight.grad.norm(), SPENT),
    "a product": (lambda m, _: m[1].weight.grad.mul_(2), SPENT),
    "a sum": (lambda m, _: m[4].bias.grad + 1, SPENT),
    "zeros": (lambda _, o: o.zero_grad(set_to_none=False), ZEROS),
    "zeros of the model": (lambda m, _: m.zero_grad(set_to_none=False), ZEROS),
    "zeros together": (lambda _, o: (o.defaults.update(foreach=True), o.zero_grad(set_to_none=False)), ZEROS),
    "scaled": (lambda m, o: scaled(m, o), "scaled"),
    "memory": (lambda m, _: m[1].weight.grad.untyped_storage().tolist(), "data is not allocated"),
}


def scaled(model, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


@each("use", GONE)
def test_what_needs_gradients_that_are_gone_is_refused(use):
    model, optimizer, _ = made()
    train(model, optimizer, 1)
    assert repr(model[1].weight.grad) == "SpentGradient(shape=(16, 16), dtype=torch.float32)"
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match=GONE[use][1]):
        GONE[use][0](model, optimizer)
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_that_is_loaded_is_stepped_on(name):
    """Loading gives an optimizer other groups; saved before, loaded after ``step_in_backward`` or before it."""
    whole, uninterrupted = ordinary(name)
    train(whole, uninterrupted, 5)
    model, optimizer, _ = made(name)
    train(model, optimizer, 2)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    resumed, other, _ = made(name)
    train(resumed, other, 1)  # gradients that are spent are there while it is loaded
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(resumed, other, 3)
    assert everything(resumed, other) == everything(whole, uninterrupted)
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 3)
    assert everything(model, optimizer) == everything(whole, uninterrupted)


def test_options_of_a_loaded_state_and_a_schedule_are_those_of_the_step(stepping):
    model, optimizer, _ = stepping
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 1)
    assert all(map(torch.equal, before, [p.detach() for p in model.parameters()]))
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


def test_groups_come_and_go_after_a_state_is_loaded(stepping):
    model, optimizer, _ = stepping
    train(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    late = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [late], "direction": "adam", "param_names": ["late"]})
    optimizer.load_state_dict(optimizer.state_dict())
    late.sum().backward()
    assert bool((late < 1).all())
    assert int(optimizer.state[late]["step"]) == 1
    group = optimizer.param_groups.pop()
    late.grad = None
    late.sum().backward()
    assert torch.equal(late.grad, torch.ones(3))  # somebody else's
    late.grad = None
    optimizer.add_param_group(group)
    optimizer.param_groups.insert(0, optimizer.param_groups.pop())
    late.sum().backward()
    assert int(optimizer.state[late]["step"]) == 2
    train(model, optimizer, 1)
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


def test_a_gradient_that_is_not_finite_ends_the_backward_pass_where_asked_to():
    model = network("fp8")
    optimizer = optim.StiffnessMuon.for_model(model, 1e-2, on_nonfinite="raise")
    optim.step_in_backward(optimizer)
    model[3].weight.register_hook(lambda g: g * float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        loss(model).backward()


@each("ends_steps", [False, True])
@each("name", ["1.weight", "5.bias"])
def test_a_parameter_that_was_frozen_is_not_forgotten(name, ends_steps):
    """The parameter trains once it is unfrozen, in a loop without ``step()`` too."""
    model = network("fp8")
    optimizer = OPTIMIZERS["adamw"](model)
    late = model.get_parameter(name)
    late.requires_grad_(False)
    optim.step_in_backward(optimizer)
    train(model, optimizer, 1)
    assert not late.requires_grad
    assert late not in optimizer.state
    late.requires_grad_(True)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model).backward()
        if ends_steps:
            optimizer.step()
    assert int(optimizer.state[late]["step"]) == 2


def test_a_parameter_that_was_moved_is_not_forgotten(stepping):
    """``Module.to`` swaps encoded weights, and torch calls none of the hooks that they had."""
    model, optimizer, handle = stepping
    model.to("cpu")
    loss(model).backward()
    with pytest.raises(RuntimeError, match=r"'1.weight'.* has not seen: .* was moved \(model.to\)"):
        optimizer.step()
    handle.remove()
    optimizer.zero_grad()
    optim.step_in_backward(optimizer)
    train(model, optimizer, 1)
    assert int(optimizer.state[model[1].weight]["step"]) == 1


def test_schedulers_see_their_steps(stepping, recwarn):
    model, optimizer, _ = stepping
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 10)
    train(model, optimizer, 1)
    schedule.step()
    assert not recwarn.list


def test_what_it_cannot_be_over_is_refused(stepping, monkeypatch):
    model, optimizer, handle = stepping
    with pytest.raises(RuntimeError, match="steps in backward already"):
        optim.step_in_backward(optimizer)
    with pytest.raises(TypeError, match="not AdamW"):
        optim.step_in_backward(torch.optim.AdamW(model.parameters()))
    with pytest.raises(TypeError, match="not FisherNaturalGradient"):
        optim.step_in_backward(optim.FisherNaturalGradient(model.parameters(), model, list))
    handle.remove()
    loss(model).backward()
    with pytest.raises(RuntimeError, match="gradients already"):
        optim.step_in_backward(optimizer)
    optimizer.zero_grad()
    optim.step_in_backward(optimizer)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match="one process, and here are 2"):
        loss(model).backward()
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("keeps_handle", [False, True])
def test_steps_end_with_their_optimizer(keeps_handle):
    """A deleted optimizer used to go on stepping, and the next over its parameters never did."""
    gc.disable()
    try:
        model = network("fp8")
        first = OPTIMIZERS["muon"](model)
        handle = optim.step_in_backward(first) if keeps_handle else None
        if not keeps_handle:
            optim.step_in_backward(first)
        train(model, first, 1)
        first.zero_grad()
        gone = weakref.ref(first)
        del first
        assert gone() is None
        loss(model).backward()
        assert all(type(p.grad) is Tensor for p in model.parameters())  # the user's again
        model.zero_grad()
        second = OPTIMIZERS["adamw"](model)
        optim.step_in_backward(second)
        train(model, second, 2)
        assert {int(state["step"]) for state in second.state.values()} == {2}
        assert len(second.state) == len(list(model.parameters()))
        assert all(len(p._post_accumulate_grad_hooks) == 1 for p in model.parameters())
        if handle is not None:
            with pytest.raises(RuntimeError, match="has been deleted"):
                _ = handle.optimizer
    finally:
        gc.enable()


def test_an_optimizer_that_nobody_has_kept_is_told_of_in_the_first_pass():
    model = network("fp8")
    handle = optim.step_in_backward(OPTIMIZERS["muon"](model))
    with pytest.raises(RuntimeError, match="has been deleted: keep it in a variable"):
        loss(model).backward()
    handle.remove()
    model.zero_grad()
    loss(model).backward()


def test_a_parameter_that_steps_with_another_is_refused():
    model = network("fp8")
    first = OPTIMIZERS["muon"](model)
    handle = optim.step_in_backward(first)
    train(model, first, 1)
    first.zero_grad()
    second = optim.StiffnessAdamW([nn.Parameter(torch.ones(2)), model[3].weight], 1e-2)
    line = (
        r"parameter 1 of group 0 \(shape \(16, 16\)\) steps in backward already, with another StiffnessMuon, .*: "
        r"call remove\(\) of that optimizer's handle, or delete the optimizer"
    )
    with pytest.raises(RuntimeError, match=line):
        optim.step_in_backward(second)
    train(model, first, 1)
    first.zero_grad()
    third = optim.StiffnessAdamW([nn.Parameter(torch.ones(2))], 1e-2)
    optim.step_in_backward(third)
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 .*steps in backward already, with another"):
        third.add_param_group({"params": [model[3].weight]})
    assert len(third.param_groups) == 1
    train(model, first, 1)
    assert int(first.state[model[3].weight]["step"]) == 3
    first.zero_grad()
    handle.remove()
    optim.step_in_backward(second)
    loss(model).backward()
    assert int(second.state[model[3].weight]["step"]) == 1
    assert int(first.state[model[3].weight]["step"]) == 3


def test_an_optimizer_in_a_cycle_of_garbage_is_nobody():
    model = network("fp8")
    first = OPTIMIZERS["muon"](model)
    first.itself = first
    optim.step_in_backward(first)
    del first
    second = OPTIMIZERS["muon"](model)
    optim.step_in_backward(second)
    train(model, second, 1)
    assert len(second.state) == len(list(model.parameters()))


def test_a_gradient_that_another_hook_has_freed_is_told_of():
    model = network("fp8")

    def free(parameter):
        parameter.grad = None

    model[3].weight.register_post_accumulate_grad_hook(free)
    optimizer = OPTIMIZERS["muon"](model)
    optim.step_in_backward(optimizer)
    with pytest.raises(RuntimeError, match=r"'3.weight', shape \(16, 16\)\) was freed by another hook"):
        loss(model).backward()


BATCHES = [torch.arange(10), torch.arange(5, 10), torch.arange(3)]


def part_of_loss(model, tokens):
    return model(tokens).square().mean() / len(BATCHES)


def pass_all(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        for tokens in BATCHES:
            part_of_loss(model, tokens).backward()
        optimizer.step()


def rounded_sums(model, optimizer):
    """The readable definition: each gradient added to the sum before, which is rounded with draws of its own."""
    sums = {}
    streams = {p: state["stream"] for p, state in optimizer.state.items()}
    for count, tokens in enumerate(BATCHES):
        parameters = [p for p in model.parameters() if p.requires_grad]
        for p, gradient in zip(parameters, torch.autograd.grad(part_of_loss(model, tokens), parameters), strict=True):
            step = int(optimizer.state[p]["step"]) + 1
            draws = draw_range(0, p.numel(), Stream((0, step, streams[p], FOR_SUMS, count)), p.device).view(p.shape)
            wide = gradient.float() + sums.get(p, torch.zeros(())).float()
            sums[p] = to_half(wide, torch.bfloat16, draws)
    return sums


@each("clips", [False, True])
@each("storage", ["fp8", None])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sums_are_the_gradients_of_an_ordinary_step(name, storage, clips):
    (plain, whole), (model, optimizer) = ordinary(name, storage), ordinary(name, storage)
    train(plain, whole, 1)
    train(model, optimizer, 1)
    optimizer.zero_grad()
    optim.step_in_backward(optimizer, accumulate="bfloat16")
    for _ in range(2):
        sums = rounded_sums(plain, whole)
        for p, held in sums.items():
            p.grad = held.to(p.dtype)
        optimizer.zero_grad()
        for tokens in BATCHES:
            part_of_loss(model, tokens).backward()
        gradients = [p.grad for p in model.parameters()]
        assert all(isinstance(g, GradientSum) and g.held.dtype is torch.bfloat16 for g in gradients)
        assert all(map(torch.equal, [g.float() for g in gradients if g is not None], map(Tensor.float, sums.values())))
        if clips:
            norms = [nn.utils.clip_grad_norm_(net.parameters(), 1e-3) for net in (plain, model)]
            assert torch.equal(*norms)
        whole.step()
        optimizer.step()
        assert repr(model[1].weight.grad).startswith("SpentGradient")
    assert everything(model, optimizer) == everything(plain, whole)


def test_draws_before_the_first_step_are_those_of_the_stream_to_come():
    model, optimizer, _ = made(accumulate="bfloat16")
    part_of_loss(model, BATCHES[0]).backward()
    words = {p: p.grad.words for p in model.parameters() if isinstance(p.grad, GradientSum)}
    assert not optimizer.state
    optimizer.step()
    assert {p: (0, 1, state["stream"]) for p, state in optimizer.state.items()} == words
    assert len(set(words.values())) == len(words) == len(twins(model.parameters()))


def test_zero_grad_drops_a_sum_and_a_state_is_saved_without_it():
    (model, *ours), (other, *its) = (made(accumulate="bfloat16") for _ in "ab")
    optimizers = [ours[0], its[0]]
    part_of_loss(model, BATCHES[1]).backward()
    saved = optimizers[0].state_dict()  # as without step_in_backward: gradients are no part of it
    assert not saved["state"]
    for net, optimizer in zip((model, other), optimizers, strict=True):
        pass_all(net, optimizer)
    assert everything(model, optimizers[0]) == everything(other, optimizers[1])
    optimizers[0].zero_grad()
    part_of_loss(model, BATCHES[1]).backward()
    optimizers[0].zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_a_sum_that_is_not_finite_leaves_out_all_steps():
    model, optimizer, _ = made("muon", accumulate="bfloat16")
    before = everything(model, optimizer)
    hook = model[3].weight.register_hook(lambda g: g * math.nan)
    optimizer.warn_after = 1
    with pytest.warns(RuntimeWarning, match=r"has skipped 1 steps in a row.*'3.weight'"):
        pass_all(model, optimizer)
    assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (1, 1)
    hook.remove()
    optimizer.skipped_steps = optimizer.skipped_in_row = 0
    assert everything(model, optimizer) == before
    pass_all(model, optimizer)
    assert optimizer.skipped_in_row == 0
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


def test_what_a_sum_cannot_do_is_refused():
    model, optimizer, _ = made(accumulate="bfloat16")
    part_of_loss(model, BATCHES[0]).backward()
    gradient = model[1].weight.grad
    assert repr(gradient) == "GradientSum(shape=(16, 16), dtype=torch.float32)"
    assert float(gradient.norm()) > 0
    with pytest.raises(RuntimeError, match="sum in bfloat16"):
        gradient.clamp_(-1, 1)
    with pytest.raises(RuntimeError, match="sum in bfloat16"):
        gradient.mul_(torch.ones(16))
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="scaled already, and another gradient comes: clip after the last"):
        part_of_loss(model, BATCHES[0]).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="used and freed"):
        part_of_loss(model, BATCHES[0]).backward()


def test_accelerate_and_its_resume_step_in_backward(tmp_path):
    """``prepare`` and ``load_state`` load the state that the optimizer has, or another."""
    import accelerate

    whole = network("fp8")
    uninterrupted = OPTIMIZERS["muon"](whole)
    train(whole, uninterrupted, 4)
    accelerator = accelerate.Accelerator(cpu=True)
    model = network("fp8")
    own = OPTIMIZERS["muon"](model)
    optim.step_in_backward(own)
    model, optimizer = accelerator.prepare(model, own)

    def go(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            accelerator.backward(loss(model))
            optimizer.step()

    go(2)
    accelerator.save_state(tmp_path / "half")
    go(1)
    accelerator.load_state(tmp_path / "half")
    go(2)
    assert everything(model, own) == everything(whole, uninterrupted)
