"""quantize_model: which layers are replaced, what the new ones compute, and that a refusal leaves the model alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import geoopt
import pytest
import torch
import torch.nn.functional as F
from optimizer_cases import bits_of, normal, on_grid, through_disk
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import LayerSpec, QuantizedLinear, SaturationWarning, dequantize_model, quantize_model

storages = pytest.mark.parametrize("storage", ["master", "grid"])
FORMATS = ("E4M3", "E5M2", "E3M4", "E1M6", "E7M0")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.relu(self.qkv(x)[..., :8]))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(8), Attention()
        self.mlp = nn.ModuleDict({"fc": nn.Linear(8, 16), "out": nn.Linear(16, 8)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp["out"](F.relu(self.mlp["fc"](x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Twelve blocks, so that blocks.1 and blocks.11 may be confused."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.lm_head = nn.Linear(8, 10, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight
        for i, p in enumerate(self.parameters()):
            p.data = normal(*p.shape, seed=i, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)  # type: ignore[no-any-return]


TOKENS = torch.arange(10).view(2, 5)


def formats_of(model: nn.Module) -> dict[str, str]:
    return {
        name: module.weight_format.name
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear) and module.weight_format
    }


def everything(model: nn.Module) -> list[Any]:
    """Modules by identity and class, parameters and buffers by identity and bits."""
    modules = [(name, id(m), type(m)) for name, m in model.named_modules()]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [modules, [(name, id(t), type(t), bits_of(t)) for name, t in tensors]]


@contextmanager
def left_alone(model: nn.Module) -> Iterator[None]:
    before = everything(model)
    yield
    assert everything(model) == before


# -------------------------------------------------------------------------------------------------------- patterns
LINEARS = [f"blocks.{i}.{part}" for i in range(12) for part in ("attn.qkv", "attn.proj", "mlp.fc", "mlp.out")] + [
    "lm_head"
]


@storages
@pytest.mark.parametrize("formats", ["E4M3", fm.FloatFormat(4, 3), LayerSpec("E4M3"), {"*": "e4m3"}], ids=str)
def test_one_format_for_every_linear_layer(formats: Any, storage: Any) -> None:
    model = Model()
    assert quantize_model(model, formats, storage) is model
    assert formats_of(model) == dict.fromkeys(LINEARS, "E4M3")
    assert type(model.embedding) is nn.Embedding
    assert type(model.blocks[0].norm) is nn.LayerNorm


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("attn", lambda n: ".attn." in n),
        ("attn.qkv", lambda n: n.endswith("attn.qkv")),
        ("fc", lambda n: n.endswith(".fc")),
        ("blocks.1", lambda n: n.startswith("blocks.1.")),
        ("1", lambda n: n.startswith("blocks.1.")),
        ("blocks.1?", lambda n: n.startswith(("blocks.10.", "blocks.11."))),
        ("blocks.[0-2].mlp", lambda n: n[7:9] in ("0.", "1.", "2.") and ".mlp." in n),
        ("q*", lambda n: n.endswith("qkv")),
        ("blocks.*.out", lambda n: n.endswith("out")),
        ("lm_head", lambda n: n == "lm_head"),
        ("blocks.3.attn.proj", lambda n: n == "blocks.3.attn.proj"),
    ],
)
def test_a_pattern_is_a_glob_over_whole_dotted_parts(pattern: str, matches: Any) -> None:
    model = quantize_model(Model(), {pattern: "E4M3"})
    assert set(formats_of(model)) == {name for name in LINEARS if matches(name)}


def test_the_most_literal_pattern_wins_in_any_order() -> None:
    formats = {
        "blocks.0.attn.qkv": "E5M2",
        "*": "E4M3",
        "attn": "E3M4",
        "mlp": "none",
        "lm_head": None,
        "attn.*": "E1M6",
    }
    for items in (list(formats.items()), list(formats.items())[::-1]):
        got = formats_of(quantize_model(Model(), dict(items)))
        assert got["blocks.0.attn.qkv"] == "E5M2"
        assert got["blocks.0.attn.proj"] == got["blocks.5.attn.qkv"] == "E1M6"
        assert set(got) == {name for name in LINEARS if "attn" in name}


def test_of_two_as_specific_the_later_wins() -> None:
    assert set(formats_of(quantize_model(Model(), {"fc": "E4M3", "f?": "E3M4", "?c": "E5M2"})).values()) == {"E4M3"}
    assert set(formats_of(quantize_model(Model(), {"f?": "E3M4", "?c": "E5M2"})).values()) == {"E5M2"}


def test_specs_and_dicts() -> None:
    spec = LayerSpec("E4M3", activation="E5M2", granularity="tensor", policy="static", ste="clipped")
    as_dict = {"weight": "E4M3", "activation": "E5M2", "granularity": "tensor", "policy": "static", "ste": "clipped"}
    model = quantize_model(Model(), {"attn": spec, "mlp": as_dict})
    assert model.blocks[0].attn.qkv.spec == model.blocks[0].mlp["fc"].spec == spec
    model = quantize_model(Model(), {"fc": {"weight": "E4M3"}, "qkv": "E4M3"}, granularity="tensor")
    assert model.blocks[0].mlp["fc"].spec.granularity == model.blocks[0].attn.qkv.spec.granularity == "tensor"
    assert LayerSpec("none").quantizes_nothing
    assert LayerSpec(None, "NONE").quantizes_nothing


def test_activations_alone() -> None:
    layer = quantize_model(nn.Linear(8, 4), LayerSpec(activation="E4M3"))
    x = normal(3, 8)
    assert torch.equal(layer(x), F.linear(fm.fake_quantize(x, "E4M3"), layer.weight, layer.bias))
    assert layer.weight_scale().item() == 1.0
    assert torch.equal(layer.quantized_weight(), layer.weight)
    with pytest.raises(ValueError, match="not quantised"):
        layer.weight_codes()


@storages
def test_a_model_that_is_a_linear_layer(storage: Any) -> None:
    linear = nn.Linear(8, 4)
    layer = quantize_model(linear, "E4M3", storage)
    assert type(layer) is QuantizedLinear
    assert layer.bias is linear.bias
    back = dequantize_model(layer)
    assert type(back) is nn.Linear
    assert torch.equal(back.weight, layer.quantized_weight())


def test_subclasses_of_linear_are_left_as_they_are() -> None:
    """Their forward is their own; a pattern that names nothing else is an error rather than ignored."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "fc": nn.Linear(8, 8)})
    quantize_model(model, "E4M3")
    assert formats_of(model) == {"fc": "E4M3"}
    with left_alone(model), pytest.raises(ValueError, match="'out_proj' matches none"):
        quantize_model(model, {"out_proj": "E4M3"})


