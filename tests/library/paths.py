"""The paths of a step on a CPU: native code, where it was built, and plain PyTorch."""

from functools import partial

import pytest

from fp8manifold._base import reading
from fp8manifold.optim import _backends, _matrices, _plan, _steady

PATHS = ("native", "eager")


def as_on_a_card(monkeypatch):
    """Let steps go the way that they go on a GPU."""
    monkeypatch.setattr(_plan, "on_gpu", lambda device: True)
    monkeypatch.setattr(_steady, "is_triton", lambda slot: True)
    monkeypatch.setattr(_matrices, "multiplies_together", lambda device: True)
    monkeypatch.setattr(reading, "is_read_at_once", lambda x: False)


def on_path(path, optimizer):
    """Let the steps of an optimizer go by one of the paths, and return it.

    A copy of it goes by native code again.
    """
    if path == "eager":
        optimizer._run = partial(_run_eager, optimizer._run)
    return optimizer


def _run_eager(run, slots):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_backends, "is_native", lambda slot: False)
        return run(slots)
