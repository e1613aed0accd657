"""Full-rank training of 7, 8 and 14 billion one-byte weights, under a cap on memory.

    cd benchmarks
    python -m _gpu.eight_billion --shape Llama-3.1-8B --optimizer StiffnessMuon --gb 24

Weights are random and made a block at a time, so that no whole model in 16 bits ever
exists except the peer's. Each row runs in a separate process, whose memory torch caps.
Blocks are recomputed in the backward pass, the loss is computed in chunks, and each
gradient is stepped with and freed as soon as it is computed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

import fp8manifold as fm
from _gpu.llama import LLAMA_SHAPES, Llama
from _gpu.session import Session, one_byte
from _gpu.steps import PEERS, find_peer

__all__ = ["eight_billion"]

PEER: Final = "torchao's AdamW8bit"
TRAINED_OPTIMIZERS: Final = (
    "StiffnessAdafactor",
    "StiffnessMuon",
    "StiffnessAdamW",
    "StiffnessLion",
    PEER,
)


class CappedTraining(NamedTuple):
    """A training."""

    shape: str
    optimizer: str
    #: the cap on memory
    gigabytes: int
    #: of a step
    tokens: int
    steps: int


#: tokens of a step, and the steps of a training
SHORT, LONG = (2048, 20), (16_384, 4)
#: by worth: caps of a card, then speed beside other optimizers; the peer is expected to
#: run out of memory, or to say what it needs
TRAININGS: Final = (
    CappedTraining("Llama-3.1-8B", "StiffnessAdafactor", 12, *SHORT),
    CappedTraining("Llama-3.1-8B", "StiffnessAdafactor", 16, *SHORT),
    CappedTraining("Qwen2.5-14B", "StiffnessAdafactor", 24, *SHORT),
    CappedTraining("Llama-3.1-8B", "StiffnessMuon", 24, *SHORT),
    CappedTraining("Llama-3.1-8B", "StiffnessLion", 24, *SHORT),
    CappedTraining("Llama-3.1-8B", "StiffnessAdamW", 32, *SHORT),
    CappedTraining("Llama-3.1-8B", "StiffnessAdafactor", 24, *LONG),
    CappedTraining("Llama-3.1-8B", "StiffnessMuon", 32, *LONG),
    CappedTraining("Llama-3.1-8B", "StiffnessAdamW", 40, *LONG),
    CappedTraining("Llama-2-7B", "StiffnessMuon", 16, *SHORT),
    CappedTraining("Llama-3.1-8B", PEER, 24, *SHORT),
)
OUT_OF_MEMORY: Final = "out of memory"


def eight_billion(session: Session) -> dict[str, Any]:
    """Train each row over a text with something to learn.

    Figures are peak memory, tokens per second, and the first and the last loss. Rows
    whose optimizer is not there are left out. A dry run has one row of each optimizer.
    """
    figures: dict[str, Any] = {}
    trained = set[str]()
    for row in TRAININGS:
        if not has_optimizer(row.optimizer) or (session.dry and row.optimizer in trained):
            continue
        if not session.has_time:
            return figures
        trained.add(row.optimizer)
        name = f"{row.shape}, {row.optimizer}, {row.gigabytes} GB, {row.tokens} tokens"
        figures[name] = train_in_a_process(row, session)
    return figures


def has_optimizer(name: str) -> bool:
    """Return whether the library, or the peer's package, has an optimizer."""
    if name != PEER:
        return hasattr(fm.optim, name)
    peer = PEERS[PEER]
    return find_peer(peer.package, peer.name) is not None


def train_in_a_process(row: CappedTraining, session: Session) -> dict[str, Any]:
    """Return a row's figures, from a fresh process, or why there are none."""
    command = [sys.executable, "-m", "_gpu.eight_billion"]
    command += ["--optimizer", row.optimizer, "--gb", str(row.gigabytes)]
    if session.dry:
        command += ["--shape", "tiny", "--tokens", "32", "--steps", "3", "--dry"]
    else:
        command += ["--shape", row.shape, "--tokens", str(row.tokens)]
        command += ["--steps", str(row.steps)]
    path = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    try:
        process = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=None if session.dry else max(session.seconds_left, 1.0),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": "no time was left for it"}
    if process.returncode:
        return {"error": process.stderr.strip().splitlines()[-1]}
    return dict(json.loads(process.stdout.splitlines()[-1]))


