"""Synthetic run folders that follow the run-folder contract.

With them the report is tested without training.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from nanogpt_bench.report.results import Result, measure
from nanogpt_bench.report.rows import Row, find_reference, group_rows
from nanogpt_bench.report.tables import to_csv
from nanogpt_bench.runs.load import load_run

ROWS = (
    ("bf16-mixed", "none", 2.10),
    ("fp32", "none", 2.09),
    ("master", "E4M3", 2.12),
    ("nearest", "E4M3", 2.55),
    ("stochastic", "E4M3", 2.13),
    ("riemannian", "E4M3", 2.11),
    ("stiffness-anneal", "E4M3", 2.06),
    ("nearest", "E7M0", 3.02),
    ("stochastic", "E7M0", 2.19),
)
STALL = {
    "master": 0.93,
    "nearest": 0.81,
    "stochastic": 0.9,
    "riemannian": 0.7,
    "stiffness-anneal": 0.86,
}


def loss_at(step: int, steps: int, final: float, jitter: float = 0.0) -> float:
    """A plausible descent from ln 256 to `final`."""
    share = (1 - math.exp(-5 * step / steps)) / (1 - math.exp(-5))
    return math.log(256) + (final - math.log(256)) * share + jitter * math.sin(1.7 * step)


def records(rule: str, final: float, steps: int, interval: int) -> list[dict[str, Any]]:
    metric = None
    if rule in STALL:
        metric = "code_unchanged" if rule == "master" else "update_lost"
    lines = []
    for step in range(steps + 1):
        record = {"step": step, "tokens": 768 * (step + 1), "lr": 1e-3 * (1 - step / (steps + 1))}
        record |= {
            "train/loss": loss_at(step, steps, final - 0.05, 0.08),
            "grad/norm": 0.8,
            "grad/clipped": 0,
        }
        record |= {"time/elapsed_s": 0.06 * (step + 1) * (1.4 if rule == "bf16-mixed" else 1.0)}
        record |= {"time/tokens_per_s": 12000.0}
        if step % interval == 0 or step == steps:
            record |= {
                "val/loss": loss_at(step, steps, final),
                "val/perplexity": 8.0,
                "val/bits_per_byte": 3.0,
            }
            if metric:
                record[f"stall/{metric}"] = STALL[rule] * (0.7 + 0.3 * step / steps)
                record[f"stall/{metric}/blocks.0.mlp.fc"] = 0.5
        lines.append(record)
    return lines


def write_run(
    folder: Path,
    *,
    rule: str = "bf16-mixed",
    fmt: str = "none",
    final: float = 2.1,
    seed: int = 42,
    steps: int = 200,
    lr: float = 1e-3,
    **changes: Any,
) -> Path:
    """Write one run folder.

    Example: write_run(folder, rule="nearest", fmt="E4M3", final=2.5, seed=0,
    **summary).
    """
    folder.mkdir(parents=True)
    metrics = records(rule, final, steps, 20)
    storage = "master" if rule == "master" else "grid"
    if fmt == "none":
        storage = "float32"
    optimizer = {"lr": lr, "writeback": "nearest" if rule == "nearest" else "stochastic"}
    config = {
        "rule": rule,
        "seed": seed,
        "model": {"formats": {"*": fmt}, "storage": storage},
        "optimizer": optimizer,
    }
    stall = [
        (key, metrics[-1][key])
        for key in ("stall/update_lost", "stall/code_unchanged")
        if key in metrics[-1]
    ]
    summary = {
        "name": folder.name,
        "rule": rule,
        "format": fmt,
        "storage": storage,
        "seed": seed,
        "lr": lr,
    }
    summary |= {
        "parameters": 820_000,
        "steps": steps,
        "steps_planned": steps,
        "status": "finished",
        "failure": None,
    }
    summary |= {
        "first_val_loss": metrics[0]["val/loss"],
        "final_val_loss": final,
        "best_val_loss": final - 0.01,
    }
    summary |= {
        "stall": stall[0][1] if stall else None,
        "stall_metric": stall[0][0] if stall else None,
    }
    summary |= {
        "bytes_per_parameter": 12.0 if fmt == "none" else 9.3,
        "tokens_per_s": 11234.5,
        "seconds": 12.5,
    }
    summary |= changes
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder / "environment.json").write_text(
        json.dumps({"python": "3.12.1", "torch": "2.13.0"}), encoding="utf-8"
    )
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in metrics), encoding="utf-8"
    )
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def write_comparison(folder: Path, seeds: int = 1) -> list[Path]:
    """Write the nine runs of the demonstration, each for every seed asked for."""
    paths = []
    for place, (rule, fmt, final) in enumerate(ROWS, start=1):
        for seed in range(seeds):
            path = folder / f"{place}-{fmt}-{rule}-s{seed}"
            paths.append(write_run(path, rule=rule, fmt=fmt, final=final + 0.01 * seed, seed=seed))
    return paths


def write_metrics(
    folder: Path, series: Mapping[str, Callable[[int], Any]], interval: int = 1
) -> None:
    """Add series to the metrics of a run on disk.

    Example: write_metrics(folder, {key: value of step}, interval=1).
    """
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for record in lines:
        if record["step"] % interval == 0:
            record |= {key: value(record["step"]) for key, value in series.items()}
    path.write_text("".join(json.dumps(record) + "\n" for record in lines), encoding="utf-8")


def write_alerts(folder: Path, *alerts: tuple[str, int]) -> None:
    """Write the alerts of a run on disk, (kind, step) each."""
    lines = [
        {
            "step": step,
            "level": "WARN",
            "kind": kind,
            "message": f"{kind} rose",
            "value": 12.5,
            "threshold": 10.0,
        }
        for kind, step in alerts
    ]
    (folder / "alerts.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )


def rows_of(folders: Iterable[Path]) -> list[Row]:
    """The rows of runs on disk."""
    return group_rows([load_run(folder) for folder in folders])


def measured(folders: Iterable[Path], baseline: str | None = None) -> list[Result]:
    """The results of runs on disk, measured against the reference among them."""
    rows = rows_of(folders)
    return measure(rows, find_reference(rows, baseline))


def csv_lines(results: Sequence[Result]) -> list[dict[str, str]]:
    """The lines of the table as CSV, by the names of its columns."""
    return list(csv.DictReader(io.StringIO(to_csv(results))))


class Page(HTMLParser):
    """The elements of a page, with their attributes.

    Also the text of each kind of element.
    """

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.text = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._open = tag

    def handle_data(self, data):
        self.text.setdefault(self._open, []).append(data)

    def charts(self):
        (text,) = [text for text in self.text["script"] if text.startswith('{"config":')]
        return json.loads(text)["charts"]
