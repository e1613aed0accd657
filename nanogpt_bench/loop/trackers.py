"""Trackers: their protocol, a guard that drops one that fails, TensorBoard's event
files, Weights & Biases.
"""

import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nanogpt_bench.checkpoint import newest
from nanogpt_bench.config.schema import Config
from nanogpt_bench.model.weights import plain
from nanogpt_bench.monitors.points import Observer, Step
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.files import write_text

_LOG = logging.getLogger("nanogpt_bench")
TRACKING_FILE = "tracking.json"
FOLDER = "tensorboard"
#: seconds to wait for the server before the training goes on without it
SECONDS_TO_CONNECT = 30
#: steps between two histograms of weights and gradients, the last step has one too; and
#: their bins
HISTOGRAM_INTERVAL, BINS = 500, 64
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]")


def finite(values: Tensor) -> NDArray[np.float32]:
    """Return a tensor's finite values, flat."""
    found = plain(values).flatten().float()
    return found[found.isfinite()].cpu().numpy()


class Tracker(Protocol):
    """A place to which records are sent. If one of its methods raises, the tracker is
    dropped.
    """

    @property
    def facts(self) -> dict[str, Any]:
        """Name of the tracker, and where it has the run; for the run folder."""

    def log(self, step: int, record: Mapping[str, float]) -> None:
        """Take a step's record, in one call; steps increase."""

    def histograms(self, step: int, values: Mapping[str, NDArray[np.float32]]) -> None:
        """Take a step's values for histograms; called before `log`."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Take the summary, None where the run broke off, and send everything that
        waits.
        """


class Trackers(Observer):
    """All trackers of a run; one that raises is reported once and dropped."""

    def __init__(
        self, trackers: Sequence[Tracker], dropped: Mapping[str, str] | None = None
    ) -> None:
        self._live = {tracker.facts["name"]: tracker for tracker in trackers}
        self._facts = {name: tracker.facts for name, tracker in self._live.items()}
        #: errors, by the name of the dropped tracker
        self.dropped: dict[str, str] = dict(dropped or {})

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of every tracker, dropped ones included, for summary.json."""
        names = [*self._facts, *(name for name in self.dropped if name not in self._facts)]
        return {
            name: {**self._facts.get(name, {}), "dropped": self.dropped.get(name)} for name in names
        }

    def before_step(self, step: Step) -> None:
        gradients = (
            (name, p.grad) for name, p in step.model.named_parameters() if p.grad is not None
        )
        self._note("gradients", step, gradients)

    def after_step(self, step: Step) -> None:
        self._note("weights", step, step.model.named_parameters())

    def _note(self, kind: str, step: Step, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self._live and step.due(HISTOGRAM_INTERVAL):
            found = {f"{kind}/{name}": finite(tensor) for name, tensor in tensors}
            found = {name: values for name, values in found.items() if values.size}
            self._each(lambda tracker: tracker.histograms(step.number, found))

    def written(self, step: Step) -> None:
        record = {
            key: value
            for key, value in step.record.items()
            if value is not None and math.isfinite(value)
        }
        self._each(lambda tracker: tracker.log(step.number, record))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Close every tracker."""
        self._each(lambda tracker: tracker.finish(summary))
        self._live = {}

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._live.items()):
            try:
                act(tracker)
            except Exception as error:  # no error of a tracker ends the training
                del self._live[name]
                self.dropped[name] = report_failure(name, error)


def report_failure(name: str, error: Exception) -> str:
    """Warn that a tracker is dropped, and return why."""
    why = f"{type(error).__name__}: {one_line(error)}"
    _LOG.warning("tracker %s is dropped, the training goes on: %s", name, why)
    return why


def check_trackers(config: Config) -> None:
    """Refuse a tracker whose package is missing, and a run to resume or an upload
    without one.
    """
    tracking = config.tracking
    for name, given in (
        ("wandb_id", tracking.wandb_id),
        ("wandb_artifacts", tracking.wandb_artifacts or None),
    ):
        if given is not None and tracking.wandb == "off":
            raise BenchError(
                f"tracking.{name}: {given!r} needs tracking.wandb, which is off; leave it out"
            )
    for name in _wanted(config):
        if find_spec(name) is None:
            raise BenchError(
                f"tracking.{name} needs {name}; get it with pip install 'fp8manifold[{name}]'"
            )


def start_trackers(
    config: Config, run_dir: Path, earlier: Mapping[str, Any] | None = None, after: int = -1
) -> Trackers:
    """Start the trackers of a configuration and write to tracking.json where each has
    the run.

    One that does not start is reported and left out. A run resumed after step `after`
    goes on in its earlier trackers, whose facts are `earlier`.
    """
    known = earlier or {}
    started, dropped = list[Tracker](), {}
    for name in _wanted(config):
        try:
            if name == "wandb":
                started.append(WandbTracker(config, run_dir, known.get(name, {}), after))
            else:
                started.append(TensorBoardTracker(run_dir, after))
        except Exception as error:  # no error of a tracker ends the training
            dropped[name] = report_failure(name, error)
    trackers = Trackers(started, dropped)
    if trackers.facts:
        write_text(run_dir / TRACKING_FILE, json.dumps(trackers.facts, indent=1) + "\n")
    return trackers