def train_row(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one row."""
    session = Session(options.dry)
    if not options.dry:
        card_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(options.gb * 1e9 / card_bytes, 1.0))
    torch.manual_seed(0)
    losses: list[float] = []
    times: list[float] = []
    try:
        model = random_model(session, options.shape, in_codes=options.optimizer != PEER)
        optimizer = make_optimizer(session, model, options.optimizer)
        vocabulary = LLAMA_SHAPES[options.shape].vocabulary
        successors = torch.randint(0, vocabulary, (vocabulary,))
        for _ in range(options.steps):
            text = random_text(successors, options.tokens + 1).to(session.device)
            begin = time.perf_counter()
            loss = model(text[:, :-1], text[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            times.append(time.perf_counter() - begin)
    except torch.OutOfMemoryError as error:
        return {"peak GB": OUT_OF_MEMORY, "reason": str(error).partition(". ")[0]}
    # The first step compiles.
    later = sorted(times[1:])
    return {
        "tokens/s": options.tokens / later[len(later) // 2],
        "first loss": losses[0],
        "loss": losses[-1],
        "weights": sum(p.numel() for p in model.parameters()),
        "peak GB": 0.0 if session.dry else torch.cuda.max_memory_allocated() / 1e9,
        "reserved GB": 0.0 if session.dry else torch.cuda.max_memory_reserved() / 1e9,
    }


def random_model(session: Session, shape: str, in_codes: bool) -> Llama:
    """Return the model with random weights of deviation 0.02.

    They are in one byte each except the norms, or in bfloat16.
    """
    with torch.device("meta"):
        model = Llama(LLAMA_SHAPES[shape]).to(torch.bfloat16)
    for block in model.blocks:
        set_random(session, block)
        if in_codes:
            one_byte(block)
    for module in (model.embedding, model.norm, model.lm_head):
        set_random(session, module)
    if in_codes:
        fm.quantize_model(model, {"lm_head": "E4M3"}, storage="codes", embeddings="E4M3")
    return model


def set_random(session: Session, module: nn.Module) -> None:
    """Give random values to a module on the meta device; norms get ones."""
    module.to_empty(device=session.device)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0, 0.02)


def make_optimizer(session: Session, model: Llama, name: str) -> Any:
    """Return the optimizer; one of ours steps each parameter in the backward pass."""
    if name == PEER:
        peer = PEERS[PEER]
        kind = find_peer(peer.package, peer.name)
        return kind(model.parameters(), lr=5e-4, **peer.options)
    if name == "StiffnessMuon":
        products: dict[str, Any] = {"ns_dtype": torch.bfloat16} if session.dry else {}
        optimizer: Any = fm.optim.StiffnessMuon.for_model(
            model, lr=2e-3, other_lr=5e-4, moments="8bit", **products
        )
    elif name == "StiffnessAdafactor":
        optimizer = fm.optim.StiffnessAdafactor(model.parameters(), lr=1e-3)
    elif name == "StiffnessLion":
        optimizer = fm.optim.StiffnessLion(model.parameters(), lr=1e-4, moments="8bit")
    else:
        optimizer = fm.optim.StiffnessAdamW(model.parameters(), lr=5e-4, moments="8bit")
    fm.optim.step_in_backward(optimizer, clip="previous", max_norm=1.0, first="measure")
    return optimizer


def random_text(successors: Tensor, length: int) -> Tensor:
    """Return a text (1, length) in which nine of ten tokens follow from the one before."""
    successor_of = successors.tolist()
    random_tokens = torch.randint(0, len(successor_of), (length,)).tolist()
    is_random = (torch.rand(length) < 0.1).tolist()
    token = 1
    text = []
    for place in range(length):
        token = random_tokens[place] if is_random[place] else successor_of[token]
        text.append(token)
    return torch.tensor([text])


def main() -> None:
    """Train one row, and print its figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=LLAMA_SHAPES, default="Llama-3.1-8B")
    parser.add_argument("--optimizer", choices=TRAINED_OPTIMIZERS, default="StiffnessMuon")
    parser.add_argument("--gb", type=float, default=24.0, help="the cap, in 10^9 bytes")
    parser.add_argument("--tokens", type=int, default=SHORT[0], help="of a step")
    parser.add_argument("--steps", type=int, default=SHORT[1])
    parser.add_argument("--dry", action="store_true", help="on a CPU")
    options = parser.parse_args()
    if options.dry:
        torch.compiler.set_stance("force_eager")
    print(json.dumps(train_row(options)))


if __name__ == "__main__":
    main()
