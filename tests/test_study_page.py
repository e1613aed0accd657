"""The study's pages show every results file, and what is drawn from one is what its runs say."""

import hashlib
import json
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from scipy.stats import spearmanr

from nanogpt_bench.report.results import Difference
from nanogpt_bench.report.results_file import read_export
from nanogpt_bench.report.rows import find_reference, setting_of
from nanogpt_bench.runs.load import Run
from nanogpt_bench.runs.read import Records
from nanogpt_bench.sweep.plan import baseline_of

ROOT = Path(__file__).parent.parent

OF_EVERY_FILE = ("-weights.md", "-monitors.md", "-failures.md")

PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "study").glob("*.md"))}
#: of what was announced up to 2026-11-24, at the start of its page
ANNOUNCED, CHARACTERS = "252ff7c1e281d3de6eb6b13c5c193d7ce131a4e98593f1f04df209ce78ff0e31", 20_627

STUDY = sorted((ROOT / "study" / "results").glob("*.json"))
SWEEPS = sorted(path.name for path in (ROOT / "study" / "sweeps").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What draws the study's pages can be imported."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.syspath_prepend(ROOT / "study")


@pytest.mark.parametrize("path", STUDY, ids=lambda path: path.stem)
def test_the_study_shows_every_results_file_that_has_runs(path: Path) -> None:
    page = "\n".join(PAGES.values())
    drawn_with = import_module("_study").BESIDE.values()
    shown = page.count(f"<!-- table: {path.stem} -->\n")
    shown += any(path.stem in names for names in drawn_with)
    assert shown == has_runs(path)


def has_runs(path: Path) -> bool:
    """Whether a results file has more than searches."""
    return path.exists() and bool(rows_of(path))


def entries_of(path: Path) -> list[dict[str, Any]]:
    """The entries of a results file."""
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def rows_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The runs of a results file by the label of their row."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for run in (entry for entry in entries_of(path) if entry["kind"] == "run"):
        rows.setdefault(run["label"], []).append(run)
    return rows


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_planned_sweep_has_results_or_is_listed_with_its_command(sweep: str) -> None:
    page = PAGES["study-protocol"]
    left_out = page[page.index("## What did not fit") : page.index("## A row made again")]
    path = ROOT / "study" / "results" / f"{Path(sweep).stem}.json"
    assert (sweep in left_out) != has_runs(path)


def test_what_was_announced_is_frozen() -> None:
    """Amendments keep their words, though not the folder of what they lead to; newer ones come after them."""
    text = PAGES["study-amendments"].replace("](../docs/", "](")
    entries = text.partition("<!-- frozen -->\n\n")[2][:CHARACTERS]
    assert hashlib.sha256(entries.encode()).hexdigest() == ANNOUNCED


def test_the_first_tables_are_drawn_from_the_results() -> None:
    front = import_module("_front")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert front.front_table() in readme
    assert front.front_table(front.MORE) in (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")
    table = readme[readme.index("| training |") :].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == 6
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    assert [cell[0].split(",")[0] for cell in cells] == ["AdamW"] * 3 + ["Muon"] * 3
    assert [cell[2:] for cell in cells if cell[0].endswith(", float32")] == [["0", "0", "1.0"]] * 2


def test_the_first_table_is_what_the_runs_say() -> None:
    """One difference anew from the file; and rows whose runs were made on two machines bear a mark and no time."""
    table = import_module("_front").front_table()
    found = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in table.splitlines()
    }
    every = rows_of(ROOT / "study" / "results" / "study_q1.json")
    rows = {label: {run["seed"]: run for run in runs} for label, runs in every.items()}
    own, exact = (rows[f"{rule} dir=data/stdlib"] for rule in ("E4M3 stochastic-8bit", "fp32"))
    apart = [run["final_val_loss"] - exact[seed]["final_val_loss"] for seed, run in own.items()]
    size, loss, _, time = found["AdamW, E4M3"]
    assert size == f"{own[42]['bytes_per_parameter']:.2f}"
    assert loss.startswith(f"{sum(apart) / len(apart):.3f}\N{NO-BREAK SPACE}±")
    assert float(time) > 0
    on = [
        {
            entry["environment.platform"]
            for entry in entries_of(ROOT / "study" / "results" / f"{stem}.json")
            if entry["kind"] == "run"
        }
        for stem in ("study_q12_e2m5", "study_q11_muon")
    ]
    apart = on[0] != on[1]
    assert ("†" in found["Muon, E2M5"][1], found["Muon, E2M5"][3] == "-") == (apart, apart)


def test_the_first_picture_shows_what_the_study_found() -> None:
    frontier = import_module("_frontier")
    found = frontier.points()
    for path in (frontier.PICTURE, frontier.NARROW):
        with Image.open(path) as picture:
            assert json.loads(picture.info["Description"]) == found
        assert f"docs/_static/{path.name}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_lengths_courses_and_what_is_brought_back_are_drawn_from_a_file(tmp_path: Path) -> None:
    """Q1's runs on one text, once as they are and once as if each rule had been trained for two lengths."""
    every = rows_of(ROOT / "study" / "results" / "study_q1.json")
    rows = {label: runs for label, runs in every.items() if label.endswith(" dir=data/stdlib")}
    of_steps = {steps: [as_trained_for(run, steps) for runs in rows.values() for run in runs] for steps in (250, 1000)}
    for name, shown in {"one": of_steps[250], "two": [*of_steps[250], *of_steps[1000]]}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(measured_against(shown[0]["label"], shown)), encoding="utf-8")
    import_module("_study").write_study(tmp_path, tmp_path)
    found = {path.name for path in tmp_path.glob("*.*")} - {"one.json", "two.json"}
    ends = {"one": ("-recovered.md", "-along.md", "-along.svg", "-clock.md"), "two": ("-length.md", "-length.svg")}
    assert found == {name + end for name in ends for end in (".md", ".svg", *ends[name], *OF_EVERY_FILE)}
    lengths = (tmp_path / "two-length.md").read_text(encoding="utf-8").splitlines()
    assert [cell.strip() for cell in lengths[0].split("|")][1:-1] == ["rule", "250 steps", "1,000 steps"]
    assert len(lengths) == 2 + len(rows) - 1
    losses = {label.split()[-2]: {run["seed"]: run["final_val_loss"] for run in runs} for label, runs in rows.items()}
    lost, own, exact = (losses[rule] for rule in ("nearest", "stochastic", "fp32"))
    shares = [(lost[seed] - own[seed]) / (lost[seed] - exact[seed]) for seed in own]
    brought = (tmp_path / "one-recovered.md").read_text(encoding="utf-8")
    assert f"| `E4M3 stochastic max_steps=250` | {sum(shares) / len(shares):.0%} [" in brought
    along = (tmp_path / "one-along.md").read_text(encoding="utf-8")
    for baseline in ("fp32", "muon"):
        apart = [loss - losses[baseline][seed] for seed, loss in lost.items() if seed in losses[baseline]]
        (line,) = re.findall(rf"`{baseline}`, [^`]*?\n\n(?:\|.*\n)*?\| `E4M3 nearest \S+` (\|.*\|)\n", along)
        assert f"{sum(apart) / len(apart):+.3f} [" in line.split("|")[-2]


