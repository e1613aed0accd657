"""Small random model folders in published FP8 layouts.

The libraries that publish a layout make them, never this one.

``make("name", folder)`` writes the folder ``LAYOUTS`` names so. A layout whose library
is not at hand is written by its published formula: ``amax / 448`` of each group,
division, rounding.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BASE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
BASE |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 96}
BASE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
RANKS = {
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
DEPTHS = {
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
}
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
        EXPERTS
        | RANKS
        | DEPTHS
        | {"n_routed_experts": 4, "hidden_size": 128, "intermediate_size": 256},
    ),
    "gpt-oss": ("GptOss", EXPERTS | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}),
}


def transformers() -> Any:
    import transformers as library

    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library


def float_model(kind: str) -> Any:
    """Return a bfloat16 model with groups of unlike sizes.

    It also has zeros of both signs and one square of zeros.
    """
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
                    weight[..., ::7].mul_(2**-12)  # below half of the smallest code beside the rest
                if weight.dim() == 2 and min(weight.shape) > 128:
                    weight[:128, :128] = 0
    return model


def tensors_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def rewritten(
    folder: Path, change: Callable[[str, Tensor], dict[str, Tensor]], config: dict[str, Any] | None
) -> None:
    """Replace each tensor by what ``change`` returns for it, file by file.

    ``config`` becomes the folder's ``quantization_config``; an empty one removes it, and
    None leaves what there is.
    """
    from safetensors.torch import load_file, save_file

    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text()) if index.exists() else None
    for file in sorted(folder.glob("*.safetensors")):
        changed = {}
        for name, tensor in load_file(file).items():
            changed |= change(name, tensor)
        save_file(
            {name: tensor.contiguous() for name, tensor in changed.items()}, file, {"format": "pt"}
        )
        if listed:
            listed["weight_map"] = {k: v for k, v in listed["weight_map"].items() if v != file.name}
            listed["weight_map"] |= dict.fromkeys(changed, file.name)
    if listed:
        listed["metadata"] = {"total_size": sum(t.nbytes for t in tensors_of(folder).values())}
        listed["weight_map"] = dict(sorted(listed["weight_map"].items()))
        index.write_text(json.dumps(listed, indent=2) + "\n")
    if config is not None:
        path = folder / "config.json"
        config_of_model = json.loads(path.read_text())
        config_of_model.pop("quantization_config", None)
        if config:
            config_of_model["quantization_config"] = config
        path.write_text(json.dumps(config_of_model, indent=2) + "\n")


def is_linear(name: str, tensor: Tensor) -> bool:
    """Whether recipes quantise the tensor.

    They take a layer's matrix, neither the embedding nor the head nor a router.
    """
    floats = (
        "embed_tokens",
        "lm_head",
        "mlp.gate.weight",
        "block_sparse_moe.gate.weight",
        "router",
    )
    return (
        tensor.dim() == 2 and name.endswith(".weight") and not any(part in name for part in floats)
    )


def quantised(
    folder: Path, make: Callable[[str, Tensor], dict[str, Tensor]], config: dict[str, Any] | None
) -> None:
    """Rewrite the matrices of linear layers; arguments are those of `rewritten`."""
    rewritten(
        folder,
        lambda name, value: make(name, value) if is_linear(name, value) else {name: value},
        config,
    )


def in_groups(value: Tensor, block: Any) -> Tensor:
    """Return the values with each square's rows and columns in dimensions 1 and 3.

    Squares at the edges end in zeros.
    """
    padding = (0, -value.shape[1] % block[1], 0, -value.shape[0] % block[0])
    return (
        torch.nn.functional.pad(value, padding)
        .unflatten(0, (-1, block[0]))
        .unflatten(-1, (-1, block[1]))
    )


def spread(scales: Tensor, block: Any, shape: Any) -> Tensor:
    """Return the scale of each weight of a matrix from those of its blocks."""
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[
        : shape[0], : shape[1]
    ]


def by_formula(
    value: Tensor, block: Any, code: torch.dtype, scale: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a matrix.

    A scale is ``amax / max`` of a square, rounded into the scales' dtype.
    """
    value, largest = value.float(), torch.finfo(code).max
    fitted = in_groups(value, block).abs().amax((1, 3)) / largest
    scales = torch.where(fitted > 0, fitted.to(scale).float(), 1.0)
    return (value / spread(scales, block, value.shape)).clamp(-largest, largest).to(
        code
    ), scales.to(scale)


