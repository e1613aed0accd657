"""Every setting, misspelt by one letter, of a wrong type and out of range.

It is refused in one line that names the key.
"""

import math
import random
import string
from itertools import product

import pytest
import yaml

from nanogpt_bench.cli import main
from nanogpt_bench.config.keys import FIELDS, mapping_above
from nanogpt_bench.config.settings import load_config
from nanogpt_bench.sweep.file import KEYS, read_sweep
from nanogpt_bench.system.errors import BenchError

LETTERS = string.ascii_lowercase + string.digits + "_.-"
TYPOS_A_KEY = 16


def typos(key):
    """Return the misspellings of a key, none of which is a key.

    They have one letter too many, too few or other, or two swapped.
    """
    misspelt = set()
    for head, tail in ((key[:place], key[place:]) for place in range(len(key) + 1)):
        misspelt |= {head + tail[1:], head + tail[1:2] + tail[:1] + tail[2:]}
        for letter in LETTERS:
            misspelt |= {head + letter + tail, head + letter + tail[1:]}
    return sorted(
        word for word in misspelt - {key} if word not in FIELDS and not mapping_above(word)
    )


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def refusal(arguments, content=None, path=None):
    if path is not None:
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(BenchError) as caught:
        load_config(path, arguments)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def assert_names_the_nearest(message, typo, key, keys=FIELDS):
    """Return the key that is meant, or others that are one edit away as well.

    What is nested below a key is a value of it.
    """
    if not message.startswith(f"{key}: {{"):
        named = message.partition("did you mean '")[2].partition("'")[0]
        assert named == key or (named in keys and typo in typos(named)), f"{typo}: {message}"


def test_a_misspelt_key_is_answered_with_the_nearest(tmp_path, full, tally, capsys):
    source, path, count = random.Random(0), tmp_path / "typo.yaml", 0
    for key in FIELDS:
        words = typos(key)
        for word in words if full else source.sample(words, TYPOS_A_KEY):
            assert_names_the_nearest(refusal([f"--{word}", "1"]), word, key)
            assert_names_the_nearest(refusal([], {word: 1}, path), word, key)
            count += 2
        word = source.choice(words)
        assert_names_the_nearest(refusal([], nested(word, 1), path), word, key)
        assert main(["run", str(path)]) == 2, key
        assert len(capsys.readouterr().err.splitlines()) == 1, key
        count += 1
    tally("misspelt config keys refused with the nearest", count, f"{len(FIELDS)} keys")


WRONG = {
    bool: ("perhaps", 3, [1], {"a": 1}),
    int: ("many", 1.5, True, [1], {"a": 1}),
    float: ("much", True, [1.0], {"a": 1}),
    str: ([1], {"a": 1}),
    list: (7, True, {"a": 1}),
    dict: (7, "word", [1]),
}


def out_of_range(key):
    """Return values of the right type just beyond the bounds.

    For choices, values that are none of them.
    """
    kind, bounds = FIELDS[key].kind, FIELDS[key].bounds
    if FIELDS[key].facts["choices"]:
        return ["no-such-word"] if kind is str else [["no-such-word"]]
    if kind not in (int, float):
        return []
    beyond = {"gt": 0, "lt": 0, "ge": -1, "le": 1}
    values = []
    for bound, (name, distance) in product(bounds, beyond.items()):
        if hasattr(bound, name):
            values.append(getattr(bound, name) + distance)
    return [kind(value) for value in values] + (
        [math.nan, math.inf, -math.inf] if kind is float else []
    )


def as_text(value):
    if isinstance(value, list) and value == ["no-such-word"]:
        return value[0]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{a: 1}"
    return str(value)


@pytest.mark.parametrize("section", sorted({key.partition(".")[0] for key in FIELDS}))
def test_a_wrong_value_is_refused_by_its_key(section, tmp_path, full, tally):
    path, count = tmp_path / "wrong.yaml", 0
    for key in [key for key in FIELDS if key.partition(".")[0] == section]:
        types, beyond = (
            [*WRONG[FIELDS[key].kind], *([] if FIELDS[key].optional else [None])],
            out_of_range(key),
        )
        if not full:  # one of each, another for every key
            turn = random.Random(key)
            types, beyond = turn.sample(types, 1), turn.sample(beyond, min(1, len(beyond)))
        for value in [*types, *beyond]:
            assert key in refusal([], nested(key, value), path), key
            count += 1
            if value in beyond or (value is not None and FIELDS[key].kind not in (str, list)):
                assert key in refusal([f"--{key}={as_text(value)}"]), key
                count += 1
    assert count
    tally(f"wrong values refused by their key, {section}", count)


def test_a_misspelt_key_of_a_sweep_file_is_answered_with_the_nearest(tmp_path, full, tally):
    source, path, count = random.Random(1), tmp_path / "sweep.yaml", 0
    for key in KEYS:
        words = [word for word in typos(key) if word not in KEYS and word]
        for word in words if full else source.sample(words, 8):
            path.write_text(yaml.safe_dump({word: 1}), encoding="utf-8")
            with pytest.raises(BenchError) as caught:
                read_sweep(path)
            assert_names_the_nearest(str(caught.value), word, key, KEYS)
            count += 1
    tally("misspelt keys of a sweep file", count)
