"""`evaluate runs/X`: the loss of the weights that a run has trained, as they are and rounded to formats."""

import json
import re
import shutil

import pytest
from bench_runs import recorded, summary_of
from laws import each

from nanogpt_bench.checkpoint import step_file
from nanogpt_bench.cli import main
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.evaluation.weights import evaluate_run
from nanogpt_bench.loop.train import run


@each("kind", ["float", "one byte", "master copy", "bfloat16", "tied", "untied"])
def test_untouched_weights_have_the_loss_that_the_run_recorded(trained, kind, capsys):
    rows = evaluate_run(trained[kind])
    assert rows[0].val_loss == summary_of(trained[kind])["final_val_loss"]
    assert rows[0].checkpoint == str(step_file(trained[kind], 6))
    assert "at step 6 had the val loss of the first row, to the bit" in capsys.readouterr().err
    assert [row.format for row in rows[1:]] == ([] if kind in ("float", "tied") else ["none"])
    if kind == "one byte":
        assert [(row.storage, row.quantized_parameters > 0) for row in rows] == [("fp8", True), ("float32", False)]
        assert rows[1].gap == pytest.approx(0, abs=1e-6)


def test_rounding_a_run_is_rounding_what_starts_from_it(tiny, trained, tmp_path):
    own, *rows = evaluate_run(trained["float"], formats=["E4M3", "e2m1"])
    start = {"model__init_from": trained["float"], "runtime__threads": 1, "train__max_steps": 1}
    configs = [tiny(**start), *(tiny(**start, model__format=fmt) for fmt in ("E4M3", "E2M1"))]
    firsts = [run(config, tmp_path / str(at))["first_val_loss"] for at, config in enumerate(configs)]
    assert [own.val_loss, *(row.val_loss for row in rows)] == firsts
    assert [row.format for row in rows] == ["E4M3", "E2M1"]
    assert rows[1].gap == rows[1].val_loss - own.val_loss
    assert abs(rows[1].gap) > abs(rows[0].gap) > 0


def test_layers_that_a_run_left_alone_stay_so(trained):
    kept = evaluate_run(trained["master copy"], formats=["E5M2"])[-1]
    assert kept.quantized_parameters == 12 * 16**2  # lm_head is `none` in the run
    asked = evaluate_run(trained["float"], formats=["E5M2"], overrides=["--model.formats.attn", "none"])[-1]
    whole = evaluate_run(trained["float"], formats=["E5M2"])[-1]
    assert whole.quantized_parameters - asked.quantized_parameters == 4 * 16**2


def test_an_earlier_checkpoint_and_the_table_as_json(trained, tmp_path):
    out, run_dir = tmp_path / "rows.json", trained["one byte"]
    command = ["evaluate", str(run_dir / "config.yaml"), "--checkpoint", "step-3", "--out", str(out)]
    assert main([*command, "--formats", "E4M3", "--save", str(tmp_path / "w")]) == 0
    rows = json.loads(out.read_text())
    losses = {record["step"]: record for record in recorded(run_dir)}
    assert rows[0]["val_loss"] == losses[3]["val/loss"]
    assert rows[0]["checkpoint"].endswith("step-3.safetensors")
    assert [row["format"] for row in rows] == ["E4M3 (as trained)", "none", "E4M3"]
    names = sorted(path.name for path in (tmp_path / "w").iterdir())
    assert names == ["E4M3-as-trained.safetensors", "E4M3.safetensors", "none.safetensors"]


def test_it_says_why_a_loss_is_another_one_or_that_there_is_none_to_compare_with(tiny, trained, tmp_path, capsys):
    assert main(["evaluate", str(trained["float"]), "--eval.batches", "1"]) == 0
    assert re.search(r"had val loss 3\.\d+, here it is 3\.\d+: --eval.batches$", capsys.readouterr().err.strip())
    run(tiny(checkpoint__every=2, checkpoint__last=False, train__max_steps=5), tmp_path / "a")
    (row,) = evaluate_run(tmp_path / "a", "step-4")
    assert row.val_loss > 0
    assert "at step 4 did not validate" in capsys.readouterr().err


def test_a_run_that_goes_on_by_stiffness_without_rounding_is_rounded(tiny, tmp_path):
    run(tiny(rule="stiffness-unrounded", model__format="E2M1", train__max_steps=1), tmp_path / "a")
    own, floats, rounded = evaluate_run(tmp_path / "a", formats=["E2M1"])
    assert (own.storage, rounded.storage) == ("continuous", "master")
    assert floats.val_loss == own.val_loss != rounded.val_loss


def test_a_tied_head_is_decided_on_in_one_line(trained, capsys):
    command = ["evaluate", str(trained["tied"]), "--formats", "E4M3"]
    assert main(command) == 2
    assert "add --model.tied leave, or --model.tied untie" in capsys.readouterr().err.splitlines()[-1]
    sizes = []
    for tied in ("leave", "untie"):
        assert main([*command, f"--model.tied={tied}"]) == 0
        sizes.append(capsys.readouterr().out)
    assert "3,072" in sizes[0]  # the blocks'
    assert "3,728" in sizes[1]  # and a head's


def test_without_a_checkpoint_one_line_says_how_to_get_one(trained, tmp_path, refused):
    bare = shutil.copytree(trained["float"], tmp_path / "bare")
    shutil.rmtree(bare / "checkpoints")
    for name in (bare, bare / "config.yaml"):
        words = f"run {bare}/config.yaml --checkpoint.last true trains it once more and saves one"
        assert words in refused("evaluate", name, "--formats", "E4M3")


def test_another_text_than_the_run_s_is_never_taken_for_it(
    tiny, trained, corpus_dir, text_file, tmp_path, refused, capsys
):
    moved = shutil.copytree(corpus_dir, tmp_path / "moved")
    assert main(["evaluate", str(trained["float"]), f"--data.dir={moved}"]) == 0  # the same text elsewhere
    (tmp_path / "other.txt").write_text(text_file.read_text() + "the fox\n" * 200)
    for source, tokenizer, said in (
        (text_file, "byte", "was trained on text of tokenizer 'char'"),
        (tmp_path / "other.txt", "char", "numbers the characters of each text on its own"),
    ):
        prepare_text(source, tmp_path / tokenizer, tokenizer)
        assert said in refused("evaluate", trained["float"], f"--data.dir={tmp_path / tokenizer}")
    run(tiny(data__dir=tmp_path / "byte", train__max_steps=1), tmp_path / "run")
    prepare_text(tmp_path / "other.txt", tmp_path / "byte", "byte")  # under it
    assert "is not the text that" in refused("evaluate", tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run"), f"--data.dir={tmp_path / 'byte'}"]) == 0
    assert re.search(r"had val loss 5\.\d+, here it is 5\.\d+: --data.dir$", capsys.readouterr().err.strip())
