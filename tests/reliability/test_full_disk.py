"""A disk that fills, and a run folder that two want: one clear line, nothing lost."""

import errno
import fcntl
import json
import os
import resource
import signal
import time
from pathlib import Path

import pytest
import yaml
from forked import finish, output_of, start
from small_runs import differences, traces, words

from nanogpt_bench import checkpoint
from nanogpt_bench.checkpoint import newest, step_file
from nanogpt_bench.cli import main
from nanogpt_bench.commands.verify import check_run
from nanogpt_bench.loop import train as loop
from nanogpt_bench.loop.observers import LineFile
from nanogpt_bench.runs.load import has_ended
from nanogpt_bench.system import files
from nanogpt_bench.system.files import LOCK, locked, new_folder

KIND = "codes stochastic"
#: the checkpoint of step 9 is the third
INTERVAL, FAILING_STEP = 3, 9


@pytest.fixture(scope="module")
def whole(small_corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(words(KIND, small_corpus)) == 0
    return traces(folder / "runs" / "r")


def full(path=None):
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *([] if path is None else [str(path)]))


def during_the_save(patch):
    """The checkpoint of step 9 can't be written.

    Nor can anything that is reported afterwards.
    """

    class Filling:
        part = -1

        def __getattr__(self, name):
            return getattr(os, name)

        def open(self, path, *arguments):
            file = os.open(path, *arguments)
            self.part = file if path.name == f".step-{FAILING_STEP}.safetensors.part" else self.part
            return file

        def write(self, file, data):
            if file != self.part:
                return os.write(file, data)
            os.write(file, data[: len(data) // 2])
            raise full()

    patch.setattr(checkpoint, "os", Filling())


def during_a_record(patch):
    """Half of a record of step 8 reaches metrics.jsonl."""
    append = LineFile.append

    def refusing(file, lines):
        lines = list(lines)
        if any(f'"step": {FAILING_STEP - 1},' in line for line in lines):
            with open(file._path, "a", encoding="utf-8") as half:
                half.write(lines[0][: len(lines[0]) // 2])
            raise full(file._path)
        append(file, lines)

    patch.setattr(LineFile, "append", refusing)


def at_the_summary(patch):
    """The training comes to its end, and its summary can't be written.

    Every attempt fails.
    """

    def refusing(path, text):
        if path.name == "summary.json":
            raise full(path)
        write(path, text)

    write = files.write_text
    patch.setattr(files, "write_text", refusing)
    patch.setattr(loop, "write_text", refusing)


@pytest.mark.parametrize(
    ("fault", "last", "steps", "line"),
    [
        (
            during_the_save,
            6,
            9,
            "stopped: checkpoint of step 9 can't be written to 'runs/r/checkpoints': No space",
        ),
        (
            during_a_record,
            6,
            7,
            "stopped: 'runs/r/metrics.jsonl' can't be written: No space left on device; make room",
        ),
        (
            at_the_summary,
            24,
            None,
            "stopped: 'runs/r/summary.json' can't be written: No space left on device; make",
        ),
    ],
    ids=["save", "record", "last summary"],
)
def test_a_disk_that_fills_ends_the_run_which_goes_on_when_there_is_room(
    fault, last, steps, line, whole, small_corpus, tmp_path, monkeypatch, capsys, tally
):
    monkeypatch.chdir(tmp_path)
    run_dir = Path("runs/r")
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        assert main(words(KIND, small_corpus)) == 1
    (printed,) = capsys.readouterr().out.splitlines()
    assert printed.startswith(line)
    assert printed.endswith("make room, then continue with --resume; see runs/r")
    state, skipped = newest(run_dir)
    assert (state, skipped) == (step_file(run_dir, last), [])
    assert [path.name for path in run_dir.rglob(".*")] == []
    if steps is None:
        assert not (run_dir / "summary.json").exists()
    else:
        summary = json.loads((run_dir / "summary.json").read_text())
        assert (summary["status"], summary["stop"]["kind"], summary["failure"]) == (
            "stopped",
            "disk",
            None,
        )
        assert summary["steps"] == steps
        assert not has_ended(summary)  # a sweep goes on with it
    assert check_run(run_dir).problems == []
    assert main(words(KIND, small_corpus)) == 0
    assert differences(whole, traces(run_dir)) == []
    tally("disk full in a run", 1, fault.__doc__ or "")


def test_a_limit_of_the_file_size_in_mid_run(whole, small_corpus, tmp_path):
    """The system's own errors, on metrics.jsonl and then on the end.

    Everything that the end reports fails.
    """

    def limited():
        append = LineFile.append

        def limiting(file, lines):
            lines = list(lines)
            if any(f'"step": {FAILING_STEP - 1},' in line for line in lines):
                resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
            append(file, lines)

        LineFile.append = limiting
        return main(words(KIND, small_corpus))

    assert finish(start(tmp_path, limited)) == 1
    assert "metrics.jsonl' can't be written: File too large" in output_of(tmp_path)
    assert not (tmp_path / "runs" / "r" / "summary.json").exists()
    assert newest(tmp_path / "runs" / "r")[0] == step_file(tmp_path / "runs" / "r", 6)
    assert finish(start(tmp_path, lambda: main(words(KIND, small_corpus)))) == 0
    assert differences(whole, traces(tmp_path / "runs" / "r")) == []


def test_a_full_disk_outside_of_a_run_is_one_line_and_exit_code_1(monkeypatch, capsys):
    def refuse(paths):
        raise full("report/report.html")

    monkeypatch.setattr("nanogpt_bench.commands.verify.main", refuse)
    assert main(["verify", "runs"]) == 1
    assert capsys.readouterr().err.endswith(
        "'report/report.html' can't be written: No space left on device\n"
    )


def test_a_run_folder_belongs_to_one_process_until_it_ends(
    small_corpus, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    run_dir, line = Path("runs/r"), words(KIND, small_corpus)
    pid = start(tmp_path, lambda: main(words(KIND, small_corpus, {"train.max_steps": 1000000})))
    try:
        end = time.monotonic() + 60
        while not list(run_dir.glob("checkpoints/step-*.safetensors")):
            assert time.monotonic() < end, output_of(tmp_path)
            time.sleep(0.02)
        for words_of_second in (line, [word for word in line if word != "--resume"]):
            assert main(words_of_second) == 2
        first, second = capsys.readouterr().err.splitlines()
        assert first.endswith(
            "run folder 'runs/r' is in use by another process; wait until it ends"
        )
        assert "already holds a run" in second
    finally:
        os.kill(pid, signal.SIGKILL)
        assert finish(pid) == -signal.SIGKILL
    assert (run_dir / LOCK).exists()
    assert main([*line, "--allow-config-change"]) == 0
    assert not (run_dir / LOCK).exists()


@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_an_output_folder_belongs_to_one_process(
    command, small_corpus, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    content = {
        "settings": {"rule": "sgd", "data.dir": str(small_corpus)},
        "axes": {"optimizer.lr": [0.1]},
    }
    Path("my.yaml").write_text(yaml.safe_dump(content))
    line = (
        ["sweep", "my.yaml"] if command == "sweep" else ["compare", "--data.dir", str(small_corpus)]
    )
    with locked(Path("out"), "--out"):
        assert main([*line, "--out", "out"]) == 2
        assert capsys.readouterr().err == (
            "nanogpt-bench: error: --out 'out' is in use by another process; wait until it ends\n"
        )
        assert os.listdir("out") == [LOCK]
    assert not Path("out").exists()


@pytest.mark.parametrize("used", [False, True])
def test_what_was_made_for_the_lock_is_gone_unless_it_came_into_use(used, tmp_path):
    with locked(tmp_path / "a" / "b", "folder"):
        assert os.listdir(tmp_path / "a" / "b") == [LOCK]
        if used:
            (tmp_path / "a" / "b" / "file").touch()
    assert [path.name for path in tmp_path.rglob("*")] == (["a", "b", "file"] if used else [])


def test_every_process_that_wants_a_new_folder_gets_another_one(tmp_path):
    with (
        new_folder(tmp_path / "runs" / "a") as first,
        new_folder(tmp_path / "runs" / "a") as second,
    ):
        assert (first.name, second.name) == ("a", "a-2")
        (second / "file").touch()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a-2"]
    with new_folder(tmp_path / "other" / "a"):
        pass
    assert not (tmp_path / "other").exists()


def test_without_locks_nobody_is_kept_out(tmp_path, monkeypatch):
    def refuse(*_):
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
