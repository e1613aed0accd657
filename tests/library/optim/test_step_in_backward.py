"""Stepping in the backward pass.

It has the numbers of an ordinary step and keeps no gradient; sums of several passes and
clipping are compared with readable definitions; what cannot work is refused.
"""

import copy
import gc
import math
import warnings
import weakref
from typing import NamedTuple

import pytest
import torch
from optimizer_cases import frozen, parameters_of
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold.optim._in_backward.gradients import GradientSum, clip_factor
from fp8manifold.optim._plan import Plan
from fp8manifold.optim._streams import twins
from fp8manifold.optim._writeback import to_half
from fp8manifold.random_bits import FOR_SUMS, DrawKey, draw_range

TOKENS = torch.arange(10)
OPTIMIZERS = {
    "muon": lambda m: optim.StiffnessMuon.for_model(m, 1e-2, moments="8bit"),
    "muon_residual8": lambda m: optim.StiffnessMuon.for_model(m, 1e-2, writeback="residual8"),
    "adamw": lambda m: optim.StiffnessAdamW(m.parameters(), 1e-2, moments="8bit"),
    "adamw_residual8": lambda m: optim.StiffnessAdamW(m.parameters(), 1e-2, writeback="residual8"),
    "adamw_annealed": lambda m: optim.StiffnessAdamW(
        m.parameters(), 1e-2, stiffness=optim.anneal(1.0, 0.0, 3)
    ),
    "lion": lambda m: optim.StiffnessLion(m.parameters(), 1e-3),
    "adafactor": lambda m: optim.StiffnessAdafactor(m.parameters()),
    "adafactor_8bit": lambda m: optim.StiffnessAdafactor(
        m.parameters(), momentum=0.9, moments="8bit"
    ),
    "sgd": lambda m: optim.StiffnessSGD(m.parameters(), 1e-2, momentum=0.9),
    "riemannian": lambda m: optim.RiemannianAdam(m.parameters(), 0.1, float_lr=1e-3),
}


def network(storage):
    torch.manual_seed(0)
    layers = [
        nn.Embedding(10, 16),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.LayerNorm(16),
        nn.Linear(16, 4),
    ]
    model = nn.Sequential(*layers)
    return model if storage is None else fm.quantize_model(model, "E4M3", storage=storage)


#: A norm by which every gradient of the network is clipped.
SMALL = 1e-3


def stepping(name="adamw", storage="codes", *, measured=False, **options):
    """Return a network, its optimizer, and the handle of steps in the backward pass."""
    model, optimizer = ordinary(name, storage)
    handle = optim.step_in_backward(optimizer, **options)
    if measured:
        measure(model, handle)
    return model, optimizer, handle


def measure(model, handle):
    with handle.measure():
        loss(model).backward()


def ordinary(name="adamw", storage="codes"):
    model = network(storage)
    return model, OPTIMIZERS[name](model)


def loss(model):
    return model(TOKENS).square().mean()


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


def everything(model, optimizer):
    return [frozen(dict(model.state_dict())), frozen(optimizer.state_dict())]


@pytest.mark.parametrize("storage", ["codes", "grid", "master", None])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_numbers_are_those_of_an_ordinary_step(name, storage):
    """Every optimizer and storage: weights and state are the same after four steps."""
    results = []
    for model, optimizer in (ordinary(name, storage), stepping(name, storage)[:2]):
        train(model, optimizer, 4)
        results.append(everything(model, optimizer))
    assert results[0] == results[1]


def test_tied_weights_and_recomputation_are_the_same():
    results = []
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
        results.append(everything(model, optimizer))
    assert results[0] == results[1]


def test_a_state_saved_under_either_goes_on_under_the_other():
    model, optimizer, handle = stepping("muon")
    train(model, optimizer, 2)
    handle.remove()
    handle.remove()
    train(model, optimizer, 2)
    optimizer.zero_grad()
    with optim.step_in_backward(optimizer):
        loss(model).backward()
    optimizer.zero_grad()
    train(model, optimizer, 1)
    plain, whole = ordinary("muon")
    train(plain, whole, 6)
    assert everything(plain, whole) == everything(model, optimizer)


def test_no_gradient_outlives_its_step():
    model, optimizer, _ = stepping("muon")
    alive = []

    def count(_):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        alive.append(sum(type(g) is Tensor for g in gradients))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)  # after the step's own
    train(model, optimizer, 2)
    assert alive == [0] * 2 * len(list(model.parameters()))


