"""Optimizers for trainers that make their own: what transformers' Trainer takes as ``optimizer_cls_and_kwargs``."""

import math
from typing import Any, Final

from torch import nn

from fp8manifold._numerics.checks import check_choice
from fp8manifold.exchange import needed
from fp8manifold.optim import StiffnessAdamW, StiffnessMuon, step_in_backward

__all__ = ["trainer_optimizer"]

_RULES: Final = ("adamw", "muon")


class TrainerOptimizer:
    """What a trainer makes first, and then calls with the model and the second part of :func:`trainer_optimizer`."""

    def __call__(
        self, model: nn.Module, arguments: Any = None, *, rule: str, in_backward: dict[str, Any] | None, **options: Any
    ) -> Any:
        """Make the optimizer of a model that is where it is trained; axolotl gives it the arguments once more."""
        made: Any
        if rule == "muon":
            made = StiffnessMuon.for_model(model, **options)
        else:
            made = StiffnessAdamW(_groups(model, options.pop("weight_decay")), **options)
        if in_backward is not None:
            step_in_backward(made, **in_backward)
        return made


def trainer_optimizer(
    arguments: Any, rule: str = "adamw", *, in_backward: bool = False, **options: Any
) -> tuple[type[TrainerOptimizer], dict[str, Any]]:
    """Give what a ``Trainer`` of transformers, or of a library on it, takes as ``optimizer_cls_and_kwargs``.

    .. math:: (F, o) \\text{ with } F()(\\text{model}, **o) = \\text{the optimizer}

    which is how other loops, whose factory sees the model, use it.  The learning rate, betas, eps and decay are those
    of the arguments, and biases and norms don't decay.  Nothing of ``Trainer`` has to be overridden: it clips,
    accumulates, logs the norm, saves and resumes to the bit.

    With ``in_backward`` each parameter steps as soon as its gradient is there, by
    :func:`fp8manifold.optim.step_in_backward`, and ``max_grad_norm`` and ``gradient_accumulation_steps`` say how:

    - without accumulation, ``clip="previous"``: clipped by the norm of the step before.  The first step only takes its
      norm, and trains nothing;
    - with it, ``accumulate="bfloat16"``: sums in two bytes a weight, clipped by their own norm.

    Args:
        arguments: ``TrainingArguments``, or those of a library on it (``SFTConfig``).
        rule: ``adamw`` (:class:`~fp8manifold.optim.StiffnessAdamW`) or ``muon``
            (:class:`~fp8manifold.optim.StiffnessMuon`, by ``for_model``).
        in_backward: whether to step in the backward pass.
        options: the optimizer's, in place of the arguments'; for ``muon`` those of ``for_model`` too.

    Returns:
        A factory, and what it is called with beside the model.

    Raises:
        ImportError: in the factory, transformers is missing.
        TypeError: no arguments of a trainer; in the factory, an option that there is not.
        ValueError: another rule; ``fp16=True``, which scales gradients, with ``in_backward``; in the factory, options
            of the optimizer's.
        RuntimeError: in the factory, ``in_backward`` in several processes.

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
    check_choice("rule", rule, _RULES)
    for name in ("learning_rate", "max_grad_norm", "gradient_accumulation_steps"):
        if not hasattr(arguments, name):
            raise TypeError(f"arguments is a {type(arguments).__name__} without {name}: TrainingArguments are needed")
    shared = {"lr": arguments.learning_rate, "weight_decay": arguments.weight_decay}
    betas, eps = (arguments.adam_beta1, arguments.adam_beta2), arguments.adam_epsilon
    shared |= {"betas": betas, "adam_eps" if rule == "muon" else "eps": eps}
    return TrainerOptimizer, shared | options | {
        "rule": rule,
        "in_backward": _asked(arguments) if in_backward else None,
    }


def _asked(arguments: Any) -> dict[str, Any]:
    """How steps are taken in the backward pass, by what a trainer would do after it."""
    if getattr(arguments, "fp16", False):
        raise ValueError("in_backward=True does not go with fp16=True, whose gradients are scaled: use bf16=True")
    if arguments.gradient_accumulation_steps > 1:
        return {"accumulate": "bfloat16"}
    return {"clip": "previous", "max_norm": float(arguments.max_grad_norm or math.inf), "first": "measure"}


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """What decays and what doesn't, as Trainer has it."""
    trainer = needed("transformers", "hf", "fp8manifold.huggingface.trainer_optimizer").Trainer
    decays = set(trainer.get_decay_parameter_names(None, model))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [each for each in named if (each[0] in decays) is decaying], "weight_decay": decay}
        for decaying, decay in ((True, weight_decay), (False, 0.0))
    ]
    return [group for group in groups if group["params"]]
