"""A GPU's bits beside the CPU's: of steps, of arrays, and of products within the bound
of their sums.
"""

import copy
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

import fp8manifold as fm
from _gpu.session import PRODUCTS, Session, bits, on_card, one_byte, seeded
from _gpu.steps import WAYS

__all__ = ["exact_arrays", "exact_products", "exact_steps"]

#: (format of the weights, products) of this version that are no decoded ones
KINDS: Final = (
    (("E4M3", "fp8"), ("E4M3", "fp8, dW"), ("E5M2", "fp8"), ("E1M6", "int8"))
    if PRODUCTS[1:]
    else ()
)
LARGEST: Final = 448.0  # of E4M3
FORMATS: Final = ("E4M3", "E5M2", "E3M4", "E2M5", "E7M0", "E4M3FNUZ")
#: (rows, inputs, outputs) of products that are compared
SHAPES: Final = (
    *(
        (16, 16, 16),
        (32, 64, 48),
        (128, 768, 768),
        (128, 768, 3072),
        (128, 3072, 768),
        (512, 1024, 1024),
    ),
    *(
        (48, 2048, 2048),
        (64, 2048, 8192),
        (64, 8192, 2048),
        (256, 4096, 4096),
        (32, 4096, 11_008),
        (32, 11_008, 4096),
    ),
)


def exact_steps(session: Session) -> dict[str, Any]:
    """The number of bytes of weights and state in which five steps on the GPU differ
    from native code's.
    """
    found: dict[str, Any] = {}
    for fmt in FORMATS[: 1 if session.dry else None]:
        for writeback, moments in WAYS[: 2 if session.dry else None]:
            if not session.has_time:
                return found
            here = [
                fm.FP8Parameter(torch.randn(24, 256, generator=seeded(i)) * 0.1, fmt, seed=i)
                for i in range(3)
            ]
            there = [nn.Parameter(p.detach().clone().to(session.device)) for p in here]
            made = [
                fm.optim.StiffnessAdamW(
                    p, 1e-2, weight_decay=0.1, writeback=writeback, moments=moments
                )  # type: ignore[arg-type]
                for p in (here, there)
            ]
            for step in range(5):
                for i, (p, q) in enumerate(zip(here, there, strict=True)):
                    p.grad = torch.randn(24, 256, generator=seeded(100 * step + i))
                    q.grad = p.grad.to(session.device)
                made[0].step()
                with on_card(session):
                    made[1].step()
            pairs = [(p.codes, q.codes) for p, q in zip(here, there, strict=True)]  # type: ignore[attr-defined]
            for p, q in zip(here, there, strict=True):
                ours, theirs = made[0].state[p], made[1].state[q]
                pairs += [
                    (value, theirs[name])
                    for name, value in ours.items()
                    if isinstance(value, Tensor)
                ]
            found[f"{fmt} {writeback} {moments}"] = sum(
                int((bits(a) != bits(b)).sum()) for a, b in pairs
            )
    return found


def exact_arrays(session: Session) -> dict[str, Any]:
    """The number of elements in which decoding, rounding and encoding differ."""
    found = {}
    for fmt in FORMATS:
        x = torch.randn(100_003, generator=seeded(1)) * torch.exp2(
            torch.randn(100_003, generator=seeded(2)) * 4
        )
        y, stochastic = x.to(session.device), {"rounding": "stochastic", "seed": 3}
        codes = fm.encode(x, fmt)
        pairs = [
            (codes, fm.encode(y, fmt)),
            (fm.round_to_grid(x, fmt, **stochastic), fm.round_to_grid(y, fmt, **stochastic)),  # type: ignore[arg-type]
            (fm.decode(codes, fmt), fm.decode(codes.to(session.device), fmt)),
        ]
        found[fmt] = sum(int((bits(a) != bits(b)).sum()) for a, b in pairs)
    return found


