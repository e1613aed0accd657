"""Memory that a run needs by arithmetic, and that this machine has.

Also machines without a GPU.
"""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_runs import refusal
from torch import nn

import fp8manifold as fm
from nanogpt_bench.config.rules import available_rules
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import build_config, find_config, load_config, shipped_configs
from nanogpt_bench.data.batches import open_corpus
from nanogpt_bench.loop.train import run
from nanogpt_bench.model.gpt import build_model
from nanogpt_bench.setup.memory import (
    bytes_each,
    bytes_with_state,
    check_fits,
    held_bytes,
    parameters_of,
)
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.task import model_shape
from nanogpt_bench.sweep import workers as pool
from nanogpt_bench.sweep.file import SWEEPS_FOLDER, find_sweep, read_sweep
from nanogpt_bench.sweep.plan import plan_sweep
from nanogpt_bench.sweep.workers import RayCluster
from nanogpt_bench.system import free_memory
from nanogpt_bench.system.signals import StopRequest

GIB = 2**30
TOO_MUCH = (
    "model.n_embd 2000000",
    f"model.n_embd {10**18}",
    f"train.batch_size {10**9}",
    f"eval.batches {10**11}",
)
SWEEP = "axes: {optimizer.beta1: [0.9]}\nsettings: {rule: stochastic, model.format: E4M3}\n"
TUNED = "tune: {seeds: [1]}\nconfirm: {seeds: [2]}\n"
TRAINING = ["run fp32.yaml", "run e4m3.yaml --train.precision bf16-mixed", "compare --max-steps 2"]
TRAINING += ["sweep axes.yaml --out out", "sweep tuned.yaml --out out"]


