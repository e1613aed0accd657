"""Files that a run adds lines to: its records in metrics.jsonl, and its alerts, which the judge finds as it goes."""

import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import yaml
from torch import nn

from nanogpt_bench.config import metrics
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import to_yaml
from nanogpt_bench.failures.judge import SOURCES, Evidence, Finding, judge
from nanogpt_bench.failures.table import CLASSES
from nanogpt_bench.monitors.points import Observer, Step
from nanogpt_bench.monitors.stall import UPDATE_LOST
from nanogpt_bench.runs.load import Alert, Run
from nanogpt_bench.runs.read import Records, records
from nanogpt_bench.setup.memory import plain_tensors
from nanogpt_bench.system.errors import BenchError, counted
from nanogpt_bench.system.files import NO_LINKS


class LineFile:
    """A file that grows by whole lines, made with its first one; a run that is taken up cuts it back first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def append(self, lines: Iterable[str]) -> None:
        """Add lines; whoever reads the file sees them.

        Raises:
            OSError: the disk does not take them; it names the file.
        """
        if self._file is None:
            self._file = os.fdopen(self._open(os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", encoding="utf-8")
        try:
            self._file.writelines(line + "\n" for line in lines)
            self._file.flush()
        except OSError as error:  # which does not say what it was that could not be written
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def _open(self, flags: int) -> int:
        """A file to be changed: one that leads elsewhere, in a folder that someone else has made, is left alone."""
        try:
            return os.open(self._path, flags | NO_LINKS, 0o666)
        except OSError:
            if self._path.is_symlink():
                raise BenchError(f"{str(self._path)!r} is a symbolic link; lines are added to a file only") from None
            raise

    def length(self) -> int:
        """Return the bytes written so far, once they are on the disk: a checkpoint must not know of later ones."""
        if not self._path.exists():
            return 0
        with self._path.open("rb") as file:
            os.fsync(file.fileno())
        return self._path.stat().st_size

    def cut(self, length: int) -> None:
        """Drop what came after the first `length` bytes.

        Raises:
            BenchError: the file is shorter.
        """
        self.close()
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < length:
            raise BenchError(
                f"{str(self._path)!r} has {size} bytes, {length} when the checkpoint was taken: lines are lost"
            )
        if size > length:
            with os.fdopen(self._open(os.O_WRONLY), "wb") as file:
                file.truncate(length)
        if size and not length:
            self._path.unlink()

    def close(self) -> None:
        """Close the file, if it was ever opened."""
        if self._file is not None:
            self._file.close()
            self._file = None


class JsonlObserver(Observer):
    """Appends every step's record to a file and flushes it; a value that is not finite is written as null."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFile(path)

    def close(self) -> None:
        self._lines.close()

    def state(self) -> dict[str, Any]:
        return {"bytes": self._lines.length()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._lines.cut(state["bytes"])

    def written(self, step: Step) -> None:
        record = {key: _finite(value) for key, value in step.record.items()}
        self._lines.append([json.dumps({"step": step.number, **record}, allow_nan=False)])


def _finite(value: float | int | None) -> float | int | None:
    return value if value is None or math.isfinite(value) else None


#: what is judged of a record: figures by their names, and those of layers by what their names begin with
_JUDGED = frozenset((*SOURCES, *(row.figure for row in CLASSES)))
_OF_LAYERS = tuple(f"{row.figure}/" for row in CLASSES if row.layers or row.figure == UPDATE_LOST.name)
#: a long run is judged again once it has grown by this share, so that judging takes the same share of its time
_GROWTH = 0.05


class AlertObserver(Observer):
    """Has a run's records judged at every look of its monitors; each kind of alert is told once."""

    def __init__(self, config: Config, run_dir: Path, tell: Callable[[Alert], None] = lambda alert: None) -> None:
        self._interval, self._tell, self._run_dir = config.monitor.interval, tell, run_dir
        self._lines, self._records = LineFile(run_dir / "alerts.jsonl"), Records()
        self._evidence = Evidence(Run(run_dir, yaml.safe_load(to_yaml(config)), metrics=self._records))
        self._standstill, self._judged = Standstill(), 0
        #: how many were raised, by kind
        self.counts: Counter[str] = Counter()

    def written(self, step: Step) -> None:
        self._records.add({"step": step.number, **_judged_of(step.record)})
        for kind, text in self._standstill.see(step):
            self._raise(Alert(step.number, kind, message=text))
        if self._is_due(step):
            self._judged = step.number
            for finding in judge(self._evidence, running=not step.last):
                if finding.found:
                    self._raise(_alert(finding, step))

    def _is_due(self, step: Step) -> bool:
        """Whether there is something new to judge: a first step that is not finite, or a look at the monitors."""
        if step.last or (step.anomaly is not None and "nan" not in self.counts):
            return True
        looked = step.number % self._interval == 0 or metrics.VAL_LOSS.name in step.record
        return looked and step.number >= self._judged * (1 + _GROWTH)

    def state(self) -> dict[str, Any]:
        return {"bytes": self._lines.length(), "counts": dict(self.counts), "standstill": self._standstill.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._lines.cut(state["bytes"])
        self.counts = Counter(state["counts"])
        self._standstill.load_state(state["standstill"])
        for _, record in records(self._run_dir / "metrics.jsonl", []):
            self._records.add(_judged_of(record))
            self._judged = int(record["step"])

    def _raise(self, alert: Alert) -> None:
        if alert.kind in self.counts:
            return
        self.counts[alert.kind] += 1
        self._lines.append([json.dumps(asdict(alert), allow_nan=False)])
        self._lines.close()  # alerts are rare
        self._tell(alert)


def _judged_of(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name in _JUDGED or name.startswith(_OF_LAYERS)}


def _alert(finding: Finding, step: Step) -> Alert:
    """What is told of a class that has just been found; of a step that is not finite where that was first seen."""
    where = f"; first seen in {step.anomaly.where}" if finding.kind == "nan" and step.anomaly else ""
    first = min((c for c in finding.criteria if c.step is not None), key=lambda c: c.step or 0)
    value = first.value if first.value is not None and math.isfinite(first.value) else None
    return Alert(step.number, finding.kind, message=finding.message + where, value=value, threshold=first.bound)


_FLAGS = tuple(flag.name for flag in metrics.FLAGS)


@dataclass
class _Look:
    """What was there at a validation: the step's number, the optimizer's count of steps, and a hash of the weights."""

    number: int
    #: summed over parameters; None where the optimizer counts none
    steps: float | None
    weights: int


class Standstill:
    """Compares every validation with the one before; a state of it lets a run that goes on compare with that before.

    >>> from nanogpt_bench.monitors.points import Step
    >>> layer = nn.Linear(2, 1)
    >>> adamw = torch.optim.AdamW(layer.parameters())
    >>> seen = Standstill()
    >>> found = [list(seen.see(Step(n, layer, adamw, record={"val/loss": 1.0}))) for n in (0, 4)]
    >>> found[1]
    [('no_change', 'no weight changed from step 0 to step 4, in 1 step')]
    """

    def __init__(self) -> None:
        self._last: _Look | None = None
        #: steps since then whose loss and gradient were finite
        self._due = 0

    def see(self, step: Step) -> Iterator[tuple[str, str]]:
        """Take in a step whose record is complete; yield kind and message of what stood still."""
        if step.number > 0 and not any(step.record.get(flag) for flag in _FLAGS):
            self._due += 1
        if metrics.VAL_LOSS.name not in step.record:
            return
        last, now = self._last, _Look(step.number, _steps(step.optimizer), _hash(step.model))
        if last is not None and self._due:
            between = f"from step {last.number} to step {now.number}, in {counted(self._due, 'step')}"
            if now.steps is not None and now.steps == last.steps:
                yield "no_step", f"the optimizer took no step {between}"
            if now.weights == last.weights:
                yield "no_change", f"no weight changed {between}"
        self._last, self._due = now, 0

    def state(self) -> dict[str, Any]:
        return {"last": None if self._last is None else asdict(self._last), "due": self._due}

    def load_state(self, state: Mapping[str, Any]) -> None:
        last = state["last"]
        self._last, self._due = None if last is None else _Look(**last), state["due"]


def _steps(optimizer: torch.optim.Optimizer) -> float | None:
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping) and "step" in state]
    return sum(float(state["step"]) for state in states) if states else None


@torch.no_grad()
def _hash(model: nn.Module) -> int:
    """A hash of the bits of all trained weights that this process holds."""
    found = 0
    for parameter in model.parameters():
        for part in plain_tensors(parameter) if parameter.requires_grad else ():
            flat = torch.empty(part.numel(), dtype=part.dtype).copy_(part.detach().reshape(-1))  # of any strides
            found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
    return found
