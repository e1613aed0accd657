"""A small prepared corpus and the settings of a run that takes a second."""

import sys
from pathlib import Path
from threading import Thread

import pytest

from nanogpt_bench.cli import main
from nanogpt_bench.config.settings import load_config
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.data.tokenizers import ByteTokenizer
from nanogpt_bench.data.write import LabelledText, write_corpus
from nanogpt_bench.loop.train import run
from nanogpt_bench.sweep import workers as pool_module

# for the tests to find the modules that they share
sys.path.extend(
    str(Path(__file__).parent / folder) for folder in ("", "monitors", "report", "sweep")
)

from bench_runs import flags

TEXT = "".join(
    f"Line {number}: the quick brown fox jumps over {number % 7} lazy dogs.\n"
    for number in range(300)
)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A UTF-8 file of 300 lines."""
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus_dir(text_file):
    """The file prepared with the char tokenizer."""
    out = text_file.parent / "prepared"
    prepare_text(text_file, out, "char")
    return out


@pytest.fixture(scope="session")
def labelled_dir(tmp_path_factory):
    """300 short documents with labels for the dogs' number.

    An even number has one more label.
    """
    numbers = [number % 7 for number in range(300)]
    texts = [
        f"{' '.join(str(number) * 8)} lazy dogs{'.' * (place % 3)}"
        for place, number in enumerate(numbers)
    ]
    labels = [[number, *([7] * (number % 2 == 0))] for number in numbers]
    documents = [
        LabelledText(text, labels_of_text)
        for text, labels_of_text in zip(texts, labels, strict=True)
    ]
    out = tmp_path_factory.mktemp("labelled") / "prepared"
    splits = {"train": documents[:240], "val": documents[240:]}
    names = [*(f"{number} dogs" for number in range(7)), "even"]
    write_corpus(out, splits, ByteTokenizer(), {"kind": "made"}, progress=False, labels=names)
    return out


@pytest.fixture(scope="session")
def tiny(corpus_dir):
    """Return a function that configures a small run.

    It takes overrides of a one-layer model on the small corpus.
    """
    base = {"data__dir": corpus_dir, "model__n_layer": 1, "model__n_head": 2, "model__n_embd": 16}
    base |= {
        "model__block_size": 16,
        "train__max_steps": 6,
        "train__batch_size": 4,
        "eval__interval": 3,
    }
    base |= {"eval__batches": 2, "optimizer__warmup_steps": 2, "monitor__interval": 2}
    return lambda **overrides: load_config(None, flags(base | overrides))


@pytest.fixture
def working_folder(tmp_path, monkeypatch):
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(capsys):
    """Return a function that has a command line refused and returns its error.

    The code is 2, nothing is printed, and the error is one line.
    """

    def line(*words):
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        *earlier_lines, last = printed.err.splitlines()
        assert last.startswith("nanogpt-bench: error: ")
        assert not [text for text in earlier_lines if "error: " in text]
        return last

    return line


@pytest.fixture
def _forked_workers(monkeypatch):
    """Workers that find torch imported."""
    import torch._dynamo  # noqa: F401  (which every optimizer imports: here once, rather than in each worker)

    monkeypatch.setattr(pool_module, "CONTEXT", "fork")


@pytest.fixture
def _no_figures(monkeypatch):
    monkeypatch.setattr("nanogpt_bench.report.write_figures", lambda *_: None)


#: what a run may store its weights as
KINDS = {
    "float": {},
    "one byte": {"rule": "stochastic", "model__format": "E4M3"},
    "master copy": {
        "model__format": "E3M4",
        "model__formats": "{lm_head: none, mlp.fc: {activation: E4M3}}",
    },
    "bfloat16": {"rule": "bf16-pure"},
    "tied": {"model__tie_weights": True},
    "untied": {"model__tie_weights": True, "model__tied": "untie", "model__format": "E4M3"},
}


@pytest.fixture(scope="session")
def trained(tiny, tmp_path_factory):
    """A run of six steps of every kind, with a checkpoint of the third and of the last."""
    runs = tmp_path_factory.mktemp("runs")
    for kind, settings in KINDS.items():
        run(tiny(**settings, checkpoint__every=3, monitor__interval=6), runs / kind)
    return {kind: runs / kind for kind in KINDS}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A hub without repositories yet, on a free port."""
    from hubs import Hub

    server = Hub(tmp_path_factory.mktemp("repositories"))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
