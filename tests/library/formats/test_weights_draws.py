"""quantize_model(draws=): what a model's own weights draw by, which writes take it, and
that it is kept.
"""

import copy

import geoopt
import pytest
import torch
from optimizer_cases import normal, take_steps, through_disk
from torch import nn

import fp8manifold as fm
from fp8manifold import quantize_model

STORED = pytest.mark.parametrize("storage", ["codes", "grid"])


def floats():
    return nn.Sequential(nn.Linear(64, 33), nn.Tanh(), nn.Linear(33, 8, bias=False))


def network(storage="codes", draws="dither", **options):
    net = floats()
    for i, p in enumerate(net.parameters()):
        p.data = normal(*p.shape, seed=i, std=0.1)
    return quantize_model(net, "E4M3", storage, seed=3, draws=draws, **options)


def layers(net):
    return [layer for layer in net.modules() if isinstance(layer, fm.QuantizedLinear)]


def owned(net):
    return [layer.weight.manifold.draws for layer in layers(net)]


def stepped(net, make):
    weights = [net[0].weight, net[2].weight]
    take_steps([make(weights)], [weights], range(3))
    values = [layer.quantized_weight().detach().dequantize() for layer in layers(net)]
    return [value.flatten().tolist() for value in values]


@STORED
def test_weights_have_the_draws_of_their_model(storage):
    assert owned(network(storage)) == ["dither"] * 2
    assert owned(network(storage, "independent")) == ["independent"] * 2
    assert owned(quantize_model(nn.Linear(2, 2), "E4M3", storage)) == ["independent"]


@STORED
def test_reports_and_layers_say_which_draws_they_have(storage):
    net = network(storage)
    plain = network(storage, "independent")
    description = f"weight=E4M3, activation=none, storage={storage}"
    details = [layer.detail for layer in fm.quantization_report(net).quantized]
    assert details == [f"{description}, draws=dither"] * 2
    plain_details = [layer.detail for layer in fm.quantization_report(plain).quantized]
    assert plain_details == [description] * 2
    assert "draws=dither" in repr(net[0])
    assert "draws" not in repr(plain)
    assert "rounding=stochastic, draws=dither" in repr(net[0].weight.manifold)


ADAM = {"lr": 0.6, "writeback": "stochastic"}


@STORED
def test_an_optimizer_without_draws_takes_the_weights(storage):
    def stepped_by(net, **draws):
        return stepped(net, lambda p: fm.optim.RiemannianAdam(p, **ADAM, **draws))

    expected = stepped_by(network(storage, "independent"), draws="dither")
    assert stepped_by(network(storage)) == expected
    assert stepped_by(network(storage), draws="independent") != expected


@STORED
@pytest.mark.parametrize(
    "make",
    [
        lambda p: geoopt.optim.RiemannianAdam(p, lr=0.6),
        lambda p: fm.optim.StiffnessWrapper(torch.optim.SGD(p, lr=1e-3), exponent=1.0),
    ],
    ids=["geoopt", "StiffnessWrapper"],
)
def test_optimizers_that_write_by_the_manifold_take_the_weights(make, storage):
    assert stepped(network(storage), make) != stepped(network(storage, "independent"), make)


@STORED
@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, lr=1e-3), lambda p: torch.optim.AdamW(p, lr=1e-3)],
    ids=["SGD", "AdamW"],
)
def test_optimizers_that_write_by_operators_do_not(make, storage):
    assert stepped(network(storage), make) == stepped(network(storage, "independent"), make)


@STORED
@pytest.mark.parametrize(
    "name", ["StiffnessAdamW", "StiffnessMuon", "StiffnessSGD", "StiffnessLion"]
)
def test_an_optimizers_own_draws_go_before_the_weights(storage, name):
    def make(**draws):
        return lambda p: getattr(fm.optim, name)([{"params": p}], lr=0.01, **draws)

    plain = stepped(network(storage, "independent"), make(draws="independent"))
    assert stepped(network(storage), make(draws="independent")) == plain
    assert stepped(network(storage), make()) == stepped(network(storage, "independent"), make())
    dithered = stepped(network(storage), make(draws="dither"))
    assert dithered == stepped(network(storage, "independent"), make(draws="dither")) != plain


def riemannian_sgd(p):
    return geoopt.optim.RiemannianSGD(p, lr=1e-3)


@STORED
def test_what_is_made_of_the_model_keeps_them(storage):
    net = network(storage)
    assert owned(copy.deepcopy(net)) == ["dither"] * 2
    assert owned(net.to(torch.bfloat16).float()) == ["dither"] * 2
    net[0].reset_parameters()
    assert owned(net) == ["dither"] * 2
    # Floats say nothing of draws.
    net.load_state_dict(floats().state_dict(), False)
    assert owned(net) == ["dither"] * 2
    again = network(storage)
    again.load_state_dict(through_disk(net.state_dict()))
    assert owned(again) == ["dither"] * 2
    assert stepped(again, riemannian_sgd) == stepped(net, riemannian_sgd)


def test_what_is_made_of_one_byte_weights_keeps_them():
    net = network("codes")
    assert net[0].weight.clone().draws == "dither"
    assert through_disk(net[0].weight).draws == "dither"
    # Codes of another library leave the layer's own.
    net.load_state_dict(dict(fm.files.layout_state_dict(net)[0]))
    assert owned(net) == ["dither"] * 2


@pytest.mark.filterwarnings("ignore")  # what other libraries announce is their own business
@STORED
def test_a_model_of_transformers_keeps_them(storage, tmp_path):
    import transformers

    transformers.utils.logging.disable_progress_bar()
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": 48}
    plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    plain.save_pretrained(tmp_path / "floats")
    model = fm.load(
        tmp_path / "floats", {"*": "E4M3"}, storage=storage, tied="leave", draws="dither"
    )
    assert owned(model) == ["dither"] * 4
    model.save_pretrained(tmp_path / "saved")
    assert owned(fm.load(tmp_path / "saved")) == ["dither"] * 4
    quantize_model(plain, storage=storage, tied="leave")
    plain.save_pretrained(tmp_path / "plain")
    assert owned(fm.load(tmp_path / "plain")) == ["independent"] * 4
