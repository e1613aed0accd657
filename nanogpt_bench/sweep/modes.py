"""What a sweep can be: a grid or random points, rates tuned and confirmed, the sensitivity of layers."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from nanogpt_bench.config.schema import DEFAULT_DATA_DIR
from nanogpt_bench.data import prepare_default
from nanogpt_bench.evaluation.measurement import gaps_table
from nanogpt_bench.report.tables import tuning_table
from nanogpt_bench.runs.load import has_ended
from nanogpt_bench.sweep.file import SweepFile
from nanogpt_bench.sweep.plan import PlannedRun, baseline_of, check_inputs, left_out_of_reference, plan_sweep
from nanogpt_bench.sweep.record import SweepRecord
from nanogpt_bench.sweep.sensitivity import measure_gaps, plan_study, write_gaps
from nanogpt_bench.sweep.session import Session, check_machine, close, threads_set
from nanogpt_bench.sweep.tuning import Tuning
from nanogpt_bench.workers.pool import Local, check_workers


def sweep_grid(
    sweep: SweepFile,
    out: Path,
    workers: int | None,
    executor: Local,
    *,
    mode: str | None = None,
    again: str | None = None,
) -> int:
    """Train every point of the file and report; the last line is the report's path.

    `mode` is told in sweep.json in place of the search. `again` is the command that goes on, where it is not the same.

    Returns 0, 1 when not one run finished or one was ended from outside (a full disk, a kill, a crash), 75 when a
    signal ended it (the report then covers what there is).

    Raises:
        BenchError: a file, corpus or output folder that can't be used; nothing is trained.
    """
    planned = plan_sweep(sweep)
    record = SweepRecord(out, mode or sweep.search, baseline_of(sweep.reference, planned))
    _check(sweep, record, planned, workers, executor)
    whole = Session(record, workers, executor).train(planned)
    return close(record, whole=whole, command=again)


def _check(
    sweep: SweepFile, record: SweepRecord, planned: Sequence[PlannedRun], workers: int | None, executor: Local
) -> None:
    """Refuse what can't be trained before anything is written, the default corpus apart; open the results file."""
    check_workers(workers, "workers", threads_set(planned), executor.cores())
    for run in planned:
        record.check(run)
    check_machine([run for run in planned if not has_ended(record.summary(run))], executor)
    for folder in {str(run.settings.get("data.dir", DEFAULT_DATA_DIR)) for run in planned}:
        prepare_default(folder)
    check_inputs(planned)
    if said := left_out_of_reference(sweep):
        print(said, file=sys.stderr)


def tune_and_confirm(sweep: SweepFile, out: Path, workers: int | None, executor: Local) -> int:
    """Search the best rates of every point, train it at these on other seeds, report and write tuning.json.

    Returns and raises as `sweep_grid` does.
    """
    record = SweepRecord(out, "tune")
    tuning = Tuning(sweep, record)
    record.order, record.baseline = tuning.labels, tuning.baseline
    _check(sweep, record, tuning.checked(), workers, executor)
    session = Session(record, workers, executor, tuning.to_come)
    tuning.say = session.say
    whole = session.train(tuning.first(), tuning.after)
    tuning.write()
    return close(record, whole=whole, table=tuning_table(tuning.rows()), rows=True)


def measure_sensitivity(sweep: SweepFile, out: Path, workers: int | None, executor: Local) -> int:
    """Quantise one layer pattern at a time, print the gaps and write sensitivity.json.

    Returns and raises as `sweep_grid` does.
    """
    study = plan_study(sweep)
    record = SweepRecord(out, "sensitivity", study.reference[0].label)
    _check(replace(sweep, reference=sweep.reference or {}), record, study.planned, workers, executor)

    def after(_: PlannedRun) -> Iterable[PlannedRun]:
        write_gaps(study, record)
        return ()

    whole = Session(record, workers, executor).train(study.planned, after)
    write_gaps(study, record)
    return close(record, whole=whole, table=gaps_table(measure_gaps(study, record)))


MODES = {"tune": tune_and_confirm, "sensitivity": measure_sensitivity}
