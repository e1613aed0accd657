"""Results: each row's measurements over its seeds, its gap, difference and verdict."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nanogpt_bench.config.endings import RunStatus
from nanogpt_bench.config.metrics import BESIDE_LOSS, VAL_ALSO_LOSS
from nanogpt_bench.monitors.shadow import COSINE
from nanogpt_bench.report.comparable import differing_facts, have_one_other_text
from nanogpt_bench.report.paired import Difference, adjusted, difference
from nanogpt_bench.report.rows import (
    REFERENCE_RULE,
    Row,
    references_by_label,
    row_label,
    seed_of,
)
from nanogpt_bench.report.verdicts import Judgement, RowComparison, Verdict, judge_row
from nanogpt_bench.runs.environment import at, latest, on_two_processors
from nanogpt_bench.runs.load import Run


@dataclass(frozen=True)
class Figure:
    """A number over seeds: mean, and sample standard deviation if there are several."""

    mean: float
    spread: float | None = None


@dataclass(frozen=True)
class Result:
    """One line of the table; losses and gaps are in nats (`loss_unit`)."""

    row: Row
    reference: bool
    final_val_loss: Figure | None
    best_val_loss: Figure | None
    gap: Figure | None
    #: relative to the reference's loss
    gap_share: float | None
    bytes_per_parameter: float | None
    stall: Figure | None
    stall_metric: str | None
    tokens_per_s: Figure | None
    verdict: Verdict
    arrived: Figure | None = None
    cosine: Figure | None = None
    #: counts by kind
    alerts: Mapping[str, int] = field(default_factory=dict)
    #: difference to the reference, over the seeds that both finished
    difference: Difference | None = None
    #: standard error of a validation over its batches, the mean over the row's runs
    val_loss_se: float | None = None
    #: other metrics of the validation, by `config.metrics.Metric.figure`
    other_metrics: Mapping[str, Figure] = field(default_factory=dict)
    #: difference of the losses on the other text (`eval.also`)
    also_difference: Difference | None = None

    @property
    def alerts_fired(self) -> int:
        return sum(self.alerts.values())


def figure(values: Iterable[float | None]) -> Figure | None:
    """Return mean and sample standard deviation of the known values; None without any.

    >>> figure([1.0, None, 3.0])
    Figure(mean=2.0, spread=1.4142135623730951)
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    spread = statistics.stdev(known) if len(known) > 1 else None
    return Figure(statistics.fmean(known), spread)


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None without any."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def reference_name(results: Sequence[Result]) -> str:
    """Return the name of the reference.

    It is BF16, or the row's label, or the rule and format of several rows.
    """
    rows = [result.row for result in results if result.reference]
    if not rows:
        return "the reference"
    if rows[0].rule == REFERENCE_RULE:
        return "BF16"
    return rows[0].label if len(rows) == 1 else row_label(rows[0].rule, rows[0].format)


def measure(rows: Sequence[Row], reference: Row | None) -> list[Result]:
    """Return each row's result, in order."""
    references = references_by_label(rows, reference)
    results = [_measure_row(row, references.get(row.label)) for row in rows]
    # p-values are adjusted over the rows of the table.
    differences = adjusted([result.difference for result in results])
    also_differences = adjusted([result.also_difference for result in results])
    return [
        replace(result, difference=paired, also_difference=also_paired)
        for result, paired, also_paired in zip(results, differences, also_differences, strict=True)
    ]


def _final_val_loss(run: Run) -> float | None:
    return run.at_end("final_val_loss")


def _bytes_per_parameter(run: Run) -> float | None:
    return run.number("bytes_per_parameter")


def _stall(run: Run) -> float | None:
    return run.stall


def _tokens_per_s(run: Run) -> float | None:
    return run.number("tokens_per_s")


def _arrived(run: Run) -> float | None:
    return run.number("arrived")


def _cosine(run: Run) -> float | None:
    """Return the mean of the measured cosines, or that of a run without its records."""
    curve = run.curve(COSINE.name)
    return mean_of(curve[1]) if curve[1] else run.number("cosine")


#: measurements of a run that a column averages over the seeds of its row, by their name
#: in `Result`
FIGURES: dict[str, Callable[[Run], float | None]] = {
    "final_val_loss": _final_val_loss,
    "bytes_per_parameter": _bytes_per_parameter,
    "stall": _stall,
    "tokens_per_s": _tokens_per_s,
    "arrived": _arrived,
    "cosine": _cosine,
}


@dataclass(frozen=True)
class _Gap:
    """L - L_ref over a row's seeds, in nats; its share of L_ref; its standard error."""

    figure: Figure | None = None
    share: float | None = None
    error: float | None = None


