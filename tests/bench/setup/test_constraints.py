"""Weights on geoopt's manifolds stay there.

They are resumed bit for bit, watched, and refused where they can't be.
"""

import geoopt
import pytest
import torch
from bench_runs import recorded, refusal, resolved, train, trainer_of

import fp8manifold as fm
from nanogpt_bench.cli import main
from nanogpt_bench.config.rules import RULES
from nanogpt_bench.data.batches import open_corpus
from nanogpt_bench.loop.train import run
from nanogpt_bench.loop.trainer import Trainer, initial_model, trainer_inputs
from nanogpt_bench.model.weights import constrained_weights
from nanogpt_bench.report import report
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.plan import applies

STIEFEL, SPHERE = ({"model__constraint": name} for name in ("stiefel", "sphere"))
MASTER = {"model__format": "E4M3"}
MLP = {"model__formats": "{mlp: E5M2}"}
#: constraints beside every storage that has room for them
CASES = {
    "stiefel": STIEFEL,
    "stiefel under a format": {**STIEFEL, **MASTER},
    "stiefel, sgd": {**STIEFEL, "optimizer__name": "riemannian_sgd"},
    "sphere": SPHERE,
    "sphere under a format": {**SPHERE, **MASTER},
    "sphere beside one-byte weights": {
        **SPHERE,
        "rule": "riemannian",
        "model__formats": "{'*': E4M3, attn: none}",
    },
    "stiefel beside a grid": {**STIEFEL, "rule": "riemannian-sgd", "model__storage": "grid", **MLP},
}


def off(weight: torch.Tensor) -> float:
    """The distance of a weight from its manifold, by the definition."""
    matrix = weight.detach().as_subclass(torch.Tensor).double()
    if isinstance(weight.manifold, geoopt.Sphere):
        return float((matrix.norm(dim=1) - 1).abs().max())
    gram = matrix.T @ matrix
    return float((gram - torch.eye(len(gram))).norm())


@pytest.mark.parametrize("case", CASES)
def test_weights_begin_on_their_manifold_and_stay_on_it(tiny, case):
    trainer = trainer_of(tiny(**CASES[case], train__max_steps=12, optimizer__constrained_lr=0.1))
    weights = constrained_weights(trainer.model)
    assert [name.rpartition("attn.")[2] for name in weights] == ["qkv.weight", "proj.weight"]
    old_weights = {name: weight.detach().clone() for name, weight in weights.items()}
    train(trainer, 12)
    for name, weight in weights.items():
        assert off(weight) < 1e-5, name
        assert float((weight.detach() - old_weights[name]).norm()) > 1e-3, name
    layer = trainer.model.get_submodule("blocks.0.attn.qkv")
    if (
        trainer.config.model.storage == "master"
    ):  # the forward pass reads the rounded value of a copy on the manifold
        codes = fm.decode(layer.weight_codes(), "E4M3") * layer.weight_scale()
        assert torch.equal(layer.quantized_weight().detach().as_subclass(torch.Tensor), codes)
    else:
        assert type(layer) is torch.nn.Linear


@pytest.mark.parametrize("settings", [STIEFEL, SPHERE], ids=["stiefel", "sphere"])
def test_a_step_turns_rows_and_columns_by_its_rate(tiny, settings):
    """Adam's first step alone has the length of its rate, whatever the gradient."""
    still = {
        "optimizer__warmup_steps": 0,
        "optimizer__schedule": "constant",
        "optimizer__constrained_lr": 1e-3,
    }
    trainer = trainer_of(tiny(**settings, **still))
    weights = constrained_weights(trainer.model)
    old_weights = {name: weight.detach().clone() for name, weight in weights.items()}
    train(trainer, 1)
    for name, weight in weights.items():
        moved = (weight.detach() - old_weights[name]).as_subclass(torch.Tensor)
        vectors = min(weight.shape) if settings is STIEFEL else len(weight)
        assert float(moved.norm()) == pytest.approx(1e-3 * vectors**0.5, rel=0.02), name


