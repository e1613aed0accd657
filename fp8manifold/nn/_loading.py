"""Reading a model into one byte per weight: the floats of a weight are freed before the
next weight is read.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8manifold._base.checks import check_int
from fp8manifold._base.replaced import note_replaced
from fp8manifold._encoded.scaled import Rounding
from fp8manifold._published.found import FLOATS, refuse_codes
from fp8manifold._published.places import weight_of
from fp8manifold.nn import _tensor_files
from fp8manifold.nn._buffers import computed_buffers
from fp8manifold.nn._carried import check_layers, parameter_names, put_parameter, replace_layers
from fp8manifold.nn._linear import QuantizedLinear
from fp8manifold.nn._plan import Plan, plan
from fp8manifold.nn._scalers import Scale
from fp8manifold.nn._selection import obstacle
from fp8manifold.nn._spec import Formats, LayerSpec, OperandSpec
from fp8manifold.nn._surgery import carry_out, encoded, layers_of, parameters_of
from fp8manifold.parameter import FP8Parameter
from fp8manifold.random_bits import Draws

_NAMED: Final = 3
AS_STORED: Final = "as stored"  #: In place of formats: the formats of the files.


def load_quantized(
    model: nn.Module,
    source: Mapping[str, Any] | _tensor_files.Source,
    formats: Formats = "E4M3",
    *,
    device: torch.device | str = "cpu",
    **options: Any,
) -> nn.Module:
    """Fill a model without values from float weights, each rounded to its codes as soon
    as it is read.

    The result is bit-identical to ``quantize_model(model, formats, "fp8", **options)``;
    at its peak loading takes the bytes of the result and one float tensor.
    ``from_pretrained`` does the same for models of transformers, with
    :func:`fp8manifold.huggingface.quantization_config`.

    Args:
        model: all its parameters on ``torch.device("meta")``; changed in place once
            everything has been read. Buffers that no state dict holds are computed by
            its ``_init_weights``, where it is of transformers, or by the
            ``reset_parameters`` of their module.
        source: a safetensors file, several, their folder, or a mapping from name to
            tensor, with the names of ``model.state_dict()``; for a tied weight one name
            is enough. Of a folder ``model.safetensors`` is read, else the files of the
            index, else all.
        formats, options: as in :func:`fp8manifold.quantize_model`, without ``storage``;
            ``"as stored"`` loads codes, formats and scales of files in a published
            layout, with ``rounding``, ``draws`` and ``seed`` as options.
        device: where the weights go, one at a time.

    Returns:
        The model; a new layer if ``model`` is itself an ``nn.Linear``. -0 is preserved
        if the layout has it.

    Raises:
        TypeError, ValueError: as :func:`fp8manifold.quantize_model`, for NaN and Inf
            too; a parameter that already has values; a buffer without values that
            nothing computes; tensors that are missing, unknown, of another shape, or
            not floats. The model is then unchanged.
        FileNotFoundError, ImportError: no such file; safetensors is missing.

    Example:
        >>> import fp8manifold as fm
        >>> floats = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4)).state_dict()
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
        >>> load_quantized(model, floats, "E4M3")[0]
        QuantizedLinear(in_features=8, out_features=4, bias=True, weight=E4M3, activation=none, storage=fp8)
    """
    if isinstance(formats, str) and formats == AS_STORED:
        return _load_as_stored(model, source, device, **options)
    if "storage" in options:
        raise TypeError(
            "load_quantized has no option storage: weights are read into 'fp8', one byte each"
        )
    planned = plan(model, formats, "fp8", **options)
    _check_without_values(model)
    buffers = computed_buffers(model)
    # tried without values, so that no file is opened for a model that can't be made
    check_layers(model, layers_of(planned))
    parameters_of(model, planned)
    becomes_codes = planned.encoded
    tensors: _tensor_files.Tensors = (
        _tensor_files.GivenTensors(source)
        if isinstance(source, Mapping)
        else _tensor_files.FileTensors(_tensor_files.files_of(source))
    )
    with closing(tensors):
        codes: dict[str, FP8Parameter] = {}
        floats: dict[str, Tensor] = {}
        for name, there, own in _checked(model, tensors):
            value = _read(tensors, there, own)
            if entry := becomes_codes.get(name):
                placed = value.to(device=device, dtype=own.dtype)
                codes[name] = encoded(planned, entry, placed, requires_grad=own.requires_grad)
                del placed
            else:
                floats[name] = value.to(device=device, dtype=own.dtype, copy=True)
            tensors.was_read(value.nbytes)
            del value
    _put(model, floats, buffers, device)
    made = carry_out(model, planned, codes)
    return made if torch.device(device).type == "cpu" else made.to(device)


def _load_as_stored(
    model: nn.Module,
    source: Mapping[str, Any] | _tensor_files.Source,
    device: torch.device | str,
    *,
    rounding: Rounding = "stochastic",
    draws: Draws = "independent",
    seed: int = 0,
) -> nn.Module:
    if isinstance(source, Mapping):
        raise TypeError(
            f"formats={AS_STORED!r} needs files, which say what their codes are, not a mapping"
        )
    check_int("seed", seed, 0, 2**31 - 1)
    _check_without_values(model)
    buffers = computed_buffers(model)
    codes: dict[str, FP8Parameter] = {}
    floats: dict[str, Tensor] = {}
    with closing(_tensor_files.StoredTensors(source)) as tensors:
        for name, there, own in _checked(model, tensors):
            if (stored := tensors.stored.get(there[0])) is None:
                value = _read(tensors, there, own)
                floats[name] = value.to(device=device, dtype=own.dtype, copy=True)
                tensors.was_read(value.nbytes)
                del value
                continue
            if there[1:]:
                raise ValueError(
                    f"{there[0]!r} and {there[1]!r} are one tensor in the model: give codes of "
                    f"only one"
                )
            how: Any = {"device": device, "dtype": own.dtype, "rounding": rounding, "draws": draws}
            how["seed"] = (seed << 32) + len(codes)
            codes[name] = weight_of(
                there[0], [((), stored)], own.shape, tensors.read, tensors.was_read, **how
            )
            codes[name].requires_grad_(own.requires_grad)
    _put(model, floats, buffers, device)
    return put_codes(model, codes).to(device)


def _check_without_values(model: nn.Module) -> None:
    """Refuse parameters that have values already."""
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            raise ValueError(
                f"parameter {name!r} has values already: build the model under torch.device('meta')"
            )


def _groups(model: nn.Module) -> dict[int, tuple[list[str], Tensor]]:
    """Every parameter and buffer that a state dict has, with all its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        kept = {
            name: x
            for name, x in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        }
        for name, value in (module._parameters | kept).items():
            if value is not None:
                found.setdefault(id(value), ([], value))[0].append(
                    f"{module_name}.{name}".lstrip(".")
                )
    return found


