"""Checkpoints that are damaged, or made by someone else.

They are read or refused, and nothing in them runs.
"""

import hashlib
import json
import os
import pickle
import random
import shutil
import struct
from contextlib import suppress
from itertools import chain, product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_checkpoints import small
from watched import watched

from nanogpt_bench.checkpoint import (
    BrokenCheckpoint,
    commit_checkpoint,
    newest,
    read_checkpoint,
    step_file,
    steps,
    verify,
)

#: the file, and its digest
LAST = ("", ".sha256")


def with_ending(path, last):
    return path.with_name(path.name + last)


def is_named(path):
    for look in (verify, read_checkpoint):
        try:
            look(path)
        except BrokenCheckpoint as error:
            if repr(str(path)) not in str(error) or "\n" in str(error):
                return False
        else:
            return False
    return True


def assert_passed_over(run_dir):
    """The checkpoint of step 2 is broken, that of step 1 is taken, and it is said why."""
    path, (skipped,) = newest(run_dir)
    assert path == step_file(run_dir, 1)
    assert "step-2" in skipped


def test_every_single_bit_flip_is_detected(run_dir, full, tally):
    path, draw, number = step_file(run_dir, 2), random.Random(0), 10_000 if full else 500
    whole = {last: with_ending(path, last).read_bytes() for last in LAST}
    bits = []
    for last, data in whole.items():
        bits += product([last], range(8 * len(data)))
    missed = []
    for last, bit in draw.sample(bits, number):
        data = bytearray(whole[last])
        data[bit // 8] ^= 1 << bit % 8
        with_ending(path, last).write_bytes(data)
        missed += [] if is_named(path) else [(last, bit)]
        with_ending(path, last).write_bytes(whole[last])
    assert missed == []
    verify(path)
    tally("bit flips in a checkpoint", number, f"of {len(bits):,} bits, all detected")


def test_truncation_at_every_length_is_detected(run_dir, tally):
    path, number = step_file(run_dir, 2), 0
    for last in LAST:
        file = with_ending(path, last)
        data = file.read_bytes()
        for length in range(len(data)):
            os.truncate(file, length)
            assert is_named(path), (last, length)
            file.write_bytes(data)
            number += 1
        file.write_bytes(data + b"\0")
        assert is_named(path), last
        file.write_bytes(data)
    verify(path)
    tally("truncated files of a checkpoint", number, "every length of both files, all detected")


def in_place_of(path, make):
    path.unlink()
    make(path)


def at_the_end_of_a_link(path, elsewhere):
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "of step 1": lambda path: shutil.copy(
        path.with_name(path.name.replace("step-2", "step-1")), path
    ),
    "folder": lambda path: in_place_of(path, Path.mkdir),
    "pipe": lambda path: in_place_of(path, os.mkfifo),
    "link": lambda path: in_place_of(path, lambda path: path.symlink_to("/dev/zero")),
    "link to the same": lambda path: at_the_end_of_a_link(path, path.parent.parent / "same"),
}


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_not_the_one_is_detected(run_dir, last, damage):
    path = step_file(run_dir, 2)
    DAMAGES[damage](with_ending(path, last))
    assert is_named(path)
    if path.exists():
        assert_passed_over(run_dir)
    else:
        assert newest(run_dir) == (step_file(run_dir, 1), [])


def test_a_checkpoint_under_another_step_s_name_is_detected_and_replaced_when_its_step_comes_again(
    run_dir,
):
    first, second = (step_file(run_dir, step) for step in (1, 2))
    shutil.copy(first, second)
    with_ending(second, ".sha256").write_text(
        with_ending(first, ".sha256").read_text().replace("step-1", "step-2")
    )
    assert is_named(second)
    assert_passed_over(run_dir)
    assert "holds step 1, but its file name gives step 2" in newest(run_dir)[1][0]
    commit_checkpoint(run_dir, small(2), keep_last=2)
    assert newest(run_dir) == (second, [])
    assert steps(run_dir) == [1, 2]


