"""FisherNaturalGradient: the step it documents, what it leaves alone, failing metrics, resuming, refusals, a GPT."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizer_cases import frozen, same_bits, through_disk
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.optim import FisherNaturalGradient, StiffnessAdamW, anneal
from fp8manifold.optim._combinations import is_valid
from fp8manifold.optim._fisher_metric import METRIC
from fp8manifold.optim._variant import MOMENTS, WRITEBACKS
from nanogpt_bench.model import SIZES, build_model

pytest.importorskip("nngeometry", reason="extra fisher")

REPRESENTATIONS = ("diagonal", "kfac", "ekfac")
EVERY = pytest.mark.parametrize("representation", REPRESENTATIONS)
STORAGES = ("plain", "grid", "fp8")
COMBINATIONS = [(w, m) for w in WRITEBACKS for m in MOMENTS if is_valid("FisherNaturalGradient", w, m)]


class Tagger(nn.Module):
    """Tokens (B, T) to one of five tags each: an embedding, two linear layers on 3-D activations, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.hidden = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.hidden(self.embedding(tokens)))))


def tagger(storage: str = "fp8", fmt: str = "E4M3", seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Tagger()
    return model if storage == "plain" else fm.quantize_model(model, fmt, storage=storage)  # type: ignore[arg-type]


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 13, (6, 9), generator=torch.Generator().manual_seed(seed))
    return tokens, (tokens * 7 + 1) % 5


def optimizer_of(model: nn.Module, loader: Any = None, **options: Any) -> FisherNaturalGradient:
    return FisherNaturalGradient(model.parameters(), model, loader or [batch(100)], **{"seed": 3, **options})


def put_gradients(model: nn.Module, seed: int = 0) -> float:
    tokens, tags = batch(seed)
    model.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tags.flatten())
    loss.backward()
    return loss.item()


def values(parameters: Iterable[Any]) -> list[Tensor]:
    """What is stored: codes, or floats."""
    return [(p.codes if isinstance(p, fm.FP8Tensor) else p.detach().as_subclass(Tensor)).clone() for p in parameters]


def snapshot(optimizer: Any) -> dict[str, Any]:
    """Everything a step may change, as bytes."""
    parameters = values(p for group in optimizer.param_groups for p in group["params"])
    return {"parameters": frozen(parameters), "state": frozen(optimizer.state_dict())}


def train(model: nn.Module, optimizer: Any, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        put_gradients(model, step)
        optimizer.step()


def counting(loader: Any) -> tuple[list[int], Any]:
    """A loader that notes the steps at which it is asked for batches."""
    asked: list[int] = []

    def batches(step: int) -> Any:
        asked.append(step)
        return loader

    return asked, batches


def stretch_of(weight: Any, low: float, high: float) -> Tensor:
    """``S / S_ref`` written out."""
    scale = weight.expanded_scale() if isinstance(weight, fm.FP8Tensor) else weight.manifold.scale
    x = weight.dequantize() if isinstance(weight, fm.FP8Tensor) else weight.detach().as_subclass(Tensor)
    stiffness = fm.ulp(x / scale, "E4M3") * scale
    return (stiffness / stiffness.mean()).clamp(low, high)


# The step


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


@EVERY
def test_step_descends(representation: str) -> None:
    model = tagger("plain")
    optimizer = optimizer_of(model, representation=representation, momentum=0.0)
    put_gradients(model)
    before = values([model.hidden.weight, model.head.weight])
    optimizer.step()
    for weight, old in zip((model.hidden.weight, model.head.weight), before, strict=True):
        assert (weight.grad * (weight.detach() - old)).sum() < 0


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
    weight, group, references = model.hidden.weight, optimizer.param_groups[0], []
    for step in range(6):
        put_gradients(model, step)
        optimizer._check_schedules(optimizer._taken())
        stretch = optimizer._stretch(group, weight)
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


def test_maximize_ascends_by_the_same_step() -> None:
    moved = []
    for maximize in (False, True):
        model = tagger("plain")
        before = values(model.parameters())
        train(model, optimizer_of(model, maximize=maximize), 1)
        moved.append([new - old for new, old in zip(values(model.parameters()), before, strict=True)])
    for down, up in zip(*moved, strict=True):
        torch.testing.assert_close(down, -up, rtol=1e-3, atol=1e-6)


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


def test_gradients_generators_and_the_model_stay_as_they_are() -> None:
    model = tagger()
    model.insert = nn.Dropout(0.5)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch()), 2, shuffle=True)
    optimizer = optimizer_of(model, loader, refresh=1)
    put_gradients(model)
    gradients, state = values([p.grad for p in model.parameters()]), torch.get_rng_state()
    optimizer.step()
    assert same_bits(gradients, [p.grad for p in model.parameters()])
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert model.insert.training


