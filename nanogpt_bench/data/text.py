"""Text on this machine as a corpus: any UTF-8 file, tokens of nanoGPT, or the English
prose in the standard library.

That prose is Python's help topics, and docstrings of the library's sources, which are
parsed and never imported. Its documents have a fixed order: the help topics by name,
then one document per module by path, with the docstrings of the module, its classes and
functions in source order.
"""

import ast
import codecs
import hashlib
import inspect
import platform
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanogpt_bench.data.tokenizers import make_tokenizer
from nanogpt_bench.data.write import check_replaced, write_corpus, write_tokens
from nanogpt_bench.system.errors import BenchError, counted, unknown
from nanogpt_bench.system.files import sha256

#: share of the characters for training, as in nanoGPT's shakespeare_char
TRAIN_SHARE = 0.9


def prepare_text(
    path: Path,
    out: Path,
    tokenizer: str = "byte",
    *,
    limit: int | None = None,
    progress: bool = False,
    replace: bool = False,
) -> dict[str, Any]:
    """Prepare a UTF-8 text file in folder `out` and return what was written to
    meta.json.

    A corpus of another text is replaced only with `replace`.
    """
    text = read_text(path)
    cut = int(len(text) * TRAIN_SHARE)
    source = {
        "kind": "text",
        "file": path.name,
        "sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
        "documents": 1,
    }
    check_replaced(out, source, replace=replace)
    splits = {"train": [text[:cut]], "val": [text[cut:]]}
    made = make_tokenizer(tokenizer, text, splits["train"])
    return write_corpus(out, splits, made, source, progress, limit, replace=replace)


#: tokenizers whose tokens a data folder of nanoGPT may have
OF_NANOGPT = ("byte", "char", "gpt2")


def prepare_nanogpt(
    folder: Path,
    out: Path,
    tokenizer: str,
    *,
    limit: int | None = None,
    progress: bool = False,
    replace: bool = False,
) -> dict[str, Any]:
    """Prepare nanoGPT's data in folder `out`: the tokens of its train.bin and val.bin,
    uint16.

    `tokenizer` names their tokenizer, since reading a meta.pkl would run code in it.
    For `char` the vocabulary comes from input.txt in `folder`, whose tokens have to be
    those of the two files. A corpus of another text is replaced only with `replace`.
    """
    if tokenizer not in OF_NANOGPT:
        raise unknown("tokenizer", tokenizer, OF_NANOGPT)
    splits = {split: _tokens_in(folder / f"{split}.bin") for split in ("train", "val")}
    text = ""
    if tokenizer == "char":
        if not (folder / "input.txt").is_file():
            raise BenchError(
                f"--tokenizer char needs {str(folder / 'input.txt')!r} for its characters, as "
                f"meta.pkl is never "
                "unpickled; put the text there, or give prepare text --input FILE --tokenizer char"
            )
        text = read_text(folder / "input.txt")
    made = make_tokenizer(tokenizer, text)
    for split, tokens in splits.items():
        if (largest := int(np.max(tokens))) >= made.vocab_size:
            raise BenchError(
                f"{str(folder / f'{split}.bin')!r} holds token {largest}: {tokenizer} has 0 to "
                f"{made.vocab_size - 1}"
            )
    if text and not np.array_equal(
        made.encode(text), np.concatenate([splits["train"], splits["val"]])
    ):
        raise BenchError(
            f"{str(folder)!r}: train.bin and val.bin are not the characters of its input.txt"
        )
    source = {
        "kind": "nanogpt",
        "file": folder.resolve().name,
        "sha256": {split: sha256(folder / f"{split}.bin") for split in splits},
    }
    return write_tokens(out, splits, made, source, limit, replace)


