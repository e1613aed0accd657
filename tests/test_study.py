"""The study's maps, ladders and predictions about E7M0.

That its tables are fresh is in `test_generated.py`.
"""

import doctest
import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fp8manifold as fm
from nanogpt_bench.data.batches import batch
from nanogpt_bench.model.gpt import GPTShape, build_model
from nanogpt_bench.model.weights import tensors_of
from nanogpt_bench.report.paired import Difference
from nanogpt_bench.report.results_file import read_export
from nanogpt_bench.runs.load import Run
from nanogpt_bench.runs.read import Records

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "study" / "results"
TOKENS = np.arange(200, dtype=np.uint16) * 7 % 11


@pytest.fixture(autouse=True)
def _on_path(monkeypatch):
    """Import the modules that draw the study's pages."""
    for folder in ("docs", "study"):
        monkeypatch.syspath_prepend(ROOT / folder)


@pytest.mark.extra("matplotlib")
def test_the_first_tables_and_pictures_are_drawn_from_the_results():
    front, frontier = import_module("_front"), import_module("_frontier")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert front.front_table() in readme
    assert front.front_table(front.OPTIMIZERS_PAGE_ROWS) in (
        ROOT / "docs" / "optimizers.md"
    ).read_text(encoding="utf-8")
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in front.front_table().splitlines()[2:]
    ]
    assert [cell[0].split(",")[0] for cell in cells] == ["AdamW"] * 5 + ["Muon"] * 3
    assert [cell[2:] for cell in cells if cell[0].endswith(", float32")] == [["0", "0"]] * 2
    for name in frontier.PICTURES:
        for path, spec in frontier.themed(name).items():
            is_current = frontier.mark(spec) in path.read_text(encoding="utf-8")
            assert is_current, f"{path.name}: python study/make.py --front"
            assert f'="docs/_static/{path.name}"' in readme


@pytest.mark.extra("matplotlib")
def test_seeds_made_later_join_the_rows_of_the_first(monkeypatch, tmp_path):
    study = import_module("_study")
    whole = json.loads((RESULTS / "study_q3.json").read_text(encoding="utf-8"))
    seeds = sorted({entry["seed"] for entry in whole if entry["kind"] == "run"})
    first = [entry for entry in whole if entry.get("seed", seeds[0]) == seeds[0]]
    later = [entry for entry in whole if entry.get("seed") in seeds[1:]]
    missing = dict.fromkeys(entry["label"] for entry in later)
    for label in missing:
        of_row = next(entry for entry in later if entry["label"] == label)
        entry = {key: of_row[key] for key in ("label", "rule", "format", "reference")}
        first += [entry | {"kind": "missing", "seed": seed} for seed in seeds[1:]]
    (tmp_path / "first.json").write_text(json.dumps(first), encoding="utf-8")
    (tmp_path / "later.json").write_text(json.dumps(later), encoding="utf-8")
    monkeypatch.setattr(study, "FURTHER_SEEDS", {"first": ("later",)})
    joined = study.read_with_added_rows(tmp_path / "first.json")
    rows = {row.label: row for row in read_export(RESULTS / "study_q3.json").rows}
    assert len(seeds) > 1
    for row in joined.rows:
        assert [run.summary for run in row.runs] == [run.summary for run in rows[row.label].runs]
        assert not row.missing
    # at other settings a seed is no further one
    for entry in later:
        entry["config.optimizer.lr"] = 1.0
    (tmp_path / "later.json").write_text(json.dumps(later), encoding="utf-8")
    study.read_with_added_rows.cache_clear()
    with pytest.raises(ValueError, match="have other settings"):
        study.read_with_added_rows(tmp_path / "first.json")
    study.read_with_added_rows.cache_clear()


def test_a_map_has_the_mean_gap_of_every_layer_in_every_format():
    path, losses = RESULTS / "study_q3.json", {}
    for entry in json.loads(path.read_text(encoding="utf-8")):
        if entry["kind"] == "run":
            losses.setdefault(entry["label"], {})[entry["seed"]] = entry["final_val_loss"]
    layer_map = import_module("_maps").map_of(read_export(path))
    for pattern, gaps in zip(layer_map.patterns, layer_map.gaps, strict=True):
        for fmt, gap in zip(layer_map.formats, gaps, strict=True):
            losses_of_layer = losses[f"{fmt} {'*' if pattern == 'all layers' else pattern}"]
            assert gap == pytest.approx(
                sum(losses_of_layer[seed] - losses["fp32"][seed] for seed in losses_of_layer)
                / len(losses_of_layer)
            ), fmt


