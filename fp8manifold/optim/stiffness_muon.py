"""StiffnessMuon: Muon over matrices on a grid, and Adam over all other parameters.

One optimizer steps both; a group's ``direction`` says which. Three parts:

- The class: options and their checks. Of a steady step, which `_plan.py` has planned, the
  matrices are `NativeMuonBatch` of `_native_step.py` on a CPU, `TritonMuonStep` on a GPU. In other
  steps matrices are stepped by `take_muon_steps` of `_muon.py`, everything else as by
  StiffnessAdamW. All put the same parts together, those of `_matrices.py`.
- `StiffnessMuon.for_model` sorts the parameters of a model into groups. Each parameter
  has a kind (`_kind_of`): a matrix, a kernel of a convolution, a batch of experts,
  another one with decay, or a vector without. `_GROUP_OPTIONS` has what follows.
- `muon_report` prints the same decisions with their reasons.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fp8manifold._base.checks import check_choice, check_int, check_number
from fp8manifold._interface import MomentStorage, StiffnessPower
from fp8manifold._numerics.charts import Metric
from fp8manifold.nn._selection import CONVOLUTIONS, is_conv1d, is_linear
from fp8manifold.optim._checks import check_first_moment, options_in
from fp8manifold.optim._eager_step import StepView
from fp8manifold.optim._matrices import ADJUSTMENTS, COEFFICIENTS, MATRIX_SHAPES, MatrixShape
from fp8manifold.optim._muon import take_muon_steps
from fp8manifold.optim._slot import Parameters, Slot
from fp8manifold.optim._step_numbers import Schedule, muon_numbers
from fp8manifold.optim._writeback import rule_of
from fp8manifold.optim.stiffness import StiffnessOptimizer
from fp8manifold.random_bits import Draws

_DIRECTIONS = ("muon", "adam")
_PRODUCT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_HEADS: Final = ("lm_head", "head", "classifier", "score", "embed_out", "output_projection")
"""Last parts of the names of output layers."""
_Kind = Literal["matrices", "transposed", "kernels", "experts", "others", "vectors"]
_GROUP_OPTIONS: Final[dict[_Kind, dict[str, Any]]] = {
    "matrices": {},
    "transposed": {"matrix_shape": MatrixShape.TRANSPOSED.value},
    "kernels": {"matrix_shape": MatrixShape.FLATTEN.value},
    "experts": {"matrix_shape": MatrixShape.BATCH.value},
    "others": {"direction": "adam"},
    "vectors": {"direction": "adam", "weight_decay": 0.0},
}
"""Options of the group of each kind, in the order of the groups.

They stand beside ``direction="muon"`` and the given decay, or in place of these.
"""
_SYMMETRIC_RULE: Final = "match_rms_adamw"
"""The rule for the size of a step that is the same for a transposed matrix."""
_NAMES_WITHOUT_DECAY: Final = re.compile(
    # gate_up_proj_bias, pos_embed, rel_pos_h
    r"(.*_)?(bias|biases|pos|position|positions|positional)(_.*)?"
    # cls_token, register_tokens
    r"|(.*_)?(token|tokens|latent|latents)"
    # state spaces
    r"|A_log|A_logs|A_b_log|log_.*|D|Ds|D_b|time_(decay|first|faaaa)"
)
"""Names, in their module, of parameters that never decay.

