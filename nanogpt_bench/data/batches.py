"""Prepared corpora, and batches of windows or documents.

A corpus is a folder that `data.write` wrote:

    meta.json              tokenizer, and for each split its counts and digests
    train.bin, val.bin     tokens, uint16 or uint32
    SPLIT.ends.bin         of labelled documents: where each ends, uint64
    SPLIT.labels.bin       of labelled documents: 0 or 1 for every label, uint8

Opening one checks all files against meta.json. A batch is a pure function of (seed,
step, micro-step): a counter-based generator draws it, so that resuming needs no saved
state, and no batch depends on another.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanogpt_bench.config.schema import Config, Task
from nanogpt_bench.data.tokenizers import token_dtype, tokenizer_from_meta
from nanogpt_bench.model.gpt import PADDING
from nanogpt_bench.system.errors import BenchError, counted, one_line
from nanogpt_bench.system.files import sha256
from nanogpt_bench.system.untrusted import read_json

#: files beside SPLIT.bin: the ends of its documents, and their labels
ENDS = "{}.ends.bin"
LABELS = "{}.labels.bin"
ENDS_TYPE = np.dtype("<u8")
SPLITS = ("train", "val")
#: further digests in meta.json, of a split of labelled documents
_OF_LABELS = ("ends_sha256", "labels_sha256")


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: token arrays, mapped from disk, and meta.json.

    Tokens are uint16, of a large vocabulary uint32.
    """

    folder: Path
    train: NDArray[Any]
    val: NDArray[Any]
    meta: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.meta["vocab_size"])

    @property
    def val_tokens_per_byte(self) -> float:
        """Tokens per UTF-8 byte of the validation text.

        It turns nats per token into bits per byte.
        """
        counts = self.meta["splits"]["val"]
        return float(counts["tokens"]) / float(counts["bytes"])


def digests_of(splits: Any) -> dict[str, Any]:
    """Return the digests of a corpus's tokens and labels, from `splits` in meta.json.

    >>> digests_of({"train": {"sha256": "ab", "labels_sha256": "cd"}})
    {'train': 'ab', 'val': None, 'train.labels_sha256': 'cd'}
    """
    facts_by_split = splits if isinstance(splits, dict) else {}
    of_tokens = {}
    of_labels = {}
    for split in SPLITS:
        facts = facts_by_split.get(split)
        if not isinstance(facts, dict):
            facts = {}
        of_tokens[split] = facts.get("sha256")
        for key in _OF_LABELS:
            if key in facts:
                of_labels[f"{split}.{key}"] = facts[key]
    return of_tokens | of_labels


def digests_in(folder: Path) -> dict[str, Any]:
    """Return the digests of a corpus's tokens and labels in its folder's meta.json."""
    return digests_of(read_json(folder / "meta.json", times=8)["splits"])


class TextChangedError(BenchError):
    """The error of a corpus that has been replaced while runs were to train on it."""


