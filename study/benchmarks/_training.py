"""A small training whose steps are recorded.

It is that of the 0.86M model of ``compare``, under Muon or under AdamW.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from _record import add_option
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.data.batches import open_corpus
from nanogpt_bench.data.text import prepare_stdlib
from nanogpt_bench.loop.trainer import Trainer, trainer_inputs
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.comparison import row_settings

__all__ = ["RULES", "read_options", "take_training_steps", "text_for", "trainer_of"]

RULES: Final = {"Muon": "muon-stochastic", "AdamW": "stochastic"}
#: hidden matrices, which Muon steps: four in each of four blocks
_MATRICES: Final = 16


def read_options(description: str | None, max_steps: int) -> tuple[argparse.Namespace, list[int]]:
    """Return the options of a command line, and the numbers of the hidden matrices in it."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir", help="prepared text; without it the standard library's prose is prepared"
    )
    parser.add_argument(
        "--max-steps", type=int, default=max_steps, help="of each training, at least 2"
    )
    parser.add_argument(
        "--layers", default="0,3,9", help="which of the hidden matrices, in the model's order"
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    add_option(parser)
    options = parser.parse_args()
    if options.max_steps < 2:
        parser.error(f"--max-steps {options.max_steps}: at least 2, for two halves")
    try:
        layers = [int(layer) for layer in options.layers.split(",")]
    except ValueError:
        layers = [-1]
    if not all(0 <= layer < _MATRICES for layer in layers):
        parser.error(f"--layers {options.layers}: numbers from 0 to {_MATRICES - 1}, such as 0,3,9")
    return options, layers


@contextmanager
def text_for(options: argparse.Namespace) -> Iterator[str]:
    """Yield the folder of a text: that of the options, or one that is prepared.

    What was prepared is removed at the end.
    """
    if options.data_dir is not None:
        yield options.data_dir
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare_stdlib(Path(folder))
        yield folder


def trainer_of(
    rule: str, fmt: str, max_steps: int, seed: int, data_dir: str
) -> tuple[Trainer, list[Tensor]]:
    """Return a trainer, and its quantised matrices in the model's order."""
    settings = row_settings(rule, fmt, seed=seed, max_steps=max_steps, data_dir=data_dir)
    config = resolve(build_config(settings | {"shadow.enabled": False}))
    trainer = Trainer(trainer_inputs(config, open_corpus(config), torch.device("cpu")))
    return trainer, [p for p in trainer.model.parameters() if isinstance(p, fm.FP8Tensor)]


def take_training_steps(trainer: Trainer, max_steps: int) -> None:
    """Take the steps."""
    for number in range(1, max_steps + 1):
        trainer.train_step(trainer.new_step(number, last=number == max_steps), [])
