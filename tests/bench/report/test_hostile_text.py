"""Text that would do harm is shown as text.

On the page, in pictures and tables, and on a terminal.
"""

import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml
from bench_runs import summary_of
from chromium import EXECUTABLE, Chromium
from rich.console import Console
from run_folders import Page, measured, write_metrics, write_run
from test_browser import UNDRAWN

from nanogpt_bench.cli import main
from nanogpt_bench.report import report
from nanogpt_bench.report.tables import to_text
from nanogpt_bench.sweep.session import Bar, Entry
from nanogpt_bench.sweep.workers import JobEvent

KEYS = (
    "filter",
    "calculate",
    "labelExpr",
    "expr",
    "test",
    "signal",
    "init",
    "update",
    "href",
    "url",
)


def expressions(node):
    """Return the texts of a chart's description where Vega allows an expression.

    So do addresses; data allow neither.
    """
    if isinstance(node, list):
        node = dict(enumerate(node))
    texts = []
    if isinstance(node, dict):
        texts += [str(part) for key, part in node.items() if key in KEYS]
        for key, part in node.items():
            if key != "data":
                texts += expressions(part)
    return texts


CANARY = "window.broken=1;alert(1)"
TEXTS = (
    f"<script>{CANARY}</script>",
    f"</script><script>{CANARY}</script>",
    f'"><img src=x onerror="{CANARY}">',
    f"<svg onload={CANARY}>'\"--><a href='javascript:{CANARY}'>x</a>",
    "&lt;script&gt; &amp; &#60;b&#62; %{x} %{fullData.name} @ink @1 <b>bold</b><br>",
    "line\u2028paragraph\u2029next\x85feed\x0bend",
    "\x00nul\x07bell\x1b[2J\x1b]0;title\x07\x9b31m\x7f",
    "\u202eright to left\u2066isolated\u200f\u061c\ufeff",
    "\ud800half\udfff",
    "n" * 3000,
    "$\\frac{1}{$ $x_$ \\input{x} _ ^ % # ~ {",
    "__proto__",
    "constructor",
    "| a | b |\n|---|---|\n`code` [x](javascript:alert(1)) ![x](x)",
)


