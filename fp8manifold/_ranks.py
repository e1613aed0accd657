"""Processes that train one model together, and the rows that each of them has.

``share_of(parameter)`` is a parameter's ``Share`` under ``fully_shard``: of n rows over
p processes, process r has ``ceil(n / p)`` from row ``r * ceil(n / p)`` on, and the last
processes have fewer or none. Collectives want one shape everywhere: they send padded
rows, and the padding is cut off where they arrive.

``Ranks`` is a process group, or a single process. What processes agree on, a maximum, a
sum or the tensor of one of them, is asked here. ``Replicas`` are processes that each
have all of a model, as under DDP; ``replicas`` says which parameters they train.
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
    """A process group, or a single process, whose answers are its own."""

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
        """Return the largest of each element over the processes."""
        return self._all_reduce(x, "MAX")

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of each element over the processes; for int64 modulo 2^64."""
        return self._all_reduce(x, "SUM")

    def any_true(self, flag: bool, device: torch.device) -> bool:
        """Return True if the flag is True in any process."""
        if self.size == 1:
            return flag
        return bool(self.largest(torch.tensor([int(flag)], device=device)))

    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all processes, joined along the first dimension.

        They have one shape.
        """
        if self.size == 1:
            return x
        whole = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        parts = list(whole.split(x.shape[0])) if x.shape[0] else [x] * self.size
        torch.distributed.all_gather(parts, x.contiguous(), group=self.group)
        return whole

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Write the tensor of one process into those of all, of one shape and dtype."""
        if self.size > 1:
            torch.distributed.broadcast(x, group=self.group, group_src=source)
        return x

    def _all_reduce(self, x: Tensor, operation: str) -> Tensor:
        if self.size == 1:
            return x
        x = x.clone()
        torch.distributed.all_reduce(
            x, getattr(torch.distributed.ReduceOp, operation), group=self.group
        )
        return x


ALONE: Final = Ranks()
"""One process."""


class Replicas(Ranks):
    """Processes that each have all of a model, and the model's parameters by name.

    A parameter is found by its layer: a weak reference to a tensor would keep
    ``Module.to`` from swapping it. An instance enters itself in :data:`replicas`.
    """

    def __init__(self, group: Any, model: nn.Module) -> None:
        super().__init__(group)
        self.names = tuple(name for name, _ in model.named_parameters())
        self._places = []
        for full_name in self.names:
            path, _, name = full_name.rpartition(".")
            owner = model.get_submodule(path)
            self._places.append(_Place(ref(owner), name))
            replicas.setdefault(owner, {})[name] = self

    def parameters(self) -> list[Tensor | None]:
        """Return parameters in the order of their names.

        None stands for one that is gone, or that was sharded since.
        """
        parameters = []
        for place in self._places:
            parameter = place.parameter()
            is_whole = parameter is not None and share_of(parameter) is None
            parameters.append(parameter if is_whole else None)
        return parameters

    def kinds(self) -> list[str]:
        """Describe each parameter as far as a reduction of gradients depends on it."""
        kinds = []
        for place in self._places:
            parameter = place.parameter()
            if parameter is None:
                kinds.append("gone")
                continue
            use = "trained" if parameter.requires_grad else "frozen"
            dtype = str(parameter.dtype).removeprefix("torch.")
            kinds.append(f"{use}, {dtype} of shape {tuple(parameter.shape)}")
        return kinds


@dataclass(frozen=True)
class _Place:
    """A parameter, as a name in its layer."""

    owner: "ref[nn.Module]"
    name: str

    def parameter(self) -> Tensor | None:
        """Return the present parameter, or None if there is none."""
        owner = self.owner()
        return None if owner is None else owner._parameters.get(self.name)


replicas: Final[WeakKeyDictionary[nn.Module, dict[str, Replicas]]] = WeakKeyDictionary()
"""For each layer the processes that have replicas of its parameters, by name.

:func:`fp8manifold.distributed.sync` sets it.
"""


@dataclass(frozen=True)
class Share:
    """The rows of a parameter that this process has: a run of the first dimension."""

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
    def first_row(self) -> int:
        """Position of the first local row in the whole."""
        return min(self.ranks.rank * self.rows, self.shape[0])

    @property
    def offset(self) -> int:
        """Position of the first local element in the whole."""
        return self.first_row * self.shape[1:].numel()

    def local_rows(self, whole: Tensor) -> Tensor:
        """Return the rows of a whole tensor that this process has."""
        return whole[self.first_row : self.first_row + self.local.shape[0]]

    def gather_rows(self, local_rows: Tensor) -> Tensor:
        """Return all rows, in every process."""
        return self.ranks.gather(self.pad_rows(local_rows))[: self.shape[0]]

    def collect_rows(self, local_rows: Tensor, owner: int) -> Tensor | None:
        """Gather a matrix in its owner; return None in the other processes."""
        if self.ranks.size == 1:
            return local_rows
        part = bytes_of(self.pad_rows(local_rows))
        parts = None
        if self.ranks.rank == owner:
            parts = [torch.empty_like(part) for _ in range(self.ranks.size)]
        torch.distributed.gather(part, parts, group=self.ranks.group, group_dst=owner)
        if parts is None:
            return None
        padded = torch.cat(parts).view(local_rows.dtype).reshape(-1, *local_rows.shape[1:])
        return padded[: self.shape[0]]

    def scatter_rows(self, whole: Tensor | None, owner: int, like: Tensor) -> Tensor:
        """Scatter a matrix from its owner; return the local rows, shaped like ``like``.

        Args:
            whole: the matrix in its owner, and None in the other processes.
            owner: the rank of the process that has the matrix.
            like: local rows in the dtype and with the columns of the matrix.
        """
        if self.ranks.size == 1:
            assert whole is not None
            return whole
        part = torch.empty_like(bytes_of(self.pad_rows(like)))
        parts = None
        if whole is not None:
            missing = self.rows * self.ranks.size - len(whole)
            padded = torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])
            parts = list(bytes_of(padded).split(part.numel()))
        torch.distributed.scatter(part, parts, group=self.ranks.group, group_src=owner)
        return part.view(like.dtype).reshape(-1, *like.shape[1:])[: len(like)]

    def pad_rows(self, local_rows: Tensor) -> Tensor:
        """Return as many rows as the first process has, contiguous.

        Nobody reads the rows that are added in the last processes.
        """
        missing = self.rows - local_rows.shape[0]
        if not missing:
            return local_rows.contiguous()
        return torch.cat([local_rows, local_rows.new_zeros((missing, *local_rows.shape[1:]))])


