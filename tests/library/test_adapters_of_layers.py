"""PEFT's adapters under ``quantize_model``: left as they are and named, unless a pattern names them."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fp8manifold as fm

peft = pytest.importorskip("peft", reason="needs the extra lora")


def adapted(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    config = peft.LoraConfig(r=4, target_modules=["0", "2"], **options)
    found: nn.Module = peft.inject_adapter_in_model(config, model)
    return found


def kinds(model: nn.Module) -> dict[str, str]:
    linear = ("Linear", "QuantizedLinear")
    found = {name: type(m).__name__ for name, m in model.named_modules() if not hasattr(m, "base_layer")}
    return {name: kind for name, kind in found.items() if kind in linear}


@pytest.mark.parametrize("formats", ["E2M5", {"*": "E2M5"}, {"0": "E2M5", "2": "E4M3"}])
@pytest.mark.parametrize("storage", ["master", "grid", "fp8"])
def test_adapters_stay_and_are_named_once(formats: Any, storage: Any) -> None:
    names = r"0\.lora_A\.default, 0\.lora_B\.default, 2\.lora_A\.default and 1 more"
    with pytest.warns(UserWarning, match=names) as said:
        model = fm.quantize_model(adapted(), formats, storage=storage)
    assert len(said) == 1
    assert "\n" not in str(said[0].message)
    found = kinds(model)
    assert {name: kind for name, kind in found.items() if "base_layer" in name} == {
        "0.base_layer": "QuantizedLinear",
        "2.base_layer": "QuantizedLinear",
    }
    assert {kind for name, kind in found.items() if "lora" in name} == {"Linear"}


@pytest.mark.parametrize("pattern", ["lora_B", "*.lora_B.*", "2.lora_B.default", "lora_*"])
def test_a_pattern_that_names_them_takes_them(pattern: str) -> None:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        model = fm.quantize_model(adapted(), {"*": "E2M5", pattern: "E2M5"}, storage="fp8")
    assert kinds(model)["2.lora_B.default"] == "QuantizedLinear"


def test_no_word_where_adapters_were_left_by_a_pattern() -> None:
    model = fm.quantize_model(adapted(), {"base_layer": "E2M5"}, storage="fp8")
    again = fm.quantize_model(adapted(), {"*": "E2M5", "lora_*": "none"}, storage="fp8")
    assert kinds(model) == kinds(again)


def test_an_adapter_of_zeros_that_is_asked_for_learns() -> None:
    """``lora_B`` begins with zeros: its scale is fitted in its first step."""
    model = fm.quantize_model(adapted(), {"base_layer": "E4M3", "lora_*": "E2M5"}, storage="fp8")
    b: Any = model.get_submodule("2.lora_B.default").weight
    assert not b.codes.any()
    optimizer = fm.optim.StiffnessAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    assert (b.scale <= 2.0**-11).all()
    assert b.codes.any()