def test_what_can_not_be_read_is_passed_over(run_dir, monkeypatch):
    really_open = Path.open

    def refuse(path, *arguments, **options):
        if path.name == "step-2.safetensors":
            raise PermissionError(13, "Permission denied", path)
        return really_open(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert_passed_over(run_dir)
    assert newest(run_dir)[1][0].endswith("step-2.safetensors': Permission denied")


#: what reading a checkpoint must never lead to, beside what no reader may
FORBIDDEN = ("exec", "compile", "import", "marshal.loads", "code.__new__", "os.rename", "os.remove")
MIB = 1 << 20


class Payload:
    """Pickled, it runs a command when it is loaded."""

    def __reduce__(self):
        return os.system, ("touch executed",)


def tensor_file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def checkpoint(text=b'{"format": 2, "texts": {}, "facts": {"step": 5}}', tensors=None, data=b""):
    return tensor_file(
        {"__metadata__": {"checkpoint": text.decode("latin-1")}, **(tensors or {})}, data
    )


def with_facts(facts):
    return checkpoint(b'{"format": 2, "texts": {}, "facts": ' + facts + b"}")


def entry(dtype="U8", shape=(1,), offsets=(0, 1)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def with_tensor(**changes):
    return checkpoint(tensors={"model/a": entry(**changes)}, data=b"x")


#: name -> its content; those in WHOLE are odd and nothing else, and are read
CASES = {
    "nothing": b"",
    "a pickle": pickle.dumps(Payload()),
    "another safetensors file": tensor_file({"model/a": entry()}, b"x"),
    "facts of ten million lists": with_facts(b'{"step": 5, "a": [' + b"[]," * 10_000_000 + b"[]]}"),
    "facts of forty megabytes": with_facts(b'{"step": 5, "a": "' + b"x" * (40 * MIB) + b'"}'),
    "facts nested deep": with_facts(b'{"step": 5, "a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "facts with a long number": with_facts(b'{"step": ' + b"5" * 1_000_000 + b"}"),
    "facts with NaN": with_facts(b'{"step": 5, "loss": NaN}'),
    "facts of another step": with_facts(b'{"step": 6}'),
    "facts with a text for a step": with_facts(b'{"step": "5"}'),
    "facts that are a list": with_facts(b"[5]"),
    "texts that are a list": checkpoint(b'{"format": 2, "texts": [], "facts": {"step": 5}}'),
    "another version": checkpoint(b'{"format": 3, "texts": {}, "facts": {"step": 5}}'),
    "header of petabytes": tensor_file({}, length=1 << 50),
    "header of more than the file": tensor_file(b"{}", length=1000),
    "header nested deep": tensor_file(b"[" * 100_000),
    "header of a million values": tensor_file({"a": [0] * 1_200_000}),
    "header that is a list": tensor_file([]),
    "tensor of petabytes": with_tensor(shape=[1 << 50], offsets=[0, 1 << 50]),
    "tensor of a negative size": with_tensor(shape=[-1]),
    "tensor beyond the file": with_tensor(shape=[9], offsets=[0, 9]),
    "tensors in each other": checkpoint(
        tensors={"model/a": entry(), "model/b": entry()}, data=b"x"
    ),
    "tensor of no type": with_tensor(dtype="OBJECT"),
    "twenty thousand tensors": checkpoint(
        tensors={f"model/{i}": entry(shape=[0], offsets=[0, 0]) for i in range(20_000)}
    ),
    "a tensor with a long name": checkpoint(tensors={"a" * MIB: entry()}, data=b"x"),
    "made by someone else": with_tensor(),
}
WHOLE = ("twenty thousand tensors", "a tensor with a long name", "made by someone else")


def lay(folder, data):
    path = folder / "step-5.safetensors"
    path.write_bytes(data)
    path.with_name(f"{path.name}.sha256").write_text(
        f"{hashlib.sha256(data).hexdigest()}  {path.name}\n"
    )
    return path


def message_of(look, path):
    try:
        look(path)
    except BrokenCheckpoint as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", CASES)
def test_each_is_refused_in_one_line_or_read(case, tmp_path, attacks, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = lay(Path(), CASES[case])
    assert message_of(verify, Path("nowhere"))  # which imports what it needs
    outcome = watched(
        lambda: [message_of(look, path) for look in (verify, read_checkpoint)], FORBIDDEN
    )
    assert (outcome.raised, outcome.executions) == ("", [])
    assert len(list(tmp_path.iterdir())) == 2
    assert outcome.grown <= 2 * len(CASES[case]) + 64 * MIB
    attacks.append(outcome.grown)
    for message in outcome.returned:
        assert (message == "") == (case in WHOLE), message
        assert "\n" not in message
        assert len(message) < 400
        assert not message or message.startswith("checkpoint 'step-5.safetensors': ")


def test_a_file_of_a_terabyte_without_content_is_not_read(tmp_path):
    path = lay(tmp_path, b"")
    os.truncate(path, 1 << 43)
    assert "do not fit into this machine's memory" in message_of(verify, path)


QUICK = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=9,
)
TENSOR = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["U8", "F32", "BF16", "F4", "F8_E8M0", "BOOL", "?"]) | JSON,
        "shape": st.lists(st.integers(-1, 5) | st.integers(0, 2**64), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(0, 16) | st.integers(0, 2**64), min_size=2, max_size=2)
        | JSON,
    },
)
TEXTS = st.just({"checkpoint": '{"format": 2, "texts": {}, "facts": {"step": 5}}'}) | JSON


@QUICK
@given(
    TEXTS, st.dictionaries(st.text(max_size=5), TENSOR | JSON, max_size=3), st.binary(max_size=16)
)
def test_any_header_is_one_of_a_checkpoint_or_refused(tmp_path_factory, texts, tensors, data):
    path = lay(
        tmp_path_factory.getbasetemp(), tensor_file({"__metadata__": texts, **tensors}, data)
    )
    with suppress(BrokenCheckpoint):
        contents = read_checkpoint(path)
        assert contents.step == 5
        tensors = chain.from_iterable(part.values() for part in contents.tensors.values())
        assert sum(tensor.nbytes for tensor in tensors) == len(data)


@QUICK
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(tmp_path_factory, data):
    with pytest.raises(BrokenCheckpoint):
        read_checkpoint(lay(tmp_path_factory.getbasetemp(), data))
