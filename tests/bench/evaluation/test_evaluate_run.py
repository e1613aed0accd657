"""Losses of a run's weights in other formats.

This is what rounding after the training costs.
"""

import json
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from bench_runs import recorded, summary_of
from safetensors import safe_open

import fp8manifold as fm
from nanogpt_bench.checkpoint import step_file
from nanogpt_bench.cli import main
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.evaluation.report import ALL
from nanogpt_bench.evaluation.weights import evaluate_run
from nanogpt_bench.loop.train import run
from nanogpt_bench.system.errors import BenchError


@pytest.mark.parametrize("kind", ["float", "one byte", "master copy", "bfloat16", "tied", "untied"])
def test_untouched_weights_have_the_loss_that_the_run_recorded(trained, kind, capsys):
    rows = evaluate_run(trained[kind])
    assert rows[0].val_loss == summary_of(trained[kind])["final_val_loss"]
    assert rows[0].checkpoint == str(step_file(trained[kind], 6))
    assert (
        "at step 6 recorded the same val loss as the first row, to the bit"
        in capsys.readouterr().err
    )
    assert [row.format for row in rows[1:]] == ([] if kind in ("float", "tied") else ["none"])
    if kind == "one byte":
        assert [(row.storage, row.quantized_parameters > 0) for row in rows] == [
            ("codes", True),
            ("float32", False),
        ]
        assert rows[1].gap == pytest.approx(0, abs=1e-6)


def test_rounding_a_run_is_rounding_what_starts_from_it(tiny, trained, tmp_path):
    floats, *rows = evaluate_run(trained["float"], formats=["E4M3", "e2m1"])
    start = {"model__init_from": trained["float"], "runtime__threads": 1, "train__max_steps": 1}
    configs = [tiny(**start), *(tiny(**start, model__format=fmt) for fmt in ("E4M3", "E2M1"))]
    firsts = [
        run(config, tmp_path / str(index))["first_val_loss"] for index, config in enumerate(configs)
    ]
    assert [floats.val_loss, *(row.val_loss for row in rows)] == firsts
    assert [row.format for row in rows] == ["E4M3", "E2M1"]
    assert rows[1].gap == rows[1].val_loss - floats.val_loss
    assert abs(rows[1].gap) > abs(rows[0].gap) > 0


def test_layers_that_a_run_left_alone_stay_so(trained):
    row = evaluate_run(trained["master copy"], formats=["E5M2"])[-1]
    assert row.quantized_parameters == 12 * 16**2  # lm_head is `none` in the run
    without_attention = evaluate_run(
        trained["float"], formats=["E5M2"], overrides=["--model.formats.attn", "none"]
    )[-1]
    whole = evaluate_run(trained["float"], formats=["E5M2"])[-1]
    assert whole.quantized_parameters - without_attention.quantized_parameters == 4 * 16**2


def test_an_earlier_checkpoint_and_the_table_as_json(trained, tmp_path):
    out, run_dir = tmp_path / "rows.json", trained["one byte"]
    command = [
        "evaluate",
        str(run_dir / "config.yaml"),
        "--checkpoint",
        "step-3",
        "--out",
        str(out),
    ]
    assert main([*command, "--formats", "E4M3", "--save", str(tmp_path / "w")]) == 0
    rows = json.loads(out.read_text())
    losses = {record["step"]: record for record in recorded(run_dir)}
    assert rows[0]["val_loss"] == losses[3]["val/loss"]
    assert rows[0]["checkpoint"].endswith("step-3.safetensors")
    assert [row["format"] for row in rows] == ["E4M3 (as trained)", "none", "E4M3"]
    names = sorted(path.name for path in (tmp_path / "w").iterdir())
    assert names == ["E4M3-as-trained.safetensors", "E4M3.safetensors", "none.safetensors"]


def test_it_says_why_a_loss_is_another_one_or_that_there_is_none_to_compare_with(
    tiny, trained, tmp_path, capsys
):
    assert main(["evaluate", str(trained["float"]), "--eval.batches", "1"]) == 0
    assert re.search(
        r"recorded val loss 3\.\d+, but here it is 3\.\d+: --eval.batches$",
        capsys.readouterr().err.strip(),
    )
    run(tiny(checkpoint__every=2, checkpoint__last=False, train__max_steps=5), tmp_path / "a")
    (row,) = evaluate_run(tmp_path / "a", "step-4")
    assert row.val_loss > 0
    assert "at step 4 recorded no val loss" in capsys.readouterr().err


def test_a_run_that_goes_on_by_stiffness_without_rounding_is_rounded(tiny, tmp_path):
    run(tiny(rule="stiffness-unrounded", model__format="E2M1", train__max_steps=1), tmp_path / "a")
    continuous, floats, rounded = evaluate_run(tmp_path / "a", formats=["E2M1"])
    assert (continuous.storage, rounded.storage) == ("continuous", "master")
    assert floats.val_loss == continuous.val_loss != rounded.val_loss