def test_what_is_reached_in_the_time_of_another_is_between_two_validations() -> None:
    """One rule as fast as its baseline, and the same at half the pace: at the end it is where the first was midway."""
    clock = import_module("_clock")
    curve = [(0, 5.0, 0.0), (100, 3.0, 10.0), (200, 2.0, 20.0)]

    def trained(seed: int, pace: float, lower: float = 0.0) -> Run:
        records = [
            {"step": step, "val/loss": loss + 0.1 * seed - lower, "time/elapsed_s": at * pace}
            for step, loss, at in curve
        ]
        return Run(Path(f"run-{seed}"), {"seed": seed}, {}, Records(records), {})

    fast, slow, better = ([trained(seed, *how) for seed in (1, 2, 3)] for how in ((1.0,), (2.0,), (2.0, 1.5)))
    assert clock.line(fast, fast) == ("20", "-", "after 100% of its time")
    seconds, apart, reached = clock.line(slow, fast)
    assert (seconds, apart.split()[0], reached) == ("40", "+1.000", "after 200% of its time")
    assert clock.line(better, fast) == ("40", "-0.500 [-0.500, -0.500]", "before 100% of its time")
    assert clock.line(fast, better)[2] == "not"
    # seconds a step that were measured apart stand in place of the runs' own
    assert clock.line(slow, fast, 0.1, 0.1)[::2] == clock.line(fast, fast)[::2]
    assert clock.line(fast, fast, 0.2, 0.1)[::2] == ("40", "after 200% of its time")
    rows = json.loads((ROOT / "docs" / "measured" / "study_steps.json").read_text(encoding="utf-8"))["rows"]
    assert clock.paces_of("study_q14_size")["fp32"] == rows[0][2] / 1e3
    assert clock.paces_of("study_q1") == {}


