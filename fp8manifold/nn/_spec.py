"""Specifications of a quantised layer: its operands' formats, scales and rounding.

An `OperandSpec` is what a caller gives for a weight, an activation or a gradient, and a
`LayerSpec` has four of them. Options that an operand leaves out are the layer's:
`LayerSpec.operand` returns them filled in. What is checked depends on what is known: a
specification checks itself, `check_storage` knows the storage, `check_blocks` and
`units_of` know the layer's size.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeGuard, get_args

from torch import Tensor, nn

from fp8manifold._base.checks import check_choice, check_int, check_keys, check_number
from fp8manifold._encoded.scaled import DRAWS
from fp8manifold._numerics.charts import RETRACTIONS, Retraction
from fp8manifold._ranks import share_of
from fp8manifold.fake_quant import STE, STES
from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.nn._scalers import HISTORY, POLICIES, Policy
from fp8manifold.random_bits import Draws
from fp8manifold.scaling import BLOCK_SIZE, WEIGHT_GRANULARITIES, WeightGranularity
from fp8manifold.tensor import FP8Tensor

#: The format that leaves an operand, or a pattern's layers, as they are.
NONE: Final = "none"
OperandName = Literal["weight", "activation", "activation_gradient", "weight_gradient"]
OPERANDS: Final[tuple[OperandName, ...]] = get_args(OperandName)
OperandRounding = Literal["nearest", "stochastic"]
GLOBAL: Final = "global"


@dataclass(frozen=True)
class OperandSpec:
    """The format and options of a weight, an activation or a gradient.

    Options that are None are taken from the layer.

    Args:
        format: a format or its name.
        granularity: one scale per ``tensor``, per ``channel`` (row: an output of a
            weight, a token of an activation or gradient), per ``block`` of 32 along a
            row (a power of two, E8M0), or, for stored weights, per ``square`` of 128 x
            128.
        policy: when the scale is measured, as in :class:`Scale`.
        history: the number of tensors for the policy ``delayed``, usually 16 to 100.
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
        format: FormatLike,  # noqa: A002
        granularity: WeightGranularity | None = None,
        policy: Policy | None = None,
        history: int | None = None,
        rounding: OperandRounding | None = None,
        scale: float | Literal["global"] | None = None,
        ste: STE | None = None,
    ) -> None:
        _set_fields(
            self,
            _OPERAND_CHOICES,
            format=as_format(format),
            granularity=granularity,
            policy=policy,
            history=history,
            rounding=rounding,
            scale=_read_scale(scale),
            ste=ste,
        )
        if scale is not None and policy is not None:
            raise ValueError(
                f"scale={scale!r} and policy={policy!r} both set the scale: give one of them"
            )
        if scale is not None and granularity not in (None, "tensor"):
            raise ValueError(
                f"scale={scale!r} is for the whole tensor, not for granularity={granularity!r}"
            )

    def filled(self, **defaults: Any) -> "OperandSpec":
        """Return a copy with the layer's values in place of options that are None.

        Args:
            defaults: the layer's values by name.

        Raises:
            ValueError: a history where the policy is not ``delayed``.
        """
        if self.scale is not None:
            defaults["policy"] = None
            defaults["granularity"] = "tensor"
        policy = self.policy or defaults["policy"]
        if policy != "delayed":
            if self.history is not None:
                raise ValueError(f"history={self.history} needs policy='delayed', not {policy!r}")
            defaults["history"] = None
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, **missing)


_OPERAND_CHOICES: Final = {
    "granularity": WEIGHT_GRANULARITIES,
    "policy": POLICIES,
    "rounding": get_args(OperandRounding),
    "ste": STES,
}
OperandLike = FormatLike | OperandSpec | Mapping[str, Any] | None


def _set_fields(spec: Any, choices: Mapping[str, tuple[str, ...]], /, **values: Any) -> None:
    """Set the fields of a frozen specification; check its choices and its history."""
    for name, value in values.items():
        object.__setattr__(spec, name, value)
    for name, allowed in choices.items():
        if values[name] is not None:
            check_choice(name, values[name], allowed)
    if values["history"] is not None:
        check_int("history", values["history"], 1, 2**20)