def _wanted(config: Config) -> list[str]:
    tracking = config.tracking
    return [
        *(["wandb"] if tracking.wandb != "off" else []),
        *(["tensorboard"] if tracking.tensorboard else []),
    ]


class TensorBoardTracker:
    """Scalars of every step, and histograms of weights and gradients; those of steps
    beyond `after` are deleted.
    """

    def __init__(self, run_dir: Path, after: int = -1) -> None:
        from torch.utils.tensorboard import SummaryWriter  # from an extra, as wandb is

        self._writer: Any = SummaryWriter(
            str(run_dir / FOLDER), purge_step=after + 1 if after >= 0 else None
        )

    @property
    def facts(self) -> dict[str, Any]:
        return {"name": "tensorboard", "folder": FOLDER}

    def log(self, step: int, record: Mapping[str, float]) -> None:
        for key, value in record.items():
            self._writer.add_scalar(key, value, step)

    def histograms(self, step: int, values: Mapping[str, NDArray[np.float32]]) -> None:
        for name, each in values.items():
            self._writer.add_histogram(name, each, step, bins=BINS)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self._writer.close()


class WandbTracker:
    """One W&B run: a `log` call per step, histograms of weights and gradients; at the
    end the summary.

    With `tracking.wandb_artifacts` the last checkpoint is a version of an artifact of
    type model. A resumed run, with `earlier` facts, goes on in the same W&B run and
    withdraws its steps beyond `after`; offline, a later `wandb sync` does. Nothing is
    withdrawn from the run of `tracking.wandb_id`, whose steps may be another run's, nor
    where the server can't: then W&B ignores steps that it has already.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        earlier: Mapping[str, Any] | None = None,
        after: int = -1,
    ) -> None:
        tracking, known = config.tracking, earlier or {}
        self._wandb: Any = import_module("wandb")
        mode = tracking.wandb
        if mode == "auto":  # without an API key the run is written to the disk
            mode = "online" if self._wandb.login(prompt=False, verify=False) else "offline"
        run_id = tracking.wandb_id or known.get("id")
        exists = tracking.wandb_id is not None or known.get("mode") == "online"
        resume = {"resume": "must" if exists else "allow"} if run_id and mode == "online" else {}

        def begin(**how: str) -> Any:  # new arguments for each call, since wandb changes them
            return self._wandb.init(
                dir=str(run_dir),
                project=os.environ.get("WANDB_PROJECT", "nanogpt-bench"),
                name=run_dir.name,
                id=run_id,
                tags=[
                    tag
                    for tag in (*os.environ.get("WANDB_TAGS", "").split(","), config.rule)
                    if tag
                ],
                config=config.model_dump(),
                mode=mode,
                allow_val_change=bool(known),  # a resumed run may have been given another setting
                settings=self._wandb.Settings(
                    silent=True, console="off", init_timeout=SECONDS_TO_CONNECT
                ),
                **how,
            )

        self._run: Any = None
        if after >= 0 and run_id and tracking.wandb_id is None:
            try:
                self._run = begin(resume_from=f"{run_id}?_step={after}")
            except (
                self._wandb.errors.Error
            ) as error:  # the server can't withdraw, or has not got the run yet
                _LOG.warning(
                    "W&B keeps the steps beyond %d that it has of this run: %s",
                    after,
                    one_line(error),
                )
                self._wandb.teardown()  # otherwise its process keeps the id
        self._run = self._run or begin(**resume)
        self._mode, self._run_dir, self._artifacts = mode, run_dir, tracking.wandb_artifacts

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "name": "wandb",
            "id": self._run.id,
            "mode": self._mode,
            "project": self._run.project,
        }

    def log(self, step: int, record: Mapping[str, float]) -> None:
        self._run.log(dict(record), step=step)

    def histograms(self, step: int, values: Mapping[str, NDArray[np.float32]]) -> None:
        found = {name: self._wandb.Histogram(each, num_bins=BINS) for name, each in values.items()}
        self._run.log(found, step=step)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        for key, value in (summary or {}).items():
            if value is None or isinstance(value, str | int | float):
                self._run.summary[key] = value
        if self._artifacts and (checkpoint := newest(self._run_dir)[0]) is not None:
            artifact = self._wandb.Artifact(
                f"{_NOT_IN_A_NAME.sub('-', self._run_dir.name)}-checkpoint", type="model"
            )
            artifact.add_file(str(checkpoint), policy="immutable")
            self._run.log_artifact(artifact, aliases=["latest", checkpoint.stem])
        failed = summary is None or summary["status"] == "failed"
        self._run.finish(exit_code=1 if failed else 0)
