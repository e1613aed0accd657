"""The doors `fm.load` and `fm.save`: every kind of folder by every reader, to the bit.

A process without this package reads the same folders with transformers alone.
"""

import copy
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_folders import float_model, make
from hf_cases import gpt2, llama, logits, transformers
from safetensors import safe_open
from safetensors.torch import save_file
from surgery_models import model_bits
from torch import nn

import fp8manifold as fm
from fp8manifold._doors.side_file import read_side_file
from fp8manifold._published.replace_files import CODES_FILE, SIDE_FILE

#: what other libraries announce is their own business
pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = torch.arange(12).view(2, 6)
PUBLISHED = ["squares", "rows", "tensor", "gpt-oss", "mxfp8", "squares, experts"]
SAVED = ["floats of ours", "codes of ours"]
FOLDERS = ["floats", *PUBLISHED, *SAVED, "gguf"]
#: one file without the settings of a class, as ComfyUI has it
IMAGE_MODEL = "image model"
FORMATS = {"*": "E4M3", "lm_head": "none"}
READS_ALONE = """
import json, sys, torch, transformers
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
results = {}
for name, folder, options in json.loads(sys.argv[1]):
    try:
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(folder, **options).eval()
        with torch.no_grad():
            values = model(torch.arange(12).view(2, 6)).logits.float()
        results[name] = values
    except Exception as error:
        results[name] = type(error).__name__
assert not any("fp8manifold" in name for name in sys.modules)
torch.save(results, sys.argv[2])
"""


