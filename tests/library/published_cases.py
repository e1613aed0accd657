"""Tensors of published files with random codes and scales, their headers, and what is
read of them.
"""

import torch

from fp8manifold import FP8Tensor
from fp8manifold._published import Header, read_parts, stored_weights, written_parts

NAMES = {
    getattr(torch, f"float8_{kind}"): f"F8_{kind.upper()}"
    for kind in ("e5m2", "e4m3fnuz", "e5m2fnuz")
}
NAMES |= {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4",
}
NAMES |= {torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32"}
NAMES |= {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
Tensors = dict[str, torch.Tensor]
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def headers_of(tensors):
    def shape(x):
        return (
            (*x.shape[:-1], 2 * x.shape[-1])
            if x.dtype == torch.float4_e2m1fn_x2
            else tuple(x.shape)
        )

    return {
        name: Header(NAMES[x.dtype], shape(x), "model.safetensors") for name, x in tensors.items()
    }


def only(tensors, config=None):
    (stored,) = stored_weights(headers_of(tensors), config).values()
    return stored


def weight_of(stored, tensors, dtype=torch.float32):
    codes, scale = read_parts(stored, tensors.__getitem__)
    return FP8Tensor.from_codes(
        codes, scale, stored.format, block_size=stored.block_size, dtype=dtype
    )


def as_bytes(x):
    return x.dtype, tuple(x.shape), x.contiguous().view(-1).view(torch.uint8).tolist()


def assert_written_as_read(stored, tensors):
    parts = written_parts(stored, weight_of(stored, tensors))
    assert set(parts) == {stored.codes, stored.scale}
    assert {name: as_bytes(x) for name, x in parts.items()} == {
        name: as_bytes(tensors[name]) for name in parts
    }


def codes(shape, dtype=E4M3):
    drawn = torch.randint(0, 256, shape, dtype=torch.uint8)
    if dtype == torch.float8_e5m2:  # no Inf, which no writer has
        drawn[(drawn & 127) == 124] = 0
    return drawn.view(dtype)


def scales(shape, dtype):
    if dtype in (torch.uint8, E8M0):
        return torch.randint(90, 128, shape, dtype=torch.uint8).view(dtype)
    return (torch.rand(shape) + 0.01).to(dtype)


def scale_at(stored, scale):
    """The float32 scale of every weight, one at a time."""
    if scale.dtype in (torch.uint8, E8M0):
        scale = torch.tensor(
            [2.0 ** (b - 127) for b in scale.view(torch.uint8).flatten().tolist()]
        ).view(scale.shape)
    flat, shape = scale.float().flatten().tolist(), stored.shape
    down, across = -(-shape[-2] // 128) if len(shape) > 1 else 1, -(-shape[-1] // 128)
    out = torch.empty(shape)
    for place in range(out.numel()):
        row, column = divmod(place, shape[-1])
        matrix, row_there = divmod(row, shape[-2] if len(shape) > 1 else 1)
        index = {
            "tensor": 0,
            "channel": place // (out.numel() // shape[0]),
            "row": row,
            "block": place // 32,
            "square": (matrix * down + row_there // 128) * across + column // 128,
        }[stored.granularity]
        out.view(-1)[place] = flat[index]
    return out


#: shape of the weight, and what its scales may look like beside it
SHAPES = {
    "tensor": ((5, 7), [(), (1,), (1, 1)]),
    "channel": ((5, 7), [(5, 1), (5,)]),
    "channel of three": ((3, 5, 7), [(3, 1, 1), (3,)]),
    "row": ((3, 5, 7), [(3, 5, 1)]),
    "block": ((5, 64), [(5, 2)]),
    "block of three": ((2, 3, 64), [(2, 3, 2)]),
    "square": ((130, 13), [(2, 1), (2, 1, 1, 1)]),
    "square of columns": ((3, 140), [(1, 2), (1, 1, 2, 1)]),
    "square of three": ((2, 130, 3), [(2, 2, 1)]),
    "tensor of a vector": ((7,), [(), (1,)]),
}


#: codes with a scale for each row, and a scale alone
W, S = codes((4, 64)), scales((4, 1), torch.float32)
ONE = torch.tensor(0.5)
