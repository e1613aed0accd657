"""Optimizers and storages.

What a rule sets up, by its options and beside its float twin.
"""

import shutil
import sys

import pytest
import torch
from bench_runs import recorded, refusal, resolved, summary_of, train, trainer_of
from torch import nn

import fp8manifold as fm
from nanogpt_bench.checkpoint import step_file
from nanogpt_bench.cli import main
from nanogpt_bench.config.rules import RULES, WITH_TWIN, available_rules
from nanogpt_bench.config.schema import FP8_FORMATS, PRODUCTS, ROUNDED
from nanogpt_bench.config.settings import build_config, find_config, read_settings_file
from nanogpt_bench.loop.train import run
from nanogpt_bench.model.gpt import GPT, GPTShape
from nanogpt_bench.model.weights import quantized_layers
from nanogpt_bench.runs.trained import choose, load
from nanogpt_bench.setup.memory import bytes_with_state
from nanogpt_bench.setup.optimizers import build_optimizer, parameter_groups
from nanogpt_bench.setup.resolve import resolve, rule_name
from nanogpt_bench.setup.surgery import quantize
from nanogpt_bench.sweep.comparison import choose_rows

ONE_BYTE = ("--model.n_layer=1", "--model.format=E4M3", "--model.storage=codes")
UNTIED = GPTShape(1, 2, 8, 16, vocab_size=11)


def test_matrices_alone_decay_tied_weights_count_once_and_options_reach_the_optimizer():
    model = GPT(GPTShape(1, 2, 8, 16, vocab_size=11, bias=True, tie_weights=True))
    assert (
        len(parameter_groups(torch.nn.Linear(3, 3, bias=False), 0.1)) == 1
    )  # none without parameters
    decayed, undecayed = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.dim() >= 2 for parameter in decayed["params"])
    assert all(parameter.dim() == 1 for parameter in undecayed["params"])
    assert len(decayed["params"]) + len(undecayed["params"]) == len(list(model.parameters()))
    options = ["--optimizer.lr=0.5", "--optimizer.beta1=0.8", "--optimizer.beta2=0.7"]
    optimizer = build_optimizer(model, resolved(options))
    assert isinstance(optimizer, torch.optim.AdamW)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.8, 0.7), 1e-8)


def on_one_byte(name, *arguments):
    config = resolved([*ONE_BYTE, "--optimizer.name", name, *arguments])
    return build_optimizer(quantize(GPT(UNTIED), config), config)


BUILT = {
    "adamw": fm.optim.StiffnessAdamW,
    "sgd": fm.optim.StiffnessSGD,
    "stiffness_lion": fm.optim.StiffnessLion,
    "stiffness_adafactor": fm.optim.StiffnessAdafactor,
}
BUILT |= {
    "stiffness_adamw": fm.optim.StiffnessAdamW,
    "stiffness_sgd": fm.optim.StiffnessSGD,
}
BUILT |= {"riemannian_adam": fm.optim.RiemannianAdam, "riemannian_sgd": fm.optim.RiemannianSGD}


