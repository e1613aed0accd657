"""The weights of a model as a server takes them."""

import hashlib
import json
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fp8manifold._base.checks import check_choice
from fp8manifold._base.wrappers import unwrapped
from fp8manifold._doors.exchange import ExportLayout
from fp8manifold._doors.published import base_of
from fp8manifold._doors.quantizer import published_of
from fp8manifold._published import quantization_of
from fp8manifold._published.layout import CONFIG, SERVER_CONFIG
from fp8manifold._published.places import share_scale_
from fp8manifold._ranks import bytes_of, check_share, local_of, sharded_modules, share_of
from fp8manifold._served.exported import exported_settings, exported_units
from fp8manifold._served.layers import in_layers
from fp8manifold._served.parameters_trap import mark_served
from fp8manifold._served.published import published_units
from fp8manifold._served.unit import CodesUnit, Shard, ShardPlace, TensorMetadata, Unit
from fp8manifold.nn._linear import QuantizedLinear
from fp8manifold.tensor import FP8Tensor

ServedLayout = Literal["compressed-tensors", "fp8"]


class ServedWeights:
    """The weights of a model as a server takes them; made by :func:`served_weights`.

    Each iteration reads the model anew, so it yields the weights after the last step.
    """

    def __init__(self, model: nn.Module, layout: ServedLayout | None = None) -> None:
        self._model = model
        self._layout = layout
        # Refuses now what can't be served.
        self._units()
        mark_served(model)

    def metadata(self) -> list[TensorMetadata]:
        """Return (name, dtype, shape) of each tensor in the order of iteration.

        No tensor is made. Of a sharded model the shapes are those of whole tensors.
        """
        metadata = []
        for unit in self._units():
            metadata += unit.metadata()
        return metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor), layer by layer.

        Codes are views of the model's memory: send or copy them before the next step.

        Raises:
            TypeError: a sharded model, which :meth:`shards` is for.
            ValueError: rows with several scales that the layout has one for, which no
                scale holds (:meth:`share_scales_`); a scale that its dtype can't hold.
            FileNotFoundError: a tensor that the model has no place for, and whose
                folder is gone.
        """
        for unit in self._units():
            yield from unit.tensors()

    def shards(self) -> Iterator[Shard]:
        """Yield (name, tensor, place) of the rows that this process has.

        ``place`` has the ``offset`` of the first element in the flat tensor, and the
        ``shape`` of the whole. Each process yields every tensor, in the order of
        :meth:`metadata`, so that a collective for each tensor finds all processes. A
        tensor is empty in a process that has no rows of it. Tensors that all processes
        have are yielded whole by the first one only. Without ``fully_shard`` tensors are
        whole.

        Raises:
            TypeError: a sharded weight with scales that can't be served by rows.
            ValueError: a weight that is spread in another way, as by HSDP.
        """
        return self._shards(is_first=_is_first_process(self._model))

    def _own_shards(self) -> Iterator[Shard]:
        """Yield what this process keeps up to date: its rows, or all where it has all."""
        is_first = not _is_sharded(self._model) or _is_first_process(self._model)
        return self._shards(is_first=is_first)

    def _shards(self, *, is_first: bool) -> Iterator[Shard]:
        device = next(self._model.parameters()).device
        for unit in self._units():
            present = {shard.name: shard for shard in unit.shards(is_first)}
            for name, dtype, shape in unit.metadata():
                if name in present:
                    yield present.pop(name)
                else:
                    nothing = torch.empty((0, *shape[1:]), dtype=dtype, device=device)
                    yield Shard(name, nothing, ShardPlace(0, shape))

    def groups(self) -> list[list[str]]:
        """Return the names of each group that is sent at once, in the order of iteration.

        A decoder layer with all its tensors is one group: a server that gets only one
        matrix of a fused qkv, or codes without their scales, computes NaN.
        """
        return in_layers(metadata.name for metadata in self.metadata())

    @property
    def config(self) -> dict[str, Any]:
        """``quantization_config`` of the server's ``config.json``."""
        published = self._published()
        if published is None:
            inner = unwrapped(self._model)
            return exported_settings(inner, _export_layout(inner, self._layout))
        documents = {
            name: json.loads(published["documents"].get(name, "null"))
            for name in (CONFIG, SERVER_CONFIG)
        }
        return quantization_of(documents[CONFIG], documents[SERVER_CONFIG]) or {}

    def digest(self) -> dict[str, str]:
        """Return the SHA-256 of each tensor's bytes, in hexadecimal, by name.

        It is that of what is sent. vLLM hashes its own parameters, which it has fused,
        padded or transposed (``compute_weight_checksums``): two servers are compared so.
        """
        digests = {}
        for name, tensor in self:
            data: Any = bytes_of(tensor.cpu()).numpy()
            digests[name] = hashlib.sha256(data).hexdigest()
        return digests

    def share_scales_(self) -> None:
        """Give rows of the model a common scale where the server has one for them.

        The common scale is the largest of theirs. This is needed where a model fuses
        matrices that have one scale each, and a step has changed the scale of some
        rows. Values are rounded by :meth:`FP8Tensor.rescale_`.

        Raises:
            TypeError: a sharded model.
        """
        units = self._units()
        for unit in units:
            if unit.is_sharded():
                raise TypeError(
                    f"{unit.target!r} is sharded: rows that share a scale may be in several "
                    "processes; call share_scales_() before fully_shard"
                )
        for unit in units:
            if not isinstance(unit, CodesUnit) or not isinstance(unit.entry, FP8Tensor):
                continue
            share_scale_(unit.entry, unit.place, unit.stored)

    def _published(self) -> dict[str, Any] | None:
        return None if self._layout is not None else published_of(base_of(self._model))

    def _units(self) -> list[Unit]:
        """Return what the model has now, layer by layer."""
        published = self._published()
        for module in sharded_modules(self._model):
            # as state_dict() does: a forward pass without a backward leaves it whole
            module.reshard()
        for parameter in self._model.parameters():
            check_share(parameter)
        if published is None:
            inner = unwrapped(self._model)
            units = exported_units(inner, _export_layout(inner, self._layout))
        else:
            units = published_units(self._model, base_of(self._model), published)
        unit_of = {unit.metadata()[0].name: unit for unit in units}
        return [unit_of[name] for name in chain.from_iterable(in_layers(unit_of))]


