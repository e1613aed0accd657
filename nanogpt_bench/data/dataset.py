"""Text data sets of the Hugging Face hub as corpora, among them EU legislation.

    hub or local copy -> streams of rows -> `Texts`, documents of a column -> a corpus

Rows are streamed, so that no data set has to fit the memory. Whatever the hub, its
client or a file's reader raises becomes one line (`data_set_errors`).
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from nanogpt_bench.data.text import VAL_DOCUMENT_INTERVAL
from nanogpt_bench.data.tokenizer_kind import TokenizerKind
from nanogpt_bench.data.tokenizers import check_tokenizer, make_tokenizer
from nanogpt_bench.data.write import (
    LabelledText,
    check_corpus_folder,
    check_replaced,
    split_limits,
    write_corpus,
)
from nanogpt_bench.system.errors import BenchError, one_line, refusals, unknown
from nanogpt_bench.system.files import sha256

#: names of a validation split
VAL_NAMES = ("validation", "val", "valid", "dev")

LABELS_COLUMN = "labels"
#: numbers of labels have to be below this
MOST_LABELS = 2**16

Stream = Iterable[Mapping[str, Any]]
#: seconds that the hub has to name a data set's commit, name resolution included
LOOKUP_SECONDS = 8.0


def data_set_errors(source: str) -> AbstractContextManager[None]:
    """Turn any error of reading a data set into one line that begins with `source`."""
    return refusals(f"{source} can't be read", *read_errors())


def read_errors() -> tuple[type[Exception], ...]:
    """Return the errors that the hub, its client and the readers of its files raise."""
    from huggingface_hub import errors

    # huggingface_hub has changed its HTTP client twice; the client's base error is
    # always among these bases.
    client_errors = [kind for kind in errors.HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError"]
    return (OSError, ValueError, RuntimeError, *client_errors)


@dataclass(frozen=True)
class Texts:
    """The texts of one column, without empty ones.

    Iterating refuses a missing column, or one of other values.
    """

    stream: Stream
    column: str
    #: the data set's name in errors
    source: str

    def __iter__(self) -> Iterator[str]:
        with data_set_errors(self.source):
            for row in self.stream:
                text = self._text(row)
                if text:
                    yield text

    def _text(self, row: Mapping[str, Any]) -> str | None:
        if self.column not in row:
            raise unknown(f"column of {self.source}", self.column, row)
        text = row[self.column]
        if text is not None and not isinstance(text, str):
            raise BenchError(
                f"column {self.column!r} of {self.source} holds {type(text).__name__}, not text"
            )
        return text


@dataclass(frozen=True)
class LabelledTexts(Texts):
    """The texts of one column, each with its labels.

    They are numbers from 0, in the column `labels`.
    """

    def _text(self, row: Mapping[str, Any]) -> str | None:
        text = super()._text(row)
        return LabelledText(text, self._labels(row)) if text else text

    def _labels(self, row: Mapping[str, Any]) -> list[int]:
        if LABELS_COLUMN not in row:
            raise unknown(f"column of {self.source}", LABELS_COLUMN, row)
        labels = row[LABELS_COLUMN]
        if not isinstance(labels, list):
            raise BenchError(
                f"column {LABELS_COLUMN!r} of {self.source} holds {type(labels).__name__}, not "
                "lists of whole numbers"
            )
        for label in labels:
            is_whole = isinstance(label, int) and not isinstance(label, bool)
            if not is_whole or not 0 <= label < MOST_LABELS:
                raise BenchError(
                    f"column {LABELS_COLUMN!r} of {self.source} holds {label!r}; whole numbers "
                    f"from 0 to {MOST_LABELS - 1} are allowed"
                )
        return labels


def label_names_in(stream: Stream) -> list[str] | None:
    """Return the names of a stream's labels; None where it only has numbers."""
    # In `datasets` a column of lists of ClassLabel has the names in its `feature`.
    column = (getattr(stream, "features", None) or {}).get(LABELS_COLUMN)
    names = getattr(getattr(column, "feature", None), "names", None)
    return list(map(str, names)) if names else None


@dataclass(frozen=True)
class EveryTenth:
    """Every tenth document of a data set without a validation split, or the others."""

    documents: Iterable[str]
    #: whether these are every tenth
    validation: bool

    def __iter__(self) -> Iterator[str]:
        for index, text in enumerate(self.documents):
            is_tenth = index % VAL_DOCUMENT_INTERVAL == VAL_DOCUMENT_INTERVAL - 1
            if is_tenth == self.validation:
                yield text


def splits_of(
    streams: Mapping[str, Stream], column: str, source: str, kind: type[Texts] = Texts
) -> dict[str, Iterable[str]]:
    """Return the documents for training and for validation, of the class `kind`."""
    if "train" not in streams:
        raise BenchError(f"{source} has no split 'train'; it has: {', '.join(streams)}")
    train = kind(streams["train"], column, source)
    for name in VAL_NAMES:
        if name in streams:
            return {"train": train, "val": kind(streams[name], column, source)}
    return {
        "train": EveryTenth(train, validation=False),
        "val": EveryTenth(train, validation=True),
    }


