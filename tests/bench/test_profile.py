"""What a configuration costs, and the ranges of a model's tensors, against figures known beforehand."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import fp8manifold as fm
from nanogpt_bench.cli import main
from nanogpt_bench.commands.profile import float_config
from nanogpt_bench.config.schema import Config
from nanogpt_bench.data.batches import load_corpus
from nanogpt_bench.loop.profile import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    RESIDUAL,
    WEIGHT,
    WEIGHT_GRADIENT,
    Range,
    RangeObserver,
    SavedBytes,
    Tolerance,
    look,
    merged,
    read_formats,
)
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.training.points import Step
from nanogpt_bench.training.trainer import Trainer

E4M3, E5M2, E1M6 = read_formats(["E4M3", "E5M2", "E1M6"])


@pytest.fixture
def config_file(corpus_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of a small model in E4M3, in the current folder."""
    monkeypatch.chdir(tmp_path)
    settings = {
        "rule": "stochastic",
        "data": {"dir": str(corpus_dir)},
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "format": "E4M3"},
        "train": {"precision": "float32"},
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def read_rows(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


# Batch sizes


def test_speed_and_memory_over_batch_sizes(config_file, capsys):
    command = ["profile", str(config_file), "--batch-sizes", "4,2,8", "--steps", "3", "--out", "out"]
    assert main(command) == 0
    rows = read_rows(Path("out/profile.json"))
    assert [row["batch_size"] for row in rows] == [2, 4, 8]
    assert [row["tokens_per_step"] for row in rows] == [32, 64, 128]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(row["tokens_per_step"] / row["seconds_per_step"])
    # Weights, optimizer and gradients know nothing of the batch; what is kept for the backward pass grows with it.
    assert len({row["held_bytes"] for row in rows}) == len({row["gradient_bytes"] for row in rows}) == 1
    first, second, third = (row["saved_bytes"] for row in rows)
    assert third - second == pytest.approx(2 * (second - first), rel=0.02)
    assert second > 1.8 * first
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 5
    assert len({len(line) for line in table}) == 1
    (line, *_) = csv.DictReader(Path("out/profile.csv").read_text().splitlines())
    assert float(line["tokens_per_s"]) == rows[0]["tokens_per_s"]


def test_saved_bytes_are_those_of_the_tensors_kept():
    layer = nn.Linear(8, 4, bias=False)
    x = torch.randn(16, 8, requires_grad=True)
    observer = SavedBytes(layer)
    step = Step(1, layer, torch.optim.SGD(layer.parameters()))
    observer.before_forward(step)
    y = layer(x)
    (y.exp() * y).sum()  # x for the weight's gradient, y and exp(y) for the product's; the weight is no activation
    observer.after_forward(step)
    assert observer.most == 4 * (16 * 8 + 16 * 4 + 16 * 4)
    layer(x)  # nothing is measured outside of a forward pass of the loop
    assert observer.most == 4 * (16 * 8 + 16 * 4 + 16 * 4)


def test_a_batch_that_does_not_fit_ends_the_table(config_file, monkeypatch, capsys):
    plain = Trainer.train_step

    def limited(self, step, observers):
        if self.config.train.batch_size > 2:
            raise torch.OutOfMemoryError("out of memory")
        return plain(self, step, observers)

    monkeypatch.setattr(Trainer, "train_step", limited)
    assert main(["profile", str(config_file), "--batch-sizes", "2,4,8", "--steps", "1", "--out", "out"]) == 0
    rows = read_rows(Path("out/profile.json"))
    assert [row["batch_size"] for row in rows] == [2, 4]
    assert rows[1]["tokens_per_s"] is None
    assert "out of memory" in capsys.readouterr().out


# Ranges


def test_extremes_and_moments_of_a_tensor_that_is_known():
    torch.manual_seed(0)
    x = torch.randn(200_000)
    x[0], x[1], x[2] = -64.0, 2.0**-30, 0.0
    found = look(WEIGHT, "a", x, [E4M3], 0.0)
    assert (found.amax, found.min_nonzero) == (64.0, 2.0**-30)
    assert found.binades == 6 + 30 + 1
    expected = ((x - x.mean()) ** 4).mean() / x.var(correction=0) ** 2
    assert found.kurtosis == pytest.approx(float(expected), rel=1e-4)


def test_what_underflows_depends_on_what_may_overflow():
    # One outlier 2^16 times the rest, which E4M3's range of 2^18 reaches down to and E1M6's of 2^7 does not.
    x = torch.full((1000,), 2.0**-8)
    x[7] = 2.0**8
    strict = look(WEIGHT, "a", x, [E4M3, E1M6], 0.0)
    assert strict.underflow == {"E4M3": 0.0, "E1M6": 0.999}
    assert strict.held_by(Tolerance(0.0, 0.01)) == ["E4M3"]
    loose = look(WEIGHT, "a", x, [E4M3, E1M6], 0.001)  # now the outlier may saturate
    assert loose.underflow == {"E4M3": 0.0, "E1M6": 0.0}
    assert loose.amax == 2.0**8


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E1M6], ids=str)
@pytest.mark.parametrize("overflow", [0.0, 0.003, 0.25])
def test_the_scale_lets_no_more_overflow_than_is_tolerated(fmt, overflow):
    torch.manual_seed(1)
    x = torch.randn(10_000).exp()
    found = look(WEIGHT, "a", x, [fmt], overflow)
    top = float(x.sort(descending=True).values[int(overflow * x.numel())])
    assert int((x > top).sum()) <= overflow * x.numel()
    rounded = fm.round_to_grid(x / (top / fmt.max), fmt)
    assert found.underflow[fmt.name] == pytest.approx(float((rounded == 0).float().mean()), abs=2e-4)


