"""The size of a run, in files: how many of the bench it enters, and that it settles its configuration once."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import nanogpt_bench

#: files of whose functions a run calls one, and files that it imports at all
MOST_ENTERED, MOST_IMPORTED = 60, 68
#: a command line under a profiler, which writes down how often every function of the bench was called
COUNT = """
import json, sys
from collections import Counter
from nanogpt_bench.cli import main

calls = Counter()

def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(sys.argv[1]) and code.co_name != "<module>":
        calls[f"{code.co_filename}:{code.co_qualname}"] += 1

sys.setprofile(note)
code = main(sys.argv[3:])
sys.setprofile(None)
imported = [name for name in sys.modules if name.partition(".")[0] == "nanogpt_bench"]
print(json.dumps([code, calls, imported]), file=open(sys.argv[2], "w"))
"""
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16}


@pytest.fixture(scope="module")
def called(tmp_path_factory, corpus_dir):
    """Calls of a run of the shipped e4m3.yaml by FILE:FUNCTION, and the modules of the bench that it imports."""
    place = tmp_path_factory.mktemp("profiled")
    words = ["run", "e4m3.yaml", "--train.max_steps=5", "--train.batch_size=4", "--eval.batches=2"]
    words += [f"--data.dir={corpus_dir}"] + [f"--model.{name}={value}" for name, value in TINY.items()]
    bench = str(Path(nanogpt_bench.__file__).parent)
    subprocess.run([sys.executable, "-c", COUNT, bench, "calls.json", *words], cwd=place, check=True, timeout=300)
    code, calls, imported = json.loads((place / "calls.json").read_text())
    assert code == 0
    return Counter(calls), imported


def test_a_run_enters_few_files(called):
    calls, imported = called
    assert len({place.rpartition(":")[0] for place in calls}) <= MOST_ENTERED
    assert len(imported) <= MOST_IMPORTED


def test_a_run_imports_nothing_that_it_does_not_use(called):
    """Neither pages nor sweeps, nor what prepares texts or reads models of others."""
    foreign = ("report", "sweep", "workers", "evaluation", "data.text", "data.write", "model.causal", "setup.start")
    names = [name.removeprefix("nanogpt_bench.") for name in called[1]]
    assert [name for name in names if name.startswith(foreign)] == []


def test_a_configuration_is_resolved_once(called):
    resolved = {place.rpartition("/")[2]: count for place, count in called[0].items() if "setup/resolve.py" in place}
    assert resolved["resolve.py:resolve"] == 1
