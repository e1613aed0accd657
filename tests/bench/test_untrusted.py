"""The bounds within which files of others are read, and what is said of those beyond them."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from nanogpt_bench.config.keys import FIELDS
from nanogpt_bench.system.errors import nearest
from nanogpt_bench.system.untrusted import (
    DEEPEST,
    MOST_JSON_VALUES,
    MOST_YAML_VALUES,
    Refused,
    check_header,
    parse_json,
    parse_yaml,
    read_json,
    read_text,
)

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


def test_an_honest_alias_and_merge_are_read() -> None:
    text = "base: &base {a: 1, b: [2, 3]}\nother: {<<: *base, c: *base}\n"
    assert parse_yaml(text)["other"] == {"a": 1, "b": [2, 3], "c": {"a": 1, "b": [2, 3]}}


@pytest.mark.parametrize("depth", [DEEPEST - 2, DEEPEST + 1, 100_000])
def test_nesting_is_read_to_the_bound(depth: int) -> None:
    for parse in (parse_yaml, parse_json):
        text = "[" * depth + "]" * depth
        if depth < DEEPEST:
            assert json.dumps(parse(text)) == text
        else:
            with pytest.raises(Refused, match=f"nests more than {DEEPEST} deep"):
                parse(text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (LAUGHS, f"more than {MOST_YAML_VALUES:,} values"),
        ("a: &a {<<: [*a]}\n", "contains it"),
        ("&a [*a]", "contains it"),
        ("[" + "x," * MOST_YAML_VALUES + "]", "values"),
        ("seed: " + "9" * 5000, "a number of 5,000 characters"),
        ("seed: " + "1:" * 5000 + "1", "a number of 10,001 characters"),
        ("seed: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("seed: !!python/name:os.system", "could not determine a constructor"),
        ("!!int x", "a value can't be read"),
        ("!!int ''", "a value can't be read"),
        ("!!timestamp x", "a value can't be read"),
        ("!!bool x", "a value can't be read"),
        ("2001-99-99", "a value can't be read"),
        ("{[1]: 2}", "unhashable"),
        ("- 1\n---\n- 2\n", "single document"),
        ("\x00", "not allowed"),
    ],
)
def test_yaml_beyond_the_bounds_is_refused_in_one_line(text: str, part: str) -> None:
    with pytest.raises(Refused) as caught:
        parse_yaml(text)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_json_beyond_the_bounds_is_refused() -> None:
    with pytest.raises(Refused, match="values"):
        parse_json("[" + "1," * MOST_JSON_VALUES + "1]")
    with pytest.raises(ValueError, match="digits"):
        parse_json("9" * 5000)


def test_a_file_is_read_to_the_bound_and_only_an_ordinary_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"[1]      ")
    assert read_json(path) == [1]
    assert read_text(path, most=9) == "[1]      "
    with pytest.raises(Refused, match="more than 8 bytes"):
        read_text(path, most=8)
    with pytest.raises(Refused, match="not an ordinary file"):
        read_text(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Refused, match="not an ordinary file"):
        read_text(tmp_path / "pipe")


def test_a_link_is_followed_only_where_it_may_be(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("[1]")
    (tmp_path / "link").symlink_to("secret")
    assert read_json(tmp_path / "link") == [1]
    with pytest.raises(Refused, match="symbolic link"):
        read_json(tmp_path / "link", links=False)


@pytest.mark.parametrize(("data", "part"), [(b"", "too short"), (b"1234567", "too short")])
def test_a_short_safetensors_file_is_refused(tmp_path: Path, data: bytes, part: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with pytest.raises(Refused, match=part):
        check_header(path)


@pytest.mark.parametrize("claimed", [9, 2**50, 2**64 - 1])
def test_a_header_longer_than_its_file_is_refused(tmp_path: Path, claimed: int) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", claimed) + b"{}      ")
    with pytest.raises(Refused, match=f"claims {claimed:,} bytes, the file has 16"):
        check_header(path)


def test_one_edit_is_nearer_than_likeness() -> None:
    assert nearest("model.n_eabd", FIELDS) == "model.n_embd"
    assert nearest("sede", ["sides", "seed"]) == "seed"
    assert nearest("x" * 10**6, FIELDS) is None
