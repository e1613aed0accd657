"""Trackers: TensorBoard's event files and Weights & Biases.

The observer `Trackers` sends every record to each tracker of a run, and drops a tracker
that raises: no error of a tracker ends the training.
"""

import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nanogpt_bench.checkpoint import newest
from nanogpt_bench.config.endings import RunStatus
from nanogpt_bench.config.schema import Config, WandbMode
from nanogpt_bench.model.weights import dequantized
from nanogpt_bench.monitors.points import Observer, Step
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.files import write_text

_LOG = logging.getLogger("nanogpt_bench")
TRACKING_FILE = "tracking.json"
TENSORBOARD_FOLDER = "tensorboard"
#: seconds to wait for the server before the training goes on without it
SECONDS_TO_CONNECT = 30
#: steps between two histograms of weights and gradients; the last step has one too
HISTOGRAM_INTERVAL = 500
#: bins of a histogram
BINS = 64
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]")


def finite_values(values: Tensor) -> NDArray[np.float32]:
    """Return a tensor's finite values, flat."""
    flat = dequantized(values).flatten().float()
    return flat[flat.isfinite()].cpu().numpy()


class Tracker(Protocol):
    """A place to which records are sent.

    If one of its methods raises, the tracker is dropped.
    """

    @property
    def facts(self) -> dict[str, Any]:
        """Name of the tracker, and where it has the run; for the run folder."""

    def log(self, step: int, record: Mapping[str, float]) -> None:
        """Take a step's record, in one call; steps increase."""

    def histograms(self, step: int, values: Mapping[str, NDArray[np.float32]]) -> None:
        """Take a step's values for histograms; called before `log`."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Take the summary, and send everything that waits.

        The summary is None where the run broke off.
        """


class Trackers(Observer):
    """All trackers of a run; one that raises is reported once and dropped."""

    def __init__(
        self, trackers: Sequence[Tracker], dropped: Mapping[str, str] | None = None
    ) -> None:
        self._active = {tracker.facts["name"]: tracker for tracker in trackers}
        self._facts = {name: tracker.facts for name, tracker in self._active.items()}
        #: errors, by the name of the dropped tracker
        self.dropped: dict[str, str] = dict(dropped or {})

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of every tracker, dropped ones included, for summary.json."""
        facts: dict[str, Any] = {}
        for name in [*self._facts, *self.dropped]:
            facts[name] = {**self._facts.get(name, {}), "dropped": self.dropped.get(name)}
        return facts

    def before_step(self, step: Step) -> None:
        gradients = {}
        for name, parameter in step.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad
        self._send_histograms("gradients", step, gradients)

    def after_step(self, step: Step) -> None:
        self._send_histograms("weights", step, dict(step.model.named_parameters()))

    def _send_histograms(self, kind: str, step: Step, tensors: Mapping[str, Tensor]) -> None:
        if not self._active or not step.due(HISTOGRAM_INTERVAL):
            return
        values_by_name = {}
        for name, tensor in tensors.items():
            values = finite_values(tensor)
            if values.size:
                values_by_name[f"{kind}/{name}"] = values
        self._call(lambda tracker: tracker.histograms(step.number, values_by_name))

    def take_record(self, step: Step) -> None:
        record = {}
        for name, value in step.record.items():
            if value is not None and math.isfinite(value):
                record[name] = value
        self._call(lambda tracker: tracker.log(step.number, record))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Close every tracker."""
        self._call(lambda tracker: tracker.finish(summary))
        self._active = {}

    def _call(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._active.items()):
            try:
                action(tracker)
            except Exception as error:
                # no error of a tracker ends the training
                del self._active[name]
                self.dropped[name] = report_failure(name, error)


def report_failure(name: str, error: Exception) -> str:
    """Warn that a tracker is dropped, and return the reason."""
    reason = f"{type(error).__name__}: {one_line(error)}"
    _LOG.warning("tracker %s is dropped, and the training goes on: %s", name, reason)
    return reason


def check_trackers(config: Config) -> None:
    """Refuse a tracker whose package is missing, and W&B's settings without W&B."""
    tracking = config.tracking
    if tracking.wandb == WandbMode.OFF:
        _refuse_without_wandb("wandb_id", tracking.wandb_id)
        _refuse_without_wandb("wandb_artifacts", tracking.wandb_artifacts or None)
    for name in _tracker_names(config):
        if find_spec(name) is None:
            raise BenchError(
                f"tracking.{name} needs {name}; get it with pip install 'fp8manifold[{name}]'"
            )


def _refuse_without_wandb(name: str, value: object) -> None:
    if value is not None:
        raise BenchError(
            f"tracking.{name}: {value!r} has no effect while tracking.wandb is off; leave it out"
        )


def start_trackers(
    config: Config,
    run_dir: Path,
    earlier: Mapping[str, Any] | None = None,
    resumed_step: int | None = None,
) -> Trackers:
    """Start the trackers of a configuration, and write where each has the run.

    The places are in tracking.json. A tracker that does not start is reported and left
    out. A run resumed after `resumed_step` goes on in its earlier trackers, whose facts
    are `earlier`.
    """
    earlier_facts = earlier or {}
    trackers: list[Tracker] = []
    dropped = {}
    for name in _tracker_names(config):
        try:
            if name == "wandb":
                facts = earlier_facts.get(name, {})
                trackers.append(WandbTracker(config, run_dir, facts, resumed_step))
            else:
                trackers.append(TensorBoardTracker(run_dir, resumed_step))
        except Exception as error:
            # no error of a tracker ends the training
            dropped[name] = report_failure(name, error)
    observer = Trackers(trackers, dropped)
    if observer.facts:
        write_text(run_dir / TRACKING_FILE, json.dumps(observer.facts, indent=1) + "\n")
    return observer