The weight that a layer multiplies by decays all the same.
"""
_EMBEDDING_NAMES: Final = re.compile(r"(.*_)?(embed|embeds|embedding|embeddings)")


class StiffnessMuon(StiffnessOptimizer):
    r"""Muon over matrices on a grid, and Adam over all other parameters.

    Muon has one average, and its steps have the same size in every direction of the
    matrix.

    .. math:: m \leftarrow \mu m + (1 - \mu) g, \qquad u = (1 - \mu) g + \mu m, \\
              w \leftarrow \mathrm{round}\left( (1 - \eta \lambda) w
              - \eta a \, F \, \mathrm{msign}(F u) \right),
              \qquad F = \left( \mathrm{clamp}(S(w) / S_{ref}, damping, clip) \right)^k

    Here ``mu`` is the momentum, ``eta`` the learning rate and ``lambda`` the decoupled
    decay; without Nesterov ``u = m``. ``msign`` is the orthogonal factor ``U V^T`` of
    ``U diag(s) V^T``, by ``ns_steps`` Newton-Schulz iterations. ``a`` follows from the
    shape of the matrix. Where ``u`` is all zeros, the step is the decay alone.

    ``k = 0``, the default, is ``torch.optim.Muon`` with one rounding. ``k = 1`` takes
    the steepest step of the spectral norm in the coordinates of the chart.

    Embeddings, heads, norms and biases belong in groups with ``direction="adam"``,
    which are stepped as by :class:`StiffnessAdamW`. :meth:`for_model` sorts the
    parameters of a whole model.

    Args:
        params: parameters or groups, quantised and ordinary ones mixed. With
            ``direction="muon"`` they are matrices.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps: as in
            ``torch.optim.Muon``.
        adjust_lr_fn: the factor ``a`` of a matrix of R rows and C columns. ``original``
            or None: ``sqrt(max(1, R/C))``. ``match_rms_adamw``: ``0.2 sqrt(max(R,
            C))``, for the rate and the decay of AdamW. ``spectral_unclamped``:
            ``sqrt(R/C)``.
        direction: ``muon`` or ``adam``, for the parameters of a group.
        matrix_shape: how a parameter is read as matrices. ``auto`` takes matrices, and
            refuses parameters of more than two dimensions. ``flatten`` makes one matrix
            of these, with a row for each entry of the first dimension, such as the
            filters of a convolution. ``batch`` makes a matrix for each entry of the
            first of three dimensions, such as experts. ``transposed`` is for matrices
            with a row for each input, as ``Conv1D`` has, alone or in a batch; ``a`` is
            then that of their transpose.
        ns_dtype: the dtype of the products. None is bfloat16 if the device multiplies
            it, otherwise float32.
        betas, adam_eps: Adam's, for groups with ``direction="adam"``.
        stiffness, metric, draws, seed, damping, clip: as in :class:`StiffnessAdamW`.
        writeback: as in :class:`StiffnessAdamW`. ``momentum`` needs ``momentum`` > 0,
            and adds errors to it as if the step were linear in it.
        moments: as in :class:`StiffnessAdamW`; all but ``float32`` need
            ``momentum`` > 0.
        refresh_every, maximize, on_nonfinite: as in :class:`StiffnessAdamW`.
        stabilize_every, reset_every, flags: as in :class:`StiffnessAdamW`.

    Raises:
        TypeError: as :class:`StiffnessAdamW`.
        ValueError: as :class:`StiffnessAdamW`, a parameter that is not a matrix, or, in
            a step, a scheduler with ``cycle_momentum``.

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
    _numbers = staticmethod(muon_numbers)

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
        r"""Return an optimizer for a whole model.

        Muon steps hidden matrices, Adam everything else:

        .. math:: d = \mathrm{msign}(u) \text{ for matrices}, \qquad
                  d = \hat m / (\sqrt{\hat v} + \epsilon) \text{ for the rest}

        Muon's are matrices, kernels of convolutions and batches of matrices, except
        embeddings, the head and depthwise convolutions. These parameters don't decay:
        vectors, positions, tokens, those of state spaces, and those that the model
        marks (``_no_weight_decay``) or lists (``no_weight_decay()``).
        :func:`muon_report` prints which is which, and why.

        If ``adjust_lr_fn`` gives a transposed matrix another size of step, float
        ``Conv1D`` layers and transposed experts have a group with
        ``matrix_shape="transposed"``.

        Args:
            model: quantised or not. Parameters that require no gradient are left out.
            lr: learning rate of the matrices.
            other_lr: learning rate of everything else. None is ``lr``, which suits
                ``adjust_lr_fn="match_rms_adamw"``.
            others: patterns over the names of modules or parameters that Adam steps,
                instead of the head.
            weight_decay: the decay of all parameters that decay.
            **options: options of the constructor, except ``direction``. The default of
                ``adjust_lr_fn`` is ``match_rms_adamw`` here.

        Raises:
            TypeError: as the constructor, or ``direction`` among the options.
            ValueError: as the constructor, a pattern that names nothing, or no
                parameters.

        Example:
            >>> model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8))
            >>> optimizer = StiffnessMuon.for_model(model, 1e-3)
            >>> for group in optimizer.param_groups:
            ...     print(group["direction"], group["param_names"])
            muon ['1.weight']
            adam ['0.weight']
            adam ['1.bias', '2.weight', '2.bias']
        """
        if "direction" in options:
            raise TypeError("for_model sorts the parameters by direction: leave direction out")
        options = {"adjust_lr_fn": _SYMMETRIC_RULE, **options}
        is_rule_symmetric = options["adjust_lr_fn"] == _SYMMETRIC_RULE
        members: dict[_Kind, list[tuple[str, Tensor]]] = {}
        for entry in _sorted_parameters(model, others):
            kind = entry.kind
            is_matrix = kind in ("matrices", "experts")
            # other rules depend on which side of a matrix its inputs are
            if not is_rule_symmetric and is_matrix and _is_transposed(model, entry.name):
                kind = "transposed"
            members.setdefault(kind, []).append((entry.name, entry.parameter))
        groups: list[dict[str, Any]] = []
        for kind, group_options in _GROUP_OPTIONS.items():
            if kind not in members:
                continue
            group = {"direction": "muon", "weight_decay": weight_decay, **group_options}
            group["params"] = members[kind]
            is_muons = group["direction"] == "muon"
            group["lr"] = lr if is_muons or other_lr is None else other_lr
            groups.append(group)
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

    def _are_plannable(self, slots: list[Slot]) -> bool:
        # F stands on both sides of the factor, and an error needs the ratio of norms
        specs = [slot.spec for slot in slots if is_matrix(slot)]
        return all(spec.stiffness == StiffnessPower.NONE and not spec.injects for spec in specs)

    def _number_facts(self, slot: Slot) -> tuple[Any, ...]:
        # a rate depends on the shape of the matrix
        return (*super()._number_facts(slot), slot.parameter.shape if is_matrix(slot) else None)

    def _run(self, slots: list[Slot]) -> list[StepView]:
        """Run steps without a plan: Adam's as everywhere, matrices' as `_muon.py` does."""
        views = super()._run([slot for slot in slots if not is_matrix(slot)])
        muons = [slot for slot in slots if is_matrix(slot)]
        return views + take_muon_steps(muons, {slot for slot in muons if self._is_observed(slot)})


