"""Two processes on one folder: the second is refused in one line, and a killed one keeps nobody out."""

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from forked import finish, said, start
from small_runs import traces, words

from nanogpt_bench.cli import main
from nanogpt_bench.commands import run as run_command
from nanogpt_bench.system.files import LOCK, locked, new_folder

KIND = "fp8 stochastic"
REFUSED = "nanogpt-bench: error: run folder 'runs/r' is in use by another process; wait for its end\n"


def test_a_run_folder_belongs_to_one_process_until_it_ends(small_corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_dir, line = Path("runs/r"), words(KIND, small_corpus)
    endless = words(KIND, small_corpus, {"train.max_steps": 1000000})
    assert main(line) == 0
    whole = traces(run_dir)
    os.rename("runs", "before")
    pid = start(tmp_path, lambda: main(endless))
    try:
        end = time.monotonic() + 60
        while not list(run_dir.glob("checkpoints/step-*.safetensors")):
            assert time.monotonic() < end, said(tmp_path)
            time.sleep(0.02)
        capsys.readouterr()
        for words_of_second in (line, [word for word in line if word != "--resume"]):
            assert main(words_of_second) == 2
        first, second = capsys.readouterr().err.splitlines()
        assert first + "\n" == REFUSED
        assert "already holds a run" in second
    finally:
        os.kill(pid, signal.SIGKILL)
        assert finish(pid) == -signal.SIGKILL
    assert (run_dir / LOCK).exists()
    assert main([*line, "--allow-config-change"]) == 0
    assert not (run_dir / LOCK).exists()
    assert {path.name for path in run_dir.iterdir()} == {path.name for path in Path("before/r").iterdir()}
    assert whole.keys() >= {"summary.json", "metrics.jsonl"}


@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_an_output_folder_belongs_to_one_process(command, small_corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    content = {"settings": {"rule": "sgd", "data.dir": str(small_corpus)}, "axes": {"optimizer.lr": [0.1]}}
    Path("my.yaml").write_text(yaml.safe_dump(content))
    line = ["sweep", "my.yaml"] if command == "sweep" else ["compare", "--data.dir", str(small_corpus)]
    with locked(Path("out"), "--out"):
        assert main([*line, "--out", "out"]) == 2
        assert capsys.readouterr().err == (
            "nanogpt-bench: error: --out 'out' is in use by another process; wait for its end\n"
        )
        assert os.listdir("out") == [LOCK]
    assert not Path("out").exists()


def test_what_was_made_for_the_lock_is_gone_unless_it_came_into_use(tmp_path):
    with locked(tmp_path / "a" / "b", "folder"):
        assert os.listdir(tmp_path / "a" / "b") == [LOCK]
    assert os.listdir(tmp_path) == []
    with locked(tmp_path / "a" / "b", "folder"):
        (tmp_path / "a" / "b" / "file").touch()
    assert os.listdir(tmp_path / "a" / "b") == ["file"]
    with locked(tmp_path / "a", "folder"):
        pass
    assert os.listdir(tmp_path / "a") == ["b"]


def test_every_process_that_wants_a_new_folder_gets_another_one(tmp_path):
    with new_folder(tmp_path / "runs" / "a") as first, new_folder(tmp_path / "runs" / "a") as second:
        assert (first.name, second.name) == ("a", "a-2")
        (second / "file").touch()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a-2"]
    with new_folder(tmp_path / "other" / "a"):
        pass
    assert not (tmp_path / "other").exists()


def test_runs_without_a_name_in_the_same_instant_are_numbered(small_corpus, tmp_path, monkeypatch):
    """The second begins when the first has chosen its folder and written nothing into it."""
    monkeypatch.chdir(tmp_path)
    line = [word for word in words(KIND, small_corpus) if word not in ("--name", "r", "--resume")]
    folders = list[str]()

    def both(config: object, run_dir: Path, **_: object) -> dict[str, object]:
        folders.append(run_dir.as_posix())
        if len(folders) < 3:
            assert main(line) == 0
        (run_dir / "summary.json").touch()
        return {"status": "finished", "stop": None}

    monkeypatch.setattr("nanogpt_bench.loop.train.run", both)
    monkeypatch.setattr(run_command, "_closing_line", lambda *_: "")
    assert main(line) == 0
    assert folders == ["runs/e4m3", "runs/e4m3-2", "runs/e4m3-3"]


def test_without_locks_nobody_is_kept_out(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "a", "folder"), locked(tmp_path / "a", "folder"):
        (tmp_path / "a" / "file").touch()
    assert [name for name in os.listdir(tmp_path / "a") if name != LOCK] == ["file"]


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / LOCK).symlink_to(tmp_path / "elsewhere")
    with locked(tmp_path / "a", "folder"):
        pass
    assert not (tmp_path / "elsewhere").exists()
    assert (tmp_path / "a" / LOCK).is_symlink()
