"""Rows of the table: runs of one setting, one per seed, their label, and the reference
of each row.
"""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from nanogpt_bench.config.keys import keys_where
from nanogpt_bench.config.metrics import ELAPSED, VAL_LOSS
from nanogpt_bench.data.batches import digests_of
from nanogpt_bench.runs.environment import at
from nanogpt_bench.runs.load import Run, has_ended
from nanogpt_bench.runs.read import finite
from nanogpt_bench.system.errors import printable, shortened

REFERENCE_RULE = "bf16-mixed"
#: configuration keys in which the seeds of one row may differ
SEED_KEYS = frozenset({"seed", "data.seed", "model.seed"})
LONGEST_SETTING = 60  # characters of a setting's value in a label
MOST_SETTINGS = 3  # settings that a label names
MOST_NAMES = 3  # runs that a label names


@dataclass(frozen=True)
class Row:
    """The runs of one setting, one per seed, under the label of tables and figures."""

    label: str
    rule: str
    format: str
    runs: tuple[Run, ...]
    #: seeds known to have no run yet
    missing: tuple[int | None, ...] = ()
    #: the reason why there will be no runs; "" otherwise
    reason: str = ""
    #: further runs of the same seeds, which are not counted
    uncounted: tuple[Run, ...] = ()


def row_runs(rows: Iterable[Row]) -> list[tuple[Row, Run]]:
    """Return every run of rows, with its row."""
    return [(row, run) for row in rows for run in row.runs]


def shortfall(rows: Iterable[Row]) -> str:
    """Return the count of runs out of those planned, in words; "" where none is
    missing.

    >>> shortfall([Row("fp32", "fp32", "none", (), (1, 2))]), shortfall([])
    ('0 of 2 runs', '')
    """
    counts = [(len(row.runs), len(row.missing)) for row in rows]
    there, missing = (sum(each) for each in zip(*counts, strict=True)) if counts else (0, 0)
    return f"{there} of {there + missing} runs" if missing else ""


def row_label(rule: str, fmt: str) -> str:
    """Return a setting's name: its format, unless its weights are floats, and its rule.

    >>> row_label("nearest", "E4M3"), row_label("fp32", "none")
    ('E4M3 nearest', 'fp32')
    """
    return rule if fmt == "none" else f"{fmt} {rule}"


def group_rows(runs: Sequence[Run]) -> list[Row]:
    """Group runs that differ only in seeds into rows, in order of first appearance;
    each seed counts once.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(setting_of(run), []).append(run)
    labels = _distinct_labels(list(groups.values()))
    return [
        counted_once(Row(label, group[0].rule, group[0].format, tuple(group)))
        for label, group in zip(labels, groups.values(), strict=True)
    ]


def counted_once(row: Row) -> Row:
    """Return the row with one run per seed, the first of the longest; `uncounted` has the
    others.
    """
    found: dict[Hashable, list[Run]] = {}
    for run in row.runs:
        seed = seed_of(run)
        found.setdefault(("unknown", id(run)) if seed is None else seed, []).append(run)
    runs = tuple(max(group, key=_went) for group in found.values())
    counted = set(map(id, runs))
    aside = (run for group in found.values() for run in group if id(run) not in counted)
    return replace(row, runs=runs, uncounted=(*row.uncounted, *aside))


def _went(run: Run) -> tuple[bool, bool, int]:
    return run.status == "finished", has_ended(run.summary), run.last_step or 0


def setting_of(run: Run) -> str:
    """Return a key that runs share if they differ only in seeds; a run without a config
    shares it with no other.
    """
    if not run.config:
        return f"path:{run.path}"
    # A corpus of the same name that was prepared again may be another one.
    parts = [run.rule, run.format, _settings_without(run, SEED_KEYS), sorted(depends_on([run]))]
    return json.dumps(parts, sort_keys=True, default=str)


def setting_without(run: Run, keys: Set[str]) -> str:
    """Return a key that runs share if their settings differ only in seeds and `keys`."""
    if not run.config:
        return f"path:{run.path}"
    return json.dumps(_settings_without(run, SEED_KEYS | keys), sort_keys=True, default=str)


def _settings_without(run: Run, keys: Set[str]) -> dict[str, Any]:
    settings = {key: value for key, value in flat(run.config).items() if key not in keys}
    tokens = _tokens(run)
    if tokens is not None and "data.dir" in settings:
        # One folder has several names, and one name may have been given to two texts.
        settings["data.dir"] = tokens
    return settings


def _distinct_labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return labels of rule and format; equal ones get the settings that differ, else
    names, else paths.
    """
    labels = plain = [row_label(group[0].rule, group[0].format) for group in groups]
    differing = [
        _differing(label, group, groups, plain) for label, group in zip(plain, groups, strict=True)
    ]
    named = [_listed([run.name for run in group]) for group in groups]
    paths = [_listed([printable(str(run.path)) for run in group]) for group in groups]
    for endings in (differing, named, paths):
        labels = [
            base + ending if labels.count(label) > 1 else label
            for base, ending, label in zip(plain, endings, labels, strict=True)
        ]
    return labels


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return f" ({', '.join(names[:MOST_NAMES])}{f' and {more} more' if more > 0 else ''})"