def test_logarithms_of_weights_are_told_where_runs_looked_at_them(tmp_path: Path) -> None:
    """Q1's runs did not: two figures that they have stand for these."""
    text = (ROOT / "study" / "results" / "study_q1.json").read_text(encoding="utf-8")
    told = import_module("_weights").logarithms_table
    (tmp_path / "before.json").write_text(text, encoding="utf-8")
    assert told(read_export(tmp_path / "before.json")) is None
    for name, stands_in in (("log2_std", "amax_over_std"), ("log2_skewness", "kurtosis")):
        text = text.replace(f'"look.quant/{stands_in}/weight"', f'"look.quant/{name}/weight"')
    (tmp_path / "after.json").write_text(text, encoding="utf-8")
    after = read_export(tmp_path / "after.json")
    row = next(row for row in after.rows if row.label == "E4M3 riemannian dir=data/stdlib")
    ends = [run.looks[2000] for run in row.runs]
    std, skewness = (sum(end[f"quant/log2_{name}/weight"] for end in ends) / 5 for name in ("std", "skewness"))
    (line,) = (line for line in told(after).splitlines() if "E4M3 riemannian" in line)
    assert line.split("|")[3].strip() == f"{std:.2f}, {skewness:+.2f}"


def test_a_look_that_came_later_is_not_told_as_that_of_a_tenth() -> None:
    """Runs of 1,000 steps that look every 200 have none within their first 100."""
    told = import_module("_weights").kurtosis_table(read_export(STUDY[0].with_stem("study_q4"))).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[2:4]] for line in told[2:]]
    assert {tenth for tenth, _ in cells} == {"-"}
    assert "-" not in {end for _, end in cells}
    told = import_module("_weights").kurtosis_table(read_export(STUDY[0].with_stem("study_q1")))
    assert "| - |" not in told


def test_classes_of_failure_and_what_k_is_worth_are_told_format_by_format() -> None:
    path = STUDY[0].with_stem("study_q4")
    rows = rows_of(path)
    file = read_export(path)
    nearest = rows["E7M0 nearest"]
    arrived = sum(run["arrived"] for run in nearest) / len(nearest)
    stalled = sum("stall" in run["failures"] for run in nearest)
    failures = import_module("_failures").failures_table(file).splitlines()
    assert f"| `E7M0 nearest` | {arrived:.1%} | stall {stalled} |" in failures
    worth = import_module("_stiffness").stiffness_table(file)
    for fmt in ("E4M3", "E1M6"):
        annealed, plain = (
            {run["seed"]: run["final_val_loss"] for run in rows[f"{fmt} {rule}"]}
            for rule in ("stiffness-anneal", "stochastic")
        )
        apart = [loss - plain[seed] for seed, loss in annealed.items()]
        assert f"| `{fmt}` | {sum(apart) / len(apart):+.3f} [" in worth


def test_what_spacing_costs_is_told_with_the_mean_ulp_of_the_runs() -> None:
    spacing = import_module("_spacing")
    path = STUDY[0].with_stem("study_q2_muon_formats")
    rows = rows_of(path)
    exact = {run["seed"]: run["final_val_loss"] for run in rows["muon"]}
    pairs = {}
    for label, runs in rows.items():
        if label != "muon":
            ulps = [run[f"look.{spacing.MEAN_ULP}"][run["look.step"].index(1000)] for run in runs]
            apart = [run["final_val_loss"] - exact[run["seed"]] for run in runs]
            pairs[label.split()[0]] = (sum(ulps) / len(ulps), sum(apart) / len(apart))
    told = spacing.spacing_table(spacing.spaced(read_export(path)))
    for fmt, (ulp, apart) in pairs.items():
        assert f"| `{fmt}` | {ulp:.4f} | {apart:.3f} ± " in told
    assert f"rank correlation {spearmanr(list(pairs.values())).statistic:+.2f}, power " in told
    assert spacing.spaced(read_export(path.with_stem("study_q4"))) == []  # three rules