def fine_grained(folder: Path, model: Any, shards: str, **options: Any) -> None:
    """Write ``FineGrainedFP8Config`` of transformers.

    Its refusal to quantise without a GPU is left out.
    """
    library = transformers()
    from transformers.quantizers.quantizer_finegrained_fp8 import (
        FineGrainedFP8HfQuantizer as Quantizer,
    )

    model.save_pretrained(folder / "floats")
    config = library.FineGrainedFP8Config(**options)
    with mock.patch.object(Quantizer, "validate_environment"):
        quantized = type(model).from_pretrained(
            folder / "floats", quantization_config=config, dtype=torch.bfloat16
        )
    for name, scale in quantized.named_parameters():
        if name.endswith("activation_scale"):
            # Calibration finds it; until then it is whatever was in memory.
            scale.data.fill_(float(torch.rand(())) / 448)
    quantized.save_pretrained(folder, max_shard_size=shards)
    shutil.rmtree(folder / "floats")


def fine_grained_tensors(folder: Path, model: Any, shards: str, **options: Any) -> None:
    """Write ``Fp8Quantize`` of transformers for each matrix of a float folder.

    Experts are written one by one, as they are published.
    """
    library = transformers()
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    model.save_pretrained(folder, max_shard_size=shards)
    config = library.FineGrainedFP8Config(**options)
    quantize = Fp8Quantize(mock.Mock(quantization_config=config))
    quantised(folder, lambda k, v: quantize.convert({k: v}), config.to_dict())


def squares(
    folder: Path, model: Any, shards: str, code: Any = E4M3, scale: Any = torch.float32
) -> None:
    """The layout of DeepSeek-V3 by its formula; squares at the edges are partial."""
    model.save_pretrained(folder, max_shard_size=shards)

    def change(name: str, value: Tensor) -> dict[str, Tensor]:
        codes, scales = by_formula(value, (128, 128), code, scale)
        return {name: codes, f"{name}_scale_inv": scales}

    quantization = {
        "activation_scheme": "dynamic",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    quantised(folder, change, {"fmt": {E4M3: "e4m3", E5M2: "e5m2"}[code], **quantization})


def compressed(
    folder: Path,
    model: Any,
    shards: str,
    scheme: str,
    wide: bool = False,
    head: bool = False,
    **changes: Any,
) -> None:
    """Write ``ModelCompressor`` of compressed-tensors, with llm-compressor's recipe.

    Scales come from each group's range.

    Args:
        folder: where it is written.
        model: a float model.
        shards: the largest size of a file.
        scheme: the name of a preset of compressed-tensors.
        wide: whether scales are found in float32.
        head: whether the head is quantised too.
        changes: parts of the preset, and what is changed in each; None removes it.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    preset = preset_name_to_scheme(scheme, ["Linear"])
    for part, values in changes.items():
        args = getattr(preset, part)
        setattr(
            preset,
            part,
            values if args is None or values is None else args.model_copy(update=values),
        )
    config = QuantizationConfig(
        config_groups={"group_0": preset}, ignore=[] if head else ["lm_head"]
    )
    if any("experts" in name for name, _ in model.named_parameters()):
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
            for name in [
                name
                for name, _ in module.named_parameters(recurse=False)
                if name.endswith("_zero_point")
            ]:
                if "input" in name:
                    delattr(module, name)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder, max_shard_size=shards)
    compressor.update_config(str(folder))


def _compressed_tensors(
    folder: Path, model: Any, shards: str, config: Any, scheme: Any, wide: bool
) -> None:
    """Write a folder by the compressor's function for single layers.

    Fused experts are no ``Linear``.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format

    scheme.format = infer_module_format(torch.nn.Linear, scheme)
    config.format, config.quantization_status = scheme.format.value, "compressed"
    compress = BaseCompressor.get_value_from_registry(scheme.format.value).compress
    model.save_pretrained(folder, max_shard_size=shards)

    def change(name: str, value: Tensor) -> dict[str, Tensor]:
        scale = _observed(value.float() if wide else value, scheme.weights)
        parts = compress({"weight": value, "weight_scale": scale}, scheme)
        return {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}

    quantised(
        folder,
        change,
        {"quant_method": "compressed-tensors", **json.loads(config.model_dump_json())},
    )


def _observed(weight: Tensor, args: Any) -> Tensor:
    """The scales that a min-max observer of llm-compressor gives a matrix."""
    from compressed_tensors.quantization.utils import calculate_qparams

    if args.strategy == "block":
        parts, over = in_groups(weight, args.block_structure), (1, 3)
    elif args.strategy == "group":
        parts, over = weight.unflatten(-1, (-1, args.group_size)), (-1,)
    else:
        parts, over = weight, (-1,) if args.strategy == "channel" else (0, 1)
    scale, _ = calculate_qparams(parts.amin(over), parts.amax(over), args)
    return scale.unsqueeze(-1) if args.strategy == "channel" else scale


def shared(folder: Path, model: Any, shards: str) -> None:
    """Write one scale a tensor, the same for ``w1`` and ``w3`` of an expert.

    Publishers do so because servers fuse these.
    """
    model.save_pretrained(folder, max_shard_size=shards)
    values = tensors_of(folder)

    def change(name: str, value: Tensor) -> dict[str, Tensor]:
        if ".w1." in name:
            fused_name = name.replace(".w1.", ".w3.")
        else:
            fused_name = name.replace(".w3.", ".w1.")
        fused = value if fused_name == name else torch.cat([value, values[fused_name]])
        _, scale = by_formula(fused, fused.shape, E4M3, torch.float32)
        return {name: (value / scale).to(E4M3), name + "_scale": scale.reshape(1)}

    kind = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": kind, "format": "float-quantized"}}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": groups,
    }
    quantised(
        folder, change, quantization | {"quantization_status": "compressed", "ignore": ["lm_head"]}
    )


