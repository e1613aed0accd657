"""Real text of fixed versions of packages, as their registries have them: 60 million tokens and more of English.

Every archive is told by its sha256 before anything in it is read, so the same command gives the same corpus.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanogpt_bench.data.prose import Reader, Sentences, described, java_package, linux_package, python_wheel
from nanogpt_bench.data.tokenizers import check_tokenizer, make_tokenizer
from nanogpt_bench.data.write import check_folder, split_limits, write_corpus
from nanogpt_bench.system.errors import BenchError, one_line, refused, unknown
from nanogpt_bench.system.files import sha256

#: one file of so many is for validation
VAL_EVERY = 50


@dataclass(frozen=True)
class Package:
    """A version of a package, told by its archive's name and sha256, the licence of its text, and what reads it."""

    version: str
    archive: str
    sha256: str
    licence: str
    read: Reader = field(repr=False)

    def command(self, name: str) -> list[str]:
        """Return the command with which the registry's own client downloads the archive into its working directory."""
        if self.archive.endswith(".deb"):
            return ["apt-get", "download", f"{name}={self.version}"]
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--retries", "1"]
        return [*pip, f"{name}=={self.version}"]


#: in the order in which they are read: a sentence stays where it comes first
PACKAGES = {
    "oci": Package(
        "2.189.0",
        "oci-2.189.0-py3-none-any.whl",
        "134e7cc634d4963ffc0c5411e9c2b2d8695d2f154fd5f8b873dd9fa8a4cb36a6",
        "UPL-1.0 OR Apache-2.0",
        python_wheel,
    ),
    "botocore": Package(
        "1.44.8",
        "botocore-1.44.8-py3-none-any.whl",
        "76342a76c338701db80dcb8afe1c9bd079283d6fffbb9d881442abb02a215043",
        "Apache-2.0",
        described(r"botocore/data/([^/]+)/[^/]+/service-2\.json(?:\.gz)?", "documentation"),
    ),
    "google-api-python-client": Package(
        "2.202.0",
        "google_api_python_client-2.202.0-py3-none-any.whl",
        "aaa90064c9bb642ff1d065b22ca8958a2cb6e345909cefe70d0e5452fc50e08b",
        "Apache-2.0",
        described(r"(googleapiclient/discovery_cache/documents/.+\.json)", "description"),
    ),
    "openjdk-17-source": Package(
        "17.0.19+10-1~deb12u2",
        "openjdk-17-source_17.0.19+10-1~deb12u2_all.deb",
        "2591b37131025f872f057be99467b45f7fa2aed928c8d779208db9c3239e1190",
        "GPL-2.0-only WITH Classpath-exception-2.0",
        java_package,
    ),
    "linux-source-6.1": Package(
        "6.1.176-1",
        "linux-source-6.1_6.1.176-1_all.deb",
        "9305d1a151b8e83dcb88aa11361e7b9513f0c252bdf7f5647e4542762d99c094",
        "GPL-2.0-only",
        linux_package,
    ),
}