FINETUNED = sorted((ROOT / "docs" / "measured" / "finetune").glob("*.json"))


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what is drawn from the files of fine-tuning."""
    folder = tmp_path_factory.mktemp("finetuned")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(ROOT / "docs")
        import_module("_finetune").write_finetune(folder)
    return folder


def test_what_is_drawn_of_fine_tuning_stands_on_its_page_once(finetuned: Path) -> None:
    page = (ROOT / "docs" / "finetune.md").read_text(encoding="utf-8")
    assert {path.name for path in finetuned.iterdir()} >= {"finetune-small.md", "finetune-small.svg"}
    for path in finetuned.iterdir():
        assert path.stat().st_size > 300
        shown = f"(figures/{path.name})\n" if path.suffix == ".svg" else f"<!-- table: {path.stem} -->\n"
        assert page.count(shown) == 1


def test_rows_of_other_rates_are_told_with_both_texts(finetuned: Path) -> None:
    """Each line's mean loss, and its paired difference, made anew from the runs."""
    files = sorted((path for path in FINETUNED if path.stem.startswith("card")), key=lambda path: path.stem)
    rows = [runs for path in files for runs in rows_of(path).values()]
    told = (finetuned / "finetune-card.md").read_text(encoding="utf-8").splitlines()[2:]
    assert len(rows) == 3
    for row, line in zip(rows, told, strict=False):
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        for key, place in (("final_val_loss", 4), ("also_loss", 6)):
            own, exact = ({run["seed"]: run[key] for run in of} for of in (row, rows[0]))
            assert cells[place].startswith(f"{sum(own.values()) / len(own):.3f}")
            apart = [own[seed] - exact[seed] for seed in own]
            assert cells[place + 1].startswith("" if row is rows[0] else f"{sum(apart) / len(apart):+.3f}")
        name = row[0]["rule"] if row[0]["format"] == "none" else f"{row[0]['format']} {row[0]['rule']}"
        assert cells[:1] + cells[3:4] == [f"`{name}`", str(len(row))]


@pytest.mark.parametrize("path", [p for p in FINETUNED if "card" not in p.stem], ids=lambda path: path.stem)
def test_fine_tuned_rules_are_told_format_by_format(path: Path, finetuned: Path) -> None:
    """Of every file one cell for each text is made anew from the runs."""
    rows = rows_of(path)
    told = (finetuned / f"finetune-{path.stem.split('-')[0]}.md").read_text(encoding="utf-8").splitlines()
    header, line = (next(line for line in told if line.startswith(start)) for start in ("| rule", "| `nearest`"))
    rate = read_export(path).rows[0].runs[0].config["optimizer"]["lr"]
    for text, key in (("new", "final_val_loss"), ("old", "also_loss")):
        own, exact = ({run["seed"]: run[key] for run in rows[label]} for label in ("E4M3 nearest", "fp32"))
        apart = [own[seed] - exact[seed] for seed in own.keys() & exact.keys()]
        place = [cell.strip() for cell in header.split("|")].index(f"{text}, {rate:.0e}".replace("e-0", "e-"))
        assert line.split("|")[place].strip().startswith(f"{sum(apart) / len(apart):+.3f}")


def test_what_is_brought_back_is_told_text_by_text() -> None:
    path = ROOT / "study" / "results" / "study_q1.json"
    losses = {
        tuple(label.split()[-2:]): {run["seed"]: run["final_val_loss"] for run in runs}
        for label, runs in rows_of(path).items()
    }
    lines = import_module("_recovered").recovered(read_export(path)).splitlines()
    (line,) = [line for line in lines if line.startswith("| `E4M3 stochastic`")]
    for text, cell in zip(("stdlib", "eurlex"), line.split(" | ")[1:], strict=True):
        lost, own, exact = (losses[rule, f"dir=data/{text}"] for rule in ("nearest", "stochastic", "fp32"))
        seeds = lost.keys() & own.keys() & exact.keys()
        shares = [(lost[seed] - own[seed]) / (lost[seed] - exact[seed]) for seed in seeds]
        assert cell.startswith(f"{sum(shares) / len(shares):.0%} [")


def test_what_monitors_foretell_is_taken_from_the_runs() -> None:
    """The rank correlation of one figure with the gaps to float32 AdamW, by scipy from the results files themselves."""
    # The second's own reference is Muon.
    paths = [STUDY[0].with_stem(stem) for stem in ("study_q1", "study_q2_muon_spacing")]
    pairs: dict[tuple[str, ...], tuple[float, float]] = {}
    for path in paths:
        runs = {(*label.split(), run["seed"]): run for label, of_row in rows_of(path).items() for run in of_row}
        pairs |= {
            of: (
                run["look.quant/amax/residual"][run["look.step"].index(200)],
                run["final_val_loss"] - runs["fp32", *of[-2:]]["final_val_loss"],
            )
            for of, run in runs.items()
            if of[0] != "fp32"
        }
    monitors = import_module("_monitors").monitors(*map(read_export, paths))
    (line,) = [line for line in monitors.splitlines() if "`quant/amax/residual`" in line]
    cells, alone = line.split(" | "), [pair for of, pair in pairs.items() if not of[-3].startswith("muon")]
    assert cells[1] == str(len(alone))
    assert cells[2].startswith(f"{spearmanr(alone).statistic:+.2f} [")
    assert cells[4].startswith(f"{spearmanr(list(pairs.values())).statistic:+.2f} [")


