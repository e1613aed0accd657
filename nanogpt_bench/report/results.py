"""From runs to rows: seeds of one setting together, each row measured against the reference row."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nanogpt_bench.config.keys import keys_where
from nanogpt_bench.config.metrics import BESIDE_LOSS, COSINE, VAL_ALSO_LOSS
from nanogpt_bench.report.comparable import depends_on, differences
from nanogpt_bench.report.gap import error_of, gap_to, tokens_to_gap, twin_of
from nanogpt_bench.report.paired import Difference, adjusted, difference
from nanogpt_bench.report.seeds import SEED_KEYS, one_a_seed, seed_of
from nanogpt_bench.report.verdict import DEFAULTS, Evidence, Outcome, Thresholds, Verdict, judge
from nanogpt_bench.runs.load import Run
from nanogpt_bench.system.errors import printable, shortened

REFERENCE_RULE = "bf16-mixed"

LONGEST_SETTING = 60  # of a setting's value in a label
MOST_SETTINGS = 3  # that a label names
MOST_NAMES = 3  # of runs, the same


@dataclass(frozen=True)
class Figure:
    """A measured number over seeds: mean, and sample standard deviation when there are several."""

    mean: float
    spread: float | None = None


@dataclass(frozen=True)
class Row:
    """The runs of one setting, one per seed, under the label the tables and figures show."""

    label: str
    rule: str
    format: str
    runs: tuple[Run, ...]
    #: seeds of which there is no run yet, as far as that is known
    missing: tuple[int | None, ...] = ()
    #: why there will be no run at all
    why: str = ""
    #: runs of seeds that `runs` has already, which are not counted
    aside: tuple[Run, ...] = ()


@dataclass(frozen=True)
class Result:
    """One line of the table. Losses and gaps are in nats (`loss_unit`); `gap_share` is relative to the reference."""

    row: Row
    reference: bool
    final_val_loss: Figure | None
    best_val_loss: Figure | None
    gap: Figure | None
    gap_share: float | None
    bytes_per_parameter: float | None
    stall: Figure | None
    stall_metric: str | None
    tokens_per_s: Figure | None
    verdict: Verdict
    arrived: Figure | None = None
    tokens_to_gap: Figure | None = None
    cosine: Figure | None = None
    alerts: Mapping[str, int] = field(default_factory=dict)
    #: to the reference, over the seeds that both finished
    difference: Difference | None = None
    #: standard error of a validation over its batches, the mean over the row's runs
    val_loss_se: float | None = None
    #: what was found beside the loss, by `config.metric.Metric.figure`
    beside: Mapping[str, Figure] = field(default_factory=dict)
    #: of the losses on the other text (`eval.also`)
    also_difference: Difference | None = None

    @property
    def alerts_fired(self) -> int:
        return sum(self.alerts.values())


def figure(values: Iterable[float | None]) -> Figure | None:
    """Mean and sample standard deviation of the values that are known; None when none is.

    >>> figure([1.0, None, 3.0])
    Figure(mean=2.0, spread=1.4142135623730951)
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Figure(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)


def shortfall(rows: Iterable[Row]) -> str:
    """Return how many runs of how many are there, in words; "" where none is missing.

    >>> shortfall([Row("fp32", "fp32", "none", (), (1, 2))]), shortfall([])
    ('0 of 2 runs', '')
    """
    counts = [(len(row.runs), len(row.missing)) for row in rows]
    there, missing = (sum(each) for each in zip(*counts, strict=True)) if counts else (0, 0)
    return f"{there} of {there + missing} runs" if missing else ""


def row_label(rule: str, fmt: str) -> str:
    """The name of a setting: its format, unless its weights are floats, and its rule.

    >>> row_label("nearest", "E4M3"), row_label("fp32", "none")
    ('E4M3 nearest', 'fp32')
    """
    return rule if fmt == "none" else f"{fmt} {rule}"


