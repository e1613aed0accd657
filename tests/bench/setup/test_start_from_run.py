"""`model.init_from: runs/X` starts from the weights of another run, exactly.

The training goes on without it.
"""

import json
import shutil

import pytest
import torch
from bench_runs import recorded, refusal, resolved, summary_of, trainer_of

from nanogpt_bench.checkpoint import Contents, commit_checkpoint, read_checkpoint, step_file, steps
from nanogpt_bench.config.settings import load_config
from nanogpt_bench.data.batches import open_corpus
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.loop.resume import restore
from nanogpt_bench.loop.train import run
from nanogpt_bench.loop.trainer import initial_model
from nanogpt_bench.runs.trained import choose
from nanogpt_bench.setup.resolve import resolve


@pytest.mark.parametrize("kind", ["float", "one byte", "master copy", "bfloat16", "tied", "untied"])
def test_a_model_starts_from_the_very_weights_of_a_run(tiny, trained, kind):
    settings = load_config(trained[kind] / "config.yaml")
    first = trainer_of(settings)
    restore(read_checkpoint(step_file(trained[kind], 6)), first, [])
    config = resolve(tiny(model__init_from=trained[kind]))
    assert config.model.init_from == str(step_file(trained[kind], 6))
    started = initial_model(config, open_corpus(config))
    for name, weight in started.named_parameters():
        expected = first.model.get_parameter(name).detach()
        expected = expected.dequantize() if hasattr(expected, "codes") else expected.float()
        assert torch.equal(weight, expected), name


def test_a_run_goes_on_where_the_other_one_ended(tiny, trained, tmp_path):
    first = run(tiny(model__init_from=trained["float"]), tmp_path / "more")
    assert first["first_val_loss"] == summary_of(trained["float"])["final_val_loss"]
    facts = json.loads((tmp_path / "more" / "environment.json").read_text())["init_from"]
    assert facts["checkpoint"] == str(step_file(trained["float"], 6))
    assert len(facts["sha256"]) == 64
    named = load_config(tmp_path / "more" / "config.yaml").model
    assert (named.init_from, named.size, named.n_layer) == (facts["checkpoint"], None, 1)


def test_it_resumes_to_the_same_bits_without_the_other_and_without_either_nothing_begins(
    tiny, trained, tmp_path
):
    start = shutil.copytree(trained["one byte"], tmp_path / "start")
    settings = {"rule": "nearest", "model__format": "E5M2", "checkpoint__every": 3}
    whole = run(tiny(model__init_from=step_file(start, 3), **settings), tmp_path / "cut")
    (tmp_path / "cut" / "summary.json").unlink()
    step_file(tmp_path / "cut", 6).unlink()
    step_file(start, 3).unlink()
    # The folder's newest checkpoint is another one now: the run goes on from the one
    # that it began with.
    config = tiny(model__init_from=start, **settings)
    assert run(config, tmp_path / "cut", resume=True)["final_val_loss"] == whole["final_val_loss"]
    (tmp_path / "cut" / "summary.json").unlink()
    for path in (tmp_path / "cut" / "checkpoints").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    with refusal("no longer exists, and this run has no complete checkpoint"):
        run(config, tmp_path / "cut", resume=True, say=lambda _: None)


def test_a_named_size_that_is_the_run_s_own_is_no_contradiction(tiny, trained):
    start = f"--model.init_from={trained['float']}"
    config = load_config(trained["float"] / "config.yaml", ["--model.size=0.8M", start])
    assert config.model.size == "0.8M"
    assert resolve(config).model.size is None
    with refusal(r"model.size: '10M' can't be used"):
        resolve(load_config(None, ["--model.size=10M", start]))


def test_a_damaged_checkpoint_and_another_text_are_refused(tiny, trained, tmp_path):
    hurt = shutil.copytree(trained["float"], tmp_path / "hurt")
    path = step_file(hurt, 6)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with refusal(r"model.init_from: checkpoint .* has another sha256"):
        resolve(tiny(model__init_from=hurt))
    (tmp_path / "other.txt").write_text(
        "".join(map(chr, range(65, 106))) * 40
    )  # as many characters, other ones
    prepare_text(tmp_path / "other.txt", tmp_path / "other", "char")
    config = resolve(tiny(model__init_from=trained["float"], data__dir=tmp_path / "other"))
    with refusal("numbers tokens differently for each text"):
        initial_model(config, open_corpus(config))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"config": None}, "does not hold the run's settings"),
        ({"config": {"model": 7}}, "model: 7 is not a section"),
        ({"config": {"model": {"n_layer": "many"}}}, "model.n_layer: 'many' is not allowed"),
        (
            {"config": {"modle": {}}},
            "does not hold a GPT's weights",
        ),  # a section nobody asks for is not looked at
        ({"config": {"model": {"n_layer": 10**9}}}, "model.n_layer: 1000000000 is out of range"),
    ],
)
def test_a_checkpoint_that_attacks_is_one_line(tmp_path, changed, words):
    tensors = {"token_embedding.weight": torch.ones(3, 8)}
    folder = commit_checkpoint(
        tmp_path, Contents(1, {"model": tensors}, facts=changed), keep_last=1
    )
    with refusal(words):
        resolved([f"--model.init_from={folder}"])


def test_the_best_checkpoint_is_kept(tiny, tmp_path):
    settings = {
        "eval__interval": 1,
        "train__max_steps": 4,
        "optimizer__lr": 0.5,
        "optimizer__warmup_steps": 6,
    }
    result = run(tiny(checkpoint__best=True, checkpoint__keep=1, **settings), tmp_path / "a")
    losses = {record["step"]: record["val/loss"] for record in recorded(tmp_path / "a")}
    lowest = min(losses, key=losses.get)
    assert 0 < lowest < 4  # or this shows nothing
    assert losses[lowest] == result["best_val_loss"]
    assert steps(tmp_path / "a") == [lowest, 4]
    assert choose(tmp_path / "a", "best") == step_file(tmp_path / "a", lowest)
    run(tiny(**settings), tmp_path / "b")
    with refusal(r"has no checkpoint of its lowest .* --checkpoint.best true"):
        choose(tmp_path / "b", "best")
    for names in (
        ("train/loss", "val/loss"),
        ("final_val_loss", "best_val_loss"),
    ):  # watching changes nothing else
        best, expected = (
            [
                {name: record.get(name) for name in names}
                for record in [*recorded(folder), summary_of(folder)]
            ]
            for folder in (tmp_path / "a", tmp_path / "b")
        )
        assert best == expected, names