def prepare_packages(
    out: Path,
    tokenizer: str = "byte",
    *,
    packages: Sequence[str] | None = None,
    data_dir: Path | None = None,
    limit: int | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Prepare the English in packages (default: in all of `PACKAGES`) in `out` and return what meta.json says.

    A document is a file of a package, without the sentences of documents before it. By the hash of its name it is one
    of training or, one in `VAL_EVERY`, of validation, and has its place among them. With `data_dir` the archives are
    read from there and nothing is downloaded; else they are, into a folder that goes when the corpus is there.

    Raises:
        BenchError: a package or tokenizer that is unknown; an archive that can't be had, or is another one than its
            sha256 says; an unwritable folder; a limit below a block.
    """
    for name in packages or ():
        if name not in PACKAGES:
            raise unknown("package", name, PACKAGES)
    chosen = {name: package for name, package in PACKAGES.items() if packages is None or name in packages}
    check_folder(out)
    split_limits(limit)
    check_tokenizer(tokenizer)
    with _archives(chosen, data_dir, out, progress) as archives:
        documents, facts = _documents(archives, progress)
    splits: dict[str, list[str]] = {"train": [], "val": []}
    digest = hashlib.sha256()
    for key in sorted(documents):
        splits["train" if int.from_bytes(key[:8]) % VAL_EVERY else "val"].append(documents[key])
        digest.update(documents[key].encode("utf-8"))
    source = {"kind": "packages", "packages": facts, "sha256": digest.hexdigest(), "documents": len(documents)}
    text = "".join(map("".join, splits.values())) if tokenizer == "char" else ""
    return write_corpus(out, splits, make_tokenizer(tokenizer, text, splits["train"]), source, progress, limit)


@contextmanager
def _archives(chosen: dict[str, Package], folder: Path | None, out: Path, progress: bool) -> Iterator[dict[str, Path]]:
    """Yield the archive of each package, whose sha256 was found right; what is downloaded goes with the block."""
    if folder is not None:
        yield {name: _checked(name, chosen, folder) for name in chosen}
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix=f".{out.name}.downloads-", dir=out.parent)
    except OSError as error:
        raise refused(f"--out {str(out)!r} can't be written", error) from None
    with made as downloads:
        found = {}
        for name, package in chosen.items():
            with _bar(f"downloading {name}", progress):
                failure = _download(package.command(name), downloads)
            found[name] = _checked(name, chosen, Path(downloads), failure)
        yield found


def _download(command: list[str], folder: str) -> str:
    """Run a registry's client and return what it says where it fails."""
    try:
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "LC_ALL": "C"}, capture_output=True, check=False, text=True
        )
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    said = [line for line in done.stderr.splitlines() if line.lower().startswith(("e:", "error:"))]
    return one_line((said or done.stderr.splitlines() or ["it failed"])[-1]) if done.returncode else ""


def _checked(name: str, chosen: dict[str, Package], folder: Path, failure: str = "") -> Path:
    package = chosen[name]
    archive = folder / package.archive
    if archive.is_file():
        if (found := sha256(archive)) == package.sha256:
            return archive
        failure = f"{str(archive)!r} has the sha256 {found}, not {package.sha256}"
    where = f"; {failure}" if failure else f": it is not in {str(folder)!r}"
    rest = ",".join(other for other in chosen if other != name)
    command = " ".join(["pip", *package.command(name)[3:]] if archive.suffix == ".whl" else package.command(name))
    raise BenchError(
        f"prepare packages can't have {package.archive}{where}; get it with: {command}; then give its folder with "
        f"--data-dir{f'; or leave it out: --packages {rest}' if rest else ''}"
    )


@contextmanager
def _bar(what: str, show: bool) -> Iterator[Callable[[str], None]]:
    """Show on standard error what is done, how far it is and how long it takes."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn(f"{what} {{task.description}}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show, transient=True) as bar:
        task = bar.add_task("")
        yield lambda said: bar.update(task, description=said)


def _documents(archives: dict[str, Path], progress: bool) -> tuple[dict[bytes, str], dict[str, dict[str, Any]]]:
    """Return every document by the hash of its name, and what meta.json says of each package."""
    known, documents = Sentences(), dict[bytes, str]()
    facts: dict[str, dict[str, Any]] = {}
    for name, archive in archives.items():
        count = size = 0
        with _bar(f"reading {name}", progress) as show:
            for path, texts in PACKAGES[name].read(archive):
                if text := "\n\n".join(filter(None, map(known.new, texts))):
                    documents[hashlib.sha256(f"{name}/{path}".encode()).digest()] = text
                    count, size = count + 1, size + len(text.encode("utf-8"))
                    show(f"{size:,} bytes")
        told = {key: value for key, value in vars(PACKAGES[name]).items() if key != "read"}
        facts[name] = {**told, "documents": count, "bytes": size}
    return documents, facts
