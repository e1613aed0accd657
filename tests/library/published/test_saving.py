"""``save`` of models that were changed after ``load``, and into folders of
earlier saves: what is read is what was trained, or nothing is written.
"""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_folders import make, rewritten, tensors_of
from fp8_served import served
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

import fp8manifold as fm
from fp8manifold._base.tensor_writer import write_tensors
from fp8manifold._doors import quantizer

#: what other libraries announce is their own business
pytestmark = pytest.mark.filterwarnings("ignore")
Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("published")
    names = ("squares, shards", "squares, tied", "squares", "modelopt")
    return {name: make(name, place / name) for name in names}


def trained(folder: Path) -> Any:
    """A model each of whose parameters differs from the files."""
    model = fm.load(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1)
    return model


def files(folder: Path) -> dict[str, bytes]:
    """Return what a folder has, without the counts beside it."""
    paths = [path for path in folder.iterdir() if path.is_file() and path.suffix != ".grids"]
    return {path.name: path.read_bytes() for path in paths}


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
    fm.save(model, tmp_path / "plain")
    assert files(tmp_path / "plain") != files(folders["squares, shards"])
    fm.save(wrapped(model), tmp_path / "wrapped")
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
        "'model.layers.2. & 'model-0000 & 'model.layers.2.inner. & layout='floats'",
    ),
    ("squares, shards", base_alone, "'lm_head.weight' & is no longer in the model"),
    ("squares, shards", without_the_last_layer, "'model.layers.3. & is no longer in the model"),
    ("squares, shards", without_a_layer_inside, "'model.layers.3. & is no longer in the model"),
    ("squares, shards", with_a_parametrisation, "'lm_head.weight' & which has 'lm_head.param"),
    ("squares, shards", with_a_head_more, "no place for 'score.weight' & layout='floats'"),
    ("squares, tied", with_a_head_untied, "no place for 'lm_head.weight' & layout='floats'"),
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
        quantizer.published_of(model).pop("copied", None)
    with pytest.raises(ValueError, match=r"the files|read from") as caught:
        fm.save(change(model), tmp_path / "out")
    message = str(caught.value)
    assert [part for part in words.split(" & ") if part not in message] == [], message
    assert "\n" not in message
    assert not (tmp_path / "out").exists()


