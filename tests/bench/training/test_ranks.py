"""Runs in several processes.

One state and one batch for any number of them, and what fails in one fails in all.
"""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench_runs import Tiny, one_step, trainer_of
from rank_pool import Pool

from nanogpt_bench.checkpoint import (
    CheckpointNotWritten,
    Contents,
    commit_checkpoint,
    read_checkpoint,
    step_file,
)
from nanogpt_bench.config.schema import Config
from nanogpt_bench.loop.resume import capture, restore
from nanogpt_bench.loop.trainer import Trainer
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.ranks import ALONE, Ranks

RESIDUAL = {
    "model__format": "E4M3",
    "model__storage": "codes",
    "optimizer__name": "stiffness_adamw",
}
RESIDUAL |= {"optimizer__writeback": "residual8", "optimizer__moments": "8bit"}
DELAYED = "{'*': {weight: E4M3, activation: E4M3, policy: delayed}}"

#: 8-bit averages with and without residuals, orthogonal steps, ULPs, floats, delayed
#: scales
KINDS = {
    "stochastic-8bit": {"rule": "stochastic-8bit", "model__format": "E4M3"},
    "muon-residual8": {"rule": "muon-residual8", "model__format": "E5M2"},
    "residual8-8bit": RESIDUAL,
    "riemannian": {"rule": "riemannian", "model__format": "E3M4"},
    "fp32": {"rule": "fp32"},
    "delayed": {"rule": "master", "model__granularity": "tensor", "model__formats": DELAYED},
}
#: stepped by torch's own AdamW, whose last bits depend on where in its memory a number
#: lies
OF_TORCH = ("fp32", "delayed")


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    pools = {size: Pool(size, tmp_path_factory.mktemp("ranks")) for size in (2, 3)}
    yield pools
    for pool in pools.values():
        pool.end()


def settings(tiny: Tiny, kind: str, mode: str | None) -> Config:
    overrides = {
        "monitor__watch": "[resources, trend]",
        "train__precision": "float32",
        "train__batch_size": 6,
    }
    return tiny(**KINDS[kind], **overrides, train__parallel=mode)


def own_ranks() -> Ranks:
    store = dist.distributed_c10d._get_default_store()
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.PrefixStore("bench", store))


def step_on_equal_gradients(trainer: Trainer, steps: range) -> None:
    """Take steps on gradients with the same bits in every process.

    A reduction leaves them so.
    """
    for step in steps:
        for index, parameter in enumerate(trainer.model.parameters()):
            drawn = torch.Generator().manual_seed(100 * step + index)
            parameter.grad = torch.randn(parameter.shape, generator=drawn).to(parameter.dtype) * 0.1
        trainer.optimizer.step()


def later_bits(contents: Contents) -> dict[str, bytes]:
    """Return all that later steps depend on.

    The scale that an operand had last is for the record.
    """
    bits = {}
    for stem in ("model", "optimizer"):
        for name, tensor in contents.tensors[stem].items():
            if not name.endswith("scaler.value"):
                bits[f"{stem}/{name}"] = tensor.flatten().view(torch.uint8).numpy().tobytes()
    return bits


def check(contents: Contents, whole: Contents, kind: str) -> None:
    """Compare two trainings to the bit.

    Steps of torch's own AdamW are compared within a tolerance.
    """
    if kind not in OF_TORCH:
        own_bits, bits_of_whole = later_bits(contents), later_bits(whole)
        assert {
            name
            for name in own_bits.keys() | bits_of_whole.keys()
            if own_bits.get(name) != bits_of_whole.get(name)
        } == set()
        return
    for name, tensor in whole.tensors["model"].items():
        if not name.endswith("scaler.value"):
            torch.testing.assert_close(
                contents.tensors["model"][name], tensor, rtol=1e-4, atol=1e-6
            )