def learnt(model: Any, steps: int = 2) -> Any:
    """Return the model after a few steps, with counts that are not those of the start."""
    optimizer = fm.optim.StiffnessAdamW(model.train().parameters(), lr=1e-2)
    for _ in range(steps):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def write_gguf(model: Any, path: Path) -> None:
    """Write a Llama in float32 with the names of llama.cpp, by its own package."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        stem, suffix = name.rsplit(".", 1)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        count = heads.get(stem.rpartition(".")[2])
        if count is not None:
            # llama.cpp rotates neighbours, where transformers rotates the halves of a head
            value = value.unflatten(0, (count, 2, -1)).transpose(1, 2).reshape(value.shape)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", value.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def options_of(name: str) -> dict[str, Any]:
    """Return what AutoModel needs beside the folder."""
    return {"gguf_file": "model.gguf"} if name == "gguf" else {}


def formats_of(name: str) -> Any:
    return FORMATS if name in ("floats", "gguf") else None


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("doors")
    names = [*FOLDERS, IMAGE_MODEL]
    paths = {name: root / name.replace(" ", "-").replace(",", "") for name in names}
    for name in PUBLISHED:
        make(name, paths[name])
    llama(tied=False).save_pretrained(paths["floats"])
    model = learnt(fm.quantize_model(llama(), {"*": "E4M3"}, tied="leave"))
    fm.save(model, paths["floats of ours"])
    fm.save(model, paths["codes of ours"], "codes")
    paths[IMAGE_MODEL].mkdir()
    quantized = fm.quantize_model(llama(tied=False), FORMATS, granularity="tensor")
    fm.files.save_state(quantized.state_dict(), paths[IMAGE_MODEL] / "model.safetensors")
    paths["gguf"].mkdir()
    pytest.importorskip("gguf")
    write_gguf(llama(tied=False), paths["gguf"] / "model.gguf")
    return paths


@pytest.fixture(scope="module")
def read_alone(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What transformers reads in a process that does not have this package."""
    wanted = [(name, str(path), options_of(name)) for name, path in folders.items()]
    target = tmp_path_factory.mktemp("alone") / "results.pt"
    without_package = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", READS_ALONE, json.dumps(wanted), str(target)]
    subprocess.run(command, check=True, env=without_package, cwd=target.parent)
    return torch.load(target)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_read_trained_saved_and_read_again(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = fm.load(folders[name], formats_of(name))
    assert fm.quantization_report(model).quantized
    fm.save(learnt(model, 1), tmp_path)
    again = fm.load(tmp_path)
    assert model_bits(again) == model_bits(model)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_codes_are_written_back_to_the_byte(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = fm.load(folders[name])
    assert model_bits(model) == model_bits(fm.load(folders[name]))
    model.save_pretrained(tmp_path)
    saved = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    del saved[SIDE_FILE]
    assert saved == {path.name: path.read_bytes() for path in folders[name].iterdir()}


@pytest.mark.parametrize("name", [*FOLDERS, IMAGE_MODEL])
def test_transformers_reads_the_same_with_the_package_and_without(
    name: str, folders: dict[str, Path], read_alone: Any
) -> None:
    """Equal numbers, or the same refusal."""
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folders[name], **options_of(name))
        result: Any = logits(model).float()
    except Exception as error:
        result = type(error).__name__
    alone = read_alone[name]
    if isinstance(alone, str):
        assert result == alone
    else:
        assert torch.equal(result, alone)


@pytest.mark.parametrize("name", ["squares", "squares, experts", "gpt-oss", "floats of ours"])
def test_transformers_reads_the_numbers_of_the_model(
    name: str, folders: dict[str, Path], read_alone: Any
) -> None:
    """Those of compressed-tensors round inputs, too.

    `test_published_folders` compares the weights that others decode.
    """
    assert torch.equal(logits(fm.load(folders[name])).float(), read_alone[name])


@pytest.mark.parametrize("name", ["floats", "gguf"])
def test_transformers_reads_the_floats_that_load_rounds(
    name: str, folders: dict[str, Path], read_alone: Any
) -> None:
    torch.testing.assert_close(read_alone[name], logits(llama(tied=False)), rtol=0, atol=1e-6)
    rounded = logits(fm.load(folders[name], FORMATS))
    assert not torch.equal(rounded, read_alone[name])
    torch.testing.assert_close(rounded, read_alone[name], rtol=0, atol=0.1)


def test_floats_of_ours_are_the_numbers_of_the_model(
    folders: dict[str, Path], read_alone: Any
) -> None:
    model = fm.load(folders["floats of ours"])
    assert torch.equal(logits(model), read_alone["floats of ours"])
    floats = transformers.AutoModelForCausalLM.from_pretrained(folders["floats of ours"])
    assert not any(isinstance(parameter, fm.FP8Tensor) for parameter in floats.parameters())


def test_an_image_model_is_read_as_a_state_and_refused_otherwise(
    folders: dict[str, Path], read_alone: Any
) -> None:
    folder = folders[IMAGE_MODEL]
    with pytest.raises(FileNotFoundError, match=r"fm\.files\.load_state"):
        fm.load(folder)
    assert isinstance(read_alone[IMAGE_MODEL], str)
    state = fm.files.load_state(folder, dtype=torch.float32)
    quantized = fm.quantize_model(llama(tied=False), FORMATS, granularity="tensor")
    for name, parameter in quantized.named_parameters():
        assert torch.equal(torch.as_tensor(state[name]), torch.as_tensor(parameter)), name


def test_codes_of_ours_are_refused_by_others(read_alone: Any) -> None:
    """No file has a name from which transformers reads weights."""
    assert read_alone["codes of ours"] == "OSError"


@pytest.mark.parametrize("layout", [None, "floats", "codes"])
@pytest.mark.parametrize("storage", ["codes", "grid", "master"])
@pytest.mark.parametrize("maker", [llama, gpt2])
def test_a_model_comes_back_to_the_bit(
    maker: Any, storage: Any, layout: Any, tmp_path: Path
) -> None:
    spec = fm.LayerSpec(
        "E4M3", activation={"format": "E4M3", "policy": "delayed", "history": 16}, gradient="E5M2"
    )
    model = learnt(fm.quantize_model(maker(), {"*": spec, "mlp": "E3M4"}, storage, tied="leave"))
    fm.save(model, tmp_path, layout)
    assert model_bits(fm.load(tmp_path)) == model_bits(model)


@pytest.mark.parametrize("layout", ["floats", "codes"])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block", "square"])
@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E3M4", "E1M6", "E7M0", "E4M3FNUZ", "E2M1"])
def test_every_format_and_granularity_comes_back(
    name: str, granularity: Any, layout: str, tmp_path: Path
) -> None:
    model = fm.quantize_model(
        llama(tied=False), {"*": name}, granularity=granularity, keep_remainder=True, seed=3
    )
    fm.save(model, tmp_path, layout)
    again = fm.load(tmp_path)
    assert model_bits(again) == model_bits(model)
    assert again.lm_head.weight.seed == model.lm_head.weight.seed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", ["power of two", "any"])
def test_floats_are_exact_in_the_narrowest_dtype(
    dtype: torch.dtype, scale: str, tmp_path: Path
) -> None:
    """A code times a power of two is a bfloat16; times another scale it is a float32."""
    from safetensors.torch import load_file

    model = fm.quantize_model(llama(tied=False).to(dtype), {"*": "E4M3"})
    weight = model.lm_head.weight
    if scale == "any":
        weight.rescale_(weight.scale * 1.1)
    fm.save(model, tmp_path)
    floats = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    is_narrow = scale == "power of two" or dtype is torch.bfloat16
    assert floats.dtype is (torch.bfloat16 if is_narrow else torch.float32)
    assert torch.equal(floats.to(dtype), weight.dequantize())
    assert model_bits(fm.load(tmp_path)) == model_bits(model)


def test_codes_that_floats_do_not_give_back_are_kept(tmp_path: Path) -> None:
    """Codes of NaN, of which E5M2 has three for each sign, and -0."""
    model = fm.quantize_model(llama(tied=False), {"*": "E5M2"})
    codes = torch.tensor([0x7D, 0x7E, 0x7F, 0xFD, 0x80, 0x00], dtype=torch.uint8)
    model.lm_head.weight.codes[0, :6] = codes
    fm.save(model, tmp_path)
    assert fm.load(tmp_path).lm_head.weight.codes[0, :6].tolist() == codes.tolist()


@pytest.mark.parametrize("embeddings", ["E4M3", None])
def test_embeddings_and_ties_come_back(embeddings: Any, tmp_path: Path) -> None:
    model = fm.quantize_model(llama(), {"*": "E4M3"}, embeddings=embeddings, tied="leave")
    fm.save(model, tmp_path)
    again = fm.load(tmp_path)
    assert model_bits(again) == model_bits(model)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    floats = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(floats), logits(model))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3 experts", "gpt-oss"])
