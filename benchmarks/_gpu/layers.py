"""Times of a layer, of its products, and of the kernels that feed them."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fp8manifold as fm
from _gpu.session import PRODUCTS, Session, one_byte

__all__ = ["kernels", "layers", "products"]

BATCH_TOKENS = 8192


def layers(session: Session) -> dict[str, Any]:
    """Time a square layer in eager mode, and the decoding of its weight.

    The layer goes forward alone, and forward and backward.
    """
    figures: dict[str, Any] = {}
    for d in (256,) if session.dry else (1024, 4096):
        dense = nn.Linear(d, d, bias=False, device=session.device, dtype=torch.bfloat16)
        layers_by_name: dict[str, Any] = {"nn.Linear": dense}
        for kind in PRODUCTS:
            coded: Any = one_byte(nn.Sequential(copy.deepcopy(dense)), kind)
            layers_by_name[f"one byte, {kind}"] = coded[0]
        decoded = layers_by_name["one byte, decoded"]
        figures[f"{d} x {d}, decoding"] = session.times(decoded.weight.dequantize)
        x = session.normal(
            16 if session.dry else BATCH_TOKENS, d, dtype=torch.bfloat16
        ).requires_grad_()
        gradient = torch.randn_like(x)
        for name, layer in layers_by_name.items():
            calls = {
                "forward": partial(layer, x),
                "forward and backward": partial(run_layer, layer, x, gradient),
            }
            for title, call in calls.items():
                case = f"{d} x {d}, {name}, {title}"
                session.case(figures, case, partial(session.times, call))
    return figures


def run_layer(layer: Any, x: Tensor, gradient: Tensor) -> None:
    """Go forward and backward."""
    layer(x).backward(gradient)
    x.grad = None
    layer.weight.grad = None


def products(session: Session) -> dict[str, Any]:
    """Time matrix products of 8,192 rows by themselves.

    They are in bfloat16, and in FP8 at one scale per tensor and at one per row.
    """
    figures: dict[str, Any] = {}
    tokens = 16 if session.dry else BATCH_TOKENS
    for d in (32,) if session.dry else (768, 2048, 4096, 8192):
        for inputs, outputs in ((d, d), (d, 4 * d), (4 * d, d)):
            giga_operations = 2e-9 * tokens * inputs * outputs
            for name, call in product_calls(session, tokens, inputs, outputs):
                measure = partial(rate, session, call, giga_operations, "TFLOP/s")
                session.case(figures, f"{inputs} to {outputs}, {name}", measure)
    return figures


def rate(session: Session, call: Callable[[], object], work: float, unit: str) -> dict[str, float]:
    """Return the time of a call, and the work divided by it.

    Args:
        session: times the call.
        call: the call.
        work: in 10^9 operations or bytes.
        unit: of the rate: 10^9 in a millisecond are 10^12 in a second.
    """
    ms = session.milliseconds(call)
    return {"ms": ms, unit: work / ms}


def product_calls(
    session: Session, tokens: int, inputs: int, outputs: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each way to multiply, by name."""
    x = session.normal(tokens, inputs, dtype=torch.bfloat16)
    weight = session.normal(outputs, inputs, dtype=torch.bfloat16)
    yield "bfloat16", partial(torch.mm, x, weight.t())
    one = torch.ones((), device=session.device)
    scales = {"tensorwise": (one, one), "rowwise": (one.repeat(tokens, 1), one.repeat(1, outputs))}
    x_codes = x.to(torch.float8_e4m3fn)
    weight_codes = weight.to(torch.float8_e4m3fn).t()
    for name, (x_scale, weight_scale) in scales.items():
        for sums, is_fast in (("fast", True), ("exact", False)):
            call = partial(
                torch._scaled_mm,
                x_codes,
                weight_codes,
                x_scale,
                weight_scale,
                out_dtype=torch.bfloat16,
                use_fast_accum=is_fast,
            )
            yield f"FP8 {name}, {sums} sums", call


class Kernel(NamedTuple):
    """A kernel that reads and writes once."""

    name: str
    call: Callable[[], object]
    #: bytes that it reads and writes
    moved: int


def kernels(session: Session) -> dict[str, Any]:
    """Time kernels that read and write once, and count the bytes per second."""
    figures: dict[str, Any] = {}
    for d in (64,) if session.dry else (768, 4096, 11_008):
        for kernel in kernels_of_width(session, d):
            measure = partial(rate, session, kernel.call, 1e-9 * kernel.moved, "TB/s")
            session.case(figures, kernel.name, measure)
    return figures


def kernels_of_width(session: Session, d: int) -> Iterator[Kernel]:
    """Yield the kernels over activations of a width, and over a square weight.

    A code is one byte, a bfloat16 two. Columns are read twice.
    """
    x = session.normal(16 if session.dry else BATCH_TOKENS, d, dtype=torch.bfloat16)
    weight = fm.FP8Parameter(session.normal(d, d, dtype=torch.bfloat16), "E4M3")
    size = f"{len(x)} x {d}"
    yield Kernel(f"decoding {d} x {d}", weight.dequantize, 3 * d * d)
    convert = partial(x.to, torch.float8_e4m3fn)
    yield Kernel(f"bfloat16 of {size}, converted by torch", convert, 3 * x.numel())
    if PRODUCTS == ("decoded",):
        return
    from fp8manifold._encoded import products as operands

    yield Kernel(f"rows of {size}, rounded", partial(operands.round_rows, x), 3 * x.numel())
    yield Kernel(f"columns of {size}, rounded", partial(operands.round_columns, x), 5 * x.numel())
    transpose = partial(operands.transpose_bytes, weight.codes)
    yield Kernel(f"bytes of {d} x {d}, transposed", transpose, 2 * d * d)
