"""From the `optimizer` section to an optimizer, its groups and its schedules.

`build_optimizer` makes torch's, another package's, or the library's, by name:

    float storage: torch.optim.AdamW and SGD, torchao's, StiffnessAdamW,
                   StiffnessMuon and StiffnessAdafactor
    manifolds:     a class of fp8manifold.optim. There adamw and sgd are StiffnessAdamW
                   and StiffnessSGD with k = 0, which round once in a step

The other packages' weights (`model.peer`) and layers (`model.torchao_float8`) are made
here, too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config.schema import (
    MANIFOLDS,
    OPTIONS,
    PEERS,
    RIEMANNIAN,
    TORCH_OPTIMIZERS,
    Config,
    OptimizerConfig,
    OptimizerName,
)
from nanogpt_bench.model.weights import constrained_weights, quantized_layers
from nanogpt_bench.setup.surgery import rate_of
from nanogpt_bench.system.errors import BenchError, refusals

#: a function: number of steps so far -> the batches (tokens, targets) on which a Fisher
#: matrix is measured
Batches = Callable[[int], Sequence[tuple[Tensor, Tensor]]]
#: added to the root of the second moment
EPS = 1e-8
#: added to the eigenvalues of a Fisher matrix, in units of their mean
_FISHER_DAMPING = 0.1
#: share of the steps in the final descent of the schedule trapezoid
DECAY_SHARE = 0.2


class Schedule(StrEnum):
    """The values of `optimizer.schedule`: the learning rate after the warm-up."""

    COSINE = "cosine"
    LINEAR = "linear"
    TRAPEZOID = "trapezoid"
    STEP = "step"
    CONSTANT = "constant"


class Descent(StrEnum):
    """How a value falls, such as that of `optimizer.stiffness_schedule`."""

    LINEAR = "linear"
    COSINE = "cosine"
    #: all at once
    STEP = "step"


def lr_factor(config: OptimizerConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of `step` (counted from 0) over the peak.

    The warm-up rises linearly over `warmup_steps` to 1. Then it depends on `schedule`:

    * `cosine` falls along half a cosine to `min_lr_ratio` at `max_steps`.
    * `linear` falls along a line to `min_lr_ratio` at `max_steps`.
    * `trapezoid` stays at 1 and falls linearly over the last fifth of the steps.
    * `step` stays at 1, and is `min_lr_ratio` after the share `step_at` of the steps.
    * `constant` stays at 1.

    >>> settings = OptimizerConfig(warmup_steps=1, min_lr_ratio=0.0)
    >>> [round(lr_factor(settings, step, 5), 3) for step in range(6)]
    [0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    schedule = Schedule(config.schedule)
    if schedule == Schedule.CONSTANT:
        return 1.0
    if schedule == Schedule.STEP:
        return _descended(Descent.STEP, step / max_steps, config)
    start = config.warmup_steps
    if schedule == Schedule.TRAPEZOID:
        start = round(max_steps * (1 - DECAY_SHARE))
    progress = min(1.0, max(0.0, (step - start) / max(1, max_steps - start)))
    descent = Descent.COSINE if schedule == Schedule.COSINE else Descent.LINEAR
    return _descended(descent, progress, config)


def _descended(descent: Descent, progress: float, config: OptimizerConfig) -> float:
    share = remaining_share(descent, progress, config.step_at)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * share


def remaining_share(descent: Descent, progress: float, step_at: float) -> float:
    """Return the share of the way from the first value to the last that remains.

    It falls from 1 to 0 while `progress` goes from 0 to 1.

    >>> [remaining_share(descent, 0.25, step_at=0.25) for descent in ("linear", "step")]
    [0.75, 0.0]
    >>> round(remaining_share(Descent.COSINE, 0.25, step_at=0.5), 3)
    0.854
    """
    if descent == Descent.STEP:
        return float(progress < step_at)
    if descent == Descent.COSINE:
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - progress


@dataclass(frozen=True)
class Course:
    """A value by the number of steps: `start` at 0, `end` at `steps` and after.

    >>> course = Course(Descent.STEP, 1.0, 0.0, steps=4, step_at=0.5)
    >>> [course(step) for step in range(5)]
    [1.0, 1.0, 0.0, 0.0, 0.0]
    """

    descent: Descent
    start: float
    end: float
    steps: int
    step_at: float

    def __call__(self, step: int) -> float:
        progress = min(step / self.steps, 1.0)
        share = remaining_share(self.descent, progress, self.step_at)
        return self.end + (self.start - self.end) * share


def build_optimizer(
    model: nn.Module, config: Config, batches: Batches | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of a resolved configuration.

    `batches` is for `fisher`, which measures a Fisher matrix on them.
    """
    name = _stepping_name(config)
    optimizer: torch.optim.Optimizer
    with refusals("optimizer", ValueError, TypeError, ImportError):
        if name in PEERS:
            optimizer = _peer_optimizer(name, model, config.optimizer)
        elif name in TORCH_OPTIMIZERS:
            optimizer = _torch_optimizer(name, model, config.optimizer)
        else:
            optimizer = _library_optimizer(name, model, config, batches)
    return optimizer


