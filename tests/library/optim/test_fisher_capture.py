"""What the Fisher metric is measured from: the rows of linear layers, and labels drawn from the model."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fisher_metric_cases import EVERY, classifier, labels_of, layers_of, measured, normal, rows_of, small_gpt, tokens
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.optim import FisherNaturalGradient
from fp8manifold.optim._fisher.nngeometry import METRIC, NEEDED, first_batches, sample_labels

pytest.importorskip("nngeometry", reason="extra fisher")


# What is captured


def selected(model: nn.Module, parameters: Any, widest: int = 4096) -> list[str]:
    other = classifier()
    optimizer = FisherNaturalGradient(other.parameters(), other, [None])
    optimizer.model = model
    group = {"params": list(parameters), "representation": "kfac", "max_features": widest}
    return [name for name, _ in optimizer._layers(group).values()]


def test_selected_are_the_weights_that_belong_to_one_linear_layer_alone() -> None:
    model = small_gpt(tie_weights=True)
    found = selected(model, model.parameters())
    assert len(found) == 8
    assert "lm_head" not in found
    narrow = [name for name in found if max(model.get_submodule(name).weight.shape) <= 16]
    assert selected(model, model.parameters(), 16) == narrow
    assert not selected(model, [model.final_norm.weight])
    shared = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    shared[2].weight = nn.Parameter(torch.empty(0, 3))
    shared[1].weight = shared[0].weight
    assert not selected(shared, shared.parameters())


@pytest.mark.parametrize("storage", ["plain", "master", "grid", "fp8"])
def test_factors_are_those_of_quantised_inputs_and_of_output_gradients(storage: Any) -> None:
    model = small_gpt(bias=True)
    if storage != "plain":
        model = fm.quantize_model(model, fm.LayerSpec("E4M3", activation="E5M2"), storage=storage)
    model.eval()
    batch = tokens()
    layers = layers_of(model)
    for layer, metric in zip(layers, measured("kfac", model, layers, [batch], decay=0.5), strict=True):
        x, y = rows_of(model, layer.module, batch)
        x = x if storage == "plain" else layer.module.quantized_input(x)
        torch.testing.assert_close(metric["fisher_inputs"], x.T @ x / len(x))
        torch.testing.assert_close(metric["fisher_outputs"], y.T @ y / len(y), rtol=1e-4, atol=1e-7)


@EVERY
def test_every_call_of_a_layer_counts(representation: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 4)
            self.calls: list[tuple[Tensor, Tensor]] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls = []
            for _ in range(2):
                before, x = x, self.inner(x)
                self.calls.append((before.detach().clone(), x))
                x = F.relu(x)
            return self.head(x)

    model, batch = Twice(), normal(10, 6)
    labels = labels_of(model, batch)
    loss = F.cross_entropy(model(batch), labels, reduction="sum")
    calls = list(model.calls)
    ys = torch.autograd.grad(loss, [output for _, output in calls])
    x, y = torch.cat([x for x, _ in calls]), torch.cat(ys)
    metric = measured(representation, model, layers_of(model)[:1], [batch], decay=0.5)[0]
    if representation == "diagonal":
        torch.testing.assert_close(metric["fisher_diagonal"], (y * y).T @ (x * x) / 20)
    else:
        torch.testing.assert_close(metric["fisher_inputs"], x.T @ x / 20)
        torch.testing.assert_close(metric["fisher_outputs"], y.T @ y / 20)


def test_outputs_that_an_activation_overwrites_do_no_harm() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4))
    other = nn.Sequential(model[0], nn.ReLU(), model[2])
    ours, theirs = (measured("diagonal", m, layers_of(m), [normal(9, 6)]) for m in (model, other))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a["fisher_diagonal"], b["fisher_diagonal"])


def test_measuring_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    model[2].eval()
    model[0].weight.grad = torch.ones(5, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    layers = layers_of(model)
    for representation in NEEDED:
        batches = first_batches([normal(20, 6)], 1, seed=0, step=0)
        found = measured(representation, model, layers, batches, decay=0.5)
        assert not any(x.requires_grad for metric in found for x in metric.values() if isinstance(x, Tensor))
        assert all(name.startswith(METRIC) for metric in found for name in metric)
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
        return torch.cat([b[0] for b in first_batches(loader, 3, seed=5, step=step)]).flatten().tolist()

    first = order(0)
    torch.manual_seed(99)
    assert order(0) == first != order(1)
    assert first_batches(lambda step: [step, step + 1], 1, seed=0, step=6) == [6]
    assert first_batches([1, 2, 3], 2, seed=0, step=0) == [1, 2]


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
    zeros = lambda n, **_: torch.zeros(n, dtype=torch.int32)  # noqa: E731
    monkeypatch.setattr("fp8manifold.optim._fisher.nngeometry.random_bits", zeros)
    assert sample_labels(torch.tensor([[-torch.inf, -torch.inf, 1.0]]), seed=0, step=0, stream=0).tolist() == [2]


def test_labels_of_a_large_vocabulary_are_drawn_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = normal(300, 5000) * 3
    whole = sample_labels(scores, seed=3, step=1, stream=2)
    monkeypatch.setattr("fp8manifold.optim._fisher.nngeometry._CHUNK", 7 * 5000)
    assert torch.equal(sample_labels(scores, seed=3, step=1, stream=2), whole)
    assert len(whole.unique()) > 150


@pytest.mark.parametrize("scores", [torch.zeros(5), torch.zeros(5, 1), torch.zeros(5, 3, dtype=torch.long), "text"])
def test_a_model_without_logits_is_refused(scores: Any) -> None:
    model = classifier()
    with pytest.raises(ValueError, match=r"logits \(\.\.\., V\)"):
        measured("kfac", model, layers_of(model), [normal(3, 6)], logits=lambda *_: scores)
    assert not any(module._forward_hooks for module in model.modules())
