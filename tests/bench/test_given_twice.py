"""What is given twice is refused, in a file, a sweep and on the command line; so are numbers that readers differ in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nanogpt_bench.config.settings import parse_overrides
from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.untrusted import parse_json, parse_yaml

Written = Callable[[str], Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Return a function that writes a YAML file."""

    def write(text: str) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_small_version_changes_one_setting_of_a_section_and_leaves_the_others(written: Written) -> None:
    text = (
        "settings:\n  train: {max_steps: 300, batch_size: 4}\naxes: {seed: [1]}\n"
        "smoke:\n  settings:\n    train: {max_steps: 2}\n"
    )
    small = read_sweep(written(text), smoke=True).base
    assert (small["train.max_steps"], small["train.batch_size"]) == (2, 4)


@pytest.mark.parametrize(
    "words",
    [
        ["--model.formats.attn", "E4M3", "--model.formats.attn", "E5M2"],
        ["--model.formats", "{attn: E4M3}", "--model.formats.attn", "E5M2"],
        ["--model.formats.attn", "E5M2", "--model.formats", "{attn: E4M3}"],
        ["--model.formats", "{attn: E4M3, attn: E5M2}"],
    ],
)
def test_an_entry_is_given_once(words: list[str]) -> None:
    with pytest.raises(BenchError, match="given twice"):
        parse_overrides(words)


def test_an_entry_beside_the_others_does_not_drop_them_whatever_the_order() -> None:
    words = (["--model.formats", "{attn: E4M3}"], ["--model.formats.mlp", "E5M2"])
    merged = {"model.formats": {"attn": "E4M3", "mlp": "E5M2"}}
    assert parse_overrides([*words[0], *words[1]]) == parse_overrides([*words[1], *words[0]]) == merged


def test_keys_are_one_where_a_mapping_holds_them_as_one() -> None:
    assert parse_yaml("a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}") == {"a": {"b": 1, "c": 2}, "d": {"b": 3, "c": 2}}


def test_a_file_of_json_gives_a_name_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"rows": [{"label": 1, "label": 2}]}', encoding="utf-8")
    assert parse_json('{"a": 1}') == {"a": 1}