def group_rows(runs: Sequence[Run]) -> list[Row]:
    """Rows in order of first appearance; runs belong together when only their seeds differ, and count once a seed."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(setting_of(run), []).append(run)
    labels = _distinct_labels(list(groups.values()))
    return [
        counted_once(Row(label, group[0].rule, group[0].format, tuple(group)))
        for label, group in zip(labels, groups.values(), strict=True)
    ]


def counted_once(row: Row) -> Row:
    """Return the row with one run a seed, the others set aside: the same seed twice has no spread."""
    runs, aside = one_a_seed(row.runs)
    return replace(row, runs=runs, aside=(*row.aside, *aside))


def setting_of(run: Run) -> str:
    """Return a key equal for the seeds of one setting; a run without a config stands alone."""
    if not run.config:
        return f"path:{run.path}"
    fixed = {key: value for key, value in flat(run.config).items() if key not in SEED_KEYS}
    # A corpus prepared anew under the same name is another one.
    return json.dumps([run.rule, run.format, fixed, sorted(depends_on([run]))], sort_keys=True, default=str)


def _distinct_labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Labels by rule and format; where those collide, with the settings that differ, else with names or paths."""
    labels = plain = [row_label(group[0].rule, group[0].format) for group in groups]
    told = [_told_apart(label, group, groups, plain) for label, group in zip(plain, groups, strict=True)]
    named = [_listed([run.name for run in group]) for group in groups]
    paths = [_listed([printable(str(run.path)) for run in group]) for group in groups]
    for endings in (told, named, paths):
        labels = [
            base + ending if labels.count(label) > 1 else label
            for base, ending, label in zip(plain, endings, labels, strict=True)
        ]
    return labels


def _listed(names: Sequence[str]) -> str:
    """The names of a row's runs, one a seed, as the end of its label."""
    more = len(names) - MOST_NAMES
    return f" ({', '.join(names[:MOST_NAMES])}{f' and {more} more' if more > 0 else ''})"


def _told_apart(label: str, group: Sequence[Run], groups: Sequence[Sequence[Run]], labels: Sequence[str]) -> str:
    """The few settings in which the groups of one label differ, such as ` lr=0.001`; none if there are many."""
    own = flat(group[0].config)
    others = [flat(other[0].config) for other, name in zip(groups, labels, strict=True) if name == label]
    keys = [k for k in own if k not in SEED_KEYS and any(other.get(k) != own[k] for other in others)]
    if len(keys) > MOST_SETTINGS:
        return ""
    return "".join(f" {key.rsplit('.', 1)[-1]}={_short(own[key])}" for key in keys)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else shortened(" ".join(str(value).split()), LONGEST_SETTING)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings by dotted key.

    >>> flat({"a": 1, "b": {"c": 2}})
    {'a': 1, 'b.c': 2}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        nested = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def find_reference(rows: Sequence[Row], label: str | None = None) -> Row | None:
    """The row of that label; without one, the first BF16 autocast row; None when there is neither."""
    if label is not None:
        return next((row for row in rows if row.label == label), None)
    return next((row for row in rows if row.rule == REFERENCE_RULE), None)


def references_of(rows: Sequence[Row], reference: Row | None) -> dict[str, Row]:
    """By label, the row that each is measured against; empty without a reference.

    That is `reference`, or, for a row whose losses can't be set against its, the one most like it among the rows of its
    rule and format that train on what that row trains on, as far.
    """
    if reference is None:
        return {}
    apart = [row for row in rows if differences(row.runs, reference.runs)]
    others = _most_like(reference, apart)
    found = {row.label: others.get(depends_on(row.runs), reference) for row in apart}
    # One that no other row is measured against is no reference, but a row that can't be compared.
    needed = {other.label for label, other in found.items() if other.label != label}
    found = {label: reference if other.label not in needed else other for label, other in found.items()}
    return {row.label: found.get(row.label, reference) for row in rows}


