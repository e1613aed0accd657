"""E7M0 with nearest rounding: what was predicted of it, and what its records say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from nanogpt_bench.report import series
from nanogpt_bench.report.charts import Chart, axes, line_traces
from nanogpt_bench.report.failed import Predicted
from nanogpt_bench.report.failure_page import sentence
from nanogpt_bench.report.palette import Look
from nanogpt_bench.report.results import Row, reference_beside
from nanogpt_bench.report.section import Section, figures
from nanogpt_bench.runs.metrics import TRAIN_LOSS, UPDATE_LOST, ZERO_GRADIENT_ZONE

if TYPE_CHECKING:
    from nanogpt_bench.failures import Prediction

FIRST_STEPS = 60
PREDICTED_STEPS = 10
TITLES = {
    "plateau": "Plateau within 10 steps",
    "update_sparsity": "Update sparsity",
    "zero_gradient_zones": "Zero-gradient zones",
}
ANSWERS = {True: "confirmed", False: "refuted", None: "not judged"}
SHARES = (
    (UPDATE_LOST, "updates lost", 0),
    (ZERO_GRADIENT_ZONE, "in a zero-gradient zone", 1),
)


def e7m0_section(
    predicted: Sequence[Predicted], references: Sequence[Row], looks: Mapping[str, Look]
) -> Section | None:
    """The page of its own that E7M0 with nearest rounding gets; None when no row has it."""
    if not predicted:
        return None
    words = (
        "E7M0 has powers of two only. With neighbours at half and at twice its value, nearest rounding leaves a weight "
        "where it is until a step reaches a quarter of it inwards or half of it outwards. Three things were predicted "
        "of that."
    )
    pages = [_page(i, entry, references, looks) for i, entry in enumerate(predicted)]
    body = f'<p class="muted">{words}</p>' + "".join(body for body, _ in pages)
    return Section("e7m0", "E7M0 with nearest rounding", body, [chart for _, charts in pages for chart in charts])


def _page(
    place: int, entry: Predicted, references: Sequence[Row], looks: Mapping[str, Look]
) -> tuple[str, list[Chart]]:
    drawn = [_first_steps(place, entry, references, looks), _shares(place, entry)]
    charts = [chart for chart in drawn if chart is not None]
    answers = "".join(_answer(prediction) for prediction in entry.predictions)
    title = f"<h3>{escape(entry.label)} · {escape(entry.run.name)}</h3>"
    return f'{title}<div class="answers">{answers}</div>{figures(charts)}', charts


def _answer(prediction: Prediction) -> str:
    answer = ANSWERS[prediction.confirmed]
    return (
        f'<div class="answer {answer.replace(" ", "-")}"><b>{escape(TITLES.get(prediction.name, prediction.name))}</b>'
        f'<span class="badge">{answer}</span><p class="muted">Predicted: {escape(prediction.statement)}.</p>'
        f"<p>{escape(sentence(prediction.text))}</p></div>"
    )


def _first_steps(place: int, entry: Predicted, references: Sequence[Row], looks: Mapping[str, Look]) -> Chart | None:
    """The training loss of the first steps, as recorded, beside the reference's."""
    own = Row(entry.label, entry.run.rule, entry.run.format, (entry.run,))
    other = reference_beside(entry.run, references)
    lines = series.first_lines([own, *other], TRAIN_LOSS.name, FIRST_STEPS)
    if not lines:
        return None
    layout = axes("step", "nats per token")
    layout["shapes"] = [_limit(PREDICTED_STEPS)]
    traces = line_traces(lines, looks, marked=True)
    for trace in traces:
        del trace["meta"]
    caption = f"The first {FIRST_STEPS} steps, the reference in ink; dotted: step {PREDICTED_STEPS}."
    return Chart(f"e7m0-loss-{place}", "Training loss at first", caption, traces, layout, height=320)


def _limit(step: int) -> dict[str, Any]:
    line = {"color": "@muted", "width": 1.5, "dash": "dot"}
    return {"type": "line", "yref": "paper", "x0": step, "x1": step, "y0": 0, "y1": 1, "line": line}


def _shares(place: int, entry: Predicted) -> Chart | None:
    """The share of weights that lost their update, and of those in a zero-gradient zone, over the steps."""
    own = Row(entry.label, entry.run.rule, entry.run.format, (entry.run,))
    found = [(line, words, ink) for metric, words, ink in SHARES for line in series.lines([own], metric.name)]
    if not found:
        return None
    layout = axes("step", "share of weights")
    layout["yaxis"] |= {"range": [-0.02, 1.04], "tickformat": ".0%"}
    layout |= {"showlegend": True, "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}}
    traces = [_share_trace(line, words, ink) for line, words, ink in found]
    return Chart(
        f"e7m0-shares-{place}", "Updates lost, by step", "Of all quantised weights.", traces, layout, height=320
    )


def _share_trace(line: series.Line, words: str, ink: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(line.xs) <= FIRST_STEPS else "lines",
        "x": line.xs,
        "y": line.ys,
        "name": words,
        "line": {"color": f"@{ink}", "width": 2},
        "marker": {"color": f"@{ink}", "size": 5},
        "hovertemplate": f"{words}<br>step %{{x}}: %{{y:.1%}}<extra></extra>",
    }
