"""The lines of ``str(model)``, which show the formats of parameters in codes.

A quantised layer describes itself. An embedding, a convolution or a stack of experts
stays a module of its own class, whose ``extra_repr`` knows nothing of codes.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

from torch import nn

from fp8manifold._ranks import local_of
from fp8manifold.tensor import FP8Tensor

_LINE: Final = "extra_repr"
_SHOWS_FORMATS: Final = "_fp8_shows_formats"


def show_formats(kind: type[nn.Module]) -> None:
    """Let ``extra_repr`` of a class name the formats of its parameters in codes."""
    describe = getattr(kind, _LINE)
    if not hasattr(describe, _SHOWS_FORMATS):
        # of the class: an attribute of the module would be a cycle
        setattr(kind, _LINE, _with_formats(describe))


def _with_formats(describe: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(describe)
    def extra_repr(module: Any) -> str:
        line = describe(module)
        formats = ", ".join(
            f"{name}={local_of(parameter).format.name}"
            for name, parameter in module._parameters.items()
            if isinstance(local_of(parameter), FP8Tensor)
        )
        # A class's own method may call that of its base, which names them already.
        if not formats or formats in line:
            return line
        return f"{line}, {formats}" if line else formats

    setattr(extra_repr, _SHOWS_FORMATS, True)
    return extra_repr
