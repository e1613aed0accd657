"""A plugin of pytest's: whatever native code steps, a Triton kernel steps too.

Every step that a test has native code take is taken by Triton's kernels on copies, in
its interpreter where ``TRITON_INTERPRET=1`` and on the GPU otherwise, and both have to
leave the same bits. A test against the scalar oracle is then one of all three.
"""

import os
from collections import Counter
from unittest import mock

import torch

from fp8manifold.optim import _backends, _optimizer, _plan, _steady, _triton_step
from fp8manifold.optim._native_step import run_native
from fp8manifold.optim._triton_step import run_triton

COUNTS = Counter()
CARD = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def different(results, expected):
    results, expected = results.detach().cpu().contiguous(), expected.detach().cpu().contiguous()
    integer = _INTEGERS[results.element_size()]
    differs = results.view(integer) != expected.view(integer)
    if results.is_floating_point():
        differs &= ~(results.isnan() & expected.isnan())
    return int(differs.sum())


def twin(slot):
    tensors = {name: tensor.to(CARD, copy=True) for name, tensor in slot.tensors.items()}
    scale = None if slot.kept_scale is None else slot.kept_scale.to(CARD)
    return slot.replaced(tensors=tensors, kept_scale=scale, saturated=[], doubled=[])


def step_both(slots):
    """Native code on the slots, kernels on copies, and no difference."""
    twins = [twin(slot) for slot in slots]
    run_native(slots)
    with mock.patch.object(
        _triton_step, "_widenings", return_value=None
    ):  # scales are the parameters' own
        launched = run_triton(twins)
    assert launched is not None
    COUNTS["launches"] += 1
    for index, (slot, copied) in enumerate(zip(slots, twins, strict=True)):
        COUNTS["slots"] += 1
        COUNTS["elements"] += slot.view.numel
        assert copied.saturated == slot.saturated[-len(copied.saturated) :], index
        differences = {
            name: different(copied.tensors[name], tensor) for name, tensor in slot.tensors.items()
        }
        wrong = {name: count for name, count in differences.items() if count}
        assert not wrong, f"{wrong} of {slot.view.numel} of a step of {slot.spec} over {slot.view}"


def pytest_configure(config):
    assert CARD.type == "cpu" or torch.cuda.is_available()
    vars(_backends)["run_native"] = step_both
    is_steady = _steady.is_steady
    vars(_optimizer)["is_steady"] = lambda optimizer, slots: (
        _plan.on_gpu(CARD) and is_steady(optimizer, slots)
    )


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"compared: {dict(COUNTS)}")
