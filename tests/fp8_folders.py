"""Small random model folders in published FP8 layouts, made by the libraries that publish them, never by this one.

``make("name", folder)`` writes the folder ``LAYOUTS`` names so, and skips where its library is missing.  A layout whose
library is not at hand is written by its published formula: ``amax / 448`` of each group, division, rounding.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BASE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "num_attention_heads": 4}
BASE |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 96}
BASE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
RANKS = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
DEPTHS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 2, "num_key_value_heads": 4}
#: what each kind of model differs in from ``BASE``: class, sizes
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama uneven": ("Llama", {"hidden_size": 136, "intermediate_size": 200, "head_dim": 34}),
    "llama of 4": ("Llama", {"num_hidden_layers": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "phi3": ("Phi3", {}),
    "qwen3 experts": ("Qwen3Moe", EXPERTS | {"num_experts": 4}),
    "mixtral": ("Mixtral", EXPERTS | {"intermediate_size": 128}),
    "deepseek": (
        "DeepseekV3",
        EXPERTS | RANKS | DEPTHS | {"n_routed_experts": 4, "hidden_size": 128, "intermediate_size": 256},
    ),
    "gpt-oss": ("GptOss", EXPERTS | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}),
}


def transformers() -> Any:
    import transformers as library

    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library


def float_model(kind: str) -> Any:
    """A model in bfloat16 whose weights have groups of unlike sizes, zeros of both signs and one square of zeros."""
    library = transformers()
    name, sizes = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(len(kind))
        config = getattr(library, f"{name}Config")(**BASE | sizes)
        model = getattr(library, f"{name}ForCausalLM")(config).to(torch.bfloat16)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.mul_(torch.exp2(torch.randn(*weight.shape[:-1], 1)))
                    weight[..., ::7].mul_(
                        2**-12
                    )  # below half of the smallest code beside the rest: zeros of both signs
                if weight.dim() == 2 and min(weight.shape) > 128:
                    weight[:128, :128] = 0
    return model


# --- one file of floats or codes, and folders of them ------------------------------------------------------------


def tensors_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def rewritten(folder: Path, change: Callable[[str, Tensor], dict[str, Tensor]], config: dict[str, Any] | None) -> None:
    """Put what ``change`` gives for each tensor in its place, file by file; ``config`` says how it is quantised."""
    from safetensors.torch import load_file, save_file

    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text()) if index.exists() else None
    for file in sorted(folder.glob("*.safetensors")):
        changed = {}
        for name, tensor in load_file(file).items():
            changed |= change(name, tensor)
        save_file({name: tensor.contiguous() for name, tensor in changed.items()}, file, {"format": "pt"})
        if listed:
            listed["weight_map"] = {k: v for k, v in listed["weight_map"].items() if v != file.name}
            listed["weight_map"] |= dict.fromkeys(changed, file.name)
    if listed:
        listed["metadata"] = {"total_size": sum(t.nbytes for t in tensors_of(folder).values())}
        listed["weight_map"] = dict(sorted(listed["weight_map"].items()))
        index.write_text(json.dumps(listed, indent=2) + "\n")
    if config is not None:
        path = folder / "config.json"
        said = json.loads(path.read_text())
        said.pop("quantization_config", None)
        path.write_text(json.dumps(said | ({"quantization_config": config} if config else {}), indent=2) + "\n")


def is_linear(name: str, tensor: Tensor) -> bool:
    """True where recipes quantise the tensor: a layer's matrix, neither the embedding nor the head nor a router."""
    kept = ("embed_tokens", "lm_head", "mlp.gate.weight", "block_sparse_moe.gate.weight", "router")
    return tensor.dim() == 2 and name.endswith(".weight") and not any(part in name for part in kept)


