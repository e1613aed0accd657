"""Contenders of ``optimizer_step.py``.

A contender builds its parameters and its optimizer from a workload. Tensors of two
dimensions or more are stored as the contender's name says. Vectors stay in the plain
dtype, as biases and LayerNorms do in a model. AdamW's settings are the same everywhere.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

import geoopt
import torch
from torch import Tensor, nn

import fp8manifold as fm

__all__ = ["CONTENDERS", "REFERENCE_NAME", "SHAPES_OF_SIZES", "Contender", "Kind", "Workload"]

Shapes = tuple[tuple[int, ...], ...]


class Built(NamedTuple):
    """What a contender steps, and what steps it."""

    parameters: list[Tensor]
    optimizer: torch.optim.Optimizer


ADAMW_OPTIONS: Final[dict[str, Any]] = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
}


def repeated(*counted: tuple[int, tuple[int, ...]]) -> Shapes:
    """Return shapes, each as often as the number before it says."""
    shapes: list[tuple[int, ...]] = []
    for count, shape in counted:
        shapes += [shape] * count
    return tuple(shapes)


#: counts and shapes of tensors of mixed sizes
MIXED: Final = repeated(
    (3, (2048, 512)),
    (3, (512, 2048)),
    (6, (512, 512)),
    (4, (384, 384)),
    (1, (768, 768)),
    (1, (500, 777)),
    (2, (333, 500)),
    (2, (1003, 129)),
    (2, (300, 301)),
    (2, (97, 1031)),
    (1, (193, 511)),
    (4, (2048,)),
    (10, (512,)),
    (4, (384,)),
    (3, (777,)),
    (2, (50,)),
)
#: the tensors of a block of GPT-2 in their order
GPT2_BLOCK: Final = (
    (768,),
    (768,),
    (2304, 768),
    (2304,),
    (768, 768),
    (768,),
    (768,),
    (768,),
    (3072, 768),
    (3072,),
    (768, 3072),
    (768,),
)
#: 50 tensors with 10.5 million parameters in all, and GPT-2's 148 with 124 million
SHAPES_OF_SIZES: Final[dict[str, Shapes]] = {
    "10M": MIXED,
    "124M": ((50257, 768), (1024, 768), *(GPT2_BLOCK * 12), (768,), (768,)),
}


@dataclass(frozen=True)
class Workload:
    """The tensors to step, with the same values for every contender."""

    shapes: Shapes
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def sized(cls, params: str, elements: float, device: torch.device) -> "Workload":
        """Return the workload of a named size.

        Each tensor is scaled to ``elements`` times its number of elements.
        """

        def scaled(shape: tuple[int, ...]) -> tuple[int, ...]:
            factor = elements ** (1 / len(shape))
            return tuple(max(1, round(n * factor)) for n in shape)

        return cls(tuple(map(scaled, SHAPES_OF_SIZES[params])), device)

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def weights(self, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
        """Return ordinary parameters of standard deviation 0.02."""
        return [nn.Parameter(values) for values in self._normal(0, 0.02, dtype)]

    def set_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Give each parameter its gradient, in the parameter's dtype."""
        parameters = list(parameters)
        gradients = self._normal(1, 1e-3, parameters[0].dtype)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)

    def drop_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Free the gradients, as ``zero_grad`` does."""
        for parameter in parameters:
            parameter.grad = None

    def _normal(self, seed: int, deviation: float, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(shape, generator=generator) * deviation for shape in self.shapes]
        return [tensor.to(self.device, dtype) for tensor in tensors]


class Kind(StrEnum):
    """Whose a contender is."""

    TORCH = "torch"
    PEER = "peer"
    OURS = "ours"


@dataclass(frozen=True)
class Contender:
    """A way to store weights and step them: a row of the table."""

    kind: Kind
    label: str
    build: Callable[[Workload], Built]
    #: the largest ratio allowed, by device and size
    goals: dict[tuple[str, str], float] = field(default_factory=dict)


def with_matrices(
    weights: list[nn.Parameter], convert: Callable[[Tensor, int], Tensor]
) -> list[Tensor]:
    """Return the weights, those of two dimensions or more converted.

    ``convert`` gets a weight and its position.
    """
    converted: list[Tensor] = []
    for position, weight in enumerate(weights):
        converted.append(convert(weight.detach(), position) if weight.dim() > 1 else weight)
    return converted


def torch_optimizer(
    label: str, optimizer: type[torch.optim.Optimizer], **options: Any
) -> Contender:
    """Return one of torch's optimizers, in float32."""

    def build(work: Workload) -> Built:
        weights = work.weights()
        return Built([*weights], optimizer(weights, **options))

    return Contender(Kind.TORCH, label, build)


