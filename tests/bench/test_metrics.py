"""The registry of metrics: complete, and the only place where a metric is named."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nanogpt_bench
from nanogpt_bench.config import metrics
from nanogpt_bench.config.metrics import (
    ABOVE,
    BELOW,
    LARGEST,
    MEAN,
    METRICS,
    OPERANDS,
    SMALLEST,
    SPREADS,
    TOGETHER,
    Metric,
    MonitorConfig,
)
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.watching import ALERT_KINDS, AlertsConfig
from nanogpt_bench.loop.train import run

SOURCES = Path(nanogpt_bench.__file__).parent
EVERY = (*METRICS, *SPREADS)
#: the registry, and what an alert about a flag is called, which is what its users set the level of
ALLOWED = (Path(metrics.__file__), SOURCES / "config" / "watching.py")
#: names that are those of settings, and of figures of a summary, too: refused as keys of records only
WORDS = {metric.name for metric in EVERY if "/" not in metric.name and metric not in metrics.FLAGS}
NAMESPACES = {metric.namespace for metric in EVERY if "/" in metric.name}


def _pattern(metric: Metric) -> str:
    return re.escape(metric.name.removesuffix("I")) + (r"\d*" if metric.name.endswith("_I") else "")


NAME = re.compile(
    rf"(?<![\w/-])(?:{'|'.join(_pattern(m) for m in EVERY if m.name not in WORDS)})(?![\w-])"
    rf"|^(?:{'|'.join(NAMESPACES)})/$"
)


def named(source: str) -> list[tuple[int, str]]:
    """Line and text of every string of a module that names a metric; docstrings may."""
    tree = ast.parse(source)
    keys = _keys(tree)
    return [
        (node.lineno, text)
        for node, text in _strings(tree)
        if NAME.search(text) or (text in WORDS and id(node) in keys)
    ]


def _strings(tree: ast.AST) -> Iterator[tuple[ast.Constant, str]]:
    """The strings of a module, parts of f-strings among them, docstrings left out."""
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docs = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node, node.value


def _keys(tree: ast.AST) -> set[int]:
    """What is read from, or put into, a record, or drawn out of a run's records."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("record"):
            found.add(id(node.slice))
        elif isinstance(node, ast.Call) and re.search(r"(record\.get|\.curve)$", ast.unparse(node.func)):
            found |= {id(argument) for argument in node.args}
    return found


def test_no_metric_is_named_outside_the_registry() -> None:
    paths = [path for path in sorted(SOURCES.rglob("*.py")) if path not in ALLOWED]
    places = {path: named(path.read_text(encoding="utf-8")) for path in paths}
    assert not [f"{path.relative_to(SOURCES)}: {found}" for path, found in places.items() if found]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("a = 'train/loss'", [1]),
        ("a = f'quant/overflow/{b}'\nc = f'the train/loss is {b}'", [1, 2]),
        ("a = f'grad/{b}'\nc = 'bits/exponent_bit_3/weight', f'bits/mantissa_bit_{b}'", [1, 2, 2]),
        ("'''train/loss'''\ndef f():\n    '''train/loss'''", []),
        ("a = record['lr']\nstep.record['tokens'] = 1\nb = step.record.get('mfu'), run.curve('tokens')", [1, 2, 3, 3]),
        ("a = summary['tokens'], group['lr'], 'retrain/losses', 'train/losses', 'a/grad/norm', 'val loss'", []),
        ("a = 'loss_is_nan'", [1]),
    ],
)
def test_the_search_finds_names_and_nothing_else(source: str, lines: list[int]) -> None:
    assert [line for line, _ in named(source)] == lines


@pytest.mark.parametrize("metric", EVERY, ids=lambda metric: metric.name)
def test_what_is_said_of_a_metric_holds(metric: Metric) -> None:
    assert [other.name for other in EVERY].count(metric.name) == 1
    assert metric.title
    assert metric.meaning.endswith(".")
    assert metric.bad in ("", ABOVE, BELOW)
    assert metric.monitor in ("", "shadow", *MonitorConfig.model_fields)
    assert metric.over in ("", MEAN, LARGEST, SMALLEST, TOGETHER)
    assert set(metric.operands) <= set(OPERANDS)
    if metric.alarm is not None:
        limit = getattr(AlertsConfig(), metric.alarm.setting)
        assert metric.bad
        assert metric.alarm.kind in ALERT_KINDS
        assert metric.alarm.text.format(value=limit, where="lm_head")
    if metric in metrics.FLAGS:
        assert metric.name in ALERT_KINDS


def registered(key: str) -> Metric | None:
    """The metric, or distribution, that a key on disk belongs to."""
    for metric in EVERY:
        layer = "(/.+)?" if metric.over or metric in SPREADS else ""
        operand = f"/({'|'.join(metric.operands)})" if metric.operands else ""
        if re.fullmatch(_pattern(metric) + operand + layer, key):
            return metric
    return None


def test_all_that_a_watched_run_writes_is_registered(
    tiny: Callable[..., Config], corpus_dir: Path, labelled_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow = {"shadow__enabled": True, "shadow__interval": 2}
    monkeypatch.setattr("nanogpt_bench.observers.resources._peak_flops", lambda device: 1e12)
    speed = {"monitor__histogram_interval": 2, "eval__also": str(corpus_dir)}
    formats = "{'*': {weight: E4M3, activation: E4M3, gradient: E5M2}}"
    seen: set[str] = set()
    residual = {"rule": "muon-residual8", "model__formats": "{'*': {weight: E4M3, gradient: E5M2}}"}
    for name, settings in {
        "residual": {**residual, **shadow, **speed},
        "master": {"rule": "master", "model__formats": formats, **shadow, **speed},
        "stiefel": {"model__constraint": "stiefel", "model__format": "E4M3", **speed},
        "sphere": {"model__constraint": "sphere", **speed},
        "labels": {"rule": "fp32", "task": "classify", "data__dir": str(labelled_dir)},
    }.items():
        folder = tmp_path / name
        run(tiny(**settings), folder)
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        seen |= {key for line in lines for key in json.loads(line)} - {"step"}
        lines = (folder / "histograms.jsonl").read_text(encoding="utf-8").splitlines()
        seen |= {json.loads(line)["name"] for line in lines}
    found = {key: registered(key) for key in seen}
    assert [key for key, metric in found.items() if metric is None] == []
    assert [metric.name for metric in EVERY if metric not in found.values()] == []
