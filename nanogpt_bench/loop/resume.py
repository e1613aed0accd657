"""Resuming: the content of a checkpoint, the checkpoint from which a run is resumed,
and whether its settings agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanogpt_bench.checkpoint import newest, read
from nanogpt_bench.checkpoint.format import (
    Contents,
    capture_tree,
    check_layout,
    clean,
    plain_copy,
    restore_tree,
    step_file,
)
from nanogpt_bench.config.keys import FIELDS
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import flatten, load_config
from nanogpt_bench.data.batches import digests_of
from nanogpt_bench.model.weights import fill, tensors_of
from nanogpt_bench.monitors.points import Observer
from nanogpt_bench.runs.environment import at, latest
from nanogpt_bench.runs.load import summary_of
from nanogpt_bench.runs.read import SUMS
from nanogpt_bench.setup.optimizers import sdnq_state, sdnq_state_back
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.files import is_unused
from nanogpt_bench.system.ranks import Ranks

if TYPE_CHECKING:
    from nanogpt_bench.loop.trainer import Trainer

#: errors that a state made by other code can cause
_MISFITS = (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError)


def capture(
    step: int, trainer: Trainer, observers: Sequence[Observer], facts: dict[str, Any]
) -> Contents | None:
    """Return everything that the steps after `step` depend on, and `facts` beside it;
    all tensors are copies.

    It has the state of model, optimizer, observers and random generators. Batches and
    schedules are functions of the step, and not saved. Scales, histories of magnitudes
    and counters of random bits belong to the model.

    Several processes hold the same state: the first returns it, the others None.
    """
    if not trainer.ranks.first:
        return None
    optimizer = trainer.optimizer.state_dict()
    # Dropout draws from torch's generators; other random numbers are functions of a
    # seed and a count.
    cuda = (
        {"cuda": torch.cuda.get_rng_state(trainer.device)} if trainer.device.type == "cuda" else {}
    )
    random = {"cpu": torch.get_rng_state(), **cuda}
    files = {
        "model": {name: plain_copy(tensor) for name, tensor in tensors_of(trainer.model).items()}
    }
    outlines = {}
    for stem, tree in (
        (
            "optimizer",
            {"state": sdnq_state(optimizer) if _steps_by(trainer, "sdnq") else optimizer},
        ),
        ("observers", {type(observer).__name__: observer.state() for observer in observers}),
        ("random", random),
    ):
        files[stem], outlines[stem] = capture_tree(tree)
    return Contents(step, files, facts={"step": step, **facts, "state": outlines})


def restore(contents: Contents, trainer: Trainer, observers: Sequence[Observer]) -> None:
    """Put a new run into the state that `capture` took; observers without a saved state
    start from the beginning.
    """
    source = f"the checkpoint of step {contents.step}"
    fill(
        trainer.model,
        contents.tensors.get("model", {}),
        contents.metadata.get("model", {}),
        f"{source}'s weights",
    )
    with _fitting(f"{source} does not fit the optimizer"):
        _restore_optimizer(contents, trainer, _state_classes(trainer))
    with _fitting(f"{source} does not fit the monitors"):
        states = _tree(contents, "observers", device=trainer.device)
        for observer in observers:
            if saved := states.get(type(observer).__name__):
                observer.load_state(saved)
    with _fitting(f"{source} has no random state"):
        states = _tree(contents, "random")
        torch.set_rng_state(states["cpu"])
        if trainer.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], trainer.device)


def _steps_by(trainer: Trainer, package: str) -> bool:
    return (trainer.config.optimizer.name or "").startswith(package)


def expected_bytes(trainer: Trainer) -> int:
    """Return roughly the bytes of a checkpoint: the model and two float32 averages per
    weight.
    """
    averages = sum(8 * parameter.numel() for parameter in trainer.model.parameters())
    return averages + sum(tensor.nbytes for tensor in tensors_of(trainer.model).values())


@contextmanager
def _fitting(what: str) -> Iterator[None]:
    try:
        yield
    except BenchError:
        raise
    except _MISFITS as error:
        raise BenchError(f"{what}: {type(error).__name__}: {one_line(error)}") from None


def _tree(
    contents: Contents, stem: str, classes: Sequence[type] = (), device: torch.device | None = None
) -> Any:
    tensors = contents.tensors.get(stem, {})
    moved = (
        tensors if device is None else {name: tensor.to(device) for name, tensor in tensors.items()}
    )
    return restore_tree(moved, contents.facts["state"][stem], classes)


def _restore_optimizer(contents: Contents, trainer: Trainer, classes: Sequence[type]) -> None:
    tree = _tree(contents, "optimizer", classes)
    state = (
        sdnq_state_back(tree["state"], trainer.optimizer)
        if _steps_by(trainer, "sdnq")
        else tree["state"]
    )
    if (
        trainer.config.optimizer.writeback_end is not None
    ):  # a checkpoint of the last steps has it as its write-back
        for group, saved in zip(trainer.optimizer.param_groups, state["param_groups"], strict=True):
            group["writeback"] = saved["writeback"]
    trainer.optimizer.load_state_dict(state)


def _state_classes(trainer: Trainer) -> tuple[type, ...]:
    """Return the tensor subclasses that the optimizer's state may contain."""
    if not _steps_by(trainer, "torchao"):
        return ()
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8

    return OptimState8bit, OptimStateFp8


