"""The peak of memory while a model is read or saved: its codes, and little more."""

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hf_cases
import pytest
import watched as watched_calls
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
ROOT = Path(__file__).parents[3]
LAYOUTS = (None, "codes", "compressed-tensors", "torchao")
LITTLE = 12 * 2**20
"""Bytes: pieces of a megabyte, and what glibc keeps of them. All floats are twice this."""


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


def bytes_of(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def save(maker: Callable[[int], Any], layout: str | None, folder: Path) -> tuple[int, int]:
    """Return how far memory grows as a large model is saved, and what the layout copies."""
    small, large = maker(1), maker(4)
    assert sum(parameter.numel() for parameter in large.parameters()) > 12e6

    def save_large() -> int:
        fm.save(large, folder / "large", layout)
        # torchao copies the codes of a weight as it names them
        return max(p.numel() for p in large.parameters()) if layout == "torchao" else 0

    return grown_by(lambda: fm.save(small, folder / "small", layout), save_large)


def read(maker: Callable[[int], Any], layout: str | None, folder: Path) -> tuple[int, int]:
    """Return how far memory grows as a large model is read, and what it holds."""
    for name, scale in (("small", 1), ("large", 4)):
        fm.save(maker(scale), folder / name, layout)
    return grown_by(lambda: fm.load(folder / "small"), lambda: bytes_of(fm.load(folder / "large")))


def read_floats(folder: Path) -> tuple[int, int]:
    """Return how far memory grows as floats are read into codes, and codes and a tensor."""
    for name, scale in (("small", 1), ("large", 4)):
        fm.dequantize_model(llama(scale)).save_pretrained(folder / name)

    def load(name: str) -> int:
        model = fm.load(folder / name, {"*": "E4M3"}, tied="leave")
        largest = max(parameter.numel() for parameter in model.parameters())
        return bytes_of(model) + 2 * largest

    return grown_by(lambda: load("small"), lambda: load("large"))


MAKERS = (llama, mixtral)
SAVED = [(maker, layout) for maker in MAKERS for layout in LAYOUTS]
READ = [(maker, layout) for maker in MAKERS for layout in (None, "codes")]


def measure(folder: Path) -> dict[str, tuple[int, int]]:
    """Return what all cases measure, by name."""
    cases: dict[str, Callable[[Path], tuple[int, int]]] = {"floats": read_floats}
    for maker, layout in SAVED:
        cases[f"save {maker.__name__} {layout}"] = partial(save, maker, layout)
    for maker, layout in READ:
        cases[f"read {maker.__name__} {layout}"] = partial(read, maker, layout)
    return {name: case(folder / name) for name, case in cases.items()}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Measure in a fresh process: the heap of one that ran other tests has many holes."""
    folders = [Path(module.__file__).parent for module in (hf_cases, watched_calls)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, *folders]))}
    run = subprocess.run(
        [sys.executable, __file__, str(tmp_path_factory.mktemp("models"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    results: dict[str, list[int]] = json.loads(run.stdout.splitlines()[-1])
    return results


@pytest.mark.parametrize(("maker", "layout"), SAVED)
def test_saving_makes_no_floats_beside_the_codes(
    maker: Any, layout: str | None, measured: dict[str, list[int]]
) -> None:
    """All floats of these 13 to 14 million weights are 25 MB in bfloat16."""
    grown, copied = measured[f"save {maker.__name__} {layout}"]
    assert grown < LITTLE + copied


@pytest.mark.parametrize(("maker", "layout"), READ)
def test_reading_what_was_saved_takes_the_codes(
    maker: Any, layout: str | None, measured: dict[str, list[int]]
) -> None:
    grown, held = measured[f"read {maker.__name__} {layout}"]
    assert held > 12e6
    assert 0.8 * held < grown < held + LITTLE


def test_reading_floats_takes_the_codes_and_a_tensor(measured: dict[str, list[int]]) -> None:
    grown, held = measured["floats"]
    assert grown < held + LITTLE


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
