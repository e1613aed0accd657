"""Resuming: the content of a checkpoint, and whether a run may go on from it.

`capture` and `restore` copy the state of a run into a checkpoint and back.
`find_checkpoint` picks the newest checkpoint that verifies, and refuses settings and a
corpus that would change the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanogpt_bench.checkpoint import newest, read_checkpoint
from nanogpt_bench.checkpoint.format import (
    Contents,
    capture_tree,
    clean,
    plain_copy,
    refuse_checkpoint_folders,
    restore_tree,
    step_file,
)
from nanogpt_bench.config.endings import RunStatus
from nanogpt_bench.config.keys import FIELDS
from nanogpt_bench.config.renamed import current_value
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import flatten, load_config
from nanogpt_bench.data.batches import digests_of
from nanogpt_bench.model.weights import fill, tensors_of
from nanogpt_bench.monitors.points import Observer
from nanogpt_bench.runs.environment import at, latest
from nanogpt_bench.runs.load import summary_of
from nanogpt_bench.runs.read import ALERTS_FILE, METRICS_FILE, SUMS
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.files import is_unused
from nanogpt_bench.system.ranks import Ranks

if TYPE_CHECKING:
    from nanogpt_bench.loop.trainer import Trainer

#: errors that a state made by other code can cause
_MISFITS = (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError)
#: files of an earlier attempt that a new run removes; others it overwrites
_OUTPUT = (SUMS, METRICS_FILE, ALERTS_FILE, "summary.json", "tracking.json")
Say = Callable[[str], None]


def capture(
    step: int, trainer: Trainer, observers: Sequence[Observer], facts: dict[str, Any]
) -> Contents | None:
    """Return everything that the steps after `step` depend on, and `facts`.

    It has the state of model, optimizer, observers and random generators. All tensors
    are copies. Batches and schedules are functions of the step, and not saved. Scales,
    histories of magnitudes and counters of random bits belong to the model.

    Several processes hold equal states: the first returns it, the others None.
    """
    if not trainer.ranks.first:
        return None
    # Dropout draws from torch's generators; other random numbers are functions of a
    # seed and a count.
    random_states = {"cpu": torch.get_rng_state()}
    if trainer.device.type == "cuda":
        random_states["cuda"] = torch.cuda.get_rng_state(trainer.device)
    trees = {
        "optimizer": {"state": trainer.optimizer.state_dict()},
        "observers": {type(observer).__name__: observer.state() for observer in observers},
        "random": random_states,
    }
    weights = {name: plain_copy(tensor) for name, tensor in tensors_of(trainer.model).items()}
    tensors = {"model": weights}
    outlines = {}
    for stem, tree in trees.items():
        tensors[stem], outlines[stem] = capture_tree(tree)
    return Contents(step, tensors, facts={"step": step, **facts, "state": outlines})


def restore(contents: Contents, trainer: Trainer, observers: Sequence[Observer]) -> None:
    """Put a new run into the state that `capture` took.

    Observers without a saved state start from the beginning.
    """
    source = f"the checkpoint of step {contents.step}"
    fill(
        trainer.model,
        contents.tensors.get("model", {}),
        contents.metadata.get("model", {}),
        f"{source}'s weights",
    )
    with _misfits_refused(f"{source} does not fit the optimizer"):
        _restore_optimizer(contents, trainer, _state_classes(trainer))
    with _misfits_refused(f"{source} does not fit the monitors"):
        states = _restore_tree(contents, "observers", device=trainer.device)
        for observer in observers:
            state = states.get(type(observer).__name__)
            if state:
                observer.load_state(state)
    with _misfits_refused(f"{source} does not hold the state of the random numbers"):
        states = _restore_tree(contents, "random")
        torch.set_rng_state(states["cpu"])
        if trainer.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], trainer.device)


def expected_bytes(trainer: Trainer) -> int:
    """Return roughly the bytes of a checkpoint.

    They are those of the model and two float32 averages per weight.
    """
    averages = sum(8 * parameter.numel() for parameter in trainer.model.parameters())
    return averages + sum(tensor.nbytes for tensor in tensors_of(trainer.model).values())


@contextmanager
def _misfits_refused(complaint: str) -> Iterator[None]:
    try:
        yield
    except BenchError:
        raise
    except _MISFITS as error:
        raise BenchError(f"{complaint}: {type(error).__name__}: {one_line(error)}") from None


def _restore_tree(
    contents: Contents, stem: str, classes: Sequence[type] = (), device: torch.device | None = None
) -> Any:
    tensors = contents.tensors.get(stem, {})
    if device is not None:
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    return restore_tree(tensors, contents.facts["state"][stem], classes)


def _restore_optimizer(contents: Contents, trainer: Trainer, classes: Sequence[type]) -> None:
    state = _restore_tree(contents, "optimizer", classes)["state"]
    if trainer.config.optimizer.writeback_end is not None:
        # A checkpoint of the last steps has the last write-back.
        for group, saved in zip(trainer.optimizer.param_groups, state["param_groups"], strict=True):
            group["writeback"] = saved["writeback"]
    trainer.optimizer.load_state_dict(state)


def _state_classes(trainer: Trainer) -> tuple[type, ...]:
    """Return the tensor subclasses that the optimizer's state may contain."""
    if not (trainer.config.optimizer.name or "").startswith("torchao"):
        return ()
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8

    return OptimState8bit, OptimStateFp8