@pytest.mark.parametrize(("name", "built"), BUILT.items())
def test_what_all_of_the_library_s_optimizers_take_reaches_them(name, built):
    options = [
        "--optimizer.lr=0.5",
        "--optimizer.writeback=residual8",
        "--optimizer.moments=bfloat16",
        "--seed=7",
    ]
    if name == "stiffness_adafactor":
        # without a momentum there is nothing to store
        options.append("--optimizer.momentum=0.5")
    optimizer = on_one_byte(name, *options)
    assert type(optimizer) is built
    for group in optimizer.param_groups:
        assert [group[key] for key in ("lr", "writeback", "moments", "seed")] == [
            0.5,
            "residual8",
            "bfloat16",
            7,
        ]


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *((name, "momentum", 0.5) for name in ("stiffness_sgd", "riemannian_sgd")),
        ("stiffness_adafactor", "momentum", 0.5),
        ("riemannian_sgd", "float_lr", 0.25),
        ("stiffness_lion", "stiffness", 0.5),
        *((name, "stiffness", 0.0) for name in ("sgd", "stiffness_sgd")),  # that of their own
    ],
)
def test_options_of_their_own_reach_the_library_s_optimizers(name, option, value):
    words = [f"--optimizer.{option}={value}"] if value else []
    assert {group[option] for group in on_one_byte(name, *words).param_groups} == {value}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("stiffness_lion", ["'momentum'", "StiffnessLion"]),
        ("adamw --optimizer.moments=8bit", ["momentum", "8bit"]),
    ],
    ids=["lion", "adamw"],
)
def test_a_combination_the_library_refuses_is_one_line(words, parts):
    with refusal("^optimizer: ") as caught:
        on_one_byte(*words.split(), "--optimizer.writeback=momentum")
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.extra("nngeometry")
def test_fisher_takes_its_options_and_names_its_package_where_it_is_missing(monkeypatch):
    config = resolved([*ONE_BYTE, "--optimizer.name=fisher", "--optimizer.momentum=0.5"])
    optimizer = build_optimizer(quantize(GPT(UNTIED), config), config, lambda step: [])
    assert type(optimizer) is fm.optim.FisherNaturalGradient
    for group in optimizer.param_groups:
        assert (group["momentum"], group["refresh"], group["damping"], group["eps"]) == (
            0.5,
            10,
            0.1,
            1e-8,
        )
    monkeypatch.setitem(sys.modules, "nngeometry", None)
    with refusal(r"optimizer: .*nngeometry"):
        build_optimizer(quantize(GPT(UNTIED), config), config, lambda step: [])


@pytest.mark.parametrize("name", ["riemannian_adam", "riemannian_sgd"])
def test_the_retraction_reaches_the_optimizer(name):
    optimizer = on_one_byte(name, "--optimizer.retraction=euclidean")
    assert {group["retraction"] for group in optimizer.param_groups} == {"euclidean"}
    assert {group["retraction"] for group in on_one_byte(name).param_groups} == {None}


@pytest.mark.parametrize("name", ["stiffness_adamw", "stiffness_muon", "riemannian_adam", "adamw"])
def test_draws_reach_the_optimizer_and_are_its_own_unless_asked_for(name):
    optimizer = on_one_byte(name, "--optimizer.draws=dither")
    assert {group["draws"] for group in optimizer.param_groups} == {"dither"}
    assert {group["draws"] for group in on_one_byte(name).param_groups} <= {"independent", None}


QUANTISED = [name for name in available_rules() if RULES[name].storage in ROUNDED]
#: values of a simulated byte are multiplied as they are, so it has no products of codes
SIMULATED = [name for name in QUANTISED if RULES[name].products is None]
#: what a weight and its optimizer state hold in one-byte storage, scales and block
#: scales left out
BYTES_HELD = {
    **dict.fromkeys(("nearest", "stochastic", "momentum", "stiffness", "riemannian"), 9.0),
    **dict.fromkeys(("stiffness-lion", "sgd-stochastic", "stiffness-sgd", "riemannian-sgd"), 5.0),
    **dict.fromkeys(("stochastic-8bit", "stochastic-fp8", "muon-residual8"), 3.0),
    "residual8": 10.0,
    **dict.fromkeys(("muon-stochastic", "lion-stochastic"), 2.0),
    # and averages of rows and columns
    "adafactor-stochastic": 1.0,
}


@pytest.mark.parametrize("fmt", ["E4M3", "E7M0"])
@pytest.mark.parametrize(
    "rule", [name for name in SIMULATED if RULES[name].writeback != "residual8"]
)
def test_one_byte_and_its_simulation_are_the_same_run_bit_for_bit(tiny, rule, fmt):
    room = {
        "model__headroom": 1024.0
    }  # a byte's scale doubles where a weight reaches its end, and a grid's does not
    byte, floats = (
        trainer_of(tiny(rule=rule, model__format=fmt, model__storage=name, **room))
        for name in ("codes", "grid")
    )
    assert train(byte, 8) == train(floats, 8)
    assert byte.validate() == floats.validate()
    twins = quantized_layers(floats.model)
    for name, layer in quantized_layers(byte.model).items():
        assert torch.equal(layer.weight_codes(), twins[name].weight_codes()), name


