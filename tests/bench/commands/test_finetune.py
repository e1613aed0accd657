"""Fine-tuning of pretrained models.

The loop, checkpoints and memory of `run`, and saving for others to read.
"""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import causal_models
import pytest
import torch
from bench_runs import flags, one_step, recorded, summary_of, trainer_of

import fp8manifold as fm
from nanogpt_bench import checkpoint
from nanogpt_bench.cli import main
from nanogpt_bench.config.settings import find_config, load_config
from nanogpt_bench.loop.train import run
from nanogpt_bench.model.causal import load_causal, quiet_transformers
from nanogpt_bench.report.paired import Difference
from nanogpt_bench.report.results import measure
from nanogpt_bench.report.rows import Row
from nanogpt_bench.report.tables import to_csv, to_markdown
from nanogpt_bench.runs.load import load_run
from nanogpt_bench.setup.pretrained import read_as_codes
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.surgery import quantize

SMALL = {
    "model.block_size": 16,
    "train.max_steps": 4,
    "eval.interval": 2,
    "eval.batches": 1,
    "monitor.interval": 2,
}
SMALL |= {
    "monitor.watch": "[gradients, stall, ranges, trend]",
    "optimizer.lr": 1e-3,
    "optimizer.warmup_steps": 1,
}
IN_BACKWARD = {"train.step_in_backward": True, "optimizer.grad_clip": 0}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return causal_models.write(tmp_path_factory.mktemp("finetune") / "llama")


@pytest.fixture(scope="session")
def law(model, text_file):
    """The text in the tokens of the model, prepared as a corpus."""
    out = text_file.parent / "law"
    assert (
        main(
            [
                "prepare",
                "text",
                "--input",
                str(text_file),
                "--tokenizer",
                str(model),
                "--out",
                str(out),
            ]
        )
        == 0
    )
    return out


@pytest.fixture(scope="session")
def settings(model, law):
    def settings_of(**overrides):
        settings = {**SMALL, "model.pretrained": model, "data.dir": law, **overrides}
        settings |= {"model.format": "null"} if settings.get("rule") == "fp32" else {}
        return load_config(find_config("finetune.yaml"), flags(settings))

    return settings_of


@pytest.mark.parametrize(
    "rule", ["stochastic-8bit", "muon-stochastic", "residual8", "master", "fp32"]
)
def test_a_rule_trains_a_pretrained_model(settings, tmp_path, rule):
    summary = run(settings(rule=rule), tmp_path / "run")
    records = recorded(tmp_path / "run")
    assert summary["status"] == "finished"
    assert summary["final_val_loss"] < summary["first_val_loss"]
    assert summary["quantized_parameters"] == (0 if rule == "fp32" else 17408)
    assert summary["gradient_peak_bytes"] == 4 * summary["parameters"] == 4 * 19616
    assert rule == "fp32" or "quant/overflow/weight/model.layers.1.mlp.up_proj" in records[2]


@pytest.mark.parametrize("embeddings", [None, "E3M4"])
@pytest.mark.parametrize("rule", ["stochastic-8bit", "muon-stochastic", "residual8"])
def test_weights_are_read_as_codes(settings, model, law, rule, embeddings, monkeypatch):
    config = resolve(
        settings(rule=rule, **({"model.embeddings": embeddings} if embeddings else {}))
    )
    wanted = quantize(load_causal(str(model)), config).state_dict()
    monkeypatch.setattr(fm, "quantize_model", None)  # nothing is rounded after it was read
    state = trainer_of(config).model.state_dict()
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(
            state[name].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)
        ), name


@pytest.mark.parametrize(
    ("rates", "rate"),
    [({}, 1e-3), ({"optimizer__float_lr": 2e-3}, 2e-3)],
    ids=["one rate", "two rates"],
)
def test_one_learning_rate_is_for_all_unless_floats_have_another(rates, rate, settings):
    assert resolve(settings(rule="muon-stochastic", **rates)).optimizer.float_lr == rate


def test_activations_in_a_format_are_measured_in_floats_first(settings):
    mlp = {"model__formats": "{mlp: {weight: E4M3, activation: E4M3}}"}
    assert read_as_codes(resolve(settings(rule="stochastic-8bit"))) is not None
    assert read_as_codes(resolve(settings(rule="stochastic-8bit", **mlp))) is None


@pytest.mark.usefixtures("products")
def test_steps_in_the_backward_pass_are_those_after_it(settings, tmp_path):
    for name, overrides in (("after", {"optimizer.grad_clip": 0}), ("within", IN_BACKWARD)):
        run(settings(rule="muon-stochastic", **overrides), tmp_path / name)
    after_pass, within = (recorded(tmp_path / name) for name in ("after", "within"))
    for record, record_within in zip(after_pass, within, strict=True):
        assert (record.get("train/loss"), record.get("val/loss")) == (
            record_within.get("train/loss"),
            record_within.get("val/loss"),
        )
        for key in record.keys() & {"stall/arrived", "stall/update_lost"}:
            assert record_within[key] == pytest.approx(record[key], rel=1e-12), key
        assert "grad/norm" not in record_within
    peaks = [summary_of(tmp_path / name)["gradient_peak_bytes"] for name in ("after", "within")]
    assert peaks == [4 * 19616, 4 * 64 * 32]


