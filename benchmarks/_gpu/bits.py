"""A GPU's bits beside the CPU's.

Those of steps and of arrays have to be equal. Sums of products may differ within a
bound.
"""

import copy
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

import fp8manifold as fm
from _gpu.session import PRODUCTS, Session, bits, on_card, one_byte, seeded
from _gpu.steps import ADAFACTOR_WAYS, ADAMW_WAYS

__all__ = ["exact_arrays", "exact_products", "exact_steps"]


class Products(NamedTuple):
    """How a layer multiplies."""

    fmt: str
    #: the units, and whether gradients of weights are FP8 products too
    units: str


#: those of this version that multiply codes, not decoded weights
CODE_PRODUCTS: tuple[Products, ...] = ()
if PRODUCTS != ("decoded",):
    CODE_PRODUCTS = (
        Products("E4M3", "fp8"),
        Products("E4M3", "fp8, dW"),
        Products("E5M2", "fp8"),
        Products("E1M6", "int8"),
    )
#: the largest number of E4M3
LARGEST_OF_E4M3: Final = 448.0
STEPPED_FORMATS: Final = ("E4M3", "E5M2", "E3M4", "E2M5", "E7M0", "E4M3FNUZ")


class ProductShape(NamedTuple):
    """Sizes of a product."""

    rows: int
    inputs: int
    outputs: int


PRODUCT_SHAPES: Final = (
    ProductShape(16, 16, 16),
    ProductShape(32, 64, 48),
    ProductShape(128, 768, 768),
    ProductShape(128, 768, 3072),
    ProductShape(128, 3072, 768),
    ProductShape(512, 1024, 1024),
    ProductShape(48, 2048, 2048),
    ProductShape(64, 2048, 8192),
    ProductShape(64, 8192, 2048),
    ProductShape(256, 4096, 4096),
    ProductShape(32, 4096, 11_008),
    ProductShape(32, 11_008, 4096),
)


#: parameters of Adafactor have rows of several tiles, experts, and all squares of a vector
ADAFACTOR_SHAPES: Final = ((24, 256), (70, 1300), (3, 40, 64), (2100,))


def exact_steps(session: Session) -> dict[str, Any]:
    """Count the bytes in which five steps on the GPU differ from native code's.

    They are bytes of weights and of state.
    """
    figures: dict[str, Any] = {}
    for fmt in STEPPED_FORMATS[: 1 if session.dry else None]:
        ways: dict[str, partial[Any]] = {}
        for writeback, moments in ADAMW_WAYS[: 2 if session.dry else None]:
            ways[f"{writeback} {moments}"] = partial(
                fm.optim.StiffnessAdamW, lr=1e-2, writeback=writeback, moments=moments
            )
        for name, options in ADAFACTOR_WAYS[: 1 if session.dry else None]:
            ways[name] = partial(fm.optim.StiffnessAdafactor, lr=5e-2, **options)
        for name, make in ways.items():
            if not session.has_time:
                return figures
            shapes: Any = ((24, 256),) * 3
            if make.func is fm.optim.StiffnessAdafactor:
                shapes = ADAFACTOR_SHAPES[: 1 if session.dry else None]
            figures[f"{fmt} {name}"] = differing_bytes_of_steps(session, fmt, make, shapes)
    return figures


def differing_bytes_of_steps(
    session: Session, fmt: str, make: partial[Any], shapes: tuple[tuple[int, ...], ...]
) -> int:
    """Count the bytes in which one way to step parameters of some shapes differs."""
    on_cpu: list[Any] = []
    for seed, shape in enumerate(shapes):
        values = torch.randn(*shape, generator=seeded(seed)) * 0.1
        on_cpu.append(fm.FP8Parameter(values, fmt, seed=seed))
    on_device: list[Any] = [nn.Parameter(p.detach().clone().to(session.device)) for p in on_cpu]
    cpu_optimizer = make(on_cpu, weight_decay=0.1)
    device_optimizer = make(on_device, weight_decay=0.1)
    for step in range(5):
        for i, (p, q) in enumerate(zip(on_cpu, on_device, strict=True)):
            p.grad = torch.randn(*p.shape, generator=seeded(100 * step + i))
            q.grad = p.grad.to(session.device)
        cpu_optimizer.step()
        with on_card(session):
            device_optimizer.step()
    count = 0
    for p, q in zip(on_cpu, on_device, strict=True):
        count += differing_bytes(p.codes, q.codes)
        device_state = device_optimizer.state[q]
        for name, value in cpu_optimizer.state[p].items():
            if isinstance(value, Tensor):
                count += differing_bytes(value, device_state[name])
    return count


def differing_bytes(x: Tensor, y: Tensor) -> int:
    """Count the bytes in which two tensors differ."""
    return int((bits(x) != bits(y)).sum())


