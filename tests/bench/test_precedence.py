"""What is said on the command line over what a file says: any rule and any format, and one learning rate a rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpt2_checkpoints
import pytest

from nanogpt_bench.cli import main
from nanogpt_bench.config.keys import FIELDS, get
from nanogpt_bench.config.precedence import settle
from nanogpt_bench.config.rules import RULES, available_rules, meaning, rules_with_format
from nanogpt_bench.config.schema import OPTIONS, Config
from nanogpt_bench.config.settings import find_config, load_config, read_yaml, shipped_configs
from nanogpt_bench.model.gpt import GPT, GPTShape
from nanogpt_bench.setup.resolve import resolve, rule_name
from nanogpt_bench.setup.surgery import quantize
from nanogpt_bench.system.errors import BenchError

FORMATS = ("E4M3", "E7M0", "none")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(gpt2_checkpoints.write(tmp_path_factory.mktemp("gpt2")))


@pytest.fixture
def loaded(checkpoint: str) -> Any:
    """Return a function from a shipped file and words of a command line to settings and the lines that were said."""

    def load(name: str, *words: str) -> tuple[Config, list[str]]:
        said: list[str] = []
        config = load_config(find_config(name), words, said.append)
        if config.model.init_from:
            config.model.init_from = checkpoint
        return resolve(config), said

    return load


@pytest.fixture
def resolved(checkpoint: str) -> Any:
    """The same for many combinations: as `load_config` does, without its checks of types, most of its time."""
    files = {name: read_yaml(find_config(name)) for name in shipped_configs()}

    def load(name: str, rule: str, fmt: str) -> tuple[Config, list[str]]:
        said = {"rule": rule, "model.format": fmt}
        kept, lines = settle(files[name], said, files[name] | said)
        config = Config()
        for key, value in kept.items():
            *section, last = key.split(".")
            setattr(get(config, section[0]) if section else config, last, value)
        if config.model.init_from:
            config.model.init_from = checkpoint
        return resolve(config), lines

    return load


def settings_of(config: Config) -> dict[str, Any]:
    return {key: get(config, key) for key in FIELDS}


def by_its_settings(config: Config) -> Config:
    """The same run without the rule's name: what makes the rule is given one by one, what it implies is left out."""
    rule = RULES[config.rule or ""]
    plain = Config()
    plain.model, plain.data, plain.train = config.model, config.data, config.train
    for name in ("name", "writeback", "moments", "stiffness", "stiffness_end", "grad_clip", "schedule"):
        setattr(plain.optimizer, name, getattr(config.optimizer, name))
    assert meaning(rule)["optimizer.name"] == plain.optimizer.name
    return resolve(plain)


def combinations() -> Iterator[tuple[str, str]]:
    ours = [rule for rule in available_rules() if RULES[rule].storage != "peer"]  # those refuse settings of such files
    for rule in ours:
        for fmt in FORMATS if rule not in rules_with_format() else FORMATS[:-1]:
            if fmt == "none" or rule in rules_with_format():
                yield rule, fmt


@pytest.mark.parametrize("name", shipped_configs())
def test_a_shipped_file_takes_any_rule_and_any_format_at_one_learning_rate_a_rule(name: str, resolved: Any) -> None:
    file, shapes = read_yaml(find_config(name)), set()
    for rule, fmt in combinations():
        config, said = resolved(name, rule, fmt)
        assert (config.rule, config.optimizer.name) == (rule, RULES[rule].optimizer)
        assert config.model.storage == RULES[rule].storage
        shape = (config.model.storage, str(config.model.formats), config.model.tied, config.optimizer.writeback)
        if shape not in shapes:  # and the surgery takes it
            shapes.add(shape)
            layers, tied = config.model.n_layer or 0, bool(config.model.tie_weights)
            narrow = GPTShape(layers, n_head=1, n_embd=32, block_size=1, vocab_size=32, tie_weights=tied)
            quantize(GPT(narrow), config)
        kept = "optimizer.lr" in file and not any("optimizer.lr" in line for line in said)
        assert config.optimizer.lr == (file["optimizer.lr"] if kept else RULES[rule].lr), rule
        other = by_its_settings(config)
        assert rule_name(other) == rule
        assert other.optimizer.lr == RULES[rule].lr
        default = OPTIONS[RULES[rule].optimizer].get("float_lr")
        assert other.optimizer.float_lr == config.optimizer.float_lr == (RULES[rule].float_lr or default)


@pytest.mark.parametrize("name", shipped_configs())
def test_a_file_and_the_rule_that_it_follows_are_one(name: str, loaded: Any) -> None:
    if name.startswith("sdnq"):
        pytest.importorskip("sdnq", reason="the rule's package is no extra of the tests: it is under GPL-3.0")
    config, said = loaded(name)
    assert said == []
    rule = rule_name(config)
    if rule in available_rules():
        named, said = loaded(name, "--rule", rule)
        assert said == []
        assert settings_of(named) | {"rule": None} == settings_of(config) | {"rule": None}


