"""The bounds within which files of others are read, and what is said of those beyond them."""

import json
import os

import pytest
from laws import each

from nanogpt_bench.config.keys import FIELDS
from nanogpt_bench.system.errors import nearest
from nanogpt_bench.system.untrusted import DEEPEST, Refused, parse_json, parse_yaml, read_json, read_text


def test_an_honest_alias_and_merge_are_read():
    text = "base: &base {a: 1, b: [2, 3]}\nother: {<<: *base, c: *base}\n"
    assert parse_yaml(text)["other"] == {"a": 1, "b": [2, 3], "c": {"a": 1, "b": [2, 3]}}


@each("depth", [DEEPEST - 2, DEEPEST + 1, 100_000])
def test_nesting_is_read_to_the_bound(depth):
    for parse in (parse_yaml, parse_json):
        text = "[" * depth + "]" * depth
        if depth < DEEPEST:
            assert json.dumps(parse(text)) == text
        else:
            with pytest.raises(Refused, match=f"nests more than {DEEPEST} deep"):
                parse(text)


def test_a_file_is_read_to_the_bound_and_only_an_ordinary_one(tmp_path):
    path, link, pipe = tmp_path / "a.json", tmp_path / "link", tmp_path / "pipe"
    path.write_bytes(b"[1]      ")
    link.symlink_to("a.json")
    os.mkfifo(pipe)
    assert read_json(path) == read_json(link) == [1]
    assert read_text(path, most=9) == "[1]      "
    for place, options, said in (
        (path, {"most": 8}, "more than 8 bytes"),
        (tmp_path, {}, "not an ordinary file"),
        (pipe, {}, "not an ordinary file"),
        (link, {"links": False}, "symbolic link"),
    ):
        with pytest.raises(Refused, match=said):
            read_text(place, **options)


def test_one_edit_is_nearer_than_likeness():
    assert nearest("model.n_eabd", FIELDS) == "model.n_embd"
    assert nearest("sede", ["sides", "seed"]) == "seed"
    assert nearest("x" * 10**6, FIELDS) is None