#: files of an earlier attempt that a new run removes; others it overwrites
_OUTPUT = (SUMS, "metrics.jsonl", "alerts.jsonl", "summary.json", "tracking.json")
Say = Callable[[str], None]


def check_unused(run_dir: Path) -> None:
    """Refuse to begin a run in a folder that already has one."""
    if not is_unused(run_dir):
        raise BenchError(
            f"{str(run_dir)!r} already holds a run; give another --name, or --resume to go on with "
            f"it"
        )


def find_checkpoint(
    run_dir: Path, config: Config, environment: Mapping[str, Any], *, allow_change: bool, say: Say
) -> Contents | None:
    """Return the newest checkpoint that verifies, None where the run begins at step 0;
    `say` gets the notices.
    """
    check_layout(run_dir)
    clean(run_dir)
    path, skipped = newest(run_dir)
    for line in skipped:
        say(f"skipped {line}")
    if path is None:
        _check_unfinished(run_dir, config, allow_change=allow_change, say=say)
        say(
            f"{run_dir} has no checkpoint{' that verifies' if skipped else ''}: the run begins at "
            f"step 0"
        )
        return None
    contents = read(path)
    _check_config(contents.facts.get("config", {}), config, allow_change=allow_change, say=say)
    _check_environment(
        contents.facts.get("environment", {}), environment, allow_change=allow_change, say=say
    )
    if contents.step > (end := config.train.max_steps):
        raise BenchError(
            f"train.max_steps={end} is below the {contents.step} steps that {run_dir} has made"
        )
    if contents.step == end and (changed := _changed(contents, environment, config)):
        raise BenchError(
            f"{run_dir} has made its {end} steps, which {', '.join(changed)} can't change; give "
            f"another --name"
        )
    say(f"{run_dir} goes on after step {contents.step}")
    return contents


