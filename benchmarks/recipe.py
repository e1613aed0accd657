"""Loss and bytes of README's first lines of Python, run on a text in the model's
tokens, beside AdamW.

    python benchmarks/recipe.py models/smollm2 data/law runs/recipe.jsonl [--seeds
    42,43,44] [--ways readme,float32]

The model is a folder of floats, or one with a ``.gguf`` file; ``nanogpt-bench prepare``
writes the text. A seed decides on the batches, which are those of the bench's runs of
that seed, and on the random bits; ``readme`` runs README's lines with the name of the
model and the seed put in. ``float32`` and ``bfloat16`` are torch's AdamW over all
weights in that dtype, clipped, with the rates, betas and decay of these lines. The loss
is over the bench's twelve windows of held-out text, as the model computes it, and
computed in float32 on its decoded weights. Bytes are those of weights and optimizer
state. Every run that ends is one line of JSON; a run that the file has is not repeated,
so that the same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Final

import torch
from _forms import add_form_options, text_table
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.data.batches import Corpus, batch, eval_batches, load_corpus
from nanogpt_bench.model.causal import load_causal, window_losses
from nanogpt_bench.setup.memory import held_bytes
from nanogpt_bench.setup.task import EVAL_SEED

README: Final = Path(__file__).parent.parent / "README.md"
NAME: Final = "HuggingFaceTB/SmolLM2-135M"
STEPS: Final = 200
BLOCK: Final = 256
WINDOWS: Final = 12
#: of Student's t, by degrees of freedom
QUANTILES: Final = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}

ADAMW: Final = """
model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M", dtype=torch.{dtype}).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, betas=(0.9, 0.99), weight_decay=0.0)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 11, (200 - step) / 190))
for tokens in batches:
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
"""
IMPORTS: Final = "import torch\nfrom transformers import AutoModelForCausalLM\n"


def lines_of_readme() -> str:
    """The first Python of README."""
    found = re.search(
        r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    if found is None:
        raise SystemExit(f"{README} has no Python")
    return found[1]


def code_of(way: str, folder: Path, seed: int) -> str:
    """The lines of a way, with the folder of the model and the seed put in."""
    if way == "readme":
        code = lines_of_readme()
        if code.count('moments="8bit"') != 1:
            raise SystemExit('README\'s lines have no place for the seed, beside moments="8bit"')
        code = code.replace('moments="8bit"', f'moments="8bit", seed={seed}')
    else:
        code = IMPORTS + ADAMW.format(dtype=way)
    if code.count(NAME) != 1:
        raise SystemExit(f"the lines name {NAME} {code.count(NAME)} times")
    return code.replace(NAME, folder.as_posix())


def batches_of(corpus: Corpus, way: str, seed: int, steps: int) -> Iterator[Tensor]:
    """Tokens of each step, (1, 257), as the bench draws them."""
    begun = time.perf_counter()
    for step in range(steps):
        if step and step % 20 == 0:
            print(
                f"{way}, seed {seed}: {step} steps, {time.perf_counter() - begun:.0f} s", flush=True
            )
        inputs, targets = batch(corpus.train, 1, BLOCK, seed=seed, step=step)
        yield torch.cat([inputs, targets[:, -1:]], dim=1)


def loss_of(model: Any, windows: Tensor) -> float:
    """The mean of the windows, in nats per token."""
    return mean(window_losses(model, windows, 1))


def run(way: str, folder: Path, corpus: Corpus, seed: int, steps: int) -> dict[str, Any]:
    """Train by the lines of a way, and measure the model and its state."""
    pairs = eval_batches(corpus.val, WINDOWS, 1, BLOCK, seed=EVAL_SEED)
    windows = torch.cat([torch.cat([inputs, targets[:, -1:]], dim=1) for inputs, targets in pairs])
    names: dict[str, Any] = {"batches": batches_of(corpus, way, seed, steps)}
    torch.manual_seed(seed)
    begun = time.perf_counter()
    exec(compile(code_of(way, folder, seed), way, "exec"), names)  # noqa: S102
    seconds = time.perf_counter() - begun
    model = names["model"]
    plain = fm.dequantize_model(copy.deepcopy(model)).float()
    return {
        "way": way,
        "seed": seed,
        "steps": steps,
        "loss": loss_of(model, windows),
        "loss_in_float32": loss_of(plain, windows),
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": held_bytes(model, names["optimizer"]),
        "seconds": seconds,
        "torch": torch.__version__,
    }


def write_floats(model: Path, out: Path) -> None:
    """A folder of float32 that ``from_pretrained`` reads, from one that may have a
    ``.gguf`` file.
    """
    read = load_causal(str(model))
    read.__class__ = type(read).__mro__[2]  # transformers' own, whose name the settings are given
    read.save_pretrained(out)


def table(found: Sequence[dict[str, Any]], ways: Sequence[str], markdown: bool) -> str:
    """Losses by seed, the mean difference to float32 with half of its 95% interval, and
    bytes per parameter.
    """
    rows = [
        (
            "way",
            "seeds",
            "loss by seed",
            "minus float32",
            "computed in float32",
            "bytes per parameter",
        )
    ]
    losses = {(line["way"], line["seed"]): line for line in found}
    for way in ways:
        seeds = [seed for name, seed in losses if name == way]
        if not seeds:
            continue
        own = [losses[way, seed] for seed in seeds]
        shared = [seed for seed in seeds if ("float32", seed) in losses and way != "float32"]
        off = [losses[way, seed]["loss"] - losses["float32", seed]["loss"] for seed in shared]
        said = f"{mean(off):+.4f}" if off else ""
        if len(off) > 1:
            said += f" ± {QUANTILES[len(off) - 1] * stdev(off) / len(off) ** 0.5:.4f}"
        each = ", ".join(f"{line['loss']:.4f}" for line in own)
        exact = ", ".join(f"{line['loss_in_float32']:.4f}" for line in own)
        size = f"{own[0]['bytes'] / own[0]['parameters']:.2f}"
        rows.append((way, ", ".join(map(str, seeds)), each, said, exact, size))
    return text_table(rows, ("---", "---", "---", "---:", "---", "---:"), markdown)


def main() -> None:
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
        default="readme,float32,bfloat16",
        help="in their order, for one seed after the other",
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="fewer than the lines say, to try it"
    )
    parser.add_argument("--threads", type=int, default=1)
    add_form_options(parser)
    args = parser.parse_args()
    ways, seeds = args.ways.split(","), [int(seed) for seed in args.seeds.split(",")]
    if unknown := {*ways} - {"readme", "float32", "bfloat16"}:
        raise SystemExit(
            f"--ways: {sorted(unknown)[0]!r} is unknown; give some of readme, float32, bfloat16"
        )
    torch.set_num_threads(args.threads)
    corpus = load_corpus(args.data, BLOCK)
    found = (
        [json.loads(line) for line in args.out.read_text().splitlines()]
        if args.out.exists()
        else []
    )
    done = {(line["way"], line["seed"], line["steps"]) for line in found}
    with tempfile.TemporaryDirectory() as folder:
        write_floats(args.model, Path(folder))
        for seed in seeds:
            for way in ways:
                if (way, seed, args.steps) not in done:
                    found.append(run(way, Path(folder), corpus, seed, args.steps))
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(found[-1]) + "\n")
    shown = [line for line in found if line["steps"] == args.steps]
    print(json.dumps(shown, indent=1) if args.json else table(shown, ways, args.markdown))


if __name__ == "__main__":
    main()