SPENT = "this gradient has been used and freed"
TO_CLIP = "clip='previous' and max_norm to clip, or accumulate='bfloat16'"
ZEROS = r"^zero_grad\(set_to_none=False\) .*call zero_grad\(set_to_none=True\)"
#: name: (a function of a model and its optimizer that needs gradients which are gone, the
#: message of its error)
GONE = {
    "another pass": (lambda m, _: loss(m).backward(), SPENT),
    "clipping": (lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 1.0), TO_CLIP),
    "clipping values": (lambda m, _: nn.utils.clip_grad_value_(m.parameters(), 1.0), SPENT),
    "a sum": (lambda m, _: m[4].bias.grad + 1, SPENT),
    "zeros": (lambda _, o: o.zero_grad(set_to_none=False), ZEROS),
    "zeros of the model": (lambda m, _: m.zero_grad(set_to_none=False), ZEROS),
    "scaled": (lambda _, o: scaled(o), "scaled"),
    "memory": (lambda m, _: m[1].weight.grad.untyped_storage().tolist(), "data is not allocated"),
}


def scaled(optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


@pytest.mark.parametrize("use", GONE)
def test_what_needs_gradients_that_are_gone_is_refused(use):
    model, optimizer, _ = stepping()
    train(model, optimizer, 1)
    assert repr(model[1].weight.grad) == "SpentGradient(shape=(16, 16), dtype=torch.float32)"
    old_state = everything(model, optimizer)
    with pytest.raises(RuntimeError, match=GONE[use][1]):
        GONE[use][0](model, optimizer)
    assert everything(model, optimizer) == old_state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_that_is_loaded_is_stepped_on(name):
    """Loading gives an optimizer other groups, and it steps on in the backward pass."""
    whole, uninterrupted = ordinary(name)
    train(whole, uninterrupted, 5)
    model, optimizer, _ = stepping(name)
    train(model, optimizer, 2)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    resumed, resumed_optimizer, _ = stepping(name)
    train(resumed, resumed_optimizer, 1)  # leaves spent gradients
    resumed.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    train(resumed, resumed_optimizer, 3)
    assert everything(resumed, resumed_optimizer) == everything(whole, uninterrupted)
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 3)
    assert everything(model, optimizer) == everything(whole, uninterrupted)


def test_groups_of_a_loaded_state_and_those_that_come_later_are_stepped():
    """With the options that they have then."""
    model, optimizer, _ = stepping("muon", clip="previous", max_norm=SMALL, measured=True)
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    old_values = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 1)
    assert all(map(torch.equal, old_values, [p.detach() for p in model.parameters()]))
    late = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [late], "direction": "adam", "param_names": ["late"]})
    assert len({group["previous_norm"] for group in optimizer.param_groups}) == 1
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    (loss(model) + late.sum()).backward()
    optimizer.step()
    assert bool((late < 1).all())
    assert [int(state["step"]) for state in optimizer.state.values()] == [2] * (len(old_values)) + [
        1
    ]


