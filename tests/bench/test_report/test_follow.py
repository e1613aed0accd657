"""The page of one run while it trains: drawn beside it, and whole once it has ended, however that was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nanogpt_bench.cli import main
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import to_yaml
from nanogpt_bench.loop.train import run
from nanogpt_bench.report import build

AGAIN = 'http-equiv="refresh"'


@pytest.fixture(scope="module")
def run_dir(tiny: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("followed") / "a"
    run(tiny(train__max_steps=2), folder)
    return folder


def until(path: Path, holds: Callable[[str], bool]) -> str:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if path.is_file() and holds(text := path.read_text(encoding="utf-8")):
            return text
        time.sleep(0.05)
    raise AssertionError(f"{path} did not come to this")


def drawing(run_dir: Path, pause: float) -> subprocess.Popen[bytes]:
    code = f"import pathlib; from nanogpt_bench.report import build; build.follow(pathlib.Path(argv[1]), {pause})"
    return subprocess.Popen([sys.executable, "-c", f"from sys import argv; {code}", run_dir], stdin=subprocess.PIPE)


def test_the_page_follows_the_records_and_is_whole_when_the_run_has_gone(run_dir: Path) -> None:
    page = run_dir / build.FOLDER / "report.html"
    process = drawing(run_dir, 0.1)
    assert process.stdin is not None
    assert AGAIN in until(page, lambda text: AGAIN in text)
    process.stdin.close()  # as the end of the run does, by a kill as well
    assert process.wait(60) == 0
    assert AGAIN not in page.read_text(encoding="utf-8")
    assert list((run_dir / build.FOLDER / "figures").iterdir())


def test_the_context_ends_what_it_began(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    (run_dir / build.FOLDER / "report.html").unlink(missing_ok=True)
    with pytest.raises(KeyboardInterrupt), build.followed(run_dir) as page:
        raise KeyboardInterrupt
    assert started[0].returncode == 0
    assert AGAIN not in page.read_text(encoding="utf-8")


def test_one_that_hangs_is_killed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_PATIENCE", 0.1)
    started = []
    popen = subprocess.Popen

    def hanging(*_: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", "import time; time.sleep(600)"], **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", hanging)
    with build.followed(run_dir):
        pass
    assert started[0].returncode == -signal.SIGKILL


def test_a_folder_without_records_is_waited_for_and_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    process = drawing(tmp_path, 0.01)
    assert process.stdin is not None
    time.sleep(0.5)
    process.stdin.close()
    assert process.wait(60) == 0
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.startswith(f"nanogpt-bench: no page of {tmp_path}: ")
    assert os.listdir(tmp_path) == []


def test_run_says_where_its_page_is(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(to_yaml(tiny(train__max_steps=2)), encoding="utf-8")
    assert main(["run", "mine.yaml", "--page"]) == 0
    assert "page: runs/mine/report/report.html" in capsys.readouterr().err.splitlines()
    assert AGAIN not in Path("runs/mine/report/report.html").read_text(encoding="utf-8")
