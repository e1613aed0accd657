"""What the study found, in the sentence that README begins with."""

from _paired import in_figures
from _study import BASELINES, FOLDER, by_text, measured_against, read, short

from nanogpt_bench.report.results import Result

#: as the sentence calls the texts
TEXTS = ("the standard library's prose", "EU law")


def headline(rule: str = "E2M5 muon-stochastic") -> str:
    """Return what a rule gains over float32 AdamW and what float32 Muon has over it, on both texts of Q1."""
    file = read(FOLDER / "study_q2_muon_e2m5.json")
    below, above = ([r for _, rs in by_text(measured_against(file, name)) for r in rs] for name in BASELINES)
    own, fp32, muon = (next(r for r in below if short(r) == name) for name in (rule, *BASELINES))
    gains = [f"{found} ({text})" for found, text in zip(_differences(below, rule, -1), TEXTS, strict=True)]
    run, seeds = own.row.runs[0], min(len(r.row.runs) for r in below if short(r) == rule)
    return (
        f"`{own.row.rule}` in {own.row.format} takes {_bytes(own)} bytes a parameter, optimizer state included, and "
        f"ends {' and '.join(gains)} nats a byte below float32 AdamW in {_bytes(fp32)} bytes and "
        f"{' and '.join(_differences(above, rule, 1))} above float32 Muon in {_bytes(muon)}, each at the best rates of "
        f"its own search ({run.summary['parameters'] / 1e6:.2f} million parameters, {run.summary['steps']:,} steps, "
        f"{seeds} seeds, 95% intervals)"
    )


def _bytes(result: Result) -> str:
    return f"{result.bytes_per_parameter or 0:.3g}"


def _differences(results: list[Result], rule: str, sign: int) -> list[str]:
    return [in_figures(r.difference, sign) for r in results if short(r) == rule and r.difference]
