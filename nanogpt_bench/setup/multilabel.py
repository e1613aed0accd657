"""Figures of a multi-label classification: the loss of a document, F1 over all labels and by label, R-precision."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def document_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross-entropy of every document (N,), the mean over its labels, in nats a label."""
    return functional.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none").mean(1)


def f1_scores(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return micro and macro F1 of logits (N, L), above 0 where a label is given, against labels (N, L) of 0 and 1.

    F1 = 2 TP / (2 TP + FP + FN): micro over all labels together, macro the mean of every label's. One whose denominator
    is 0, a label that no document has and none is given, counts 0, as scikit-learn has it.

    >>> f1_scores(torch.tensor([[1.0, -1.0], [1.0, -1.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    (0.6666666666666666, 0.3333333333333333)
    """
    given, held = logits > 0, labels > 0
    hits = (given & held).sum(0).double()
    total = (given.sum(0) + held.sum(0)).double()
    micro = 2 * hits.sum() / total.sum().clamp(min=1)
    return float(micro), float((2 * hits / total.clamp(min=1)).mean())


def r_precision(logits: Tensor, labels: Tensor) -> float | None:
    """Return the mean over documents of the share of their R labels that is among the R highest of their logits.

    Of equal logits the first counts as higher. A document without labels is left out; None where all are.

    >>> r_precision(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[1.0, 0.0, 1.0]]))
    0.5

    Source: Chalkidis et al. 2019, Large-Scale Multi-Label Text Classification on EU Legislation.
    """
    counts = labels.sum(1)
    known = counts > 0
    if not bool(known.any()):
        return None
    order = logits.argsort(dim=1, descending=True, stable=True)
    ranked = labels.gather(1, order)
    top = torch.arange(labels.shape[1], device=labels.device) < counts.unsqueeze(1)
    shares = (ranked * top).sum(1)[known].double() / counts[known]
    return float(shares.mean())
