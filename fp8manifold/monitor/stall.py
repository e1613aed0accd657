"""How many weights a step asked to move and did not."""

from torch import Tensor

__all__ = ["code_unchanged", "update_lost"]


def update_lost(before: Tensor, target: Tensor, after: Tensor) -> float:
    """Share of all weights whose requested update was not zero and was lost in the write-back.

    .. math:: \\frac{1}{n} \\#\\{i : target_i \\ne before_i \\text{ and } after_i = before_i\\}

    Args:
        before: weights before the step.
        target: weights the step asked for, before rounding.
        after: weights after the write-back; all of one shape.

    Returns:
        A number in [0, 1]; 0 for an empty tensor.  A NaN in ``target`` counts as a request.

    Raises:
        ValueError: shapes that differ.

    Example:
        >>> import torch
        >>> before = torch.tensor([1.0, 1.0, 1.0, 1.0])
        >>> update_lost(before, torch.tensor([1.0, 1.01, 1.01, 1.2]), torch.tensor([1.0, 1.0, 1.125, 1.25]))
        0.25
    """
    _check_shapes(before, target, after)
    return _share((target != before) & (after == before))


def code_unchanged(before_codes: Tensor, after_codes: Tensor, before: Tensor, after: Tensor) -> float:
    """Share of all master weights that moved without their code moving.

    .. math:: \\frac{1}{n} \\#\\{i : after_i \\ne before_i \\text{ and } code(after_i) = code(before_i)\\}

    Args:
        before_codes, after_codes: uint8 codes of the quantised weights before and after a step.
        before, after: the master weights themselves; all of one shape.

    Returns:
        A number in [0, 1]; 0 for an empty tensor.

    Raises:
        ValueError: shapes that differ.

    Example:
        >>> import torch
        >>> codes = torch.tensor([56, 56], dtype=torch.uint8)
        >>> code_unchanged(codes, codes, torch.tensor([1.0, 1.0]), torch.tensor([1.01, 1.0]))
        0.5
    """
    _check_shapes(before_codes, after_codes, before, after)
    return _share((after != before) & (after_codes == before_codes))


def _share(mask: Tensor) -> float:
    return int(mask.sum()) / max(mask.numel(), 1)


def _check_shapes(first: Tensor, *others: Tensor) -> None:
    shapes = [tuple(t.shape) for t in (first, *others)]
    if len(set(shapes)) > 1:
        raise ValueError(f"all tensors must have one shape: got {', '.join(map(str, shapes))}")
