"""Reading a model into one byte per weight.

The floats of a weight are freed before the next weight is read. `load_into` reads
float weights, or the codes of files in a published layout, into a model without values.
`Reader` does this inside transformers' ``from_pretrained``.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8manifold._base.checks import check_int
from fp8manifold._base.replaced import note_replaced
from fp8manifold._encoded.scaled import WriteRounding
from fp8manifold._published.find_weights import FLOATS, refuse_codes
from fp8manifold._published.places import weight_of
from fp8manifold.nn import _tensor_files
from fp8manifold.nn._buffers import computed_buffers
from fp8manifold.nn._carried import check_layers, parameter_names, put_parameter, replace_layers
from fp8manifold.nn._linear import QuantizedLinear
from fp8manifold.nn._plan import SurgeryPlan, plan
from fp8manifold.nn._scalers import Scale
from fp8manifold.nn._selection import obstacle
from fp8manifold.nn._spec import Formats, LayerSpec, OperandSpec, Storage
from fp8manifold.nn._surgery import carry_out, encode_parameter, layers_of, parameters_of
from fp8manifold.parameter import FP8Parameter
from fp8manifold.random_bits import Draws

#: Names that a message lists.
_NAMES_LISTED: Final = 3
#: In place of formats: the formats of the files.
AS_STORED: Final = "as stored"


def load_into(
    model: nn.Module,
    source: Mapping[str, Any] | _tensor_files.Source,
    formats: Formats = "E4M3",
    *,
    device: torch.device | str = "cpu",
    **options: Any,
) -> nn.Module:
    """Fill a model without values from float weights, rounded to codes one by one.

    The result is bit-identical to ``quantize_model(model, formats, "codes", **options)``;
    at its peak loading takes the bytes of the result and one float tensor.
    For models of transformers :func:`fp8manifold.load` does the same.

    Args:
        model: all its parameters on ``torch.device("meta")``; changed in place once
            everything has been read. Buffers that no state dict holds are computed by
            its ``_init_weights``, where it is of transformers, or by the
            ``reset_parameters`` of their module.
        source: a safetensors file, several, their folder, or a mapping from name to
            tensor, with the names of ``model.state_dict()``; for a tied weight one name
            is enough. Of a folder ``model.safetensors`` is read, else the files of the
            index, else all.
        formats: as in :func:`fp8manifold.quantize_model`; ``"as stored"`` loads codes,
            formats and scales of files in a published layout.
        device: where the weights go, one at a time.
        **options: as in :func:`fp8manifold.quantize_model`, without ``storage``; with
            ``"as stored"`` only ``rounding``, ``draws`` and ``seed``.

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
        >>> weight = load_into(model, floats, "E4M3")[0].weight
        >>> weight.dtype, weight.codes.dtype
        (torch.float32, torch.uint8)
    """
    if isinstance(formats, str) and formats == AS_STORED:
        return _load_as_stored(model, source, device, **options)
    if "storage" in options:
        raise TypeError(
            "load_into has no option storage: weights are read into 'codes', one byte each"
        )
    planned = plan(model, formats, "codes", **options)
    _check_without_values(model)
    buffers = computed_buffers(model)
    # tried without values, so that no file is opened for a model that can't be made
    check_layers(model, layers_of(planned))
    parameters_of(model, planned)
    code_entries = planned.code_entries
    tensors: _tensor_files.Tensors = (
        _tensor_files.GivenTensors(source)
        if isinstance(source, Mapping)
        else _tensor_files.FileTensors(_tensor_files.files_of(source))
    )
    with closing(tensors):
        codes: dict[str, FP8Parameter] = {}
        floats: dict[str, Tensor] = {}
        for name, stored_names, tensor in _checked_entries(model, tensors):
            value = _read_one(tensors, stored_names, tensor)
            entry = code_entries.get(name)
            if entry is not None:
                placed = value.to(device=device, dtype=tensor.dtype)
                codes[name] = encode_parameter(
                    planned, entry, placed, requires_grad=tensor.requires_grad
                )
                del placed
            else:
                floats[name] = value.to(device=device, dtype=tensor.dtype, copy=True)
            tensors.was_read(value.nbytes)
            del value
    _put_floats(model, floats, buffers, device)
    quantized = carry_out(model, planned, codes)
    return quantized if torch.device(device).type == "cpu" else quantized.to(device)


def _load_as_stored(
    model: nn.Module,
    source: Mapping[str, Any] | _tensor_files.Source,
    device: torch.device | str,
    *,
    rounding: WriteRounding = "stochastic",
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
        for name, stored_names, tensor in _checked_entries(model, tensors):
            stored = tensors.stored.get(stored_names[0])
            if stored is None:
                value = _read_one(tensors, stored_names, tensor)
                floats[name] = value.to(device=device, dtype=tensor.dtype, copy=True)
                tensors.was_read(value.nbytes)
                del value
                continue
            if stored_names[1:]:
                raise ValueError(
                    f"{stored_names[0]!r} and {stored_names[1]!r} are one tensor in the model: "
                    "give codes of only one"
                )
            codes[name] = weight_of(
                stored_names[0],
                [((), stored)],
                tensor.shape,
                tensors.read,
                tensors.was_read,
                device=device,
                dtype=tensor.dtype,
                rounding=rounding,
                draws=draws,
                seed=(seed << 32) + len(codes),
            )
            codes[name].requires_grad_(tensor.requires_grad)
    _put_floats(model, floats, buffers, device)
    return put_codes(model, codes).to(device)


def _check_without_values(model: nn.Module) -> None:
    """Refuse parameters that have values already."""
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            raise ValueError(
                f"parameter {name!r} has values already: build the model under torch.device('meta')"
            )


def _state_entries(model: nn.Module) -> dict[int, tuple[list[str], Tensor]]:
    """Return every parameter and buffer that a state dict has, with all its names."""
    entries: dict[int, tuple[list[str], Tensor]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        persistent = {
            name: buffer
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        }
        for name, value in (module._parameters | persistent).items():
            if value is not None:
                names, _ = entries.setdefault(id(value), ([], value))
                names.append(f"{module_name}.{name}".lstrip("."))
    return entries


def _checked_entries(
    model: nn.Module, tensors: _tensor_files.Tensors
) -> list[tuple[str, list[str], Tensor]]:
    """Return the entries of a model's state, or refuse a source that does not fit them.

    Each has its first name in the model, and the names that the source has for it.
    """
    source_names = set(tensors.names())
    entries: list[tuple[str, list[str], Tensor]] = []
    model_names: set[str] = set()
    missing, unfit = [], []
    for names, entry in _state_entries(model).values():
        model_names |= set(names)
        stored_names = [name for name in names if name in source_names]
        entries.append((names[0], stored_names, entry))
        if not stored_names:
            missing.append(names[0])
        for name in stored_names:
            shape, dtype, file = tensors.known(name)
            if dtype is not None and entry.is_floating_point():
                refuse_codes(name, dtype, source_names, file)
            unfit += _unfit(name, entry, shape, dtype)
    unexpected = [name for name in tensors.names() if name not in model_names]
    if missing:
        hint = f" (it has {_listed(unexpected)}, which the model lacks)" if unexpected else ""
        raise ValueError(f"the model has {_listed(missing)}, which the source lacks{hint}")
    if unexpected:
        raise ValueError(f"the source has {_listed(unexpected)}, which the model lacks")
    if unfit:
        raise ValueError(unfit[0] + (f"; and {len(unfit) - 1} more like it" if unfit[1:] else ""))
    return entries


def _unfit(
    name: str, entry: Tensor, shape: tuple[int, ...] | None, dtype: torch.dtype | str | None
) -> list[str]:
    """Return a list of why a tensor can't be that of an entry; empty if it can."""
    if shape is not None and shape != tuple(entry.shape):
        return [f"{name!r} has shape {shape} in the source, but {tuple(entry.shape)} in the model"]
    is_float = dtype.is_floating_point if isinstance(dtype, torch.dtype) else dtype in FLOATS
    if dtype is not None and is_float != entry.is_floating_point():
        kinds = ("floats", "other numbers")
        return [
            f"{name!r} holds {kinds[not is_float]} in the source, but {kinds[is_float]} in the "
            "model"
        ]
    return []


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _NAMES_LISTED} more" if len(names) > _NAMES_LISTED else ""
    return ", ".join(map(repr, names[:_NAMES_LISTED])) + rest