def characters(splits: Mapping[str, Iterable[str]], limits: Mapping[str, int | None]) -> str:
    """Return the different characters of the text that will be written, in order.

    The order is that of code points.
    """
    distinct: set[str] = set()
    for split, documents in splits.items():
        distinct.update(islice(chain.from_iterable(documents), limits[split]))
    return "".join(sorted(distinct))


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
            f"--dataset {dataset!r} is not the id of a data set: {one_line(error)}"
        ) from None
    except read_errors() as error:
        raise BenchError(
            f"the Hugging Face hub can't be reached ({one_line(error) or type(error).__name__}); "
            f"give a local copy of {dataset!r} with --data-dir DIR, or prepare a text that needs "
            f"no network: nanogpt-bench prepare stdlib"
        ) from None


class DataSet(NamedTuple):
    """The rows of each split of a data set, and facts that identify its version."""

    streams: dict[str, Stream]
    facts: dict[str, Any]


def local_copy(folder: Path, config: str | None) -> DataSet:
    """Return the data set in FOLDER/CONFIG or else in FOLDER.

    Its facts are the sha256 of the files that are read.
    """
    import datasets

    if not folder.is_dir():
        raise BenchError(f"--data-dir {str(folder)!r} is not a folder")
    inner = folder / config if config and (folder / config).is_dir() else folder
    quiet()
    with data_set_errors(f"--data-dir {str(inner)!r}"):
        builder = datasets.load_dataset_builder(str(inner))
        digests = {}
        for split in ("train", *VAL_NAMES):
            for file in builder.config.data_files.get(split, ()):
                path = Path(file)
                digests[path.name] = sha256(path)
        streams = dict(builder.as_streaming_dataset())
    return DataSet(streams, {"kind": "copy", "files": digests})


def quiet() -> None:
    """Silence the progress bars and warnings of datasets; errors are still raised."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)


class HubId(NamedTuple):
    """A version of a data set on the hub; revision None is its newest."""

    name: str
    config: str
    revision: str | None


#: English EU legislation
EURLEX = HubId("coastalcph/lex_glue", "eurlex", None)
#: the same acts in another data set by its authors
EURLEX_FALLBACK = HubId("coastalcph/multi_eurlex", "en", "refs/pr/9")

#: tasks that a data set is prepared for, and how its documents are read
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
    """Prepare English EU legislation as `prepare_hub` does.

    If the hub has not its first data set, a second one is taken.
    """
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "limit": limit,
        "progress": progress,
        "task": task,
        "replace": replace,
    }
    try:
        return prepare_hub(
            out,
            EURLEX.name,
            "text",
            config=EURLEX.config,
            revision=revision,
            data_dir=data_dir,
            **options,
        )
    except NotOnHubError as error:
        # The second data set has other labels.
        if revision is not None or task == "labels":
            raise
        second = EURLEX_FALLBACK
        print(f"{error}; taking {second.name!r} instead", file=sys.stderr)
        return prepare_hub(
            out,
            second.name,
            "text",
            config=second.config,
            revision=second.revision,
            **options,
        )


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
    """Prepare one column of a data set in `out`; return the content of meta.json.

    The training and validation splits become train.bin and val.bin. Without a
    validation split, every tenth document is for validation. With `data_dir` a local
    copy is read and no network is used. `task` is one of `TASKS`: with `labels` the
    documents get the labels in the column `labels`. A corpus of another text is
    replaced only with `replace`.
    """
    if task not in TASKS:
        raise unknown("--task", task, TASKS)
    if find_spec("datasets") is None:
        raise BenchError(
            "prepare hub and prepare eurlex need the package datasets; get it with pip install "
            "'fp8manifold[hub]'"
        )
    check_corpus_folder(out)
    limits = split_limits(limit)
    check_tokenizer(tokenizer)
    data_set = _open_data_set(dataset, config, revision, data_dir)
    source = {
        **data_set.facts,
        "dataset": dataset,
        "config": config,
        "column": column,
        "limit_tokens": limit,
    }
    if task != "text":
        source["task"] = task
    check_replaced(out, source, replace=replace)
    splits = splits_of(data_set.streams, column, f"data set {dataset!r}", TASKS[task])
    labels = label_names_in(data_set.streams["train"]) if task == "labels" else None
    vocabulary = characters(splits, limits) if tokenizer == TokenizerKind.CHAR else ""
    made_tokenizer = make_tokenizer(tokenizer, vocabulary, splits["train"])
    return write_corpus(out, splits, made_tokenizer, source, progress, limit, labels, replace)


def _open_data_set(
    dataset: str, config: str | None, revision: str | None, data_dir: Path | None
) -> DataSet:
    if data_dir is not None:
        return local_copy(data_dir, config)
    import datasets

    commit = find_commit(dataset, revision)
    quiet()
    with data_set_errors(f"data set {dataset!r}"):
        streams = dict(datasets.load_dataset(dataset, config, streaming=True, revision=commit))
    return DataSet(streams, {"kind": "hub", "revision": commit})
