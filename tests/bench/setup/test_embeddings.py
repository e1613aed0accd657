"""Embeddings in one byte: trained, saved, resumed, evaluated and sampled as the layers are."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8manifold as fm
from nanogpt_bench.checkpoint import step_file
from nanogpt_bench.cli import main
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import load_config
from nanogpt_bench.data.batches import load_corpus
from nanogpt_bench.loop.train import run
from nanogpt_bench.loop.trainer import Trainer
from nanogpt_bench.runs.trained import choose, load
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.system.errors import BenchError

Tiny = Callable[..., Config]
OPTIONS = {"model__format": "E4M3", "model__embeddings": "e3m4"}


def embeddings(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: m.weight for name, m in model.named_modules() if isinstance(m, nn.Embedding)}


@pytest.mark.parametrize("rule", ["stochastic-8bit", "muon-stochastic", "residual8"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_embedding_trains_in_its_codes(tiny: Tiny, corpus_dir: Path, rule: str, tied: bool) -> None:
    more = {"model__tied": "leave"} if tied else {}
    config = resolve(tiny(rule=rule, model__tie_weights=tied, **OPTIONS, **more))
    trainer = Trainer(config, load_corpus(corpus_dir, config.model.block_size or 0), torch.device("cpu"))
    found = embeddings(trainer.model)
    assert len(found) == 2
    before = {}
    for name, weight in found.items():
        assert isinstance(weight, fm.FP8Parameter)
        assert weight.format == fm.FloatFormat.from_string("E3M4")
        before[name] = weight.codes.clone()
    assert (trainer.model.lm_head.weight is trainer.model.token_embedding.weight) is tied
    trainer.train_step(trainer.new_step(1, last=False), [])
    for name, weight in found.items():
        assert not torch.equal(weight.codes, before[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_goes_on_and_is_measured_and_sampled(
    tiny: Tiny, tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"model__tie_weights": True, "model__tied": "leave"} if tied else {}
    config = tiny(rule="stochastic-8bit", train__max_steps=4, checkpoint__every=2, **OPTIONS, **more)
    run(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    step_file(tmp_path / "half", 4).unlink()
    run(config, tmp_path / "half", resume=True)
    one, other = (load(choose(tmp_path / name)).tensors for name in ("whole", "half"))
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    floats = tiny(rule="stochastic-8bit", model__format="E4M3", **more)
    run(floats, tmp_path / "floats")
    held = [
        json.loads((tmp_path / name / "summary.json").read_text())["bytes_per_parameter"]
        for name in ("whole", "floats")
    ]
    assert held[0] < held[1] - 0.5  # norms, counters and seeds are a tenth of so small a model
    for command in (["evaluate", str(tmp_path / "whole")], ["sample", str(tmp_path / "whole"), "--tokens", "3"]):
        assert main(command) == 0, capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "whole"), "--formats", "E5M2"]) == 0


def test_a_format_is_refused_by_its_key_where_they_are_floats_or_it_is_none(tiny: Tiny) -> None:
    floats = "model.embeddings: 'E3M4' needs model.storage fp8, not "
    for given, message in {
        "--model.embeddings=e3m4 --rule=master --model.format=E4M3": f"{floats}'mast",
        "--model.embeddings=e3m4 --rule=fp32": f"{floats}'float32'",
        "--model.embeddings=E3M9 --rule=stochastic --model.format=E4M3": "model.embeddings: unknown float format 'E3M9",
    }.items():
        with pytest.raises(BenchError) as refused:
            resolve(load_config(None, given.split()))
        assert str(refused.value).startswith(message)
    assert resolve(tiny(rule="fp32", model__embeddings="none")).model.embeddings is None
