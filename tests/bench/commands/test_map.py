"""`nanogpt-bench map`: one training in floats predicts where which format would cost."""

import json
from pathlib import Path

import causal_models
import pytest

from nanogpt_bench.cli import main
from nanogpt_bench.commands.map import float_twin
from nanogpt_bench.config.settings import build_config, read_settings_file
from nanogpt_bench.setup.resolve import resolve

QUICK = [
    "--train.max_steps=8",
    "--train.precision=float32",
    "--eval.batches=1",
    "--eval.interval=8",
    "--model.n_layer=2",
    "--model.n_embd=16",
    "--model.n_head=2",
    "--model.block_size=8",
    "--train.batch_size=2",
    "--optimizer.warmup_steps=1",
]

pytestmark = pytest.mark.usefixtures("working_folder")


def printed_table(lines):
    """The cells of a Markdown table by the name of their line."""
    rows = [line.strip("| ").split("|") for line in lines if line.startswith("|")]
    table = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows[2:]}
    return [cell.strip() for cell in rows[0][1:]], table


@pytest.mark.parametrize("rule", ["muon-stochastic", "nearest", "fp32"])
def test_one_training_gives_a_floor_for_every_kind_of_layer_and_format(rule, corpus_dir, capsys):
    words = ["map", "fp32.yaml", "--rule", rule, "--formats", "E5M2,E2M5", "--name", "it", *QUICK]
    words += ["--data.dir", str(corpus_dir)]
    if rule != "fp32":
        words += ["--model.format", "E4M3"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    formats, table = printed_table(lines)
    content = json.loads(Path("runs/it/map.json").read_text())
    assert formats == content["formats"] == ["E2M5", "E5M2"]
    kinds = ["attn.qkv", "attn.proj", "mlp.fc", "mlp.proj", "lm_head"]
    assert sorted(content["kinds"][:-1]) == sorted(kinds)
    assert content["kinds"][-1] == "all layers"
    by_kind = dict(zip(content["kinds"], content["floor"], strict=True))
    for place in (0, 1):
        total = sum(by_kind[kind][place] for kind in kinds)
        assert by_kind["all layers"][place] == pytest.approx(total, rel=1e-5)
    # A spacing eight times as wide costs about eight times as much.
    assert 4 < by_kind["all layers"][1] / by_kind["all layers"][0] < 16
    assert table["mlp.fc"] == [f"{value:.4f}" for value in by_kind["mlp.fc"]]
    assert lines[-1] == "runs/it/map.json"


def test_a_pretrained_model_gets_a_map(tmp_path, text_file, capsys):
    model = causal_models.write(tmp_path / "llama")
    law = tmp_path / "law"
    prepare = ["prepare", "text", "--input", str(text_file), "--tokenizer", str(model)]
    assert main([*prepare, "--out", str(law)]) == 0
    words = ["--train.max_steps=4", "--eval.batches=1", "--eval.interval=4"]
    words += ["--model.block_size=16", "--optimizer.warmup_steps=1"]
    assert main(["map", "--model", str(model), "--data.dir", str(law), *words]) == 0
    _, table = printed_table(capsys.readouterr().out.splitlines())
    assert {"self_attn.q_proj", "mlp.down_proj", "all layers"} <= set(table)


def test_the_twin_keeps_rates_and_drops_what_belongs_to_codes():
    settings = {
        "rule": "muon-stochastic",
        "model.format": "E4M3",
        "model.headroom": 4.0,
        "optimizer.lr": 0.01,
        "optimizer.momentum": 0.9,
        "optimizer.moments": "8bit",
        "seed": 7,
    }
    twin = float_twin(settings, None)
    assert twin.rule == "muon"
    assert twin.optimizer.lr == 0.01
    assert twin.optimizer.momentum == 0.9
    assert twin.optimizer.moments is None
    assert twin.model.format is None
    assert twin.model.headroom is None
    assert twin.seed == 7
    assert twin.monitor.floor_formats == ["E2M5", "E4M3", "E5M2", "E7M0"]


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"rule": "adafactor-stochastic", "model.format": "E4M3"}, "adafactor"),
        ({"optimizer.name": "stiffness_adamw", "model.format": "E4M3"}, "fp32"),
        ({"optimizer.name": "stiffness_muon", "model.format": "E4M3"}, "muon"),
    ],
    ids=["adafactor", "adamw-by-name", "muon-by-name"],
)
def test_the_twin_has_the_rates_that_the_codes_would_have(settings, rule):
    twin = float_twin(settings, None)
    given = resolve(build_config(settings)).optimizer
    assert twin.rule == rule
    assert resolve(twin).optimizer.lr == given.lr
    assert resolve(twin).optimizer.float_lr == given.float_lr


def refusal_of(words, capsys):
    assert main(["map", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["either FILE.yaml or --model PATH"]),
        (["fp32.yaml", "--model", "x"], ["either FILE.yaml or --model PATH"]),
        (["fp32.yaml", "--formats", "E4M33"], ["E4M33", "E4M3"]),
        (
            ["e4m3.yaml", "--rule", "riemannian"],
            ["riemannian_adam", "--rule fp32 or muon or adafactor or sgd"],
        ),
        (
            ["fp32.yaml", "--formats", "E4M3", "--monitor.floor_formats", "[E5M2]"],
            ["--formats and monitor.floor_formats"],
        ),
        (["gone.yaml"], ["gone.yaml"]),
        (["e4m3.yaml", "--rule", "stiffness"], ["optimizer.stiffness 1", "give 0"]),
        (["fp32.yaml", "--train.step_in_backward", "true"], ["step_in_backward"]),
    ],
    ids=["nothing", "both", "format", "no-twin", "twice", "no-file", "stiffness", "no-gradients"],
)
def test_what_gives_no_map_is_refused_before_anything_is_written(words, parts, capsys):
    line = refusal_of(words, capsys)
    for part in parts:
        assert part in line
    assert not Path("runs").exists()


def test_settings_of_a_file_are_those_of_run():
    path = Path("my.yaml")
    path.write_text("rule: fp32\nmonitor:\n  floor_formats: [E6M1]\n")
    twin = float_twin(read_settings_file(path), None)
    assert twin.monitor.floor_formats == ["E6M1"]
