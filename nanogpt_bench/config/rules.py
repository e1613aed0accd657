"""The update rules: how weights are stored and how a step changes them.

`RULES` is data, one entry per rule. The functions below say what a rule means, which of
its packages are installed, and what follows from storage and write-back.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

from nanogpt_bench.config.keys import keys_where
from nanogpt_bench.config.schema import (
    DECODED,
    LOSING,
    MANIFOLDS,
    ON_FLOATS,
    RIEMANNIAN,
    ROUNDED,
    OptimizerName,
    Storage,
)
from nanogpt_bench.system.errors import BenchError, unknown


class ExtraPackage(NamedTuple):
    """A package beyond the bench's own: its module, and the extra that brings it."""

    module: str
    extra: str


@dataclass(frozen=True)
class Rule:
    """The settings behind a rule's name.

    Each field is the default of a configuration key.
    """

    #: where weights live: float32, master, grid, codes, continuous or peer (see
    #: `model.storage`)
    storage: str
    #: name of the optimizer; adamw and sgd on grid or codes storage are the library's own
    #: with k = 0
    optimizer: str
    #: default learning rate, in the optimizer's own unit: the best of
    #: benchmarks/rule_learning_rates.py for E4M3
    lr: float
    #: float32, bf16-mixed (autocast) or bf16-pure (bfloat16 weights and optimizer
    #: state)
    precision: str = "bf16-mixed"
    #: write-back of a step to the grid (None: there is none)
    writeback: str | None = None
    #: format of running averages (None: the optimizer's default, float32)
    moments: str | None = None
    #: the stiffness exponent k at the first step (None: the optimizer has none)
    stiffness: float | None = None
    #: k at the last step, reached linearly (None: k stays)
    stiffness_end: float | None = None
    #: torchao's recipe of scales, where the linear layers are torchao's (see
    #: `model.torchao_float8`)
    torchao_float8: str | None = None
    #: what multiplies the weights' codes (see `model.products`; None: they are decoded)
    products: str | None = None
    #: the package whose weights are trained, and their format (see `model.peer`)
    peer: str | None = None
    #: learning rate of the parameters that stay float, where its unit is not that of lr
    float_lr: float | None = None
    #: a package beyond the bench's own that the rule needs
    needs: ExtraPackage | None = None
    #: one line for --help and the report
    help: str = ""


def _on_floats(
    text: str,
    optimizer: str = "adamw",
    precision: str = "bf16-mixed",
    *,
    storage: str = "float32",
    lr: float = 2e-3,
    **settings: Any,
) -> Rule:
    """Return a rule of float weights; its learning rate is AdamW's by default."""
    return Rule(storage, optimizer, lr, precision, help=text, **settings)


def _one_byte(optimizer: str, lr: float, writeback: str, text: str, **settings: Any) -> Rule:
    """Return a rule without a master copy."""
    help_text = f"{text}, no master copy"
    return Rule("codes", optimizer, lr, writeback=writeback, help=help_text, **settings)


def _muon(writeback: str, text: str) -> Rule:
    """Return a rule of Muon without a master copy."""
    return _one_byte(
        "stiffness_muon", 16e-3, writeback, text, moments="8bit", stiffness=0.0, float_lr=2e-3
    )


def _stiffness_rule(text: str, k: float, stiffness_end: float | None = None) -> Rule:
    """Return a rule of StiffnessAdamW without a master copy."""
    return _one_byte(
        "stiffness_adamw",
        2e-3,
        "stochastic",
        f"StiffnessAdamW with k {text}, stochastic rounding",
        stiffness=k,
        stiffness_end=stiffness_end,
    )