def test_a_gradient_that_is_not_finite_ends_the_backward_pass_where_asked_to():
    model = network("codes")
    optimizer = optim.StiffnessMuon.for_model(model, 1e-2, on_nonfinite="raise")
    optim.step_in_backward(optimizer)
    model[3].weight.register_hook(lambda g: g * float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        loss(model).backward()


@pytest.mark.parametrize("ends_steps", [False, True])
@pytest.mark.parametrize("name", ["1.weight", "5.bias"])
def test_a_parameter_that_was_frozen_is_not_forgotten(name, ends_steps):
    """The parameter trains once it is unfrozen, in a loop without ``step()`` too."""
    model, optimizer = ordinary()
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


def test_a_parameter_that_was_moved_is_not_forgotten():
    """`Module.to` swaps encoded weights, and torch no longer calls their hooks."""
    model, optimizer, handle = stepping("muon")
    model.to("cpu")
    loss(model).backward()
    with pytest.raises(RuntimeError, match=r"'1.weight'.* has not seen: .* was moved \(model.to\)"):
        optimizer.step()
    handle.remove()
    optimizer.zero_grad()
    optim.step_in_backward(optimizer)
    train(model, optimizer, 1)
    assert int(optimizer.state[model[1].weight]["step"]) == 1


def test_what_it_cannot_be_over_is_refused(monkeypatch):
    model, optimizer, handle = stepping("muon")
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
    monkeypatch.setattr("fp8manifold.optim._in_backward.is_distributed", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    old_state = everything(model, optimizer)
    with pytest.raises(RuntimeError, match="one process, and there are 2"):
        loss(model).backward()
    assert everything(model, optimizer) == old_state


@pytest.mark.parametrize("keeps_handle", [False, True])
def test_steps_end_with_their_optimizer(keeps_handle):
    """A deleted optimizer used to go on, and the next over its parameters never began."""
    gc.disable()
    try:
        model, first, handle = stepping("muon")
        if not keeps_handle:
            del handle
        train(model, first, 1)
        first.zero_grad()
        reference = weakref.ref(first)
        del first
        assert reference() is None
        loss(model).backward()
        assert all(type(p.grad) is Tensor for p in model.parameters())  # the user's again
        model.zero_grad()
        second = OPTIMIZERS["adamw"](model)
        optim.step_in_backward(second)
        train(model, second, 2)
        assert {int(state["step"]) for state in second.state.values()} == {2}
        assert len(second.state) == len(list(model.parameters()))
        assert all(len(p._post_accumulate_grad_hooks) == 1 for p in model.parameters())
        if keeps_handle:
            with pytest.raises(RuntimeError, match="has been deleted"):
                _ = handle.optimizer
    finally:
        gc.enable()


def test_an_optimizer_without_a_variable_is_refused_in_the_first_pass():
    model = network("codes")
    handle = optim.step_in_backward(OPTIMIZERS["muon"](model))
    with pytest.raises(RuntimeError, match="has been deleted: keep it in a variable"):
        loss(model).backward()
    handle.remove()
    model.zero_grad()
    loss(model).backward()


def test_a_parameter_that_steps_with_another_is_refused():
    model, first, handle = stepping("muon")
    second = optim.StiffnessAdamW([nn.Parameter(torch.ones(2)), model[3].weight], 1e-2)
    parameter = r"parameter 1 of group 0 \(shape \(16, 16\)\)"
    problem = "steps in backward already, with another StiffnessMuon, .*"
    advice = r"call remove\(\) of that optimizer's handle, or delete the optim"
    with pytest.raises(RuntimeError, match=f"{parameter} {problem}: {advice}"):
        optim.step_in_backward(second)
    third = optim.StiffnessAdamW([nn.Parameter(torch.ones(2))], 1e-2)
    optim.step_in_backward(third)
    with pytest.raises(
        RuntimeError, match=r"parameter 0 of group 0 .*steps in backward already, with another"
    ):
        third.add_param_group({"params": [model[3].weight]})
    assert len(third.param_groups) == 1
    train(model, first, 1)
    first.zero_grad()
    handle.remove()
    optim.step_in_backward(second)
    loss(model).backward()
    assert first.state[model[3].weight]["step"] == 1
    assert second.state[model[3].weight]["step"] == 1


BATCHES = [torch.arange(10), torch.arange(5, 10), torch.arange(3)]


def part_of_loss(model, tokens):
    return model(tokens).square().mean() / len(BATCHES)


def pass_all(model, optimizer):
    optimizer.zero_grad()
    for tokens in BATCHES:
        part_of_loss(model, tokens).backward()
    optimizer.step()


def rounded_sums(model, optimizer):
    """Return sums of gradients by their definition.

    Each gradient is added to the sum of those before it, and the new sum is rounded to
    bfloat16 with its own draws.
    """
    sums = {}
    streams = {p: state["stream"] for p, state in optimizer.state.items()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    for count, tokens in enumerate(BATCHES):
        gradients = torch.autograd.grad(part_of_loss(model, tokens), parameters)
        for p, gradient in zip(parameters, gradients, strict=True):
            step = int(optimizer.state[p]["step"]) + 1
            key = DrawKey((0, step, streams[p], FOR_SUMS, count))
            draws = draw_range(0, p.numel(), key, p.device).view(p.shape)
            wide = gradient.float() + sums.get(p, torch.zeros(())).float()
            sums[p] = to_half(wide, torch.bfloat16, draws)
    return sums


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("storage", ["codes", None])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sums_are_the_gradients_of_an_ordinary_step(name, storage, clips):
    (plain, whole), (model, optimizer) = ordinary(name, storage), ordinary(name, storage)
    train(plain, whole, 1)
    train(model, optimizer, 1)
    optimizer.zero_grad()
    optim.step_in_backward(optimizer, accumulate="bfloat16")
    for _ in range(2):
        sums = rounded_sums(plain, whole)
        for p, rounded in sums.items():
            p.grad = rounded.to(p.dtype)
        optimizer.zero_grad()
        for tokens in BATCHES:
            part_of_loss(model, tokens).backward()
        for index, (gradient, rounded) in enumerate(
            zip([p.grad for p in model.parameters()], sums.values(), strict=True)
        ):
            assert isinstance(gradient, GradientSum), index
            assert gradient.stored.dtype is torch.bfloat16, index
            assert torch.equal(gradient.float(), rounded.float()), index
        if clips:
            norms = [nn.utils.clip_grad_norm_(net.parameters(), 1e-3) for net in (plain, model)]
            assert torch.equal(*norms)
        whole.step()
        optimizer.step()
        assert repr(model[1].weight.grad).startswith("SpentGradient")
    assert everything(model, optimizer) == everything(plain, whole)


def test_draws_before_the_first_step_are_those_of_the_stream_to_come():
    model, optimizer, _ = stepping(accumulate="bfloat16")
    part_of_loss(model, BATCHES[0]).backward()
    words = {p: p.grad.words for p in model.parameters() if isinstance(p.grad, GradientSum)}
    assert not optimizer.state
    optimizer.step()
    assert {p: (0, 1, state["stream"]) for p, state in optimizer.state.items()} == words
    assert len(set(words.values())) == len(words) == len(twins(model.parameters()))


def test_zero_grad_drops_a_sum_and_a_state_is_saved_without_it():
    (model, optimizer, _), (twin, twin_optimizer, _) = (
        stepping(accumulate="bfloat16") for _ in "ab"
    )
    part_of_loss(model, BATCHES[1]).backward()
    # Gradients are no part of a state without step_in_backward, either.
    assert not optimizer.state_dict()["state"]
    pass_all(model, optimizer)
    pass_all(twin, twin_optimizer)
    assert everything(model, optimizer) == everything(twin, twin_optimizer)
    optimizer.zero_grad()
    part_of_loss(model, BATCHES[1]).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_a_sum_that_is_not_finite_leaves_out_all_steps():
    model, optimizer, _ = stepping("muon", accumulate="bfloat16")
    old_state = everything(model, optimizer)
    hook = model[3].weight.register_hook(lambda g: g * math.nan)
    optimizer.warn_after = 1
    with pytest.warns(RuntimeWarning, match=r"has skipped 1 steps in a row.*'3.weight'"):
        pass_all(model, optimizer)
    assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (1, 1)
    part_of_loss(model, BATCHES[0]).backward()
    for group in optimizer.param_groups:
        group["on_nonfinite"] = "raise"
    with pytest.raises(FloatingPointError, match="not finite"):
        optimizer.step()
    hook.remove()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["on_nonfinite"] = "skip"
    optimizer.skipped_steps = optimizer.skipped_in_row = 0
    assert everything(model, optimizer) == old_state
    pass_all(model, optimizer)
    assert optimizer.skipped_in_row == 0
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


def test_what_a_sum_cannot_do_is_refused():
    model, optimizer, _ = stepping(accumulate="bfloat16")
    part_of_loss(model, BATCHES[0]).backward()
    gradient = model[1].weight.grad
    assert repr(gradient) == "GradientSum(shape=(16, 16), dtype=torch.float32)"
    assert float(gradient.norm()) > 0
    with pytest.raises(RuntimeError, match="sum in bfloat16"):
        gradient.clamp_(-1, 1)
    with pytest.raises(RuntimeError, match="sum in bfloat16"):
        gradient.mul_(torch.ones(16))
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(
        RuntimeError, match="scaled already, and another gradient comes: clip after the last"
    ):
        part_of_loss(model, BATCHES[0]).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="used and freed"):
        part_of_loss(model, BATCHES[0]).backward()


def test_accelerate_and_its_resume_step_in_backward(tmp_path):
    """`prepare` and `load_state` load the state that the optimizer has, or another."""
    import accelerate

    (whole, uninterrupted), (model, inner, _) = ordinary("muon"), stepping("muon")
    train(whole, uninterrupted, 4)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, inner)

    def train_prepared(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            accelerator.backward(loss(model))
            optimizer.step()

    train_prepared(2)
    accelerator.save_state(tmp_path / "half")
    train_prepared(1)
    accelerator.load_state(tmp_path / "half")
    train_prepared(2)
    assert everything(model, inner) == everything(whole, uninterrupted)


def without_norms(model, optimizer):
    """Return `everything` but for the norm, which groups of an ordinary optimizer lack."""
    saved = everything(model, optimizer)
    for group in saved[1]["param_groups"]:
        group.pop("previous_norm", None)
    return saved


def clipped_by_hand(model, optimizer, steps, previous, max_norm, spike=1.0):
    """Take steps that are clipped by the definition of clip="previous".

    By the larger of the previous norm and the norm so far, in the order of the backward
    pass. `spike` multiplies the loss of the first step.
    """
    order = []
    handles = [p.register_post_accumulate_grad_hook(order.append) for p in model.parameters()]
    for step in range(steps):
        optimizer.zero_grad()
        order.clear()
        (loss(model) * (spike if step == 0 else 1.0)).backward()
        total = nn.utils.get_total_norm(
            [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        )
        limit = max(float(previous) * (1 + 1e-5), max_norm)
        so_far = torch.zeros(())
        for p in order:
            so_far = torch.hypot(so_far, torch.linalg.vector_norm(p.grad))
            p.grad.mul_(clip_factor(previous, max_norm))
            if so_far > limit:
                p.grad.mul_(torch.tensor(limit) / so_far)
        optimizer.step()
        previous = total
    for handle in handles:
        handle.remove()
    return previous


@pytest.mark.parametrize("storage", ["codes", None])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_passes_are_clip_grad_norm_to_the_bit(name, storage):
    """With clip="exact" the first pass measures the norm and the second steps."""
    plain, whole = ordinary(name, storage)
    norms = []
    for _ in range(3):
        whole.zero_grad()
        loss(plain).backward()
        norms.append(nn.utils.clip_grad_norm_(parameters_of(whole), SMALL))
        whole.step()
    model, optimizer, handle = stepping(name, storage, clip="exact", max_norm=SMALL)
    for i in range(3):
        optimizer.zero_grad()
        measure(model, handle)
        assert all(p.grad is None for p in model.parameters()), i
        loss(model).backward()
        assert torch.equal(nn.utils.clip_grad_norm_(parameters_of(optimizer), SMALL), norms[i]), i
        optimizer.step()
    assert everything(model, optimizer) == everything(plain, whole)
    assert float(norms[0]) > 10 * SMALL
    with pytest.raises(RuntimeError, match="clip='exact' has no norm to clip by: before each step"):
        train(model, optimizer, 1)


@pytest.mark.parametrize("name", ["muon", "adamw", "sgd"])
@pytest.mark.parametrize("max_norm", [SMALL, 0.4, 1e9])
@pytest.mark.parametrize("spike", [1.0, 1000.0])
def test_one_pass_clips_by_the_norm_of_the_step_before_or_the_norm_so_far(name, max_norm, spike):
    plain, whole = ordinary(name)
    loss(plain).backward()
    first = nn.utils.get_total_norm([p.grad for p in parameters_of(whole) if p.grad is not None])
    last = clipped_by_hand(plain, whole, 4, first, max_norm, spike)
    model, optimizer, _ = stepping(name, clip="previous", max_norm=max_norm, measured=True)
    optimizer.zero_grad()
    (loss(model) * spike).backward()
    optimizer.step()
    train(model, optimizer, 3)
    assert {group["previous_norm"] for group in optimizer.param_groups} == {float(last)}
    assert without_norms(model, optimizer) == everything(plain, whole)


def losses_around_a_spike(name, clip):
    """Losses of a small classifier; the loss of one batch is multiplied by 1,000."""
    torch.manual_seed(0)
    layers = [nn.Embedding(32, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)]
    model = fm.quantize_model(nn.Sequential(*layers), "E4M3", storage="codes")
    optimizer = OPTIMIZERS[name](model)
    if clip == "previous":
        optim.step_in_backward(optimizer, clip="previous", max_norm=1.0, first="measure")
    tokens, targets = torch.arange(32), torch.randperm(32)
    losses = []
    for step in range(24):
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(model(tokens), targets)
        (value * 1000 if step == 16 else value).backward()
        if clip == "by hand":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(value.item())
    return losses


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_spike_does_not_come_through(name):
    """It used to, whole: by the norm of the step before, it was hardly clipped."""
    by_hand, in_backward = (losses_around_a_spike(name, clip) for clip in ("by hand", "previous"))
    assert max(in_backward[17:]) < max(by_hand[17:]) + 0.15
    assert max(in_backward[17:]) < in_backward[16] + 0.05


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
    old_state = everything(model, optimizer)
    with pytest.raises(
        RuntimeError, match=r"clip='previous' has no norm to clip by: .*with handle.measure\(\)"
    ):
        loss(model).backward()
    optimizer.zero_grad()
    assert everything(model, optimizer) == old_state
    handle.remove()
    optim.step_in_backward(optimizer, clip="previous", max_norm=SMALL, first="measure")
    train(model, optimizer, 1)
    assert not optimizer.state
    norm = optimizer.param_groups[0]["previous_norm"]
    train(model, optimizer, 1)
    plain, whole = ordinary()
    clipped_by_hand(plain, whole, 1, torch.tensor(norm), SMALL)
    assert without_norms(model, optimizer) == everything(plain, whole)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_norm_that_is_not_finite_is_no_norm_to_clip_by(bad):
    """The step of the parameter at fault is left out; the next clips by the norm before."""
    model, optimizer, _ = stepping(clip="previous", max_norm=SMALL, measured=True)
    train(model, optimizer, 1)
    norm = optimizer.param_groups[0]["previous_norm"]
    hook = model[3].weight.register_hook(lambda g: torch.full_like(g, bad))
    old_values = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.warns(
        RuntimeWarning, match=r"parameter 3 of group 0 \(shape \(16, 16\)\) is not finite: its step"
    ):
        train(model, optimizer, 1)
    hook.remove()
    moved = {
        name
        for name, p in model.named_parameters()
        if not torch.equal(p.detach(), old_values[name])
    }
    assert "3.weight" not in moved
    assert {"1.weight", "5.weight"} <= moved
    assert optimizer.param_groups[0]["previous_norm"] == norm
    assert optimizer.skipped_steps == 1
    assert int(optimizer.state[model[3].weight]["step"]) == 1
    train(model, optimizer, 1)
    assert int(optimizer.state[model[3].weight]["step"]) == 2
    assert optimizer.param_groups[0]["previous_norm"] != norm


def bad_pass(model, optimizer, *, ends_step=True):
    """Take a backward pass of a loss that is NaN, and return the messages of its warnings."""
    optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (loss(model) * math.nan).backward()
        if ends_step:
            optimizer.step()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("ends_step", [False, True])
def test_a_pass_of_nan_is_warned_of_and_counted_once(ends_step):
    """It used to be once for each parameter, and never in a row."""
    model, optimizer, _ = stepping()
    old_weights = everything(model, optimizer)[0]
    warned = [bad_pass(model, optimizer, ends_step=ends_step) for _ in range(11)]
    assert [len(messages) for messages in warned] == [1] * 11
    assert "its step was skipped, and so was that of every parameter with such" in warned[0][0]
    assert "has skipped steps in 10 backward passes in a row" in warned[9][0]
    assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (11, 11)
    assert everything(model, optimizer)[0] == old_weights
    optimizer.zero_grad()
    loss(model).backward()
    assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (11, 0)


def test_passes_of_nan_in_a_row_are_counted_over_a_resume_and_without_steps_in_backward():
    model, optimizer, handle = stepping(clip="previous", max_norm=SMALL, measured=True)
    for _ in range(3):
        bad_pass(model, optimizer)
    twin, resumed, _ = stepping(clip="previous", max_norm=SMALL)
    resumed.load_state_dict(optimizer.state_dict())
    bad_pass(twin, resumed)
    assert (resumed.skipped_steps, resumed.skipped_in_row) == (4, 4)
    handle.remove()
    bad_pass(model, optimizer)
    assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (4, 4)
    train(model, optimizer, 1)
    assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (4, 0)


def test_recomputation_in_a_pass_belongs_to_it():
    """Each recomputed layer has a run of autograd for itself."""
    torch.manual_seed(0)
    parts = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]), nn.Linear(8, 4)])
    model = fm.quantize_model(parts, "E4M3", storage="codes")
    optimizer = optim.StiffnessAdamW(model.parameters(), 1e-2)
    optim.step_in_backward(optimizer, clip="previous", max_norm=1.0, first="measure")
    inputs = torch.randn(4, 8, requires_grad=True)

    def backward(factor):
        optimizer.zero_grad()
        hidden = inputs
        for layer in model[0]:
            hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=True)
        (model[1](hidden).square().sum() * factor).backward()
        optimizer.step()

    backward(1.0)
    with pytest.warns(RuntimeWarning, match="its step was skipped"):
        backward(math.nan)
    backward(1.0)
    assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (1, 0)
    assert [int(state["step"]) for state in optimizer.state.values()] == [1] * 8


