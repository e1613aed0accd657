"""FisherNaturalGradient: its step, when it measures, what fails, resuming, learning.

The measurement itself is compared with brute force: gradients one by one, and dense
systems solved.
"""

import copy
import itertools
import sys

import pytest
import torch
import torch.nn.functional as F
from optimizer_cases import frozen, normal, same_bits, snapshot, through_disk, value_of, values
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.optim import FisherNaturalGradient, StiffnessAdamW
from fp8manifold.optim._fisher import nngeometry
from nanogpt_bench.model.gpt import GPTShape, build_model

pytestmark = pytest.mark.extra("nngeometry")
every_representation = pytest.mark.parametrize("representation", nngeometry.ENTRY_OF_METRIC)
STORAGES = ("plain", "grid", "codes")


class Tagger(nn.Module):
    """Tokens (B, T) to tags: an embedding, two linear layers on 3-D activations, a norm."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.hidden = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(torch.tanh(self.hidden(self.embedding(tokens)))))


def tagger(storage="codes", fmt="E4M3", seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Tagger()
    return model if storage == "plain" else fm.quantize_model(model, fmt, storage=storage)


def batch(seed=0):
    tokens = torch.randint(0, 13, (6, 9), generator=torch.Generator().manual_seed(seed))
    return tokens, (tokens * 7 + 1) % 5


def optimizer_of(model, loader=None, **options):
    return FisherNaturalGradient(
        model.parameters(),
        model,
        loader or [batch(100)],
        **{"seed": 3, "stiffness": 1.0, **options},
    )


def put_gradients(model, seed=0):
    tokens, tags = batch(seed)
    model.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tags.flatten())
    loss.backward()
    return loss.item()


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        put_gradients(model, step)
        optimizer.step()


def counting(loader):
    """Return a list of steps, and a loader that appends the steps at which it is called."""
    steps = []

    def batches(step):
        steps.append(step)
        return loader

    return steps, batches


@pytest.mark.parametrize("bounds", [(2.0**-8, 16.0), (0.75, 1.5)])
@pytest.mark.parametrize("storage", STORAGES)
def test_step_is_the_damped_natural_one(storage, bounds):
    """``(F + c T^-2)^-1 g`` with ``T = S / S_ref``, rounded once, to nearest."""
    model = tagger(storage)
    weight = model.hidden.weight
    options = {
        "representation": "diagonal",
        "normalize": False,
        "momentum": 0.0,
        "writeback": "nearest",
        "floor": bounds[0],
        "clip": bounds[1],
    }
    optimizer = optimizer_of(model, lr=0.5, damping=0.3, **options)
    put_gradients(model)
    start, gradient, t = value_of(weight).clone(), weight.grad.clone(), torch.ones_like(weight.grad)
    if storage != "plain":
        scale = weight.expanded_scale() if storage == "codes" else weight.manifold.scale
        stiffness = fm.ulp(start / scale, "E4M3") * scale
        t = (stiffness / stiffness.mean()).clamp(*bounds)
    optimizer.step()
    fisher = optimizer.state[weight]["fisher_diagonal"]
    target = start - 0.5 * gradient / (fisher + 0.3 * (fisher * t * t).mean() / t**2)
    if storage == "plain":
        torch.testing.assert_close(weight.detach(), target)
        return
    target /= scale
    unclear = (
        fm.round_to_grid(target * 1.0001, "E4M3") != fm.round_to_grid(target * 0.9999, "E4M3")
    ).sum()
    assert unclear < 3
    assert (value_of(weight) / scale != fm.round_to_grid(target, "E4M3")).sum() <= unclear
    assert (value_of(weight) != start).float().mean() > 0.2


def test_direction_averages_and_decays():
    model = tagger("plain")
    optimizer = optimizer_of(model, lr=0.01, momentum=0.75, weight_decay=0.5)
    weight, buffer = model.head.weight, torch.zeros(5, 12)
    for step in range(1, 5):
        old_values = values([weight])[0]
        train(model, optimizer, 1, step)
        buffer_before, buffer = buffer, optimizer.state[weight]["momentum_buffer"].clone()
        direction = (buffer - 0.75 * buffer_before) / 0.25
        assert direction.square().mean().sqrt().item() == pytest.approx(1.0, rel=1e-4), step
        expected = old_values * (1 - 0.005) - 0.01 / (1 - 0.75**step) * buffer
        torch.testing.assert_close(values([weight])[0], expected)


@pytest.mark.parametrize("storage", STORAGES)
def test_other_parameters_take_the_step_of_stiffness_adamw(storage):
    """Bias, norm, embedding, and a linear layer that is too wide for its group."""
    model, twin = tagger(storage), tagger(storage)
    shared = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1, "seed": 3, "stiffness": 0.5}
    rest = [p for name, p in model.named_parameters() if name != "head.weight"]
    groups = [{"params": rest, "max_features": 11}, {"params": [model.head.weight]}]
    optimizer = FisherNaturalGradient(groups, model, [batch()], **shared)
    reference = StiffnessAdamW(twin.parameters(), **shared)
    for step in range(4):
        put_gradients(model, step)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad
        optimizer.step()
        reference.step()
        assert same_bits(values(model.parameters())[:-1], values(twin.parameters())[:-1]), step
    assert "exp_avg" in optimizer.state[model.hidden.weight]
    assert "momentum_buffer" in optimizer.state[model.head.weight]


def test_metric_is_measured_every_refresh_steps():
    model = tagger()
    measured_at, loader = counting([batch()])
    train(model, optimizer_of(model, loader, refresh=3), 8)
    assert measured_at == [0, 3, 6]


def test_labels_are_drawn_anew_at_every_refresh():
    model = tagger()
    optimizer = optimizer_of(model, lr=0.0, refresh=1, decay=0.0, representation="diagonal")
    diagonals = []
    for step in range(3):
        train(model, optimizer, 1, step)
        diagonals.append(optimizer.state[model.head.weight]["fisher_diagonal"])
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(diagonals))


def test_each_group_has_a_representation_and_another_takes_the_place_of_the_first():
    model = tagger()
    head, rest = model.head.weight, [p for p in model.parameters() if p is not model.head.weight]
    groups = [{"params": [head]}, {"params": rest, "samples": 3, "batches": 2}]
    optimizer = FisherNaturalGradient(groups, model, [batch(1), batch(2)], decay=0.0)

    def entries(weight):
        return {
            name for name in optimizer.state[weight] if name.startswith(nngeometry.METRIC_PREFIXES)
        }

    for step, (representation, names) in enumerate(
        {
            "kfac": {"inverse_inputs", "inverse_outputs"},
            "ekfac": {"basis_inputs", "basis_outputs", "eigenvalues", "fisher_damping"},
            "diagonal": {"fisher_diagonal", "fisher_damping"},
        }.items()
    ):
        optimizer.param_groups[0]["representation"] = representation
        train(model, optimizer, 1, step)
        assert entries(head) == names, (step, representation)
        assert entries(model.hidden.weight) == {"inverse_inputs", "inverse_outputs"}, (
            step,
            representation,
        )


@every_representation
def test_reset_forgets_what_was_measured(representation):
    model = tagger("plain")
    measured_at, loader = counting([batch()])
    optimizer = optimizer_of(
        model, loader, representation=representation, refresh=100, reset_every=4, decay=0.9
    )
    name = "fisher_diagonal" if representation == "diagonal" else "fisher_inputs"
    train(model, optimizer, 4)
    first = optimizer.state[model.head.weight][name].clone()
    fresh = copy.deepcopy(model)
    train(model, optimizer, 1, 4)
    assert measured_at == [0, 4]
    second = optimizer.state[model.head.weight][name]
    assert not torch.allclose(second, first, rtol=1e-3)
    # Inputs do not depend on the labels, whose key is the step.
    if representation != "diagonal":
        fresh_optimizer = optimizer_of(fresh, loader, representation=representation, decay=1e-9)
        train(fresh, fresh_optimizer, 1, 4)
        torch.testing.assert_close(second, fresh_optimizer.state[fresh.head.weight][name])
    buffer = optimizer.state[model.head.weight]["momentum_buffer"]
    assert buffer.square().mean().sqrt().item() == pytest.approx(0.1, rel=1e-4)


def test_parameters_that_join_later_are_measured_when_they_do():
    model = tagger()
    measured_at, loader = counting([batch()])
    optimizer = optimizer_of(model, loader, refresh=10)
    for step in range(3):
        put_gradients(model, step)
        if step < 2:
            model.head.weight.grad = None
        optimizer.step()
    assert measured_at == [0, 0]
    assert int(optimizer.state[model.head.weight]["step"]) == 1


@every_representation
def test_an_indefinite_metric_leaves_the_step_out_or_raises(representation):
    """Two tokens span two directions of eight: nothing to invert without damping."""
    model = tagger()
    if representation == "diagonal":
        model.embedding.weight.data[:, 3] = 0
    optimizer = optimizer_of(
        model, [(torch.tensor([[1, 2]]), None)], representation=representation, damping=0.0
    )
    put_gradients(model)
    old_state = snapshot(optimizer)
    with pytest.warns(
        RuntimeWarning, match=r"skipped a step: layer 'h.*not positive definite.*raise damping"
    ):
        optimizer.step()
    new_state = snapshot(optimizer)
    assert optimizer.skipped_steps == 1
    new_state["state"]["skipped_steps"] = new_state["state"]["skipped_in_row"] = 0
    assert new_state == old_state
    for group in optimizer.param_groups:
        group["on_nonfinite"] = "raise"
    with pytest.raises(FloatingPointError, match="not positive definite"):
        optimizer.step()
    assert snapshot(optimizer)["parameters"] == old_state["parameters"]
    for group in optimizer.param_groups:
        group["damping"] = 0.1
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert snapshot(optimizer)["parameters"] != old_state["parameters"]


@every_representation
@pytest.mark.parametrize("storage", STORAGES)
def test_resume_is_bit_exact_for_every_representation(representation, storage):
    options = {"representation": representation, "refresh": 4, "weight_decay": 0.1}
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(9)), 3, shuffle=True)
    model, resumed = tagger(storage), tagger(storage, seed=1)
    optimizer = optimizer_of(model, loader, **options)
    train(model, optimizer, 1)
    for step in range(1, 15):
        saved = through_disk({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        resumed.load_state_dict(saved["model"])
        again = optimizer_of(resumed, loader, **options)
        again.load_state_dict(saved["optimizer"])
        train(model, optimizer, 1, step)
        train(resumed, again, 1, step)
        assert same_bits(values(model.parameters()), values(resumed.parameters())), (
            f"after step {step}"
        )
        assert frozen(optimizer.state_dict()) == frozen(again.state_dict()), f"after step {step}"
    # safetensors keep no strides, on which the last bits of products depend.
    for state in optimizer.state.values():
        assert all(x.is_contiguous() for x in state.values() if isinstance(x, Tensor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_learns_in_other_dtypes(dtype):
    model = tagger("plain").to(dtype)
    optimizer = optimizer_of(model, lr=0.02)
    first = put_gradients(model)
    train(model, optimizer, 40)
    assert put_gradients(model) < 0.7 * first
    metric = optimizer.state[model.head.weight]
    assert {metric[name].dtype for name in ("inverse_inputs", "fisher_outputs")} == {torch.float32}
    assert metric["momentum_buffer"].dtype == (
        torch.float64 if dtype == torch.float64 else torch.float32
    )


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
    train(model, optimizer, 2)
    assert optimizer.skipped_steps == 0


def classifier(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False))


def layers_of(model, stretches=None):
    linear = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    stretches = stretches or [torch.ones_like(module.weight) for module in linear.values()]
    return [
        nngeometry.Layer(name, module, stretch, {})
        for (name, module), stretch in zip(linear.items(), stretches, strict=True)
    ]


def stretches_of(model, *, product=False):
    """Return powers of two, as stiffness ratios are, or outer products of such."""
    fields = []
    for i, layer in enumerate(layers_of(model)):
        exponents = (normal(*layer.module.weight.shape, seed=i) * 1.5).round()
        fields.append(torch.exp2(exponents[:, :1] + exponents[:1] if product else exponents))
    return fields


def measured(
    representation, model, layers, batches, *, samples=1, logits=nngeometry.call_model, **options
):
    def loss(index):
        return nngeometry.likelihood(
            logits(model, batches[index // samples]), seed=7, step=2, stream=index
        )

    options = {"damping": 0.1, "decay": 0.0, **options}
    return nngeometry.measure(
        model, layers, loss, len(batches) * samples, representation=representation, **options
    )


def rows_of(model, layer, batch):
    """Return inputs and output gradients of a layer that is called once.

    The loss has the labels that the measurement draws.
    """
    rows = {}

    def record(_, inputs, output):
        rows["x"] = inputs[0].detach().flatten(0, -2)
        output.register_hook(lambda g: rows.update(y=g.flatten(0, -2)))

    hook = layer.register_forward_hook(record)
    F.cross_entropy(
        model(batch).flatten(0, -2), labels_of(model, batch), reduction="sum"
    ).backward()
    hook.remove()
    return rows["x"], rows["y"]


def labels_of(model, batch, stream=0):
    return nngeometry.sample_labels(
        model(batch).flatten(0, -2).detach(), seed=7, step=2, stream=stream
    )


def gradients_by_token(model, weight, batch, labels):
    """Take one backward pass for the log-likelihood of every token."""
    scores = F.log_softmax(model(batch).flatten(0, -2), -1)
    likelihoods = scores.gather(1, labels[:, None])[:, 0]
    return torch.stack(
        [torch.autograd.grad(value, weight, retain_graph=True)[0] for value in likelihoods]
    )


def dense_solution(metric, stretch, gradient):
    t = stretch.double().flatten()
    solved = torch.linalg.solve(metric.double(), t * gradient.double().flatten())
    return (t * solved).view(gradient.shape)


def mean_eigenvalue(matrix):
    return matrix.double().diagonal().mean().item()


def selected(model, parameters, widest=4096):
    """Return the names of the layers whose metric is measured."""
    small = classifier()
    optimizer = FisherNaturalGradient(small.parameters(), small, [None])
    optimizer.model = model
    group = {"params": list(parameters), "representation": "kfac", "max_features": widest}
    return [name for name, _ in optimizer._layers(group).values()]


def test_selected_are_the_weights_that_belong_to_one_linear_layer_alone():
    model = build_model(GPTShape(2, 2, 16, 8, vocab_size=31, tie_weights=True), seed=1)
    names = selected(model, model.parameters())
    assert len(names) == 8
    assert "lm_head" not in names
    narrow = [name for name in names if max(model.get_submodule(name).weight.shape) <= 16]
    assert selected(model, model.parameters(), 16) == narrow
    assert not selected(model, [model.final_norm.weight])
    shared = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    shared[2].weight = nn.Parameter(torch.empty(0, 3))
    shared[1].weight = shared[0].weight
    assert not selected(shared, shared.parameters())


@pytest.mark.parametrize("storage", ["plain", "master", "grid", "codes"])
def test_factors_are_those_of_quantised_inputs_and_of_output_gradients(storage):
    model = build_model(GPTShape(2, 2, 16, 8, vocab_size=31, bias=True), seed=1)
    if storage != "plain":
        model = fm.quantize_model(model, fm.LayerSpec("E4M3", activation="E5M2"), storage=storage)
    model.eval()
    batch = torch.randint(0, 31, (3, 8), generator=torch.Generator().manual_seed(0))
    layers = layers_of(model)
    for layer, metric in zip(
        layers, measured("kfac", model, layers, [batch], decay=0.5), strict=True
    ):
        x, y = rows_of(model, layer.module, batch)
        x = x if storage == "plain" else layer.module.quantized_input(x)
        torch.testing.assert_close(metric["fisher_inputs"], x.T @ x / len(x))
        torch.testing.assert_close(metric["fisher_outputs"], y.T @ y / len(y), rtol=1e-4, atol=1e-7)


@every_representation
def test_every_call_of_a_layer_counts(representation):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 4)
            self.calls = []

        def forward(self, x):
            self.calls = []
            for _ in range(2):
                layer_input, x = x, self.inner(x)
                self.calls.append((layer_input.detach().clone(), x))
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
    expected = nn.Sequential(model[0], nn.ReLU(), model[2])
    metrics = [measured("diagonal", m, layers_of(m), [normal(9, 6)]) for m in (model, expected)]
    for index, (a, b) in enumerate(zip(*metrics, strict=True)):
        assert torch.equal(a["fisher_diagonal"], b["fisher_diagonal"]), index


@every_representation
def test_measuring_leaves_no_trace(representation):
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    model[2].eval()
    model[0].weight.grad = torch.ones(5, 6)
    old_state = {name: value.clone() for name, value in model.state_dict().items()}
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    layers = layers_of(model)
    batches = nngeometry.first_batches([normal(20, 6)], 1, seed=0, step=0)
    for metric in measured(representation, model, layers, batches, decay=0.5):
        assert not any(x.requires_grad for x in metric.values() if isinstance(x, Tensor))
        assert all(name.startswith(nngeometry.METRIC_PREFIXES) for name in metric)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, old_state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(5, 6))
    assert model[3].weight.grad is None
    assert not any(m._forward_hooks for m in model.modules())


def test_batches_follow_the_key_and_not_the_global_generator():
    data = torch.utils.data.TensorDataset(torch.arange(40.0)[:, None])

    def order(step):
        loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
        batches = nngeometry.first_batches(loader, 3, seed=5, step=step)
        return torch.cat([x for (x,) in batches]).flatten().tolist()

    first = order(0)
    torch.manual_seed(99)
    assert order(0) == first != order(1)
    assert nngeometry.first_batches(lambda step: [step, step + 1], 1, seed=0, step=6) == [6]
    assert nngeometry.first_batches([1, 2, 3], 2, seed=0, step=0) == [1, 2]


def test_labels_are_drawn_from_the_softmax_in_proportion():
    n, scores = 200_000, torch.tensor([1.0, -1.0, -torch.inf, 2.0, 0.0, -torch.inf])
    labels = nngeometry.sample_labels(scores.expand(n, -1), seed=3, step=1, stream=2)
    counts = torch.bincount(labels, minlength=6).double()
    expected = scores.double().softmax(0) * n
    assert counts[[2, 5]].tolist() == [0, 0]
    possible = expected > 0
    chi_square = ((counts - expected) ** 2 / expected)[possible].sum()
    assert chi_square < 16.3  # 3 degrees of freedom, 0.1%


def test_labels_depend_on_their_key_alone():
    scores = normal(500, 11)
    first = nngeometry.sample_labels(scores, seed=3, step=1, stream=2)
    torch.manual_seed(1)
    assert torch.equal(nngeometry.sample_labels(scores, seed=3, step=1, stream=2), first)


@pytest.mark.parametrize("change", [{"seed": 4}, {"step": 2}, {"stream": 3}], ids=str)
def test_another_key_has_other_labels(change):
    scores, key = normal(500, 11), {"seed": 3, "step": 1, "stream": 2}
    labels = nngeometry.sample_labels(scores, **key)
    assert not torch.equal(nngeometry.sample_labels(scores, **key | change), labels)


def test_the_smallest_draw_finds_no_label_of_probability_zero(monkeypatch):
    zeros = lambda n, **_: torch.zeros(n, dtype=torch.int32)  # noqa: E731
    monkeypatch.setattr("fp8manifold.optim._fisher.nngeometry.random_bits", zeros)
    assert nngeometry.sample_labels(
        torch.tensor([[-torch.inf, -torch.inf, 1.0]]), seed=0, step=0, stream=0
    ).tolist() == [2]


def test_labels_of_a_large_vocabulary_are_drawn_part_by_part(monkeypatch):
    scores = normal(300, 5000) * 3
    whole = nngeometry.sample_labels(scores, seed=3, step=1, stream=2)
    monkeypatch.setattr("fp8manifold.optim._fisher.nngeometry._LOGITS_AT_ONCE", 7 * 5000)
    assert torch.equal(nngeometry.sample_labels(scores, seed=3, step=1, stream=2), whole)
    assert len(whole.unique()) > 150


NO_LOGITS = {
    "a vector": torch.zeros(5),
    "one class": torch.zeros(5, 1),
    "integers": torch.zeros(5, 3, dtype=torch.long),
    "text": "text",
}


@pytest.mark.parametrize("scores", NO_LOGITS.values(), ids=NO_LOGITS)
def test_a_model_without_logits_is_refused(scores):
    model = classifier()
    with pytest.raises(ValueError, match=r"logits \(\.\.\., V\)"):
        measured("kfac", model, layers_of(model), [normal(3, 6)], logits=lambda *_: scores)
    assert not any(module._forward_hooks for module in model.modules())


def test_diagonal_is_the_mean_square_of_gradients_taken_one_by_one():
    model, batches = classifier(), [normal(9, 6, seed=1), normal(14, 6, seed=2)]
    layers = layers_of(model)
    metrics = measured("diagonal", model, layers, batches, samples=2)
    for layer, metric in zip(layers, metrics, strict=True):
        gradients = []
        for stream in range(4):
            batch = batches[stream // 2]
            labels = labels_of(model, batch, stream)
            gradients.append(gradients_by_token(model, layer.module.weight, batch, labels))
        expected = torch.cat(gradients).square().mean(0)
        torch.testing.assert_close(metric["fisher_diagonal"], expected)
        assert metric["fisher_damping"] == pytest.approx(0.1 * expected.mean().item())


@pytest.mark.parametrize("product", [True, False])
@pytest.mark.parametrize("representation", ["kfac", "ekfac"])
def test_kronecker_steps_solve_the_dense_system(representation, product):
    """``T`` is the outer product nearest to the stretch.

    Where the stretch is an outer product nothing is approximated.
    """
    model, batch = classifier(), normal(50, 6)
    layers = layers_of(model, stretches_of(model, product=product))
    metrics = measured(representation, model, layers, [batch], damping=0.2)
    for layer, metric in zip(layers, metrics, strict=True):
        c, r = nngeometry.rank_one(layer.stretch)
        assert torch.allclose(torch.outer(r, c), layer.stretch) == product
        x, y = rows_of(model, layer.module, batch)
        x, y = (x * c).double(), (y * r).double()
        inputs, outputs = x.T @ x / len(x), y.T @ y / len(y)
        if representation == "kfac":
            damped = [
                f + 0.2**0.5 * mean_eigenvalue(f) * torch.eye(len(f)) for f in (outputs, inputs)
            ]
            dense = torch.kron(*damped)
        else:
            basis = torch.kron(torch.linalg.eigh(outputs)[1], torch.linalg.eigh(inputs)[1])
            gradients = (y[:, :, None] * x[:, None]).flatten(1) @ basis
            values = gradients.square().mean(0)
            dense = basis @ torch.diag(values + 0.2 * values.mean()) @ basis.T
        gradient = normal(*layer.module.weight.shape, seed=9)
        expected = dense_solution(dense, torch.outer(r, c), gradient)
        natural = nngeometry.natural_gradient(representation, metric, gradient)
        torch.testing.assert_close(
            natural.double(), expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item()
        )
        assert (gradient * natural).sum() > 0


def test_rank_one_is_the_least_squares_fit_of_the_logarithm():
    stretch = stretches_of(classifier())[0]
    c, r = nngeometry.rank_one(stretch)
    design = torch.cat([torch.eye(5).repeat_interleave(6, 0), torch.eye(6).repeat(5, 1)], 1)
    fit = (
        design
        @ torch.linalg.lstsq(design, stretch.log2().flatten()[:, None], driver="gelsd").solution
    )
    torch.testing.assert_close(torch.outer(r, c).log2().flatten(), fit[:, 0], atol=1e-4, rtol=1e-4)


@every_representation
def test_earlier_measurements_count_with_their_decay(representation):
    model = classifier()
    layers = layers_of(model)
    names = ("fisher_inputs", "fisher_outputs")
    if representation == "diagonal":
        names = ("fisher_diagonal",)

    def metrics_of(seed, earlier):
        again = [x._replace(earlier=e) for x, e in zip(layers, earlier, strict=True)]
        return measured(representation, model, again, [normal(30, 6, seed=seed)], decay=0.75)

    first, second = metrics_of(1, [{}, {}]), metrics_of(2, [{}, {}])
    averaged = metrics_of(2, first)
    for a, b, mean in zip(first, second, averaged, strict=True):
        for name in names:
            torch.testing.assert_close(mean[name], 0.75 * a[name] + 0.25 * b[name])


@every_representation
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e30])
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
