"""Let transformers' ``Trainer`` read the side file when it resumes.

It reads the floats of a checkpoint alone, and gives them to ``load_state_dict``: values
come back, but scales, seeds and counts do not, so that the steps that follow would draw
other random bits. Its two methods that read a checkpoint therefore read a folder with a
side file by `restore`. They are replaced as soon as the trainer's module is there.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from torch import nn

from fp8manifold._base.after_import import when_imported
from fp8manifold._base.wrappers import unwrapped
from fp8manifold._doors.exchange import is_transformers_model
from fp8manifold._doors.plain import is_quantized
from fp8manifold._doors.restore import restore
from fp8manifold._doors.saved_folder import has_side_file

_MODULE: Final = "transformers.trainer"
_IS_GUARDED: Final = "_fp8_reads_side_files"


def _guard_trainer(module: ModuleType) -> None:
    """Replace the methods with which a Trainer reads checkpoints, once."""
    kind: Any = getattr(module, "Trainer", None)
    if kind is None or hasattr(kind, _IS_GUARDED):
        return
    kind._load_from_checkpoint = _resuming(kind._load_from_checkpoint)
    kind._load_best_model = _loading_best(kind._load_best_model)
    setattr(kind, _IS_GUARDED, True)


def _resuming(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def _load_from_checkpoint(
        self: Any, resume_from_checkpoint: str, model: Any = None, **options: Any
    ) -> Any:
        target = self.model if model is None else model
        if _has_side_file(self, target, resume_from_checkpoint):
            restore(target, resume_from_checkpoint)
            return None
        given = {} if model is None else {"model": model}
        return load(self, resume_from_checkpoint, **given, **options)

    return _load_from_checkpoint


def _loading_best(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def _load_best_model(self: Any, *arguments: Any, **options: Any) -> Any:
        folder = self.state.best_model_checkpoint
        if folder is not None and _has_side_file(self, self.model, folder):
            restore(self.model, folder)
            return None
        return load(self, *arguments, **options)

    return _load_best_model


def _has_side_file(trainer: Any, model: Any, folder: str) -> bool:
    """Return whether a model is to be read with a side file, and not by a framework."""
    if getattr(trainer, "is_fsdp_enabled", False) or getattr(
        trainer, "is_deepspeed_enabled", False
    ):
        return False
    base = unwrapped(model) if isinstance(model, nn.Module) else model
    return is_transformers_model(base) and is_quantized(base) and has_side_file(folder)


when_imported(_MODULE, _guard_trainer)
