"""`fits`: the memory of ways of training, best first, and code for the least."""

import ast
import importlib
import inspect
import json
import re

import pytest
import torch
import transformers

import fp8manifold as fm
from nanogpt_bench.cli import main
from nanogpt_bench.commands.fits import SETTINGS
from nanogpt_bench.setup.fits import best_first, ways

LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
WRITTEN_OUT = ",".join(f"{name}={value}" for name, value in LLAMA.items())


def rows_of(text):
    """Return the cells of each row by the name of its way of training."""
    lines = text.splitlines()[2:]
    lines = lines[: lines.index("")]
    cells = {}
    for line in lines:
        name, *numbers = [part.strip() for part in line.split("  ") if part.strip()]
        cells[name] = numbers
    return cells


def code_of(text):
    return text[text.index("import torch") :]


def test_rows_stand_best_first_and_sum_to_their_peaks(capsys):
    assert main(["fits", WRITTEN_OUT]) == 0
    rows = rows_of(capsys.readouterr().out)
    peaks = [float(cells[-2]) for cells in rows.values()]
    assert peaks == sorted(peaks)
    for *parts, peak, _ in rows.values():
        assert sum(map(float, parts)) == pytest.approx(float(peak), abs=0.04)
    muon = fm.memory_needed(LLAMA, "muon")
    assert float(rows["one byte, Muon, steps in backward"][-2]) == round(muon.peak / 1e9, 2)
    assert "bfloat16 stochastic, Adafactor, steps in backward" in rows


@pytest.mark.parametrize(("card", "count"), [("8", 0), ("24", 1), ("200", 99)])
def test_a_card_has_some_of_them(capsys, card, count):
    assert main(["fits", WRITTEN_OUT, "--card", card]) == 0
    output = capsys.readouterr().out
    verdicts = [cells[-1] for cells in rows_of(output).values()]
    assert verdicts == ["fits"] * verdicts.count("fits") + ["-"] * verdicts.count("-")
    assert min(verdicts.count("fits"), 1) == min(count, 1)
    assert ("No way of training in this library fits" in output) == (count == 0)
    assert count < 99 or "-" not in verdicts


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_model_is_a_folder_or_a_file(capsys, tmp_path, kind):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, vocab_size=300)
    folder = tmp_path / "model"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    name = str(folder if kind == "folder" else folder / "config.json")
    assert main(["fits", name, "--tokens", "64", "--sequences", "2"]) == 0
    output = capsys.readouterr().out
    counted = fm.memory_needed(config, "adafactor", chunk=256, tokens=64, sequences=2)
    assert "a step of 2 x 64 tokens" in output
    assert float(
        rows_of(output)["one byte, Adafactor, steps in backward, loss in chunks"][-2]
    ) == pytest.approx(counted.peak / 1e9, abs=0.01)
    code = code_of(output)
    ast.parse(code)
    assert (f'"{name}"' in code) == (kind == "folder")


@pytest.mark.parametrize("way", ways(), ids=lambda way: f"{way.name}, {way.chunked}")
def test_chunks_and_options_reach_the_arithmetic(way):
    needed = way.needed(LLAMA, tokens=1024)
    expected = fm.memory_needed(
        LLAMA, **way.options, chunk=256 if way.chunked else None, tokens=1024
    )
    assert needed == expected


def test_what_was_not_measured_of_the_least_is_said(capsys):
    assert main(["fits", WRITTEN_OUT, "--card", "24", "--optimizer", "lion"]) == 0
    output = capsys.readouterr().out
    assert "was measured with 0.86 million weights only" in output
    assert (
        "takes least is one byte, Adafactor, steps in backward, loss in chunks (10.80 GB);"
        in output
    )
    assert "StiffnessLion" in code_of(output)


def test_the_lines_of_adafactor_have_the_format_that_costs_it_least(capsys):
    assert main(["fits", WRITTEN_OUT, "--card", "12"]) == 0
    output = capsys.readouterr().out
    assert "measured with" not in output
    assert '"E2M5", tied="leave", embeddings="E2M5"' in code_of(output)
    assert "StiffnessAdafactor(model.parameters(), lr=5e-4)" in code_of(output)


