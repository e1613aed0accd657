"""Models of transformers read into codes, experts too: what is held meanwhile, and what
is refused.
"""

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import SIZES, gpt2, llama, seeded, transformers
from safetensors.torch import load_file, save_file
from surgery_models import model_bits
from test_loading import LAYOUTS, in_codes
from torch import Tensor

import fp8manifold as fm
from fp8manifold import FP8Parameter, quantize_model
from fp8manifold._doors import quantizer
from fp8manifold.nn import _loading, _tensor_files

#: what other libraries announce is their own business
pytestmark = pytest.mark.filterwarnings("ignore")
MAKERS = {
    "llama": llama,
    "gpt2": gpt2,
    "qwen": lambda tied: seeded(
        "Qwen2", transformers.Qwen2Config(**SIZES, tie_word_embeddings=tied)
    ),
}


def read_quantized(
    folder: Path,
    formats: Any = "E4M3",
    *,
    dtype: Any = "auto",
    storage: str = "codes",
    **options: Any,
) -> Any:
    model, info = fm.load(
        folder, formats, dtype=dtype, storage=storage, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    return model


def plain(folder: Path, dtype: Any = "auto", **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


@pytest.mark.parametrize("kind", sorted(MAKERS))
@pytest.mark.parametrize("tied", ["leave", "untie", "was not"])
@pytest.mark.parametrize(
    ("saved", "asked"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "float32")]
)
def test_the_bits_of_quantising_the_float_model(
    kind: str, tied: str, saved: str, asked: str, tmp_path: Path
) -> None:
    tmp_path = tmp_path / f"{tied} {saved} {asked}"
    options = {} if tied == "was not" else {"tied": tied}
    dtype = "auto" if asked == "auto" else getattr(torch, asked)
    formats = {
        "*": "E4M3",
        "mlp": {"weight": "E5M2", "activation": "E4M3", "granularity": "tensor"},
    }
    model = MAKERS[kind](tied != "was not").to(getattr(torch, saved))
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    wanted = quantize_model(
        plain(tmp_path, dtype), formats, "codes", seed=3, keep_remainder=True, **options
    )
    loaded = read_quantized(tmp_path, formats, dtype=dtype, seed=3, keep_remainder=True, **options)
    assert model_bits(loaded) == model_bits(wanted)
    head, embedding = loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight
    assert (head is embedding) == (tied == "leave")
    loaded.save_pretrained(tmp_path / "again")
    again = fm.load(tmp_path / "again", dtype=None if dtype == "auto" else dtype)
    assert model_bits(again) == model_bits(loaded)


@pytest.mark.parametrize("storage", ["grid", "master"])
def test_other_storages_are_quantised_at_the_end(storage: Any, tmp_path: Path) -> None:
    llama(False).save_pretrained(tmp_path)
    assert model_bits(read_quantized(tmp_path, storage=storage)) == model_bits(
        quantize_model(plain(tmp_path), "E4M3", storage)
    )


def test_each_tensor_is_encoded_in_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama(True).save_pretrained(tmp_path)
    values = []
    alive = []
    encode = _loading.Reader.encode

    def watched(self: Any, model: Any, name: str, value: Tensor) -> Tensor:
        gc.collect()
        values.append(weakref.ref(value))
        alive.append(sum(ref() is not None for ref in values))
        return encode(self, model, name, value)

    monkeypatch.setattr(_loading.Reader, "encode", watched)
    model = read_quantized(tmp_path, {"*": "E4M3"}, tied="leave")
    assert alive == [1] * sum(isinstance(m, fm.QuantizedLinear) for m in model.modules())


def test_pages_are_given_back_unless_they_were_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not _tensor_files._PAGES.exists():
        pytest.skip("this system does not say which pages were written to")
    path = tmp_path / "some.bin"
    path.write_bytes(bytes(range(256)) * 1024)

    def resident() -> int:
        lines = Path("/proc/self/smaps").read_text().splitlines()
        start = next(i for i, line in enumerate(lines) if line.endswith(str(path)))
        return int(next(line for line in lines[start:] if line.startswith("Rss:")).split()[1])

    monkeypatch.setattr(_tensor_files, "_FEWEST_BYTES", 2**10)
    monkeypatch.setattr(_tensor_files, "_RELEASES_PER_READ", 2**10)
    files = _tensor_files.MappedFiles([path])
    values = torch.from_file(str(path), shared=False, size=2**18, dtype=torch.uint8)
    assert int(values.sum()) > 0
    for count, resident_bytes in ((2**9, 256), (2**9, 0)):
        files.was_read(count)
        assert resident() == resident_bytes, count
    assert values[:3].tolist() == [0, 1, 2]
    values[0] = 7  # a page of the process's own by now
    files.was_read(2**10)
    assert values[:3].tolist() == [7, 1, 2]
    _tensor_files.MappedFiles([path]).give_back()  # not its own
    assert resident() > 0


def test_patterns_devices_ties_and_nan_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = llama(True)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pattern 'nothing' matches none"):
        read_quantized(tmp_path, {"nothing": "E4M3"})
    with pytest.raises(ValueError, match=r"the weight of 'lm_head' is shared"):
        read_quantized(tmp_path)
    options: Any = {"device_map": {"": "disk"}, "offload_folder": str(tmp_path)}
    with pytest.raises(ValueError, match="device_map has 'disk'"):
        fm.load(tmp_path, "E4M3", tied="leave", **options)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(ValueError, match=r"a weight of shape \(96, 64\) holds NaN or Inf"):
        read_quantized(tmp_path / "nan", tied="leave")


def test_a_missing_layer_is_drawn_and_quantised(tmp_path: Path) -> None:
    llama(True).model.save_pretrained(tmp_path)
    options: Any = {"tied": "leave", "num_labels": 2}
    options["architectures"] = ["LlamaForSequenceClassification"]
    with pytest.raises(ValueError, match=r"the model has 'score\.weight', which .* lacks"):
        fm.load(tmp_path, "E4M3", **options)
    model, info = fm.load(tmp_path, "E4M3", output_loading_info=True, **options)
    assert info["missing_keys"] == {"score.weight"}
    assert isinstance(model.score.weight, fm.FP8Parameter)
    assert not any(p.is_meta for p in model.parameters())


def folder_of(model: Any, layout: str, folder: Path, **options: Any) -> Path:
    """Save a model, and replace the weights of its projections by codes in a layout."""
    model.save_pretrained(folder, **options)
    for path in folder.glob("*.safetensors"):
        save_file(in_codes(load_file(path), layout, "proj.weight"), path, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("layout", "storage"),
    [*((layout, "codes") for layout in LAYOUTS), ("raw int8", "grid"), ("raw E4M3", "master")],
)
def test_from_pretrained(layout: str, storage: str, tmp_path: Path) -> None:
    """It refuses to quantise what is in codes already."""
    folder = folder_of(llama(False), layout, tmp_path)
    with pytest.raises(ValueError, match=r"^formats='E4M3' can't be used with .* codes"):
        read_quantized(folder, storage=storage, dtype=torch.float32)


@pytest.mark.parametrize("layout", ["DeepSeek, Qwen", "raw int8"])
def test_from_pretrained_of_shards_pickles_and_bases(layout: str, tmp_path: Path) -> None:
    """It refuses codes in all of these; a pickle of floats is read."""
    model = llama(False)
    with pytest.raises(ValueError, match=r"^formats='E4M3' can't be used with"):
        read_quantized(folder_of(model, layout, tmp_path / "shards", max_shard_size="40KB"))
    with pytest.raises(ValueError, match=r"^formats='E4M3' can't be used with"):
        read_quantized(folder_of(model.model, layout, tmp_path / "base"))
    pickled = tmp_path / "pickled"
    model.save_pretrained(pickled)
    state = load_file(pickled / "model.safetensors")
    (pickled / "model.safetensors").unlink()
    torch.save(in_codes(state, layout, "proj.weight"), pickled / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"of 'pytorch_model\.bin' holds codes"):
        read_quantized(pickled)
    torch.save(state, pickled / "pytorch_model.bin")
    assert isinstance(read_quantized(pickled).lm_head.weight, fm.FP8Parameter)


def test_integers_that_are_no_weights_are_nobodys_business(tmp_path: Path) -> None:
    """Masks and positions, which old files have, and the scales of nothing."""
    model = llama(False)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    extra = {
        "h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
        "position_ids": torch.arange(4)[None],
    }
    save_file(load_file(path) | extra, path, {"format": "pt"})
    fm.files.check_floats(model, tmp_path)
    loaded = fm.load(tmp_path, "E4M3")
    assert isinstance(loaded.lm_head.weight, fm.FP8Parameter)


def test_tensors_in_memory_are_cast_before_anybody_is_asked() -> None:
    model = llama(False)
    arguments = {
        "state_dict": model.state_dict(),
        "quantization_config": quantizer.quantizing(),
    }
    with pytest.raises(
        ValueError,
        match=r"^state_dict= can't be used with quantization_config=: .* call quantize_model",
    ):
        type(model).from_pretrained(None, config=model.config, **arguments)


TOKENS = torch.arange(16).view(2, 8)
COMMON: dict[str, Any] = {**SIZES, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 32},
    "GptOss": {"num_local_experts": 4, "head_dim": 32, "layer_types": ["full_attention"] * 2},
}