def torchao(folder: Path, model: Any, shards: str) -> None:
    """Write ``Float8WeightOnlyConfig`` of torchao through transformers.

    The files' metadata says what each weight is.
    """
    from torchao import quantization as ao

    library = transformers()
    model.save_pretrained(folder / "floats")
    config = library.TorchAoConfig(ao.Float8WeightOnlyConfig())
    quantized = type(model).from_pretrained(
        folder / "floats", quantization_config=config, dtype=torch.bfloat16
    )
    quantized.save_pretrained(folder, max_shard_size=shards)
    shutil.rmtree(folder / "floats")


def flat(folder: Path, model: Any, shards: str, **options: Any) -> None:
    """Write ``compressed``, with scales of rows in one dimension.

    The one scale of a tensor has no dimension.
    """
    compressed(folder, model, shards, **options)
    rewritten(folder, lambda k, v: {k: v.squeeze() if k.endswith("weight_scale") else v}, None)


def autofp8(folder: Path, model: Any, shards: str) -> None:
    """Write AutoFP8's files by its formula.

    One scale a tensor, and one of its input, without dimensions.
    """
    modelopt(folder, model, shards)
    (folder / "hf_quant_config.json").unlink()
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": ["lm_head"],
    }
    rewritten(folder, lambda k, v: {k: v}, quantization)


def modelopt(folder: Path, model: Any, shards: str, kv: bool = False) -> None:
    """Write the FP8 files of Model-Optimizer's ``export_hf_checkpoint``.

    Its formula is ``amax / 448``, one a tensor.
    """
    model.save_pretrained(folder, max_shard_size=shards)

    def change(name: str, value: Tensor) -> dict[str, Tensor]:
        codes, scale = by_formula(value, value.shape, E4M3, torch.float32)
        stem = name.removesuffix("weight")
        extra = {
            stem + f"{part}_scale": torch.ones(()) for part in "kv" if kv and f"{part}_proj" in name
        }
        input_scale = (torch.rand(()) + 0.5) / 448
        return {
            name: codes,
            stem + "weight_scale": scale.reshape(()),
            stem + "input_scale": input_scale,
        } | extra

    producer = {"name": "modelopt", "version": "0.35.0"}
    quantization = {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8" if kv else None,
        "exclude_modules": ["lm_head"],
    }
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"producer": producer, "quantization": quantization}, indent=4)
    )
    kind = {"dynamic": False, "num_bits": 8, "type": "float"}
    group = {"input_activations": kind, "weights": kind, "targets": ["Linear"]}
    new = {
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quant_algo": "FP8",
        "producer": producer,
    }
    quantised(folder, change, {**new, "quant_method": "modelopt"} if kv else None)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def gpt_oss(folder: Path, model: Any, shards: str) -> None:
    """Write the experts of gpt-oss in E2M1, two a byte, the first in the low half.

    Each 32 values of a row have an E8M0 scale.
    """
    model.save_pretrained(folder, max_shard_size=shards)

    def change(name: str, value: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: value}
        parts = (
            value.float().transpose(-1, -2).unflatten(-1, (-1, 32))
        )  # files have outputs before inputs
        largest = parts.abs().amax(-1, keepdim=True).clamp(min=2**-100)
        scales = largest.log2().floor() - 2
        near = (parts.abs() / scales.exp2()).unsqueeze(-1).sub(E2M1).abs().argmin(-1)
        codes = (near + 8 * torch.signbit(parts)).to(torch.uint8)
        packed = codes[..., ::2] + 16 * codes[..., 1::2]
        return {
            f"{name}_blocks": packed,
            f"{name}_scales": (scales.squeeze(-1) + 127).to(torch.uint8),
        }

    floats = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    rewritten(folder, change, {"quant_method": "mxfp4", "modules_to_not_convert": floats})


