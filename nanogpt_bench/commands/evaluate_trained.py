"""`nanogpt-bench evaluate runs/X --scales ...`: a run's weights after the training, in several formats, as a report."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from nanogpt_bench.commands.post_training import Measurement, check_folder, report, spread
from nanogpt_bench.commands.run import say
from nanogpt_bench.data.batches import open_corpus
from nanogpt_bench.data.default import prepare_default
from nanogpt_bench.runs.environment import environment
from nanogpt_bench.runs.trained import choose, load
from nanogpt_bench.step.runtime import runtime
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.lock import locked
from nanogpt_bench.training.rounded import Rounded, checked_overrides, folder_of

#: what the options say, or what is not for weights that are only measured
_SAID_OTHERWISE = {
    "model.granularity": "give --scales",
    "model.storage": "every row is stored in one byte a weight",
}


def evaluate_trained(run_dir: Path, args: argparse.Namespace) -> int:
    """The command line's entry: measure the float weights of a run, then rounded, on the run's validation batches.

    Computed in float32, whatever the run computed in.

    Raises:
        BenchError: no such checkpoint, another text, or options that can't be used.
    """
    given = checked_overrides(args.overrides)
    for key, instead in _SAID_OTHERWISE.items():
        if key in given:
            raise BenchError(f"--{key} means nothing with a report of formats: {instead}")
    trained = load(choose(run_dir, args.checkpoint or "last"))
    if trained.config.task != "language":
        raise BenchError(
            f"{folder_of(trained.folder)} is of task {trained.config.task!r}, and a report of formats measures windows "
            f"of a text; nanogpt-bench evaluate {run_dir} --formats A,B rounds its weights to formats"
        )
    weights = Rounded(trained, given)
    config = weights.own
    prepare_default(config.data.dir)
    corpus = open_corpus(config)
    weights.check_text(corpus)
    out = args.out or Path("runs") / f"evaluate-{run_dir.resolve().name}"
    with locked(out, "--out"), runtime(config) as device, torch.no_grad():
        check_folder(out)
        trainer = weights.rounded({}, corpus, device)
        windows = trainer.validation_windows()
        block = windows.shape[1] - 1
        calibration = spread(corpus.train, args.calibrate, block).to(device) if args.calibrate else None
        options = {
            "tied": given.get("model.tied") or "leave",
            "headroom": given.get("model.headroom"),
            "seed": config.seed or 0,
        }
        say(f"weights of {folder_of(trained.folder)}; {len(windows)} windows of {block} tokens, in float32")
        at = Measurement(
            str(run_dir),
            trainer.model,
            windows,
            corpus.val_tokens_per_byte,
            config.train.batch_size,
            options,
            calibration,
            args.save,
        )
        report(at, args, weights.formats, out, environment(corpus, config.runtime.threads))
    return 0
