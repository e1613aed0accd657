"""Alerts, failure classes and tables say of the same rules that a weight which stands still has lost its step."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from laws import each
from torch import nn

import fp8manifold as fm
from nanogpt_bench.config import schema
from nanogpt_bench.config.rules import RULES, available_rules, stall_counts
from nanogpt_bench.config.schema import ROUNDED, Config
from nanogpt_bench.failures import classify
from nanogpt_bench.loop.observers import AlertObserver
from nanogpt_bench.monitors.points import Step
from nanogpt_bench.setup.resolve import resolve

LOSING = {"nearest", "sgd-nearest", "muon-nearest"}


def test_the_write_backs_are_the_librarys() -> None:
    """The configuration knows them without importing torch."""
    assert tuple(fm.optim.WRITEBACKS) == schema.WRITEBACKS
    assert tuple(name for name, rule in fm.optim.WRITEBACKS.items() if rule.loses_updates) == schema.LOSING


@each("rule", available_rules())
def test_a_rule_loses_steps_for_everybody_or_nobody(
    rule: str, tiny: Callable[..., Config], make: Callable[..., Path], tmp_path: Path
) -> None:
    quantized = RULES[rule].storage not in schema.WITHOUT_FORMATS
    folder = tmp_path / f"alerts of {rule}"
    folder.mkdir()
    config = resolve(tiny(rule=rule, **({"model__format": "E4M3"} if quantized else {})))
    storage, writeback = config.model.storage, config.optimizer.writeback
    lost = {"stall/update_lost": 0.99, "stall/update_lost/lm_head": 0.99}

    raised: list[str] = []
    observer = AlertObserver(config, folder, lambda alert: raised.append(alert.kind))
    for number in range(1, 4):
        step = Step(number, nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
        step.record.update(lost)
        observer.written(replace(step, number=number * config.monitor.interval))

    settings = {"model": {"storage": storage}, "optimizer": {"writeback": writeback}}
    series = {name: dict.fromkeys(range(20, 201, 20), value) for name, value in lost.items()}
    stall = next(f for f in classify(make(rule, series=series, settings=settings)) if f.kind == "stall")

    assert (raised == ["stall"], stall.found) == (rule in LOSING, rule in LOSING)
    assert stall_counts(storage, writeback) == (rule in LOSING or storage not in ROUNDED)
