"""Text on this machine as a corpus.

It is any UTF-8 file, tokens of nanoGPT, or the English prose in the standard library.
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

from nanogpt_bench.data.tokenizer_kind import TokenizerKind
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
    """Prepare a UTF-8 text file in folder `out`; return the content of meta.json.

    A corpus of another text is replaced only with `replace`.
    """
    text = read_corpus_text(path)
    cut = int(len(text) * TRAIN_SHARE)
    source = {
        "kind": "text",
        "file": path.name,
        "sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
        "documents": 1,
    }
    check_replaced(out, source, replace=replace)
    splits = {"train": [text[:cut]], "val": [text[cut:]]}
    made_tokenizer = make_tokenizer(tokenizer, text, splits["train"])
    return write_corpus(out, splits, made_tokenizer, source, progress, limit, replace=replace)


#: tokenizers whose tokens a data folder of nanoGPT may have
OF_NANOGPT = (TokenizerKind.BYTE, TokenizerKind.CHAR, TokenizerKind.GPT2)


def prepare_nanogpt(
    folder: Path,
    out: Path,
    tokenizer: str,
    *,
    limit: int | None = None,
    progress: bool = False,
    replace: bool = False,
) -> dict[str, Any]:
    """Prepare nanoGPT's data in folder `out`; return the content of meta.json.

    These are the tokens of its train.bin and val.bin, uint16. `tokenizer` names their
    tokenizer, since reading a meta.pkl would run code in it. For `char` the vocabulary
    comes from input.txt in `folder`, whose tokens have to be those of the two files. A
    corpus of another text is replaced only with `replace`.
    """
    if tokenizer not in OF_NANOGPT:
        raise unknown("tokenizer", tokenizer, OF_NANOGPT)
    splits = {split: _tokens_in(folder / f"{split}.bin") for split in ("train", "val")}
    text = ""
    if tokenizer == TokenizerKind.CHAR:
        input_file = folder / "input.txt"
        if not input_file.is_file():
            raise BenchError(
                f"--tokenizer char takes the characters from {str(input_file)!r}, which does not "
                "exist (meta.pkl is never unpickled); put the text there, or use prepare text "
                "--input FILE --tokenizer char"
            )
        text = read_corpus_text(input_file)
    made_tokenizer = make_tokenizer(tokenizer, text)
    for split, tokens in splits.items():
        largest = int(np.max(tokens))
        if largest >= made_tokenizer.vocab_size:
            raise BenchError(
                f"{str(folder / f'{split}.bin')!r} holds token {largest}, but {tokenizer} has 0 to "
                f"{made_tokenizer.vocab_size - 1}"
            )
    if text:
        all_tokens = np.concatenate([splits["train"], splits["val"]])
        if not np.array_equal(made_tokenizer.encode(text), all_tokens):
            raise BenchError(
                f"{str(folder)!r}: train.bin and val.bin do not hold the characters of its "
                "input.txt"
            )
    source = {
        "kind": "nanogpt",
        "file": folder.resolve().name,
        "sha256": {split: sha256(folder / f"{split}.bin") for split in splits},
    }
    return write_tokens(out, splits, made_tokenizer, source, limit, replace)


def _tokens_in(path: Path) -> NDArray[np.uint16]:
    try:
        size = path.stat().st_size
        if size % 2 or not size:
            raise BenchError(
                f"{str(path)!r} has {counted(size, 'byte')}, but uint16 tokens take two each"
            )
        return np.memmap(path, dtype="<u2", mode="r")
    except OSError as error:
        raise BenchError(f"{str(path)!r} can't be read: {error.strerror}") from None


def read_corpus_text(path: Path) -> str:
    """Return the content of a UTF-8 file with its line ends; refuse an empty file.

    The byte order mark that some editors write is dropped.
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
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BenchError(
            f"--input {str(path)!r} is not UTF-8: byte 0x{data[error.start]:02x} at position "
            f"{error.start}; convert it to UTF-8 first"
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
VAL_DOCUMENT_INTERVAL = 10

#: nodes that may have a docstring
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def prepare_stdlib(
    out: Path,
    tokenizer: str = "byte",
    *,
    limit: int | None = None,
    progress: bool = False,
    replace: bool = False,
) -> dict[str, Any]:
    """Prepare the standard library's prose in `out`; return the content of meta.json.

    A corpus of another text is replaced only with `replace`.
    """
    documents = stdlib_documents()
    text = "\n".join(documents)
    validation = slice(VAL_DOCUMENT_INTERVAL - 1, None, VAL_DOCUMENT_INTERVAL)
    training_documents = list(documents)
    del training_documents[validation]
    splits = {"train": training_documents, "val": documents[validation]}
    source = {
        "kind": "stdlib",
        "python": platform.python_version(),
        "sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
        "documents": len(documents),
    }
    check_replaced(out, source, replace=replace)
    made_tokenizer = make_tokenizer(tokenizer, text, splits["train"])
    return write_corpus(out, splits, made_tokenizer, source, progress, limit, replace=replace)


def stdlib_documents(root: Path | None = None) -> list[str]:
    """Return the documents of the standard library below `root`.

    By default it is that of the running Python.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    documents = [*_help_topics(root / "pydoc_data" / "topics.py"), *_module_prose(root)]
    if not documents:
        raise BenchError(
            f"no sources of the standard library in {str(root)!r}; use prepare text --input FILE"
        )
    return documents


def _help_topics(path: Path) -> list[str]:
    """Return the texts of the dictionary literals in topics.py, sorted by topic."""
    tree = _parse(path.read_bytes()) if path.exists() else None
    if tree is None:
        return []
    texts: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(value, ast.Constant):
                continue
            if isinstance(value.value, str):
                texts[str(key.value)] = inspect.cleandoc(value.value) + "\n"
    return [texts[topic] for topic in sorted(texts)]


def _module_prose(root: Path) -> Iterator[str]:
    """Yield the docstrings of each module of the standard library, by relative path."""
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    for path in sorted(paths, key=lambda path: path.as_posix()):
        if _has_prose(path):
            text = "\n\n".join(docstrings((root / path).read_bytes()))
            if text:
                yield text + "\n"


def _has_prose(path: Path) -> bool:
    """Return whether a module, by its relative path, may be among the documents."""
    # It differs from machine to machine.
    if path.name.startswith("_sysconfigdata"):
        return False
    is_of_library = path.parts[0].removesuffix(".py") in sys.stdlib_module_names
    return is_of_library and not EXCLUDED.intersection(path.parts)


def docstrings(source: bytes) -> list[str]:
    """Return the docstrings of a module, its classes and functions in source order.

    It is empty if the source is no valid Python.
    """
    tree = _parse(source)
    if tree is None:
        return []
    texts = [ast.get_docstring(node) for node in _documented_nodes(tree)]
    return [text for text in texts if text]


def _parse(source: bytes) -> ast.Module | None:
    with warnings.catch_warnings():
        # Old modules have invalid escapes.
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError):
            # Templates, and files that are broken on purpose.
            return None


def _documented_nodes(node: ast.AST) -> Iterator[_Documented]:
    """Yield a node and those below it that may have a docstring, in source order."""
    if isinstance(node, _Documented):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _documented_nodes(child)
