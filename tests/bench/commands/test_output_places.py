"""A place where nothing can be written is refused before anything is computed."""

import os
from pathlib import Path

import pytest

from nanogpt_bench.cli import main

#: commands, and the option of each that names what they write
COMMANDS = {
    "evaluate --out": "evaluate RUN --out PLACE",
    "evaluate --save": "evaluate RUN --formats E4M3 --save PLACE",
    "evaluate report --out": "evaluate RUN --formats all --out PLACE",
    "evaluate report --save": "evaluate RUN --formats all --out out --save PLACE",
    "sample --out": "sample RUN --out PLACE",
    "results --out": "results export RUN --out PLACE",
    "report --out": "report RUN --out PLACE",
    "prepare --out": "prepare text --tokenizer bpe-300 --input TEXT --out PLACE",
    "sweep --out": "sweep formats.yaml --data.dir CORPUS --out PLACE",
    "compare --out": "compare --data.dir CORPUS --out PLACE",
    "finetune --save": "finetune --model gone --data.dir CORPUS --save PLACE",
}
#: a place, and what is said of it
PLACES = {
    "below a file": ("file/new.json", "'file' is a file, not a folder; give another name"),
    "far below a file": ("file/a/b/new.json", "'file' is a file, not a folder; give another name"),
    "a link to nothing": ("link.json", "'link.json' is a broken link"),
    "below a link to nothing": ("link.json/new.json", "'link.json' is a broken link"),
}


def fail(*_, **__):
    pytest.fail("something was computed")


@pytest.fixture
def line(working_folder, monkeypatch, trained, corpus_dir, text_file):
    """Return a function from a command of `COMMANDS` and a place to its words.

    Nothing can be computed.
    """
    for name in (
        "loop.trainer.Trainer.__init__",
        "report.write_report",
        "report.results_file.export",
        "data.text.make_tokenizer",
        "sweep.session.check_machine",
        "model.causal.outline",
    ):
        monkeypatch.setattr(f"nanogpt_bench.{name}", fail)
    Path("file").write_text("mine")
    Path("link.json").symlink_to("nothing.json")
    Path("locked").mkdir()
    names = {"RUN": trained["float"], "CORPUS": corpus_dir, "TEXT": text_file}
    return lambda command, place: [
        str({**names, "PLACE": place}.get(word, word)) for word in COMMANDS[command].split()
    ]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_can_not_be_is_refused_at_once(command, place, line, refused):
    name, message = PLACES[place]
    assert message in refused(*line(command, name))
    assert Path("file").read_text() == "mine"
    assert os.readlink("link.json") == "nothing.json"
    assert sorted(os.listdir()) == ["file", "link.json", "locked"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_can_not_be_written_is_refused_at_once(command, line, refused, monkeypatch):
    writable = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).name != "locked" and writable(path, mode)
    )
    message = refused(*line(command, "locked/new.json"))
    assert "no permission to write in 'locked'; give another name" in message
    assert os.listdir("locked") == []


@pytest.mark.parametrize("name", ["data/stdlib", "data/mine"])
def test_a_corpus_behind_a_link_to_nothing_is_named(name, working_folder, refused):
    Path("data").mkdir()
    Path(name).symlink_to("gone")
    message = refused("run", "fp32", "--data.dir", name)
    assert f"data.dir {name!r} is a broken link; mend it, or give another folder" in message
    assert os.listdir("data") == [Path(name).name]


@pytest.mark.usefixtures("_no_figures")
def test_a_link_to_a_folder_is_one(trained, working_folder):
    Path("there").mkdir()
    Path("link").symlink_to("there")
    assert main(["report", str(trained["float"]), "--out", "link"]) == 0
    assert Path("there/report.html").exists()
