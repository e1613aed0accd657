"""From the `optimizer` section to an optimizer, the library's or another package's, its
groups and its schedules.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config.schema import MANIFOLDS, OPTIONS, Config, OptimizerConfig
from nanogpt_bench.model.weights import constrained_weights, is_packaged, parts_of, quantized_layers
from nanogpt_bench.setup.surgery import rate_of
from nanogpt_bench.system.errors import BenchError, refusals

#: a function from the number of steps taken to batches (tokens, targets) on which a
#: Fisher matrix is measured
Batches = Callable[[int], Sequence[tuple[Tensor, Tensor]]]


#: added to the root of the second moment
EPS = 1e-8
#: added to the eigenvalues of a Fisher matrix, in units of their mean
_FISHER_DAMPING = 0.1
#: share of the steps in the final descent of the schedule trapezoid
DECAY_SHARE = 0.2


def lr_factor(config: OptimizerConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of `step` (counted from 0) over the peak.

    The warm-up rises linearly over `warmup_steps` to 1. Then `cosine` falls along half
    a cosine, and `linear` along a line, to `min_lr_ratio` at `max_steps`; `trapezoid`
    stays at 1 and falls linearly over the last fifth of the steps; `step` stays at 1
    and is `min_lr_ratio` once the share `step_at` of the steps is over; `constant`
    stays.

    >>> settings = OptimizerConfig(warmup_steps=1, min_lr_ratio=0.0)
    >>> [round(lr_factor(settings, step, 5), 3) for step in range(6)]
    [0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "step":
        return _fallen("step", step / max_steps, config)
    start = (
        round(max_steps * (1 - DECAY_SHARE))
        if config.schedule == "trapezoid"
        else config.warmup_steps
    )
    progress = min(1.0, max(0.0, (step - start) / max(1, max_steps - start)))
    return _fallen("cosine" if config.schedule == "cosine" else "linear", progress, config)


def _fallen(course: str, progress: float, config: OptimizerConfig) -> float:
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * left(course, progress, config.step_at)


def left(course: str, progress: float, step_at: float) -> float:
    """Return what is left of the way from the first value to the last, 1 to 0, at a
    progress of 0 to 1.

    >>> [left(course, 0.25, step_at=0.25) for course in ("linear", "step")], round(left("cosine", 0.25, 0.5), 3)
    ([0.75, 0.0], 0.854)
    """
    if course == "step":
        return float(progress < step_at)
    return 0.5 * (1 + math.cos(math.pi * progress)) if course == "cosine" else 1 - progress


@dataclass(frozen=True)
class Course:
    """A value by the number of steps taken: from `start` at none to `end` at `steps`
    and after.

    >>> [Course("step", 1.0, 0.0, steps=4, step_at=0.5)(step) for step in range(5)]
    [1.0, 1.0, 0.0, 0.0, 0.0]
    """

    name: str
    start: float
    end: float
    steps: int
    step_at: float

    def __call__(self, step: int) -> float:
        return self.end + (self.start - self.end) * left(
            self.name, min(step / self.steps, 1.0), self.step_at
        )


def build_optimizer(
    model: nn.Module, config: Config, batches: Batches | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of a resolved configuration; `batches` is for `fisher`,
    which measures a Fisher matrix.
    """
    with refusals("optimizer", ValueError, TypeError, ImportError):
        built: torch.optim.Optimizer = _built(model, config, batches)
    return built


#: on the library's manifolds torch's would round at every operation; ours with k = 0
#: take the same step and round once
_ROUNDING_ONCE = {"adamw": "stiffness_adamw", "sgd": "stiffness_sgd"}


def _kind(config: Config) -> str:
    """Return the name of the optimizer that steps: on the library's manifolds one of
    the library's.
    """
    name = config.optimizer.name or ""
    return _ROUNDING_ONCE.get(name, name) if config.model.storage in MANIFOLDS else name


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups: matrices and embeddings decay, biases and norms don't; shared
    parameters appear once.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return _groups(
        (weight_decay, [parameter for parameter in parameters if parameter.dim() >= 2]),
        (0.0, [parameter for parameter in parameters if parameter.dim() < 2]),
    )


def _groups(*groups: tuple[float, list[nn.Parameter]]) -> list[dict[str, Any]]:
    return [
        {"params": parameters, "weight_decay": decay} for decay, parameters in groups if parameters
    ]