def found_by_all(
    ranks: Ranks, run_dir: Path, find: Callable[[], Contents | None]
) -> Contents | None:
    """Return in every process the checkpoint that the first one finds; the others read
    the same file.
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
    """Return a configuration as JSON values; numbers that JSON can't write become
    strings.
    """
    facts: dict[str, Any] = json.loads(json.dumps(config.model_dump()), parse_constant=str)
    return facts


def remove_output(run_dir: Path) -> None:
    """Remove the files of an earlier attempt to which a run at step 0 would append."""
    for name in _OUTPUT:
        (run_dir / name).unlink(missing_ok=True)


def resumed_environment(
    contents: Contents, environment: Mapping[str, Any], config: Config
) -> dict[str, Any]:
    """Return environment.json of a resumed run: its beginning, and each later start
    with what it changed.
    """
    first = dict(contents.facts.get("environment", {}))
    again = {
        "step": contents.step,
        **{key: value for key, value in environment.items() if key != "corpus"},
    }
    changed = _changed(contents, environment, config)
    again |= {"changed": changed} if changed else {}
    again |= {"corpus": environment.get("corpus")} if "corpus" in changed else {}
    return {**first, "resumed": [*first.get("resumed", []), again]}


def _changed(contents: Contents, environment: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return what changes the numbers since the checkpoint: a setting or the corpus,
    with both values.
    """
    changes = _changes(contents.facts.get("config", {}), config_facts(config))
    changed: dict[str, Any] = {
        key: values for key, *values in changes if FIELDS[key].facts["changes_numbers"]
    }
    before = latest(dict(contents.facts.get("environment", {})))
    digests = [_digests(facts) for facts in (before, environment)]
    return changed | ({"corpus": digests} if digests[0] != digests[1] else {})


def _check_unfinished(run_dir: Path, config: Config, *, allow_change: bool, say: Say) -> None:
    """Refuse to begin again in a folder with a finished run, other settings, or files
    that are no run's.
    """
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return
    if summary_of(run_dir).get("status") == "finished":
        raise BenchError(
            f"run folder {str(run_dir)!r} holds a finished run without a checkpoint; give another "
            f"--name"
        )
    if not (run_dir / "config.yaml").is_file():
        if any(not path.name.startswith(".") for path in run_dir.iterdir()):
            raise BenchError(f"folder {str(run_dir)!r} holds no run; give another --name")
        return
    saved = config_facts(load_config(run_dir / "config.yaml"))
    _check_config(saved, config, allow_change=allow_change, say=say)


def _check_config(
    saved: Mapping[str, Any], config: Config, *, allow_change: bool, say: Say
) -> None:
    if isinstance(saved, Mapping):
        dict(flatten(saved))  # refuses a setting that no longer exists
    changed = [
        (key, f"{key} was {was!r}, is {now!r}")
        for key, was, now in _changes(saved, config_facts(config))
    ]
    fixed = [text for key, text in changed if FIELDS[key].facts["changes_numbers"]]
    if fixed and not allow_change:
        raise BenchError(
            f"the run was made with other settings: {', '.join(fixed)}; give the same, or "
            f"--allow-config-change to go "
            "on with the new ones"
        )
    if changed:
        say(f"settings that differ from the checkpoint's: {', '.join(text for _, text in changed)}")


def _changes(
    saved: Mapping[str, Any], current: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys that differ, with both values; a key that `saved` does not have
    counts as its default.
    """
    for key, setting in FIELDS.items():
        default = json.loads(json.dumps(setting.default), parse_constant=str)
        before, now = at(saved, key, default), at(current, key, default)
        if before != now:
            yield key, before, now


def _check_environment(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, allow_change: bool, say: Say
) -> None:
    """Refuse another corpus; report other differences that may change the last bits."""
    if _digests(latest(saved)) != _digests(current) and not allow_change:
        raise BenchError(
            "data.dir: the corpus is not the one that the run was begun on (its sha256 differs); "
            "give that one, or --allow-config-change"
        )
    keys = ("libraries.torch", "threads", "cpu", "gpu", "processes")
    both = [(key, at(saved, key), at(current, key)) for key in keys]
    differing = [f"{key} was {before!r}, is {now!r}" for key, before, now in both if before != now]
    if differing:
        say(f"the last bits may differ from an uninterrupted run's: {', '.join(differing)}")


def _digests(environment: Mapping[str, Any]) -> dict[str, Any]:
    return digests_of(at(environment, "corpus.splits", {}))