def test_result_does_not_depend_on_the_global_generator() -> None:
    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = tagger()
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch()), 2, shuffle=True)
        train(model, optimizer_of(model, loader, refresh=2), 4)
        results.append(values(model.parameters()))
    assert same_bits(*results)


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
        assert METRIC & optimizer.state[model.head.weight].keys() == names


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
    after["state"]["skipped_steps"] = 0
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


def test_failing_refresh_keeps_the_metric_that_was() -> None:
    model = tagger("plain")
    good = [batch()]
    optimizer = optimizer_of(model, lambda step: good if step == 0 else [(torch.tensor([[1]]), None)], refresh=1)
    train(model, optimizer, 1)
    for group in optimizer.param_groups:
        group["damping"] = 0.0
        group["decay"] = 0.0
    before = frozen(optimizer.state_dict()["state"])
    put_gradients(model, 1)
    with pytest.warns(RuntimeWarning, match="not positive definite"):
        optimizer.step()
    assert frozen(optimizer.state_dict()["state"]) == before


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
    after["state"]["skipped_steps"] = 0
    assert after == before


def test_zero_gradients_move_nothing() -> None:
    model = tagger("plain")
    optimizer = optimizer_of(model)
    put_gradients(model)
    for p in model.parameters():
        p.grad.zero_()
    before = values(model.parameters())
    optimizer.step()
    assert same_bits(before, values(model.parameters()))


# Resuming


def resumes(storage: str, steps: int, **options: Any) -> None:
    """After every step a checkpoint, loaded elsewhere, takes the next step as the run itself does."""
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


@pytest.mark.parametrize(("writeback", "moments"), COMBINATIONS)
def test_resume_is_bit_exact_after_every_step(writeback: str, moments: str) -> None:
    resumes("fp8", 50, writeback=writeback, moments=moments, refresh=6, reset_every=17)


@EVERY
@pytest.mark.parametrize("storage", STORAGES)
def test_resume_is_bit_exact_for_every_representation(representation: str, storage: str) -> None:
    resumes(storage, 15, representation=representation, refresh=4, weight_decay=0.1)


def test_state_of_another_optimizer_is_refused() -> None:
    model = tagger()
    other = StiffnessAdamW(model.parameters())
    with pytest.raises(ValueError, match="FisherNaturalGradient"):
        optimizer_of(model).load_state_dict(other.state_dict())


# Learning


@EVERY
@pytest.mark.parametrize("storage", STORAGES)
def test_learns(representation: str, storage: str) -> None:
    model = tagger(storage)
    optimizer = optimizer_of(model, lr=0.03, representation=representation)
    first = put_gradients(model)
    train(model, optimizer, 80)
    assert first > 1.4
    assert put_gradients(model) < 0.35


