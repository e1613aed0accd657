"""Specifications of a quantised layer: its operands' formats, scales and rounding,
checked.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, Literal, TypeGuard, get_args

from torch import Tensor, nn

from fp8manifold._base.checks import check_choice, check_int, check_keys, check_number
from fp8manifold._encoded.scaled import DRAWS
from fp8manifold._numerics.charts import RETRACTIONS
from fp8manifold._ranks import share_of
from fp8manifold.fake_quant import STE, STES
from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.nn._scalers import HISTORY, POLICIES, Policy
from fp8manifold.scaling import BLOCK_SIZE, WEIGHT_GRANULARITIES, WeightGranularity
from fp8manifold.tensor import FP8Tensor

NONE: Final = "none"  #: The format that leaves an operand, or a pattern's layers, as they are.
OperandName = Literal["weight", "activation", "activation_gradient", "weight_gradient"]
OPERANDS: Final[tuple[OperandName, ...]] = get_args(OperandName)
OperandRounding = Literal["nearest", "stochastic"]
GLOBAL: Final = "global"


@dataclass(frozen=True)
class OperandSpec:
    """The format and options of a weight, an activation or a gradient; options that are
    None are the layer's.

    Args:
        format: a format or its name.
        granularity: one scale per ``tensor``, per ``channel`` (row: an output of a
            weight, a token of an activation or gradient), per ``block`` of 32 along a
            row, a power of two (E8M0), or, for stored weights, per ``square`` of 128 x
            128.
        policy: of the scale, as in :class:`Scale`.
        history: of the policy ``delayed``, usually 16 to 100 tensors.
        rounding: ``nearest`` or ``stochastic``.
        scale: None measures it; a number is the scale; ``global`` takes one magnitude
            for all of a model's gradients.
        ste: the straight-through gradient, as in :func:`fake_quantize`; gradients have
            none.

    Raises:
        TypeError, ValueError: a format or option that can't be read, or options that
            exclude each other.

    Example:
        >>> OperandSpec("e5m2", rounding="stochastic").format.name
        'E5M2'
    """

    format: FloatFormat
    granularity: WeightGranularity | None = None
    policy: Policy | None = None
    history: int | None = None
    rounding: OperandRounding | None = None
    scale: float | Literal["global"] | None = None
    ste: STE | None = None

    def __init__(
        self,
        format: FormatLike,  # noqa: A002  # what it is called everywhere
        granularity: WeightGranularity | None = None,
        policy: Policy | None = None,
        history: int | None = None,
        rounding: OperandRounding | None = None,
        scale: float | Literal["global"] | None = None,
        ste: STE | None = None,
    ) -> None:
        values = (
            as_format(format),
            granularity,
            policy,
            history,
            rounding,
            _read_scale(scale),
            ste,
        )
        _set_fields(self, values, _OPERAND_CHOICES)
        if scale is not None and policy is not None:
            raise ValueError(
                f"scale={scale!r} leaves nothing to policy={policy!r}: give one of them"
            )
        if scale is not None and granularity not in (None, "tensor"):
            raise ValueError(
                f"scale={scale!r} is for the whole tensor, not for granularity={granularity!r}"
            )

    def filled(self, **defaults: Any) -> "OperandSpec":
        """A copy with the layer's values, given by name, in place of options that are
        None.

        Raises:
            ValueError: a history where the policy is not ``delayed``.
        """
        if self.scale is not None:
            defaults |= {"policy": None, "granularity": "tensor"}
        policy = self.policy or defaults["policy"]
        if self.history is not None and policy != "delayed":
            raise ValueError(
                f"history={self.history} belongs to policy='delayed', not to {policy!r}"
            )
        if policy != "delayed":
            defaults["history"] = None
        return replace(
            self, **{name: value for name, value in defaults.items() if getattr(self, name) is None}
        )


_OPERAND_CHOICES: Final = {
    "granularity": WEIGHT_GRANULARITIES,
    "policy": POLICIES,
    "rounding": get_args(OperandRounding),
    "ste": STES,
}
OperandLike = FormatLike | OperandSpec | Mapping[str, Any] | None


def _set_fields(spec: Any, values: Iterable[Any], choices: Mapping[str, tuple[str, ...]]) -> None:
    """Set the fields of a frozen specification; those that are choices, and a history,
    are checked.
    """
    for field, value in zip(fields(spec), values, strict=True):
        object.__setattr__(spec, field.name, value)
    for name, allowed in choices.items():
        if (value := getattr(spec, name)) is not None:
            check_choice(name, value, allowed)
    if spec.history is not None:
        check_int("history", spec.history, 1, 2**20)


def _read_scale(scale: float | str | None) -> Any:
    if scale is None:
        return None
    if isinstance(scale, str):
        check_choice("scale", scale, (GLOBAL,))
        return scale
    check_number("scale", scale, 2.0**-126, 2.0**127)
    return float(scale)


def read_operand(name: str, value: OperandLike) -> OperandSpec | None:
    """The specification from a format, a mapping or a specification; None if the
    operand is not quantised.
    """
    if isinstance(value, Mapping):
        check_keys(name, value, [field.name for field in fields(OperandSpec)])
        if is_none(value.get("format")):
            if set(value) - {"format"}:
                raise ValueError(f"{name} has options but no format: {dict(value)!r}")
            return None
        value = OperandSpec(**value)
    if is_none(value):
        return None
    return value if isinstance(value, OperandSpec) else OperandSpec(value)  # type: ignore[arg-type]


def is_none(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.lower() == NONE)


LayerRounding = Literal["nearest", "stochastic", "split"]
Products = Literal["decoded", "fp8", "int8", "auto"]
PRODUCTS: Final = get_args(Products)
GradientProducts = Literal["bfloat16", "fp8"]
Units = Literal["fp8", "int8"]
_UNITS: Final[dict[str, Units]] = {"E4M3": "fp8", "E5M2": "fp8", "E1M6": "int8"}
"""The units that multiply the codes of a format as they are."""
ALIGNMENT: Final = 16
_LONGEST_SUM: Final = (
    2**31 - 1
) // 127**2  #: Products of INT8 whose sum is an int32, whatever they are.
GradientLike = OperandLike | Mapping[str, OperandLike]


@dataclass(frozen=True)
class LayerSpec:
    """The formats of a linear layer's operands, and how these are quantised.

    An operand is a format, an :class:`OperandSpec`, a mapping of its arguments, or None
    or ``"none"`` (not quantised). Options that it does not have are the layer's.

    Args:
        weight, activation: operands: the weight, and the layer's input.
        granularity: of the weight's scale, as in :class:`OperandSpec`; activations and
            gradients have one per tensor.
        policy: of the measured scales, as in :class:`Scale`; None takes ``dynamic``.
        ste: of weight and activation, as in :func:`fake_quantize`; None takes
            ``identity``.
        gradient: an operand for both gradients, or a mapping with the keys
            ``activation`` (the gradient of the output) and ``weight``; they become
            ``activation_gradient`` and ``weight_gradient``.
        rounding: ``nearest`` (None), ``stochastic``, or ``split``: stochastic in the
            backward pass only.
        history: of the policy ``delayed``; None takes 16.
        products: how the matmul runs, with storage ``fp8``: ``decoded``; on units of
            ``fp8`` (E4M3, E5M2) or ``int8`` (E1M6), where input and gradient are
            rounded to E4M3 or INT8 and results differ; or ``auto``.
        gradient_products: with products on ``fp8`` units, what the weight's gradient is
            computed in.

    Codes are multiplied if rows and columns are multiples of 16, with one scale per
        ``tensor`` or ``channel``, and
    without ``activation`` and ``gradient``. NaN or Inf in a row of the input makes its
        output NaN; in a gradient it
    makes both gradients NaN.

    Raises:
        TypeError, ValueError: a format or option that can't be read, or that would
            change nothing.

    Example:
        >>> spec = LayerSpec("E4M3", activation="E4M3", gradient={"activation": "E5M2"}, rounding="split")
        >>> spec.operand("activation_gradient").format.name, spec.operand("activation_gradient").rounding
        ('E5M2', 'stochastic')
        >>> spec.weight_gradient is None
        True
    """

    weight: OperandSpec | None
    activation: OperandSpec | None
    activation_gradient: OperandSpec | None
    weight_gradient: OperandSpec | None
    granularity: WeightGranularity
    policy: Policy | None
    ste: STE | None
    rounding: LayerRounding | None
    history: int | None
    products: Products
    gradient_products: GradientProducts
    _filled: ClassVar[
        dict[OperandName, OperandSpec | None]
    ]  # of each instance, but no field: it follows from them

    def __init__(
        self,
        weight: OperandLike = None,
        activation: OperandLike = None,
        granularity: WeightGranularity = "channel",
        policy: Policy | None = None,
        ste: STE | None = None,
        gradient: GradientLike = None,
        rounding: LayerRounding | None = None,
        history: int | None = None,
        products: Products = "decoded",
        gradient_products: GradientProducts = "bfloat16",
    ) -> None:
        check_choice("granularity", granularity, WEIGHT_GRANULARITIES)
        check_choice("products", products, PRODUCTS)
        check_choice("gradient_products", gradient_products, get_args(GradientProducts))
        operands = (
            read_operand("weight", weight),
            read_operand("activation", activation),
            *_read_gradients(gradient),
        )
        values = (
            *operands,
            granularity,
            policy,
            ste,
            rounding,
            history,
            products,
            gradient_products,
        )
        _set_fields(self, values, _CHOICES)
        object.__setattr__(self, "_filled", {name: self._fill(name) for name in OPERANDS})
        self._check()

    @property
    def quantizes_nothing(self) -> bool:
        """True where the layer stays as it is."""
        return all(getattr(self, name) is None for name in OPERANDS)

    def operand(self, name: OperandName) -> OperandSpec | None:
        """An operand's specification, with every option filled in that has a meaning;
        None if it is not quantised.

        Args:
            name: ``weight``, ``activation``, ``activation_gradient`` or
                ``weight_gradient``.

        Raises:
            ValueError: another name.
        """
        check_choice("name", name, OPERANDS)
        return self._filled[name]

    @property
    def operands(self) -> dict[OperandName, OperandSpec]:
        """Quantised operands by name, as :meth:`operand` has them."""
        return {name: spec for name, spec in self._filled.items() if spec is not None}

    def _fill(self, name: OperandName) -> OperandSpec | None:
        spec: OperandSpec | None = getattr(self, name)
        if spec is None:
            return None
        backward = name.endswith("gradient")
        split = "stochastic" if backward else "nearest"
        return spec.filled(
            granularity=self.granularity if name == "weight" else "tensor",
            policy=self.policy or "dynamic",
            history=self.history or HISTORY,
            rounding=split if self.rounding == "split" else self.rounding or "nearest",
            ste=None if backward else self.ste or "identity",
        )

    def _check(self) -> None:
        for name, spec in self.operands.items():
            _check_operand(name, spec)
        if self.history is not None and all(
            spec.policy != "delayed" for spec in self.operands.values()
        ):
            raise ValueError(
                f"history={self.history} belongs to policy='delayed', which no operand has"
            )
        if self.gradient_products == "fp8" and (
            "int8" in (self.products, self.units) or self.products == "decoded"
        ):
            raise ValueError(
                f"gradient_products='fp8' belongs to products='fp8', not to "
                f"products={self.products!r} of "
                f"weight={NONE if self.weight is None else self.weight.format.name}"
            )
        units_of(self, ALIGNMENT, ALIGNMENT)

    @property
    def units(self) -> Units | None:
        """The units that could multiply the weight's codes as they are, or None."""
        return None if self.weight is None else _UNITS.get(self.weight.format.name)