def exact_products(session: Session) -> dict[str, Any]:
    """The number of values converted otherwise than by definition, and of elements of
    products beyond the bound.
    """
    found: dict[str, Any] = {}
    session.case(
        found, "bfloat16 values, converted to E4M3", partial(differing_conversions, session)
    )
    if KINDS:
        session.case(
            found, "bfloat16 values, through a layer", partial(differing_in_a_layer, session)
        )
    for fmt, products in KINDS:
        for shape in SHAPES[: 2 if session.dry else None]:
            what = f"{fmt}, {products}, {' x '.join(map(str, shape))}"
            session.case(found, what, partial(beyond_the_bound, session, shape, products, fmt))
    return found


def values_of_bfloat16() -> Tensor:
    """All bfloat16 values that a row at scale 1 may hold, both zeros among them."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    return every[every.abs() <= LARGEST]


def differing_conversions(session: Session) -> int:
    """The number of values that torch converts to another code than the library does on
    the CPU.
    """
    x = values_of_bfloat16()
    there = x.to(session.device).to(torch.float8_e4m3fn)
    return int((bits(there) != bits(fm.encode(x.float(), "E4M3"))).sum())


def differing_in_a_layer(session: Session) -> int:
    """The number of values that differ in the output of a layer that multiplies by 1
    after it has rounded.

    The last value of each row is the format's largest, so that the row's scale is 1.
    """
    x = values_of_bfloat16()
    padded = torch.cat([x, x.new_zeros(-len(x) % 15)]).view(-1, 15)
    rows = torch.cat([padded, x.new_full((len(padded), 1), LARGEST)], 1)
    layer = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
    nn.init.eye_(layer.weight)
    layer = one_byte(nn.Sequential(layer), "fp8").to(session.device)
    there = layer(rows.to(session.device))[:, :15].reshape(-1)[: len(x)]
    return int((there.cpu() != fm.round_to_grid(x.float(), "E4M3")).sum())


def beyond_the_bound(
    session: Session, shape: tuple[int, int, int], products: str, fmt: str = "E4M3"
) -> dict[str, float]:
    """The number of elements of y, dx and dW further from the CPU's than the bound,
    with the largest ratio to it.

    Two sums that differ may round to neighbours in bfloat16, and an FP8 unit keeps
    fewer bits of a sum than float32: ``ulp(y) + 2^-10 (|a| @ |b|)``, the ulp being
    bfloat16's, ``2^-7 |y|`` at most. Sums of integers are exact.

    With 2^-11 an H200 was up to 1.29 times the bound apart. A unit that adds 32
    products at a time, each cut below 2^-13 of the largest, would be up to 1.49 times,
    since a few rows here outweigh the others.
    """
    rows, inputs, outputs = shape
    torch.manual_seed(0)
    layer = one_byte(
        nn.Sequential(nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)), products, fmt
    )
    x, g = (torch.randn(rows, n) * torch.exp2(2 * torch.randn(rows, 1)) for n in (inputs, outputs))
    made = []
    for device in (torch.device("cpu"), session.device):
        there = copy.deepcopy(layer).to(device)
        a = x.to(device, torch.bfloat16).requires_grad_()
        y = there(a)
        y.backward(g.to(device, torch.bfloat16))
        made.append([t.detach().cpu().float() for t in (y, a.grad, there[0].weight.grad)])  # type: ignore[index, union-attr]
    w = layer[0].weight.dequantize().float().abs()  # type: ignore[index, operator, union-attr]
    sums = (x.abs() @ w.T, g.abs() @ w, g.abs().T @ x.abs())
    beyond, share = 0, 0.0
    for name, a, b, magnitude in zip(("y", "dx", "dW"), *made, sums, strict=True):
        distance, allowed = (
            (a - b).abs(),
            2**-7 * torch.maximum(a.abs(), b.abs()) + 2**-10 * magnitude,
        )
        if products == "int8" and name != "dW":
            allowed = torch.zeros_like(allowed)
        beyond += int((~(distance <= allowed)).sum())
        share = max(share, float((distance / allowed).nan_to_num(0.0).max()))
    return {"count": beyond, "largest share of the bound": share}
