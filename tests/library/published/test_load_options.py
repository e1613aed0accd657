"""Options of ``load``, which are those of ``from_pretrained``: each does what it
does there, or is refused by its name.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_folders import make, transformers

import fp8manifold as fm

#: what other libraries announce is their own business
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("squares", tmp_path_factory.mktemp("published") / "squares")


#: options, and what the model then is
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "model.dtype == torch.bfloat16"),
    "torch_dtype": ({"torch_dtype": torch.float32}, "model.dtype == torch.float32"),
    "torch_dtype by name": ({"torch_dtype": "float32"}, "model.dtype == torch.float32"),
    "dtype auto": ({"dtype": "auto"}, "model.dtype == torch.bfloat16"),
    "torch_dtype auto": ({"torch_dtype": "auto"}, "model.dtype == torch.bfloat16"),
    "dtype by name": ({"dtype": "float32"}, "model.dtype == torch.float32"),
    "device_map": ({"device_map": "cpu"}, "model.device.type == 'cpu'"),
    "device_map of the whole": ({"device_map": {"": "cpu"}}, "model.device.type == 'cpu'"),
    "attn_implementation": (
        {"attn_implementation": "eager"},
        "model.config._attn_implementation == 'eager'",
    ),
    "a setting": ({"attention_dropout": 0.5}, "model.config.attention_dropout == 0.5"),
    "a setting of layers": (
        {"attention_dropout": 0.5},
        "model.model.layers[0].self_attn.attention_dropout == 0.5",
    ),
    "low_cpu_mem_usage": ({"low_cpu_mem_usage": True}, "model.dtype == torch.bfloat16"),
    "use_safetensors": ({"use_safetensors": True}, "model.dtype == torch.bfloat16"),
    "no remote code": ({"trust_remote_code": False}, "model.dtype == torch.bfloat16"),
    "no loading info": ({"output_loading_info": False}, "model.dtype == torch.bfloat16"),
}


@pytest.mark.parametrize(("options", "expected"), OPTIONS.values(), ids=OPTIONS)
def test_an_option_does_what_it_does_in_from_pretrained(
    options: dict[str, Any], expected: str, folder: Path, tmp_path: Path
) -> None:
    model = fm.load(folder, **options)
    assert eval(expected, {"torch": torch, "model": model})
    assert not model.training
    fm.save(model, tmp_path / "same")
    for path in folder.iterdir():
        assert (tmp_path / "same" / path.name).read_bytes() == path.read_bytes()


def test_a_generation_config_that_is_given_stays(folder: Path) -> None:
    config = transformers().GenerationConfig(max_new_tokens=7)
    model = fm.load(folder, generation_config=config)
    assert model.generation_config.max_new_tokens == 7
    assert fm.load(folder).generation_config.max_new_tokens is None


ONE = "a model is read to one device: give device="
#: options, the error, and words of it
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "meta": ({"device": "meta"}, ValueError, "device='meta' can't hold the values"),
    "device_map meta": ({"device_map": "meta"}, ValueError, "device='meta' can't hold the values"),
    "device_map auto": ({"device_map": "auto"}, ValueError, "device_map='auto': " + ONE),
    "device_map of two": (
        {"device_map": {"model": 0, "lm_head": "cpu"}},
        ValueError,
        "device_map={'model': 0, 'lm_head': 'cpu'}: " + ONE,
    ),
    "two devices": ({"device": "cuda:0", "device_map": "cpu"}, ValueError, "give device alone"),
    "the CPU and another device": (
        {"device": "cpu", "device_map": "cuda:0"},
        ValueError,
        "give device alone",
    ),
    "two dtypes": (
        {"dtype": torch.float32, "torch_dtype": torch.bfloat16},
        ValueError,
        "give dtype alone",
    ),
    "bfloat16 and another dtype": (
        {"dtype": torch.bfloat16, "torch_dtype": torch.float32},
        ValueError,
        "give dtype alone",
    ),
    "torch_dtype float16": ({"torch_dtype": torch.float16}, TypeError, "torch.float16"),
    "variant": ({"variant": "fp16"}, ValueError, "variant='fp16': the files are"),
    "config": ({"config": "other"}, ValueError, "config='other': settings are those"),
    "loading info": (
        {"output_loading_info": True},
        ValueError,
        "output_loading_info=True: a tensor that is missing, unknown",
    ),
    "mismatched": ({"ignore_mismatched_sizes": True}, ValueError, "ignore_mismatched_sizes=True"),
    "remote code": ({"trust_remote_code": True}, ValueError, "trust_remote_code=True"),
    "state": ({"state_dict": {}}, ValueError, "state_dict={}"),
    "formats": ({"quantization_config": {}}, ValueError, "quantization_config={}"),
    "names": ({"key_mapping": {"a": "b"}}, ValueError, "key_mapping={'a': 'b'}"),
    "pickles": ({"use_safetensors": False}, ValueError, "use_safetensors=False: the files"),
    "offload_folder": ({"offload_folder": "x"}, ValueError, "offload_folder='x': " + ONE),
    "max_memory": ({"max_memory": {0: 1}}, ValueError, "max_memory={0: 1}: " + ONE),
    "tp_plan": ({"tp_plan": "auto"}, ValueError, "tp_plan='auto': " + ONE),
    "adapter": ({"adapter_name": "x"}, ValueError, "adapter_name='x'"),
    "subfolder": ({"subfolder": "nowhere"}, FileNotFoundError, "has no folder 'nowhere'"),
    "unknown": ({"use_cash": True}, TypeError, "'use_cash' is neither an option & of LlamaConfig"),
    "more layers": ({"num_hidden_layers": 2}, ValueError, "the model has 'model.layers.1."),
    "fewer layers": ({"num_hidden_layers": 0}, ValueError, "has no place for & layers.0."),
}


@pytest.mark.parametrize(("options", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_an_option_without_a_meaning_is_refused_in_one_line(
    options: dict[str, Any], error: type[Exception], words: str, folder: Path
) -> None:
    with pytest.raises(error) as caught:
        fm.load(folder, **options)
    message = str(caught.value)
    assert [part for part in words.split(" & ") if part not in message] == [], message
    assert "\n" not in message


def test_subfolder_reads_a_folder_inside(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "inside")
    model = fm.load(tmp_path, subfolder="inside")
    assert model.name_or_path == str(tmp_path / "inside")
    assert fm.files.stored_weights(tmp_path, subfolder="inside") == fm.files.stored_weights(folder)
    fm.save(model, tmp_path / "out")
    expected = (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize(
    "options", [{"attn_implementation": "eager"}, {"use_cache": False}], ids=str
)
def test_headers_need_no_options_of_a_model(options: dict[str, Any], folder: Path) -> None:
    with pytest.raises(TypeError, match="stored_weights has no option"):
        fm.files.stored_weights(folder, **options)


@pytest.mark.parametrize("path_type", [str, Path], ids=["name", "path"])
def test_a_model_says_where_it_was_read(path_type: Any, folder: Path) -> None:
    model = fm.load(path_type(folder))
    names = [model.name_or_path, model.model.name_or_path, model.config.name_or_path]
    assert names == [str(folder)] * 3


@pytest.mark.extra("peft")
@pytest.mark.parametrize("part", ["whole", "base"])
def test_an_adapter_names_the_folder_as_its_base(part: str, folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    model = fm.load(folder)
    model = model if part == "whole" else model.model
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config).eval()
    tokens = torch.arange(12).view(1, 12)
    expected = adapted(tokens)[0]
    adapted.save_pretrained(tmp_path / "adapter")
    base = fm.load(LoraConfig.from_pretrained(tmp_path / "adapter").base_model_name_or_path)
    base = base if part == "whole" else base.model
    again = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(again(tokens)[0], expected)
