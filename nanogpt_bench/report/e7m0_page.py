"""E7M0 with nearest rounding: what was predicted of it, and what its records say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from nanogpt_bench.config.metrics import TRAIN_LOSS, UPDATE_LOST, ZERO_GRADIENT_ZONE
from nanogpt_bench.report.chart import Chart, Look, ink, limit_line, lines, quantity
from nanogpt_bench.report.curve_charts import first_lines, lines_of
from nanogpt_bench.report.failed import Predicted
from nanogpt_bench.report.failure_page import sentence
from nanogpt_bench.report.markup import Section, chart_places
from nanogpt_bench.report.rows import Row, loss_unit, reference_beside

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
    return f'{title}<div class="answers">{answers}</div>{chart_places(charts)}', charts


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
    drawn = first_lines([own, *other], TRAIN_LOSS.name, FIRST_STEPS)
    if not drawn:
        return None
    x, y = quantity("x", "step"), quantity("y", loss_unit([own]))
    spec = lines(drawn, looks, x, y)
    spec["layer"].append(limit_line(PREDICTED_STEPS, x=x))
    caption = f"The first {FIRST_STEPS} steps, the reference in ink; dotted: step {PREDICTED_STEPS}."
    return Chart(f"e7m0-loss-{place}", "Training loss at first", caption, spec)


def _shares(place: int, entry: Predicted) -> Chart | None:
    """The share of weights that lost their update, and of those in a zero-gradient zone, over the steps."""
    own = Row(entry.label, entry.run.rule, entry.run.format, (entry.run,))
    found = [(line, words) for metric, words, _ in SHARES for line in lines_of([own], metric.name)]
    if not found:
        return None
    values = [{"name": words, "x": line.xs, "y": line.ys} for line, words in found]
    y = quantity("y", "share of weights", (-0.02, 1.04), format=".0%")
    places = {"x": quantity("x", "step"), "y": y}
    scale = {"domain": [words for _, words, _ in SHARES], "range": [ink(colour) for *_, colour in SHARES]}
    colour = {"field": "name", "type": "nominal", "scale": scale, "legend": {"orient": "top", "title": None}}
    spec = {
        "data": {"values": values},
        "transform": [{"flatten": ["x", "y"]}],
        "layer": [{"mark": {"type": "line", "point": {"size": 22}}, "encoding": places | {"color": colour}}],
    }
    return Chart(f"e7m0-shares-{place}", "Updates lost, by step", "Of all quantised weights.", spec)