def test_a_first_norm_that_is_not_finite_is_told_of():
    """README's lines used to measure again for ever, without a word."""
    model, optimizer, _ = stepping(clip="previous", max_norm=SMALL, first="measure")
    warned = [bad_pass(model, optimizer) for _ in range(10)]
    assert [len(messages) for messages in warned] == [1] * 10
    line = "the norm of the whole gradient is not finite: no step was taken, and the next pass"
    assert line in warned[0][0]
    assert "has skipped steps in 10 backward passes in a row" in warned[9][0]
    assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (10, 10)
    train(model, optimizer, 2)
    assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (10, 0)
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}
    optimizer.param_groups[0].update(on_nonfinite="raise", previous_norm=None)
    optimizer.zero_grad()
    (loss(model) * math.nan).backward()
    with pytest.raises(FloatingPointError, match="the norm of the whole gradient is not finite"):
        optimizer.step()


@pytest.mark.parametrize("raises", [False, True])
def test_a_measured_norm_that_is_not_finite_is_told_of(raises):
    model, optimizer, handle = stepping(clip="previous", max_norm=SMALL)
    optimizer.param_groups[0]["on_nonfinite"] = "raise" if raises else "skip"
    expected = (
        pytest.raises(FloatingPointError, match="norm of the whole gradient is not finite")
        if raises
        else pytest.warns(RuntimeWarning, match="it is no norm to clip by; measure another batch")
    )
    with expected, handle.measure():
        (loss(model) * math.nan).backward()
    measure(model, handle)
    train(model, optimizer, 1)
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