def _read_scale(scale: float | str | None) -> Any:
    if scale is None:
        return None
    if isinstance(scale, str):
        check_choice("scale", scale, (GLOBAL,))
        return scale
    check_number("scale", scale, 2.0**-126, 2.0**127)
    return float(scale)


def read_operand(name: str, value: OperandLike) -> OperandSpec | None:
    """Return the specification that a format, a mapping or a specification means.

    It is None if the operand is not quantised.
    """
    if isinstance(value, Mapping):
        check_keys(name, value, [field.name for field in fields(OperandSpec)])
        if is_none(value.get("format")):
            if set(value) - {"format"}:
                raise ValueError(f"{name} has options but no format: {dict(value)!r}")
            return None
        return OperandSpec(**value)
    if is_none(value):
        return None
    return value if isinstance(value, OperandSpec) else OperandSpec(value)  # type: ignore[arg-type]


def is_none(value: object) -> bool:
    """Return True for None and ``"none"``, which leave an operand or layer as it is."""
    return value is None or (isinstance(value, str) and value.lower() == NONE)


LayerRounding = Literal["nearest", "stochastic", "split"]
Products = Literal["decoded", "fp8", "int8", "auto"]
PRODUCTS: Final = get_args(Products)
GradientProducts = Literal["bfloat16", "fp8"]
Storage = Literal["codes", "grid", "master"]
STORAGES: Final[tuple[Storage, ...]] = get_args(Storage)
Units = Literal["fp8", "int8"]
#: The units that multiply the codes of a format as they are.
_UNITS: Final[dict[str, Units]] = {"E4M3": "fp8", "E5M2": "fp8", "E1M6": "int8"}
#: The units take matrices whose sizes this divides.
ALIGNMENT: Final = 16
#: The sum of so many products of two INT8 numbers (to ±127) always fits an int32.
_LONGEST_SUM: Final = (2**31 - 1) // 127**2
GradientLike = OperandLike | Mapping[str, OperandLike]


@dataclass(frozen=True)
class LayerSpec:
    """The formats of a linear layer's operands, and how these are quantised.

    An operand is a format, an :class:`OperandSpec`, a mapping of its arguments, or None
    or ``"none"`` (not quantised). Options that an operand does not give are taken from
    the layer.

    Args:
        weight, activation: operands: the weight, and the layer's input.
        granularity: which weights share a scale, as in :class:`OperandSpec`;
            activations and gradients have one scale per tensor.
        policy: when scales are measured, as in :class:`Scale`; None takes ``dynamic``.
        ste: the straight-through estimator of weight and activation, as in
            :func:`fake_quantize`; None takes ``identity``.
        gradient: an operand for both gradients, or a mapping with the keys
            ``activation`` (the gradient of the output) and ``weight``; they become
            ``activation_gradient`` and ``weight_gradient``.
        rounding: ``nearest`` (None), ``stochastic``, or ``split``: stochastic in the
            backward pass only.
        history: the number of tensors for the policy ``delayed``; None takes 16.
        products: what the matmul multiplies, with storage ``codes``. ``decoded``:
            values. ``fp8`` (E4M3, E5M2) and ``int8`` (E1M6): codes, on such units of
            the device; input and gradient are rounded to E4M3 or INT8, so results
            differ. ``auto``: codes if the device has fast units for them, otherwise
            values.
        gradient_products: ``bfloat16`` or ``fp8``: what the weight's gradient is
            computed in, with ``products`` on ``fp8`` units.

    Codes are multiplied if rows and columns are multiples of 16, with one scale per
    ``tensor`` or ``channel``, and without ``activation`` and ``gradient``. NaN or Inf
    in a row of the input makes its output NaN; in a gradient it makes both gradients
    NaN.

    Raises:
        TypeError, ValueError: a format or option that can't be read, or that would
            change nothing.

    Example:
        >>> gradient = {"activation": "E5M2"}
        >>> spec = LayerSpec("E4M3", "E4M3", gradient=gradient, rounding="split")
        >>> operand = spec.operand("activation_gradient")
        >>> operand.format.name, operand.rounding
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
    # of each instance, but no field: it follows from them
    _filled: ClassVar[dict[OperandName, OperandSpec | None]]

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
        weight_spec = read_operand("weight", weight)
        activation_spec = read_operand("activation", activation)
        gradients = _read_gradients(gradient)
        _set_fields(
            self,
            _CHOICES,
            weight=weight_spec,
            activation=activation_spec,
            activation_gradient=gradients.activation,
            weight_gradient=gradients.weight,
            granularity=granularity,
            policy=policy,
            ste=ste,
            rounding=rounding,
            history=history,
            products=products,
            gradient_products=gradient_products,
        )
        object.__setattr__(self, "_filled", {name: self._fill(name) for name in OPERANDS})
        self._check()

    @property
    def quantizes_nothing(self) -> bool:
        """Whether the layer stays as it is."""
        return all(getattr(self, name) is None for name in OPERANDS)

    def operand(self, name: OperandName) -> OperandSpec | None:
        """Return an operand's specification; None if it is not quantised.

        Every option that has a meaning is filled in.

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
        is_gradient = name.endswith("gradient")
        rounding = self.rounding or "nearest"
        if rounding == "split":
            rounding = "stochastic" if is_gradient else "nearest"
        return spec.filled(
            granularity=self.granularity if name == "weight" else "tensor",
            policy=self.policy or "dynamic",
            history=self.history or HISTORY,
            rounding=rounding,
            ste=None if is_gradient else self.ste or "identity",
        )

    def _check(self) -> None:
        for name, spec in self.operands.items():
            _check_operand(name, spec)
        has_delayed = any(spec.policy == "delayed" for spec in self.operands.values())
        if self.history is not None and not has_delayed:
            raise ValueError(
                f"history={self.history} needs an operand with policy='delayed', and there is none"
            )
        has_other_products = self.products in ("int8", "decoded") or self.units == "int8"
        if self.gradient_products == "fp8" and has_other_products:
            raise ValueError(
                f"gradient_products='fp8' needs products='fp8', not products={self.products!r} of "
                f"weight={_operand_format_name(self.weight)}"
            )
        # refuses products that no size could have
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


