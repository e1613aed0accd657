"""Products straight from codes of weights that several processes hold by rows: the bits of one process."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from optimizer_cases import normal
from rank_pool import Pool
from test_ranks_fsdp import check_same, own_rows, same_count, sharded
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import fp8manifold as fm
from fp8manifold.nn import _products


def net(fmt: str, **spec: Any) -> Any:
    """Two linear layers with rows of all sizes; 2 divides the rows, and 3 does not."""
    made = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 80, bias=False))
    with torch.no_grad():
        for i, p in enumerate(made.parameters()):
            sizes = torch.exp2(normal(len(p), *[1] * (p.dim() - 1), seed=i + 5).mul(2).round())
            p.copy_(normal(*p.shape, seed=i, std=0.1) * sizes)
    return fm.quantize_model(made, fm.LayerSpec(fmt, **spec), "fp8", seed=1)


def passed(made: nn.Module, x: Tensor, again: bool) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = checkpoint(made, x, use_reentrant=False) if again else made(x)
    (y.float() * normal(*y.shape, seed=8)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def trained(fmt: str, spec: dict[str, Any], options: dict[str, Any], *, again: bool = False) -> None:
    """Passes of rows and of the whole, from one input in all processes, and steps, which widen scales of rows."""
    policy = options.get("mp_policy")
    dtype = torch.float32 if policy is None else policy.param_dtype
    whole, parts = net(fmt, **spec).to(dtype), sharded(net(fmt, **spec), **options)
    optimizers: list[Any] = [fm.optim.StiffnessAdamW(each.parameters(), 0.5, moments="8bit") for each in (parts, whole)]
    for step in range(3):
        x = normal(2, 16, 64, seed=step).to(dtype)
        ours, its = (passed(each, x, again) for each in (parts, whole))
        assert torch.equal(ours[0], its[0])
        assert torch.equal(ours[1], its[1])
        assert step or not torch.equal(ours[0], net(fmt).to(dtype)(x))
        parts.reshard()
        if policy is not None:
            return  # gradients are float32 here, and bfloat16 there
        for p, q in zip(parts.parameters(), whole.parameters(), strict=True):
            mine, rows = p.grad._local_tensor, own_rows(q.grad, p.grad._local_tensor)
            if dist.get_world_size() == 2:  # the mean over which is exact
                assert torch.equal(mine, rows)
            torch.testing.assert_close(mine, rows)
            mine.copy_(rows)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        check_same(parts, whole)
    assert same_count(*optimizers) > 0 or spec.get("granularity") == "tensor"


FP8: dict[str, Any] = {"products": "fp8"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "rows": ("E4M3", FP8, {}, {}),
    "one scale": ("E4M3", FP8 | {"granularity": "tensor"}, {"nested": False}, {}),
    "E5M2, FP8 gradients": ("E5M2", FP8 | {"gradient_products": "fp8"}, {}, {}),
    "INT8": ("E1M6", {"products": "int8"}, {}, {}),
    "whole between passes": ("E4M3", FP8, {"reshard_after_forward": False}, {}),
    "offloaded": ("E4M3", FP8, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}),
    "bfloat16": ("E4M3", FP8, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, {}),
    "computed again": ("E4M3", FP8, {}, {"again": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_passes_and_steps_are_those_of_one_process(pair: Pool, case: str) -> None:
    fmt, spec, options, how = CASES[case]
    pair.run(trained, fmt, spec, options, **how)


@pytest.mark.parametrize("case", ["rows", "one scale"])
def test_rows_that_processes_do_not_divide(pool: Pool, case: str) -> None:
    fmt, spec, options, how = CASES[case]
    pool.run(trained, fmt, spec, options, **how)


def given_away(fmt: str, products: str) -> list[tuple[str, torch.dtype, int]]:
    """The dtype that products take as the weight's operand, and True where its memory is what was gathered."""
    made, taken = sharded(net(fmt, products=products)), []
    operand = _products._operand

    def seen(weight: Any, units: Any) -> Any:
        codes, scale = operand(weight, units)
        taken.append((type(weight).__name__, codes.dtype, codes.data_ptr() == weight.codes.data_ptr()))
        return codes, scale

    with mock.patch.object(_products, "_operand", seen), mock.patch.object(fm.FP8Tensor, "dequantize", None):
        passed(made, normal(16, 64, seed=1), False)
    return taken


def test_codes_are_multiplied_where_they_were_gathered(pair: Pool) -> None:
    for taken in pair.run(given_away, "E4M3", "fp8"):
        assert taken == [("FP8Parameter", torch.float8_e4m3fn, True)] * 2
    for taken in pair.run(given_away, "E1M6", "int8"):
        assert taken == [("FP8Parameter", torch.int8, False)] * 2
