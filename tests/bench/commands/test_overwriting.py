"""Files of somebody that a command line names stay as they are.

One line, code 2, not a byte changed.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from bench_runs import refusal
from damages import GARBAGE, contents, gone

from nanogpt_bench.cli import main
from nanogpt_bench.data.tokenizers import ByteTokenizer
from nanogpt_bench.data.write import write_corpus
from nanogpt_bench.system.files import locked

#: what is said of a folder, the file that is changed in it, and how
CHANGES = {
    "'train.bin' without a meta.json": ("meta.json", gone()),
    "'train.bin' with a meta.json that can't be read:": ("meta.json", GARBAGE["half"]),
    "'val.bin' with another sha256 than its meta.json gives": ("val.bin", GARBAGE["zeros"]),
    "'train.labels.bin', which its meta.json does not list": ("train.labels.bin", Path.touch),
    "'val.bin', which is not an ordinary file": ("val.bin", GARBAGE["folder"]),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_prepare_replaces_what_it_made_and_nothing_else(
    reason, tmp_path, text_file, refused, corpus_dir
):
    folder = tmp_path / "corpus"
    shutil.copytree(corpus_dir, folder)
    prepare = ["prepare", "text", "--input", str(text_file), "--out", str(folder)]
    assert main(prepare) == 0
    assert json.loads((folder / "meta.json").read_text())["tokenizer"] == "byte"
    name, damage = CHANGES[reason]
    damage(folder / name)
    old_contents = contents(folder)
    assert f"--out {str(folder)!r} holds {reason}" in refused(*prepare)
    assert contents(folder) == old_contents
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_what_comes_while_a_text_is_prepared_stays(tmp_path):
    out = tmp_path / "out"

    class Slow(ByteTokenizer):
        def encode(self, text):
            out.mkdir(exist_ok=True)
            np.arange(1000, dtype=np.uint16).tofile(
                out / "train.bin"
            )  # as nanoGPT's scripts write them
            return super().encode(text)

    with refusal(r"holds 'train\.bin' without a meta\.json"):
        write_corpus(out, {"train": ["a" * 99], "val": ["b" * 99]}, Slow(), {}, progress=False)
    assert list(tmp_path.rglob("*")) == [out, out / "train.bin"]


def test_a_link_or_a_pipe_is_nothing_to_write_to(tmp_path, text_file, trained, refused):
    """Nor is a device, such as /dev/null, replaced.

    A test that failed would take it from the whole machine.
    """
    (tmp_path / "there").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "there")
    assert "out' is a link;" in refused(
        "prepare", "text", "--input", text_file, "--out", tmp_path / "out"
    )
    os.mkfifo(tmp_path / "pipe")
    assert "not an ordinary file" in refused(
        "evaluate", trained["float"], "--out", tmp_path / "pipe"
    )


#: what is written, by the command that would; each holds something of the user's
FILES_OF_COMMANDS = {
    "evaluate RUN --out FILE": "table.json",
    "sample RUN --tokens 2 --out FILE": "texts.json",
    "results export SWEEP --out FILE": "results.json",
    "evaluate RUN --formats E4M3 --save DIR": "dir/none-as-trained.safetensors",
    "evaluate RUN --formats all --out DIR": "dir/evaluation.json",
    "report RUN --out DIR": "dir/results.csv",
    "report RUN --out DIR ": "dir/figures/loss_curves.svg",
    "sweep formats.yaml --data.dir CORPUS --out DIR": "dir/sweep.json",
    "compare --data.dir CORPUS --out DIR": "dir/sweep.json",
    "compare --data.dir CORPUS --out DIR ": "dir/mine.txt",
    "finetune --model gone --data.dir CORPUS --save DIR": "dir/model.safetensors",
}
MINE = '{"mine": [1, 2, 3]}\n'


@pytest.mark.parametrize("words", FILES_OF_COMMANDS)
@pytest.mark.parametrize("content", [MINE, "no JSON\n"])
def test_a_file_of_the_users_stays(words, content, trained, corpus_dir, working_folder, refused):
    file = working_folder / FILES_OF_COMMANDS[words]
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_text(content)
    sweep = working_folder / "a sweep"
    shutil.copytree(trained["float"], sweep / "run", dirs_exist_ok=True)
    places = {
        "RUN": trained["float"],
        "CORPUS": corpus_dir,
        "FILE": file,
        "DIR": working_folder / "dir",
        "SWEEP": sweep,
    }
    message = refused(*(places.get(word, word) for word in words.split()))
    assert str(file) in message or str(working_folder / "dir") in message
    assert file.read_text() == content
    assert [path.name for path in file.parent.iterdir() if path != sweep] == [file.name]


@pytest.mark.usefixtures("_no_figures", "working_folder")
@pytest.mark.parametrize(
    "words",
    [
        "evaluate --out x.json",
        "sample --tokens 2 --out x.json",
        "report --out dir",
        "evaluate --save kept",
    ],
)
def test_what_a_command_wrote_it_writes_again(trained, words):
    Path("x.json").touch()  # as mktemp leaves one
    command, *arguments = words.split()
    for _ in range(2):
        assert main([command, str(trained["float"]), *arguments]) == 0


def test_a_lock_file_of_somebody_else_stays(tmp_path):
    (tmp_path / ".lock").write_text("mine")
    with locked(tmp_path, "--out"):
        pass
    assert (tmp_path / ".lock").read_text() == "mine"
