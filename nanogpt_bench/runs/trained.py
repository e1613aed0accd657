"""The weights of a run, from one of its checkpoints: choosing it, the settings of the
training, the model.

Only plain tensors and JSON are read, and every byte is checked against the digest
beside the checkpoint.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.checkpoint import read, says_best
from nanogpt_bench.checkpoint.format import (
    CHECKPOINTS,
    BrokenCheckpoint,
    check_layout,
    step_file,
    step_of,
    steps,
)
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import build_config, flatten
from nanogpt_bench.model.gpt import GPT, GPTShape
from nanogpt_bench.model.weights import PART
from nanogpt_bench.runs.environment import latest
from nanogpt_bench.runs.load import summary_of
from nanogpt_bench.runs.read import finite
from nanogpt_bench.system.errors import BenchError, refusals

EMBEDDING = "token_embedding.weight"
#: names of the embedding and of an untied lm_head, as floats and as codes
EMBEDDINGS, HEADS = ((name, f"{name}.codes") for name in (EMBEDDING, "lm_head.weight"))
#: sections of a run's settings that its loss depends on
_SECTIONS = ("rule", "seed", "task", "data", "model", "optimizer", "train", "eval", "runtime")
#: files that show, beside config.yaml, that a folder is a run's
_WRITTEN = (CHECKPOINTS, "metrics.jsonl", "summary.json", "environment.json")


@dataclass(frozen=True)
class Trained:
    """A checkpoint's weights, and the facts beside them."""

    path: Path
    step: int
    #: the run's settings at that step, by dotted key, without those of monitors,
    #: tracking and the like
    settings: Mapping[str, Any]
    #: environment.json as of the last start
    environment: Mapping[str, Any]
    #: validation loss at that step; None where it was not measured
    val_loss: float | None
    #: the lowest validation loss up to that step
    best_val_loss: float | None
    #: `tensors_of` the run's model; empty if it was loaded without weights
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    @property
    def config(self) -> Config:
        """The run's settings, without `model.init_from`."""
        return build_config({**self.settings, "model.init_from": None})


def run_folder(name: str) -> Path | None:
    """Return the run folder of this name, or that of this config.yaml; None for
    anything else.
    """
    path = Path(name)
    path = path.parent if path.name == "config.yaml" and path.is_file() else path
    return path if is_run(path) else None