def check_unused(run_dir: Path) -> None:
    """Refuse to begin a run in a folder that already has one."""
    if not is_unused(run_dir):
        raise BenchError(
            f"{str(run_dir)!r} already holds a run; give another --name, or --resume to continue "
            "the run"
        )


def find_checkpoint(
    run_dir: Path, config: Config, environment: Mapping[str, Any], *, allow_change: bool, say: Say
) -> Contents | None:
    """Return the newest checkpoint that verifies.

    The result is None where the run begins at step 0. `say` gets the notices.
    """
    refuse_checkpoint_folders(run_dir)
    clean(run_dir)
    path, skipped = newest(run_dir)
    for line in skipped:
        say(f"skipped {line}")
    if path is None:
        _check_unfinished(run_dir, config, allow_change=allow_change, say=say)
        kind = "valid checkpoint" if skipped else "checkpoint"
        say(f"{run_dir} has no {kind}: the run begins at step 0")
        return None
    contents = read_checkpoint(path)
    _check_config(contents.facts.get("config", {}), config, allow_change=allow_change, say=say)
    _check_environment(
        contents.facts.get("environment", {}), environment, allow_change=allow_change, say=say
    )
    max_steps = config.train.max_steps
    if contents.step > max_steps:
        raise BenchError(
            f"train.max_steps={max_steps} is less than the {contents.step} steps that {run_dir} "
            "has made already"
        )
    if contents.step == max_steps:
        changes = _number_changes(contents, environment, config)
        if changes:
            raise BenchError(
                f"{run_dir} has made all of its {max_steps} steps, so {', '.join(changes)} can't "
                "change them; give another --name"
            )
    say(f"{run_dir} continues after step {contents.step}")
    return contents


def share_checkpoint(
    ranks: Ranks, run_dir: Path, find: Callable[[], Contents | None]
) -> Contents | None:
    """Return in every process the checkpoint that the first one finds.

    The others read the file that the first one has read.
    """
    checkpoint = None
    with ranks.together():
        if ranks.first:
            checkpoint = find()
    step = ranks.broadcast("" if checkpoint is None else str(checkpoint.step))
    with ranks.together():
        if step and not ranks.first:
            checkpoint = read_checkpoint(step_file(run_dir, int(step)))
    return checkpoint


