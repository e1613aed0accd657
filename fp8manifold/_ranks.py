"""Processes that train one model: what they agree on, and the rows of a parameter that
each of them holds.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

_DISTRIBUTED: Final = torch.distributed.is_available()


class Ranks:
    """A process group; without one, or with a single process, every answer is the
    process's own.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.size = 1 if group is None else int(group.size())
        self.rank = 0 if group is None else int(group.rank())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        """Itself: a group can't be copied."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A single process: a saved object does not know the processes that load it."""
        return Ranks, ()

    def largest(self, x: Tensor) -> Tensor:
        return self._reduced(x, "MAX")

    def total(self, x: Tensor) -> Tensor:
        """The sum of each element over the processes; for int64 modulo 2^64."""
        return self._reduced(x, "SUM")

    def any(self, flag: bool, device: torch.device) -> bool:
        return (
            flag if self.size == 1 else bool(self.largest(torch.tensor([int(flag)], device=device)))
        )

    def gathered(self, x: Tensor) -> Tensor:
        """A tensor of one shape in all processes, one behind the other along the first
        dimension.
        """
        if self.size == 1:
            return x
        whole = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        parts = list(whole.split(x.shape[0])) if x.shape[0] else [x] * self.size
        torch.distributed.all_gather(parts, x.contiguous(), group=self.group)
        return whole

    def sent(self, x: Tensor, source: int = 0) -> Tensor:
        """The tensor of the process ``source``, written in place into the others', of
        the same shape and dtype.
        """
        if self.size > 1:
            torch.distributed.broadcast(x, group=self.group, group_src=source)
        return x

    def _reduced(self, x: Tensor, operation: str) -> Tensor:
        if self.size == 1:
            return x
        x = x.clone()
        torch.distributed.all_reduce(
            x, getattr(torch.distributed.ReduceOp, operation), group=self.group
        )
        return x


ALONE: Final = Ranks()  #: One process.


class Replicas(Ranks):
    """Processes that each hold all of a model, and the model's parameters by name.

    A parameter is found by its layer: a weak reference to a tensor would keep
    ``Module.to`` from swapping it.
    """

    def __init__(self, group: Any, model: nn.Module) -> None:
        super().__init__(group)
        self.names = tuple(name for name, _ in model.named_parameters())
        self._places = []
        for whole in self.names:
            path, _, name = whole.rpartition(".")
            owner = model.get_submodule(path)
            self._places.append((ref(owner), name))
            replicas.setdefault(owner, {})[name] = self

    def parameters(self) -> list[Tensor | None]:
        """Parameters in the order of their names; None for one that is gone, or sharded
        since.
        """
        owners = [(place(), name) for place, name in self._places]
        found = [None if owner is None else owner._parameters.get(name) for owner, name in owners]
        return [None if p is None or share_of(p) is not None else p for p in found]

    def kinds(self) -> list[str]:
        """What a reduction of gradients has to know of each parameter, in words."""
        kinds = []
        for place, name in self._places:
            owner = place()
            parameter = None if owner is None else owner._parameters.get(name)
            if parameter is None:
                kinds.append("gone")
                continue
            use = "trained" if parameter.requires_grad else "frozen"
            dtype = str(parameter.dtype).removeprefix("torch.")
            kinds.append(f"{use}, {dtype} of shape {tuple(parameter.shape)}")
        return kinds


replicas: Final[WeakKeyDictionary[nn.Module, dict[str, Replicas]]] = WeakKeyDictionary()
"""The processes that hold replicas of a layer's parameters, by name; set by
:func:`fp8manifold.distributed.sync`.
"""