def _checked(
    model: nn.Module, tensors: _tensor_files.Tensors
) -> list[tuple[str, list[str], Tensor]]:
    """The entries of a model's state, each with its first name in the model and those
    that the source has for it.
    """
    there = set(tensors.names())
    found: list[tuple[str, list[str], Tensor]] = []
    known: set[str] = set()
    missing, unfit = [], []
    for names, entry in _groups(model).values():
        known |= set(names)
        found.append((names[0], [name for name in names if name in there], entry))
        missing += [] if there.intersection(names) else names[:1]
        for name in found[-1][1]:
            shape, dtype, file = tensors.known(name)
            if dtype is not None and entry.is_floating_point():
                refuse_codes(name, dtype, there, file)
            unfit += _unfit(name, entry, shape, dtype)
    unexpected = [name for name in tensors.names() if name not in known]
    if missing:
        hint = f" (it has {_some(unexpected)}, which the model lacks)" if unexpected else ""
        raise ValueError(f"the model has {_some(missing)}, which the source lacks{hint}")
    if unexpected:
        raise ValueError(f"the source has {_some(unexpected)}, which the model lacks")
    if unfit:
        raise ValueError(unfit[0] + (f"; and {len(unfit) - 1} more like it" if unfit[1:] else ""))
    return found


def _unfit(
    name: str, entry: Tensor, shape: tuple[int, ...] | None, dtype: torch.dtype | str | None
) -> list[str]:
    if shape is not None and shape != tuple(entry.shape):
        return [f"{name!r} has shape {shape} in the source, and {tuple(entry.shape)} in the model"]
    is_float = dtype.is_floating_point if isinstance(dtype, torch.dtype) else dtype in FLOATS
    if dtype is not None and is_float != entry.is_floating_point():
        kinds = ("floats", "no floats")
        return [
            f"{name!r} holds {kinds[not is_float]} in the source, and {kinds[is_float]} in the "
            f"model"
        ]
    return []


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more


def _read(tensors: _tensor_files.Tensors, names: Sequence[str], entry: Tensor) -> Tensor:
    value = tensors.read(names[0])
    if entry.is_floating_point():
        refuse_codes(names[0], value.dtype, tensors.names(), tensors.known(names[0])[2])
    for problem in _unfit(names[0], entry, tuple(value.shape), value.dtype):
        raise ValueError(problem)
    for other in names[1:]:
        if not torch.equal(tensors.read(other), value):
            raise ValueError(
                f"{names[0]!r} and {other!r} differ in the source, and are one tensor in the model"
            )
    return value


