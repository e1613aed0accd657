"""Prepared corpora, and batches of windows or documents, each a pure function of (seed,
step, micro-step).
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

from nanogpt_bench.config.schema import Config
from nanogpt_bench.data.tokenizers import stored_as, tokenizer_from_meta
from nanogpt_bench.model.gpt import PADDING
from nanogpt_bench.system.errors import BenchError, counted, one_line
from nanogpt_bench.system.files import sha256
from nanogpt_bench.system.untrusted import read_json

#: files beside SPLIT.bin: the ends of its documents, and their labels
ENDS, LABELS = "{}.ends.bin", "{}.labels.bin"
ENDS_TYPE = np.dtype("<u8")
SPLITS = ("train", "val")
#: further digests in meta.json, of a split of labelled documents
_OF_LABELS = ("ends_sha256", "labels_sha256")


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: token arrays, uint16 or for a large vocabulary uint32, mapped
    from disk; and meta.json.
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
        """Tokens per UTF-8 byte of the validation text; turns nats per token into bits
        per byte.
        """
        counts = self.meta["splits"]["val"]
        return float(counts["tokens"]) / float(counts["bytes"])


def digests_of(splits: Any) -> dict[str, Any]:
    """Return the digests of a corpus's tokens and labels, from `splits` in its
    meta.json.

    >>> digests_of({"train": {"sha256": "ab", "labels_sha256": "cd"}})
    {'train': 'ab', 'val': None, 'train.labels_sha256': 'cd'}
    """
    parts = splits if isinstance(splits, dict) else {}
    known = {split: parts[split] if isinstance(parts.get(split), dict) else {} for split in SPLITS}
    of_labels = {
        f"{name}.{key}": part[key]
        for name, part in known.items()
        for key in _OF_LABELS
        if key in part
    }
    return {name: part.get("sha256") for name, part in known.items()} | of_labels


def digests_in(folder: Path) -> dict[str, Any]:
    """Return the digests of a corpus's tokens and labels, as its folder has them now."""
    return digests_of(read_json(folder / "meta.json", times=8)["splits"])


class TextChangedError(BenchError):
    """The error of a corpus that has been replaced while runs were to train on it."""


