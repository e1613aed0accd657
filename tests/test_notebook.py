"""The notebook runs, and its outputs are those that it was committed with."""

import itertools
import json
import os
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "finetune.ipynb"
NUMBER = re.compile(r"\d+\.\d+")


def printed(cells):
    """Return what each cell of code has printed, without what goes to stderr."""
    texts = []
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        streams = [part for part in cell["outputs"] if part.get("name") == "stdout"]
        text = "".join("".join(part["text"]) for part in streams)
        if "print(" in "".join(cell["source"]):
            assert text
        texts.append(text)
    return texts


@pytest.mark.extra("ipykernel", "nbclient", "nbformat")
@pytest.mark.filterwarnings("ignore")
def test_it_runs_and_prints_what_it_says(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    root = str(NOTEBOOK.parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    committed = nbformat.read(NOTEBOOK, as_version=4)
    run = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(run, timeout=300, kernel_name="python3", resources=resources).execute()
    before, after = "\n".join(printed(committed.cells)), "\n".join(printed(run.cells))
    assert NUMBER.sub("#", after) == NUMBER.sub("#", before)
    figures = [float(figure) for figure in NUMBER.findall(after)]
    stated = [float(figure) for figure in NUMBER.findall(before)]
    assert figures == pytest.approx(stated, rel=0.5, abs=0.05)


def test_it_is_committed_as_run_with_short_cells_and_without_warnings():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert max(len(cell["source"]) for cell in code) <= 20
    outputs = itertools.chain.from_iterable(cell["outputs"] for cell in code)
    assert [part for part in outputs if part.get("name") == "stderr"] == []
    losses = re.findall(r"loss .*?(\d+\.\d+)", "".join(printed(cells)))
    by_one, by_two_before, by_two_after = map(float, losses)
    assert max(by_one, by_two_after) < 0.2 < by_two_before
