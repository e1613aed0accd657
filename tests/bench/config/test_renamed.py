"""Files of earlier versions have former names of values; whoever types one hears of it."""

import json
from itertools import chain
from pathlib import Path

import pytest
import yaml

from nanogpt_bench.config.settings import load_config
from nanogpt_bench.report.results_file import read_export
from nanogpt_bench.runs.load import load_run
from nanogpt_bench.system.errors import BenchError

FORMER = {"model": {"storage": "fp8"}}


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(FORMER), encoding="utf-8")
    assert load_config(path).model.storage == "codes"
    assert load_run(tmp_path).config == {"model": {"storage": "codes"}}


def test_a_results_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = Path(__file__).parents[3] / "study" / "results" / "study_q2_muon_parts.json"
    entries = json.loads(path.read_text(encoding="utf-8"))
    assert {entry.get("config.model.storage") for entry in entries} == {"fp8", None}
    runs = chain.from_iterable(row.runs for row in read_export(path).rows)
    storages = {run.config["model"]["storage"] for run in runs}
    assert storages == {"codes"}


def test_the_former_name_is_refused_in_a_command() -> None:
    with pytest.raises(BenchError, match=r"--model\.storage: 'fp8' is now called 'codes'"):
        load_config(None, ["--model.storage", "fp8"])
