"""One training run: settings, corpus and folder made ready, and the loop."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from nanogpt_bench.checkpoint import check_room
from nanogpt_bench.config.schema import Config
from nanogpt_bench.data.batches import open_corpus
from nanogpt_bench.loop.loop import Loop
from nanogpt_bench.loop.outcome import Progress
from nanogpt_bench.loop.resume import check_unused, find_checkpoint, found_by_all
from nanogpt_bench.model.gpt import build_model
from nanogpt_bench.observers.trackers import check_trackers
from nanogpt_bench.observers.trend import baseline_curve
from nanogpt_bench.runs.environment import environment
from nanogpt_bench.setup.memory import check_fits
from nanogpt_bench.setup.resolve import resolve_for
from nanogpt_bench.setup.runtime import check_ranks, processes, runtime
from nanogpt_bench.setup.start import check_start, start_facts
from nanogpt_bench.setup.surgery import left_in_float
from nanogpt_bench.system.files import locked
from nanogpt_bench.system.ranks import ALONE, Ranks
from nanogpt_bench.system.signals import StopRequest
from nanogpt_bench.training.run_state import expected_bytes
from nanogpt_bench.training.trainer import Trainer

_LOG = logging.getLogger("nanogpt_bench")


def run(
    config: Config,
    run_dir: Path,
    *,
    resume: bool = False,
    allow_config_change: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    stop: StopRequest | None = None,
    ranks: Ranks = ALONE,
    say: Callable[[str], None] = _LOG.warning,
) -> dict[str, Any]:
    """Train as `config` says, write everything into `run_dir` and return the content of summary.json.

    With `resume` the run goes on from the newest checkpoint in `run_dir` that verifies, with the same numbers as if it
    had never stopped; without a checkpoint it begins. `say` is told what is noticed then: checkpoints that were
    skipped, settings that differ.

    `train.on_anomaly` says what becomes of a step in which something is not finite. A `stop` that is asked
    for ends the run after the step at hand, with a checkpoint; a file that can't be written ends it without one.
    KeyboardInterrupt writes the summary, then interrupts.

    Of several `ranks`, each of which calls this, the first one writes; all stop together, and read the same checkpoint.

    Raises:
        BenchError: settings or corpus that can't be used, or a `run_dir` that already holds a run; nothing is written.
            With `resume`, settings that would change the numbers, unless `allow_config_change`.
    """
    config = resolve_for(config, run_dir, resume=resume)
    check_ranks(config, ranks)
    with runtime(config) as device:
        corpus = open_corpus(config)
        check_fits(config, corpus)
        facts = environment(corpus, config.runtime.threads) | start_facts(config) | processes(config, ranks)
        baseline = baseline_curve(config.alerts.baseline)
        check_trackers(config)
        if not resume:
            check_unused(run_dir)
        trainer = Trainer(
            config, corpus, device, start=build_model(config.begun, 0) if config.begun else None, ranks=ranks
        )
        if config.model.pretrained and config.layers and ranks.first:
            say(left_in_float(trainer.model))
        check_room(run_dir, expected_bytes(trainer), "the first checkpoint")
        with locked(run_dir, "run folder") if ranks.first else nullcontext():
            if not resume and ranks.first:
                check_unused(run_dir)  # another process may have come and gone
            find = partial(find_checkpoint, run_dir, config, facts, allow_change=allow_config_change, say=say)
            found = found_by_all(ranks, run_dir, find) if resume else None
            check_start(config, found)
            progress = Loop(config, trainer, run_dir, baseline, on_progress, stop or StopRequest(), facts)
            progress.begin(found)
            del found  # its tensors would be held as long as the run takes
            return progress.go()