def _put(
    model: nn.Module,
    floats: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    device: torch.device | str,
) -> None:
    """Give the model its floats, each under all its names, and the buffers that were
    computed; move those that have values already.
    """
    for buffer_name, computed in buffers.items():
        owner, _, entry_name = buffer_name.rpartition(".")
        model.get_submodule(owner)._buffers[entry_name] = computed
    made: dict[int, Tensor] = {}
    for names, entry in _groups(model).values():
        if names[0] in floats:
            value = made[id(entry)] = floats[names[0]]
            if isinstance(entry, nn.Parameter):
                made[id(entry)] = nn.Parameter(value, requires_grad=entry.requires_grad)
                vars(made[id(entry)]).update(vars(entry))
                note_replaced(entry, made[id(entry)], names[0])
    for module in model.modules():
        for place in (module._parameters, module._buffers):
            entries: dict[str, Any] = place
            entries.update({name: made[id(x)] for name, x in entries.items() if id(x) in made})
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def put_codes(
    model: nn.Module,
    made: Mapping[str, FP8Parameter],
    inputs: Mapping[str, Tensor] = MappingProxyType({}),
) -> nn.Module:
    """Put codes into a model: linear layers become quantised ones, with frozen scales
    of inputs by the same names.
    """
    names = parameter_names(model)
    layers: dict[str, nn.Module] = {}
    for name, codes in made.items():
        owner, _, entry = name.rpartition(".")
        module, every = model.get_submodule(owner), names[id(model.get_parameter(name))]
        if (
            type(module) is not nn.Linear
            or obstacle(module) is not None
            or entry != "weight"
            or every != [name]
        ):
            put_parameter(model, every, codes)
            continue
        scale = inputs.get(name)
        rounded = None if scale is None else OperandSpec(codes.format, policy="static")
        spec = LayerSpec(OperandSpec(codes.format, codes.granularity), rounded)  # type: ignore[arg-type]
        layer = QuantizedLinear(module, spec, "fp8", codes=codes, seed=codes.seed)
        if scale is not None:
            assert isinstance(layer.activation_scaler, Scale)
            layer.activation_scaler.freeze(scale)
        layers[owner] = layer
    return replace_layers(model, layers)


class Reader:
    """Codes for a model of transformers that has no values yet; tied weights and other
    dtypes wait until the end.
    """

    def __init__(
        self,
        model: Any,
        formats: Any,
        storage: str,
        options: Mapping[str, Any],
        files: Iterable[str] | None,
    ) -> None:
        self._how = formats, storage, dict(options)
        self._plan = self._planned(model)
        self._codes: dict[str, FP8Parameter] = {}
        self._files = _tensor_files.MappedFiles(files or ())
        ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        dtype, tied = torch.get_default_dtype(), {*ties, *ties.values()}
        self._wanted = {
            name: entry
            for name, entry in self._plan.encoded.items()
            if name not in tied and model.get_parameter(name).dtype == dtype
        }

    def _planned(self, model: Any) -> Plan:
        formats, storage, options = self._how
        return plan(model, formats, storage, **options)

    def wants(self, name: str) -> bool:
        return name in self._wanted

    def encoded(self, model: nn.Module, name: str, value: Tensor) -> Tensor:
        """The codes of a tensor that was read; one that does not fit is left to
        transformers to refuse.
        """
        entry = self._wanted.get(name)
        with suppress(TypeError, ValueError):
            if entry is not None and value.shape == (own := model.get_parameter(name)).shape:
                self._codes[name] = encoded(
                    self._plan, entry, value, requires_grad=own.requires_grad
                )
                self._files.was_read(value.nbytes)
                return self._codes[name]
        self._wanted.pop(name, None)
        return value

    def finish(self, model: nn.Module) -> None:
        """Put the quantised layers in, around the codes that the model has already."""
        planned = self._planned(model)
        codes = {
            name: weight
            for name, weight in self._codes.items()
            if model.get_parameter(name) is weight
        }
        known = {name for entry in planned.layers for name in entry.parameters}
        if lost := sorted(
            name for name in codes.keys() - known if self._wanted[name].spec is not None
        ):
            layer = self._wanted[lost[0]].name
            raise ValueError(
                f"the weight of {layer!r} was tied while loading: the model does not declare it as "
                f"tied"
            )
        carry_out(model, planned, codes)


class Encode:
    """The operation that transformers runs on a tensor that becomes codes; put before
    its own class.
    """

    reader: Reader

    def convert(self, input_dict: dict[str, Any], *, model: Any, **_: Any) -> dict[str, Any]:
        made = {}
        for name in list(input_dict):
            value = input_dict.pop(name)
            value = value[0] if isinstance(value, list) else value
            made[name] = self.reader.encoded(model, name, value)
        return made