def config_facts(config: Config) -> dict[str, Any]:
    """Return a configuration as JSON values.

    Numbers that JSON can't write become strings.
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
    """Return environment.json of a resumed run.

    It has the environment of the beginning, and those of later starts with what each
    changed.
    """
    first = dict(contents.facts.get("environment", {}))
    start = {"step": contents.step, **environment}
    start.pop("corpus", None)
    changes = _number_changes(contents, environment, config)
    if changes:
        start["changed"] = changes
    if "corpus" in changes:
        start["corpus"] = environment.get("corpus")
    return {**first, "resumed": [*first.get("resumed", []), start]}


def _number_changes(
    contents: Contents, environment: Mapping[str, Any], config: Config
) -> dict[str, list[Any]]:
    """Return what changes the numbers since the checkpoint, with old and new value.

    It is settings, by their keys, or the corpus.
    """
    changes: dict[str, list[Any]] = {}
    for change in _setting_changes(contents.facts.get("config", {}), config_facts(config)):
        if change.affects_numbers:
            changes[change.key] = [change.old, change.new]
    old_digests = _corpus_digests(latest(dict(contents.facts.get("environment", {}))))
    new_digests = _corpus_digests(environment)
    if old_digests != new_digests:
        changes["corpus"] = [old_digests, new_digests]
    return changes


def _check_unfinished(run_dir: Path, config: Config, *, allow_change: bool, say: Say) -> None:
    """Refuse to begin again in a folder of a finished run or other settings.

    A folder with other files is refused, too.
    """
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return
    if summary_of(run_dir).get("status") == RunStatus.FINISHED:
        raise BenchError(
            f"run folder {str(run_dir)!r} holds a finished run, without a checkpoint to continue "
            "from; give another --name"
        )
    if not (run_dir / "config.yaml").is_file():
        if any(not path.name.startswith(".") for path in run_dir.iterdir()):
            raise BenchError(
                f"folder {str(run_dir)!r} is not empty and does not hold a run; give another --name"
            )
        return
    saved = config_facts(load_config(run_dir / "config.yaml"))
    _check_config(saved, config, allow_change=allow_change, say=say)


def _check_config(
    saved: Mapping[str, Any], config: Config, *, allow_change: bool, say: Say
) -> None:
    if isinstance(saved, Mapping):
        # Refuses a setting that no longer exists.
        dict(flatten(saved))
    changes = list(_setting_changes(saved, config_facts(config)))
    forbidden = [change.describe() for change in changes if change.affects_numbers]
    if forbidden and not allow_change:
        raise BenchError(
            f"the run was made with other settings: {', '.join(forbidden)}; give the same, or "
            "--allow-config-change to continue with the new ones"
        )
    if changes:
        texts = [change.describe() for change in changes]
        say(f"settings that differ from the checkpoint's: {', '.join(texts)}")


@dataclass(frozen=True)
class _SettingChange:
    """A setting whose value is not that of the checkpoint."""

    key: str
    old: Any
    new: Any

    @property
    def affects_numbers(self) -> bool:
        return bool(FIELDS[self.key].facts["changes_numbers"])

    def describe(self) -> str:
        return f"{self.key} was {self.old!r}, is now {self.new!r}"


def _setting_changes(
    saved: Mapping[str, Any], current: Mapping[str, Any]
) -> Iterator[_SettingChange]:
    """Yield the settings that differ.

    A key that `saved` does not have counts as its default.
    """
    for key, setting in FIELDS.items():
        default = json.loads(json.dumps(setting.default), parse_constant=str)
        old = current_value(key, at(saved, key, default))
        new = at(current, key, default)
        if old != new:
            yield _SettingChange(key, old, new)


def _check_environment(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, allow_change: bool, say: Say
) -> None:
    """Refuse another corpus; report other differences that may change the last bits."""
    if _corpus_digests(latest(saved)) != _corpus_digests(current) and not allow_change:
        raise BenchError(
            "data.dir: the run began on another corpus (its sha256 differs); give that corpus, or "
            "--allow-config-change"
        )
    differences = []
    for key in ("libraries.torch", "threads", "cpu", "gpu", "processes"):
        old = at(saved, key)
        new = at(current, key)
        if old != new:
            differences.append(f"{key} was {old!r}, is now {new!r}")
    if differences:
        say(f"the last bits may differ from an uninterrupted run's: {', '.join(differences)}")


def _corpus_digests(environment: Mapping[str, Any]) -> dict[str, Any]:
    return digests_of(at(environment, "corpus.splits", {}))
