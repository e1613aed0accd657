"""FisherNaturalGradient: when the metric is measured, and what becomes of a step whose metric or gradients fail."""

import copy

import pytest
import torch
from fisher_cases import EVERY, batch, counting, optimizer_of, put_gradients, snapshot, tagger, train

from fp8manifold.optim import FisherNaturalGradient, anneal
from fp8manifold.optim._fisher.nngeometry import METRIC

pytest.importorskip("nngeometry", reason="extra fisher")


# When the metric is measured


def test_metric_is_measured_every_refresh_steps() -> None:
    model = tagger()
    asked, loader = counting([batch()])
    train(model, optimizer_of(model, loader, refresh=3), 8)
    assert asked == [0, 3, 6]


def test_labels_are_drawn_anew_at_every_refresh() -> None:
    model = tagger()
    optimizer = optimizer_of(model, lr=0.0, refresh=1, decay=0.0, representation="diagonal")
    seen = []
    for step in range(3):
        train(model, optimizer, 1, step)
        seen.append(optimizer.state[model.head.weight]["fisher_diagonal"])
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_another_representation_takes_the_place_of_the_first() -> None:
    model = tagger()
    optimizer = optimizer_of(model, decay=0.0)
    for step, (representation, names) in enumerate(
        {
            "kfac": {"inverse_inputs", "inverse_outputs"},
            "ekfac": {"basis_inputs", "basis_outputs", "eigenvalues", "fisher_damping"},
            "diagonal": {"fisher_diagonal", "fisher_damping"},
        }.items()
    ):
        optimizer.param_groups[0]["representation"] = representation
        train(model, optimizer, 1, step)
        assert {name for name in optimizer.state[model.head.weight] if name.startswith(METRIC)} == names


@EVERY
def test_reset_forgets_what_was_measured(representation: str) -> None:
    """After a reset the state is that of an optimizer which begins there with the same step count."""
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


def test_groups_have_options_of_their_own() -> None:
    model = tagger()
    rest = [p for p in model.parameters() if p is not model.head.weight and p is not model.hidden.weight]
    groups = [
        {"params": [model.head.weight], "representation": "diagonal", "refresh": 2, "stiffness": anneal(1.0, 0.0, 3)},
        {"params": [model.hidden.weight], "representation": "ekfac", "samples": 3, "batches": 2},
        {"params": rest, "lr": 0.1},
    ]
    optimizer = FisherNaturalGradient(groups, model, [batch(1), batch(2)])
    train(model, optimizer, 4)
    assert "fisher_diagonal" in optimizer.state[model.head.weight]
    assert "eigenvalues" in optimizer.state[model.hidden.weight]
    assert "exp_avg" in optimizer.state[model.norm.weight]
    assert 0 <= optimizer.bounded_share <= 1


def test_parameters_that_join_later_are_measured_when_they_do() -> None:
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


# Failing metrics and gradients


@EVERY
def test_indefinite_metric_leaves_the_step_out(representation: str) -> None:
    """Two tokens span two directions of eight: nothing to invert without damping."""
    model = tagger()
    tokens = torch.tensor([[1, 2]])
    if representation == "diagonal":
        model.embedding.weight.data[:, 3] = 0
    optimizer = optimizer_of(model, [(tokens, None)], representation=representation, damping=0.0)
    put_gradients(model)
    before = snapshot(optimizer)
    with pytest.warns(RuntimeWarning, match=r"left out: layer 'h.*not positive definite.*raise damping"):
        optimizer.step()
    after = snapshot(optimizer)
    assert optimizer.skipped_steps == 1
    after["state"]["skipped_steps"] = after["state"]["skipped_in_row"] = 0
    assert after == before
    for group in optimizer.param_groups:
        group["damping"] = 0.1
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert snapshot(optimizer)["parameters"] != before["parameters"]


def test_indefinite_metric_raises_where_asked_to() -> None:
    model = tagger()
    optimizer = optimizer_of(model, [(torch.tensor([[1, 2]]), None)], damping=0.0, on_nonfinite="raise")
    put_gradients(model)
    before = snapshot(optimizer)
    with pytest.raises(FloatingPointError, match="not positive definite"):
        optimizer.step()
    assert snapshot(optimizer) == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_bad_gradients_leave_the_step_out_and_measure_nothing(bad: float) -> None:
    model = tagger()
    asked, loader = counting([batch()])
    optimizer = optimizer_of(model, loader)
    put_gradients(model)
    model.norm.weight.grad[3] = bad
    before = snapshot(optimizer)
    optimizer.step()
    assert (optimizer.skipped_steps, asked) == (1, [])
    after = snapshot(optimizer)
    after["state"]["skipped_steps"] = after["state"]["skipped_in_row"] = 0
    assert after == before
