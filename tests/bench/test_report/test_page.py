"""The page is one file that needs no network, carries small curves, and shows every text as text."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from nanogpt_bench.errors import BenchError
from nanogpt_bench.report import report, write_report
from nanogpt_bench.report.load import load_run
from nanogpt_bench.report.results import Row

SAME = ("weights", "configs")
NASTY = '</script><script>window.broken=1</script>"><img src=x onerror=alert(1)>&amp;\u2028'


class Page(HTMLParser):
    """Collects what the tests look at: elements, and the text of each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._open = tag

    def handle_data(self, data):
        self.text.setdefault(self._open, []).append(data)

    def charts(self):
        (text,) = [text for text in self.text["script"] if text.startswith('{"styles":')]
        content = json.loads(text)
        for chart in content["charts"]:
            for trace in chart["traces"]:
                trace |= content["styles"][trace["style"]] | {"x": content["xs"][trace["x"]]}
        return content["charts"]


@pytest.fixture(scope="module")
def built(tmp_path_factory, write_comparison):
    folder = tmp_path_factory.mktemp("comparison")
    write_comparison(folder / "runs")
    return report([folder / "runs"], out=folder / "out")


def test_the_folder_holds_page_tables_and_figures_and_no_litter(built):
    names = sorted(path.relative_to(built.parent).as_posix() for path in built.parent.rglob("*") if path.is_file())
    drawn = ("code_use", "gap", "loss_curves", "stall", "stiffness", "weights")
    figures = [f"figures/{name}.{kind}" for name in drawn for kind in ("pdf", "png", "svg")]
    assert names == [*figures, "report.html", "results.csv", "table.md", "table.tex"]


def test_nothing_is_loaded_from_elsewhere(built):
    page = Page(built.read_text(encoding="utf-8"))
    for tag, attributes in page.elements:
        assert tag not in {"img", "link", "iframe", "object"}
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "http" not in policy


def test_it_has_every_section_and_chart(built):
    page = Page(built.read_text(encoding="utf-8"))
    sections = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    assert sections == ["what", "results", "loss", "e7m0", "failures", "settings", "stall", "gradients", *SAME]
    charts = page.charts()
    names = {chart["name"] for chart in charts}
    assert names >= {"val-step", "val-seconds", "train-step", "train-seconds", "stall"}
    assert len([name for name in names if name.startswith("weights-")]) == 7
    places = {attributes.get("id") for tag, attributes in page.elements if tag == "div"}
    assert {f"chart-{name}" for name in names} <= places
    assert "+0.450 (+21.4%)" in page.text["td"]


def test_curves_are_small_and_not_webgl(tmp_path, write_run):
    built = report([write_run(tmp_path / "a", steps=2500)], out=tmp_path / "out")
    for chart in Page(built.read_text(encoding="utf-8")).charts():
        for trace in chart["traces"]:
            assert trace["type"] in {"scatter", "heatmap"}
            assert len(trace["x"]) <= 500


def test_text_from_a_run_stays_text(tmp_path, write_run):
    failure = {"kind": NASTY, "message": NASTY, "step": 3}
    paths = [
        write_run(tmp_path / "a", rule=NASTY, fmt="none", name=NASTY, lr=1e-3),
        write_run(tmp_path / "b", rule=NASTY, fmt="none", name=NASTY + "2", lr=1e-4, status="failed", failure=failure),
    ]
    (paths[0] / "environment.json").write_text(json.dumps({"command": NASTY, "cpu": NASTY}), encoding="utf-8")
    text = report(paths, out=tmp_path / "out").read_text(encoding="utf-8")
    assert "<script>window.broken" not in text
    assert "<img" not in text.replace("plotly", "")[: text.index('<script id="charts"')]
    page = Page(text)
    assert [attributes.get("id") for tag, attributes in page.elements if tag == "script"] == ["charts", None, None]
    assert any(NASTY in cell for cell in page.text["td"])
    # What plotly draws passes through its own small HTML, so the names in its data are escaped once more.
    names = [trace["name"] for chart in page.charts() for trace in chart["traces"] if "name" in trace]
    assert names
    assert not any("<" in name for name in names)


def test_a_page_of_running_runs_reloads_and_a_finished_one_does_not(tmp_path, write_run):
    folder = write_run(tmp_path / "a")
    (folder / "summary.json").unlink()
    rows = [Row("bf16-mixed", "bf16-mixed", "none", (load_run(folder),)), Row("fp32", "fp32", "none", ())]
    text = write_report(rows, tmp_path / "out", title="t", facts={}, running=True).read_text(encoding="utf-8")
    assert 'http-equiv="refresh"' in text
    assert {"running, step 200", "waiting"} <= set(Page(text).text["td"])
    assert not (tmp_path / "out" / "figures").exists()
    text = write_report(rows, tmp_path / "out", title="t", facts={}).read_text(encoding="utf-8")
    assert 'http-equiv="refresh"' not in text
    assert {"unfinished at step 200", "not run"} <= set(Page(text).text["td"])


def test_gaps_in_the_record_are_on_the_page(tmp_path, write_run):
    folder = write_run(tmp_path / "a")
    (folder / "environment.json").unlink()
    page = Page(report([folder], out=tmp_path / "out").read_text(encoding="utf-8"))
    assert "a: environment.json is missing" in page.text["li"]


def test_an_output_that_is_a_file_is_refused(tmp_path, write_run):
    (tmp_path / "out").write_text("x")
    with pytest.raises(BenchError, match="out"):
        report([write_run(tmp_path / "a")], out=tmp_path / "out")
    assert (tmp_path / "out").read_text() == "x"
