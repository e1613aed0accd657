"""StiffnessMuon: Muon over matrices that live on a grid, and Adam over what is no matrix, in one optimizer."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8manifold._base.checks import check_choice, check_int, check_number
from fp8manifold._numerics.charts import Metric
from fp8manifold.optim._backends import StepView
from fp8manifold.optim._checks import Schedule, check_betas, check_finite, check_first_moment, lr_of, options_in
from fp8manifold.optim._muon import ADJUSTMENTS, COEFFICIENTS, SHAPES, adjusted_rate, as_matrices, take_muon_steps
from fp8manifold.optim._slot import Parameters, Slot
from fp8manifold.optim._sorting import sorted_groups
from fp8manifold.optim._writeback import rule_of
from fp8manifold.optim.stiffness import StiffnessOptimizer, adam_numbers, injected
from fp8manifold.random_bits import Draws

_DIRECTIONS = ("muon", "adam")
_PRODUCTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class StiffnessMuon(StiffnessOptimizer):
    """Muon over matrices that live on a grid: one average, and a step of one size in every direction of the matrix.

    .. math:: m \\leftarrow \\mu m + (1 - \\mu) g, \\qquad u = (1 - \\mu) g + \\mu m, \\\\
              w \\leftarrow \\mathrm{round}\\left( (1 - \\eta \\lambda) w
              - \\eta a \\, F \\, \\mathrm{msign}(F u) \\right),
              \\qquad F = \\left( \\mathrm{clamp}(S(w) / S_{ref}, damping, clip) \\right)^k

    ``msign`` is the orthogonal factor ``U V^T`` of ``U diag(s) V^T``, by five Newton-Schulz products; ``a`` follows
    from the matrix' shape.  With ``k = 0``, the default, this is ``torch.optim.Muon`` with one rounding a step, and on
    float parameters its numbers; ``k = 1`` takes the steepest step of the spectral norm in the chart's coordinates.

    With ``writeback="stochastic"`` and ``moments="8bit"`` a matrix takes two bytes a weight, its momentum included.
    That is in E2M5, rounded stochastically, in blocks whose power-of-two scale is the smallest that holds all of them.
    Embeddings, heads, norms and biases are for Adam: put them into groups with ``direction="adam"``, which are stepped
    as :class:`StiffnessAdamW` does, or let :meth:`for_model` sort a whole model.

    Args:
        params: parameters or groups, quantised and ordinary ones mixed; matrices, where ``direction`` is ``muon``.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps: as in ``torch.optim.Muon``; the decay is
            decoupled, times ``lr`` a step.
        adjust_lr_fn: how ``a`` follows from a matrix of R rows and C columns: ``original`` (None), ``sqrt(max(1,
            R/C))``; ``match_rms_adamw``, ``0.2 sqrt(max(R, C))``, with which AdamW's learning rate and decay serve; or
            ``spectral_unclamped``, ``sqrt(R/C)``.
        direction: ``muon``, or ``adam`` for a group's parameters.
        matrix_shape: what a parameter of more than two dimensions is: with ``flatten`` one matrix, a row for each
            entry of its first dimension (a convolution's filters); with ``batch`` a matrix for each entry of the
            first of its three (experts).  With ``auto`` such a parameter is refused.
        ns_dtype: what the products are computed in; None is bfloat16 where the device has it, float32 elsewhere.
        betas, adam_eps: of groups with ``direction="adam"``.
        stiffness, metric, writeback, draws, moments, seed, damping, clip, refresh_every, maximize,
            on_nonfinite, stabilize_every, reset_every: as in :class:`StiffnessAdamW`.  ``moments`` and
            ``writeback="momentum"`` need ``momentum`` > 0; the latter gives the momentum what the rounding took as
            if the step were linear in it.
        flags: torch's ``foreach``, ``fused``, ``capturable`` and ``differentiable``, which must be False or None.

    A gradient of zeros has a step of zeros.  Matrices are orthogonalised one by one, so that no step depends on what
    else is stepped; their products are the same bits on the same machine with the same number of threads.

    Raises:
        TypeError: an option of another type.
        ValueError: as :class:`StiffnessAdamW`; a parameter that is no matrix under ``direction="muon"``; in a step, a
            scheduler that cycles ``betas`` (``cycle_momentum=True``) over matrices, which read ``momentum``.

    Example:
        >>> import fp8manifold as fm, torch
        >>> weight = fm.FP8Parameter(torch.eye(4) / 2, "E4M3", seed=0)
        >>> optimizer = StiffnessMuon([weight], lr=0.05, moments="8bit")
        >>> for _ in range(150):
        ...     optimizer.zero_grad()
        ...     (weight - torch.eye(4)).square().sum().backward()
        ...     optimizer.step()
        >>> bool((weight - torch.eye(4)).abs().max() < 0.25)
        True

    Source: Jordan et al. 2024 (Muon); Liu et al. 2025 (arXiv 2502.16982) for ``match_rms_adamw``; the chart's
    coordinates and the write-backs are this library's.
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
        """One optimizer for a whole model: hidden matrices by Muon, everything else by Adam.

        .. math:: d = \\mathrm{msign}(u) \\text{ for matrices}, \\qquad
                  d = \\hat m / (\\sqrt{\\hat v} + \\epsilon) \\text{ for the rest}

        A matrix is a parameter of two dimensions, the kernel of a convolution, or a batch of matrices (three
        dimensions), unless it is that of an embedding or of the model's head, or of a convolution of each channel
        alone.  The head is what ``get_output_embeddings`` gives, or else a module called ``lm_head``, ``head``,
        ``classifier``, ``score``, ``embed_out`` or ``output_projection``.  What is no layer's weight is a vector, if
        all but one of its dimensions are 1, or if its name is that of a bias (``gate_up_proj_bias``), of positions or
        tokens (``pos_embed``, ``cls_token``) or of a state space (``A_log``, ``D``); so is what the model marks
        (``no_weight_decay()``, ``_no_weight_decay``).  :func:`muon_report` prints which is what and why, and the
        groups, with ``param_names``, say what became of each parameter.

        Args:
            model: quantised or not; parameters that require no gradient are left out.
            lr: of the matrices.
            other_lr: of everything else; None is ``lr``, which suits ``adjust_lr_fn="match_rms_adamw"``.
            others: patterns of module or parameter names that are Adam's, in place of the head.
            weight_decay: of all but vectors, which are Adam's.
            options: the constructor's; ``adjust_lr_fn`` is ``match_rms_adamw`` here, unless given.

        Raises:
            TypeError, ValueError: as the constructor; a pattern that names nothing; a model without parameters.

        Example:
            >>> model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8))
            >>> optimizer = StiffnessMuon.for_model(model, 1e-3)
            >>> [(group["direction"], group["param_names"]) for group in optimizer.param_groups]
            [('muon', ['1.weight']), ('adam', ['0.weight']), ('adam', ['1.bias', '2.weight', '2.bias'])]
        """
        groups = sorted_groups(model, others, weight_decay)
        for group in groups:
            group["lr"] = lr if group["direction"] == "muon" or other_lr is None else other_lr
        return cls(groups, lr, weight_decay, **{"adjust_lr_fn": "match_rms_adamw", **options})

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_choice("direction", group["direction"], _DIRECTIONS)
        check_betas(group["betas"])
        check_finite("adam_eps", group["adam_eps"])
        if group["direction"] == "adam":
            check_first_moment(group)
            return
        _check_muon(group)
        for parameter in group["params"]:
            _check_matrix(parameter, group["matrix_shape"])

    def _fields(self, slot: Slot) -> dict[str, Any]:
        fields = super()._fields(slot) | {"direction": slot.group["direction"]}
        if not _is_muons(slot):
            return fields
        return fields | {"has_moments": bool(slot.group["momentum"]), "nesterov": slot.group["nesterov"]}

    def _numbers(self, slot: Slot) -> dict[str, float]:
        group, lr, shared = slot.group, lr_of(slot.group), self._shared_numbers(slot)
        if not _is_muons(slot):
            return adam_numbers(lr, tuple(group["betas"]), group["adam_eps"], slot.age) | shared
        shape = torch.empty(slot.parameter.shape, device="meta")
        rows, columns = as_matrices(shape, group["matrix_shape"]).shape[-2:]
        rate, momentum = adjusted_rate(lr, group["adjust_lr_fn"], rows, columns), group["momentum"]
        numbers = {"beta1": momentum, "gain1": 1 - momentum, "rate": rate, "inject": injected(rate, momentum)}
        return numbers | shared

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
            "cycle_momentum=True, the default of OneCycleLR and CyclicLR, cycles the betas of every group, and a group "
            "with direction='muon' reads its momentum, which would stay as it is: give the scheduler "
            "cycle_momentum=False"
        )
    momentum = group["momentum"]
    check_number("momentum", momentum, 0.0, 1.0, open_high=True)
    check_finite("eps", group["eps"])
    check_int("ns_steps", group["ns_steps"], 0, 99)
    check_choice("matrix_shape", group["matrix_shape"], SHAPES)
    if group["adjust_lr_fn"] is not None:
        check_choice("adjust_lr_fn", group["adjust_lr_fn"], ADJUSTMENTS)
    if not isinstance(group["nesterov"], bool):
        raise TypeError(f"nesterov={group['nesterov']!r} must be True or False")
    coefficients = group["ns_coefficients"]
    if not isinstance(coefficients, tuple | list) or len(coefficients) != 3:
        raise TypeError(f"ns_coefficients={coefficients!r} must be three numbers")
    for i, coefficient in enumerate(coefficients):
        check_number(f"ns_coefficients[{i}]", coefficient, -math.inf, math.inf, open_low=True, open_high=True)
    if group["ns_dtype"] is not None and group["ns_dtype"] not in _PRODUCTS:
        raise TypeError(f"ns_dtype={group['ns_dtype']!r} must be a float dtype of torch, or None")
    if not momentum and (group["moments"] != "float32" or rule_of(group).injects):
        option = "moments" if group["moments"] != "float32" else "writeback"
        raise ValueError(f"{option}={group[option]!r} needs momentum > 0: without it there is none")


def _check_matrix(parameter: Tensor, matrix_shape: str) -> None:
    """Raise ValueError unless it is clear which matrix, or which matrices, a parameter is."""
    shape = tuple(parameter.shape)
    if len(shape) < 2:
        raise ValueError(
            f"a parameter of shape {shape} is no matrix: put it into a group with direction='adam', or let "
            "StiffnessMuon.for_model sort the model's parameters"
        )
    if len(shape) > 2 and (matrix_shape == "auto" or (matrix_shape == "batch" and len(shape) != 3)):
        raise ValueError(
            f"a parameter of shape {shape} is no matrix: give its group matrix_shape='flatten' (one matrix, a row a "
            "filter) or, with three dimensions, 'batch' (a matrix for each entry of the first)"
        )