def optimi(label: str, dtype: torch.dtype) -> Contender:
    """Return optimi's AdamW, which sums with Kahan compensation in bfloat16."""

    def build(work: Workload) -> Built:
        from optimi import AdamW

        weights = work.weights(dtype)
        return Built([*weights], AdamW(weights, **ADAMW_OPTIONS))

    return Contender(Kind.PEER, label, build)


def torchao_optimizer(
    label: str, name: str, dtype: torch.dtype = torch.float32, **options: Any
) -> Contender:
    """Return one of torchao's low-bit optimizers."""

    def build(work: Workload) -> Built:
        import torchao.optim

        weights = work.weights(dtype)
        optimizer = getattr(torchao.optim, name)(weights, **ADAMW_OPTIONS, **options)
        return Built([*weights], optimizer)

    return Contender(Kind.PEER, label, build)


def torchao_int8(work: Workload) -> Built:
    """Build torchao's int8 weights under its AdamW, which rounds stochastically, once."""
    from torchao.optim import _AdamW
    from torchao.prototype.quantized_training.int8 import (
        Int8QuantizedTrainingLinearWeight as Int8Weight,
    )

    weights = with_matrices(work.weights(), lambda w, _: nn.Parameter(Int8Weight.from_float(w)))
    return Built(weights, _AdamW(weights, **ADAMW_OPTIONS))


def torchao_int8_8bit(work: Workload) -> Built:
    """Build torchao's int8 weights under its AdamW with averages of 8 bits."""
    from torchao.optim import AdamW8bit
    from torchao.prototype.quantized_training.int8 import (
        Int8QuantizedTrainingLinearWeight as Int8Weight,
    )

    weights = with_matrices(work.weights(), lambda w, _: nn.Parameter(Int8Weight.from_float(w)))
    return Built(weights, AdamW8bit(weights, **ADAMW_OPTIONS))


def sdnq(label: str, optimizer: str, fmt: str) -> Contender:
    """Return SDNQ's weights, a float scale per 32, under its optimizer with 8-bit averages.

    SDNQ is under GPL-3.0.
    """

    def build(work: Workload) -> Built:
        import sdnq.optim
        from sdnq.training import SDNQTensor

        def convert(weight: Tensor, _: int) -> Tensor:
            return nn.Parameter(
                SDNQTensor.from_float(weight, layer_class_name="Linear", weights_dtype=fmt)
            )

        weights = with_matrices(work.weights(), convert)
        options = {name: value for name, value in ADAMW_OPTIONS.items() if name != "eps"}
        make_optimizer = getattr(sdnq.optim, optimizer)
        return Built(weights, make_optimizer(list(weights), use_quantized_buffers=True, **options))

    return Contender(Kind.PEER, label, build)


def geoopt_adam(work: Workload) -> Built:
    """Build geoopt's RiemannianAdam in flat space."""
    weights: list[Tensor] = [geoopt.ManifoldParameter(w.detach()) for w in work.weights()]
    return Built(weights, geoopt.optim.RiemannianAdam(weights, **ADAMW_OPTIONS))


def bitsandbytes_8bit(work: Workload) -> Built:
    """Build bitsandbytes' block-wise 8-bit AdamW."""
    import bitsandbytes

    weights = work.weights()
    return Built([*weights], bitsandbytes.optim.AdamW8bit(weights, **ADAMW_OPTIONS))


