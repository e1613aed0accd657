"""The quantised linear layer.

A forward pass takes one of three ways.

1. Codes are multiplied as they are, on FP8 or INT8 units: `linear_from_codes`.
2. The weight is in codes and nothing else is quantised: `linear` decodes them for the
   product.
3. Otherwise the weight (with ``storage="master"``) and the input are fake-quantised,
   each at the scale of its scaler, and the gradients are rounded in the backward pass.

A layer with stochastic rounding counts its passes in the buffer ``draws``, so that
every pass draws other bits. What a state dict has of the weight is in `_parts` for
codes, and in `_grid_weight` for ``storage="grid"``.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from fp8manifold._base.checks import check_number
from fp8manifold._base.reading import (
    advance,
    eager_only,
    has_values,
    is_exporting,
    read_cached,
    refuse_trace,
)
from fp8manifold._encoded.dispatch import is_backward
from fp8manifold._encoded.scaled import WriteRounding
from fp8manifold._encoded.storage import expand_scale
from fp8manifold._numerics.charts import Retraction
from fp8manifold._published.find_weights import FLOATS
from fp8manifold.fake_quant import quantize_at
from fp8manifold.formats import FloatFormat
from fp8manifold.grid import encode
from fp8manifold.manifolds import FP8Manifold
from fp8manifold.nn import _grid_weight, _spec
from fp8manifold.nn._parts import gather_parts, holds_codes, is_in_codes, name_parts, write_parts
from fp8manifold.nn._products import (
    GradientRounding,
    byte_weight,
    forbid_fused_operators,
    linear,
    linear_from_codes,
    linear_with_rounded_gradients,
    over_nested,
    round_gradient,
    rounded_input,
    scaler_of,
    units_on,
)
from fp8manifold.nn._scalers import Scaler, SharedAmax, announce_gradients
from fp8manifold.nn._selection import linear_around, linear_of
from fp8manifold.parameter import FP8Parameter
from fp8manifold.random_bits import DrawKey, Draws
from fp8manifold.scaling import BLOCK_SIZE, WeightGranularity
from fp8manifold.tensor import FP8Tensor

#: Streams of the operands' rounding: far from those that optimizers use.
_STREAMS: Final = {name: 2**32 + index for index, name in enumerate(_spec.OPERANDS)}
_IS_OLD_TORCH: Final = torch.__version__.startswith("2.8.")
_IN_A_GRAPH: Final = "take policy='dynamic', rounding='nearest', no gradient format, and torch 2.13"


class QuantizedLinear(nn.Linear):
    r"""A linear layer with weights of one byte.

    .. math:: y = Q_x(x) \, Q_W(W)^T + b, \qquad
              g_x = Q_g(g_y) \, Q_W(W), \qquad g_W = Q_{gW}\left( Q_g(g_y)^T Q_x(x) \right)

    With storage ``codes`` the weight is an :class:`FP8Parameter`, one byte per weight;
    with ``grid`` a ``geoopt.ManifoldParameter`` on an :class:`FP8Manifold`, the same
    values in floats; with ``master`` (quantisation-aware training) a float parameter,
    fake-quantised in the forward pass. A gradient that contains Inf or NaN becomes NaN
    as a whole, so that saturation does not hide it. Inf and NaN in the input are
    treated as in :func:`fake_quantize`. -0 is preserved if the layout has it, and an
    empty batch has an empty output.

    Args:
        linear: the layer to replace; its bias parameter is reused, and with storage
            ``master`` its weight too.
        spec: formats and options.
        storage: ``codes``, ``grid`` or ``master``.
        headroom: how many times stored weights may grow, as in :func:`quantize_model`.
        rounding: how stored weights are rounded, as in :func:`quantize_model`.
        seed: key of the random bits of stored weights and of stochastic rounding in the
            two passes; every layer needs another one.
        keep_remainder: with ``codes``, store the remainder of rounding the weights,
            with which an optimizer's residuals begin; fine-tuning needs it.
        defer_weight_gradient: leave the weight's gradient in float for
            :meth:`quantize_weight_gradient`.
        global_with: a layer whose gradients under ``scale="global"`` share their
            magnitude with this one's.
        draws: random draws for stored weights, as in :func:`quantize_model`.
        retraction: the path of Riemannian steps, as in :func:`quantize_model`.
        codes: with storage ``codes``, a weight that is in codes already, in the
            specification's format and granularity. It is used without a copy, and gets
            ``seed``; only the shape of ``linear.weight`` is used then.

    The modules ``weight_scaler``, ``activation_scaler``, ``activation_gradient_scaler``
    and ``weight_gradient_scaler`` have the scales, as ``value``. They are None for
    stored weights and operands that are not quantised. An empty forward pre-hook
    prevents the fused operators of ``nn.TransformerEncoderLayer``.

    Under activation checkpointing a repeated pass gives the same bits. A layer that
    draws random bits or delays its scales refuses to repeat a pass.

    Raises:
        TypeError: ``linear`` is not an ``nn.Linear``; a weight of a dtype that the
            storage or its format does not have.
        ValueError: an unknown storage, weights that are not finite, or an option that
            the storage does not have.
        RuntimeError: ``products`` that the device lacks; ``grid`` in a FakeTensorMode;
            in a call, a repeated pass whose bits would differ, or a weight that is no
            longer in codes.

    Example:
        >>> from fp8manifold import LayerSpec
        >>> spec = LayerSpec("E4M3", gradient="E5M2")
        >>> layer = QuantizedLinear(nn.Linear(4, 2), spec, "grid")
        >>> layer(torch.zeros(1, 4)).shape, layer.weight_codes().dtype
        (torch.Size([1, 2]), torch.uint8)

    Source: Micikevicius et al. 2022 (FP8 Formats for Deep Learning); Jacob et al. 2018
    (quantisation-aware training).
    """

    # the attribute `TAKES_PARTS` of `_parts`: this class saves and loads parts itself
    _fp8_takes_parts = True
    # The count of passes in training that drew bits. It is there if an operand is
    # rounded stochastically. The option `draws` is another thing, of stored weights.
    draws: Tensor
    weight_scaler: Scaler | None
    activation_scaler: Scaler | None
    activation_gradient_scaler: Scaler | None
    weight_gradient_scaler: Scaler | None

    def __init__(
        self,
        linear: nn.Linear,
        spec: _spec.LayerSpec,
        storage: _spec.Storage = "codes",
        *,
        headroom: float | None = None,
        rounding: WriteRounding = "stochastic",
        seed: int = 0,
        keep_remainder: bool = False,
        defer_weight_gradient: bool = False,
        global_with: Self | None = None,
        draws: Draws = "independent",
        retraction: Retraction = "exponential",
        codes: FP8Parameter | None = None,
    ) -> None:
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be an nn.Linear, not {type(linear).__name__}")
        _spec.check_storage_name(storage)
        _spec.check_storage(storage, spec, keep_remainder)
        _spec.check_stored_weight_options(draws, retraction, headroom, storage)
        if codes is not None:
            _spec.check_codes_fit(codes, linear, spec, storage)
        if headroom is not None:
            check_number("headroom", headroom, 1.0, open_high=True)
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.spec = spec
        self.storage = storage
        self.shared_amax: SharedAmax | None = None
        self.manifold: FP8Manifold | None = None
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self._headroom = headroom
        self._keep_remainder = keep_remainder
        self._seed = seed
        self._defers_weight_gradient = defer_weight_gradient
        name_parts(self, "weight")
        self._operands = spec.operands
        _spec.check_blocks(self._operands, linear.in_features, linear.out_features)
        self._units = _spec.units_of(spec, linear.in_features, linear.out_features)
        # refuses a device that lacks units which the specification demands
        units_on(self._units, spec, linear.weight.device)
        if codes is None:
            self._take_weight(
                linear.weight, rounding=rounding, seed=seed, draws=draws, retraction=retraction
            )
        else:
            codes.seed = seed
            self.weight = codes
        self._make_scalers(None if global_with is None else global_with.shared_amax)
        if any(operand.rounding == "stochastic" for operand in self._operands.values()):
            self.register_buffer("draws", torch.zeros((), dtype=torch.int64))
        forbid_fused_operators(self)
        self.train(linear.training)
        # what the layer has besides these was added by other code, and `_carried` gives
        # it to the layer that takes this one's place
        self._own_names = frozenset({*vars(self), *self._buffers, *self._modules, "_own_names"})

    @property
    def weight_format(self) -> FloatFormat | None:
        """The weight's format, or None."""
        return None if self.spec.weight is None else self.spec.weight.format

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # nn.Linear's own name
        """Return ``Q_a(x) Q_w(W)^T + b``, in the dtype of an ``nn.Linear``.

        Under autocast that is autocast's dtype.
        """
        if input.is_nested:
            return over_nested(self.forward, input)
        if self._units is not None:
            # Newer releases hold products in a graph, to which a question would add a guard.
            if _IS_OLD_TORCH:
                self._break_graph()
            units = units_on(self._units, self.spec, input.device)
            if units is not None:
                return linear_from_codes(input, self.weight, self.bias, units, self.spec)
        # read from the dictionary: attribute access looks there last
        parameters = self._parameters
        weight_parameter = parameters.get("weight")
        has_scalers = (
            self.weight_scaler is not None
            or self.activation_scaler is not None
            or self.activation_gradient_scaler is not None
            or self.weight_gradient_scaler is not None
        )
        # a parametrised bias is no parameter
        has_bias_entry = "bias" in parameters
        if type(weight_parameter) is FP8Parameter and has_bias_entry and not has_scalers:
            # nothing is drawn, remembered or announced
            return linear(input, weight_parameter, parameters["bias"])
        return self._fake_quantized_forward(input)

    def _fake_quantized_forward(self, x: Tensor) -> Tensor:
        """Return the output for a quantised weight, input or gradient."""
        self._break_graph()
        if self.weight_scaler is not None or self.activation_scaler is not None:
            refuse_trace()
        pass_number, is_repeated = self._begin_pass()
        weight: Tensor = self.weight
        is_stored = self.storage != "master" and self.spec.weight is not None
        if is_stored and not torch.compiler.is_compiling():
            _grid_weight.check_kept(self)
        if self.weight_scaler is not None:
            scale = self._scale_of(self.weight_scaler, weight, is_repeated)
            weight = self._fake_quantized("weight", weight, scale, pass_number)
        quantized = x
        if self.activation_scaler is not None:
            rows = self._rows(x)
            scale = self._scale_of(self.activation_scaler, rows, is_repeated)
            quantized = self._fake_quantized("activation", rows, scale, pass_number).view(x.shape)
        round_weight_gradient = None
        if not self._defers_weight_gradient:
            round_weight_gradient = self._gradient_rounding("weight_gradient", pass_number)
        round_output_gradient = self._gradient_rounding("activation_gradient", pass_number)
        rounds_nothing = round_output_gradient is None and round_weight_gradient is None
        if rounds_nothing or not torch.is_grad_enabled():
            return linear(quantized, weight, self.bias)
        if self.training and not is_repeated:
            announce_gradients(self, x)
        return linear_with_rounded_gradients(
            quantized, weight, self.bias, round_output_gradient, round_weight_gradient
        )

    def quantized_input(self, x: Tensor) -> Tensor:
        """Return what the last forward pass multiplied in place of its input ``x``."""
        units = units_on(self._units, self.spec, self.weight.device)
        if units is not None:
            return rounded_input(x, units)
        if self.activation_scaler is None:
            return x
        scale = self.activation_scaler.value
        rows = self._fake_quantized("activation", self._rows(x), scale, self._last_pass())
        return rows.view(x.shape)

    def quantized_weight(self) -> Tensor:
        """Return the weight that the next forward pass multiplies; differentiable."""
        if self.weight_scaler is None:
            return self.weight
        scale = self.weight_scaler.preview(self.weight)
        return self._fake_quantized("weight", self.weight, scale, self._next_pass())

    @torch.no_grad()
    def quantize_weight_gradient(self) -> None:
        """Quantise the weight's gradient of one backward pass, if that was deferred."""
        rounding = self._gradient_rounding("weight_gradient", self._last_pass())
        gradient = self.weight.grad
        if self._defers_weight_gradient and rounding is not None and gradient is not None:
            self.weight.grad = rounding(gradient.float()).to(gradient.dtype)

    def weight_scale(self) -> Tensor:
        """Return the scale of the weight, broadcasting against it.

        It is 1 for a weight that is not quantised.
        """
        if _spec.is_stored(self.weight):
            return self.weight.expanded_scale()
        if self.manifold is not None:
            return self.manifold.scale
        if self.weight_scaler is None:
            return torch.ones((), device=self.weight.device)
        scale = self.weight_scaler.preview(self.weight)
        if self._operands["weight"].granularity == "block":
            return expand_scale(scale, BLOCK_SIZE, self.weight.shape)
        return scale

    def weight_codes(self) -> Tensor:
        """Return the codes of the quantised weight, uint8 in its shape.

        Raises:
            ValueError: the weight is not quantised, or holds a NaN that its format has
                no code for.
        """
        if self.weight_format is None:
            raise ValueError(
                "this layer has weight=None: only a weight with a format has codes; see spec"
            )
        if _spec.is_stored(self.weight):
            return self.weight.codes.clone()
        _grid_weight.warn_off_grid(self)
        return encode(self.quantized_weight().detach() / self.weight_scale(), self.weight_format)

    def extra_repr(self) -> str:
        """Return the line of ``nn.Linear``, with formats and storage."""
        return f"{super().extra_repr()}, {self._described_formats()}"

    def _described_formats(self) -> str:
        """Return formats and storage, and the options that are not the defaults."""
        settings: dict[str, str] = {
            name: self._operands[name].format.name if name in self._operands else _spec.NONE
            for name in _spec.OPERANDS
        }
        # gradients are rarely quantised
        for name in ("activation_gradient", "weight_gradient"):
            if settings[name] == _spec.NONE:
                del settings[name]
        settings["storage"] = self.storage
        holder = self.weight if isinstance(self.weight, FP8Tensor) else self.manifold
        options = {
            "draws": getattr(holder, "draws", "independent"),
            "retraction": getattr(holder, "retraction", "exponential"),
            "gradient_products": self.spec.gradient_products,
            "products": self.spec.products,
        }
        defaults = {
            "draws": "independent",
            "retraction": "exponential",
            "gradient_products": "bfloat16",
            "products": "decoded",
        }
        for name, value in options.items():
            if value != defaults[name]:
                settings[name] = value
        return ", ".join(f"{name}={value}" for name, value in settings.items())

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; codes must be those that the layer is made for.

        Raises:
            ValueError: a weight in codes of another format, granularity or shape than
                the specification's, or in a layer whose storage has none.
        """
        # while the layer is made it has no weight yet
        if name == "weight" and isinstance(param, FP8Tensor) and "_own_names" in vars(self):
            _spec.check_codes_fit(param, self, self.spec, self.storage)
        super().register_parameter(name, param)

    def _take_weight(self, weight: Tensor, **options: Any) -> None:
        """Store the weight; options are its rounding, seed, draws and retraction."""
        operand = self._operands.get("weight")
        if operand is None:
            return
        if weight.dtype not in FLOATS:
            raise TypeError(
                f"a weight has dtype {weight.dtype}: float64, float32, float16 or bfloat16 is "
                f"needed"
            )
        if has_values(weight) and not bool(weight.isfinite().all()):
            raise ValueError(
                f"a weight of shape {tuple(weight.shape)} holds NaN or Inf: it can't be quantised"
            )
        if self.storage == "grid":
            self.weight, self.manifold = _grid_weight.grid_weight(
                weight, operand.format, self._weight_granularity, self._headroom, **options
            )
        elif self.storage == "codes":
            self.weight = self._in_codes(weight, operand.format, **options)

    def _make_scalers(self, shared: SharedAmax | None) -> None:
        """Make a scaler for every operand whose scale is not stored with it."""
        has_global = any(operand.scale == _spec.GLOBAL for operand in self._operands.values())
        if has_global and shared is None:
            shared = SharedAmax()
            self.shared_amax = shared
        for name in _spec.OPERANDS:
            is_stored = name == "weight" and self.storage != "master"
            operand = self._operands.get(name)
            scaler = None if is_stored or operand is None else scaler_of(operand, shared)
            setattr(self, f"{name}_scaler", scaler)

    def _rows(self, x: Tensor) -> Tensor:
        """Return an input as a matrix if each of its rows has a scale."""
        if self._operands["activation"].granularity == "channel":
            return x.reshape(-1, x.shape[-1])
        return x

    def _scale_of(self, scaler: Scaler, x: Tensor, is_repeated: bool) -> Tensor:
        """Return the scale of a tensor; a repeated pass remembers nothing."""
        scale: Tensor = scaler.preview(x) if is_repeated else scaler(x)
        return scale

    def _fake_quantized(
        self, name: _spec.OperandName, x: Tensor, scale: Tensor, pass_number: int
    ) -> Tensor:
        operand = self._operands[name]
        return quantize_at(
            x,
            scale,
            operand.format,
            operand.ste or "identity",
            operand.rounding or "nearest",
            self._key(name, pass_number),
            blocks=operand.granularity == "block",
        )

    def _gradient_rounding(self, name: _spec.OperandName, pass_number: int) -> GradientRounding:
        """Return the function that rounds a gradient, or None if it has no format."""
        scaler: Scaler | None = getattr(self, f"{name}_scaler")
        if scaler is None:
            return None
        return partial(
            round_gradient,
            scaler=scaler,
            operand=self._operands[name],
            key=self._key(name, pass_number),
        )

    def _key(self, name: _spec.OperandName, pass_number: int) -> DrawKey:
        return DrawKey((self._seed, pass_number, _STREAMS[name]))

    def _break_graph(self) -> None:
        """End a graph of torch.compile before a layer that it can't hold.

        ``fullgraph=True`` raises the reason.
        """
        if not torch.compiler.is_compiling() or is_exporting():
            return
        reason = self._why_no_graph()
        if reason:
            torch._dynamo.graph_break(msg=f"{reason}: leave fullgraph=True out, or {_IN_A_GRAPH}")

    def _why_no_graph(self) -> str:
        """Return why torch.compile can't hold the layer in a graph, or ""."""
        # asked first, so that other releases of torch guard nothing for it
        if _IS_OLD_TORCH and not self._has_only_stored_weights():
            return "torch 2.8 has no graph of a quantised layer with more than stored weights"
        for scaler in (self.weight_scaler, self.activation_scaler):
            if scaler is not None and getattr(scaler, "policy", "") == "static":
                return "no graph can hold a static scale, which the first tensor sets"
            if scaler is not None and scaler.remembers and self.training:
                return "no graph can hold a delayed scale, which remembers tensors"
        if self.training and hasattr(self, "draws"):
            return "no graph can hold stochastic rounding, which counts passes"
        gradients = (self.activation_gradient_scaler, self.weight_gradient_scaler)
        if torch.is_grad_enabled() and gradients != (None, None):
            return "no graph can hold a format of gradients, which is measured in the backward pass"
        return ""

    def _has_only_stored_weights(self) -> bool:
        return self.storage != "master" and self._units is None and self.activation_scaler is None

    def _next_pass(self) -> int:
        """Return the number of the next forward pass; 0 if no bits are drawn in it."""
        draws = getattr(self, "draws", None)
        return 0 if draws is None else int(read_cached(draws, Tensor.item))

    def _last_pass(self) -> int:
        """Return the number of the last forward pass; evaluation does not count."""
        pass_number = self._next_pass()
        return max(pass_number - 1, 0) if self.training else pass_number

    def _begin_pass(self) -> tuple[int, bool]:
        """Count a forward pass.

        Returns:
            Its number, and whether activation checkpointing repeats an earlier pass, to
            the same bits.
        """
        is_repeated = False
        draws_bits = hasattr(self, "draws")
        scalers = (self.weight_scaler, self.activation_scaler)
        remembers = any(scaler is not None and scaler.remembers for scaler in scalers)
        if self.training and (draws_bits or remembers):
            self._refuse_repetition()
        else:
            is_repeated = not torch.compiler.is_compiling() and is_backward()
        pass_number = self._next_pass()
        if self.training and draws_bits:
            advance(self.draws, pass_number)
        return pass_number, is_repeated

    # a graph would have one answer, whether or not it is run again
    @eager_only
    def _refuse_repetition(self) -> None:
        if is_backward() and torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(self).__name__}({self.extra_repr()}) runs again in a backward pass, where "
                "random bits or delayed scales would differ: leave it out of activation "
                "checkpointing, or take rounding='nearest' and policy='dynamic'; if this pass is "
                "no recomputation, run it under torch.no_grad()"
            )

    def _in_codes(self, weight: Tensor, fmt: FloatFormat, **options: Any) -> FP8Parameter:
        return byte_weight(
            weight,
            fmt,
            granularity=self._weight_granularity,
            headroom=self._headroom,
            keep_remainder=self._keep_remainder,
            **options,
        )

    def _encoded(self, values: Tensor, weight: FP8Tensor) -> FP8Parameter:
        """Return floats in codes like the layer's own weight.

        They have its format, rounding, seed, draws and retraction.
        """
        return self._in_codes(
            values,
            weight.format,
            rounding=weight.rounding,
            seed=weight.seed,
            draws=weight.draws,
            retraction=weight.retraction,
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weight and bias again as ``nn.Linear`` does, at a fresh scale.

        Counts and measured scales are reset. Memory without values is filled too
        (``Module.to_empty``).
        """
        fresh = nn.Linear(
            self.in_features,
            self.out_features,
            bias=self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        if self.bias is not None:
            self.bias.copy_(fresh.bias)
        if isinstance(self.weight, FP8Parameter):
            weight = self._encoded(fresh.weight, self.weight)
            self.weight.adopt(weight)
            self.weight.counter.zero_()
            self.weight.remainder = weight.remainder
        elif self.manifold is not None:
            _grid_weight.renew_grid_weight(self, fresh.weight)
        else:
            self.weight.copy_(fresh.weight)
        for module in self.children():
            if isinstance(module, Scaler | SharedAmax):
                module.reset_parameters()
        if hasattr(self, "draws"):
            self.draws.zero_()

    @property
    def _weight_granularity(self) -> WeightGranularity:
        granularity = self._operands["weight"].granularity
        assert granularity is not None, "an operand's options are filled in"
        return granularity

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Refuse a dtype that stored weights can't have, before anything has changed.

        A graph that holds them is refused too.
        """
        dtype = fn(torch.empty(0, dtype=self.weight.dtype, device=self.weight.device)).dtype
        if isinstance(self.weight, FP8Tensor) and dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(
                f"a layer with storage='codes' can't be {dtype}: take float32 or bfloat16"
            )
        if self.manifold is not None:
            _grid_weight.check_dtype_holds(self.manifold, dtype)

        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if not isinstance(self.weight, FP8Tensor) or "Couldn't swap" not in str(error):
                raise
            raise RuntimeError(
                f"a layer with storage='codes' can't be moved ({self.extra_repr()}) while a graph "
                "or a weak reference holds its weight: finish the backward pass, or delete outputs "
                "and losses, and then move the layer"
            ) from error
        _grid_weight.keep_on_manifold(self)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        _grid_weight.warn_off_grid(self)
        write_parts(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take what hooks have made of the state: codes as they are, floats rounded."""
        error_messages: list[str] = args[-1]
        # the hooks run before the state is prepared, and not again in torch's method
        hooks = self._load_state_dict_pre_hooks
        self._load_state_dict_pre_hooks = OrderedDict()
        try:
            for hook in hooks.values():
                hook(state_dict, prefix, *args)
            refusal = self._prepare_state(state_dict, prefix)
            if refusal is not None:
                error_messages.append(refusal)
            else:
                super()._load_from_state_dict(state_dict, prefix, *args)
                _grid_weight.keep_on_manifold(self)
        finally:
            self._load_state_dict_pre_hooks = hooks

    def _prepare_state(self, state_dict: dict[str, Any], prefix: str) -> str | None:
        """Convert the saved weight to this storage; or return why it can't be."""
        weight = self.weight
        try:
            for name, parameter in self._parameters.items():
                if parameter is not None and (name == "weight" or is_in_codes(parameter)):
                    gather_parts(state_dict, prefix + name, parameter)
        except ValueError as error:
            return str(error)
        # nanogpt_bench may have put the weight on a StiffnessManifold, which has every value
        if isinstance(self.manifold, FP8Manifold):
            return _grid_weight.prepare_grid_state(self, state_dict, prefix)
        key = f"{prefix}weight"
        saved = state_dict.get(key)
        if not isinstance(weight, FP8Tensor) or not isinstance(saved, Tensor):
            return None
        if not isinstance(saved, FP8Tensor):
            state_dict[key] = self._encoded(saved.detach().to(weight.dtype), weight)
        elif saved.format != weight.format:
            return (
                f"{key} is in {saved.format.name}, but this layer's weight is in "
                f"{weight.format.name}"
            )
        return None


class QuantizedConv1D(QuantizedLinear):
    """A :class:`QuantizedLinear` in place of a ``Conv1D``.

    A ``Conv1D`` has a weight ``(in, out)``. This layer's weight is ``(out, in)``, a row
    and a scale per output; float weights in a state dict are ``(in, out)``.
    """

    def __init__(
        self,
        conv: nn.Module,
        spec: _spec.LayerSpec,
        storage: _spec.Storage = "codes",
        **options: Any,
    ) -> None:
        old: Any = conv
        if options.get("codes") is None:
            linear = linear_of(old)
        else:
            linear = linear_around(torch.empty(old.nf, old.nx, device="meta"), old)
        super().__init__(linear, spec, storage, **options)
        self._restores = type(conv)
        self.nf = self.out_features
        self.nx = self.in_features
        self._own_names |= {"_restores", "nf", "nx"}

    def restored(self, values: Tensor) -> nn.Module:
        """Return a ``Conv1D`` with values ``(out, in)`` and this layer's bias."""
        conv = self._restores.__new__(self._restores)
        # its own __init__ would draw random numbers
        nn.Module.__init__(conv)
        conv.nf, conv.nx = self.nf, self.nx  # type: ignore[assignment]
        conv.weight = nn.Parameter(values.t().contiguous(), requires_grad=self.weight.requires_grad)
        conv.bias = self.bias
        return conv.train(self.training)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = destination[prefix + "weight"]
        destination[prefix + "weight"] = weight if holds_codes(weight) else weight.t()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight = state_dict.get(prefix + "weight")
        if isinstance(weight, Tensor) and not holds_codes(weight):
            state_dict[prefix + "weight"] = weight.t().contiguous()
        super()._load_from_state_dict(state_dict, prefix, *args)
