"""The peak of main memory when a language model is read and trained, from its file to
its stepped weights, by recipe.

    python benchmarks/whole_step.py [--weights 277M] [--recipes adamw,torchao,backward]
    [--iterations 5] [--record]

A Llama of random bfloat16 weights, tied, is written in shards of safetensors by a
separate process. For each recipe a fresh process reads it, in bfloat16 or into codes of
E4M3 with the embedding too, and takes two steps on sequences of 128 tokens, so that the
second has gradients and a state; activations of blocks are recomputed in the backward
pass. A recipe that steps in the backward pass frees each gradient there, clipped by the
norm of the pass before; the others clip all gradients at once. Shown is the largest
resident set of that process (``VmHWM`` of Linux, reset first) minus that before, taken
after such steps of one layer of the model, so that all compilation is done. Muon's
iterations, which all take the same memory, may be fewer than the usual 5 to save time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from _forms import add_form_options, text_table
from _record import Cell, add_option, record
from loading import SIZES, highest, write

TOKENS: Final = 128
SHARDS: Final = 5
FORMATS: Final = {"*": "E4M3"}
MAX_NORM: Final = 1.0


def adamw(model: Any, _: int) -> Any:
    """torch's AdamW."""
    import torch

    return torch.optim.AdamW(model.parameters(), 1e-5)


def torchao(model: Any, _: int) -> Any:
    """torchao's AdamW with moments of 8 bits."""
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), 1e-5)


def stiffness(model: Any, _: int) -> Any:
    """StiffnessAdamW, with moments of 8 bits."""
    import fp8manifold as fm

    return fm.optim.StiffnessAdamW(model.parameters(), 1e-5, moments="8bit")


def muon(model: Any, iterations: int) -> Any:
    """StiffnessMuon over a whole model."""
    import fp8manifold as fm

    return fm.optim.StiffnessMuon.for_model(model, 1e-3, moments="8bit", ns_steps=iterations)


@dataclass(frozen=True)
class Recipe:
    """A way of training: where weights live, what steps them, and when."""

    name: str
    made: Callable[[Any, int], Any]
    codes: bool
    in_backward: bool


RECIPES: Final = {
    "adamw": Recipe("bfloat16, torch AdamW", adamw, codes=False, in_backward=False),
    "torchao": Recipe("bfloat16, torchao AdamW8bit", torchao, codes=False, in_backward=False),
    "bf16": Recipe("bfloat16, StiffnessAdamW", stiffness, codes=False, in_backward=False),
    "loop": Recipe("one byte, StiffnessAdamW", stiffness, codes=True, in_backward=False),
    "backward": Recipe("the same, steps in backward", stiffness, codes=True, in_backward=True),
    "muon": Recipe(
        "one byte, StiffnessMuon, steps in backward", muon, codes=True, in_backward=True
    ),
}


def take_steps(model: Any, recipe: Recipe, iterations: int) -> None:
    """Take two steps; if they are taken in the backward pass, after a pass that only
    takes the norm.
    """
    import torch

    import fp8manifold as fm

    model.gradient_checkpointing_enable()
    model.train()
    tokens = torch.randint(
        0, model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0)
    )
    optimizer = recipe.made(model, iterations)

    def backward() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    if recipe.in_backward:
        with fm.optim.step_in_backward(optimizer, clip="previous", max_norm=MAX_NORM).measure():
            backward()
    for _ in range(2):
        optimizer.zero_grad()
        backward()
        if not recipe.in_backward:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    steps = {int(optimizer.state[p]["step"]) for p in model.parameters()}
    if steps != {2}:
        raise SystemExit(f"not every parameter has taken both steps: {sorted(steps)}")


def read(folder: Path, recipe: Recipe) -> Any:
    """The model in bfloat16, or in codes, its embedding too."""
    import transformers

    import fp8manifold as fm

    config = (
        fm.huggingface.quantization_config(FORMATS, tied="leave", embeddings="E4M3")
        if recipe.codes
        else None
    )
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, quantization_config=config, dtype="auto")


def child(folder: Path, recipe: Recipe, iterations: int) -> dict[str, float]:
    """Read and step in this process: its largest resident set at the start, once it has
    read, and at the end.
    """
    import torch
    import transformers

    import fp8manifold as fm

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(folder, num_hidden_layers=1)
    small = transformers.LlamaForCausalLM(config).bfloat16()
    if recipe.codes:
        fm.quantize_model(small, FORMATS, "fp8", tied="leave", embeddings="E4M3")
    take_steps(small, recipe, iterations)
    del small
    gc.collect()
    Path("/proc/self/clear_refs").write_text(
        "5"
    )  # resets the largest resident set to the present one
    found: dict[str, float] = {"empty": highest()}
    model = read(folder, recipe)
    found |= {"read": highest(), "weights": sum(p.numel() for p in model.parameters())}
    found |= {"in_codes": sum(p.numel() for p in model.parameters() if isinstance(p, fm.FP8Tensor))}
    take_steps(model, recipe, iterations)
    return found | {"stepped": highest()}


def run_child(*words: str) -> Any:
    """Run this script in a fresh process, and read the JSON that it prints."""
    command = [sys.executable, __file__, "--child", *words]
    # glibc gives every block of 64 kB and more back at once, so that none counts twice.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**16)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(
    folder: Path, size: str, names: list[str], iterations: int
) -> list[tuple[str, float, float, float]]:
    """For each recipe: GB at the peak of reading and of all, and bytes per weight."""
    run_child("write", str(folder), size)
    rows = []
    for name in names:
        found = run_child("step", str(folder), name, str(iterations))
        read_in, stepped = (found[at] - found["empty"] for at in ("read", "stepped"))
        rows.append((RECIPES[name].name, read_in / 1e9, stepped / 1e9, stepped / found["weights"]))
        print(f"{name}: {json.dumps(found)}", file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--weights", choices=tuple(SIZES), default="277M", help="how many there are"
    )
    parser.add_argument(
        "--recipes", default=",".join(RECIPES), help="separated by commas; by default all"
    )
    parser.add_argument("--iterations", type=int, default=5, help="of Muon's orthogonalisation")
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
        task, folder, what, *more = args.child
        if task == "write":
            write(Path(folder), what, SHARDS)
            print("{}")
        else:
            print(json.dumps(child(Path(folder), RECIPES[what], int(more[0]))))
        return
    names = args.recipes.split(",")
    if unknown := [name for name in names if name not in RECIPES]:
        raise SystemExit(f"--recipes: {unknown[0]!r} is unknown; give some of {', '.join(RECIPES)}")
    if not Path("/proc/self/status").exists():
        raise SystemExit("VmHWM is what Linux says of a process; there is nothing like it here")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = measure(Path(folder), args.weights, names, args.iterations)
    columns = (
        f"{args.weights} weights, 1 x {TOKENS} tokens",
        "GB to read",
        "GB at the peak",
        "bytes per weight",
    )
    if args.json:
        print(
            json.dumps(
                [dict(zip(("what", "read", "gb", "bytes"), row, strict=True)) for row in rows],
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
        record("", columns, cells, packages=("transformers", "safetensors", "torchao"))


if __name__ == "__main__":
    main()
