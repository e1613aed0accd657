"""Published FP8 folders in the bench.

Trained, written back and measured as they are stored; all else is refused.
"""

import json
import math
from pathlib import Path

import causal_models
import fp8_folders
import fp8_served
import pytest
import torch
from bench_runs import flags, refusal, resolved, trainer_of
from safetensors.torch import load_file, save_file

import fp8manifold as fm
from nanogpt_bench.cli import main
from nanogpt_bench.config.settings import find_config, load_config
from nanogpt_bench.model.causal import load_causal, outline, window_losses
from nanogpt_bench.setup.pretrained import _bytes_each
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.system import free_memory

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # what other libraries' imports announce is their own business
SMALL = flags(
    {"model.block_size": 16, "train.max_steps": 2, "train.batch_size": 2, "eval.batches": 1}
)
SMALL += flags({"optimizer.warmup_steps": 0, "optimizer.lr": 1e-2, "eval.interval": 2})
SQUARES, ROWS, EXPERTS, FIVE = "squares", "rows", "squares, experts", "squares, e5m2"


@pytest.fixture
def words(working_folder, text_file):
    """Return the words of a small fine-tuning of a folder in a layout.

    The folder is `model`, its text is `law`.
    """

    def folder_of(layout):
        causal_models.write_tokenizer(fp8_folders.make(layout, working_folder / "model"))
        text = [
            "prepare",
            "text",
            "--input",
            str(text_file),
            "--tokenizer",
            "./model",
            "--out",
            "law",
        ]
        assert main([*text, "--limit-tokens", "2000"]) == 0
        return ["finetune", "--model", "./model", "--data.dir", "law", *SMALL]

    return folder_of


def resolved_of(finetune):
    """The configuration of the words of a fine-tuning."""
    return resolve(
        load_config(find_config("finetune"), [*finetune[3:], "--model.pretrained", "./model"])
    )


def tensors(folder):
    tensors = {}
    for file in Path(folder).glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        (SQUARES, "muon-stochastic"),
        (SQUARES, "residual8"),
        (ROWS, "stochastic-8bit"),
        (EXPERTS, "stochastic"),
    ],
)
def test_what_is_trained_is_written_as_it_came_and_is_what_transformers_serves(layout, rule, words):
    finetune = [*words(layout), "--rule", rule]
    assert main([*finetune, "--name", "whole", "--save", "saved"]) == 0
    assert main([*finetune, "--name", "cut", "--train.max_seconds", "1e-9"]) == 0
    assert main([*finetune, "--name", "cut", "--resume", "--save", "again"]) == 0
    published, saved = tensors("model"), tensors("saved")
    assert published.keys() == saved.keys()
    moved = {name for name, value in saved.items() if value.dtype == torch.float8_e4m3fn}
    assert moved
    for name in moved:
        assert published[name].dtype == saved[name].dtype, name
        old_codes, new_codes = (state[name].view(torch.uint8) for state in (published, saved))
        assert not torch.equal(old_codes, new_codes), name
    for file in Path("model").iterdir():
        if file.suffix != ".safetensors":
            assert (
                file.name.endswith("index.json")
                or file.read_bytes() == Path("saved", file.name).read_bytes()
            )
        assert Path("saved", file.name).read_bytes() == Path("again", file.name).read_bytes(), (
            file.name
        )
    loss = json.loads(Path("runs/whole/summary.json").read_text())["final_val_loss"]
    trainer = trainer_of(
        load_config(Path("runs/whole/config.yaml"), ["--model.pretrained=./saved"])
    )
    assert trainer.validate() == loss
    (tokens, targets), *_ = trainer._eval_batches
    logits = fp8_served.served(Path("saved"), torch.float32)(tokens).logits
    assert torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item() == loss


def test_evaluate_measures_a_folder_as_it_is_stored_or_what_it_stands_for(words, capsys):
    words(SQUARES)
    evaluate = [
        "evaluate",
        "--model",
        "./model",
        "--data.dir",
        "law",
        "--windows",
        "3",
        "--model.block_size",
        "16",
    ]
    assert main([*evaluate, "--out", "stored"]) == 0
    assert main([*evaluate, "--out", "rounded", "--formats", "E2M5", "--scales", "tensor"]) == 0
    (stored,), (floats, rounded) = (
        json.loads(Path(out, "evaluation.json").read_text())["rows"]
        for out in ("stored", "rounded")
    )
    assert (stored["format"], stored["scale"], stored["gap"]) == ("E4M3", "square", None)
    model_outline = outline("./model")
    assert stored["bytes_per_parameter"] == pytest.approx(
        model_outline.stored_bytes / model_outline.parameters, rel=0.01
    )
    assert stored["quantized_parameters"] == sum(
        math.prod(tensor.shape) for tensor in model_outline.stored.values()
    )
    assert (floats["format"], floats["val_loss"]) == ("none", stored["val_loss"])
    assert floats["bytes_per_parameter"] == pytest.approx(4, rel=0.01)
    assert rounded["gap"] != 0
    windows = torch.arange(51).view(3, 17)
    served = fp8_served.served(Path("model"), torch.float32)
    assert window_losses(load_causal("./model", quantization={}), windows, 2) == window_losses(
        served, windows, 2
    )