Formats = FormatLike | LayerSpec | Mapping[str, FormatLike | LayerSpec | Mapping[str, Any] | None]
_KEYS: Final = tuple(inspect.signature(LayerSpec).parameters)
_GRADIENTS: Final = ("activation", "weight")
_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "policy": POLICIES,
    "ste": STES,
    "rounding": get_args(LayerRounding),
}


def _check_operand(name: str, spec: OperandSpec) -> None:
    if name.endswith("gradient") and spec.ste is not None:
        raise ValueError(
            f"{name} has ste={spec.ste!r}: a gradient is quantised in the backward pass and has "
            f"none"
        )
    if not name.endswith("gradient") and spec.scale == GLOBAL:
        raise ValueError(
            f"{name} has scale='global', which is for gradients: give a number, or leave it out"
        )
    if name != "weight" and spec.granularity == "square":
        raise ValueError(
            f"{name} has granularity='square', which is for weights: take 'tensor', 'channel' or "
            f"'block'"
        )
    if (
        name in ("activation", "activation_gradient")
        and spec.granularity != "tensor"
        and spec.policy != "dynamic"
    ):
        raise ValueError(
            f"{name} has granularity={spec.granularity!r} with policy={spec.policy!r}: its rows "
            f"change from batch to "
            "batch, so take policy='dynamic' or granularity='tensor'"
        )


