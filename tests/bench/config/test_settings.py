"""Configuration files and overrides: what is read, what is refused and how."""

from pathlib import Path

import pytest
from laws import each

from nanogpt_bench.config.keys import FIELDS
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import build_config, defaults_yaml, load_config
from nanogpt_bench.system.errors import BenchError


def test_yaml_and_overrides_meet_and_the_override_wins(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("seed: 3\ntrain:\n  max_steps: 10\n  batch_size: 2\noptimizer:\n  lr: 1e-2\n")
    config = load_config(path, ["--train.max_steps", "20", "--model.format=E5M2"])
    assert (config.seed, config.train.max_steps, config.train.batch_size) == (3, 20, 2)
    assert config.optimizer.lr == 0.01
    assert config.model.format == "E5M2"


def test_lists_of_words_from_files_and_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("train:\n  stop_on: [nan, plateau]\n")
    assert load_config(path).train.stop_on == ["nan", "plateau"]
    assert load_config(path, ["--train.stop_on", "divergence, nan"]).train.stop_on == ["divergence", "nan"]
    assert load_config(path, ["--train.stop_on=[]"]).train.stop_on == []


def test_off_is_a_word_where_it_is_a_choice(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("tracking: {wandb: off, tensorboard: off}\n")
    assert load_config(path).tracking.wandb == "off"
    assert load_config(path).tracking.tensorboard is False


def test_sections_of_earlier_files_are_read_where_they_ask_for_what_they_did_by_default(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("alerts: {enabled: false, stall: 0.5, levels: {}}\nfailure: {patience: 3, stall: 0.5}\n")
    assert load_config(path).alerts.enabled is False
    path.write_text("failure: {patience: 4}\n")
    with pytest.raises(BenchError, match=r"failure.patience: 4 asks for what is no longer here; leave"):
        load_config(path)


@each("word", ["null", "~"])
def test_a_quoted_null_is_null_where_there_are_choices(tmp_path: Path, word: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(f'optimizer: {{name: "{word}", lr: "{word}"}}')
    config = load_config(path)
    assert (config.optimizer.name, config.optimizer.lr) == (None, None)


@each("given", ["StiffnessAdamW", "stiffness-adamw", "stiffness_adamw"])
def test_choices_are_read_in_any_case(given: str) -> None:
    assert load_config(None, ["--optimizer.name", given]).optimizer.name == "stiffness_adamw"


@each(
    ("text", "parts"),
    [
        ("train: 3\n", ["train", "3", "section"]),
        ("train:\n  max_step: 3\n", ["train.max_step", "train.max_steps"]),
        ("trian:\n  max_steps: 3\n", ["trian"]),
        ("- 1\n- 2\n", ["keys and values"]),
        ("a: [1\n", ["not YAML"]),
        ("seed: !!python/object/apply:os.getcwd []\n", ["not YAML"]),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(BenchError) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_a_file_without_settings_gives_the_defaults_and_an_empty_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("{}")
    assert load_config(path) == Config()
    for content in ("", "# nothing\n", "\ufeff"):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(BenchError, match="is empty; give settings"):
            load_config(path)


def test_a_setting_that_is_gone_is_read_where_it_asked_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "earlier.yaml"
    path.write_text("model: {outliers: none, lora_rank: null}\ntrain: {max_rollbacks: 3, max_steps: 7}\n")
    assert load_config(path).train.max_steps == 7
    path.write_text("model: {outliers: clip_sigma}\n")
    with pytest.raises(BenchError, match=r"model\.outliers: 'clip_sigma' asks for what is no longer here; leave model"):
        load_config(path)


@each(
    ("filled", "other"),
    [
        ("{seed: 7, data: {seed: 7}, model: {seed: 7}}", "{seed: 7, data: {seed: 8}}"),
        ("{task: classify, model: {pooling: mean}}", "{task: classify, model: {pooling: last}}"),
        ("{rule: fisher, optimizer: {damping: 0.1, eps: 1.0e-8}}", "{rule: madam, optimizer: {damping: 0.1}}"),
        ("{rule: madam, optimizer: {damping: 0.00390625}}", "{rule: fisher, optimizer: {damping: 0.00390625}}"),
        ("{model: {constrained: [attn.qkv, attn.proj]}}", "{model: {constrained: [attn]}}"),
    ],
)
def test_what_a_run_filled_in_for_it_is_read_too_and_no_other_value(tmp_path: Path, filled: str, other: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(filled)
    load_config(path)
    path.write_text(other)
    with pytest.raises(BenchError, match="asks for what is no longer here"):
        load_config(path)


def test_the_file_of_all_defaults_is_read_as_none_at_all_and_explains_every_setting(tmp_path: Path) -> None:
    path = tmp_path / "defaults.yaml"
    path.write_text(defaults_yaml())
    assert load_config(path) == build_config({}) == Config()
    lines = path.read_text().splitlines()
    given = [place for place, line in enumerate(lines) if not line.lstrip().startswith("#") and line.partition(":")[2]]
    assert len(given) == len(FIELDS)
    assert all(lines[place - 1].lstrip().startswith("#") for place in given)