def test_what_is_not_finite_takes_no_step_in_the_backward_pass_and_is_told_of(
    settings, monkeypatch
):
    trainer = trainer_of(settings(**IN_BACKWARD))
    start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with monkeypatch.context() as patch:
        real = trainer._model_loss
        patch.setattr(trainer, "_model_loss", lambda *batch: real(*batch) * float("nan"))
        step = one_step(trainer)
    assert step.record["loss_is_nan"] == 1
    assert all(
        torch.equal(start[name], value) for name, value in trainer.model.state_dict().items()
    )
    trainer = trainer_of(settings(**IN_BACKWARD))
    norm = trainer.model.model.norm.weight
    hook = norm.register_hook(lambda gradient: gradient * float("inf"))
    old_norm, old_projection = (
        norm.detach().clone(),
        trainer.model.model.layers[1].mlp.up_proj.weight.dequantize().clone(),
    )
    for number, bad in ((1, 1), (2, 0)):
        step = one_step(trainer, number)
        assert (step.record["grad_has_nan"], step.record["loss_is_nan"]) == (bad, 0), number
        # The bad gradient leaves the norm as it was, and the next step moves it.
        assert torch.equal(old_norm, norm) == bool(bad), number
        hook.remove()
    assert not torch.equal(
        old_projection, trainer.model.model.layers[1].mlp.up_proj.weight.dequantize()
    )


def test_a_run_of_a_pretrained_model_is_no_gpt(settings, tmp_path, refused):
    run(settings(), tmp_path / "run")
    message = refused("evaluate", tmp_path / "run")
    assert "belongs to the pretrained model" in message
    assert (
        "give its finetune command again, with --resume --name run --save DIR; then use --model DIR"
        in message
    )


def test_recomputed_activations_change_nothing_and_a_fine_tuning_goes_on_where_it_was(
    settings, tmp_path
):
    for name in ("whole", "cut"):
        run(
            settings(
                checkpoint__every=2, **({"train__max_seconds": 1e-9} if name == "cut" else {})
            ),
            tmp_path / name,
        )
    run(settings(train__recompute=True), tmp_path / "recomputed")
    run(settings(checkpoint__every=2), tmp_path / "cut", resume=True)
    whole, cut, recomputed = (
        [record.get("train/loss") for record in recorded(tmp_path / name)]
        for name in ("whole", "cut", "recomputed")
    )
    assert whole == cut == recomputed


def validated(*words):
    """The loss of the saved model in floats."""
    words = [*words, "--model.pretrained=./saved", "--rule=fp32", "--model.format=null"]
    return trainer_of(load_config(find_config("finetune"), words)).validate()


def test_the_command_trains_says_its_memory_and_saves(
    model, law, text_file, working_folder, capsys
):
    options = flags(SMALL)
    words = [
        "finetune",
        "--model",
        str(model),
        "--data.dir",
        str(law),
        "--rule",
        "stochastic",
        "--save",
        "saved",
    ]
    assert main([*words, *options]) == 0
    printed = capsys.readouterr().out
    assert "memory: weights and state" in printed
    assert "float32 AdamW would take 0.3 MiB, by arithmetic" in printed
    loss = summary_of(working_folder / "runs" / "finetune")["final_val_loss"]
    assert validated(*options, f"--data.dir={law}") == pytest.approx(loss, rel=1e-5)
    with quiet_transformers("saved") as transformers:
        assert len(transformers.AutoTokenizer.from_pretrained("saved")) == 23
    assert main([*words, *options]) == 2
    assert "--save 'saved' is in use" in capsys.readouterr().err


@pytest.mark.filterwarnings(
    "ignore"
)  # what other libraries' imports announce is their own business
@pytest.mark.parametrize(
    ("layout", "rule"), [("compressed-tensors", "stochastic"), ("torchao", "master")]
)
def test_a_fine_tuned_model_is_saved_as_others_keep_it(layout, rule, model, law, working_folder):
    words = [
        "finetune",
        "--model",
        str(model),
        "--data.dir",
        str(law),
        "--rule",
        rule,
        *flags(SMALL),
    ]
    assert main([*words, "--save", "coded", "--layout", layout]) == 0
    assert main([*words, "--resume", "--save", "floats"]) == 0
    with quiet_transformers("saved") as transformers:
        floats, coded = (
            transformers.AutoModelForCausalLM.from_pretrained(name) for name in ("floats", "coded")
        )
        assert len(transformers.AutoTokenizer.from_pretrained("coded")) == 23
    tokens = torch.arange(8).view(1, 8)
    with torch.no_grad():
        assert torch.equal(coded(tokens).logits, floats(tokens).logits)
    size = [
        (working_folder / name / "model.safetensors").stat().st_size for name in ("coded", "floats")
    ]
    assert size[0] < 0.6 * size[1]


