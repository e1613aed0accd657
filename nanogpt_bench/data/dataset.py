"""Text data sets of the Hugging Face hub as corpora, among them EU legislation; from
the hub or a local copy.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any

from nanogpt_bench.data.text import VAL_EVERY
from nanogpt_bench.data.tokenizers import check_tokenizer, make_tokenizer
from nanogpt_bench.data.write import (
    LabelledText,
    check_folder,
    check_replaced,
    split_limits,
    write_corpus,
)
from nanogpt_bench.system.errors import BenchError, one_line, refusals, unknown
from nanogpt_bench.system.files import sha256

#: names of a validation split
VAL_NAMES = ("validation", "val", "valid", "dev")

#: the column of labels, whose numbers have to be below this
COLUMN, MOST_LABELS = "labels", 2**16

Stream = Iterable[Mapping[str, Any]]
#: seconds that the hub has to name a data set's commit, name resolution included
LOOKUP_SECONDS = 8.0


def reading(what: str) -> AbstractContextManager[None]:
    """Turn any error of reading a data set into one line that begins with `what`."""
    return refusals(f"{what} can't be read", *read_errors())


def read_errors() -> tuple[type[Exception], ...]:
    """Return the errors that the hub, its client and the readers of its files raise."""
    from huggingface_hub import errors

    # huggingface_hub has changed its HTTP client twice; the client's base error is
    # always among these bases.
    of_the_client = (kind for kind in errors.HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
    return (OSError, ValueError, RuntimeError, *of_the_client)


@dataclass(frozen=True)
class Texts:
    """The texts of one column, without empty ones; iterating refuses a missing column,
    or one of other values.
    """

    stream: Stream
    column: str
    what: str

    def __iter__(self) -> Iterator[str]:
        with reading(self.what):
            for row in self.stream:
                text = self._text(row)
                if text:
                    yield text

    def _text(self, row: Mapping[str, Any]) -> str | None:
        if self.column not in row:
            raise unknown(f"column of {self.what}", self.column, row)
        text = row[self.column]
        if text is not None and not isinstance(text, str):
            raise BenchError(
                f"column {self.column!r} of {self.what} holds {type(text).__name__}, not text"
            )
        return text


@dataclass(frozen=True)
class LabelledTexts(Texts):
    """The texts of one column, each with its label numbers, from 0, in the column
    `labels`.
    """

    def _text(self, row: Mapping[str, Any]) -> str | None:
        text = super()._text(row)
        return LabelledText(text, self._labels(row)) if text else text

    def _labels(self, row: Mapping[str, Any]) -> list[int]:
        if COLUMN not in row:
            raise unknown(f"column of {self.what}", COLUMN, row)
        given = row[COLUMN]
        if not isinstance(given, list):
            raise BenchError(
                f"column {COLUMN!r} of {self.what} holds {type(given).__name__}, not lists of "
                f"numbers"
            )
        for number in given:
            if (
                isinstance(number, bool)
                or not isinstance(number, int)
                or not 0 <= number < MOST_LABELS
            ):
                raise BenchError(
                    f"column {COLUMN!r} of {self.what} holds {number!r}; whole numbers from 0 to "
                    f"{MOST_LABELS - 1} are "
                    "allowed"
                )
        return given


def names_in(stream: Stream) -> list[str] | None:
    """Return the names of a stream's labels; None where the data set only has numbers."""
    column = (getattr(stream, "features", None) or {}).get(COLUMN)
    names = getattr(getattr(column, "feature", None), "names", None)
    return list(map(str, names)) if names else None


@dataclass(frozen=True)
class EveryTenth:
    """Every tenth document of a data set without a validation split (`validation`), or
    all the others.
    """

    documents: Iterable[str]
    validation: bool

    def __iter__(self) -> Iterator[str]:
        for index, text in enumerate(self.documents):
            if (index % VAL_EVERY == VAL_EVERY - 1) == self.validation:
                yield text


def splits_of(
    streams: Mapping[str, Stream], column: str, what: str, rows: type[Texts] = Texts
) -> dict[str, Iterable[str]]:
    """Return the documents for training and for validation, read as `rows`."""
    if "train" not in streams:
        raise BenchError(f"{what} has no split 'train'; it has: {', '.join(streams)}")
    train = rows(streams["train"], column, what)
    name = next((name for name in VAL_NAMES if name in streams), None)
    if name is None:
        return {
            "train": EveryTenth(train, validation=False),
            "val": EveryTenth(train, validation=True),
        }
    return {"train": train, "val": rows(streams[name], column, what)}


def characters(splits: Mapping[str, Iterable[str]], limits: Mapping[str, int | None]) -> str:
    """Return the different characters of the text that will be written, in code-point
    order.
    """
    found: set[str] = set()
    for split, documents in splits.items():
        found.update(islice(chain.from_iterable(documents), limits[split]))
    return "".join(sorted(found))


class NotOnHubError(BenchError):
    """The error when the hub answers that it has no such data set."""


