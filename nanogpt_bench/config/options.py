"""The options that every optimizer takes, with their defaults, and the unit that its learning rate is in."""

from __future__ import annotations

from typing import Any

#: optimizers of other packages, on float weights only
PEERS = ("torchao_adamw8bit", "torchao_adamwfp8", "optimi_adamw")
#: of the library's own optimizers, beside those of their kind
_OWN: dict[str, Any] = {"damping": 2.0**-8, "clip": 2.0**4, "stabilize_every": None, "reset_every": None}
_DECAY: dict[str, Any] = {"weight_decay": 0.1, "weight_decay_end": None, "weight_decay_schedule": None}
_ADAM: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, **_DECAY}
_SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, **_DECAY, "weight_decay": 0.0}
_LION: dict[str, Any] = {"lr": 2.5e-4, "beta1": 0.9, "beta2": 0.99, **_DECAY}
_EXPONENT: dict[str, Any] = {**_OWN, "stiffness": 0.0, "stiffness_end": None, "stiffness_schedule": None}
#: the options every optimizer takes, with their defaults; all others must be left out. A rule has rates of its own
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": _ADAM,
    "sgd": _SGD,
    **dict.fromkeys(PEERS, _ADAM),
    "stiffness_adamw": {**_ADAM, **_EXPONENT},
    "stiffness_sgd": {**_SGD, **_EXPONENT},
    "stiffness_muon": {**_ADAM, **_EXPONENT, "momentum": 0.95, "lr": 4e-3, "float_lr": 4e-3},
    "stiffness_lion": {**_LION, **_EXPONENT},
    "madam": {**_ADAM, **_OWN, "lr": 1e-2, "float_lr": 1e-3, "weight_decay": 0.0},
    "riemannian_adam": {**_ADAM, **_OWN, "lr": 0.5, "float_lr": 1e-3},
    "riemannian_sgd": {**_SGD, **_OWN, "lr": 2e4, "float_lr": 0.1},
    "fisher": {**_ADAM, **_EXPONENT, "momentum": 0.9, "representation": "kfac", "refresh": 10, "damping": 0.1},
}
#: the library's own, each a class of fp8manifold.optim without its underscores
OWN_OPTIMIZERS = tuple(name for name in OPTIONS if name not in ("adamw", "sgd", *PEERS))
#: what the options are called, of which each optimizer takes some
OPTION_NAMES = tuple(sorted({option for options in OPTIONS.values() for option in options}))
#: those that step weights on manifolds of geoopt's too
RIEMANNIAN = ("riemannian_adam", "riemannian_sgd")
_UNITS = {
    "sgd": "gradients",
    "stiffness_sgd": "gradients",
    "stiffness_lion": "signs",
    "madam": "a share of the weight",
    "riemannian_adam": "ULPs a step",
    "riemannian_sgd": "ULPs for a code gradient of 1",
}


def unit(optimizer: str) -> str:
    """Return what one of an optimizer's learning rate stands for; that of one unit suits the others of it.

    >>> unit("adamw") == unit("stiffness_adamw"), unit("riemannian_adam")
    (True, 'ULPs a step')
    """
    return _UNITS.get(optimizer, "AdamW's steps")
