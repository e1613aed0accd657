"""Pictures are drawn for whatever data there is, and odd names don't stop them."""

import math
import os
import re
import xml.etree.ElementTree as ElementTree

import pytest
from bench_runs import refusal
from run_folders import measured, write_comparison, write_run

from nanogpt_bench.report import chart
from nanogpt_bench.report.chart import chosen as chosen_charts
from nanogpt_bench.report.chart import styles, write_figures
from nanogpt_bench.report.charts import lines_of, loss_charts, loss_range
from nanogpt_bench.report.rows import find_reference
from nanogpt_bench.report.sections import Page, all_sections
from nanogpt_bench.runs.load import MAX_POINTS, decimate, smooth


def prepared(paths):
    results = measured(paths)
    rows = [result.row for result in results]
    return results, styles(rows, find_reference(rows))


def charts_of(results, chosen):
    return [chart for section in all_sections(Page({}, results, chosen)) for chart in section.charts]


def texts_of(path):
    """The texts of an SVG, each with where it begins."""
    found = []

    def walk(node, x, y):
        moved = re.match(r"translate\(([-.\d]+),([-.\d]+)\)", node.get("transform", ""))
        x, y = (x + float(moved[1]), y + float(moved[2])) if moved else (x, y)
        if node.tag.endswith("}text"):
            found.append(("".join(node.itertext()), x, y))
        for child in node:
            walk(child, x, y)

    walk(ElementTree.parse(path).getroot(), 0.0, 0.0)
    return found


def test_every_figure_is_an_svg_that_shows_something(tmp_path):
    results, chosen = prepared(write_comparison(tmp_path / "runs"))
    written = write_figures(charts_of(results, chosen), chosen, tmp_path / "figures")
    assert {path.name for path in written} == {f"{name}.svg" for name in ("loss_curves", "stall")}
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == sorted(path.name for path in written)
    for path in written:
        assert "E4M3 nearest" in "".join(ElementTree.parse(path).getroot().itertext())


@pytest.mark.parametrize("call", [lambda: chart.svg({}), lambda: chart.javascript("")], ids=["svg", "javascript"])
def test_a_forked_process_and_what_can_not_be_drawn_are_refused(call, monkeypatch):
    with refusal("a figure can't be drawn: "):
        chart.svg({"mark": "none", "data": {"values": []}})
    monkeypatch.setattr(chart, "_process", [os.getpid() + 1])
    with refusal("forked from one that drew"):
        call()


def test_a_run_without_records_is_left_out(tmp_path):
    whole, empty = write_run(tmp_path / "a"), write_run(tmp_path / "b", rule="fp32")
    (empty / "metrics.jsonl").write_text("")
    results, chosen = prepared([whole, empty])
    drawn = chosen_charts(charts_of(results, chosen))
    assert [len(chart.values) for chart in drawn["loss_curves"]] == [1, 1]
    assert set(drawn) == {"loss_curves"}  # of floats there is no stall and no grid


def test_curves_keep_their_ends_and_stay_small_and_the_axis_leaves_out_the_first_descent(tmp_path):
    (result,), _ = prepared([write_run(tmp_path / "a", steps=3000)])
    (line,) = lines_of([result.row], "train/loss")
    assert len(line.xs) == MAX_POINTS
    assert (line.xs[0], line.xs[-1]) == (0, 3000)
    low, high = loss_range(lines_of([result.row], "val/loss"))
    assert low < 2.1 < high < math.log(256)
    assert decimate(10_000, 500)[-1] == 9_999
    with pytest.raises(ValueError, match="limit = 1"):
        decimate(10, 1)


def test_smoothing_is_unbiased_and_keeps_gaps():
    assert smooth([3.0] * 5, 10) == pytest.approx([3.0] * 5)
    assert smooth([1.0, None, 3.0], 1) == [1.0, None, 3.0]
    middle = smooth([0.0, 1.0] * 200, 40)[-1]
    assert 0.45 < middle < 0.55


def test_a_long_legend_makes_room_for_itself(tmp_path):
    results, chosen = prepared([write_run(tmp_path / str(i), rule=f"a rule with a long name, {i}") for i in range(40)])
    charts = loss_charts([result.row for result in results], chosen)
    write_figures(charts, chosen, tmp_path)
    root = ElementTree.parse(tmp_path / "loss_curves.svg").getroot()
    width, height = float(root.get("width")), float(root.get("height"))
    legend = [(x, y) for text, x, y in texts_of(tmp_path / "loss_curves.svg") if text.startswith("a rule with a long")]
    assert len(set(legend)) == 40
    assert all(0 < x < width - 6 * len("a rule with a long name, 39") and 0 < y < height for x, y in legend)
    assert min(chart.height for chart in charts) > 0.3 * height