def test_a_rule_of_floats_trains_the_values(words):
    finetune = [*words(ROWS), "--model.format", "null", "--rule", "fp32"]
    served = fp8_served.served(Path("model"), torch.float32).state_dict()
    model = trainer_of(resolved_of(finetune)).model
    assert all(torch.equal(served[name], value) for name, value in model.state_dict().items())
    assert main([*finetune, "--save", "saved"]) == 0
    assert {value.dtype for value in tensors("saved").values()} == {torch.float32}
    assert "quantization_config" not in json.loads(Path("saved/config.json").read_text())


def test_the_values_of_weights_trained_in_codes_can_be_saved(words):
    finetune = [*words(FIVE), "--model.format", "null", "--rule", "stochastic"]
    assert main([*finetune, "--save", "saved"]) == 0
    assert (
        main([*finetune, "--name", "finetune", "--resume", "--save", "floats", "--layout", "float"])
        == 0
    )
    assert all(
        torch.equal(value, tensors("floats")[name])
        for name, value in fp8_served.decoded(Path("saved")).items()
    )


REFUSED = {
    "--model.format E5M2": "model.formats: {'*': 'E5M2'} is not the format of './model', whose weights "
    "are stored in codes",
    "--model.formats.lm_head E4M3": "model.formats: {'lm_head': 'E4M3', '*': 'E4M3'} is not "
    "the format of './model'",
    "--model.granularity channel": "model.granularity: 'channel' is not the granularity of './model', whose "
    "weights are stored in",
    "--rule master": "model.storage: 'master' can't be used with './model', whose weights are "
    "stored in codes; give",
    "--rule stochastic-fp8": "model.products: 'fp8' can't be used with './model'",
    "--model.embeddings E4M3": "model.embeddings: 'E4M3' can't be used with './model'",
    "--model.headroom 2": "model.headroom: 2.0 can't be used with './model'",
    "--save saved --layout torchao": "--layout torchao: './model' is saved in its own layout; leave "
    "--layout out",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_is_not_as_the_files_have_it_is_refused(words, refused, arguments):
    assert REFUSED[arguments] in refused(*words(SQUARES), *arguments.split())
    assert not Path("runs").exists()


def test_a_run_has_the_formats_and_the_scales_of_its_files(words):
    config = resolved_of(words(SQUARES))
    assert (config.model.formats, config.model.granularity) == ({"*": "E4M3"}, "square")
    assert resolved([]).model.granularity is None


@pytest.mark.parametrize("command", ["finetune", "evaluate"])
def test_codes_that_are_not_understood_are_refused_by_tensor_and_file(
    words, refused, text_file, command
):
    finetune = words(SQUARES)
    assert outline("./model").stored  # and what is remembered of it goes with the file
    state = load_file("model/model.safetensors")
    del state["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(state, "model/model.safetensors", {"format": "pt"})
    evaluate = ["evaluate", "--model", "./model", "--input", text_file, "--out", "out"]
    message = refused(*(finetune if command == "finetune" else evaluate))
    assert (
        "model './model': model.layers.0.mlp.up_proj.weight of 'model.safetensors' holds "
        "F8_E4M3" in message
    )
    assert "its scale is missing" in message


def test_files_are_read_once(words, monkeypatch):
    """On the hub that is a question to a server, which may be out of reach."""
    opened = []
    real = fm.files.stored_weights
    monkeypatch.setattr(fm.files, "stored_weights", lambda name: opened.append(name) or real(name))
    finetune = words(SQUARES)
    for _ in range(2):
        resolved_of(finetune)
    assert opened == ["./model"]


def test_memory_is_that_of_codes(words, monkeypatch):
    finetune = words(SQUARES)
    model_outline = outline("./model")
    codes = sum(math.prod(tensor.shape) for tensor in model_outline.stored.values())
    scales = sum(
        value.numel() for name, value in tensors("model").items() if name.endswith("_scale_inv")
    )
    assert model_outline.stored_bytes == 4 * (model_outline.parameters - codes) + codes + 4 * scales
    assert (
        _bytes_each(resolved_of(finetune))
        == model_outline.stored_bytes / model_outline.parameters + 2 + 4
    )  # two averages of a byte, a gradient
    with monkeypatch.context() as on_a_gpu:
        # there main memory holds what is read alone
        on_a_gpu.setattr(torch.cuda, "is_available", lambda: True)
        codes_alone = model_outline.stored_bytes / model_outline.parameters
        assert _bytes_each(resolved_of(finetune)) == codes_alone
    monkeypatch.setattr(free_memory, "free_memory", lambda: 3 * model_outline.parameters)
    load_causal(
        "./model", bytes_each=model_outline.stored_bytes / model_outline.parameters, quantization={}
    )
    with refusal("needs about"):
        load_causal("./model")  # codes and floats at once


def test_a_trained_folder_says_its_formats(words):
    words(EXPERTS)
    model = load_causal("./model", quantization={"seed": 3, "rounding": "nearest"})
    own_formats = {
        name: value for name, value in model.named_parameters() if isinstance(value, fm.FP8Tensor)
    }
    assert all("experts" in name or name.endswith("_proj.weight") for name in own_formats)
    assert {value.rounding for value in own_formats.values()} == {"nearest"}
