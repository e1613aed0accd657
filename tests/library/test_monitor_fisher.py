"""Fisher traces and top eigenvalues against one backward pass a token."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold._fisher.capture import sample_labels
from fp8manifold.monitor import FisherFigures, eigenvalue_ratios, fisher_figures, fisher_ratio

pytest.importorskip("nngeometry", reason="extra fisher")


def classifier() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False))


def batch(seed: int = 0) -> Tensor:
    return torch.randn((16, 6), generator=torch.Generator().manual_seed(seed))


def gradients_by_token(model: nn.Module, weight: Tensor, x: Tensor, *, seed: int, step: int) -> Tensor:
    labels = sample_labels(model(x).detach(), seed=seed, step=step, stream=0)
    chosen = F.log_softmax(model(x), -1).gather(1, labels[:, None])[:, 0]
    return torch.stack([torch.autograd.grad(value, weight, retain_graph=True)[0] for value in chosen]).double()


def test_the_diagonal_is_brute_force() -> None:
    model, x = classifier(), batch()
    found = fisher_figures(model, [x], representation="diagonal", eigenvalues=4, seed=3, step=4)
    for name in ("0", "2"):
        weight = model.get_submodule(name).weight
        moments = gradients_by_token(model, weight, x, seed=3, step=4).square().mean(0)
        assert found[name].trace == pytest.approx(moments.sum().item(), rel=1e-4)
        assert found[name].eigenvalues == pytest.approx(moments.flatten().topk(4).values.tolist(), rel=1e-4)


def test_kfac_is_the_product_of_its_factors() -> None:
    model, x = classifier(), batch()
    hidden = model[1](model[0](x)).detach()
    labels = sample_labels(model(x).detach(), seed=0, step=0, stream=0)
    at_output = (model(x).softmax(-1) - F.one_hot(labels, 4)).detach()
    inputs, outputs = hidden.T @ hidden / 16, at_output.T @ at_output / 16
    found = fisher_figures(model, [x], eigenvalues=30)["2"]
    dense = torch.kron(outputs, inputs).double()
    assert found.trace == pytest.approx(dense.trace().item(), rel=1e-4)
    assert found.top == pytest.approx(torch.linalg.eigvalsh(dense)[-1].item(), rel=1e-4)
    assert found.top < found.trace
    spectrum = torch.linalg.eigvalsh(dense).flip(0)
    assert len(found.eigenvalues) == 20  # there are no more
    assert torch.tensor(found.eigenvalues, dtype=torch.float64).allclose(spectrum, rtol=1e-4, atol=1e-7)
    assert fisher_figures(model, [x], eigenvalues=3)["2"].eigenvalues == pytest.approx(found.eigenvalues[:3])


def test_batches_and_samples_are_averaged() -> None:
    model = classifier()
    x = batch()
    twice = fisher_figures(model, [x, batch(1)], samples=3, representation="diagonal")["2"].trace
    alone = [fisher_figures(model, [b], samples=60, representation="diagonal")["2"].trace for b in (x, batch(1))]
    assert twice == pytest.approx(sum(alone) / 2, rel=0.2)


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 4))
    model[0].weight.grad = torch.ones(5, 6)
    before = copy.deepcopy(model.state_dict())
    state = torch.random.get_rng_state()
    first = fisher_figures(model, [(batch(), None)])
    assert first == fisher_figures(model, [(batch(), None)])
    assert first != fisher_figures(model, [(batch(), None)], step=1)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert torch.equal(model[0].weight.grad, torch.ones(5, 6))
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.training


@pytest.mark.parametrize("storage", ["master", "grid", "fp8"])
def test_quantised_weights_against_their_shadow(storage: str) -> None:
    """A shadow that holds the dequantised weights has the same Fisher matrix; the float weights have another."""
    original = classifier()
    quantized = fm.quantize_model(copy.deepcopy(original), "E2M1", storage=storage)
    shadow = copy.deepcopy(original)
    with torch.no_grad():
        for name in ("0", "2"):
            shadow.get_submodule(name).weight.copy_(quantized.get_submodule(name).quantized_weight())
    figures = fisher_figures(quantized, [batch()])
    assert figures.keys() == {"0", "2"}
    same = fisher_ratio(figures, fisher_figures(shadow, [batch()]))
    assert same == {"0": pytest.approx(1, rel=1e-3), "2": pytest.approx(1, rel=1e-3)}
    other = fisher_ratio(figures, fisher_figures(original, [batch()]))
    assert any(abs(ratio - 1) > 5e-3 for ratio in other.values() if ratio is not None)


def test_the_ratio_of_layers_that_both_have() -> None:
    one, zero = FisherFigures(1.0, (1.0,)), FisherFigures(0.0, (0.0,))
    assert fisher_ratio({"a": one, "b": one, "c": one}, {"b": zero, "c": FisherFigures(4.0, (1.0,))}) == {
        "b": None,
        "c": 0.25,
    }


def test_eigenvalues_are_compared_rank_by_rank() -> None:
    ours, theirs = FisherFigures(9.0, (6.0, 3.0, 1.0)), FisherFigures(9.0, (4.0, 0.0))
    assert eigenvalue_ratios({"a": ours, "b": ours}, {"a": theirs}) == {"a": (1.5, None)}


def test_layers_that_are_left_out() -> None:
    model = classifier()
    assert fisher_figures(model, [batch()], max_features=5).keys() == {"2"}
    assert fisher_figures(nn.Sequential(nn.Tanh()), [batch()]) == {}


def test_weights_that_are_no_numbers_have_no_figures() -> None:
    model = classifier()
    with torch.no_grad():
        model[2].weight.fill_(math.inf)
    found = fisher_figures(model, [batch()], representation="diagonal")["2"]
    assert not math.isfinite(found.trace)
    assert math.isnan(fisher_figures(model, [batch()], eigenvalues=3)["2"].top)
