"""Files of earlier versions are read to the bit, or refused by name.

`stored_folders.py` wrote each folder of `tests/stored` in the version that its name says.
"""

import json
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stored_folders import TOKENS, digest_of, prepare_corpus, train

import fp8manifold as fm

STORED = Path(__file__).parent / "stored"
VERSIONS = sorted(path.name for path in STORED.iterdir())
versions = pytest.mark.parametrize("version", VERSIONS)
#: models with the states of their optimizers; earlier versions had the form ``attached``
SAVED = [
    (version, kind)
    for version, kind in product(VERSIONS, ("attached", "floats", "codes"))
    if (STORED / version / kind).is_dir()
]
#: what transformers announces while it reads is its own business
pytestmark = pytest.mark.filterwarnings("ignore")


def facts_of(version):
    return json.loads((STORED / version / "facts.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("version", "kind"), [pair for pair in SAVED if pair[1] == "attached"])
def test_transformers_reads_codes_of_earlier_versions(version, kind):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(STORED / version / kind)
    assert digest_of(model) == facts_of(version)[kind]["weights"]
    in_codes = [p for p in model.parameters() if isinstance(p, fm.FP8Tensor)]
    assert len(in_codes) == 8


@pytest.mark.parametrize("version", [version for version, kind in SAVED if kind == "floats"])
def test_transformers_reads_floats_with_the_same_values(version):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(STORED / version / "floats", dtype=torch.float32)
    assert digest_of(model) == facts_of(version)["floats"]["weights"]


@pytest.mark.parametrize(
    ("version", "kind"), [*SAVED, *((version, "published") for version in VERSIONS)]
)
def test_load_reads_them_to_the_bit(version, kind, tmp_path):
    model = fm.load(STORED / version / kind, dtype=torch.float32)
    assert digest_of(model) == facts_of(version)[kind]["weights"]
    fm.save(model, tmp_path, "floats")
    assert digest_of(fm.load(tmp_path)) == facts_of(version)[kind]["weights"]


@pytest.mark.parametrize(("version", "kind"), SAVED)
def test_the_state_of_an_optimizer_goes_on(version, kind):
    model = fm.load(STORED / version / kind).train()
    optimizer = fm.optim.StiffnessAdamW(model.parameters(), lr=1e-2, moments="8bit")
    state = optimizer.state_dict()
    folder = STORED / version / kind
    folder = folder if kind == "attached" else folder / "optimizer"
    tensors = load_file(folder / "optimizer.safetensors")
    plain = json.loads((folder / "optimizer.json").read_text(encoding="utf-8"))
    state["state"] = {}
    for name, value in (tensors | plain).items():
        number, _, entry = name.partition(".")
        state["state"].setdefault(int(number), {})[entry] = value
    optimizer.load_state_dict(state)
    old_digest = digest_of(model)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    assert digest_of(model) != old_digest
    steps = {float(entries["step"]) for entries in optimizer.state.values()}
    assert steps == {3.0}


@versions
def test_a_run_of_the_bench_goes_on(version, tmp_path):
    prepare_corpus(tmp_path)
    shutil.copytree(STORED / version / "run", tmp_path / "runs" / "run")
    train(tmp_path, 8, "--resume", "--allow-config-change")
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    expected = facts_of(version)["run"]["loss_after_eight_steps"]
    # Another processor may round sums otherwise.
    assert summary["final_val_loss"] == pytest.approx(expected, abs=2e-3)
    assert summary["steps"] == 8