@pytest.fixture
def folder(working_folder, monkeypatch):
    """A folder with sweep files on a machine of 4 GiB free.

    It has no GPU, and no worker can be started.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(free_memory, "free_memory", lambda: 4 * GIB)
    monkeypatch.setattr(pool, "CONTEXT", "no worker is to be started")
    Path("axes.yaml").write_text(SWEEP)
    Path("tuned.yaml").write_text(SWEEP + TUNED)
    return working_folder


@pytest.mark.parametrize("command", TRAINING)
@pytest.mark.parametrize("setting", TOO_MUCH)
def test_a_training_that_does_not_fit_is_refused_before_a_text_is_prepared(
    setting, command, folder, refused
):
    key, value = setting.split()
    old_files = sorted(folder.iterdir())
    message = refused(*command.split(), "--model.n_head", "1", f"--{key}", value)
    assert f"{key} {value}" in message
    assert "GiB are free" in message
    assert sorted(folder.iterdir()) == old_files


@pytest.mark.parametrize("setting", TOO_MUCH[2:])
def test_nor_is_a_model_trained_further(setting, folder, refused):
    import causal_models

    finetune = [
        "finetune",
        "--model",
        str(causal_models.write(folder / "model")),
        "--model.block_size",
        "16",
    ]
    old_files = sorted(folder.iterdir())
    message = refused(*finetune, *f"--{setting}".split())
    assert setting in message
    assert "GiB are free" in message
    assert sorted(folder.iterdir()) == old_files


@pytest.mark.parametrize(
    ("key", "value", "limit"), [("runtime.threads", 10**6, 1024), ("model.n_layer", 10**9, 4096)]
)
def test_layers_and_threads_have_a_limit(key, value, limit, corpus_dir, refused):
    message = refused("run", "e4m3.yaml", "--data.dir", corpus_dir, f"--{key}", value)
    assert f"{key}: {value} is out of range; give a whole number >= 1 and <= {limit}" in message


def test_what_is_counted_is_what_a_model_has(tiny):
    config = resolve(tiny())
    shape = model_shape(config, open_corpus(config))
    matrices = [
        parameter for parameter in build_model(shape, 0).parameters() if parameter.dim() == 2
    ]
    assert parameters_of(shape) == sum(parameter.numel() for parameter in matrices)


@pytest.mark.parametrize(
    ("rule", "fmt", "fewest"),
    [
        ("fp32", None, 16),
        ("sgd", None, 12),
        ("bf16-pure", None, 8),
        ("stochastic", "E4M3", 13),
        ("stochastic-8bit", "E4M3", 7),
        ("lion-stochastic", "E4M3", 6),
        ("adafactor-stochastic", "E4M3", 5),
        ("adafactor", None, 8),
    ],
)
def test_a_rule_has_its_fewest_bytes(rule, fmt, fewest):
    settings = {"rule": rule} if fmt is None else {"rule": rule, "model.format": fmt}
    assert bytes_each(resolve(build_config(settings))) == fewest


def test_shipped_files_are_for_a_machine_of_24_gigabytes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(free_memory, "free_memory", lambda: 20 * GIB)
    all_rules = available_rules()
    for name in shipped_configs():
        config = load_config(find_config(name))
        if (
            config.rule in (None, *all_rules)
            and not config.model.pretrained
            and not config.model.init_from
        ):
            check_fits(resolve(config))
    for name in (path.name for path in SWEEPS_FOLDER.glob("*.yaml")):
        sweep = read_sweep(find_sweep(name), [])
        rules = sweep.axis("rule")
        if sweep.axes and {sweep.base.get("rule"), *(rules.grid() if rules else ())} <= {
            None,
            *all_rules,
        }:
            for run in plan_sweep(sweep):
                check_fits(resolve(build_config(run.settings)))
    check_fits(
        resolve(build_config({"rule": "fp32", "model.size": "124M", "train.batch_size": 12}))
    )


def test_the_smallest_size_needs_less_than_a_gigabyte_and_batches_of_few_texts_no_more(
    labelled_dir, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(free_memory, "free_memory", lambda: GIB)
    check_fits(resolve(Config()))
    with refusal("GiB are free"):
        check_fits(resolve(build_config({"model.size": "124M"})))
    config = build_config(
        {"task": "classify", "data.dir": str(labelled_dir), "eval.batches": 10**11}
    )
    config = resolve(config)
    check_fits(config, model_shape(config, open_corpus(config)))


MEMINFO = {"meminfo": "MemTotal: 9000 kB\nMemAvailable:   8000 kB\n"}
NO_LIMIT = MEMINFO | {"memory.max": "max\n", "memory.current": "900000\n"}
LIMIT = NO_LIMIT | {"memory.max": "1000000\n"}
STAT = "anon 100000\ninactive_anon 7\ninactive_file 500000\nactive_file 300000\n"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        pytest.param(MEMINFO, 8000 * 1024, id="no group"),
        pytest.param(NO_LIMIT, 8000 * 1024, id="no limit"),
        pytest.param(LIMIT, 100_000, id="limit"),
        pytest.param(LIMIT | {"memory.stat": STAT}, 900_000, id="files that were read"),
    ],
)
def test_what_was_read_counts_as_free(tmp_path, monkeypatch, files, free):
    monkeypatch.setattr(free_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "_CONTROL_GROUP", tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert free_memory.free_memory() == free


def test_what_fits_is_trained(tiny, folder, monkeypatch):
    monkeypatch.setattr(free_memory, "free_memory", lambda: 10_000_000)
    assert run(tiny(), folder / "run")["status"] == "finished"


def test_each_memory_counts_once_and_a_wrapper_as_what_is_inside_it():
    layer = nn.Linear(1, 1, bias=False)

    def bytes_with(option):
        """The bytes that an optimizer is counted to hold with this in its state."""
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        optimizer.state[layer.weight]["kept"] = option
        return held_bytes(layer, optimizer) - 4

    whole, packed = torch.zeros(100), fm.FP8Tensor(torch.ones(4, 25), "E4M3")
    assert (
        bytes_with(packed)
        == sum(getattr(packed, name).nbytes for name in packed.__tensor_flatten__()[0])
        < 200
    )
    assert bytes_with([whole, whole.view(10, 10), whole[:3]]) == 400
    assert bytes_with({whole: 1, "b": [2.0, (whole[:3], {"c": torch.zeros(1)})]}) == 404
    assert bytes_with(whole[:3]) == 400  # a view keeps all of its memory
    assert bytes_with([torch.zeros(0), torch.zeros(0)]) == 0
    optimizer = torch.optim.SGD(layer.parameters(), lr=torch.tensor(0.1))
    vars(optimizer).update(scratch=SimpleNamespace(room=torch.zeros(10)))  # which is made anew
    assert held_bytes(layer, optimizer) == 4 + 4  # the weight and the rate


def test_gradients_do_not_count_while_the_model_has_them():
    layer = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 8)).sum().backward()
    optimizer.state[layer.weight]["kept"] = layer.weight.grad.view(-1)
    assert held_bytes(layer, optimizer) == 256
    optimizer.zero_grad()
    assert held_bytes(layer, optimizer) == 512


@pytest.mark.parametrize(
    ("make", "per_parameter"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 4),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 8),
        (lambda p: torch.optim.AdamW(p), 12),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 16),
    ],
)
def test_an_optimizer_counts_with_everything_it_keeps_between_steps(make, per_parameter):
    layer = nn.Linear(64, 32, bias=False)
    optimizer = make(layer.parameters())
    layer(torch.ones(1, 64)).sum().backward()
    assert (
        held_bytes(layer, optimizer) == 4 * 2048
    )  # nothing before the first step, and no gradients
    optimizer.step()
    steps = 4 if isinstance(optimizer, torch.optim.AdamW) else 0
    assert (
        held_bytes(layer, optimizer)
        == bytes_with_state([layer.weight], optimizer)
        == per_parameter * 2048 + steps
    )


def asked_at(step: int) -> dict[str, Any]:
    """A stop request that comes when a step is reached."""
    stop = StopRequest()
    return {
        "stop": stop,
        "on_progress": lambda progress: progress.step == step and stop.note(signal.SIGTERM),
    }


@pytest.mark.parametrize("rule", ["stochastic", "fisher"])
def test_a_model_has_one_number_of_bytes_however_its_run_ended(tiny, tmp_path, rule):
    """The last step was watched or not.

    Another follows, or the run was resumed with or without a step to do.
    """
    config = tiny(rule=rule, model__format="E4M3", monitor__interval=100, train__max_steps=5)
    ends = {"whole": run(config, tmp_path / "whole")}
    ends["stopped"] = run(config, tmp_path / "other", **asked_at(3))
    ends["gone on"] = run(config, tmp_path / "other", resume=True)
    ends["nothing left"] = run(config, tmp_path / "other", resume=True)
    assert len({end["status"] for end in ends.values()}) == 2
    for figure in ("bytes_per_parameter", "bytes_per_quantized_parameter"):
        assert {end[figure] for end in ends.values()} == {ends["whole"][figure]}, figure


def test_a_run_that_took_no_step_has_none(tiny, tmp_path):
    ended = run(tiny(), tmp_path / "r", **asked_at(0))
    assert (ended["status"], ended["steps"], ended["bytes_per_parameter"]) == ("stopped", 0, None)
    assert run(tiny(), tmp_path / "r", resume=True)["bytes_per_parameter"] == pytest.approx(
        12, rel=0.005
    )


DEVICE = "--runtime.device cuda"
ON_CUDA = [
    f"run fp32.yaml {DEVICE}",
    f"run fp32.yaml --name gone --resume {DEVICE}",
    f"compare --max-steps 2 {DEVICE}",
]
ON_CUDA += [f"finetune --model MODEL --data.dir CORPUS --model.block_size 16 {DEVICE}"]
ON_CUDA += [f"sweep formats.yaml --data.dir CORPUS {DEVICE}"]
ON_CUDA += [f"sweep sensitivity.yaml --sensitivity --data.dir CORPUS {DEVICE}"]
ON_CUDA += [f"sweep {name}.yaml --out out" for name in ("setting", "axis", "tuned")]


@pytest.mark.parametrize("words", ON_CUDA)
def test_a_gpu_that_is_not_there_is_refused_in_one_line(words, folder, corpus_dir, refused):
    import causal_models

    places = {"CORPUS": str(corpus_dir), "MODEL": str(causal_models.write(folder / "model"))}
    setting = SWEEP.replace("{rule", "{runtime.device: cuda, rule")
    axis = SWEEP.replace("axes: {", "axes: {runtime.device: [cpu, cuda], ")
    for name, text in {"setting": setting, "axis": axis, "tuned": setting + TUNED}.items():
        Path(f"{name}.yaml").write_text(text)
    old_files = sorted(folder.iterdir())
    message = refused(*(places.get(word, word) for word in words.split()))
    assert "runtime.device: 'cuda' is not available on this machine; allowed: auto, cpu" in message
    assert sorted(folder.iterdir()) == old_files


def test_an_empty_device_is_not_the_default(refused):
    message = refused("run", "fp32.yaml", "--runtime.device", "")
    assert (
        "--runtime.device: '' is not allowed; give one of auto, cpu, cuda, or leave it" in message
    )


@pytest.mark.parametrize("name", ["cuda:7", "mps"])
def test_other_devices_are_not_known(name, refused):
    message = refused("run", "fp32.yaml", "--runtime.device", name)
    assert f"runtime.device: {name!r} is not known" in message
    assert "allowed: auto, cpu, cuda" in message


def test_a_cluster_is_asked_for_its_own_gpus(tmp_path):
    RayCluster(
        SimpleNamespace(cluster_resources=lambda: {"CPU": 4.0, "GPU": 1.0}), tmp_path
    ).check_device("cuda")
    cluster = RayCluster(SimpleNamespace(cluster_resources=lambda: {"CPU": 4.0}), tmp_path)
    cluster.check_device("auto")
    with pytest.raises(
        ValueError, match="not available on any node of the cluster; allowed: auto, cpu"
    ):
        cluster.check_device("cuda")
