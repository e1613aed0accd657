"""An FP8 folder as its publisher reads it: values of its weights, and a model to run."""

import json
from pathlib import Path
from typing import Any

import torch
from fp8_folders import E4M3, E5M2, spread, tensors_of, transformers
from torch import Tensor, nn


def settings_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text()).get("quantization_config", {})


def served(folder: Path, dtype: torch.dtype) -> Any:
    """Return the model as transformers reads it, decoded into ``dtype``.

    The code that decodes is its own, compressed-tensors' or torchao's.
    """
    library, method = transformers(), settings_of(folder).get("quant_method")
    decode = {
        "compressed-tensors": "CompressedTensorsConfig",
        "mxfp4": "Mxfp4Config",
        "fp8": "FineGrainedFP8Config",
    }
    options = (
        {"quantization_config": getattr(library, decode[method])(dequantize=True)}
        if method in decode
        else {}
    )
    model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module.weight.data) is not Tensor:
            module.weight = nn.Parameter(module.weight.dequantize().detach().to(dtype))
    return model


def decoded(folder: Path) -> dict[str, Tensor]:
    """Return the weights by their names in the files.

    compressed-tensors decodes its own; elsewhere codes are multiplied by their scales.
    """
    weights, files, config = {}, tensors_of(folder), settings_of(folder)
    if config.get("quant_method") != "compressed-tensors":
        for name, codes in files.items():
            if codes.dtype in (E4M3, E5M2):
                scale = next(
                    files[name + end].float()
                    for end in ("_scale_inv", "_scale")
                    if name + end in files
                )
                weights[name] = codes.float() * (
                    spread(scale, (128, 128), codes.shape) if scale.dim() else scale
                )
        return weights
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    (group,) = config["config_groups"].values()
    decompress = BaseCompressor.get_value_from_registry(
        group["format"] or config["format"]
    ).decompress
    for name in files:
        if name.endswith(".weight_scale"):
            codes = name.removesuffix("_scale")
            # `decompress` takes no scales of rows in one dimension.
            scale = (
                files[name].reshape(-1, 1)
                if group["weights"]["strategy"] == "channel"
                else files[name]
            )
            parts = {
                "weight": files[codes],
                "weight_scale": scale,
            }
            weights[codes] = decompress(parts, QuantizationScheme.model_validate(group))["weight"]
    return weights