@pytest.mark.parametrize("rule", BYTES_HELD)
def test_a_weight_holds_the_bytes_of_its_scheme(tiny, rule):
    trainer = trainer_of(
        tiny(rule=rule, model__format="E4M3", model__storage="codes", model__n_embd=128)
    )
    train(trainer, 2)
    weights = [layer.weight for layer in quantized_layers(trainer.model).values()]
    bytes_of_weight = bytes_with_state(weights, trainer.optimizer) / sum(
        weight.numel() for weight in weights
    )
    # One float32 scale a row of 128 or 512, block scales of the averages, counters.
    assert BYTES_HELD[rule] < bytes_of_weight < BYTES_HELD[rule] + 0.15


def test_an_unrounded_rule_moves_weights_off_the_grid_and_has_no_stall(tiny, tmp_path):
    config = tiny(
        rule="stiffness-unrounded", model__format="E4M3", optimizer__lr=0.02, train__max_steps=40
    )
    trainer = trainer_of(config)
    layers, drawn = quantized_layers(trainer.model), trainer_of(tiny(rule="fp32"))
    start = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    for name, layer in layers.items():  # the float weights of the same seed, not their roundings
        assert torch.equal(start[name], drawn.model.get_submodule(name).weight), name
        assert layer.weight_format is not None, name
    train(trainer, 2)
    assert all(not torch.equal(layer.weight, start[name]) for name, layer in layers.items())
    summary = run(config, tmp_path / "r")
    assert summary["final_val_loss"] < summary["first_val_loss"] - 0.2
    assert (summary["storage"], summary["stall"], summary["stall_metric"]) == (
        "continuous",
        None,
        None,
    )
    assert 12 <= summary["bytes_per_quantized_parameter"] < 12.5
    assert recorded(tmp_path / "r")[1]["stiffness/exponent"] == 1.0


def test_a_residual_begins_with_the_float_weights(tiny):
    trainer = trainer_of(
        tiny(rule="residual8", model__format="E4M3", optimizer__lr=1e-12, optimizer__weight_decay=0)
    )
    floats = trainer_of(tiny(rule="fp32"))
    train(trainer, 1)
    for name, layer in quantized_layers(trainer.model).items():
        weight, residual = layer.weight, trainer.optimizer.state[layer.weight]["residual"]
        assert weight.remainder is None, name  # handed over
        assert residual.dtype == torch.int8, name
        start, scale = floats.model.get_submodule(name).weight.detach(), layer.weight_scale()
        code = fm.to_chart(weight.dequantize() / scale, "E4M3")
        value = fm.from_chart(code + residual / 256, "E4M3") * scale
        assert bool(((value - start).abs() <= fm.ulp(start / scale, "E4M3") * scale / 256).all()), (
            name
        )
        assert not torch.equal(weight.dequantize(), value), name