def _operand_format_name(operand: OperandSpec | None) -> str:
    return NONE if operand is None else operand.format.name


def _check_operand(name: OperandName, spec: OperandSpec) -> None:
    is_gradient = name.endswith("gradient")
    if is_gradient and spec.ste is not None:
        raise ValueError(
            f"{name} has ste={spec.ste!r}: a gradient is quantised in the backward pass and has "
            "none"
        )
    if not is_gradient and spec.scale == GLOBAL:
        raise ValueError(
            f"{name} has scale='global', which is for gradients: give a number, or leave it out"
        )
    if name != "weight" and spec.granularity == "square":
        raise ValueError(
            f"{name} has granularity='square', which is for weights: take 'tensor', 'channel' or "
            "'block'"
        )
    has_rows_of_batch = name in ("activation", "activation_gradient")
    if has_rows_of_batch and spec.granularity != "tensor" and spec.policy != "dynamic":
        raise ValueError(
            f"{name} has granularity={spec.granularity!r} with policy={spec.policy!r}: its rows "
            "change from batch to batch, so take policy='dynamic' or granularity='tensor'"
        )


class _Gradients(NamedTuple):
    """Operands of the gradients of a layer's output and of its weight."""

    activation: OperandSpec | None
    weight: OperandSpec | None


def _read_gradients(gradient: GradientLike) -> _Gradients:
    if not isinstance(gradient, Mapping) or "format" in gradient:
        operand = read_operand("gradient", gradient)
        return _Gradients(operand, operand)
    names = [name for name in gradient if name in _GRADIENTS]
    if not names:
        options = [field.name for field in fields(OperandSpec)]
        check_keys("gradient", gradient, [*_GRADIENTS, *options])
        raise ValueError(f"gradient has options but no format: {dict(gradient)!r}")
    check_keys("gradient", gradient, _GRADIENTS)
    return _Gradients(
        activation=read_operand("gradient.activation", gradient.get("activation")),
        weight=read_operand("gradient.weight", gradient.get("weight")),
    )


def why_decoded(spec: LayerSpec, in_features: int, out_features: int) -> str:
    """Return why codes of such a weight can't be multiplied as they are, or ""."""
    return _why_formats_decoded(spec) or _why_shape_decoded(spec, in_features, out_features)


