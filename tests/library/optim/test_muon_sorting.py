"""Which parameters of a model Muon steps, which Adam steps, and which decay.

They are sorted by layer, name and shape, in models of transformers and in small ones.
"""

from typing import NamedTuple

import pytest
import torch
import transformers
from torch import nn

import fp8manifold as fm
from fp8manifold.optim import StiffnessMuon, muon_report

# What other libraries announce is their own business.
pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "intermediate_size": 8}


def vit():
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**SIZES, **HEADS, image_size=8, patch_size=4)
    )


def gpt_oss():
    experts = {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "head_dim": 8,
        "num_key_value_heads": 1,
    }
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SIZES, **HEADS, **experts, vocab_size=20)
    )


def mamba():
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(**SIZES, state_size=4, vocab_size=20)
    )


def swin():
    sizes = {
        "embed_dim": 8,
        "depths": [1],
        "num_heads": [2],
        "window_size": 2,
        "image_size": 8,
        "patch_size": 2,
    }
    return transformers.SwinModel(transformers.SwinConfig(**sizes))


class Kind(NamedTuple):
    """Which direction a parameter takes, and whether it decays."""

    direction: str
    decays: bool


MUON, DECAYS, VECTOR = Kind("muon", True), Kind("adam", True), Kind("adam", False)


def kinds_of(model, **options):
    groups = StiffnessMuon.for_model(model, 1e-2, **options).param_groups
    kinds = {}
    for group in groups:
        kind = Kind(group["direction"], group["weight_decay"] > 0)
        kinds |= dict.fromkeys(group["param_names"], kind)
    return kinds


#: Kinds of parameters by the ends of their names.
ENDS = {
    vit: {
        "cls_token": VECTOR,
        "position_embeddings": VECTOR,
        "projection.weight": MUON,
        "q_proj.weight": MUON,
        "classifier.weight": DECAYS,
    },
    gpt_oss: {
        "sinks": VECTOR,
        "proj_bias": VECTOR,
        "experts.gate_up_proj": MUON,
        "experts.down_proj": MUON,
        "tokens.weight": DECAYS,
        "lm_head.weight": DECAYS,
    },
    mamba: {
        "A_log": VECTOR,
        "mixer.D": VECTOR,
        "in_proj.weight": MUON,
        "dt_proj.weight": MUON,
        "conv1d.weight": DECAYS,
    },
    swin: {"relative_position_bias_table": VECTOR, "q_proj.weight": MUON},
}


@pytest.mark.parametrize("make", ENDS)
def test_what_is_no_hidden_matrix_is_adams(make):
    model = make()
    kinds = kinds_of(model)
    for end, kind in ENDS[make].items():
        assert {kinds[name] for name in kinds if name.endswith(end)} == {kind}, end
    assert kinds.keys() == dict(model.named_parameters()).keys()
    reported = {p.name: Kind(p.direction, p.decays) for p in muon_report(model).parameters}
    assert reported == kinds


@pytest.mark.parametrize("make", ENDS)
def test_quantised_layers_are_sorted_as_their_floats_are(make):
    model = make()
    kinds_of_floats = kinds_of(model)
    fm.quantize_model(model, {"*": "E4M3"}, storage="codes", tied="leave")
    assert kinds_of(model) == kinds_of_floats


