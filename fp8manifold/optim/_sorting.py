"""Groups of StiffnessMuon: which parameters it steps as matrices, and a report of them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from torch import Tensor, nn

from fp8manifold.nn._selection import CONVOLUTIONS, is_linear

HEADS: Final = ("lm_head", "head", "classifier", "score", "embed_out", "output_projection")
"""Last parts of the names under which models keep the layer that gives their outputs."""

Kind = Literal["matrices", "kernels", "experts", "others", "vectors"]

OPTIONS: Final[dict[Kind, dict[str, Any]]] = {
    "matrices": {},
    "kernels": {"matrix_shape": "flatten"},
    "experts": {"matrix_shape": "batch"},
    "others": {"direction": "adam"},
    "vectors": {"direction": "adam", "weight_decay": 0.0},
}
"""Of the groups, in their order, where they are not ``direction="muon"`` with the decay that is asked for."""

_NO_DECAY: Final = re.compile(
    r"(.*_)?(bias|biases|pos|position|positions|positional)(_.*)?"  # gate_up_proj_bias, pos_embed, rel_pos_h
    r"|(.*_)?(token|tokens|latent|latents)"  # cls_token, register_tokens
    r"|A_log|A_logs|A_b_log|log_.*|D|Ds|D_b|time_(decay|first|faaaa)"  # state spaces
)
"""Names of a module's own parameters that are no matrix of a layer, and decay nowhere."""

_EMBEDDING: Final = re.compile(r"(.*_)?(embed|embeds|embedding|embeddings)")


@dataclass(frozen=True)
class Sorted:
    """A parameter that is trained, the kind of group that it is for, and why."""

    name: str
    parameter: Tensor
    kind: Kind
    reason: str


def sorted_groups(model: nn.Module, others: Sequence[str] | None, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of a whole model: matrices, kernels and experts for Muon, the rest for Adam.

    Args:
        model: whose parameters require a gradient or not; only those that do are sorted.
        others: patterns of names of modules or parameters that are Adam's, in place of :data:`HEADS` and of what
            ``get_output_embeddings`` gives.
        weight_decay: of matrices and of Adam's parameters of two dimensions and more.

    Raises:
        ValueError: a pattern that names nothing.
    """
    groups: dict[Kind, list[tuple[str, Tensor]]] = {}
    for each in sorted_parameters(model, others):
        groups.setdefault(each.kind, []).append((each.name, each.parameter))
    decay = {"direction": "muon", "weight_decay": weight_decay}
    return [{**decay, **OPTIONS[kind], "params": groups[kind]} for kind in OPTIONS if kind in groups]


def sorted_parameters(model: nn.Module, others: Sequence[str] | None) -> list[Sorted]:
    """Each parameter that is trained, in the model's order; the rest as :func:`sorted_groups`."""
    adams, exempt = _others(model, others), _exempt(model)
    found = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            owner = model.get_submodule(name.rpartition(".")[0])
            kind, reason = _without_decay(name, parameter, owner, exempt) or _kind(name, parameter, owner, adams)
            found.append(Sorted(name, parameter, kind, reason))
    return found


def _without_decay(name: str, parameter: Tensor, owner: nn.Module, exempt: set[int]) -> tuple[Kind, str] | None:
    """The reason why a parameter is no matrix whatever its shape and does not decay, if there is one."""
    own = name.rpartition(".")[2]
    if parameter.dim() < 2:
        return "vectors", "a vector"
    if id(parameter) in exempt:
        return "vectors", "the model says that it does not decay"
    if _multiplies(owner, own):
        return None
    if sum(size != 1 for size in parameter.shape) < 2:
        return "vectors", "a vector, by its shape"
    if _NO_DECAY.fullmatch(own):
        return "vectors", f"by its name, {own!r}"
    return None


def _kind(name: str, parameter: Tensor, owner: nn.Module, adams: dict[int, str]) -> tuple[Kind, str]:
    own = name.rpartition(".")[2]
    if id(parameter) in adams:
        return "others", adams[id(parameter)]
    if isinstance(owner, CONVOLUTIONS) and own == "weight":
        if owner.groups > 1 and parameter.shape[1] == 1:
            return "others", "a convolution of each channel alone"
        return "kernels", "a convolution: a row for each filter"
    if _EMBEDDING.fullmatch(own):
        return "others", f"by its name, {own!r}"
    if parameter.dim() > 3:
        return "others", f"{parameter.dim()} dimensions"
    return ("matrices", "a matrix") if parameter.dim() == 2 else ("experts", f"{parameter.shape[0]} matrices")


def _multiplies(owner: nn.Module, own: str) -> bool:
    """True for the weight that a layer multiplies by, which no name or shape makes anything else."""
    return own == "weight" and (is_linear(owner) or isinstance(owner, CONVOLUTIONS))


def _exempt(model: nn.Module) -> set[int]:
    """Parameters that the model itself exempts from decay, as timm's models list them and state spaces mark them."""
    says = getattr(model, "no_weight_decay", None)
    names = set(says()) if callable(says) else set()
    return {
        id(parameter)
        for name, parameter in model.named_parameters()
        if name in names or getattr(parameter, "_no_weight_decay", False)
    }


def _others(model: nn.Module, patterns: Sequence[str] | None) -> dict[int, str]:
    """The parameters that are Adam's whatever their shape: embeddings always, and heads, or what the patterns name."""
    found: dict[int, str] = {}
    if patterns is not None:
        for pattern in patterns:
            named = list(_named(model, pattern))
            if not named:
                raise ValueError(f"others={pattern!r} names no module and no parameter of the model")
            found |= {id(parameter): f"others={pattern!r} names it" for parameter in named}
    else:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        modules = [m for name, m in model.named_modules() if name.rsplit(".", 1)[-1] in HEADS]
        for module in modules if head is None else [head]:
            found |= {id(parameter): "the head" for parameter in module.parameters()}
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    return found | {id(weight): "an embedding" for weight in embeddings}


def _named(model: nn.Module, pattern: str) -> Iterable[Tensor]:
    for name, module in model.named_modules():
        if name and fnmatchcase(name, pattern):
            yield from module.parameters()
    for name, parameter in model.named_parameters():
        if fnmatchcase(name, pattern):
            yield parameter


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
