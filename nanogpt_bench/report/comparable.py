"""Which runs may be compared: facts of their records in which they have to agree.

A gap between the losses of two runs means something only if both were trained on one
corpus, as long, with models of one size. What differs between rows on purpose (format,
rule, learning rate) and what differs within a row (the seed) is no such fact.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanogpt_bench.config.settings import GONE
from nanogpt_bench.data.batches import digests_of
from nanogpt_bench.runs.environment import at
from nanogpt_bench.runs.load import Run

#: a setting of earlier releases: the seed by which the validation's batches are drawn
SEED_OF_DRAW = "eval.seed"
#: a function from a run to a comparable value in its records; None where they lack it
Fact = Callable[[Run], Any]


def corpus_digests(run: Run) -> dict[str, Any] | None:
    """Return the digests of the corpus' tokens by split; None where one is unknown."""
    return _digests(run, "corpus")


def _digests(run: Run, text: str) -> dict[str, Any] | None:
    splits = at(run.environment, f"{text}.splits")
    if not isinstance(splits, Mapping):
        return None
    digests = {}
    for name, split in splits.items():
        if isinstance(split, Mapping):
            digests[name] = split.get("sha256")
    if not digests or not all(digests.values()):
        return None
    # Those of labels, too, which a corpus of documents has.
    return digests | digests_of(splits)


def _settings(run: Run, *keys: str) -> list[Any] | None:
    """Return the values of settings; None where the config lacks one."""
    values = [at(run.config, key) for key in keys]
    return None if None in values else values


def _nullable_setting(run: Run, key: str) -> list[Any] | None:
    """Return the value of a setting, which may be null, in a list.

    It is None where the config lacks the setting.
    """
    absent = object()
    value = at(run.config, key, absent)
    return None if value is absent else [value]


def _task(run: Run) -> Any:
    return run.config.get("task")


def _train_tokens(run: Run) -> list[Any] | None:
    return _nullable_setting(run, "data.train_tokens")


def _tokenizer(run: Run) -> Any:
    return run.environment.get("tokenizer")


def _model_size(run: Run) -> list[Any] | None:
    return _settings(run, "model.n_layer", "model.n_head", "model.n_embd", "model.block_size")


def _first_weights(run: Run) -> list[Any] | None:
    """Return where the first weights are from; random ones of all seeds count as equal."""
    return _nullable_setting(run, "model.init_from")


def _steps(run: Run) -> Any:
    planned = at(run.config, "train.max_steps")
    return run.number("steps_planned") if planned is None else planned


def _batch_size(run: Run) -> Any:
    """Return the sequences per step."""
    values = _settings(run, "train.batch_size", "train.accumulation")
    if values is None or not all(isinstance(value, int) for value in values):
        return None
    batch_size, accumulation = values
    return batch_size * accumulation


def _validation(run: Run) -> list[Any] | None:
    """Return what the draw of the validation's batches depends on."""
    values = _settings(run, "eval.batches", "train.batch_size")
    if values is None:
        return None
    # Configurations of earlier releases have the draw's seed, which is fixed today.
    return [*values, at(run.config, SEED_OF_DRAW, GONE[SEED_OF_DRAW])]


#: the facts by name; the fields of settings among them have the mark `of_task`
COMPARED_FACTS: Mapping[str, Fact] = {
    "task": _task,
    "corpus": corpus_digests,
    "training tokens": _train_tokens,
    "tokenizer": _tokenizer,
    "size": _model_size,
    "first weights": _first_weights,
    "steps": _steps,
    "batch size": _batch_size,
    "validation": _validation,
}


def differing_facts(runs: Sequence[Run], reference_runs: Sequence[Run]) -> tuple[str, ...]:
    """Return the names of facts in which runs differ from those of a reference.

    A gap of their losses means nothing then. A fact that either run's records lack is
    skipped.

    >>> differing_facts([], [])
    ()
    """
    names: dict[str, None] = {}
    for name in COMPARED_FACTS:
        for run, reference_run in itertools.product(runs, reference_runs):
            if _differ(name, run, reference_run):
                names[name] = None
    return tuple(names)


def have_one_other_text(runs: Sequence[Run], reference_runs: Sequence[Run]) -> bool:
    """Return whether losses on the text of `eval.also` can be subtracted.

    Records of earlier releases lack its digests; there the folders' names are compared.
    """
    for run, reference_run in itertools.product(runs, reference_runs):
        digests, reference_digests = _digests(run, "also"), _digests(reference_run, "also")
        if digests is None or reference_digests is None:
            digests, reference_digests = _other_folder(run), _other_folder(reference_run)
        if digests != reference_digests:
            return False
    return True


def _other_folder(run: Run) -> Any:
    return at(run.config, "eval.also")


def _differ(name: str, run: Run, reference_run: Run) -> bool:
    fact = COMPARED_FACTS[name]
    if name == "corpus" and _differ("tokenizer", run, reference_run):
        # Two tokenizers make different tokens of one text, so the sources of the text
        # are compared instead.
        fact = _corpus_source
    value = fact(run)
    reference_value = fact(reference_run)
    return value is not None and reference_value is not None and value != reference_value


def _corpus_source(run: Run) -> Any:
    return at(run.environment, "corpus.source")


def loss_conditions(runs: Sequence[Run]) -> frozenset[str]:
    """Return as one value everything that runs' losses depend on.

    Format, rule, learning rate and seed are left out.
    """
    conditions = set()
    for run in runs:
        conditions.add(repr([fact(run) for fact in COMPARED_FACTS.values()]))
    return frozenset(conditions)
