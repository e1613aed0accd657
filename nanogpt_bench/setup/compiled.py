"""The model's loss under torch.compile (`runtime.compile`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nanogpt_bench.system.errors import BenchError, one_line


class CompiledLoss:
    """`model.loss`, compiled; as it is written while anybody has hooked himself into a layer.

    Hooks come and go with the monitors' intervals: tracing them would compile the model anew each time, and hand out
    tensors that the compiled step would not have kept.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._compiled = torch.compile(model.loss, dynamic=False)
        self._own_hooks = _hooks(model)

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats, as `GPT.loss` does.

        Raises:
            BenchError: the model can't be compiled here, for want of a C++ compiler, say.
        """
        if _hooks(self._model) != self._own_hooks:
            loss: Tensor = self._model.loss(tokens, targets)
            return loss
        try:
            loss = self._compiled(tokens, targets)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = one_line(str(error).partition("from user code")[0].partition("Set TORCH")[0])
            raise BenchError(f"runtime.compile: the model can't be compiled: {reason}") from None
        return loss


def _hooks(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    )