def _tracker_names(config: Config) -> list[str]:
    names = []
    if config.tracking.wandb != WandbMode.OFF:
        names.append("wandb")
    if config.tracking.tensorboard:
        names.append("tensorboard")
    return names


class TensorBoardTracker:
    """Scalars of every step, and histograms of weights and gradients.

    Those of steps beyond `resumed_step` are deleted.
    """

    def __init__(self, run_dir: Path, resumed_step: int | None = None) -> None:
        # from an extra, as wandb is
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resumed_step is None else resumed_step + 1
        self._writer: Any = SummaryWriter(str(run_dir / TENSORBOARD_FOLDER), purge_step=purge_step)

    @property
    def facts(self) -> dict[str, Any]:
        return {"name": "tensorboard", "folder": TENSORBOARD_FOLDER}

    def log(self, step: int, record: Mapping[str, float]) -> None:
        for key, value in record.items():
            self._writer.add_scalar(key, value, step)

    def histograms(self, step: int, values: Mapping[str, NDArray[np.float32]]) -> None:
        for name, array in values.items():
            self._writer.add_histogram(name, array, step, bins=BINS)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self._writer.close()


class WandbTracker:
    """One W&B run: a `log` call per step, histograms, at the end the summary.

    With `tracking.wandb_artifacts` the last checkpoint is a version of an artifact of
    type model. A resumed run, with `earlier` facts, goes on in its W&B run and
    withdraws the steps beyond `resumed_step`; offline, a later `wandb sync` does.
    Nothing is withdrawn from the run of `tracking.wandb_id`, whose steps may be another
    run's, nor where the server can't: then W&B ignores steps that it has already.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        earlier: Mapping[str, Any] | None = None,
        resumed_step: int | None = None,
    ) -> None:
        tracking = config.tracking
        earlier_facts = earlier or {}
        self._wandb: Any = import_module("wandb")
        self._run_dir = run_dir
        self._artifacts = tracking.wandb_artifacts
        self._mode = WandbMode(tracking.wandb)
        if self._mode is WandbMode.AUTO:
            # Without an API key the run is written to the disk.
            has_key = self._wandb.login(prompt=False, verify=False)
            self._mode = WandbMode.ONLINE if has_key else WandbMode.OFFLINE
        run_id = tracking.wandb_id or earlier_facts.get("id")

        def start_run(**options: str) -> Any:
            return self._start_run(
                config, run_id, allow_val_change=bool(earlier_facts), options=options
            )

        # A resumed run of its own is rewound. Otherwise, or where that fails, online
        # the run of the id goes on; without an id a run begins.
        self._run: Any = None
        if resumed_step is not None and run_id and tracking.wandb_id is None:
            try:
                self._run = start_run(resume_from=f"{run_id}?_step={resumed_step}")
            except self._wandb.errors.Error as error:
                # The server can't withdraw steps, or has not got the run yet.
                _LOG.warning(
                    "W&B keeps the steps after %d that it already has of this run: %s",
                    resumed_step,
                    one_line(error),
                )
                # Otherwise wandb's process keeps the id.
                self._wandb.teardown()
        if self._run:
            return
        if run_id and self._mode is WandbMode.ONLINE:
            exists = tracking.wandb_id is not None or earlier_facts.get("mode") == WandbMode.ONLINE
            self._run = start_run(resume="must" if exists else "allow")
        else:
            self._run = start_run()

    def _start_run(
        self,
        config: Config,
        run_id: str | None,
        *,
        allow_val_change: bool,
        options: Mapping[str, str],
    ) -> Any:
        """Start a W&B run.

        `allow_val_change` is for a resumed run, whose settings may be new. The
        arguments are made anew for each call, since wandb changes them.
        """
        tags = [tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag]
        if config.rule:
            tags.append(config.rule)
        settings = self._wandb.Settings(silent=True, console="off", init_timeout=SECONDS_TO_CONNECT)
        return self._wandb.init(
            dir=str(self._run_dir),
            project=os.environ.get("WANDB_PROJECT", "nanogpt-bench"),
            name=self._run_dir.name,
            id=run_id,
            tags=tags,
            config=config.model_dump(),
            mode=self._mode.value,
            allow_val_change=allow_val_change,
            settings=settings,
            **options,
        )

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "name": "wandb",
            "id": self._run.id,
            "mode": self._mode.value,
            "project": self._run.project,
        }

    def log(self, step: int, record: Mapping[str, float]) -> None:
        self._run.log(dict(record), step=step)

    def histograms(self, step: int, values: Mapping[str, NDArray[np.float32]]) -> None:
        histograms = {}
        for name, array in values.items():
            histograms[name] = self._wandb.Histogram(array, num_bins=BINS)
        self._run.log(histograms, step=step)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        for key, value in (summary or {}).items():
            if value is None or isinstance(value, str | int | float):
                self._run.summary[key] = value
        if self._artifacts:
            self._upload_checkpoint()
        failed = summary is None or summary["status"] == RunStatus.FAILED
        self._run.finish(exit_code=1 if failed else 0)

    def _upload_checkpoint(self) -> None:
        checkpoint, _ = newest(self._run_dir)
        if checkpoint is None:
            return
        name = _NOT_IN_A_NAME.sub("-", self._run_dir.name)
        artifact = self._wandb.Artifact(f"{name}-checkpoint", type="model")
        artifact.add_file(str(checkpoint), policy="immutable")
        self._run.log_artifact(artifact, aliases=["latest", checkpoint.stem])
