"""Tuning: the search for the best rates, then the runs that count, with other seeds.

Every combination of the axes has a `Search`: a coordinate descent on a logarithmic grid
of rates. Its places are counted in half steps from the first value:

    lr = first * factor ** (index / 2)      index  -4  -2  -1   0   1   2   4
                                                    .   .   ,   o   ,   .   .

A search goes in rounds. A round's trials train at the same time, with each seed of
`tune.seeds`; when all have ended, `next_places` decides where to go from the best
place. First come full steps (.), and half steps (,) around the best at the end. Then
the points of the search are trained at the best values with the seeds of
`confirm.seeds`.

`Tuning` has all searches of a sweep. A session calls `Tuning.runs_after` with each run that
has ended, and trains the runs it returns.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanogpt_bench.config.keys import FIELDS, get
from nanogpt_bench.config.settings import unknown_key
from nanogpt_bench.runs.load import TRIALS
from nanogpt_bench.runs.read import finite
from nanogpt_bench.sweep.axes import Point
from nanogpt_bench.sweep.file import SweepFile, Tune
from nanogpt_bench.sweep.plan import (
    STEPS_KEY,
    PlannedRun,
    baseline_of,
    check_count,
    count_points,
    plan_point,
    points_of,
    reference_points,
)
from nanogpt_bench.sweep.record import SweepRecord
from nanogpt_bench.system.errors import BenchError, counted
from nanogpt_bench.system.files import write_text

TUNING_FILE = "tuning.json"
#: a point of the search: for every key, the number of half steps from its first value
Place = tuple[int, ...]
#: half steps of a full step
FULL = 2
HALF = 1


@dataclass
class Search:
    """The search for the best values of keys, and the rows that are trained at these."""

    base: Mapping[str, Any]
    #: a run at the first values
    start: PlannedRun
    options: Tune
    #: rows of the table, each a run without a seed: they are trained at the best values
    rows: list[PlannedRun] = field(default_factory=list)
    trials: dict[Place, list[PlannedRun]] = field(default_factory=dict)
    #: mean losses, inf where a run diverged
    losses: dict[Place, float] = field(default_factory=dict)
    #: names of the current round's runs that have not ended
    pending: set[str] = field(default_factory=set)
    #: first value of each key that the rule has
    first_values: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.first_values = self._read_first_values()
        choices = self.options.choices
        for key, value in self.first_values.items():
            if key in choices and value not in choices[key]:
                raise BenchError(
                    f"tune.choices: {key} is {value:g} for {self.start.label}, which is not among "
                    f"{choices[key]}; add it"
                )
            if key not in choices and not value > 0:
                raise BenchError(
                    f"tune.keys: {key} is {value:g} for {self.start.label}, but a search begins "
                    "above 0; give tune.start"
                )

    def _read_first_values(self) -> dict[str, Any]:
        keys = dict.fromkeys((*self.options.keys, *self.options.choices))
        values = {}
        for key in keys:
            value_of_rule = get(self.start.config, key)
            # A rule that does not have the setting has None.
            if value_of_rule is not None:
                values[key] = self.options.start.get(key, value_of_rule)
        if not values:
            raise BenchError(f"tune.keys: {self.start.label} takes none of {', '.join(keys)}")
        return values

    def value(self, key: str, index: int) -> float | None:
        """Return a key's value `index` half steps from its first, to four digits.

        It is None beyond the span or the list.
        """
        first = self.first_values[key]
        if key in self.options.choices:
            return self._choice(self.options.choices[key], first, index)
        factor = self.options.factor
        # Rounding must not take the end of the span away.
        farthest = FULL * math.log(self.options.span) / math.log(factor) + 1e-9
        if abs(index) > farthest:
            return None
        return float(f"{first * factor ** (index / FULL):.4g}")

    def _choice(self, choices: Sequence[float], first: float, index: int) -> float | None:
        """Return the value of a list `index` half steps from `first`, if any."""
        steps, between = divmod(index, FULL)
        place = choices.index(first) + steps
        if between or not 0 <= place < len(choices):
            return None
        return choices[place]

    def values(self, place: Place) -> dict[str, float | None]:
        """Return the value of every key at a place, None where it has none."""
        return {
            key: self.value(key, index) for key, index in zip(self.first_values, place, strict=True)
        }

    def has(self, place: Place) -> bool:
        """Return whether every key has a value at a place."""
        return None not in self.values(place).values()

    def next_round(self) -> list[PlannedRun]:
        """Return the next trials that follow from the ended ones; [] at the end."""
        places = next_places(self.losses, len(self.first_values), self.has)
        # A place whose values are refused has its loss at once: others follow from it.
        while places:
            for place in places:
                self._try(place)
            if any(place not in self.losses for place in places):
                break
            places = next_places(self.losses, len(self.first_values), self.has)
        runs: list[PlannedRun] = []
        for place, trials in self.trials.items():
            if place not in self.losses:
                runs += trials
        self.pending = {run.name for run in runs}
        return runs

    def _try(self, place: Place) -> None:
        """Plan the runs of a place.

        Values that a setting does not take count as diverged.
        """
        values = {**self.start.axes, **self.values(place)}
        trials = []
        try:
            for seed in self.options.seeds:
                run = plan_point(self.base, {**values, "seed": seed})
                trials.append(replace(run, name=f"{TRIALS}/{run.name}", is_trial=True))
        except BenchError:
            is_start = not any(place)
            if is_start:
                raise
            self.losses[place] = math.inf
        else:
            self.trials[place] = trials

    def record_end(self, run: PlannedRun, loss_of: Callable[[PlannedRun], float | None]) -> bool:
        """Record the end of a run; return whether it was the last of its round."""
        self.pending.discard(run.name)
        if self.pending:
            return False
        for place, runs in self.trials.items():
            losses = [loss_of(trial) for trial in runs]
            known = [loss for loss in losses if loss is not None]
            self.losses[place] = statistics.fmean(known) if len(known) == len(runs) else math.inf
        return True

    @property
    def best(self) -> dict[str, Any] | None:
        """The values with the lowest mean loss so far; None without a finite one."""
        if not self.losses:
            return None
        place = best_place(self.losses)
        return None if math.isinf(self.losses[place]) else self.values(place)


class Tuning:
    """All searches of a sweep, the runs that follow from them, and tuning.json."""

    def __init__(self, sweep: SweepFile, record: SweepRecord) -> None:
        assert sweep.tune is not None
        assert sweep.confirm is not None
        _check_search(sweep, sweep.tune)
        self.sweep = sweep
        self.tune = sweep.tune
        self.confirm = sweep.confirm
        self._record = record
        self.searches: list[Search] = []
        #: called with a line when a search is over
        self.say: Callable[[str], None] = lambda _: None
        points = points_of(sweep)
        for base, reference_point in reference_points(sweep, points):
            self._add(base, reference_point)
        for point in points:
            self._add(sweep.base, point)
        rows: list[PlannedRun] = []
        for search in self.searches:
            rows += search.rows
        self.baseline = baseline_of(sweep.reference, rows)
        self.labels = [row.label for row in rows]

    def _add(self, base: Mapping[str, Any], point: Point) -> None:
        """Add a combination of the axes.

        Combinations that differ only in keys of `tune.settings` share a search.
        """
        row = self._row_at(base, point)
        if self._has_row(row):
            return
        trial_settings = dict(self.tune.settings)
        if self.tune.steps is not None:
            trial_settings[STEPS_KEY] = self.tune.steps
        rest = {key: value for key, value in point.items() if key not in trial_settings}
        start = plan_point(base, rest | trial_settings)
        self._search_from(base, start).rows.append(row)

    def _row_at(self, base: Mapping[str, Any], point: Point) -> PlannedRun:
        """Return the row of a point, as long as `confirm` says, under the point's own label."""
        settings = dict(point)
        if self.confirm.steps is not None:
            settings[STEPS_KEY] = self.confirm.steps
        return replace(plan_point(base, settings), label=plan_point(base, point).label)

    def _has_row(self, row: PlannedRun) -> bool:
        """Return whether a row is there already; refuse another one of its name.

        It is there if a rule with float weights is repeated for another format.
        """
        for search in self.searches:
            for known in search.rows:
                if known.name != row.name:
                    continue
                if known.settings == row.settings:
                    return True
                raise BenchError(
                    f"two rows would both be called {known.label!r}; name that row: reference: "
                    f"{known.label}"
                )
        return False

    def _search_from(self, base: Mapping[str, Any], start: PlannedRun) -> Search:
        """Return the search with the settings of `start`, a new one if need be."""
        for search in self.searches:
            if search.start.settings == start.settings:
                return search
        search = Search(base, start, self.tune)
        self.searches.append(search)
        return search

    def first_trials(self) -> list[PlannedRun]:
        """Return the first trials."""
        trials: list[PlannedRun] = []
        for search in self.searches:
            trials += search.next_round()
        return trials

    def confirmations(self, search: Search, values: Mapping[str, Any]) -> Iterator[PlannedRun]:
        """Yield the runs that count, for every row of a search, at these values."""
        for row in search.rows:
            for seed in self.confirm.seeds:
                run = plan_point(search.base, {**row.axes, **values, "seed": seed})
                yield replace(run, label=row.label)

    def runs_to_check(self) -> list[PlannedRun]:
        """Return runs to be checked before any training.

        They are the first trials, and confirmations at the first values.
        """
        runs = self.first_trials()
        for search in self.searches:
            runs += self.confirmations(search, search.first_values)
        return runs

    def runs_after(self, run: PlannedRun) -> Iterable[PlannedRun]:
        """Return the runs that follow from one that has ended.

        They are the next trials of its search or, at the end of that, the confirmation.
        """
        search = next((search for search in self.searches if run.name in search.pending), None)
        if search is None or not search.record_end(run, self._record.final_loss):
            return ()
        following = search.next_round()
        if not following:
            best = search.best
            if best is not None:
                following = list(self.confirmations(search, best))
            self.say(_result_line(search))
        self.write()
        return following

    def to_come(self) -> list[float]:
        """Return sizes of runs still to be planned, to estimate the time left.

        Of trials they are those at half steps.
        """
        sizes: list[float] = []
        for search in self.searches:
            if search.pending:
                half_steps = 2 * len(search.first_values) * len(self.tune.seeds)
                sizes += [search.start.cost] * half_steps
                for row in search.rows:
                    sizes += [row.cost] * len(self.confirm.seeds)
        return sizes

    def write(self) -> Path:
        """Write tuning.json as of now."""
        content = {
            "factor": self.tune.factor,
            "span": self.tune.span,
            "seeds": self.tune.seeds,
            "steps": self.tune.steps,
            "confirm": {"seeds": self.confirm.seeds, "steps": self.confirm.steps},
            "rows": self.entries(),
        }
        return write_text(self._record.folder / TUNING_FILE, json.dumps(content, indent=1) + "\n")

    def entries(self) -> list[dict[str, Any]]:
        """Return an entry per search: best values, all trials with losses, the cost."""
        return [self._entry(search) for search in self.searches]

    def _entry(self, search: Search) -> dict[str, Any]:
        is_best_inside = {}
        for index, key in enumerate(search.first_values):
            # A list of choices is tried whole.
            is_listed = key in self.tune.choices
            is_best_inside[key] = is_listed or is_inside(search.losses, index)
        trials = sorted(search.trials.items())
        return {
            "label": search.start.label,
            "rows": [row.label for row in search.rows],
            "rule": search.start.rule,
            "format": search.start.format,
            "axes": dict(search.start.axes),
            "over": bool(search.losses) and not search.pending,
            "start": search.first_values,
            "best": search.best,
            "inside": is_best_inside,
            "trials": [self._trial(search, place, runs) for place, runs in trials],
            "cost": self._cost(search),
        }

    def _trial(self, search: Search, place: Place, runs: Sequence[PlannedRun]) -> dict[str, Any]:
        losses = {}
        statuses = {}
        for run in runs:
            losses[str(run.seed)] = self._record.final_loss(run)
            statuses[str(run.seed)] = self._record.summary(run).get("status")
        return {
            "values": search.values(place),
            "loss": finite(search.losses.get(place)),
            "losses": losses,
            "status": statuses,
            "runs": [run.name for run in runs],
        }

    def _cost(self, search: Search) -> dict[str, Any]:
        summaries: list[dict[str, Any]] = []
        for runs in search.trials.values():
            summaries += [self._record.summary(run) for run in runs]
        return {
            "runs": sum(bool(summary) for summary in summaries),
            "steps": sum(int(finite(summary.get("steps")) or 0) for summary in summaries),
            "seconds": sum(finite(summary.get("seconds")) or 0.0 for summary in summaries),
        }