def is_matrix(slot: Slot) -> bool:
    """Return True for a parameter that Muon's direction steps."""
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
    check_choice("matrix_shape", group["matrix_shape"], MATRIX_SHAPES)
    if group["adjust_lr_fn"] is not None:
        check_choice("adjust_lr_fn", group["adjust_lr_fn"], ADJUSTMENTS)
    coefficients = group["ns_coefficients"]
    if not isinstance(coefficients, tuple | list) or len(coefficients) != 3:
        raise TypeError(f"ns_coefficients={coefficients!r} must be three numbers")
    for i, coefficient in enumerate(coefficients):
        check_number(
            f"ns_coefficients[{i}]", coefficient, -math.inf, math.inf, open_low=True, open_high=True
        )
    if group["ns_dtype"] is not None and group["ns_dtype"] not in _PRODUCT_DTYPES:
        raise TypeError(f"ns_dtype={group['ns_dtype']!r} must be a float dtype of torch, or None")
    if not momentum and (group["moments"] != MomentStorage.FLOAT32 or rule_of(group).injects):
        option = "moments" if group["moments"] != MomentStorage.FLOAT32 else "writeback"
        raise ValueError(
            f"{option}={group[option]!r} needs momentum > 0 (momentum=0 keeps no moment to store)"
        )