def mixture(kind: str) -> Any:
    model = seeded(kind, getattr(transformers, f"{kind}Config")(**COMMON, **KINDS[kind]))
    model.set_experts_implementation("eager")
    return model.eval()


def options_of(kind: str) -> dict[str, Any]:
    biases = {"*_bias": "none"} if kind == "GptOss" else {}
    return {"parameters": {"*.experts.*": "E4M3", **biases}, "embeddings": "E4M3"}


def quantized(kind: str, **options: Any) -> Any:
    return quantize_model(mixture(kind), "E4M3", "codes", **options_of(kind), **options)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_router_is_a_parameter_that_stays_in_float(kind: str) -> None:
    options = options_of(kind)
    options["parameters"] = {"*": "E4M3", **options["parameters"]}
    model = quantize_model(mixture(kind), "E4M3", "codes", **options)
    codes = {name for name, p in model.named_parameters() if isinstance(p, fm.FP8Tensor)}
    routers = {name for name, _ in model.named_parameters() if ".gate." in name or "router" in name}
    assert routers
    assert not routers & codes
    name = "router" if kind == "GptOss" else "gate"
    options["parameters"][name] = "E4M3"
    model = quantize_model(mixture(kind), "E4M3", "codes", **options)
    assert isinstance(model.get_parameter(f"model.layers.0.mlp.{name}.weight"), fm.FP8Tensor)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_logits_and_gradients_are_those_of_the_values(kind: str) -> None:
    model = quantized(kind)
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.scale.shape == (*experts.gate_up_proj.shape[:-1], 1)
    assert isinstance(experts.down_proj, FP8Parameter)
    report = fm.quantization_report(model)
    assert report.quantized_parameters > 0.95 * report.parameters
    floats: Any = fm.dequantize_model(copy.deepcopy(model))
    assert torch.equal(model(TOKENS).logits, floats(TOKENS).logits)
    model(TOKENS, labels=TOKENS).loss.backward()
    floats(TOKENS, labels=TOKENS).loss.backward()
    expected = dict(floats.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name].grad), name


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_logits_by_every_implementation_are_those_of_the_values(
    kind: str, implementation: str
) -> None:
    model = quantized(kind)
    floats: Any = fm.dequantize_model(copy.deepcopy(model))
    model.set_experts_implementation(implementation)
    floats.set_experts_implementation(implementation)
    assert torch.equal(model(TOKENS).logits, floats(TOKENS).logits)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_they_are_saved_and_read(kind: str, tmp_path: Path) -> None:
    model = quantized(kind, seed=3)
    optimizer = fm.optim.StiffnessAdamW(model.parameters(), lr=1e-2)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    loaded = fm.load(tmp_path)
    assert model_bits(loaded) == model_bits(model)
    loaded.save_pretrained(tmp_path / "again")
    assert model_bits(fm.load(tmp_path / "again")) == model_bits(model)
    floats = dict(plain(tmp_path).named_parameters())
    for name, parameter in fm.dequantize_model(model).named_parameters():
        assert torch.equal(floats[name], parameter), name


