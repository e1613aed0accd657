"""Each shipped baseline trains for a few steps.

It has the bytes per parameter of its scheme.
"""

from pathlib import Path

import pytest
import torch
from bench_runs import flags, one_step, refusal, train, trainer_of
from torch import nn

from nanogpt_bench.config.rules import RULES, available_rules
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import find_config, load_config
from nanogpt_bench.loop.train import run

#: shipped file, its rule, and the bytes of a weight and its state, block scales and
#: small tensors left out
BASELINES = {
    "fp32.yaml": ("fp32", 12.0),
    "bf16_baseline.yaml": ("bf16-mixed", 12.0),
    "bf16_pure.yaml": ("bf16-pure", 6.0),
    "bf16_stochastic.yaml": ("bf16-stochastic", 4.0),
    "torchao_float8.yaml": ("torchao-float8", 12.0),
    "torchao_adamw8bit.yaml": ("torchao-adamw8bit", 6.0),
    "torchao_adamwfp8.yaml": ("torchao-adamwfp8", 6.0),
}
COMPILED = ("torchao_adamw8bit.yaml", "torchao_adamwfp8.yaml")
# torchao tells torch twice what torch now knows by itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*torchao.*", "ignore:.*Enum.*")


@pytest.fixture
def uncompiled():
    """Run what would be compiled as it is written.

    The same step without a minute of compiling.
    """
    with torch.compiler.set_stance("force_eager"):
        yield


def from_file(name: str, corpus_dir: Path, *arguments: str, width: int = 64) -> Config:
    rule = BASELINES[name][0]
    if rule not in available_rules():
        pytest.skip(f"{RULES[rule].needs} is not installed")
    settings = {
        "data.dir": corpus_dir,
        "model.n_layer": 1,
        "model.n_head": 2,
        "model.n_embd": width,
        "eval.batches": 2,
    }
    settings |= {
        "model.block_size": 16,
        "train.max_steps": 12,
        "optimizer.warmup_steps": 2,
        "eval.interval": 12,
    }
    return load_config(find_config(name), [*flags(settings), *arguments])


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_trains(name, corpus_dir, tmp_path, uncompiled):
    summary = run(from_file(name, corpus_dir), tmp_path / "run")
    assert (summary["status"], summary["rule"]) == ("finished", BASELINES[name][0])
    assert summary["final_val_loss"] < summary["first_val_loss"] - 0.1
    # Vectors and small tensors stay float32 under torchao's optimizers, and a block has
    # a scale of its own; under ours each of the two moments has a float32 for a row of
    # 64.
    above = 0.001
    if name in COMPILED:
        above = 1.0
    elif name == "bf16_stochastic.yaml":
        above = 2 * 4 / 64
    assert BASELINES[name][1] <= summary["bytes_per_parameter"] <= BASELINES[name][1] + above


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of what the compiler imports and looks into
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_step_is_the_step_that_is_written(name, corpus_dir):
    losses = []
    for stance in ("force_eager", "default"):
        torch._dynamo.reset()
        with torch.compiler.set_stance(stance):
            trainer = trainer_of(from_file(name, corpus_dir))
            losses.append(train(trainer, 5))
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


def test_the_schedule_reaches_an_optimizer_that_keeps_its_learning_rate_in_a_tensor(
    corpus_dir, uncompiled
):
    trainer = trainer_of(from_file("torchao_adamw8bit.yaml", corpus_dir))
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    written = []
    for number in (1, 2):
        step = one_step(trainer, number)
        assert all(
            group["lr"] is lr
            for group, lr in zip(trainer.optimizer.param_groups, rates, strict=True)
        ), number
        assert [float(lr) for lr in rates] == pytest.approx([step.record["lr"]] * 2), number
        written.append(step.record["lr"])
    assert 0 < written[0] < written[1] < 2e-3


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_training_rounds_the_products_of_the_blocks(corpus_dir, recipe):
    config = from_file(
        "torchao_float8.yaml", corpus_dir, "--rule=torchao-float8", "--train.precision=bf16-mixed"
    )
    config.rule, config.model.torchao_float8, config.train.precision = None, recipe, "float32"
    rounded, plain = trainer_of(config), trainer_of(from_file("fp32.yaml", corpus_dir))
    kinds = {name: type(module).__name__ for name, module in rounded.model.named_modules()}
    names = [f"blocks.0.{name}" for name in ("attn.qkv", "attn.proj", "mlp.fc", "mlp.proj")]
    assert [kinds[name] for name in (*names, "lm_head")] == ["Float8Linear"] * 4 + ["Linear"]
    assert rounded.model.blocks[0].mlp.fc.weight.dtype is torch.float32
    tokens, targets = (part[:1] for part in rounded._eval_batches[0])
    rounded_loss, plain_loss = losses = [
        trainer.model.loss(tokens, targets) for trainer in (rounded, plain)
    ]
    assert 0 < (rounded_loss - plain_loss).abs().item() < 0.02
    for loss in losses:
        loss.backward()
    with refusal("multiples of 16"):
        trainer_of(from_file("torchao_float8.yaml", corpus_dir, width=24))
    cosine = nn.functional.cosine_similarity(
        *(trainer.model.blocks[0].mlp.fc.weight.grad.flatten() for trainer in (rounded, plain)),
        dim=0,
    )
    assert 0.9 < float(cosine) < 1 - 1e-6
