"""Memory by arithmetic and of this machine, and machines without a GPU."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laws import each
from torch import Tensor, nn

from nanogpt_bench.cli import main
from nanogpt_bench.loop.train import run
from nanogpt_bench.setup.memory import bytes_of, held_bytes
from nanogpt_bench.sweep import workers as pool
from nanogpt_bench.sweep.workers import RayCluster
from nanogpt_bench.system.signals import StopRequest


class Packed(Tensor):
    """A wrapper that looks like float32 and holds one byte an element, and a scale."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes):
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale = codes, torch.ones(())
        return made

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


def bytes_with(**kept: Any) -> int:
    """The bytes that an optimizer without memory of its own holds with this in its state."""
    layer = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.state[layer.weight].update(kept)
    return held_bytes(layer, optimizer) - 4


def test_each_memory_counts_once_and_a_wrapper_as_what_is_inside_it():
    whole = torch.zeros(100)
    assert bytes_with(kept=Packed(torch.zeros(100, dtype=torch.uint8))) == 100 + 4
    assert bytes_with(kept=[whole, whole.view(10, 10), whole[:3]]) == 400
    assert bytes_with(kept={whole: 1, "b": [2.0, (whole[:3], {"c": torch.zeros(1)})]}) == 404
    assert bytes_with(kept=whole[:3]) == 400  # a view keeps all of its memory
    assert bytes_with(kept=[torch.zeros(0), torch.zeros(0)]) == 0
    layer = nn.Linear(1, 1, bias=False)
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


@each(
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
    assert held_bytes(layer, optimizer) == 4 * 2048  # nothing before the first step, and no gradients
    optimizer.step()
    steps = 4 if isinstance(optimizer, torch.optim.AdamW) else 0
    assert held_bytes(layer, optimizer) == bytes_of([layer.weight], optimizer) == per_parameter * 2048 + steps


class Asked(StopRequest):
    """A stop that is asked for once a step is reached."""

    def at(self, step):
        def follow(progress):
            if progress.step == step:
                self.note(signal.SIGTERM)

        return follow


@pytest.mark.parametrize("rule", ["stochastic", "fisher"])
def test_a_model_has_one_number_of_bytes_however_its_run_ended(tiny, tmp_path, rule):
    """The last step was watched or not, another follows, or the run was resumed with or without a step to do."""
    config = tiny(rule=rule, model__format="E4M3", monitor__interval=100, train__max_steps=5)
    ends = {"whole": run(config, tmp_path / "whole")}
    stop = Asked()
    ends["stopped"] = run(config, tmp_path / "other", stop=stop, on_progress=stop.at(3))
    ends["gone on"] = run(config, tmp_path / "other", resume=True)
    ends["nothing left"] = run(config, tmp_path / "other", resume=True)
    assert len({end["status"] for end in ends.values()}) == 2
    for figure in ("bytes_per_parameter", "bytes_per_quantized_parameter"):
        assert {end[figure] for end in ends.values()} == {ends["whole"][figure]}, figure


def test_a_run_that_took_no_step_has_none(tiny, tmp_path):
    stop = Asked()
    ended = run(tiny(), tmp_path / "r", stop=stop, on_progress=stop.at(0))
    assert (ended["status"], ended["steps"], ended["bytes_per_parameter"]) == ("stopped", 0, None)
    assert run(tiny(), tmp_path / "r", resume=True)["bytes_per_parameter"] == pytest.approx(12, rel=0.005)


AXES = "axes: {model.format: [E4M3, E5M2]}\nsettings: {rule: stochastic, runtime.device: cuda, data.dir: CORPUS}\n"
TUNED = "tune: {seeds: [1]}\nconfirm: {seeds: [2]}\n"
DEVICE = "--runtime.device cuda"
COMMANDS = {
    "run": f"run fp32.yaml {DEVICE}",
    "run, resumed": f"run fp32.yaml --name gone --resume {DEVICE}",
    "finetune": f"finetune --model MODEL --data.dir CORPUS --model.block_size 16 {DEVICE}",
    "compare": f"compare --max-steps 2 {DEVICE}",
    "compare of a text": f"compare --max-steps 2 --data.dir CORPUS --out out {DEVICE}",
    "sweep": f"sweep formats.yaml --data.dir CORPUS {DEVICE}",
    "sweep, in the file": "sweep axes.yaml --out out",
    "sweep, an axis": "sweep device.yaml --out out",
    "sweep of the default text": "sweep default.yaml --out out",
    "tuned on the default text": "sweep tuned_default.yaml --out out",
    "sensitivity": f"sweep sensitivity.yaml --sensitivity --data.dir CORPUS {DEVICE}",
    "tuned": "sweep tuned.yaml --out out",
}


@pytest.fixture
def places(here, corpus_dir, monkeypatch):
    """A folder with sweep files, on a machine without a GPU, where no worker can be started."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(pool, "CONTEXT", "no worker is to be started")
    files = {"axes.yaml": AXES, "tuned.yaml": AXES + TUNED, "device.yaml": AXES.replace("cuda", "cpu")}
    files["device.yaml"] = files["device.yaml"].replace("axes: {", "axes: {runtime.device: [cpu, cuda], ")
    files["device.yaml"] = files["device.yaml"].replace("runtime.device: cpu, ", "")
    files |= {
        name: files[of].replace(", data.dir: CORPUS", "")
        for name, of in (("default.yaml", "axes.yaml"), ("tuned_default.yaml", "tuned.yaml"))
    }
    for name, text in files.items():
        Path(name).write_text(text.replace("CORPUS", str(corpus_dir)))
    return {"CORPUS": str(corpus_dir)}


@each("words", COMMANDS.values(), ids=COMMANDS)
def test_a_gpu_that_is_not_there_is_refused_in_one_line(words, places, tmp_path, capsys):
    if "MODEL" in words:
        import causal_models

        places["MODEL"] = str(causal_models.write(tmp_path / "model"))
    before = sorted(tmp_path.iterdir())
    assert main([places.get(word, word) for word in words.split()]) == 2
    said = capsys.readouterr()
    line = "nanogpt-bench: error: runtime.device: 'cuda' is not available on this machine; allowed: auto, cpu\n"
    assert (said.out, said.err) == ("", line)
    assert sorted(tmp_path.iterdir()) == before


@each("name", ["cuda:7", "mps", "gpu", ""])
@each("command", ["run fp32.yaml", "compare", "sweep formats.yaml"])
def test_other_devices_are_not_known(command, name, refused):
    said = refused(*command.split(), "--runtime.device", name)
    assert f"runtime.device: {name!r} is not known" in said
    assert "allowed: auto, cpu, cuda" in said


def test_a_cluster_is_asked_for_its_own_gpus(tmp_path):
    class Nodes:
        def __init__(self, gpus):
            self.gpus = gpus

        def cluster_resources(self):
            return {"CPU": 4.0} | ({"GPU": self.gpus} if self.gpus else {})

    RayCluster(Nodes(1.0), tmp_path).check_device("cuda")
    cluster = RayCluster(Nodes(0.0), tmp_path)
    cluster.check_device("auto")
    with pytest.raises(ValueError, match="not available on any node of the cluster; allowed: auto, cpu"):
        cluster.check_device("cuda")