#: optimizers of the library that take torch's step with k = 0: on the library's
#: manifolds torch's would round at every operation, these round once
_ROUNDING_ONCE: dict[str, OptimizerName] = {
    OptimizerName.ADAMW: OptimizerName.STIFFNESS_ADAMW,
    OptimizerName.SGD: OptimizerName.STIFFNESS_SGD,
}


def _stepping_name(config: Config) -> str:
    """Return the optimizer that steps: on manifolds one of the library's."""
    name = config.optimizer.name or ""
    return _ROUNDING_ONCE.get(name, name) if config.model.storage in MANIFOLDS else name


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups: matrices and embeddings decay, biases and norms don't.

    Shared parameters appear once.
    """
    decaying = []
    undecayed = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.dim() >= 2:
            decaying.append(parameter)
        else:
            undecayed.append(parameter)
    return _groups((weight_decay, decaying), (0.0, undecayed))


def _groups(*groups: tuple[float, list[nn.Parameter]]) -> list[dict[str, Any]]:
    """Return groups of (weight decay, parameters), without empty ones."""
    return [
        {"params": parameters, "weight_decay": decay} for decay, parameters in groups if parameters
    ]


def _adam_options(settings: OptimizerConfig) -> dict[str, Any]:
    return {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": EPS}


def _torch_optimizer(name: str, model: nn.Module, settings: OptimizerConfig) -> Any:
    groups = parameter_groups(model, settings.weight_decay or 0.0)
    if name == OptimizerName.SGD:
        return torch.optim.SGD(groups, lr=settings.lr or 0.0, momentum=settings.momentum or 0.0)
    return torch.optim.AdamW(groups, fused=True, **_adam_options(settings))


def _peer_optimizer(name: str, model: nn.Module, settings: OptimizerConfig) -> Any:
    """Return torchao's optimizer of a name, whose step needs torch.compile."""
    groups = parameter_groups(model, settings.weight_decay or 0.0)
    torchao = import_module("torchao.optim")
    is_8bit = name == OptimizerName.TORCHAO_ADAMW8BIT
    kind = torchao.AdamW8bit if is_8bit else torchao.AdamWFp8
    return kind(groups, **_adam_options(settings))


def _library_optimizer(name: str, model: nn.Module, config: Config, batches: Batches | None) -> Any:
    settings = config.optimizer
    betas = (settings.beta1, settings.beta2)
    options: dict[str, Any] = {"moments": settings.moments or "float32", "seed": config.seed}
    for option in ("writeback", "draws", "retraction"):
        if getattr(settings, option) is not None:
            options[option] = getattr(settings, option)
    if "stiffness" in OPTIONS[name]:
        options["stiffness"] = _stiffness_exponent(config)
    groups = parameter_groups(model, settings.weight_decay or 0.0)
    if name == OptimizerName.FISHER:
        options |= _adam_options(settings)
        options |= {"momentum": settings.momentum, "damping": _FISHER_DAMPING}
        return fm.optim.FisherNaturalGradient(groups, model, batches, **options)  # type: ignore[arg-type]
    if name == OptimizerName.STIFFNESS_MUON:
        # Hidden matrices step at lr, all other parameters by Adam at float_lr.
        options |= {
            "betas": betas,
            "adam_eps": EPS,
            "momentum": settings.momentum,
            "weight_decay": settings.weight_decay,
        }
        return fm.optim.StiffnessMuon.for_model(
            model, settings.lr or 0.0, other_lr=settings.float_lr, **options
        )
    for option in ("lr", "momentum", "float_lr"):
        if option in OPTIONS[name]:
            options[option] = getattr(settings, option)
    if "beta1" in OPTIONS[name]:
        options["betas"] = betas
    if name in RIEMANNIAN:
        groups = _riemannian_groups(model, config)
    # stiffness_adamw -> StiffnessAdamW
    classes = {public.lower(): member for public, member in vars(fm.optim).items()}
    return classes[name.replace("_", "")](groups, **options)


def peak_lr(group: dict[str, Any], settings: OptimizerConfig) -> float:
    """Return a group's highest learning rate.

    Under Muon parameters that are no hidden matrices have a rate of their own.

    >>> settings = OptimizerConfig(lr=2e-3, float_lr=4e-3)
    >>> peak_lr({"direction": "adam"}, settings), peak_lr({}, settings)
    (0.004, 0.002)
    """
    is_adam_in_muon = group.get("direction") == "adam"
    lr = settings.float_lr if is_adam_in_muon else settings.lr
    return lr or 0.0


