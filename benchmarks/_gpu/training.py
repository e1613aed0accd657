"""Training as other projects measure it: GPT-2 with attention, compiled and eager.

One byte per weight stands beside bfloat16, with tokens per second and the share of the
GPU's peak rate, which follows from a count of FLOPs.
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
from _gpu.llama import LlamaBlock, LlamaShape
from _gpu.session import PRODUCTS, Session, on_card, one_byte
from _gpu.steps import PEERS, Peer, find_peer, fused
from nanogpt_bench.model.gpt import GPT, GPTShape

__all__ = ["flops_per_token", "losses", "one_block", "training_768", "training_2048"]

#: FLOP/s in bfloat16 of an H100 SXM, by its data sheet
PEAK: Final = 989e12
LR: Final = 3e-4
REFERENCE_KIND: Final = "bfloat16, fused AdamW"
#: rows of weights in one byte, and how their layers multiply
ONE_BYTE: Final = {f"one byte, {products}": products for products in PRODUCTS}
if PRODUCTS != ("decoded",):
    ONE_BYTE["one byte, fp8, dW"] = "fp8, dW"
#: rows of other packages
PEER_FORMS: Final = {
    f"bfloat16 weights, {name}": peer for name, peer in PEERS.items() if peer.name == "AdamW8bit"
}
PEER_FORMS["torchao's float8, tensorwise, fused AdamW"] = Peer(
    "torchao.float8", "convert_to_float8_training", {}
)


def shape_of(session: Session, width: int) -> GPTShape:
    """Return twelve blocks of GPT-2.

    The vocabulary is padded to a multiple of 64, as usual.
    """
    if session.dry:
        return GPTShape(1, 2, 32, 16, vocab_size=64, tie_weights=True)
    return GPTShape(12, width // 64, width, 1024, vocab_size=50_304, tie_weights=True, gelu="tanh")


def flops_per_token(model: GPT) -> float:
    """Return six per weight of the linear layers, and those of attention's products.

    The head counts and the embedding does not. Source: Chowdhery et al. 2022 (PaLM),
    appendix B.
    """
    shape = model.shape
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    return 6.0 * weights + 12.0 * shape.n_layer * shape.n_embd * shape.block_size


def prepare_model(session: Session, model: GPT, kind: str) -> Any:
    """Turn a float32 model into the model of a row, and return its optimizer.

    Returns None if a package is missing.
    """
    if kind == REFERENCE_KIND:
        return fused(session)(model.parameters(), lr=LR)
    if kind in ONE_BYTE:
        one_byte(model, ONE_BYTE[kind], left_out=("lm_head",))
        return fm.optim.StiffnessAdamW(model.parameters(), LR, moments="8bit")
    package, name, options = PEER_FORMS[kind]
    peer = find_peer(package, name)
    if peer is None:
        return None
    if package == "torchao.float8":
        config = find_peer(package, "Float8LinearConfig")(emulate=session.dry)
        peer(model, config=config, module_filter_fn=lambda _, name: not name.endswith("lm_head"))
        return fused(session)(model.parameters(), lr=LR)
    return peer(model.bfloat16().parameters(), lr=LR, **options)


def training_step(
    session: Session, model: GPT, kind: str, way: str
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return a whole step of training over (tokens, targets) that returns the loss.

    Returns None if a package is missing. A dry run records no graphs.
    """
    optimizer = prepare_model(session, model, kind)
    if optimizer is None:
        return None
    loss_of = model.loss if way == "eager" else torch.compile(model.loss)
    autocast = not kind.startswith("bfloat16 weights")

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(session.device.type, torch.bfloat16, enabled=autocast):
            loss = loss_of(tokens, targets)
        loss.backward()
        with on_card(session):
            optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return fm.optim.graphed(step, optimizer) if way == "graphed" and not session.dry else step


def training(session: Session, width: int) -> dict[str, Any]:
    """Measure steps of 8,192 tokens.

    Figures are tokens per second, the share of the GPU's peak rate, and peak memory.
    """
    # by worth: the last ones may find no time
    rows = [
        ("compiled", REFERENCE_KIND),
        *product(("compiled", "graphed"), ONE_BYTE),
        *product(("eager",), (REFERENCE_KIND, *ONE_BYTE)),
        *product(("compiled",), PEER_FORMS),
    ]
    figures: dict[str, Any] = {}
    for way, kind in rows:
        measure = partial(training_figures, session, width, kind, way)
        session.case(figures, f"{kind}, {way}", measure)
    return {name: case for name, case in figures.items() if case}