def _result_line(search: Search) -> str:
    """Return the line about a search that is over."""
    trials = sum(len(runs) for runs in search.trials.values())
    if search.best is None:
        return f"{search.start.label}: none of {trials} trials ended with a loss"
    values = ", ".join(f"{key} {value:g}" for key, value in search.best.items())
    return f"{search.start.label}: best at {values} ({counted(trials, 'run')})"


def _check_search(sweep: SweepFile, tune: Tune) -> None:
    """Refuse a file whose search can't be done, before any run is planned."""
    if sweep.search != "grid":
        raise BenchError(
            f"tune in {sweep.path.name} searches at every point of a grid; leave search: random out"
        )
    _check_searched_keys(tune)
    _check_given_once(sweep, tune)
    places = 5 * len(tune.keys) + sum(len(values) for values in tune.choices.values())
    confirmations = len(sweep.confirm.seeds) if sweep.confirm else 0
    runs_of_point = places * len(tune.seeds) + confirmations
    check_count(runs_of_point * count_points(sweep), f"{sweep.path.name} (tune)")


def _check_searched_keys(tune: Tune) -> None:
    """Refuse keys that can't be searched."""
    for key in (*tune.keys, *tune.start):
        if key not in FIELDS:
            raise unknown_key(key)
        if FIELDS[key].kind is not float:
            raise BenchError(
                f"tune.keys: {key!r} is not a number that can be multiplied; give a key such as "
                "optimizer.lr"
            )
    for key in tune.choices:
        if key not in FIELDS or FIELDS[key].kind not in (int, float):
            raise BenchError(
                f"tune.choices: {key!r} is not a number; give a key such as optimizer.weight_decay"
            )
        if key in tune.keys:
            raise BenchError(f"tune.choices: {key} is one of tune.keys too; leave one of them out")
    for key in tune.start:
        if key not in tune.keys:
            raise BenchError(f"tune.start: {key} is not one of tune.keys: {', '.join(tune.keys)}")