def _built(model: nn.Module, config: Config, batches: Any) -> Any:
    """The optimizer by its name: torch's, another package's, or the library's, with the
    options that it takes.
    """
    settings, name = config.optimizer, _kind(config)
    groups = parameter_groups(model, settings.weight_decay or 0.0)
    betas, momentum = (settings.beta1, settings.beta2), settings.momentum
    adam: dict[str, Any] = {"lr": settings.lr, "betas": betas, "eps": EPS}
    match name:
        case "sgd":
            return torch.optim.SGD(groups, lr=settings.lr or 0.0, momentum=momentum or 0.0)
        case "adamw":
            return torch.optim.AdamW(groups, fused=True, **adam)
        case "torchao_adamw8bit" | "torchao_adamwfp8":  # their steps need torch.compile
            torchao: Any = import_module("torchao.optim")
            return (torchao.AdamW8bit if name == "torchao_adamw8bit" else torchao.AdamWFp8)(
                groups, **adam
            )
        case "optimi_adamw":
            return import_module("optimi").AdamW(groups, **adam, kahan_sum=True)
        case "sdnq_adamw":  # it has no eps, and bounds an update by 1
            options = {"lr": settings.lr, "betas": betas}
            return import_module("sdnq.optim").AdamW(
                [group | options for group in groups], use_quantized_buffers=True
            )
        case "sdnq_muon":
            muon = fm.optim.StiffnessMuon.for_model(
                model, weight_decay=settings.weight_decay or 0.0
            ).param_groups
            made = [_sdnq_group(group, settings) for group in muon]
            return import_module("sdnq.optim").Muon(made, use_quantized_buffers=True)
    own: dict[str, Any] = {"moments": settings.moments or "float32", "seed": config.seed}
    own |= {
        key: value
        for key in ("writeback", "draws", "retraction")
        if (value := getattr(settings, key)) is not None
    }
    if "stiffness" in OPTIONS[name]:
        own["stiffness"] = _stiffness(config)
    if name == "fisher":
        own |= {**adam, "momentum": momentum, "damping": _FISHER_DAMPING}
        return fm.optim.FisherNaturalGradient(groups, model, batches, **own)
    if name == "stiffness_muon":  # hidden matrices at lr, all others by Adam at float_lr
        own |= {
            "betas": betas,
            "adam_eps": EPS,
            "momentum": momentum,
            "weight_decay": settings.weight_decay,
        }
        return fm.optim.StiffnessMuon.for_model(
            model, settings.lr or 0.0, other_lr=settings.float_lr, **own
        )
    own |= {
        option: getattr(settings, option)
        for option in ("lr", "momentum", "float_lr")
        if option in OPTIONS[name]
    }
    if "beta1" in OPTIONS[name]:
        own["betas"] = betas
    if name.startswith("riemannian"):
        groups = _riemannian_groups(model, config)
    kinds = {public.lower(): kind for public, kind in vars(fm.optim).items()}
    return kinds[name.replace("_", "")](groups, **own)


def peak_lr(group: dict[str, Any], settings: OptimizerConfig) -> float:
    """Return a group's highest learning rate: under Muon parameters that are no hidden
    matrices have their own.

    >>> peak_lr({"direction": "adam"}, OptimizerConfig(lr=2e-3, float_lr=4e-3)), peak_lr({}, OptimizerConfig(lr=2e-3))
    (0.004, 0.002)
    """
    others = group.get("direction") == "adam" or group.get("use_muon") is False
    lr = settings.float_lr if others else settings.lr
    return lr or 0.0


def _riemannian_groups(model: nn.Module, config: Config) -> list[dict[str, Any]]:
    """Return a group of weights stepped by ULPs, with decay, one of all others, and one
    per rate of constraints.

    The Riemannian optimizers take decay of quantised weights as a share per step, not
    times lr, and add that of floats to the gradient. So quantised weights get the decay
    that AdamW has at float_lr, and the others get none.
    """
    settings = config.optimizer
    on_manifolds = config.model.storage in MANIFOLDS
    weights: list[Any] = (
        [layer.weight for layer in quantized_layers(model).values()] if on_manifolds else []
    )
    rates = {
        id(weight): rate_of(weight, settings) for weight in constrained_weights(model).values()
    }
    apart = {id(weight) for weight in weights} | rates.keys()
    others = [parameter for parameter in model.parameters() if id(parameter) not in apart]
    groups = _groups(
        ((settings.weight_decay or 0.0) * (settings.float_lr or 0.0), weights), (0.0, others)
    )
    for rate in dict.fromkeys(rates.values()):
        members = [
            parameter for parameter in model.parameters() if rates.get(id(parameter)) == rate
        ]
        groups.append({"params": members, "weight_decay": 0.0, "float_lr": rate})
    return groups


#: SDNQ's Muon needs so many times the rate of ours for the same step: its update, a
#: matrix (m, n) of orthogonal rows or columns, has an RMS of 1 / sqrt(max(m, n)), ours
#: one of 0.2; the factor is the mean over the 0.8M model's matrices
_SDNQ_RATE = 4.0


def _sdnq_group(group: dict[str, Any], settings: OptimizerConfig) -> dict[str, Any]:
    hidden = group["direction"] == "muon"
    return {
        "params": group["params"],
        "use_muon": hidden,
        "lr": settings.lr if hidden else settings.float_lr,
        "betas": (settings.momentum if hidden else settings.beta1, settings.beta2),
        "weight_decay": group["weight_decay"] / (_SDNQ_RATE if hidden else 1.0),
    }