def _why_formats_decoded(spec: LayerSpec) -> str:
    units = spec.units
    if units is None:
        return f"no units multiply codes of weight={_operand_format_name(spec.weight)}"
    weight = spec.operands["weight"]
    if spec.products not in (units, "auto"):
        return f"codes of {weight.format.name} take products={units!r}"
    if weight.granularity not in ("tensor", "channel"):
        return f"the weight has granularity={weight.granularity!r}, not 'tensor' or 'channel'"
    for name, operand in spec.operands.items():
        if name != "weight":
            return f"{name}={operand.format.name} is given"
    return ""


def _why_shape_decoded(spec: LayerSpec, in_features: int, out_features: int) -> str:
    if not in_features or not out_features:
        return "there is nothing to multiply"
    for size in (in_features, out_features):
        if size % ALIGNMENT:
            return f"{ALIGNMENT} does not divide {size}"
    longest = max(in_features, out_features)
    if spec.units == "int8" and longest > _LONGEST_SUM:
        return f"a sum of {longest} products may be beyond 32 bits"
    return ""


def units_of(spec: LayerSpec, in_features: int, out_features: int) -> Units | None:
    """Return the units that multiply codes of that shape; None decodes the codes.

    Whether a device has them is for :func:`fp8manifold.nn._products.units_on`.

    Raises:
        ValueError: codes that the specification demands to multiply can't be.
    """
    if spec.products == "decoded":
        return None
    reason = why_decoded(spec, in_features, out_features)
    if not reason:
        return spec.units
    if spec.products == "auto":
        return None
    raise ValueError(
        f"products={spec.products!r}: {reason}; take products='decoded' or 'auto' there"
    )


def read_formats(
    formats: Formats, granularity: WeightGranularity, products: Products = "decoded"
) -> dict[str, LayerSpec]:
    """Return a specification for every pattern.

    A single format is that of the pattern ``*``.
    """
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
    has_bare_formats = any(
        not isinstance(value, LayerSpec) and not is_none(value) for value in formats.values()
    )
    if products != "decoded" and not has_bare_formats:
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
    arguments: dict[str, Any] = {"granularity": granularity, "products": products}
    arguments.update(value)
    spec = LayerSpec(**arguments)
    weight = spec.weight
    takes_granularity = weight is not None and not weight.granularity and weight.scale is None
    if "granularity" in value and not takes_granularity:
        raise ValueError(
            f"formats[{pattern!r}] has granularity={value['granularity']!r}, which is for a weight "
            "that has neither granularity nor scale itself: leave it out, or give it to the "
            "operand that it is meant for"
        )
    return spec


def check_storage_name(storage: object) -> None:
    """Raise ValueError for an unknown storage, and for the former name of one."""
    if storage == "fp8":
        raise ValueError("storage='fp8' is now called storage='codes' (one byte, of any format)")
    check_choice("storage", storage, STORAGES)


def check_storage(storage: Storage, spec: LayerSpec, keep_remainder: bool) -> None:
    """Refuse options that a storage would ignore.

    Options of the layer that no operand takes under this storage are refused too.
    """
    weight = spec.operands.get("weight")
    granularity = None if weight is None else weight.granularity
    if granularity == "block" and storage == "grid":
        raise ValueError(
            f"granularity='block' needs storage='codes' or 'master', not storage={storage!r}"
        )
    options_of_codes = []
    if granularity == "square":
        options_of_codes.append("granularity='square'")
    if spec.products != "decoded":
        options_of_codes.append(f"products={spec.products!r}")
    if keep_remainder:
        options_of_codes.append("keep_remainder=True")
    if options_of_codes and storage != "codes":
        raise ValueError(f"{options_of_codes[0]} needs storage='codes', not storage={storage!r}")
    operands = _operands_as_given(spec)
    stored_weight = None
    if storage != "master":
        stored_weight = operands.pop("weight", None)
    if stored_weight is not None:
        _check_stored_weight(storage, stored_weight)
    for option in _CHOICES:
        _check_option_is_taken(option, storage, spec, operands, stored_weight)