_TORCHAO: dict[str, Any] = {"needs": ExtraPackage("torchao", "torchao")}
RULES: dict[str, Rule] = {
    "fp32": _on_floats("AdamW, everything in float32", precision="float32"),
    "bf16-mixed": _on_floats("AdamW, bfloat16 autocast, float32 weights: the reference"),
    "bf16-pure": _on_floats("AdamW, weights and state in bfloat16", precision="bf16-pure"),
    "bf16-stochastic": _on_floats(
        "StiffnessAdamW, bfloat16 weights with stochastic rounding, 8-bit moments: 4 bytes per "
        "parameter",
        "stiffness_adamw",
        "bf16-pure",
        moments="8bit",
        stiffness=0.0,
    ),
    "bf16-adafactor": _on_floats(
        "Adafactor without momentum, bfloat16 weights with stochastic rounding: two bytes per "
        "weight, and state for rows and columns only",
        "stiffness_adafactor",
        "bf16-pure",
        lr=0.05,
        stiffness=0.0,
    ),
    "bf16-adamw8bit": _on_floats(
        "torchao's AdamW8bit: moments in 8-bit blocks, bfloat16 weights rounded to nearest",
        "torchao_adamw8bit",
        "bf16-pure",
        **_TORCHAO,
    ),
    "sgd": _on_floats("SGD with momentum 0.9, everything in float32", "sgd", "float32", lr=1e-1),
    "torchao-float8": _on_floats(
        "AdamW, torchao's float8 training: products of E4M3 operands and E5M2 gradients, float32 "
        "weights",
        torchao_float8="tensorwise",
        **_TORCHAO,
    ),
    "torchao-adamw8bit": _on_floats(
        "torchao's AdamW8bit: moments in 8-bit blocks, float32 weights",
        "torchao_adamw8bit",
        **_TORCHAO,
    ),
    "torchao-adamwfp8": _on_floats(
        "torchao's AdamWFp8: moments in E4M3 blocks, float32 weights",
        "torchao_adamwfp8",
        **_TORCHAO,
    ),
    "torchao-int8": _on_floats(
        "torchao's AdamW8bit on its int8 weights, stochastic rounding, no master copy",
        "torchao_adamw8bit",
        "float32",
        storage="peer",
        peer="torchao-int8",
        **_TORCHAO,
    ),
    "master": Rule(
        "master", "adamw", 2e-3, help="AdamW on a float32 master copy, quantised forward (QAT)"
    ),
    "nearest": _one_byte("adamw", 2e-3, "nearest", "AdamW, nearest rounding"),
    "stochastic": _one_byte("adamw", 2e-3, "stochastic", "AdamW, stochastic rounding"),
    "stochastic-8bit": _one_byte(
        "adamw", 2e-3, "stochastic", "AdamW, stochastic rounding, 8-bit moments", moments="8bit"
    ),
    "stochastic-fp8": _one_byte(
        "adamw",
        2e-3,
        "stochastic",
        "AdamW, stochastic rounding, 8-bit moments, products on FP8 units",
        moments="8bit",
        products="fp8",
    ),
    "residual8": _one_byte(
        "adamw", 2e-3, "residual8", "AdamW, rounding errors kept in 8 bits per weight"
    ),
    "momentum": _one_byte(
        "adamw", 2e-3, "momentum", "AdamW, rounding errors added to the momentum"
    ),
    "muon": _on_floats(
        "Muon on hidden matrices, AdamW (at float_lr) on the rest, everything in float32",
        "stiffness_muon",
        "float32",
        lr=16e-3,
        stiffness=0.0,
        float_lr=2e-3,
    ),
    "muon-stochastic": _muon(
        "stochastic",
        "Muon on hidden matrices, AdamW (at float_lr) on the rest, stochastic rounding, 8-bit "
        "moments: two bytes per hidden weight",
    ),
    "muon-nearest": _muon("nearest", "as muon-stochastic, but nearest rounding"),
    "muon-residual8": _muon(
        "residual8",
        "as muon-stochastic, but rounding errors kept in 8 bits per weight: three bytes",
    ),
    "adafactor": _on_floats(
        "Adafactor without momentum, everything in float32",
        "stiffness_adafactor",
        "float32",
        lr=0.05,
        stiffness=0.0,
    ),
    "adafactor-stochastic": _one_byte(
        "stiffness_adafactor",
        0.05,
        "stochastic",
        "Adafactor without momentum, stochastic rounding: one byte per weight, and state for rows "
        "and columns only",
        stiffness=0.0,
    ),
    "stiffness-k0": _stiffness_rule("= 0 (AdamW)", 0.0),
    "stiffness-k0.5": _stiffness_rule("= 1/2", 0.5),
    "stiffness": _stiffness_rule("= 1", 1.0),
    "stiffness-anneal": _stiffness_rule("from 1 to 0", 1.0, stiffness_end=0.0),
    "stiffness-unrounded": Rule(
        "continuous",
        "stiffness_adamw",
        2e-3,
        stiffness=1.0,
        help="StiffnessAdamW with k = 1 on float32 weights that are never rounded: the geometry "
        "without the grid",
    ),
    "stiffness-lion": _one_byte(
        "stiffness_lion",
        1e-3,
        "stochastic",
        "StiffnessLion with k = 1, stochastic rounding",
        stiffness=1.0,
    ),
    "lion-stochastic": _one_byte(
        "stiffness_lion",
        1e-3,
        "stochastic",
        "Lion, stochastic rounding, 8-bit momentum: two bytes per weight",
        moments="8bit",
        stiffness=0.0,
    ),
    "sgd-nearest": _one_byte("sgd", 2e-1, "nearest", "SGD with momentum 0.9, nearest rounding"),
    "sgd-stochastic": _one_byte(
        "sgd", 1e-1, "stochastic", "SGD with momentum 0.9, stochastic rounding"
    ),
    "stiffness-sgd": _one_byte(
        "stiffness_sgd",
        4e-1,
        "stochastic",
        "StiffnessSGD with k = 2, stochastic rounding",
        stiffness=2.0,
    ),
    "riemannian": _one_byte(
        "riemannian_adam",
        # Q20's rate, best after 2,000 steps; 150 steps find 2, and 500 and 1,000 find 1
        0.5,
        "stochastic",
        "RiemannianAdam (lr in ULPs per step), stochastic rounding",
        float_lr=1e-3,
    ),
    "riemannian-sgd": _one_byte(
        "riemannian_sgd",
        2e4,
        "stochastic",
        "RiemannianSGD (lr in ULPs for a code gradient of 1), stochastic rounding",
        float_lr=1e-1,
    ),
    "fisher": _one_byte(
        "fisher",
        2e-3,
        "stochastic",
        "natural gradient (KFAC) damped in the stiffness metric, stochastic rounding",
        stiffness=1.0,
        needs=ExtraPackage("nngeometry", "fisher"),
    ),
}

