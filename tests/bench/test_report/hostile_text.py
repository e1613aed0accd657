"""Run folders in which every text that a report shows is one that would do harm, were it not shown as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import run_folders
import yaml

CANARY = "window.broken=1;alert(1)"
TEXTS = (
    f"<script>{CANARY}</script>",
    f"</script><script>{CANARY}</script>",
    f'"><img src=x onerror="{CANARY}">',
    f"<svg onload={CANARY}>'\"--><a href='javascript:{CANARY}'>x</a>",
    "&lt;script&gt; &amp; &#60;b&#62; %{x} %{fullData.name} @ink @1 <b>bold</b><br>",
    "line\u2028paragraph\u2029next\x85feed\x0bend",
    "\x00nul\x07bell\x1b[2J\x1b]0;title\x07\x9b31m\x7f",
    "\u202eright to left\u2066isolated\u200f\u061c\ufeff",
    "\ud800half\udfff",
    "n" * 3000,
    "$\\frac{1}{$ $x_$ \\input{x} _ ^ % # ~ {",
    "__proto__",
    "constructor",
    "| a | b |\n|---|---|\n`code` [x](javascript:alert(1)) ![x](x)",
)


def lay(folder: Path) -> list[Path]:
    """Write a run for every text, which is everything in it that a run can name, and the studies beside them."""
    run_folders.write_run(folder / "bf16", seed=0)
    runs = [_run(folder / str(place), text) for place, text in enumerate(TEXTS)]
    study = {
        "patterns": list(TEXTS),
        "formats": list(TEXTS),
        "gap": [[None if i == j else 0.01 * i for j in range(len(TEXTS))] for i in range(len(TEXTS))],
        "status": [[text] * len(TEXTS) for text in TEXTS],
        "operand": TEXTS[0],
        "rule": TEXTS[1],
    }
    _json(folder / "sensitivity.json", study)
    return runs


def _run(folder: Path, text: str) -> Path:
    failure = {"kind": text, "message": text, "step": 150}
    findings = [{"kind": text, "step": 100, "evidence": {"message": text, text: text}}]
    run_folders.write_run(
        folder, rule=text, fmt="E4M3", seed=0, name=text, status="failed", failure=failure, failures=findings
    )
    summary = json.loads((folder / "summary.json").read_text())
    _json(folder / "summary.json", summary | {"format": text, "alerts": {text: 3}})
    config: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())
    printed = text if "\ud800" not in text else "half"  # what YAML can hold
    config |= {printed: printed, "data": {"dir": printed, "seed": printed}, "tracking": {"tags": [printed]}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    corpus = {"source": {text: text}, "splits": {text: {"tokens": 3}}}
    facts = {"command": text, "cpu": text, "gpu": text, "platform": text, "started": text, "python": text}
    _json(folder / "environment.json", {**facts, "libraries": {text: text}, "corpus": corpus})
    series = {f"{key}/{text}": lambda step: step / 200 for key in ("grad/cosine", "quant/kurtosis/residual", "stall")}
    series |= {"grad/cosine": lambda step: 0.9, "quant/kurtosis/residual": lambda step: 3 + step / 10}
    run_folders.write_metrics(folder, {**series, text: lambda step: text}, every=20)
    alert = {"step": 80, "level": text, "kind": text, "message": text, "value": 12.5, "threshold": 10.0}
    (folder / "alerts.jsonl").write_text(json.dumps(alert) + "\n")
    return folder


def _json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