def _most_like(reference: Row, rows: Sequence[Row]) -> dict[frozenset[str], Row]:
    """The rows of the reference's rule and format by what their losses depend on; of several, the nearest to it."""
    groups: dict[frozenset[str], list[Row]] = {}
    for row in rows:
        if (row.rule, row.format) == (reference.rule, reference.format):
            groups.setdefault(depends_on(row.runs), []).append(row)
    # rates may be tuned for each row, so that they count last; seeds and text tell nothing of what a row is
    aside, rates = {*SEED_KEYS, *keys_where("of_task")}, set(keys_where("is_rate"))

    def apart(row: Row) -> tuple[int, int]:
        one, other = ({} if not each.runs else flat(each.runs[0].config) for each in (row, reference))
        differing = {key for key in (one.keys() | other.keys()) - aside if one.get(key) != other.get(key)}
        return len(differing - rates), len(differing)

    return {key: min(group, key=apart) for key, group in groups.items()}


def reference_name(results: Sequence[Result]) -> str:
    """What gaps are measured against: BF16, or the row that stands in for it, of several what they have in common."""
    rows = [result.row for result in results if result.reference]
    if not rows:
        return "the reference"
    if rows[0].rule == REFERENCE_RULE:
        return "BF16"
    return rows[0].label if len(rows) == 1 else row_label(rows[0].rule, rows[0].format)


def measure(
    rows: Sequence[Row], reference: Row | None, thresholds: Thresholds = DEFAULTS, *, running: bool = False
) -> list[Result]:
    """Every row's line of the table, in order; `running` says that runs without a summary still go on."""
    against = references_of(rows, reference)
    results = [_measure_row(row, against.get(row.label), thresholds, running) for row in rows]
    family, also = (
        adjusted([getattr(result, name) for result in results]) for name in ("difference", "also_difference")
    )
    each = zip(results, family, also, strict=True)
    return [replace(result, difference=found, also_difference=other) for result, found, other in each]


def _measure_row(row: Row, reference: Row | None, thresholds: Thresholds, running: bool) -> Result:
    is_reference = row is reference
    unlike = () if reference is None or is_reference else differences(row.runs, reference.runs)
    measured = None if unlike else reference
    gaps = [] if measured is None else [each for run in row.runs if (each := gap_to(run, measured.runs)) is not None]
    gap = figure(gaps)
    base = figure(run.at_end("final_val_loss") for run in measured.runs) if measured is not None else None
    gap_share = gap.mean / base.mean if gap is not None and base is not None and base.mean > 0 else None
    stall = figure(run.stall for run in row.runs)
    bytes_each = figure(run.number("bytes_per_parameter") for run in row.runs)
    cosine = figure(mean_cosine(run) for run in row.runs)
    errors = _errors(row)
    alerts = sum((Counter(run.alert_counts) for run in row.runs), Counter[str]())
    evidence = Evidence(
        gap_share,
        stall.mean if stall else None,
        cosine.mean if cosine else None,
        alerts.total(),
        is_reference,
        unlike,
        unmeasured=reference is None,
        gap=gap.mean if gap else None,
        gap_error=error_of(
            gaps, [getattr(_errors(each), "mean", None) for each in (row, measured) if each is not None]
        ),
    )
    verdict = judge(row.runs, evidence, thresholds=thresholds, running=running)
    if row.why:
        verdict = Verdict(Outcome.FAILED, row.why)
    return Result(
        row=row,
        reference=is_reference,
        final_val_loss=figure(run.at_end("final_val_loss") for run in row.runs),
        best_val_loss=_best(row),
        gap=gap,
        gap_share=gap_share,
        bytes_per_parameter=bytes_each.mean if bytes_each else None,
        stall=stall,
        stall_metric=next((run.stall_metric for run in row.runs if run.stall_metric), None),
        tokens_per_s=figure(run.number("tokens_per_s") for run in row.runs),
        arrived=figure(run.number("arrived") for run in row.runs),
        verdict=verdict,
        tokens_to_gap=None if is_reference or measured is None else _tokens_to_gap(row, measured, thresholds),
        cosine=cosine,
        alerts=dict(alerts.most_common()),
        val_loss_se=errors.mean if errors else None,
        beside=_beside(row),
        also_difference=_difference(row, measured, VAL_ALSO_LOSS.figure),
        difference=_difference(row, measured, "final_val_loss"),
    )


