"""A save that fails leaves the earlier one, and one that succeeds has every bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_folders import make
from hf_cases import llama
from surgery_models import model_bits
from torch import nn

import fp8manifold as fm
from fp8manifold._doors.restore import restore
from fp8manifold._doors.side_file import SideFile
from fp8manifold._published.replace_files import SIDE_FILE

#: what other libraries announce is their own business
pytestmark = pytest.mark.filterwarnings("ignore")
FORMATS = {"*": "E4M3", "lm_head": "none"}


def fail(*_: Any) -> None:
    raise OSError("no space left on device")


def mixed() -> Any:
    """Return a model in bfloat16 with norms and an MLP in float32 that it can't hold."""
    model = llama(tied=False).bfloat16()
    for name, module in model.named_modules():
        if name.endswith("norm") or name == "model.layers.0.mlp":
            module.float()
            for parameter in module.parameters():
                parameter.data.mul_(1.001)
    return model


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("layout", ["floats", "codes"])
def test_a_head_that_was_untied_is_saved(layout: str, tmp_path: Path) -> None:
    """The settings still say that it is the embedding."""
    model = llama(tied=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1.5)
    model = fm.quantize_model(model, FORMATS)
    fm.save(model, tmp_path, layout)
    assert model_bits(fm.load(tmp_path)) == model_bits(model)


def test_a_tied_head_is_in_the_codes_once(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = fm.quantize_model(llama(tied=True), FORMATS)
    fm.save(model, tmp_path, "codes")
    names = load_file(tmp_path / "codes.safetensors").keys()
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_codes_that_a_class_leaves_out_do_not_replace_a_save(tmp_path: Path) -> None:
    model = fm.quantize_model(llama(tied=False), FORMATS)
    fm.save(model, tmp_path, "compressed-tensors")
    before = files_of(tmp_path)
    model._keys_to_ignore_on_save = {"model.layers.0.mlp.up_proj.weight"}
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="13 of 14 weights in codes"):
        fm.save(model, tmp_path, "compressed-tensors")
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    ("owner", "name"),
    [(shutil, "copyfile"), (SideFile, "write")],
    ids=["tokenizer", "side file"],
)
def test_a_published_save_that_fails_replaces_nothing(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make("rows", tmp_path / "published")
    (source / "tokenizer.json").write_text("{}")
    model = fm.load(source)
    folder = tmp_path / "saved"
    fm.save(model, folder)
    before = files_of(folder)
    assert "tokenizer.json" in before
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(OSError, match="no space left"):
            fm.save(model, folder)
    assert files_of(folder) == before
    assert {path.name for path in folder.iterdir()} == before.keys()
    fm.save(model, folder)
    assert files_of(folder) != before


def test_a_published_save_over_its_source_has_the_same_files(tmp_path: Path) -> None:
    source = make("rows", tmp_path / "published")
    (source / "tokenizer.json").write_text("{}")
    before = files_of(source)
    fm.save(fm.load(source), source)
    after = files_of(source)
    del after[SIDE_FILE]
    assert after == before


@pytest.mark.parametrize("layout", ["floats", "codes"])
@pytest.mark.parametrize("storage", ["codes", "grid", "master"])
def test_tensors_keep_the_dtypes_that_they_were_saved_in(
    storage: Any, layout: str, tmp_path: Path
) -> None:
    model = fm.quantize_model(mixed(), FORMATS, storage).eval()
    assert model.model.norm.weight.dtype is torch.float32
    fm.save(model, tmp_path, layout)
    assert model_bits(fm.load(tmp_path)) == model_bits(model)
    restored = fm.quantize_model(mixed(), FORMATS, storage, seed=1).eval()
    with torch.no_grad():
        restored.model.norm.weight.mul_(2)
    restore(restored, tmp_path)
    assert model_bits(restored) == model_bits(model)


def test_floats_are_not_rounded_by_a_resume(tmp_path: Path) -> None:
    model = fm.quantize_model(mixed(), FORMATS)
    fm.save(model, tmp_path)
    model.model.norm.bfloat16()
    before = model_bits(model)
    with pytest.raises(ValueError, match=r"'model.norm.weight' was saved in torch.float32"):
        restore(model, tmp_path)
    assert model_bits(model) == before
