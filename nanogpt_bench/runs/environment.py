"""environment.json: what a result depends on beside its settings, and what changed on the way."""

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

#: of meta.json, what the losses depend on
_OF_CORPUS = ("splits", "labels")
_LIBRARIES = ("fp8manifold", "torch", "geoopt", "numpy")


def environment(corpus: Corpus, threads: int | None = None) -> dict[str, Any]:
    """Return the content of environment.json."""
    return {
        "command": command_line(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **machine(threads),
        "corpus": {"source": corpus.meta.get("source")} | {k: v for k, v in corpus.meta.items() if k in _OF_CORPUS},
        "tokenizer": corpus.meta["tokenizer"],
    }


def machine(threads: int | None = None) -> dict[str, Any]:
    """Return what a result depends on that is the same for all runs of a machine: versions and processors."""
    import torch  # whoever reads a run folder does without

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "commit": commit(),
        "libraries": {name: _version(name) for name in _LIBRARIES} | {"torch": torch.__version__},
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),  # the width of its vectors, by torch's name
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": threads or torch.get_num_threads(),
    }


def command_line() -> str:
    """Return the running command as it would be typed, the program by its name only."""
    program = Path(sys.argv[0]).name
    return shlex.join(["nanogpt-bench" if program == "__main__.py" else program, *sys.argv[1:]])  # python -m


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@cache
def commit() -> str | None:
    """Return the commit that this package is of: as it was installed, or as it is checked out; None if unknown.

    One behind which files were changed ends in `+`.
    """
    with suppress(metadata.PackageNotFoundError, ValueError, TypeError, AttributeError):
        told = json.loads(metadata.distribution("fp8manifold").read_text("direct_url.json") or "{}")
        if found := told.get("vcs_info", {}).get("commit_id"):
            return str(found)
    here = ["git", "-C", str(Path(__file__).parent)]
    with suppress(OSError, subprocess.SubprocessError):
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10, "check": True}
        # An installed copy may lie inside a checkout of something else: that one's commit says nothing.
        subprocess.run([*here, "ls-files", "--error-unmatch", Path(__file__).name], **options)
        said = subprocess.run([*here, "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"], **options)
        return str(said.stdout).strip() or None
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
    """Return whether two runs were made on two processors, by their names, vectors and systems.

    One name may stand for several processors, so the system counts. A fact that either record lacks is skipped.
    """
    pairs = [(there.get(key), here.get(key)) for key in ("cpu", "cpu_capability", "platform")]
    return any(then != now for then, now in pairs if None not in (then, now))


def at(tree: Any, key: str, default: Any = None) -> Any:
    """Return what mappings within mappings have at a dotted key.

    >>> at({"libraries": {"torch": "2.9"}}, "libraries.torch"), at({"gpu": None}, "cpu")
    ('2.9', None)
    """
    for name in key.split("."):
        if not isinstance(tree, Mapping) or name not in tree:
            return default
        tree = tree[name]
    return tree


#: of a setting's value in a line
LONGEST_VALUE = 200


def config_history(environment: Any) -> list[dict[str, Any]]:
    """Return the changes in the order of their steps, each as {"step": N, "changed": {key: [before, after]}}.

    Only settings that change the numbers are in it, and the corpus. What does not fit is left out: the file may be
    anyone's.

    >>> config_history({"resumed": [{"step": 3, "changed": {"optimizer.lr": [0.1, 0.2]}}, {"step": 6}]})
    [{'step': 3, 'changed': {'optimizer.lr': [0.1, 0.2]}}]
    """
    resumed = environment.get("resumed") if isinstance(environment, Mapping) else None
    return [
        {"step": entry["step"], "changed": changed}
        for entry in (resumed if isinstance(resumed, list) else [])
        if isinstance(entry, Mapping) and isinstance(entry.get("step"), int) and (changed := _pairs(entry))
    ]


def _pairs(entry: Mapping[str, Any]) -> dict[str, list[Any]]:
    changed = entry.get("changed")
    if not isinstance(changed, Mapping):
        return {}
    return {str(key): list(pair) for key, pair in changed.items() if isinstance(pair, list | tuple) and len(pair) == 2}


def latest(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return environment.json as it was where a run was last taken up: machine, versions, threads and corpus.

    >>> latest({"threads": 2, "cpu": "a", "resumed": [{"step": 3, "threads": 1}]})["threads"]
    1
    """
    resumed = environment.get("resumed")
    now = dict(environment)
    for entry in resumed if isinstance(resumed, list) else []:
        now |= entry if isinstance(entry, Mapping) else {}
    return now


def history_lines(environment: Any) -> Iterator[str]:
    """Yield a line for every change.

    >>> list(history_lines({"resumed": [{"step": 3, "changed": {"optimizer.lr": [0.1, 0.2]}}]}))
    ['settings were changed after step 3: optimizer.lr was 0.1, is 0.2; config.yaml alone does not repeat the run']
    """
    for entry in config_history(environment):
        changes = ", ".join(
            f"{key} was {_shown(was)}, is {_shown(now)}" for key, (was, now) in entry["changed"].items()
        )
        yield f"settings were changed after step {entry['step']}: {changes}; config.yaml alone does not repeat the run"


def history_comment(environment: Any) -> str:
    """Return those lines as the first ones of config.yaml; nothing where the settings are those of every step."""
    return "".join(f"# {line}\n" for line in history_lines(environment))


def _shown(value: Any) -> str:
    """A value on one line of printable characters: JSON escapes all others."""
    return shortened(json.dumps(value), LONGEST_VALUE)
