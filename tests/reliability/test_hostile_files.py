"""Files that attack, met by real commands in a child process: nothing is executed, memory stays bounded, one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hostile_files import CANARY, MIB, REPORT, Attack, attacks, lay_run

from nanogpt_bench.data import prepare_text

#: as commands that meet nothing hostile: what they grow by is theirs, not the attack's
SMALL = ("--model.n_layer=1", "--model.n_head=1", "--model.n_embd=8", "--model.block_size=8", "--eval.batches=1")
HARMLESS = (
    REPORT,
    ("sweep", "missing.yaml"),
    ("run", "bf16_baseline", "--data.dir=corpus", "--train.max_steps=1", *SMALL),
    ("run", "bf16_baseline", "--data.dir=missing"),
)


class Target:
    """The process whose children are attacked."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("attacked.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self._send([{"words": words, "folder": str(folder)} for words in HARMLESS])
        assert self._receive() == "ready\n"
        self.harmless = self.attack(folder, REPORT)["grown"]

    def attack(self, folder: Path, words: tuple[str, ...]) -> dict[str, Any]:
        self._send({"words": words, "folder": str(folder)})
        answer: dict[str, Any] = json.loads(self._receive())
        return answer

    def _send(self, content: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(content) + "\n")
        self._process.stdin.flush()

    def _receive(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("harmless")
    (folder / "corpus").symlink_to(corpus)
    lay_run(folder / "run")
    process = Target(folder)
    yield process
    process.close()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text("a line of text\n" * 500)
    prepare_text(folder / "a.txt", folder / "prepared", "byte")
    return folder / "prepared"


def bytes_under(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def assert_harmless(attack: Attack, folder: Path, target: Target) -> int:
    """Run an attack and return by how much memory grew beyond what the command itself takes."""
    size = bytes_under(folder)
    answer = target.attack(folder, attack.words)
    assert answer["executions"] == [], attack.name
    assert not list(folder.rglob(CANARY)), attack.name
    assert answer["code"] in attack.codes, f"{attack.name}: {answer}"
    assert "Traceback" not in answer["said"], f"{attack.name}: {answer['said']}"
    assert answer["code"] == 0 or len(answer["said"].splitlines()) == 1, f"{attack.name}: {answer['said']}"
    page = folder / "page" / "report.html"
    assert not page.exists() or "hunter2" not in page.read_text(encoding="utf-8")
    grown: int = answer["grown"] - (target.harmless if attack.words == REPORT else 0)
    assert grown <= 2 * size + 64 * MIB, f"{attack.name}: grew by {grown / MIB:.0f} MiB over {size / MIB:.1f} MiB"
    return grown


def test_files_that_attack_are_refused(
    tmp_path: Path, corpus: Path, target: Target, full: bool, tally: Callable[..., None]
) -> None:
    grown = {}
    for place, attack in enumerate(attacks(full)):
        folder = tmp_path / str(place)
        folder.mkdir()
        (folder / "corpus").symlink_to(corpus)
        attack.lay(folder)
        grown[attack.name] = assert_harmless(attack, folder, target)
    assert len(grown) >= (50 if full else 20)
    worst = max(grown, key=lambda name: grown[name])
    tally("files that attack", len(grown), f"0 executions, most memory {grown[worst] / MIB:.0f} MiB: {worst}")


def test_an_execution_would_be_seen(tmp_path: Path) -> None:
    code = (
        "import contextlib, io, json, os, sys; sys.path.insert(0, sys.argv[1]); import attacked\n"
        "def bad(words):\n    exec('1'); os.system('true'); return 0\n"
        "found = attacked._attacked(bad, {'folder': sys.argv[2], 'words': []})['executions']\n"
        "print(json.dumps([event.split()[0] for event in found]))"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)]
    seen = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert {"exec", "compile", "os.system"} <= set(seen)
