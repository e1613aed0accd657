"""Weights & Biases, online or offline."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from nanogpt_bench.config.schema import Config
from nanogpt_bench.observers.alerts import Alert

#: seconds to wait for the server before the training goes on without it
SECONDS_TO_CONNECT = 30


class WandbTracker:
    """One W&B run: a `log` call a step, alerts, and the summary at the end.

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
        self._mode = mode

    @property
    def facts(self) -> dict[str, Any]:
        return {"name": "wandb", "id": self._run.id, "mode": self._mode, "project": self._run.project}

    def log(self, step: int, record: Mapping[str, float]) -> None:
        self._run.log(dict(record), step=step)

    def alert(self, alert: Alert) -> None:
        level = wandb.AlertLevel.ERROR if alert.level == "ERROR" else wandb.AlertLevel.WARN
        self._run.alert(title=alert.kind, text=alert.message, level=level, wait_duration=0)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        for key, value in (summary or {}).items():
            if value is None or isinstance(value, str | int | float):
                self._run.summary[key] = value
        failed = summary is None or summary["status"] == "failed"
        self._run.finish(exit_code=1 if failed else 0)


def _mode(wanted: str) -> Any:
    """Return online or offline: without a key, a run that was not asked to be online is kept on disk."""
    if wanted != "auto":
        return wanted
    return "online" if wandb.login(prompt=False, verify=False) else "offline"