def _check_matrix(parameter: Tensor, matrix_shape: str) -> None:
    """Raise ValueError unless it is clear which matrices a parameter is."""
    shape = tuple(parameter.shape)
    if len(shape) < 2:
        raise ValueError(
            f"a parameter of shape {shape} is no matrix: put it into a group with "
            "direction='adam', or let StiffnessMuon.for_model sort the model's parameters"
        )
    fits = len(shape) == 2 or matrix_shape == MatrixShape.FLATTEN
    if not fits and (matrix_shape == MatrixShape.AUTO or len(shape) != 3):
        raise ValueError(
            f"a parameter of shape {shape} is no matrix: give its group matrix_shape='flatten' "
            "(one matrix, a row per filter) or, with three dimensions, 'batch' (a matrix for each "
            "entry of the first)"
        )


@dataclass(frozen=True)
class ReportedParameter:
    """One parameter of a model, and the direction that steps it."""

    #: The dotted name.
    name: str
    #: The shape.
    shape: tuple[int, ...]
    #: ``muon`` or ``adam``.
    direction: str
    #: True if ``weight_decay`` applies to it.
    decays: bool
    #: Why it is Muon's or Adam's.
    reason: str


@dataclass(frozen=True)
class MuonReport:
    """The parameters that Muon steps and those that Adam steps; printed as a table."""

    parameters: tuple[ReportedParameter, ...]
    """Every parameter that requires a gradient, in the order of the model.

    One that several modules share is listed once.
    """

    def __str__(self) -> str:
        """Return a table with a line for each parameter, and one for all of them."""
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
    """Sort a model's parameters as :meth:`StiffnessMuon.for_model` does, with reasons.

    Args:
        model: as in :meth:`StiffnessMuon.for_model`; it is not changed.
        others: as in :meth:`StiffnessMuon.for_model`.

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
    for entry in _sorted_parameters(model, others):
        options = _GROUP_OPTIONS[entry.kind]
        rows.append(
            ReportedParameter(
                entry.name,
                tuple(entry.parameter.shape),
                direction=str(options.get("direction", "muon")),
                decays="weight_decay" not in options,
                reason=entry.reason,
            )
        )
    return MuonReport(tuple(rows))


class _SortedParameter(NamedTuple):
    """A parameter of a model, the kind that it is of, and why."""

    name: str
    parameter: Tensor
    kind: _Kind
    reason: str


def _sorted_parameters(
    model: nn.Module, others: Sequence[str] | None
) -> Iterator[_SortedParameter]:
    """Yield every parameter that is trained, in the order of the model."""
    reasons_for_adam = _reasons_for_adam(model, others)
    exempt = _exempt_from_decay(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind, reason = _kind_of(model, name, parameter, reasons_for_adam, exempt)
            yield _SortedParameter(name, parameter, kind, reason)


def _kind_of(
    model: nn.Module,
    name: str,
    parameter: Tensor,
    reasons_for_adam: dict[int, str],
    exempt: set[int],
) -> tuple[_Kind, str]:
    """Return the kind of a parameter by the first rule that applies, and the reason."""
    module_name, _, last_name = name.rpartition(".")
    module = model.get_submodule(module_name)
    is_kernel = last_name == "weight" and isinstance(module, CONVOLUTIONS)
    # the weight that a layer multiplies by is a matrix, whatever its name or shape
    multiplies = is_kernel or (last_name == "weight" and is_linear(module))
    if parameter.dim() < 2:
        return "vectors", "a vector"
    if id(parameter) in exempt:
        return "vectors", "the model says that it does not decay"
    if not multiplies and sum(size != 1 for size in parameter.shape) < 2:
        return "vectors", "a vector, by its shape"
    if not multiplies and _NAMES_WITHOUT_DECAY.fullmatch(last_name):
        return "vectors", f"by its name, {last_name!r}"
    if id(parameter) in reasons_for_adam:
        return "others", reasons_for_adam[id(parameter)]
    return _kind_of_matrix(parameter, module, last_name, is_kernel=is_kernel)


def _kind_of_matrix(
    parameter: Tensor, module: nn.Module, last_name: str, *, is_kernel: bool
) -> tuple[_Kind, str]:
    """Return the kind of a parameter that is no vector and not Adam's by its module."""
    is_depthwise = is_kernel and getattr(module, "groups", 1) > 1 and parameter.shape[1] == 1
    if is_depthwise:
        return "others", "a depthwise convolution"
    if is_kernel:
        return "kernels", "a convolution: a row for each filter"
    if _EMBEDDING_NAMES.fullmatch(last_name):
        return "others", f"by its name, {last_name!r}"
    if parameter.dim() > 3:
        return "others", f"{parameter.dim()} dimensions"
    if parameter.dim() == 3:
        return "experts", f"{parameter.shape[0]} matrices"
    return "matrices", "a matrix"