class Interrupted(Exception):
    """What ends a backward pass in the middle of it."""


def interrupted_pass(model, optimizer):
    def interrupt(gradient):
        raise Interrupted

    optimizer.zero_grad()
    hook = model[1].weight.register_hook(interrupt)
    with pytest.raises(Interrupted):
        loss(model).backward()
    hook.remove()


@pytest.mark.parametrize("ends_step", [False, True])
def test_half_a_pass_leaves_no_norm(ends_step):
    """The next step used to be clipped by it, or all later passes were refused."""
    model, optimizer, handle = stepping(clip="previous", max_norm=SMALL, measured=True)
    train(model, optimizer, 1)
    norm = optimizer.param_groups[0]["previous_norm"]
    interrupted_pass(model, optimizer)
    if ends_step:
        optimizer.step()
    assert optimizer.param_groups[0]["previous_norm"] == norm
    optimizer.state_dict()
    whole = nn.utils.get_total_norm(torch.autograd.grad(loss(model), list(model.parameters())))
    train(model, optimizer, 1)
    assert optimizer.param_groups[0]["previous_norm"] == pytest.approx(float(whole))
    interrupted_pass(model, optimizer)
    optimizer.zero_grad()
    measure(model, handle)


@pytest.mark.parametrize("ends_step", [False, True])
def test_half_a_pass_under_exact_clipping_is_measured_again(ends_step):
    model, optimizer, handle = stepping(clip="exact", max_norm=SMALL, measured=True)
    interrupted_pass(model, optimizer)
    if ends_step:
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="has no norm to clip by: before each step"):
        loss(model).backward()
    measure(model, handle)
    train(model, optimizer, 1)
    assert int(optimizer.state[model[1].weight]["step"]) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("raises", [False, True])