#: rules that step in a format's geometry, and those of AdamW and Muon without a master
#: copy. Each has a control NAME-float, whose float weights take the same step and are
#: never rounded
WITH_TWIN = (
    "stochastic",
    "muon-stochastic",
    "stiffness-k0.5",
    "stiffness-anneal",
    "stiffness-lion",
    "stiffness-sgd",
    "riemannian",
    "riemannian-sgd",
)
for _name in WITH_TWIN:
    RULES[f"{_name}-float"] = replace(
        RULES[_name],
        storage="continuous",
        writeback=None,
        help=f"as {_name}, but on float32 weights that are never rounded",
    )


def rule(name: str) -> Rule:
    """Return the rule called `name`.

    >>> rule("nearest").writeback
    'nearest'
    """
    if name not in RULES:
        raise unknown("rule", name, RULES)
    return RULES[name]


def meaning(entry: Rule) -> dict[str, Any]:
    """Return the settings that define a rule.

    With another value the run would have the wrong name. Rates and the exponent of the
    stiffness do not define it: they are searched, and varied, under the rule's name.

    >>> meaning(rule("fp32"))["train.precision"]
    'float32'
    """
    settings: dict[str, Any] = {
        "model.storage": entry.storage,
        "optimizer.name": entry.optimizer,
    }
    if entry.storage in ROUNDED:
        settings["optimizer.writeback"] = entry.writeback
    if has_moments(entry.storage, entry.optimizer):
        settings["optimizer.moments"] = entry.moments or "float32"
    if entry.storage == Storage.CODES:
        settings["model.products"] = entry.products or DECODED
    if entry.storage == Storage.FLOAT32:
        settings["train.precision"] = entry.precision
        settings["model.torchao_float8"] = entry.torchao_float8
    return settings