def _read_one(tensors: _tensor_files.Tensors, names: Sequence[str], entry: Tensor) -> Tensor:
    value = tensors.read(names[0])
    if entry.is_floating_point():
        refuse_codes(names[0], value.dtype, tensors.names(), tensors.known(names[0])[2])
    for problem in _unfit(names[0], entry, tuple(value.shape), value.dtype):
        raise ValueError(problem)
    for alias in names[1:]:
        if not torch.equal(tensors.read(alias), value):
            raise ValueError(
                f"{names[0]!r} and {alias!r} differ in the source, but are one tensor in the model"
            )
    return value


def _put_floats(
    model: nn.Module,
    floats: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    device: torch.device | str,
) -> None:
    """Give the model its floats, each under all its names, and the computed buffers.

    Buffers that have values already are moved.
    """
    for buffer_name, computed in buffers.items():
        owner, _, entry_name = buffer_name.rpartition(".")
        model.get_submodule(owner)._buffers[entry_name] = computed
    new_tensors = _new_tensors(model, floats)
    for module in model.modules():
        for place in (module._parameters, module._buffers):
            entries: dict[str, Any] = place
            for name, entry in entries.items():
                if id(entry) in new_tensors:
                    entries[name] = new_tensors[id(entry)]
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _new_tensors(model: nn.Module, floats: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Return what takes the place of parameters and buffers, by their identity."""
    new_tensors: dict[int, Tensor] = {}
    for names, entry in _state_entries(model).values():
        if names[0] in floats:
            value = floats[names[0]]
            if isinstance(entry, nn.Parameter):
                value = nn.Parameter(value, requires_grad=entry.requires_grad)
                vars(value).update(vars(entry))
                note_replaced(entry, value, names[0])
            new_tensors[id(entry)] = value
    return new_tensors


def put_codes(
    model: nn.Module,
    codes_by_name: Mapping[str, FP8Parameter],
    inputs: Mapping[str, Tensor] = MappingProxyType({}),
) -> nn.Module:
    """Put codes into a model; linear layers become quantised ones.

    Scales of inputs, by the same names, are frozen.
    """
    names = parameter_names(model)
    layers: dict[str, nn.Module] = {}
    for name, codes in codes_by_name.items():
        owner, _, entry = name.rpartition(".")
        module = model.get_submodule(owner)
        all_names = names[id(model.get_parameter(name))]
        if (
            type(module) is not nn.Linear
            or obstacle(module) is not None
            or entry != "weight"
            or all_names != [name]
        ):
            put_parameter(model, all_names, codes)
            continue
        scale = inputs.get(name)
        rounded = None if scale is None else OperandSpec(codes.format, policy="static")
        spec = LayerSpec(OperandSpec(codes.format, codes.granularity), rounded)  # type: ignore[arg-type]
        layer = QuantizedLinear(module, spec, "codes", codes=codes, seed=codes.seed)
        if scale is not None:
            assert isinstance(layer.activation_scaler, Scale)
            layer.activation_scaler.freeze(scale)
        layers[owner] = layer
    return replace_layers(model, layers)


class Reader:
    """Codes for a model of transformers that has no values yet.

    Tied weights and other dtypes wait until the end.
    """

    def __init__(
        self,
        model: Any,
        formats: Any,
        storage: Storage,
        options: Mapping[str, Any],
        files: Iterable[str] | None,
    ) -> None:
        self._formats = formats
        self._storage = storage
        self._options = dict(options)
        self._plan = self._planned(model)
        self._codes: dict[str, FP8Parameter] = {}
        self._files = _tensor_files.MappedFiles(files or ())
        ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        dtype, tied = torch.get_default_dtype(), {*ties, *ties.values()}
        self._wanted = {
            name: entry
            for name, entry in self._plan.code_entries.items()
            if name not in tied and model.get_parameter(name).dtype == dtype
        }

    def _planned(self, model: Any) -> SurgeryPlan:
        return plan(model, self._formats, self._storage, **self._options)

    def wants(self, name: str) -> bool:
        return name in self._wanted

    def encode(self, model: nn.Module, name: str, value: Tensor) -> Tensor:
        """Return the codes of a tensor that was read.

        One that does not fit is returned as it is: transformers refuses it.
        """
        entry = self._wanted.get(name)
        with suppress(TypeError, ValueError):
            parameter = None if entry is None else model.get_parameter(name)
            if entry is not None and parameter is not None and value.shape == parameter.shape:
                self._codes[name] = encode_parameter(
                    self._plan, entry, value, requires_grad=parameter.requires_grad
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
        known: set[str] = set()
        for entry in planned.layers:
            known.update(entry.parameters)
        unknown = sorted(codes.keys() - known)
        # weights of layers when loading began, and of no layer now
        tied_later = [name for name in unknown if self._wanted[name].spec is not None]
        if tied_later:
            layer = self._wanted[tied_later[0]].name
            raise ValueError(
                f"the weight of {layer!r} was tied while loading: the model does not declare it as "
                f"tied"
            )
        carry_out(model, planned, codes)


class Encode:
    """The operation that transformers runs on a tensor that becomes codes.

    It is put before transformers' own class.
    """

    reader: Reader

    def convert(self, input_dict: dict[str, Any], *, model: Any, **_: Any) -> dict[str, Any]:
        converted = {}
        for name in list(input_dict):
            value = input_dict.pop(name)
            value = value[0] if isinstance(value, list) else value
            converted[name] = self.reader.encode(model, name, value)
        return converted
