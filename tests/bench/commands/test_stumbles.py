"""Messages and exit codes where a user stumbles: warm-ups, empty files, other folders, signals."""

import signal

import pytest
from bench_runs import flags, refusal

from nanogpt_bench.cli import main
from nanogpt_bench.data.batches import load_corpus
from nanogpt_bench.data.text import prepare_text, read_text
from nanogpt_bench.loop.train import run

SMALL = {"model.n_layer": 1, "model.n_head": 2, "model.n_embd": 16, "model.block_size": 8, "model.size": "null"}
SMALL |= {"train.max_steps": 2, "eval.batches": 1, "eval.interval": 2}


def test_a_warm_up_that_outlasts_the_run_is_said(corpus_dir, here, capsys):
    for steps, said in ((1, False), (2, True)):
        given = SMALL | {"data.dir": corpus_dir, "optimizer.warmup_steps": steps}
        assert main(["run", "bf16_baseline.yaml", *flags(given)]) == 0
        assert ("steps of warm-up in a run of 2: the learning rate rises to" in capsys.readouterr().err) is said


def test_a_byte_order_mark_is_no_token(tmp_path):
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbf" + b"some words, " * 100)
    prepare_text(tmp_path / "text", tmp_path / "out", "byte")
    corpus = load_corpus(tmp_path / "out", 4)
    assert bytes(corpus.train[:4].tolist()) == b"some"
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbf\n")
    with refusal("is empty"):
        read_text(tmp_path / "text")


def test_a_corpus_that_is_not_there_from_here_is_not_to_be_prepared_anew(
    tiny, tmp_path, corpus_dir, monkeypatch, capsys
):
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "there" / "d").symlink_to(corpus_dir)
    monkeypatch.chdir(tmp_path / "there")
    run(tiny(data__dir="d", train__max_steps=1), tmp_path / "there" / "r")
    monkeypatch.chdir(tmp_path / "here")
    assert main(["evaluate", "../there/r", "--formats", "E4M3"]) == 2
    said = capsys.readouterr().err
    assert "start where it is, or give its whole path as --data.dir" in said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_with_its_number(number, code, monkeypatch, text_file):
    monkeypatch.setattr("nanogpt_bench.commands.prepare.main", lambda _: signal.raise_signal(number))
    before = signal.getsignal(signal.SIGTERM)
    interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        assert main(["prepare", "text", "--input", str(text_file)]) == code
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupts)
