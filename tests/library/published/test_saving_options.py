"""Options and names that saving and loading honour, or refuse before anything changes."""

import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_folders import make
from hf_cases import llama, transformers
from safetensors.torch import load_file

import fp8manifold as fm

#: what other libraries announce is their own business
pytestmark = pytest.mark.filterwarnings("ignore")


def quantized(model: Any = None) -> Any:
    model = llama(tied=False) if model is None else model
    return fm.quantize_model(model, {"*": "E4M3", "lm_head": "none"})


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def published_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("squares", tmp_path_factory.mktemp("published") / "squares")


@pytest.fixture
def published(published_folder: Path) -> Any:
    return fm.load(published_folder)


def test_a_push_to_the_hub_is_refused_and_leaves_the_earlier_save(tmp_path: Path) -> None:
    model = quantized()
    model.save_pretrained(tmp_path)
    before = files(tmp_path)
    model.model.layers[0].mlp.up_proj.weight.data.mul_(2)
    with pytest.raises(ValueError, match=r"push_to_hub=True .*upload_folder"):
        model.save_pretrained(tmp_path, push_to_hub=True)
    assert files(tmp_path) == before


def test_a_push_to_the_hub_in_a_published_layout_is_refused(published: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"push_to_hub=True .*upload_folder"):
        published.save_pretrained(tmp_path / "new", push_to_hub=True)
    assert not (tmp_path / "new").exists()


class SavesAnyOptions(transformers.LlamaForCausalLM):
    def save_pretrained(self, *arguments: Any, **options: Any) -> Any:
        return super().save_pretrained(*arguments, **options)


class SavesInSmallFiles(transformers.LlamaForCausalLM):
    def save_pretrained(
        self, save_directory: Any, max_shard_size: str = "20KB", **options: Any
    ) -> Any:
        return super().save_pretrained(save_directory, **options)


@pytest.mark.parametrize(
    ("kind", "is_sharded"),
    [(SavesAnyOptions, False), (SavesInSmallFiles, True)],
    ids=["any options", "small files"],
)
def test_the_size_of_files_is_that_of_the_first_method_that_has_one(
    kind: Any, is_sharded: bool, tmp_path: Path
) -> None:
    model = quantized(kind(llama(tied=False).config))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() is is_sharded
    same = fm.load(tmp_path, architectures=["LlamaForCausalLM"])
    weight = model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(same.model.layers[0].mlp.up_proj.weight.codes, weight.codes)


#: options of a published model's `save_pretrained` that are not honoured
REFUSED: dict[str, dict[str, Any]] = {
    "max_shard_size": {"max_shard_size": "20KB"},
    "variant": {"variant": "fp8"},
    "save_original_format": {"save_original_format": False},
    "safe_serialization": {"safe_serialization": False},
    "no state": {"state_dict": {}},
}