def layout(
    kind: str, write: Callable[..., None] = fine_grained, shards: str = "10GB", **options: Any
) -> Any:
    """Return an entry of `LAYOUTS`: kind of model, writer, size of files, the writer's options."""
    return kind, write, shards, options


LAYOUTS: dict[str, tuple[str, Callable[..., None], str, dict[str, Any]]] = {
    "squares": layout("llama"),
    "squares, shards": layout("llama of 4", shards="1MB"),
    "squares, tied": layout("qwen3"),
    "squares, fused": layout("phi3"),
    "squares, ue8m0": layout("llama", scale_fmt="ue8m0"),
    "squares, bfloat16": layout("llama", squares, scale=torch.bfloat16),
    "squares, partial": layout("llama uneven", squares),
    "squares, experts": layout("qwen3 experts", fine_grained_tensors, "400KB"),
    "squares, mixtral": layout("mixtral", fine_grained_tensors),
    "squares, deepseek": layout("deepseek", fine_grained_tensors),
    "squares, e5m2": layout("llama", squares, code=E5M2),
    "tensor of fp8": layout("llama tied", weight_block_size=None),
    "tensor of fp8, static": layout("llama", weight_block_size=None, activation_scheme="static"),
    "mxfp8 of fp8": layout("llama", weight_block_size=(1, 32), scale_fmt="ue8m0"),
    "tensor of fp8, autofp8": layout("llama", autofp8),
    "tensor": layout("llama", compressed, scheme="FP8", wide=True),
    "tensor, bfloat16": layout("llama tied", compressed, scheme="FP8"),
    "tensor, flat": layout("llama", flat, scheme="FP8"),
    "tensor, experts": layout(
        "mixtral", compressed, scheme="FP8_DYNAMIC", weights={"strategy": "tensor"}
    ),
    "tensor, shared": layout("mixtral", shared),
    "rows": layout("llama", compressed, scheme="FP8_DYNAMIC", wide=True),
    "rows, bfloat16": layout("qwen3", compressed, scheme="FP8_DYNAMIC"),
    "rows, shards": layout("llama of 4", compressed, "1MB", scheme="FP8_DYNAMIC"),
    "rows, fused": layout("phi3", compressed, scheme="FP8_DYNAMIC"),
    "rows, uneven": layout("llama uneven", compressed, scheme="FP8_DYNAMIC"),
    "rows, experts": layout("qwen3 experts", compressed, scheme="FP8_DYNAMIC"),
    "rows, head": layout("qwen2", compressed, scheme="FP8_DYNAMIC", head=True),
    "rows, flat": layout("qwen3", flat, scheme="FP8_DYNAMIC"),
    "rows, naive": layout("llama", compressed, scheme="FP8_DYNAMIC", input_activations=None),
    "blocks": layout("llama", compressed, scheme="FP8_BLOCK", wide=True),
    "blocks, bfloat16": layout("llama", compressed, scheme="FP8_BLOCK"),
    "blocks, experts": layout("qwen3 experts", compressed, scheme="FP8_BLOCK"),
    "mxfp8": layout("llama", compressed, scheme="MXFP8"),
    "mxfp8, experts": layout("qwen3 experts", compressed, scheme="MXFP8"),
    "torchao": layout("llama", torchao),
    "modelopt": layout("llama", modelopt),
    "modelopt, kv": layout("llama of 4", modelopt, kv=True, shards="1MB"),
    "gpt-oss": layout("gpt-oss", gpt_oss),
    "mxfp4": layout("llama", compressed, scheme="MXFP4A16"),
}


def make(name: str, folder: Path) -> Path:
    """Write the folder of one layout; the same bytes each time."""
    kind, write, shards, options = LAYOUTS[name]
    model = float_model(kind)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        write(folder, model, shards, **options)
    return folder
