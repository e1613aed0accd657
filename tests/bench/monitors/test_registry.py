"""The metrics: each named in its own module and nowhere else, and all that a run writes among them."""

import json
import re
from pathlib import Path

import nanogpt_bench
from nanogpt_bench.config import metrics
from nanogpt_bench.config.metrics import ABOVE, BELOW, LARGEST, MEAN, OPERANDS, TOGETHER, WATCHED, Metric
from nanogpt_bench.loop.train import run
from nanogpt_bench.monitors import METRICS, MODULES

SOURCES = Path(nanogpt_bench.__file__).parent
#: their own modules
ALLOWED = [Path(module.__file__ or "") for module in (metrics, *MODULES.values())]
NAMESPACES = {metric.namespace for metric in METRICS if "/" in metric.name}
#: names that are those of settings, and of figures of a summary, too: looked for as keys of records only
WORDS = "|".join(metric.name for metric in METRICS if "/" not in metric.name and metric not in metrics.FLAGS)


NAMED = "|".join(re.escape(metric.name) for metric in METRICS if "/" in metric.name or metric in metrics.FLAGS)
NAME = re.compile(
    rf"[\"' ](?:{NAMED})(?=[\"' /{{])|[\"'](?:{'|'.join(NAMESPACES)})/[\"'{{]"
    rf"|(?:record\[|record\.get\(|\.curve\()[\"'](?:{WORDS})[\"']"
)


def test_no_metric_is_named_outside_its_own_module():
    paths = [path for path in SOURCES.rglob("*.py") if path not in ALLOWED]
    found = {path: NAME.findall(re.sub(r'"""[\s\S]*?"""|#.*', "", path.read_text(encoding="utf-8"))) for path in paths}
    assert not {path.relative_to(SOURCES): names for path, names in found.items() if names}
    planted = ("'train/loss'", "f'quant/overflow/{b}'", "f'grad/{b}'", "'bits/codes_used/weight'", "f'a val/loss is'")
    planted += ("record['lr']", "step.record.get('lr')", "run.curve('tokens')", "'loss_is_nan'")
    innocent = ("summary['tokens']", "group['lr']", "'retrain/losses'", "'train/losses'", "'a/grad/norm'", "'val loss'")
    assert [bool(NAME.search(text)) for text in (*planted, *innocent)] == [True] * len(planted) + [False] * len(
        innocent
    )


def test_what_is_said_of_a_metric_holds():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert (bool(metric.title), metric.meaning[-1]) == (True, "."), metric
        assert metric.bad in ("", ABOVE, BELOW), metric
        assert metric.monitor in ("", "shadow", *WATCHED), metric
        assert metric.over in ("", MEAN, LARGEST, TOGETHER), metric
        assert set(metric.operands) <= set(OPERANDS), metric


def registered(key: str) -> Metric | None:
    """The metric that a key on disk belongs to."""
    for metric in METRICS:
        layer = "(/.+)?" if metric.over else ""
        operand = f"/({'|'.join(metric.operands)})" if metric.operands else ""
        if re.fullmatch(re.escape(metric.name) + operand + layer, key):
            return metric
    return None


def test_all_that_a_watched_run_writes_is_registered(tiny, corpus_dir, labelled_dir, tmp_path, monkeypatch):
    shadow = {"shadow__enabled": True, "shadow__interval": 2}
    monkeypatch.setattr("nanogpt_bench.monitors.resources._peak_flops", lambda device: 1e12)
    speed = {"eval__also": str(corpus_dir)}
    formats = "{'*': {weight: E4M3, activation: E4M3, gradient: E5M2}}"
    seen = set()
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
        assert json.loads(lines[0])["memory/peak_bytes"] > 1e7
    found = {key: registered(key) for key in seen}
    assert [key for key, metric in found.items() if metric is None] == []
    assert [metric.name for metric in METRICS if metric not in found.values()] == []
