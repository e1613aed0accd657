"""Running averages of quantised weights, which have to be floats: a step of an average is a fraction of a grid's."""

import copy
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from fp8manifold.nn._surgery import dequantize_model

__all__ = ["averaged_model"]


def averaged_model(model: nn.Module, **options: Any) -> AveragedModel:
    """An ``AveragedModel`` of torch's over a quantised model, with the average in floats.

    .. math:: a \\leftarrow a + (w - a) / (n + 1)

    ``AveragedModel(model)`` itself copies the weights with their storage, and in one byte, rounded to nearest, an
    average stalls.  ``update_parameters(model)`` works as ever; :func:`quantize_model` takes the average's ``module``
    back to a format.

    Args:
        model: is not changed; its quantised layers are ordinary ``nn.Linear`` in the average.
        options: ``device``, ``avg_fn`` and ``multi_avg_fn`` of ``AveragedModel``.

    Returns:
        The average; NaN, Inf and -0 are averaged as floats are, and a model without parameters has an empty one.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.
        ValueError: ``use_buffers=True``: quantised layers have buffers that the average lacks.

    Example:
        >>> import torch, fp8manifold as fm
        >>> model = fm.quantize_model(nn.Sequential(nn.Linear(4, 2)), "E4M3", "fp8", rounding="nearest")
        >>> average = averaged_model(model)
        >>> average.update_parameters(model)
        >>> torch.equal(average.module[0].weight, model[0].weight)
        True

    Source: Izmailov et al. 2018 (stochastic weight averaging).
    """
    if options.get("use_buffers"):
        raise ValueError("use_buffers=True is not supported: quantised layers have buffers that the average lacks")
    return AveragedModel(dequantize_model(copy.deepcopy(model)), **options)
