"""Quantised models in the layouts of other libraries: read back to the bit, and what is
refused.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import gpt2, llama, logits, read_folder, transformers
from safetensors import torch as safetensors
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

import fp8manifold as fm
from fp8manifold import LayerSpec, QuantizedLinear, quantize_model
from fp8manifold.files import layout_state_dict

#: what other libraries' imports announce is their own business
pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = torch.arange(10).view(2, 5)
#: every storage and granularity, but for a grid of blocks, which there is not
every_storage = pytest.mark.parametrize(
    ("storage", "granularity"),
    [
        ("codes", "tensor"),
        ("codes", "channel"),
        ("codes", "block"),
        ("grid", "tensor"),
        ("grid", "channel"),
        ("master", "tensor"),
        ("master", "channel"),
        ("master", "block"),
    ],
)


def read_model(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return read_folder(folder, dtype=dtype, **options).eval()


def plain_values(weight: Tensor) -> Tensor:
    """Return the values of a weight of this library's or of torchao's, in float32."""
    weight = weight.detach()
    if isinstance(weight, fm.FP8Tensor) or type(weight).__name__ == "Float8Tensor":
        return weight.dequantize().float().contiguous()
    return weight.as_subclass(Tensor).float().contiguous()


def assert_same(model: Any, reloaded: Any, outputs: bool = True) -> None:
    """Assert that every quantised weight has the same bits, and the model the same logits."""
    assert torch.equal(logits(reloaded), logits(model)) or not outputs
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear) and layer.weight_format is not None:
            reloaded_layer = reloaded.get_submodule(name)
            assert type(reloaded_layer) is nn.Linear, name
            values = plain_values(reloaded_layer.weight)
            expected = plain_values(layer.quantized_weight())
            assert torch.equal(values.view(torch.int32), expected.view(torch.int32)), name


@every_storage
@pytest.mark.parametrize("dequantize", [False, True])
def test_transformers_reads_compressed_tensors(storage, granularity, dequantize, tmp_path):
    model = quantize_model(llama(), {"*": "E4M3"}, storage, granularity=granularity, tied="leave")
    settings = copy.deepcopy(model.config.to_dict())
    fm.save(model, tmp_path, "compressed-tensors")
    assert model.config.to_dict() | {"dtype": None} == settings | {"dtype": None}
    assert "hf_quantizer" not in vars(model)
    options = {}
    if dequantize:
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    # Left in blocks, weights become bfloat16 at the first pass.
    if granularity == "block" and not dequantize:
        assert_same(model, read_model(tmp_path, torch.bfloat16), outputs=False)
    else:
        assert_same(model, read_model(tmp_path, **options))


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_a_server_may_round_what_it_multiplies(granularity, tmp_path):
    """By a scale a token, which transformers emulates.

    The logits are those of inputs that are rounded by hand.
    """
    model = quantize_model(
        llama(), {"*": "E4M3", "lm_head": "none"}, "codes", granularity=granularity, tied="leave"
    )
    fm.save(model, tmp_path, "compressed-tensors", activations="E4M3")
    (group,) = (
        transformers.AutoConfig.from_pretrained(tmp_path)
        .quantization_config["config_groups"]
        .values()
    )
    weights = group["weights"]
    inputs = group["input_activations"]
    assert (weights["dynamic"], inputs["dynamic"]) == (False, True)
    assert all(inputs[key] == weights[key] for key in ("num_bits", "type", "symmetric"))
    # MXFP8, whose weights become bfloat16: against the same folder with exact inputs.
    if granularity == "block":
        assert all(inputs[key] == weights[key] for key in ("strategy", "group_size", "scale_dtype"))
        fm.save(model, tmp_path / "exact", "compressed-tensors")
        exact, rounded = (
            logits(read_model(folder, torch.bfloat16)) for folder in (tmp_path / "exact", tmp_path)
        )
        assert (rounded - exact).abs().max() > 2e-3
        return
    assert inputs["strategy"] == "token"
    reloaded = read_model(tmp_path)
    exact_logits = logits(model)
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            layer.register_forward_pre_hook(lambda _, x: rounded_by_token(x[0]))
    torch.testing.assert_close(logits(reloaded), logits(model), rtol=1e-5, atol=1e-6)
    assert (logits(reloaded) - exact_logits).abs().max() > 1e-3


def rounded_by_token(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


@torch.no_grad()
def with_unlike_scales(model: Any) -> None:
    """Multiply rows by up to 2^8, so that the squares of a weight have unlike scales."""
    for i, p in enumerate(model.parameters()):
        exponents = torch.arange(p.shape[0]).remainder(128 + i % 3).div(16)
        p.mul_(torch.exp2(exponents).view(-1, *[1] * (p.dim() - 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("vocabulary", [48, 256])
def test_transformers_reads_what_was_trained_in_squares(vocabulary, dequantize, dtype, tmp_path):
    """A head of 48 rows is one partial square; untold, transformers dequantises by
    itself where no GPU is.
    """
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 1,
        "vocab_size": vocabulary,
    }
    model = llama(False, **sizes)
    with_unlike_scales(model)
    quantize_model(model, {"*": "E4M3"}, "codes", granularity="square")
    optimizer = fm.optim.StiffnessMuon.for_model(model, lr=0.02, moments="8bit")
    for _ in range(2):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    fm.save(model, tmp_path, "fp8")
    described = transformers.AutoConfig.from_pretrained(tmp_path).quantization_config
    assert (described["quant_method"], described["weight_block_size"]) == ("fp8", [128, 128])
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert saved["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    scale = saved["model.layers.0.mlp.up_proj.weight_scale_inv"]
    assert (scale.dtype, scale.shape) == (torch.float32, (3, 2))
    assert scale.unique().numel() > 1
    if torch.cuda.is_available() and not dequantize:
        pytest.skip("transformers keeps the codes where there is a GPU")
    options = (
        {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)}
        if dequantize
        else {}
    )
    reloaded = read_model(tmp_path, dtype, **options)
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            values = reloaded.get_submodule(name).weight.detach()
            assert values.dtype == dtype, name
            assert torch.equal(values, layer.weight.dequantize().to(dtype)), name
    if dtype is torch.float32:
        assert torch.equal(logits(reloaded), logits(model))


def test_partial_squares_are_written_as_their_layout_has_them():
    layer = quantize_model(nn.Linear(300, 200), "E4M3", "codes", granularity="square")
    with pytest.warns(
        UserWarning, match=r"'0\.weight' of shape \(200, 300\) ends in partial squares"
    ):
        tensors, config = layout_state_dict(nn.Sequential(layer), "fp8")
    with pytest.warns(
        UserWarning, match=r"'0\.weight' of shape .* and 2 more end in partial squares"
    ) as record:
        layout_state_dict(nn.Sequential(layer, *(copy.deepcopy(layer) for _ in range(2))), "fp8")
    assert len(record) == 1
    assert "\n" not in str(record[0].message)
    codes, scale = tensors["0.weight"], tensors["0.weight_scale_inv"]
    assert scale.shape == (2, 3)
    for i in range(200):
        row = codes[i].float() * scale[i // 128].repeat_interleave(128)[:300]
        assert torch.equal(row, layer.weight.dequantize()[i]), i
    assert config["modules_to_not_convert"] == []


@every_storage
@pytest.mark.parametrize("fmt", ["E4M3", "E5M2"])
def test_torchao_reads_its_own(fmt, storage, granularity, tmp_path):
    model = quantize_model(llama(), {"*": fmt}, storage, granularity=granularity, tied="leave")
    tensors, _ = layout_state_dict(model, "torchao")
    reloaded = llama()
    tied = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    reloaded.load_state_dict(tensors | tied, assign=True)
    assert_same(model, reloaded)
    fm.save(model, tmp_path / fmt, "torchao")
    assert_same(model, read_model(tmp_path / fmt))


def test_scales_of_bfloat16_weights_are_float32():
    model = quantize_model(llama().bfloat16(), {"*": "E4M3"}, "codes", tied="leave")
    tensors, _ = layout_state_dict(model)
    assert tensors["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.float32


@pytest.mark.parametrize("layout", ["compressed-tensors", "torchao"])
def test_bfloat16_weights_are_exact_too(layout, tmp_path):
    model = quantize_model(llama().bfloat16(), {"*": "E4M3"}, "codes", tied="leave")
    fm.save(model, tmp_path, layout)
    wanted = quantize_model(llama().bfloat16().float(), {"*": "E4M3"}, "codes", tied="leave")
    assert_same(wanted, read_model(tmp_path, torch.bfloat16), outputs=False)


def test_granularities_and_layers_are_mixed(tmp_path):
    """Float layers, scales of three kinds, an untied output layer, activations that
    only training quantises.
    """
    formats = {"*": "none", "mlp": LayerSpec("E4M3"), "lm_head": LayerSpec("E4M3")}
    formats |= {
        "q_proj": LayerSpec("E4M3", granularity="tensor"),
        "o_proj": LayerSpec("E4M3", granularity="block"),
    }
    model = quantize_model(llama(), formats, "codes", tied="untie")
    _, described = layout_state_dict(model)
    assert described["format"] == "mixed-precision"
    assert [len(group["targets"]) for group in described["config_groups"].values()] == [2, 7, 2]
    assert len(described["ignore"]) == 4
    fm.save(model, tmp_path / "one", "compressed-tensors")
    assert model.config.tie_word_embeddings
    # dequantize=True would read one kind of scale alone.
    assert_same(model, read_model(tmp_path / "one", torch.bfloat16), outputs=False)
    fm.save(model, tmp_path / "other", "torchao")
    assert_same(model, read_model(tmp_path / "other"))


@pytest.mark.parametrize(
    ("storage", "spec"),
    [
        (
            "master",
            LayerSpec("E4M3", activation="E5M2", policy="delayed", rounding="split"),
        ),
        ("codes", LayerSpec("E4M3", activation="E5M2")),
        ("grid", LayerSpec("E4M3", activation="E5M2")),
    ],
    ids=["master", "codes", "grid"],
)
def test_what_belongs_to_training_is_not_exported(storage, spec):
    """Counts, measured scales and manifolds; what somebody has registered in a layer
    goes along.
    """
    model = quantize_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), spec, storage)
    model[0].register_buffer("mine", torch.ones(1))
    tensors, _ = layout_state_dict(model)
    assert sorted(tensors) == [
        "0.bias",
        "0.mine",
        "0.weight",
        "0.weight_scale",
        "1.bias",
        "1.weight",
        "1.weight_scale",
    ]
    assert not tensors["0.weight"].requires_grad


def test_a_layer_by_itself_and_special_codes():
    layer: Any = quantize_model(nn.Linear(4, 2, bias=False), "E4M3", "codes")
    codes = torch.tensor(
        [[0, 128, 127, 255], [1, 129, 126, 254]], dtype=torch.uint8
    )  # NaN and -0 among them
    layer.weight.codes.copy_(codes)
    tensors, described = layout_state_dict(layer)
    assert sorted(tensors) == ["weight", "weight_scale"]
    assert torch.equal(tensors["weight"].view(torch.uint8), codes)
    assert torch.equal(tensors["weight_scale"], layer.weight.scale)
    assert described["ignore"] == []
    values = layout_state_dict(layer, "torchao")[0]["weight"].dequantize()
    assert torch.equal(values.nan_to_num(7.0), layer.weight.dequantize().nan_to_num(7.0))


#: formats of which a layout has codes
FORMATS_OF = {
    "compressed-tensors": ["E4M3"],
    "torchao": ["E4M3", "E5M2", "E4M3FNUZ", "E5M2FNUZ"],
}


@pytest.mark.parametrize("name", [*fm.NAMED_FORMATS, "E4M3_B8", "E4M3IEEE"])
@pytest.mark.parametrize("layout", FORMATS_OF)
def test_formats_with_a_dtype_are_exported_and_others_refused_by_name(layout, name):
    model = quantize_model(nn.Sequential(nn.Linear(4, 2)), name, "codes")
    if name not in FORMATS_OF[layout]:
        allowed = ", ".join(FORMATS_OF[layout])
        line = f"layer '0' is in {name}, but layout='{layout}' takes one of {allowed}$"
        with pytest.raises(ValueError, match=line):
            layout_state_dict(model, layout)
        return
    tensors, _ = layout_state_dict(model, layout)
    values = tensors["0.weight"]
    if layout == "torchao":
        values = values.dequantize()
    else:
        values = values.float() * tensors["0.weight_scale"]
    assert torch.equal(values, model[0].weight.dequantize())


def test_what_no_layout_takes_is_refused(tmp_path):
    quantized = quantize_model(nn.Sequential(nn.Linear(4, 2)), "E4M3", "codes")
    quantized.append(nn.Linear(4, 4))
    quantized[1].weight = fm.FP8Parameter(quantized[1].weight)
    tensors, _ = layout_state_dict(quantized)  # in no QuantizedLinear: the floats that it is
    assert torch.equal(tensors["1.weight"], quantized[1].weight.dequantize())
    with pytest.raises(
        ValueError, match=r"'transformer\.h\.0\.attn\.c_attn' is transformers' Conv1D"
    ):
        fm.save(
            quantize_model(gpt2(), {"*": "E4M3"}, "codes", tied="leave"),
            tmp_path,
            "compressed-tensors",
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("exponent", [-126, 0, 127])
def test_block_scales_are_written_as_they_are_kept(exponent):
    spec = LayerSpec("E4M3", granularity="block")
    layer: Any = quantize_model(nn.Linear(64, 1, bias=False), spec, "codes")
    layer.weight.set_scale_(2.0**exponent)
    scales = layout_state_dict(layer)[0]["weight_scale"]
    assert scales.tolist() == [[exponent + 127] * 2]
    assert torch.equal(scales, layer.weight.exponents)


@pytest.mark.parametrize(
    ("scale", "entry", "dtype"),
    [
        (2.0**-126, 1, torch.uint8),
        (2.0**-127, 2.0**-127, torch.float32),
        (3.0, 3.0, torch.float32),
    ],
)
def test_a_block_scale_that_is_no_e8m0_is_written_as_a_float(scale, entry, dtype):
    spec = LayerSpec("E4M3", granularity="block", policy="static")
    layer: Any = quantize_model(nn.Linear(64, 1, bias=False), spec, "master")
    layer(torch.ones(1, 64))
    with torch.no_grad():
        layer.weight.zero_()
    layer.weight_scaler.value.fill_(scale)
    scales = layout_state_dict(layer)[0]["weight_scale"]
    assert scales.tolist() == [[entry, entry]]
    assert scales.dtype is dtype


def checkpointed(model: Any) -> Any:
    checkpoint_wrapper.apply_activation_checkpointing(
        model, check_fn=lambda module: isinstance(module, nn.Linear)
    )
    return model


def with_compiled_blocks(model: Any) -> Any:
    for index, block in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(block)
    return model


WRAPPERS = pytest.mark.parametrize(
    "wrapped",
    [checkpointed, with_compiled_blocks, torch.compile, nn.DataParallel],
    ids=["checkpoint_wrapper", "compiled blocks", "compile", "DataParallel"],
)


@WRAPPERS
@pytest.mark.parametrize("layout", ["compressed-tensors", "fp8"])
def test_names_are_those_of_the_model_inside_wrappers(wrapped, layout):
    """With experts' and embeddings' codes too, which are written as floats."""
    granularity = "square" if layout == "fp8" else "channel"
    model = quantize_model(
        llama(), {"*": "E4M3"}, granularity=granularity, tied="leave", embeddings="E5M2"
    )
    tensors, described = layout_state_dict(model, layout)
    wrapped_tensors, same = layout_state_dict(wrapped(model), layout)
    assert same == described
    assert wrapped_tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert wrapped_tensors[name].dtype == tensor.dtype, name
        assert torch.equal(wrapped_tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name


@WRAPPERS
def test_a_folder_is_that_of_the_model_inside_wrappers(wrapped, tmp_path):
    model = quantize_model(llama(), {"*": "E4M3"}, tied="leave")
    expected = logits(model)
    fm.save(wrapped(model), tmp_path, "compressed-tensors")
    assert "hf_quantizer" not in vars(model)
    assert torch.equal(logits(read_model(tmp_path)), expected)


@pytest.mark.extra("peft")
@pytest.mark.parametrize("part", ["adapters", "base"])
def test_a_model_with_adapters_is_refused(part, tmp_path):
    import peft

    model = quantize_model(llama(), {"*": "E4M3"}, tied="leave")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    exported = adapted if part == "adapters" else adapted.base_model.model
    with pytest.raises(ValueError, match=r"of PEFT: merge the adapters with .* or take them out"):
        layout_state_dict(exported)
    with pytest.raises(ValueError, match=r"an adapter of PEFT.* merge_and_unload\(\) returns"):
        fm.save(exported, tmp_path, "compressed-tensors")
    assert list(tmp_path.iterdir()) == []
    fm.save(adapted.unload(), tmp_path, "compressed-tensors")
    assert_same(model, read_model(tmp_path))


def test_a_weight_that_a_hook_of_the_model_renames_is_refused():
    model = quantize_model(nn.Sequential(nn.Linear(4, 2)), "E4M3")

    def rename(_, state, prefix, *__):
        state["0.kernel"] = state.pop("0.weight")

    model.register_state_dict_post_hook(rename)
    with pytest.raises(
        ValueError, match=r"state_dict has no tensor '0\.weight', a quantised weight"
    ):
        layout_state_dict(model)


def test_a_weight_that_the_class_leaves_out_is_refused(tmp_path):
    model = quantize_model(llama(), {"*": "E4M3"}, tied="leave")
    name = "model.layers.0.mlp.up_proj.weight"
    model._keys_to_ignore_on_save = {name}
    with pytest.raises(RuntimeError, match="writes 13 of 14 weights in codes"):
        fm.save(model, tmp_path, "compressed-tensors")


@pytest.mark.parametrize(
    ("module", "extra"),
    [("torchao.quantization", "torchao"), ("transformers.quantizers.base", "hf")],
)
def test_a_missing_package_is_named(module, extra, monkeypatch, tmp_path):
    model = quantize_model(llama(), {"*": "E4M3"}, "codes", tied="leave")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ImportError, match=rf"needs {module.split('.')[0]}: pip install 'fp8manifold\[{extra}\]'"
    ):
        fm.save(model, tmp_path, "torchao")
