"""Full-rank training of Llama-3.1-8B's and Llama-2-7B's shapes in one byte per weight,
under a cap on memory.

    cd benchmarks && python -m _gpu.eight_billion --shape Llama-3.1-8B --optimizer
    StiffnessMuon --gb 24

Weights are random and made a block at a time, so that no whole model in 16 bits ever
exists except the peer's. Each row runs in a separate process, whose memory torch caps;
blocks are recomputed in the backward pass, the loss is computed in chunks, and each
gradient is stepped with and freed as soon as it is computed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import fp8manifold as fm
from _gpu.llama import SHAPES, Llama
from _gpu.session import Session, one_byte
from _gpu.steps import PEERS, peer

__all__ = ["eight_billion"]

PEER: Final = "torchao's AdamW8bit"
OPTIMIZERS: Final = ("StiffnessMuon", "StiffnessAdamW", PEER)
#: (shape, optimizer, gigabytes), by worth; the peer is expected to run out of memory,
#: or to say what it needs
ROWS: Final = (
    ("Llama-3.1-8B", "StiffnessMuon", 24),
    ("Llama-2-7B", "StiffnessMuon", 16),
    ("Llama-3.1-8B", "StiffnessAdamW", 24),
    ("Llama-2-7B", "StiffnessAdamW", 16),
    ("Llama-3.1-8B", PEER, 24),
)
TOKENS: Final = (2048, 512)  # of a step: the second where the first does not fit
OUT_OF_MEMORY: Final = "out of memory"


def eight_billion(session: Session) -> dict[str, Any]:
    """Peak memory, tokens per second, and the first and last loss of 20 steps over a
    text with something to learn.
    """
    found: dict[str, Any] = {}
    for shape, optimizer, gigabytes in ROWS[:: 2 if session.dry else 1]:
        if optimizer == PEER and peer(*PEERS[PEER][:2]) is None:
            continue
        for tokens in TOKENS:
            if not session.has_time:
                return found
            options = {
                "shape": "tiny" if session.dry else shape,
                "optimizer": optimizer,
                "gb": gigabytes,
                "tokens": tokens,
            }
            if session.dry:
                options |= {"tokens": 32, "steps": 3}
            figures = in_a_process(options, session)
            found[f"{shape}, {optimizer}, {gigabytes} GB, {tokens} tokens"] = figures
            if figures.get("peak GB") != OUT_OF_MEMORY:
                break
    return found


def in_a_process(options: dict[str, Any], session: Session) -> dict[str, Any]:
    """A row's figures, from a fresh process, or why there are none."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    path = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "_gpu.eight_billion",
                *words,
                *(["--dry"] if session.dry else []),
            ],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=None if session.dry else max(session.seconds_left, 1.0),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": "no time was left for it"}
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def train(asked: argparse.Namespace) -> dict[str, Any]:
    """The figures of one row."""
    session = Session(asked.dry)
    if not asked.dry:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(asked.gb * 1e9 / whole, 1.0))
    torch.manual_seed(0)
    losses: list[float] = []
    times: list[float] = []
    try:
        model = made(session, asked.shape, in_codes=asked.optimizer != PEER)
        optimizer = prepared(session, model, asked.optimizer)
        follows = torch.randint(
            0, SHAPES[asked.shape].vocabulary, (SHAPES[asked.shape].vocabulary,)
        )
        for _ in range(asked.steps):
            text = walk(follows, asked.tokens + 1).to(session.device)
            begun = time.perf_counter()
            loss = model(text[:, :-1], text[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            times.append(time.perf_counter() - begun)
    except torch.OutOfMemoryError as error:
        return {"peak GB": OUT_OF_MEMORY, "reason": str(error).partition(". ")[0]}
    usual = sorted(times[1:])[len(times[1:]) // 2]
    found = {"tokens/s": asked.tokens / usual, "first loss": losses[0], "loss": losses[-1]}
    found["weights"] = sum(p.numel() for p in model.parameters())
    for name, peak in (("peak GB", "max_memory_allocated"), ("reserved GB", "max_memory_reserved")):
        found[name] = 0.0 if session.dry else getattr(torch.cuda, peak)() / 1e9
    return found


def made(session: Session, shape: str, in_codes: bool) -> Llama:
    """The model with random weights of deviation 0.02, in one byte each except the
    norms, or in bfloat16.
    """
    with torch.device("meta"):
        model = Llama(SHAPES[shape]).to(torch.bfloat16)
    for block in model.blocks:
        put_random(session, block)
        if in_codes:
            one_byte(block)
    for rest in (model.embedding, model.norm, model.lm_head):
        put_random(session, rest)
    if in_codes:
        fm.quantize_model(model, {"lm_head": "E4M3"}, storage="fp8", embeddings="E4M3")
    return model


def put_random(session: Session, module: nn.Module) -> None:
    """Give a module on the meta device values."""
    module.to_empty(device=session.device)
    for p in module.parameters():
        p.data.fill_(1.0) if p.dim() == 1 else p.data.normal_(0, 0.02)


def prepared(session: Session, model: Llama, name: str) -> Any:
    """The optimizer, which steps each parameter in the backward pass where it can."""
    if name == PEER:
        package, kind, options = PEERS[PEER]
        return peer(package, kind)(model.parameters(), lr=5e-4, **options)
    if name == "StiffnessMuon":
        products: dict[str, Any] = {"ns_dtype": torch.bfloat16} if session.dry else {}
        optimizer: Any = fm.optim.StiffnessMuon.for_model(
            model, lr=2e-3, other_lr=5e-4, moments="8bit", **products
        )
    else:
        optimizer = fm.optim.StiffnessAdamW(model.parameters(), lr=5e-4, moments="8bit")
    fm.optim.step_in_backward(optimizer, clip="previous", max_norm=1.0, first="measure")
    return optimizer


def walk(follows: Tensor, length: int) -> Tensor:
    """A text (1, length) in which nine of ten tokens follow from the one before."""
    rule, at, out = follows.tolist(), 1, []
    others = torch.randint(0, len(rule), (length,)).tolist()
    for flips, other in zip((torch.rand(length) < 0.1).tolist(), others, strict=True):
        at = other if flips else rule[at]
        out.append(at)
    return torch.tensor([out])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="Llama-3.1-8B")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0])
    parser.add_argument("--gb", type=float, default=24.0, help="the cap, in 10^9 bytes")
    parser.add_argument("--tokens", type=int, default=TOKENS[0], help="of a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dry", action="store_true", help="on a CPU")
    asked = parser.parse_args()
    if asked.dry:
        torch.compiler.set_stance("force_eager")
    print(json.dumps(train(asked)))


if __name__ == "__main__":
    main()
