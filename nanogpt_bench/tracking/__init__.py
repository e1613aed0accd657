"""Where a run's figures go beside its own folder."""

from nanogpt_bench.tracking.base import Tracker, Trackers
from nanogpt_bench.tracking.build import check_trackers, start_trackers

__all__ = ["Tracker", "Trackers", "check_trackers", "start_trackers"]
