"""Products of bfloat16 matrices on processors that have no instructions for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanogpt_bench.config.schema import Config

#: what `torch.backends.cpu.get_cpu_capability` calls processors on which torch's own product takes ten times float32's
WITHOUT = ("NO AVX", "AVX2")
_ATEN = torch.ops.aten
PRODUCTS = (_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default)


class ProductsByFloat32(TorchDispatchMode):
    """Take products of bfloat16 matrices as products of float32 ones, rounded once at the end.

    A product of two bfloat16 numbers is exact in float32, in which the sums are kept anyway: operands, sums and the
    rounded result are those of a unit for bfloat16, in another order of summation. Everything else is left alone.
    """

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call one operation of torch."""
        plain: Callable[..., Any] = func
        if func in PRODUCTS and all(type(x) is torch.Tensor and x.dtype is torch.bfloat16 for x in args):
            return plain(*(x.float() for x in args), **(kwargs or {})).bfloat16()
        return plain(*args, **(kwargs or {}))


def bfloat16_products(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a run's products of bfloat16 matrices are taken, forward and backward.

    It is a `ProductsByFloat32` where the run has such products and the processor no instructions for them, else
    nothing. Compiled models keep torch's own, since a compiler does not see through such a context.
    """
    wanted = config.train.precision in ("bf16-mixed", "bf16-pure") and not config.runtime.compile
    if wanted and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in WITHOUT:
        return ProductsByFloat32()
    return nullcontext()
