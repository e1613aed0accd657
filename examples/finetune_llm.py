"""
Fine-tuning all of a language model
===================================

All weights of a model of transformers learn from a text. Those of the linear layers
live in one byte each, and Adam's two averages of them in another byte each. Each
gradient is used and freed before the next is computed.

Without arguments a small Llama, pretrained on the Python reference, learns Python code.
With a folder that ``save_pretrained`` wrote and a text file, that model learns that
text. ``nanogpt-bench finetune`` adds checkpoints, monitors and a report.

Needs transformers (``pip install 'fp8manifold[hf]'``).  Expected output::

    as it was                    2.724
    in one byte per weight       2.721
    fine-tuned                   2.484
    bytes per weight with state  3.14
"""

import difflib
import inspect
import sys
from pathlib import Path
from pydoc_data import topics

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import fp8manifold as fm

BATCH, LENGTH, STEPS = 8, 64, 100


def text_bytes(text: str) -> Tensor:
    """Return the text with one token per byte."""
    return torch.tensor(list(text.encode("ascii", "replace")))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, steps: int) -> None:
    """Train on random stretches of the text, at a rate that falls to zero."""
    generator = torch.Generator().manual_seed(1)
    peak = optimizer.param_groups[0]["lr"]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak * (1 - step / steps)
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        batch = text[starts + torch.arange(LENGTH)]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def report(name: str, model: nn.Module, text: Tensor) -> None:
    """Print the loss on text that was not trained on, in nats per token."""
    batch = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)[:64]
    loss = model(input_ids=batch, labels=batch).loss.item()
    print(f"{name:<29}{loss:.3f}")


def finetune(model: nn.Module, text: Tensor, lr: float) -> None:
    """Round the linear layers to E4M3 and train everything."""
    test_start = -len(text) // 5
    training_text, test_text = text[:test_start], text[test_start:]
    report("as it was", model, test_text)
    fm.quantize_model(model, "E4M3", storage="codes", tied="leave")
    report("in one byte per weight", model, test_text)
    optimizer = fm.optim.StiffnessAdamW(
        model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0, moments="8bit"
    )
    fm.optim.step_in_backward(optimizer)
    train(model, optimizer, training_text, STEPS)
    report("fine-tuned", model, test_text)

    layer = next(module for module in model.modules() if isinstance(module, fm.QuantizedLinear))
    state = optimizer.state[layer.weight].values()
    state_bytes = sum(value.nbytes for value in state if isinstance(value, Tensor))
    size = (layer.weight.codes.nbytes + state_bytes) / layer.weight.numel()
    print(f"{'bytes per weight with state':<29}{size:.2f}")


def pretrained_llama() -> nn.Module:
    """Return a small Llama that has read the Python reference."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        max_position_embeddings=LENGTH,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    llama = LlamaForCausalLM(config)
    reference = text_bytes("\n".join(topics.topics.values())[:200_000])
    train(llama, torch.optim.AdamW(llama.parameters(), lr=3e-3), reference, steps=150)
    return llama


if __name__ == "__main__":
    if len(sys.argv) == 3:
        folder, path = sys.argv[1:]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokens = tokenizer(Path(path).read_text(encoding="utf-8"))["input_ids"]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        finetune(model, torch.tensor(tokens), lr=5e-5)
    else:
        finetune(pretrained_llama(), text_bytes(inspect.getsource(difflib)), lr=1e-3)
