"""Saving makes one tensor at a time, with the bytes of safetensors and of transformers."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_folders import float_model
from hf_cases import gpt2, llama, transformers
from safetensors.torch import save_file

import fp8manifold as fm
from fp8manifold._base import blocks
from fp8manifold._base.tensor_writer import TensorToWrite, ready, write_tensors
from fp8manifold._doors import exchange
from fp8manifold._doors import save as saving
from fp8manifold._doors.float_files import files_of_tensors
from fp8manifold._doors.grids import Decoded
from fp8manifold._published.replace_files import WEIGHTS_FILE

#: what other libraries announce is their own business
pytestmark = pytest.mark.filterwarnings("ignore")
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.float32,
    torch.float64,
    torch.int64,
]


def test_a_file_has_the_bytes_of_safetensors(tmp_path: Path) -> None:
    tensors = {f"t{i}.é": torch.arange(6).view(2, 3).to(dtype) for i, dtype in enumerate(DTYPES)}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "b": torch.ones(5)}
    metadata = {"format": "pt"}
    save_file(tensors, tmp_path / "theirs", metadata)
    to_write = {name: ready(tensor) for name, tensor in tensors.items()}
    write_tensors(tmp_path / "ours", to_write, metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        (
            TensorToWrite(torch.float32, (2,), lambda: (torch.ones(3),)),
            ValueError,
            "was described as",
        ),
        (ready(torch.zeros(2, dtype=torch.complex128)), TypeError, "complex128, which safetensors"),
    ],
    ids=["another shape", "no name"],
)
def test_what_can_not_be_written_is_refused(
    tensor: Any, error: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        write_tensors(tmp_path / "file", {"x": tensor}, {})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def parts_of_file(content: bytes) -> tuple[Any, bytes]:
    """Return the header and the values of a file of safetensors."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


@pytest.mark.parametrize("size", ["50GB", "20KB"])
@pytest.mark.parametrize("maker", [llama, gpt2])
@pytest.mark.parametrize("embeddings", [None, "E4M3"])
def test_files_and_index_are_those_of_transformers(
    size: str, maker: Any, embeddings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fm.quantize_model(maker(), {"*": "E4M3"}, tied="leave", embeddings=embeddings)
    model.save_pretrained(tmp_path / "ours", max_shard_size=size)
    monkeypatch.setattr(saving, "files_of_tensors", lambda *_: None)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    assert (len(contents(tmp_path / "ours")) > 5) == (size == "20KB")


@pytest.mark.parametrize("granularity", ["channel", "square"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3 experts", "deepseek"])
def test_files_of_experts_are_those_of_transformers(
    kind: str, granularity: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models have them in stacks, and files one by one: parts that cut squares among them."""
    model = float_model(kind)
    options = {"granularity": granularity, "parameters": {"*experts*_proj": "E4M3"}}
    fm.quantize_model(model, {"*": "E4M3"}, tied="leave", **options)
    model.save_pretrained(tmp_path / "ours")
    asked = []
    monkeypatch.setattr(saving, "files_of_tensors", lambda *given: asked.append(given))
    model.save_pretrained(tmp_path / "theirs")
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    assert files_of_tensors(*asked[0]) is not None


@pytest.mark.parametrize("kind", ["llama tied", "mixtral"])
@pytest.mark.parametrize("layout", ["compressed-tensors", "torchao", "fp8"])
def test_files_of_other_layouts_are_those_of_transformers(
    layout: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = float_model(kind)
    options = {"granularity": "square"} if layout == "fp8" else {}
    experts = {"parameters": {"*experts*_proj": "E4M3"}} if kind == "mixtral" else {}
    fm.quantize_model(model, {"*": "E4M3"}, embeddings="E4M3", **options, **experts)
    fm.save(model, tmp_path / "ours", layout)
    asked = []
    monkeypatch.setattr(exchange, "files_of_tensors", lambda *given: asked.append(given))
    fm.save(model, tmp_path / "theirs", layout)
    ours, theirs = contents(tmp_path / "ours"), contents(tmp_path / "theirs")
    # safetensors writes metadata in any order
    assert parts_of_file(ours.pop(WEIGHTS_FILE)) == parts_of_file(theirs.pop(WEIGHTS_FILE))
    assert ours == theirs
    assert files_of_tensors(*asked[0]) is not None


def test_one_piece_of_a_decoded_weight_is_alive_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[Any] = []
    counts: list[int] = []
    make = Decoded.pieces

    def watched(weight: Decoded) -> Any:
        for values in make(weight):
            alive[:] = [reference for reference in alive if reference() is not None]
            alive.append(weakref.ref(values))
            counts.append(len(alive))
            yield values

    monkeypatch.setattr(Decoded, "pieces", watched)
    monkeypatch.setattr(blocks, "PIECE", 2**9)
    fm.save(fm.quantize_model(llama(), {"*": "E4M3"}, tied="leave"), tmp_path)
    assert len(counts) > 14
    assert max(counts) <= 2
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size
