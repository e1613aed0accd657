"""A session of ``gpu.py``: where its parts run, how long each may take, and how a GPU
is timed.
"""

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.optim import _backends, _steady

__all__ = ["PRODUCTS", "Session", "bits", "on_card", "one_byte", "seeded"]

#: the ways in which this version's one-byte layers multiply
PRODUCTS = (
    ("decoded", "fp8")
    if "products" in inspect.signature(fm.quantize_model).parameters
    else ("decoded",)
)


class Session:
    """Device, sizes, and the time that a part may still take."""

    def __init__(self, dry: bool) -> None:
        self.dry, self.device = dry, torch.device("cpu" if dry else "cuda")
        self.start(90.0)

    def start(self, seconds: float) -> None:
        """Begin a part that may take so many seconds."""
        self.until = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the part's end."""
        return self.until - time.monotonic()

    @property
    def has_time(self) -> bool:
        """True if another case may begin; in a dry run it always may."""
        return self.dry or self.seconds_left > 0

    def case(self, found: dict[str, Any], name: str, measure: Callable[[], Any]) -> None:
        """Add a case's figures to a part's, or why there are none: no time, or a
        failure, which ends no other case.
        """
        if self.has_time:
            try:
                found[name] = measure()
            except Exception as error:
                found[name] = {
                    "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                }

    def milliseconds(self, call: Callable[[], object], repeats: int = 20) -> float:
        """The median of single calls, with the cache flushed between them, by the GPU's
        own clock.
        """
        if self.dry:
            begun = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begun)
        cache, times = torch.empty(2**27, dtype=torch.uint8, device=self.device), []
        for _ in range(3):
            call()
        while len(times) < 3 or (len(times) < repeats and self.has_time):
            cache.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times)[len(times) // 2]

    def busy(self, call: Callable[[], object]) -> float:
        """Milliseconds that the kernels of one call run for: the time of a call when
        the host runs ahead.
        """
        if self.dry:
            return 0.0
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        return sum(event.self_device_time_total for event in profile.key_averages()) / 1e3

    def times(self, call: Callable[[], object], repeats: int = 20) -> dict[str, float]:
        """Milliseconds of a call, and of its kernels."""
        return {"ms": self.milliseconds(call, repeats), "kernels ms": self.busy(call)}

    def normal(
        self, *shape: int, deviation: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Random values on the device."""
        return (torch.randn(shape, device=self.device) * deviation).to(dtype)


@contextlib.contextmanager
def on_card(session: Session) -> Iterator[None]:
    """Steps by kernels; in a dry run by Triton's interpreter, on the CPU."""
    if not session.dry:
        yield
        return
    kept = _steady.on_gpu, _steady.is_triton, _backends.is_native, _backends.is_triton
    _steady.on_gpu = lambda device: True  # type: ignore[assignment]
    _steady.is_triton = _backends.is_triton = lambda slot: True  # type: ignore[assignment]
    _backends.is_native = lambda slot: False  # type: ignore[assignment]
    try:
        yield
    finally:
        _steady.on_gpu, _steady.is_triton, _backends.is_native, _backends.is_triton = kept


def one_byte(
    model: nn.Module, products: str = "decoded", fmt: str = "E4M3", left: tuple[str, ...] = ()
) -> nn.Module:
    """The model in one byte per weight, some layers left; with ``fp8, dW`` weights'
    gradients are FP8 products, too.
    """
    spec: dict[str, Any] = {"weight": fmt}
    if products != "decoded":
        units, _, gradients = products.partition(", ")
        spec |= {"products": units, "gradient_products": "fp8" if gradients else "bfloat16"}
    return fm.quantize_model(model, {"*": spec, **dict.fromkeys(left, "none")}, storage="fp8")


def bits(x: Tensor) -> Tensor:
    """A tensor's bytes, on the CPU."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def seeded(seed: int) -> torch.Generator:
    """A generator of the CPU's."""
    return torch.Generator().manual_seed(seed)