def is_run(path: Path) -> bool:
    """Return whether a folder has the files of a run, and not only its settings."""
    return (path / "config.yaml").is_file() and any((path / name).exists() for name in _WRITTEN)


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is a file with the name and in the folder of a run's
    checkpoint.
    """
    return step_of(path.name) is not None and path.parent.name == CHECKPOINTS and path.is_file()


def choose(run_dir: Path, which: str = "last") -> Path:
    """Return a run's checkpoint: `last` (the newest), `best` (with the lowest
    validation loss) or `step-N`.
    """
    known = {f"step-{step}": step_file(run_dir, step) for step in steps(run_dir)}
    if not known:
        check_layout(run_dir)
        raise BenchError(
            f"{str(run_dir)!r} has no checkpoint; {_again(run_dir, '--checkpoint.last true')}"
        )
    if which == "best":
        lowest = summary_of(run_dir).get("best_val_loss")
        if not isinstance(lowest, int | float):
            lowest = load([*known.values()][-1], weights=False).best_val_loss
        for path in filter(says_best, reversed(known.values())):
            loss = load(path, weights=False).val_loss
            if lowest is None or (loss is not None and loss <= lowest):
                return path
        raise BenchError(
            f"{str(run_dir)!r} has no checkpoint of its lowest validation loss; give --checkpoint "
            f"last, or step-N; {_again(run_dir, '--checkpoint.best true')}"
        )
    if which == "last":
        return list(known.values())[-1]
    if which not in known:
        raise BenchError(
            f"--checkpoint: {which!r} does not exist; allowed: best, last, {', '.join(known)}"
        )
    return known[which]


def _again(run_dir: Path, option: str) -> str:
    command = shlex.join(["nanogpt-bench", "run", str(run_dir / "config.yaml")])
    return f"{command} {option} trains it once more and saves one"


def load(path: Path, *, weights: bool = True) -> Trained:
    """Return a checkpoint's settings and other facts, and its weights unless `weights`
    is False.
    """
    contents = read(path, only=("model",) if weights else ())
    config = contents.facts.get("config")
    if not isinstance(config, dict):
        raise BrokenCheckpoint(f"checkpoint {str(path)!r}: it does not have the run's settings")
    environment = contents.facts.get("environment")
    return Trained(
        path=path,
        step=contents.step,
        settings=dict(flatten({key: config[key] for key in _SECTIONS if key in config})),
        environment=latest(environment) if isinstance(environment, dict) else {},
        val_loss=finite(contents.facts.get("val_loss")),
        best_val_loss=finite(contents.facts.get("best_val_loss")),
        tensors=contents.tensors.get("model", {}),
        metadata=contents.metadata.get("model", {}),
    )


def trained_shape(path: Path) -> GPTShape:
    """Return the shape of a checkpoint's model; `tie_weights` is False where its
    lm_head was untied.
    """
    config = load(path, weights=False).config
    settings = config.model
    if settings.pretrained:
        how = f"with --resume --name {shlex.quote(path.resolve().parent.parent.name)} --save DIR"
        raise BenchError(
            f"checkpoint {str(path)!r} is of the pretrained model {settings.pretrained!r}; its "
            f"finetune command {how} "
            "writes it as a model, which evaluate --model DIR and finetune --model DIR take"
        )
    sizes = {key: getattr(settings, key) for key in ("n_layer", "n_head", "n_embd", "block_size")}
    unread = f"checkpoint {str(path)!r}: its weights can't be read"
    with (
        refusals(unread, SafetensorError, OSError, ValueError),
        safe_open(path, framework="pt") as file,
    ):
        names = {name.removeprefix("model/") for name in file.keys()}  # noqa: SIM118  (it is no mapping)
        embedding, head = (_shape_in(file, spelt) for spelt in (EMBEDDINGS, HEADS))
    if len(embedding) != 2 or None in sizes.values():
        raise BenchError(f"checkpoint {str(path)!r} has no weights of a GPT")
    claimed, size = sizes["n_embd"] * (12 * sizes["n_layer"] * sizes["n_embd"]), path.stat().st_size
    if claimed > size:  # checked before so much memory is allocated
        raise BenchError(
            f"checkpoint {str(path)!r}: settings for {claimed:,} weights, a file of {size:,} bytes"
        )
    return GPTShape(
        **sizes,
        vocab_size=embedding[0],
        bias=bool(settings.bias),
        tie_weights=names.isdisjoint(HEADS),
        gelu=settings.gelu or "exact",
        labels=head[0] if head and config.task == "classify" else 0,
    )


def _shape_in(file: Any, spelt: Sequence[str]) -> list[int]:
    found = next((name for spelling in spelt if (name := f"model/{spelling}") in file.keys()), None)  # noqa: SIM118
    return list(file.get_slice(found).get_shape()) if found else []


def float_weights(trained: Trained) -> dict[str, Tensor]:
    """Return the weights as float32: one-byte weights decoded, exactly; master copies
    where the run had them.
    """
    if any(PART in name for name in trained.tensors):
        raise BenchError(
            f"checkpoint {str(trained.path)!r} has the weights of another package (model.peer), "
            f"which only its own "
            "run can use"
        )
    with refusals(f"checkpoint {str(trained.path)!r}", ValueError):
        state = fm.unflatten_state_dict(trained.tensors, trained.metadata)
    named = {
        name: value
        for name, value in state.items()
        if name.rpartition(".")[2] in ("weight", "bias")
    }
    return {
        name: value.dequantize() if isinstance(value, fm.FP8Tensor) else value.float()
        for name, value in named.items()
    }


@torch.no_grad()
def fill_floats(model: GPT, trained: Trained, called: str) -> None:
    """Fill a float model with the weights of a checkpoint, which errors call `called`.

    A model with fewer positions takes the first ones; an untied lm_head gets a copy of
    the embedding if need be.
    """
    state = float_weights(trained)
    state.setdefault("lm_head.weight", state.get(EMBEDDING, torch.empty(0)))
    own = dict(model.named_parameters(remove_duplicate=False))
    missing, unknown = own.keys() - state.keys(), state.keys() - own.keys()
    if missing or unknown:
        what = (
            f"lacks the tensor {min(missing)!r}"
            if missing
            else f"has a tensor too many, {min(unknown)!r}"
        )
        raise BenchError(f"{called} {what}: it is of another model")
    for name, parameter in model.named_parameters():
        value = state[name]
        if name == "position_embedding.weight":
            value = value[: len(parameter)]
        if value.shape != parameter.shape:
            raise BenchError(
                f"{called} has {name} of shape {tuple(value.shape)}, the model needs "
                f"{tuple(parameter.shape)}"
            )
        parameter.copy_(value)
