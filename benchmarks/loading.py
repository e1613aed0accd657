"""The peak of main memory when a model is read into codes, rounded, or saved.

    python benchmarks/loading.py [--fp8] [--weights 277M] [--shards 5] [--folder PATH]
                                 [--markdown | --json] [--record]

A separate process writes a Llama of random bfloat16 weights, tied, in shards of
safetensors, and once more with its layers in codes and a float32 scale for each
128 x 128, as DeepSeek and Qwen publish them, and as `save` writes the model in codes.
Each way of reading or saving it runs in a fresh process, which reads or saves a small
model in the same way first, so that everything is imported. Shown is the largest resident
set from then on (``VmHWM`` of Linux, pages of mapped files among them) minus the one
before; of ``save`` that of the model itself is counted, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from _forms import add_form_options, text_table
from _record import Cell, add_option, record


class LlamaSize(NamedTuple):
    """Sizes of a Llama."""

    width: int
    inner: int
    layers: int
    #: of the vocabulary, whose embedding publishers keep in float
    tokens: int


#: by the number of weights
LLAMA_SIZES: Final = {
    "0.2M": LlamaSize(64, 192, 4, 64),
    "50M": LlamaSize(1024, 4096, 3, 64),
    "103M": LlamaSize(1024, 4096, 6, 2048),
    "277M": LlamaSize(1024, 4096, 16, 8192),
    "1.2B": LlamaSize(2048, 8192, 16, 128256),
    "1.2B, 32k tokens": LlamaSize(2048, 8192, 17, 32000),
}


class Method(StrEnum):
    """How a process gets a model in codes."""

    #: `load` of floats
    LOAD = "codes"
    #: `files.load_into` with floats
    LOAD_INTO = "own"
    #: `from_pretrained` of floats, then `quantize_model`
    QUANTIZE_AFTER = "after"
    #: `load` of an FP8 folder
    LOAD_FP8 = "fp8"
    #: `from_pretrained` of an FP8 folder, which gives floats
    DECODE_FP8 = "fp8 decoded"
    #: `load` of a folder that `save` wrote
    LOAD_SAVED = "saved"
    #: the same with layout="codes"
    LOAD_SAVED_CODES = "saved codes"
    #: `save` of a model that `load` has made of floats
    SAVE = "save"
    #: the same with layout="codes"
    SAVE_CODES = "save codes"

    @property
    def folder(self) -> str:
        """The name of the folder that is read."""
        if self in (Method.LOAD_SAVED, Method.LOAD_SAVED_CODES):
            return self.value
        return "fp8" if self in (Method.LOAD_FP8, Method.DECODE_FP8) else "floats"

    @property
    def is_save(self) -> bool:
        """Whether the model is saved once it has been read."""
        return self in (Method.SAVE, Method.SAVE_CODES)


class LoadingWay(NamedTuple):
    """A way to read a model."""

    method: Method
    #: in which the weights appear
    dtype: str


LOADING_WAYS: Final = {
    "load of floats": LoadingWay(Method.LOAD, "auto"),
    "the same, dtype=torch.float32": LoadingWay(Method.LOAD, "float32"),
    "files.load_into, transformers' model on meta": LoadingWay(Method.LOAD_INTO, "bfloat16"),
    "from_pretrained, bfloat16, then quantize_model": LoadingWay(Method.QUANTIZE_AFTER, "auto"),
    "from_pretrained, float32, then quantize_model": LoadingWay(Method.QUANTIZE_AFTER, "float32"),
    "load of an FP8 folder": LoadingWay(Method.LOAD_FP8, "bfloat16"),
    "the same FP8 folder, dtype=torch.float32": LoadingWay(Method.LOAD_FP8, "float32"),
    "from_pretrained of the FP8 folder, bfloat16": LoadingWay(Method.DECODE_FP8, "bfloat16"),
    "load of a saved folder": LoadingWay(Method.LOAD_SAVED, "bfloat16"),
    "load of a saved folder of codes": LoadingWay(Method.LOAD_SAVED_CODES, "bfloat16"),
    "save": LoadingWay(Method.SAVE, "auto"),
    "save in codes": LoadingWay(Method.SAVE_CODES, "auto"),
}
FORMATS_OF_NAMES: Final = {"*": "E4M3"}
#: the folder of small models, which are read first
SMALL: Final = "small"


def llama_config(size: str) -> Any:
    """Return the settings of the model."""
    import transformers

    width, inner, layers, tokens = LLAMA_SIZES[size]
    heads = width // 64
    return transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=tokens,
        tie_word_embeddings=True,
    )


def write(folder: Path, size: str, shards: int) -> None:
    """Write random weights in shards, as ``save_pretrained`` does.

    They are in bfloat16, or in codes in a folder called fp8.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    if folder.name in (Method.LOAD_SAVED, Method.LOAD_SAVED_CODES):
        save_in_codes(folder)
        return
    config = llama_config(size)
    in_codes = folder.name == "fp8"
    config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
    if in_codes:
        config.quantization_config = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    parameters = list(model.named_parameters())
    weight_map = {}
    for shard in range(shards):
        first = shard * len(parameters) // shards
        end = (shard + 1) * len(parameters) // shards
        tensors = {}
        for name, parameter in parameters[first:end]:
            weight = torch.randn(parameter.shape)
            if in_codes and name.endswith("_proj.weight"):
                tensors[name] = (100 * weight).clamp_(-448, 448).to(torch.float8_e4m3fn)
                squares = [-(-side // 128) for side in parameter.shape]
                tensors[f"{name}_scale_inv"] = 2e-4 * (1 + torch.rand(squares))
            else:
                tensors[name] = (0.02 * weight).bfloat16()
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)


def save_in_codes(folder: Path) -> None:
    """Save the floats of the folder beside this one by `save`, rounded to codes."""
    import fp8manifold as fm

    model = load_model(folder.parent / "floats", Method.LOAD, "auto")
    layout = "codes" if folder.name == Method.LOAD_SAVED_CODES else "floats"
    fm.save(model, folder, layout)


def load_model(folder: Path, method: Method, dtype_name: str) -> Any:
    """Read the model in one way."""
    import torch
    import transformers

    import fp8manifold as fm

    transformers.utils.logging.disable_progress_bar()
    auto = transformers.AutoModelForCausalLM
    dtype = dtype_name if dtype_name == "auto" else getattr(torch, dtype_name)
    if method in (Method.LOAD_FP8, Method.LOAD_SAVED, Method.LOAD_SAVED_CODES):
        return fm.load(folder, dtype=dtype)
    if method is Method.DECODE_FP8:
        return auto.from_pretrained(folder, dtype=dtype)
    if method is Method.LOAD or method.is_save:
        return fm.load(folder, FORMATS_OF_NAMES, tied="leave", dtype=dtype)
    if method is Method.LOAD_INTO:
        with torch.device("meta"):
            model = auto.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=dtype)
        return fm.files.load_into(model, folder, FORMATS_OF_NAMES, tied="leave")
    model = auto.from_pretrained(folder, dtype=dtype)
    return fm.quantize_model(model, FORMATS_OF_NAMES, "codes", tied="leave")


