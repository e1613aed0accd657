"""`evaluate runs/X --formats all ...`: a run's weights in every format, maps and mixtures."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from bench_runs import summary_of
from safetensors import safe_open

import fp8manifold as fm
from nanogpt_bench.cli import main
from nanogpt_bench.evaluation.report import ALL


def report_of(run_dir: Path, out: Path, *more: str) -> dict[str, Any]:
    assert main(["evaluate", str(run_dir), "--out", str(out), *more]) == 0
    return json.loads((out / "evaluation.json").read_text())


def test_every_format_and_scale_of_a_run_beside_its_floats(trained, tmp_path):
    run_dir = trained["float"]
    found = report_of(run_dir, tmp_path / "out", "--formats", "all", "--scales", "channel,tensor")
    rows = found["rows"]
    assert [(row["format"], row["scale"]) for row in rows] == [
        ("none", ""),
        *((name, scale) for name in ALL for scale in ("channel", "tensor")),
    ]
    recorded = summary_of(run_dir)["final_val_loss"]
    assert rows[0]["val_loss"] == pytest.approx(recorded, rel=1e-4)  # the run computed in bfloat16
    assert all(row["gap"] == pytest.approx(row["val_loss"] - rows[0]["val_loss"], abs=1e-9) for row in rows[1:])
    assert abs(rows[-1]["gap"]) > abs(rows[3]["gap"])  # E7M0, E2M5
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(name in page for name in ALL)


def test_one_byte_weights_of_a_run_are_the_floats_that_are_rounded(trained, tmp_path):
    rows = report_of(trained["one byte"], tmp_path / "out", "--formats", "E4M3,E2M1", "--scales", "channel")["rows"]
    recorded = summary_of(trained["one byte"])["final_val_loss"]
    assert rows[0]["val_loss"] == pytest.approx(recorded, rel=1e-4)  # the run computed in bfloat16
    assert abs(rows[1]["gap"]) < 1e-4 < abs(rows[2]["gap"])


def test_the_best_mixture_keeps_to_its_bytes_and_is_written(trained, tmp_path):
    words = ["--formats", "E4M3,E2M5", "--budget", "2.0", "--save", str(tmp_path / "w")]
    found = report_of(trained["float"], tmp_path / "out", *words)
    mixture = found["rows"][-1]
    assert mixture["format"] == "mixture"
    assert mixture["bytes_per_parameter"] <= 2.0
    table = json.loads((tmp_path / "out" / "sensitivity.json").read_text())
    assert table["patterns"] == ["attn.qkv", "attn.proj", "mlp.fc", "mlp.proj", "lm_head", "embeddings"]
    names = {path.name for path in (tmp_path / "w").iterdir()}
    assert names == {f"{name}.safetensors" for name in ("none", "E4M3-channel", "E2M5-channel", "mixture-channel")}
    with safe_open(tmp_path / "w" / "E2M5-channel.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        state = fm.unflatten_state_dict(tensors, file.metadata())
    weights = [value for value in state.values() if isinstance(value, fm.FP8Tensor)]
    assert len(weights) == 5
    assert {weight.format.name for weight in weights} == {"E2M5"}


def test_a_map_and_a_mixture_leave_alone_what_the_command_line_speaks_of(trained, tmp_path, capsys):
    words = ["--formats", "E4M3,E2M5", "--budget", "3", "--model.formats.attn", "none"]
    words += ["--model.formats.blocks.0.mlp.fc", "none", "--model.formats.lm_head", "E5M2"]
    found = report_of(trained["float"], tmp_path / "out", *words)
    mixture = found["rows"][-1]
    own = {"attn": "none", "blocks.0.mlp.fc": "none", "lm_head": "E5M2"}
    assert mixture["format"] == "mixture"
    assert {key: mixture["formats"].get(key) for key in own} == own
    assert mixture["formats"].keys() <= {*own, "mlp.proj", "embeddings"}
    assert mixture["bytes_per_parameter"] <= 3
    table = json.loads((tmp_path / "out" / "sensitivity.json").read_text())
    assert table["patterns"] == ["mlp.proj", "embeddings"]
    assert table["reference"] == "the same weights in the formats given"
    gap = table["reference_loss"] - found["rows"][0]["val_loss"]
    for row, cell in zip(found["rows"][1:3], table["gap"][0], strict=True):  # all that is left is one layer
        assert row["gap"] == pytest.approx(gap + cell, abs=1e-9)
    (advised,) = re.findall(r"^lowest gaps: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert main(["evaluate", str(trained["float"]), *advised.split()]) == 0
    assert "given" in capsys.readouterr().out