# -------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("formats", "error", "message"),
    [
        ({"atn": "E4M3"}, ValueError, "pattern 'atn' matches none of the 49 linear layers; did you mean 'attn'"),
        ({"*": "E4M3", "blocks.12": "E4M3"}, ValueError, "'blocks.12'"),
        ({"att": "E4M3"}, ValueError, "'att'"),
        ({"*": "E4M3", "embedding": "none"}, ValueError, "'embedding'"),
        ("E4M33", ValueError, "E4M33"),
        ({"attn": "E9M9"}, ValueError, "E9M9"),
        ({"attn": {"weights": "E4M3"}}, ValueError, "unknown key 'weights'.*did you mean 'weight'"),
        ({"attn": {"weight": "E4M3", "ste": "clip"}}, ValueError, "ste='clip'.*'clipped'"),
        ({"attn": {"weight": "E4M3", "policy": "delayed"}}, ValueError, "policy='delayed'"),
        ({"attn": 4}, TypeError, r"formats\['attn'\].*int"),
        ({4: "E4M3"}, TypeError, "key 4"),
        (["E4M3"], TypeError, "list"),
        ({}, ValueError, "empty"),
    ],
)
def test_bad_formats_are_refused_and_the_model_left_alone(formats: Any, error: type[Exception], message: str) -> None:
    model = Model()
    with left_alone(model), pytest.raises(error, match=message):
        quantize_model(model, formats, "grid")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"storage": "fp8x"}, ValueError, "storage='fp8x'"),
        ({"storage": "gird"}, ValueError, "did you mean 'grid'"),
        ({"granularity": "row"}, ValueError, "granularity='row'"),
        ({"rounding": "up"}, ValueError, "rounding='up'"),
        ({"headroom": 0.5}, ValueError, r"headroom=0\.5"),
        ({"headroom": 0.5, "storage": "master"}, ValueError, r"headroom=0\.5"),
        ({"headroom": "16"}, TypeError, "headroom='16'"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"seed": 1.0}, TypeError, r"seed=1\.0"),
    ],
)
def test_bad_options_are_refused_and_the_model_left_alone(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = Model()
    with left_alone(model), pytest.raises(error, match=message):
        quantize_model(model, "E4M3", **{"storage": "grid", **options})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused_before_anything_is_done(bad: float) -> None:
    """In the last layer of all: the others are not touched."""
    model = Model()
    model.lm_head.weight.data[3, 2] = bad
    with left_alone(model), pytest.raises(ValueError, match="NaN or Inf"):
        quantize_model(model, "E4M3", "grid")
    quantize_model(model, {"*": "E4M3", "lm_head": "none"}, "grid")
    assert len(formats_of(model)) == 48


@storages
def test_tied_weights_are_refused(storage: Any) -> None:
    model = Model(tied=True)
    with (
        left_alone(model),
        pytest.raises(ValueError, match=r"'lm_head' is shared \(embedding.weight, lm_head.weight\)"),
    ):
        quantize_model(model, "E4M3", storage)
    quantize_model(model, {"*": "E4M3", "lm_head": "none"}, storage)
    assert model.lm_head.weight is model.embedding.weight
    assert "lm_head" not in formats_of(model)


@storages
def test_a_layer_in_two_places_is_refused(storage: Any) -> None:
    """Replacing it in one would untie it silently."""
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    with left_alone(model), pytest.raises(ValueError, match="shared"):
        quantize_model(model, "E4M3", storage)


def test_what_is_quantised_already_is_refused_unless_left_alone() -> None:
    model = quantize_model(Model(), {"mlp": "E4M3"}, "grid")
    with left_alone(model), pytest.raises(ValueError, match=r"'blocks\.0\.mlp\.fc' is quantised already"):
        quantize_model(model, "E5M2", "grid")
    quantize_model(model, {"*": "E5M2", "mlp": "none"}, "grid")
    assert set(formats_of(model).values()) == {"E4M3", "E5M2"}


def test_other_things_than_models_are_refused() -> None:
    with pytest.raises(TypeError, match="dict"):
        quantize_model({}, "E4M3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Conv1d"):
        QuantizedLinear(nn.Conv1d(1, 1, 1), LayerSpec("E4M3"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="matches none of the 0 linear layers"):
        quantize_model(nn.Sequential(nn.ReLU()), "E4M3")


# ---------------------------------------------------------------------------------------------- what a layer computes
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("name", FORMATS)
def test_master_is_a_fake_quantised_weight(name: str, granularity: Any, bias: bool) -> None:
    linear = nn.Linear(16, 5, bias=bias)
    weight = linear.weight
    layer = quantize_model(linear, LayerSpec(name, granularity=granularity))
    assert layer.weight is weight
    x = normal(3, 16)
    expected = fm.fake_quantize(weight, name, granularity=granularity)
    assert torch.equal(layer(x), F.linear(x, expected, linear.bias))
    assert torch.equal(layer.quantized_weight(), expected)
    assert torch.equal(fm.decode(layer.weight_codes(), name) * layer.weight_scale(), expected)
    layer(x).sum().backward()
    assert torch.equal(weight.grad, x.sum(0).expand(5, 16))  # type: ignore[arg-type]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("name", FORMATS)
def test_grid_is_the_weight_itself(name: str, granularity: Any, bias: bool) -> None:
    """On the grid, at power-of-two scales with headroom 16, within half an ULP of the weight it was."""
    linear = nn.Linear(64, 5, bias=bias)
    linear.weight.data = normal(5, 64, std=0.1)
    before = linear.weight.detach().clone()
    layer = quantize_model(linear, LayerSpec(name, granularity=granularity), "grid")
    scale, fmt = layer.weight_scale(), fm.FloatFormat.from_string(name)
    assert isinstance(layer.weight, geoopt.ManifoldParameter)
    assert layer.weight.manifold is layer.manifold
    assert on_grid(layer.weight)
    assert scale.shape == ((5, 1) if granularity == "channel" else ())
    assert (torch.frexp(scale).mantissa == 0.5).all()
    amax = before.abs().amax(1, keepdim=True) if granularity == "channel" else before.abs().amax()
    assert (16 * amax <= scale * fmt.max).all()
    assert ((layer.weight - before).abs() <= fm.ulp(before / scale, fmt) * scale / 2).all()
    x = normal(3, 64)
    assert torch.equal(layer(x), F.linear(x, layer.weight.detach().as_subclass(Tensor), linear.bias))
    assert torch.equal(fm.decode(layer.weight_codes(), fmt) * scale, layer.weight.detach().as_subclass(Tensor))
    layer(x).sum().backward()
    assert torch.allclose(layer.weight.grad, x.sum(0).expand(5, 64))


@storages
def test_activations_are_quantised_too(storage: Any) -> None:
    layer = quantize_model(nn.Linear(8, 4), LayerSpec("E4M3", activation="E5M2"), storage)
    x = normal(3, 8, std=5.0).requires_grad_()
    expected = F.linear(fm.fake_quantize(x, "E5M2"), layer.quantized_weight(), layer.bias)
    assert torch.equal(layer(x), expected)
    assert layer.activation_scaler.value.item() == pytest.approx(x.abs().max().item() / 57344, rel=1e-6)
    layer(x).sum().backward()
    assert torch.allclose(x.grad, layer.quantized_weight().detach().sum(0).expand(3, 8))  # type: ignore[arg-type]


def test_static_scales_are_frozen_after_the_first_forward() -> None:
    layer = quantize_model(nn.Linear(8, 4), LayerSpec("E4M3", activation="E4M3", policy="static"))
    x = normal(3, 8)
    layer(x)
    scales = [layer.weight_scale().clone(), layer.activation_scaler.value.clone()]
    layer(x / 2)
    assert torch.equal(layer.weight_scale(), scales[0])
    assert torch.equal(layer.activation_scaler.value, scales[1])
    with pytest.warns(SaturationWarning, match="4 times"):
        layer(x * 4)
    layer.weight.data *= 3
    with pytest.warns(SaturationWarning, match="3 times"):
        layer(x)


@storages
def test_gradients_flow_to_what_they_did_before(storage: Any) -> None:
    """requires_grad, training mode and dtype are kept."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    model[0].weight.requires_grad_(False)
    quantize_model(model, "E4M3", storage)
    assert not model[0].training
    model(torch.ones(1, 4)).sum().backward()
    assert model[0].weight.grad is None
    assert model[1].weight.grad is not None
    assert quantize_model(nn.Linear(4, 4, dtype=torch.float64), "E4M3", storage).weight.dtype == torch.float64


@storages
def test_the_models_own_code_runs_unchanged(storage: Any) -> None:
    """Close to the float model with fine formats, differentiable to the embedding."""
    model = Model()
    expected = model(TOKENS)
    quantize_model(model, {"*": "E4M3", "lm_head": "none"}, storage)
    logits = model(TOKENS)
    error = (logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 0 < error < 0.2
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(TOKENS).dtype == torch.bfloat16


def test_every_manifold_has_a_seed_of_its_own() -> None:
    model = quantize_model(Model(), "E4M3", "grid", seed=3)
    manifolds = [m.manifold for m in model.modules() if isinstance(m, QuantizedLinear)]
    assert len({int(m.seed_word) for m in manifolds}) == 49
    assert {m.rounding for m in manifolds} == {"stochastic"}
    other = quantize_model(Model(), "E4M3", "grid", seed=4, rounding="nearest")
    seeds = {int(m.manifold.seed_word) for m in other.modules() if isinstance(m, QuantizedLinear)}
    assert not seeds & {int(m.seed_word) for m in manifolds}


# --------------------------------------------------------------------------------------------- copies, files, and back
@storages
def test_state_dict_round_trip(storage: Any) -> None:
    """Into a model with other weights, so other scales: weights, scales and counters come from the file."""
    first, second = Model(), Model()
    for p in second.parameters():
        p.data *= 3.7
    formats = {"*": LayerSpec("E4M3", policy="static"), "lm_head": "E7M0"}
    for model in (first, second):
        quantize_model(model, formats, storage)
    expected = first(TOKENS)
    second.load_state_dict(through_disk(first.state_dict()))
    assert torch.equal(second(TOKENS), expected)
    assert torch.equal(second.lm_head.weight_scale(), first.lm_head.weight_scale())
    if storage == "grid":
        assert all(on_grid(m.weight) for m in second.modules() if isinstance(m, QuantizedLinear))


def test_the_state_of_another_format_is_refused() -> None:
    model, other = quantize_model(Model(), "E4M3", "grid"), quantize_model(Model(), "E5M2", "grid")
    with pytest.raises(RuntimeError, match="E4M3, but this manifold is of E5M2"):
        other.load_state_dict(model.state_dict())


@storages
def test_a_deep_copy_is_independent(storage: Any) -> None:
    model = quantize_model(Model(), "E4M3", storage)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(TOKENS), model(TOKENS))
    layer, copied = model.lm_head, twin.lm_head
    if storage == "grid":
        assert copied.weight.manifold is copied.manifold
        assert copied.manifold is not layer.manifold
    with torch.no_grad():
        copied.weight.zero_()
    assert layer.weight.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_grid_survives_a_change_of_dtype(dtype: torch.dtype) -> None:
    """Values of 8 bits at power-of-two scales are exact in bfloat16."""
    layer = quantize_model(nn.Linear(8, 4), "E4M3", "grid")
    codes = layer.weight_codes()
    layer.to(dtype)
    assert layer.weight.dtype == dtype
    assert layer.weight.manifold is layer.manifold
    assert on_grid(layer.weight)
    assert torch.equal(layer.weight_codes(), codes)
    assert layer(torch.ones(1, 8, dtype=dtype)).dtype == dtype


@storages
def test_dequantize_puts_plain_layers_back(storage: Any) -> None:
    """With the quantised values as plain parameters: the function stays, bias and all."""
    model = quantize_model(Model(), {"*": "E4M3", "lm_head": "none"}, storage)
    model.blocks[0].attn.qkv.weight.requires_grad_(False)
    expected, biases = model(TOKENS), model.blocks[0].attn.qkv.bias
    assert dequantize_model(model) is model
    assert torch.equal(model(TOKENS), expected)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert list(linears) == LINEARS
    assert {type(m) for m in linears.values()} == {nn.Linear}
    assert {type(m.weight) for m in linears.values()} == {nn.Parameter}
    assert not linears["blocks.0.attn.qkv"].weight.requires_grad
    assert linears["blocks.0.attn.qkv"].bias is biases
    assert linears["blocks.0.attn.proj"].bias is None
    quantize_model(model, "E4M3", storage)
    fresh = Model()
    assert dequantize_model(fresh) is fresh


@storages
def test_repr_says_what_is_quantised(storage: Any) -> None:
    layer = quantize_model(nn.Linear(8, 4), LayerSpec("E4M3", activation="E5M2"), storage)
    assert f"weight=E4M3, activation=E5M2, storage={storage}" in repr(layer)


# -------------------------------------------------------------------------------------------------------- training
def trained_loss(storage: str, make: Any, steps: int = 150) -> tuple[float, float, nn.Module]:
    """A tiny regression, y = x0 x1 + x2: loss at the start and at the end."""
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    for i, p in enumerate(model.parameters()):
        p.data = normal(*p.shape, seed=i, std=0.3)
    quantize_model(model, "E4M3", storage)  # type: ignore[arg-type]
    optimizer = make(model.parameters())
    x = normal(256, 6, seed=99)
    y = x[:, :1] * x[:, 1:2] + x[:, 2:3]
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    return losses[0], sum(losses[-10:]) / 10, model


TRAINERS: dict[str, Any] = {
    "master-adamw": ("master", lambda p: torch.optim.AdamW(p, lr=0.01)),
    "grid-stiffness": ("grid", lambda p: fm.optim.StiffnessAdamW(p, lr=0.01)),
    "grid-anneal": ("grid", lambda p: fm.optim.StiffnessAdamW(p, lr=0.01, stiffness=fm.optim.anneal(1.0, 0.0, 150))),
    "grid-riemannian": ("grid", lambda p: fm.optim.RiemannianAdam(p, lr=0.5, float_lr=0.01)),
    "grid-wrapped": ("grid", lambda p: fm.optim.StiffnessWrapper(torch.optim.AdamW(p, lr=0.01), exponent=1.0)),
}


@pytest.mark.parametrize(("storage", "make"), TRAINERS.values(), ids=TRAINERS)
def test_a_small_network_learns(storage: str, make: Any) -> None:
    """To a fifth of the loss it began with, on weights of eight bits."""
    first, last, model = trained_loss(storage, make)
    assert last < 0.2 * first
    if storage == "grid":
        assert all(on_grid(m.weight) for m in model.modules() if isinstance(m, QuantizedLinear))


def test_nearest_rounding_stalls_where_stochastic_learns() -> None:
    """Steps a thousandth in size: what the library is about, in one comparison."""
    ends = {
        rule: trained_loss(
            "grid", lambda p, rule=rule: fm.optim.StiffnessAdamW(p, 1e-3, stiffness=0.0, writeback=rule)
        )[1]
        for rule in ("nearest", "stochastic")
    }
    assert ends["stochastic"] < 0.8 * ends["nearest"]
