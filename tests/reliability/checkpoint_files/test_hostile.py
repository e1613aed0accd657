"""A checkpoint made by someone else is read or refused: nothing in it runs, and its size bounds the memory it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_checkpoints import CASES, MIB, WHOLE
from watched import watched

from nanogpt_bench.checkpoint import BrokenCheckpoint, read, verify

#: what reading a checkpoint must never lead to, beside what no reader may
FORBIDDEN = ("exec", "compile", "import", "marshal.loads", "code.__new__", "os.rename", "os.remove")


def said_of(look: Callable[[Path], Any], folder: Path) -> str:
    try:
        look(folder)
    except BrokenCheckpoint as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", CASES)
def test_each_is_refused_in_one_line_or_read(
    case: str, tmp_path: Path, attacks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(case)
    folder.mkdir()
    CASES[case](folder)
    size = sum(path.lstat().st_size for path in folder.iterdir())
    assert said_of(verify, Path("nowhere"))  # which imports what it needs
    found = watched(lambda: [said_of(look, folder) for look in (verify, read)], FORBIDDEN)
    assert (found.raised, found.executions) == ("", [])
    assert [path.name for path in tmp_path.iterdir()] == [case]
    assert found.grown <= 2 * size + 64 * MIB
    attacks.append(found.grown)
    for said in found.returned:
        assert (said == "") == (case in WHOLE), said
        assert "\n" not in said
        assert len(said) < 400
        assert not said or said.startswith(f"checkpoint {case!r}: ")
