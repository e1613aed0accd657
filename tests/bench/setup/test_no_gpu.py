"""A GPU that is asked for and not there: one line and exit code 2 before anything is prepared, started or written."""

from pathlib import Path

import pytest
import torch
from laws import each

from nanogpt_bench.cli import main
from nanogpt_bench.sweep import workers as pool
from nanogpt_bench.sweep.workers import RayCluster

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
