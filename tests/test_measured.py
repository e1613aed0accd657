"""Pages show all that the benchmarks wrote; the reference of the bench names every failure."""

import datetime
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import ml_dtypes
import pytest

from nanogpt_bench.failures import KINDS

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "docs" / "measured").glob("*.json"))
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
#: pages of the tables that are not on performance's
ELSEWHERE = {
    name: ROOT / f"{page}.md"
    for page, names in {
        "docs/finetune": ("loading", "mxfp4_training", "whole_step"),
        "docs/other-libraries": ("train_is_serve",),
        "study/study-q14": ("study_steps",),
        "study/study-rounding": ("arrived_share", "draws", "moment_formats", "second_moment", "write_back_noise"),
        "study/study-speed": ("checkpoint", "fake_quantized_linear", "harness_overhead", "overhead", "round_to_grid"),
    }.items()
    for name in names
} | dict.fromkeys(("linear_forward", "muon_step"), ROOT / "study" / "study-speed.md")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


RECORDING = ("optimizer_step", "linear_forward", "fake_quantized_linear")
MEASURED = load(ROOT / "docs" / "_measured.py")


def test_files_say_what_was_measured_where_when_and_against_what_and_stand_on_a_page() -> None:
    for path in FILES:
        facts = json.loads(path.read_text(encoding="utf-8"))
        assert facts.keys() == {"command", "date", "machine", "versions", "peer", "columns", "rows"}
        assert facts["command"].startswith(f"python benchmarks/{path.stem}.py")
        assert (ROOT / "benchmarks" / f"{path.stem}.py").exists()
        assert datetime.date.fromisoformat(facts["date"]) <= datetime.date.today()
        assert re.fullmatch(r"\d+-core (x86|Arm|\w+) CPU|NVIDIA [\w ]+", facts["machine"])
        assert {"Python", "torch"} <= facts["versions"].keys()
        assert {len(row) for row in facts["rows"]} == {len(facts["columns"])}
        for ratio in (cell for row in facts["rows"] for cell in row if isinstance(cell, list)):
            median, *ends = ratio
            assert not ends or ends[0] <= median <= ends[1]
        page = ELSEWHERE[path.stem].read_text(encoding="utf-8") if path.stem in ELSEWHERE else PAGE
        assert page.count(f"<!-- table: measured-{path.stem} -->\n") == 1  # with what, test_generated.py says
        assert all(fact in MEASURED.table(facts) for fact in (facts["command"], facts["date"], facts["machine"]))


def test_what_a_benchmark_records_is_what_the_page_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder = load(ROOT / "benchmarks" / "_record.py")
    monkeypatch.setattr(recorder, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["somewhere/round_to_grid.py", "--record"])
    rows = [("E4M3", (1.23456, 1.0, 2.0), ""), ("E5M2", (1.5,), None), ("E3M4", 7, 2.5)]
    packages = ("ml_dtypes", "no-such-package")
    path = recorder.record("`torch.clone`", ("function", "ratio", "goal"), rows, packages=packages)
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert (path.name, facts["command"]) == ("round_to_grid.json", "python benchmarks/round_to_grid.py --record")
    assert list(facts["versions"]) == ["Python", "torch", "ml_dtypes"]
    assert facts["versions"]["ml_dtypes"] == ml_dtypes.__version__
    assert facts["rows"] == [["E4M3", [1.23, 1.0, 2.0], ""], ["E5M2", [1.5], None], ["E3M4", 7, 2.5]]
    lines = MEASURED.table(facts).splitlines()
    assert lines[:2] == ["| function | ratio | goal |", "| --- | ---: | --- |"]
    assert lines[2].split() == ["|", "E4M3", "|", "1.23x", "(1.00", "..", "2.00)", "|", "|"]
    assert lines[3:5] == ["| E5M2 | 1.50x |  |", "| E3M4 | 7 | 2.5 |"]
    assert facts["date"] in lines[6]


def test_every_benchmark_records_rows_as_wide_as_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    step, linear, fake = (load(ROOT / "benchmarks" / f"{name}.py") for name in RECORDING)
    measured = {"label": "x", "bytes_per_parameter": 9.0104, "ratio": 1.5, "ratio_min": 1.0, "ratio_max": 2.0}
    row = step.recorded(measured | {"first_step_s": [3.04, 1.0, 2.0], "goal": 1.6, "met": True})
    assert row == ("x", 9.01, (1.5, 1.0, 2.0), 3.0, 1.5, "1.6x, met")
    assert step.RECORDED == ("contender", "bytes per parameter", "ratio", "first step, s", "then, s", "goal")
    cells = [linear.Cell(8, 16, 4, "eager", backward, 3, 1.0, 1.5, 1.0, 2.0) for backward in (False, True)]
    assert linear.recorded(cells) == [("8x16", "eager", 4, (1.5, 1.0, 2.0), (1.5, 1.0, 2.0))]
    row = fake.recorded(fake.Row("8x16", 4, "tensor", 3, 1.0, 1.5, 1.0, 2.0, 1.1, 0.0))
    assert row == ("8x16", 4, "one a tensor", (1.5, 1.0, 2.0), (1.1,), "1x, not met")
    assert len(fake.RECORDED) == len(row)


def test_every_class_of_failure_is_explained() -> None:
    page = (ROOT / "docs" / "bench-reference.md").read_text(encoding="utf-8")
    advice = page.partition("\n### Failures\n")[2].partition("\n### ")[0]
    assert re.findall(r"^\| `(\w+)` \|", advice, re.MULTILINE) == list(KINDS)
