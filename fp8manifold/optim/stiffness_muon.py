"""StiffnessMuon: Muon over matrices that live on a grid, and Adam over all other
parameters, in one optimizer.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from fp8manifold._base.checks import check_choice, check_int, check_number
from fp8manifold._numerics.charts import Metric
from fp8manifold.nn._selection import CONVOLUTIONS, is_conv1d, is_linear
from fp8manifold.optim._checks import Schedule, check_first_moment, lr_of, options_in
from fp8manifold.optim._muon import (
    ADJUSTMENTS,
    COEFFICIENTS,
    SHAPES,
    TRANSPOSED,
    adjusted_rate,
    as_matrices,
    take_muon_steps,
)
from fp8manifold.optim._slot import Parameters, Slot
from fp8manifold.optim._step import StepView
from fp8manifold.optim._writeback import rule_of
from fp8manifold.optim.stiffness import StiffnessOptimizer, adam_numbers, momentum_numbers
from fp8manifold.random_bits import Draws

_DIRECTIONS = ("muon", "adam")
_PRODUCTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_HEADS: Final = ("lm_head", "head", "classifier", "score", "embed_out", "output_projection")
"""Last parts of the names of output layers."""
_Kind = Literal["matrices", "transposed", "kernels", "experts", "others", "vectors"]
_KINDS: Final[dict[_Kind, dict[str, Any]]] = {
    "matrices": {},
    "transposed": {"matrix_shape": TRANSPOSED},
    "kernels": {"matrix_shape": "flatten"},
    "experts": {"matrix_shape": "batch"},
    "others": {"direction": "adam"},
    "vectors": {"direction": "adam", "weight_decay": 0.0},
}
"""Options of the groups, in their order, where they are not ``direction="muon"`` with
the given decay.
"""
_OF_EITHER_SHAPE: Final = "match_rms_adamw"
"""The rule for the size of a step that is the same for a transposed matrix."""
_NO_DECAY: Final = re.compile(
    r"(.*_)?(bias|biases|pos|position|positions|positional)(_.*)?"  # gate_up_proj_bias, pos_embed, rel_pos_h
    r"|(.*_)?(token|tokens|latent|latents)"  # cls_token, register_tokens
    r"|A_log|A_logs|A_b_log|log_.*|D|Ds|D_b|time_(decay|first|faaaa)"  # state spaces
)
"""Names of a module's own parameters that are not the matrix of a layer and never
decay.
"""
_EMBEDDING: Final = re.compile(r"(.*_)?(embed|embeds|embedding|embeddings)")


class StiffnessMuon(StiffnessOptimizer):
    r"""Muon over matrices on a grid: one average, and a step of the same size in every
    direction of the matrix.

    .. math:: m \leftarrow \mu m + (1 - \mu) g, \qquad u = (1 - \mu) g + \mu m, \\
              w \leftarrow \mathrm{round}\left( (1 - \eta \lambda) w
              - \eta a \, F \, \mathrm{msign}(F u) \right),
              \qquad F = \left( \mathrm{clamp}(S(w) / S_{ref}, damping, clip) \right)^k

    ``msign`` is the orthogonal factor ``U V^T`` of ``U diag(s) V^T``, by ``ns_steps``
    Newton-Schulz iterations; ``a`` follows from the matrix' shape. ``k = 0``, the
    default, is ``torch.optim.Muon`` with one rounding; ``k = 1`` takes the steepest
    step of the spectral norm in the chart's coordinates. Embeddings, heads, norms and
    biases are stepped as by :class:`StiffnessAdamW`, in groups with
    ``direction="adam"``; :meth:`for_model` sorts a whole model.

    Args:
        params: parameters or groups, quantised and ordinary ones mixed; matrices, where
            ``direction`` is ``muon``.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps: as in
            ``torch.optim.Muon``.
        adjust_lr_fn: ``a`` of a matrix of R rows and C columns: ``original`` (None),
            ``sqrt(max(1, R/C))``; ``match_rms_adamw``, ``0.2 sqrt(max(R, C))``, for
            AdamW's rate and decay; ``spectral_unclamped``, ``sqrt(R/C)``.
        direction: ``muon``, or ``adam`` for a group's parameters.
        matrix_shape: for a parameter of more than two dimensions: ``flatten`` makes one
            matrix with a row for each entry of the first (a convolution's filters),
            ``batch``, with three, a matrix for each entry of the first (experts);
            ``auto`` refuses it. ``transposed``: a matrix, or one for each entry of the
            first of three dimensions, with a row for each input, as in ``Conv1D``;
            ``a`` is then that of its transpose.
        ns_dtype: what the products are computed in; None is bfloat16 where the device
            has it, float32 elsewhere.
        betas, adam_eps: of groups with ``direction="adam"``.
        stiffness, metric, draws, seed, damping, clip: as in :class:`StiffnessAdamW`.
        writeback, moments: as in :class:`StiffnessAdamW`. ``moments`` and
            ``writeback="momentum"`` need ``momentum`` > 0; the latter feeds it errors
            as if the step were linear in it.
        refresh_every, maximize, on_nonfinite: as in :class:`StiffnessAdamW`.
        stabilize_every, reset_every, flags: as in :class:`StiffnessAdamW`.

    Where ``u`` is all zeros the step is the decay alone, and no step depends on other
    parameters.

    Raises:
        TypeError, ValueError: as :class:`StiffnessAdamW`; no matrix; in a step, a
            scheduler with ``cycle_momentum``.

    Example:
        >>> import fp8manifold as fm, torch
        >>> weight = fm.FP8Parameter(torch.eye(2), "E4M3", seed=0)
        >>> optimizer = StiffnessMuon([weight], lr=0.5, moments="8bit", weight_decay=0.0)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> bool((weight.diag() < 1).all())
        True

    Source: Jordan et al. 2024 (Muon); Liu et al. 2025 (arXiv 2502.16982) for
    ``match_rms_adamw``.
    """

    direction = "muon"

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        direction: str = "muon",
        matrix_shape: str = "auto",
        ns_dtype: torch.dtype | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        stiffness: Schedule = 0.0,
        metric: Metric = "ulp",
        writeback: str = "stochastic",
        draws: Draws = "independent",
        moments: str = "float32",
        seed: int = 0,
        damping: float = 2.0**-8,
        clip: float = 2.0**4,
        refresh_every: int = 100,
        maximize: bool = False,
        on_nonfinite: str = "skip",
        stabilize_every: int | None = None,
        reset_every: int | None = None,
        **flags: Any,
    ) -> None:
        super().__init__(params, options_in(locals()))

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        *,
        other_lr: float | Tensor | None = None,
        others: Sequence[str] | None = None,
        weight_decay: float = 0.1,
        **options: Any,
    ) -> "StiffnessMuon":
        r"""One optimizer for a whole model: hidden matrices by Muon, everything else by
        Adam.

        .. math:: d = \mathrm{msign}(u) \text{ for matrices}, \qquad
                  d = \hat m / (\sqrt{\hat v} + \epsilon) \text{ for the rest}

        Muon steps matrices, kernels of convolutions and batches of matrices, except
        embeddings, the head and depthwise convolutions. Vectors, positions, tokens,
        parameters of state spaces and those that the model marks (``_no_weight_decay``)
        or lists (``no_weight_decay()``) don't decay. :func:`muon_report` prints all of
        this. Where ``a`` depends on it, float ``Conv1D`` and transposed experts have a
        group with ``matrix_shape="transposed"``.

        Args:
            model: quantised or not; parameters that require no gradient are left out.
            lr: of the matrices.
            other_lr: of everything else; None is ``lr``, which suits
                ``adjust_lr_fn="match_rms_adamw"``.
            others: patterns of module or parameter names that are Adam's, in place of
                the head.
            weight_decay: of all parameters that decay.
            options: the constructor's; ``adjust_lr_fn`` is ``match_rms_adamw`` here,
                unless given.

        Raises:
            TypeError, ValueError: as the constructor; a pattern that names nothing; no
                parameters; a direction.

        Example:
            >>> model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8))
            >>> optimizer = StiffnessMuon.for_model(model, 1e-3)
            >>> [(group["direction"], group["param_names"]) for group in optimizer.param_groups]
            [('muon', ['1.weight']), ('adam', ['0.weight']), ('adam', ['1.bias', '2.weight', '2.bias'])]
        """
        if "direction" in options:
            raise TypeError("for_model sorts the parameters by direction: leave direction out")
        options = {"adjust_lr_fn": _OF_EITHER_SHAPE, **options}
        depends = options["adjust_lr_fn"] != _OF_EITHER_SHAPE
        kinds: dict[_Kind, list[tuple[str, Tensor]]] = {}
        for name, parameter, kind, _ in _sorted(model, others):
            is_matrix = kind in ("matrices", "experts")
            if depends and is_matrix and _is_transposed(model, name):
                kinds.setdefault("transposed", []).append((name, parameter))
            else:
                kinds.setdefault(kind, []).append((name, parameter))
        decay = {"direction": "muon", "weight_decay": weight_decay}
        groups = [
            {**decay, **_KINDS[kind], "params": kinds[kind]} for kind in _KINDS if kind in kinds
        ]
        for group in groups:
            group["lr"] = lr if group["direction"] == "muon" or other_lr is None else other_lr
        return cls(groups, lr, weight_decay, **options)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_choice("direction", group["direction"], _DIRECTIONS)
        if group["direction"] == "adam":
            check_first_moment(group)
            return
        _check_muon(group)
        for parameter in group["params"]:
            _check_matrix(parameter, group["matrix_shape"])

    def _fields(self, slot: Slot) -> dict[str, Any]:
        return super()._fields(slot) | {"direction": slot.group["direction"]}

    def _numbers(self, slot: Slot) -> dict[str, float]:
        group, lr, shared = slot.group, lr_of(slot.group), self._shared_numbers(slot)
        if not _is_muons(slot):
            return adam_numbers(lr, tuple(group["betas"]), group["adam_eps"], slot.age) | shared
        shape = torch.empty(slot.parameter.shape, device="meta")
        rows, columns = as_matrices(shape, group["matrix_shape"]).shape[-2:]
        if group["matrix_shape"] == TRANSPOSED:
            rows, columns = columns, rows
        rate, momentum = adjusted_rate(lr, group["adjust_lr_fn"], rows, columns), group["momentum"]
        return momentum_numbers(rate, momentum, 1 - momentum) | shared

    def _run(self, slots: list[Slot]) -> list[StepView]:
        """Run Adam's steps as everywhere, and those of matrices in two halves."""
        views = super()._run([slot for slot in slots if not _is_muons(slot)])
        muons = [slot for slot in slots if _is_muons(slot)]
        return views + take_muon_steps(muons, {slot for slot in muons if self._is_observed(slot)})


