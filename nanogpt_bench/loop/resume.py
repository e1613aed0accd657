"""Taking up a run where its last whole checkpoint was committed: which one, and whether the configuration agrees."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nanogpt_bench.checkpoint import Contents, check_layout, clean, newest, read, step_file
from nanogpt_bench.config.keys import FIELDS
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import flatten, load_config
from nanogpt_bench.data.batches import digests_of
from nanogpt_bench.runs.environment import at, latest
from nanogpt_bench.runs.find import summary_of
from nanogpt_bench.runs.read import SUMS
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.files import is_unused
from nanogpt_bench.system.ranks import Ranks

#: what a run leaves behind that begins anew; its other files are written over
_OUTPUT = (SUMS, "metrics.jsonl", "alerts.jsonl", "summary.json", "tracking.json")
Say = Callable[[str], None]


def check_unused(run_dir: Path) -> None:
    """Refuse to begin a run in a folder that holds one.

    Raises:
        BenchError: says so.
    """
    if not is_unused(run_dir):
        raise BenchError(
            f"run folder {str(run_dir)!r} already holds a run; give another --name, or --resume to go on with it"
        )


def find_checkpoint(
    run_dir: Path, config: Config, environment: Mapping[str, Any], *, allow_change: bool, say: Say
) -> Contents | None:
    """Return the newest checkpoint that verifies, None where the run begins at step 0; `say` is told what is noticed.

    Raises:
        BenchError: a configuration or a corpus that would change the numbers, a finished run without a checkpoint, or
            a folder that holds no run, or one of an earlier version.
    """
    check_layout(run_dir)
    clean(run_dir)
    path, skipped = newest(run_dir)
    for line in skipped:
        say(f"skipped {line}")
    if path is None:
        _check_unfinished(run_dir, config, allow_change=allow_change, say=say)
        say(f"{run_dir} has no checkpoint{' that verifies' if skipped else ''}: the run begins at step 0")
        return None
    contents = read(path)
    _check_config(contents.facts.get("config", {}), config, allow_change=allow_change, say=say)
    _check_environment(contents.facts.get("environment", {}), environment, allow_change=allow_change, say=say)
    say(f"{run_dir} goes on after step {contents.step}")
    return contents


def found_by_all(ranks: Ranks, run_dir: Path, find: Callable[[], Contents | None]) -> Contents | None:
    """Return in every process what the first one finds: the others read the same checkpoint from the same folder.

    Raises:
        BenchError: it can't be found or read in one of them.
    """
    found = None
    with ranks.together():
        found = find() if ranks.first else None
    step = ranks.broadcast("" if found is None else str(found.step))
    with ranks.together():
        if step and not ranks.first:
            found = read(step_file(run_dir, int(step)))
    return found


def config_facts(config: Config) -> dict[str, Any]:
    """Return a configuration as JSON has it; numbers that JSON has no word for become words."""
    facts: dict[str, Any] = json.loads(json.dumps(config.model_dump()), parse_constant=str)
    return facts


def remove_output(run_dir: Path) -> None:
    """Remove what an earlier attempt wrote that a run at step 0 would add to."""
    for name in _OUTPUT:
        (run_dir / name).unlink(missing_ok=True)


def resumed_environment(contents: Contents, environment: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return environment.json of a run that goes on: that of its beginning, and every place where it was taken up.

    What was changed there that changes the numbers is told with it (`nanogpt_bench.runs.history`).
    """
    first = dict(contents.facts.get("environment", {}))
    again = {"step": contents.step, **{key: value for key, value in environment.items() if key != "corpus"}}
    changes = _changes(contents.facts.get("config", {}), config_facts(config))
    changed: dict[str, Any] = {
        key: [before, now] for key, before, now in changes if FIELDS[key].facts["changes_numbers"]
    }
    digests = [_digests(facts) for facts in (latest(first), environment)]
    changed |= {"corpus": digests} if digests[0] != digests[1] else {}
    again |= {"changed": changed} if changed else {}
    again |= {"corpus": environment.get("corpus")} if "corpus" in changed else {}
    return {**first, "resumed": [*first.get("resumed", []), again]}


def _check_unfinished(run_dir: Path, config: Config, *, allow_change: bool, say: Say) -> None:
    """Refuse to begin anew where something would be lost that can't be had again."""
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return
    if summary_of(run_dir).get("status") == "finished":
        raise BenchError(f"run folder {str(run_dir)!r} holds a finished run without a checkpoint; give another --name")
    if not (run_dir / "config.yaml").is_file():
        if any(not path.name.startswith(".") for path in run_dir.iterdir()):
            raise BenchError(f"folder {str(run_dir)!r} holds no run; give another --name")
        return
    saved = config_facts(load_config(run_dir / "config.yaml"))
    _check_config(saved, config, allow_change=allow_change, say=say)


def _check_config(saved: Mapping[str, Any], config: Config, *, allow_change: bool, say: Say) -> None:
    if isinstance(saved, Mapping):
        dict(flatten(saved))  # which refuses what asks for a setting that is gone
    changed = [(key, f"{key} was {was!r}, is {now!r}") for key, was, now in _changes(saved, config_facts(config))]
    fixed = [text for key, text in changed if FIELDS[key].facts["changes_numbers"]]
    if fixed and not allow_change:
        raise BenchError(
            f"the run was made with other settings: {', '.join(fixed)}; give the same, or --allow-config-change to go "
            "on with the new ones"
        )
    if changed:
        say(f"settings that differ from the checkpoint's: {', '.join(text for _, text in changed)}")


def _changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys that differ, with both values; a key that the saved ones do not know had its default."""
    for key, setting in FIELDS.items():
        default = json.loads(json.dumps(setting.default), parse_constant=str)
        before, now = at(saved, key, default), at(current, key, default)
        if before != now:
            yield key, before, now


def _check_environment(saved: Mapping[str, Any], current: Mapping[str, Any], *, allow_change: bool, say: Say) -> None:
    """Refuse another corpus; say what else may change the last bits."""
    if _digests(latest(saved)) != _digests(current) and not allow_change:
        raise BenchError(
            "data.dir: the corpus is not the one that the run was begun on (its sha256 differs); give that one, or "
            "--allow-config-change"
        )
    keys = ("libraries.torch", "threads", "cpu", "gpu", "processes")
    both = [(key, at(saved, key), at(current, key)) for key in keys]
    differing = [f"{key} was {before!r}, is {now!r}" for key, before, now in both if before != now]
    if differing:
        say(f"the last bits may differ from an uninterrupted run's: {', '.join(differing)}")


def _digests(environment: Mapping[str, Any]) -> dict[str, Any]:
    return digests_of(at(environment, "corpus.splits", {}))