def test_a_gap_appears_where_an_interval_first_leaves_0_out():
    appearance = import_module("_ladders").appearance
    ends = {400: (0.01, 0.03), 100: (-0.02, 0.02), 200: (-0.01, 0.03), 800: (-0.01, 0.1)}
    rungs = {
        step: SimpleNamespace(difference=Difference(sum(e) / 2, 3, *e))
        for step, e in {**ends, 50: (-0.03, -0.01)}.items()
    }
    below = rungs.pop(50)
    assert (appearance(rungs), appearance({100: rungs[100]}), appearance({50: below, **rungs})) == (
        400,
        None,
        50,
    )
    assert appearance({100: SimpleNamespace(difference=Difference(0.5, 1)), 400: rungs[400]}) == 400


#: a loss that falls for eight steps and then stays
STUCK = [5.5 - 0.2 * step for step in range(8)] + [4.0 + 0.02 * (step % 2) for step in range(192)]


def run_of(losses, lost=None, zone=None, **config):
    shares = {"stall/update_lost": lost, "stall/zero_gradient_zone": zone}
    known = {name: share for name, share in shares.items() if share is not None}
    records = [
        {"step": step, "train/loss": loss, **(known if step % 20 == 0 else {})}
        for step, loss in enumerate(losses, 1)
    ]
    return Run(Path("a"), config, metrics=Records(records), summary={"format": "E7M0"})


LEARNS = [2.2 + 3.3 * (step + 1) ** -0.5 for step in range(200)]


@pytest.mark.parametrize(
    ("run", "answer"),
    [
        pytest.param(run_of(STUCK, 0.97, 0.6), "confirmed", id="confirmed"),
        pytest.param(run_of(LEARNS, 0.5, 0.01), "refuted", id="refuted"),
        pytest.param(run_of(STUCK[:9]), "not judged", id="not judged"),
    ],
)
def test_each_prediction_is_confirmed_refuted_or_open(run, answer):
    script = import_module("e7m0")
    assert [prediction.answer.value for prediction in script.predictions(run)] == [answer] * 3


def test_predictions_are_about_nearest_rounding():
    script = import_module("e7m0")
    nearest = run_of(STUCK, 0.97, 0.2, optimizer={"writeback": "nearest"})
    stochastic = run_of(STUCK, 0.97, 0.2, optimizer={"writeback": "stochastic"})
    lines = script.predictions_table([nearest, stochastic]).splitlines()[2:]
    assert [line.split("|")[3].strip() for line in lines] == ["confirmed", "confirmed", "refuted"]
    assert "97.0%, 97.0% at step 20 and 97.0% at step 200" in lines[1]


def test_binades_of_an_even_use_of_codes_have_a_slope_of_0_and_of_normal_weights_of_1():
    script = import_module("binades")
    e4m3 = fm.FloatFormat.from_string("E4M3")
    generator = torch.Generator().manual_seed(0)
    # the codes of numbers from 1/8 up, almost nine binades
    codes = torch.randint(32, 102, (200, 500), generator=generator, dtype=torch.uint8)
    even = script.binades(fm.decode(codes, e4m3), e4m3)
    assert even.exponents == (-3, -2, -1, 0)
    assert even.slope == pytest.approx(0.0, abs=0.02)
    rows = torch.exp2(torch.arange(200) % 3).unsqueeze(1)
    weights = fm.round_to_grid(10 * rows * torch.randn(200, 500, generator=generator), e4m3)
    normal = script.binades(weights, e4m3)
    assert normal.slope == pytest.approx(1.0, abs=0.1)
    assert normal.slope == pytest.approx(normal.normal_slope, abs=0.03)
    assert normal.off_by < 1.15