def _check_given_once(sweep: SweepFile, tune: Tune) -> None:
    """Refuse settings, axes and a reference's seed that tune or confirm also give."""
    # which key of the file gives a setting
    sources = {"seed": "tune.seeds and confirm.seeds"}
    sources |= dict.fromkeys(tune.keys, "tune.keys")
    sources |= dict.fromkeys(tune.choices, "tune.choices")
    trial_sources = dict(sources)
    if tune.steps:
        trial_sources[STEPS_KEY] = "tune.steps"
    for key in tune.settings:
        if key in trial_sources:
            source = trial_sources[key]
            raise BenchError(f"tune.settings: {source} sets {key} already; leave one of them out")
    if sweep.confirm and sweep.confirm.steps:
        sources[STEPS_KEY] = "confirm.steps"
    for axis in sweep.axes:
        if axis.key in sources:
            raise BenchError(
                f"axes.{axis.key} in {sweep.path.name}: {sources[axis.key]} sets it already; leave "
                "one of them out"
            )
    if isinstance(sweep.reference, Mapping) and "seed" in sweep.reference:
        raise BenchError(f"reference: {sources['seed']} set its seed; leave the seed out there")


def next_places(
    losses: Mapping[Place, float], keys: int, has: Callable[[Place], bool]
) -> list[Place]:
    """Return the places to try next, all at once; empty when the search is over.

    It is a coordinate descent. First come the start and its neighbours a full step to
    either side on the first key. Then come, key by key, the untried neighbours of the
    best place, until none is left, and last its neighbours at half a step.

    Args:
        losses: losses at the places tried so far, inf where a run diverged.
        keys: number of keys that are searched.
        has: whether a place exists.

    >>> next_places({}, keys=1, has=lambda _: True)
    [(0,), (-2,), (2,)]
    >>> next_places({(0,): 1.0, (-2,): 2.0, (2,): 0.5}, keys=1, has=lambda _: True)
    [(4,)]
    >>> next_places({(0,): 1.0, (-2,): 2.0, (2,): 0.5, (4,): 0.7}, keys=1, has=lambda _: True)
    [(1,), (3,)]
    """
    at_full_steps = {}
    for place, loss in losses.items():
        if all(index % FULL == 0 for index in place):
            at_full_steps[place] = loss
    centre = best_place(at_full_steps) if at_full_steps else (0,) * keys
    for step in (FULL, HALF):
        for key in range(keys):
            candidates = (centre, *neighbours(centre, key, step))
            untried = [place for place in candidates if place not in losses and has(place)]
            if untried:
                return untried
    return []


def neighbours(place: Place, key: int, step: int) -> Iterator[Place]:
    """Yield the places `step` half steps below and above on one key."""
    for distance in (-step, step):
        yield (*place[:key], place[key] + distance, *place[key + 1 :])


def best_place(losses: Mapping[Place, float]) -> Place:
    """Return the place with the lowest loss.

    Of several it is the one with the lowest values, where training is more stable.

    >>> best_place({(0,): 1.0, (2,): 1.0, (4,): math.inf})
    (0,)
    """
    return min(losses, key=lambda place: (losses[place], place))


def is_inside(losses: Mapping[Place, float], key: int) -> bool:
    """Return whether values of a key below and above the best place's were tried."""
    if not losses:
        return False
    best = best_place(losses)
    tried = [place[key] for place in losses]
    return math.isfinite(losses[best]) and min(tried) < best[key] < max(tried)
