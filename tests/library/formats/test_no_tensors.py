"""What is no float tensor, where one is asked for: one line of a TypeError, never a number
made of a part of it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fp8manifold as fm
from fp8manifold.ops import fp8_mm

ONES = torch.ones(4, 4)
ONE = torch.tensor(1.0)


def weight() -> fm.FP8Tensor:
    return fm.FP8Tensor(ONES, "E4M3", seed=0)


def manifold() -> fm.FP8Manifold:
    return fm.FP8Manifold("E4M3", rounding="nearest")


#: what takes a tensor of floats
TENSORS: dict[str, Callable[[Any], Any]] = {
    "amax_scale": lambda x: fm.amax_scale(x, "E4M3"),
    "storage_scale": lambda x: fm.storage_scale(x, "E4M3"),
    "widened_scale, amax": lambda x: fm.widened_scale(x, ONE, "E4M3"),
    "widened_scale, scale": lambda x: fm.widened_scale(ONE, x, "E4M3"),
    "Scale": lambda x: fm.Scale("E4M3")(x),
    "Scale.freeze": lambda x: fm.Scale("E4M3", policy="static").freeze(x),
    "fake_quantize": lambda x: fm.fake_quantize(x, "E4M3"),
    "round_to_grid": lambda x: fm.round_to_grid(x, "E4M3"),
    "encode": lambda x: fm.encode(x, "E4M3"),
    "ulp": lambda x: fm.ulp(x, "E4M3"),
    "to_chart": lambda x: fm.to_chart(x, "E4M3"),
    "from_chart": lambda x: fm.from_chart(x, "E4M3"),
    "FP8Tensor": lambda x: fm.FP8Tensor(x, "E4M3"),
    "FP8Parameter": lambda x: fm.FP8Parameter(x, "E4M3"),
    "FP8Tensor.adopt": lambda x: weight().adopt(x),
    "fp8_mm, a": lambda x: fp8_mm(x, ONES),
    "fp8_mm, b": lambda x: fp8_mm(ONES, x),
    "projx": lambda x: manifold().projx(x),
    "retr": lambda x: manifold().retr(ONES, x),
    "expmap": lambda x: manifold().expmap(ONES, x),
    "logmap": lambda x: manifold().logmap(ONES, x),
    "dist": lambda x: manifold().dist(ONES, x),
    "inner": lambda x: manifold().inner(ONES, x),
    "norm": lambda x: manifold().norm(ONES, x),
    "transp": lambda x: manifold().transp(ONES, ONES, x),
    "egrad2rgrad": lambda x: manifold().egrad2rgrad(ONES, x),
}
NO_TENSORS: dict[str, Any] = {
    "None": None,
    "list": [[1.0] * 4] * 4,
    "numpy": np.ones((4, 4), np.float32),
    "complex": torch.ones(4, 4, dtype=torch.complex64),
    "int64": torch.ones(4, 4, dtype=torch.int64),
    "uint8": torch.ones(4, 4, dtype=torch.uint8),
    "bool": torch.ones(4, 4, dtype=torch.bool),
    "int": 1,
    "str": "x",
}
#: what takes a number or a tensor of real numbers
SCALES: dict[str, Callable[[Any], Any]] = {
    "fake_quantize": lambda s: fm.fake_quantize(ONES, "E4M3", s),
    "fp8_mm, a_scale": lambda s: fp8_mm(ONES, ONES, a_scale=s),
    "fp8_mm, b_scale": lambda s: fp8_mm(ONES, ONES, b_scale=s),
    "FP8Tensor": lambda s: fm.FP8Tensor(ONES, "E4M3", scale=s),
    "from_codes": lambda s: fm.FP8Tensor.from_codes(weight().codes, s, "E4M3"),
    "set_scale_": lambda s: weight().set_scale_(s),
    "rescale_": lambda s: weight().rescale_(s),
    "FP8Manifold": lambda s: fm.FP8Manifold("E4M3", s),
    "StiffnessManifold": lambda s: fm.StiffnessManifold("E4M3", s),
}
NO_SCALES: dict[str, Any] = {
    "list": [1.0],
    "numpy": np.ones((), np.float32),
    "complex": torch.ones((), dtype=torch.complex64),
    "bool": torch.ones((), dtype=torch.bool),
    "True": True,
    "1j": 1j,
    "str": "x",
}


def check_one_line(call: Callable[[Any], Any], argument: Any) -> None:
    with pytest.raises(TypeError) as refused:
        call(argument)
    message = str(refused.value)
    assert "\n" not in message
    assert "must be" in message or "needed" in message, message


@pytest.mark.parametrize("argument", NO_TENSORS.values(), ids=NO_TENSORS)
@pytest.mark.parametrize("call", TENSORS.values(), ids=TENSORS)
def test_what_is_no_float_tensor_is_refused(call, argument) -> None:
    check_one_line(call, argument)


@pytest.mark.parametrize("argument", NO_SCALES.values(), ids=NO_SCALES)
@pytest.mark.parametrize("call", SCALES.values(), ids=SCALES)
def test_what_is_no_scale_is_refused(call, argument) -> None:
    check_one_line(call, argument)


@pytest.mark.parametrize("scale", [2, 2.0, torch.tensor(2), torch.tensor(2.0), np.float32(2.0)])
@pytest.mark.parametrize("call", SCALES.values(), ids=SCALES)
def test_a_real_number_is_a_scale(call, scale) -> None:
    assert call(scale) is not None


@pytest.mark.parametrize("argument", [None, [1.0], ONES, 1], ids=["None", "list", "tensor", "int"])
def test_a_state_is_a_mapping(argument) -> None:
    check_one_line(fm.files.unflatten, argument)
