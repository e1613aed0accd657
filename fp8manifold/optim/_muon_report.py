"""Which parameters of a model Muon is for, which Adam, and why: what a user reads before training."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fp8manifold.optim._sorting import OPTIONS, sorted_parameters

__all__ = ["MuonReport", "ReportedParameter", "muon_report"]


@dataclass(frozen=True)
class ReportedParameter:
    """What becomes of one parameter of a model."""

    name: str
    """Its dotted name."""
    shape: tuple[int, ...]
    """Its shape."""
    direction: str
    """``muon`` or ``adam``."""
    decays: bool
    """Whether ``weight_decay`` is for it."""
    reason: str
    """Why."""


@dataclass(frozen=True)
class MuonReport:
    """Which parameters are Muon's and which Adam's; as a string a table."""

    parameters: tuple[ReportedParameter, ...]
    """Each that requires a gradient, those that are shared once, in the model's order."""

    def __str__(self) -> str:
        """A line for each parameter, and one for all of them."""
        rows = [("parameter", "shape", "direction", "decays", "")]
        rows += [(p.name, str(p.shape), p.direction, "yes" if p.decays else "no", p.reason) for p in self.parameters]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join([*map(str.ljust, row, widths), row[4]]).rstrip() for row in rows]
        muons = sum(p.direction == "muon" for p in self.parameters)
        return "\n".join([*lines, f"Muon's: {muons} of {len(self.parameters)} parameters, the rest Adam's"])


def muon_report(model: nn.Module, others: Sequence[str] | None = None) -> MuonReport:
    """Which parameters of a model :meth:`StiffnessMuon.for_model` gives to Muon, which to Adam, and why.

    Args:
        model: any, quantised or not; nothing is changed.
        others: as in :meth:`StiffnessMuon.for_model`.

    Returns:
        A :class:`MuonReport`, to print or to look through; parameters that require no gradient are not in it.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.
        ValueError: a pattern that names nothing.

    Example:
        >>> print(muon_report(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8))))
        parameter  shape    direction  decays
        0.weight   (10, 8)  adam       yes     an embedding
        1.weight   (8, 8)   muon       yes     a matrix
        1.bias     (8,)     adam       no      a vector
        2.weight   (8,)     adam       no      a vector
        2.bias     (8,)     adam       no      a vector
        Muon's: 1 of 5 parameters, the rest Adam's
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    rows = []
    for each in sorted_parameters(model, others):
        options = {"direction": "muon", "weight_decay": None, **OPTIONS[each.kind]}
        shape, decays = tuple(each.parameter.shape), options["weight_decay"] is None
        rows.append(ReportedParameter(each.name, shape, str(options["direction"]), decays, each.reason))
    return MuonReport(tuple(rows))