def contradicting(
    value_of: Callable[[str], Any], rule_settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings with another value than a rule gives them.

    `value_of` takes a key and returns its value, None for a setting not given. codes and
    grid hold the same values, so neither contradicts the other.

    >>> settings = {"model.storage": "grid", "train.precision": "float32"}
    >>> contradicting(settings.get, {"model.storage": "codes"})
    {}
    """
    contradictions: dict[str, Any] = {}
    for key, rule_value in rule_settings.items():
        value = value_of(key)
        same_values = value in ROUNDED and rule_value in ROUNDED
        if value is not None and value != rule_value and not same_values:
            contradictions[key] = value
    return contradictions


def optimizer_of(settings: Mapping[str, Any]) -> str:
    """Return the optimizer that settings call for.

    They do so by its name, by a rule, or by a constraint.

    >>> optimizer_of({"rule": "riemannian"}), optimizer_of({})
    ('riemannian_adam', 'adamw')
    """
    if settings.get("optimizer.name"):
        return str(settings["optimizer.name"])
    entry = RULES.get(str(settings.get("rule")))
    if entry is not None:
        return entry.optimizer
    name = RIEMANNIAN[0] if settings.get("model.constraint") else OptimizerName.ADAMW
    return name.value


def available_rules() -> list[str]:
    """Return the names of the rules whose packages are installed."""
    return [name for name, entry in RULES.items() if _is_installed(entry.needs)]


def _is_installed(package: ExtraPackage | None) -> bool:
    return package is None or find_spec(package.module) is not None


def check_available(name: str) -> None:
    """Raise for a rule whose package is missing."""
    package = rule(name).needs
    if package is not None and not _is_installed(package):
        raise BenchError(
            f"rule {name!r} needs {package.module}; get it with pip install "
            f"'fp8manifold[{package.extra}]'"
        )


def loses_steps(
    storage: str | None, writeback: str | None, writeback_end: str | None = None
) -> bool | None:
    """Return whether a small step is lost for good when it is written back.

    It is lost in a part of the training if either of its two write-backs loses it. None
    where that is not known.

    >>> loses_steps("codes", "nearest"), loses_steps("codes", "residual8")
    (True, False)
    >>> loses_steps("codes", "stochastic", "nearest")
    True
    >>> loses_steps("master", None), loses_steps(None, "nearest")
    (False, None)
    """
    if storage is None:
        return None
    is_lost = writeback is None or writeback in LOSING or writeback_end in LOSING
    return storage in ROUNDED and is_lost


def stall_counts(
    storage: str | None, writeback: str | None, writeback_end: str | None = None
) -> bool:
    """Return whether a stall is a failure.

    Under an unbiased write-back weights that stall at a step still move on average: the
    stall is no failure. With a master copy the stall is the share of codes that stayed,
    and is one. It also is one where the write-back is not known.

    >>> stall_counts("codes", "nearest"), stall_counts("codes", "stochastic")
    (True, False)
    >>> stall_counts("master", None)
    True
    """
    if storage not in ROUNDED:
        return True
    return loses_steps(storage, writeback, writeback_end) is not False


def reference_settings(base: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a reference.

    They are those of all runs, except what belongs to their rule, and its own.

    >>> base = {"rule": "nearest", "model.format": "E4M3", "seed": 1}
    >>> reference_settings(base, {"rule": "fp32"})
    {'seed': 1, 'rule': 'fp32'}
    """
    of_rule = keys_where("of_rule")
    return {key: value for key, value in base.items() if key not in of_rule} | dict(reference)


def has_moments(storage: str | None, optimizer: str | None) -> bool:
    """Return whether `optimizer.moments` means something.

    It does for the library's own optimizers.

    >>> has_moments("codes", "adamw"), has_moments("float32", "stiffness_muon")
    (True, True)
    >>> has_moments("float32", "adamw")
    False
    """
    return storage in MANIFOLDS or optimizer in ON_FLOATS


_UNITS: dict[str, str] = {
    OptimizerName.SGD: "gradients",
    OptimizerName.STIFFNESS_SGD: "gradients",
    OptimizerName.STIFFNESS_LION: "signs",
    OptimizerName.STIFFNESS_ADAFACTOR: "sizes of the weights",
    OptimizerName.RIEMANNIAN_ADAM: "ULPs per step",
    OptimizerName.RIEMANNIAN_SGD: "ULPs for a code gradient of 1",
}


def unit(optimizer: str) -> str:
    """Return the unit of an optimizer's learning rate.

    Optimizers with the same unit can share a rate.

    >>> unit("adamw") == unit("stiffness_adamw"), unit("riemannian_adam")
    (True, 'ULPs per step')
    """
    return _UNITS.get(optimizer, "AdamW's steps")
