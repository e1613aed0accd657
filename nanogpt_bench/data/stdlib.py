"""English prose that every Python carries: the help topics and the docstrings of the standard library.

The sources are read and parsed, never imported. Documents come in a fixed order: the help topics by name, then one
document a module by path, with the docstrings of the module, its classes and functions in source order.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import platform
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nanogpt_bench.config.schema import DEFAULT_DATA_DIR
from nanogpt_bench.data.tokenizers import make_tokenizer
from nanogpt_bench.data.write import write_corpus
from nanogpt_bench.system.errors import BenchError

#: folders without prose of their own, or absent from some installations
EXCLUDED = {"test", "tests", "idlelib", "idle_test", "turtledemo", "site-packages", "dist-packages", "lib2to3"}
#: every tenth document is for validation: whole modules, so that no docstring is split
VAL_EVERY = 10

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def prepare_stdlib(
    out: Path, tokenizer: str = "byte", *, limit: int | None = None, progress: bool = False
) -> dict[str, Any]:
    """Prepare the standard library's prose in folder `out` and return what was written to meta.json.

    The text differs a little between Python versions: meta.json records the version and the text's sha256.

    Raises:
        BenchError: unknown tokenizer, unwritable folder, or an installation without its sources.
    """
    documents = stdlib_documents()
    text = "\n".join(documents)
    splits = {
        "train": [item for index, item in enumerate(documents) if index % VAL_EVERY != VAL_EVERY - 1],
        "val": documents[VAL_EVERY - 1 :: VAL_EVERY],
    }
    source = {
        "kind": "stdlib",
        "python": platform.python_version(),
        "sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
        "documents": len(documents),
    }
    return write_corpus(out, splits, make_tokenizer(tokenizer, text, splits["train"]), source, progress, limit)


def stdlib_documents(root: Path | None = None) -> list[str]:
    """Return the documents of the standard library below `root` (default: the running Python's).

    Raises:
        BenchError: no sources are below `root`.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    documents = [*_topics(root / "pydoc_data" / "topics.py"), *_modules(root)]
    if not documents:
        raise BenchError(f"no standard library sources below {str(root)!r}; use prepare text --input FILE")
    return documents


def _topics(path: Path) -> list[str]:
    """Return the values of the dictionary literal in pydoc_data/topics.py, sorted by topic."""
    tree = _parse(path) if path.exists() else None
    dictionaries = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)] if tree else []
    found: dict[str, str] = {}
    for dictionary in dictionaries:
        for key, value in zip(dictionary.keys, dictionary.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[str(key.value)] = inspect.cleandoc(value.value) + "\n"
    return [found[topic] for topic in sorted(found)]


def _modules(root: Path) -> Iterator[str]:
    for path in _sources(root):
        tree = _parse(path)
        text = "\n\n".join(_docstrings(tree)) if tree else ""
        if text:
            yield text + "\n"


def _sources(root: Path) -> Iterable[Path]:
    """Return the sources of the standard library's own modules, in the order of their relative paths."""
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (
        path
        for path in relative
        if path.parts[0].removesuffix(".py") in sys.stdlib_module_names
        and not path.name.startswith("_sysconfigdata")  # differs from machine to machine
        and not EXCLUDED.intersection(path.parts)
    )
    return [root / path for path in sorted(kept, key=lambda path: path.as_posix())]


def _parse(path: Path) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old modules
        try:
            return ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return None  # templates and deliberately broken files


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in _in_source_order(tree):
        text = ast.get_docstring(node, clean=True)
        if text:
            yield text


def _in_source_order(node: ast.AST) -> Iterator[_Documented]:
    if isinstance(node, _Documented):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_source_order(child)


def prepare_default(data_dir: str) -> None:
    """Prepare the standard library's prose if a run asks for the default corpus and it is not there yet."""
    folder = Path(DEFAULT_DATA_DIR)
    if Path(data_dir) == folder and not folder.exists():
        print(f"preparing {folder} (the standard library's prose)", file=sys.stderr)
        prepare_stdlib(folder, progress=sys.stderr.isatty())
