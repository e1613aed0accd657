"""Weights of other packages, in one byte without a master copy: they train, are counted, saved and taken up again."""

import math
from pathlib import Path

import pytest
import torch
from bench_runs import flags, refusal, train, trainer_of
from laws import each

from nanogpt_bench.config.rules import RULES, available_rules
from nanogpt_bench.config.schema import PEER_WEIGHTS, Config
from nanogpt_bench.config.settings import load_config
from nanogpt_bench.data.batches import load_corpus
from nanogpt_bench.loop.train import run
from nanogpt_bench.model.weights import forward_weight, is_packaged, linear_layers
from nanogpt_bench.setup.memory import held_bytes, memory_of
from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.sweep.plan import plan_sweep

#: rule, weights, and the bytes of a quantised weight with its averages, of layers that SDNQ finds large enough
PEERS = (
    ("sdnq-muon", "sdnq-E2M5", 1.125 + 1.25),
    ("sdnq-muon", "sdnq-E4M3", 1.125 + 1.25),
    ("sdnq-muon", "sdnq-int8", 1.125 + 1.25),
    ("sdnq-adamw", "sdnq-E2M5", 1.125 + 2.5),
    ("torchao-int8", "torchao-int8", 1.0 + 2.0 * (1 + 4 / 256)),
)
# torchao tells torch twice what torch now knows by itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*torchao.*", "ignore:.*Enum.*", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def uncompiled():
    """Run what would be compiled as it is written."""
    with torch.compiler.set_stance("force_eager"):
        yield


def peer_config(rule: str, peer: str | None, corpus_dir: Path, *more: str, width: int = 64) -> Config:
    if rule not in available_rules():
        pytest.skip(f"the package of rule {rule}, {RULES[rule].needs}, is not installed")
    given = {"rule": rule, "model.peer": peer or "null", "train.precision": "float32", "data.dir": corpus_dir}
    given |= {"train.max_steps": 12, "model.n_layer": 1, "model.n_head": 2, "model.n_embd": width}
    given |= {"model.block_size": 16, "eval.interval": 12, "optimizer.warmup_steps": 2, "eval.batches": 2}
    return load_config(None, [*flags(given), *more])


@pytest.mark.parametrize(("rule", "peer", "_"), PEERS)
def test_peers_train_with_all_monitors(rule, peer, _, corpus_dir, tmp_path):
    watched = ["--monitor.interval=4", "--checkpoint.every=12"]
    summary = run(peer_config(rule, peer, corpus_dir, *watched), tmp_path / "run")
    assert (summary["status"], summary["rule"], summary["storage"]) == ("finished", rule, "peer")
    assert summary["final_val_loss"] < summary["first_val_loss"] - 0.1
    vocabulary = int(load_corpus(corpus_dir, 16).meta["vocab_size"])
    assert summary["quantized_parameters"] == 12 * 64 * 64 + 64 * vocabulary


@each(("rule", "peer", "expected"), PEERS)
def test_bytes_are_those_of_the_tensors_inside(rule, peer, expected, corpus_dir):
    trainer = trainer_of(peer_config(rule, peer, corpus_dir, width=128))
    train(trainer, 1)
    weight = trainer.model.blocks[0].mlp.fc.weight
    state = [value for value in trainer.optimizer.state[weight].values() if isinstance(value, torch.Tensor)]
    rows = 0 if peer.startswith("sdnq") else 4 / weight.shape[1]
    tables = memory_of([value.qmap for value in state if hasattr(value, "qmap")])
    counts = sum(4 for value in state if value.dim() == 0)
    found = memory_of([weight, *state]) - tables - counts
    assert found / weight.numel() == pytest.approx(expected + rows, rel=1e-6)
    assert held_bytes(trainer.model, trainer.optimizer) >= found


@each(("rule", "peer"), [peer[:2] for peer in PEERS])
def test_the_first_update_is_about_as_large_as_ours(rule, peer, corpus_dir):
    sizes = []
    own = "muon" if rule.endswith("muon") else "fp32"
    for config in (peer_config(rule, peer, corpus_dir, width=128), peer_config(own, None, corpus_dir, width=128)):
        trainer = trainer_of(config)
        layers = {name: layer for name, layer in linear_layers(trainer.model).items() if name != "lm_head"}
        before = {name: forward_weight(layer).clone() for name, layer in layers.items()}
        train(trainer, 3)
        moved = [(forward_weight(layer) - before[name]).flatten() for name, layer in layers.items()]
        sizes.append(float(torch.cat(moved).square().mean().sqrt()))
    # Rounding adds to the update: about half as much again at this width, and at the rates of the first steps.
    assert 0.7 < sizes[0] / sizes[1] < 2.0


@each("name", PEER_WEIGHTS)
def test_what_layers_hold_is_the_packages_own(name, corpus_dir):
    rule = "sdnq-adamw" if name.startswith("sdnq") else "torchao-int8"
    trainer = trainer_of(peer_config(rule, name, corpus_dir))
    layers = linear_layers(trainer.model)
    assert layers
    assert all(is_packaged(layer.weight) for layer in layers.values())
    plain = trainer_of(peer_config("fp32", None, corpus_dir))
    for key, layer in layers.items():
        mine, theirs = forward_weight(layer), forward_weight(linear_layers(plain.model)[key])
        assert type(mine) is torch.Tensor
        assert 0 < float((mine - theirs).norm() / theirs.norm()) < 0.06
        assert math.isclose(float(mine.std()), float(theirs.std()), rel_tol=0.02)


def test_a_checkpoint_of_them_starts_no_other_run(corpus_dir, tmp_path):
    rule, peer, _ = PEERS[-1]
    run(peer_config(rule, peer, corpus_dir, "--checkpoint.every=12"), tmp_path / "run")
    with refusal(r"the weights of another package \(model.peer\)"):
        trainer_of(load_config(None, [f"--model.init_from={tmp_path / 'run'}", f"--data.dir={corpus_dir}"]))


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("study_q13_peers.yaml", {"sdnq-muon", "sdnq-muon peer=sdnq-E4M3", "sdnq-muon peer=sdnq-int8", "torchao-int8"}),
        ("study_q13_adamw.yaml", {"sdnq-adamw"}),
    ],
)
def test_the_sweep_of_peers_has_each_of_them_once(name, labels):
    if not {"sdnq-muon", "torchao-int8"} <= set(available_rules()):
        pytest.skip("sdnq or torchao is not installed")
    sweep = read_sweep(Path(__file__).parents[3] / "study" / "sweeps" / name)
    planned = plan_sweep(sweep)
    assert len({point.label for point in planned}) == len(planned)
    assert {point.label for point in planned if RULES[point.rule].storage == "peer"} == labels