def test_tolerating_everything_is_no_error():
    x = torch.tensor([math.inf, math.nan, 3.0, 1.0])
    found = look(WEIGHT, "a", x, [E4M3], 1.0)
    assert (found.amax, found.nonfinite, found.underflow["E4M3"]) == (3.0, 0.5, 0.0)


@pytest.mark.parametrize("x", [torch.zeros(5), torch.tensor([]), torch.tensor([math.nan, 0.0])])
def test_a_tensor_without_a_magnitude_is_held_by_every_format(x):
    found = look(WEIGHT, "a", x, [E4M3], 0.0)
    assert (found.amax, found.binades, found.underflow) == (0.0, 0, {"E4M3": 0.0})
    assert math.isinf(found.min_nonzero)


def test_the_worst_of_all_looks_and_blocks_counts():
    found = Range(WEIGHT, "blocks.0.mlp.fc", 1.0, 0.5, 3.0, 0.0, {"E4M3": 0.0, "E5M2": 0.2})
    found.take(Range(WEIGHT, "blocks.0.mlp.fc", 0.5, 0.25, 9.0, 0.0, {"E4M3": 0.1, "E5M2": 0.0}))
    assert (found.amax, found.min_nonzero, found.kurtosis) == (1.0, 0.25, 9.0)
    assert found.underflow == {"E4M3": 0.1, "E5M2": 0.2}
    base = {"operand": WEIGHT, "amax": 1.0, "min_nonzero": 0.5, "kurtosis": 3.0, "nonfinite": 0.0, "underflow": {}}
    rows = [
        {**base, "layer": "blocks.0.mlp.fc", "held_by": ["E4M3", "E5M2"]},
        {**base, "layer": "blocks.1.mlp.fc", "held_by": ["E5M2"], "amax": 4.0},
        {**base, "layer": "lm_head", "held_by": ["E4M3"]},
    ]
    both, head = merged(rows)
    assert (both["layer"], both["amax"], both["binades"], both["held_by"]) == ("mlp.fc", 4.0, 4, ["E5M2"])
    assert (head["layer"], head["held_by"]) == ("lm_head", ["E4M3"])


def test_the_observer_sees_the_tensors_of_the_first_micro_batch_and_the_gradient_of_the_step(
    tiny: Callable[..., Config],
):
    config = resolve(tiny(train__accumulation=2, train__precision="float32", rule="fp32"))
    trainer = Trainer(config, load_corpus(Path(config.data.dir), 16), torch.device("cpu"))
    seen: dict[str, list[torch.Tensor]] = {"in": [], "out": [], "grad": []}
    proj = trainer.model.blocks[0].mlp.proj

    def keep(_, inputs, output):
        seen["in"].append(inputs[0].detach())
        seen["out"].append(output.detach())
        output.register_hook(seen["grad"].append)

    proj.register_forward_hook(keep)
    weight = proj.weight.detach().clone()
    observer = RangeObserver(trainer.model, [E4M3], 0.0, [1])
    trainer.train_step(trainer.new_step(1, last=False), (observer,))
    name = "blocks.0.mlp.proj"
    expected = {
        WEIGHT: weight,
        ACTIVATION: seen["in"][0],
        RESIDUAL: seen["out"][0],
        ACTIVATION_GRADIENT: seen["grad"][0],
    }
    for operand, tensor in expected.items():
        assert observer.ranges[operand, name].amax == tensor.abs().max()
    assert observer.ranges[WEIGHT_GRADIENT, name].amax > 0
    assert (RESIDUAL, "blocks.0.mlp.fc") not in observer.ranges
    before = {key: found.amax for key, found in observer.ranges.items()}
    trainer.train_step(trainer.new_step(2, last=False), (observer,))  # a step that is not looked at
    assert {key: found.amax for key, found in observer.ranges.items()} == before
    hooks = len(proj._forward_hooks)
    observer.close()
    assert len(proj._forward_hooks) == hooks - 1


def test_ranges_of_a_model_with_float_weights(config_file, capsys):
    command = ["profile", "ranges", str(config_file), "--formats", "e4m3,E1M6"]
    assert main([*command, "--steps", "4", "--underflow", "0.5", "--out", "out"]) == 0
    rows = read_rows(Path("out/ranges.json"))
    # Nine linear layers: four operands each, and the residual outputs of four of them.
    assert len(rows) == 9 * 4 + 4
    assert {row["operand"] for row in rows} == {WEIGHT, ACTIVATION, RESIDUAL, WEIGHT_GRADIENT, ACTIVATION_GRADIENT}
    for row in rows:
        assert set(row["underflow"]) == {"E4M3", "E1M6"}
        assert row["held_by"] == [name for name, share in row["underflow"].items() if share <= 0.5]
        assert row["nonfinite"] == 0
    output = capsys.readouterr()
    assert "4 steps in float32, looking at 1, 2, 3, 4" in output.err
    assert len(output.out.splitlines()) == 2 + 5 * 4 + 2
    assert main([*command, "--steps", "1", "--underflow", "0", "--overflow", "0", "--out", "strict"]) == 0
    strict = read_rows(Path("strict/ranges.json"))
    assert sum(len(row["held_by"]) for row in strict) < sum(len(row["held_by"]) for row in rows)


def test_the_configuration_trains_in_float():
    config = float_config({"rule": "riemannian", "model.format": "E4M3", "optimizer.lr": 2.0, "train.batch_size": 3})
    assert (config.model.storage, config.model.formats, config.rule) == ("float32", {}, "bf16-mixed")
    assert (config.train.batch_size, config.optimizer.lr, config.train.precision) == (3, 2e-3, "bf16-mixed")
    assert float_config({"rule": "sgd", "optimizer.lr": 0.3}).optimizer.lr == 0.3
