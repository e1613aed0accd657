"""Random tensors, a model of one quantised layer, its monitors, and a step under watch."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config.metrics import MonitorConfig
from nanogpt_bench.config.schema import Config
from nanogpt_bench.model.weights import quantized_layers
from nanogpt_bench.monitors import MODULES, Observer, Step
from nanogpt_bench.monitors.capture import UpdateMonitor, UpdateObserver, Watched

NAMES = ("E4M3", "E5M2", "E3M4", "E1M6", "E7M0", "E2M1", "E4M3FNUZ", "P3109_8P3F")
#: of three rows
SCALES = torch.tensor([[2.0**-5], [2.0**-4], [2.0**-6]])


def format_of(name: str) -> fm.FloatFormat:
    return fm.FloatFormat.from_string(name)


def normal(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, std: float = 1.0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul_(std).to(dtype)


def on_grid(name: str, *shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return fm.round_to_grid(normal(*shape, seed=seed, std=std), name)


def layer_of(spec: dict[str, object], weight: Tensor, storage: str = "master") -> nn.Sequential:
    """A model of one quantised linear layer with this weight."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight.clone()
    model = fm.quantize_model(nn.Sequential(linear), {"*": spec}, storage)
    assert isinstance(model, nn.Sequential)
    return model


def watched(
    model: nn.Module,
    look: Callable[[int], object] = lambda one_in: None,
    interval: int = 1,
    **settings: object,
) -> Watched:
    """The facts that monitors of a model are made from; every step is watched."""
    config, layers = Config(), quantized_layers(model)
    config.monitor = MonitorConfig(interval=interval, **settings)
    config.model.storage = next(iter(layers.values())).storage if layers else "float32"
    return Watched.from_model(config, model, torch.device("cpu"), look)


def observers_of(watched: Watched, *names: str) -> list[Observer]:
    """Some monitors of what is watched, in the order of a run.

    What shows them their tensors comes with them.
    """
    monitors = [MODULES[name].build(watched) for name in names]
    watching = [monitor for monitor in monitors if isinstance(monitor, UpdateMonitor)]
    updates = [UpdateObserver(watched, watching)] if watching and watched.quantized else []
    return [watched.capture, *updates, *monitors, watched.turns]


def one_step(
    model: nn.Module, observers: list[Observer], inputs: Tensor, lr: float = 0.0, number: int = 1
) -> Step:
    """Forward, backward, SGD and the writing of the record, as the loop does them."""
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    if any(
        isinstance(layer.manifold, fm.FP8Manifold) for layer in quantized_layers(model).values()
    ):
        optimizer = fm.optim.StiffnessSGD(
            model.parameters(), lr=lr, stiffness=0.0, momentum=0.0, writeback="nearest"
        )
    step = Step(number, model, optimizer, last=True)
    for point in (
        "before_forward",
        "after_forward",
        "after_backward",
        "before_step",
        "after_step",
        "complete_record",
        "take_record",
    ):
        if point == "after_forward":
            loss = model(inputs).sum()
        if point == "after_backward":
            loss.backward()
        if point == "after_step":
            optimizer.step()
        for observer in observers:
            getattr(observer, point)(step)
    return step