def grouped(value: Tensor, block: tuple[int, int]) -> Iterator[tuple[tuple[int, int], tuple[slice, slice]]]:
    """Each square's place among the scales, and where its weights are; those at the edges are partial."""
    for row in range(-(-value.shape[0] // block[0])):
        for column in range(-(-value.shape[1] // block[1])):
            places = zip((row, column), block, strict=True)
            yield (row, column), tuple(slice(at * size, (at + 1) * size) for at, size in places)  # type: ignore[misc]


def by_formula(value: Tensor, block: tuple[int, int], code: torch.dtype, scale: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix: ``amax / max`` of each square, rounded into the scales' dtype (E8M0: upwards)."""
    value, largest = value.float(), torch.finfo(code).max
    scales = torch.ones(-(-value.shape[0] // block[0]), -(-value.shape[1] // block[1]))
    codes = torch.zeros_like(value).to(code)
    for at, where in grouped(value, block):
        fitted = value[where].abs().max() / largest
        if fitted > 0:
            scales[at] = torch.exp2(fitted.log2().ceil()) if scale == torch.float8_e8m0fnu else fitted.to(scale)
        codes[where] = (value[where] / scales[at]).clamp(-largest, largest).to(code)
    return codes, scales.to(scale)


# --- how each library makes one ----------------------------------------------------------------------------------


def fine_grained(folder: Path, model: Any, shards: str, **options: Any) -> None:
    """``FineGrainedFP8Config`` of transformers: quantised while it loads, then ``save_pretrained``.

    transformers refuses to quantise without a GPU, though its operation runs anywhere: the refusal is what is left out.
    """
    library = transformers()
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer as Quantizer

    model.save_pretrained(folder / "floats")
    config = library.FineGrainedFP8Config(**options)
    with mock.patch.object(Quantizer, "validate_environment"):
        made = type(model).from_pretrained(folder / "floats", quantization_config=config, dtype=torch.bfloat16)
    for name, scale in made.named_parameters():
        if name.endswith("activation_scale"):
            scale.data.fill_(float(torch.rand(())) / 448)  # found by calibration; until then whatever was in memory
    made.save_pretrained(folder, max_shard_size=shards)
    shutil.rmtree(folder / "floats")


def fine_grained_tensors(folder: Path, model: Any, shards: str, **options: Any) -> None:
    """``Fp8Quantize`` of transformers for each matrix of a float folder: experts one by one, as they are published.

    (What ``save_pretrained`` of 5.24 writes of experts has one scale for all of them beside weights of each.)
    """
    library = transformers()
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    model.save_pretrained(folder, max_shard_size=shards)
    config = library.FineGrainedFP8Config(**options)
    quantize = Fp8Quantize(mock.Mock(quantization_config=config))
    rewritten(folder, lambda k, v: quantize.convert({k: v}) if is_linear(k, v) else {k: v}, config.to_dict())


def squares(folder: Path, model: Any, shards: str, code: Any = E4M3, scale: Any = torch.float32, **config: Any) -> None:
    """The layout of DeepSeek-V3 by its formula; squares at the edges are partial."""
    transformers()
    block = config.setdefault("weight_block_size", [128, 128])
    model.save_pretrained(folder, max_shard_size=shards)

    def change(name: str, value: Tensor) -> dict[str, Tensor]:
        if not is_linear(name, value):
            return {name: value}
        codes, scales = by_formula(value, tuple(block), code, scale)
        return {name: codes, f"{name}_scale_inv": scales}

    fmt = {E4M3: "e4m3", E5M2: "e5m2"}[code]
    ue8m0 = {"scale_fmt": "ue8m0"} if scale == torch.float8_e8m0fnu else {}
    rewritten(folder, change, {"activation_scheme": "dynamic", "fmt": fmt, "quant_method": "fp8", **ue8m0, **config})


def compressed(
    folder: Path, model: Any, shards: str, scheme: str, wide: bool = False, head: bool = False, **changes: Any
) -> None:
    """``ModelCompressor`` of compressed-tensors with the recipe of llm-compressor: scales from each group's range."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    preset = preset_name_to_scheme(scheme, ["Linear"])
    for part, values in changes.items():
        args = getattr(preset, part)
        setattr(preset, part, values if args is None or values is None else args.model_copy(update=values))
    config = QuantizationConfig(config_groups={"group_0": preset}, ignore=[] if head else ["lm_head"])
    if any(("experts" in name for name, _ in model.named_parameters())):
        _compressed_tensors(folder, model, shards, config, preset, wide)
        return
    apply_quantization_config(model, config, show_progress=False)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            scale = _observed(module.weight.float() if wide else module.weight, preset.weights)
            assert scale.shape == module.weight_scale.shape
            module.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(float(torch.rand(())) / 448)
            for name in [name for name, _ in module.named_parameters(recurse=False) if name.endswith("_zero_point")]:
                if "input" in name:
                    delattr(module, name)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder, max_shard_size=shards)
    compressor.update_config(str(folder))


def _compressed_tensors(folder: Path, model: Any, shards: str, config: Any, scheme: Any, wide: bool) -> None:
    """Writes a folder by the compressor's function for single layers, because fused experts are no ``Linear``."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format

    scheme.format = infer_module_format(torch.nn.Linear, scheme)
    config.format, config.quantization_status = scheme.format.value, "compressed"
    compress = BaseCompressor.get_value_from_registry(scheme.format.value).compress
    model.save_pretrained(folder, max_shard_size=shards)

    def change(name: str, value: Tensor) -> dict[str, Tensor]:
        if not is_linear(name, value):
            return {name: value}
        scale = _observed(value.float() if wide else value, scheme.weights)
        made = compress({"weight": value, "weight_scale": scale}, scheme)
        return {name.removesuffix("weight") + part: tensor for part, tensor in made.items()}

    rewritten(folder, change, {"quant_method": "compressed-tensors", **json.loads(config.model_dump_json())})


def _observed(weight: Tensor, args: Any) -> Tensor:
    """The scales that a min-max observer of llm-compressor gives a matrix."""
    from compressed_tensors.quantization.utils import calculate_qparams

    rows, columns = weight.shape
    if args.strategy == "block":
        size, other = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % other, 0, -rows % size))
        parts, over = padded.unflatten(0, (-1, size)).unflatten(-1, (-1, other)), (1, 3)
    elif args.strategy == "group":
        parts, over = weight.unflatten(-1, (-1, args.group_size)), (-1,)
    else:
        parts, over = weight, (-1,) if args.strategy == "channel" else (0, 1)
    scale, _ = calculate_qparams(parts.amin(over), parts.amax(over), args)
    return scale.unsqueeze(-1) if args.strategy == "channel" else scale


def shared(folder: Path, model: Any, shards: str) -> None:
    """One scale a tensor, the same for ``w1`` and ``w3`` of each expert, as publishers write what servers fuse."""
    transformers()
    model.save_pretrained(folder, max_shard_size=shards)
    values = tensors_of(folder)

    def change(name: str, value: Tensor) -> dict[str, Tensor]:
        if not is_linear(name, value):
            return {name: value}
        other = name.replace(".w1.", ".w3.") if ".w1." in name else name.replace(".w3.", ".w1.")
        both = torch.cat([value, values[other]]) if other != name else value
        _, scale = by_formula(both, tuple(both.shape), E4M3, torch.float32)  # type: ignore[arg-type]
        return {name: (value / scale).to(E4M3), name + "_scale": scale.reshape(1)}

    kind = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": kind, "format": "float-quantized"}}
    said = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    rewritten(folder, change, said | {"quantization_status": "compressed", "ignore": ["lm_head"]})


def torchao(folder: Path, model: Any, shards: str) -> None:
    """``Float8WeightOnlyConfig`` of torchao through transformers; the files' metadata says what each weight is."""
    from torchao import quantization as ao

    library = transformers()
    model.save_pretrained(folder / "floats")
    config = library.TorchAoConfig(ao.Float8WeightOnlyConfig())
    made = type(model).from_pretrained(folder / "floats", quantization_config=config, dtype=torch.bfloat16)
    made.save_pretrained(folder, max_shard_size=shards)
    shutil.rmtree(folder / "floats")


def flat(folder: Path, model: Any, shards: str, **options: Any) -> None:
    """``compressed``, its scales of rows in one dimension, or in none where there is one."""
    compressed(folder, model, shards, **options)
    rewritten(folder, lambda k, v: {k: v.squeeze() if k.endswith("weight_scale") else v}, None)


def autofp8(folder: Path, model: Any, shards: str) -> None:
    """AutoFP8's files by its formula: one scale a tensor, and one of its input, without dimensions."""
    modelopt(folder, model, shards)
    (folder / "hf_quant_config.json").unlink()
    said = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    rewritten(folder, lambda k, v: {k: v}, said)


def modelopt(folder: Path, model: Any, shards: str, kv: bool = False) -> None:
    """Files of Model-Optimizer's ``export_hf_checkpoint`` for FP8, by its formula: ``amax / 448``, one a tensor."""
    transformers()
    model.save_pretrained(folder, max_shard_size=shards)
    drawn = torch.Generator().manual_seed(3)

    def change(name: str, value: Tensor) -> dict[str, Tensor]:
        if not is_linear(name, value):
            return {name: value}
        codes, scale = by_formula(value, tuple(value.shape), E4M3, torch.float32)  # type: ignore[arg-type]
        stem = name.removesuffix("weight")
        extra = {stem + f"{part}_scale": torch.ones(()) for part in "kv" if kv and f"{part}_proj" in name}
        given = (torch.rand((), generator=drawn) + 0.5) / 448
        return {name: codes, stem + "weight_scale": scale.reshape(()), stem + "input_scale": given} | extra

    producer = {"name": "modelopt", "version": "0.35.0"}
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8" if kv else None, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": producer, "quantization": said}, indent=4))
    kind = {"dynamic": False, "num_bits": 8, "type": "float"}
    group = {"input_activations": kind, "weights": kind, "targets": ["Linear"]}
    new = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "quant_algo": "FP8", "producer": producer}
    rewritten(folder, change, {**new, "quant_method": "modelopt"} if kv else None)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def gpt_oss(folder: Path, model: Any, shards: str) -> None:
    """The experts of gpt-oss: E2M1, two a byte, the first in the low half; each 32 of a row have an E8M0."""
    transformers()
    model.save_pretrained(folder, max_shard_size=shards)

    def change(name: str, value: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: value}
        parts = value.float().transpose(-1, -2).unflatten(-1, (-1, 32))  # files have outputs before inputs
        largest = parts.abs().amax(-1, keepdim=True).clamp(min=2**-100)
        scales = largest.log2().floor() - 2
        near = (parts.abs() / scales.exp2()).unsqueeze(-1).sub(E2M1).abs().argmin(-1)
        codes = (near + 8 * torch.signbit(parts)).to(torch.uint8)
        packed = codes[..., ::2] + 16 * codes[..., 1::2]
        return {f"{name}_blocks": packed, f"{name}_scales": (scales.squeeze(-1) + 127).to(torch.uint8)}

    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    rewritten(folder, change, {"quant_method": "mxfp4", "modules_to_not_convert": kept})


# --- the layouts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    kind: str
    write: Callable[..., None]
    options: dict[str, Any] = field(default_factory=dict)
    #: whose code makes it: "transformers", "compressed-tensors", "torchao", or "formula"
    by: str = "formula"
    shards: str = "10GB"


def _hf(kind: str, write: Any = fine_grained, shards: str = "10GB", **options: Any) -> Layout:
    return Layout(kind, write, options, "transformers", shards)


def _ct(kind: str, scheme: str, shards: str = "10GB", **options: Any) -> Layout:
    return Layout(kind, compressed, {"scheme": scheme, **options}, "compressed-tensors", shards)


_STATIC = {"dynamic": False, "strategy": "tensor"}
LAYOUTS: dict[str, Layout] = {
    "squares": _hf("llama"),
    "squares, shards": _hf("llama of 4", shards="1MB"),
    "squares, tied": _hf("qwen3"),
    "squares, fused": _hf("phi3"),
    "squares, ue8m0": _hf("llama", scale_fmt="ue8m0"),
    "squares, bfloat16": Layout("llama", squares, {"scale": torch.bfloat16}),
    "squares, partial": Layout("llama uneven", squares),
    "squares, experts": _hf("qwen3 experts", fine_grained_tensors, "400KB"),
    "squares, mixtral": _hf("mixtral", fine_grained_tensors),
    "squares, deepseek": _hf("deepseek", fine_grained_tensors),
    "squares, e5m2": Layout("llama", squares, {"code": E5M2}),
    "tensor of fp8": _hf("llama tied", weight_block_size=None),
    "tensor of fp8, static": _hf("llama", weight_block_size=None, activation_scheme="static"),
    "mxfp8 of fp8": _hf("llama", weight_block_size=(1, 32), scale_fmt="ue8m0"),
    "tensor of fp8, autofp8": Layout("llama", autofp8),
    "tensor": _ct("llama", "FP8", wide=True),
    "tensor, bfloat16": _ct("llama tied", "FP8"),
    "tensor, flat": Layout("llama", flat, {"scheme": "FP8"}),
    "tensor, experts": _ct("mixtral", "FP8_DYNAMIC", weights={"strategy": "tensor"}),
    "tensor, shared": Layout("mixtral", shared),
    "rows": _ct("llama", "FP8_DYNAMIC", wide=True),
    "rows, bfloat16": _ct("qwen3", "FP8_DYNAMIC"),
    "rows, shards": _ct("llama of 4", "FP8_DYNAMIC", "1MB"),
    "rows, fused": _ct("phi3", "FP8_DYNAMIC"),
    "rows, uneven": _ct("llama uneven", "FP8_DYNAMIC"),
    "rows, experts": _ct("qwen3 experts", "FP8_DYNAMIC"),
    "rows, head": _ct("qwen2", "FP8_DYNAMIC", head=True),
    "rows, flat": Layout("qwen3", flat, {"scheme": "FP8_DYNAMIC"}),
    "rows, naive": _ct("llama", "FP8_DYNAMIC", input_activations=None),
    "blocks": _ct("llama", "FP8_BLOCK", wide=True),
    "blocks, bfloat16": _ct("llama", "FP8_BLOCK"),
    "blocks, experts": _ct("qwen3 experts", "FP8_BLOCK"),
    "mxfp8": _ct("llama", "MXFP8"),
    "mxfp8, experts": _ct("qwen3 experts", "MXFP8"),
    "torchao": Layout("llama", torchao, by="torchao"),
    "modelopt": Layout("llama", modelopt),
    "modelopt, kv": Layout("llama of 4", modelopt, {"kv": True}, shards="1MB"),
    "gpt-oss": Layout("gpt-oss", gpt_oss),
    "mxfp4": _ct("llama", "MXFP4A16"),
}


def make(name: str, folder: Path) -> Path:
    """Write the folder of one layout; the same bytes each time.  Skips the test where the library is missing."""
    layout = LAYOUTS[name]
    model = float_model(layout.kind)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        layout.write(folder, model, layout.shards, **layout.options)
    return folder