@pytest.fixture(scope="module")
def watched(tiny, tmp_path_factory):
    """Folders of a run under every constraint.

    Its format is read through a copy.
    """
    folders = {name: tmp_path_factory.mktemp(name) / "r" for name in ("stiefel", "sphere", "float")}
    for folder, settings in zip(
        folders.values(), (STIEFEL | MASTER, SPHERE | MASTER, STIEFEL), strict=True
    ):
        run(tiny(**settings), folder)
    return folders


@pytest.mark.parametrize("name", ["stiefel", "sphere", "float"])
def test_the_monitor_watches_what_is_constrained(watched, name):
    figure = "geometry/off_sphere" if name == "sphere" else "geometry/orthogonality"
    looks = [record for record in recorded(watched[name]) if figure in record]
    assert [record["step"] for record in looks] == [2, 4, 6]
    keys = [f"{figure}/blocks.0.{layer}.weight" for layer in ("attn.qkv", "attn.proj")]
    rounded = [key.replace(figure, "geometry/constraint_rounded") for key in keys]
    for record in looks:
        assert record[figure] == max(record[key] for key in keys) < 1e-5
        if name == "float":
            assert "geometry/constraint_rounded" not in record
        else:  # a rounded matrix is close to the manifold, and not on it
            assert all(1e-3 < record[key] < 1 for key in rounded)
    alerts = watched[name] / "alerts.jsonl"
    assert not alerts.exists() or "off_manifold" not in alerts.read_text(encoding="utf-8")


def test_the_report_draws_its_figures_and_a_checkpoint_is_evaluated_as_any_other(watched, tmp_path):
    page = report(list(watched.values()), out=tmp_path / "report").read_text(encoding="utf-8")
    for title in ("Off the Stiefel manifold", "Off the sphere", "Constraints, rounded"):
        assert title in page, title
    assert (
        main(
            [
                "evaluate",
                str(watched["stiefel"]),
                "--formats",
                "none,E5M2",
                "--out",
                str(tmp_path / "e"),
            ]
        )
        == 0
    )


def test_a_constraint_fills_in_what_it_calls_for():
    config = resolved(model__constraint="stiefel")
    optimizer = config.optimizer
    assert config.model.storage == "float32"
    assert (optimizer.name, optimizer.constrained_lr, optimizer.weight_decay) == (
        "riemannian_adam",
        0.01,
        0.0,
    )
    assert (optimizer.lr, optimizer.float_lr) == (1e-3, 1e-3)
    config = resolved(model__constraint="sphere", model__format="E4M3", optimizer__float_lr=3e-3)
    assert (config.model.storage, config.optimizer.lr) == ("master", 3e-3)
    config = resolved(model__constraint="sphere", rule="riemannian", model__formats="{mlp: E4M3}")
    assert (config.model.storage, config.optimizer.lr, config.optimizer.weight_decay) == (
        "codes",
        0.5,
        0.1,
    )


@pytest.mark.parametrize("storage", ["grid", "continuous"])
def test_a_format_of_a_constrained_layer_is_refused_on_manifolds(storage):
    with refusal(f"has format E4M3 under model.storage '{storage}'"):
        resolved(**STIEFEL, **MASTER, model__storage=storage)


def test_what_cannot_be_constrained_is_refused_and_a_comparison_constrains_what_it_can(tiny):
    advice = "; add --model.formats.attn none, or give --model.storage master"
    with refusal(
        f"the weight of 'blocks.0.attn.qkv' has format E4M3 under model.storage 'codes'.*{advice}"
    ):
        resolved(**STIEFEL, **MASTER, rule="riemannian")
    config = resolve(tiny(**SPHERE))
    corpus = open_corpus(config)
    model = initial_model(config, corpus)
    model.blocks[0].attn.qkv.weight.data[3] = 0.0  # a row without a nearest point
    with refusal(r"the weight of 'blocks.0.attn.qkv' has a row of zeros"):
        Trainer(trainer_inputs(config, corpus, torch.device("cpu")), start=model)
    assert applies("model.constraint", "stiefel", RULES["riemannian"])
    assert not applies("model.constraint", "stiefel", RULES["fp32"])
    assert not applies("optimizer.constrained_lr", 0.1, RULES["stochastic"])
