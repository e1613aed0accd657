"""Products of codes as a setting: which layers have them, what they compute, and how near training stays."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench_runs import trainer_of

import fp8manifold as fm
from nanogpt_bench.config.schema import FP8_FORMATS, PRODUCTS, Config
from nanogpt_bench.config.settings import build_config, find_config, read_yaml
from nanogpt_bench.model.weights import quantized_layers
from nanogpt_bench.setup.resolve import resolve, rule_name
from nanogpt_bench.sweep.comparison import choose_rows

Tiny = Callable[..., Config]


def products_of(**settings: Any) -> dict[str, tuple[str, str]]:
    """Products of each layer of one block, and of its weight's gradient, where the shipped file has other settings."""
    file = read_yaml(find_config("e4m3_fp8.yaml")) | {"model.n_layer": 1}
    formats = {"*": file.pop("model.format"), **settings.pop("formats", {})}
    layers = resolve(build_config(file | {"model.formats": formats} | settings)).layers
    return {name.removeprefix("blocks.0."): (spec.products, spec.gradient_products) for name, spec in layers.items()}


def test_every_layer_multiplies_codes_but_the_head_and_those_that_say_otherwise() -> None:
    fp8, decoded = ("fp8", "bfloat16"), ("decoded", "bfloat16")
    every = dict.fromkeys(("attn.qkv", "attn.proj", "mlp.fc", "mlp.proj"), fp8)
    assert products_of() == {**every, "lm_head": decoded}
    own = {"attn.qkv": {"weight": "E4M3", "products": "decoded"}, "lm_head": {"weight": "E5M2", "products": "fp8"}}
    own["mlp.fc"] = {"weight": "E4M3", "products": "fp8", "gradient_products": "fp8"}
    assert products_of(formats=own) == {**every, "attn.qkv": decoded, "mlp.fc": ("fp8", "fp8"), "lm_head": fp8}
    integers = {"rule": None, "model.storage": "fp8", "formats": {"*": "E1M6"}, "model.products": "int8"}
    assert products_of(**integers)["mlp.fc"] == ("int8", "bfloat16")


def test_the_bench_has_the_products_that_the_library_has() -> None:
    for products in PRODUCTS:
        assert fm.LayerSpec("E1M6" if products == "int8" else "E4M3", products=products).products == products
    for fmt in ("E4M3", "E5M2", "E1M6", "E2M5", "E3M4"):
        units = fm.LayerSpec(fmt, products="auto").units
        assert (units == "fp8") == (fmt in FP8_FORMATS)


def test_settings_one_by_one_are_the_rule() -> None:
    given = {"model.storage": "fp8", "optimizer.writeback": "stochastic", "optimizer.moments": "8bit"}
    given |= {"model.format": "E4M3", "optimizer.name": "adamw"}
    names = {
        p: rule_name(resolve(build_config(given | {"model.products": p}))) for p in (None, "decoded", "fp8", "auto")
    }
    assert names.pop("fp8") == "stochastic-fp8"
    assert names.pop("auto") == "custom"
    assert set(names.values()) == {"stochastic-8bit"}


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed"])
def test_a_run_trains_on_the_units_of_its_products(tiny: Tiny, precision: str) -> None:
    losses = {}
    for rule in ("stochastic-8bit", "stochastic-fp8"):
        trainer = trainer_of(tiny(rule=rule, model__format="E4M3", train__precision=precision))
        losses[rule] = [trainer.train_step(trainer.new_step(n, last=False), ()) for n in range(1, 21)]
        products = {layer.spec.products for name, layer in quantized_layers(trainer.model).items() if name != "lm_head"}
        assert products == {"fp8" if rule == "stochastic-fp8" else "decoded"}
    decoded, fp8 = (torch.tensor(each) for each in losses.values())
    assert not torch.equal(decoded, fp8)
    torch.testing.assert_close(fp8, decoded, atol=0.02, rtol=0)


def test_a_comparison_of_all_rules_leaves_out_formats_that_no_unit_multiplies() -> None:
    def formats(rules: list[str]) -> list[str]:
        return [row["model.format"] for row in choose_rows(["E4M3", "E7M0"], rules) if row["rule"] == "stochastic-fp8"]

    assert formats(["all"]) == ["E4M3"]
    assert formats(["stochastic-fp8"]) == ["E4M3", "E7M0"]  # refused when it is planned, as it was named