@pytest.mark.parametrize("layout", ["floats", "codes"])
def test_experts_come_back(kind: str, layout: str, tmp_path: Path) -> None:
    """The files have one tensor per expert, and the model stacks of them."""
    model = fm.quantize_model(
        float_model(kind), {"*": "E4M3"}, parameters={"*.experts.*_proj": "E4M3"}
    ).eval()
    fm.save(model, tmp_path, layout)
    again = fm.load(tmp_path)
    assert model_bits(again) == model_bits(model)
    if layout == "floats":
        floats = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        # Both compute experts in the way that from_pretrained chooses.
        assert torch.equal(logits(floats), logits(again))


def test_published_experts_are_saved_as_floats(folders: dict[str, Path], tmp_path: Path) -> None:
    """Those of gpt-oss, which the model holds transposed."""
    model = fm.load(folders["gpt-oss"])
    fm.save(model, tmp_path, "floats")
    assert model_bits(fm.load(tmp_path)) == model_bits(model)
    floats = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(floats), logits(model))


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, copy.deepcopy])
def test_a_wrapped_model_is_saved(wrap: Any, tmp_path: Path) -> None:
    model = fm.quantize_model(llama(), {"*": "E4M3"}, tied="leave")
    fm.save(wrap(model), tmp_path)
    assert model_bits(fm.load(tmp_path)) == model_bits(model)


def test_the_log_has_one_line(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fp8manifold"):
        fm.load(folders["squares"])
    lines = [record.getMessage() for record in caplog.records if "read" in record.getMessage()]
    assert len(lines) == 1
    size = (folders["squares"] / "model.safetensors").stat().st_size
    assert lines[0].startswith("read codes in a published layout from ")
    assert f"{size:,} bytes of files" in lines[0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("floats", {}, "has floats: give formats="),
        ("gguf", {}, "has a GGUF file: give formats="),
        ("squares", {"formats": "E4M3"}, "formats='E4M3' can't be used with"),
        ("squares", {"embeddings": "E4M3"}, "embeddings='E4M3' can't be used with"),
        ("squares", {"storage": "grid"}, "storage='grid' can't be used with"),
        ("squares", {"granularity": "block"}, "granularity='block' can't be used with"),
        ("squares", {"trust_remote_code": True}, "load takes no trust_remote_code=True"),
        ("floats of ours", {"formats": "E4M3"}, "formats='E4M3' can't be used with"),
        ("floats of ours", {"seed": 1}, "seed=1 can't be used with"),
        ("floats of ours", {"dtype": torch.float16}, "float16"),
        ("floats", {"formats": "E4M3", "activations": "as stored"}, "activations='as stored'"),
        ("floats", {"formats": "E4M3", "storage": "fp9"}, "storage='fp9' is unknown"),
    ],
)
def test_what_an_option_can_not_mean_is_refused(
    name: str, options: dict[str, Any], message: str, folders: dict[str, Path]
) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        fm.load(folders[name], **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_options_of_codes_reach_published_weights(rounding: Any, folders: dict[str, Path]) -> None:
    model = fm.load(folders["rows"], rounding=rounding, seed=7)
    assert model_bits(model) == model_bits(fm.load(folders["rows"], rounding=rounding, seed=7))


def test_floats_that_were_changed_are_refused(tmp_path: Path) -> None:
    """A float model that was trained and saved over the folder."""
    fm.save(fm.quantize_model(llama(), {"*": "E4M3"}, tied="leave"), tmp_path)
    floats = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        floats.model.layers[0].mlp.up_proj.weight += 1e-3
    floats.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"up_proj.weight' was changed since it was saved"):
        fm.load(tmp_path)
    (tmp_path / SIDE_FILE).unlink()
    assert torch.equal(
        logits(fm.load(tmp_path, {"*": "E4M3"}, storage="master", tied="leave")),
        logits(fm.quantize_model(floats, {"*": "E4M3"}, "master", tied="leave")),
    )