def _operands_as_given(spec: LayerSpec) -> dict[OperandName, OperandSpec]:
    """Return the quantised operands, without the layer's options filled in."""
    operands = {}
    for name in OPERANDS:
        operand: OperandSpec | None = getattr(spec, name)
        if operand is not None:
            operands[name] = operand
    return operands


def _check_stored_weight(storage: Storage, weight: OperandSpec) -> None:
    for option in ("policy", "history", "rounding", "scale", "ste"):
        value = getattr(weight, option)
        if value is not None:
            raise ValueError(
                f"weight has {option}={value!r}, which needs storage='master', not "
                f"storage={storage!r}: a stored weight has a static power-of-two scale, and is "
                "rounded when it is written"
            )


def _check_option_is_taken(
    option: str,
    storage: Storage,
    spec: LayerSpec,
    operands: Mapping[OperandName, OperandSpec],
    stored_weight: OperandSpec | None,
) -> None:
    """Refuse an option of the layer that none of the operands of its passes takes."""
    value = getattr(spec, option)
    if value is None:
        return
    if any(_takes(name, operand, option) for name, operand in operands.items()):
        return
    alternative = ""
    if stored_weight is not None and _takes("weight", stored_weight, option):
        alternative = ", or give storage='master'"
    raise ValueError(
        f"the layer has {option}={value!r}, which no operand takes: the forward and "
        f"backward passes quantise {', '.join(operands) or 'none'} with "
        f"storage={storage!r}; leave {option} out{alternative}"
    )


def _takes(name: OperandName, operand: OperandSpec, option: str) -> bool:
    """Return True if an operand leaves an option to the layer, and has a use for it."""
    if option == "policy" and operand.scale is not None:
        return False
    if option == "ste" and name.endswith("gradient"):
        return False
    return getattr(operand, option) is None


def check_stored_weight_options(
    draws: Draws, retraction: Retraction, headroom: float | None, storage: Storage
) -> None:
    """Refuse an unknown kind of draws or retraction.

    Options of stored weights are refused where a master copy is stored.
    """
    check_choice("draws", draws, DRAWS)
    check_choice("retraction", retraction, RETRACTIONS)
    if storage != "master":
        return
    options = []
    if draws != "independent":
        options.append(f"{draws=}")
    if retraction != "exponential":
        options.append(f"{retraction=}")
    if headroom is not None:
        options.append(f"{headroom=}")
    if options:
        raise ValueError(
            f"{options[0]} needs storage='codes' or 'grid', not {storage!r}: it is for stored "
            "weights"
        )


def check_blocks(
    operands: Mapping[OperandName, OperandSpec], in_features: int, out_features: int
) -> None:
    """Refuse blocks along rows that they do not fill."""
    for name, operand in operands.items():
        length = out_features if name == "activation_gradient" else in_features
        if operand.granularity == "block" and length % BLOCK_SIZE:
            raise ValueError(
                f"granularity='block' of {name} needs rows whose length {BLOCK_SIZE} divides, not "
                f"{length}: take 'channel' or 'tensor'"
            )


def check_codes_fit(codes: FP8Tensor, linear: nn.Linear, spec: LayerSpec, storage: Storage) -> None:
    """Refuse codes that are not those of a layer's weight."""
    operand = spec.operands.get("weight")
    if storage != "codes" or operand is None:
        raise ValueError(
            f"codes need storage='codes' and a weight format, not {storage!r} with "
            f"weight={_operand_format_name(operand)}"
        )
    properties = (tuple(codes.shape), codes.format.name, codes.granularity)
    shape = (linear.out_features, linear.in_features)
    needed = (shape, operand.format.name, operand.granularity)
    if properties != needed:
        raise ValueError(
            f"codes have (shape, format, granularity) {properties}, but the layer's weight has "
            f"{needed}"
        )


def is_stored(weight: Tensor) -> TypeGuard[FP8Tensor]:
    """Return True for a weight in codes; a sharded one is refused."""
    if share_of(weight) is not None:
        raise RuntimeError(
            f"a weight of shape {tuple(weight.shape)} is sharded: call unshard() of the module "
            "that fully_shard made, read it, and reshard()"
        )
    return isinstance(weight, FP8Tensor)