def hostile_run(folder, text):
    """A run in which the text is everything that a run can name."""
    failure = {"kind": text, "message": text, "step": 150}
    findings = [{"kind": text, "step": 100, "evidence": {"message": text, text: text}}]
    write_run(
        folder,
        rule=text,
        fmt="E4M3",
        seed=0,
        name=text,
        status="failed",
        failure=failure,
        failures=findings,
    )
    write_json(folder / "summary.json", summary_of(folder) | {"format": text, "alerts": {text: 3}})
    config = yaml.safe_load((folder / "config.yaml").read_text())
    in_yaml = text if "\ud800" not in text else "half"  # what YAML can hold
    config |= {
        in_yaml: in_yaml,
        "data": {"dir": in_yaml, "seed": in_yaml},
        "tracking": {"tags": [in_yaml]},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    corpus = {"source": {text: text}, "splits": {text: {"tokens": 3}}}
    facts = {
        "command": text,
        "cpu": text,
        "gpu": text,
        "platform": text,
        "started": text,
        "python": text,
    }
    write_json(folder / "environment.json", {**facts, "libraries": {text: text}, "corpus": corpus})
    series = {
        f"{key}/{text}": lambda step: step / 200
        for key in ("grad/cosine", "quant/kurtosis/residual", "stall")
    }
    series |= {
        "grad/cosine": lambda step: 0.9,
        "quant/kurtosis/residual": lambda step: 3 + step / 10,
    }
    write_metrics(folder, {**series, text: lambda step: text}, interval=20)
    alert = {
        "step": 80,
        "level": text,
        "kind": text,
        "message": text,
        "value": 12.5,
        "threshold": 10.0,
    }
    write_json(folder / "alerts.jsonl", alert)
    return folder


def write_json(path, content):
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


#: what the page says while a pointer goes over every chart
TOOLTIPS = """[...document.querySelectorAll('.vega-embed')].flatMap((place) => {
  const box = place.getBoundingClientRect();
  return [...Array(400).keys()].map((i) => {
    const at = { clientX: box.x + box.width * (i % 20) / 20, clientY: box.y + box.height * Math.floor(i / 20) / 20 };
    place.dispatchEvent(new PointerEvent('pointermove', { ...at, bubbles: true }));
    return document.querySelector('.tip').textContent;
  });
}).join('\\n')"""
#: what no text on a page or a terminal may hold: controls, marks of direction,
#: separators of lines, surrogates
OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run for every text, and the studies beside them."""
    folder = tmp_path_factory.mktemp("hostile")
    write_run(folder / "bf16", seed=0)
    runs = [hostile_run(folder / str(place), text) for place, text in enumerate(TEXTS)]
    gaps = [[None if i == j else 0.01 * i for j in range(len(TEXTS))] for i in range(len(TEXTS))]
    study = {
        "patterns": TEXTS,
        "formats": TEXTS,
        "gap": gaps,
        "status": [[text] * len(TEXTS) for text in TEXTS],
    }
    write_json(folder / "sensitivity.json", study | {"operand": TEXTS[0], "rule": TEXTS[1]})
    return runs


@pytest.fixture(scope="module")
def page(runs):
    return report([runs[0].parent], out=runs[0].parent / "out")


def test_the_page_has_no_element_of_theirs(page):
    text = page.read_text(encoding="utf-8")
    elements = Page(text).elements
    tags = [tag for tag, _ in elements]
    assert tags.count("script") == 3
    assert "img" not in tags
    for _, attributes in elements:
        for name, value in attributes.items():
            if name != "data-row":
                assert not name.startswith("on"), name
                assert "javascript:" not in (value or "").lower(), name
    markup = text.split("<script>")[0]  # what is before the charts' code
    assert not OBEYED.search(markup), OBEYED.search(markup)
    assert "&lt;script&gt;window.broken=1" in markup


def test_nothing_of_theirs_is_an_expression(page):
    text = (
        page.read_text(encoding="utf-8").split('type="application/json">')[1].split("</script>")[0]
    )
    texts = set()
    for chart in json.loads(text)["charts"]:
        texts.update(expressions(chart["spec"]))
    assert 3 < len(texts) < 20
    assert [words for words in texts if not re.fullmatch(r"[\w .,()<>&|+*-]+", words)] == []
    assert not [words for words in texts if any(t[:12] in words for t in TEXTS)]


def test_figures_are_pictures_and_tables_are_tables(page):
    for path in (page.parent / "figures").iterdir():
        root = ElementTree.parse(path).getroot()
        assert not [node for node in root.iter() if node.tag.endswith(("script", "foreignObject"))]
    rows = len(TEXTS) + 1
    table = (page.parent / "table.md").read_text(encoding="utf-8")
    assert len(table.splitlines()) == rows + 2
    assert not re.search(r"(?<!\\)[<>`]|(?<!\\)\]\(", table)
    assert not OBEYED.search(table)
    with (page.parent / "results.csv").open(encoding="utf-8", newline="") as file:
        assert len(list(csv.reader(file))) == rows + 1


def test_a_terminal_is_told_nothing(runs, capsys):
    results = measured(runs)
    lines = to_text(
        results
    ).splitlines()  # a verdict that is too long goes on below, in rows without a name
    assert len([line for line in lines if not line.startswith("|  ")]) == len(runs) + 2
    print(to_text(results))
    bar = Bar(Console(width=200))
    for index, text in enumerate(TEXTS):
        bar.entries.append(Entry(text))
        bar.show(JobEvent(index, "failed", {"error": {"message": text}}))
    assert main(["verify", *map(str, runs)]) == 1
    assert main(["run", "\x1b[2J\u202e\ud800.yaml"]) == 2
    assert main(["report", "\x1b[2J", "--out", "x"]) == 2
    printed = "".join(capsys.readouterr())
    assert "window.broken" in printed
    assert not OBEYED.search(printed), OBEYED.search(printed)


@pytest.mark.browser
@pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium to open the page in")
def test_a_browser_runs_none_of_it_and_draws_every_chart(page, tmp_path):
    with Chromium(tmp_path / "profile") as browser:
        browser.screen(width=1280)
        browser.open(Path(page).resolve().as_uri())
        assert browser.evaluate(UNDRAWN) == []
        assert browser.evaluate("document.querySelectorAll('.vega-embed').length") > 20
        assert browser.evaluate("document.querySelectorAll('img, iframe, object').length") == 0
        assert browser.evaluate("document.querySelectorAll('[onerror], [onload]').length") == 0
        shown = browser.evaluate("document.body.innerText")
        assert "</script><script>window.broken=1" in shown
        assert "&lt;script&gt; &amp; &#60;b&#62;" in shown
        drawn = browser.evaluate(
            "[...document.querySelectorAll('svg text')].map((t) => t.textContent).join('\\n')"
        )
        assert "<script>" in drawn
        tooltips = browser.evaluate(TOOLTIPS)
        assert "%{x}" in tooltips
        assert "<script>" in tooltips
        browser.evaluate(
            "document.querySelectorAll('#loss button.key').forEach((key) => key.click())"
        )
        browser.wait("document.querySelectorAll('#chart-val-step .mark-line path').length === 0")
        assert browser.messages == []
        assert browser.evaluate("window.broken === undefined")
