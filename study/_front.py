"""Tables of optimizers on one-byte weights, each against the same optimizer in float32,
from the study's results files.

``python study/make.py --front`` prints README's table and the optimizers page's;
without it the results page's is made.
"""

from collections.abc import Sequence
from pathlib import Path

from _claims import claims_table
from _compared import short
from _markdown import markdown
from _paired import in_figures
from _study import against_baseline

#: of each line: the results files (one for all texts, or one per text), the rule, its
#: title, and its float32 baseline
LINES = (
    ("study_q16_adamw", "fp32", "AdamW, float32", "fp32"),
    ("study_q16_adamw", "bf16-pure", "AdamW, bfloat16", "fp32"),
    ("study_q16_adamw", "bf16-stochastic", "AdamW, bfloat16, stochastic", "fp32"),
    ("study_q16_adamw", "E4M3 stochastic-8bit", "AdamW, E4M3", "fp32"),
    ("study_q16_adamw", "E4M3 nearest", "AdamW, E4M3, nearest", "fp32"),
    ("study_q16_adamw", "muon", "Muon, float32", "muon"),
    ("study_q16_adamw", "E2M5 muon-stochastic", "Muon, E2M5", "muon"),
    ("study_q16_adamw", "E4M3 muon-stochastic", "Muon, E4M3", "muon"),
)
E4M3_MUON = ("study_q11_e4m3 study_q11_e4m3_law", "E4M3 muon-stochastic draws=independent")
E2M5_MUON = ("study_q11_e2m5 study_q11_law", "E2M5 muon-stochastic draws=independent")
#: all rules at rates of the first search
OTHERS = (
    ("study_q1", "bf16-mixed", "AdamW, bfloat16 autocast", "fp32"),
    ("study_q1", "E4M3 master", "AdamW, E4M3, float32 copy", "fp32"),
    ("study_q1", "E4M3 stochastic-8bit", 'AdamW, E4M3, `moments="8bit"`', "fp32"),
    ("study_q1", "E4M3 stochastic", "AdamW, E4M3, float32 moments", "fp32"),
    ("study_q1", "E4M3 residual8", "AdamW, E4M3, `residual8`", "fp32"),
    ("study_q1", "E4M3 stiffness-anneal", "AdamW, E4M3, `stiffness` from 1 to 0", "fp32"),
    ("study_q1", "E4M3 riemannian", "`RiemannianAdam`, E4M3, against AdamW", "fp32"),
    ("study_q1", "E4M3 nearest", "AdamW, E4M3, `nearest`", "fp32"),
    (*E4M3_MUON, 'Muon, E4M3, `moments="8bit"`', "muon"),
    ("study_q1", "E4M3 muon-residual8", "Muon, E4M3, `residual8`", "muon"),
    (*E2M5_MUON, 'Muon, E2M5, `moments="8bit"`', "muon"),
)
#: those on the page on optimizers
MORE = OTHERS[2:]
HEADER = (
    "training",
    "bytes per parameter",
    "loss minus the same optimizer's in float32, STDLIB",
    "the same, EULAW",
)


def front_table(lines: Sequence[tuple[str, str, str, str]] = LINES) -> str:
    """Bytes per parameter, and differences of final losses on two texts with half of
    their 95% intervals.
    """
    return markdown(HEADER, [_line(*line) for line in lines])


def _line(stems: str, rule: str, name: str, baseline: str) -> list[str]:
    own = [
        next(r for r in results if short(r) == rule)
        for _, results in against_baseline(stems, baseline)
    ]
    losses = ["0" if r.reference or r.difference is None else in_figures(r.difference) for r in own]
    return [
        name,
        f"{own[0].bytes_per_parameter:.2f}",
        *(loss.replace(" ", "\N{NO-BREAK SPACE}") for loss in losses),
    ]


def found_table(lines: Sequence[tuple[str, str, str, str]] = LINES) -> str:
    """The results page's table: differences to the same optimizer in float32 and to
    float32 AdamW.
    """
    against = [
        [_line(stems, rule, name, by) for by in (own, "fp32")] for stems, rule, name, own in lines
    ]
    header = (
        "training",
        "bytes",
        "minus itself in float32, STDLIB",
        "EULAW",
        "minus float32 AdamW, STDLIB",
        "EULAW",
    )
    return markdown(header, [[*own, *adamw[2:]] for own, adamw in against])


def write_front(folder: Path) -> None:
    """Write the tables of the results page, and that of Q16."""
    (folder / "study-found.md").write_text(found_table(), encoding="utf-8")
    (folder / "study-others.md").write_text(found_table(OTHERS), encoding="utf-8")
    (folder / "study-claims.md").write_text(claims_table(LINES), encoding="utf-8")