def _read_gradients(gradient: GradientLike) -> tuple[OperandSpec | None, OperandSpec | None]:
    if not isinstance(gradient, Mapping) or "format" in gradient:
        both = read_operand("gradient", gradient)
        return both, both
    kinds = [key for key in gradient if key in _GRADIENTS]
    if not kinds:
        check_keys(
            "gradient", gradient, [*_GRADIENTS, *(field.name for field in fields(OperandSpec))]
        )
        raise ValueError(f"gradient has options but no format: {dict(gradient)!r}")
    check_keys("gradient", gradient, _GRADIENTS)
    first, second = (read_operand(f"gradient.{kind}", gradient.get(kind)) for kind in _GRADIENTS)
    return first, second


def why_decoded(spec: LayerSpec, in_features: int, out_features: int) -> str:
    """A reason why the codes of a weight of that shape can't be multiplied as they are,
    or nothing.
    """
    units, operands = spec.units, spec.operands
    if units is None:
        return f"no units multiply codes of weight={NONE if spec.weight is None else spec.weight.format.name}"
    if spec.products not in (units, "auto"):
        return f"codes of {operands['weight'].format.name} take products={units!r}"
    if operands["weight"].granularity not in ("tensor", "channel"):
        return f"the weight has granularity={operands['weight'].granularity!r}, not 'tensor' or 'channel'"
    if given := [name for name in OPERANDS[1:] if name in operands]:
        return f"{given[0]}={operands[given[0]].format.name} is given"
    if not in_features or not out_features:
        return "there is nothing to multiply"
    if unfit := [size for size in (in_features, out_features) if size % ALIGNMENT]:
        return f"{ALIGNMENT} does not divide {unfit[0]}"
    if units == "int8" and max(in_features, out_features) > _LONGEST_SUM:
        return f"a sum of {max(in_features, out_features)} products may be beyond 32 bits"
    return ""


