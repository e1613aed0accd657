"""Any text data set of the Hugging Face hub as a corpus, EU legislation for one, from the hub or a local copy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nanogpt_bench.data.rows import (
    LabelledRows,
    NotOnHubError,
    Stream,
    characters,
    find_commit,
    local_copy,
    names_in,
    open_streams,
    splits_of,
)
from nanogpt_bench.data.tokenizers import check_tokenizer, make_tokenizer
from nanogpt_bench.data.write import check_folder, split_limits, write_corpus
from nanogpt_bench.system.errors import BenchError, unknown

#: id, configuration and revision of English EU legislation, and of the same acts in another data set of its authors
EURLEX = ("coastalcph/lex_glue", "eurlex", None)
EURLEX_FALLBACK = ("coastalcph/multi_eurlex", "en", "refs/pr/9")

#: documents of both splits, and the names of their labels, where they have some that have names
Prepared = tuple[Mapping[str, Iterable[str]], list[str] | None]


def _as_text(streams: Mapping[str, Stream], column: str, what: str) -> Prepared:
    return splits_of(streams, column, what), None


def _with_labels(streams: Mapping[str, Stream], column: str, what: str) -> Prepared:
    return splits_of(streams, column, what, LabelledRows), names_in(streams["train"])


#: what is prepared of a data set: its text, or documents with the labels it gives them
TASKS: Mapping[str, Callable[[Mapping[str, Stream], str, str], Prepared]] = {"text": _as_text, "labels": _with_labels}


def prepare_eurlex(
    out: Path,
    tokenizer: str = "byte",
    *,
    revision: str | None = None,
    data_dir: Path | None = None,
    limit: int | None = None,
    progress: bool = False,
    task: str = "text",
) -> dict[str, Any]:
    """Prepare English EU legislation in folder `out` and return what was written to meta.json.

    Raises:
        BenchError: as `prepare_hub` does.
    """
    dataset, config, _ = EURLEX
    options: dict[str, Any] = {"tokenizer": tokenizer, "limit": limit, "progress": progress, "task": task}
    try:
        return prepare_hub(out, dataset, "text", config=config, revision=revision, data_dir=data_dir, **options)
    except NotOnHubError as error:
        if revision is not None or task == "labels":  # those of the other data set are others
            raise
        other, config, commit = EURLEX_FALLBACK
        print(f"{error}; taking {other!r}", file=sys.stderr)
        return prepare_hub(out, other, "text", config=config, revision=commit, **options)


def prepare_hub(
    out: Path,
    dataset: str,
    column: str,
    *,
    tokenizer: str = "byte",
    config: str | None = None,
    revision: str | None = None,
    data_dir: Path | None = None,
    limit: int | None = None,
    progress: bool = False,
    task: str = "text",
) -> dict[str, Any]:
    """Prepare one column of a data set in folder `out` and return what was written to meta.json.

    The training and validation splits become train.bin and val.bin; where there is no validation split, every tenth
    document is for validation. With `data_dir` a local copy is read and no network is used. `task` is one of `TASKS`:
    with `labels` the documents have those of the column `labels`.

    Raises:
        BenchError: no such data set, configuration, revision, column or tokenizer; the hub is out of reach; a damaged
            file; a missing package; an unwritable folder; too little text; labels that are none.
    """
    if task not in TASKS:
        raise unknown("--task", task, TASKS)
    _require_packages()
    check_folder(out)
    limits = split_limits(limit)
    check_tokenizer(tokenizer)
    streams, facts = _open(dataset, config, revision, data_dir)
    splits, labels = TASKS[task](streams, column, f"data set {dataset!r}")
    made = make_tokenizer(tokenizer, characters(splits, limits) if tokenizer == "char" else "", splits["train"])
    source = {**facts, "dataset": dataset, "config": config, "column": column, "limit_tokens": limit}
    source |= {} if task == "text" else {"task": task}
    return write_corpus(out, splits, made, source, progress, limit, labels)


def _open(
    dataset: str, config: str | None, revision: str | None, data_dir: Path | None
) -> tuple[Mapping[str, Stream], dict[str, Any]]:
    """Return the rows of each split, and what tells this text from others of the same name."""
    if data_dir is not None:
        streams, files = local_copy(data_dir, config)
        return streams, {"kind": "copy", "files": files}
    commit = find_commit(dataset, revision)
    streams = open_streams(f"data set {dataset!r}", dataset, config, revision=commit)
    return streams, {"kind": "hub", "revision": commit}


def _require_packages() -> None:
    if find_spec("datasets") is None:
        raise BenchError("this corpus needs the package datasets; get it with pip install 'fp8manifold[hub]'")