def _is_muons(slot: Slot) -> bool:
    return bool(slot.group["direction"] == "muon")


def _check_muon(group: dict[str, Any]) -> None:
    if "max_momentum" in group:
        raise ValueError(
            "cycle_momentum=True, the default of OneCycleLR and CyclicLR, cycles the betas of "
            "every group, and a group with direction='muon' reads its momentum, which would stay "
            "as it is: give the scheduler cycle_momentum=False"
        )
    momentum = group["momentum"]
    check_number("momentum", momentum, 0.0, 1.0, open_high=True)
    check_int("ns_steps", group["ns_steps"], 0, 99)
    check_choice("matrix_shape", group["matrix_shape"], SHAPES)
    if group["adjust_lr_fn"] is not None:
        check_choice("adjust_lr_fn", group["adjust_lr_fn"], ADJUSTMENTS)
    coefficients = group["ns_coefficients"]
    if not isinstance(coefficients, tuple | list) or len(coefficients) != 3:
        raise TypeError(f"ns_coefficients={coefficients!r} must be three numbers")
    for i, coefficient in enumerate(coefficients):
        check_number(
            f"ns_coefficients[{i}]", coefficient, -math.inf, math.inf, open_low=True, open_high=True
        )
    if group["ns_dtype"] is not None and group["ns_dtype"] not in _PRODUCTS:
        raise TypeError(f"ns_dtype={group['ns_dtype']!r} must be a float dtype of torch, or None")
    if not momentum and (group["moments"] != "float32" or rule_of(group).injects):
        option = "moments" if group["moments"] != "float32" else "writeback"
        raise ValueError(f"{option}={group[option]!r} needs momentum > 0: without it there is none")


