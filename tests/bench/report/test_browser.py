"""The page in a real browser.

Every chart drawn, the console silent, readable on both screens and in both themes.
"""

import json
import struct

import pytest
from chromium import EXECUTABLE, Chromium
from run_folders import write_alerts, write_comparison, write_metrics, write_run

from nanogpt_bench.report import report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium to open the page in"),
]
SCREENS = [(1280, False), (1280, True), (390, False), (390, True)]
NASTY = '</script><script>window.broken=1</script>"><img src=x onerror=alert(1)>&amp;'

#: what is drawn in any picture of a chart: a curve, a marker, a filled cell
DRAWN = """(place) =>
  place.querySelector('.mark-line path, .mark-symbol path, .mark-area path, .mark-rect path') !== null"""
#: charts without a drawn mark in them
UNDRAWN = f"""[...document.querySelectorAll('[id^="chart-"]')].filter((place) => !({DRAWN})(place)).map((p) => p.id)"""
#: what reaches past the right edge of the screen without a scroll bar of its own
TOO_WIDE = """[...document.querySelectorAll('main *')].filter((node) => !node.closest('.scroll, pre, svg, .bar-track')
  && node.getBoundingClientRect().right > innerWidth + 1).map((node) => node.tagName + '.' + node.className)"""
#: pairs of neighbouring axis labels that lie on each other, as "chart: label / label"
OVERLAPPING = """[...document.querySelectorAll('.vega-embed')].flatMap((place) => {
  const groups = [];
  const walk = (item) => {
    if (item.role === 'axis-label') groups.push(item.items.filter((text) => text.opacity !== 0 && text.text));
    (item.items || []).forEach(walk);
  };
  walk(place.view.scenegraph().root);
  return groups.flatMap((texts) => texts.slice(1).map((text, i) => [texts[i], text])
    .filter(([a, b]) => a.bounds.x1 < b.bounds.x2 && b.bounds.x1 < a.bounds.x2
      && a.bounds.y1 < b.bounds.y2 && b.bounds.y1 < a.bounds.y2)
    .map(([a, b]) => `${place.id}: ${a.text} / ${b.text}`));
})"""
#: texts too faint against the page to be read: contrast below 4.5 as WCAG counts it
FAINT = """(() => {
  const light = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((c) => c / 255)
      .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const page = light(getComputedStyle(document.body).backgroundColor);
  const contrast = (colour) => {
    const [a, b] = [light(colour), page].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  return [...document.querySelectorAll('main h1, main h2, main h3, main p, main td, main th, main summary, main a')]
    .filter((node) => contrast(getComputedStyle(node).color) < 4.5).map((node) => node.outerHTML.slice(0, 80));
})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report with every kind of chart.

    Nine rows, a sweep of learning rates, monitors, alerts and a failed run.
    """
    folder = tmp_path_factory.mktemp("report")
    runs = write_comparison(folder / "runs")
    write_metrics(runs[3], {"grad/cosine": lambda step: 0.97 - 0.0004 * step}, interval=20)
    write_metrics(runs[3], {"quant/kurtosis/residual": lambda step: 3.0 + step / 10}, interval=20)
    write_alerts(runs[3], ("kurtosis", 80), ("early_divergence", 120))
    for lr in (2e-3, 4e-3):
        write_run(
            folder / "runs" / f"lr{lr}",
            rule="stochastic",
            fmt="E4M3",
            final=2.1 + 20 * lr,
            seed=0,
            lr=lr,
        )
    nan = {"kind": "nan", "message": NASTY, "step": 150}
    write_run(folder / "runs" / "nasty", rule=NASTY, name=NASTY, status="failed", failure=nan)
    study = {
        "patterns": ["attn.qkv", "mlp.fc"],
        "formats": ["E4M3", "E7M0"],
        "gap": [[0.01, 0.4], [-0.02, None]],
    }
    (folder / "runs" / "sensitivity.json").write_text(json.dumps(study))
    return report([folder / "runs"], out=folder / "out")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture
def opened(page, browser):
    """A browser that shows the page on a wide screen."""
    browser.screen(width=1280)
    browser.open(page.resolve().as_uri())
    return browser


@pytest.mark.parametrize(("width", "dark"), SCREENS, ids=lambda value: str(value))
def test_every_chart_is_drawn_and_readable(page, browser, width, dark):
    browser.messages.clear()
    browser.screen(width=width, dark=dark)
    browser.open(page.resolve().as_uri())
    assert browser.messages == []
    for flaws in (UNDRAWN, TOO_WIDE, OVERLAPPING, FAINT):
        assert browser.evaluate(flaws) == [], flaws
    assert browser.evaluate("document.querySelectorAll('.vega-embed').length") > 13
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate("window.broken === undefined")
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(21, 24, 29)" if dark else "rgb(255, 255, 255)")
    assert struct.unpack(">I", browser.screenshot()[16:20])[0] == width