@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_an_option_that_a_published_layout_has_no_room_for_is_refused(
    options: dict[str, Any], published: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        published.save_pretrained(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


#: the same options with what holds anyway
HOLD_ANYWAY: dict[str, dict[str, Any]] = {
    "max_shard_size": {"max_shard_size": "50GB"},
    "variant": {"variant": None},
    "save_original_format": {"save_original_format": True},
    "safe_serialization": {"safe_serialization": True},
}


@pytest.mark.parametrize("options", HOLD_ANYWAY.values(), ids=HOLD_ANYWAY)
def test_what_holds_anyway_may_be_said(
    options: dict[str, Any], published: Any, published_folder: Path, tmp_path: Path
) -> None:
    published.save_pretrained(tmp_path, **options)
    expected = files(published_folder)
    assert {name: text for name, text in files(tmp_path).items() if name in expected} == expected


def test_an_exact_copy_of_a_published_state_may_have_nan(published: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        published.model.norm.weight[0] = float("nan")
    state = {name: value.clone() for name, value in published.state_dict().items()}
    published.save_pretrained(tmp_path, state_dict=state)
    assert fm.load(tmp_path).model.norm.weight[0].isnan()


#: changes of an exact copy of a published model's state
CHANGES: dict[str, Any] = {
    "a part": lambda state: state.pop("model.norm.weight"),
    "a value": lambda state: state["model.norm.weight"].mul_(2),
    "a sign of 0": lambda state: state["lm_head.weight"].copysign_(
        torch.tensor(-1, dtype=state["lm_head.weight"].dtype)
    ),
    "a dtype": lambda state: state.update(
        {"model.norm.weight": state["model.norm.weight"].double()}
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_state_than_the_published_models_is_refused(
    change: Any, published: Any, tmp_path: Path
) -> None:
    with torch.no_grad():
        published.lm_head.weight.zero_()
    state = {name: value.clone() for name, value in published.state_dict().items()}
    change(state)
    with pytest.raises(ValueError, match="state_dict= is not the model's own state"):
        published.save_pretrained(tmp_path / "new", state_dict=state)
    assert not (tmp_path / "new").exists()


def of_floats(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state of a layer in codes and one in floats, and more tensors."""
    codes = fm.FP8Parameter(torch.ones(4, 4), "E4M3", granularity="tensor")
    state = {"codes.weight": codes, "floats.weight": torch.ones(4, 4)}
    return state | {name.replace("__", "."): tensor for name, tensor in tensors.items()}


#: a layout of ComfyUI, and tensors of a state whose names in the file are taken
TAKEN: dict[str, tuple[str, dict[str, torch.Tensor]]] = {
    "two scales of inputs": (
        "scaled_fp8",
        {"codes__input_scale": torch.ones(()), "codes__scale_input": torch.zeros(())},
    ),
    "the scale of a weight": ("comfy_quant", {"codes__weight_scale": torch.zeros(())}),
    "the older scale": ("scaled_fp8", {"codes__scale_weight": torch.zeros(())}),
    "the marker of a layer": ("comfy_quant", {"codes__comfy_quant": torch.zeros(1)}),
    "the marker of a file": ("scaled_fp8", {"scaled_fp8": torch.zeros(1)}),
}


@pytest.mark.parametrize(("layout", "tensors"), TAKEN.values(), ids=TAKEN)
def test_no_tensor_of_a_state_takes_the_name_of_another(
    layout: str, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"the file would have '.*' twice"):
        fm.files.save_state(of_floats(**tensors), tmp_path / "state.safetensors", layout)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("layout", ["comfy_quant", "scaled_fp8"])
@pytest.mark.parametrize("entry", ["input_scale", "scale_input"])
def test_a_tensor_beside_floats_keeps_its_name(layout: str, entry: str, tmp_path: Path) -> None:
    state = of_floats(**{f"floats__{entry}": torch.full((), 2.0)})
    fm.files.save_state(state, tmp_path / "state.safetensors", layout)
    assert load_file(tmp_path / "state.safetensors")[f"floats.{entry}"] == 2.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_floats_of_another_dtype_ask_for_one(dtype: torch.dtype, tmp_path: Path) -> None:
    llama(tied=False).to(dtype).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=rf"{dtype}.*dtype="):
        fm.load(tmp_path, "E4M3")
    assert fm.load(tmp_path, "E4M3", dtype="float32").dtype == torch.float32


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a repository, whose files are downloaded by patterns."""
    repository = tmp_path / "repository"
    repository.mkdir()

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        cache = tmp_path / "cache"
        for path in repository.rglob("*"):
            file = path.relative_to(repository)
            if any(fnmatch(file.as_posix(), pattern) for pattern in allow_patterns):
                (cache / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, cache / file)
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return repository


@pytest.mark.parametrize("subfolder", ["", "inside"], ids=["top", "subfolder"])
def test_a_repository_of_pickled_floats_alone_is_read(subfolder: str, downloads: Path) -> None:
    model = llama(tied=False)
    (downloads / subfolder).mkdir(exist_ok=True)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(downloads / subfolder)
    torch.save(model.state_dict(), downloads / subfolder / "pytorch_model.bin")
    read = fm.load("some/model", "E4M3", subfolder=subfolder)
    codes = quantized(model).model.layers[0].mlp.up_proj.weight.codes
    assert torch.equal(read.model.layers[0].mlp.up_proj.weight.codes, codes)


def test_pickles_beside_safetensors_are_not_downloaded(downloads: Path) -> None:
    llama(tied=False).save_pretrained(downloads)
    (downloads / "pytorch_model.bin").write_bytes(b"no pickle")
    fm.load("some/model", "E4M3")
    assert not (downloads.parent / "cache" / "pytorch_model.bin").exists()


def test_a_repository_of_gguf_files_alone_asks_for_one(downloads: Path) -> None:
    llama(tied=False).config.save_pretrained(downloads)
    (downloads / "model.Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(FileNotFoundError, match=r"'some/model' has no weights: .*gguf_file="):
        fm.load("some/model", "E4M3")
    assert not (downloads.parent / "cache" / "model.Q8_0.gguf").exists()
