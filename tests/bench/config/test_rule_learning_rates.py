"""The search for learning rates.

Its grid, its growth at the ends, and going on after an interruption.
"""

import doctest
import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

from nanogpt_bench.config.rules import RULES
from nanogpt_bench.data.text import prepare_text

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "rule_learning_rates.py"


@pytest.fixture(scope="module")
def search():
    spec = importlib.util.spec_from_file_location("rule_learning_rates", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_its_examples_run(search):
    result = doctest.testmod(search)
    assert result.attempted > result.failed == 0


@pytest.mark.parametrize("name", RULES)
def test_a_rule_has_a_grid_around_its_default(name, search):
    powers = math.log2(RULES[name].lr / search.lr_at(name, 0))
    assert abs(powers) <= search.MOST_POWERS
    assert powers == pytest.approx(round(powers), abs=1e-9)


@pytest.mark.parametrize(
    ("losses", "grown"),
    [
        ({-1: 3.0, 0: 2.0, 1: 1.0}, [2]),
        ({-1: 1.0, 0: 2.0, 1: 3.0}, [-2]),
        ({-1: 3.0, 0: 2.0, 1: 1.0, 2: 0.9}, [3]),
        ({-1: 3.0, 0: 2.0, 1: 1.0, 2: 1.1}, []),
        ({-1: 3.0, 0: 2.0, 1: math.inf}, []),
        ({-1: math.inf, 0: math.inf, 1: math.inf}, []),
        ({power: 10.0 - power for power in range(-1, 9)}, []),  # it ends somewhere
    ],
)
def test_the_grid_grows_where_the_best_is_at_an_end(search, losses, grown):
    assert search.next_powers(losses, 3) == grown


@pytest.mark.slow
def test_an_interrupted_search_goes_on_and_a_finished_one_trains_nothing(
    search, tmp_path, text_file, capsys
):
    prepare_text(text_file, tmp_path / "corpus", "byte")
    command = [
        "--rules",
        "fp32,stochastic",
        "--max-steps",
        "1",
        "--points",
        "1",
        "--out",
        str(tmp_path),
    ]
    folder = tmp_path / "1-steps-seed-42" / "fp32" / "0.001"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("")  # begun and not ended
    assert search.main(command) == 0
    first = capsys.readouterr()
    summaries = sorted(tmp_path.rglob("summary.json"))
    assert {json.loads(path.read_text())["status"] for path in summaries} == {"finished"}
    assert (
        len(summaries) == len(first.err.splitlines()) >= 4
    )  # one point is both ends, so that it grows
    assert (tmp_path / "table.md").read_text() == first.out
    best = min(
        json.loads(path.read_text())["final_val_loss"] for path in summaries if "fp32" in str(path)
    )
    assert f"**{best:.3f}**" in next(
        line for line in first.out.splitlines() if line.startswith("| fp32")
    )
    assert search.main(command) == 0
    second = capsys.readouterr()
    assert (second.out, second.err) == (first.out, "")


def test_an_unknown_rule_is_answered_with_the_nearest(search, capsys):
    with pytest.raises(SystemExit) as ended:
        search.main(["--rules", "stocastic"])
    assert ended.value.code == 2
    assert "did you mean 'stochastic'" in capsys.readouterr().err