def library_optimizer(
    label: str,
    optimizer: str,
    fmt: str = "E4M3",
    goals: Any = None,
    *,
    factors: bool = False,
    **options: Any,
) -> Contender:
    """Return an optimizer of this library over weights of one byte.

    Scales are powers of two, or with ``factors`` are not.
    """
    has_residual = str(options.get("writeback")).startswith("residual")
    decay = ADAMW_OPTIONS["weight_decay"]

    def convert(weight: Tensor, position: int) -> Tensor:
        parameter = fm.FP8Parameter(weight, fmt, seed=position, keep_remainder=has_residual)
        if factors:
            parameter.set_scale_(parameter.scale * 1.2345679)
        return parameter

    def build(work: Workload) -> Built:
        weights = with_matrices(work.weights(), convert)
        make_optimizer = getattr(fm.optim, optimizer)
        return Built(weights, make_optimizer(weights, weight_decay=decay, **options))

    return Contender(Kind.OURS, label, build, goals or {})


def stiffness_adamw(label: str, fmt: str = "E4M3", goals: Any = None, **options: Any) -> Contender:
    """Return StiffnessAdamW with AdamW's settings, by default with k = 1.

    That step has more to compute than the one with k = 0.
    """
    settings = {name: ADAMW_OPTIONS[name] for name in ("lr", "betas", "eps")}
    settings = settings | {"stiffness": 1.0} | options
    return library_optimizer(
        f"StiffnessAdamW {fmt} {label}", "StiffnessAdamW", fmt, goals, **settings
    )


def grid_adamw(work: Workload) -> Built:
    """Build StiffnessAdamW over float32 parameters whose values are on the grid."""

    def convert(weight: Tensor, position: int) -> Tensor:
        manifold = fm.FP8Manifold("E4M3", fm.storage_scale(weight, "E4M3"), "stochastic", position)
        return geoopt.ManifoldParameter(manifold.projx(weight), manifold=manifold)

    weights = with_matrices(work.weights(), convert)
    return Built(weights, fm.optim.StiffnessAdamW(weights, **ADAMW_OPTIONS, stiffness=1.0))


