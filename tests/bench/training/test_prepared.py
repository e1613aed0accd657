"""A run is resolved and checked once, before its model is made."""

import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import sweep_runs
from bench_runs import flags, refusal

from nanogpt_bench.checkpoint import check_room
from nanogpt_bench.cli import main
from nanogpt_bench.config.settings import build_config, load_config
from nanogpt_bench.data import prepare_default
from nanogpt_bench.data.batches import (
    TextChangedError,
    digests_in,
    open_corpus,
    read_meta,
    refuse_changed,
)
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.loop.prepared import prepare_run
from nanogpt_bench.loop.resume import check_unused
from nanogpt_bench.loop.trackers import check_trackers
from nanogpt_bench.loop.trainer import Trainer
from nanogpt_bench.setup.memory import check_fits
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.runtime import check_device, check_ranks, refuse_parallel
from nanogpt_bench.system.free_memory import check_memory

#: checks, and how often each is made for a run that begins
CHECKS = {
    load_config: 1,
    build_config: 1,
    resolve: 1,
    check_ranks: 1,
    # that of a sweep, whose runs are planned
    refuse_parallel: 0,
    check_device: 1,
    check_trackers: 1,
    check_fits: 1,
    check_memory: 1,
    read_meta: 1,
    open_corpus: 1,
    refuse_changed: 1,
    check_unused: 1,
    check_room: 1,
}


def calls_of(command):
    """Return how often each function is called before the first step of a command."""
    calls = Counter()
    has_begun = False

    def count(frame, event, _):
        nonlocal has_begun
        has_begun |= frame.f_code is Trainer.train_step.__code__
        if event == "call" and not has_begun:
            calls[frame.f_code] += 1

    sys.setprofile(count)
    try:
        assert main(command) == 0
    finally:
        sys.setprofile(None)
    assert has_begun
    return calls


@pytest.fixture(scope="module")
def words(tiny):
    """Settings of a small run, as words of a command line."""
    config = tiny(train__max_steps=1, optimizer__warmup_steps=0, checkpoint__last=False)
    settings = {"data.dir": config.data.dir, "train.max_steps": 1, "optimizer.warmup_steps": 0}
    settings |= {"model.n_layer": 1, "model.n_head": 2, "model.n_embd": 16, "model.block_size": 16}
    settings |= {"train.batch_size": 4, "eval.batches": 2}
    return flags(settings)


@pytest.fixture(scope="module")
def calls(words, tmp_path_factory):
    """The calls of a new run, and of the same one that is resumed without a checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        begun = calls_of(["run", "e4m3.yaml", *words])
        shutil.rmtree("runs")
        return {"new": begun, "resumed": calls_of(["run", "e4m3.yaml", "--resume", *words])}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_new_run_makes_each_check_once(calls, check):
    assert calls["new"][check.__code__] == CHECKS[check]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_resumed_run_makes_the_same_checks_but_for_the_folder(calls, check):
    expected = 0 if check is check_unused else CHECKS[check]
    assert calls["resumed"][check.__code__] == expected


@pytest.fixture(scope="module")
def calls_of_sweep(corpus_dir, tmp_path_factory):
    """The calls of a sweep of one run, up to its first step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("sweep"))
        sweep_runs.train_here(patch)
        settings = sweep_runs.small(corpus_dir, {"train.max_steps": 1, "rule": "fp32"})
        Path("one.yaml").write_text(f"axes: {{seed: [1]}}\nsettings: {settings}\n")
        return calls_of(["sweep", "one.yaml", "--out", "out"])


@pytest.mark.parametrize(
    ("check", "count"),
    [(resolve, 2), (check_device, 2), (check_fits, 2), (check_ranks, 1), (open_corpus, 2)],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_a_sweep_checks_a_run_once_itself_and_once_where_it_is_trained(
    calls_of_sweep, check, count
):
    assert calls_of_sweep[check.__code__] == count


def test_what_a_run_needs_is_known_before_its_default_text_is_written(working_folder):
    config = load_config(None, ["--model.n_embd", "64", "--train.batch_size", "2"])
    before = prepare_run(config, Path("run"), make_default=True)
    after = prepare_run(config, Path("run"), make_default=True)
    assert before.needed_bytes == after.needed_bytes > 0
    assert not Path("run").exists()


def test_only_a_command_writes_the_default_text(working_folder):
    with refusal("data/stdlib' does not exist"):
        prepare_run(load_config(None), Path("run"))
    assert not list(working_folder.iterdir())


@pytest.mark.parametrize("damage", ["another text", "half a text", "no text"])
def test_a_text_that_has_changed_is_refused_as_such_although_it_can_not_be_opened(
    tiny, corpus_dir, tmp_path, damage
):
    folder = tmp_path / "text"
    shutil.copytree(corpus_dir, folder)
    digests = {str(folder): digests_in(folder)}
    config = tiny(data__dir=folder)
    assert prepare_run(config, tmp_path / "run", texts=digests).corpus.folder == folder
    shutil.rmtree(folder)
    if damage != "no text":
        (folder.parent / "fox.txt").write_text("another text " * 1000)
        prepare_text(folder.parent / "fox.txt", folder, "char")
    if damage == "half a text":
        (folder / "val.bin").unlink()
    with pytest.raises(TextChangedError, match="has changed since this sweep began"):
        prepare_run(config, tmp_path / "run", texts=digests)


def test_prepare_default_writes_what_prepare_run_counts_on(working_folder):
    prepare_default("data/stdlib")
    assert prepare_run(load_config(None), Path("run")).corpus.vocab_size == 257