def _tokens_in(path: Path) -> NDArray[np.uint16]:
    try:
        if (size := path.stat().st_size) % 2 or not size:
            raise BenchError(
                f"{str(path)!r} has {counted(size, 'byte')}; uint16 tokens take two each"
            )
        return np.memmap(path, dtype="<u2", mode="r")
    except OSError as error:
        raise BenchError(f"{str(path)!r} can't be read: {error.strerror}") from None


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file with its line ends, without a byte order mark;
    refuse an empty file.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BenchError(f"--input {str(path)!r} does not exist") from None
    except OSError as error:
        raise BenchError(f"--input {str(path)!r} can't be read: {error.strerror}") from None
    if not data.removeprefix(codecs.BOM_UTF8).strip():
        raise BenchError(f"--input {str(path)!r} is empty; give a UTF-8 text file")
    try:
        return data.decode("utf-8-sig")  # drops the byte order mark that some editors write
    except UnicodeDecodeError as error:
        raise BenchError(
            f"--input {str(path)!r} is not UTF-8: byte 0x{data[error.start]:02x} at position "
            f"{error.start}; "
            "convert it to UTF-8 first"
        ) from None


#: folders without prose, or missing in some installations
EXCLUDED = {
    "test",
    "tests",
    "idlelib",
    "idle_test",
    "turtledemo",
    "site-packages",
    "dist-packages",
    "lib2to3",
}
#: every tenth document is for validation: whole modules, so that no docstring is split
VAL_EVERY = 10

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def prepare_stdlib(
    out: Path,
    tokenizer: str = "byte",
    *,
    limit: int | None = None,
    progress: bool = False,
    replace: bool = False,
) -> dict[str, Any]:
    """Prepare the standard library's prose in folder `out` and return what was written
    to meta.json.

    A corpus of another text is replaced only with `replace`.
    """
    documents = stdlib_documents()
    text = "\n".join(documents)
    splits = {
        "train": [
            item for index, item in enumerate(documents) if index % VAL_EVERY != VAL_EVERY - 1
        ],
        "val": documents[VAL_EVERY - 1 :: VAL_EVERY],
    }
    source = {
        "kind": "stdlib",
        "python": platform.python_version(),
        "sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
        "documents": len(documents),
    }
    check_replaced(out, source, replace=replace)
    made = make_tokenizer(tokenizer, text, splits["train"])
    return write_corpus(out, splits, made, source, progress, limit, replace=replace)


def stdlib_documents(root: Path | None = None) -> list[str]:
    """Return the documents of the standard library below `root` (default: the running
    Python's).
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    documents = [*_topics(root / "pydoc_data" / "topics.py"), *_modules(root)]
    if not documents:
        raise BenchError(
            f"no standard library sources below {str(root)!r}; use prepare text --input FILE"
        )
    return documents


def _topics(path: Path) -> list[str]:
    """Return the values of the dictionary literal in pydoc_data/topics.py, sorted by
    topic.
    """
    tree = _parse(path.read_bytes()) if path.exists() else None
    dictionaries = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)] if tree else []
    found: dict[str, str] = {}
    for dictionary in dictionaries:
        for key, value in zip(dictionary.keys, dictionary.values, strict=True):
            if (
                isinstance(key, ast.Constant)
                and isinstance(value, ast.Constant)
                and isinstance(value.value, str)
            ):
                found[str(key.value)] = inspect.cleandoc(value.value) + "\n"
    return [found[topic] for topic in sorted(found)]


def _modules(root: Path) -> Iterator[str]:
    """Yield the docstrings of each of the standard library's own modules, in the order
    of their relative paths.
    """
    for path in sorted(
        (path.relative_to(root) for path in root.rglob("*.py")), key=lambda path: path.as_posix()
    ):
        # _sysconfigdata differs from machine to machine
        if path.parts[0].removesuffix(".py") not in sys.stdlib_module_names or path.name.startswith(
            "_sysconfigdata"
        ):
            continue
        if not EXCLUDED.intersection(path.parts) and (
            text := "\n\n".join(docstrings((root / path).read_bytes()))
        ):
            yield text + "\n"


def docstrings(source: bytes) -> list[str]:
    """Return the docstrings of a module, its classes and functions in source order;
    empty if it is no valid Python.
    """
    nodes = _in_source_order(tree) if (tree := _parse(source)) else ()
    return list(filter(None, map(ast.get_docstring, nodes)))


def _parse(source: bytes) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old modules
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError):
            return None  # templates and deliberately broken files


def _in_source_order(node: ast.AST) -> Iterator[_Documented]:
    if isinstance(node, _Documented):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_source_order(child)
