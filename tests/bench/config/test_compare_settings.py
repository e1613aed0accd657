"""Settings given to compare: which rows they go into, what is said of them, and what is refused."""

import pytest

from nanogpt_bench.cli import main
from nanogpt_bench.config.rules import RULES
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep import session as command

ROWS = ["compare", "--formats", "E4M3", "--rules", "sgd,stochastic", "--out", "out"]


@pytest.fixture
def planned(monkeypatch, here):
    """Return a function from a command line to the records of what it would have trained, by label."""
    records = []

    class Planning(command.Session):
        def train(self, planned):
            records.append(planned)
            for run in planned:
                self._record.add(run)
            self._record.write_manifest()
            return True

    monkeypatch.setattr(command, "Session", Planning)
    monkeypatch.setattr(command, "close", lambda *_, **__: 0)

    def plan(*words):
        assert main([*ROWS, *words]) == 0
        return {run.label: run for run in records[-1]}

    return plan


def test_settings_go_into_every_row_that_takes_them(planned, capsys):
    words = ("--model.n_layer=2", "--optimizer.lr", "3e-3", "--optimizer.weight_decay=0", "--optimizer.momentum", "0.5")
    rows = planned(*words, "--model.formats.lm_head", "none", "--train.max_steps", "40", "--seed", "7")
    configs = {label: resolve(build_config(run.settings)) for label, run in rows.items()}
    assert list(configs) == ["bf16-mixed", "sgd", "E4M3 stochastic"]
    for label, config in configs.items():
        assert (config.model.n_layer, config.optimizer.lr, config.optimizer.weight_decay) == (2, 3e-3, 0.0)
        assert (config.train.max_steps, config.optimizer.warmup_steps, config.eval.interval) == (40, 4, 4)
        assert (config.seed, config.optimizer.momentum) == (7, 0.5 if label == "sgd" else None)
    assert configs["E4M3 stochastic"].model.formats == {"lm_head": "none", "*": "E4M3"}
    assert capsys.readouterr().err.splitlines()[:3] == [
        "optimizer.lr 0.003 in every row, in the unit of its optimizer, in place of the rule's own",
        "optimizer.momentum 0.5 in the rows that take it: sgd",
        "model.formats {'lm_head': 'none'} in the rows that take it: E4M3 stochastic",
    ]


def test_without_settings_every_row_has_its_rule_s_rate_and_another_rate_is_another_comparison(planned):
    rates = {run.rule: resolve(build_config(run.settings)).optimizer.lr for run in planned().values()}
    assert rates == {rule: RULES[rule].lr for rule in ("bf16-mixed", "sgd", "stochastic")}
    assert main([*ROWS, "--optimizer.lr", "0.1"]) == 2


def test_what_differs_from_an_earlier_start_is_named(planned, capsys):
    planned("--optimizer.lr", "0.1")
    capsys.readouterr()
    assert main([*ROWS, "--eval.batches", "3"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "with eval.batches 20, now 3; give a new folder" in line