def training_figures(session: Session, width: int, kind: str, way: str) -> dict[str, float]:
    """Return the figures of one row; none if its package is missing."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    shape = shape_of(session, width)
    model = GPT(shape).to(session.device)
    flops = flops_per_token(model)
    step = training_step(session, model, kind, way)
    if step is None:
        return {}
    size = (2 if session.dry else 8, shape.block_size + 1)
    text = torch.randint(0, shape.vocab_size, size, device=session.device)
    tokens, targets = text[:, :-1], text[:, 1:]
    if not session.dry:
        torch.cuda.reset_peak_memory_stats()
    figures = session.times(partial(step, tokens, targets), repeats=8)
    count, seconds = targets.numel(), figures["ms"] / 1e3
    figures["tokens/s"] = count / seconds
    figures["MFU"] = count * flops / (PEAK * seconds)
    figures["peak GB"] = 0.0 if session.dry else torch.cuda.max_memory_allocated() / 1e9
    return figures


def training_768(session: Session) -> dict[str, Any]:
    """Measure training of GPT-2's 124M."""
    return training(session, 768)


def training_2048(session: Session) -> dict[str, Any]:
    """Measure training of twelve blocks of 2,048."""
    return training(session, 2048)


def one_block(session: Session) -> dict[str, Any]:
    """Time forward and backward pass of a block of Llama-2-7B over 8,192 tokens.

    Its weights are in bfloat16 or in one byte.
    """
    shape = LlamaShape(4096, 11_008, layers=1, heads=32, kv_heads=32, vocabulary=1)
    if session.dry:
        shape = LlamaShape(64, 128, layers=1, heads=4, kv_heads=4, vocabulary=1)
    figures: dict[str, Any] = {}
    for compiled, kind in product((True, False), ("bfloat16", *ONE_BYTE)):
        name = f"{kind}, {'compiled' if compiled else 'eager'}"
        session.case(figures, name, partial(block_times, session, shape, kind, compiled))
    return figures


def block_times(session: Session, shape: LlamaShape, kind: str, compiled: bool) -> dict[str, float]:
    """Return the times of one row."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    block: Any = LlamaBlock(shape).to(session.device, torch.bfloat16)
    if kind in ONE_BYTE:
        block = one_byte(block, ONE_BYTE[kind])
    length = 16 if session.dry else 4096
    x = session.normal(2, length, shape.width, dtype=torch.bfloat16).requires_grad_()
    forward = torch.compile(block) if compiled else block
    call = partial(run_block, block, forward, x, torch.randn_like(x))
    return session.times(call, repeats=8)


def run_block(block: nn.Module, forward: Any, x: Tensor, gradient: Tensor) -> None:
    """Go forward and backward, and free the gradients."""
    forward(x).backward(gradient)
    x.grad = None
    block.zero_grad()


def losses(session: Session) -> dict[str, Any]:
    """Train the 124M model for 200 steps over the bytes of Python's sources.

    Figures are the mean loss of the last 20 steps, and that minus bfloat16's.
    """
    figures: dict[str, Any] = {}
    for kind in (REFERENCE_KIND, *ONE_BYTE):
        session.case(figures, kind, partial(last_loss, session, kind))
        case = figures.get(kind, {})
        if "loss" in case and "loss" in figures[REFERENCE_KIND]:
            case["loss over bfloat16's"] = case["loss"] - figures[REFERENCE_KIND]["loss"]
    return figures


def last_loss(session: Session, kind: str) -> dict[str, float]:
    """Return the last loss of one row."""
    steps, last = (4, 2) if session.dry else (200, 20)
    torch.manual_seed(0)
    shape = shape_of(session, 768)
    model = GPT(shape).to(session.device)
    step = training_step(session, model, kind, "eager")
    assert step is not None, "torch's optimizers and ours are not missing"
    batches = source_batches(2 if session.dry else 8, shape.block_size, shape.vocab_size)
    step_losses = []
    for _ in range(steps):
        tokens, targets = next(batches)
        step_losses.append(step(tokens.to(session.device), targets.to(session.device)))
    return {"loss": torch.stack(step_losses[-last:]).mean().item()}


def source_batches(rows: int, length: int, vocabulary: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and targets of the standard library's modules, in the order of names.

    A token is a byte, and no byte is in two batches.
    """
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources = bytearray(b"".join(path.read_bytes() for path in paths))
    text = torch.frombuffer(sources, dtype=torch.uint8).long().clamp(max=vocabulary - 1)
    for part in text.split(rows * (length + 1)):
        batch = part.view(rows, length + 1)
        yield batch[:, :-1], batch[:, 1:]