def test_an_exact_norm_that_is_not_finite_leaves_out_the_step(bad, raises):
    """As clip_grad_norm_ and a step of all would."""
    model = network("codes")
    optimizer = optim.StiffnessAdamW(model.parameters(), on_nonfinite="raise" if raises else "skip")
    handle = optim.step_in_backward(optimizer, clip="exact", max_norm=SMALL)
    model[3].weight.register_hook(lambda g: torch.full_like(g, bad))
    old_state = everything(model, optimizer)
    measure(model, handle)
    loss(model).backward()
    if raises:
        with pytest.raises(
            FloatingPointError, match="the norm of the whole gradient is not finite"
        ):
            optimizer.step()
        return
    with pytest.warns(
        RuntimeWarning, match="the norm of the whole gradient is not finite: the step was skipped"
    ):
        optimizer.step()
    assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (1, 1)
    optimizer.skipped_steps = optimizer.skipped_in_row = 0
    assert everything(model, optimizer) == old_state


def test_infinity_takes_norms_and_clips_nothing():
    """A trainer wants the norm for its log.

    No first pass is needed, and steps have the numbers of steps that are not clipped.
    """
    (plain, whole), (model, optimizer, _) = ordinary(), stepping(clip="previous", max_norm=math.inf)
    for _ in range(3):
        norms = []
        for net, stepper in ((plain, whole), (model, optimizer)):
            stepper.zero_grad()
            loss(net).backward()
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), math.inf))
        assert torch.equal(*norms)
        whole.step()
        optimizer.step()
    assert without_norms(model, optimizer) == everything(plain, whole)


