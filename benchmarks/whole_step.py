"""Main memory of one full training step of a language model, from its file to its stepped weights, at the peak.

    python benchmarks/whole_step.py [--weights 1.2B] [--optimizers muon,adamw] [--iterations 5] [--json] [--record]

A Llama of random bfloat16 weights, tied, is written in shards of safetensors by a process of its own.  For each
optimizer a fresh process reads it into codes of E4M3, the embedding too, and takes a step on one sequence of 128
tokens: blocks are computed once more in the backward pass, each gradient is stepped with and freed in it, clipped by
the norm of the pass before, which steps nothing.  Averages are of 8 bits.  Shown is the largest resident set of that
process (``VmHWM`` of Linux) less what it was before, when it had taken such a step of a small model.  Muon's
iterations, of which each takes the memory of the others, may be fewer than the usual 5, where time is short.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from _forms import add_form_options, text_table
from _record import Cell, add_option, record
from loading import SIZES, config_of, highest, write

TOKENS: Final = 128
SHARDS: Final = 5
FORMATS: Final = {"*": "E4M3"}
OPTIMIZERS: Final = ("muon", "adamw")
NAMES: Final = {"muon": "StiffnessMuon", "adamw": "StiffnessAdamW"}
MAX_NORM: Final = 1.0


def optimizer_of(kind: str, model: Any, iterations: int) -> Any:
    """A step of 8-bit averages over a whole model."""
    import fp8manifold as fm

    if kind == "muon":
        return fm.optim.StiffnessMuon.for_model(model, 1e-3, moments="8bit", ns_steps=iterations)
    return fm.optim.StiffnessAdamW(model.parameters(), 1e-5, moments="8bit")


def take_step(model: Any, kind: str, iterations: int) -> dict[str, float]:
    """A pass for the norm and one that steps; the norm, and the share of codes that moved."""
    import torch

    import fp8manifold as fm

    model.gradient_checkpointing_enable()
    model.train()
    tokens = torch.randint(0, model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    optimizer = optimizer_of(kind, model, iterations)
    handle = fm.optim.step_in_backward(optimizer, clip="previous", max_norm=MAX_NORM)
    weight = next(p for p in model.parameters() if isinstance(p, fm.FP8Tensor))
    before = weight.codes[:64].clone()
    with handle.measure():
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    norm = optimizer.param_groups[0]["previous_norm"]
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    steps = {int(optimizer.state[p]["step"]) for p in model.parameters()}
    if steps != {1}:
        raise SystemExit(f"not every parameter has taken its step: {sorted(steps)}")
    return {"norm": norm, "moved": float((weight.codes[:64] != before).float().mean())}


def read(folder: Path) -> Any:
    """The model in codes, its embedding too."""
    import transformers

    import fp8manifold as fm

    config = fm.huggingface.quantization_config(FORMATS, tied="leave", embeddings="E4M3")
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, quantization_config=config, dtype="auto")


def child(folder: Path, kind: str, iterations: int) -> dict[str, float]:
    """Read and step in this process: its largest resident set at the start, once it has read, and at the end."""
    import torch
    import transformers

    import fp8manifold as fm

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    small = transformers.LlamaForCausalLM(config_of("0.2M")).bfloat16()
    take_step(fm.quantize_model(small, FORMATS, "fp8", tied="leave", embeddings="E4M3"), kind, iterations)
    del small
    found: dict[str, float] = {"empty": highest()}
    model = read(folder)
    found |= {"read": highest(), "weights": sum(p.numel() for p in model.parameters())}
    found |= {"in_codes": sum(p.numel() for p in model.parameters() if isinstance(p, fm.FP8Tensor))}
    return found | take_step(model, kind, iterations) | {"stepped": highest()}


def run_child(*words: str) -> Any:
    """What a fresh process of this script prints, as JSON."""
    command = [sys.executable, __file__, "--child", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: Path, size: str, kinds: list[str], iterations: int) -> list[tuple[str, float, float]]:
    """For reading and for each optimizer: GB at the peak, and bytes a weight."""
    run_child("write", str(folder), size)
    rows, most_read = [], 0.0
    for kind in kinds:
        found = run_child("step", str(folder), kind, str(iterations))
        read_in, stepped = (found[name] - found["empty"] for name in ("read", "stepped"))
        most_read, weights = max(most_read, read_in), found["weights"]
        rows.append((f"read, and one step of {NAMES[kind]}", stepped / 1e9, stepped / weights))
        print(f"{NAMES[kind]}: {json.dumps(found)}", file=sys.stderr)
    return [("read into codes", most_read / 1e9, most_read / weights), *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--weights", choices=tuple(SIZES), default="1.2B", help="how many there are")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS), help="muon, adamw")
    parser.add_argument("--iterations", type=int, default=5, help="of Muon's orthogonalisation")
    parser.add_argument("--folder", type=Path, help="where the files are written meanwhile; by default a temporary one")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    add_form_options(parser)
    add_option(parser)
    args = parser.parse_args()
    if args.child:
        task, folder, what, *more = args.child
        if task == "write":
            write(Path(folder), what, SHARDS)
            print("{}")
        else:
            print(json.dumps(child(Path(folder), what, int(more[0]))))
        return
    kinds = args.optimizers.split(",")
    if unknown := [kind for kind in kinds if kind not in OPTIMIZERS]:
        raise SystemExit(f"--optimizers: {unknown[0]!r} is unknown; give some of {', '.join(OPTIMIZERS)}")
    if not Path("/proc/self/status").exists():
        raise SystemExit("VmHWM is what Linux says of a process; there is nothing like it here")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = measure(Path(folder), args.weights, kinds, args.iterations)
    columns = (f"{args.weights} weights, batch 1 x {TOKENS}, 8-bit averages", "GB at the peak", "bytes a weight")
    if args.json:
        print(json.dumps([dict(zip(("what", "gb", "bytes"), row, strict=True)) for row in rows], indent=1))
    else:
        lines = [(name, *(f"{cell:.2f}" for cell in cells)) for name, *cells in rows]
        print(text_table([columns, *lines], ("---", "---:", "---:"), args.markdown))
    if args.record:
        cells: list[list[Cell]] = [[name, *(round(cell, 2) for cell in rest)] for name, *rest in rows]
        record("", columns, cells, packages=("transformers", "safetensors"))


if __name__ == "__main__":
    main()