def find_commit(dataset: str, revision: str | None) -> str:
    """Return the commit of a data set's revision (default: the newest)."""
    from huggingface_hub import HfApi, errors

    try:
        return str(HfApi().dataset_info(dataset, revision=revision, timeout=LOOKUP_SECONDS).sha)
    except errors.RevisionNotFoundError:
        raise BenchError(
            f"data set {dataset!r} has no revision {revision!r}; leave --revision out for main"
        ) from None
    except errors.GatedRepoError:
        raise BenchError(
            f"data set {dataset!r} is gated: ask for access on the hub, then: hf auth login"
        ) from None
    except errors.RepositoryNotFoundError:
        raise NotOnHubError(f"the hub has no data set {dataset!r}") from None
    except errors.HFValidationError as error:
        raise BenchError(
            f"--dataset {dataset!r} is no id of a data set: {one_line(error)}"
        ) from None
    except read_errors() as error:
        raise BenchError(
            f"the Hugging Face hub can't be reached ({one_line(error) or type(error).__name__}); "
            f"give a local copy of {dataset!r} with --data-dir DIR, or prepare a text that needs "
            f"no network: nanogpt-bench prepare stdlib"
        ) from None


def local_copy(folder: Path, config: str | None) -> tuple[dict[str, Stream], dict[str, str]]:
    """Return the rows of each split in FOLDER/CONFIG or else in FOLDER, and the sha256
    of the files that are read.
    """
    import datasets

    if not folder.is_dir():
        raise BenchError(f"--data-dir {str(folder)!r} is not a folder")
    inner = folder / config if config and (folder / config).is_dir() else folder
    quiet()
    with reading(f"--data-dir {str(inner)!r}"):
        builder = datasets.load_dataset_builder(str(inner))
        paths = [
            Path(path)
            for name in ("train", *VAL_NAMES)
            for path in builder.config.data_files.get(name, ())
        ]
        return dict(builder.as_streaming_dataset()), {path.name: sha256(path) for path in paths}


def quiet() -> None:
    """Silence the progress bars and warnings of datasets; errors are still raised."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)


#: id, configuration and revision of English EU legislation, and of the same acts in
#: another data set by its authors
EURLEX = ("coastalcph/lex_glue", "eurlex", None)
EURLEX_FALLBACK = ("coastalcph/multi_eurlex", "en", "refs/pr/9")

#: tasks that a data set is prepared for, and how its documents are read: as texts, or
#: as texts with labels
TASKS = {"text": Texts, "labels": LabelledTexts}


def prepare_eurlex(
    out: Path,
    tokenizer: str = "byte",
    *,
    revision: str | None = None,
    data_dir: Path | None = None,
    limit: int | None = None,
    progress: bool = False,
    task: str = "text",
    replace: bool = False,
) -> dict[str, Any]:
    """Prepare English EU legislation as `prepare_hub` does, from a second data set if
    the hub has not the first.
    """
    dataset, config, _ = EURLEX
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "limit": limit,
        "progress": progress,
        "task": task,
        "replace": replace,
    }
    try:
        return prepare_hub(
            out, dataset, "text", config=config, revision=revision, data_dir=data_dir, **options
        )
    except NotOnHubError as error:
        if revision is not None or task == "labels":  # the second data set has other labels
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
    replace: bool = False,
) -> dict[str, Any]:
    """Prepare one column of a data set in folder `out` and return what was written to
    meta.json.

    The training and validation splits become train.bin and val.bin; without a
    validation split, every tenth document is for validation. With `data_dir` a local
    copy is read and no network is used. `task` is one of `TASKS`: with `labels` the
    documents get the labels in the column `labels`. A corpus of another text is
    replaced only with `replace`.
    """
    if task not in TASKS:
        raise unknown("--task", task, TASKS)
    if find_spec("datasets") is None:
        raise BenchError(
            "this corpus needs the package datasets; get it with pip install 'fp8manifold[hub]'"
        )
    check_folder(out)
    limits = split_limits(limit)
    check_tokenizer(tokenizer)
    streams, facts = _open(dataset, config, revision, data_dir)
    source = {
        **facts,
        "dataset": dataset,
        "config": config,
        "column": column,
        "limit_tokens": limit,
    }
    source |= {} if task == "text" else {"task": task}
    check_replaced(out, source, replace=replace)
    splits = splits_of(streams, column, f"data set {dataset!r}", TASKS[task])
    labels = names_in(streams["train"]) if task == "labels" else None
    made = make_tokenizer(
        tokenizer, characters(splits, limits) if tokenizer == "char" else "", splits["train"]
    )
    return write_corpus(out, splits, made, source, progress, limit, labels, replace)


def _open(
    dataset: str, config: str | None, revision: str | None, data_dir: Path | None
) -> tuple[Mapping[str, Stream], dict[str, Any]]:
    """Return the rows of each split, and facts that identify this version of the data
    set.
    """
    if data_dir is not None:
        streams, files = local_copy(data_dir, config)
        return streams, {"kind": "copy", "files": files}
    import datasets

    commit = find_commit(dataset, revision)
    quiet()
    with reading(f"data set {dataset!r}"):
        streams = dict(datasets.load_dataset(dataset, config, streaming=True, revision=commit))
    return streams, {"kind": "hub", "revision": commit}
