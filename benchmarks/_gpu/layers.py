"""Times of a layer's products: a call in Python, products by themselves, and the
kernels that feed them.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fp8manifold as fm
from _gpu.session import PRODUCTS, Session, one_byte

__all__ = ["kernels", "layers", "products"]

TOKENS = 8192


def layers(session: Session) -> dict[str, Any]:
    """A square layer in eager mode, forward alone and with its backward pass, and the
    decoding of its weight.
    """
    found: dict[str, Any] = {}
    for d in (256,) if session.dry else (1024, 4096):
        dense = nn.Linear(d, d, bias=False, device=session.device, dtype=torch.bfloat16)
        made: dict[str, Any] = {"nn.Linear": dense}
        for kind in PRODUCTS:
            made[f"one byte, {kind}"] = one_byte(nn.Sequential(copy.deepcopy(dense)), kind)[0]  # type: ignore[index]
        found[f"{d} x {d}, decoding"] = session.times(made["one byte, decoded"].weight.dequantize)
        x = session.normal(16 if session.dry else TOKENS, d, dtype=torch.bfloat16).requires_grad_()
        g = torch.randn_like(x)
        for name, layer in made.items():
            for what, call in (
                ("forward", partial(layer, x)),
                ("forward and backward", partial(both, layer, x, g)),
            ):
                session.case(found, f"{d} x {d}, {name}, {what}", partial(session.times, call))
    return found


def both(layer: Any, x: Tensor, g: Tensor) -> None:
    """A forward and a backward pass."""
    layer(x).backward(g)
    x.grad = layer.weight.grad = None


def products(session: Session) -> dict[str, Any]:
    """Matrix products of 8,192 rows by themselves: bfloat16, FP8 at one scale per
    tensor and at one per row.
    """
    found: dict[str, Any] = {}
    tokens = 16 if session.dry else TOKENS
    for d in (32,) if session.dry else (768, 2048, 4096, 8192):
        for inputs, outputs in ((d, d), (d, 4 * d), (4 * d, d)):
            for name, call in product_calls(session, tokens, inputs, outputs):
                work = 2e-9 * tokens * inputs * outputs
                session.case(
                    found,
                    f"{inputs} to {outputs}, {name}",
                    partial(rate, session, call, work, "TFLOP/s"),
                )
    return found


def rate(session: Session, call: Callable[[], object], work: float, unit: str) -> dict[str, float]:
    """The time of a call, and the work divided by it."""
    ms = session.milliseconds(call)
    return {"ms": ms, unit: work / ms}


def product_calls(
    session: Session, tokens: int, inputs: int, outputs: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each way to multiply, by name."""
    a, b = (session.normal(n, inputs, dtype=torch.bfloat16) for n in (tokens, outputs))
    yield "bfloat16", partial(torch.mm, a, b.t())
    one = torch.ones((), device=session.device)
    scales = {"tensorwise": (one, one), "rowwise": (one.repeat(tokens, 1), one.repeat(1, outputs))}
    x, w = (t.to(torch.float8_e4m3fn) for t in (a, b))
    for name, (p, q) in scales.items():
        for fast in (True, False):
            call = partial(
                torch._scaled_mm, x, w.t(), p, q, out_dtype=torch.bfloat16, use_fast_accum=fast
            )
            yield f"FP8 {name}, {'fast' if fast else 'exact'} sums", call


def kernels(session: Session) -> dict[str, Any]:
    """Kernels that read and write once, and the bytes per second that they move."""
    found: dict[str, Any] = {}
    for d in (64,) if session.dry else (768, 4096, 11_008):
        x = session.normal(16 if session.dry else TOKENS, d, dtype=torch.bfloat16)
        codes = fm.FP8Parameter(session.normal(d, d, dtype=torch.bfloat16), "E4M3")
        calls = {
            f"decoding {d} x {d}": (codes.dequantize, 3 * d * d),
            f"bfloat16 of {len(x)} x {d}, converted by torch": (
                partial(x.to, torch.float8_e4m3fn),
                3 * x.numel(),
            ),
        }
        if PRODUCTS[1:]:
            from fp8manifold._encoded import products as operands

            calls |= {
                f"rows of {len(x)} x {d}, rounded": (
                    partial(operands.round_rows, x),
                    3 * x.numel(),
                ),
                f"columns of {len(x)} x {d}, rounded": (
                    partial(operands.round_columns, x),
                    5 * x.numel(),
                ),
                f"bytes of {d} x {d}, transposed": (
                    partial(operands.transpose_bytes, codes.codes),
                    2 * d * d,
                ),
            }
        for name, (call, moved) in calls.items():
            session.case(found, name, partial(rate, session, call, 1e-9 * moved, "TB/s"))
    return found
