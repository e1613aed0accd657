"""Bytes are counted on what is alive: shared memory once, wrappers as what is inside them, state included."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laws import each
from torch import Tensor, nn

from nanogpt_bench.loop.train import run
from nanogpt_bench.setup.memory import bytes_of, held_bytes
from nanogpt_bench.system.signals import StopRequest


class Packed(Tensor):
    """A wrapper that looks like float32 and holds one byte an element, and a scale."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes):
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale = codes, torch.ones(())
        return made

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


def bytes_with(**kept: Any) -> int:
    """The bytes that an optimizer is counted to hold with these entries in its state."""
    layer = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.state[layer.weight].update(kept)
    return held_bytes(layer, optimizer) - 4


def test_each_memory_counts_once_and_a_wrapper_as_what_is_inside_it():
    whole = torch.zeros(100)
    assert bytes_with(kept=Packed(torch.zeros(100, dtype=torch.uint8))) == 100 + 4
    assert bytes_with(kept=[whole, whole.view(10, 10), whole[:3]]) == 400
    assert bytes_with(kept={whole: 1, "b": [2.0, (whole[:3], {"c": torch.zeros(1)})]}) == 404
    assert bytes_with(kept=whole[:3]) == 400  # a view keeps all of its memory
    assert bytes_with(kept=[torch.zeros(0), torch.zeros(0)]) == 0
    layer = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=torch.tensor(0.1))
    vars(optimizer).update(scratch=SimpleNamespace(room=torch.zeros(10)))  # which is made anew
    assert held_bytes(layer, optimizer) == 4 + 4  # the weight and the rate


def test_gradients_do_not_count_while_the_model_has_them():
    layer = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 8)).sum().backward()
    optimizer.state[layer.weight]["kept"] = layer.weight.grad.view(-1)
    assert held_bytes(layer, optimizer) == 256
    optimizer.zero_grad()
    assert held_bytes(layer, optimizer) == 512


@each(
    ("make", "per_parameter"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 4),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 8),
        (lambda p: torch.optim.AdamW(p), 12),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 16),
    ],
)
def test_an_optimizer_counts_with_everything_it_keeps_between_steps(make, per_parameter):
    layer = nn.Linear(64, 32, bias=False)
    optimizer = make(layer.parameters())
    layer(torch.ones(1, 64)).sum().backward()
    assert held_bytes(layer, optimizer) == 4 * 2048  # nothing before the first step, and no gradients
    optimizer.step()
    steps = 4 if isinstance(optimizer, torch.optim.AdamW) else 0
    assert held_bytes(layer, optimizer) == bytes_of([layer.weight], optimizer) == per_parameter * 2048 + steps


class Asked(StopRequest):
    """A stop request that comes when a step is reached."""

    def at(self, step):
        def follow(progress):
            if progress.step == step:
                self.note(signal.SIGTERM)

        return follow


@pytest.mark.parametrize("rule", ["stochastic", "fisher"])
def test_a_model_has_one_number_of_bytes_however_its_run_ended(tiny, tmp_path, rule):
    """The last step was watched or not, another follows, or the run was resumed with or without a step to do."""
    config = tiny(rule=rule, model__format="E4M3", monitor__interval=100, train__max_steps=5)
    ends = {"whole": run(config, tmp_path / "whole")}
    stop = Asked()
    ends["stopped"] = run(config, tmp_path / "other", stop=stop, on_progress=stop.at(3))
    ends["gone on"] = run(config, tmp_path / "other", resume=True)
    ends["nothing left"] = run(config, tmp_path / "other", resume=True)
    assert len({end["status"] for end in ends.values()}) == 2
    for figure in ("bytes_per_parameter", "bytes_per_quantized_parameter"):
        assert {end[figure] for end in ends.values()} == {ends["whole"][figure]}, figure


def test_a_run_that_took_no_step_has_none(tiny, tmp_path):
    stop = Asked()
    ended = run(tiny(), tmp_path / "r", stop=stop, on_progress=stop.at(0))
    assert (ended["status"], ended["steps"], ended["bytes_per_parameter"]) == ("stopped", 0, None)
    assert run(tiny(), tmp_path / "r", resume=True)["bytes_per_parameter"] == pytest.approx(12, rel=0.005)