def test_what_is_forgotten_is_measured_beside(settings, law, tmp_path):
    run(settings(eval__also=law), tmp_path / "run")
    losses = [
        (record.get("val/loss"), record.get("val/also_loss"))
        for record in recorded(tmp_path / "run")
    ]
    assert [also is None for _, also in losses] == [False, True, False, True, False]
    assert all(own_loss == also for own_loss, also in losses)
    first = load_run(tmp_path / "run")
    assert first.number("also_loss") == losses[-1][1]
    other_run = replace(first, summary={**first.summary, "also_loss": losses[-1][1] + 0.25})
    rows = [
        Row(label, label, "none", (run,))
        for label, run in (("fp32", first), ("stochastic", other_run))
    ]
    results = measure(rows, rows[0])
    assert results[1].also_difference == Difference(pytest.approx(0.25), 1)
    table = to_markdown(results)
    assert re.search(r"Loss on the other text \| +its difference \(95%\)", table)
    assert "+0.250, one seed: a hint" in table
    assert "also_loss" in to_csv(results).splitlines()[0]


QUICK = flags(
    {"model.block_size": 16, "train.max_steps": 2, "train.batch_size": 2, "eval.batches": 1}
)
QUICK += flags({"optimizer.warmup_steps": 0, "optimizer.lr": 1e-2})


def prepared(folder, text_file, kind, **options):
    """A model and its text in a folder, and the words of a small fine-tuning of it."""
    model = causal_models.write(folder / "model", kind, **options)
    out = folder / "law"
    words = [
        "prepare",
        "text",
        "--input",
        str(text_file),
        "--tokenizer",
        str(model),
        "--out",
        str(out),
    ]
    assert main([*words, "--limit-tokens", "2000"]) == 0
    return ["finetune", "--model", str(model), "--data.dir", str(out), *QUICK]


@pytest.mark.parametrize(
    ("kind", "tied", "overrides", "rule"),
    [
        ("gpt2", True, [], "stochastic"),
        ("gpt2", True, [], "stiffness-unrounded"),
        ("gpt2", True, ["--model.tied", "untie"], "stochastic"),
        ("gpt2", True, ["--model.embeddings", "E4M3"], "stochastic"),
        ("gpt2", False, [], "master"),
        ("mixtral", True, [], "stochastic"),
        ("llama", True, ["--model.embeddings", "E4M3"], "stochastic"),
    ],
)
def test_every_kind_of_layer_is_saved(kind, tied, overrides, rule, working_folder, text_file):
    words = prepared(working_folder, text_file, kind, tied=tied)
    assert (
        main(
            [*words, *overrides, "--rule", rule, "--train.precision", "float32", "--save", "saved"]
        )
        == 0
    )
    loss = summary_of(working_folder / "runs" / "finetune")["final_val_loss"]
    assert validated(*QUICK, "--data.dir=law") == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--save saved --checkpoint.last false", "leave --checkpoint.last false out"),
        (
            "--save model/config.json/saved",
            "'model/config.json' is a file, not a folder; give another name",
        ),
        ("--save saved --layout gguf", "--layout: 'gguf' is not known"),
    ],
)
def test_words_that_contradict_saving_are_refused_before_the_training(
    arguments, message, working_folder, text_file, refused
):
    words = prepared(working_folder, text_file, "llama")
    assert message in refused(
        *words, "--rule", "fp32", "--model.format", "null", *arguments.split()
    )
    assert not Path("runs").exists()
    assert not Path("saved").exists()


def test_what_is_in_the_way_of_saving_is_said_before_the_training(
    working_folder, text_file, refused, monkeypatch
):
    words = prepared(working_folder, text_file, "llama")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        assert "--save needs 1.1 MB in 'saved', but 0.0 MB are free" in refused(
            *words, "--save", "saved"
        )
    shutil.copytree("model", "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    words[words.index("--model") + 1] = str(Path("bare").absolute())
    assert "tokenizer" in refused(*words, "--save", "saved")
    assert not Path("runs").exists()
    assert not Path("saved").exists()


def test_weights_that_could_not_be_written_are_not_lost(
    working_folder, text_file, monkeypatch, capsys
):
    words = prepared(working_folder, text_file, "llama")

    def fails(*_):
        Path("saved", "model.safetensors").write_text("the beginning")
        raise ValueError("of whatever kind")

    with monkeypatch.context() as patch:
        patch.setattr("fp8manifold.dequantize_model", fails)
        assert main([*words, "--save", "saved"]) == 2
    assert (
        "--save: 'saved' can't be written: ValueError: of whatever kind; the trained weights are still in "
        "'runs/finetune'; to write them, give the same command with --resume --name finetune and --save DIR"
    ) in capsys.readouterr().err
    assert not Path("saved").exists()
    assert main([*words, "--resume", "--name", "finetune", "--save", "saved"]) == 0
    assert Path("saved", "model.safetensors").is_file()
