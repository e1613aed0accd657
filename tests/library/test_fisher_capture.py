"""What the Fisher metric is measured from: the rows of linear layers, and labels drawn from the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fisher_metric_cases import classifier, labels_of, layers_of, normal, passes_over, small_gpt, tokens
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold._fisher.capture import (
    Draws,
    linear_layers,
    rows_of_batches,
    sample_labels,
    take_batches,
)
from fp8manifold._fisher.metric import METRIC, REPRESENTATIONS, measure

pytest.importorskip("nngeometry", reason="extra fisher")


# What is captured


def test_selected_are_the_weights_that_belong_to_one_linear_layer_alone() -> None:
    model = small_gpt(tie_weights=True)
    found = linear_layers(model, model.parameters(), 4096)
    assert len(found) == 8
    assert not any(name == "lm_head" for name, _ in found.values())
    assert {p for p in found if max(p.shape) <= 16} == set(linear_layers(model, model.parameters(), 16))
    assert not linear_layers(model, [model.final_norm.weight], 4096)
    shared = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    shared[2].weight = nn.Parameter(torch.empty(0, 3))
    shared[1].weight = shared[0].weight
    assert not linear_layers(shared, shared.parameters(), 4096)


@pytest.mark.parametrize("storage", ["plain", "master", "grid"])
def test_rows_give_the_gradient_that_autograd_gives(storage: Any) -> None:
    model = small_gpt(bias=True)
    if storage != "plain":
        model = fm.quantize_model(model, fm.LayerSpec("E4M3", activation="E5M2"), storage=storage)
    model.eval()
    layers = layers_of(model)
    batch = tokens()
    rows = next(passes_over(model, layers, [batch])())
    loss = F.cross_entropy(model(batch).flatten(0, -2), labels_of(model, batch), reduction="sum")
    loss.backward()
    assert len(rows) == 9
    for layer in layers:
        ((x, y),) = rows[layer.module]
        assert x.dtype == y.dtype == torch.float32
        assert len(x) == len(y) == batch.numel()
        torch.testing.assert_close(y.T @ x, layer.module.weight.grad.as_subclass(Tensor), atol=1e-4, rtol=1e-4)


def test_every_call_of_a_layer_counts_and_in_place_activations_do_no_harm() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = F.relu(self.inner(x), inplace=True)
            return self.head(x)

    model, batch = Twice(), normal(10, 6)
    rows = next(passes_over(model, layers_of(model), [batch])())
    F.cross_entropy(model(batch), labels_of(model, batch), reduction="sum").backward()
    assert [len(x) for x, _ in rows[model.inner]] == [10, 10]
    total = sum(y.T @ x for x, y in rows[model.inner])
    torch.testing.assert_close(total, model.inner.weight.grad)


def test_measuring_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    model[2].eval()
    model[0].weight.grad = torch.ones(5, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    layers = layers_of(model)
    for representation in REPRESENTATIONS:
        batches = take_batches([normal(20, 6)], 1, seed=0, step=0)
        found = measure(representation, layers, passes_over(model, layers, batches), damping=0.1, decay=0.5)
        assert not any(x.requires_grad for metric in found for x in metric.values() if isinstance(x, Tensor))
        assert all(metric.keys() <= METRIC for metric in found)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(5, 6))
    assert model[3].weight.grad is None
    assert not any(m._forward_hooks for m in model.modules())


def test_batches_follow_the_key_and_not_the_global_generator() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(40.0)[:, None])

    def order(step: int) -> list[float]:
        loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
        return torch.cat([b[0] for b in take_batches(loader, 3, seed=5, step=step)]).flatten().tolist()

    first = order(0)
    torch.manual_seed(99)
    assert order(0) == first != order(1)
    assert take_batches(lambda step: [step, step + 1], 1, seed=0, step=6) == [6]
    assert take_batches([1, 2, 3], 2, seed=0, step=0) == [1, 2]


# Labels


def test_labels_are_drawn_from_the_softmax_in_proportion() -> None:
    n, scores = 200_000, torch.tensor([1.0, -1.0, -torch.inf, 2.0, 0.0, -torch.inf])
    labels = sample_labels(scores.expand(n, -1), seed=3, step=1, stream=2)
    counts = torch.bincount(labels, minlength=6).double()
    expected = scores.double().softmax(0) * n
    assert counts[[2, 5]].tolist() == [0, 0]
    assert (((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum() < 16.3  # chi-square, 3 df, 0.1%


def test_labels_depend_on_their_key_alone() -> None:
    scores = normal(500, 11)
    first = sample_labels(scores, seed=3, step=1, stream=2)
    torch.manual_seed(1)
    assert torch.equal(sample_labels(scores, seed=3, step=1, stream=2), first)
    for key in ({"seed": 4}, {"step": 2}, {"stream": 3}):
        assert not torch.equal(sample_labels(scores, **{"seed": 3, "step": 1, "stream": 2} | key), first)


def test_the_smallest_draw_finds_no_label_of_probability_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8manifold._fisher.capture.random_bits", lambda n, **_: torch.zeros(n, dtype=torch.int32))
    assert sample_labels(torch.tensor([[-torch.inf, -torch.inf, 1.0]]), seed=0, step=0, stream=0).tolist() == [2]


def test_labels_of_a_large_vocabulary_are_drawn_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = normal(300, 5000) * 3
    whole = sample_labels(scores, seed=3, step=1, stream=2)
    monkeypatch.setattr("fp8manifold._fisher.capture._CHUNK", 7 * 5000)
    assert torch.equal(sample_labels(scores, seed=3, step=1, stream=2), whole)
    assert len(whole.unique()) > 150


@pytest.mark.parametrize("scores", [torch.zeros(5), torch.zeros(5, 1), torch.zeros(5, 3, dtype=torch.long), "text"])
def test_a_model_without_logits_is_refused(scores: Any) -> None:
    model = classifier()
    layers = [x.module for x in layers_of(model)]
    with pytest.raises(ValueError, match=r"logits \(\.\.\., V\)"):
        next(rows_of_batches(model, layers, [None], lambda *_: scores, Draws(0, 0, 1)))
