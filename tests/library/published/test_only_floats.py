"""Codes where float weights are to be read: every reader refuses them, in the same words, and reads nothing."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loading import Watched, state_of
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import huggingface, load_quantized, quantize_model

safetensors = pytest.importorskip("safetensors.torch", reason="needs the package safetensors")
WANTED = "weights are read from float64, float32, float16 or bfloat16; decode it first, values times scales"
NAME = "one.weight"


def codes(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: (x / x.abs().max() * 100).round().to(dtype)


def filled(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.full(shape, value).to(dtype)


#: scales as the layouts have them: of squares, of rows, of the tensor, of blocks as E8M0, of bitsandbytes' rows
SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda x: filled(0.0003, torch.float32, -(-x.shape[0] // 128), -(-x.shape[1] // 128)),
    "row": lambda x: filled(0.0003, torch.bfloat16, x.shape[0], 1),
    "tensor": lambda x: torch.tensor(0.0003),
    "block": lambda x: filled(115, torch.uint8, x.shape[0], x.shape[1] // 32),
    "flat": lambda x: filled(0.0003, torch.float32, x.shape[0]),
}
F8, F8_5, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
#: by name: what a weight is, how a file calls that, and its scales' name and kind
LAYOUTS: dict[str, tuple[torch.dtype, str, str, str]] = {
    "DeepSeek, Qwen": (F8, "F8_E4M3", "weight_scale_inv", "square"),
    "compressed-tensors, rows": (F8, "F8_E4M3", "weight_scale", "row"),
    "compressed-tensors, ModelOpt, tensor": (F8, "F8_E4M3", "weight_scale", "tensor"),
    "MXFP8": (F8, "F8_E4M3", "weight_scale", "block"),
    "E5M2": (F8_5, "F8_E5M2", "weight_scale", "row"),
    "compressed-tensors, int8": (torch.int8, "I8", "weight_scale", "row"),
    "bitsandbytes": (torch.int8, "I8", "SCB", "flat"),
    "raw E4M3": (F8, "F8_E4M3", "", ""),
    "raw E5M2": (F8_5, "F8_E5M2", "", ""),
    "raw E8M0": (E8M0, "F8_E8M0", "", ""),
    "raw int8": (torch.int8, "I8", "", ""),
    "raw uint8": (torch.uint8, "U8", "", ""),
    "raw int32": (torch.int32, "I32", "", ""),
}


def in_codes(state: Mapping[str, Tensor], layout: str, wanted: Callable[[str, Tensor], bool]) -> dict[str, Tensor]:
    """A state whose linear weights are codes, with their scales beside them."""
    dtype, _, beside, kind = LAYOUTS[layout]
    made: dict[str, Tensor] = {}
    for name, value in state.items():
        made[name] = codes(dtype)(value) if wanted(name, value) else value.clone()
        if wanted(name, value) and beside:
            made[name.removesuffix("weight") + beside] = SCALES[kind](value)
    return made


def said(layout: str, name: str, file: str = "") -> str:
    """What is to be said of the first weight."""
    dtype, in_file, beside, _ = LAYOUTS[layout]
    where, kind = (f" of {file!r}", in_file) if file else ("", str(dtype))
    scales = name.removesuffix("weight") + beside
    how = (
        f"at the scales of {scales!r}, which fm.load_fp8 reads, and not this"
        if beside
        else f"and {name}_scale is missing"
    )
    return f"{name}{where} holds codes ({kind}), {how}: {WANTED}"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(64, 32, bias=False)
        self.norm = nn.LayerNorm(32)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))


def is_one(name: str, value: Tensor) -> bool:
    return name == NAME


@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_quantized(layout: str, tmp_path: Path) -> None:
    """Of a state, of a file, and of tensors that are made when they are asked for, where nothing lies beside them."""
    state = in_codes(state_of(Net()), layout, is_one)
    safetensors.save_file(state, tmp_path / "part.safetensors")
    sources: list[tuple[Any, str]] = [(state, ""), (tmp_path, "part.safetensors")]
    for source, file in [*sources, *([(Watched(state), "")] if layout.startswith("raw") else [])]:
        with torch.device("meta"):
            model = Net()
        with pytest.raises(ValueError, match=f"^{re.escape(said(layout, NAME, file))}$"):
            load_quantized(model, source, "E4M3")
        assert model.one.weight.is_meta


@pytest.mark.parametrize("storage", ["fp8", "grid", "master"])
@pytest.mark.parametrize(
    "layout", [name for name in LAYOUTS if "weight_scale" not in LAYOUTS[name][2] or "int8" in name]
)
def test_load_state_dict(layout: str, storage: Any) -> None:
    """Float8 with scales beside it that are called ``weight_scale`` or ``weight_scale_inv`` is read."""
    model = quantize_model(Net(), "E4M3", storage)
    before = model.one.quantized_weight().detach().clone()
    state = in_codes(state_of(Net()), layout, is_one)
    with pytest.raises(RuntimeError, match=re.escape(said(layout, NAME))):
        model.load_state_dict(state, strict=False)
    assert torch.equal(torch.as_tensor(model.one.quantized_weight()), torch.as_tensor(before))


@pytest.mark.parametrize("layout", ["raw E4M3", "raw E8M0", "raw int8", "bitsandbytes"])
def test_load_state_dict_of_an_embedding_in_codes(layout: str) -> None:
    model = quantize_model(nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 2)), "E4M3", "fp8", embeddings="E4M3")
    state = in_codes(state_of(nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 2))), layout, lambda n, _: n[0] == "0")
    with pytest.raises(RuntimeError, match=re.escape(said(layout, "0.weight"))):
        model.load_state_dict(state, strict=False)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, F8, E8M0])
@pytest.mark.parametrize("storage", ["fp8", "grid", "master"])
def test_layers_of_codes_are_not_quantised(dtype: torch.dtype, storage: Any) -> None:
    layer = nn.Linear(32, 4)
    layer.weight = nn.Parameter(codes(dtype)(torch.ones(4, 32)), requires_grad=False)
    with pytest.raises(TypeError, match=f"a weight has dtype {re.escape(str(dtype))}: float64, float32"):
        quantize_model(nn.Sequential(layer), "E4M3", storage)


# transformers


@pytest.fixture
def hf() -> Any:
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 48,
    "tie_word_embeddings": False,
}
FIRST = "model.layers.0.mlp.down_proj.weight"


def is_projection(name: str, value: Tensor) -> bool:
    return name.endswith("proj.weight")


def folder_of(model: Any, layout: str, folder: Path, **how: Any) -> Path:
    """A folder that `save_pretrained` wrote, whose linear weights became codes."""
    model.save_pretrained(folder, **how)
    for path in folder.glob("*.safetensors"):
        state = in_codes(safetensors.load_file(path), layout, is_projection)
        safetensors.save_file(state, path, {"format": "pt"})
    return folder


def read(hf: Any, folder: Path, storage: str = "fp8", **how: Any) -> Any:
    config = huggingface.quantization_config("E4M3", storage)
    return hf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **how)


@pytest.mark.filterwarnings("ignore")  # what other libraries announce is their own business
@pytest.mark.parametrize(
    ("layout", "storage"), [*((layout, "fp8") for layout in LAYOUTS), ("raw int8", "grid"), ("raw E4M3", "master")]
)
def test_from_pretrained(layout: str, storage: str, hf: Any, tmp_path: Path) -> None:
    folder = folder_of(hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)), layout, tmp_path)
    line = said(layout, FIRST, "model.safetensors")
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        read(hf, folder, storage, dtype=torch.float32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["DeepSeek, Qwen", "raw int8"])
def test_from_pretrained_of_shards_pickles_and_bases(layout: str, hf: Any, tmp_path: Path) -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))
    with pytest.raises(ValueError, match=r"of 'model-\d+-of-\d+\.safetensors' holds codes"):
        read(hf, folder_of(model, layout, tmp_path / "shards", max_shard_size="40KB"))
    with pytest.raises(ValueError, match=r"^layers\.0\.mlp\.down_proj\.weight of 'model\.safetensors' holds codes"):
        read(hf, folder_of(model.model, layout, tmp_path / "base"))
    pickled = tmp_path / "pickled"
    model.save_pretrained(pickled)
    state = safetensors.load_file(pickled / "model.safetensors")
    (pickled / "model.safetensors").unlink()
    torch.save(in_codes(state, layout, is_projection), pickled / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"of 'pytorch_model\.bin' holds codes"):
        read(hf, pickled)
    torch.save(state, pickled / "pytorch_model.bin")
    assert isinstance(read(hf, pickled).lm_head.weight, fm.FP8Parameter)


@pytest.mark.filterwarnings("ignore")
def test_from_pretrained_of_experts_that_transformers_renames(hf: Any, tmp_path: Path) -> None:
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=2))
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = safetensors.load_file(path)
    name = next(each for each in state if ".experts.0." in each)
    safetensors.save_file({**state, name: codes(torch.int8)(state[name])}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=f"^{re.escape(name)} of 'model.safetensors' holds codes"):
        read(hf, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_integers_that_are_no_weights_are_nobodys_business(hf: Any, tmp_path: Path) -> None:
    """Masks and positions, which old files have, and the scales of nothing."""
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    extra = {"h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8), "position_ids": torch.arange(4)[None]}
    safetensors.save_file(safetensors.load_file(path) | extra, path, {"format": "pt"})
    huggingface.check_floats(model, tmp_path)
    assert isinstance(read(hf, tmp_path).lm_head.weight, fm.FP8Parameter)


@pytest.mark.filterwarnings("ignore")
def test_tensors_in_memory_are_cast_before_anybody_is_asked(hf: Any) -> None:
    config = hf.LlamaConfig(**SIZES)
    state = hf.LlamaForCausalLM(config).state_dict()
    with pytest.raises(ValueError, match=r"^state_dict= goes with no quantization_config here: call quantize_model"):
        hf.LlamaForCausalLM.from_pretrained(
            None, config=config, state_dict=state, quantization_config=huggingface.quantization_config()
        )
