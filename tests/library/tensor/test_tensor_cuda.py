"""One-byte weights on a GPU: the same codes as on the CPU, moved, written and compiled."""

from typing import Any

import pytest
import torch
from tensor_cases import INPUT, TARGET, Net, every_format, every_granularity, parameter, same_store
from torch import optim

import fp8manifold as fm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@every_granularity
@every_format
def test_moving_there_and_back(name: str, granularity: Any) -> None:
    p = parameter(name, granularity=granularity, keep_remainder=True)
    q = p.to("cuda")
    assert type(q) is fm.FP8Parameter
    assert all(x.is_cuda for x in (q, q.codes, q.scale, q.counter, q.remainder))  # type: ignore[union-attr]
    assert torch.equal(q.dequantize().cpu(), p.dequantize())
    assert same_store(q.cpu(), p)
    made_there = fm.FP8Parameter(p.dequantize().cuda(), name, granularity=granularity, scale=p.scale.cuda())
    assert torch.equal(made_there.codes.cpu(), p.codes)


@every_format
def test_writes_draw_the_same(name: str) -> None:
    p = parameter(name, seed=3)
    q = p.to("cuda")
    with torch.no_grad():
        for x in (p, q):
            x.mul_(0.97)
            x[1].mul_(0.9)
            x.rescale_(x.scale * 2)
    assert same_store(q.cpu(), p)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=lambda x: "-".join(x) or "default")
def test_a_network_learns(options: dict[str, Any]) -> None:
    net = Net().cuda()
    compiled = torch.compile(net, fullgraph=True)
    optimizer = optim.AdamW(net.parameters(), 1e-2, **options)
    x, y = INPUT.cuda(), TARGET.cuda()
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (compiled(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    assert all(type(p) is fm.FP8Parameter and p.is_cuda for p in net.stored)