class Direct(nn.Module):
    """A module that has parameters of given names and shapes itself."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.ones(shape)))


#: Kinds of matrices that are parameters of no layer, by their names.
NAMES = {
    **dict.fromkeys(
        ("out_bias", "bias_table", "pos_embed", "rel_pos_h", "query_tokens", "D"), VECTOR
    ),
    **dict.fromkeys(("positional_embedding", "A_logs", "log_dt", "latents", "time_decay"), VECTOR),
    **dict.fromkeys(("weight", "w1", "positive", "tokenizer", "biased"), MUON),
    **dict.fromkeys(("D_proj", "in_proj_weight"), MUON),
    **dict.fromkeys(("embedding", "tok_embed", "word_embeddings"), DECAYS),
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items(), ids=NAMES)
def test_matrices_that_are_no_layers_go_by_their_names(name, kind):
    assert kinds_of(Direct(**{name: (4, 6)})) == {name: kind}


@pytest.mark.parametrize("shape", [(1, 1, 6), (6, 1, 1), (1, 6), (6,), (1, 1), ()], ids=str)
def test_parameters_of_one_dimension_are_vectors(shape):
    assert kinds_of(Direct(gamma=shape)) == {"gamma": VECTOR}


def test_a_stack_of_matrices_is_muons_and_more_dimensions_are_not():
    assert kinds_of(Direct(w1=(2, 4, 6))) == {"w1": MUON}
    assert kinds_of(Direct(w1=(2, 2, 4, 6))) == {"w1": DECAYS}


def test_layers_weights_are_matrices_whatever_they_are_called_and_channels_alone_are_none():
    layers = {"pos_embed": nn.Linear(4, 1, bias=False), "bias": nn.Conv1d(1, 4, 3, bias=False)}
    layers |= {f"groups{n}": nn.Conv1d(4, 4, 3, groups=n, bias=False) for n in (2, 4)}
    kinds = kinds_of(nn.ModuleDict(layers))
    assert kinds.pop("groups4.weight") == DECAYS
    assert set(kinds.values()) == {MUON}


def test_what_a_model_leaves_out_of_decay_is_left_out():
    class Timm(Direct):
        def no_weight_decay(self):
            return {"w1"}

    model = Timm(w1=(4, 6), w2=(4, 6), w3=(4, 6))
    model.w3._no_weight_decay = True
    assert kinds_of(model) == {"w1": VECTOR, "w2": MUON, "w3": VECTOR}
    assert kinds_of(model, others=["w2"])["w2"] == kinds_of(model, others="w2")["w2"] == DECAYS


def test_a_report_says_why():
    text = str(muon_report(mamba()))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "backbone.layers.0.mixer.A_log (32, 4) adam no by its name, 'A_log'" in rows
    assert "a depthwise convolution" in text
    assert text.endswith("Muon's: 4 of 12 parameters, the rest Adam's")


def one_step(model, weight, gradient, **options):
    """Return the weight after a step of the model's Muon along a gradient of it."""
    optimizer = StiffnessMuon.for_model(model, 1e-2, ns_dtype=torch.float32, **options)
    weight.grad = gradient
    optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("adjust", ["original", "spectral_unclamped", "match_rms_adamw"])
def test_a_transposed_layer_takes_the_step_of_the_layer(adjust, quantized):
    """A float `Conv1D` used to have the rate of the transposed matrix."""
    conv = transformers.pytorch_utils.Conv1D(12, 4)
    linear = nn.Linear(4, 12)
    linear.weight.data.copy_(conv.weight.detach().t())
    models = [nn.Sequential(layer) for layer in (linear, conv)]
    if quantized:
        models = [fm.quantize_model(model, "E4M3", storage="grid") for model in models]
    gradient = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    results = []
    for model in models:
        weight = model[0].weight
        is_transposed = weight.shape != (12, 4)
        weight_gradient = gradient.t().contiguous() if is_transposed else gradient
        new = one_step(model, weight, weight_gradient, adjust_lr_fn=adjust, weight_decay=0.0)
        results.append(new.t() if is_transposed else new)
    of_linear, of_conv = results
    torch.testing.assert_close(of_conv, of_linear, atol=1e-6, rtol=1e-4)


def test_experts_that_a_model_has_transposed_have_a_row_for_each_output():
    groups = StiffnessMuon.for_model(gpt_oss(), 1e-2, adjust_lr_fn="original").param_groups
    shapes = {}
    for group in groups:
        shapes |= dict.fromkeys(group["param_names"], group.get("matrix_shape"))
    experts = [name for name in shapes if name.endswith(("gate_up_proj", "down_proj"))]
    assert {shapes[name] for name in experts} == {"transposed"}
    assert {shape for name, shape in shapes.items() if name not in experts} == {"auto"}
    default = StiffnessMuon.for_model(gpt_oss(), 1e-2).param_groups
    assert "transposed" not in {group["matrix_shape"] for group in default}
