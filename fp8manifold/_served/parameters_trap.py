"""Functions of TRL and vLLM that would send values under the names of codes.

They send ``named_parameters()``. A server of FP8 takes these for codes, and computes NaN
or nonsense. Which server it is they do not know, but a model that was given to
`served_weights` has one that takes codes: from then on they refuse it. Neither library
is imported for this.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from torch import nn

from fp8manifold._base.after_import import after_import
from fp8manifold._doors.published import base_of

_IS_SERVED: Final = "_fp8_is_served"
"""An attribute of models whose codes a server has."""
_IS_GUARDED: Final = "_fp8_refuses_served"
_SENDERS: Final = {
    "trl.generation.vllm_client": ("VLLMClient", "update_model_params"),
    "trl.generation.vllm_generation": ("VLLMGeneration", "sync_weights"),
    "trl.experimental.async_grpo.async_grpo_trainer": ("AsyncGRPOTrainer", "_streaming_iter"),
    "trl.experimental.async_distillation.async_distillation_trainer": (
        "AsyncDistillationTrainer",
        "_streaming_iter",
    ),
    "trl.experimental.online_dpo.online_dpo_trainer": ("OnlineDPOTrainer", "_move_model_to_vllm"),
    "vllm.distributed.weight_transfer.base": ("ModuleSource", "__init__"),
    "vllm.distributed.weight_transfer.m2n_source": ("DTensorModuleSource", "__init__"),
}
"""Methods that take a model, or have it as ``model``, by their modules."""


def mark_served(model: nn.Module) -> None:
    """Note that a server has the codes of a model, which other senders then refuse."""
    vars(base_of(model))[_IS_SERVED] = True
    for name in _SENDERS:
        module = sys.modules.get(name)
        if module is not None:
            _guard(module)
        else:
            after_import(name, _guard)


def _guard(module: ModuleType) -> None:
    """Put the sender of a module behind the guard, once."""
    kind_name, method_name = _SENDERS[module.__name__]
    kind: Any = getattr(module, kind_name, None)
    # Other versions may lack it; None has an `__init__`, too.
    if not isinstance(kind, type):
        return
    method = getattr(kind, method_name, None)
    if method is None or hasattr(method, _IS_GUARDED):
        return
    setattr(kind, method_name, _refusing(method, f"{kind_name} of {module.__name__}"))


def _refusing(method: Callable[..., Any], sender: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(self: Any, *arguments: Any, **options: Any) -> Any:
        models = [*arguments, *options.values(), getattr(self, "model", None)]
        for model in models:
            if isinstance(model, nn.Module) and hasattr(base_of(model), _IS_SERVED):
                raise ValueError(
                    f"{sender} would send float values of this {type(model).__name__} under the "
                    "names of codes, but since fm.served_weights its server takes codes: send "
                    "iter(fm.served_weights(model)); to a server in bfloat16, send "
                    "named_parameters() with update_named_params"
                )
        return method(self, *arguments, **options)

    setattr(guarded, _IS_GUARDED, True)
    return guarded