def load_in_this_process(folder: Path, method: Method, dtype: str) -> dict[str, int]:
    """Read in this process.

    Returns:
        How far its resident set has grown at most, the number of weights, and the bytes
        of the largest tensor.
    """
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    read_or_save(folder.parent / SMALL / folder.name, method, dtype)
    gc.collect()
    before = resident_bytes("VmRSS")
    forget_peak()
    model = read_or_save(folder, method, dtype)
    sizes = [parameter.numel() for parameter in model.parameters()]
    width = 4 if dtype == "float32" else 2
    peak = resident_bytes("VmHWM") - before
    return {"peak": peak, "weights": sum(sizes), "largest": width * max(sizes)}


def read_or_save(folder: Path, method: Method, dtype: str) -> Any:
    """Read a model in one way, and save it if that is what is measured."""
    import fp8manifold as fm

    model = load_model(folder, method, dtype)
    if method.is_save:
        forget_peak()
        layout = "codes" if method is Method.SAVE_CODES else "floats"
        fm.save(model, folder.parent / method.value, layout)
    return model


def resident_bytes(key: str) -> int:
    """Return the resident set of this process: at present (VmRSS) or the largest (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            _, kilobytes, _ = line.split()
            return 1024 * int(kilobytes)
    raise SystemExit(f"/proc/self/status has no {key}")


def forget_peak() -> None:
    """Let the largest resident set begin at the present one."""
    Path("/proc/self/clear_refs").write_text("5")


def check_linux() -> None:
    """End where there is no largest resident set to read."""
    if not Path("/proc/self/status").exists():
        raise SystemExit("VmHWM is what Linux says of a process; there is nothing like it here")


def run_loading(*words: str) -> Any:
    """Run this script in a fresh process, and read the JSON that it prints."""
    command = [sys.executable, __file__, "--child", *words]
    process = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{process.stdout}{process.stderr}")
    return json.loads(process.stdout.splitlines()[-1])


class LoadingFigures(NamedTuple):
    """What was measured of one way."""

    way: str
    #: at the peak
    gb: float
    #: per weight
    bytes: float
    #: per weight, without the largest tensor
    beyond: float


def measure_loading(
    folder: Path, size: str, shards: int, ways: dict[str, LoadingWay]
) -> list[LoadingFigures]:
    """Measure each way in a process of its own."""
    for name in sorted({way.method.folder for way in ways.values()}):
        run_loading("write", str(folder / name), size, str(shards))
        run_loading("write", str(folder / SMALL / name), "0.2M", "1")
    rows = []
    for name, (method, dtype) in ways.items():
        figures = run_loading("read", str(folder / method.folder), method, dtype)
        peak, weights = figures["peak"], figures["weights"]
        rows.append(
            LoadingFigures(name, peak / 1e9, peak / weights, (peak - figures["largest"]) / weights)
        )
    return rows


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fp8", action="store_true", help="read the FP8 folder alone")
    parser.add_argument(
        "--weights", choices=tuple(LLAMA_SIZES), default="277M", help="how many there are"
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
        run_loading_task(*args.child)
        return
    check_linux()
    if args.fp8 and args.record:
        parser.error("--record writes the whole table: leave out --fp8")
    ways = {}
    for name, way in LOADING_WAYS.items():
        if way.method.folder == "fp8" or not args.fp8:
            ways[name] = way
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = measure_loading(Path(folder), args.weights, args.shards, ways)
    columns = (
        f"{args.weights} weights",
        "GB at the peak",
        "bytes per weight",
        "beyond the largest tensor",
    )
    if args.json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
    else:
        lines = [(name, *(f"{cell:.2f}" for cell in cells)) for name, *cells in rows]
        print(text_table([columns, *lines], ("---", "---:", "---:", "---:"), args.markdown))
    if args.record:
        cells: list[list[Cell]] = [
            [name, *(round(cell, 2) for cell in rest)] for name, *rest in rows
        ]
        record("", columns, cells, packages=("transformers", "safetensors"))


def run_loading_task(task: str, folder: str, *words: str) -> None:
    """Do what `run_loading` asks of a process, and print JSON."""
    if task == "write":
        size, shards = words
        write(Path(folder), size, int(shards))
        print("{}")
    else:
        method, dtype = words
        print(json.dumps(load_in_this_process(Path(folder), Method(method), dtype)))


if __name__ == "__main__":
    main()
