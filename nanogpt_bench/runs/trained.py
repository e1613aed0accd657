"""The weights of a run, from one of its checkpoints.

`choose` picks the checkpoint, `load` reads it, `trained_shape` says which model its
weights fit, and `fill_floats` fills a float model with them. Only plain tensors and
JSON are read, and every byte is checked against the digest beside the checkpoint.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.checkpoint import read_checkpoint, says_best
from nanogpt_bench.checkpoint.format import (
    CHECKPOINTS,
    BrokenCheckpoint,
    refuse_checkpoint_folders,
    step_file,
    step_of,
    steps,
)
from nanogpt_bench.config.schema import Config, Task
from nanogpt_bench.config.settings import build_config, flatten
from nanogpt_bench.model.gpt import GPT, GPTShape
from nanogpt_bench.model.weights import PART
from nanogpt_bench.runs.environment import latest
from nanogpt_bench.runs.load import summary_of
from nanogpt_bench.runs.read import METRICS_FILE, finite
from nanogpt_bench.system.errors import BenchError, refusals

EMBEDDING, HEAD = "token_embedding.weight", "lm_head.weight"
#: sections of a run's settings that its loss depends on
_SECTIONS = ("rule", "seed", "task", "data", "model", "optimizer", "train", "eval", "runtime")
#: files that show, beside config.yaml, that a folder is a run's
_RECORDS = (CHECKPOINTS, METRICS_FILE, "summary.json", "environment.json")


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
    #: the model's tensors, named as by `model.weights.tensors_of`; empty if it was
    #: loaded without weights
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    @property
    def config(self) -> Config:
        """The run's settings, without `model.init_from`."""
        return build_config({**self.settings, "model.init_from": None})


def run_folder(name: str) -> Path | None:
    """Return the run folder of this name, or that of this config.yaml.

    None for anything else.
    """
    path = Path(name)
    if path.name == "config.yaml" and path.is_file():
        path = path.parent
    return path if is_run(path) else None


def is_run(path: Path) -> bool:
    """Return whether a folder has the files of a run, and not only its settings."""
    return (path / "config.yaml").is_file() and any((path / name).exists() for name in _RECORDS)


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is a run's checkpoint, by its name and its folder."""
    return step_of(path.name) is not None and path.parent.name == CHECKPOINTS and path.is_file()


def choose(run_dir: Path, checkpoint: str = "last") -> Path:
    """Return a run's checkpoint: `last`, `best` or `step-N`.

    `last` is the newest, and `best` has the lowest validation loss.
    """
    paths = {f"step-{step}": step_file(run_dir, step) for step in steps(run_dir)}
    if not paths:
        refuse_checkpoint_folders(run_dir)
        raise BenchError(
            f"{str(run_dir)!r} has no checkpoint; to get one, train it once more: "
            f"{_trained_again(run_dir, '--checkpoint.last true')}"
        )
    if checkpoint == "best":
        return _best(run_dir, list(paths.values()))
    if checkpoint == "last":
        return list(paths.values())[-1]
    if checkpoint not in paths:
        raise BenchError(
            f"--checkpoint: the run has no checkpoint {checkpoint!r}; allowed: best, last, "
            f"{', '.join(paths)}"
        )
    return paths[checkpoint]


def _best(run_dir: Path, paths: list[Path]) -> Path:
    lowest = summary_of(run_dir).get("best_val_loss")
    if not isinstance(lowest, int | float):
        lowest = load(paths[-1], weights=False).best_val_loss
    for path in reversed(paths):
        if not says_best(path):
            continue
        loss = load(path, weights=False).val_loss
        if lowest is None or (loss is not None and loss <= lowest):
            return path
    raise BenchError(
        f"{str(run_dir)!r} has no checkpoint of its lowest validation loss; give --checkpoint "
        "last, or step-N; to get one, train it once more: "
        f"{_trained_again(run_dir, '--checkpoint.best true')}"
    )


def _trained_again(run_dir: Path, option: str) -> str:
    command = shlex.join(["nanogpt-bench", "run", str(run_dir / "config.yaml")])
    return f"{command} {option}"


