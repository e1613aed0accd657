"""What has changed since a server was last told."""

from typing import Any

import torch
from torch import Tensor

from fp8manifold._served.apply import apply_changes
from fp8manifold._served.patch import Patch, as_integers
from fp8manifold._served.unit import Shard
from fp8manifold._served.weights import ServedWeights


class ServedChanges:
    r"""The entries of served weights that have changed since the last call, as patches.

    .. math:: \{(i, v_i) : v_i \ne u_i\}

    Here ``u`` are the bits at the last call, of which a copy is kept, and ``v`` the
    bits now. A server that had the weights when this object was made has them again, to
    the byte, after each round of patches (:func:`apply_changes`).

    Args:
        weights: the result of :func:`served_weights`. For a sharded model each process
            has the patches of its rows, with positions in the whole tensor. For one that
            each process has whole, as under DDP, each has all patches, and one sends
            them.
        shadow: device of the copy, which takes one byte per weight in codes.

    Attributes:
        shadow: the copy, by name.

    NaN equals itself here, and -0 is not 0: bits are compared.

    Raises:
        TypeError, ValueError: no weights of :func:`served_weights`; as iterating them.

    Example:
        >>> from torch import nn
        >>> import fp8manifold as fm
        >>> model = fm.quantize_model(nn.Sequential(nn.Linear(32, 8)), "E4M3")
        >>> weights = fm.served_weights(model)
        >>> changes, server = fm.ServedChanges(weights), {n: t.clone() for n, t in weights}
        >>> model[0].weight.codes[3, 5] ^= 1
        >>> patches = changes.since_last()
        >>> [(patch.name, patch.indices.tolist()) for patch in patches]
        [('0.weight', [101])]
        >>> fm.apply_changes(server, patches)
        >>> all(torch.equal(server[n].view(torch.uint8), t.view(torch.uint8)) for n, t in weights)
        True
        >>> changes.since_last()
        []
    """

    def __init__(self, weights: ServedWeights, shadow: torch.device | str = "cpu") -> None:
        if not isinstance(weights, ServedWeights):
            raise TypeError(
                f"weights must be those of fm.served_weights(model), not {type(weights).__name__}"
            )
        self.weights = weights
        device = torch.device(shadow)
        self.shadow: dict[str, Tensor] = {
            name: tensor.detach().to(device, copy=True).contiguous()
            for name, tensor, _ in weights._own_shards()
        }

    def since_last(self) -> list[Patch]:
        """Return what has changed since the last call, or since this was made.

        Raises:
            ValueError: a tensor of another shape or dtype, or one that is new or gone: the
                server needs all weights again.
        """
        patches = []
        local_patches = []
        seen = set()
        for shard in self.weights._own_shards():
            seen.add(shard.name)
            old = self._old(shard)
            new = shard.tensor.detach().to(old.device).contiguous()
            indices = (as_integers(new) != as_integers(old)).nonzero().view(-1)
            if not len(indices):
                continue
            values = as_integers(new)[indices].view(new.dtype)
            local_patches.append(Patch(shard.name, tuple(new.shape), new.dtype, indices, values))
            offset, shape = shard.place
            indices = (indices + offset).to(_index_dtype(shape))
            patches.append(Patch(shard.name, shape, new.dtype, indices, values))
        gone = sorted(self.shadow.keys() - seen)
        if gone:
            raise ValueError(
                f"{gone[0]!r} is no longer there: send all weights and make a new ServedChanges"
            )
        # After all of them were read: a pass that raises is told again.
        apply_changes(self.shadow, local_patches)
        return patches

    def _old(self, shard: Shard) -> Tensor:
        old = self.shadow.get(shard.name)
        if old is None or old.shape != shard.tensor.shape or old.dtype != shard.tensor.dtype:
            before: Any = None if old is None else (old.dtype, tuple(old.shape))
            now = (shard.tensor.dtype, tuple(shard.tensor.shape))
            raise ValueError(
                f"{shard.name!r} is {now}, but was {before}: send all weights and make a new "
                "ServedChanges"
            )
        return old


def _index_dtype(shape: tuple[int, ...]) -> torch.dtype:
    size = torch.Size(shape).numel()
    return torch.int32 if size <= torch.iinfo(torch.int32).max else torch.int64