def gone_on(config: Config, folder: str, first_step: int) -> list[float]:
    """Take a checkpoint up in every rank, go on, and write another one.

    Return the losses on the way.
    """
    ranks = own_ranks()
    trainer = trainer_of(config, ranks)
    restore(read_checkpoint(step_file(Path(folder), first_step)), trainer, [])
    losses = trainer.validation_losses()
    step_on_equal_gradients(trainer, range(first_step, first_step + 3))
    contents = capture(first_step + 3, trainer, [], {})
    assert (contents is None) == (not ranks.first)
    if contents is not None:
        commit_checkpoint(Path(folder), contents, keep_last=9)
    dist.barrier()
    return losses


@pytest.mark.parametrize("first_step", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_one_two_and_three_go_on_from_each_others_checkpoints_to_the_bit(
    tiny, pools, tmp_path, kind, first_step
):
    """One process begins, two go on, three, one.

    They end as the one that went all the way alone.
    """
    alone = trainer_of(settings(tiny, kind, None))
    step_on_equal_gradients(alone, range(first_step))
    commit_checkpoint(tmp_path, capture(first_step, alone, [], {}), keep_last=9)
    for size in (2, 3):
        expected = alone.validation_losses()
        outcomes = pools[size].run(gone_on, settings(tiny, kind, "ddp"), str(tmp_path), first_step)
        for losses in outcomes:
            assert losses == (pytest.approx(expected, rel=1e-4) if kind in OF_TORCH else expected)
        step_on_equal_gradients(alone, range(first_step, first_step + 3))
        first_step += 3
        check(
            read_checkpoint(step_file(tmp_path, first_step)),
            capture(first_step, alone, [], {}),
            kind,
        )
    again = trainer_of(settings(tiny, kind, None))
    restore(read_checkpoint(step_file(tmp_path, first_step)), again, [])
    for trainer in (again, alone):
        step_on_equal_gradients(trainer, range(first_step, first_step + 2))
    check(capture(first_step, again, [], {}), capture(first_step, alone, [], {}), kind)


def trained(config: Config, size: int) -> list[tuple[float, float]]:
    trainer = trainer_of(config, own_ranks() if size > 1 else ALONE)
    records = [one_step(trainer, number).record for number in range(1, 5)]
    return [(record["train/loss"], record["grad/norm"]) for record in records]


@pytest.mark.parametrize("kind", ["stochastic-8bit", "fp32", "delayed"])
def test_processes_train_on_the_batch_of_one(tiny, pools, kind):
    """Sums of another order apart, which change the last bits."""
    config, alone = (settings(tiny, kind, mode) for mode in ("ddp", None))
    config.optimizer.grad_clip = alone.optimizer.grad_clip = 0.0
    first, second = pools[2].run(trained, config, 2)
    assert first == second
    records = torch.tensor(trained(alone, 1))
    torch.testing.assert_close(torch.tensor(first[:1]), records[:1], rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.tensor(first), records, rtol=2e-3, atol=0)


def failing(part: str) -> list[Any]:
    ranks = own_ranks()
    answers = [
        ranks.broadcast(f"from {ranks.rank}"),
        ranks.gathered(ranks.rank),
        ranks.mean(ranks.rank),
    ]
    errors = {
        "disk": OSError(errno.ENOSPC, "No space left on device", "a"),
        "line": BenchError("no"),
        "none": None,
    }
    try:
        with ranks.together(CheckpointNotWritten):
            if ranks.rank == 1 and errors[part]:
                raise errors[part]
    except (OSError, BenchError) as error:
        answers.append((type(error).__name__, getattr(error, "errno", None), str(error)))
    return answers


FULL = [("OSError", errno.ENOSPC, "[Errno 28] No space left on device: 'a'")]
NOT_WRITTEN, NO = ([(name, None, "no")] for name in ("CheckpointNotWritten", "BenchError"))


@pytest.mark.parametrize(
    ("part", "ends"), [("disk", (FULL, FULL)), ("line", (NOT_WRITTEN, NO)), ("none", ([], []))]
)
def test_what_fails_in_one_fails_in_all(pools, part, ends):
    for index, (outcome, end) in enumerate(zip(pools[2].run(failing, part), ends, strict=True)):
        assert outcome == ["from 0", [0.0, 1.0], 0.5, *end], index