def _check_matrix(parameter: Tensor, matrix_shape: str) -> None:
    """Raise ValueError unless it is clear which matrix, or which matrices, a parameter
    is.
    """
    shape = tuple(parameter.shape)
    if len(shape) < 2:
        raise ValueError(
            f"a parameter of shape {shape} is no matrix: put it into a group with "
            "direction='adam', or let "
            "StiffnessMuon.for_model sort the model's parameters"
        )
    fits = len(shape) == 2 or matrix_shape == "flatten"
    if not fits and (matrix_shape == "auto" or len(shape) != 3):
        raise ValueError(
            f"a parameter of shape {shape} is no matrix: give its group matrix_shape='flatten' "
            "(one matrix, a row per "
            "filter) or, with three dimensions, 'batch' (a matrix for each entry of the first)"
        )


@dataclass(frozen=True)
class ReportedParameter:
    """One parameter of a model, and the direction that steps it."""

    name: str  #: Its dotted name.
    shape: tuple[int, ...]  #: Its shape.
    direction: str  #: ``muon`` or ``adam``.
    decays: bool  #: True if ``weight_decay`` applies to it.
    reason: str  #: Why it is Muon's or Adam's.


@dataclass(frozen=True)
class MuonReport:
    """The parameters that Muon steps and those that Adam steps; its string is a table."""

    parameters: tuple[ReportedParameter, ...]
    """Every parameter that requires a gradient, a shared one once, in the model's
    order.
    """

    def __str__(self) -> str:
        """A line for each parameter, and one for all of them."""
        rows = [("parameter", "shape", "direction", "decays", "")]
        rows += [
            (p.name, str(p.shape), p.direction, "yes" if p.decays else "no", p.reason)
            for p in self.parameters
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join([*map(str.ljust, row, widths), row[4]]).rstrip() for row in rows]
        muons = sum(p.direction == "muon" for p in self.parameters)
        return "\n".join(
            [*lines, f"Muon's: {muons} of {len(self.parameters)} parameters, the rest Adam's"]
        )


