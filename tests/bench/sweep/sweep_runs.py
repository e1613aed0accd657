"""Files that sweeps leave in the current folder.

Also sweeps that train in the test's own process.
"""

import json
from pathlib import Path

from nanogpt_bench.config.settings import build_config
from nanogpt_bench.loop.train import run
from nanogpt_bench.sweep import session
from nanogpt_bench.sweep.workers import JobEvent


class PoolOfNone:
    """A pool that does the jobs itself, one after another.

    A worker process takes longer to import torch than a tiny run takes.
    """

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def kill(self):
        pass

    def run(self, jobs, order):
        while order:
            job = order.popleft()
            yield JobEvent(job, "started")
            content = json.loads(json.dumps(jobs[job]))
            run(
                build_config(content["settings"]),
                Path(content["run_dir"]),
                resume=content["resume"],
            )
            yield JobEvent(job, "done")


def train_here(patch):
    """Have sweeps train in this process, and leave out the pictures of their reports."""
    patch.setattr(session, "Pool", PoolOfNone)
    patch.setattr("nanogpt_bench.report.write_figures", lambda *_: None)


def small(corpus_dir, lines):
    """Settings of a model that trains in a moment, and more."""
    settings = {"data.dir": str(corpus_dir), "runtime.threads": 1}
    settings |= {"model.n_layer": 1, "model.n_head": 2, "model.n_embd": 16, "model.block_size": 16}
    settings |= {
        "train.batch_size": 4,
        "train.precision": "float32",
        "eval.interval": 1000,
        "eval.batches": 2,
    }
    return settings | lines


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def runs_of(folder):
    return {entry["name"]: entry for entry in read_json(folder / "sweep.json")["runs"]}


def trained():
    """The runs that stub workers were given since the last call, in order."""
    path = Path("done.txt")
    names = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return names
