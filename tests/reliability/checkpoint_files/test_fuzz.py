"""The parsers of a checkpoint's files take any bytes: they return what is right or raise a ValueError."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanogpt_bench.checkpoint.format import Entry, Manifest, compose, decompose, from_bytes, parse

QUICK = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner), max_leaves=9
)
DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}\.safetensors", fullmatch=True)
ENTRIES = st.builds(Entry, st.integers(0, 2**63 - 1), DIGESTS)
FILES = st.builds(
    lambda state, others: {**others, "state.json": state}, ENTRIES, st.dictionaries(NAMES, ENTRIES, max_size=5)
)
MANIFESTS = st.builds(Manifest, st.integers(0, 2**63 - 1), st.booleans(), FILES)


def signed(content: Any) -> bytes:
    body = json.dumps(content).encode().removesuffix(b"}") + b",\n"
    return body + f' "sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


@QUICK
@given(MANIFESTS)
def test_a_manifest_comes_back(manifest: Manifest) -> None:
    assert decompose(compose(manifest)) == manifest


@QUICK
@given(MANIFESTS, st.data())
def test_a_changed_manifest_is_refused(manifest: Manifest, data: st.DataObject) -> None:
    whole = compose(manifest)
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    changed = whole[:start] + data.draw(st.binary(max_size=20)) + whole[end:]
    if changed != whole:
        with pytest.raises(ValueError, match=r"\S"):
            decompose(changed)


@QUICK
@given(st.binary(max_size=300))
def test_any_bytes_are_no_manifest(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        decompose(data)


@QUICK
@given(
    st.dictionaries(st.sampled_from(["format", "step", "best", "files", "x"]), JSON | st.just(1)),
    JSON,
    st.text(max_size=50),
)
def test_any_content_with_the_right_hash_is_a_manifest_or_none(content: dict[str, Any], entry: Any, name: str) -> None:
    known = {
        "format": 1,
        "step": 3,
        "best": True,
        "files": {"state.json": {"size": 1, "sha256": "0" * 64}, name: entry},
    }
    for tried in (content, known | content, known):
        with suppress(ValueError):
            found = decompose(signed(tried))
            assert decompose(compose(found)) == found


@QUICK
@given(st.binary(max_size=200) | st.text('[]{},:"\\0eE-NaInf', max_size=200).map(str.encode))
def test_any_bytes_are_json_or_none(data: bytes) -> None:
    with suppress(ValueError):
        assert parse(data, limit=200, unique=True) == json.loads(data)


TENSOR = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["U8", "F32", "BF16", "F4", "F8_E8M0", "BOOL", "?"]) | JSON,
        "shape": st.lists(st.integers(-1, 5) | st.integers(0, 2**64), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(0, 16) | st.integers(0, 2**64), min_size=2, max_size=2) | JSON,
    },
)
HEADERS = st.dictionaries(st.text(max_size=5) | st.just("__metadata__"), TENSOR | JSON, max_size=3)


@QUICK
@given(HEADERS, st.binary(max_size=16), st.none() | st.integers(0, 2**64 - 1))
def test_any_header_is_one_of_tensors_or_none(header: Any, data: bytes, length: int | None) -> None:
    text = json.dumps(header).encode()
    with suppress(ValueError):
        tensors, _ = from_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
        assert sum(tensor.nbytes for tensor in tensors.values()) == len(data)


ATHERIS = """
import sys, atheris
with atheris.instrument_imports(include=["nanogpt_bench.checkpoint"]):
    from nanogpt_bench.checkpoint.format import decompose
    from nanogpt_bench.checkpoint.format import from_bytes
def once(data):
    for parse in (decompose, from_bytes):
        try:
            parse(data)
        except ValueError:
            pass
atheris.Setup([sys.argv[0], "-runs=200000", "-max_len=512"], once)
atheris.Fuzz()
"""


def test_bytes_that_a_fuzzer_finds(full: bool) -> None:
    if not full:
        pytest.skip("coverage-guided fuzzing belongs to the full tier")
    pytest.importorskip("atheris", reason="atheris is not installed")
    done = subprocess.run([sys.executable, "-c", ATHERIS], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