def refuse_changed(texts: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse corpora that have other digests than `texts` gives by their folders."""
    for folder, digests in texts.items():
        try:
            now = digests_in(Path(folder))
        except (OSError, ValueError, KeyError):
            now = {}
        if now != digests:
            raise TextChangedError(
                f"data.dir: {folder!r} has changed since this sweep began (its sha256 differs)"
            )


def load_corpus(folder: Path, block_size: int) -> Corpus:
    """Open a prepared corpus; refuse files that disagree with meta.json or are shorter
    than a block.
    """
    meta = _read_meta(folder)
    arrays = {split: _open_split(folder, split, meta, block_size) for split in SPLITS}
    return Corpus(folder, arrays["train"], arrays["val"], meta)


def open_corpus(config: Config) -> Corpus:
    """Open the corpus of a resolved configuration, with the first `data.train_tokens`
    of its training tokens.
    """
    classify = config.task == "classify"  # documents may be shorter than a block
    corpus = load_corpus(Path(config.data.dir), 0 if classify else config.model.block_size or 0)
    if classify:
        label_names(corpus)
    count, block = config.data.train_tokens, config.model.block_size or 0
    if count is None:
        return corpus
    if not block < count <= len(corpus.train):
        raise BenchError(
            f"data.train_tokens: {count} is not allowed with {config.data.dir!r} and a block of "
            f"{block}; give {block + 1} to {len(corpus.train)}"
        )
    return replace(corpus, train=corpus.train[:count])


def label_names(corpus: Corpus) -> list[str]:
    """Return the names of a corpus's labels; refuse a corpus without labels."""
    names = corpus.meta.get("labels")
    if names is None:
        raise BenchError(
            f"task: 'classify' needs documents with labels, which data.dir {str(corpus.folder)!r} "
            f"does not have; "
            "prepare some with: nanogpt-bench prepare eurlex --task labels"
        )
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise BenchError(
            f"{str(corpus.folder / 'meta.json')!r} is damaged (labels); prepare the corpus again"
        )
    return names


def open_also(config: Config, corpus: Corpus) -> Corpus | None:
    """Open the text of `eval.also`, refusing one of another tokenizer; None without the
    setting.
    """
    if config.eval.also is None:
        return None
    try:
        also = load_corpus(Path(config.eval.also), config.model.block_size or 0)
    except BenchError as error:
        raise BenchError(str(error).replace("data.dir", "eval.also")) from None
    same = ("tokenizer", "vocab_size", "characters", "pairs")
    if [also.meta.get(key) for key in same] != [corpus.meta.get(key) for key in same]:
        raise BenchError(
            f"eval.also: {config.eval.also!r} has other tokens than {str(corpus.folder)!r}"
        )
    return also


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    if not path.is_file():
        raise _no_meta(folder)
    try:
        meta = read_json(path)
        vocab_size, tokenizer = int(meta["vocab_size"]), tokenizer_from_meta(meta)
        if not 1 <= vocab_size <= 2**31:
            raise ValueError(f"vocab_size {vocab_size}; 1 to {2**31} are allowed")
        for split in SPLITS:
            facts = meta["splits"][split]
            known = {
                "tokens": int(facts["tokens"]),
                "bytes": int(facts["bytes"]),
                "sha256": facts["sha256"],
            }
            if known["bytes"] < 1:
                raise ValueError(f"splits.{split}.bytes {known['bytes']}; at least 1 is needed")
    except BenchError as error:
        raise BenchError(f"{str(path)!r}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise BenchError(
            f"{str(path)!r} is damaged ({one_line(error)}); prepare the corpus again"
        ) from None
    if tokenizer.vocab_size != vocab_size:
        raise BenchError(
            f"{str(path)!r} gives a vocabulary of {vocab_size}, its {tokenizer.name} tokenizer has "
            f"{tokenizer.vocab_size}; prepare the corpus again"
        )
    return dict(meta)


def _no_meta(folder: Path) -> BenchError:
    """Return the error of a folder without meta.json; its advice never overwrites files
    that are in it.
    """
    if folder.is_symlink() and not folder.exists():
        return BenchError(
            f"data.dir {str(folder)!r} is a link to nothing; mend it, or give another folder"
        )
    said = f"data.dir {str(folder)!r} has no meta.json"
    if folder.exists() and not folder.is_dir():
        return BenchError(f"{said}: it is a file; give a folder that prepare wrote")
    there = sorted(item.name for item in folder.iterdir()) if folder.is_dir() else []
    if there:
        said = f"{said} and holds {there[0]!r}, which prepare did not write; prepare the text into a folder of its own"
        if "train.bin" not in there:
            return BenchError(f"{said}: nanogpt-bench prepare text --input FILE --out DIR")
        command = f"nanogpt-bench prepare nanogpt --input {shlex.quote(str(folder))} --tokenizer gpt2 --out DIR"
        return BenchError(f"{said} with its tokenizer, gpt2, byte or char: {command}")
    command = f"nanogpt-bench prepare stdlib --out {shlex.quote(str(folder))}"
    if folder.exists() or folder.is_absolute():
        return BenchError(f"{said}; prepare it with: {command}")
    return BenchError(
        f"data.dir {str(folder)!r} does not exist in {str(Path.cwd())!r}: start where it is, or "
        f"give its whole path as --data.dir; this prepares a new one: {command}"
    )


def _open_split(folder: Path, split: str, meta: dict[str, Any], block_size: int) -> NDArray[Any]:
    path = folder / f"{split}.bin"
    if not path.is_file():
        raise BenchError(f"{str(path)!r} does not exist; prepare the corpus again")
    size, stored = path.stat().st_size, stored_as(int(meta["vocab_size"]))
    if size % stored.itemsize:
        odd = (
            "an odd number; uint16 tokens take two"
            if stored.itemsize == 2
            else "uint32 tokens take four"
        )
        raise BenchError(f"{str(path)!r} has {counted(size, 'byte')}, {odd} each")
    if size == 0:
        raise BenchError(f"{str(path)!r} is empty; prepare the corpus again")
    tokens = np.memmap(path, dtype=stored, mode="r")
    expected = int(meta["splits"][split]["tokens"])
    if len(tokens) != expected:
        raise BenchError(
            f"{str(path)!r} has {counted(len(tokens), 'token')}, meta.json says {expected}; "
            f"prepare the corpus again"
        )
    if len(tokens) <= block_size:
        raise BenchError(
            f"{str(path)!r} has {counted(len(tokens), 'token')}, a block of {block_size} needs "
            f"{block_size + 1}; "
            "give a longer text or a smaller --model.block_size"
        )
    if int(tokens.max()) >= int(meta["vocab_size"]):
        raise BenchError(
            f"{str(path)!r} holds token {tokens.max()}, the vocabulary has {meta['vocab_size']}"
        )
    if sha256(path) != meta["splits"][split]["sha256"]:
        raise BenchError(
            f"{str(path)!r} does not have the sha256 that meta.json gives; prepare the corpus again"
        )
    return tokens


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
    """Return inputs and targets, int64 (size, block_size); the targets are the inputs
    shifted by one.

    Positions are drawn uniformly with replacement from a counter-based generator keyed
    by `seed` at the counter (step, micro_step, rank): resuming needs no saved state,
    and no batch depends on another.

    >>> x, y = batch(np.arange(100, dtype=np.uint16), 2, 4, seed=0, step=0)
    >>> bool((x[:, 1:] == y[:, :-1]).all())
    True
    """
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, rank, micro_step, step]))
    starts = generator.integers(0, len(tokens) - block_size, size=size)
    drawn = torch.from_numpy(tokens[starts[:, None] + np.arange(block_size + 1)].astype(np.int64))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def eval_batches(
    tokens: NDArray[Any], count: int, size: int, block_size: int, *, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """Return `count` validation batches that depend on `seed` only."""
    return [
        batch(tokens, size, block_size, seed=seed, step=0, micro_step=index, rank=1)
        for index in range(count)
    ]


@dataclass(frozen=True)
class Documents:
    """The documents of one split: tokens, start and end of each, and labels, 0 or 1,
    uint8 (documents, labels).
    """

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    labels: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.ends)

    def lengths(self, which: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
        """Return how many tokens of each of these documents a batch takes: at most
        `block_size`.
        """
        return np.minimum(self.ends[which] - self.starts[which], block_size)

    def rows(self, which: NDArray[np.int64], block_size: int) -> tuple[Tensor, Tensor]:
        """Return the first tokens, int64 (B, block_size), padded by `PADDING`; and the
        labels, float32 (B, L).
        """
        tokens = np.full((len(which), block_size), PADDING, dtype=np.int64)
        for row, start, length in zip(
            tokens, self.starts[which], self.lengths(which, block_size), strict=True
        ):
            row[:length] = self.tokens[start : start + length]
        return torch.from_numpy(tokens), torch.from_numpy(self.labels[which].astype(np.float32))


def documents_of(corpus: Corpus, split: str) -> Documents:
    """Return the labelled documents of one split of a corpus; refuse files that
    disagree with each other.
    """
    names, facts = label_names(corpus), corpus.meta["splits"][split]
    ends = _read(corpus.folder / ENDS.format(split), ENDS_TYPE, facts.get("ends_sha256")).astype(
        np.int64
    )
    labels = _read(
        corpus.folder / LABELS.format(split), np.dtype(np.uint8), facts.get("labels_sha256")
    )
    tokens = corpus.train if split == "train" else corpus.val
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
    if (
        not len(ends)
        or (ends <= starts).any()
        or ends[-1] != len(tokens)
        or len(labels) != len(ends) * len(names)
    ):
        raise BenchError(
            f"{str(corpus.folder)!r}: the ends and labels of {split!r} are not those of its "
            f"tokens; prepare it again"
        )
    if labels.max() > 1:
        raise BenchError(
            f"{str(corpus.folder)!r}: a label of {split!r} is {labels.max()}, not 0 or 1; prepare "
            f"it again"
        )
    return Documents(tokens, starts, ends, labels.reshape(len(ends), len(names)))


def _read(path: Path, kind: np.dtype[Any], digest: Any) -> NDArray[Any]:
    if not path.is_file():
        raise BenchError(f"{str(path)!r} does not exist; prepare the corpus again")
    if path.stat().st_size % kind.itemsize or sha256(path) != digest:
        raise BenchError(
            f"{str(path)!r} does not have the sha256 that meta.json gives; prepare the corpus again"
        )
    return np.fromfile(path, dtype=kind)


def drawn(
    documents: Documents, size: int, *, seed: int, step: int, micro_step: int = 0
) -> NDArray[np.int64]:
    """Return the indices of `size` documents, drawn uniformly with replacement as
    `batch` draws positions.
    """
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, micro_step, step]))
    return generator.integers(0, len(documents), size=size)


def held_out(documents: Documents, count: int, size: int, *, seed: int) -> list[NDArray[np.int64]]:
    """Return document indices of `count` batches without repetition, by `seed` only;
    fewer if the documents run out.
    """
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 1, 0, 0]))
    order = generator.permutation(len(documents))[: count * size]
    return [order[begin : begin + size] for begin in range(0, len(order), size)]