@pytest.mark.parametrize(
    ("name", "words", "expected", "told"),
    [
        (
            "nanogpt_cpu.yaml",
            ["--rule", "stochastic", "--model.format", "E4M3"],
            {"optimizer.lr": 1e-3, "model.tied": "leave", "model.storage": "fp8"},
            ["model.tied: leave", "--model.tied untie"],
        ),
        (
            "nanogpt_cpu.yaml",
            ["--rule", "stochastic", "--model.format", "E4M3", "--model.tied", "untie"],
            {"model.tied": "untie"},
            [],
        ),
        (
            "nanogpt_cpu.yaml",
            ["--rule", "riemannian", "--model.format", "E4M3"],
            {"optimizer.lr": 2.0, "optimizer.name": "riemannian_adam", "optimizer.beta2": 0.99},
            ["optimizer.name 'adamw', optimizer.lr 0.001 give way to --rule riemannian --model.format E4M3", "tied"],
        ),
        (
            "nanogpt_cpu.yaml",
            ["--rule", "riemannian", "--model.format", "E4M3", "--optimizer.lr", "0.5"],
            {"optimizer.lr": 0.5},
            ["optimizer.name 'adamw' gives way to --rule riemannian", "tied"],
        ),
        (
            "nanogpt_cpu.yaml",
            ["--rule", "sgd"],
            {"optimizer.lr": 0.1, "optimizer.beta1": None, "optimizer.momentum": 0.9},
            ["optimizer.beta1 0.9", "optimizer.lr 0.001", "--rule sgd"],
        ),
        ("fp32.yaml", ["--model.format", "E4M3"], {"rule": None, "model.storage": "master"}, ["rule 'fp32' gives way"]),
        ("fp32.yaml", ["--optimizer.name", "SGD"], {"rule": None, "train.precision": "float32"}, ["rule 'fp32' gives"]),
        ("e4m3.yaml", ["--rule", "fp32"], {"model.formats": {}}, ["model.format 'E4M3' gives way to --rule fp32"]),
        ("gpt2.yaml", ["--model.format", "none"], {"model.tied": None}, ["model.tied 'leave' gives way"]),
        ("gpt2.yaml", ["--rule", "master"], {"optimizer.lr": 3e-5, "model.tied": "leave"}, []),
        (
            "e4m3.yaml",
            ["--model.init_from", "gpt2", "--model.tied", "leave"],
            {"model.n_layer": 2},
            ["model.size '0.8M'"],
        ),
    ],
)
def test_the_file_gives_way_and_it_is_said(
    name: str, words: list[str], expected: dict[str, Any], told: list[str], loaded: Any
) -> None:
    config, said = loaded(name, *words)
    assert {key: get(config, key) for key in expected} == expected
    assert bool(said) == bool(told)
    for part in told:
        assert any(part in line for line in said)
    assert all(line.startswith(f"{name}: ") for line in said)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--rule", "fp32", "--model.format", "E4M3"], "model.formats"),
        (["--rule", "stochastic", "--model.format", "E4M3", "--optimizer.name", "sgd"], "optimizer.name"),
        (["--rule", "stochastic", "--model.format", "none"], "needs a format"),
        (["--rule", "sgd", "--optimizer.beta1", "0.5"], "optimizer.beta1"),
    ],
)
def test_what_the_command_line_says_against_itself_is_refused(words: list[str], part: str, loaded: Any) -> None:
    with pytest.raises(BenchError, match=part):
        loaded("nanogpt_cpu.yaml", *words)


def test_what_a_file_says_against_itself_is_refused_whatever_else_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("rule: fp32\nmodel: {format: E4M3}\n")
    with pytest.raises(BenchError, match="whose weights are floats"):
        resolve(load_config(path, ["--seed", "3"]))


def test_a_resolved_file_takes_another_rule(tmp_path: Path, loaded: Any) -> None:
    from nanogpt_bench.config.settings import to_yaml

    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(loaded("e4m3.yaml", "--rule", "stiffness")[0]))
    config = resolve(load_config(path, ["--rule", "stiffness-anneal"]))
    assert (config.optimizer.stiffness, config.optimizer.stiffness_end) == (1.0, 0.0)
    config = resolve(load_config(path, ["--rule", "bf16-mixed"]))
    assert config == resolve(load_config(find_config("e4m3.yaml"), ["--rule", "bf16-mixed"]))


def test_run_says_what_gave_way_once_it_goes_on(
    corpus_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = [f"--model.{key}={value}" for key, value in (("n_layer", 1), ("n_embd", 32), ("block_size", 8))]
    words = ["run", "nanogpt_cpu.yaml", f"--data.dir={corpus_dir}", "--rule=riemannian", "--model.format=E4M3", *small]
    assert main([*words, "--train.max_steps=1", "--eval.batches=1"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(
        "nanogpt_cpu.yaml: optimizer.name 'adamw', optimizer.lr 0.001 give way to --rule riemannian"
    )
    assert said[1].startswith("nanogpt_cpu.yaml: model.tied: leave")
    assert main([*words, "--data.dir=gone"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