def _differing(
    label: str, group: Sequence[Run], groups: Sequence[Sequence[Run]], labels: Sequence[str]
) -> str:
    """Return the settings in which the groups of one label differ, such as ` lr=0.001`;
    "" if there are many.
    """
    own = flat(group[0].config)
    others = [
        flat(other[0].config) for other, name in zip(groups, labels, strict=True) if name == label
    ]
    keys = [
        k for k in own if k not in SEED_KEYS and any(other.get(k) != own[k] for other in others)
    ]
    if len(keys) > MOST_SETTINGS:
        return ""
    words = {
        k: f"{v:g}" if isinstance(v := own[k], float) else " ".join(str(v).split()) for k in keys
    }
    return "".join(
        f" {k.rsplit('.', 1)[-1]}={shortened(text, LONGEST_SETTING)}" for k, text in words.items()
    )


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten settings to dotted keys.

    >>> flat({"a": 1, "b": {"c": 2}})
    {'a': 1, 'b.c': 2}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        nested = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def learning_rate(run: Run) -> float | None:
    """Return the peak learning rate in a run's records; None without one above 0."""
    rate = finite(run.summary.get("lr", at(run.config, "optimizer.lr")))
    return rate if rate is not None and rate > 0 else None


def find_reference(rows: Sequence[Row], label: str | None = None) -> Row | None:
    """Return the row of that label, by default the first BF16 autocast row; None where
    there is none.
    """
    if label is not None:
        return next((row for row in rows if row.label == label), None)
    return next((row for row in rows if row.rule == REFERENCE_RULE), None)


def references_of(rows: Sequence[Row], reference: Row | None) -> dict[str, Row]:
    """Return each row's reference by the row's label; {} without a reference.

    It is `reference` itself. For a row with another corpus, length or size it is the
    row most like `reference` with that corpus, length and size, of the reference's rule
    and format.
    """
    if reference is None:
        return {}
    apart = [row for row in rows if differences(row.runs, reference.runs)]
    others = _most_like(reference, apart)
    found = {row.label: others.get(depends_on(row.runs), reference) for row in apart}
    # A row that would only be its own reference is none: it can't be compared.
    needed = {other.label for label, other in found.items() if other.label != label}
    found = {
        label: reference if other.label not in needed else other for label, other in found.items()
    }
    return {row.label: found.get(row.label, reference) for row in rows}


def _most_like(reference: Row, rows: Sequence[Row]) -> dict[frozenset[str], Row]:
    """Return, by what losses depend on, the row of the reference's rule and format that
    is most like the reference.
    """
    groups: dict[frozenset[str], list[Row]] = {}
    for row in rows:
        if (row.rule, row.format) == (reference.rule, reference.format):
            groups.setdefault(depends_on(row.runs), []).append(row)
    # Rates may be tuned for each row, so they count least; seeds and the task do not
    # count.
    aside, rates = {*SEED_KEYS, *keys_where("of_task")}, set(keys_where("is_rate"))

    def apart(row: Row) -> tuple[int, int]:
        one, other = (
            {} if not each.runs else flat(each.runs[0].config) for each in (row, reference)
        )
        differing = {
            key for key in (one.keys() | other.keys()) - aside if one.get(key) != other.get(key)
        }
        return len(differing - rates), len(differing)

    return {key: min(group, key=apart) for key, group in groups.items()}


def loss_unit(rows: Iterable[Row]) -> str:
    """Return the unit of the rows' losses: nats per token, or per label where documents
    are classified.

    >>> loss_unit([])
    'nats per token'
    """
    tasks = {run.config.get("task", "language") for row in rows for run in row.runs}
    return (
        "nats per label"
        if tasks == {"classify"}
        else "nats"
        if "classify" in tasks
        else "nats per token"
    )


def reference_beside(run: Run, references: Sequence[Row]) -> list[Row]:
    """Return the first run of a comparable reference as a row to draw beside the run;
    [] without one.
    """
    for reference in references:
        if not differences([run], reference.runs[:1]):
            return [Row(reference.label, reference.rule, reference.format, reference.runs[:1])]
    return []


