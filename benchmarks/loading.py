"""The peak of main memory when a model is read into codes, beside reading its floats
first and rounding them then.

    python benchmarks/loading.py [--fp8] [--weights 277M] [--shards 5] [--folder PATH]
    [--markdown | --json] [--record]

A Llama of random bfloat16 weights, tied, is written in shards of safetensors by a
separate process, and once more with its layers in codes and a float32 scale for each
128 x 128, as DeepSeek and Qwen publish them. Each way of reading it runs in a fresh
process, and so does a process that imports the same and builds a small model. Shown is
the largest resident set of the first (``VmHWM`` of Linux, pages of mapped files among
them) minus that of the second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from _forms import add_form_options, text_table
from _record import Cell, add_option, record

#: width, inner width, layers, tokens of a model of about as many weights; what
#: publishers keep in float are the tokens
SIZES: Final = {
    "0.2M": (64, 192, 4, 64),
    "50M": (1024, 4096, 3, 64),
    "277M": (1024, 4096, 16, 8192),
    "1.2B": (2048, 8192, 16, 128256),
    "1.2B, 32k tokens": (2048, 8192, 17, 32000),
}
#: what is read, and how; in which dtype the weights appear
WAYS: Final = {
    "from_pretrained(quantization_config=...)": ("codes", "auto"),
    "the same, dtype=torch.float32": ("codes", "float32"),
    "load_quantized, transformers' model on meta": ("own", "bfloat16"),
    "from_pretrained, bfloat16, then quantize_model": ("after", "auto"),
    "from_pretrained, float32, then quantize_model": ("after", "float32"),
    "load_fp8 of an FP8 folder": ("fp8", "bfloat16"),
    "the same FP8 folder, dtype=torch.float32": ("fp8", "float32"),
    "from_pretrained of the FP8 folder, bfloat16": ("fp8 decoded", "bfloat16"),
}
FORMATS: Final = {"*": "E4M3"}


def config_of(size: str) -> Any:
    """The settings of the model."""
    import transformers

    width, inner, layers, tokens = SIZES[size]
    return transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=tokens,
        tie_word_embeddings=True,
    )


def write(folder: Path, size: str, shards: int) -> None:
    """Write random weights in bfloat16, or codes in a folder called fp8, in shards as
    ``save_pretrained`` does.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    config = config_of(size)
    fp8 = folder.name == "fp8"
    config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
    if fp8:
        method = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
        config.quantization_config = method
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {
            name: p.shape for name, p in transformers.LlamaForCausalLM(config).named_parameters()
        }
    names = list(shapes)
    where = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        its = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        tensors = {}
        for name in its:
            weight = torch.randn(shapes[name])
            if fp8 and name.endswith("_proj.weight"):
                tensors[name] = (100 * weight).clamp_(-448, 448).to(torch.float8_e4m3fn)
                squares = [-(-side // 128) for side in shapes[name]]
                tensors[f"{name}_scale_inv"] = 2e-4 * (1 + torch.rand(squares))
            else:
                tensors[name] = (0.02 * weight).bfloat16()
        save_file(tensors, folder / file, {"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )


def read(folder: Path, way: str, dtype: str) -> Any:
    """The model, read in one way."""
    import torch
    import transformers

    import fp8manifold as fm

    transformers.utils.logging.disable_progress_bar()
    auto = transformers.AutoModelForCausalLM
    asked = dtype if dtype == "auto" else getattr(torch, dtype)
    if way == "fp8":
        return fm.load_fp8(folder, dtype=asked)
    if way == "fp8 decoded":
        return auto.from_pretrained(folder, dtype=asked)
    if way == "codes":
        config = fm.huggingface.quantization_config(FORMATS, tied="leave")
        return auto.from_pretrained(folder, quantization_config=config, dtype=asked)
    if way == "own":
        with torch.device("meta"):
            model = auto.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=asked)
        return fm.load_quantized(model, folder, FORMATS, tied="leave")
    return fm.quantize_model(
        auto.from_pretrained(folder, dtype=asked), FORMATS, "fp8", tied="leave"
    )


def child(folder: Path, size: str, way: str, dtype: str) -> dict[str, int]:
    """Read in this process; its largest resident set, and the sizes of the model and
    its largest tensor.
    """
    import torch
    import transformers

    import fp8manifold as fm

    fm.huggingface.register()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    small = fm.quantize_model(
        transformers.LlamaForCausalLM(config_of("0.2M")), FORMATS, "fp8", tied="leave"
    )
    if way == "empty":
        return {"peak": highest(), "weights": 0, "largest": 0}
    del small
    model = read(folder, way, dtype)
    sizes = [p.numel() for p in model.parameters()]
    width = 4 if dtype == "float32" else 2
    return {"peak": highest(), "weights": sum(sizes), "largest": width * max(sizes)}


def highest() -> int:
    """The largest resident set of this process so far, in bytes."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return 1024 * int(line.split()[1])


def run_child(*words: str) -> Any:
    """Run this script in a fresh process, and read the JSON that it prints."""
    command = [sys.executable, __file__, "--child", *words]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(
    folder: Path, size: str, shards: int, ways: dict[str, tuple[str, str]]
) -> list[tuple[str, float, float, float]]:
    """For each way: GB at the peak, bytes per weight, and the same beyond the largest
    tensor.
    """
    folders = {
        way: folder / ("fp8" if way.startswith("fp8") else "floats") for way, _ in ways.values()
    }
    for each in sorted(set(folders.values())):
        run_child("write", str(each), size, str(shards))
    empty = run_child("read", str(folder), size, "empty", "auto")["peak"]
    rows = []
    for name, (way, dtype) in ways.items():
        found = run_child("read", str(folders[way]), size, way, dtype)
        peak = found["peak"] - empty
        rows.append(
            (
                name,
                peak / 1e9,
                peak / found["weights"],
                (peak - found["largest"]) / found["weights"],
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fp8", action="store_true", help="read the FP8 folder alone")
    parser.add_argument(
        "--weights", choices=tuple(SIZES), default="277M", help="how many there are"
    )
    parser.add_argument("--shards", type=int, default=5, help="files that they are in")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the files are written meanwhile; by default a temporary one",
    )
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    add_form_options(parser)
    add_option(parser)
    args = parser.parse_args()
    if args.child:
        task, folder, size, *rest = args.child
        if task == "write":
            write(Path(folder), size, int(rest[0]))
            print("{}")
        else:
            print(json.dumps(child(Path(folder), size, rest[0], rest[1])))
        return
    if not Path("/proc/self/status").exists():
        raise SystemExit("VmHWM is what Linux says of a process; there is nothing like it here")
    if args.fp8 and args.record:
        parser.error("--record writes the whole table: leave out --fp8")
    ways = {name: way for name, way in WAYS.items() if way[0].startswith("fp8") or not args.fp8}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = measure(Path(folder), args.weights, args.shards, ways)
    columns = (
        f"{args.weights} weights",
        "GB at the peak",
        "bytes per weight",
        "beyond the largest tensor",
    )
    if args.json:
        print(
            json.dumps(
                [dict(zip(("way", "gb", "bytes", "beyond"), row, strict=True)) for row in rows],
                indent=1,
            )
        )
    else:
        lines = [(name, *(f"{cell:.2f}" for cell in cells)) for name, *cells in rows]
        print(text_table([columns, *lines], ("---", "---:", "---:", "---:"), args.markdown))
    if args.record:
        cells: list[list[Cell]] = [
            [name, *(round(cell, 2) for cell in rest)] for name, *rest in rows
        ]
        record("", columns, cells, packages=("transformers", "safetensors"))


if __name__ == "__main__":
    main()