def load(path: Path, *, weights: bool = True) -> Trained:
    """Return a checkpoint's settings and facts, with its weights if wanted."""
    contents = read_checkpoint(path, only=("model",) if weights else ())
    config = contents.facts.get("config")
    if not isinstance(config, dict):
        raise BrokenCheckpoint(f"checkpoint {str(path)!r} does not hold the run's settings")
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
    """Return the shape of a checkpoint's model.

    `tie_weights` is False where its lm_head was untied.
    """
    config = load(path, weights=False).config
    settings = config.model
    if settings.pretrained:
        name = shlex.quote(path.resolve().parent.parent.name)
        raise BenchError(
            f"checkpoint {str(path)!r} belongs to the pretrained model {settings.pretrained!r}; "
            "write it as a model first: give its finetune command again, with --resume --name "
            f"{name} --save DIR; then use --model DIR"
        )
    sizes = {key: getattr(settings, key) for key in ("n_layer", "n_head", "n_embd", "block_size")}
    unreadable = f"checkpoint {str(path)!r}: its weights can't be read"
    with (
        refusals(unreadable, SafetensorError, OSError, ValueError),
        safe_open(path, framework="pt") as file,
    ):
        embedding = _shape_in(file, EMBEDDING)
        head = _shape_in(file, HEAD)
    if embedding is None or len(embedding) != 2 or None in sizes.values():
        raise BenchError(f"checkpoint {str(path)!r} does not hold a GPT's weights")
    # Checked before so much memory is allocated: linear layers of the blocks, of which
    # every weight takes a byte or more.
    claimed = 12 * sizes["n_layer"] * sizes["n_embd"] ** 2
    size = path.stat().st_size
    if claimed > size:
        raise BenchError(
            f"checkpoint {str(path)!r}: its settings describe {claimed:,} weights, too many for a "
            f"file of {size:,} bytes"
        )
    return GPTShape(
        **sizes,
        vocab_size=embedding[0],
        bias=bool(settings.bias),
        tie_weights=head is None,
        gelu=settings.gelu or "exact",
        labels=head[0] if head and config.task == Task.CLASSIFY else 0,
    )


def _shape_in(file: Any, weight: str) -> list[int] | None:
    """Return the shape of a matrix in a checkpoint, stored as floats or as codes.

    None where the checkpoint does not have it. Codes have a last dimension of size 1
    that the matrix has not. Earlier versions left it out, and had another name for
    codes.
    """
    names = file.keys()
    for name in (f"model/{weight}", f"model/{weight}.codes"):
        if name in names:
            shape = list(file.get_slice(name).get_shape())
            is_stored_as_codes = len(shape) == 3 and shape[2] == 1
            return shape[:2] if is_stored_as_codes else shape
    return None


def float_weights(trained: Trained) -> dict[str, Tensor]:
    """Return the weights as float32.

    One-byte weights are decoded, exactly. Where the run had master copies, these are
    returned.
    """
    if any(PART in name for name in trained.tensors):
        raise BenchError(
            f"checkpoint {str(trained.path)!r} holds weights of another package (model.peer); only "
            "the run itself can use them"
        )
    with refusals(f"checkpoint {str(trained.path)!r}", ValueError):
        state = fm.files.unflatten(trained.tensors, trained.metadata)
    weights: dict[str, Tensor] = {}
    for name, value in state.items():
        if name.rpartition(".")[2] in ("weight", "bias"):
            is_codes = isinstance(value, fm.FP8Tensor)
            weights[name] = value.dequantize() if is_codes else value.float()
    return weights


@torch.no_grad()
def fill_floats(model: GPT, trained: Trained, source: str) -> None:
    """Fill a float model with the weights of a checkpoint, called `source` in errors.

    A model with fewer positions takes the first ones. An untied lm_head gets a copy of
    the embedding if need be.
    """
    state = float_weights(trained)
    state.setdefault(HEAD, state.get(EMBEDDING, torch.empty(0)))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing, unknown = parameters.keys() - state.keys(), state.keys() - parameters.keys()
    if missing:
        raise BenchError(f"{source} has no tensor {min(missing)!r}: it is from another model")
    if unknown:
        raise BenchError(
            f"{source} has a tensor {min(unknown)!r}, which this model does not have: it is from "
            "another model"
        )
    for name, parameter in model.named_parameters():
        value = state[name]
        if name == "position_embedding.weight":
            value = value[: len(parameter)]
        if value.shape != parameter.shape:
            raise BenchError(
                f"{source} has {name} with shape {tuple(value.shape)}; the model needs "
                f"{tuple(parameter.shape)}"
            )
        parameter.copy_(value)
