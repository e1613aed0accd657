"""Charts of many runs and of failed ones, whatever data there is."""

import json
import math
import os
import re
import xml.etree.ElementTree as ElementTree
from itertools import product

import pytest
from bench_runs import refusal
from run_folders import measured, rows_of, write_alerts, write_comparison, write_metrics, write_run

from nanogpt_bench.failures import diagnose
from nanogpt_bench.report import svg_figures
from nanogpt_bench.report.curve_charts import lines_of, loss_charts, loss_range
from nanogpt_bench.report.parallel_chart import MISSING_PLACE, parallel_chart
from nanogpt_bench.report.row_styles import styles
from nanogpt_bench.report.rows import find_reference
from nanogpt_bench.report.sections import Page, all_sections
from nanogpt_bench.report.setting_charts import LEAST_REACH, rate_chart, sensitivity_charts
from nanogpt_bench.report.studies import SensitivityMap, read_studies
from nanogpt_bench.report.svg_figures import write_figures
from nanogpt_bench.runs.load import MAX_POINTS, decimate, load_run


def prepared(paths):
    results = measured(paths)
    rows = [result.row for result in results]
    return results, styles(rows, find_reference(rows))


def test_every_figure_is_an_svg_that_shows_something(tmp_path):
    results, chosen = prepared(write_comparison(tmp_path / "runs"))
    charts = []
    for section in all_sections(Page({}, results, chosen)):
        charts += section.charts
    files = write_figures(charts, chosen, tmp_path / "figures")
    assert {path.name for path in files} == {"loss_curves.svg", "stall.svg"}
    assert set((tmp_path / "figures").iterdir()) == set(files)
    for path in files:
        assert "E4M3 nearest" in "".join(ElementTree.parse(path).getroot().itertext())


@pytest.mark.parametrize(
    "call",
    [lambda: svg_figures.svg({}), lambda: svg_figures.javascript("")],
    ids=["svg", "javascript"],
)
def test_a_forked_process_and_what_can_not_be_drawn_are_refused(call, monkeypatch):
    with refusal("a figure can't be drawn: "):
        svg_figures.svg({"mark": "none", "data": {"values": []}})
    monkeypatch.setattr(svg_figures, "_process", [os.getpid() + 1])
    with refusal("forked after another drew"):
        call()


def test_curves_keep_their_ends_and_stay_small_and_the_axis_leaves_out_the_first_descent(tmp_path):
    (result,), _ = prepared([write_run(tmp_path / "a", steps=3000)])
    (line,) = lines_of([result.row], "train/loss")
    assert len(line.xs) == MAX_POINTS
    assert (line.xs[0], line.xs[-1]) == (0, 3000)
    low, high = loss_range(lines_of([result.row], "val/loss"))
    assert low < 2.1 < high < math.log(256)
    assert decimate(10_000, 500)[-1] == 9_999
    with pytest.raises(ValueError, match="limit=1 is not allowed"):
        decimate(10, 1)


def test_a_long_legend_makes_room_for_itself(tmp_path):
    results, chosen = prepared(
        [write_run(tmp_path / str(i), rule=f"a rule with a long name, {i}") for i in range(40)]
    )
    charts = loss_charts([result.row for result in results], chosen)
    write_figures(charts, chosen, tmp_path)
    root = ElementTree.parse(tmp_path / "loss_curves.svg").getroot()
    width, height, legend = float(root.get("width")), float(root.get("height")), set()

    def walk(node, x, y):
        moved = re.match(r"translate\(([-.\d]+),([-.\d]+)\)", node.get("transform", ""))
        x, y = (x + float(moved[1]), y + float(moved[2])) if moved else (x, y)
        if node.tag.endswith("}text") and "".join(node.itertext()).startswith("a rule with a long"):
            legend.add((x, y))
        for child in node:
            walk(child, x, y)

    walk(root, 0.0, 0.0)
    assert len(legend) == 40
    assert all(
        0 < x < width - 6 * len("a rule with a long name, 39") and 0 < y < height for x, y in legend
    )
    assert min(chart.height for chart in charts) > 0.3 * height