def served_weights(model: nn.Module, layout: ServedLayout | None = None) -> ServedWeights:
    r"""Return the weights of a model as a server of FP8 takes them: the codes that train.

    .. math:: w = s \cdot \operatorname{decode}(code)

    Nothing is rounded, so a server whose kernels take inputs in float computes with the
    weights that the trainer computes with. The model, its random numbers and its
    optimizer are not changed.

    Args:
        model: a model of :func:`fp8manifold.load` or :func:`quantize_model`, also under
            wrappers of torch, or sharded by rows (``fully_shard``).
        layout: ``compressed-tensors`` (scales of tensors, rows or blocks) or ``fp8``
            (squares of 128 x 128), as of :func:`fp8manifold.save`. By default the one
            that the model was read in, or that its scales fit.

    Returns:
        A source of tensors, which may be iterated again after each step. Names are
        those of published files; experts that the model has in one stack are one matrix
        each. Floats have the dtype of the file, or the model's if that is wider. Codes
        and float32 scales are views; tensors that are decoded, packed or converted are
        computed, one at a time, and so are codes of layers with a float master copy.

    Tied tensors come once. NaN and -0 are preserved. From then on functions of TRL and
    vLLM that send ``named_parameters()`` refuse the model: they would send values under
    the names of codes.

    Raises:
        TypeError, ValueError: ``model`` is not a module; an unknown layout, or one that
            can't describe the model; adapters of PEFT; a tensor that the model has lost
            since it was read.

    Example:
        >>> from torch import nn
        >>> import fp8manifold as fm
        >>> model = fm.quantize_model(nn.Sequential(nn.Linear(32, 8)), "E4M3")
        >>> weights = fm.served_weights(model)
        >>> [(name, str(tensor.dtype)) for name, tensor in weights][:2]
        [('0.weight', 'torch.float8_e4m3fn'), ('0.weight_scale', 'torch.float32')]
        >>> for name, tensor in weights: send(name, tensor)  # doctest: +SKIP

    Source: ``WeightSource`` of vLLM 0.32, which has these methods.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    if layout is not None:
        check_choice("layout", layout, get_args(ServedLayout))
    return ServedWeights(model, layout)


def _export_layout(model: nn.Module, layout: ServedLayout | None) -> ExportLayout:
    """Return the layout of an export: the one that was given, or that the scales fit."""
    if layout is not None:
        return ExportLayout(layout)
    for module in model.modules():
        if not isinstance(module, QuantizedLinear):
            continue
        weight = local_of(module.weight)
        if isinstance(weight, FP8Tensor) and weight.granularity == "square":
            return ExportLayout.FP8
    return ExportLayout.COMPRESSED_TENSORS


def _is_sharded(model: nn.Module) -> bool:
    return any(share_of(parameter) is not None for parameter in model.parameters())


def _is_first_process(model: nn.Module) -> bool:
    """Return whether this process yields what all of them have.

    Of a sharded model it is the first of those that share it, which may be a part of
    all processes.
    """
    for parameter in model.parameters():
        share = share_of(parameter)
        if share is not None:
            return share.ranks.rank == 0
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return True
    return bool(distributed.get_rank() == 0)