def muon_report(model: nn.Module, others: Sequence[str] | None = None) -> MuonReport:
    """Sort a model's parameters as :meth:`StiffnessMuon.for_model` does, with the
    reasons.

    Args:
        model, others: as in :meth:`StiffnessMuon.for_model`; nothing is changed.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.
        ValueError: a pattern that names nothing.

    Example:
        >>> print(muon_report(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8))))
        parameter  shape    direction  decays
        0.weight   (10, 8)  adam       yes     an embedding
        1.weight   (8, 8)   muon       yes     a matrix
        1.bias     (8,)     adam       no      a vector
        Muon's: 1 of 3 parameters, the rest Adam's
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    rows = []
    for name, parameter, kind, reason in _sorted(model, others):
        options, shape = _KINDS[kind], tuple(parameter.shape)
        direction, decays = str(options.get("direction", "muon")), "weight_decay" not in options
        rows.append(ReportedParameter(name, shape, direction, decays, reason))
    return MuonReport(tuple(rows))


def _sorted(
    model: nn.Module, others: Sequence[str] | None
) -> Iterator[tuple[str, Tensor, _Kind, str]]:
    """Name, kind of group and reason for each parameter that is trained, in the model's
    order.
    """
    adams, exempt = _adams(model, others), _exempt(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter, *_kind(model, name, parameter, adams, exempt)


def _kind(
    model: nn.Module, name: str, parameter: Tensor, adams: dict[int, str], exempt: set[int]
) -> tuple[_Kind, str]:
    place, _, own = name.rpartition(".")
    owner = model.get_submodule(place)
    # the weight that a layer multiplies by is a matrix, whatever its name or shape
    multiplies = own == "weight" and (is_linear(owner) or isinstance(owner, CONVOLUTIONS))
    if parameter.dim() < 2:
        return "vectors", "a vector"
    if id(parameter) in exempt:
        return "vectors", "the model says that it does not decay"
    if not multiplies and sum(size != 1 for size in parameter.shape) < 2:
        return "vectors", "a vector, by its shape"
    if not multiplies and _NO_DECAY.fullmatch(own):
        return "vectors", f"by its name, {own!r}"
    if id(parameter) in adams:
        return "others", adams[id(parameter)]
    if isinstance(owner, CONVOLUTIONS) and own == "weight":
        if owner.groups > 1 and parameter.shape[1] == 1:
            return "others", "a depthwise convolution"
        return "kernels", "a convolution: a row for each filter"
    if _EMBEDDING.fullmatch(own):
        return "others", f"by its name, {own!r}"
    if parameter.dim() > 3:
        return "others", f"{parameter.dim()} dimensions"
    return (
        ("matrices", "a matrix")
        if parameter.dim() == 2
        else ("experts", f"{parameter.shape[0]} matrices")
    )


def _is_transposed(model: nn.Module, name: str) -> bool:
    """True if a matrix has a row for each input: that of a ``Conv1D``, or of experts as
    GPT-OSS has them.
    """
    place, _, own = name.rpartition(".")
    owner = model.get_submodule(place)
    is_turned = own in getattr(owner, "turned", ())
    is_transposed = own == "weight" and is_conv1d(owner)
    if model.get_parameter(name).dim() == 3:
        is_transposed = bool(getattr(owner, "is_transposed", False))
    return is_transposed != is_turned


def _exempt(model: nn.Module) -> set[int]:
    """Parameters that the model itself exempts from decay, as timm's models list them
    and state spaces mark them.
    """
    says = getattr(model, "no_weight_decay", None)
    names = set(says()) if callable(says) else set()
    marked = "_no_weight_decay"
    return {
        id(p) for name, p in model.named_parameters() if name in names or getattr(p, marked, False)
    }


def _adams(model: nn.Module, patterns: Sequence[str] | None) -> dict[int, str]:
    """The parameters that are Adam's whatever their shape: embeddings always, and
    heads, or what the patterns name.
    """
    found: dict[int, str] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        matched = [
            p
            for name, m in model.named_modules()
            if name and fnmatchcase(name, pattern)
            for p in m.parameters()
        ]
        matched += [p for name, p in model.named_parameters() if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(f"others={pattern!r} names no module and no parameter of the model")
        found |= {id(parameter): f"others={pattern!r} names it" for parameter in matched}
    if patterns is None:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        modules = [m for name, m in model.named_modules() if name.rsplit(".", 1)[-1] in _HEADS]
        for module in modules if head is None else [head]:
            found |= {id(parameter): "the head" for parameter in module.parameters()}
    embeddings = [
        m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)
    ]
    return found | {id(weight): "an embedding" for weight in embeddings}