def test_learning_rate_curves_join_runs_that_differ_in_nothing_else(tmp_path):
    ended = {
        "status": "failed",
        "failure": {"kind": "nan", "message": "x", "step": 3},
        "final_val_loss": None,
    }
    runs = product((0.1, 0.2), (0, 1))
    paths = [
        *(
            write_run(tmp_path / f"{lr}-{s}", rule="sgd", lr=lr, seed=s, final=2 + lr + s)
            for lr, s in runs
        ),
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
    assert places["final val loss"] == (0.0, 1.0, MISSING_PLACE)
    assert parallel_chart(rows_of(paths[:1]), styles(rows)) is None


def test_the_sensitivity_table_is_drawn_with_its_gaps_and_how_the_others_ended(tmp_path):
    table = {
        "patterns": ["attn.qkv", "mlp.fc"],
        "formats": ["E4M3", "E7M0"],
        "gap": [[0.01, 0.5], [-0.25, None]],
    }
    (tmp_path / "sensitivity.json").write_text(
        json.dumps(table | {"status": [[None, None], [None, "nan"]]})
    )
    (chart,) = sensitivity_charts(read_studies([tmp_path]).sensitivities)
    assert [line["pattern"] for line in chart.values] == ["attn.qkv", "mlp.fc"]
    assert [list(line["format"]) for line in chart.values] == [["E4M3", "E7M0"]] * 2
    assert [line["text"] for line in chart.values] == [["+0.010", "+0.500"], ["-0.250", "nan"]]
    cells, _ = chart.spec["layer"]
    assert cells["encoding"]["color"]["scale"]["domain"] == [-0.5, 0, 0.5]
    assert cells["transform"] == [{"filter": "isValid(datum.gap)"}]


@pytest.mark.parametrize(("checkpoint", "reach"), [("", LEAST_REACH), ("step-9", 0.004)])
def test_small_gaps_of_trained_cells_are_pale_and_those_of_rounded_weights_are_not(
    checkpoint, reach
):
    study = SensitivityMap(("mlp.fc",), ("E4M3", "E7M0"), ((0.002, -0.004),), checkpoint=checkpoint)
    (chart,) = sensitivity_charts([study])
    cells, _ = chart.spec["layer"]
    assert cells["encoding"]["color"]["scale"]["domain"] == [-reach, 0, reach]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("sensitivity.json", '{"patterns": ["a"], "formats": ["b"], "gap": [[1, 2]]}'),
        ("tuning.json", '{"rows": "none"}'),
    ],
)
def test_studies_that_do_not_fit_are_named_and_left_out(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    studies = read_studies([tmp_path])
    assert (studies.sensitivities, studies.tunings) == ((), ())
    assert name in studies.notes[0]


def test_the_chart_marks_the_first_step_of_each_class(tmp_path):
    """The chart marks classes in a run that ends in values that are not finite.

    Before, its residual outputs grow heavy tails.
    """
    failure = {"kind": "nan", "message": "train/loss is nan at step 200", "step": 200}
    folder = write_run(
        tmp_path / "b", rule="fp32", status="failed", failure=failure, final_val_loss=None
    )
    write_metrics(folder, {"quant/kurtosis/residual": lambda step: 3 + step}, interval=10)
    write_metrics(folder, {"train/loss": lambda step: None if step == 200 else 5.0 - step / 100})
    write_alerts(folder, ("kurtosis", 50), ("kurtosis", 60))
    results, chosen = prepared([write_run(tmp_path / "a"), folder])
    sections = {section.name: section for section in all_sections(Page({}, results, chosen))}
    (chart,) = sections["failures"].charts
    steps = [finding.step for finding in diagnose(load_run(folder)).found]
    for layer in chart.spec["layer"][-2:]:  # lines, and names above them
        assert [moment["x"] for moment in layer["data"]["values"]] == steps
    assert {line["row"] for line in chart.values} == {"fp32", "bf16-mixed"}
    assert chart.rows == ()  # shown whether or not the row is hidden elsewhere


def test_early_divergence_and_failure_are_marked_on_the_curve(tmp_path):
    failure = {"kind": "nan", "message": "gone", "step": 200}
    folder = write_run(tmp_path / "a", status="failed", failure=failure)
    write_alerts(folder, ("early_divergence", 110), ("early_divergence", 150))
    rows = rows_of([folder])
    chart, *_ = loss_charts(rows, styles(rows))
    early, end = chart.spec["layer"][-1]["data"]["values"]
    assert (early["x"], early["text"]) == (110.0, "bf16-mixed: divergence found at step 110")
    assert (
        early["y"] == lines_of(rows, "val/loss")[0].ys[5]
    )  # the validation at step 100, the last before it
    assert (end["x"], end["text"]) == (200.0, "bf16-mixed: failed at step 200")
