"""Clipping and accumulation while the backward pass steps: those of the plain loop, or of the step before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import trainer_of
from torch import Tensor

from nanogpt_bench.cli import main
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import find_config, load_config
from nanogpt_bench.monitors import Step
from nanogpt_bench.system.errors import BenchError

Tiny = Callable[..., Config]
CLIP = 0.02
STEPS = 6
KEYS = ("step", "train/loss", "grad/norm", "grad/clipped")
RULES = {
    "adamw": {"rule": "stochastic-8bit"},
    "muon": {"rule": "muon-stochastic"},
    "dropout": {"rule": "stochastic", "model__dropout": 0.3},
    "gradients": {
        "rule": "stochastic",
        "model__formats": {"*": {"weight": "E4M3", "gradient": {"activation": "E5M2"}}},
    },
}


def settings_of(rule: str, **more: Any) -> dict[str, Any]:
    given = {"model__format": "E4M3", "optimizer__grad_clip": CLIP, "train__max_steps": STEPS, **RULES[rule]}
    if "model__formats" in given:
        given.pop("model__format")
    return given | more


def taken(config: Config) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """The records of some steps, and the weights after them."""
    trainer, records = trainer_of(config), []
    torch.manual_seed(0)  # of dropout
    for number in range(1, STEPS + 1):
        step = trainer.new_step(number, last=number == STEPS)
        trainer.train_step(step, [])
        records.append({k: v for k, v in step.record.items() if k in KEYS})
    assert isinstance(step, Step)
    return records, [p.detach().clone() for p in trainer.model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_exact_is_the_plain_loop(rule: str, tiny: Tiny) -> None:
    plain = taken(tiny(**settings_of(rule)))
    within = taken(tiny(**settings_of(rule, train__step_in_backward=True, optimizer__clip_by="exact")))
    assert plain[0] == within[0]
    assert any(record["grad/clipped"] for record in plain[0])
    assert same(plain[1], within[1])


def test_previous_clips_by_the_norm_of_the_step_before(tiny: Tiny) -> None:
    """The first step by its own, as the plain loop; its record says what was clipped."""
    plain, _ = taken(tiny(**settings_of("adamw")))
    within, _ = taken(tiny(**settings_of("adamw", train__step_in_backward=True, optimizer__clip_by="previous")))
    assert plain[0] == within[0]
    assert plain[1:] != within[1:]
    norms = [record["grad/norm"] for record in within]
    assert [record["grad/clipped"] for record in within] == [int(n > CLIP) for n in [norms[0], *norms[:-1]]]


@pytest.mark.parametrize("clip", [0.0, CLIP])
def test_sums_are_those_of_the_plain_loop_but_for_their_rounding(clip: float, tiny: Tiny) -> None:
    more = {"train__accumulation": 3, "optimizer__grad_clip": clip}
    plain, _ = taken(tiny(**settings_of("adamw", **more)))
    within, _ = taken(tiny(**settings_of("adamw", **more, train__step_in_backward=True)))
    assert [record["grad/clipped"] for record in plain] == [record["grad/clipped"] for record in within]
    for one, other in zip(plain, within, strict=True):
        assert other["grad/norm"] == pytest.approx(one["grad/norm"], rel=0.02)


def test_gradients_of_weights_with_a_format_are_refused(tiny: Tiny) -> None:
    formats = {"*": {"weight": "E4M3", "gradient": {"weight": "E5M2"}}}
    how = {"train__step_in_backward": True, "optimizer__clip_by": "exact", "model__formats": formats}
    with pytest.raises(BenchError, match=r"gradient of a weight can't be used with train\.step_in_backward"):
        trainer_of(tiny(rule="stochastic", optimizer__grad_clip=CLIP, **how))


def test_a_model_of_transformers_that_recomputes_takes_two_passes(text_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    import causal_models

    model, law = causal_models.write(tmp_path / "llama"), tmp_path / "law"
    assert main(["prepare", "text", "--input", str(text_file), "--tokenizer", str(model), "--out", str(law)]) == 0
    given = {"model.pretrained": model, "data.dir": law, "model.block_size": 16, "train.batch_size": 2}
    given |= {"rule": "stochastic-8bit", "optimizer.grad_clip": 0.5, "train.max_steps": STEPS, "train.recompute": True}
    words = [f"--{key}={value}" for key, value in given.items()]
    within = ["--train.step_in_backward=true", "--optimizer.clip_by=exact"]
    plain, two = (taken(load_config(find_config("finetune.yaml"), [*words, *more])) for more in ([], within))
    assert plain[0] == two[0]
    assert any(record["grad/clipped"] for record in plain[0])
    assert same(plain[1], two[1])
