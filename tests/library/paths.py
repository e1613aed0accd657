"""The paths of a step that a CPU has: native code, where it was built, and plain PyTorch."""

from functools import partial
from typing import Any

import pytest

from fp8manifold.optim import _backends

PATHS = ("native", "eager")


def by(path: str, optimizer: Any) -> Any:
    """An optimizer whose steps go by one of the paths; a copy of it goes by native code again."""
    if path == "eager":
        optimizer._run = partial(_run_eager, optimizer._run)
    return optimizer


def _run_eager(run: Any, slots: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_backends, "is_native", lambda slot: False)
        return run(slots)
