"""More than a machine has is refused in one line, before anything of it is made; what fits is not refused."""

from pathlib import Path

import pytest
import torch
from bench_runs import refusal
from laws import each

from nanogpt_bench.cli import main
from nanogpt_bench.config.rules import available_rules
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import build_config, find_config, load_config, shipped_configs
from nanogpt_bench.data.batches import open_corpus
from nanogpt_bench.model.gpt import build_model
from nanogpt_bench.setup.memory import bytes_each, check_fits, parameters_of
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.task import model_shape
from nanogpt_bench.sweep import workers as pool
from nanogpt_bench.sweep.file import FOLDER, find_sweep, read_sweep
from nanogpt_bench.sweep.plan import plan_sweep
from nanogpt_bench.system import free_memory

GIB = 2**30
TOO_MUCH = ("model.n_embd 2000000", f"model.n_embd {10**18}", f"train.batch_size {10**9}", f"eval.batches {10**11}")
AXES = "axes: {seed: [1, 2]}\nsettings: {rule: stochastic, model.format: E4M3}\n"
TUNED = "tune: {seeds: [1]}\nconfirm: {seeds: [2]}\n"
TRAINING = {
    "run": "run fp32.yaml",
    "run in a format": "run e4m3.yaml --train.precision bf16-mixed",
    "compare": "compare --max-steps 2",
    "sweep": "sweep axes.yaml --out out",
    "tune": "sweep tuned.yaml --out out",
}


@pytest.fixture
def folder(here, monkeypatch):
    """A folder with sweep files, on a machine without a GPU and with 4 GiB free, where no worker can be started."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(free_memory, "free_memory", lambda: 4 * GIB)
    monkeypatch.setattr(pool, "CONTEXT", "no worker is to be started")
    Path("axes.yaml").write_text(AXES)
    Path("tuned.yaml").write_text(AXES.replace("seed: [1, 2]", "optimizer.beta1: [0.9]") + TUNED)
    return here


@each("command", TRAINING.values(), ids=TRAINING)
@each("asked", TOO_MUCH)
def test_a_training_that_does_not_fit_is_refused_before_a_text_is_prepared(asked, command, folder, refused):
    key, value = asked.split()
    before = sorted(folder.iterdir())
    said = refused(*command.split(), "--model.n_head", "1", f"--{key}", value)
    assert f"{key} {value}" in said
    assert "GiB are free" in said
    assert sorted(folder.iterdir()) == before


def test_nor_is_a_model_trained_further(folder, refused):
    import causal_models

    finetune = ["finetune", "--model", str(causal_models.write(folder / "model")), "--model.block_size", "16"]
    before = sorted(folder.iterdir())
    for *words, asked in ([*finetune, f"--{asked}"] for asked in TOO_MUCH[2:]):
        said = refused(*words, *asked.split())
        assert asked.removeprefix("--") in said
        assert "GiB are free" in said
    assert sorted(folder.iterdir()) == before


def test_layers_and_threads_have_a_limit(corpus_dir, refused):
    said = refused("run", "e4m3.yaml", "--data.dir", corpus_dir, "--runtime.threads", "100000")
    assert "runtime.threads: 100000 is out of range; give a whole number >= 1 and <= 1024" in said
    said = refused("run", "e4m3.yaml", "--data.dir", corpus_dir, "--model.n_layer", str(10**9))
    assert f"model.n_layer: {10**9} is out of range; give a whole number >= 1 and <= 4096" in said


def test_what_is_counted_is_what_a_model_has(tiny):
    config = resolve(tiny())
    shape = model_shape(config, open_corpus(config))
    matrices = [parameter for parameter in build_model(shape, 0).parameters() if parameter.dim() == 2]
    assert parameters_of(shape) == sum(parameter.numel() for parameter in matrices)


@each(
    ("rule", "fmt", "fewest"),
    [("fp32", None, 12), ("bf16-pure", None, 6), ("stochastic", "E4M3", 9), ("stochastic-8bit", "E4M3", 6)],
)
def test_no_weight_takes_fewer_bytes(rule, fmt, fewest):
    assert bytes_each(resolve(build_config({"rule": rule} | ({"model.format": fmt} if fmt else {})))) == fewest


def test_shipped_files_are_for_a_machine_of_24_gigabytes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(free_memory, "free_memory", lambda: 20 * GIB)
    there = available_rules()
    for name in shipped_configs():
        config = load_config(find_config(name))
        if config.rule in (None, *there) and not config.model.pretrained and not config.model.init_from:
            check_fits(resolve(config))
    for name in (path.name for path in FOLDER.glob("*.yaml")):
        sweep = read_sweep(find_sweep(name), [])
        rules = sweep.axis("rule")
        if sweep.axes and {sweep.base.get("rule"), *(rules.grid() if rules else ())} <= {None, *there}:
            for run in plan_sweep(sweep):
                check_fits(resolve(build_config(run.settings)))
    check_fits(resolve(build_config({"rule": "fp32", "model.size": "124M", "train.batch_size": 12})))


def test_the_smallest_size_needs_less_than_a_gigabyte_and_batches_of_few_documents_do_not_count(
    labelled_dir, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(free_memory, "free_memory", lambda: GIB)
    check_fits(resolve(Config()))
    with refusal("GiB are free"):
        check_fits(resolve(build_config({"model.size": "124M"})))
    config = build_config({"task": "classify", "data.dir": str(labelled_dir), "eval.batches": 10**11})
    check_fits(resolve(config), open_corpus(resolve(config)))


def test_what_was_read_counts_as_free(tmp_path, monkeypatch):
    monkeypatch.setattr(free_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "_GROUP", tmp_path)
    stat = "anon 100000\ninactive_anon 7\ninactive_file 500000\nactive_file 300000\n"
    for files, free in (
        ({"meminfo": "MemTotal: 9000 kB\nMemAvailable:   8000 kB\n"}, 8000 * 1024),
        ({"memory.max": "max\n", "memory.current": "900000\n"}, 8000 * 1024),
        ({"memory.max": "1000000\n"}, 100_000),
        ({"memory.stat": stat}, 900_000),
    ):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        assert free_memory.free_memory() == free


def test_what_fits_is_trained(corpus_dir, folder, monkeypatch):
    monkeypatch.setattr(free_memory, "free_memory", lambda: 10_000_000)
    small = ["--model.block_size", "16", "--model.n_layer", "1", "--model.n_head", "1", "--train.batch_size", "2"]
    words = ["run", "fp32.yaml", "--data.dir", str(corpus_dir), "--model.n_embd", "32", *small]
    assert main([*words, "--train.max_steps", "1", "--eval.batches", "1"]) == 0
