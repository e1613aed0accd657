"""The hub's streams come from a server that answers as it does.

Without an answer there is one line in time.
"""

import json
import os
import socket
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
from bench_runs import refusal
from hubs import write_parquet
from huggingface_hub.errors import OfflineModeIsEnabled

from nanogpt_bench.data import dataset
from nanogpt_bench.data.dataset import NotOnHubError, find_commit

pytestmark = pytest.mark.extra("datasets")

TRAIN = [
    f"Article {number}: the Council has adopted decision {number * 41}." for number in range(30)
]
VAL = [f"Annex {number}: done at Luxembourg, {number % 28 + 1} June." for number in range(12)]
CARD = """---
configs:
- config_name: {config}
  data_files:
  - {{split: train, path: {config}/train-*}}
  - {{split: validation, path: {config}/validation-*}}
---
"""
GLUE, MULTI = "coastalcph/lex_glue", "coastalcph/multi_eurlex"


def add_repository(root: Path, name: str, config: str) -> None:
    """Lay out a data set as the hub keeps them.

    A card names the files of each split.
    """
    folder = root / name
    write_parquet(folder / config / "train-00000-of-00002.parquet", TRAIN[:20])
    write_parquet(folder / config / "train-00001-of-00002.parquet", TRAIN[20:])
    write_parquet(folder / config / "validation-00000-of-00001.parquet", VAL)
    (folder / "README.md").write_text(CARD.format(config=config), encoding="utf-8")


#: what the one process is told to prepare, by the name of the folder it goes to
COMMANDS = {
    "copy": ["eurlex", "--data-dir", "local"],
    "eurlex": ["eurlex", "--revision", "v2"],
    "limited": [
        "hub",
        "--dataset",
        "some/set",
        "--config",
        "en",
        "--column",
        "text",
        "--limit-tokens",
        "800",
    ],
    "configuration": ["hub", "--dataset", "some/set", "--config", "eng", "--column", "text"],
    "column": ["hub", "--dataset", "some/set", "--column", "txt"],
    "revision": ["hub", "--dataset", "some/set", "--column", "text", "--revision", "gone"],
    "name": ["hub", "--dataset", "some/sett", "--column", "text"],
    "id": ["hub", "--dataset", "a/b/c", "--column", "text"],
    "fallback": ["eurlex", "--tokenizer", "char"],
}
#: where the hub is, is read when its client is imported, so these run in a process of
#: their own: one, for its imports
PROCESS = """
import contextlib, io, json, sys, urllib.request
from nanogpt_bench.cli import main
endpoint, outcomes = sys.argv[1], {}
for name, words in json.load(sys.stdin).items():
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(f"{endpoint}/begin/{name}")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["prepare", *words, "--out", name])
    outcomes[name] = [code, out.getvalue(), err.getvalue()]
print(json.dumps(outcomes))
"""


