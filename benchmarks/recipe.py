"""Loss and bytes of README's first lines of Python, beside AdamW.

    python benchmarks/recipe.py models/smollm2 data/law runs/recipe.jsonl
                                [--seeds 42,43,44] [--ways readme,float32] [--record]

The model is a folder of floats, or one with a ``.gguf`` file. ``nanogpt-bench prepare``
writes the text in the model's tokens. A seed decides on the batches, which are those of
the bench's runs of that seed, and on the random bits.

    readme              README's lines, with the model's folder and the seed put in
    float32, bfloat16   torch's AdamW over all weights in that dtype, clipped, with the
                        rates, betas and decay of these lines
    adafactor-codes     StiffnessAdafactor over matrices and embeddings of one byte, with
                        steps in the backward pass
    adafactor-bfloat16  the same over bfloat16 weights, rounded at random
    adafactor-torch     torch's Adafactor over bfloat16 weights, rounded to nearest

The rate of Adafactor, relative to the size of the weights, was not searched.

With ``--record`` losses by seed are written to ``docs/measured/recipe.json``, from which
the tables of README and of the pages on fine-tuning are made.

The loss is over the bench's twelve windows of held-out text, as the model computes it,
and computed in float32 on its decoded weights. Bytes are those of weights and optimizer
state. Every run that ends is one line of JSON. A run that the file has is not repeated,
so that the same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Final, NamedTuple

import torch
from _forms import add_form_options, text_table
from _record import Cell, add_option, record
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.data.batches import Corpus, batch, eval_batches, load_corpus
from nanogpt_bench.model.causal import load_causal, window_losses
from nanogpt_bench.setup.memory import held_bytes
from nanogpt_bench.setup.task import EVAL_SEED

README: Final = Path(__file__).parent.parent / "README.md"
NAME: Final = "HuggingFaceTB/SmolLM2-135M"
TRAINING_STEPS: Final = 200
WINDOW_LENGTH: Final = 256
EVAL_WINDOWS: Final = 12
RECIPE_WAYS: Final = (
    "readme",
    "float32",
    "bfloat16",
    "adafactor-codes",
    "adafactor-bfloat16",
    "adafactor-torch",
)
#: of Student's t for 95% intervals, by degrees of freedom
QUANTILES: Final = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}

ADAMW_RECIPE: Final = """
model = AutoModelForCausalLM.from_pretrained(
    "HuggingFaceTB/SmolLM2-135M", dtype=torch.{dtype}
).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, betas=(0.9, 0.99), weight_decay=0.0)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / 11, (200 - step) / 190)
)
for tokens in batches:
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
"""
IMPORTS: Final = """
import fp8manifold as fm
import torch
from transformers import AutoModelForCausalLM
"""
ADAFACTOR_RECIPE: Final = """
model = AutoModelForCausalLM.from_pretrained(
    "HuggingFaceTB/SmolLM2-135M", dtype=torch.{dtype}
).train()
{prepare}
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / 11, (200 - step) / 190)
)
for tokens in batches:
    model(input_ids=tokens, labels=tokens).loss.backward()
    {clip}
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
"""
OURS: Final = """
optimizer = fm.optim.StiffnessAdafactor(model.parameters(), lr=1e-3, seed={seed})
handle = fm.optim.step_in_backward(optimizer, clip="previous", max_norm=1.0, first="measure")
"""
QUANTISE: Final = """
fm.quantize_model(model, "E4M3", embeddings="E4M3")
"""
TORCHS: Final = """
optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
"""
CLIP: Final = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


class AdafactorWay(NamedTuple):
    """What differs between the ways that train by Adafactor."""

    dtype: str
    #: lines before the schedule
    prepare: str
    #: a line between the backward pass and the step
    clip: str = ""


ADAFACTOR_WAYS: Final = {
    "adafactor-codes": AdafactorWay("bfloat16", QUANTISE + OURS),
    "adafactor-bfloat16": AdafactorWay("bfloat16", OURS),
    "adafactor-torch": AdafactorWay("bfloat16", TORCHS, CLIP),
}


def lines_of_readme() -> str:
    """Return the first Python of README."""
    block = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    match = block.search(README.read_text(encoding="utf-8"))
    if match is None:
        raise SystemExit(f"{README} has no Python")
    return match[1]


def code_of(way: str, folder: Path, seed: int) -> str:
    """Return the lines of a way, with the folder of the model and the seed put in."""
    if way == "readme":
        code = lines_of_readme()
        if code.count('moments="8bit"') != 1:
            raise SystemExit('README\'s lines have no place for the seed, beside moments="8bit"')
        code = code.replace('moments="8bit"', f'moments="8bit", seed={seed}')
    elif way in ADAFACTOR_WAYS:
        dtype, prepare, clip = ADAFACTOR_WAYS[way]
        lines = prepare.replace("{seed}", str(seed))
        code = IMPORTS + ADAFACTOR_RECIPE.format(dtype=dtype, prepare=lines, clip=clip)
    else:
        code = IMPORTS + ADAMW_RECIPE.format(dtype=way)
    if code.count(NAME) != 1:
        raise SystemExit(f"the lines name {NAME} {code.count(NAME)} times")
    return code.replace(NAME, folder.as_posix())


def batches_of(corpus: Corpus, way: str, seed: int, steps: int) -> Iterator[Tensor]:
    """Yield the tokens of each step, (1, 257), as the bench draws them."""
    begin = time.perf_counter()
    for step in range(steps):
        if step and step % 20 == 0:
            seconds = time.perf_counter() - begin
            print(f"{way}, seed {seed}: {step} steps, {seconds:.0f} s", flush=True)
        inputs, targets = batch(corpus.train, 1, WINDOW_LENGTH, seed=seed, step=step)
        yield torch.cat([inputs, targets[:, -1:]], dim=1)


def loss_of_windows(model: Any, windows: Tensor) -> float:
    """Return the mean loss of the windows, in nats per token."""
    return mean(window_losses(model, windows, 1))


def train_way(way: str, folder: Path, corpus: Corpus, seed: int, steps: int) -> dict[str, Any]:
    """Train by the lines of a way, and measure the model and its state."""
    windows = []
    for inputs, targets in eval_batches(corpus.val, EVAL_WINDOWS, 1, WINDOW_LENGTH, seed=EVAL_SEED):
        windows.append(torch.cat([inputs, targets[:, -1:]], dim=1))
    names: dict[str, Any] = {"batches": batches_of(corpus, way, seed, steps)}
    torch.manual_seed(seed)
    begin = time.perf_counter()
    exec(compile(code_of(way, folder, seed), way, "exec"), names)  # noqa: S102
    seconds = time.perf_counter() - begin
    model = names["model"]
    plain = fm.dequantize_model(copy.deepcopy(model)).float()
    return {
        "way": way,
        "seed": seed,
        "steps": steps,
        "loss": loss_of_windows(model, torch.cat(windows)),
        "loss_in_float32": loss_of_windows(plain, torch.cat(windows)),
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": held_bytes(model, names["optimizer"]),
        "seconds": seconds,
        "torch": torch.__version__,
    }


def write_floats(model: Path, out: Path) -> None:
    """Write a folder of float32, which ``from_pretrained`` reads.

    The model's folder may have a ``.gguf`` file.
    """
    causal = load_causal(str(model))
    # The folder's settings get the name of the class, which has to be transformers'. In
    # `__mro__` the bench's class and its mixin come before it.
    causal.__class__ = type(causal).__mro__[2]
    causal.save_pretrained(out)


RECIPE_HEADER: Final = (
    "way",
    "seeds",
    "loss by seed",
    "minus float32",
    "computed in float32",
    "bytes per parameter",
)


def ways_table(runs: Sequence[dict[str, Any]], ways: Sequence[str], markdown: bool) -> str:
    """Return a line per way, with losses by seed and bytes per parameter."""
    by_way: dict[str, dict[int, dict[str, Any]]] = {way: {} for way in ways}
    for line in runs:
        by_way.setdefault(line["way"], {})[line["seed"]] = line
    rows = [RECIPE_HEADER]
    for way in ways:
        by_seed = by_way[way]
        if not by_seed:
            continue
        lines = list(by_seed.values())
        difference = ""
        if way != "float32":
            difference = difference_text(by_seed, by_way.get("float32", {}))
        rows.append(
            (
                way,
                ", ".join(map(str, by_seed)),
                ", ".join(f"{line['loss']:.4f}" for line in lines),
                difference,
                ", ".join(f"{line['loss_in_float32']:.4f}" for line in lines),
                f"{lines[0]['bytes'] / lines[0]['parameters']:.2f}",
            )
        )
    return text_table(rows, ("---", "---", "---", "---:", "---", "---:"), markdown)


def difference_text(
    runs: dict[int, dict[str, Any]], reference: dict[int, dict[str, Any]], decimals: int = 4
) -> str:
    """Return the mean difference of runs by seed, with half of its 95% interval."""
    differences = [
        runs[seed]["loss"] - reference[seed]["loss"] for seed in runs if seed in reference
    ]
    count = len(differences)
    if count == 0:
        return ""
    text = f"{mean(differences):+.{decimals}f}"
    if count > 1:
        half = QUANTILES[count - 1] * stdev(differences) / count**0.5
        text += f" ± {half:.{decimals}f}"
    return text


def record_runs(runs: Sequence[dict[str, Any]], ways: Sequence[str], seeds: Sequence[int]) -> Path:
    """Write the loss of every way by seed, its difference to float32, and its bytes."""
    by_way: dict[str, dict[int, dict[str, Any]]] = {way: {} for way in ways}
    for line in runs:
        by_way.setdefault(line["way"], {})[line["seed"]] = line
    rows: list[list[Cell]] = []
    for way in ways:
        by_seed = by_way[way]
        losses: list[Cell] = [by_seed[seed]["loss"] if seed in by_seed else None for seed in seeds]
        difference = ""
        if way != "float32":
            difference = difference_text(by_seed, by_way.get("float32", {}), decimals=3)
        held = next(iter(by_seed.values()))["bytes"] if by_seed else None
        rows.append([way, *losses, difference, held])
    columns = ["way", *(f"seed {seed}" for seed in seeds), "minus float32", "bytes held"]
    return record("", columns, rows)


def main() -> None:
    """Do the runs that the file does not have, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder of floats, or one with a .gguf file")
    parser.add_argument(
        "data",
        type=Path,
        help="a text that nanogpt-bench prepare has written in the model's tokens",
    )
    parser.add_argument("out", type=Path, help="the file of the runs, a line of JSON each")
    parser.add_argument("--seeds", default="42,43,44", help="separated by commas")
    parser.add_argument(
        "--ways",
        default=",".join(RECIPE_WAYS),
        help="in their order, for one seed after the other",
    )
    parser.add_argument(
        "--steps", type=int, default=TRAINING_STEPS, help="fewer than the lines say, to try it"
    )
    parser.add_argument("--threads", type=int, default=1)
    add_form_options(parser)
    add_option(parser)
    args = parser.parse_args()
    ways = args.ways.split(",")
    seeds = [int(seed) for seed in args.seeds.split(",")]
    for way in ways:
        if way not in RECIPE_WAYS:
            raise SystemExit(f"--ways: {way!r} is unknown; give some of {', '.join(RECIPE_WAYS)}")
    torch.set_num_threads(args.threads)
    corpus = load_corpus(args.data, WINDOW_LENGTH)
    runs = []
    if args.out.exists():
        runs = [json.loads(line) for line in args.out.read_text().splitlines()]
    recorded_keys = {(line["way"], line["seed"], line["steps"]) for line in runs}
    with tempfile.TemporaryDirectory() as folder:
        write_floats(args.model, Path(folder))
        for seed, way in itertools.product(seeds, ways):
            if (way, seed, args.steps) in recorded_keys:
                continue
            runs.append(train_way(way, Path(folder), corpus, seed, args.steps))
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(runs[-1]) + "\n")
    shown = [line for line in runs if line["steps"] == args.steps]
    print(json.dumps(shown, indent=1) if args.json else ways_table(shown, ways, args.markdown))
    if args.record:
        print(record_runs(shown, ways, seeds))


if __name__ == "__main__":
    main()
