"""Training quantised models of transformers, by its own trainers."""

import math
from enum import StrEnum
from typing import Any, Final

from torch import nn

from fp8manifold._base.checks import check_choice, import_optional
from fp8manifold._chunked_loss import ChunkedLoss, chunked_loss
from fp8manifold.optim import (
    StiffnessAdafactor,
    StiffnessAdamW,
    StiffnessMuon,
    step_in_backward,
)

__all__ = ["ChunkedLoss", "chunked_loss", "trainer_optimizer"]

_ARGUMENTS: Final = (
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "gradient_accumulation_steps",
)
"""The arguments of a trainer that its optimizer follows."""


class TrainerRule(StrEnum):
    """An optimizer, as ``rule`` of :func:`trainer_optimizer` names it."""

    ADAMW = "adamw"
    MUON = "muon"
    ADAFACTOR = "adafactor"


class TrainerOptimizer:
    """The factory of an optimizer.

    A trainer makes it, then calls it with the model and the options of
    :func:`trainer_optimizer`.
    """

    def __init__(self, *parameters: Any, **options: Any) -> None:
        if parameters or options:
            raise TypeError(
                "this Trainer gives an optimizer its parameters and not the model: "
                "trainer_optimizer needs transformers 5.2 or newer"
            )

    def __call__(
        self,
        model: nn.Module,
        arguments: Any = None,
        *,
        rule: str,
        in_backward: dict[str, Any] | None,
        **options: Any,
    ) -> Any:
        """Make the optimizer of a model, which is on the device where it is trained.

        axolotl passes the trainer's arguments once more; they are not read.
        """
        optimizer: Any
        if rule == TrainerRule.MUON:
            optimizer = StiffnessMuon.for_model(model, **options)
        else:
            kind = StiffnessAdafactor if rule == TrainerRule.ADAFACTOR else StiffnessAdamW
            groups = _groups_by_decay(model, options.pop("weight_decay"))
            optimizer = kind(groups, **options)
        if in_backward is not None:
            step_in_backward(optimizer, **in_backward)
        return optimizer


def trainer_optimizer(
    arguments: Any, rule: str = "adamw", *, in_backward: bool = False, **options: Any
) -> tuple[type[Any], dict[str, Any]]:
    r"""Return the ``optimizer_cls_and_kwargs`` of a ``Trainer`` of transformers.

    Libraries that build on ``Trainer`` take it too.

    .. math:: (F, o) \text{ with } F()(\text{model}, **o) = \text{the optimizer}

    Learning rate, betas, eps and decay are those of the arguments, for ``adafactor``
    learning rate and decay. Biases and norms don't decay. ``in_backward`` uses
    :func:`fp8manifold.optim.step_in_backward` with ``clip="previous"``; the first step
    then only measures the norm. Under ``gradient_accumulation_steps`` it uses
    ``accumulate="bfloat16"`` and clips by the norm of the sums.

    Args:
        arguments: ``TrainingArguments``, or those of a library that builds on it
            (``SFTConfig``).
        rule: ``adamw`` (:class:`~fp8manifold.optim.StiffnessAdamW`), ``muon``
            (``StiffnessMuon.for_model``) or ``adafactor``
            (:class:`~fp8manifold.optim.StiffnessAdafactor`).
        in_backward: whether to step in the backward pass.
        **options: options of the optimizer, which replace the arguments'; for ``muon``
            those of ``for_model`` too.

    Returns:
        A factory, and the options that it is called with beside the model.

    Raises:
        TypeError: ``arguments`` are not those of a trainer; in the factory, an unknown
            option.
        ValueError: an unknown rule; ``fp16=True`` with ``in_backward``; in the factory,
            an option that the optimizer refuses.
        ImportError, RuntimeError: in the factory, transformers is missing;
            ``in_backward`` in several processes.

    Example:
        >>> from transformers import TrainingArguments
        >>> from fp8manifold.huggingface import trainer_optimizer
        >>> arguments = TrainingArguments("out", learning_rate=2e-5, use_cpu=True, report_to=[])
        >>> factory, chosen = trainer_optimizer(arguments, "muon", moments="8bit", in_backward=True)
        >>> chosen["lr"], chosen["moments"], chosen["in_backward"]
        (2e-05, '8bit', {'clip': 'previous', 'max_norm': 1.0, 'first': 'measure'})
        >>> optimizer = factory()(nn.Sequential(nn.Linear(4, 4)), **chosen)
        >>> Trainer(model, arguments, optimizer_cls_and_kwargs=(factory, chosen))  # doctest: +SKIP

    Source: the interface of transformers 5 for optimizers that see the model.
    """
    check_choice("rule", rule, [known.value for known in TrainerRule])
    for name in _ARGUMENTS:
        if not hasattr(arguments, name):
            raise TypeError(
                f"arguments is a {type(arguments).__name__} without {name}: TrainingArguments are "
                "needed"
            )
    options_of_arguments = {
        "lr": arguments.learning_rate,
        "weight_decay": arguments.weight_decay,
    }
    if rule != TrainerRule.ADAFACTOR:
        name_of_eps = "adam_eps" if rule == TrainerRule.MUON else "eps"
        options_of_arguments |= {
            "betas": (arguments.adam_beta1, arguments.adam_beta2),
            name_of_eps: arguments.adam_epsilon,
        }
    if in_backward and getattr(arguments, "fp16", False):
        raise ValueError(
            "in_backward=True can't be used with fp16=True, whose gradients are scaled: use "
            "bf16=True"
        )
    backward_options: dict[str, Any] | None = None
    if in_backward and arguments.gradient_accumulation_steps > 1:
        backward_options = {"accumulate": "bfloat16"}
    elif in_backward:
        backward_options = {
            "clip": "previous",
            "max_norm": float(arguments.max_grad_norm or math.inf),
            "first": "measure",
        }
    chosen = options_of_arguments | options
    return TrainerOptimizer, chosen | {"rule": rule, "in_backward": backward_options}


def _groups_by_decay(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return groups of the parameters that decay and of those that do not.

    They are divided as Trainer divides them.
    """
    transformers = import_optional(
        "transformers", "hf", "fp8manifold.huggingface.trainer_optimizer"
    )
    decaying_names = set(transformers.Trainer.get_decay_parameter_names(None, model))
    decaying: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = decaying if name in decaying_names else others
            group.append((name, parameter))
    groups: list[dict[str, Any]] = []
    if decaying:
        groups.append({"params": decaying, "weight_decay": weight_decay})
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    return groups