def test_a_run_of_steps_in_the_backward_pass_is_rounded_to_other_formats(tiny, tmp_path):
    """Nothing is trained then, so the setting says nothing."""
    settings = {"rule": "stochastic", "model__format": "E4M3", "train__max_steps": 1}
    within = {"train__step_in_backward": True, "optimizer__clip_by": "exact"}
    run(tiny(**settings, **within), tmp_path / "a")
    rows = evaluate_run(tmp_path / "a", formats=["E5M2"])
    assert [row.format for row in rows] == ["E4M3 (as trained)", "none", "E5M2"]


def test_a_tied_head_is_decided_on_in_one_line(trained, capsys):
    command = ["evaluate", str(trained["tied"]), "--formats", "E4M3"]
    assert main(command) == 2
    assert (
        "add --model.tied leave, or --model.tied untie" in capsys.readouterr().err.splitlines()[-1]
    )


@pytest.mark.parametrize(
    ("tied", "size"),
    [("leave", "3,072"), ("untie", "3,728")],
    ids=["leave: the blocks'", "untie: and a head's"],
)
def test_a_tied_head_is_left_or_measured_too(trained, capsys, tied, size):
    command = ["evaluate", str(trained["tied"]), "--formats", "E4M3"]
    assert main([*command, f"--model.tied={tied}"]) == 0
    assert size in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "config.yaml"], ids=["the folder", "its config.yaml"])
def test_without_a_checkpoint_one_line_says_how_to_get_one(trained, tmp_path, refused, name):
    bare = shutil.copytree(trained["float"], tmp_path / "bare")
    shutil.rmtree(bare / "checkpoints")
    words = f"train it once more: nanogpt-bench run {bare}/config.yaml --checkpoint.last true"
    assert words in refused("evaluate", bare / name, "--formats", "E4M3")


@pytest.mark.parametrize(
    ("tokenizer", "addition", "message"),
    [
        ("byte", "", "was trained with tokenizer 'char'"),
        ("char", "the fox\n" * 200, "numbers tokens differently for each text"),
    ],
    ids=["another tokenizer", "another text"],
)
def test_text_of_other_tokens_than_the_run_s_is_refused(
    trained, text_file, tmp_path, refused, tokenizer, addition, message
):
    source = tmp_path / "other.txt"
    source.write_text(text_file.read_text() + addition)
    prepare_text(source, tmp_path / tokenizer, tokenizer)
    assert message in refused("evaluate", trained["float"], f"--data.dir={tmp_path / tokenizer}")


