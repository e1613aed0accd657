"""Training as other projects measure it: GPT-2 with attention, its FLOP count, compiled
and eager, beside bfloat16.
"""

import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import fp8manifold as fm
from _gpu.llama import Block, Shape
from _gpu.session import PRODUCTS, Session, on_card, one_byte
from _gpu.steps import PEERS, fused, peer
from nanogpt_bench.model.gpt import GPT, GPTShape

__all__ = ["flops_per_token", "losses", "one_block", "training_768", "training_2048"]

PEAK: Final = 989e12  # products of bfloat16 an H100 SXM adds up in a second, by its data sheet
LR: Final = 3e-4
REFERENCE: Final = "bfloat16, fused AdamW"
OURS: Final = {
    f"one byte, {products}": products
    for products in (*PRODUCTS, *(["fp8, dW"] if PRODUCTS[1:] else []))
}
OTHERS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    **{
        f"bfloat16 weights, {name}": facts
        for name, facts in PEERS.items()
        if name.endswith("AdamW8bit")
    },
    "torchao's float8, tensorwise, fused AdamW": (
        "torchao.float8",
        "convert_to_float8_training",
        {},
    ),
}


def shape_of(session: Session, width: int) -> GPTShape:
    """Twelve blocks, GPT-2's except for the vocabulary, which is padded to a multiple
    of 64 as usual.
    """
    if session.dry:
        return GPTShape(1, 2, 32, 16, vocab_size=64, tie_weights=True)
    return GPTShape(12, width // 64, width, 1024, vocab_size=50_304, tie_weights=True, gelu="tanh")


def flops_per_token(model: GPT) -> float:
    """Six per weight of the linear layers, with the head and without the embedding, and
    attention's products.

    Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    return 6.0 * weights + 12.0 * model.shape.n_layer * model.shape.n_embd * model.shape.block_size


def prepared(session: Session, model: GPT, kind: str) -> Any:
    """Turn a float32 model into the model of a row; the optimizer, or None if its
    package is missing.
    """
    if kind == REFERENCE:
        return fused(session)(model.parameters(), lr=LR)
    if kind in OURS:
        one_byte(model, OURS[kind], left=("lm_head",))
        return fm.optim.StiffnessAdamW(model.parameters(), LR, moments="8bit")
    package, name, options = OTHERS[kind]
    if (found := peer(package, name)) is None:
        return None
    if package == "torchao.float8":
        config = peer(package, "Float8LinearConfig")(emulate=session.dry)
        found(model, config=config, module_filter_fn=lambda _, name: not name.endswith("lm_head"))
        return fused(session)(model.parameters(), lr=LR)
    return found(model.bfloat16().parameters(), lr=LR, **options)


def stepping(
    session: Session, model: GPT, kind: str, way: str
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """A whole step of training over (tokens, targets), whose loss it returns; a dry run
    records no graphs.
    """
    optimizer = prepared(session, model, kind)
    if optimizer is None:
        return None
    loss_of = model.loss if way == "eager" else torch.compile(model.loss)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(
            session.device.type, torch.bfloat16, enabled=not kind.startswith("bfloat16 weights")
        ):
            loss = loss_of(tokens, targets)
        loss.backward()
        with on_card(session):
            optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return fm.optim.graphed(step, optimizer) if way == "graphed" and not session.dry else step


def training(session: Session, width: int) -> dict[str, Any]:
    """Tokens per second, the share of the GPU's peak rate of products, and peak memory,
    for steps of 8,192 tokens.
    """
    found: dict[str, Any] = {}
    by_worth = [("compiled", REFERENCE), *product(("compiled", "graphed"), OURS)]
    for way, kind in [
        *by_worth,
        *product(("eager",), (REFERENCE, *OURS)),
        *product(("compiled",), OTHERS),
    ]:
        session.case(found, f"{kind}, {way}", partial(trained, session, width, kind, way))
    return {name: figures for name, figures in found.items() if figures}


def trained(session: Session, width: int, kind: str, way: str) -> dict[str, float]:
    """The figures of one row; none if its package is missing."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = GPT(shape := shape_of(session, width)).to(session.device)
    flops = flops_per_token(model)
    step = stepping(session, model, kind, way)
    if step is None:
        return {}
    text = torch.randint(
        0, shape.vocab_size, (2 if session.dry else 8, shape.block_size + 1), device=session.device
    )
    if not session.dry:
        torch.cuda.reset_peak_memory_stats()
    figures = session.times(partial(step, text[:, :-1], text[:, 1:]), repeats=8)
    tokens, seconds = text[:, 1:].numel(), figures["ms"] / 1e3
    figures |= {"tokens/s": tokens / seconds, "MFU": tokens * flops / (PEAK * seconds)}
    return figures | {"peak GB": 0.0 if session.dry else torch.cuda.max_memory_allocated() / 1e9}


def training_768(session: Session) -> dict[str, Any]:
    """GPT-2's 124M."""
    return training(session, 768)


def training_2048(session: Session) -> dict[str, Any]:
    """Twelve blocks of 2,048."""
    return training(session, 2048)


def one_block(session: Session) -> dict[str, Any]:
    """Forward and backward pass of a block of Llama-2-7B over 8,192 tokens, its weights
    in bfloat16 or one byte.
    """
    shape = Shape(64, 128, 1, 4, 4, 1) if session.dry else Shape(4096, 11_008, 1, 32, 32, 1)
    found: dict[str, Any] = {}
    for compiled, kind in product((True, False), ("bfloat16", *OURS)):
        name = f"{kind}, {'compiled' if compiled else 'eager'}"
        session.case(found, name, partial(block_times, session, shape, kind, compiled))
    return found


def block_times(session: Session, shape: Shape, kind: str, compiled: bool) -> dict[str, float]:
    """Times of one row."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    block: Any = Block(shape).to(session.device, torch.bfloat16)
    if kind in OURS:
        block = one_byte(block, OURS[kind])
    x = session.normal(
        2, 16 if session.dry else 4096, shape.width, dtype=torch.bfloat16
    ).requires_grad_()
    call = torch.compile(block) if compiled else block
    return session.times(partial(passes, block, call, x, torch.randn_like(x)), repeats=8)


def passes(block: nn.Module, call: Any, x: Tensor, g: Tensor) -> None:
    """A forward and a backward pass."""
    call(x).backward(g)
    x.grad = None
    block.zero_grad()


def losses(session: Session) -> dict[str, Any]:
    """The mean training loss of the last 20 of 200 steps of the 124M model over the
    bytes of Python's own sources.
    """
    found: dict[str, Any] = {}
    for kind in (REFERENCE, *OURS):
        session.case(found, kind, partial(last_loss, session, kind))
        if "loss" in found.get(kind, {}) and "loss" in found[REFERENCE]:
            found[kind]["loss over bfloat16's"] = found[kind]["loss"] - found[REFERENCE]["loss"]
    return found


def last_loss(session: Session, kind: str) -> dict[str, float]:
    """Last loss of one row."""
    steps, last = (4, 2) if session.dry else (200, 20)
    torch.manual_seed(0)
    model = GPT(shape := shape_of(session, 768)).to(session.device)
    step = stepping(session, model, kind, "eager")
    assert step is not None, "torch's and our own optimizers are there"
    texts = sources(2 if session.dry else 8, shape.block_size, shape.vocab_size)
    every = [step(*(part.to(session.device) for part in next(texts))) for _ in range(steps)]
    return {"loss": torch.stack(every[-last:]).mean().item()}


def sources(rows: int, length: int, vocabulary: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of the standard library's modules by name, byte by byte, each byte once."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8
    )
    for batch in text.long().clamp(max=vocabulary - 1).split(rows * (length + 1)):
        rows_of_it = batch.view(rows, length + 1)
        yield rows_of_it[:, :-1], rows_of_it[:, 1:]
