"""environment.json: what a result depends on beside its settings, and what changed when
a run was resumed.
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
_OF_CORPUS = ("splits", "labels")
_LIBRARIES = ("fp8manifold", "torch", "geoopt", "numpy")


def environment(corpus: Corpus, threads: int | None = None) -> dict[str, Any]:
    """Return the content of environment.json."""
    return {
        "command": command_line(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **machine(threads),
        "corpus": {"source": corpus.meta.get("source")}
        | {k: v for k, v in corpus.meta.items() if k in _OF_CORPUS},
        "tokenizer": corpus.meta["tokenizer"],
    }


def machine(threads: int | None = None) -> dict[str, Any]:
    """Return versions and processors, on which the results of all runs on this machine
    depend.
    """
    import torch  # not at the top: reading a run folder does not need it

    versions = dict.fromkeys(_LIBRARIES)
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "commit": commit(),
        "libraries": versions | {"torch": torch.__version__},
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),  # torch's name of its vector instructions
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": threads or torch.get_num_threads(),
    }


def command_line() -> str:
    """Return the running command as it would be typed, the program without its path."""
    program = Path(sys.argv[0]).name
    return shlex.join(
        ["nanogpt-bench" if program == "__main__.py" else program, *sys.argv[1:]]
    )  # python -m


@cache
def commit() -> str | None:
    """Return the commit that is installed or checked out, with `+` if files were
    changed; None if unknown.
    """
    with suppress(metadata.PackageNotFoundError, ValueError, TypeError, AttributeError):
        origin = json.loads(
            metadata.distribution("fp8manifold").read_text("direct_url.json") or "{}"
        )
        if found := origin.get("vcs_info", {}).get("commit_id"):
            return str(found)
    here = ["git", "-C", str(Path(__file__).parent)]
    with suppress(OSError, subprocess.SubprocessError):
        options: dict[str, Any] = {
            "capture_output": True,
            "text": True,
            "timeout": 10,
            "check": True,
        }
        # An installed copy may be inside another project's checkout.
        subprocess.run([*here, "ls-files", "--error-unmatch", Path(__file__).name], **options)
        found = subprocess.run(
            [*here, "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"], **options
        )
        return str(found.stdout).strip() or None
    return None


def cpu_model() -> str:
    """Return the processor's name as the operating system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def on_two_processors(there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Return whether two runs were made on different processors or systems, judged by
    what both records have.
    """
    pairs = [(there.get(key), here.get(key)) for key in ("cpu", "cpu_capability", "platform")]
    return any(then != now for then, now in pairs if None not in (then, now))


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
    """Return the changes on resuming, by step, each as {"step": N, "changed": {key:
    [before, after]}}.

    The keys are settings that change the numbers, and the corpus. Malformed entries are
    left out.

    >>> config_history({"resumed": [{"step": 3, "changed": {"optimizer.lr": [0.1, 0.2]}}, {"step": 6}]})
    [{'step': 3, 'changed': {'optimizer.lr': [0.1, 0.2]}}]
    """
    history = []
    for entry in _resumed(environment):
        changed = entry.get("changed")
        pairs = changed.items() if isinstance(changed, Mapping) else ()
        known = {
            str(key): list(pair)
            for key, pair in pairs
            if isinstance(pair, list | tuple) and len(pair) == 2
        }
        if known and isinstance(entry.get("step"), int):
            history.append({"step": entry["step"], "changed": known})
    return history


def _resumed(environment: Any) -> list[Mapping[str, Any]]:
    """The entries of all starts after the first."""
    listed = at(environment, "resumed")
    return (
        [entry for entry in listed if isinstance(entry, Mapping)]
        if isinstance(listed, list)
        else []
    )


def latest(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return environment.json as it was at the last start: machine, versions, threads
    and corpus.

    >>> latest({"threads": 2, "cpu": "a", "resumed": [{"step": 3, "threads": 1}]})["threads"]
    1
    """
    now = dict(environment)
    for entry in _resumed(environment):
        now |= entry
    return now


def history_lines(environment: Any) -> Iterator[str]:
    """Yield a line for every resumption that changed settings.

    >>> list(history_lines({"resumed": [{"step": 3, "changed": {"optimizer.lr": [0.1, 0.2]}}]}))
    ['settings were changed after step 3: optimizer.lr was 0.1, is 0.2; config.yaml alone does not repeat the run']
    """
    for entry in config_history(environment):
        texts = {
            key: [shortened(json.dumps(v), LONGEST_VALUE) for v in pair]
            for key, pair in entry["changed"].items()
        }
        changes = ", ".join(f"{key} was {was}, is {now}" for key, (was, now) in texts.items())
        yield f"settings were changed after step {entry['step']}: {changes}; config.yaml alone does not repeat the run"


def history_comment(environment: Any) -> str:
    """Return `history_lines` as comments for the top of config.yaml; empty where
    nothing changed.
    """
    return "".join(f"# {line}\n" for line in history_lines(environment))
