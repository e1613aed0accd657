"""What an optimizer steps, group after group.

``param_groups`` of an optimizer has a list of parameters in each group. Its ``state_dict()``
has groups too, with a number in the place of each parameter, counted over all groups.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in order."""
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def saved_indices(saved_groups: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the numbers that the groups of a ``state_dict()`` have for parameters, in order."""
    indices: list[int] = []
    for group in saved_groups:
        indices += group["params"]
    return indices