@dataclass(frozen=True)
class Share:
    """The rows of a parameter that this process holds: a run of the first dimension, as
    a DTensor divides it.
    """

    local: Tensor
    ranks: Ranks
    #: of the whole parameter
    shape: torch.Size
    mesh: Any
    placements: Any

    @property
    def rows(self) -> int:
        """Rows of every process but the last ones."""
        return -(-self.shape[0] // self.ranks.size)

    @property
    def offset(self) -> int:
        """Position of the first own element in the whole."""
        return min(self.ranks.rank * self.rows, self.shape[0]) * (self.shape[1:].numel())

    def gathered(self, own: Tensor) -> Tensor:
        return self.ranks.gathered(self.padded(own))[: self.shape[0]]

    def collected(self, own: Tensor, owner: int) -> Tensor | None:
        """All rows of a matrix in one process; None in the others."""
        if self.ranks.size == 1:
            return own
        part = bytes_of(self.padded(own))
        parts = (
            [torch.empty_like(part) for _ in range(self.ranks.size)]
            if self.ranks.rank == owner
            else None
        )
        torch.distributed.gather(part, parts, group=self.ranks.group, group_dst=owner)
        return (
            None
            if parts is None
            else torch.cat(parts).view(own.dtype).reshape(-1, *own.shape[1:])[: self.shape[0]]
        )

    def handed_out(self, whole: Tensor | None, owner: int, like: Tensor) -> Tensor:
        """The own rows of a matrix that one process has, in the dtype and with the
        columns of ``like``.
        """
        if self.ranks.size == 1:
            assert whole is not None
            return whole
        part, parts = torch.empty_like(bytes_of(self.padded(like))), None
        if whole is not None:
            missing = self.rows * self.ranks.size - len(whole)
            rows = torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])
            parts = list(bytes_of(rows).split(part.numel()))
        torch.distributed.scatter(part, parts, group=self.ranks.group, group_src=owner)
        return part.view(like.dtype).reshape(-1, *like.shape[1:])[: len(like)]

    def own(self, whole: Tensor) -> Tensor:
        first = min(self.ranks.rank * self.rows, self.shape[0])
        return whole[first : first + self.local.shape[0]]

    def padded(self, own: Tensor) -> Tensor:
        """The own rows, padded with rows that nobody reads where this process has fewer
        than the first.
        """
        short = self.rows - own.shape[0]
        return (
            torch.cat([own, own.new_zeros((short, *own.shape[1:]))]) if short else own.contiguous()
        )


def bytes_of(x: Tensor) -> Tensor:
    """The bytes of a tensor, flat, without a copy if it is contiguous: with one column
    or element at any stride.
    """
    return x.contiguous().resolve_neg().as_strided((x.numel(),), (1,)).view(torch.uint8)


def local_of(x: Any) -> Any:
    """The part of a DTensor that this process holds; anything else as it is."""
    return x if type(x) is Tensor else getattr(x, "_local_tensor", x)


def share_of(parameter: Tensor) -> Share | None:
    """The part of a parameter that this process holds, if it is spread over several;
    None for any other.
    """
    tensors = sys.modules.get("torch.distributed.tensor")  # not imported: there are no DTensors
    if tensors is None or not isinstance(parameter, tensors.DTensor):
        return None
    mesh = parameter.device_mesh
    return Share(
        local_of(parameter), Ranks(mesh.get_group(0)), parameter.shape, mesh, parameter.placements
    )


def check_share(parameter: Tensor) -> None:
    """Raise ValueError for a DTensor that is spread in another way than ``fully_shard``
    does it over one mesh.
    """
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None or not isinstance(parameter, tensors.DTensor):
        return
    mesh, placements = parameter.device_mesh, tuple(parameter.placements)
    if not getattr(local_of(parameter), "is_share", True):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} in codes became a DTensor without its "
            f"scales: only "
            "fully_shard gives rows their scales; use that, or DistributedDataParallel"
        )
    if mesh.ndim != 1 or type(placements[0]) is not tensors.Shard or placements[0].dim != 0:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is spread as {placements} over a mesh "
            f"of {mesh.ndim} "
            "dimensions: tensor parallelism, HSDP and their combinations are not supported; use "
            "fully_shard over a mesh of one dimension, which shards rows, or "
            "DistributedDataParallel"
        )


def spread(parameter: Tensor, array: Tensor) -> Tensor:
    """An array with a row for each row of the parameter here: as it is, or as part of a
    DTensor spread like it.
    """
    share = share_of(parameter)
    if share is None:
        return array
    shape = torch.Size((share.shape[0], *array.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    dtensor: Any = sys.modules["torch.distributed.tensor"].DTensor
    made: Tensor = dtensor.from_local(
        array, share.mesh, share.placements, run_check=False, shape=shape, stride=stride
    )
    return made


def ranks_of(parameters: Iterable[Tensor]) -> list[Ranks]:
    """The groups of processes that step these parameters together, each once; none for
    a single process.
    """
    found: dict[Any, Ranks] = {}
    for ranks in ranks_of_each(parameters):
        if ranks is not None:
            found.setdefault(ranks.group, ranks)
    return list(found.values())


def ranks_of_each(parameters: Iterable[Tensor]) -> list[Ranks | None]:
    """The processes that step each of these parameters together; None for a single one."""
    parameters = list(parameters)
    if not _DISTRIBUTED or not torch.distributed.is_initialized():
        return [None] * len(parameters)
    found: list[Ranks | None] = []
    held = {
        id(owner._parameters.get(name)): ranks
        for owner, kin in replicas.items()
        for name, ranks in kin.items()
    }
    for parameter in parameters:
        share = share_of(parameter)
        ranks = held.get(id(parameter)) if share is None else share.ranks
        found.append(ranks if ranks is not None and ranks.size > 1 else None)
    return found
