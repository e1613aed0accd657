"""Published FP8 folders read, trained in place, written: the same bytes after no step,
the trainer's model after 20.
"""

import functools
import importlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_folders import LAYOUTS, make, rewritten, torchao
from fp8_served import decoded, served
from torch import Tensor
from watched import watched

import fp8manifold as fm
from fp8manifold._doors import quantizer

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # what other libraries announce is their own business
#: layouts that transformers can't decode: it reads partial squares as equal parts, leaves
#: scales out, or reads nothing
NOT_SERVED = {"squares, partial", "modelopt", "modelopt, kv", "tensor of fp8, autofp8"}
NOT_SERVED |= {"blocks, experts", "mxfp8, experts", "rows, flat"}
NAMES = list(LAYOUTS)


def as_served(name: str, folder: Path, dtype: torch.dtype, place: Path) -> Any:
    """Return the model as others decode it.

    Where transformers can't, values decoded here are written to `place` as floats, and read
    from there.
    """
    if name not in NOT_SERVED:
        return served(folder, dtype)
    values = decoded(folder)
    shutil.copytree(folder, place)

    def change(key: str, value: Tensor) -> dict[str, Tensor]:
        if key in values:
            return {key: values[key].to(dtype)}
        return {} if key.endswith(("_scale", "_scale_inv")) else {key: value}

    rewritten(place, change, {})
    return served(place, dtype)


def widest(name: str) -> torch.dtype:
    """Return the widest dtype into which the layout's library decodes exactly.

    compressed-tensors multiplies in the dtype of its scales.
    """
    _, write, _, options = LAYOUTS[name]
    exact = write is not torchao and "scheme" not in options
    return torch.float32 if exact or options.get("wide") else torch.bfloat16


def sampled(pairs: Iterable[tuple[str, str]], default: int) -> list[Any]:
    """Return cases of which the default run has the first ones."""
    return [
        pytest.param(*pair, marks=[pytest.mark.slow] * (place >= default))
        for place, pair in enumerate(pairs)
    ]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    place = tmp_path_factory.mktemp("published")
    return functools.cache(lambda name: make(name, place / name))


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(tokens(0)).logits


def contents(folder: Path) -> dict[str, Any]:
    """The bytes of every file; of tensors, with the header read, in which the order of
    torchao's metadata varies.
    """
    files = {}
    for path in folder.iterdir():
        data = path.read_bytes()
        size = 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else 0
        files[path.name] = json.loads(data[8:size] or "0"), data[size:]
    return files


def check_same_files(folder: Path, expected_folder: Path) -> None:
    files, expected = contents(folder), contents(expected_folder)
    # counts of draws, which no published folder has
    files.pop("fp8manifold.grids", None)
    assert files.keys() == expected.keys()
    assert [name for name in files if files[name] != expected[name]] == []


@pytest.mark.parametrize("name", NAMES)
def test_no_step_and_the_same_files(published, name, tmp_path):
    fm.save(fm.load(published(name)), tmp_path)
    check_same_files(tmp_path, published(name))


#: bfloat16 for every layout, and float32 for those that are decoded exactly there
DTYPES = [(name, torch.bfloat16) for name in NAMES]
DTYPES += [(name, torch.float32) for name in NAMES if widest(name) is torch.float32]


@pytest.mark.parametrize(("name", "dtype"), DTYPES, ids=str)
def test_the_model_is_the_one_that_others_decode(published, name, dtype, tmp_path):
    model = fm.load(published(name), dtype=dtype)
    served_model = as_served(name, published(name), dtype, tmp_path / "served")
    values = dict(model.named_parameters())
    turned = quantizer.published_of(model).get("turned", ())
    assert any(isinstance(value, fm.FP8Tensor) for value in values.values())
    for key, expected in served_model.named_parameters():
        value = values[key]
        if isinstance(value, fm.FP8Tensor):
            value = value.dequantize()
        if key in turned:
            value = value.mT
        assert torch.equal(value.to(expected.dtype), expected), key
    assert torch.equal(logits(model), logits(served_model))