def _is_transposed(model: nn.Module, name: str) -> bool:
    """Return True if a matrix has a row for each input.

    Those of ``Conv1D`` have, and those of experts as GPT-OSS has them. Modules that
    list a parameter in ``turned`` hold it the other way round.
    """
    module_name, _, last_name = name.rpartition(".")
    module = model.get_submodule(module_name)
    is_turned = last_name in getattr(module, "turned", ())
    is_transposed = last_name == "weight" and is_conv1d(module)
    if model.get_parameter(name).dim() == 3:
        is_transposed = bool(getattr(module, "is_transposed", False))
    return is_transposed != is_turned


def _exempt_from_decay(model: nn.Module) -> set[int]:
    """Return the identities of parameters that the model itself exempts from decay.

    Models of timm list them by name, and state spaces mark them by an attribute.
    """
    list_names = getattr(model, "no_weight_decay", None)
    names = set(list_names()) if callable(list_names) else set()
    exempt = set()
    for name, parameter in model.named_parameters():
        if name in names or getattr(parameter, "_no_weight_decay", False):
            exempt.add(id(parameter))
    return exempt


def _reasons_for_adam(model: nn.Module, patterns: Sequence[str] | None) -> dict[int, str]:
    """Return a reason for each parameter that is Adam's whatever its shape.

    These are embeddings, and what the patterns name, or without patterns the head. They
    are known by their identities.
    """
    reasons: dict[int, str] = {}
    if patterns is None:
        for module in _heads(model):
            reasons |= {id(parameter): "the head" for parameter in module.parameters()}
    else:
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            parameters = _parameters_named(model, pattern)
            reasons |= {id(parameter): f"others={pattern!r} names it" for parameter in parameters}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            reasons[id(module.weight)] = "an embedding"
    return reasons


def _heads(model: nn.Module) -> list[nn.Module]:
    """Return the output layer as a model of transformers names it, or layers by name."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        return [head]
    return [m for name, m in model.named_modules() if name.rsplit(".", 1)[-1] in _HEADS]


def _parameters_named(model: nn.Module, pattern: str) -> list[Tensor]:
    """Return the parameters that a pattern names, or whose modules it names."""
    parameters: list[Tensor] = []
    for name, module in model.named_modules():
        if name and fnmatchcase(name, pattern):
            parameters += module.parameters()
    parameters += [p for name, p in model.named_parameters() if fnmatchcase(name, pattern)]
    if not parameters:
        raise ValueError(f"others={pattern!r} names no module and no parameter of the model")
    return parameters