def test_the_base_of_a_tied_model_is_the_whole_of_it(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = trained(folders["squares, tied"])
    fm.save(model, tmp_path / "whole")
    fm.save(model.model, tmp_path / "base")
    assert files(tmp_path / "base") == files(tmp_path / "whole")


def test_a_compiled_model_is_saved_over_its_source(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["squares, shards"], tmp_path / "published")
    model = trained(folder)
    fm.save(model, tmp_path / "expected")
    fm.save(compiled(model), folder)
    assert files(folder) == files(tmp_path / "expected")


@pytest.mark.parametrize("settings", ["new settings", "settings of older versions"])
def test_what_never_had_a_place_is_copied(settings: str, tmp_path: Path) -> None:
    folder = make("squares, deepseek", tmp_path / "published")
    drafts = {"model.layers.61.enorm.weight": torch.ones(128, dtype=torch.bfloat16)}
    first = next(iter(tensors_of(folder)))
    rewritten(folder, lambda name, value: {name: value} | (drafts if name == first else {}), None)
    model = fm.load(folder)
    published = quantizer.published_of(model)
    assert published["copied"] == list(drafts)
    if settings == "settings of older versions":
        published.pop("copied")
    fm.save(model, tmp_path / "same")
    assert files(tmp_path / "same") == files(folder)


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
    (prompts, "'prompt_encoder.default.embedding.weight' is outside"),
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
    with pytest.raises(ValueError, match="files have no place") as caught:
        fm.save(outside(model), tmp_path / "out")
    assert [part for part in words.split(" & ") if part not in str(caught.value)] == []
    assert not (tmp_path / "out").exists()


@pytest.mark.extra("peft")
def test_adapters_that_were_merged_are_written(folders: dict[str, Path], tmp_path: Path) -> None:
    from peft import get_peft_model

    base = fm.load(folders["squares, shards"])
    original = copy.deepcopy(base)
    model = get_peft_model(base, modules_to_save())
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(-1)
    merged = model.merge_and_unload()
    fm.save(merged, tmp_path / "merged")
    again = fm.load(tmp_path / "merged")
    tokens = torch.arange(12).view(1, 12)
    assert torch.equal(again(tokens).logits, merged(tokens).logits)
    assert torch.equal(again.lm_head.weight, -original.lm_head.weight)
    projections = [net.model.layers[0].self_attn.q_proj.weight for net in (again, original)]
    assert not torch.equal(projections[0].codes, projections[1].codes)


TOKENS = torch.arange(12).view(1, 12)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def exported(folders: dict[str, Path], out: Path) -> Any:
    """Write a small model in one file, which no earlier save has a tensor of."""
    model = fm.dequantize_model(fm.load(folders["squares"], dtype=torch.float32))
    fm.quantize_model(model, {"*": "E4M3", "lm_head": "none"}, "codes", granularity="square")
    fm.save(model, out, layout="fp8")
    return model


def saved(name: str) -> Callable[[dict[str, Path], Path], Any]:
    def save(folders: dict[str, Path], out: Path) -> Any:
        model = fm.load(folders[name], dtype=torch.float32)
        fm.save(model, out)
        return model

    return save


SAVES = {
    "shards": saved("squares, shards"),
    "one file": saved("squares"),
    "exported": exported,
}


@pytest.mark.parametrize("second", SAVES)
@pytest.mark.parametrize("first", SAVES)
def test_files_of_an_earlier_save_are_not_read(
    first: str, second: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "consolidated.safetensors").write_bytes(b"of the user")
    (tmp_path / "pytorch_model.bin").write_bytes(b"of the user")
    SAVES[first](folders, tmp_path)
    model = SAVES[second](folders, tmp_path)
    assert torch.equal(logits(fm.load(tmp_path, dtype=torch.float32)), logits(model))
    assert torch.equal(logits(served(tmp_path, torch.float32)), logits(model))
    names = {path.name for path in tmp_path.glob("model*")}
    shards = {path.name for path in folders["squares, shards"].glob("model*")}
    assert names == (shards if second == "shards" else {"model.safetensors"})
    assert (tmp_path / "consolidated.safetensors").read_bytes() == b"of the user"
    assert (tmp_path / "pytorch_model.bin").read_bytes() == b"of the user"
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", ["adapter_config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("save", SAVES)
def test_what_would_be_read_beside_the_weights_is_refused(
    save: str, name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=f"{name}.*: remove it, or give another folder"):
        SAVES[save](folders, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_settings_of_a_server_are_replaced_by_those_of_the_same_layout(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = fm.load(folders["modelopt"])
    fm.save(model, tmp_path)
    fm.save(model, tmp_path)
    assert files(tmp_path) == files(folders["modelopt"])


def test_another_file_of_weights_beside_an_unusual_name_is_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["squares"], tmp_path / "published")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    model = fm.load(folder)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "others.safetensors").write_bytes(b"of the user")
    with pytest.raises(ValueError, match=r"others\.safetensors.* would be read with"):
        fm.save(model, tmp_path / "out")
    (tmp_path / "out" / "others.safetensors").rename(tmp_path / "out" / "model.safetensors")
    fm.save(model, tmp_path / "out")
    assert files(tmp_path / "out") == files(folder)


def test_an_index_that_cannot_be_read_is_replaced(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("half of an ind")
    fm.save(fm.load(folders["squares"]), tmp_path)
    assert files(tmp_path) == files(folders["squares"])


def test_a_save_that_fails_changes_nothing(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fm.save(fm.load(folders["squares"]), tmp_path)
    old_files = files(tmp_path)
    calls = []

    def failing(*args: Any) -> None:
        calls.append(args)
        if len(calls) > 1:
            raise OSError("no space left on the device")
        write_tensors(*args)

    monkeypatch.setattr("fp8manifold._doors.published.write_tensors", failing)
    with pytest.raises(OSError, match="no space left"):
        fm.save(fm.load(folders["squares, shards"]), tmp_path)
    assert files(tmp_path) == old_files
    assert len(list(tmp_path.iterdir())) == len(old_files) + 1


# Files that are added to a folder, of which transformers reads one set alone.
def as_consolidated(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")


def as_variant(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "model.fp16.safetensors")


def as_shards(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(tensors_of(folder), "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def named_in_settings(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    settings["transformers_weights"] = "weights.safetensors"
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = {"lm_head.weight": torch.zeros(96, 256)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "add_files",
    [as_consolidated, as_variant, as_shards, named_in_settings],
    ids=lambda f: f.__name__,
)
def test_it_reads_the_files_that_transformers_reads(
    add_files: Callable[[Path], None], folders: dict[str, Path], tmp_path: Path
) -> None:
    """In the files that are not to be read norms are 0, which logits would show."""
    folder = shutil.copytree(folders["squares"], tmp_path / "published")
    expected = logits(fm.load(folder, dtype=torch.float32))
    copies = {path.name for path in folder.glob("*.safetensors")}
    add_files(folder)

    def zeroed(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(value) if name.endswith("norm.weight") else value}

    changed = tmp_path / "other"
    changed.mkdir()
    for path in folder.glob("*.safetensors"):
        if path.name not in copies and add_files is not named_in_settings:
            path.rename(changed / path.name)
    rewritten(changed, zeroed, None)
    for path in changed.iterdir():
        path.rename(folder / path.name)
    model = fm.load(folder, dtype=torch.float32)
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(served(folder, torch.float32)), expected)
    assert fm.files.stored_weights(folder)
    fm.save(model, tmp_path / "out")
    assert torch.equal(logits(fm.load(tmp_path / "out", dtype=torch.float32)), expected)
    assert torch.equal(logits(served(tmp_path / "out", torch.float32)), expected)