def test_a_setting_that_two_files_hold_is_one_draw() -> None:
    """Q2 has three of Q1's five runs, under a label of its own."""
    files = [read_export(STUDY[0].with_stem(stem)) for stem in ("study_q1", "study_q2")]
    found, early_points = {}, import_module("_predictors").early_points
    for file in files:
        found |= early_points(file.rows, find_reference(file.rows, baseline_of("fp32", file.rows)))
    labels = {"E4M3 stochastic dir=data/stdlib", "E4M3 stochastic max_steps=2000"}
    rows = [row for file in files for row in file.rows if row.label in labels]
    (setting,) = {setting_of(run) for row in rows for run in row.runs}
    assert [len(row.runs) for row in rows] == [5, 3]
    assert sum(point.of == setting for point in found.values()) == 5


def test_a_gap_appears_where_an_interval_first_leaves_0_out() -> None:
    _ladders = import_module("_ladders")

    def rung(low: float, high: float) -> SimpleNamespace:
        return SimpleNamespace(difference=Difference((low + high) / 2, 3, low, high))

    rungs = {400: rung(0.01, 0.03), 100: rung(-0.02, 0.02), 200: rung(-0.01, 0.03), 800: rung(-0.01, 0.1)}
    assert _ladders.appearance(rungs) == 400
    assert _ladders.appearance({100: rungs[100]}) is None
    assert _ladders.appearance({100: SimpleNamespace(difference=Difference(0.5, 1)), 400: rungs[400]}) == 400
    assert _ladders.appearance({50: rung(-0.03, -0.01), **rungs}) == 50


def as_trained_for(run: dict[str, Any], steps: int) -> dict[str, Any]:
    """A run of a results file as if it had been of so many steps."""
    label = run["label"].replace("dir=data/stdlib", f"max_steps={steps}")
    return run | {"label": label, "steps": steps, "steps_planned": steps, "config.train.max_steps": steps}


def measured_against(baseline: str | None, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run | {"reference": run["label"] == baseline} for run in runs]


def test_a_map_and_a_search_for_limits_are_drawn_from_a_file(tmp_path: Path) -> None:
    """Q1's runs of two rules, told as those of two layer patterns in two formats, and as those of four rates."""
    path = ROOT / "study" / "results" / "study_q1.json"
    searches = [entry for entry in entries_of(path) if entry["kind"] == "search"]
    fp32, nearest, own = (
        rows_of(path)[f"{label} dir=data/stdlib"] for label in ("fp32", "E4M3 nearest", "E4M3 stochastic")
    )
    places = {("attn.qkv", "E4M3"): nearest, ("*", "E4M3"): own, ("attn.qkv", "E7M0"): own, ("*", "E7M0"): nearest}
    cells = [
        {
            **run,
            "label": f"{fmt} {pattern}",
            "rule": "stochastic",
            "format": fmt,
            "config.model.formats": {pattern: fmt},
        }
        for (pattern, fmt), runs in places.items()
        for run in runs
    ]
    found = written_study(tmp_path, [*measured_against(fp32[0]["label"], [*fp32, *cells]), *searches])
    gaps = [
        sum(run["final_val_loss"] - base["final_val_loss"] for run, base in zip(runs, fp32, strict=True))
        for runs in (nearest, own)
    ]
    drawn = (found / "file.svg").read_text(encoding="utf-8").replace("\u2212", "-")
    assert all(word in drawn for word in ("all layers", "E7M0", *(f"{gap / 5:+.3f}" for gap in gaps)))
    assert "`geometry/warp_slope` | 20 |" in (found / "file.md").read_text(encoding="utf-8")

    unstable = [{**run, "final_val_loss": 9.0} for run in own]
    rates = {0.001: own, 0.01: nearest, 0.1: unstable}
    cells = [
        {**run, "label": f"E4M3 stochastic lr={rate:g}", "rule": "stochastic", "config.optimizer.lr": rate}
        for rate, runs in rates.items()
        for run in runs
    ]
    found = written_study(tmp_path, [*measured_against(None, cells), *searches])
    (line,) = re.findall(r"^\| `E4M3 stochastic` .*$", (found / "file.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert (
        line == f"| `E4M3 stochastic` | {'; '.join(['0.01 to 0.1'] * 5)} | 0.004 | 2.5 | {'; '.join(['0.001'] * 5)} |"
    )


def written_study(folder: Path, content: list[dict[str, Any]]) -> Path:
    (folder / "file.json").write_text(json.dumps(content), encoding="utf-8")
    import_module("_study").write_study(folder, folder)
    return folder
