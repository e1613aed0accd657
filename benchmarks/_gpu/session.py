"""A session of ``gpu.py``.

It knows where the parts run and how long each may take, and times calls on a GPU.
"""

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.optim import _backends, _plan, _steady

__all__ = ["PRODUCTS", "Session", "bits", "on_card", "one_byte", "seeded"]

#: the ways in which one-byte layers multiply: one in a version whose `quantize_model`
#: has no argument `products`
PRODUCTS: tuple[str, ...] = ("decoded",)
if "products" in inspect.signature(fm.quantize_model).parameters:
    PRODUCTS = ("decoded", "fp8")


class Session:
    """Device, sizes, and the time that a part may still take."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.start(90.0)

    def start(self, seconds: float) -> None:
        """Begin a part that may take so many seconds."""
        self.end = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the part's end."""
        return self.end - time.monotonic()

    @property
    def has_time(self) -> bool:
        """True if another case may begin; in a dry run it always may."""
        return self.dry or self.seconds_left > 0

    def case(self, figures: dict[str, Any], name: str, measure: Callable[[], Any]) -> None:
        """Measure a case and add its figures to a part's, unless no time is left.

        A failure ends no other case. Its error is added in place of figures.
        """
        if not self.has_time:
            return
        try:
            figures[name] = measure()
        except Exception as error:
            text = " ".join(str(error).split())
            figures[name] = {"error": f"{type(error).__name__}: {text[:300]}"}

    def milliseconds(self, call: Callable[[], object], repeats: int = 20) -> float:
        """Return the median of single calls, by the GPU's clock.

        The cache is flushed between them.
        """
        if self.dry:
            begin = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begin)
        larger_than_cache = torch.empty(2**27, dtype=torch.uint8, device=self.device)
        for _ in range(3):
            call()
        times: list[float] = []
        while len(times) < 3 or (len(times) < repeats and self.has_time):
            larger_than_cache.zero_()
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times)[len(times) // 2]

    def kernel_milliseconds(self, call: Callable[[], object]) -> float:
        """Return how long the kernels of one call run.

        It is the time of a call when the host runs ahead.
        """
        if self.dry:
            return 0.0
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        return sum(event.self_device_time_total for event in profile.key_averages()) / 1e3

    def times(self, call: Callable[[], object], repeats: int = 20) -> dict[str, float]:
        """Return the milliseconds of a call, and of its kernels."""
        ms = self.milliseconds(call, repeats)
        return {"ms": ms, "kernels ms": self.kernel_milliseconds(call)}

    def normal(
        self, *shape: int, deviation: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return random values on the device."""
        return (torch.randn(shape, device=self.device) * deviation).to(dtype)


@contextlib.contextmanager
def on_card(session: Session) -> Iterator[None]:
    """Step by kernels; in a dry run by Triton's interpreter, on the CPU."""
    if not session.dry:
        yield
        return
    replacements: list[tuple[Any, str, Any]] = [
        (_plan, "on_gpu", lambda device: True),
        (_steady, "is_triton", lambda slot: True),
        (_backends, "is_native", lambda slot: False),
        (_backends, "is_triton", lambda slot: True),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, replacement in replacements:
            stack.enter_context(patch.object(module, name, replacement))
        yield


def one_byte(
    model: nn.Module, products: str = "decoded", fmt: str = "E4M3", left_out: tuple[str, ...] = ()
) -> nn.Module:
    """Put a model in one byte per weight, some layers left out.

    With the products ``fp8, dW`` gradients of weights are FP8 products too.
    """
    spec: dict[str, Any] = {"weight": fmt}
    if products != "decoded":
        units, _, gradients = products.partition(", ")
        spec |= {"products": units, "gradient_products": "fp8" if gradients else "bfloat16"}
    formats = {"*": spec, **dict.fromkeys(left_out, "none")}
    return fm.quantize_model(model, formats, storage="codes")


def bits(x: Tensor) -> Tensor:
    """Return a tensor's bytes, on the CPU."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def seeded(seed: int) -> torch.Generator:
    """Return a generator of the CPU's."""
    return torch.Generator().manual_seed(seed)
