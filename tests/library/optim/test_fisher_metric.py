"""The Fisher metric of linear layers: what it is measured from, and its representations against brute force."""

import pytest
import torch
import torch.nn.functional as F
from laws import each
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.optim import FisherNaturalGradient
from fp8manifold.optim._fisher.nngeometry import (
    METRIC,
    NEEDED,
    Layer,
    call_model,
    check_definite,
    first_batches,
    likelihood,
    measure,
    natural_gradient,
    rank_one,
    sample_labels,
)
from nanogpt_bench.model.gpt import GPTShape, build_model

pytestmark = pytest.mark.extra("nngeometry")
EVERY = pytest.mark.parametrize("representation", NEEDED)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def classifier(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False))


def small_gpt(**options):
    return build_model(GPTShape(2, 2, 16, 8, vocab_size=31, **options), seed=1)


def tokens(rows=3, seed=0):
    return torch.randint(0, 31, (rows, 8), generator=torch.Generator().manual_seed(seed))


def layers_of(model, stretches=None):
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    stretches = stretches or [torch.ones_like(module.weight) for _, module in found]
    return [Layer(name, module, t, {}) for (name, module), t in zip(found, stretches, strict=True)]


def stretches_of(model, *, product=False):
    """Powers of two, as stiffness ratios are; ``product`` makes them an outer product."""
    fields = []
    for i, layer in enumerate(layers_of(model)):
        exponents = (normal(*layer.module.weight.shape, seed=i) * 1.5).round()
        fields.append(torch.exp2(exponents[:, :1] + exponents[:1] if product else exponents))
    return fields


def measured(representation, model, layers, batches, *, samples=1, logits=call_model, **options):
    def loss(index):
        return likelihood(logits(model, batches[index // samples]), seed=7, step=2, stream=index)

    options = {"damping": 0.1, "decay": 0.0, **options}
    return measure(model, layers, loss, len(batches) * samples, representation=representation, **options)


def rows_of(model, layer, batch):
    """Inputs and output gradients of a layer that is called once, with the labels that the measurement draws."""
    seen = {}

    def keep(_, inputs, output):
        seen["x"] = inputs[0].detach().flatten(0, -2)
        output.register_hook(lambda g: seen.update(y=g.flatten(0, -2)))

    hook = layer.register_forward_hook(keep)
    F.cross_entropy(model(batch).flatten(0, -2), labels_of(model, batch), reduction="sum").backward()
    hook.remove()
    return seen["x"], seen["y"]


def labels_of(model, batch, stream=0):
    return sample_labels(model(batch).flatten(0, -2).detach(), seed=7, step=2, stream=stream)


def gradients_by_token(model, weight, batch, labels):
    """Brute force: one backward pass for every token's log-likelihood."""
    chosen = F.log_softmax(model(batch).flatten(0, -2), -1).gather(1, labels[:, None])[:, 0]
    return torch.stack([torch.autograd.grad(value, weight, retain_graph=True)[0] for value in chosen])


def dense_solution(metric, stretch, gradient):
    t = stretch.double().flatten()
    solved = torch.linalg.solve(metric.double(), t * gradient.double().flatten())
    return (t * solved).view(gradient.shape)


def mean_eigenvalue(matrix):
    return matrix.double().diagonal().mean().item()


def selected(model, parameters, widest=4096):
    other = classifier()
    optimizer = FisherNaturalGradient(other.parameters(), other, [None])
    optimizer.model = model
    group = {"params": list(parameters), "representation": "kfac", "max_features": widest}
    return [name for name, _ in optimizer._layers(group).values()]


def test_selected_are_the_weights_that_belong_to_one_linear_layer_alone():
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
def test_factors_are_those_of_quantised_inputs_and_of_output_gradients(storage):
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
def test_every_call_of_a_layer_counts(representation):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 4)
            self.calls = []

        def forward(self, x):
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


def test_outputs_that_an_activation_overwrites_do_no_harm():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4))
    other = nn.Sequential(model[0], nn.ReLU(), model[2])
    ours, theirs = (measured("diagonal", m, layers_of(m), [normal(9, 6)]) for m in (model, other))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a["fisher_diagonal"], b["fisher_diagonal"])


def test_measuring_leaves_no_trace():
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


def test_batches_follow_the_key_and_not_the_global_generator():
    data = torch.utils.data.TensorDataset(torch.arange(40.0)[:, None])

    def order(step):
        loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
        return torch.cat([b[0] for b in first_batches(loader, 3, seed=5, step=step)]).flatten().tolist()

    first = order(0)
    torch.manual_seed(99)
    assert order(0) == first != order(1)
    assert first_batches(lambda step: [step, step + 1], 1, seed=0, step=6) == [6]
    assert first_batches([1, 2, 3], 2, seed=0, step=0) == [1, 2]


