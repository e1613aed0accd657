"""FisherNaturalGradient: the step it documents, and what it leaves alone."""

from typing import Any

import pytest
import torch
from fisher_cases import EVERY, STORAGES, batch, optimizer_of, put_gradients, stretch_of, tagger, train, values
from optimizer_cases import same_bits
from torch import Tensor

import fp8manifold as fm
from fp8manifold.optim import FisherNaturalGradient, StiffnessAdamW

pytest.importorskip("nngeometry", reason="extra fisher")


@pytest.mark.parametrize("bounds", [(2.0**-8, 16.0), (0.75, 1.5)])
@pytest.mark.parametrize("storage", STORAGES)
def test_step_is_the_damped_natural_one(storage: str, bounds: tuple[float, float]) -> None:
    """``(F + c T^-2)^-1 g``, rounded once to the nearest point of the grid."""
    model = tagger(storage)
    weight = model.hidden.weight
    optimizer = optimizer_of(
        model,
        representation="diagonal",
        normalize=False,
        momentum=0.0,
        lr=0.5,
        damping=0.3,
        writeback="nearest",
        floor=bounds[0],
        clip=bounds[1],
    )
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


@EVERY
def test_normalized_step_has_the_size_of_lr(representation: str) -> None:
    model = tagger("plain")
    optimizer = optimizer_of(model, representation=representation, lr=0.02)
    for step in range(3):
        before = values([model.hidden.weight, model.head.weight])
        train(model, optimizer, 1, step)
        if step == 0:
            for old, new in zip(before, values([model.hidden.weight, model.head.weight]), strict=True):
                assert (new - old).square().mean().sqrt().item() == pytest.approx(0.02, rel=1e-4)


def test_undamped_step_does_not_depend_on_the_coordinates() -> None:
    moved = []
    for k in (0.0, 1.0):
        model = tagger("grid")
        model.hidden.weight.manifold.__class__ = fm.StiffnessManifold  # steps in value, unrounded
        optimizer = optimizer_of(model, representation="diagonal", damping=1e-9, stiffness=k, normalize=False, lr=1e-3)
        before = values([model.hidden.weight])[0]
        train(model, optimizer, 1)
        moved.append(values([model.hidden.weight])[0] - before)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-3, atol=1e-6)


def test_reference_stiffness_is_kept_between_its_refreshes() -> None:
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


def test_direction_averages_and_decays() -> None:
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


# What it leaves alone


@pytest.mark.parametrize("storage", STORAGES)
def test_other_parameters_take_the_step_of_stiffness_adamw(storage: str) -> None:
    """Bias, norm, embedding, and a linear layer that is too wide for its group."""
    ours, theirs = tagger(storage), tagger(storage)
    shared: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "seed": 3, "stiffness": 0.5}
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
