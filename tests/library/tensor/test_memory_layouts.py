"""Results of tensors that are not contiguous have the bits of a contiguous copy's."""

import geoopt
import pytest
import torch
from family_cases import NAMES, make
from optimizer_cases import normal, stored_weight
from paths import PATHS, on_path
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import _native
from fp8manifold._ranks import bytes_of
from fp8manifold.optim._agreement import _word_of_start


def every_second(x: Tensor) -> Tensor:
    wide = x.new_zeros([2 * size for size in x.shape])
    places = tuple(slice(None, None, 2) for _ in x.shape)
    wide[places] = x
    return wide[places]


def of_odd_strides(x: Tensor) -> Tensor:
    """Give dimensions of one entry a stride of 7; torch still calls it contiguous."""
    strides = [7 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, strides)


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every second": every_second,
    "negated later": lambda x: (-x)._neg_view(),
    "of odd strides": of_odd_strides,
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def as_bytes(x: Tensor) -> bytes:
    return bytes_of(x.detach().as_subclass(Tensor)).numpy().tobytes()


def weight_of(storage, shape, layout):
    if storage == "codes":
        return stored_weight(shape=shape)
    x = normal(*shape, std=0.1)
    if storage == "grid":
        manifold = fm.FP8Manifold("E4M3", 2.0**-5, "stochastic")
        return geoopt.ManifoldParameter(layout(manifold.projx(x)), manifold=manifold)
    return nn.Parameter(layout(x.to(getattr(torch, storage))))


def bytes_after_steps(name, storage, shape, layout, path) -> list[bytes]:
    """Return weight and state after three steps; the state has the layout in the last."""
    weight = weight_of(storage, shape, layout)
    optimizer = on_path(path, make(name, [weight]))
    for step in range(3):
        weight.grad = layout(normal(*shape, seed=step + 1, std=0.1).to(weight.dtype))
        for x in optimizer.state[weight].values() if step == 2 else ():
            if isinstance(x, Tensor) and x.shape == weight.shape:
                x.data = layout(x)
        optimizer.step()
    parts = [weight.codes, weight.scale] if storage == "codes" else [weight]
    parts += optimizer.state[weight].values()
    return [as_bytes(x) for x in parts if isinstance(x, Tensor)]


@pytest.mark.covering(2)
@every_layout
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(24, 8), (1, 33), (33, 1), (6, 3, 2, 2), (17,)], ids=str)
@pytest.mark.parametrize("storage", ["codes", "grid", "float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "FisherNaturalGradient"])
def test_steps(name, storage, shape, path, layout, products) -> None:
    """Every optimizer steps a weight, gradient and state of any layout to the same bits."""
    contiguous = bytes_after_steps(name, storage, shape, torch.clone, path)
    assert bytes_after_steps(name, storage, shape, layout, path) == contiguous


def quantized_gradient(x, granularity) -> Tensor:
    x = x.detach().requires_grad_()
    fm.fake_quantize(x, "E4M3", granularity=granularity, ste="clipped").square().sum().backward()
    return x.grad


FUNCTIONS = {
    "nearest": lambda x: fm.round_to_grid(x, "E4M3"),
    "stochastic": lambda x: fm.round_to_grid(x, "E4M3", "stochastic", seed=3),
    "encode": lambda x: fm.encode(x, "E4M3"),
    "ulp": lambda x: fm.ulp(x, "E4M3"),
    "tensor": lambda x: fm.fake_quantize(x, "E4M3"),
    "channel": lambda x: fm.fake_quantize(x, "E4M3", granularity="channel"),
    "channel, stochastic": lambda x: fm.fake_quantize(
        x, "E4M3", granularity="channel", rounding="stochastic", seed=3
    ),
    "block": lambda x: fm.fake_quantize(x, "E4M3", granularity="block"),
    "gradient": lambda x: quantized_gradient(x, "channel"),
}


@every_layout
@pytest.mark.parametrize("native", [True, False], ids=["native", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 64), (900, 320), (1, 32)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, shape, dtype, native, layout, monkeypatch) -> None:
    x = normal(*shape, seed=1).to(dtype)
    with monkeypatch.context() as patch:
        if not native:
            patch.setattr(_native, "_load", lambda: _native._Loaded(None, []))
        assert as_bytes(FUNCTIONS[name](layout(x))) == as_bytes(FUNCTIONS[name](x))


@every_layout
@pytest.mark.parametrize("shape", [(3, 4), (4, 1), (1, 4), (5,), (1,), (0, 3), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_a_contiguous_copy(shape, dtype, layout) -> None:
    x = normal(*shape).to(dtype)
    expected = x.view(torch.uint8) if shape else x.reshape(1).view(torch.uint8)
    assert as_bytes(layout(x)) == expected.numpy().tobytes()
    assert _word_of_start(nn.Parameter(layout(x)), {}) == _word_of_start(nn.Parameter(x), {})