@EVERY
def test_smallest_gpt_learns_in_one_byte_a_weight(representation: str) -> None:
    model = fm.quantize_model(build_model(SIZES["0.8M"], seed=0), "E4M3", storage="fp8")
    text = torch.randint(0, 257, (2, 32), generator=torch.Generator().manual_seed(0))
    optimizer = FisherNaturalGradient(
        model.parameters(), model, [text], lr=2e-3, representation=representation, refresh=4, compile=False
    )
    losses = []
    for _ in range(9):
        model.zero_grad()
        loss = model.loss(text, text.roll(-1, 1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    natural = {name for name, p in model.named_parameters() if "momentum_buffer" in optimizer.state[p]}
    assert natural == {name for name, p in model.named_parameters() if isinstance(p, fm.FP8Tensor)}
    assert len(natural) == 17
    assert losses[0] > 5.3
    assert losses[-1] < losses[0] - 1.0
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize("fmt", ["E7M0", "E1M6", "E5M2"])
def test_learns_in_every_format_and_granularity(fmt: str, granularity: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(13, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))
    fm.quantize_model(model, fm.LayerSpec(fmt, granularity=granularity), storage="fp8")  # type: ignore[arg-type]
    optimizer = optimizer_of(model, lr=0.01, representation="diagonal")
    first = put_gradients(model)
    train(model, optimizer, 40)
    assert put_gradients(model) < 0.6 * first
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_learns_in_other_dtypes(dtype: torch.dtype) -> None:
    model = tagger("plain").to(dtype)
    optimizer = optimizer_of(model, lr=0.02)
    first = put_gradients(model)
    train(model, optimizer, 40)
    assert put_gradients(model) < 0.7 * first
    metric = optimizer.state[model.head.weight]
    assert {metric[name].dtype for name in ("inverse_inputs", "fisher_outputs")} == {torch.float32}
    assert metric["momentum_buffer"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_compiled_step_has_the_bits_of_the_eager_one(cpp_compiler: None) -> None:
    results = []
    for compiled in (False, True):
        model = tagger()
        train(model, optimizer_of(model, compile=compiled, refresh=2), 4)
        results.append(values(model.parameters()))
    assert same_bits(*results)


# Refusals


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"representation": "kfak"}, ValueError, r"representation='kfak' is unknown.*did you mean 'kfac'"),
        ({"refresh": 0}, ValueError, "refresh=0 is out of range"),
        ({"refresh": 2.0}, TypeError, "refresh=2.0 must be an int"),
        ({"damping": -0.1}, ValueError, "damping=-0.1 is out of range"),
        ({"damping": "much"}, TypeError, "damping='much' must be a number"),
        ({"floor": 2.0}, ValueError, "floor=2.0 is out of range"),
        ({"momentum": 1.0}, ValueError, "momentum=1.0 is out of range"),
        ({"decay": 1.0}, ValueError, "decay=1.0 is out of range"),
        ({"batches": 0}, ValueError, "batches=0"),
        ({"samples": 0}, ValueError, "samples=0"),
        ({"max_features": 0}, ValueError, "max_features=0"),
        ({"normalize": 1}, TypeError, "normalize=1 must be True or False"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\]=1.0"),
        ({"momentum": 0.0, "moments": "8bit"}, ValueError, "needs momentum > 0"),
        ({"momentum": 0.0, "writeback": "momentum"}, ValueError, "needs momentum > 0"),
        ({"writeback": "momentum", "moments": "8bit"}, ValueError, "does not go with"),
        ({"fused": True}, ValueError, "fused=True is not supported"),
        ({"refresch": 3}, TypeError, "unexpected keyword argument 'refresch'"),
        ({"logits": 3}, TypeError, "logits must be a function"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        optimizer_of(tagger(), **options)


def test_bad_sources() -> None:
    model = tagger()
    with pytest.raises(TypeError, match=r"model must be an nn\.Module"):
        FisherNaturalGradient(model.parameters(), "model", [batch()])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="used up after one pass"):
        FisherNaturalGradient(model.parameters(), model, iter([batch()]))
    with pytest.raises(TypeError, match="loader must be iterable"):
        FisherNaturalGradient(model.parameters(), model, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="none of the parameters is the weight of a linear layer"):
        FisherNaturalGradient([model.norm.weight], model, [batch()])
    with pytest.raises(ValueError, match="none of the parameters"):
        FisherNaturalGradient(tagger().parameters(), model, [batch()])
    optimizer = FisherNaturalGradient(model.parameters(), model, lambda step: [])
    put_gradients(model)
    with pytest.raises(ValueError, match="gave no batch"):
        optimizer.step()
    optimizer.loader = [{"ids": batch()[0]}]
    with pytest.raises(TypeError, match="the loader gave a dict, not tensors: say with logits="):
        optimizer.step()


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nngeometry", None)
    with pytest.raises(ImportError, match=r"pip install 'fp8manifold\[fisher\]'"):
        optimizer_of(tagger())


def test_logits_may_be_computed_in_another_way() -> None:
    model = tagger()
    optimizer = optimizer_of(model, [{"ids": batch()[0]}], logits=lambda m, b: m(b["ids"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 2)
    assert optimizer.skipped_steps == 0
