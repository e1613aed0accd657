"""Charts of many runs: heat maps, learning rates, parallel coordinates; files that do not fit."""

import json

import pytest
from run_folders import rows_of, write_run

from nanogpt_bench.report.chart import styles
from nanogpt_bench.report.charts import ABOVE, parallel_chart, rate_chart, sensitivity_charts
from nanogpt_bench.report.results_file import read_studies


def test_learning_rate_curves_join_runs_that_differ_in_nothing_else(tmp_path):
    ended = {"status": "failed", "failure": {"kind": "nan", "message": "x", "step": 3}, "final_val_loss": None}
    runs = [(lr, seed) for lr in (0.1, 0.2) for seed in (0, 1)]
    paths = [
        *(write_run(tmp_path / f"{lr}-{s}", rule="sgd", lr=lr, seed=s, final=2 + lr + s) for lr, s in runs),
        write_run(tmp_path / "diverged", rule="sgd", lr=0.4, seed=0, **ended),
        write_run(tmp_path / "alone", rule="fp32"),
    ]
    rows = rows_of(paths)
    chart = rate_chart(rows, styles(rows, None))
    (line,), (cross,) = chart.values, chart.spec["layer"][-1]["data"]["values"]
    assert (line["name"], line["x"], line["y"]) == ("sgd", [0.1, 0.2, 0.4], [2.6, 2.7, None])
    assert (cross["x"], cross["text"]) == (0.4, "sgd, learning rate 0.4: 1 failed")
    assert cross["y"] > 2.7


def test_parallel_coordinates_have_an_axis_for_everything_that_differs(tmp_path):
    failed = {"status": "failed", "final_val_loss": None}
    paths = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", rule="nearest", fmt="E4M3", final=2.5, lr=1e-1),
        write_run(tmp_path / "c", rule="nearest", fmt="E7M0", lr=1e-2, **failed),
    ]
    rows = rows_of(paths)
    chart = parallel_chart(rows, styles(rows))
    names = [head["text"] for head in chart.spec["layer"][-1]["data"]["values"]]
    assert names == ["format", "rule", "learning rate", "bytes/param", "final val loss"]
    places = dict(zip(names, zip(*(line["y"] for line in chart.values), strict=True), strict=True))
    assert places["format"] == (0.0, 0.5, 1.0)
    assert places["learning rate"] == pytest.approx((0.0, 1.0, 0.5))  # logarithmic
    assert places["final val loss"] == (0.0, 1.0, ABOVE)
    assert parallel_chart(rows_of(paths[:1]), styles(rows)) is None


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "study").mkdir()
    return tmp_path / "study"


def test_the_sensitivity_table_is_drawn_with_its_gaps_and_how_the_others_ended(folder):
    table = {"patterns": ["attn.qkv", "mlp.fc"], "formats": ["E4M3", "E7M0"], "gap": [[0.01, 0.5], [-0.25, None]]}
    (folder / "sensitivity.json").write_text(json.dumps(table | {"status": [[None, None], [None, "nan"]]}))
    (chart,) = sensitivity_charts(read_studies([folder]).sensitivities)
    assert [line["pattern"] for line in chart.values] == ["attn.qkv", "mlp.fc"]
    assert [list(line["format"]) for line in chart.values] == [["E4M3", "E7M0"]] * 2
    assert [line["text"] for line in chart.values] == [["+0.010", "+0.500"], ["-0.250", "nan"]]
    cells, _ = chart.spec["layer"]
    assert cells["encoding"]["color"]["scale"]["domain"] == [-0.5, 0, 0.5]
    assert cells["transform"] == [{"filter": "isValid(datum.gap)"}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("sensitivity.json", "{"),
        ("sensitivity.json", '{"patterns": ["a"], "formats": ["b"], "gap": [[1, 2]]}'),
        ("tuning.json", "[]"),
        ("tuning.json", '{"rows": "none"}'),
    ],
)
def test_studies_that_do_not_fit_are_named_and_left_out(folder, name, content):
    (folder / name).write_text(content)
    studies = read_studies([folder])
    assert (studies.sensitivities, studies.tunings) == ((), ())
    assert name in studies.notes[0]