@pytest.mark.parametrize(
    ("optimizer", "call", "is_guess"),
    [
        ("adafactor", "fm.optim.StiffnessAdafactor(", False),
        ("lion", "fm.optim.StiffnessLion(", True),
        ("muon", "fm.optim.StiffnessMuon.for_model(", False),
        ("adamw", "fm.optim.StiffnessAdamW(", False),
    ],
)
def test_lines_of_any_optimizer_can_be_asked_for(optimizer, call, is_guess, capsys):
    assert main(["fits", WRITTEN_OUT, "--card", "48", "--optimizer", optimizer]) == 0
    output = capsys.readouterr().out
    assert call in code_of(output)
    assert ("first guess" in output) == is_guess


def test_an_optimizer_that_does_not_fit_is_named(capsys):
    assert main(["fits", WRITTEN_OUT, "--card", "24", "--optimizer", "adamw"]) == 0
    assert (
        "No way of training with adamw in this library fits on a card of 24 GiB."
        in capsys.readouterr().out
    )


def test_all_activations_take_more(capsys):
    peaks = []
    for options in ([], ["--no-checkpointing"]):
        assert main(["fits", WRITTEN_OUT, *options]) == 0
        output = capsys.readouterr().out
        peaks.append(float(rows_of(output)["one byte, Muon, steps in backward"][-2]))
        assert ("activation_checkpointing_enable" in output) == (not options)
    assert peaks[1] > peaks[0]


def test_experts_are_quantised_in_the_lines(capsys):
    mixture = "model_type=qwen3_moe,num_experts=8,moe_intermediate_size=512,num_experts_per_tok=2"
    assert main(["fits", f"{WRITTEN_OUT},{mixture}"]) == 0
    assert 'parameters="*.experts.*"' in code_of(capsys.readouterr().out)


def test_experts_of_a_file_of_settings_are_quantised_in_the_lines(capsys, tmp_path):
    mixture = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | mixture | {"num_hidden_layers": 2}), encoding="utf-8")
    assert main(["fits", str(path)]) == 0
    assert 'parameters="*.experts.*"' in code_of(capsys.readouterr().out)


@pytest.mark.parametrize("layout", [None, "compressed-tensors"])
def test_the_lines_load_a_model_that_is_in_codes_already(capsys, tmp_path, layout):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, vocab_size=300)
    model = fm.quantize_model(transformers.LlamaForCausalLM(config), "E4M3")
    fm.save(model, tmp_path, *[layout] if layout else [])
    assert main(["fits", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "the table is for the same model in floats" in output
    imports, _, load, *_ = code_of(output).splitlines()
    names = {}
    exec(f"{imports}\n{load}", names)
    weight = names["model"].model.layers[0].mlp.up_proj.weight
    assert torch.equal(weight.codes, model.model.layers[0].mlp.up_proj.weight.codes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hidden_size=64"], "config has no num_hidden_layers"),
        (["hidden_size=64,64"], "'64' is not a setting"),
        (["hidden_size=64,hidden_size=64"], "given twice"),
        ([f"{WRITTEN_OUT},model_type=mamba"], "model_type='mamba' is not supported"),
        ([f"{WRITTEN_OUT},x=1"], "unknown setting 'x'; allowed: model_type"),
        ([f"{WRITTEN_OUT},num_key_value_head=8"], "did you mean 'num_key_value_heads'?"),
        (["missing.json"], "does not exist"),
        (["broken.json"], "is not JSON"),
        ([WRITTEN_OUT, "--card", "0"], "give a number > 0"),
        ([WRITTEN_OUT, "--tokens", "0"], "give a whole number >= 1"),
        ([WRITTEN_OUT, "--tokens", str(2**62)], "tokens="),
    ],
    ids=[
        "missing",
        "word",
        "twice",
        "kind",
        "unknown",
        "misspelt",
        "no file",
        "broken",
        "card",
        "tokens",
        "many",
    ],
)
def test_what_it_cannot_count_is_refused_in_one_line(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    assert main(["fits", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_loop_of_links_is_refused_in_one_line(tmp_path, refused):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "does not exist" in refused("fits", loop)


def test_settings_that_may_be_written_out_are_those_that_are_read():
    architecture = importlib.import_module("fp8manifold._memory.architecture")
    source = inspect.getsource(architecture)
    read = set(re.findall(r'settings\.\w+\("(\w+)"', source))
    widths = {family.expert_width for family in architecture._FAMILIES.values()} - {""}
    # a list of layers has commas, and GPT-2's heads take no memory
    assert {*SETTINGS} == (read | widths | {"n_head"}) - {"mlp_only_layers"}


def test_the_json_of_a_config_is_read_as_it_is(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    first, *_ = best_first(str(path), ways())
    assert first.needed.peak == min(way.needed(LLAMA).peak for way in ways())