def exact_arrays(session: Session) -> dict[str, Any]:
    """Count the bytes in which decoding, rounding and encoding differ, by format."""
    sizes = torch.exp2(torch.randn(100_003, generator=seeded(2)) * 4)
    x = torch.randn(100_003, generator=seeded(1)) * sizes
    y = x.to(session.device)
    stochastic: dict[str, Any] = {"rounding": "stochastic", "seed": 3}
    figures = {}
    for fmt in STEPPED_FORMATS:
        codes = fm.encode(x, fmt)
        figures[fmt] = sum(
            (
                differing_bytes(codes, fm.encode(y, fmt)),
                differing_bytes(
                    fm.round_to_grid(x, fmt, **stochastic), fm.round_to_grid(y, fmt, **stochastic)
                ),
                differing_bytes(fm.decode(codes, fmt), fm.decode(codes.to(session.device), fmt)),
            )
        )
    return figures


def exact_products(session: Session) -> dict[str, Any]:
    """Count the values that are converted wrongly, and the products beyond the bound."""
    figures: dict[str, Any] = {}
    conversions = partial(differing_conversions, session)
    session.case(figures, "bfloat16 values, converted to E4M3", conversions)
    if CODE_PRODUCTS:
        through_a_layer = partial(differing_in_a_layer, session)
        session.case(figures, "bfloat16 values, through a layer", through_a_layer)
    for fmt, units in CODE_PRODUCTS:
        for shape in PRODUCT_SHAPES[: 2 if session.dry else None]:
            name = f"{fmt}, {units}, {' x '.join(map(str, shape))}"
            session.case(figures, name, partial(beyond_the_bound, session, shape, units, fmt))
    return figures


def values_of_bfloat16() -> Tensor:
    """Return all bfloat16 values that a row at scale 1 may hold, both zeros among them."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    return values[values.abs() <= LARGEST_OF_E4M3]


def differing_conversions(session: Session) -> int:
    """Count the values that torch converts otherwise than the library does on the CPU."""
    x = values_of_bfloat16()
    converted = x.to(session.device).to(torch.float8_e4m3fn)
    return differing_bytes(converted, fm.encode(x.float(), "E4M3"))


def differing_in_a_layer(session: Session) -> int:
    """Count the values that a layer rounds wrongly, which then multiplies by 1.

    The last value of each row is the format's largest, so that the row's scale is 1.
    """
    x = values_of_bfloat16()
    padded = torch.cat([x, x.new_zeros(-len(x) % 15)]).view(-1, 15)
    rows = torch.cat([padded, x.new_full((len(padded), 1), LARGEST_OF_E4M3)], 1)
    layer = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
    nn.init.eye_(layer.weight)
    layer = one_byte(nn.Sequential(layer), "fp8").to(session.device)
    output = layer(rows.to(session.device))[:, :15].reshape(-1)[: len(x)]
    return int((output.cpu() != fm.round_to_grid(x.float(), "E4M3")).sum())


def beyond_the_bound(
    session: Session, shape: tuple[int, int, int], products: str, fmt: str = "E4M3"
) -> dict[str, float]:
    """Count the elements of y, dx and dW further from the CPU's than a bound.

    The bound is ``ulp(y) + 2^-10 (|a| @ |b|)``. Two sums that differ may round to
    neighbours in bfloat16, whose ulp is ``2^-7 |y|`` at most. An FP8 unit keeps fewer
    bits of a sum than float32. Sums of integers are exact.

    With 2^-11 an H200 was up to 1.29 times the bound apart. A unit that adds 32
    products at a time, each cut below 2^-13 of the largest, would be up to 1.49 times,
    since a few rows here outweigh the others.
    """
    rows, inputs, outputs = shape
    torch.manual_seed(0)
    layer = one_byte(
        nn.Sequential(nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)), products, fmt
    )
    x = _rows_of_unlike_size(rows, inputs)
    gradient = _rows_of_unlike_size(rows, outputs)
    expected = products_of(layer, x, gradient, torch.device("cpu"))
    measured = products_of(layer, x, gradient, session.device)
    weight = layer[0].weight.dequantize().float().abs()  # type: ignore[index, operator, union-attr]
    magnitudes = {
        "y": x.abs() @ weight.T,
        "dx": gradient.abs() @ weight,
        "dW": gradient.abs().T @ x.abs(),
    }
    count, largest_share = 0, 0.0
    for name, magnitude in magnitudes.items():
        a, b = expected[name], measured[name]
        distance = (a - b).abs()
        bound = 2**-7 * torch.maximum(a.abs(), b.abs()) + 2**-10 * magnitude
        if products == "int8" and name != "dW":
            bound = torch.zeros_like(bound)
        # NaN is beyond the bound.
        count += int((~(distance <= bound)).sum())
        largest_share = max(largest_share, float((distance / bound).nan_to_num(0.0).max()))
    return {"count": count, "largest share of the bound": largest_share}


def _rows_of_unlike_size(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns) * torch.exp2(2 * torch.randn(rows, 1))


def products_of(
    layer: nn.Module, x: Tensor, gradient: Tensor, device: torch.device
) -> dict[str, Tensor]:
    """Return the three products of a layer on a device, in float32 on the CPU."""
    copied: Any = copy.deepcopy(layer).to(device)
    inputs = x.to(device, torch.bfloat16).requires_grad_()
    y = copied(inputs)
    y.backward(gradient.to(device, torch.bfloat16))
    products = {"y": y, "dx": inputs.grad, "dW": copied[0].weight.grad}
    return {name: product.detach().cpu().float() for name, product in products.items()}
