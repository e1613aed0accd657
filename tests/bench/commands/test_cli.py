"""The command line, from the outside.

Exit codes, one-line errors, files, and where a user stumbles.
"""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bench_runs import refusal

from nanogpt_bench.cli import main
from nanogpt_bench.config.settings import defaults_yaml
from nanogpt_bench.data.batches import load_corpus
from nanogpt_bench.data.text import prepare_text, read_corpus_text
from nanogpt_bench.loop.train import run

QUICK = [
    "--train.max_steps=3",
    "--eval.batches=1",
    "--model.n_layer=1",
    "--model.n_embd=16",
    "--model.n_head=2",
]

pytestmark = pytest.mark.usefixtures("working_folder")


@pytest.mark.parametrize(
    "command", [[], ["prepare"], ["run"], ["compare"], ["sweep"], ["map"], ["report"], ["verify"]]
)
def test_help_has_examples_and_that_of_run_is_short(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "examples:\n  nanogpt-bench " in printed
    # Without words the program prints what --help prints.
    assert command or (main([]), capsys.readouterr().out) == (0, printed)
    if command == ["run"]:
        assert len(printed.splitlines()) < 40
        assert "nanogpt-bench run --defaults" in printed
        assert (main(["run", "--defaults"]), capsys.readouterr().out.strip()) == (
            0,
            defaults_yaml().strip(),
        )


def test_help_and_wrong_options_load_no_torch():
    """All commands in one process: a module that one of them brings stays."""
    code = """if True:
        import contextlib, sys
        from nanogpt_bench.cli import COMMANDS, main
        main([])
        for name in COMMANDS:
            assert main([name, "--no-such-option"]) == 2
            with contextlib.suppress(SystemExit):
                main([name, "--help"])
            assert "torch" not in sys.modules, name
    """
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


def test_a_reader_may_leave_before_the_end_of_the_output():
    """As `head` does: nothing is said of it, and the exit code is that of its signal."""
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [sys.executable, "-m", "nanogpt_bench", "run", "--defaults"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (process.returncode, process.stderr) == (128 + signal.SIGPIPE, "")


def test_a_broken_pipe_of_another_kind_is_said(monkeypatch, capsys):
    def lose_a_worker(*_):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("nanogpt_bench.cli._dispatch", lose_a_worker)
    with open(os.devnull, "w", encoding="utf-8") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["verify"]) == 2
    assert capsys.readouterr().err == "nanogpt-bench: error: Broken pipe\n"


def test_prepare_then_run_and_runs_without_a_name_are_numbered(text_file, capsys):
    assert (
        main(
            [
                "prepare",
                "text",
                "--input",
                str(text_file),
                "--tokenizer",
                "char",
                "--out",
                "data/fox",
            ]
        )
        == 0
    )
    assert "data/fox" in capsys.readouterr().out
    command = ["run", "bf16_baseline.yaml", "--data.dir", "data/fox", *QUICK]
    assert main([*command, "--name", "a"]) == 0
    assert "finished after 3 steps" in capsys.readouterr().out
    assert json.loads(Path("runs/a/summary.json").read_text())["steps"] == 3
    assert main([*command, "--name", "a"]) == 2
    assert [main(command), main(command)] == [0, 0]
    assert sorted(path.name for path in Path("runs").iterdir()) == [
        "a",
        "bf16_baseline",
        "bf16_baseline-2",
    ]


def test_a_failed_run_exits_with_1(corpus_dir, capsys):
    wild = ["--rule=sgd", "--optimizer.lr=1e30", "--optimizer.grad_clip=0", "--train.max_steps=30"]
    assert main(["run", "bf16_baseline", f"--data.dir={corpus_dir}", *QUICK[1:], *wild]) == 1
    assert "failed: train/loss is" in capsys.readouterr().out


def test_the_default_corpus_is_prepared_on_the_fly(capsys):
    assert main(["run", "bf16_baseline", *QUICK]) == 0
    assert Path("data/stdlib/meta.json").is_file()
    assert "preparing data/stdlib" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["rich", "pydantic", "vl_convert"])
def test_a_missing_package_is_named_with_its_extra(package, tmp_path):
    script = f"import sys; sys.modules[{package!r}] = None; from nanogpt_bench.cli import main; "
    script += "sys.exit(main(['compare', '--max-steps', '1', '--out', 'out']))"
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 2
    assert (
        process.stderr.strip()
        .splitlines()[-1]
        .startswith(f"nanogpt-bench: error: not installed: {package}; ")
    )
    assert "fp8manifold[bench]" in process.stderr
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("steps", "warned"), [(2, False), (3, True)])
def test_a_warm_up_that_outlasts_the_run_is_said(steps, warned, corpus_dir, capsys):
    words = [*QUICK, "--data.dir", str(corpus_dir), f"--optimizer.warmup_steps={steps}"]
    assert main(["run", "bf16_baseline.yaml", *words]) == 0
    assert (
        "steps of warm-up in a run of 3: the learning rate rises to" in capsys.readouterr().err
    ) is warned


def test_a_byte_order_mark_is_no_token(tmp_path):
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbf" + b"some words, " * 100)
    prepare_text(tmp_path / "text", tmp_path / "out", "byte")
    corpus = load_corpus(tmp_path / "out", 4)
    assert bytes(corpus.train[:4].tolist()) == b"some"
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbf\n")
    with refusal("is empty"):
        read_corpus_text(tmp_path / "text")


def test_a_corpus_that_is_not_there_from_here_is_not_to_be_prepared_anew(
    tiny, working_folder, corpus_dir, monkeypatch, refused
):
    (working_folder / "d").symlink_to(corpus_dir)
    run(tiny(data__dir="d", train__max_steps=1), working_folder / "r")
    (working_folder / "inner").mkdir()
    monkeypatch.chdir(working_folder / "inner")
    message = refused("evaluate", "../r", "--formats", "E4M3")
    assert "start in the folder where it is, or give its whole path as --data.dir" in message
