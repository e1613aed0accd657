"""Products of bfloat16 matrices taken as float32's, where a processor has no instructions for them."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from bench_runs import train, trainer_of
from laws import each
from torch import Tensor, nn

from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.runtime import ProductsByFloat32, bfloat16_products

PRODUCTS = {
    "mm": lambda a, b: a @ b.T,
    "addmm": lambda a, b: nn.functional.linear(a, b, b[:, 0]),
    "bmm": lambda a, b: torch.bmm(a[None], b.T[None]),
    "baddbmm": lambda a, b: torch.baddbmm(b.new_ones(()), a[None], b.T[None]),
}


def results(product: Callable[[Tensor, Tensor], Tensor], operands: tuple[Tensor, Tensor], context: Any) -> list[Tensor]:
    """Return a product and the gradients of its operands."""
    a, b = (x.clone().requires_grad_() for x in operands)
    with context:
        found = product(a, b)
        found.backward(torch.ones_like(found))
    assert a.grad is not None
    assert b.grad is not None
    return [found.detach(), a.grad, b.grad]


def operands(dtype: torch.dtype, *, whole: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randn(size, 24, generator=generator) * (3 if whole else 1) for size in (17, 9))
    a, b = ((x.round() if whole else x).to(dtype) for x in drawn)
    return a, b


@each("name", PRODUCTS)
def test_sums_that_are_exact_are_torch_s_own_to_the_bit(name):
    of = operands(torch.bfloat16, whole=True)
    own, by_float32 = (results(PRODUCTS[name], of, context) for context in (nullcontext(), ProductsByFloat32()))
    for left, right in zip(own, by_float32, strict=True):
        assert left.dtype == right.dtype == torch.bfloat16
        assert torch.equal(left, right)


@each("name", PRODUCTS)
def test_other_sums_are_the_nearest_bfloat16_of_the_exact_one_or_its_neighbour(name):
    of = operands(torch.bfloat16, whole=False)
    exact = results(PRODUCTS[name], (of[0].double(), of[1].double()), nullcontext())
    for found, true in zip(results(PRODUCTS[name], of, ProductsByFloat32()), exact, strict=True):
        near = true.bfloat16()
        ulp = torch.nextafter(near.abs(), torch.tensor(torch.inf).bfloat16()) - near.abs()
        assert bool(((found - near).abs() <= ulp).all())
        assert float((found == near).double().mean()) > 0.99


@each("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_left_alone(dtype):
    of = operands(dtype, whole=False)
    own, beside = (results(PRODUCTS["addmm"], of, context) for context in (nullcontext(), ProductsByFloat32()))
    assert all(torch.equal(left, right) for left, right in zip(own, beside, strict=True))


@each(
    ("settings", "capability", "device", "expected"),
    [
        ({"rule": "bf16-mixed"}, "AVX2", "cpu", True),
        ({"rule": "bf16-pure"}, "AVX2", "cpu", True),
        ({"rule": "bf16-mixed"}, "AVX512", "cpu", False),
        ({"rule": "bf16-mixed"}, "DEFAULT", "cpu", False),
        ({"rule": "fp32"}, "AVX2", "cpu", False),
        ({"rule": "bf16-mixed", "runtime__compile": True}, "AVX2", "cpu", False),
        ({"rule": "bf16-mixed"}, "AVX2", "cuda", False),
    ],
)
def test_it_is_chosen_where_torch_s_own_are_slow(tiny, monkeypatch, settings, capability, device, expected):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    context = bfloat16_products(resolve(tiny(**settings)), torch.device(device))
    assert isinstance(context, ProductsByFloat32) == expected


@pytest.mark.parametrize("rule", ["bf16-mixed", "bf16-pure"])
def test_a_training_ends_where_it_does_with_torch_s_own(tiny, monkeypatch, rule):
    losses, taken = {}, 0
    dispatch = ProductsByFloat32.__torch_dispatch__

    def counted(self, func, *args, **kwargs):
        nonlocal taken
        taken += 1
        return dispatch(self, func, *args, **kwargs)

    monkeypatch.setattr(ProductsByFloat32, "__torch_dispatch__", counted)
    config = resolve(tiny(rule=rule, train__max_steps=20, optimizer__lr=0.02))
    for capability in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        before = taken
        trainer = trainer_of(config)
        train(trainer, 20)
        losses[capability] = trainer.validate()
        assert (taken > before) == (capability == "AVX2")
    assert losses["AVX2"] < 3.0  # from 3.6
    assert losses["AVX2"] == pytest.approx(losses["AVX512"], abs=0.02)
