"""Every reader of files that come from elsewhere.

With a whole file for it, and the call that reads the file.
"""

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import gpt2_checkpoints
import torch
from forked import without_drawing
from run_folders import write_run
from safetensors.torch import save_file
from torch import nn

import fp8manifold as fm
from nanogpt_bench.cli import main
from nanogpt_bench.config.settings import load_config
from nanogpt_bench.data.batches import documents_of, load_corpus
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.model.gpt import GPT
from nanogpt_bench.model.weights import checkpoint_shape, load_checkpoint
from nanogpt_bench.report.studies import read_studies
from nanogpt_bench.runs.load import load_run
from nanogpt_bench.runs.read import AT_END, SUMS
from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.system.errors import BenchError

SMALL = (
    "--model.n_layer=1",
    "--model.n_embd=16",
    "--model.n_head=2",
    "--model.block_size=16",
    "--eval.batches=1",
)

FROM_GPT2 = ("run", "bf16_baseline", "--model.block_size=16", "--eval.batches=1")


@dataclass(frozen=True)
class Reader:
    """A reader and how its file is written.

    `lay` writes a whole one into an empty folder; `read` raises, or returns its notes.
    """

    lay: Callable[[Path], object]
    read: Callable[[Path], Iterable[str] | object]
    #: the files that garbage is put into, each with the kinds of garbage that are not tried
    #: there: they may be what is meant, or would be waited for
    files: dict[str, tuple[str, ...]]
    errors: tuple[type[Exception], ...] = (BenchError,)

    def messages(self, folder):
        """Return the error of the folder, or its notes."""
        try:
            notes = self.read(folder)
        except self.errors as error:
            return [str(error)]
        return list(notes) if isinstance(notes, list | tuple) else []


def commanded(*words: object) -> None:
    """Give a command that ends well, or with code 2 and one line, which is raised."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = main([str(word) for word in words])
    if code:
        (line,) = err.getvalue().splitlines()
        assert (code, out.getvalue()) == (2, "")
        assert line.startswith("nanogpt-bench: error: ")
        raise BenchError(line.removeprefix("nanogpt-bench: error: "))


def verified(folder: Path) -> list[str]:
    """Return the lines of `verify`, with a problem exactly where its code says so."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(["verify", str(folder)])
    first, *lines = out.getvalue().splitlines()
    assert (
        code
        == any(line.startswith("  problem: ") for line in lines)
        == first.startswith(f"{folder}: not whole, ")
    )
    return lines


def reported(folder: Path) -> tuple[str, ...]:
    """Return the notes of a run whose page has nothing of what a link leads to.

    Figures are empty from then on.
    """
    without_drawing()
    with tempfile.TemporaryDirectory() as out:
        commanded("report", folder, "--out", out)
        assert "root:x:0" not in Path(out, "report.html").read_text(encoding="utf-8")
    return load_run(folder).notes


def load_gpt2(folder: Path) -> None:
    load_checkpoint(GPT(checkpoint_shape(str(folder))), str(folder), "char")


def load_floats(folder: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 16))
    fm.files.load_into(model, folder)


