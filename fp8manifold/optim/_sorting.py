"""Which parameters of a model are hidden matrices, for Muon, and which are for Adam."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

__all__ = ["HEADS", "sorted_groups"]

HEADS: Final = ("lm_head", "head", "classifier", "score", "embed_out", "output_projection")
"""Last parts of the names under which models keep the layer that gives their outputs."""


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
    adams = _others(model, others)
    kernels = {id(m.weight) for m in model.modules() if isinstance(m, _ConvNd)}
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(_kind(parameter, adams, kernels), []).append((name, parameter))
    options: dict[str, dict[str, Any]] = {
        "matrices": {},
        "kernels": {"matrix_shape": "flatten"},
        "experts": {"matrix_shape": "batch"},
        "others": {"direction": "adam"},
        "vectors": {"direction": "adam", "weight_decay": 0.0},
    }
    decay = {"direction": "muon", "weight_decay": weight_decay}
    return [{**decay, **options[kind], "params": groups[kind]} for kind in options if kind in groups]


def _kind(parameter: Tensor, adams: set[int], kernels: set[int]) -> str:
    if parameter.dim() < 2:
        return "vectors"
    if id(parameter) in adams or (parameter.dim() > 3 and id(parameter) not in kernels):
        return "others"
    if id(parameter) in kernels:
        return "kernels"
    return "matrices" if parameter.dim() == 2 else "experts"


def _others(model: nn.Module, patterns: Sequence[str] | None) -> set[int]:
    """The parameters that are Adam's whatever their shape: embeddings always, and heads, or what the patterns name."""
    found = [m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    if patterns is not None:
        for pattern in patterns:
            named = list(_named(model, pattern))
            if not named:
                raise ValueError(f"others={pattern!r} names no module and no parameter of the model")
            found += named
    else:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        modules = [m for name, m in model.named_modules() if name.rsplit(".", 1)[-1] in HEADS]
        for module in modules if head is None else [head]:
            found += list(module.parameters())
    return {id(parameter) for parameter in found}


def _named(model: nn.Module, pattern: str) -> Iterable[Tensor]:
    for name, module in model.named_modules():
        if name and fnmatchcase(name, pattern):
            yield from module.parameters()
    for name, parameter in model.named_parameters():
        if fnmatchcase(name, pattern):
            yield parameter