REFERENCE_NAME: Final = "adamw-fused"
CONTENDERS: Final[dict[str, Contender]] = {
    REFERENCE_NAME: torch_optimizer(
        "torch AdamW fused, float32", torch.optim.AdamW, fused=True, **ADAMW_OPTIONS
    ),
    "adamw-loop": torch_optimizer(
        "torch AdamW for-loop, float32", torch.optim.AdamW, foreach=False, **ADAMW_OPTIONS
    ),
    "sgd-fused": torch_optimizer(
        "torch SGD fused, float32, no momentum (a floor)",
        torch.optim.SGD,
        fused=True,
        lr=1e-3,
        weight_decay=0.1,
    ),
    "adafactor-foreach": torch_optimizer(
        "torch Adafactor foreach, float32", torch.optim.Adafactor, foreach=True, weight_decay=0.1
    ),
    "optimi-float32": optimi("optimi AdamW float32", torch.float32),
    "optimi-kahan": optimi("optimi AdamW bfloat16, Kahan sums", torch.bfloat16),
    "geoopt-adam": Contender(Kind.PEER, "geoopt RiemannianAdam, Euclidean, float32", geoopt_adam),
    "torchao-fp8": torchao_optimizer("torchao AdamWFp8, float32 weights", "AdamWFp8"),
    "torchao-int8-weights": Contender(
        Kind.PEER, "torchao int8 weights, stochastic, _AdamW", torchao_int8
    ),
    "torchao-int8-8bit": Contender(
        Kind.PEER, "torchao int8 weights, stochastic, AdamW8bit", torchao_int8_8bit
    ),
    "sdnq-adamw-e2m5": sdnq("SDNQ AdamW, E2M5 weights, 8-bit averages", "AdamW", "float8_e2m5fn"),
    "sdnq-adamw-e4m3": sdnq("SDNQ AdamW, E4M3 weights, 8-bit averages", "AdamW", "float8_e4m3fn"),
    "sdnq-adamw-int8": sdnq("SDNQ AdamW, int8 weights, 8-bit averages", "AdamW", "int8"),
    "sdnq-muon-e2m5": sdnq("SDNQ Muon, E2M5 weights, 8-bit momentum", "Muon", "float8_e2m5fn"),
    "torchao-bf16": torchao_optimizer(
        "torchao _AdamW bfloat16, stochastic", "_AdamW", torch.bfloat16, bf16_stochastic_round=True
    ),
    "torchao-8bit": torchao_optimizer("torchao AdamW8bit, float32 weights", "AdamW8bit"),
    "bitsandbytes-8bit": Contender(
        Kind.PEER, "bitsandbytes AdamW8bit, float32 weights", bitsandbytes_8bit
    ),
    "stiffness-adamw": stiffness_adamw(
        "stochastic, float32 moments", goals={("cpu", "10M"): 1.3, ("cuda", "124M"): 0.6}
    ),
    "stiffness-adamw-bfloat16": stiffness_adamw("stochastic, bfloat16 moments", moments="bfloat16"),
    "stiffness-adamw-8bit": stiffness_adamw(
        "stochastic, 8-bit moments", goals={("cpu", "10M"): 2.0}, moments="8bit"
    ),
    "stiffness-adamw-residual8": stiffness_adamw(
        "residual8, float32 moments", goals={("cpu", "10M"): 1.6}, writeback="residual8"
    ),
    "stiffness-adamw-residual8-8bit": stiffness_adamw(
        "residual8, 8-bit moments", writeback="residual8", moments="8bit"
    ),
    "stiffness-adamw-nearest": stiffness_adamw("nearest, float32 moments", writeback="nearest"),
    "stiffness-adamw-momentum": stiffness_adamw("momentum, float32 moments", writeback="momentum"),
    "stiffness-adamw-k0": stiffness_adamw("stochastic, k = 0", stiffness=0.0),
    "stiffness-adamw-annealed": stiffness_adamw(
        "stochastic, k from 1 to 0", stiffness=fm.optim.anneal(1.0, 0.0, 1000)
    ),
    "stiffness-adamw-factors": stiffness_adamw(
        "stochastic, float32 moments, any scales", factors=True
    ),
    "stiffness-adamw-annealed-factors": stiffness_adamw(
        "stochastic, k from 1 to 0, any scales",
        stiffness=fm.optim.anneal(1.0, 0.0, 1000),
        factors=True,
    ),
    "stiffness-adamw-dither": stiffness_adamw("stochastic, dithered draws", draws="dither"),
    "stiffness-adamw-e2m5": stiffness_adamw("stochastic, float32 moments", "E2M5"),
    "stiffness-adamw-e5m2": stiffness_adamw("stochastic, float32 moments", "E5M2"),
    "stiffness-adamw-e3m4": stiffness_adamw("stochastic, float32 moments", "E3M4"),
    "stiffness-adamw-e7m0": stiffness_adamw("stochastic, float32 moments", "E7M0"),
    "stiffness-adamw-grid": Contender(
        Kind.OURS, "StiffnessAdamW E4M3 stochastic, float32 grid weights", grid_adamw
    ),
    "riemannian-adam": library_optimizer(
        "RiemannianAdam E4M3 stochastic", "RiemannianAdam", lr=0.5, float_lr=1e-3
    ),
    "stiffness-sgd": library_optimizer(
        "StiffnessSGD E4M3 stochastic, momentum 0.9",
        "StiffnessSGD",
        lr=0.1,
        momentum=0.9,
        stiffness=2.0,
    ),
    "stiffness-lion": library_optimizer(
        "StiffnessLion E4M3 stochastic", "StiffnessLion", stiffness=1.0
    ),
    "stiffness-adafactor": library_optimizer(
        "StiffnessAdafactor E4M3 stochastic",
        "StiffnessAdafactor",
        goals={("cpu", "10M"): 2.0},
    ),
    "stiffness-adafactor-8bit": library_optimizer(
        "StiffnessAdafactor E4M3 stochastic, 8-bit momentum",
        "StiffnessAdafactor",
        momentum=0.9,
        moments="8bit",
    ),
}
