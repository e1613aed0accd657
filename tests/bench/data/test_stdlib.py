"""The standard library's prose."""

import sys
from pathlib import Path

import pytest

from nanogpt_bench.data.text import prepare_stdlib, stdlib_documents
from nanogpt_bench.system.errors import BenchError


def fake_library(root: Path) -> Path:
    files = {
        "pydoc_data/topics.py": "topics = {'zip': 'last\\n', 'and': 'first'}\n",
        "json/__init__.py": '"""JSON, with an \\d escape."""\nimport nowhere\ndef f():\n    """F.\n\n    More."""\n',
        "json/tests/__init__.py": '"""excluded"""\n',
        "site-packages/json.py": '"""excluded"""\n',
        "mine.py": '"""not of the standard library"""\n',
        "abc.py": "class A:\n    'a class'\n    async def g(self):\n        'a coroutine'\n",
        "copy.py": "x = 1\n",
        "ast.py": "def broken(:\n",
        "_sysconfigdata_linux.py": '"""differs"""\n',
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_topics_then_docstrings_in_order_and_nothing_is_imported(tmp_path: Path) -> None:
    assert stdlib_documents(fake_library(tmp_path)) == [
        "first\n",
        "last\n",
        "a class\n\na coroutine\n",
        "JSON, with an \\d escape.\n\nF.\n\nMore.\n",
    ]
    assert "nowhere" not in sys.modules


def test_an_installation_without_sources_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no standard library sources"):
        stdlib_documents(tmp_path)


def test_the_real_library_gives_over_a_million_bytes_of_prose(tmp_path: Path) -> None:
    meta = prepare_stdlib(tmp_path / "a")
    assert meta["splits"]["train"]["bytes"] > 1_000_000
    assert meta["splits"]["val"]["bytes"] > 50_000
    assert meta["source"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert len(meta["source"]["sha256"]) == 64
