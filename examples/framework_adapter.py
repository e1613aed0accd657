"""
An adapter for a training framework
===================================

What a framework needs to offer one-byte weights: ``Adapter`` below, in the order in which
a trainer calls its methods. Two trainers show it on a small Llama. The second one resumes
from a checkpoint of the first, in the middle, and takes the same steps to the bit. The
saved folder is then read by transformers alone.

Expected output::

    bytes of parameters: 0.27 of those in float32
    loss 4.17, after 20 steps 0.52, average 1.00
    resumed after 10 steps: largest difference of the losses 0.0
    read by transformers alone: largest difference of the logits 0.0
"""

import copy
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fp8manifold as fm


@dataclass(frozen=True)
class Settings:
    """The settings of a framework that matter to the adapter."""

    formats: str = "E4M3"
    lr: float = 1e-2
    strategy: str = "none"
    processes: int = 1
    steps_in_backward: bool = False


class Adapter:
    """One-byte weights for a trainer that owns the loop."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        if settings.strategy == "deepspeed":
            raise ValueError("strategy='deepspeed' has no place for codes: take 'ddp', 'fsdp2'")
        if settings.steps_in_backward and settings.processes > 1:
            raise ValueError("steps_in_backward=True is for one process: leave it out")
        # after weights are loaded and moved, before compile, DDP, fully_shard and optimizer
        self.model = fm.quantize_model(model, settings.formats, embeddings=settings.formats)
        self.optimizer = fm.optim.StiffnessAdamW(
            model.parameters(), lr=settings.lr, weight_decay=0.0, moments="8bit"
        )
        if settings.steps_in_backward:
            self.handle = fm.optim.step_in_backward(self.optimizer)
        self.average = fm.averaged_model(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def step(self, loss: torch.Tensor) -> float:
        """Take one step."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update_parameters(self.model)
        return loss.item()

    @property
    def bytes(self) -> int:
        """The bytes that the parameters take."""
        return fm.quantization_report(self.model).bytes

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on; the data's place is the trainer's."""
        parts = {"model": self.model, "optimizer": self.optimizer, "average": self.average}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, to the bit."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average.load_state_dict(state["average"])

    def export(self, folder: str) -> None:
        """Write a folder that transformers reads without this package."""
        fm.save(self.model, folder)


def network() -> LlamaForCausalLM:
    """Return a small Llama, with the same weights every time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, vocab_size=64))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """Return the loss on sequences that count up, each from a number of its own."""
    first = torch.randint(0, 64, (8, 1), generator=torch.Generator().manual_seed(step))
    tokens = (first + torch.arange(16)) % 64
    return model(input_ids=tokens, labels=tokens).loss


def main() -> None:
    """Train, resume, export, and print what came of it."""
    floats = 4 * network().num_parameters()
    adapter = Adapter(network(), Settings())
    print(f"bytes of parameters: {adapter.bytes / floats:.2f} of those in float32")
    losses = []
    for step in range(20):
        if step == 10:
            checkpoint = copy.deepcopy(adapter.state_dict())
        losses.append(adapter.step(loss_of(adapter.model, step)))
    average = loss_of(adapter.average.module, 20).item()
    print(f"loss {losses[0]:.2f}, after 20 steps {losses[-1]:.2f}, average {average:.2f}")

    resumed = Adapter(network(), Settings())
    resumed.load_state_dict(checkpoint)
    later = [resumed.step(loss_of(resumed.model, step)) for step in range(10, 20)]
    difference = max(abs(a - b) for a, b in zip(later, losses[10:], strict=True))
    print(f"resumed after 10 steps: largest difference of the losses {difference}")

    tokens = torch.arange(16)[None]
    with TemporaryDirectory() as folder, torch.no_grad():
        adapter.export(folder)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        logits = adapter.model.eval()(input_ids=tokens).logits
        difference = (plain(input_ids=tokens).logits - logits).abs().max().item()
    print(f"read by transformers alone: largest difference of the logits {difference}")


if __name__ == "__main__":
    main()
