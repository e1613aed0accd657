"""Tables of rows, and of what each layer pattern loses in each format (sensitivity.json), with mixtures from it."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from nanogpt_bench.config.metrics import OF_LABELS
from nanogpt_bench.evaluation.measurement import EMBEDDINGS, Row

FILE = "sensitivity.json"
#: parts that a budget is cut into; the bytes of a choice are rounded up to one
PARTS = 2000
#: a format's name, what it adds to the loss, and its bytes
Choice = tuple[str, float, float]


def rows_table(rows: Sequence[Row], gap: str = "gap to float") -> Table:
    """Return the table of a terminal, with the columns that rows have, and their gaps under this name."""
    labels = [metric for metric in OF_LABELS if any(row.of_labels for row in rows)]
    measured = rows[0].seconds is not None
    table = Table("format", "scales" if measured else "storage")
    beside = [metric.title for metric in labels] or ["perplexity", "bits/byte"]
    more = ["bytes/param", "quantised", "seconds"] if measured else ["quantised"]
    for name in ("loss" if measured else "val loss", gap, *beside, *more):
        table.add_column(name, justify="right")
    for row in rows:
        figures = [_cell(row.of_labels.get(metric.figure)) for metric in labels]
        figures = figures or [_cell(row.perplexity, ".2f"), _cell(row.bits_per_byte)]
        losses = _cell(row.val_loss) + _error(row.val_loss_se), _cell(row.gap, "+.4f") + _error(row.gap_se)
        size = [_cell(row.bytes_per_parameter, ".3f")] if measured else []
        time = [_cell(row.seconds, ".1f")] if measured else []
        where = row.scale if measured else row.storage
        table.add_row(row.format, where, *losses, *figures, *size, f"{row.quantized_parameters:,}", *time)
    return table


def _cell(value: float | None, spec: str = ".4f") -> str:
    return "-" if value is None else format(value, spec)


def _error(error: float | None) -> str:
    return "" if error is None else f" ± {error:.4f}"


def gaps_table(content: Mapping[str, Any]) -> str:
    """Return the gaps as a Markdown table, and below it the settings of the mixture with the lowest ones."""
    lines = [f"| quantised alone | {' | '.join(content['formats'])} |", "|---|" + "---:|" * len(content["formats"])]
    for pattern, gaps, ends in zip(content["patterns"], content["gap"], content["status"], strict=True):
        cells = [end or "-" if gap is None else f"{gap:+.3f}" for gap, end in zip(gaps, ends, strict=True)]
        lines.append(f"| {'all layers' if pattern == '*' else pattern} | {' | '.join(cells)} |")
    settings = shlex.join(_settings(content)) if content["operand"] == "weight" else ""
    return "\n".join(lines) + "\n" + (f"\nlowest gaps: {settings}\n" if settings else "")


def _settings(content: Mapping[str, Any]) -> list[str]:
    """The mixture of the lowest gaps as words of a command line, with the settings that the table had."""
    found, keys = mixture(content), content.get("keys", {})
    formats = {key: name for pattern, name in found.items() for key in keys.get(pattern, (pattern,))}
    if not formats:
        return []
    formats |= {pattern: value for pattern, value in content.get("given", {}).items() if pattern != EMBEDDINGS}
    values = [(pattern, value if isinstance(value, str) else json.dumps(value)) for pattern, value in formats.items()]
    tied = ["--model.tied", content["tied"]] if content.get("tied") else []
    return [*(word for pattern, value in values for word in (f"--model.formats.{pattern}", value)), *tied]


def mixture(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the format of the lowest gap by layer pattern.

    Without single blocks, all layers at once, and embeddings, which no setting of a run rounds.
    """
    left_out = ("*", EMBEDDINGS)
    patterns = [name for name in content["patterns"] if name not in left_out and not name.startswith("blocks.")]
    rows = dict(zip(content["patterns"], content["gap"], strict=True))
    known = {
        pattern: [(gap, name) for gap, name in zip(rows[pattern], content["formats"], strict=True) if gap is not None]
        for pattern in patterns
    }
    return {pattern: min(cells)[1] for pattern, cells in known.items() if cells}


def best_mixture(choices: Mapping[str, Sequence[Choice]], budget: float) -> dict[str, str] | None:
    """Return the format of every pattern whose gaps add up to the least among those that fit into `budget` bytes.

    None where the smallest of all takes more. That gaps add up holds where each is small. By dynamic programming over
    the bytes.

    >>> best_mixture({"attn": [("E4M3", 0.2, 1), ("none", 0.0, 4)], "mlp": [("E4M3", 0.1, 1), ("none", 0.0, 4)]}, 5)
    {'attn': 'none', 'mlp': 'E4M3'}
    """
    spare = budget - sum(min(size for _, _, size in each) for each in choices.values())
    if spare < 0:
        return None
    best: dict[int, tuple[float, dict[str, str]]] = {0: (0.0, {})}
    for pattern, each in choices.items():
        least, following = min(size for _, _, size in each), dict[int, tuple[float, dict[str, str]]]()
        for used, (loss, chosen) in best.items():
            for name, gap, size in each:
                more = (
                    math.ceil((size - least) * PARTS / spare) if size > least and spare else (size > least) * 2 * PARTS
                )
                if used + more <= PARTS and loss + gap < following.get(used + more, (math.inf, {}))[0]:
                    following[used + more] = (loss + gap, {**chosen, pattern: name})
        best = following
    return min(best.values(), key=lambda found: found[0])[1]
