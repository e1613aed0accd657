"""Configuration files and overrides: where they are found, what is read, what is refused and how."""

from pathlib import Path

import gpt2_checkpoints
import pytest
from laws import each

from nanogpt_bench.config.keys import FIELDS
from nanogpt_bench.config.rules import available_rules
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import (
    FOLDER,
    build_config,
    defaults_yaml,
    find_config,
    load_config,
    parse_overrides,
    shipped_configs,
)
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.system.errors import BenchError


def test_yaml_and_overrides_meet_and_the_override_wins(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("seed: 3\ntrain:\n  max_steps: 10\n  batch_size: 2\noptimizer:\n  lr: 1e-2\n")
    config = load_config(path, ["--train.max_steps", "20", "--model.format=E5M2"])
    assert (config.seed, config.train.max_steps, config.train.batch_size) == (3, 20, 2)
    assert config.optimizer.lr == 0.01
    assert config.model.format == "E5M2"


def test_lists_of_words_from_files_and_the_command_line(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("train:\n  stop_on: [nan, plateau]\n")
    assert load_config(path).train.stop_on == ["nan", "plateau"]
    assert load_config(path, ["--train.stop_on", "divergence, nan"]).train.stop_on == ["divergence", "nan"]
    assert load_config(path, ["--train.stop_on=[]"]).train.stop_on == []


def test_off_is_a_word_where_it_is_a_choice(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("tracking: {wandb: off, tensorboard: off}\n")
    assert load_config(path).tracking.wandb == "off"
    assert load_config(path).tracking.tensorboard is False


def test_sections_of_earlier_files_are_read_where_they_ask_for_what_they_did_by_default(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("alerts: {enabled: false, stall: 0.5, levels: {}}\nfailure: {patience: 3, stall: 0.5}\n")
    assert load_config(path).alerts.enabled is False
    path.write_text("failure: {patience: 4}\n")
    with pytest.raises(BenchError, match=r"failure.patience: 4 asks for what is no longer here; leave"):
        load_config(path)


@each("word", ["null", "~"])
def test_a_quoted_null_is_null_where_there_are_choices(tmp_path, word):
    path = tmp_path / "my.yaml"
    path.write_text(f'optimizer: {{name: "{word}", lr: "{word}"}}')
    config = load_config(path)
    assert (config.optimizer.name, config.optimizer.lr) == (None, None)


@each("given", ["StiffnessAdamW", "stiffness-adamw", "stiffness_adamw"])
def test_choices_are_read_in_any_case(given):
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
def test_wrong_files_are_refused_in_one_line(tmp_path, text, parts):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(BenchError) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_a_file_without_settings_gives_the_defaults_and_an_empty_one_is_refused(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("{}")
    assert load_config(path) == Config()
    for content in ("", "# nothing\n", "\ufeff"):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(BenchError, match="is empty; give settings"):
            load_config(path)


def test_a_setting_that_is_gone_is_read_where_it_asked_for_nothing(tmp_path):
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
def test_what_a_run_filled_in_for_it_is_read_too_and_no_other_value(tmp_path, filled, other):
    path = tmp_path / "config.yaml"
    path.write_text(filled)
    load_config(path)
    path.write_text(other)
    with pytest.raises(BenchError, match="asks for what is no longer here"):
        load_config(path)


def test_the_file_of_all_defaults_is_read_as_none_at_all_and_explains_every_setting(tmp_path):
    path = tmp_path / "defaults.yaml"
    path.write_text(defaults_yaml())
    assert load_config(path) == build_config({}) == Config()
    lines = path.read_text().splitlines()
    given = [place for place, line in enumerate(lines) if not line.lstrip().startswith("#") and line.partition(":")[2]]
    assert len(given) == len(FIELDS)
    assert all(lines[place - 1].lstrip().startswith("#") for place in given)


def test_a_small_version_changes_one_setting_of_a_section_and_leaves_the_others(tmp_path):
    text = (
        "settings:\n  train: {max_steps: 300, batch_size: 4}\naxes: {seed: [1]}\n"
        "smoke:\n  settings:\n    train: {max_steps: 2}\n"
    )
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    small = read_sweep(tmp_path / "mine.yaml", smoke=True).base
    assert (small["train.max_steps"], small["train.batch_size"]) == (2, 4)


@each(
    "words",
    [
        ["--model.formats.attn", "E4M3", "--model.formats.attn", "E5M2"],
        ["--model.formats", "{attn: E4M3}", "--model.formats.attn", "E5M2"],
        ["--model.formats.attn", "E5M2", "--model.formats", "{attn: E4M3}"],
        ["--model.formats", "{attn: E4M3, attn: E5M2}"],
    ],
)
def test_an_entry_is_given_once(words):
    with pytest.raises(BenchError, match="given twice"):
        parse_overrides(words)


def test_an_entry_beside_the_others_does_not_drop_them_whatever_the_order():
    words = (["--model.formats", "{attn: E4M3}"], ["--model.formats.mlp", "E5M2"])
    merged = {"model.formats": {"attn": "E4M3", "mlp": "E5M2"}}
    assert parse_overrides([*words[0], *words[1]]) == parse_overrides([*words[1], *words[0]]) == merged


@each("name", shipped_configs())
def test_every_shipped_file_is_valid(name, tmp_path):
    config = load_config(find_config(name))
    if config.rule and config.rule not in available_rules():
        pytest.skip(f"{config.rule} needs a package that is not installed")
    if config.model.init_from:
        config.model.init_from = str(gpt2_checkpoints.write(tmp_path))
    assert resolve(config).train.max_steps == (763 if name == "gpt2_124m.yaml" else 2000)


@each("name", ["e4m3", "e4m3.yaml", "configs/e4m3.yaml"])
def test_a_shipped_file_is_found_by_its_name(name):
    assert find_config(name) == FOLDER / "e4m3.yaml"


def test_a_file_on_disk_comes_first(here):
    Path("e4m3.yaml").write_text("seed: 1\n")
    assert load_config(find_config("e4m3.yaml")).seed == 1


@each("name", ["e4m33.yaml", "elsewhere/e4m3.yaml"])
def test_a_missing_file_is_named_with_the_nearest_shipped_one(name):
    with pytest.raises(BenchError, match=r"does not exist; did you mean 'e4m3.yaml'\?"):
        find_config(name)
