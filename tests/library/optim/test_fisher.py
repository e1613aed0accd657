"""FisherNaturalGradient: the step it documents, when it measures, what fails, resuming and learning."""

import copy
import sys
import warnings

import pytest
import torch
from fisher_cases import (
    EVERY,
    STORAGES,
    batch,
    counting,
    optimizer_of,
    put_gradients,
    snapshot,
    stretch_of,
    tagger,
    train,
    values,
)
from laws import each
from optimizer_cases import frozen, same_bits, through_disk
from torch import Tensor

import fp8manifold as fm
from fp8manifold.optim import FisherNaturalGradient, StiffnessAdamW
from fp8manifold.optim._fisher.nngeometry import METRIC

pytestmark = pytest.mark.extra("nngeometry")


@each("bounds", [(2.0**-8, 16.0), (0.75, 1.5)])
@each("storage", STORAGES)
def test_step_is_the_damped_natural_one(storage, bounds):
    """``(F + c T^-2)^-1 g``, rounded once to the nearest point of the grid."""
    model = tagger(storage)
    weight = model.hidden.weight
    how = {"representation": "diagonal", "normalize": False, "momentum": 0.0, "writeback": "nearest"}
    optimizer = optimizer_of(model, lr=0.5, damping=0.3, floor=bounds[0], clip=bounds[1], **how)
    put_gradients(model)
    before, gradient = values([weight])[0].clone(), weight.grad.clone()
    t = torch.ones_like(gradient) if storage == "plain" else stretch_of(weight, *bounds)
    optimizer.step()
    fisher = optimizer.state[weight]["fisher_diagonal"]
    added = 0.3 * (fisher * t * t).mean()
    natural = gradient / (fisher + added / t**2)
    if storage == "plain":
        torch.testing.assert_close(weight.detach(), before - 0.5 * natural)
        return
    scale = weight.expanded_scale() if storage == "fp8" else weight.manifold.scale
    start = fm.decode(before, "E4M3") * scale if storage == "fp8" else before
    target = (start - 0.5 * natural) / scale
    now = weight.dequantize() if storage == "fp8" else weight.detach().as_subclass(Tensor)
    unclear = (fm.round_to_grid(target * 1.0001, "E4M3") != fm.round_to_grid(target * 0.9999, "E4M3")).sum()
    assert unclear < 3
    assert (now / scale != fm.round_to_grid(target, "E4M3")).sum() <= unclear
    assert (now != start).float().mean() > 0.2


def test_reference_stiffness_is_kept_between_its_refreshes():
    model = tagger()
    optimizer = optimizer_of(model, lr=0.1, refresh_every=4, representation="diagonal")
    weight, references = model.hidden.weight, []
    for step in range(6):
        put_gradients(model, step)
        slots = optimizer._slots()
        optimizer._check_schedules(slots)
        stretch = optimizer._stretch(next(slot for slot in slots if slot.parameter is weight))
        stiffness = fm.ulp(weight.dequantize() / weight.expanded_scale(), "E4M3") * weight.expanded_scale()
        optimizer.step()
        references.append(optimizer.state[weight]["reference"])
        torch.testing.assert_close(stretch, (stiffness / references[-1]).clamp(2.0**-8, 16))
    assert len(set(references[:4])) == len(set(references[4:])) == 1
    assert references[3] != references[4]


def test_direction_averages_and_decays():
    model = tagger("plain")
    optimizer = optimizer_of(model, lr=0.01, momentum=0.75, weight_decay=0.5)
    weight, buffer = model.head.weight, torch.zeros(5, 12)
    for step in range(1, 5):
        before = values([weight])[0]
        train(model, optimizer, 1, step)
        buffer_before, buffer = buffer, optimizer.state[weight]["momentum_buffer"].clone()
        direction = (buffer - 0.75 * buffer_before) / 0.25
        assert direction.square().mean().sqrt().item() == pytest.approx(1.0, rel=1e-4)
        expected = before * (1 - 0.005) - 0.01 / (1 - 0.75**step) * buffer
        torch.testing.assert_close(values([weight])[0], expected)


@each("storage", STORAGES)
def test_other_parameters_take_the_step_of_stiffness_adamw(storage):
    """Bias, norm, embedding, and a linear layer that is too wide for its group."""
    ours, theirs = tagger(storage), tagger(storage)
    shared = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1, "seed": 3, "stiffness": 0.5}
    groups = [{"params": [p for n, p in ours.named_parameters() if n != "head.weight"], "max_features": 11}]
    optimizer = FisherNaturalGradient([*groups, {"params": [ours.head.weight]}], ours, [batch()], **shared)
    reference = StiffnessAdamW(theirs.parameters(), **shared)
    for step in range(4):
        put_gradients(ours, step)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            b.grad = a.grad
        optimizer.step()
        reference.step()
        assert same_bits(values(ours.parameters())[:-1], values(theirs.parameters())[:-1])
    assert "exp_avg" in optimizer.state[ours.hidden.weight]
    assert "momentum_buffer" in optimizer.state[ours.head.weight]


def test_metric_is_measured_every_refresh_steps():
    model = tagger()
    asked, loader = counting([batch()])
    train(model, optimizer_of(model, loader, refresh=3), 8)
    assert asked == [0, 3, 6]


