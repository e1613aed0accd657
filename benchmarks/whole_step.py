"""The peak of main memory when a language model is read and trained, by recipe.

    python benchmarks/whole_step.py [--weights 277M] [--recipes adamw,torchao,backward]
                                    [--iterations 5] [--markdown | --json] [--record]

A separate process writes a Llama of random bfloat16 weights, tied, in shards of
safetensors. For each recipe a fresh process reads it, in bfloat16 or into codes of E4M3
with the embedding too. It takes two steps on sequences of 128 tokens, so that the
second has gradients and a state. Activations of blocks are recomputed in the backward
pass. A recipe that steps in the backward pass frees each gradient there, clipped by the
norm of the pass before. The others clip all gradients at once.

Shown is the largest resident set of that process (``VmHWM`` of Linux, reset before it
reads) minus the one at the reset. By then the process has taken such steps of a model
of one layer, so that all compilation is done. Muon's iterations, which all take the
same memory, may be fewer than the usual 5 to save time.
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
from typing import Any, Final, NamedTuple

from _forms import add_form_options, text_table
from _record import Cell, add_option, record
from loading import (
    FORMATS_OF_NAMES,
    LLAMA_SIZES,
    check_linux,
    forget_peak,
    resident_bytes,
    write,
)

STEP_TOKENS: Final = 128
SHARDS: Final = 5
MAX_NORM: Final = 1.0


def adamw(model: Any, _: int) -> Any:
    """Return torch's AdamW."""
    import torch

    return torch.optim.AdamW(model.parameters(), 1e-5)


def torchao_adamw(model: Any, _: int) -> Any:
    """Return torchao's AdamW with moments of 8 bits."""
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), 1e-5)


def stiffness(model: Any, _: int) -> Any:
    """Return StiffnessAdamW, with moments of 8 bits."""
    import fp8manifold as fm

    return fm.optim.StiffnessAdamW(model.parameters(), 1e-5, moments="8bit")


def stiffness_muon(model: Any, iterations: int) -> Any:
    """Return StiffnessMuon over a whole model, with so many iterations."""
    import fp8manifold as fm

    return fm.optim.StiffnessMuon.for_model(model, 1e-3, moments="8bit", ns_steps=iterations)


@dataclass(frozen=True)
class Recipe:
    """A way of training."""

    name: str
    #: takes a model and the iterations of Muon
    make_optimizer: Callable[[Any, int], Any]
    #: weights live in one byte each
    codes: bool
    #: weights are stepped in the backward pass
    in_backward: bool


RECIPES: Final = {
    "adamw": Recipe("bfloat16, torch AdamW", adamw, codes=False, in_backward=False),
    "torchao": Recipe("bfloat16, torchao AdamW8bit", torchao_adamw, codes=False, in_backward=False),
    "bf16": Recipe("bfloat16, StiffnessAdamW", stiffness, codes=False, in_backward=False),
    "loop": Recipe("one byte, StiffnessAdamW", stiffness, codes=True, in_backward=False),
    "backward": Recipe("the same, steps in backward", stiffness, codes=True, in_backward=True),
    "muon": Recipe(
        "one byte, StiffnessMuon, steps in backward", stiffness_muon, codes=True, in_backward=True
    ),
}


def take_steps(model: Any, recipe: Recipe, iterations: int) -> None:
    """Take two steps.

    If they are taken in the backward pass, a pass before them only measures the norm.
    """
    import torch

    import fp8manifold as fm

    model.gradient_checkpointing_enable()
    model.train()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (1, STEP_TOKENS), generator=generator)
    optimizer = recipe.make_optimizer(model, iterations)

    def backward() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    if recipe.in_backward:
        handle = fm.optim.step_in_backward(optimizer, clip="previous", max_norm=MAX_NORM)
        with handle.measure():
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


def read_for_recipe(folder: Path, recipe: Recipe) -> Any:
    """Read the model in bfloat16, or into codes, its embedding too."""
    import transformers

    import fp8manifold as fm

    if recipe.codes:
        return fm.load(folder, FORMATS_OF_NAMES, tied="leave", embeddings="E4M3")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def step_in_this_process(folder: Path, recipe: Recipe, iterations: int) -> dict[str, float]:
    """Read and step in this process.

    Returns:
        Its largest resident set at the start, once it has read, and at the end, and the
        numbers of all weights and of those in codes.
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
        fm.quantize_model(small, FORMATS_OF_NAMES, "codes", tied="leave", embeddings="E4M3")
    take_steps(small, recipe, iterations)
    del small
    gc.collect()
    forget_peak()
    empty = resident_bytes("VmHWM")
    model = read_for_recipe(folder, recipe)
    after_reading = resident_bytes("VmHWM")
    parameters = list(model.parameters())
    take_steps(model, recipe, iterations)
    return {
        "empty": empty,
        "read": after_reading,
        "weights": sum(p.numel() for p in parameters),
        "in_codes": sum(p.numel() for p in parameters if isinstance(p, fm.FP8Tensor)),
        "stepped": resident_bytes("VmHWM"),
    }


def run_stepping(*words: str) -> Any:
    """Run this script in a fresh process, and read the JSON that it prints."""
    command = [sys.executable, __file__, "--child", *words]
    # glibc gives every block of 64 kB and more back at once, so that none counts twice.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**16)}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{process.stdout}{process.stderr}")
    return json.loads(process.stdout.splitlines()[-1])


class RecipeFigures(NamedTuple):
    """What was measured of one recipe."""

    #: name of the recipe
    what: str
    #: GB at the peak of reading
    read: float
    #: GB at the peak of all
    gb: float
    #: per weight, at that peak
    bytes: float


def measure_recipes(
    folder: Path, size: str, names: list[str], iterations: int
) -> list[RecipeFigures]:
    """Measure each recipe in a process of its own."""
    run_stepping("write", str(folder), size)
    rows = []
    for name in names:
        figures = run_stepping("step", str(folder), name, str(iterations))
        reading = figures["read"] - figures["empty"]
        peak = figures["stepped"] - figures["empty"]
        rows.append(
            RecipeFigures(RECIPES[name].name, reading / 1e9, peak / 1e9, peak / figures["weights"])
        )
        print(f"{name}: {json.dumps(figures)}", file=sys.stderr)
    return rows


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--weights", choices=tuple(LLAMA_SIZES), default="277M", help="how many there are"
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
        run_stepping_task(*args.child)
        return
    names = args.recipes.split(",")
    for name in names:
        if name not in RECIPES:
            raise SystemExit(f"--recipes: {name!r} is unknown; give some of {', '.join(RECIPES)}")
    check_linux()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = measure_recipes(Path(folder), args.weights, names, args.iterations)
    columns = (
        f"{args.weights} weights, 1 x {STEP_TOKENS} tokens",
        "GB to read",
        "GB at the peak",
        "bytes per weight",
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
        record("", columns, cells, packages=("transformers", "safetensors", "torchao"))


def run_stepping_task(task: str, folder: str, *words: str) -> None:
    """Do what `run_stepping` asks of a process, and print JSON."""
    if task == "write":
        (size,) = words
        write(Path(folder), size, SHARDS)
        print("{}")
    else:
        recipe, iterations = words
        print(json.dumps(step_in_this_process(Path(folder), RECIPES[recipe], int(iterations))))


if __name__ == "__main__":
    main()