@pytest.mark.parametrize("foreach", [None, False])
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
    assert float(nn.utils.clip_grad_norm_(parameters, SMALL, foreach=foreach)) > SMALL
    optimizer.step()


GRADIENT_USES = {
    "add": lambda g: g + 1,
    "mul_": lambda g: g.mul_(2),
    "abs": lambda g: g.abs(),
    "sum": lambda g: g.sum(),
    "norm of columns": lambda g: g.norm(dim=0),
}


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("kind", ["previous", "exact"])
@pytest.mark.parametrize("use", GRADIENT_USES.values(), ids=GRADIENT_USES)
def test_another_use_of_a_gradient_is_refused(use, kind, foreach):
    """The step can be taken all the same."""
    model, optimizer, _ = stepping(clip=kind, max_norm=SMALL, measured=True)
    loss(model).backward()
    parameters = list(model.parameters())
    with pytest.raises(RuntimeError, match="used and freed"):
        use(parameters[1].grad)
    assert float(nn.utils.clip_grad_norm_(parameters, SMALL, foreach=foreach)) > SMALL
    optimizer.step()


def test_passes_that_are_no_steps_are_refused():
    model, optimizer, handle = stepping(clip="previous", max_norm=SMALL)
    with pytest.raises(RuntimeError, match=r"measure\(\) has seen no gradient"), handle.measure():
        pass
    with (
        pytest.raises(RuntimeError, match=r"measure\(\) takes the norm of one backward pass"),
        handle.measure(),
    ):
        list(map(Tensor.backward, [loss(model), loss(model)]))
    optimizer.zero_grad()
    measure(model, handle)
    loss(model).backward()
    with pytest.raises(RuntimeError, match=r"a step is under way, .* save the state afterwards"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match=r"measure\(\) comes between steps"), handle.measure():
        pass
    optimizer.zero_grad()
    with pytest.raises(
        RuntimeError, match=r"under clip='previous': call optimizer.step\(\) after each"
    ):
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
    optimizer.load_state_dict(ordinary()[1].state_dict())
    assert optimizer.param_groups[0]["previous_norm"] is None