def _stiffness(config: Config) -> float | Callable[[int], float]:
    """Return the exponent k, or its schedule; AdamW and SGD on the library's manifolds
    have k = 0.
    """
    settings = config.optimizer
    if settings.stiffness is None:
        return 0.0
    if settings.stiffness_end is None:
        return settings.stiffness
    steps, name = config.train.max_steps, settings.stiffness_schedule or "linear"
    if name == "linear":
        return fm.optim.anneal(settings.stiffness, settings.stiffness_end, steps)
    return Course(name, settings.stiffness, settings.stiffness_end, steps, settings.step_at)


def stiffness_at(config: Config, step: int) -> float | None:
    """Return the stiffness exponent of `step` (counted from 0), None when the optimizer
    has none.
    """
    if config.optimizer.stiffness is None:
        return None
    exponent = _stiffness(config)
    return float(exponent(step)) if callable(exponent) else exponent


#: SDNQ's names of its formats
SDNQ_FORMATS = {"E2M5": "float8_e2m5fn", "E4M3": "float8_e4m3fn", "int8": "int8"}

Model = TypeVar("Model", bound=nn.Module)
#: FP8 products take sizes that are multiples of this
MULTIPLE = 16
#: compute capability of the first NVIDIA GPUs whose tensor cores multiply FP8
FP8_CAPABILITY = (8, 9)


def keep_peer_weights(model: Model, config: Config) -> Model:
    """Give every linear layer, the head too, the weights that `model.peer` names;
    embeddings stay float32.
    """
    peer = config.model.peer
    if peer is None:
        return model
    package, _, fmt = peer.partition("-")
    with refusals(
        f"model.peer: {peer!r}",
        ImportError,
        ValueError,
        TypeError,
        AssertionError,
        NotImplementedError,
    ):
        if (
            package == "sdnq"
        ):  # SDNQ's defaults (a scale per 32 weights, products of floats), in small layers, too
            from sdnq.training import sdnq_training_post_load_quant

            least = {"minimum_allowed_numel": 0, "minimum_allowed_channel_size": 0}
            model = sdnq_training_post_load_quant(
                model, weights_dtype=SDNQ_FORMATS[fmt], add_skip_keys=False, **least
            )
        else:
            from torchao.prototype.quantized_training import int8_weight_only_quantized_training
            from torchao.quantization import quantize_

            quantize_(model, int8_weight_only_quantized_training())
    return model


def sdnq_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an SDNQ optimizer for a checkpoint: SDNQ's tensors become
    mappings of their parts.
    """
    apart = {
        index: {
            name: parts_of(value) if is_packaged(value) else value
            for name, value in entries.items()
        }
        for index, entries in state["state"].items()
    }
    return {**state, "state": apart}


def sdnq_state_back(state: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return the state that `sdnq_state` took apart, its parts in new tensors that the
    optimizer makes.
    """
    places = [
        (group, parameter) for group in optimizer.param_groups for parameter in group["params"]
    ]
    made = {
        index: _filled(optimizer, places[index], entries)
        for index, entries in state["state"].items()
    }
    return {**state, "state": made}


@torch.no_grad()
def _filled(optimizer: Any, place: tuple[Any, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    group, parameter = place
    gradient, parameter.grad = parameter.grad, torch.zeros(parameter.shape, device=parameter.device)
    try:
        fresh = optimizer.init_state(parameter, group, {})
    finally:
        parameter.grad = gradient
    for name, value in entries.items():
        if isinstance(value, Mapping):
            for part, tensor in parts_of(fresh[name]).items():
                tensor.copy_(value[part])
        else:
            fresh[name] = value
    return dict(fresh)


def train_in_float8(model: Model, config: Config, device: torch.device) -> Model:
    """Replace the linear layers of the blocks by torchao's, where
    `model.torchao_float8` names a recipe of scales.

    lm_head stays as it is, and so do layers whose sizes are no multiples of 16, which
    FP8 hardware can't multiply. The weights stay float32. Without FP8 hardware the same
    roundings are emulated in float32.
    """
    recipe = config.model.torchao_float8
    if recipe is None:
        return model
    linear = (
        (name, x)
        for name, x in model.named_modules()
        if isinstance(x, nn.Linear) and name.startswith("blocks.")
    )
    wanted = {
        name
        for name, x in linear
        if x.in_features % MULTIPLE == 0 and x.out_features % MULTIPLE == 0
    }
    if not wanted:
        raise BenchError(
            f"model.torchao_float8: {recipe!r} needs a layer whose sizes are multiples of "
            f"{MULTIPLE}; "
            "give another model.n_embd"
        )
    multiplies = (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    )
    with refusals("model.torchao_float8", ImportError, ValueError, AssertionError):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        settings = Float8LinearConfig.from_recipe_name(recipe)
        # The class is frozen, and from_recipe_name takes no other argument.
        object.__setattr__(settings, "emulate", not multiplies)
        convert_to_float8_training(
            model, module_filter_fn=lambda _, name: name in wanted, config=settings
        )
    return model