def identity(run: Run) -> Hashable:
    """Return a key that all records of one run share, and no other run's: settings,
    name, seed, first validation.
    """
    times, losses = run.curve(VAL_LOSS.name, ELAPSED.name)
    return (setting_of(run), run.name, run.seed, times[0], losses[0]) if times else str(run.path)


def seed_of(run: Run) -> Hashable | None:
    """Return the seeds of run, data and model, in which the runs of one setting differ;
    None if unknown.

    >>> from pathlib import Path
    >>> seed_of(Run(Path("a"), summary={"seed": 3})) == seed_of(Run(Path("b"), {"seed": 3, "data": {"seed": 3}}))
    True
    """
    if run.seed is None:
        return None
    own = (at(run.config, key) for key in ("data.seed", "model.seed"))
    return (
        run.seed,
        *(
            run.seed if seed is None else seed if isinstance(seed, int) else repr(seed)
            for seed in own
        ),
    )


def left_aside(row: Row) -> list[str]:
    """Return a line for each run in `uncounted`: its seed, the run that counts instead, and
    why.
    """
    lines = []
    for run in row.uncounted:
        other = next(each for each in row.runs if seed_of(each) == seed_of(run))
        why = "went further" if _went(other) > _went(run) else "went as far and comes first"
        lines.append(
            f"{row.label}: {run.path} is not counted; {other.path} has seed {run.seed} too, and "
            f"{why}"
        )
    return lines


#: a function from a run to a comparable value in its records; None where they lack it
Fact = Callable[[Run], Any]


def differences(runs: Sequence[Run], others: Sequence[Run]) -> tuple[str, ...]:
    """Return the names of facts in which runs differ from others, so that a gap of
    their losses means nothing.

    A fact that either run's records lack is skipped.

    >>> differences([], [])
    ()
    """
    pairs = [(run, other) for run in runs for other in others]
    return tuple(
        name for name, fact in FACTS.items() if any(_differ(fact, *pair) for pair in pairs)
    )


def depends_on(runs: Sequence[Run]) -> frozenset[str]:
    """Return as one value everything that runs' losses depend on, except format, rule,
    learning rate and seed.
    """
    return frozenset(repr([fact(run) for fact in FACTS.values()]) for run in runs)


def _differ(fact: Fact, run: Run, other: Run) -> bool:
    if fact is _tokens and _differ(FACTS["tokenizer"], run, other):
        # Two tokenizers make different tokens of one text, so the sources of the text
        # are compared instead.
        return _differ(lambda each: at(each.environment, "corpus.source"), run, other)
    own, its = fact(run), fact(other)
    return own is not None and its is not None and own != its


def _tokens(run: Run) -> dict[str, Any] | None:
    splits = at(run.environment, "corpus.splits")
    if not isinstance(splits, Mapping):
        return None
    digests = {
        name: part.get("sha256") for name, part in splits.items() if isinstance(part, Mapping)
    }
    return digests | digests_of(splits) if digests and all(digests.values()) else None


def _all(run: Run, *keys: str) -> list[Any] | None:
    """The values of settings; None where the config lacks one."""
    found = [at(run.config, key) for key in keys]
    return found if None not in found else None


def _given(run: Run, key: str) -> list[Any] | None:
    """The value of a setting, which may be null, in a list; None where the config lacks
    it.
    """
    absent = object()
    found = at(run.config, key, absent)
    return None if found is absent else [found]


def _steps(run: Run) -> Any:
    planned = at(run.config, "train.max_steps")
    return run.number("steps_planned") if planned is None else planned


def _batch(run: Run) -> Any:
    known = [
        part
        for part in _all(run, "train.batch_size", "train.accumulation") or ()
        if isinstance(part, int)
    ]
    return known[0] * known[1] if len(known) == 2 else None


#: facts in which compared runs have to agree, from their records; settings among them
#: are marked `of_task`
FACTS: Mapping[str, Fact] = {
    "task": lambda run: run.config.get("task"),
    "corpus": _tokens,
    "training tokens": lambda run: _given(run, "data.train_tokens"),
    "tokenizer": lambda run: run.environment.get("tokenizer"),
    "size": lambda run: _all(
        run, *(f"model.{key}" for key in ("n_layer", "n_head", "n_embd", "block_size"))
    ),
    "first weights": lambda run: _given(
        run, "model.init_from"
    ),  # random weights of all seeds count as equal
    "steps": _steps,
    "batch size": _batch,
    "validation": lambda run: _all(
        run, "eval.batches", "train.batch_size", "eval.seed"
    ),  # what its draw depends on
}
