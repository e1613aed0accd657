"""The Fisher metric of linear layers against brute force: representations and definiteness."""

from typing import Any

import pytest
import torch
from fisher_metric_cases import (
    EVERY,
    classifier,
    dense_solution,
    gradients_by_token,
    labels_of,
    layers_of,
    mean_eigenvalue,
    measured,
    normal,
    rows_of,
    small_gpt,
    stretches_of,
    tokens,
)
from torch import Tensor, nn

from fp8manifold.optim._fisher.nngeometry import check_definite, natural_gradient, rank_one

pytest.importorskip("nngeometry", reason="extra fisher")


# Representations


def test_diagonal_is_the_mean_square_of_gradients_taken_one_by_one() -> None:
    model, batches = classifier(), [normal(9, 6, seed=1), normal(14, 6, seed=2)]
    layers = layers_of(model)
    found = measured("diagonal", model, layers, batches, samples=2)
    for layer, metric in zip(layers, found, strict=True):
        alone = [
            gradients_by_token(model, layer.module.weight, batch, labels_of(model, batch, 2 * i + sample))
            for i, batch in enumerate(batches)
            for sample in range(2)
        ]
        expected = torch.cat(alone).square().mean(0)
        torch.testing.assert_close(metric["fisher_diagonal"], expected)
        assert metric["fisher_damping"] == pytest.approx(0.1 * expected.mean().item())


def test_diagonal_approaches_the_exact_fisher_of_the_model() -> None:
    model, batch = classifier(), normal(20, 6)
    layers = layers_of(model)
    found = measured("diagonal", model, layers, [batch], samples=400)
    probabilities = model(batch).softmax(-1).detach()
    for layer, metric in zip(layers, found, strict=True):
        exact = sum(
            (gradients_by_token(model, layer.module.weight, batch, torch.full((20,), label)) ** 2)
            .mul(probabilities[:, label, None, None])
            .mean(0)
            for label in range(4)
        )
        assert ((metric["fisher_diagonal"] - exact).abs().sum() / exact.sum()).item() < 0.05


@pytest.mark.parametrize("build", [classifier, small_gpt])
def test_kfac_is_two_covariances(build: Any) -> None:
    model = build()
    batch = normal(30, 6) if build is classifier else tokens()
    layers = layers_of(model)
    found = measured("kfac", model, layers, [batch], damping=0.25, decay=0.5)
    for layer, metric in zip(layers, found, strict=True):
        x, y = rows_of(model, layer.module, batch)
        inputs, outputs = x.T @ x / len(x), y.T @ y / len(y)
        torch.testing.assert_close(metric["fisher_inputs"], inputs)
        torch.testing.assert_close(metric["fisher_outputs"], outputs)
        for factor, inverse in ((inputs, metric["inverse_inputs"]), (outputs, metric["inverse_outputs"])):
            damped = factor.double() + 0.5 * mean_eigenvalue(factor) * torch.eye(len(factor))
            torch.testing.assert_close(inverse, damped.inverse().float(), rtol=1e-3, atol=1e-3 * inverse.max().item())


def test_diagonal_step_is_damped_in_the_stiffness_metric() -> None:
    """``T (T F T + c)^-1 T g = (F + c T^-2)^-1 g``."""
    model, batch = classifier(), normal(30, 6)
    layers = layers_of(model, stretches_of(model))
    for layer, metric in zip(layers, measured("diagonal", model, layers, [batch], damping=0.3), strict=True):
        gradient = normal(*layer.module.weight.shape, seed=9)
        fisher, t = metric["fisher_diagonal"].double(), layer.stretch.double()
        added = 0.3 * (fisher * t * t).mean()
        ours = natural_gradient("diagonal", metric, gradient, layer.stretch)
        torch.testing.assert_close(ours.double(), gradient / (fisher + added / t**2), rtol=1e-5, atol=0)


