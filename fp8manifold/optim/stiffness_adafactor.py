"""StiffnessAdafactor: Adafactor over weights on a grid, with a state of n + m numbers.

The class is options and their checks, as in `stiffness.py`. Statistics and the factors
that follow from them are `_factored.py`, and ``_native/factors.c``; with these a step is
SGD's, by any backend.
"""

from typing import Any

from torch import Tensor

from fp8manifold._base.checks import check_choice, check_number
from fp8manifold._interface import MomentStorage
from fp8manifold._numerics.charts import Metric
from fp8manifold.optim._checks import check_finite, options_in
from fp8manifold.optim._eager_step import StepView
from fp8manifold.optim._factored import factors_of
from fp8manifold.optim._factors import FACTORED_SHAPES, Preconditioner
from fp8manifold.optim._slot import Parameters, Slot
from fp8manifold.optim._step_numbers import Schedule, adafactor_numbers
from fp8manifold.optim._writeback import rule_of
from fp8manifold.optim.stiffness import StiffnessOptimizer
from fp8manifold.random_bits import Draws


class StiffnessAdafactor(StiffnessOptimizer):
    r"""Adafactor over weights on a grid: for a matrix of n x m it stores n + m numbers.

    .. math:: R \leftarrow \beta_2 R + (1 - \beta_2) \mathrm{mean}_{columns}(g^2), \qquad
              C \leftarrow \beta_2 C + (1 - \beta_2) \mathrm{mean}_{rows}(g^2), \qquad
              \beta_2 = 1 - t^{decay}, \\
              V = \frac{R C^T}{\mathrm{mean}(R)}, \qquad
              u = \frac{g}{\sqrt{\max(V, \epsilon_1^2)}}, \qquad
              \hat u = \frac{u}{\max(1, \mathrm{rms}(u) / d)}, \\
              w \leftarrow \mathrm{round}\left( (1 - \eta \lambda) w
              - \min(\eta, 1 / \sqrt t) \max(\epsilon_2, \mathrm{rms}(w)) F \hat u \right),
              \qquad F = \left( \mathrm{clamp}(S(w) / S_{ref}, damping, clip) \right)^k

    Here ``g`` is the gradient, ``t`` the number of the step, ``eta`` the learning rate,
    relative to the size of the weights, and ``lambda`` the decoupled decay. A vector has
    a full ``V``. With ``momentum`` the step goes along an average of ``u``,
    ``m <- mu m + (1 - mu) u``. Weights that are NaN or Inf count as 0 in ``rms(w)``.

    With one-byte weights, weights and state take about one byte per weight. With ``k =
    0``, the default, and float32 parameters it is ``torch.optim.Adafactor`` up to
    rounding. For bfloat16 and float16 parameters, which are rounded stochastically,
    arithmetic and ``eps[0]`` are float32's here.

    Args:
        params: parameters or groups, quantised and ordinary ones mixed.
        lr, beta2_decay, eps, d, weight_decay: as in ``torch.optim.Adafactor``. None for
            ``eps[0]`` is the machine epsilon of the dtype that is computed in.
        momentum: ``mu``; 0 stores no average.
        matrix_shape: how a parameter of more than two dimensions is read. ``auto``: its
            last two dimensions are matrices, as in torch, and as experts have them.
            ``flatten``: one matrix, with a row for each entry of the first dimension,
            such as the filters of a convolution.
        stiffness, metric, draws, seed, damping, clip: as in :class:`StiffnessAdamW`.
        writeback: as in :class:`StiffnessAdamW`; ``momentum`` needs ``momentum`` > 0.
        moments: how the average is stored, as in :class:`StiffnessAdamW`; all but
            ``float32`` need ``momentum`` > 0. ``R`` and ``C`` are always in float32.
        refresh_every, maximize, on_nonfinite: as in :class:`StiffnessAdamW`.
        stabilize_every, reset_every, flags: as in :class:`StiffnessAdamW`.

    Raises:
        TypeError: as :class:`StiffnessAdamW`.
        ValueError: as :class:`StiffnessAdamW`.

    Example:
        >>> import fp8manifold as fm, torch
        >>> weight = fm.FP8Parameter(torch.eye(4), "E4M3", seed=0)
        >>> optimizer = StiffnessAdafactor([weight], lr=0.1)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[weight]["row_var"].shape, optimizer.state[weight]["col_var"].shape
        (torch.Size([4, 1]), torch.Size([1, 4]))

    Source: Shazeer and Stern 2018 (Adafactor, arXiv 1804.04235).
    """

    direction = "sgd"
    _numbers = staticmethod(adafactor_numbers)

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        momentum: float = 0.0,
        matrix_shape: str = "auto",
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

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_number("beta2_decay", group["beta2_decay"], -float("inf"), 0.0, open_low=True)
        _check_eps(group["eps"])
        check_number("d", group["d"], 1.0, float("inf"), open_high=True)
        check_choice("matrix_shape", group["matrix_shape"], FACTORED_SHAPES)
        momentum = group["momentum"]
        check_number("momentum", momentum, 0.0, 1.0, open_high=True)
        if rule_of(group).injects and not group["eps"][1]:
            raise ValueError(
                f"writeback={group['writeback']!r} needs eps[1] > 0 (the error of rounding is "
                "divided by the size of the weights, which can be 0)"
            )
        if momentum:
            return
        for option, needs in (
            ("moments", group["moments"] != MomentStorage.FLOAT32),
            ("writeback", rule_of(group).injects),
        ):
            if needs:
                raise ValueError(
                    f"{option}={group[option]!r} needs momentum > 0 (momentum=0 keeps no moment to "
                    "store)"
                )

    def _fields(self, slot: Slot) -> dict[str, Any]:
        is_matrix = slot.parameter.dim() > 1
        preconditioner = Preconditioner.FACTORED if is_matrix else Preconditioner.WHOLE
        return super()._fields(slot) | {"preconditioner": preconditioner}

    def _run(self, slots: list[Slot]) -> list[StepView]:
        """Advance the statistics that need other processes, or the step twice; then run."""
        for slot in slots:
            is_first = slot.share is not None or slot.fit_mask is not None
            if is_first or self._is_observed(slot):
                slot.factors = factors_of(slot)
        return super()._run(slots)


def _check_eps(eps: Any) -> None:
    if not isinstance(eps, tuple | list) or len(eps) != 2:
        raise TypeError(f"eps={eps!r} must be a pair: a number or None, and a number")
    for i, value in enumerate(eps):
        if i or value is not None:
            check_finite(f"eps[{i}]", value)