def lay_floats(folder: Path) -> None:
    save_file({"0.weight": torch.ones(16, 32)}, folder / "a.safetensors")
    save_file({"0.bias": torch.ones(16)}, folder / "b.safetensors")
    index = {"weight_map": {"0.weight": "a.safetensors", "0.bias": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def lay_study(folder: Path) -> None:
    write_run(folder / "a", rule="nearest", fmt="E4M3")
    (folder / "sweep.json").write_text(
        json.dumps({"order": ["a"], "runs": [{"name": "a", "label": "a"}]})
    )
    (folder / "tuning.json").write_text(json.dumps({"rows": []}))


def lay_results(folder: Path) -> None:
    lay_study(folder / "study")
    commanded("results", "export", folder / "study", "--out", folder / "x.json")


def lay_tables(folder: Path) -> None:
    (folder / "sensitivity.json").write_text(
        '{"patterns": ["a"], "formats": ["b"], "gap": [[1.0]]}'
    )
    (folder / "tuning.json").write_text('{"rows": []}')


def write_text(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def copy_of(source: Path) -> Callable[[Path], object]:
    return lambda folder: shutil.copytree(source, folder, dirs_exist_ok=True)


def on_corpus(*words: str) -> Callable[[Path], object]:
    return lambda folder: commanded(*words, f"--data.dir={folder}")


#: of a file that need not be there
OPTIONAL = ("gone", "folder", "pipe", "link to nothing", "endless")


def readers(corpus: Path, labelled: Path, run: Path) -> dict[str, Reader]:
    """Every reader by name; corpora and the run are copied."""
    # Garbage that is a text like any other.
    any_text = (
        "deep",
        "deep and whole",
        "digits",
        "laughs",
        "huge",
        "zeros",
        "half",
        "header of a petabyte",
        "wide",
    )
    any_text += (
        "merges",
        "deep blocks",
        "wide and whole",
        "sixties",
        "huge comment",
        "link to a secret",
    )
    # Texts that are too short, and files that are waited for.
    few_words = (
        "of another kind",
        "tag",
        "tag of a class",
        "tag of a module",
        "class",
        "pipe",
        "endless",
    )
    metrics = {"metrics.jsonl": ("empty", "pipe", "endless")}
    settings = dict.fromkeys(("environment.json", "summary.json"), ("class",))
    weights = {"checkpoints/step-6.safetensors": ("gone",)}
    of_run = {"config.yaml": ("half", "class"), **metrics, **settings}
    return {
        "config": Reader(
            write_text("a.yaml", "seed: 1"),
            lambda f: load_config(f / "a.yaml"),
            {"a.yaml": ("empty", "class")},
        ),
        "sweep": Reader(
            write_text("a.yaml", "axes: {seed: [1]}"),
            lambda f: read_sweep(f / "a.yaml"),
            {"a.yaml": ()},
        ),
        "text": Reader(
            write_text("a.txt", "a line of text\n" * 99),
            lambda f: prepare_text(f / "a.txt", f / "out", "byte"),
            {"a.txt": any_text + few_words},
        ),
        "corpus": Reader(
            copy_of(corpus),
            lambda f: load_corpus(f, 16),
            {"meta.json": (), "train.bin": (), "val.bin": ()},
        ),
        "run on a corpus": Reader(
            copy_of(corpus), on_corpus("run", "bf16_baseline", *SMALL), {"meta.json": ()}
        ),
        "compare on a corpus": Reader(
            copy_of(corpus), on_corpus("compare", "--max-steps=1"), {"meta.json": ()}
        ),
        "labels": Reader(
            copy_of(labelled),
            lambda f: documents_of(load_corpus(f, 16), "train"),
            {"train.ends.bin": (), "train.labels.bin": ()},
        ),
        "gpt2": Reader(
            gpt2_checkpoints.write, load_gpt2, {"config.json": (), "model.safetensors": ()}
        ),
        "run from gpt2": Reader(
            lambda f: gpt2_checkpoints.write(
                f, vocab_size=load_corpus(corpus, 16).vocab_size, n_positions=16
            ),
            lambda f: commanded(*FROM_GPT2, f"--data.dir={corpus}", f"--model.init_from={f}"),
            {"config.json": (), "model.safetensors": ()},
        ),
        "floats": Reader(
            lay_floats,
            load_floats,
            {"a.safetensors": (), "model.safetensors.index.json": (*OPTIONAL, "wide and whole")},
            errors=(ValueError, FileNotFoundError),
        ),
        "results": Reader(
            lay_results, lambda f: commanded("results", "show", f / "x.json"), {"x.json": ()}
        ),
        "study": Reader(
            lay_study,
            lambda f: commanded("results", "export", f, "--out", f.parent / "x.json"),
            {"sweep.json": (), "tuning.json": (*OPTIONAL, "class", "huge")},
        ),
        "tables": Reader(
            lay_tables,
            lambda f: read_studies([f]).notes,
            {"sensitivity.json": OPTIONAL, "tuning.json": OPTIONAL},
        ),
        "run": Reader(copy_of(run), lambda f: load_run(f).notes, of_run),
        "report on a run": Reader(copy_of(run), reported, of_run),
        "verify": Reader(
            copy_of(run),
            verified,
            {name: () for name in AT_END if name != "alerts.jsonl"} | {SUMS: ("gone",)} | weights,
        ),
    }
