"""The peak of memory while a model is read or saved: its codes, and little more."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf_cases import transformers
from watched import kibibytes, watched

import fp8manifold as fm

pytestmark = [
    #: what other libraries announce is their own business
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not Path("/proc/self/clear_refs").exists(),
        reason="Linux alone says how large a process was",
    ),
]
LITTLE = 12 * 2**20
"""Bytes: pieces of a megabyte, and what glibc keeps of them.

It keeps most in a process whose heap has many holes, as after thousands of other tests: there
what was freed is seldom taken again, and 9 MB more were measured. All floats are twice this.
"""


def llama(scale: int) -> Any:
    sizes = {"hidden_size": 128 * scale, "intermediate_size": 512 * scale, "vocab_size": 8192}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    return quantized(transformers.LlamaForCausalLM(config), embeddings="E4M3", tied="leave")


def mixtral(scale: int) -> Any:
    sizes = {"hidden_size": 64 * scale, "intermediate_size": 128 * scale, "vocab_size": 64}
    experts = {"num_local_experts": 8, "num_hidden_layers": 4, "num_key_value_heads": 4}
    config = transformers.MixtralConfig(**sizes, **experts, num_attention_heads=4)
    return quantized(transformers.MixtralForCausalLM(config), parameters={"*experts*_proj": "E4M3"})


def quantized(model: Any, **options: Any) -> Any:
    model = fm.quantize_model(model.bfloat16(), {"*": "E4M3"}, **options)
    return model.eval()


def grown_by(small: Callable[[], Any], large: Callable[[], int]) -> tuple[int, int]:
    """Return how far memory grows in a call, and what it returns.

    In a process of its own, which has done the same with a small model before: a forked
    process has no pages of libraries yet.
    """

    def measured() -> tuple[int, int]:
        small()
        gc.collect()
        # what was freed before would be taken again, and not counted
        ctypes.CDLL(None).malloc_trim(0)
        before = kibibytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        returned = large()
        return 1024 * (kibibytes("VmHWM") - before), returned

    usage = watched(measured)
    assert not usage.raised
    grown, returned = usage.returned
    return grown, returned


@pytest.mark.parametrize("layout", [None, "codes", "compressed-tensors", "torchao"])
@pytest.mark.parametrize("maker", [llama, mixtral])
def test_saving_makes_no_floats_beside_the_codes(maker: Any, layout: Any, tmp_path: Path) -> None:
    """All floats of these 13 to 14 million weights are 25 MB in bfloat16."""
    small, large = maker(1), maker(4)
    assert sum(parameter.numel() for parameter in large.parameters()) > 12e6

    def save_large() -> int:
        fm.save(large, tmp_path / "large", layout)
        return 0

    grown, _ = grown_by(lambda: fm.save(small, tmp_path / "small", layout), save_large)
    # torchao copies the codes of a weight as it names them
    copied = max(p.numel() for p in large.parameters()) if layout == "torchao" else 0
    assert grown < LITTLE + copied


def bytes_of(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("layout", [None, "codes"])
@pytest.mark.parametrize("maker", [llama, mixtral])
def test_reading_what_was_saved_takes_the_codes(maker: Any, layout: Any, tmp_path: Path) -> None:
    for name, scale in (("small", 1), ("large", 4)):
        fm.save(maker(scale), tmp_path / name, layout)
    grown, held = grown_by(
        lambda: fm.load(tmp_path / "small"), lambda: bytes_of(fm.load(tmp_path / "large"))
    )
    assert held > 12e6
    assert 0.8 * held < grown < held + LITTLE


def test_reading_floats_takes_the_codes_and_a_tensor(tmp_path: Path) -> None:
    for name, scale in (("small", 1), ("large", 4)):
        fm.dequantize_model(llama(scale)).save_pretrained(tmp_path / name)

    def read(name: str) -> int:
        model = fm.load(tmp_path / name, {"*": "E4M3"}, tied="leave")
        largest = max(parameter.numel() for parameter in model.parameters())
        return bytes_of(model) + 2 * largest

    grown, held = grown_by(lambda: read("small"), lambda: read("large"))
    assert grown < held + LITTLE