@pytest.mark.parametrize("fmt", ["E4M3", "E7M0"])
@pytest.mark.parametrize("rule", WITH_TWIN)
def test_a_float_twin_takes_the_step_of_its_rule_without_its_rounding(tiny, rule, fmt):
    """From the same weights and batch.

    What the rule writes is a neighbour of what the twin keeps.
    """
    twin, rounded = (
        trainer_of(tiny(rule=name, model__format=fmt, optimizer__warmup_steps=0, **grid))
        for name, grid in ((f"{rule}-float", {}), (rule, {"model__storage": "grid"}))
    )
    with torch.no_grad():
        for weight, rounded_weight in zip(
            twin.model.parameters(), rounded.model.parameters(), strict=True
        ):
            weight.copy_(rounded_weight)
    assert train(twin, 1) == train(rounded, 1)
    layers, moved = quantized_layers(rounded.model), 0
    twin_weights = {name: layer.weight for name, layer in quantized_layers(twin.model).items()}
    for name, layer in layers.items():
        ulps = layer.manifold.to_chart(layer.weight) - layer.manifold.to_chart(twin_weights[name])
        assert ulps.abs().max() < 1 + 1e-4, name
        moved += int((twin_weights[name] != layer.weight).sum())
    assert moved  # the twin is off the grid
    quantized = {
        id(layer.weight) for layer in (*layers.values(), *quantized_layers(twin.model).values())
    }
    for index, (weight, rounded_weight) in enumerate(
        zip(twin.model.parameters(), rounded.model.parameters(), strict=True)
    ):
        assert id(weight) in quantized or torch.equal(weight, rounded_weight), index


def test_every_layer_multiplies_codes_but_the_head_and_those_that_say_otherwise():
    def products_of(formats, **settings):
        """Return each layer's products, and those of its weight's gradient.

        The formats and settings are put over those of the shipped file.
        """
        file = read_settings_file(find_config("e4m3_fp8.yaml")) | {"model.n_layer": 1}
        formats = {"*": file.pop("model.format"), **formats}
        layers = resolve(build_config(file | {"model.formats": formats} | settings)).layers
        return {
            name.removeprefix("blocks.0."): (s.products, s.gradient_products)
            for name, s in layers.items()
        }

    fp8, decoded = ("fp8", "bfloat16"), ("decoded", "bfloat16")
    in_blocks = dict.fromkeys(("attn.qkv", "attn.proj", "mlp.fc", "mlp.proj"), fp8)
    assert products_of({}) == {**in_blocks, "lm_head": decoded}
    options = {
        "attn.qkv": {"weight": "E4M3", "products": "decoded"},
        "lm_head": {"weight": "E5M2", "products": "fp8"},
    }
    options["mlp.fc"] = {"weight": "E4M3", "products": "fp8", "gradient_products": "fp8"}
    assert products_of(options) == {
        **in_blocks,
        "attn.qkv": decoded,
        "mlp.fc": ("fp8", "fp8"),
        "lm_head": fp8,
    }
    integers = {"rule": None, "model.storage": "codes", "model.products": "int8"}
    assert products_of({"*": "E1M6"}, **integers)["mlp.fc"] == ("int8", "bfloat16")


@pytest.mark.parametrize("products", PRODUCTS)
def test_a_layer_has_the_products_that_are_asked_for(products):
    fmt = "E1M6" if products == "int8" else "E4M3"
    assert fm.LayerSpec(fmt, products=products).products == products


@pytest.mark.parametrize("fmt", ["E4M3", "E5M2", "E1M6", "E2M5", "E3M4"])
def test_formats_of_fp8_units_have_them_by_themselves(fmt):
    units = fm.LayerSpec(fmt, products="auto").units
    assert (units == "fp8") == (fmt in FP8_FORMATS)


@pytest.mark.parametrize(
    ("products", "rule"),
    [
        (None, "stochastic-8bit"),
        ("decoded", "stochastic-8bit"),
        ("fp8", "stochastic-fp8"),
        ("auto", "custom"),
    ],
)
def test_settings_one_by_one_are_the_rule(products, rule):
    settings = {
        "model.storage": "codes",
        "model.format": "E4M3",
        "model.products": products,
        "optimizer.name": "adamw",
        "optimizer.writeback": "stochastic",
        "optimizer.moments": "8bit",
    }
    assert rule_name(resolve(build_config(settings))) == rule


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed"])
def test_a_run_trains_on_the_units_of_its_products(tiny, precision):
    losses = {}
    for rule in ("stochastic-8bit", "stochastic-fp8"):
        trainer = trainer_of(tiny(rule=rule, model__format="E4M3", train__precision=precision))
        losses[rule] = train(trainer, 20)
        products = {
            layer.spec.products
            for name, layer in quantized_layers(trainer.model).items()
            if name != "lm_head"
        }
        assert products == {"fp8" if rule == "stochastic-fp8" else "decoded"}, rule
    decoded, fp8 = (torch.tensor(values) for values in losses.values())
    assert not torch.equal(decoded, fp8)
    torch.testing.assert_close(fp8, decoded, atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("rules", "formats"),
    [(["all"], ["E4M3"]), (["stochastic-fp8"], ["E4M3", "E7M0"])],
    ids=["all", "one rule"],
)
def test_a_comparison_of_all_rules_leaves_out_formats_that_no_unit_multiplies(rules, formats):
    # one that is named is refused when it is planned
    rows = [row for row in choose_rows(["E4M3", "E7M0"], rules) if row["rule"] == "stochastic-fp8"]
    assert [row["model.format"] for row in rows] == formats