def _difference(row: Row, reference: Row | None, name: str) -> Difference | None:
    if reference is None or row is reference:
        return None
    return difference(_by_seed(row, name), _by_seed(reference, name))


def _errors(row: Row) -> Figure | None:
    return figure(run.at_end("final_val_loss_se") for run in row.runs)


def _best(row: Row) -> Figure | None:
    """The lowest loss of the runs that the final loss is of; where there are none, of those that ended early."""
    return figure(run.at_end("best_val_loss") for run in row.runs) or figure(
        run.number("best_val_loss") for run in row.runs
    )


def _beside(row: Row) -> dict[str, Figure]:
    found = {name: figure(run.at_end(name) for run in row.runs) for name in (metric.figure for metric in BESIDE_LOSS)}
    return {name: value for name, value in found.items() if value is not None}


def loss_unit(rows: Iterable[Row]) -> str:
    """What the losses of rows are in: nats per token, or per label where documents are classified.

    >>> loss_unit([])
    'nats per token'
    """
    tasks = {run.config.get("task", "language") for row in rows for run in row.runs}
    return "nats per label" if tasks == {"classify"} else "nats" if "classify" in tasks else "nats per token"


def _tokens_to_gap(row: Row, reference: Row, thresholds: Thresholds) -> Figure | None:
    twins = ((run, twin_of(run, reference.runs)) for run in row.runs)
    return figure(tokens_to_gap(run, twin, thresholds.gap) for run, twin in twins if twin is not None)


def mean_cosine(run: Run) -> float | None:
    """The run's mean gradient cosine against the float32 shadow, over all looks; None when it had no shadow."""
    seen = figure(run.curve(COSINE.name)[1])
    return seen.mean if seen else None


def reference_beside(run: Run, references: Sequence[Row]) -> list[Row]:
    """The first run of the run's reference as a row to draw beside it; none where none can be compared with it."""
    for reference in references:
        if not differences([run], reference.runs[:1]):
            return [Row(reference.label, reference.rule, reference.format, reference.runs[:1])]
    return []


def _by_seed(row: Row, name: str) -> dict[Hashable, float]:
    """The final losses of that name of a row's finished runs by seed."""
    ended = ((seed_of(run), run.at_end(name)) for run in row.runs)
    return {seed: loss for seed, loss in ended if seed is not None and loss is not None}


def findings(results: Sequence[Result]) -> list[str]:
    """The measured gaps worth a sentence: nearest rounding's, beside stochastic rounding's of the same format."""
    sentences = []
    for result in results:
        if result.row.rule == "nearest" and result.gap is not None and result.gap_share is not None:
            sentences.append(_nearest_sentence(result, results))
    return sentences


def _nearest_sentence(nearest: Result, results: Sequence[Result]) -> str:
    sentence = f"{nearest.row.label}: {describe_gap(nearest)} against the reference"
    if nearest.stall is not None:
        sentence += f", with {nearest.stall.mean:.1%} of the weights unmoved by a requested update"
    stochastic = (r for r in results if r.row.rule == "stochastic" and r.row.format == nearest.row.format and r.gap)
    other = next((r for r in stochastic if not differences(r.row.runs, nearest.row.runs)), None)
    return sentence + (f"; {other.row.label}: {describe_gap(other)}" if other else "") + "."


def describe_gap(result: Result) -> str:
    """The gap as signed nats and per cent of the reference's loss; a dash when unknown."""
    if result.gap is None or result.gap_share is None:
        return "-"
    share = f"{result.gap_share:+.1%}"
    return f"{result.gap.mean:+z.3f} nats ({'0.0%' if share[1:] == '0.0%' else share})"