def test_labels_are_drawn_from_the_softmax_in_proportion():
    n, scores = 200_000, torch.tensor([1.0, -1.0, -torch.inf, 2.0, 0.0, -torch.inf])
    labels = sample_labels(scores.expand(n, -1), seed=3, step=1, stream=2)
    counts = torch.bincount(labels, minlength=6).double()
    expected = scores.double().softmax(0) * n
    assert counts[[2, 5]].tolist() == [0, 0]
    assert (((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum() < 16.3  # chi-square, 3 df, 0.1%


def test_labels_depend_on_their_key_alone():
    scores = normal(500, 11)
    first = sample_labels(scores, seed=3, step=1, stream=2)
    torch.manual_seed(1)
    assert torch.equal(sample_labels(scores, seed=3, step=1, stream=2), first)
    for key in ({"seed": 4}, {"step": 2}, {"stream": 3}):
        assert not torch.equal(sample_labels(scores, **{"seed": 3, "step": 1, "stream": 2} | key), first)


def test_the_smallest_draw_finds_no_label_of_probability_zero(monkeypatch):
    zeros = lambda n, **_: torch.zeros(n, dtype=torch.int32)  # noqa: E731
    monkeypatch.setattr("fp8manifold.optim._fisher.nngeometry.random_bits", zeros)
    assert sample_labels(torch.tensor([[-torch.inf, -torch.inf, 1.0]]), seed=0, step=0, stream=0).tolist() == [2]


def test_labels_of_a_large_vocabulary_are_drawn_part_by_part(monkeypatch):
    scores = normal(300, 5000) * 3
    whole = sample_labels(scores, seed=3, step=1, stream=2)
    monkeypatch.setattr("fp8manifold.optim._fisher.nngeometry._CHUNK", 7 * 5000)
    assert torch.equal(sample_labels(scores, seed=3, step=1, stream=2), whole)
    assert len(whole.unique()) > 150


@pytest.mark.parametrize("scores", [torch.zeros(5), torch.zeros(5, 1), torch.zeros(5, 3, dtype=torch.long), "text"])
def test_a_model_without_logits_is_refused(scores):
    model = classifier()
    with pytest.raises(ValueError, match=r"logits \(\.\.\., V\)"):
        measured("kfac", model, layers_of(model), [normal(3, 6)], logits=lambda *_: scores)
    assert not any(module._forward_hooks for module in model.modules())


def test_diagonal_is_the_mean_square_of_gradients_taken_one_by_one():
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


@pytest.mark.parametrize("product", [True, False])
@pytest.mark.parametrize("representation", ["kfac", "ekfac"])
def test_kronecker_steps_solve_the_dense_system(representation, product):
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


def test_rank_one_is_the_least_squares_fit_of_the_logarithm():
    stretch = stretches_of(classifier())[0]
    c, r = rank_one(stretch)
    design = torch.cat([torch.eye(5).repeat_interleave(6, 0), torch.eye(6).repeat(5, 1)], 1)
    fit = design @ torch.linalg.lstsq(design, stretch.log2().flatten()[:, None], driver="gelsd").solution
    torch.testing.assert_close(torch.outer(r, c).log2().flatten(), fit[:, 0], atol=1e-4, rtol=1e-4)


@EVERY
def test_earlier_measurements_count_with_their_decay(representation):
    model = classifier()
    layers = layers_of(model)
    names = {"diagonal": ("fisher_diagonal",)}.get(representation, ("fisher_inputs", "fisher_outputs"))

    def found(batch, earlier):
        again = [x._replace(earlier=e) for x, e in zip(layers, earlier, strict=True)]
        return measured(representation, model, again, [batch], decay=0.75)

    first, fresh = found(normal(30, 6, seed=1), [{}, {}]), found(normal(30, 6, seed=2), [{}, {}])
    both = found(normal(30, 6, seed=2), first)
    for a, b, mean in zip(first, fresh, both, strict=True):
        for name in names:
            torch.testing.assert_close(mean[name], 0.75 * a[name] + 0.25 * b[name])


@EVERY
@each("value", [0.0, float("nan"), float("inf"), 1e30])
def test_dead_and_overflowing_layers_are_refused_whatever_the_damping(representation, value):
    model = classifier()
    layers = layers_of(model)[:1]
    batch = torch.full((8, 6), value)
    with pytest.raises(FloatingPointError, match="layer '0'"):
        measured(representation, model, layers, [batch], damping=1.0)


def test_a_layer_that_the_batches_do_not_reach_is_refused():
    model = classifier()
    model.add_module("spare", nn.Linear(4, 4))
    layers = layers_of(model)
    with pytest.raises(FloatingPointError, match=r"layer 'spare' was not reached"):
        measured("kfac", model, layers, [normal(5, 6)], logits=lambda m, b: m[:3](b))


def test_definiteness_has_a_margin():
    check_definite("it", torch.eye(3), 0.0, 1.0)
    check_definite("it", torch.diag(torch.tensor([1.0, 1.0, 0.0])), 1e-6, 2 / 3)
    for matrix, added in ((torch.diag(torch.tensor([1.0, 1.0, 0.0])), 1e-8), (torch.tensor([[1.0, 2], [2, 1]]), 0.9)):
        with pytest.raises(FloatingPointError, match="not positive definite"):
            check_definite("it", matrix, added, 1.0)
