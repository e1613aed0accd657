"""Published FP8 folders read, trained in place, written: the same bytes after no step, the trainer's model after 20."""

import importlib
import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_folders import LAYOUTS, make
from fp8_served import served, served_by_values
from torch import Tensor, nn
from watched import watched

import fp8manifold as fm

pytestmark = pytest.mark.filterwarnings("ignore")  # what other libraries announce is their own business
Get = Callable[[str], Path]
#: transformers reads partial squares as equal parts, these codes without their scales, and the rest not at all
NOT_SERVED = {"squares, partial", "modelopt", "modelopt, kv", "tensor of fp8, autofp8"} | {
    *("blocks, experts", "mxfp8, experts", "rows, flat")
}
READ = list(LAYOUTS)
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def as_served(name: str, folder: Path, dtype: torch.dtype, place: Path) -> Any:
    return served_by_values(folder, dtype, place) if name in NOT_SERVED else served(folder, dtype)


def widest(name: str) -> torch.dtype:
    """The widest dtype into which the layout's library decodes: compressed-tensors multiplies in that of its scales."""
    layout = LAYOUTS[name]
    exact = layout.by in ("transformers", "formula") and "scheme" not in layout.options
    return torch.float32 if exact or layout.options.get("wide") else torch.bfloat16


def some(pairs: Iterable[tuple[str, str]], default: int) -> list[Any]:
    return [pytest.param(*pair, marks=[pytest.mark.slow] * (at >= default)) for at, pair in enumerate(pairs)]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    place = tmp_path_factory.mktemp("published")
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        return made[name] if name in made else made.setdefault(name, make(name, place / f"{len(made)}"))

    return get


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    found: Tensor = model.eval()(tokens(0)).logits
    return found


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:size]), data[size:]


def check_same_files(folder: Path, other: Path) -> None:
    """Every file has the same name and bytes; of tensors, those that differ are named."""
    names = [sorted(path.name for path in each.iterdir()) for each in (folder, other)]
    assert names[0] == names[1]
    for name in names[0]:
        if not name.endswith(".safetensors"):
            assert (folder / name).read_bytes() == (other / name).read_bytes(), name
            continue
        (header, data), (its, expected) = (parts(each / name) for each in (folder, other))
        assert header == its
        spans = {key: slice(*said["data_offsets"]) for key, said in header.items() if key != "__metadata__"}
        assert [key for key, span in spans.items() if data[span] != expected[span]] == []


@pytest.mark.parametrize("name", READ)
def test_no_step_and_the_same_files(published, name, tmp_path):
    fm.save_fp8(fm.load_fp8(published(name)), tmp_path)
    check_same_files(tmp_path, published(name))


@pytest.mark.parametrize("name", READ)
def test_the_model_is_the_one_that_others_decode(published, name, tmp_path):
    for dtype in sorted({torch.bfloat16, widest(name)}, key=str):
        model = fm.load_fp8(published(name), dtype=dtype)
        other = as_served(name, published(name), dtype, tmp_path / str(dtype))
        values = dict(model.named_parameters())
        turned = model.config.quantization_config.published.get("turned", ())
        assert any(isinstance(value, fm.FP8Tensor) for value in values.values())
        for key, expected in other.named_parameters():
            mine = values[key].dequantize() if isinstance(values[key], fm.FP8Tensor) else values[key]
            mine = mine.mT if key in turned else mine
            assert torch.equal(mine.to(expected.dtype), expected), key
        assert torch.equal(logits(model), logits(other))


# ------------------------------------------------------------------------------------------------------ trained

OPTIMIZERS: dict[str, Callable[[Any, float], Any]] = {
    "muon": lambda m, lr: fm.optim.StiffnessMuon.for_model(m, lr=lr, other_lr=lr, weight_decay=0.0, moments="8bit"),
    "adamw": lambda m, lr: fm.optim.StiffnessAdamW(m.parameters(), lr=lr, weight_decay=0.0),
    "adamw residual": lambda m, lr: fm.optim.StiffnessAdamW(
        m.parameters(), lr=lr, weight_decay=0.0, writeback="residual8"
    ),
    "lion": lambda m, lr: fm.optim.StiffnessLion(m.parameters(), lr=lr),
    "sgd": lambda m, lr: fm.optim.StiffnessSGD(m.parameters(), lr=300 * lr, momentum=0.9),
    "madam": lambda m, lr: fm.optim.Madam(m.parameters(), lr=lr, float_lr=lr),
    "fisher": lambda m, lr: fm.optim.FisherNaturalGradient(m.parameters(), m, [tokens(1)], lr=lr, refresh=10),
    "wrapper": lambda m, lr: fm.optim.StiffnessWrapper(torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=0.0)),
    "riemannian adam": lambda m, lr: fm.optim.RiemannianAdam(m.parameters(), lr=300 * lr, float_lr=lr),
    "riemannian sgd": lambda m, lr: fm.optim.RiemannianSGD(m.parameters(), lr=3e5 * lr, float_lr=lr),
}


PAIRS = [
    (name, optimizer)
    for start in range(len(OPTIMIZERS))
    for name, optimizer in zip(READ, itertools.islice(itertools.cycle(OPTIMIZERS), start, None), strict=False)
]


@pytest.mark.parametrize(("name", "optimizer"), some(PAIRS, len(READ)))
def test_gradients_of_zero_and_the_same_files(published, name, optimizer, tmp_path):
    model = fm.load_fp8(published(name))
    stepping = OPTIMIZERS[optimizer](model, 1e-2)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype)
        stepping.step()
    fm.save_fp8(model, tmp_path)
    check_same_files(tmp_path, published(name))


@pytest.mark.parametrize(("name", "optimizer"), some(PAIRS, len(OPTIMIZERS)))
def test_what_is_served_after_20_steps_is_what_is_trained(published, name, optimizer, tmp_path):
    dtype = widest(name)
    model = fm.load_fp8(published(name), dtype=dtype)
    before = {key: value.codes.clone() for key, value in model.named_parameters() if isinstance(value, fm.FP8Tensor)}
    stepping = OPTIMIZERS[optimizer](model.train(), 1e-3)
    for step in range(20):
        stepping.zero_grad()
        ids = tokens(step + 1)
        model(ids, labels=ids).loss.backward()
        stepping.step()
    moved = [(before[key] != model.get_parameter(key).codes).float().mean() for key in before]
    assert min(moved) > 0.01
    fm.save_fp8(model, tmp_path / "trained")
    other = as_served(name, tmp_path / "trained", dtype, tmp_path / "floats")
    assert torch.equal(logits(other), logits(model))


# ------------------------------------------------------------------------------------------------------- memory


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone says how large a process was")
def test_reading_takes_the_codes_and_little_more(monkeypatch, tmp_path):
    """50M codes: their bytes, pages of files that are given back every 16 MiB, and one tensor of 4 MiB as float32."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    importlib.import_module("loading").write(tmp_path / "fp8", "50M", 3)

    def read() -> int:
        model = fm.load_fp8(tmp_path / "fp8")
        return sum(p.codes.numel() for p in model.parameters() if isinstance(p, fm.FP8Tensor))

    fm.save_fp8(fm.load_fp8(make("squares", tmp_path / "squares")), tmp_path / "other")  # what is imported on the way
    found = watched(read)
    assert found.returned == 3 * 2**24, found.raised
    assert found.grown < 3 * 2**24 + 2**24 + 2**24