OPTIONS = {"model__format": "E4M3", "model__embeddings": "e3m4"}


@pytest.mark.parametrize("rule", ["stochastic-8bit", "muon-stochastic", "residual8"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_embedding_trains_in_its_codes(tiny, rule, tied):
    overrides = {"model__tied": "leave"} if tied else {}
    trainer = trainer_of(resolve(tiny(rule=rule, model__tie_weights=tied, **OPTIONS, **overrides)))
    weights = {
        name: m.weight for name, m in trainer.model.named_modules() if isinstance(m, nn.Embedding)
    }
    assert {type(weight) for weight in weights.values()} == {fm.FP8Parameter}
    assert [weight.format.name for weight in weights.values()] == ["E3M4"] * 2
    old_codes = {name: weight.codes.clone() for name, weight in weights.items()}
    assert (trainer.model.lm_head.weight is trainer.model.token_embedding.weight) is tied
    train(trainer, 1)
    for name, weight in weights.items():
        assert not torch.equal(weight.codes, old_codes[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_goes_on_and_is_measured_and_sampled(tiny, tmp_path, tied, capsys):
    overrides = {"model__tie_weights": True, "model__tied": "leave"} if tied else {}
    config = tiny(
        rule="stochastic-8bit", train__max_steps=4, checkpoint__every=2, **OPTIONS, **overrides
    )
    run(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    step_file(tmp_path / "half", 4).unlink()
    run(config, tmp_path / "half", resume=True)
    whole, half = (load(choose(tmp_path / name)).tensors for name in ("whole", "half"))
    assert whole.keys() == half.keys()
    assert all(torch.equal(value, half[name]) for name, value in whole.items())
    floats = tiny(rule="stochastic-8bit", model__format="E4M3", **overrides)
    run(floats, tmp_path / "floats")
    sizes = [summary_of(tmp_path / name)["bytes_per_parameter"] for name in ("whole", "floats")]
    assert sizes[0] < sizes[1] - 0.5  # norms, counters and seeds are a tenth of so small a model
    for command, *overrides in (
        ["evaluate"],
        ["sample", "--tokens", "3"],
        ["evaluate", "--formats", "E5M2"],
    ):
        assert main([command, str(tmp_path / "whole"), *overrides]) == 0, capsys.readouterr().err


FLOATS = "model.embeddings: 'E3M4' needs model.storage codes, not "


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("--model.embeddings=e3m4 --rule=master --model.format=E4M3", f"{FLOATS}'mast"),
        ("--model.embeddings=e3m4 --rule=fp32", f"{FLOATS}'float32'"),
        (
            "--model.embeddings=E3M9 --rule=stochastic --model.format=E4M3",
            "model.embeddings: unknown float format 'E3M9",
        ),
    ],
)
def test_a_format_of_embeddings_is_refused_by_its_key_where_they_are_floats(setting, message):
    with refusal() as refused:
        resolved(setting.split())
    assert str(refused.value).startswith(message)


def test_embeddings_without_a_format_are_taken_with_floats(tiny):
    assert resolve(tiny(rule="fp32", model__embeddings="none")).model.embeddings is None
