"""A sweep file over a tiny model, and workers that train nothing."""

import json
import os
from pathlib import Path

import pytest
import yaml
from sweep_runs import small

from nanogpt_bench.sweep import workers as pool_module


def stub(job):
    """Write what a training would have found.

    At a rate of 13 the worker dies, unless STUB_MEMORY says that there is enough; above 0.3
    (0.1 for seed 3) the run diverges.
    """
    settings, folder = job["settings"], Path(job["run_dir"])
    lr, seed = settings["optimizer.lr"], settings.get("seed", 42)
    if lr == 13 and os.environ.get("STUB_MEMORY") != "enough":
        os.write(2, b"out of memory\n")
        os._exit(9)
    assert not folder.exists()
    folder.mkdir(parents=True)
    bad = 13 > lr > (0.1 if seed == 3 else 0.3)
    summary = {
        "name": folder.name,
        "rule": settings.get("rule"),
        "format": "none",
        "seed": seed,
        "steps": 4,
    }
    summary |= {
        "status": "failed" if bad else "finished",
        "first_val_loss": 5.0,
        "best_val_loss": 2.0,
    }
    summary |= {
        "failure": {"kind": "nan", "message": "train/loss is nan at step 3", "step": 3}
        if bad
        else None
    }
    summary |= {"failures": [{"kind": "divergence"}, {"kind": "nan"}] if bad else []}
    summary |= {
        "final_val_loss": None if bad else 2.0 + lr / 10,
        "threads": settings["runtime.threads"],
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    with open("done.txt", "a") as log:
        print(folder.name, file=log)
    return {"kind": "done"}


@pytest.fixture
def write(working_folder, corpus_dir):
    """Return a function that writes a sweep file over a tiny model.

    Its folder becomes the current one.
    """
    base = small(
        corpus_dir,
        {"model.n_layer": 2, "train.max_steps": 4, "eval.interval": 2, "optimizer.warmup_steps": 1},
    )

    def writer(**content):
        settings = content.get("settings", {})
        rest = {key: value for key, value in base.items() if key.partition(".")[0] not in settings}
        path = working_folder / "my.yaml"
        path.write_text(
            yaml.safe_dump({**content, "settings": {**rest, **settings}}, sort_keys=False)
        )
        return path

    return writer


@pytest.fixture
def _stub_workers(monkeypatch, _forked_workers, _no_figures):
    """Workers that train nothing, and reports without pictures.

    Pictures take most of the time and no part in this.
    """
    monkeypatch.setattr(pool_module, "SERVE", stub)