def refuse_changed(texts: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse corpora that have other digests than `texts` gives by their folders."""
    for folder, digests in texts.items():
        try:
            present_digests = digests_in(Path(folder))
        except (OSError, ValueError, KeyError):
            present_digests = {}
        if present_digests != digests:
            raise TextChangedError(
                f"data.dir: {folder!r} has changed since this sweep began (its sha256 differs)"
            )


def load_corpus(folder: Path, block_size: int, meta: dict[str, Any] | None = None) -> Corpus:
    """Open a prepared corpus.

    Files that disagree with meta.json, or are shorter than a block, are refused. `meta`
    is what `read_meta` has returned, if that was called.
    """
    if meta is None:
        meta = read_meta(folder)
    train = _open_split(folder, "train", meta, block_size)
    val = _open_split(folder, "val", meta, block_size)
    return Corpus(folder, train, val, meta)


def open_corpus(config: Config, meta: dict[str, Any] | None = None) -> Corpus:
    """Open the corpus of a resolved configuration.

    It has the first `data.train_tokens` of its training tokens, all without the
    setting. `meta` is what `read_meta` has returned, if that was called.
    """
    block = config.model.block_size or 0
    if config.task == Task.CLASSIFY:
        # Documents may be shorter than a block.
        corpus = load_corpus(Path(config.data.dir), 0, meta)
        label_names(corpus)
    else:
        corpus = load_corpus(Path(config.data.dir), block, meta)
    count = config.data.train_tokens
    if count is None:
        return corpus
    if not block < count <= len(corpus.train):
        raise BenchError(
            f"data.train_tokens: {count} is not allowed with the text {config.data.dir!r} and "
            f"model.block_size {block}; give {block + 1} to {len(corpus.train)}"
        )
    return replace(corpus, train=corpus.train[:count])


def label_names(corpus: Corpus) -> list[str]:
    """Return the names of a corpus's labels; refuse a corpus without labels."""
    names = corpus.meta.get("labels")
    if names is None:
        raise BenchError(
            f"task: 'classify' needs documents with labels, but data.dir {str(corpus.folder)!r} "
            "has none; prepare some with: nanogpt-bench prepare eurlex --task labels"
        )
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise BenchError(
            f"{str(corpus.folder / 'meta.json')!r} is damaged: its labels are not a list of names; "
            "prepare the corpus again"
        )
    return names


def open_also(config: Config, corpus: Corpus) -> Corpus | None:
    """Open the text of `eval.also`; None without the setting.

    A text of another tokenizer is refused.
    """
    if config.eval.also is None:
        return None
    try:
        also = load_corpus(Path(config.eval.also), config.model.block_size or 0)
    except BenchError as error:
        # `load_corpus` names the usual setting.
        raise BenchError(str(error).replace("data.dir", "eval.also")) from None
    for key in ("tokenizer", "vocab_size", "characters", "pairs"):
        if also.meta.get(key) != corpus.meta.get(key):
            raise BenchError(
                f"eval.also: {config.eval.also!r} is tokenized differently from "
                f"{str(corpus.folder)!r}"
            )
    return also


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the content of a corpus's meta.json; refuse one that is missing or damaged."""
    path = folder / "meta.json"
    if not path.is_file():
        raise _no_meta(folder)
    try:
        meta = read_json(path)
        vocab_size = int(meta["vocab_size"])
        tokenizer = tokenizer_from_meta(meta)
        if not 1 <= vocab_size <= 2**31:
            raise ValueError(f"vocab_size is {vocab_size}; 1 to {2**31} are allowed")
        for split in SPLITS:
            _check_split_facts(meta["splits"][split], split)
    except BenchError as error:
        raise BenchError(f"{str(path)!r}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise BenchError(
            f"{str(path)!r} is damaged ({one_line(error)}); prepare the corpus again"
        ) from None
    if tokenizer.vocab_size != vocab_size:
        raise BenchError(
            f"{str(path)!r} gives a vocabulary of {vocab_size}, but its {tokenizer.name} tokenizer "
            f"has {tokenizer.vocab_size}; prepare the corpus again"
        )
    return dict(meta)


def _check_split_facts(facts: Mapping[str, Any], split: str) -> None:
    """Raise ValueError, KeyError or TypeError for what meta.json lacks of a split."""
    counts = {name: int(facts[name]) for name in ("tokens", "bytes")}
    if "sha256" not in facts:
        raise KeyError("sha256")
    if counts["bytes"] < 1:
        raise ValueError(f"splits.{split}.bytes is {counts['bytes']}; at least 1 is needed")


def _no_meta(folder: Path) -> BenchError:
    """Return the error of a folder without meta.json.

    Its advice never overwrites files that are in the folder.
    """
    if folder.is_symlink() and not folder.exists():
        return BenchError(
            f"data.dir {str(folder)!r} is a broken link; mend it, or give another folder"
        )
    problem = f"data.dir {str(folder)!r} has no meta.json"
    if folder.exists() and not folder.is_dir():
        return BenchError(f"{problem}: it is a file; give a folder that prepare wrote")
    names = sorted(item.name for item in folder.iterdir()) if folder.is_dir() else []
    quoted = shlex.quote(str(folder))
    if names:
        problem = f"{problem} but holds {names[0]!r}, which prepare did not write"
        if "train.bin" not in names:
            return BenchError(
                f"{problem}; prepare its text into a folder of its own: nanogpt-bench prepare text "
                "--input FILE --out DIR"
            )
        command = f"nanogpt-bench prepare nanogpt --input {quoted} --tokenizer gpt2 --out DIR"
        return BenchError(
            f"{problem}; prepare it into a folder of its own with its tokenizer (gpt2, byte or "
            f"char): {command}"
        )
    command = f"nanogpt-bench prepare stdlib --out {quoted}"
    if folder.exists() or folder.is_absolute():
        return BenchError(f"{problem}; prepare it with: {command}")
    return BenchError(
        f"data.dir {str(folder)!r} does not exist in {str(Path.cwd())!r}; start in the folder "
        f"where it is, or give its whole path as --data.dir; to prepare a new one: {command}"
    )


def _open_split(folder: Path, split: str, meta: dict[str, Any], block_size: int) -> NDArray[Any]:
    path = folder / f"{split}.bin"
    facts = meta["splits"][split]
    if not path.is_file():
        raise BenchError(f"{str(path)!r} does not exist; prepare the corpus again")
    size = path.stat().st_size
    dtype = token_dtype(int(meta["vocab_size"]))
    if size % dtype.itemsize:
        widths = {2: "uint16 tokens take two", 4: "uint32 tokens take four"}
        raise BenchError(
            f"{str(path)!r} has {counted(size, 'byte')}, but {widths[dtype.itemsize]} each"
        )
    if size == 0:
        raise BenchError(f"{str(path)!r} is empty; prepare the corpus again")
    tokens = np.memmap(path, dtype=dtype, mode="r")
    expected = int(facts["tokens"])
    if len(tokens) != expected:
        raise BenchError(
            f"{str(path)!r} has {counted(len(tokens), 'token')}, but meta.json says {expected}; "
            "prepare the corpus again"
        )
    if len(tokens) <= block_size:
        raise BenchError(
            f"{str(path)!r} has {counted(len(tokens), 'token')}, but a block of {block_size} needs "
            f"{block_size + 1}; give a longer text or a smaller --model.block_size"
        )
    if int(tokens.max()) >= int(meta["vocab_size"]):
        raise BenchError(
            f"{str(path)!r} holds token {tokens.max()}, but the vocabulary has {meta['vocab_size']}"
        )
    if sha256(path) != facts["sha256"]:
        raise _wrong_digest(path)
    return tokens


def _wrong_digest(path: Path) -> BenchError:
    return BenchError(
        f"{str(path)!r} has another sha256 than meta.json gives; prepare the corpus again"
    )


def _generator(
    seed: int, *, step: int = 0, micro_step: int = 0, rank: int = 0
) -> np.random.Generator:
    """Return the generator of a batch; each takes its numbers from another counter."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, rank, micro_step, step]))


#: the rank that draws validation batches, so that none is a training batch
_VALIDATION_RANK = 1


def batch(
    tokens: NDArray[Any],
    size: int,
    block_size: int,
    *,
    seed: int,
    step: int,
    micro_step: int = 0,
    rank: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, int64 (size, block_size), targets one token later.

    Positions are drawn uniformly with replacement from a counter-based generator keyed
    by `seed` at the counter (step, micro_step, rank).

    >>> x, y = batch(np.arange(100, dtype=np.uint16), 2, 4, seed=0, step=0)
    >>> bool((x[:, 1:] == y[:, :-1]).all())
    True
    """
    generator = _generator(seed, step=step, micro_step=micro_step, rank=rank)
    starts = generator.integers(0, len(tokens) - block_size, size=size)
    positions = starts[:, None] + np.arange(block_size + 1)
    windows = torch.from_numpy(tokens[positions].astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def eval_batches(
    tokens: NDArray[Any], count: int, size: int, block_size: int, *, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """Return `count` validation batches that depend on `seed` only."""
    batches = []
    for index in range(count):
        pair = batch(
            tokens,
            size,
            block_size,
            seed=seed,
            step=0,
            micro_step=index,
            rank=_VALIDATION_RANK,
        )
        batches.append(pair)
    return batches


@dataclass(frozen=True)
class Documents:
    """The labelled documents of one split."""

    #: of all documents
    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    #: 0 or 1, (documents, labels)
    labels: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.ends)

    def lengths(self, indices: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
        """Return how many tokens of each document a batch takes, at most a block."""
        return np.minimum(self.ends[indices] - self.starts[indices], block_size)

    def rows(self, indices: NDArray[np.int64], block_size: int) -> tuple[Tensor, Tensor]:
        """Return the first tokens and the labels of documents.

        Tokens are int64 (B, block_size), padded by `PADDING`; labels float32 (B, L).
        """
        rows = np.full((len(indices), block_size), PADDING, dtype=np.int64)
        starts = self.starts[indices]
        lengths = self.lengths(indices, block_size)
        for row, start, length in zip(rows, starts, lengths, strict=True):
            row[:length] = self.tokens[start : start + length]
        labels = self.labels[indices].astype(np.float32)
        return torch.from_numpy(rows), torch.from_numpy(labels)


def documents_of(corpus: Corpus, split: str) -> Documents:
    """Return the labelled documents of one split of a corpus.

    Files that disagree with each other are refused.
    """
    names = label_names(corpus)
    facts = corpus.meta["splits"][split]
    ends_file = corpus.folder / ENDS.format(split)
    labels_file = corpus.folder / LABELS.format(split)
    ends = _read_array(ends_file, ENDS_TYPE, facts.get("ends_sha256")).astype(np.int64)
    labels = _read_array(labels_file, np.dtype(np.uint8), facts.get("labels_sha256"))
    tokens = corpus.train if split == "train" else corpus.val
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
    is_damaged = (
        not len(ends)
        or (ends <= starts).any()
        or ends[-1] != len(tokens)
        or len(labels) != len(ends) * len(names)
    )
    if is_damaged:
        raise BenchError(
            f"{str(corpus.folder)!r}: the documents and labels of {split!r} do not match its "
            "tokens; prepare it again"
        )
    if labels.max() > 1:
        raise BenchError(
            f"{str(corpus.folder)!r}: {split!r} has the label {labels.max()}; only 0 and 1 are "
            "allowed; prepare it again"
        )
    return Documents(tokens, starts, ends, labels.reshape(len(ends), len(names)))


def _read_array(path: Path, kind: np.dtype[Any], digest: Any) -> NDArray[Any]:
    if not path.is_file():
        raise BenchError(f"{str(path)!r} does not exist; prepare the corpus again")
    if path.stat().st_size % kind.itemsize or sha256(path) != digest:
        raise _wrong_digest(path)
    return np.fromfile(path, dtype=kind)


def draw_documents(
    documents: Documents, size: int, *, seed: int, step: int, micro_step: int = 0
) -> NDArray[np.int64]:
    """Return indices of `size` documents, uniform with replacement, as in `batch`."""
    generator = _generator(seed, step=step, micro_step=micro_step)
    return generator.integers(0, len(documents), size=size)


def held_out_batches(
    documents: Documents, count: int, size: int, *, seed: int
) -> list[NDArray[np.int64]]:
    """Return document indices of `count` batches without repetition, by `seed` only.

    There are fewer batches if the documents run out.
    """
    order = _generator(seed, rank=_VALIDATION_RANK).permutation(len(documents))
    indices = order[: count * size]
    return [indices[start : start + size] for start in range(0, len(indices), size)]