def units_of(spec: LayerSpec, in_features: int, out_features: int) -> Units | None:
    """The units that multiply codes of that shape, where the device has them; None
    where they are decoded.
    """
    if spec.products == "decoded":
        return None
    why = why_decoded(spec, in_features, out_features)
    if why and spec.products != "auto":
        raise ValueError(
            f"products={spec.products!r}: {why}; take products='decoded' or 'auto' there"
        )
    return None if why else spec.units


def read_formats(
    formats: Formats, granularity: WeightGranularity, products: Products = "decoded"
) -> dict[str, LayerSpec]:
    """A specification for every pattern; a single format is that of the pattern ``*``."""
    check_choice("products", products, PRODUCTS)
    if not isinstance(formats, Mapping):
        formats = {"*": formats}
    if not formats:
        raise ValueError(
            "formats is empty: give a format, or a mapping from layer pattern to format"
        )
    for pattern in formats:
        if not isinstance(pattern, str):
            raise TypeError(f"formats has the key {pattern!r}: a layer pattern must be a string")
    if products != "decoded" and all(
        isinstance(value, LayerSpec) or is_none(value) for value in formats.values()
    ):
        raise ValueError(
            f"products={products!r} is for bare formats: give products to each LayerSpec instead"
        )
    return {
        pattern: _read_spec(pattern, value, granularity, products)
        for pattern, value in formats.items()
    }


def _read_spec(
    pattern: str, value: object, granularity: WeightGranularity, products: Products
) -> LayerSpec:
    if isinstance(value, LayerSpec):
        return value
    if is_none(value):
        return LayerSpec(granularity=granularity)
    if isinstance(value, str | FloatFormat):
        return LayerSpec(value, granularity=granularity, products=products)
    if not isinstance(value, Mapping):
        raise TypeError(
            f"formats[{pattern!r}] must be a format, a LayerSpec or a dict, not "
            f"{type(value).__name__}"
        )
    check_keys(f"formats[{pattern!r}]", value, _KEYS)
    spec = LayerSpec(**{"granularity": granularity, "products": products, **value})
    if "granularity" in value and (
        spec.weight is None or spec.weight.granularity or spec.weight.scale is not None
    ):
        raise ValueError(
            f"formats[{pattern!r}] has granularity={value['granularity']!r}, which is for a weight "
            f"that has neither "
            "granularity nor scale itself: leave it out, or give it to the operand that it is "
            "meant for"
        )
    return spec


