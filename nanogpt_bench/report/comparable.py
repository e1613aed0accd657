"""Whether losses may be set against each other: what they depend on beside format, rule, learning rate and seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanogpt_bench.data.batches import digests_of
from nanogpt_bench.runs.load import Run

SHAPE = ("n_layer", "n_head", "n_embd", "block_size")

#: a fact as a value that can be compared; None where the run's records do not say
Fact = Callable[[Run], Any]


def differences(runs: Sequence[Run], others: Sequence[Run]) -> tuple[str, ...]:
    """What differs between runs and the reference's, by name, so that a gap of their losses would say nothing.

    A fact that a run's records do not hold is not judged.

    >>> differences([], [])
    ()
    """
    return tuple(
        name for name, fact in FACTS.items() if any(_differ(name, fact, run, other) for other in others for run in runs)
    )


def depends_on(runs: Sequence[Run]) -> frozenset[str]:
    """All that the losses of runs depend on beside format, rule, learning rate and seed, as one value."""
    return frozenset(repr([fact(run) for fact in FACTS.values()]) for run in runs)


def _differ(name: str, fact: Fact, run: Run, other: Run) -> bool:
    if name == "corpus" and _known_to_differ(_tokenizer, run, other):
        # Every tokenizer makes other tokens of one text: there the text itself says whether it is the same.
        fact = _text
    return _known_to_differ(fact, run, other)


def _known_to_differ(fact: Fact, run: Run, other: Run) -> bool:
    own, its = fact(run), fact(other)
    return own is not None and its is not None and own != its


def _setting(run: Run, section: str, key: str) -> Any:
    """A setting of a run's config; None where it has none."""
    part = run.config.get(section)
    return part.get(key) if isinstance(part, Mapping) else None


def _of_corpus(run: Run, key: str) -> Any:
    corpus = run.environment.get("corpus")
    return corpus.get(key) if isinstance(corpus, Mapping) else None


def _tokens(run: Run) -> dict[str, Any] | None:
    """The digest of each split's tokens, and of their labels where there are some."""
    splits = _of_corpus(run, "splits")
    if not isinstance(splits, Mapping):
        return None
    digests = {name: part.get("sha256") for name, part in splits.items() if isinstance(part, Mapping)}
    return digests | digests_of(splits) if digests and all(digests.values()) else None


def _text(run: Run) -> Any:
    """What the corpus was made from."""
    return _of_corpus(run, "source")


def _tokenizer(run: Run) -> Any:
    return run.environment.get("tokenizer")


def _size(run: Run) -> Any:
    shape = [_setting(run, "model", key) for key in SHAPE]
    return shape if None not in shape else None


def _started_from(run: Run) -> Any:
    """What the first weights were; random ones, of any seed, are one."""
    model = run.config.get("model")
    return [model["init_from"]] if isinstance(model, Mapping) and "init_from" in model else None


def _steps(run: Run) -> Any:
    planned = _setting(run, "train", "max_steps")
    return run.number("steps_planned") if planned is None else planned


def _training_tokens(run: Run) -> Any:
    data = run.config.get("data")
    return [data["train_tokens"]] if isinstance(data, Mapping) and "train_tokens" in data else None


def _batch(run: Run) -> Any:
    """Sequences a step, however they are divided."""
    parts = [_setting(run, "train", key) for key in ("batch_size", "accumulation")]
    known = [part for part in parts if isinstance(part, int)]
    return known[0] * known[1] if len(known) == len(parts) else None


def _validation(run: Run) -> Any:
    """How many batches, of how many sequences, drawn from which seed: what is drawn depends on all three."""
    parts = [_setting(run, "eval", "batches"), _setting(run, "train", "batch_size"), _setting(run, "eval", "seed")]
    return parts if None not in parts else None


#: beside the settings that are `of_task` (`nanogpt_bench.config.field`), what says the same of a run's records
FACTS: Mapping[str, Fact] = {
    "task": lambda run: run.config.get("task"),
    "corpus": _tokens,
    "training tokens": _training_tokens,
    "tokenizer": _tokenizer,
    "size": _size,
    "first weights": _started_from,
    "steps": _steps,
    "batch size": _batch,
    "validation": _validation,
}
