"""Bytes a weight that a training step needs: weights, gradients and optimizer state at their peak.

    python benchmarks/training_memory.py [--size 124M] [--tokens 16] [--markdown | --json] [--record]

A GPT of GPT-2's shape, its head tied to its embedding, does two steps on a few tokens.  Counted are the live tensors:
the parameters' own bytes with their scales, the optimizer's state, and every gradient that a parameter holds, at the
moment within the backward pass or the step at which they are most.  What autograd holds for the forward pass, and what
it sums up before a parameter has it, is not counted; it is the same for all rows.

Under ``E4M3`` every matrix, embeddings included, is a byte a weight; norms and biases are float32.
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from _forms import add_form_options, text_table
from _record import Cell, add_option, record
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.model.gpt import GPT, SIZES

Made = Callable[[nn.Module], torch.optim.Optimizer]


def muon(**options: Any) -> Made:
    """StiffnessMuon over a whole model."""
    return lambda model: fm.optim.StiffnessMuon.for_model(model, 1e-3, **options)


#: label, format, dtype of values and gradients, optimizer, whether it steps in the backward pass
ROWS: Final[dict[str, tuple[str | None, torch.dtype, Made, bool]]] = {
    "float32, AdamW": (None, torch.float32, lambda m: torch.optim.AdamW(m.parameters(), 1e-3), False),
    "float32, Muon": (None, torch.float32, muon(), False),
    "E4M3, Muon, 8-bit averages": ("E4M3", torch.float32, muon(moments="8bit"), False),
    "the same, step in backward": ("E4M3", torch.float32, muon(moments="8bit"), True),
    "the same, gradients in bfloat16": ("E4M3", torch.bfloat16, muon(moments="8bit"), True),
}


def model_of(size: str, fmt: str | None, dtype: torch.dtype) -> nn.Module:
    """The GPT, quantised or not."""
    torch.manual_seed(0)
    model = GPT(SIZES[size])
    if fmt is None:
        return model.to(dtype)
    tied = {id(p) for p in model.token_embedding.parameters()} & {id(p) for p in model.lm_head.parameters()}
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Embedding) and not isinstance(layer.weight, fm.FP8Tensor):
            layer.weight = fm.FP8Parameter(layer.weight.detach().to(dtype), fmt)
    if tied:
        model.lm_head.weight = model.token_embedding.weight
    return model.to(dtype) if dtype != torch.float32 else model


def held(tensors: list[Tensor]) -> int:
    """Bytes of tensors, those of codes with their scales."""
    return sum(t.codes.nbytes + t.scale.nbytes if isinstance(t, fm.FP8Tensor) else t.nbytes for t in tensors)


class Meter:
    """Adds up what lives whenever a gradient has come, after the optimizer's own hook."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.parameters, self.optimizer, self.peak, self.least = list(model.parameters()), optimizer, 0, 0
        self.largest_gradient = 0

    def watch(self) -> None:
        """Look once before the step of each parameter and once after."""
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.look)

    def look(self, _: Tensor | None = None) -> None:
        """Take down what lives now."""
        gradients = [p.grad for p in self.parameters if type(p.grad) is Tensor]
        self.largest_gradient = max([self.largest_gradient, *(g.nbytes for g in gradients)])
        self.peak = max(self.peak, self.kept() + sum(g.nbytes for g in gradients))

    def kept(self) -> int:
        """Weights and state."""
        state = [v for entry in self.optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]
        return held(self.parameters) + held(state)


def measure(label: str, size: str, tokens: int) -> dict[str, Any]:
    """Two steps of one row."""
    fmt, dtype, made, in_backward = ROWS[label]
    model = model_of(size, fmt, dtype)
    optimizer = made(model)
    meter = Meter(model, optimizer)
    meter.watch()  # before the optimizer's hooks: a gradient is seen while it is there
    if in_backward:
        fm.optim.step_in_backward(optimizer)
    numbers = torch.randint(0, SIZES[size].vocab_size, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        optimizer.zero_grad()
        loss = model.loss(numbers[:, :-1], numbers[:, 1:])
        loss.backward()
        optimizer.step()
        meter.look()
    count = sum(p.numel() for p in meter.parameters)
    assert torch.isfinite(loss)
    return {
        "label": label,
        "parameters": count,
        "kept": meter.kept() / count,
        "largest": meter.largest_gradient / count,
        "peak": meter.peak / count,
    }


HEADER: Final = ("training", "weights and state", "largest gradient", "peak with gradients")
RECORDED: Final = ("bytes a weight", *HEADER[1:])


def table(rows: list[dict[str, Any]], markdown: bool) -> str:
    """Bytes a weight as Markdown or in columns."""
    lines = [HEADER, *((r["label"], f"{r['kept']:.2f}", f"{r['largest']:.2f}", f"{r['peak']:.2f}") for r in rows)]
    return text_table(lines, ("---", "---:", "---:", "---:"), markdown)


def main() -> int:
    parser = argparse.ArgumentParser(description="Bytes a weight of a training step.")
    parser.add_argument("--size", choices=list(SIZES), default="124M")
    parser.add_argument("--tokens", type=int, default=16)
    add_form_options(parser)
    add_option(parser)
    options = parser.parse_args()
    rows = []
    for label in ROWS:
        print(label, file=sys.stderr, flush=True)
        rows.append(measure(label, options.size, options.tokens))
    if options.json:
        print(json.dumps(rows))
    else:
        print(f"torch {torch.__version__}, {rows[0]['parameters']:,} parameters; bytes a weight")
        print(table(rows, options.markdown))
    if options.record:
        cells: list[tuple[Cell, ...]] = [
            (row["label"], round(row["kept"], 2), round(row["largest"], 2), round(row["peak"], 2)) for row in rows
        ]
        record("", RECORDED, cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