@pytest.mark.parametrize("first", [None, "codes", "fp8"])
@pytest.mark.parametrize("second", [None, "codes", "fp8"])
def test_a_save_replaces_an_earlier_one(first: Any, second: Any, tmp_path: Path) -> None:
    squares = fm.quantize_model(llama(tied=False), {"*": "E4M3"}, granularity="square")
    later = learnt(copy.deepcopy(squares))
    fm.save(squares, tmp_path, first)
    fm.save(later, tmp_path, second)
    again = fm.load(tmp_path)
    for name, weight in later.named_parameters():
        if isinstance(weight, fm.FP8Tensor):
            assert torch.equal(again.get_parameter(name).codes, weight.codes), name
    assert (tmp_path / CODES_FILE).exists() is (second == "codes")
    assert (tmp_path / SIDE_FILE).exists() is (second != "fp8")


def test_codes_beside_weights_of_another_save_are_refused(tmp_path: Path) -> None:
    fm.save(fm.quantize_model(llama(), {"*": "E4M3"}, tied="leave"), tmp_path, "codes")
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="one of them is from another save"):
        fm.load(tmp_path)


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (lambda: nn.Linear(4, 2), None, "not a transformers model"),
        (lambda: llama(), None, "no quantised layer"),
        (lambda: fm.quantize_model(llama(), "E4M3", tied="leave"), "gguf", "layout='gguf'"),
        (lambda: fm.quantize_model(llama(), "E4M3", tied="leave"), "fp8", "128 x 128"),
    ],
    ids=["no transformers", "floats", "unknown layout", "rows as squares"],
)
def test_what_can_not_be_saved_is_refused(
    model: Any, layout: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        fm.save(model(), tmp_path, layout)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(b"12345678"), "can't be read"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "can't be read"),
    ],
    ids=["no header", "cut"],
)
def test_a_side_file_that_is_not_whole_is_refused(
    change: Any, message: str, tmp_path: Path
) -> None:
    fm.save(fm.quantize_model(llama(), {"*": "E4M3"}, tied="leave"), tmp_path)
    change(tmp_path / SIDE_FILE)
    with pytest.raises(ValueError, match=message):
        fm.load(tmp_path)


def retold(path: Path, change: Any) -> None:
    """Write a file of safetensors again, with its tensors changed."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
    change(tensors)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    "change",
    [
        lambda codes: codes.float(),
        lambda codes: codes.view(torch.float8_e4m3fn),
        lambda codes: codes.short() + 256,
    ],
    ids=["floats", "float8", "int16"],
)
def test_codes_of_another_dtype_are_refused(change: Any, tmp_path: Path) -> None:
    fm.save(fm.quantize_model(llama(), {"*": "E4M3"}, tied="leave"), tmp_path, "codes")
    name = "model.layers.0.mlp.up_proj.weight_codes"
    retold(
        tmp_path / "codes.safetensors",
        lambda tensors: tensors.update({name: change(tensors[name])}),
    )
    with pytest.raises(ValueError, match="not U8"):
        fm.load(tmp_path)


@pytest.mark.parametrize("part", ["exceptions", "exception_codes"])
@pytest.mark.parametrize("change", ["cut", "gone"])
def test_codes_that_floats_lack_are_read_with_their_positions(
    change: str, part: str, tmp_path: Path
) -> None:
    model = fm.quantize_model(llama(), {"*": "E4M3"}, tied="leave")
    model.model.layers[0].mlp.up_proj.weight.codes[0, :5] = 0xFF  # NaN, the second code
    fm.save(model, tmp_path)
    name = f"model.layers.0.mlp.up_proj.weight_{part}"

    def changed(tensors: Any) -> None:
        part_of_file = tensors.pop(name)
        if change == "cut":
            tensors[name] = part_of_file[:-1].clone()

    retold(tmp_path / SIDE_FILE, changed)
    with pytest.raises(ValueError, match="file is incomplete"):
        fm.load(tmp_path)


def test_the_side_file_is_small(tmp_path: Path) -> None:
    """It has scales and counts, and no codes."""
    fm.save(fm.load(make("rows", tmp_path / "published")), tmp_path / "floats", "floats")
    side = read_side_file(tmp_path / "floats")
    assert not any(name.endswith("_exceptions") for name in side.tensors)
    size = (tmp_path / "floats" / SIDE_FILE).stat().st_size
    assert size < 0.05 * (tmp_path / "floats" / "model.safetensors").stat().st_size