class Preparation(NamedTuple):
    """A preparation that has ended.

    Exit code, output, where it was to go, and what the hub was asked for.
    """

    code: int
    out: str
    err: str
    folder: Path
    requests: list[str]

    @property
    def meta(self):
        return dict(json.loads((self.folder / "meta.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, hub):
    """Prepare everything; lex_glue leaves the hub before the last."""
    place = tmp_path_factory.mktemp("place")
    for name, config in ((GLUE, "eurlex"), (MULTI, "en"), ("some/set", "en")):
        add_repository(hub.root, name, config)
    add_repository(place, "local", "eurlex")
    hub.leaves = {"fallback": GLUE}
    plain = {
        name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")
    }
    surroundings = {
        **plain,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(place / "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command, piped = (
        [sys.executable, "-c", PROCESS, hub.url],
        {"capture_output": True, "text": True, "timeout": 240},
    )
    process = subprocess.run(
        command, input=json.dumps(COMMANDS), env=surroundings, cwd=place, check=False, **piped
    )
    assert (process.returncode, process.stderr) == (0, "")
    questions: dict[str, list[str]] = {}
    for request in hub.requests:
        if request.startswith("GET /begin/"):
            questions[request.removeprefix("GET /begin/")] = []
        elif "/datasets/" in request:
            questions[[*questions][-1]].append(request)
    return {
        name: Preparation(*answer, place / name, questions[name])
        for name, answer in json.loads(process.stdout).items()
    }


def test_what_comes_from_the_hub_and_from_a_copy_is_the_same(outcomes):
    outcome = outcomes["eurlex"]
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.requests[0] == "GET /api/datasets/coastalcph/lex_glue/revision/v2"
    train = np.fromfile(outcome.folder / "train.bin", dtype="<u2")
    end = 256
    assert train.tolist() == list(chain.from_iterable([*text.encode(), end] for text in TRAIN))
    named = {
        "dataset": "coastalcph/lex_glue",
        "config": "eurlex",
        "column": "text",
        "limit_tokens": None,
    }
    assert outcome.meta["source"] == {"kind": "hub", "revision": "c0ffee" * 6 + "c0de", **named}
    assert [outcome.meta["splits"][split]["documents"] for split in ("train", "val")] == [
        len(TRAIN),
        len(VAL),
    ]
    outcome = outcomes["copy"]
    assert (outcome.code, outcome.err, outcome.requests) == (0, "", [])
    assert (outcome.folder / "train.bin").read_bytes() == (
        outcomes["eurlex"].folder / "train.bin"
    ).read_bytes()


def test_a_limit_leaves_files_unread(outcomes):
    outcome = outcomes["limited"]
    assert (outcome.code, outcome.err) == (0, "")
    assert "800 tokens for training, 80 for validation" in outcome.out
    files = {request.rpartition("/")[2] for request in outcome.requests if ".parquet" in request}
    assert files == {"train-00000-of-00002.parquet", "validation-00000-of-00001.parquet"}


def test_without_lex_glue_the_other_data_set_is_taken(outcomes):
    outcome = outcomes["fallback"]
    assert (outcome.code, outcome.err) == (
        0,
        f"the hub has no data set {GLUE!r}; taking {MULTI!r} instead\n",
    )
    assert f"GET /api/datasets/{MULTI}/revision/refs/pr/9" in outcome.requests
    assert (outcome.meta["source"]["dataset"], outcome.meta["source"]["config"]) == (MULTI, "en")
    assert outcome.meta["splits"]["train"]["tokens"] == sum(map(len, TRAIN))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("configuration", ["'some/set'", "'eng'", "'en'"]),
        ("column", ["unknown column", "'txt'", "did you mean 'text'"]),
        ("revision", ["'some/set' has no revision 'gone'"]),
        ("name", ["the hub has no data set 'some/sett'"]),
        ("id", ["--dataset 'a/b/c' is not the id"]),
    ],
)
def test_what_the_hub_does_not_have_is_named(outcomes, name, parts):
    outcome = outcomes[name]
    assert (outcome.code, outcome.out, len(outcome.err.splitlines())) == (2, "", 1)
    assert [part for part in parts if part not in outcome.err] == []
    assert [path.name for path in outcome.folder.parent.iterdir() if name in path.name] == []


def test_a_hub_out_of_reach_in_trouble_or_silent_is_given_up_in_one_line(
    hub, tmp_path, monkeypatch, refused
):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr(hub, "down", 503)
    with refusal(r"can't be reached \(.*503.*\)"):
        find_commit("some/set", None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(
            "huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}"
        )
        assert dataset.LOOKUP_SECONDS < 10
        monkeypatch.setattr(dataset, "LOOKUP_SECONDS", 0.5)
        started = time.monotonic()
        with refusal(r"can't be reached \(.+\); give a local copy"):
            find_commit("some/set", None)
    message = refused(
        "prepare", "eurlex", "--out", tmp_path / "out"
    )  # nobody listens there any more
    assert time.monotonic() - started < 10
    parts = ["hub can't be reached", "'coastalcph/lex_glue'", "--data-dir DIR", "prepare stdlib"]
    assert [part for part in parts if part not in message] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("no route"),
        OfflineModeIsEnabled("off"),
        TimeoutError(),
        OSError(5, "broken pipe"),
    ],
    ids=["no route", "offline", "timeout", "broken pipe"],
)
def test_errors_are_a_hub_out_of_reach(error, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", Mock(side_effect=error))
    with refusal(r"can't be reached \(.+\)"):
        find_commit("some/set", None)


def test_a_given_revision_is_looked_for_in_one_data_set(monkeypatch, tmp_path):
    monkeypatch.setattr(
        dataset,
        "find_commit",
        Mock(side_effect=NotOnHubError("the hub has no data set 'lex_glue'")),
    )
    with pytest.raises(NotOnHubError, match="lex_glue"):
        dataset.prepare_eurlex(tmp_path / "out", revision="v2")
