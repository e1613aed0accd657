"""environment.json: what a result depends on beside its settings.

It has the versions, the machine, the corpus, that of `eval.also` if there is one, and a
list `resumed` with what was different at each later start: the step, the changed settings,
the machine.
"""

import datetime
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from nanogpt_bench.data.batches import Corpus
from nanogpt_bench.system.errors import shortened

#: the entries of meta.json that losses depend on
_CORPUS_ENTRIES = ("splits", "labels")
_LIBRARIES = ("fp8manifold", "torch", "geoopt", "numpy")


def environment(corpus: Corpus, threads: int | None = None) -> dict[str, Any]:
    """Return the content of environment.json."""
    return {
        "command": command_line(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **machine(threads),
        "corpus": corpus_facts(corpus),
        "tokenizer": corpus.meta["tokenizer"],
    }


def corpus_facts(corpus: Corpus) -> dict[str, Any]:
    """Return what a text's meta.json says of its source and its digests."""
    facts = {"source": corpus.meta.get("source")}
    for name, value in corpus.meta.items():
        if name in _CORPUS_ENTRIES:
            facts[name] = value
    return facts


def machine(threads: int | None = None) -> dict[str, Any]:
    """Return versions and processors, on which the results of all runs depend."""
    # not at the top: reading a run folder does not need it
    import torch

    versions = dict.fromkeys(_LIBRARIES)
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    versions["torch"] = torch.__version__
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "commit": source_commit(),
        "libraries": versions,
        "cpu": cpu_model(),
        # torch's name of the processor's vector instructions
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": threads or torch.get_num_threads(),
    }


def command_line() -> str:
    """Return the running command as it would be typed, the program without its path."""
    program = Path(sys.argv[0]).name
    if program == "__main__.py":
        # started by python -m
        program = "nanogpt-bench"
    return shlex.join([program, *sys.argv[1:]])


@cache
def source_commit() -> str | None:
    """Return the commit that is installed or checked out; None if unknown.

    It ends with `+` if files were changed.
    """
    return _installed_commit() or _checked_out_commit()


def _installed_commit() -> str | None:
    with suppress(metadata.PackageNotFoundError, ValueError, TypeError, AttributeError):
        text = metadata.distribution("fp8manifold").read_text("direct_url.json")
        commit_id = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
        return str(commit_id) if commit_id else None
    return None


def _checked_out_commit() -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        # An installed copy may be inside another project's checkout.
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        name = _git("describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*")
        return name.strip() or None
    return None


def _git(*arguments: str) -> str:
    """Return what git prints about the folder of this file."""
    result = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), *arguments],
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    return result.stdout


def cpu_model() -> str:
    """Return the processor's name as the operating system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def on_two_processors(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether two runs were made on different processors or systems.

    `a` and `b` are their records. What one of them does not have is not compared.
    """
    for key in ("cpu", "cpu_capability", "platform", "gpu"):
        values = (a.get(key), b.get(key))
        if None not in values and values[0] != values[1]:
            return True
    return False


def at(tree: Any, key: str, default: Any = None) -> Any:
    """Return the value in nested mappings at a dotted key.

    >>> at({"libraries": {"torch": "2.9"}}, "libraries.torch"), at({"gpu": None}, "cpu")
    ('2.9', None)
    """
    for name in key.split("."):
        if not isinstance(tree, Mapping) or name not in tree:
            return default
        tree = tree[name]
    return tree


#: the most characters of a setting's value in a line
LONGEST_VALUE = 200


def config_history(environment: Any) -> list[dict[str, Any]]:
    """Return the changes on resuming, by step.

    Each is {"step": N, "changed": {key: [before, after]}}. The keys are settings that
    change the numbers, and the corpus. Malformed entries are left out.

    >>> resumed = [{"step": 3, "changed": {"optimizer.lr": [0.1, 0.2]}}, {"step": 6}]
    >>> config_history({"resumed": resumed})
    [{'step': 3, 'changed': {'optimizer.lr': [0.1, 0.2]}}]
    """
    history = []
    for entry in _resumed(environment):
        changed = entry.get("changed")
        changes: dict[str, list[Any]] = {}
        for key, pair in changed.items() if isinstance(changed, Mapping) else ():
            if isinstance(pair, list | tuple) and len(pair) == 2:
                changes[str(key)] = list(pair)
        if changes and isinstance(entry.get("step"), int):
            history.append({"step": entry["step"], "changed": changes})
    return history


def _resumed(environment: Any) -> list[Mapping[str, Any]]:
    """Return the entries of all starts after the first."""
    entries = at(environment, "resumed")
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, Mapping)]


def latest(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return environment.json as it was at the last start.

    Machine, versions, threads and corpus are those of that start.

    >>> resumed = [{"step": 3, "threads": 1}]
    >>> latest({"threads": 2, "cpu": "a", "resumed": resumed})["threads"]
    1
    """
    now = dict(environment)
    for entry in _resumed(environment):
        now |= entry
    return now


def history_lines(environment: Any) -> Iterator[str]:
    """Yield a line for every resumption that changed settings.

    >>> changed = {"optimizer.lr": [0.1, 0.2]}
    >>> line, = history_lines({"resumed": [{"step": 3, "changed": changed}]})
    >>> line.partition(";")[0]
    'settings were changed after step 3: optimizer.lr was 0.1, is now 0.2'
    """
    for entry in config_history(environment):
        changes = []
        for key, pair in entry["changed"].items():
            old, new = (shortened(json.dumps(value), LONGEST_VALUE) for value in pair)
            changes.append(f"{key} was {old}, is now {new}")
        yield (
            f"settings were changed after step {entry['step']}: {', '.join(changes)}; config.yaml "
            "alone does not reproduce the run"
        )


def history_comment(environment: Any) -> str:
    """Return `history_lines` as comments for the top of config.yaml."""
    return "".join(f"# {line}\n" for line in history_lines(environment))