@pytest.mark.parametrize("product", [True, False])
@pytest.mark.parametrize("representation", ["kfac", "ekfac"])
def test_kronecker_steps_solve_the_dense_system(representation: str, product: bool) -> None:
    """``T`` is the outer product nearest to the stretch; where the stretch is one, nothing is approximated."""
    model, batch = classifier(), normal(50, 6)
    layers = layers_of(model, stretches_of(model, product=product))
    for layer, metric in zip(layers, measured(representation, model, layers, [batch], damping=0.2), strict=True):
        c, r = rank_one(layer.stretch)
        assert torch.allclose(torch.outer(r, c), layer.stretch) == product
        x, y = rows_of(model, layer.module, batch)
        x, y = (x * c).double(), (y * r).double()
        inputs, outputs = x.T @ x / len(x), y.T @ y / len(y)
        if representation == "kfac":
            damped = [f + 0.2**0.5 * mean_eigenvalue(f) * torch.eye(len(f)) for f in (outputs, inputs)]
            dense = torch.kron(*damped)
        else:
            basis = torch.kron(torch.linalg.eigh(outputs)[1], torch.linalg.eigh(inputs)[1])
            each = (y[:, :, None] * x[:, None]).flatten(1) @ basis
            values = each.square().mean(0)
            dense = basis @ torch.diag(values + 0.2 * values.mean()) @ basis.T
        gradient = normal(*layer.module.weight.shape, seed=9)
        expected = dense_solution(dense, torch.outer(r, c), gradient)
        ours = natural_gradient(representation, metric, gradient)
        torch.testing.assert_close(ours.double(), expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
        assert (gradient * ours).sum() > 0


def test_rank_one_is_the_least_squares_fit_of_the_logarithm() -> None:
    stretch = stretches_of(classifier())[0]
    c, r = rank_one(stretch)
    design = torch.cat([torch.eye(5).repeat_interleave(6, 0), torch.eye(6).repeat(5, 1)], 1)
    fit = design @ torch.linalg.lstsq(design, stretch.log2().flatten()[:, None], driver="gelsd").solution
    torch.testing.assert_close(torch.outer(r, c).log2().flatten(), fit[:, 0], atol=1e-4, rtol=1e-4)


@EVERY
def test_earlier_measurements_count_with_their_decay(representation: str) -> None:
    model = classifier()
    layers = layers_of(model)
    names = {"diagonal": ("fisher_diagonal",)}.get(representation, ("fisher_inputs", "fisher_outputs"))

    def found(batch: Tensor, earlier: list[Any]) -> list[Any]:
        again = [x._replace(earlier=e) for x, e in zip(layers, earlier, strict=True)]
        return measured(representation, model, again, [batch], decay=0.75)

    first, fresh = found(normal(30, 6, seed=1), [{}, {}]), found(normal(30, 6, seed=2), [{}, {}])
    both = found(normal(30, 6, seed=2), first)
    for a, b, mean in zip(first, fresh, both, strict=True):
        for name in names:
            torch.testing.assert_close(mean[name], 0.75 * a[name] + 0.25 * b[name])


# Definiteness


@EVERY
def test_a_singular_metric_without_damping_is_refused(representation: str) -> None:
    """Three tokens span three directions of six: without damping nothing can be inverted."""
    model = classifier()
    layers = layers_of(model)
    batch = normal(3, 6)
    if representation == "diagonal":
        batch[:, 2] = 0  # an input that is never there
    with pytest.raises(FloatingPointError, match=r"layer '0'.*not positive definite.*raise damping"):
        measured(representation, model, layers, [batch], damping=0.0)
    measured(representation, model, layers, [batch], damping=0.01)


@EVERY
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e30])
def test_dead_and_overflowing_layers_are_refused_whatever_the_damping(representation: str, value: float) -> None:
    model = classifier()
    layers = layers_of(model)[:1]
    batch = torch.full((8, 6), value)
    with pytest.raises(FloatingPointError, match="layer '0'"):
        measured(representation, model, layers, [batch], damping=1.0)


def test_a_layer_that_the_batches_do_not_reach_is_refused() -> None:
    model = classifier()
    model.add_module("spare", nn.Linear(4, 4))
    layers = layers_of(model)
    with pytest.raises(FloatingPointError, match=r"layer 'spare' was not reached"):
        measured("kfac", model, layers, [normal(5, 6)], logits=lambda m, b: m[:3](b))


def test_definiteness_has_a_margin() -> None:
    check_definite("it", torch.eye(3), 0.0, 1.0)
    check_definite("it", torch.diag(torch.tensor([1.0, 1.0, 0.0])), 1e-6, 2 / 3)
    for matrix, added in ((torch.diag(torch.tensor([1.0, 1.0, 0.0])), 1e-8), (torch.tensor([[1.0, 2], [2, 1]]), 0.9)):
        with pytest.raises(FloatingPointError, match="not positive definite"):
            check_definite("it", matrix, added, 1.0)
