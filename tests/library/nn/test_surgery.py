"""quantize_model: which layers are replaced and which are left, as patterns, ties,
adapters and the report say it.
"""

import inspect
import math
import re

import pytest
import torch
from optimizer_cases import bits_of
from surgery_models import LINEARS, Model, layers
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import (
    LayerSpec,
    QuantizedLinear,
    quantization_report,
    quantize_model,
)
from fp8manifold.files import check_formats


class Mixture(nn.Module):
    """A module that is one of transformers' mixtures by the names of its parts."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.mlp = nn.Module()
        for name in names:
            holder: nn.Module = self.mlp
            *owners, last = name.split(".")
            for owner in owners:
                if not hasattr(holder, owner):
                    holder.add_module(owner, nn.Module())
                holder = holder.get_submodule(owner)
            holder.add_module(last, nn.Linear(8, 8))


#: by model: names of linear layers, and how many of the first are quantised; the others are
#: routers
MIXTURES = {
    "Qwen2Moe": (["experts.0.up_proj", "gate", "shared_expert_gate"], 1),
    "Qwen3Next": (["shared_expert.gate_proj", "shared_expert_gate"], 1),
    "DeepSeek": (["shared_experts.up_proj", "gate"], 1),
    "Afmoe": (["experts.0.up_proj", "router.gate"], 1),
    "Dbrx": (["experts.w1", "router.layer"], 1),
    "Switch": (["experts.expert_0.wi", "router.classifier"], 1),
    "Doge": (["down_embed", "router_gate"], 1),
    "HunYuan": (["experts.0.up_proj", "gate.wg"], 1),
    "Zaya": (["experts.0.up_proj", "gate.router_mlp.fc1"], 1),
    "Gemma3n": (["prediction", "modality_router"], 1),
    "DFine": (["gateway.gate", "gateway.norm"], 2),
    "MiniMax": (["output_gate", "forget_gate.f_proj", "q_gate_proj"], 3),
    "xLSTM": (["igate_preact", "proj_up_gate", "gate_proj"], 3),
}


@pytest.mark.parametrize(("names", "linear_count"), MIXTURES.values(), ids=MIXTURES)
def test_routers_stay_in_float_unless_a_pattern_names_them(names, linear_count) -> None:
    model = quantize_model(Mixture(*names), "E4M3")
    assert [*formats_of(model)] == [f"mlp.{name}" for name in names[:linear_count]]
    layers = {f"mlp.{name}": (8, 8) for name in names}
    assert check_formats("E4M3", layers).keys() == formats_of(model).keys()
    details = {layer.name: layer.detail for layer in quantization_report(model).left}
    assert details.keys() == {f"mlp.{name}" for name in names[linear_count:]}
    assert all(why.startswith("a router: only a pattern that names it") for why in details.values())
    part = names[-1].split(".")[0]
    named = quantize_model(Mixture(*names), {"*": "E4M3", part: "E5M2"})
    assert formats_of(named)[f"mlp.{names[-1]}"] == "E5M2"
    by_glob = quantize_model(Mixture(*names), {"*": "E4M3", f"*{part}*": "E5M2"})
    assert formats_of(by_glob) == formats_of(named)


def test_a_pattern_of_routers_alone_is_refused() -> None:
    model = Mixture("router.layer", "experts.w1")
    with pytest.raises(ValueError, match=r"formats: pattern 'mlp\.\*\.layer' matches only routers"):
        quantize_model(model, {"mlp.*.layer": "E4M3"})
    model.mlp.gate = nn.ParameterDict({"weight": nn.Parameter(torch.ones(4, 8))})
    with pytest.raises(ValueError, match=r"parameters: .* such as 'gate'"):
        quantize_model(model, None, parameters={"*.weight": "E4M3", "experts": "none"})


def formats_of(model: nn.Module) -> dict[str, str]:
    return {
        name: module.weight_format.name
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear) and module.weight_format
    }


@pytest.mark.parametrize("storage", ["codes", "grid", "master"])
@pytest.mark.parametrize(
    "formats", ["E4M3", fm.FloatFormat(4, 3), LayerSpec("E4M3"), {"*": "e4m3"}]
)
def test_one_format_for_every_linear_layer(formats, storage) -> None:
    model = Model()
    assert quantize_model(model, formats, storage) is model
    assert formats_of(model) == dict.fromkeys(LINEARS, "E4M3")
    assert type(model.embedding) is nn.Embedding
    assert type(model.blocks[0].norm) is nn.LayerNorm


#: whether each pattern matches a name
PATTERNS = {
    "attn": lambda name: ".attn." in name,
    "attn.qkv": lambda name: name.endswith("attn.qkv"),
    "blocks.1": lambda name: name.startswith("blocks.1."),
    "1": lambda name: name.startswith("blocks.1."),
    "blocks.1?": lambda name: name.startswith(("blocks.10.", "blocks.11.")),
    "blocks.[0-2].mlp": lambda name: name[7:9] in ("0.", "1.", "2.") and ".mlp." in name,
    "q*": lambda name: name.endswith("qkv"),
    "blocks.*.out": lambda name: name.endswith("out"),
    "blocks.3.attn.proj": lambda name: name == "blocks.3.attn.proj",
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_a_glob_over_whole_dotted_parts(pattern) -> None:
    model = quantize_model(Model(), {pattern: "E4M3"})
    assert set(formats_of(model)) == set(filter(PATTERNS[pattern], LINEARS))


@pytest.mark.parametrize("reverse", [False, True])
def test_the_most_literal_pattern_wins_in_any_order(reverse) -> None:
    patterns = [
        ("blocks.0.attn.qkv", "E5M2"),
        ("*", "E4M3"),
        ("attn", "E3M4"),
        ("mlp", "none"),
        ("lm_head", None),
        ("attn.*", "E1M6"),
    ]
    if reverse:
        patterns.reverse()
    formats = formats_of(quantize_model(Model(), dict(patterns)))
    assert formats["blocks.0.attn.qkv"] == "E5M2"
    assert formats["blocks.0.attn.proj"] == formats["blocks.5.attn.qkv"] == "E1M6"
    assert set(formats) == {name for name in LINEARS if "attn" in name}


@pytest.mark.parametrize(
    ("patterns", "winner"),
    [
        ({"fc": "E4M3", "f?": "E3M4", "?c": "E5M2"}, "E4M3"),
        ({"f?": "E3M4", "?c": "E5M2"}, "E5M2"),
    ],
    ids=["the literal one", "the later one"],
)
def test_the_more_literal_pattern_wins_and_of_two_alike_the_later(patterns, winner) -> None:
    assert set(formats_of(quantize_model(Model(), patterns)).values()) == {winner}


@pytest.mark.parametrize("call", [quantize_model, check_formats, QuantizedLinear])
def test_one_byte_is_the_default_of(call) -> None:
    assert inspect.signature(call).parameters["storage"].default == "codes"


def test_a_spec_with_formats_for_the_passes_has_codes_and_trains() -> None:
    spec = LayerSpec("E4M3", activation="E4M3", gradient="E5M2", policy="delayed")
    model = quantize_model(Model(), spec)
    assert {layer.weight_codes().dtype for layer in layers(model)} == {torch.uint8}
    model(torch.zeros(1, 4, dtype=torch.long)).square().sum().backward()
    assert all(layer.weight.grad.isfinite().all() for layer in layers(model))


def test_a_mapping_means_the_spec_of_its_entries() -> None:
    spec = LayerSpec(
        "E4M3", activation="E5M2", granularity="tensor", policy="static", ste="clipped"
    )
    as_dict = {
        "weight": "E4M3",
        "activation": "E5M2",
        "granularity": "tensor",
        "policy": "static",
        "ste": "clipped",
    }
    model = quantize_model(Model(), {"attn": spec, "mlp": as_dict}, storage="master")
    assert model.blocks[0].attn.qkv.spec == model.blocks[0].mlp["fc"].spec == spec
    model = quantize_model(
        Model(), {"fc": {"weight": "E4M3"}, "qkv": "E4M3"}, granularity="tensor", storage="master"
    )
    assert (
        model.blocks[0].mlp["fc"].spec.granularity
        == model.blocks[0].attn.qkv.spec.granularity
        == "tensor"
    )
    assert LayerSpec("none").quantizes_nothing
    assert LayerSpec(None, "NONE").quantizes_nothing


@pytest.mark.parametrize("tied", ["refuse", "untie", "leave"])
@pytest.mark.parametrize(
    "formats",
    [
        "E4M3",
        {
            "*": "E4M3",
            "attn": "none",
            "blocks.1": "E5M2",
            "mlp.out": {"weight": "E3M4", "activation": "E5M2"},
        },
        {"attn": {"activation": "E4M3"}, "blocks.1.attn": {"weight": "none"}, "lm_head": "E4M3"},
        {"*": {"weight": "E4M3", "granularity": "block"}},
        {"*": "E4M3", "lm_head": {"weight": {"format": "E4M3", "rounding": "nearest"}}},
    ],
)
@pytest.mark.parametrize("storage", ["codes", "grid", "master"])
def test_what_is_allowed_is_known_without_a_model(storage, formats, tied) -> None:
    model = Model(tied=True)
    shared = {"lm_head": ("embedding.weight", "lm_head.weight")}
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    sizes = {name: (m.in_features, m.out_features) for name, m in linears.items()}
    try:
        quantize_model(model, formats, storage, tied=tied)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            check_formats(formats, sizes, storage, tied=tied, shared=shared)
        return
    specs = check_formats(formats, sizes, storage, tied=tied, shared=shared)
    assert specs == {
        name: m.spec for name, m in model.named_modules() if isinstance(m, QuantizedLinear)
    }
    again = quantize_model(Model(tied=True), specs, storage, tied=tied)
    assert [bits_of(p) for p in again.parameters()] == [bits_of(p) for p in model.parameters()]


@pytest.mark.parametrize("storage", ["master", "grid", "codes"])
def test_what_none_names_may_be_anything(storage) -> None:
    model = Model(tied=True)
    model.lm_head.weight.data[3, 2] = math.nan
    quantize_model(model, {"mlp": "E4M3"}, storage)
    quantize_model(model, {"*": "E5M2", "mlp": "none", "lm_head": "none"}, storage)
    assert model.lm_head.weight is model.embedding.weight
    assert set(formats_of(model)) == {*LINEARS} - {"lm_head"}
    assert set(formats_of(model).values()) == {"E4M3", "E5M2"}


@pytest.mark.parametrize(
    ("storage", "kind"), [("codes", fm.FP8Parameter), ("master", nn.Parameter)]
)
def test_a_tied_head_is_untied(storage, kind) -> None:
    model = quantize_model(Model(tied=True), "E4M3", storage, tied="untie")
    assert model.lm_head.weight is not model.embedding.weight
    assert (type(model.lm_head.weight), type(model.embedding.weight)) == (kind, nn.Parameter)
    if storage == "master":
        assert torch.equal(model.lm_head.weight, model.embedding.weight)


def test_a_tied_head_is_left() -> None:
    model = quantize_model(Model(tied=True), "E4M3", tied="leave")
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.embedding.weight


class Negative(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return -super().forward(input)


def mixed_net() -> nn.ModuleDict:
    """Return a module with layers that are quantised and some of each kind that is not."""
    net = nn.ModuleDict(
        {
            "wte": nn.Embedding(4, 8),
            "attn": nn.MultiheadAttention(8, 2),
            "negative": Negative(8, 8),
            "fc": nn.Linear(8, 8),
        }
    )
    net["head"] = nn.Linear(8, 4, bias=False)
    net["head"].weight = net["wte"].weight
    return net


@pytest.mark.parametrize("pattern", ["out_proj", "negative"])
def test_a_pattern_of_layers_that_can_not_be_quantised_is_refused(pattern) -> None:
    with pytest.raises(
        ValueError, match=f"'{pattern}' matches only layers that can't be quantised"
    ):
        quantize_model(mixed_net(), {pattern: "E4M3"})


def test_what_a_model_holds_is_reported() -> None:
    net = quantize_model(mixed_net(), {"*": "E4M3"}, "grid", tied="leave")
    report = quantization_report(net)
    assert {layer.name: layer.detail for layer in report.layers} == {
        "wte": "not a linear layer",
        "attn": "not a linear layer",
        "attn.out_proj": "nn.MultiheadAttention reads its weight and never calls it",
        "negative": "Negative is a subclass of nn.Linear with a forward of its own",
        "fc": "weight=E4M3, activation=none, storage=grid",
        "head": "its weight is also wte.weight; tied='untie' gives it one of its own",
    }
    assert [layer.name for layer in report.quantized] == ["fc"]
    assert report.quantized_parameters == 64
    assert report.parameters == sum(p.numel() for p in net.parameters())
    assert str(report).splitlines()[-1].startswith("quantised: 1 of 6 layers, 64 of ")


def test_a_layer_that_was_put_where_it_is_never_called_is_reported() -> None:
    net = quantize_model(mixed_net(), {"*": "E4M3"}, "grid", tied="leave")
    net["attn"].out_proj = QuantizedLinear(nn.Linear(8, 8), LayerSpec("E4M3"), storage="master")
    assert "attn.out_proj" in {layer.name for layer in quantization_report(net).left}


def test_a_model_without_linear_layers_is_reported() -> None:
    assert quantization_report(nn.ReLU()).layers == ()
    model = quantize_model(nn.Sequential(nn.Embedding(4, 8)), None, embeddings="E4M3")
    assert quantization_report(model).quantized
