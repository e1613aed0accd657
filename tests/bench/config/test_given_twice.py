"""What is given twice is refused, in a file, a sweep and on the command line; so are numbers that readers differ in."""

from pathlib import Path

import pytest
from laws import each

from nanogpt_bench.config.settings import parse_overrides
from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.system.errors import BenchError


def test_a_small_version_changes_one_setting_of_a_section_and_leaves_the_others(tmp_path: Path) -> None:
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
def test_an_entry_is_given_once(words: list[str]) -> None:
    with pytest.raises(BenchError, match="given twice"):
        parse_overrides(words)


def test_an_entry_beside_the_others_does_not_drop_them_whatever_the_order() -> None:
    words = (["--model.formats", "{attn: E4M3}"], ["--model.formats.mlp", "E5M2"])
    merged = {"model.formats": {"attn": "E4M3", "mlp": "E5M2"}}
    assert parse_overrides([*words[0], *words[1]]) == parse_overrides([*words[1], *words[0]]) == merged
