"""From the `tracking` section to trackers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nanogpt_bench.config.schema import Config
from nanogpt_bench.observers.tracking import Tracker, Trackers, report_failure
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.files import write_text

TRACKING_FILE = "tracking.json"


def check_trackers(config: Config) -> None:
    """Refuse a tracker whose package is missing, and a run to resume without one.

    Raises:
        BenchError: names the extra that brings it, or the setting that is missing.
    """
    tracking = config.tracking
    if tracking.wandb_id is not None and tracking.wandb == "off":
        raise BenchError(f"tracking.wandb_id: {tracking.wandb_id!r} needs tracking.wandb online; leave it out")
    for name in _wanted(config):
        if find_spec(name) is None:
            raise BenchError(f"tracking.{name} needs {name}; get it with pip install 'fp8manifold[{name}]'")


def start_trackers(
    config: Config, run_dir: Path, earlier: Mapping[str, Any] | None = None, after: int = -1
) -> Trackers:
    """Start the trackers asked for and write down in tracking.json how the run is found there.

    One that does not start is reported and left out. `earlier` are the facts that a run which goes on after step
    `after` had of its trackers: it goes on there.
    """
    known = earlier or {}
    started, dropped = [], {}
    for name in _wanted(config):
        try:
            started.append(_STARTERS[name](config, run_dir, known.get(name, {}), after))
        except Exception as error:  # a tracker never stops a training
            dropped[name] = report_failure(name, error)
    trackers = Trackers(started, dropped, config.monitor.histogram_interval)
    if trackers.facts:
        write_text(run_dir / TRACKING_FILE, json.dumps(trackers.facts, indent=1) + "\n")
    return trackers


def _wanted(config: Config) -> list[str]:
    tracking = config.tracking
    return [*(["wandb"] if tracking.wandb != "off" else []), *(["tensorboard"] if tracking.tensorboard else [])]


def _wandb(config: Config, run_dir: Path, earlier: Mapping[str, Any], after: int) -> Tracker:
    from nanogpt_bench.observers.wandb_tracker import WandbTracker

    return WandbTracker(config, run_dir, earlier)


def _tensorboard(config: Config, run_dir: Path, earlier: Mapping[str, Any], after: int) -> Tracker:
    from nanogpt_bench.observers.tensorboard_tracker import TensorBoardTracker

    return TensorBoardTracker(run_dir, after)


_STARTERS: dict[str, Callable[[Config, Path, Mapping[str, Any], int], Tracker]] = {
    "wandb": _wandb,
    "tensorboard": _tensorboard,
}