def test_norms_of_bfloat16_gradients_are_float32():
    model = network("codes").to(torch.bfloat16)
    optimizer = OPTIMIZERS["adamw"](model)
    optim.step_in_backward(optimizer, clip="previous", max_norm=math.inf)
    loss(model).backward()
    plain = network("codes").to(torch.bfloat16)
    loss(plain).backward()
    whole = torch.cat([p.grad.float().flatten() for p in plain.parameters() if p.grad is not None])
    torch.testing.assert_close(
        nn.utils.get_total_norm([p.grad for p in model.parameters()]), whole.norm()
    )


class BadOptions(NamedTuple):
    """Options that do not go together, and the message of their error."""

    options: dict
    message: str
    error: type[Exception] = ValueError


BAD_OPTIONS = {
    "max_norm alone": BadOptions(
        {"max_norm": 1.0},
        r"max_norm=1.0 needs clip='previous' \(one backward .* or clip='exact' \(two",
    ),
    "clip alone": BadOptions({"clip": "exact"}, "clip='exact' needs max_norm"),
    "unknown clip": BadOptions(
        {"clip": "previus", "max_norm": 1.0},
        "clip='previus' is unknown: .* did you mean 'previous'",
    ),
    "max_norm 0": BadOptions(
        {"clip": "exact", "max_norm": 0.0}, r"max_norm=0.0 is out of range: \(0, inf\]"
    ),
    "max_norm nan": BadOptions(
        {"clip": "exact", "max_norm": math.nan}, "max_norm=nan is out of range"
    ),
    "max_norm str": BadOptions(
        {"clip": "exact", "max_norm": "1"}, "max_norm='1' must be a number", TypeError
    ),
    "first with exact": BadOptions(
        {"clip": "exact", "max_norm": 1.0, "first": "measure"},
        "first='measure' is for clip='previous'",
    ),
    "first alone": BadOptions(
        {"first": "measure"}, "first='measure' is for clip='previous', and nothing is clipped"
    ),
    "unknown first": BadOptions(
        {"clip": "previous", "max_norm": 1.0, "first": "mesure"}, "did you mean 'measure'"
    ),
    "accumulate with clip": BadOptions(
        {"clip": "exact", "max_norm": 1.0, "accumulate": "bfloat16"},
        "can be clipped by clip_grad_norm_",
    ),
    "unknown accumulate": BadOptions(
        {"accumulate": "momentum"},
        "accumulate='momentum' is unknown: one of bfloat16; did you mean",
    ),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_options_that_do_not_go_together_are_refused(case):
    options, message, error = BAD_OPTIONS[case]
    optimizer = OPTIMIZERS["adamw"](network("codes"))
    with pytest.raises(error, match=message):
        optim.step_in_backward(optimizer, **options)
    optim.step_in_backward(optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_is_planned_once_in_the_backward_pass(name, monkeypatch):
    """Plans serve in later passes, and have the bits of steps that are all planned."""
    answers = []
    is_stale = Plan.is_stale

    def recorded(plan, optimizer, member=None):
        answers.append(is_stale(plan, optimizer, member))
        return answers[-1]

    monkeypatch.setattr(Plan, "is_stale", recorded)
    bits = []
    for keeps in (True, False):
        model, optimizer, _ = stepping(name)
        optimizer.keeps_plan = keeps
        for _ in range(5):
            model(TOKENS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        bits.append(frozen([[p.detach() for p in model.parameters()], optimizer.state_dict()]))
    assert bits[0] == bits[1]
    assert answers
    assert answers.count(False) > answers.count(True)
