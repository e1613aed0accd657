"""Parquet files as the hub keeps them."""

from pathlib import Path

import pytest


def write_parquet(path: Path, texts: list[str | None]) -> None:
    """Write a file as lex_glue's are: a text and the numbers of its labels a row."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    labels = pyarrow.array([[0]] * len(texts), pyarrow.list_(pyarrow.int64()))
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(texts, pyarrow.string()), "labels": labels}), path)


@pytest.fixture(scope="session")
def parquet():
    """The function that writes texts into a parquet file."""
    return write_parquet
