"""Going on with runs of version 0.1 by the command that began them."""

from __future__ import annotations

import copy
from pathlib import Path

from nanogpt_bench.config.options import OPTIONS
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import load_config
from nanogpt_bench.model.gpt import GPTShape
from nanogpt_bench.step.resolve import resolve


def at_the_rate_begun(config: Config, run_dir: Path, begun_shape: GPTShape | None = None) -> Config:
    """Return a configuration at the learning rate that the run in `run_dir` began with, if nobody gives one.

    Up to version 0.1 settings that amount to a rule had the optimizer's default rate, not the rule's. Where a run has
    that one, it goes on with it. `begun_shape` is for `resolve`.

    Raises:
        BenchError: a config.yaml that can't be read.
    """
    path = run_dir / "config.yaml"
    if config.rule is not None or config.optimizer.lr is not None or not path.is_file():
        return config
    begun, now = load_config(path).optimizer, resolve(config, begun_shape).optimizer
    default = OPTIONS[now.name or ""]
    if begun.name != now.name or begun.lr != default["lr"]:
        return config
    config = copy.deepcopy(config)
    config.optimizer.lr = begun.lr
    return config
