"""Models made without values whose buffers no file holds: ``load_into`` computes
them as the model does, or names them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_folders import make
from hf_cases import gpt2, llama, logits
from torch import Tensor, nn

import fp8manifold as fm

#: what other libraries announce is their own business
pytestmark = pytest.mark.filterwarnings("ignore")


class Inside(nn.Module):
    """A model of transformers in a module of the user's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Any:
        return self.model(tokens)


#: models of transformers, by what is in no file of theirs
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(tied=False),
    "llama, tied": llama,
    "llama, yarn": lambda: llama(
        tied=False,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "gpt2": gpt2,
    "in a module": lambda: Inside(llama(tied=False)),
}


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers())


@pytest.mark.parametrize("name", MODELS)
def test_buffers_are_those_of_the_model_that_was_made_with_values(name: str) -> None:
    floats = MODELS[name]()
    with torch.device("meta"):
        empty = MODELS[name]()
    expected = buffers_of(floats)
    state = floats.state_dict()
    model = fm.files.load_into(empty, state, "E4M3", tied="leave")
    buffers = buffers_of(model)
    assert all(torch.equal(buffers[entry], value) for entry, value in expected.items())
    assert all(buffers[entry].dtype == value.dtype for entry, value in expected.items())
    quantised = fm.quantize_model(floats, "E4M3", "codes", tied="leave")
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        output = model.eval()(tokens).logits
        expected_output = quantised.eval()(tokens).logits
    assert torch.equal(output, expected_output)


def test_codes_are_read_into_a_model_without_values(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = make("squares", tmp_path / "published")
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder)
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = fm.files.load_into(empty, folder, "as stored", seed=3)
    assert torch.equal(logits(model), logits(fm.load(folder, seed=3)))


class Rotated(nn.Module):
    """A layer with two buffers that no state dict holds, one of them with values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.register_buffer("angles", self.computed(), persistent=False)
        self.register_buffer("known", torch.ones(2, device="cpu"), persistent=False)

    def computed(self) -> Tensor:
        return torch.arange(32.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.angles


class Reset(Rotated):
    def reset_parameters(self) -> None:
        self.angles = torch.arange(32.0)
        self.known.zero_()


class ResetInPlace(Rotated):
    def reset_parameters(self) -> None:
        self.angles.copy_(torch.arange(32.0))


class ResetInPart(Rotated):
    def reset_parameters(self) -> None:
        self.angles[1:].copy_(torch.arange(1.0, 32.0))


class ResetFromWeights(Rotated):
    def reset_parameters(self) -> None:
        self.angles.fill_(self.layer.weight.sum().item())


@pytest.mark.parametrize("kind", [Reset, ResetInPlace], ids=lambda kind: kind.__name__)
def test_a_module_computes_its_own(kind: type[Rotated]) -> None:
    with torch.device("meta"):
        empty = kind()
    rng_state = torch.random.get_rng_state()
    state = {"layer.weight": torch.ones(32, 32), "layer.bias": torch.ones(32)}
    model = fm.files.load_into(empty, state)
    assert torch.equal(model.angles, torch.arange(32.0))
    assert torch.equal(model.known, torch.ones(2))
    assert torch.equal(torch.random.get_rng_state(), rng_state)


@pytest.mark.parametrize(
    "kind", [Rotated, ResetInPart, ResetFromWeights], ids=lambda kind: kind.__name__
)
def test_what_nothing_computes_is_refused_by_name(kind: type[Rotated]) -> None:
    with torch.device("meta"):
        empty = Inside(kind())
    state = {"model.layer.weight": torch.ones(32, 32), "model.layer.bias": torch.ones(32)}
    with pytest.raises(ValueError, match=r"'model\.angles' has no values.*reset_parameters\(\)"):
        fm.files.load_into(empty, state)
    assert empty.model.angles.is_meta
    assert type(empty.model.layer) is nn.Linear
    assert torch.equal(empty.model.known, torch.ones(2))
