"""Labelled documents of a prepared corpus, and batches of them, each a pure function of (seed, step, micro-step)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanogpt_bench.data.batches import Corpus, label_names
from nanogpt_bench.data.write import ENDS, ENDS_TYPE, LABELS
from nanogpt_bench.model.gpt import PADDING
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.files import sha256


@dataclass(frozen=True)
class Documents:
    """The documents of one split: tokens, where each begins and ends, its labels, 0 or 1: uint8 (documents, labels)."""

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    labels: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.ends)

    def lengths(self, which: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
        """Return how many tokens of these documents a batch has: the first ones, at most `block_size`."""
        return np.minimum(self.ends[which] - self.starts[which], block_size)

    def rows(self, which: NDArray[np.int64], block_size: int) -> tuple[Tensor, Tensor]:
        """Return the first tokens of these documents, int64 (B, block_size), and their labels, float32 (B, L).

        Behind a document that is shorter stands `PADDING`.
        """
        tokens = np.full((len(which), block_size), PADDING, dtype=np.int64)
        for row, start, length in zip(tokens, self.starts[which], self.lengths(which, block_size), strict=True):
            row[:length] = self.tokens[start : start + length]
        return torch.from_numpy(tokens), torch.from_numpy(self.labels[which].astype(np.float32))


def documents_of(corpus: Corpus, split: str) -> Documents:
    """Return the labelled documents of one split of a corpus.

    Raises:
        BenchError: a corpus without labels, or files that disagree with meta.json or with each other.
    """
    names, facts = label_names(corpus), corpus.meta["splits"][split]
    ends = _read(corpus.folder / ENDS.format(split), ENDS_TYPE, facts.get("ends_sha256")).astype(np.int64)
    labels = _read(corpus.folder / LABELS.format(split), np.dtype(np.uint8), facts.get("labels_sha256"))
    tokens = corpus.train if split == "train" else corpus.val
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
    if not len(ends) or (ends <= starts).any() or ends[-1] != len(tokens) or len(labels) != len(ends) * len(names):
        raise BenchError(
            f"{str(corpus.folder)!r}: the ends and labels of {split!r} are not those of its tokens; prepare it again"
        )
    if labels.max() > 1:
        raise BenchError(
            f"{str(corpus.folder)!r}: a label of {split!r} is {labels.max()}, not 0 or 1; prepare it again"
        )
    return Documents(tokens, starts, ends, labels.reshape(len(ends), len(names)))


def _read(path: Path, kind: np.dtype[Any], digest: Any) -> NDArray[Any]:
    if not path.is_file():
        raise BenchError(f"{str(path)!r} does not exist; prepare the corpus again")
    if path.stat().st_size % kind.itemsize or sha256(path) != digest:
        raise BenchError(f"{str(path)!r} does not have the sha256 that meta.json gives; prepare the corpus again")
    return np.fromfile(path, dtype=kind)


def drawn(documents: Documents, size: int, *, seed: int, step: int, micro_step: int = 0) -> NDArray[np.int64]:
    """Return the numbers of `size` documents, drawn uniformly with replacement as `batches.batch` draws positions."""
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, micro_step, step]))
    return generator.integers(0, len(documents), size=size)


def held_out(documents: Documents, count: int, size: int, *, seed: int) -> list[NDArray[np.int64]]:
    """Return the numbers of `count` batches of different documents that depend on `seed` only; fewer where they end."""
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 1, 0, 0]))
    order = generator.permutation(len(documents))[: count * size]
    return [order[begin : begin + size] for begin in range(0, len(order), size)]
