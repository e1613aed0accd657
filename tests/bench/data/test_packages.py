"""Packages as a corpus.

What is taken of each kind, what is left out, and archives that can't be had or are
others.
"""

import gzip
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench_runs import refusal

from nanogpt_bench.cli import main
from nanogpt_bench.data import packages
from nanogpt_bench.data.batches import load_corpus
from nanogpt_bench.data.packages import PACKAGES, VAL_FILE_INTERVAL, Sentences, prepare_packages
from nanogpt_bench.data.tokenizers import make_tokenizer
from nanogpt_bench.system.files import sha256

TWICE = "This sentence stands in every archive, as a licence or a header does."


def sentence(subject: str, number: int = 0) -> str:
    return f"{TWICE} Here the text number {number} of {subject} goes on, and nothing else says so."


def wheel(files: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return data.getvalue()


def tar_xz(files: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return data.getvalue()


def deb(files: dict[str, bytes]) -> bytes:
    """An ar archive as dpkg-deb writes it; the control archive's size is odd."""
    control = tar_xz({"control": b"Package: tiny"})
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": control + b"\0" * (len(control) % 2 == 0),
    }
    archive = b"!<arch>\n"
    for name, data in {**members, "data.tar.xz": tar_xz(files)}.items():
        archive += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode()
        archive += data + b"\n" * (len(data) % 2)
    return archive


def described(key: str, text: str) -> bytes:
    return json.dumps(
        {"shapes": [{key: f"<p>{text}</p>"}, {key: {"not a": "text"}}, {key: "short"}]}
    ).encode()


def archives() -> dict[str, bytes]:
    """Return an archive of every package with two files.

    The text of one has a sentence of the others before it.
    """
    service = "botocore/data/{}/{}/service-2.json"
    google = "googleapiclient/discovery_cache/documents/{}.json"
    comment = (
        b'/* %s */\nchar *a = "/* a text in quotes, which is not a comment of the program. */";\n'
    )
    linux = {
        "linux-source-6.1/Documentation/a.rst": sentence("a.rst").encode(),
        "linux-source-6.1/Documentation/translations/fr/b.rst": b"Une phrase en fran\xc3\xa7ais, qui n'est pas utile.",
        "linux-source-6.1/lib/c.c": comment % sentence("c.c").encode(),
        "linux-source-6.1/lib/d.h": b"/* SPDX: this header says under which licence one may use the file. */\n",
        "linux-source-6.1/lib/e.rs": b"// The lines of one comment in the other form\n// belong to one another.\nx\n",
        "linux-source-6.1/lib/e.bin": b"/* A comment in a file that holds no source code at all. */",
    }
    java = {
        "java.base/A.java": comment % sentence("A {@code java}").encode(),
        "java.base/A.class": b"\xca\xfe",
    }
    s3 = gzip.compress(described("documentation", sentence("s3 &amp; more")))
    services = {
        service.format(f"x{n}", "1"): described("documentation", sentence("a service", n))
        for n in range(200)
    }
    old = described("documentation", sentence("an old version"))
    services |= {
        service.format("s3", "2006-03-01"): old,
        service.format("s3", "2016-03-01") + ".gz": s3,
    }
    return {
        "oci": wheel(
            {"oci/a.py": f'"""{sentence("a module")}"""'.encode(), "oci/z.py": b"def broken("}
        ),
        "botocore": wheel(services),
        "google-api-python-client": wheel(
            {google.format("v1"): described("description", sentence("v1"))}
        ),
        "openjdk-17-source": deb(
            {"./usr/share/doc": b"", "./usr/lib/jvm/openjdk-17/lib/src.zip": wheel(java)}
        ),
        "linux-source-6.1": deb({"./usr/src/linux-source-6.1.tar.xz": tar_xz(linux)}),
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with an archive of each package.

    Their sha256 are those that are expected.
    """
    archive_folder = tmp_path / "archives"
    archive_folder.mkdir()
    for name, data in archives().items():
        archive = archive_folder / PACKAGES[name].archive
        archive.write_bytes(data)
        monkeypatch.setitem(PACKAGES, name, replace(PACKAGES[name], sha256=sha256(archive)))
    return archive_folder


def documents(out: Path) -> dict[str, list[str]]:
    corpus, tokenizer = load_corpus(out, 16), make_tokenizer("byte", "")
    return {
        split: [
            tokenizer.decode(part)
            for part in np.split(tokens, np.flatnonzero(tokens == tokenizer.end_of_text) + 1)
        ][:-1]
        for split, tokens in (("train", corpus.train), ("val", corpus.val))
    }


def test_each_kind_gives_its_english_and_no_sentence_twice(folder, tmp_path):
    meta = prepare_packages(tmp_path / "out", data_dir=folder)
    splits = documents(tmp_path / "out")
    texts = splits["train"] + splits["val"]
    assert sum(TWICE in text for text in texts) == 1
    for subject in ("s3 & more", "v1", "A java", "a.rst", "c.c", "a module"):
        assert any(f"of {subject} goes on" in text for text in texts), subject
    assert "The lines of one comment in the other form\nbelong to one another." in texts
    for dropped in (
        "old version",
        "short",
        "in quotes",
        "Une phrase",
        "under which licence",
        "no source code",
        "<p>",
    ):
        assert not any(dropped in text for text in texts), dropped
    assert meta["source"]["documents"] == len(texts) == 1 + 201 + 1 + 1 + 3
    facts = meta["source"]["packages"]
    counts = {**dict.fromkeys(PACKAGES, 1), "botocore": 201, "linux-source-6.1": 3}
    assert {name: fact["documents"] for name, fact in facts.items()} == counts
    assert [facts[name]["licence"] for name in ("botocore", "linux-source-6.1")] == [
        "Apache-2.0",
        "GPL-2.0-only",
    ]
    assert all(fact["sha256"] == sha256(folder / fact["archive"]) for fact in facts.values())
    assert sum(fact["bytes"] for fact in facts.values()) == sum(
        len(text.encode()) for text in texts
    )


def test_no_long_sentence_is_twice_whatever_stands_before_it():
    known = Sentences()
    long = "A sentence of more than forty characters, which is long."
    assert known.new(f"Short. {long}") == f"Short. {long}"
    first_sentence = "Another one of them, which stands before the first of all."
    assert known.new(f"Else. {long}\n{first_sentence} So.") == f"Else. {first_sentence} So."
    assert (
        known.new(long.replace(" ", "\n "))
        == known.new(f"{long} And so on.")
        == known.new("Short. Else.")
        == ""
    )
    brief = "Brief. Very brief. " * 4
    assert known.new(brief) == brief.strip()
    assert known.new(brief) == ""


def test_held_out_are_whole_files_wherever_they_are_and_whatever_else_is_taken(folder, tmp_path):
    prepare_packages(tmp_path / "all", data_dir=folder)
    prepare_packages(tmp_path / "botocore", packages=["botocore"], data_dir=folder)
    all_documents, alone = documents(tmp_path / "all"), documents(tmp_path / "botocore")
    texts = {
        split: [text.replace(TWICE, "").strip() for text in alone[split]]
        for split in ("train", "val")
    }
    assert len(texts["train"]) + len(texts["val"]) == 201
    assert 0.2 < len(texts["val"]) * VAL_FILE_INTERVAL / 201 < 4
    for split in ("train", "val"):
        assert [
            text for text in all_documents[split] if "of a service" in text or "of s3" in text
        ] == texts[split], split
    numbers = [
        text.split("number ")[1].split(" ")[0] for text in texts["train"] if "of a service" in text
    ]
    assert numbers != sorted(numbers)  # as they are in the archive: a limit takes of all packages


def test_what_is_downloaded_is_read_and_goes_and_the_same_archives_give_the_same_bytes(
    folder, tmp_path, monkeypatch
):
    def copying(package, name):
        program = "import shutil, sys; shutil.copy(*sys.argv[1:])"
        return [sys.executable, "-c", program, str(folder / package.archive), package.archive]

    monkeypatch.setattr(packages.PackageArchive, "command", copying)
    out, other_folder = tmp_path / "made" / "out", tmp_path / "other"
    assert prepare_packages(out, progress=True) == prepare_packages(other_folder, data_dir=folder)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    for name in ("train.bin", "val.bin", "meta.json"):
        assert (out / name).read_bytes() == (other_folder / name).read_bytes(), name


def test_an_interrupted_download_leaves_nothing(folder, tmp_path, monkeypatch):
    def interrupted(command, **options):
        (Path(options["cwd"]) / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_packages(tmp_path / "made" / "out")
    assert list((tmp_path / "made").iterdir()) == []


LINUX = r"can't get linux-source-6.1_6.1.176-1_all.deb: it is not in '.*'; "
LINUX += r"get it with: apt-get download linux-source-6"
WRONG_DIGEST = r"get botocore-1.44.8-py3-none-any.whl; '.*' has sha256 [0-9a-f]{64}, but "
WRONG_DIGEST += r"[0-9a-f]{64} is expected;"


@pytest.mark.parametrize(
    ("name", "packages", "message"),
    [
        ("botocore", None, WRONG_DIGEST),
        (
            "linux-source-6.1",
            None,
            rf"{LINUX}.*then .* --packages oci,botocore,google-api-python-client,openjdk",
        ),
        (
            "botocore",
            ["linux-source"],
            "unknown package 'linux-source'; did you mean 'linux-source-6.1'",
        ),
    ],
)
def test_an_archive_that_cant_be_had_is_refused(folder, tmp_path, name, packages, message):
    archive = folder / PACKAGES[name].archive
    archive.write_bytes(b"another version") if name == "botocore" else archive.unlink()
    with refusal(message):
        prepare_packages(tmp_path / "out", packages=packages, data_dir=folder)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            [sys.executable, "-c", r"import sys; sys.exit('noise\nERROR: No match\nnotice')"],
            "any.whl; ERROR: No match",
        ),
        (["true"], "can't get oci.*: it is not in"),
        (["/nowhere/client"], "any.whl; /nowhere/client: No such file"),
    ],
    ids=["fails", "gets nothing", "does not exist"],
)
def test_a_client_that_fails_is_one_line(tmp_path, monkeypatch, program, message):
    monkeypatch.setattr(packages.PackageArchive, "command", lambda package, name: program)
    with refusal(message):
        prepare_packages(tmp_path / "made" / "out")
    assert list((tmp_path / "made").iterdir()) == []


def test_the_command(folder, working_folder, capsys):
    assert (
        main(["prepare", "packages", "--packages", "oci, botocore", "--data-dir", str(folder)]) == 0
    )
    assert capsys.readouterr().out.startswith("data/packages: ")
