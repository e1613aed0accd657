"""The tables and figures of fine-tuning rules against each other, from the files in `measured/finetune` alone."""

from collections.abc import Callable, Sequence
from pathlib import Path

from _looks import STYLE
from _study import forest, measured_against, source
from _tables import markdown
from matplotlib import pyplot as plt

from nanogpt_bench.report.exported import Exported, read_export
from nanogpt_bench.report.paired import Difference, in_words
from nanogpt_bench.report.results import Result
from nanogpt_bench.report.tables import format_figure

FOLDER = Path(__file__).parent / "measured" / "finetune"
BASELINE = "fp32"


def tables(file: Exported) -> str:
    """What float32 came from and to; then a line a rule, a column a format, on the new text and on the old one."""
    results = measured_against(file, BASELINE)
    (exact,) = (result for result in results if result.reference)
    before = [loss for run in exact.row.runs if (loss := run.number("first_val_loss")) is not None]
    lines = [
        f"`{BASELINE}`: from {sum(before) / len(before):.3f} to {format_figure(exact.final_val_loss)} on the new text, "
        f"means over {len(exact.row.runs)} seeds.",
        "Loss on the new text less that of `fp32`:",
        _grid(results, lambda result: result.difference),
        "Loss on the old text less that of `fp32`, what is forgotten beyond what that forgets:",
        _grid(results, lambda result: result.also_difference),
        source(file),
    ]
    return "\n\n".join(lines)


def _grid(results: Sequence[Result], of: Callable[[Result], Difference | None]) -> str:
    others = [result for result in results if not result.reference]
    formats = list(dict.fromkeys(result.row.format for result in others))
    found = {(result.row.rule, result.row.format): result for result in others}
    rows = []
    for rule in dict.fromkeys(result.row.rule for result in others):
        each = [found.get((rule, fmt)) for fmt in formats]
        held = next(result.bytes_per_parameter for result in each if result is not None)
        cells = ("-" if result is None else in_words(of(result)) for result in each)
        rows.append([f"`{rule}`", "-" if held is None else f"{held:.2f}", *cells])
    return markdown(("rule", "bytes a parameter", *formats), rows)


def write_finetune(folder: Path, files: Path = FOLDER) -> None:
    """Write the tables and the figure of every results file into the folder."""
    for path in sorted(files.glob("*.json")):
        file = read_export(path)
        (folder / f"finetune-{path.stem}.md").write_text(tables(file), encoding="utf-8")
        with plt.rc_context(STYLE):
            drawn = forest(file, BASELINE)
            drawn.savefig(folder / f"finetune-{path.stem}.svg", metadata={"Date": None})
            plt.close(drawn)
