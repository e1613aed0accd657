"""The bar of a preparation: over the characters where they are known, over the tokens where these are limited."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    """What tells the bar how far the writing has come."""

    def __call__(self, *, characters: int, tokens: int) -> None: ...


@contextmanager
def progress_bar(
    splits: Mapping[str, Iterable[str]], limits: Mapping[str, int | None], show: bool
) -> Iterator[Advance]:
    """Show a bar on standard error while its block runs, and yield the function that moves it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    by_tokens = None not in limits.values()
    total = sum(limit or 0 for limit in limits.values()) if by_tokens else _characters(splits.values())
    columns = (TextColumn("tokenizing"), BarColumn(), TextColumn("{task.fields[tokens]:,} tokens"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show, transient=True) as progress:
        task, written = progress.add_task("", total=total, tokens=0), 0

        def advance(*, characters: int, tokens: int) -> None:
            nonlocal written
            written += tokens
            progress.update(task, advance=tokens if by_tokens else characters, tokens=written)

        yield advance


def _characters(splits: Iterable[Iterable[str]]) -> int | None:
    """Return the characters of all documents, None where they come in a stream."""
    lists = [documents for documents in splits if isinstance(documents, Sequence)]
    whole = len(lists) == len(list(splits))
    return sum(len(text) for documents in lists for text in documents) if whole else None