def test_a_conversion_that_transformers_has_for_the_same_name_leaves_the_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for gpt-oss in transformers before 5.4, whose operation aligns the floats."""
    from transformers import conversion_mapping, core_model_loading

    class Aligned(core_model_loading.ConversionOps):
        def convert(self, input_dict: Any, **_: Any) -> Any:
            return {"mlp.experts.down_proj": next(iter(input_dict.values()))[0]}

        @property
        def reverse_op(self) -> Any:
            return self

    name = "mlp.experts.down_proj"
    conversion = core_model_loading.WeightConverter([f"{name}$"], name, operations=[Aligned()])
    conversion_mapping.get_checkpoint_conversion_mapping("gpt_oss")
    known = conversion_mapping._checkpoint_conversion_mapping_cache
    monkeypatch.setitem(known, "gpt_oss", [conversion])
    model = quantized("GptOss", seed=3)
    quantizer.attach(model).save_pretrained(tmp_path)
    loaded = plain(tmp_path)
    assert model_bits(loaded) == model_bits(model)
    quantizer.attach(loaded).save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again/model.safetensors").keys() == (
        load_file(tmp_path / "model.safetensors").keys()
    )
    assert model_bits(plain(tmp_path / "again")) == model_bits(model)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats_are_read_into_codes(kind: str, dtype: Any, tmp_path: Path) -> None:
    mixture(kind).to(dtype).save_pretrained(tmp_path, max_shard_size="60KB")
    wanted = quantize_model(plain(tmp_path, dtype), "E4M3", "codes", **options_of(kind))
    loaded = fm.load(tmp_path, "E4M3", dtype=dtype, **options_of(kind))
    assert model_bits(loaded) == model_bits(wanted)


@pytest.mark.parametrize("tied", ["refuse", "leave", "untie"])
@pytest.mark.parametrize("folder", ["codes", "floats"])
def test_a_tied_embedding_in_codes_is_saved_and_read(
    folder: str, tied: Any, tmp_path: Path
) -> None:
    """From a folder of codes, and from one of floats that are quantised as they are read."""
    model = llama().eval()
    options: Any = {"embeddings": "E4M3", "tied": tied}
    if folder == "floats":
        model.save_pretrained(tmp_path)
    quantize_model(model, "E4M3", "codes", **options)
    if folder == "codes":
        model.save_pretrained(tmp_path)
        loaded = fm.load(tmp_path)
    else:
        loaded = fm.load(tmp_path, "E4M3", **options)
    assert model_bits(loaded) == model_bits(model)
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    head = loaded.get_output_embeddings().weight
    embedding = loaded.get_input_embeddings().weight
    assert (head is embedding) == (tied != "untie")
    assert isinstance(head, FP8Parameter)
    assert isinstance(embedding, FP8Parameter)


def test_the_experts_are_exported_as_the_floats_that_they_are(tmp_path: Path) -> None:
    model = quantized("Mixtral")
    fm.save(model, tmp_path, "compressed-tensors")
    exported = plain(tmp_path)
    codes = model.model.layers[0].mlp.experts.down_proj
    floats = exported.model.layers[0].mlp.experts.down_proj
    assert torch.equal(floats, codes.dequantize())
    exported.set_experts_implementation("eager")
    assert torch.equal(exported(TOKENS).logits, model(TOKENS).logits)
