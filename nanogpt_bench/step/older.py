"""Resolving for a run: a new one, or one that goes on, those of version 0.1 by the command that began them."""

from __future__ import annotations

from pathlib import Path

from nanogpt_bench.config.schema import OPTIONS, Config
from nanogpt_bench.config.settings import Resolved, load_config
from nanogpt_bench.step.resolve import resolve
from nanogpt_bench.step.start import as_begun


def resolve_for(config: Config, run_dir: Path, *, resume: bool) -> Resolved:
    """Return a configuration resolved for the run in `run_dir`: where it goes on, from what it began, at its own rate.

    One that is resolved already is that. Up to version 0.1 settings that amount to a rule had the optimizer's default
    rate, not the rule's. Where a run has that one, it goes on with it if nobody gives another.

    Raises:
        BenchError: settings that can't be used, or a config.yaml that can't be read.
    """
    if isinstance(config, Resolved):
        return config
    path, unsaid = run_dir / "config.yaml", config.rule is None and config.optimizer.lr is None
    if not resume or not (unsaid or config.model.init_from) or not path.is_file():
        return resolve(config)
    saved = load_config(path)
    resolved = resolve(*as_begun(config, saved, run_dir))
    ours, theirs = resolved.optimizer, saved.optimizer
    if unsaid and ours.name == theirs.name and theirs.lr == OPTIONS[ours.name or ""]["lr"]:
        ours.lr = theirs.lr
    return resolved
