"""Weights & Biases, online or offline."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from nanogpt_bench.checkpoint import newest
from nanogpt_bench.config.schema import Config
from nanogpt_bench.observers.alerts import Alert
from nanogpt_bench.observers.tracking import Distribution
from nanogpt_bench.runs.trained import BEST

#: seconds to wait for the server before the training goes on without it
SECONDS_TO_CONNECT = 30
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]")


class WandbTracker:
    """One W&B run: a `log` call a step, distributions of weights and gradients, alerts; at the end the summary.

    The summary is there as figures of the run and as a table, `summary`. With `tracking.wandb_artifacts` the last
    checkpoint and the best are versions of an artifact of type model, with the aliases `latest` and `best`.

    An id given to an online run, or known from an `earlier` one, resumes that run, which must exist; offline there is
    nothing to resume, and the id tells a later `wandb sync` where the steps belong. Steps that W&B has already are
    logged there no second time.
    """

    def __init__(self, config: Config, run_dir: Path, earlier: Mapping[str, Any] | None = None) -> None:
        tracking, known = config.tracking, earlier or {}
        mode = _mode(tracking.wandb)
        run_id = tracking.wandb_id or known.get("id")
        exists = tracking.wandb_id is not None or known.get("mode") == "online"
        resume = {} if mode != "online" or run_id is None else {"resume": "must" if exists else "allow"}
        self._run: Any = wandb.init(
            dir=str(run_dir),
            project=tracking.wandb_project,
            entity=tracking.wandb_entity,
            name=run_dir.name,
            id=run_id,
            tags=[*tracking.tags, *([config.rule] if config.rule else [])],
            config=dataclasses.asdict(config),
            mode=mode,
            allow_val_change=bool(known),  # a resumed run may have been given another setting
            settings=wandb.Settings(silent=True, console="off", init_timeout=SECONDS_TO_CONNECT),
            **resume,
        )
        self._mode, self._run_dir, self._artifacts = mode, run_dir, tracking.wandb_artifacts

    @property
    def facts(self) -> dict[str, Any]:
        return {"name": "wandb", "id": self._run.id, "mode": self._mode, "project": self._run.project}

    def log(self, step: int, record: Mapping[str, float]) -> None:
        self._run.log(dict(record), step=step)

    def distributions(self, step: int, found: Mapping[str, Distribution]) -> None:
        histograms = {
            name: wandb.Histogram(np_histogram=(spread.counts, spread.edges)) for name, spread in found.items()
        }
        self._run.log(histograms, step=step)

    def alert(self, alert: Alert) -> None:
        level = wandb.AlertLevel.ERROR if alert.level == "ERROR" else wandb.AlertLevel.WARN
        self._run.alert(title=alert.kind, text=alert.message, level=level, wait_duration=0)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        figures = {k: v for k, v in (summary or {}).items() if v is None or isinstance(v, str | int | float)}
        for key, value in figures.items():
            self._run.summary[key] = value
        if figures:
            rows = [[key, "" if value is None else str(value)] for key, value in figures.items()]
            self._run.log({"summary": wandb.Table(columns=["figure", "value"], data=rows)})
        if self._artifacts:
            self._log_checkpoints()
        failed = summary is None or summary["status"] == "failed"
        self._run.finish(exit_code=1 if failed else 0)

    def _log_checkpoints(self) -> None:
        """Log the last whole checkpoint, and the best one where it is another step's."""
        last, best = newest(self._run_dir)[0], newest(self._run_dir / BEST)[0]
        same = last is not None and best is not None and last.name == best.name
        for folder, aliases in ((best, ["best"]), (last, ["latest", "best"] if same else ["latest"])):
            if folder is None or (same and folder == best):
                continue
            artifact = wandb.Artifact(f"{_NOT_IN_A_NAME.sub('-', self._run_dir.name)}-checkpoint", type="model")
            artifact.add_dir(str(folder), policy="immutable")
            self._run.log_artifact(artifact, aliases=[*aliases, folder.name])


def _mode(wanted: str) -> Any:
    """Return online or offline: without a key, a run that was not asked to be online is kept on disk."""
    if wanted != "auto":
        return wanted
    return "online" if wandb.login(prompt=False, verify=False) else "offline"
