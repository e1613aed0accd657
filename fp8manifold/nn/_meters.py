"""Other libraries' meters of memory, which would leave out the scales of codes.

``get_memory_footprint`` of transformers and diffusers multiplies the count of a
parameter's numbers with the size of one. A weight in codes has scales beside them.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

from torch import nn

_METER: Final = "get_memory_footprint"
_COUNTS_SCALES: Final = "_fp8_counts_scales"


def count_scales(model: nn.Module) -> None:
    """Let ``get_memory_footprint`` of a model's class count what codes have beside them."""
    for kind in type(model).__mro__:
        measure = vars(kind).get(_METER)
        if callable(measure) and not hasattr(measure, _COUNTS_SCALES):
            # of the class: an attribute of the model would be a cycle
            setattr(kind, _METER, _with_scales(measure))


def _with_scales(measure: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(measure)
    def get_memory_footprint(model: Any, *args: Any, **options: Any) -> Any:
        beside_numbers = 0
        for parameter in model.parameters():
            beside_numbers += parameter.nbytes - parameter.nelement() * parameter.element_size()
        return measure(model, *args, **options) + beside_numbers

    setattr(get_memory_footprint, _COUNTS_SCALES, True)
    return get_memory_footprint
