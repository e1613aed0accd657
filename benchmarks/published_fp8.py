"""A float model converted to an FP8 folder by the usual recipe, scales of amax / 448,
and a folder of its values.

    python benchmarks/published_fp8.py models/smollm2 models/smollm2-squares --layout
    deepseek python benchmarks/published_fp8.py models/smollm2 models/smollm2-rows
    --layout compressed-tensors

Every linear layer except the head becomes E4M3, all other tensors bfloat16.
``deepseek`` has a scale for each square of 128 x 128, by formula;
``compressed-tensors`` one per row, by that package. The folder OUT-float has the values
of OUT in float32, decoded by torch's float8 type alone. Nothing here is this library's
code.
"""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

SIDE: Final = 128
HIGHEST: Final = torch.finfo(torch.float8_e4m3fn).max


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """The scale of every weight: of squares, or of rows (R, 1)."""
    if scales.shape == (shape[0], 1):
        return scales
    return scales.repeat_interleave(SIDE, 0)[: shape[0]].repeat_interleave(SIDE, 1)[:, : shape[1]]


def squares(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and float32 scales, amax / 448 of each square; squares at the edges are
    partial.
    """
    tiles = [
        [tile.abs().max() for tile in row.split(SIDE, 1)] for row in weight.float().split(SIDE)
    ]
    scales = torch.stack([torch.stack(row) for row in tiles]) / HIGHEST
    return (weight.float() / spread(scales, weight.shape)).to(torch.float8_e4m3fn), scales


def deepseek(model: Any, out: Path) -> None:
    """The layout of DeepSeek, Qwen and MiniMax."""
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            codes, scales = squares(layer.weight.detach())
            state |= {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}
    how = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [SIDE, SIDE],
    }
    model.save_pretrained(out, state_dict=state)
    settings = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(settings | {"quantization_config": how}, indent=2))


def compressed(model: Any, out: Path) -> None:
    """The layout of llm-compressor, its scheme FP8_DYNAMIC, written by
    compressed-tensors.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationConfig(config_groups={"FP8_DYNAMIC": ["Linear"]}, ignore=["lm_head"])
    apply_quantization_config(model, scheme)
    for layer in model.modules():
        if (how := getattr(layer, "quantization_scheme", None)) is not None:
            weight = layer.weight.detach()
            low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
            layer.weight_scale.data = calculate_qparams(low, high, how.weights)[0]
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(str(out))


LAYOUTS: Final[dict[str, Callable[[Any, Path], None]]] = {
    "deepseek": deepseek,
    "compressed-tensors": compressed,
}


def decoded(folder: Path) -> dict[str, Tensor]:
    """The values of a folder's tensors in float32."""
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file)
    floats = {name: tensor.float() for name, tensor in state.items()}
    for name in state:
        base, _, kind = name.rpartition(".weight_scale")
        if base and kind in ("", "_inv"):
            weight = floats[f"{base}.weight"]
            weight *= spread(floats.pop(name), weight.shape)
    return floats


def main() -> None:
    """Write both folders."""
    import transformers

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder of floats, or one with a .gguf file")
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    args = parser.parse_args()
    names = [path.name for path in args.model.glob("*.gguf")]
    gguf = {"gguf_file": names[0]} if names else {}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, **gguf
    )
    model.hf_quantizer, model.is_quantized = None, False  # of a .gguf file's floats
    vars(model.config).pop("quantization_config", None)
    LAYOUTS[args.layout](model, args.out)
    floats = Path(f"{args.out}-float")
    settings = transformers.AutoConfig.from_pretrained(args.out)
    vars(settings).pop("quantization_config", None)
    settings.dtype = torch.float32
    plain = transformers.AutoModelForCausalLM.from_config(settings)
    plain.load_state_dict(decoded(args.out), strict=not settings.tie_word_embeddings)
    plain.save_pretrained(floats)
    transformers.AutoTokenizer.from_pretrained(args.model, **gguf).save_pretrained(args.out)
    for file in args.out.glob("*token*"):
        shutil.copy(file, floats)


if __name__ == "__main__":
    main()
