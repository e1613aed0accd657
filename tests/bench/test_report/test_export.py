"""What of a folder goes into a results file, and folders of which nothing does."""

import json

import pytest

from nanogpt_bench.cli import main


@pytest.mark.parametrize(
    ("name", "content"), [("sweep.json", '{"runs": [1]}'), ("compare.json", '{"rows": [{}]}'), ("tuning.json", "{")]
)
def test_a_damaged_folder_is_refused_in_a_line(tmp_path, write_run, capsys, name, content):
    folder = write_run(tmp_path / "study" / "a").parent
    (folder / "sweep.json").write_text(json.dumps({"order": ["a"], "runs": [{"name": "a", "label": "a"}]}))
    assert main(["results", "export", str(folder), "--out", str(tmp_path / "whole.json")]) == 0
    if name == "compare.json":
        (folder / "sweep.json").unlink()
    (folder / name).write_text(content)
    assert main(["results", "export", str(folder), "--out", str(tmp_path / "x.json")]) == 2
    assert str(folder) in capsys.readouterr().err


def test_what_an_earlier_plan_left_is_not_exported(tmp_path, write_run):
    for name in ("new", "old"):
        write_run(tmp_path / "study" / name)
    runs = [{"name": "new", "label": "a"}, {"name": "old", "label": "a", "of_plan": False}]
    (tmp_path / "study" / "sweep.json").write_text(json.dumps({"order": ["a"], "runs": runs}))
    assert main(["results", "export", str(tmp_path / "study"), "--out", str(tmp_path / "x.json")]) == 0
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert len(row["runs"]) == 1