def bytes_of(x: Tensor) -> Tensor:
    """Return the bytes of a tensor, flat, without a copy if it is contiguous."""
    # with one column or element a contiguous tensor may have any strides
    flat = x.contiguous().resolve_neg().as_strided((x.numel(),), (1,))
    return flat.view(torch.uint8)


def has_own_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's elements lie at its address.

    Those of wrapper subclasses lie in the tensors that they hold, if anywhere.
    """
    if type(tensor) is Tensor or not tensor.numel():
        return True
    try:
        return bool(tensor.as_subclass(Tensor).data_ptr())
    except RuntimeError:
        # of tensors within torch's transforms
        return False


def local_of(x: Any) -> Any:
    """Return the part of a DTensor that this process has; anything else as it is."""
    return x if type(x) is Tensor else getattr(x, "_local_tensor", x)


def share_of(parameter: Tensor) -> Share | None:
    """Return the rows of a parameter that this process has; None for a whole one."""
    # not imported: there are no DTensors
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None or not isinstance(parameter, tensors.DTensor):
        return None
    mesh = parameter.device_mesh
    return Share(
        local_of(parameter), Ranks(mesh.get_group(0)), parameter.shape, mesh, parameter.placements
    )


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules whose parameters ``fully_shard`` has cut into rows.

    A forward pass may leave their parameters whole until ``module.reshard()``.
    """
    # not imported: no module is sharded
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(model, nn.Module):
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def check_share(parameter: Tensor) -> None:
    """Raise ValueError for a DTensor that is not spread as by ``fully_shard``.

    It has to be spread by rows, with their scales, over a mesh of one dimension.
    """
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None or not isinstance(parameter, tensors.DTensor):
        return
    mesh, placements = parameter.device_mesh, tuple(parameter.placements)
    if not getattr(local_of(parameter), "is_shard", True):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} in codes became a DTensor without its "
            "scales: only fully_shard gives rows their scales; use that, or "
            "DistributedDataParallel"
        )
    if mesh.ndim != 1 or type(placements[0]) is not tensors.Shard or placements[0].dim != 0:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is spread as {placements} over a mesh "
            f"of {mesh.ndim} dimensions: tensor parallelism, HSDP and their combinations are not "
            "supported; use fully_shard over a mesh of one dimension, which shards rows, or "
            "DistributedDataParallel"
        )


def spread(parameter: Tensor, array: Tensor) -> Tensor:
    """Return a DTensor spread like a parameter.

    Args:
        parameter: if it is not spread, ``array`` is returned as it is.
        array: one row for each row of the parameter that this process has.
    """
    share = share_of(parameter)
    if share is None:
        return array
    shape = torch.Size((share.shape[0], *array.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    dtensor: Any = sys.modules["torch.distributed.tensor"].DTensor
    distributed: Tensor = dtensor.from_local(
        array, share.mesh, share.placements, run_check=False, shape=shape, stride=stride
    )
    return distributed


def ranks_of(parameters: Iterable[Tensor]) -> list[Ranks]:
    """Return the groups of processes that step these parameters together, each once.

    The list is empty for a single process.
    """
    by_group: dict[Any, Ranks] = {}
    for ranks in ranks_by_parameter(parameters):
        if ranks is not None:
            by_group.setdefault(ranks.group, ranks)
    return list(by_group.values())


def ranks_by_parameter(parameters: Iterable[Tensor]) -> list[Ranks | None]:
    """Return the processes that step each parameter together; None for a single one."""
    parameters = list(parameters)
    if not _DISTRIBUTED or not torch.distributed.is_initialized():
        return [None] * len(parameters)
    replicas_by_id: dict[int, Ranks] = {}
    for owner, ranks_by_name in replicas.items():
        for name, ranks in ranks_by_name.items():
            replicas_by_id[id(owner._parameters.get(name))] = ranks
    result: list[Ranks | None] = []
    for parameter in parameters:
        share = share_of(parameter)
        group = replicas_by_id.get(id(parameter)) if share is None else share.ranks
        result.append(group if group is not None and group.size > 1 else None)
    return result
