"""Convert a float model to an FP8 folder by the usual recipe, scales of amax / 448.

    python benchmarks/published_fp8.py models/smollm2 OUT --layout deepseek
    python benchmarks/published_fp8.py models/smollm2 OUT --layout compressed-tensors

Every linear layer except the head becomes E4M3, all other tensors bfloat16.
``deepseek`` has a scale for each square of 128 x 128, by formula. ``compressed-tensors``
has one per row, by that package. The folder OUT-float has the values of OUT in float32,
decoded by torch's float8 type alone. No code of this library is used.
"""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

#: of a square
SIDE: Final = 128
LARGEST_FLOAT8: Final = torch.finfo(torch.float8_e4m3fn).max


def scale_of_every_weight(scales: Tensor, shape: torch.Size) -> Tensor:
    """Repeat scales of squares, so that they broadcast; those of rows (R, 1) do already."""
    rows, columns = shape
    if scales.shape == (rows, 1):
        return scales
    return scales.repeat_interleave(SIDE, 0)[:rows].repeat_interleave(SIDE, 1)[:, :columns]


class Squares(NamedTuple):
    """A weight in codes, with a scale for each square."""

    codes: Tensor
    scales: Tensor


def in_squares(weight: Tensor) -> Squares:
    """Round a weight to codes with scales of amax / 448; squares at the edges are partial."""
    amax = []
    for rows in weight.float().split(SIDE):
        amax.append(torch.stack([square.abs().max() for square in rows.split(SIDE, 1)]))
    scales = torch.stack(amax) / LARGEST_FLOAT8
    scaled = weight.float() / scale_of_every_weight(scales, weight.shape)
    return Squares(scaled.to(torch.float8_e4m3fn), scales)


def write_deepseek(model: Any, out: Path) -> None:
    """Write the layout of DeepSeek, Qwen and MiniMax."""
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            squares = in_squares(layer.weight.detach())
            state[f"{name}.weight"] = squares.codes
            state[f"{name}.weight_scale_inv"] = squares.scales
    method = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [SIDE, SIDE],
    }
    model.save_pretrained(out, state_dict=state)
    path = out / "config.json"
    settings = json.loads(path.read_text()) | {"quantization_config": method}
    path.write_text(json.dumps(settings, indent=2))


def write_compressed_tensors(model: Any, out: Path) -> None:
    """Write the layout of llm-compressor's scheme FP8_DYNAMIC, by compressed-tensors."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationConfig(config_groups={"FP8_DYNAMIC": ["Linear"]}, ignore=["lm_head"])
    apply_quantization_config(model, scheme)
    for layer in model.modules():
        layer_scheme = getattr(layer, "quantization_scheme", None)
        if layer_scheme is not None:
            weight = layer.weight.detach()
            low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
            scale, _ = calculate_qparams(low, high, layer_scheme.weights)
            layer.weight_scale.data = scale
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(str(out))


LAYOUTS: Final[dict[str, Callable[[Any, Path], None]]] = {
    "deepseek": write_deepseek,
    "compressed-tensors": write_compressed_tensors,
}


def decoded_folder(folder: Path) -> dict[str, Tensor]:
    """Return the values of a folder's tensors in float32."""
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file)
    floats = {name: tensor.float() for name, tensor in state.items()}
    for name in state:
        base, _, kind = name.rpartition(".weight_scale")
        if base and kind in ("", "_inv"):
            weight = floats[f"{base}.weight"]
            weight *= scale_of_every_weight(floats.pop(name), weight.shape)
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
    gguf_names = [path.name for path in args.model.glob("*.gguf")]
    gguf = {"gguf_file": gguf_names[0]} if gguf_names else {}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, **gguf
    )
    # A model from a .gguf file says that it is quantised, though its weights are floats.
    model.hf_quantizer = None
    model.is_quantized = False
    vars(model.config).pop("quantization_config", None)
    LAYOUTS[args.layout](model, args.out)

    float_folder = Path(f"{args.out}-float")
    settings = transformers.AutoConfig.from_pretrained(args.out)
    vars(settings).pop("quantization_config", None)
    settings.dtype = torch.float32
    plain = transformers.AutoModelForCausalLM.from_config(settings)
    plain.load_state_dict(decoded_folder(args.out), strict=not settings.tie_word_embeddings)
    plain.save_pretrained(float_folder)
    transformers.AutoTokenizer.from_pretrained(args.model, **gguf).save_pretrained(args.out)
    for file in args.out.glob("*token*"):
        shutil.copy(file, float_folder)


if __name__ == "__main__":
    main()