OPTIMIZERS: dict[str, Callable[[Any, float], Any]] = {
    "muon": lambda m, lr: fm.optim.StiffnessMuon.for_model(
        m, lr=lr, other_lr=lr, weight_decay=0.0, moments="8bit"
    ),
    "adamw": lambda m, lr: fm.optim.StiffnessAdamW(m.parameters(), lr=lr, weight_decay=0.0),
    "adamw residual": lambda m, lr: fm.optim.StiffnessAdamW(
        m.parameters(), lr=lr, weight_decay=0.0, writeback="residual8"
    ),
    "lion": lambda m, lr: fm.optim.StiffnessLion(m.parameters(), lr=lr),
    "sgd": lambda m, lr: fm.optim.StiffnessSGD(m.parameters(), lr=300 * lr, momentum=0.9),
    "fisher": lambda m, lr: fm.optim.FisherNaturalGradient(
        m.parameters(), m, [tokens(1)], lr=lr, refresh=10
    ),
    "wrapper": lambda m, lr: fm.optim.StiffnessWrapper(
        torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=0.0)
    ),
    "riemannian adam": lambda m, lr: fm.optim.RiemannianAdam(
        m.parameters(), lr=300 * lr, float_lr=lr
    ),
    "riemannian sgd": lambda m, lr: fm.optim.RiemannianSGD(
        m.parameters(), lr=3e5 * lr, float_lr=lr
    ),
}


#: every layout with every optimizer; the first ones have each layout once
PAIRS = []
for start in range(len(OPTIMIZERS)):
    optimizers = itertools.islice(itertools.cycle(OPTIMIZERS), start, None)
    PAIRS += zip(NAMES, optimizers, strict=False)


@pytest.mark.parametrize(("name", "optimizer"), sampled(PAIRS, len(NAMES)))
def test_gradients_of_zero_and_the_same_files(published, name, optimizer, tmp_path):
    model = fm.load(published(name))
    stepping = OPTIMIZERS[optimizer](model, 1e-2)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype)
        stepping.step()
    fm.save(model, tmp_path)
    check_same_files(tmp_path, published(name))


@pytest.mark.parametrize(("name", "optimizer"), sampled(PAIRS, len(OPTIMIZERS)))
def test_what_is_served_after_20_steps_is_what_is_trained(published, name, optimizer, tmp_path):
    dtype = widest(name)
    model = fm.load(published(name), dtype=dtype)
    old_codes = {
        key: value.codes.clone()
        for key, value in model.named_parameters()
        if isinstance(value, fm.FP8Tensor)
    }
    stepping = OPTIMIZERS[optimizer](model.train(), 1e-3)
    for step in range(20):
        stepping.zero_grad()
        ids = tokens(step + 1)
        model(ids, labels=ids).loss.backward()
        stepping.step()
    moved = [(old_codes[key] != model.get_parameter(key).codes).float().mean() for key in old_codes]
    assert min(moved) > 0.01
    fm.save(model, tmp_path / "trained")
    served_model = as_served(name, tmp_path / "trained", dtype, tmp_path / "floats")
    assert torch.equal(logits(served_model), logits(model))


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="Linux alone says how large a process was"
)
def test_reading_takes_the_codes_and_little_more(monkeypatch, tmp_path):
    """50M codes: their bytes, pages of files that are given back every 16 MiB, and one
    tensor of 4 MiB as float32.

    The last 8 MiB are what glibc's arenas of threads hold: 68 to 87 MB in all from run
    to run, and 49 with one arena.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    importlib.import_module("loading").write(tmp_path / "fp8", "50M", 3)

    def count_codes() -> int:
        model = fm.load(tmp_path / "fp8")
        return sum(p.codes.numel() for p in model.parameters() if isinstance(p, fm.FP8Tensor))

    fm.save(
        fm.load(make("squares", tmp_path / "squares")), tmp_path / "other"
    )  # what is imported on the way
    usage = watched(count_codes)
    assert usage.returned == 3 * 2**24, usage.raised
    assert usage.grown < 3 * 2**24 + 2**24 + 2**24 + 2**23
