"""Parameters of other people's models: Muon's, Adam's, and those that decay, by layer,
name and shape.
"""

import pytest
import torch
import transformers
from torch import nn

import fp8manifold as fm
from fp8manifold.optim import StiffnessMuon, muon_report

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # what other libraries announce is their own business
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


def found(model, **options):
    groups = StiffnessMuon.for_model(model, 1e-2, **options).param_groups
    return {
        name: (g["direction"], g["weight_decay"] > 0) for g in groups for name in g["param_names"]
    }


MUON, DECAYS, VECTOR = ("muon", True), ("adam", True), ("adam", False)
#: model, and ends of names: of vectors, of Muon's matrices, and of what else decays
MODELS = {
    "vit": (
        vit,
        "cls_token position_embeddings",
        "projection.weight q_proj.weight",
        "classifier.weight",
    ),
    "gpt_oss": (
        gpt_oss,
        "sinks proj_bias",
        "experts.gate_up_proj experts.down_proj",
        "tokens.weight lm_head.weight",
    ),
    "mamba": (mamba, "A_log mixer.D", "in_proj.weight dt_proj.weight", "conv1d.weight"),
    "swin": (swin, "relative_position_bias_table", "q_proj.weight", ""),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_no_hidden_matrix_is_adams(name):
    make, *ends = MODELS[name]
    model = make()
    sorted_here = found(model)
    for kind, some in zip((VECTOR, MUON, DECAYS), ends, strict=True):
        for end in some.split():
            assert {sorted_here[each] for each in sorted_here if each.endswith(end)} == {kind}, end
    assert sorted_here.keys() == dict(model.named_parameters()).keys()
    assert {p.name: (p.direction, p.decays) for p in muon_report(model).parameters} == sorted_here


@pytest.mark.parametrize("name", MODELS)
def test_quantised_layers_are_sorted_as_their_floats_are(name):
    model = MODELS[name][0]()
    before = found(model)
    fm.quantize_model(model, {"*": "E4M3"}, storage="fp8", tied="leave")
    assert found(model) == before


class Direct(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.ones(shape)))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        *(
            (name, (4, 6), VECTOR)
            for name in ("out_bias", "bias_table", "pos_embed", "rel_pos_h", "query_tokens", "D")
        ),
        *(
            (name, (4, 6), VECTOR)
            for name in ("positional_embedding", "A_logs", "log_dt", "latents", "time_decay")
        ),
        *(
            (name, (4, 6), MUON)
            for name in (
                "weight",
                "w1",
                "positive",
                "tokenizer",
                "biased",
                "D_proj",
                "in_proj_weight",
            )
        ),
        *((name, (4, 6), DECAYS) for name in ("embedding", "tok_embed", "word_embeddings")),
        *(("gamma", shape, VECTOR) for shape in ((1, 1, 6), (6, 1, 1), (1, 6), (6,), (1, 1), ())),
        ("w1", (2, 4, 6), MUON),
        ("w1", (2, 2, 4, 6), DECAYS),
    ],
)
def test_parameters_that_are_no_layers_go_by_name_and_shape(name, shape, expected):
    assert found(Direct(**{name: shape})) == {name: expected}


def test_layers_weights_are_matrices_whatever_they_are_called_and_channels_alone_are_none():
    layers = {"pos_embed": nn.Linear(4, 1, bias=False), "bias": nn.Conv1d(1, 4, 3, bias=False)}
    layers |= {f"groups{n}": nn.Conv1d(4, 4, 3, groups=n, bias=False) for n in (2, 4)}
    kinds = found(nn.ModuleDict(layers))
    assert kinds.pop("groups4.weight") == DECAYS
    assert set(kinds.values()) == {MUON}


def test_what_a_model_leaves_out_of_decay_is_left_out():
    class Timm(Direct):
        def no_weight_decay(self):
            return {"w1"}

    model = Timm(w1=(4, 6), w2=(4, 6), w3=(4, 6))
    model.w3._no_weight_decay = True
    assert found(model) == {"w1": VECTOR, "w2": MUON, "w3": VECTOR}
    assert found(model, others=["w2"])["w2"] == found(model, others="w2")["w2"] == DECAYS


def test_a_report_says_why():
    text = str(muon_report(mamba()))
    rows = {tuple(line.split(maxsplit=5)) for line in text.splitlines()}
    assert (
        "backbone.layers.0.mixer.A_log",
        "(32,",
        "4)",
        "adam",
        "no",
        "by its name, 'A_log'",
    ) in rows
    assert "a depthwise convolution" in text
    assert text.endswith("Muon's: 4 of 12 parameters, the rest Adam's")


def one_step(model, weight, gradient, **options):
    """The weight after a step of the model's Muon along a gradient of that weight."""
    optimizer = StiffnessMuon.for_model(model, 1e-2, ns_dtype=torch.float32, **options)
    weight.grad = gradient
    optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("adjust", ["original", "spectral_unclamped", "match_rms_adamw"])
def test_a_transposed_layer_takes_the_step_of_the_layer(adjust, quantized):
    """A float ``Conv1D`` used to have the rate of the transposed matrix."""
    conv = transformers.pytorch_utils.Conv1D(12, 4)
    linear = nn.Linear(4, 12)
    linear.weight.data.copy_(conv.weight.detach().t())
    models = [nn.Sequential(layer) for layer in (linear, conv)]
    if quantized:
        models = [fm.quantize_model(model, "E4M3", storage="grid") for model in models]
    gradient = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    ours, theirs = (
        one_step(
            model,
            model[0].weight,
            gradient if model[0].weight.shape == (12, 4) else gradient.t().contiguous(),
            adjust_lr_fn=adjust,
            weight_decay=0.0,
        )
        for model in models
    )
    torch.testing.assert_close(theirs if quantized else theirs.t(), ours, atol=1e-6, rtol=1e-4)


def test_experts_that_a_model_has_transposed_have_a_row_for_each_output():
    groups = StiffnessMuon.for_model(gpt_oss(), 1e-2, adjust_lr_fn="original").param_groups
    shapes = {name: g.get("matrix_shape") for g in groups for name in g["param_names"]}
    experts = [name for name in shapes if name.endswith(("gate_up_proj", "down_proj"))]
    assert {shapes[name] for name in experts} == {"transposed"}
    others = {shape for name, shape in shapes.items() if name not in experts}
    assert others == {"auto"}
    default = StiffnessMuon.for_model(gpt_oss(), 1e-2).param_groups
    assert "transposed" not in {group["matrix_shape"] for group in default}