def test_another_text_than_the_run_s_is_never_taken_for_it(
    tiny, trained, corpus_dir, text_file, tmp_path, refused, capsys
):
    moved = shutil.copytree(corpus_dir, tmp_path / "moved")
    assert (
        main(["evaluate", str(trained["float"]), f"--data.dir={moved}"]) == 0
    )  # the same text elsewhere
    (tmp_path / "other.txt").write_text(text_file.read_text() + "the fox\n" * 200)
    prepare_text(text_file, tmp_path / "byte", "byte")
    run(tiny(data__dir=tmp_path / "byte", train__max_steps=1), tmp_path / "run")
    # another text takes the place of the run's
    prepare_text(tmp_path / "other.txt", tmp_path / "byte", "byte", replace=True)
    assert "is not the text that" in refused("evaluate", tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run"), f"--data.dir={tmp_path / 'byte'}"]) == 0
    assert re.search(
        r"recorded val loss 5\.\d+, but here it is 5\.\d+: --data.dir$",
        capsys.readouterr().err.strip(),
    )


def report_of(run_dir: Path, out: Path, *arguments: str) -> dict[str, Any]:
    assert main(["evaluate", str(run_dir), "--out", str(out), *arguments]) == 0
    return json.loads((out / "evaluation.json").read_text())


def test_every_format_and_scale_of_a_run_beside_its_floats(trained, tmp_path):
    run_dir = trained["float"]
    evaluation = report_of(
        run_dir, tmp_path / "out", "--formats", "all", "--scales", "channel,tensor"
    )
    rows = evaluation["rows"]
    all_rows = product(ALL, ("channel", "tensor"))
    assert [(row["format"], row["scale"]) for row in rows] == [("none", ""), *all_rows]
    recorded = summary_of(run_dir)["final_val_loss"]
    assert rows[0]["val_loss"] == pytest.approx(recorded, rel=1e-4)  # the run computed in bfloat16
    assert all(
        row["gap"] == pytest.approx(row["val_loss"] - rows[0]["val_loss"], abs=1e-9)
        for row in rows[1:]
    )
    assert abs(rows[-1]["gap"]) > abs(rows[3]["gap"])  # E7M0, E2M5
    assert all(name in (tmp_path / "out" / "report.html").read_text() for name in ALL)


def test_one_byte_weights_of_a_run_are_the_floats_that_are_rounded(trained, tmp_path):
    rows = report_of(
        trained["one byte"], tmp_path / "out", "--formats", "E4M3,E2M1", "--scales", "channel"
    )["rows"]
    recorded = summary_of(trained["one byte"])["final_val_loss"]
    assert rows[0]["val_loss"] == pytest.approx(recorded, rel=1e-4)  # the run computed in bfloat16
    assert abs(rows[1]["gap"]) < 1e-4 < abs(rows[2]["gap"])


def test_the_best_mixture_keeps_to_its_bytes_and_is_written(trained, tmp_path):
    words = ["--formats", "E4M3,E2M5", "--budget", "2.0", "--save", str(tmp_path / "w")]
    mixture = report_of(trained["float"], tmp_path / "out", *words)["rows"][-1]
    assert mixture["format"] == "mixture"
    assert mixture["bytes_per_parameter"] <= 2.0
    words[3] = repr(mixture["bytes_per_parameter"])
    again = report_of(trained["float"], tmp_path / "again", *words[:4])["rows"][-1]
    assert (again["format"], again["formats"]) == ("mixture", mixture["formats"])
    table = json.loads((tmp_path / "out" / "sensitivity.json").read_text())
    assert table["patterns"] == [
        "attn.qkv",
        "attn.proj",
        "mlp.fc",
        "mlp.proj",
        "lm_head",
        "embeddings",
    ]
    names = {path.name for path in (tmp_path / "w").iterdir()}
    assert names == {
        f"{name}.safetensors"
        for name in ("none", "E4M3-channel", "E2M5-channel", "mixture-channel")
    }
    with safe_open(tmp_path / "w" / "E2M5-channel.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        state = fm.files.unflatten(tensors, file.metadata())
    weights = [value for value in state.values() if isinstance(value, fm.FP8Tensor)]
    assert len(weights) == 5
    assert {weight.format.name for weight in weights} == {"E2M5"}


def test_a_map_and_a_mixture_leave_alone_what_the_command_line_speaks_of(trained, tmp_path, capsys):
    words = ["--formats", "E4M3,E2M5", "--budget", "3", "--model.formats.attn", "none"]
    words += [
        "--model.formats.blocks.0.mlp.fc",
        "none",
        "--model.formats.lm_head",
        "E5M2",
        "--sensitivity",
        "layers",
    ]
    evaluation = report_of(trained["float"], tmp_path / "out", *words)
    mixture = evaluation["rows"][-1]
    own_formats = {"attn": "none", "blocks.0.mlp.fc": "none", "lm_head": "E5M2"}
    assert (mixture["format"], {key: mixture["formats"].get(key) for key in own_formats}) == (
        "mixture",
        own_formats,
    )
    assert mixture["formats"].keys() <= {*own_formats, "blocks.0.mlp.proj", "embeddings"}
    assert mixture["bytes_per_parameter"] <= 3
    table = json.loads((tmp_path / "out" / "sensitivity.json").read_text())
    assert table["patterns"] == ["blocks.0.mlp.proj", "embeddings"]
    assert table["reference"] == "the same weights in the formats given"
    gap = table["reference_loss"] - evaluation["rows"][0]["val_loss"]
    for row, cell in zip(
        evaluation["rows"][1:3], table["gap"][0], strict=True
    ):  # all that is left is one layer
        assert row["gap"] == pytest.approx(gap + cell, abs=1e-9)
    (advised,) = re.findall(
        r"^lowest gaps: (.*blocks.0.mlp.proj E.*)$", capsys.readouterr().out, re.MULTILINE
    )
    assert main(["evaluate", str(trained["float"]), *advised.split()]) == 0
    assert "given" in capsys.readouterr().out


def test_byte_pairs_learned_from_another_text_are_other_tokens(tiny, tmp_path, refused):
    for name, words in (
        ("one", "lorem ipsum dolor sit amet "),
        ("two", "the quick brown fox jumps over "),
    ):
        (tmp_path / f"{name}.txt").write_text(words * 300)
        prepare_text(tmp_path / f"{name}.txt", tmp_path / name, "bpe-265")
    run(tiny(data__dir=tmp_path / "one", train__max_steps=1), tmp_path / "run")
    message = "tokenizer 'bpe-265' numbers tokens differently for each text"
    assert message in refused("evaluate", tmp_path / "run", f"--data.dir={tmp_path / 'two'}")
    config = tiny(data__dir=tmp_path / "one", eval__also=tmp_path / "two")
    with pytest.raises(BenchError, match="is tokenized differently from"):
        run(config, tmp_path / "also")
