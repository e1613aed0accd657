"""What is decided about a run before its model is made.

Every run goes through `prepare_run`: of the commands, of a sweep's workers, of torchrun's
processes, new or resumed. It resolves and checks in the order in which a refusal costs
least, and nothing after it asks again:

    settings        resolved; processes, device and trackers are there
    memory          enough, before a text is written or read, which takes a while
    texts           the run's and that of `eval.also`, opened and whole
    baseline        the curve that alerts compare with
    environment     the content of environment.json

Two checks are left for `train`: the folder is unused, which only the holder of its lock
can know, and there is room for a checkpoint, whose size the built model tells.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import Resolved
from nanogpt_bench.data import lacks_default, prepare_default
from nanogpt_bench.data.batches import Corpus, open_corpus, read_meta, refuse_changed
from nanogpt_bench.data.tokenizers import ByteTokenizer
from nanogpt_bench.loop.observers import baseline_curve
from nanogpt_bench.loop.trackers import check_trackers
from nanogpt_bench.loop.trainer import TrainerInputs, trainer_inputs
from nanogpt_bench.model.gpt import GPTShape
from nanogpt_bench.runs.environment import corpus_facts, environment
from nanogpt_bench.setup.memory import check_fits
from nanogpt_bench.setup.resolve import resolve_for
from nanogpt_bench.setup.runtime import check_ranks, device_of
from nanogpt_bench.setup.task import model_shape
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Prepared(TrainerInputs):
    """A run that is resolved and checked, and can begin.

    Beside the inputs of its trainer it has what only the loop needs.
    """

    run_dir: Path
    #: whether it goes on from the newest checkpoint of `run_dir`
    resume: bool
    #: the least bytes of memory that it takes
    needed_bytes: int
    #: smoothed training loss by step of `alerts.baseline`
    baseline: Mapping[int, float]
    #: content of environment.json of a run that begins
    environment: dict[str, Any]


def prepare_run(
    config: Config,
    run_dir: Path,
    *,
    resume: bool = False,
    ranks: Ranks = ALONE,
    texts: Mapping[str, Mapping[str, Any]] | None = None,
    make_default: bool = False,
) -> Prepared:
    """Resolve and check a run, once; return all that is decided about it.

    Args:
        config: its settings, resolved or not.
        run_dir: folder of its results. Nothing is written to it here.
        resume: whether it goes on from a checkpoint in `run_dir`.
        ranks: this process among those that train it; each of them calls this function.
        texts: the digests, by their folders, of the corpora that the run has to be
            trained on. With any others a `TextChangedError` is raised.
        make_default: whether the default text is prepared if it is missing.
    """
    config = resolve_for(config, run_dir, resume=resume)
    check_ranks(config, ranks)
    device = device_of(config)
    check_trackers(config)
    try:
        meta = None
        with suppress(BenchError):
            # Opening the text reads it again, and says what is wrong.
            meta = read_meta(Path(config.data.dir))
        needed_bytes = check_fits(config, _shape_by_meta(config, meta))
        if make_default:
            with ranks.together():
                if ranks.first:
                    prepare_default(config.data.dir)
        corpus = open_corpus(config, meta)
        inputs = trainer_inputs(config, corpus, device, ranks)
    finally:
        # Not before: a text may be replaced while it is opened. A replaced one that
        # can't be opened is refused as a changed one, too.
        refuse_changed(texts or {})
    return Prepared(
        **{field.name: getattr(inputs, field.name) for field in fields(inputs)},
        run_dir=run_dir,
        resume=resume,
        needed_bytes=needed_bytes,
        baseline=baseline_curve(config.alerts.baseline),
        environment=_environment_facts(config, inputs, ranks),
    )


def _shape_by_meta(config: Resolved, meta: dict[str, Any] | None) -> GPTShape:
    """Return the model's shape before its text is opened, by the text's meta.json."""
    if meta is not None:
        no_tokens = np.empty(0, dtype=np.uint16)
        return model_shape(config, Corpus(Path(config.data.dir), no_tokens, no_tokens, meta))
    shape = model_shape(config, None)
    if lacks_default(config.data.dir):
        # It is still to be written.
        shape = replace(shape, vocab_size=ByteTokenizer().vocab_size)
    return shape


def _environment_facts(config: Config, inputs: TrainerInputs, ranks: Ranks) -> dict[str, Any]:
    """Return the content of environment.json of a run that begins."""
    facts = environment(inputs.corpus, config.runtime.threads)
    if inputs.also is not None:
        facts["also"] = corpus_facts(inputs.also)
    if ranks.size > 1:
        facts["parallel"] = config.train.parallel
        facts["processes"] = ranks.size
    if config.model.init_from:
        from nanogpt_bench.setup.start import start_facts

        facts |= start_facts(config)
    return facts
