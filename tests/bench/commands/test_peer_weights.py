"""Weights of other packages, in one byte without a master copy.

They train, are counted, saved and taken up again.
"""

import math

import pytest
import torch
from bench_runs import refusal, train, trainer_of

from nanogpt_bench.config.rules import RULES, available_rules
from nanogpt_bench.config.schema import PEER_WEIGHTS
from nanogpt_bench.data.batches import load_corpus
from nanogpt_bench.loop.train import run
from nanogpt_bench.model.weights import forward_weight, is_packaged, linear_layers
from nanogpt_bench.setup.memory import held_bytes, memory_of

#: rule, weights, and the bytes of a quantised weight with its averages
PEERS = (("torchao-int8", "torchao-int8", 1.0 + 2.0 * (1 + 4 / 256)),)
# torchao tells torch twice what torch now knows by itself.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torchao.*", "ignore:.*Enum.*", "ignore::DeprecationWarning"
)


@pytest.fixture(autouse=True)
def uncompiled():
    """Run what would be compiled as it is written."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def peer_config(tiny):
    def config_with(rule, peer="null", width=64, **overrides):
        if rule not in available_rules():
            pytest.skip(f"the package of rule {rule}, {RULES[rule].needs}, is not installed")
        settings = {
            "rule": rule,
            "model__peer": peer,
            "train__precision": "float32",
            "model__n_embd": width,
        }
        return tiny(
            **settings, train__batch_size=12, train__max_steps=12, eval__interval=12, **overrides
        )

    return config_with


@pytest.mark.parametrize(("rule", "peer", "_"), PEERS)
def test_peers_train_with_all_monitors(rule, peer, _, peer_config, corpus_dir, tmp_path):
    summary = run(
        peer_config(rule, peer, monitor__interval=4, checkpoint__every=12), tmp_path / "run"
    )
    assert (summary["status"], summary["rule"], summary["storage"]) == ("finished", rule, "peer")
    assert summary["final_val_loss"] < summary["first_val_loss"] - 0.1
    vocabulary = int(load_corpus(corpus_dir, 16).meta["vocab_size"])
    assert summary["quantized_parameters"] == 12 * 64 * 64 + 64 * vocabulary


@pytest.mark.parametrize(("rule", "peer", "expected"), PEERS)
def test_bytes_are_those_of_the_tensors_inside(rule, peer, expected, peer_config):
    trainer = trainer_of(peer_config(rule, peer, 128))
    train(trainer, 1)
    weight = trainer.model.blocks[0].mlp.fc.weight
    state = [
        value
        for value in trainer.optimizer.state[weight].values()
        if isinstance(value, torch.Tensor)
    ]
    rows = 4 / weight.shape[1]
    tables = memory_of([value.qmap for value in state if hasattr(value, "qmap")])
    counts = sum(4 for value in state if value.dim() == 0)
    tensor_bytes = memory_of([weight, *state]) - tables - counts
    assert tensor_bytes / weight.numel() == pytest.approx(expected + rows, rel=1e-6)
    assert held_bytes(trainer.model, trainer.optimizer) >= tensor_bytes


@pytest.mark.parametrize(("rule", "peer"), [peer[:2] for peer in PEERS])
def test_the_first_update_is_about_as_large_as_ours(rule, peer, peer_config):
    sizes = []
    for rule_and_peer in ((rule, peer), ("fp32", "null")):
        trainer = trainer_of(peer_config(*rule_and_peer, 128))
        layers = {
            name: layer for name, layer in linear_layers(trainer.model).items() if name != "lm_head"
        }
        old_weights = {name: forward_weight(layer).clone() for name, layer in layers.items()}
        train(trainer, 3)
        moved = [
            (forward_weight(layer) - old_weights[name]).flatten() for name, layer in layers.items()
        ]
        sizes.append(float(torch.cat(moved).square().mean().sqrt()))
    # Rounding adds to the update: about half as much again at this width, and at the
    # rates of the first steps.
    assert 0.7 < sizes[0] / sizes[1] < 2.0


@pytest.mark.parametrize("name", PEER_WEIGHTS)
def test_what_layers_hold_is_the_packages_own(name, peer_config):
    peers, floats = (
        linear_layers(trainer_of(config).model)
        for config in (peer_config("torchao-int8", name), peer_config("fp32"))
    )
    assert peers
    for key, layer in peers.items():
        mine, peer_weight = forward_weight(layer), forward_weight(floats[key])
        assert (is_packaged(layer.weight), type(mine)) == (True, torch.Tensor), key
        assert 0 < float((mine - peer_weight).norm() / peer_weight.norm()) < 0.06, key
        assert math.isclose(float(mine.std()), float(peer_weight.std()), rel_tol=0.02), key


def test_a_checkpoint_of_them_starts_no_other_run(peer_config, tiny, tmp_path):
    run(peer_config(*PEERS[-1][:2], 16, checkpoint__every=12), tmp_path / "run")
    with refusal(r"holds weights of another package \(model\.peer\)"):
        trainer_of(tiny(model__init_from=tmp_path / "run"))
