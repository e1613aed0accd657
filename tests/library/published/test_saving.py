"""``save_fp8`` of models that were changed after ``load_fp8``: what is written is what
was trained, or nothing is.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_folders import make
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

import fp8manifold as fm

#: what other libraries announce is their own business
pytestmark = pytest.mark.filterwarnings("ignore")
Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("published")
    names = ("squares, shards", "squares, tied")
    return {name: make(name, place / name) for name in names}


def trained(folder: Path) -> Any:
    """A model each of whose parameters differs from the files."""
    model = fm.load_fp8(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1)
    return model


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def compiled_layer(model: Any) -> Any:
    model.model.layers[1] = compiled(model.model.layers[1])
    return model


def compiled_base(model: Any) -> Any:
    model.model = compiled(model.model)
    return model


def checkpointed(model: Any) -> Any:
    kind = type(model.model.layers[0])
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kind))
    return model


def checkpointed_and_compiled(model: Any) -> Any:
    return compiled(compiled_layer(checkpointed(model)))


WRAPPED: list[Change] = [
    compiled,
    compiled_layer,
    compiled_base,
    checkpointed,
    checkpointed_and_compiled,
    nn.DataParallel,
]


@pytest.mark.parametrize("wrapped", WRAPPED, ids=lambda change: change.__name__)
def test_weights_are_found_under_the_names_of_wrappers(
    wrapped: Change, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = trained(folders["squares, shards"])
    fm.save_fp8(model, tmp_path / "plain")
    assert files(tmp_path / "plain") != files(folders["squares, shards"])
    fm.save_fp8(wrapped(model), tmp_path / "wrapped")
    assert files(tmp_path / "wrapped") == files(tmp_path / "plain")


class Outer(nn.Module):
    """A wrapper that nobody but its user knows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def in_a_wrapper_of_the_user(model: Any) -> Any:
    model.model.layers[2] = Outer(model.model.layers[2])
    return model


def base_alone(model: Any) -> Any:
    return model.model


def without_the_last_layer(model: Any) -> Any:
    model.model.layers = model.model.layers[:-1]
    return model


def without_a_layer_inside(model: Any) -> Any:
    del model.model.layers[1]
    return model


def with_a_head_more(model: Any) -> Any:
    model.score = nn.Linear(256, 1)
    return model


def with_a_head_untied(model: Any) -> Any:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def with_a_parametrisation(model: Any) -> Any:
    nn.utils.parametrizations.weight_norm(model.lm_head)
    return model


REFUSED: list[tuple[str, Change, str]] = [
    (
        "squares, shards",
        in_a_wrapper_of_the_user,
        "'model.layers.2. & 'model-0000 & 'model.layers.2.inner. & fm.export_model",
    ),
    ("squares, shards", base_alone, "'lm_head.weight' & no place in the model any more"),
    ("squares, shards", without_the_last_layer, "'model.layers.3. & no place in the model"),
    ("squares, shards", without_a_layer_inside, "'model.layers.3. & no place in the model"),
    ("squares, shards", with_a_parametrisation, "'lm_head.weight' & which has 'lm_head.param"),
    ("squares, shards", with_a_head_more, "has 'score.weight' & fm.export_model"),
    ("squares, tied", with_a_head_untied, "has 'lm_head.weight' & fm.export_model"),
]


@pytest.mark.parametrize(
    ("name", "change", "words"), REFUSED, ids=[change.__name__ for _, change, _ in REFUSED]
)
@pytest.mark.parametrize("settings", ["new settings", "settings of older versions"])
def test_a_tensor_that_lost_its_place_is_refused_by_name(
    name: str, change: Change, words: str, settings: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = trained(folders[name])
    if settings == "settings of older versions":
        model.config.quantization_config.published.pop("copied", None)
    with pytest.raises(ValueError, match=r"the files|read from") as caught:
        fm.save_fp8(change(model), tmp_path / "out")
    said = str(caught.value)
    assert [part for part in words.split(" & ") if part not in said] == [], said
    assert "\n" not in said
    assert not (tmp_path / "out").exists()


def test_the_base_of_a_tied_model_is_the_whole_of_it(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = trained(folders["squares, tied"])
    fm.save_fp8(model, tmp_path / "whole")
    fm.save_fp8(model.model, tmp_path / "base")
    assert files(tmp_path / "base") == files(tmp_path / "whole")


def lora(**options: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **options)


def modules_to_save() -> Any:
    return lora(modules_to_save=["lm_head"])


def prompts() -> Any:
    from peft import PromptTuningConfig

    return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)


ADAPTERS = [
    (lora, "q_proj' has an adapter of PEFT & merge_and_unload()"),
    (modules_to_save, "merge_and_unload()"),
    (prompts, "has 'prompt_encoder.default.embedding.weight'"),
]


@pytest.mark.extra("peft")
@pytest.mark.parametrize(
    ("config", "words"), ADAPTERS, ids=[config.__name__ for config, _ in ADAPTERS]
)
@pytest.mark.parametrize("outside", [lambda model: model, compiled], ids=["plain", "compiled"])
def test_adapters_are_not_left_out(
    config: Callable[[], Any],
    words: str,
    outside: Change,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    from peft import get_peft_model

    model = get_peft_model(trained(folders["squares, shards"]), config())
    with pytest.raises(ValueError, match="for which the files") as caught:
        fm.save_fp8(outside(model), tmp_path / "out")
    assert [part for part in words.split(" & ") if part not in str(caught.value)] == []
    assert not (tmp_path / "out").exists()


@pytest.mark.extra("peft")
def test_adapters_that_were_merged_are_written(folders: dict[str, Path], tmp_path: Path) -> None:
    from peft import get_peft_model

    base = fm.load_fp8(folders["squares, shards"])
    before = copy.deepcopy(base)
    model = get_peft_model(base, modules_to_save())
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(-1)
    merged = model.merge_and_unload()
    fm.save_fp8(merged, tmp_path / "merged")
    again = fm.load_fp8(tmp_path / "merged")
    tokens = torch.arange(12).view(1, 12)
    assert torch.equal(again(tokens).logits, merged(tokens).logits)
    assert torch.equal(again.lm_head.weight, -before.lm_head.weight)
    projections = [each.model.layers[0].self_attn.q_proj.weight for each in (again, before)]
    assert not torch.equal(projections[0].codes, projections[1].codes)
