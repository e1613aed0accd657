"""An FP8 folder as its publisher reads it: values of its weights, and a model to run."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from fp8_folders import E4M3, E5M2, grouped, rewritten, tensors_of, transformers
from torch import Tensor


def served(folder: Path, dtype: torch.dtype) -> Any:
    """The model as transformers reads it, decoded into ``dtype`` by its own code, compressed-tensors' or torchao's."""
    library = transformers()
    method = quantization_of(folder).get("quant_method")
    decode = {"compressed-tensors": "CompressedTensorsConfig", "mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
    given = {"quantization_config": getattr(library, decode[method])(dequantize=True)} if method in decode else {}
    model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **given).eval()
    if method == "torchao":
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and type(module.weight.data) is not Tensor:
                module.weight = torch.nn.Parameter(module.weight.dequantize().detach().to(dtype))
    return model


def served_by_values(folder: Path, dtype: torch.dtype, place: Path) -> Any:
    """The served model from a float folder of :func:`decoded` values, for layouts that transformers does not read."""
    values = decoded(folder)
    shutil.copytree(folder, place)

    def change(name: str, value: Tensor) -> dict[str, Tensor]:
        if name in values:
            return {name: values[name].to(dtype)}
        return {} if name.endswith(("_scale", "_scale_inv")) else {name: value}

    rewritten(place, change, {})
    return transformers().AutoModelForCausalLM.from_pretrained(place, dtype=dtype).eval()


def quantization_of(folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    return said


def decoded(folder: Path) -> dict[str, Tensor]:
    """Each weight as its publisher decodes it, in float32 or the dtype it is given in, by its name in the files."""
    files, config = tensors_of(folder), quantization_of(folder)
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return _decompressed(files, config)
    if method == "torchao":
        model = served(folder, torch.bfloat16)
        return {k: model.get_parameter(k.replace("._weight_qdata", ".weight")) for k in files if k.endswith("_qdata")}
    if method == "mxfp4":
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors as unpacked

        experts = {name: name.removesuffix("blocks") + "scales" for name in files if name.endswith("_blocks")}
        # the model has inputs before outputs, files have them after
        return {k: unpacked(files[k], files[s], dtype=torch.float32).transpose(1, 2) for k, s in experts.items()}
    found = {}
    for name, codes in files.items():
        if codes.dtype in (E4M3, E5M2):
            scale = next(files[name + end] for end in ("_scale_inv", "_scale") if name + end in files)
            whole = scale.dim() < 2 or any(size % parts for size, parts in zip(codes.shape, scale.shape, strict=True))
            whole |= any(size % 128 for size in codes.shape)
            found[name] = _by_squares(codes, scale) if whole else _fine_grained(codes, scale)
    return found


def _fine_grained(codes: Tensor, scale: Tensor) -> Tensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)


def _by_squares(codes: Tensor, scale: Tensor) -> Tensor:
    """One scale, or squares of 128 that may be partial: those transformers reads as equal parts, or refuses."""
    if scale.dim() == 0:
        return codes.float() * scale.float()
    value = codes.float()
    for at, where in grouped(value, (128, 128)):
        value[where] *= scale[at].float()
    return value


def _decompressed(files: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    (group,) = config["config_groups"].values()
    scheme = QuantizationScheme.model_validate(group)
    decompress = BaseCompressor.get_value_from_registry(group["format"] or config["format"]).decompress
    found = {}
    for name in files:
        if name.endswith(".weight_scale"):
            stem = name.removesuffix("weight_scale")
            names = ("weight", "weight_scale", "weight_packed")
            parts = {part: files[stem + part] for part in names if stem + part in files}
            if config["config_groups"]["group_0"]["weights"]["strategy"] == "channel":
                parts["weight_scale"] = parts["weight_scale"].reshape(-1, 1)  # it takes no other shape
            found[next(stem + part for part in parts if part != "weight_scale")] = decompress(parts, scheme)["weight"]
    return found