def _measure_row(row: Row, reference: Row | None) -> Result:
    is_reference = row is reference
    facts: tuple[str, ...] = ()
    if reference is not None and not is_reference:
        facts = differing_facts(row.runs, reference.runs)
    comparable = None if facts else reference
    figures = {name: figure(map(measured, row.runs)) for name, measured in FIGURES.items()}
    gap = _Gap() if comparable is None else _measure_gap(row, comparable)
    evidence = RowComparison(
        gap_share=gap.share,
        stall=_mean_of_figure(figures["stall"]),
        cosine=_mean_of_figure(figures["cosine"]),
        reference=is_reference,
        differing_facts=facts,
        lacks_reference=reference is None,
        gap=_mean_of_figure(gap.figure),
        gap_error=gap.error,
        reference_fall=None if comparable is None else _fall_share(comparable),
    )
    has_one_other_text = reference is not None and have_one_other_text(row.runs, reference.runs)
    given_up = Verdict(Judgement.FAILED, row.reason)
    verdict = given_up if row.reason else judge_row(row.runs, evidence)
    stall_metrics = [run.stall_metric for run in row.runs if run.stall_metric]
    return Result(
        row=row,
        reference=is_reference,
        final_val_loss=figures["final_val_loss"],
        best_val_loss=_best_val_loss(row),
        gap=gap.figure,
        gap_share=gap.share,
        bytes_per_parameter=_mean_of_figure(figures["bytes_per_parameter"]),
        stall=figures["stall"],
        stall_metric=stall_metrics[0] if stall_metrics else None,
        tokens_per_s=figures["tokens_per_s"],
        verdict=verdict,
        arrived=figures["arrived"],
        cosine=figures["cosine"],
        alerts=_count_alerts(row),
        val_loss_se=_val_loss_error(row),
        other_metrics=_other_metrics(row),
        also_difference=_difference(
            row, comparable if has_one_other_text else None, VAL_ALSO_LOSS.figure
        ),
        difference=_difference(row, comparable, "final_val_loss"),
    )


def _mean_of_figure(value: Figure | None) -> float | None:
    return None if value is None else value.mean


def _measure_gap(row: Row, reference: Row) -> _Gap:
    gaps = []
    for run in row.runs:
        gap = gap_to(run, reference.runs)
        if gap is not None:
            gaps.append(gap)
    error = error_of(gaps, [_val_loss_error(row), _val_loss_error(reference)])
    base = mean_of(map(_final_val_loss, reference.runs))
    share = None
    if gaps and base is not None and base > 0:
        share = statistics.fmean(gaps) / base
    return _Gap(figure(gaps), share, error)


def _fall_share(row: Row) -> float | None:
    """Return how far a row's validation loss fell, as a share of its final one."""
    first = mean_of(run.at_end("first_val_loss") for run in row.runs)
    final = mean_of(map(_final_val_loss, row.runs))
    if first is None or final is None or final <= 0:
        return None
    return (first - final) / final


def _best_val_loss(row: Row) -> Figure | None:
    """Return the best loss of finished runs, or without any that of the others."""
    finished = figure(run.at_end("best_val_loss") for run in row.runs)
    return finished or figure(run.number("best_val_loss") for run in row.runs)


def _count_alerts(row: Row) -> dict[str, int]:
    """Return the number of alerts of each kind, the most frequent kind first."""
    counts: Counter[str] = Counter()
    for run in row.runs:
        counts += Counter(run.alert_counts)
    return dict(counts.most_common())


def _other_metrics(row: Row) -> dict[str, Figure]:
    metrics = {}
    for metric in BESIDE_LOSS:
        value = figure(run.at_end(metric.figure) for run in row.runs)
        if value is not None:
            metrics[metric.figure] = value
    return metrics


def _val_loss_error(row: Row) -> float | None:
    """Return the mean standard error of the runs' last validations."""
    return mean_of(run.at_end("final_val_loss_se") for run in row.runs)


def _difference(row: Row, reference: Row | None, name: str) -> Difference | None:
    """Return the paired difference of a loss.

    It is marked if records say that a seed's two runs were made on different processors.
    """
    if reference is None or row is reference:
        return None
    paired = difference(_losses_by_seed(row, name), _losses_by_seed(reference, name))
    if paired is None:
        return None
    machines = _machines_by_seed(row)
    reference_machines = _machines_by_seed(reference)
    apart = any(
        on_two_processors(machine, reference_machines[seed])
        for seed, machine in machines.items()
        if seed in reference_machines
    )
    return replace(paired, apart=apart)


def _machines_by_seed(row: Row) -> dict[Hashable | None, Mapping[str, object]]:
    return {seed_of(run): _machine_of(run) for run in row.runs}


def _machine_of(run: Run) -> Mapping[str, object]:
    """Return the machine of a run's last start, its GPU only where the run was on it."""
    machine = latest(run.environment)
    if at(run.config, "runtime.device") == "cpu":
        machine["gpu"] = None
    return machine


def _losses_by_seed(row: Row, name: str) -> dict[Hashable, float]:
    losses = {}
    for run in row.runs:
        seed = seed_of(run)
        loss = run.at_end(name)
        if seed is not None and loss is not None:
            losses[seed] = loss
    return losses


def gap_to(run: Run, reference: Sequence[Run]) -> float | None:
    """Return L - L_ref to the reference's run of the same seed, or else its mean.

    It is None for a run that ended early.
    """
    loss = _final_val_loss(run)
    twins = [
        reference_run
        for reference_run in reference
        if reference_run.status == RunStatus.FINISHED and seed_of(reference_run) == seed_of(run)
    ]
    base = mean_of(map(_final_val_loss, twins or reference))
    return None if loss is None or base is None else loss - base


def error_of(gaps: Sequence[float], errors: Sequence[float | None]) -> float | None:
    """Return the standard error of a row's gap.

    It is that over its seeds, or for one seed that from the two losses' errors. The two
    losses are over the same batches, so that for one seed it is an upper bound.

    >>> error_of([1.0, 3.0, 5.0, 3.0], []), error_of([0.1], [3.0, 4.0])
    (0.816496580927726, 5.0)
    >>> error_of([0.1], [0.03, None]) is None
    True
    """
    if len(gaps) > 1:
        return statistics.stdev(gaps) / math.sqrt(len(gaps))
    known = [error for error in errors if error is not None]
    return math.hypot(*known) if known and len(known) == len(errors) else None