def test_labels_are_drawn_anew_at_every_refresh():
    model = tagger()
    optimizer = optimizer_of(model, lr=0.0, refresh=1, decay=0.0, representation="diagonal")
    seen = []
    for step in range(3):
        train(model, optimizer, 1, step)
        seen.append(optimizer.state[model.head.weight]["fisher_diagonal"])
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_each_group_has_a_representation_and_another_takes_the_place_of_the_first():
    model = tagger()
    head, rest = model.head.weight, [p for p in model.parameters() if p is not model.head.weight]
    groups = [{"params": [head]}, {"params": rest, "samples": 3, "batches": 2}]
    optimizer = FisherNaturalGradient(groups, model, [batch(1), batch(2)], decay=0.0)

    def entries(weight):
        return {name for name in optimizer.state[weight] if name.startswith(METRIC)}

    for step, (representation, names) in enumerate(
        {
            "kfac": {"inverse_inputs", "inverse_outputs"},
            "ekfac": {"basis_inputs", "basis_outputs", "eigenvalues", "fisher_damping"},
            "diagonal": {"fisher_diagonal", "fisher_damping"},
        }.items()
    ):
        optimizer.param_groups[0]["representation"] = representation
        train(model, optimizer, 1, step)
        assert entries(head) == names
        assert entries(model.hidden.weight) == {"inverse_inputs", "inverse_outputs"}


@EVERY
def test_reset_forgets_what_was_measured(representation):
    model = tagger("plain")
    asked, loader = counting([batch()])
    optimizer = optimizer_of(model, loader, representation=representation, refresh=100, reset_every=4, decay=0.9)
    name = "fisher_diagonal" if representation == "diagonal" else "fisher_inputs"
    train(model, optimizer, 4)
    kept = optimizer.state[model.head.weight][name].clone()
    fresh = copy.deepcopy(model)
    train(model, optimizer, 1, 4)
    assert asked == [0, 4]
    again = optimizer_of(
        fresh, loader, representation=representation, decay=0.0 if representation == "diagonal" else 1e-9
    )
    train(fresh, again, 1, 4)
    now = optimizer.state[model.head.weight][name]
    assert not torch.allclose(now, kept, rtol=1e-3)
    if representation != "diagonal":  # inputs do not depend on the labels, whose key is the step
        torch.testing.assert_close(now, again.state[fresh.head.weight][name])
    buffer = optimizer.state[model.head.weight]["momentum_buffer"]
    assert buffer.square().mean().sqrt().item() == pytest.approx(0.1, rel=1e-4)


def test_parameters_that_join_later_are_measured_when_they_do():
    model = tagger()
    asked, loader = counting([batch()])
    optimizer = optimizer_of(model, loader, refresh=10)
    for step in range(3):
        put_gradients(model, step)
        if step < 2:
            model.head.weight.grad = None
        optimizer.step()
    assert asked == [0, 0]
    assert int(optimizer.state[model.head.weight]["step"]) == 1


@EVERY
def test_an_indefinite_metric_leaves_the_step_out_or_raises(representation):
    """Two tokens span two directions of eight: nothing to invert without damping."""
    model = tagger()
    tokens = torch.tensor([[1, 2]])
    if representation == "diagonal":
        model.embedding.weight.data[:, 3] = 0
    optimizer = optimizer_of(model, [(tokens, None)], representation=representation, damping=0.0)
    put_gradients(model)
    before = snapshot(optimizer)
    with pytest.warns(RuntimeWarning, match=r"skipped a step: layer 'h.*not positive definite.*raise damping"):
        optimizer.step()
    after = snapshot(optimizer)
    assert optimizer.skipped_steps == 1
    after["state"]["skipped_steps"] = after["state"]["skipped_in_row"] = 0
    assert after == before
    for group in optimizer.param_groups:
        group["on_nonfinite"] = "raise"
    with pytest.raises(FloatingPointError, match="not positive definite"):
        optimizer.step()
    assert snapshot(optimizer)["parameters"] == before["parameters"]
    for group in optimizer.param_groups:
        group["damping"] = 0.1
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert snapshot(optimizer)["parameters"] != before["parameters"]


def resumes(storage, steps, **options):
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(9)), 3, shuffle=True)
    model, other = tagger(storage), tagger(storage, seed=1)
    optimizer = optimizer_of(model, loader, **options)
    train(model, optimizer, 1)
    for step in range(1, steps):
        saved = through_disk({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        other.load_state_dict(saved["model"])
        again = optimizer_of(other, loader, **options)
        again.load_state_dict(saved["optimizer"])
        train(model, optimizer, 1, step)
        train(other, again, 1, step)
        assert same_bits(values(model.parameters()), values(other.parameters())), f"after step {step}"
        assert frozen(optimizer.state_dict()) == frozen(again.state_dict()), f"after step {step}"


@EVERY
@each("storage", STORAGES)
def test_resume_is_bit_exact_for_every_representation(representation, storage):
    resumes(storage, 15, representation=representation, refresh=4, weight_decay=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_learns_in_other_dtypes(dtype):
    model = tagger("plain").to(dtype)
    optimizer = optimizer_of(model, lr=0.02)
    first = put_gradients(model)
    train(model, optimizer, 40)
    assert put_gradients(model) < 0.7 * first
    metric = optimizer.state[model.head.weight]
    assert {metric[name].dtype for name in ("inverse_inputs", "fisher_outputs")} == {torch.float32}
    assert metric["momentum_buffer"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_bad_sources():
    model = tagger()
    optimizer = FisherNaturalGradient(model.parameters(), model, lambda step: [])
    put_gradients(model)
    with pytest.raises(ValueError, match="gave no batch"):
        optimizer.step()
    optimizer.loader = [{"ids": batch()[0]}]
    with pytest.raises(TypeError, match="the loader gave a dict, not tensors: say with logits="):
        optimizer.step()


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nngeometry", None)
    with pytest.raises(ImportError, match=r"pip install 'fp8manifold\[fisher\]'"):
        optimizer_of(tagger())


def test_logits_may_be_computed_in_another_way():
    model = tagger()
    optimizer = optimizer_of(model, [{"ids": batch()[0]}], logits=lambda m, b: m(b["ids"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 2)
    assert optimizer.skipped_steps == 0