def _riemannian_groups(model: nn.Module, config: Config) -> list[dict[str, Any]]:
    """Return groups of the weights stepped by ULPs, of the others, and of constraints.

    Constrained weights have one group for each rate. The Riemannian optimizers take
    decay of quantised weights as a share per step, not times lr, and add that of floats
    to the gradient. So quantised weights get the decay that AdamW has at float_lr, and
    the others get none.
    """
    settings = config.optimizer
    weights: list[Any] = []
    if config.model.storage in MANIFOLDS:
        weights = [layer.weight for layer in quantized_layers(model).values()]
    #: of constrained weights, by id
    rates: dict[int, float] = {}
    for weight in constrained_weights(model).values():
        rates[id(weight)] = rate_of(weight, settings)
    grouped = {id(weight) for weight in weights} | rates.keys()
    parameters = list(model.parameters())
    ungrouped = [parameter for parameter in parameters if id(parameter) not in grouped]
    decay = (settings.weight_decay or 0.0) * (settings.float_lr or 0.0)
    groups = _groups((decay, weights), (0.0, ungrouped))
    for rate in dict.fromkeys(rates.values()):
        members = [parameter for parameter in parameters if rates.get(id(parameter)) == rate]
        groups.append({"params": members, "weight_decay": 0.0, "float_lr": rate})
    return groups


def _stiffness_exponent(config: Config) -> float | Callable[[int], float]:
    """Return the exponent k, or its schedule.

    AdamW and SGD on the library's manifolds have k = 0.
    """
    settings = config.optimizer
    if settings.stiffness is None:
        return 0.0
    if settings.stiffness_end is None:
        return settings.stiffness
    steps = config.train.max_steps
    descent = Descent(settings.stiffness_schedule or Descent.LINEAR)
    if descent == Descent.LINEAR:
        return fm.optim.anneal(settings.stiffness, settings.stiffness_end, steps)
    return Course(descent, settings.stiffness, settings.stiffness_end, steps, settings.step_at)


def stiffness_at(config: Config, step: int) -> float | None:
    """Return the stiffness exponent of `step` (counted from 0).

    None when the optimizer has none.
    """
    if config.optimizer.stiffness is None:
        return None
    exponent = _stiffness_exponent(config)
    return float(exponent(step)) if callable(exponent) else exponent


Model = TypeVar("Model", bound=nn.Module)
#: FP8 products take sizes that are multiples of this
MULTIPLE = 16
#: compute capability of the first NVIDIA GPUs whose tensor cores multiply FP8
FP8_CAPABILITY = (8, 9)


def keep_peer_weights(model: Model, config: Config) -> Model:
    """Give every linear layer, the head too, the weights that `model.peer` names.

    Embeddings stay float32.
    """
    peer = config.model.peer
    if peer is None:
        return model
    kinds = (ImportError, ValueError, TypeError, AssertionError, NotImplementedError)
    with refusals(f"model.peer: {peer!r}", *kinds):
        from torchao.prototype.quantized_training import int8_weight_only_quantized_training
        from torchao.quantization import quantize_

        quantize_(model, int8_weight_only_quantized_training())
    return model


def train_in_float8(model: Model, config: Config, device: torch.device) -> Model:
    """Replace the blocks' linear layers by torchao's, as `model.torchao_float8` says.

    lm_head stays as it is, and so do layers whose sizes are no multiples of 16, which
    FP8 hardware can't multiply. The weights stay float32. Without FP8 hardware the same
    roundings are emulated in float32.
    """
    recipe = config.model.torchao_float8
    if recipe is None:
        return model
    replaced = {name for name, module in model.named_modules() if _fits_float8(name, module)}
    if not replaced:
        raise BenchError(
            f"model.torchao_float8: {recipe!r} needs layers whose sizes are multiples of "
            f"{MULTIPLE}, and there is none; give another model.n_embd"
        )
    on_gpu = device.type == "cuda"
    has_units = on_gpu and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    with refusals("model.torchao_float8", ImportError, ValueError, AssertionError):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        settings = Float8LinearConfig.from_recipe_name(recipe)
        # The class is frozen, and from_recipe_name takes no other argument.
        object.__setattr__(settings, "emulate", not has_units)
        convert_to_float8_training(
            model, module_filter_fn=lambda _, name: name in replaced, config=settings
        )
    return model


def _fits_float8(name: str, module: nn.Module) -> bool:
    return (
        name.startswith("blocks.")
        and isinstance(module, nn.Linear)
        and module.in_features % MULTIPLE == 0
        and module.out_features % MULTIPLE == 0
    )