def check_storage(storage: str, spec: LayerSpec, keep_remainder: bool) -> None:
    """Refuse options that a storage would ignore, and options of the layer that no
    operand takes under it.
    """
    weight = spec.operands.get("weight")
    granularity = None if weight is None else weight.granularity
    if granularity == "block" and storage == "grid":
        raise ValueError(
            f"granularity='block' needs storage='fp8' or 'master', not storage={storage!r}"
        )
    given = {
        "granularity='square'": granularity == "square",
        f"products={spec.products!r}": spec.products != "decoded",
    }
    for option, is_given in (given | {"keep_remainder=True": keep_remainder}).items():
        if is_given and storage != "fp8":
            raise ValueError(f"{option} needs storage='fp8', not storage={storage!r}")
    operands = {name: operand for name in OPERANDS if (operand := getattr(spec, name)) is not None}
    stored = operands.pop("weight", None) if storage != "master" else None
    for option in ("policy", "history", "rounding", "scale", "ste"):
        if (value := getattr(stored, option, None)) is not None:
            raise ValueError(
                f"weight has {option}={value!r}, which needs storage='master', not "
                f"storage={storage!r}: a stored "
                "weight has a static power-of-two scale, and is rounded when it is written"
            )
    for option in _CHOICES:
        value = getattr(spec, option)
        if value is not None and not any(
            _takes(name, operand, option) for name, operand in operands.items()
        ):
            instead = (
                ", or give storage='master'"
                if stored is not None and _takes("weight", stored, option)
                else ""
            )
            raise ValueError(
                f"the layer has {option}={value!r}, which no operand takes: the forward and "
                f"backward passes quantise {', '.join(operands) or 'none'} with "
                f"storage={storage!r}; leave {option} out{instead}"
            )


def _takes(name: str, operand: OperandSpec, option: str) -> bool:
    if option == "policy" and operand.scale is not None:
        return False
    return getattr(operand, option) is None and not (option == "ste" and name.endswith("gradient"))


def check_stored(draws: str, retraction: str, headroom: float | None, storage: str) -> None:
    """Refuse an unknown kind of draws or retraction, and options of stored weights where a master
    copy is kept.
    """
    check_choice("draws", draws, DRAWS)
    check_choice("retraction", retraction, RETRACTIONS)
    for option, is_given in (
        (f"{draws=}", draws != "independent"),
        (f"{retraction=}", retraction != "exponential"),
        (f"{headroom=}", headroom is not None),
    ):
        if is_given and storage == "master":
            raise ValueError(
                f"{option} needs storage='fp8' or 'grid', not {storage!r}: it is for stored weights"
            )


def check_blocks(
    operands: Mapping[OperandName, OperandSpec], in_features: int, out_features: int
) -> None:
    for name, operand in operands.items():
        length = out_features if name == "activation_gradient" else in_features
        if operand.granularity == "block" and length % BLOCK_SIZE:
            raise ValueError(
                f"granularity='block' of {name} needs rows whose length {BLOCK_SIZE} divides, not "
                f"{length}: "
                "take 'channel' or 'tensor'"
            )


def check_codes_fit(codes: FP8Tensor, linear: nn.Linear, spec: LayerSpec, storage: str) -> None:
    operand = spec.operands.get("weight")
    if storage != "fp8" or operand is None:
        raise ValueError(
            f"codes need storage='fp8' and a weight format, not {storage!r} with "
            f"weight={NONE if operand is None else operand.format.name}"
        )
    found = (tuple(codes.shape), codes.format.name, codes.granularity)
    shape = (linear.out_features, linear.in_features)
    wanted = (shape, operand.format.name, operand.granularity)
    if found != wanted:
        raise ValueError(
            f"codes are of (shape, format, granularity) {found}, and the layer's weight is {wanted}"
        )


def is_stored(weight: Tensor) -> TypeGuard[FP8Tensor]:
    """True for a weight in codes; a sharded one is refused."""
    if share_of(weight) is not None:
        raise RuntimeError(
            f"a weight of shape {tuple(weight.shape)} is sharded: call unshard() of the module "
            f"that fully_shard made, "
            "read it, and reshard()"
        )
    return isinstance(weight, FP8Tensor)