def test_the_charts_follow_a_change_of_theme(opened):
    ink = "getComputedStyle(document.querySelector('#chart-val-step .role-axis-label text')).fill"
    assert opened.evaluate(ink) == "rgb(26, 26, 26)"
    opened.screen(width=1280, dark=True)
    opened.wait(f"{ink} === 'rgb(240, 240, 240)'")


def test_a_row_is_hidden_everywhere_by_one_press(opened):
    shown = "document.querySelectorAll('#chart-val-step .mark-line path').length"
    old_rows = opened.evaluate(shown)
    opened.evaluate("document.querySelector('button.key[data-row=\"E4M3 nearest\"]').click()")
    opened.wait(f"{shown} < {old_rows}")
    pressed = "[...document.querySelectorAll('button.key[data-row=\"E4M3 nearest\"]')].map((k) => k.ariaPressed)"
    assert set(opened.evaluate(pressed)) == {"false"}


def test_a_failure_page_has_an_address(page, opened):
    opened.open(page.resolve().as_uri() + "#failure-0")
    assert opened.evaluate("document.getElementById('failure-0').open")
    plot = "document.querySelector('#failure-0 .vega-embed svg').getBoundingClientRect().width"
    assert opened.evaluate(plot) > 900


LABELS = """[...document.querySelectorAll('#chart-val-step .role-axis-label text')]
  .filter((text) => text.getAttribute('opacity') !== '0').map((text) => text.textContent).sort().join()"""


def test_a_drag_magnifies_and_two_presses_go_back(opened):
    old_labels = opened.evaluate(LABELS)
    opened.evaluate("document.getElementById('chart-val-step').scrollIntoView({block: 'center'})")
    box = opened.evaluate(
        "document.querySelector('#chart-val-step svg').getBoundingClientRect().toJSON()"
    )
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    for kind, shift in (("mousePressed", 0), ("mouseMoved", 40), ("mouseReleased", 80)):
        opened.mouse(kind, x + shift, y + shift)
    opened.wait(f"{LABELS} !== {json.dumps(old_labels)}")
    assert opened.evaluate("document.querySelector('.box').hidden")
    for clicks in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            opened.mouse(kind, x, y, clicks)
    opened.wait(f"{LABELS} === {json.dumps(old_labels)}")
    assert opened.messages == []


def test_a_page_evaluates_no_text(opened):
    """Vega's interpreter reads its expressions.

    The page's own policy lets nothing be compiled.
    """
    compiled = "(() => { try { return new Function('return 1')() } catch (e) { return e.name } })()"
    answer = opened.call("Runtime.evaluate", expression=compiled, allowUnsafeEvalBlockedByCSP=False)
    assert answer["result"]["value"] == "EvalError"
    assert opened.evaluate(UNDRAWN) == []


LONG = "x" * 200
#: cells whose text reaches over the next one
OVERFLOWING = """[...document.querySelectorAll('td, th')].filter((cell) => cell.scrollWidth > cell.clientWidth + 1)
  .map((cell) => cell.textContent.slice(0, 40))"""
#: losses of the results that are not on the screen, though nothing was scrolled
OUT_OF_SIGHT = """[...document.querySelectorAll('#results td:nth-child(2)')]
  .filter((cell) => cell.getBoundingClientRect().right > innerWidth).map((cell) => cell.textContent)"""


@pytest.fixture(scope="module")
def long_names(tmp_path_factory):
    """A report of runs whose names have no blank at which a line could be broken."""
    folder = tmp_path_factory.mktemp("long")
    write_comparison(folder / "runs")
    write_run(folder / "runs" / "long", rule=LONG, fmt="E4M3", final=2.2)
    nan = {"kind": "nan", "message": LONG, "step": 150}
    write_run(folder / "runs" / "failed", rule=LONG, name=LONG, status="failed", failure=nan)
    return report([folder / "runs"], out=folder / "out")


@pytest.mark.parametrize(("width", "dark"), SCREENS, ids=lambda value: str(value))
def test_a_long_name_leaves_the_figures_where_they_are(long_names, browser, width, dark):
    browser.screen(width=width, dark=dark)
    browser.open(long_names.resolve().as_uri())
    for flaws in (TOO_WIDE, OVERFLOWING, OUT_OF_SIGHT):
        assert browser.evaluate(flaws) == [], flaws
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    if width == 1280:
        sizes = "(({clientWidth, scrollWidth}) => [clientWidth, scrollWidth])"
        shown, needed = browser.evaluate(f"{sizes}(document.querySelector('#results .scroll'))")
        assert needed <= shown
    height = "document.querySelector('#results .clamp').clientHeight"
    cut = browser.evaluate(height)
    browser.evaluate("document.querySelector('#results .clamp').focus()")
    assert browser.evaluate(height) > cut