def test_the_layers_with_the_least_and_the_most_mean_gradient_have_a_line(monkeypatch):
    script = import_module("binades")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    for layer in model:
        torch.nn.init.normal_(layer.weight)
    model = fm.quantize_model(model, "E5M2")
    trained = SimpleNamespace(tensors=tensors_of(model), metadata=None)
    monkeypatch.setattr(script, "choose", lambda folder: folder)
    monkeypatch.setattr(script, "load", lambda path: trained)
    records = [
        {"step": step} | {f"grad/snr/{layer}": (4 - layer) * step for layer in range(4)}
        for step in range(1, 9)
    ]
    layers = script.layers_of(Path("a"), Run(Path("a"), metrics=Records(records)))
    assert [layer.name for layer in layers] == ["3", "2", "1", "0"]
    assert layers[0].snr == 7.5
    weight = model[3].weight
    assert torch.equal(layers[0].units * weight.scale, weight.dequantize())
    cells = [line.split("|") for line in script.binades_table({"runs/a": layers}).splitlines()[2:]]
    assert [row[2].strip() for row in cells] == ["`3`", "`0`"]
    assert all(0.8 < float(row[5]) < 1.2 for row in cells)


def test_shares_by_binade_tell_weights_uniform_over_codes_from_normal_ones():
    """Law 3 of docs/laws.md would make them uniform: a slope of 0, where normal weights have 1."""
    binades = import_module("binades")
    generator = torch.Generator().manual_seed(0)
    fmt = fm.formats.as_format("E5M2")
    normal = torch.randn(256, 256, generator=generator)
    uniform = torch.exp2(12 * torch.rand(256, 256, generator=generator) - 8)
    of_normal = binades.binades(16 * normal, fmt)
    assert of_normal.slope == pytest.approx(of_normal.normal_slope, abs=0.05)
    assert of_normal.off_by < 1.2
    assert binades.binades(uniform, fmt).slope == pytest.approx(0, abs=0.05)


@pytest.mark.extra("matplotlib")
def test_a_gap_stands_beside_the_floor_of_the_float_run_with_its_batch_and_momentum():
    law, losses_of = import_module("_law"), import_module("_paired").losses_of
    file = read_export(RESULTS / "study_q21_momentum.json")
    cells = {(cell.pattern, cell.format): cell for cell in law.cells_by_training(file)}
    assert len(cells) == 12
    losses, floors = {}, {}
    for row in file.rows:
        (run,) = row.runs
        place = (run.config["optimizer"]["momentum"], row.format)
        losses[place] = losses_of(row)[run.seed]
        if row.rule == "muon":
            floors[place[0]] = run.looks[1000]["floor/loss/E5M2"]
    for momentum in (0.9, 0.95, 0.99):
        cell = cells[f"12 sequences, momentum {momentum}", "E5M2"]
        gap = losses[momentum, "E5M2"] - losses[momentum, "none"]
        assert cell.gap.mean == pytest.approx(gap)
        assert cell.floor == pytest.approx(floors[momentum])
        assert f"| {cell.share:.2f} |" in law.law_table([*cells.values()])


def test_the_hessian_that_an_equilibrium_follows_from_is_that_of_differences():
    script = import_module("equilibrium")
    assert doctest.testmod(script).failed == 0
    model = build_model(GPTShape(1, 2, 8, 8, vocab_size=11), seed=0).double()
    pairs = [batch(TOKENS, 4, 8, seed=0, step=step) for step in range(2)]
    trained = SimpleNamespace(model=model, batches=lambda size, count: iter(pairs))
    weights = script.code_weights(model)
    sizes = {name: torch.rand_like(weight) + 0.5 for name, weight in weights.items()}
    roots = torch.cat([size.flatten() for size in sizes.values()]).sqrt()
    vector = torch.randn(roots.shape, generator=torch.Generator().manual_seed(1)).double()
    product = script.hessian_product(trained, script.Noise({}, sizes))(vector)

    def gradients_at(distance):
        parts = (distance * roots * vector).split([weight.numel() for weight in weights.values()])
        for weight, part in zip(weights.values(), parts, strict=True):
            weight.data += part.view_as(weight)
        loss = sum(model.loss(*pair) for pair in pairs) / len(pairs)
        gradients = torch.autograd.grad(loss, [*weights.values()])
        for weight, part in zip(weights.values(), parts, strict=True):
            weight.data -= part.view_as(weight)
        return torch.cat([gradient.flatten() for gradient in gradients])

    difference = (gradients_at(1e-4) - gradients_at(-1e-4)) / 2e-4
    # losses are in float32
    assert float((product - roots * difference).norm()) < 1e-4 * float(product.norm())
