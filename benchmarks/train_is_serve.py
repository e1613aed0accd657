"""Distance between the policy that samples and the policy that is trained, where
rollouts come from weights in FP8.

    python benchmarks/train_is_serve.py [--model FOLDER_OR_GGUF | --large] [--updates
                                        20] [--prompts 8] [--written 32] [--lr 1e-4]
                                        [--reading 300] [--json | --markdown] [--record]

A language model learns by policy gradients (rewards minus their mean over 8 samples of
one prompt) to write tokens with even numbers. Before the first update, after it and
after the last, sequences are sampled from the weights that a server would have. Both
policies score them in one pass of the same arithmetic, so that only the weights differ.
With r the trained policy's probability of a sampled token over that of the sampling
one:

    k3 KL = mean(r - 1 - log r), ratio = mean(r), argmax = share of places whose
    likeliest token differs

A server has E4M3 codes, at scales of the largest weight of 128 x 128, or of a row, over
448. In place, StiffnessAdamW or StiffnessMuon trains the codes of such a folder, which
are written as they are. Other weights are trained by AdamW and rounded for the server.
A server's weights are decoded by hand, as code times scale. Without a model a Llama of
1.4M weights is pretrained on some prose; ``--large`` takes SmolLM2-135M's shape with
random weights, in three ways.
"""

import argparse
import copy
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Any, Final

import torch
import torch.nn.functional as F
import transformers
from _forms import add_form_options, text_table
from _record import add_option, record
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fp8manifold as fm

SQUARES: Final = (128, 128)
GROUP, PROMPT = 8, 16
E4M3: Final = torch.float8_e4m3fn


def rounded(weight: Tensor, block: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """The codes of a float matrix, and a scale for each block (None: for each row)."""
    rows, columns = block or (1, weight.shape[1])
    padded = F.pad(weight.float(), (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    tiles = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    scale = tiles.abs().amax((1, 3)) / 448
    codes = (tiles / scale[:, None, :, None]).to(E4M3).view_as(padded)
    return codes[: weight.shape[0], : weight.shape[1]], scale


def decoded(codes: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """The values of codes: code times scale, in float32."""
    rows, columns = block or (1, codes.shape[1])
    spread = (
        scale.view(-1, scale.shape[-1]).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    )
    return codes.float() * spread[: codes.shape[0], : codes.shape[1]]


def copy_in(base: Any, dtype: torch.dtype) -> Any:
    """A copy with its parameters in a dtype; rotary frequencies stay in float32, as
    after ``from_pretrained``.
    """
    model = copy.deepcopy(base)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def linear(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers by name, without the head."""
    return {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and name != "lm_head"
    }


class Rounded(nn.Module):
    """A parametrisation: the rounded weight forward, and its gradient straight through."""

    def __init__(self, block: tuple[int, int] | None) -> None:
        super().__init__()
        self.block = block

    def forward(self, weight: Tensor) -> Tensor:
        values = decoded(*rounded(weight.detach(), self.block), self.block)
        return _Through.apply(weight, values)  # type: ignore[no-any-return]


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


@dataclass
class Policy:
    """A model in training, and the weights that a server gets, as a state for the model
    before training.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    served: Callable[[], dict[str, Tensor]]


def publish(model: Any, folder: Path, block: tuple[int, int] | None, dtype: torch.dtype) -> None:
    """Write a float model as models are published in FP8: a scale for each block or
    row, other tensors in a dtype.
    """
    tensors = {name: p.detach().to(dtype) for name, p in model.named_parameters()}
    for name, layer in linear(model).items():
        (
            tensors[f"{name}.weight"],
            tensors[f"{name}.{'weight_scale_inv' if block else 'weight_scale'}"],
        ) = rounded(layer.weight.detach(), block)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    weights = {
        "num_bits": 8,
        "type": "float",
        "strategy": "channel",
        "symmetric": True,
        "dynamic": False,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    rows = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
    }
    squares = {"quant_method": "fp8", "weight_block_size": block}
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.quantization_config = (
        squares if block else rows | {"config_groups": groups, "ignore": ["lm_head"]}
    )
    config.save_pretrained(folder)


def in_place(
    base: Any,
    lr: float,
    block: tuple[int, int] | None,
    dtype: torch.dtype = torch.float32,
    muon: bool = False,
) -> Policy:
    """The codes of a published folder: trained, written, and read by hand."""
    with tempfile.TemporaryDirectory() as folder:
        publish(base, Path(folder), block, dtype)
        model = fm.load_fp8(folder, dtype=dtype).eval()

    def served() -> dict[str, Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            fm.save_fp8(model, folder)
            tensors = load_file(Path(folder) / "model.safetensors")
        for name in [name for name, value in tensors.items() if value.dtype is E4M3]:
            scale = tensors.pop(f"{name}_scale_inv" if block else f"{name}_scale")
            tensors[name] = decoded(tensors[name], scale, block).to(dtype)
        return tensors

    if muon:
        rule = fm.optim.StiffnessMuon.for_model(
            model, lr=lr, other_lr=lr, weight_decay=0.0, moments="8bit"
        )
        return Policy(model, rule, served)
    return Policy(
        model,
        fm.optim.StiffnessAdamW(
            model.parameters(), lr, (0.9, 0.95), weight_decay=0.0, moments="8bit"
        ),
        served,
    )


def from_master(
    base: Any,
    lr: float,
    block: tuple[int, int] | None,
    dtype: torch.dtype = torch.float32,
    trained_rounded: bool = False,
    copied_in: torch.dtype | None = None,
) -> Policy:
    """Float weights, trained as they are or rounded in the forward pass, and a copy
    rounded for the server.
    """
    model = copy_in(base, dtype)
    masters = {name: layer.weight for name, layer in linear(model).items()}
    for layer in linear(model).values() if trained_rounded else ():
        parametrize.register_parametrization(layer, "weight", Rounded(block))

    def served() -> dict[str, Tensor]:
        tensors = {
            name: p.detach()
            for name, p in model.named_parameters()
            if ".parametrizations." not in name
        }
        for name, weight in masters.items():
            parts = rounded(weight.detach().to(copied_in or dtype), block)
            tensors[f"{name}.weight"] = decoded(*parts, block).to(dtype)
        return tensors

    return Policy(model, torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0), served)


BF16: Final = torch.bfloat16
WAYS: Final[dict[str, Callable[[Any, float], Policy]]] = {
    "codes in place, squares": partial(in_place, block=SQUARES),
    "codes in place, rows": partial(in_place, block=None),
    "codes in place, squares, products in bfloat16": partial(in_place, block=SQUARES, dtype=BF16),
    "float32, a copy in squares": partial(from_master, block=SQUARES),
    "float32, a copy in rows": partial(from_master, block=None),
    "bfloat16, a copy in squares": partial(from_master, block=SQUARES, dtype=BF16),
    "float32 rounded in training, a copy in squares": partial(
        from_master, block=SQUARES, trained_rounded=True
    ),
    "the same, the copy by way of bfloat16": partial(
        from_master, block=SQUARES, trained_rounded=True, copied_in=BF16
    ),
}
LARGE: Final[dict[str, Callable[[Any, float], Policy]]] = {
    "codes in place, squares, AdamW": partial(in_place, block=SQUARES),
    "codes in place, squares, Muon": partial(in_place, block=SQUARES, muon=True),
    "float32, a copy in squares": partial(from_master, block=SQUARES),
}


def scores(model: Any, tokens: Tensor) -> Tensor:
    """The log-probabilities of all tokens at each place that was written."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, PROMPT - 1 : -1]
    return logits.float().log_softmax(-1)  # type: ignore[no-any-return]


def roll_out(
    policy: Policy, server: Any, prompts: Tensor, written: int
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Samples of the server's weights, their log-probabilities under these, and the
    mismatch to the trained policy.
    """
    server.load_state_dict(policy.served(), strict=False)
    how = transformers.GenerationConfig(
        do_sample=True, max_new_tokens=written, top_k=0, pad_token_id=0
    )
    with torch.no_grad():
        tokens = server.generate(prompts, how, attention_mask=torch.ones_like(prompts))
        sampling, trained = scores(server, tokens), scores(policy.model, tokens)
    drawn = tokens[:, PROMPT:, None]
    return tokens, sampling.gather(2, drawn), mismatch(trained, sampling, drawn)


def mismatch(trained: Tensor, sampling: Tensor, drawn: Tensor) -> dict[str, float]:
    """Mismatch of two policies' log-probabilities, over the tokens that one of them
    drew.
    """
    log_ratio = (trained.gather(2, drawn) - sampling.gather(2, drawn)).double()
    return {
        "k3": (log_ratio.expm1() - log_ratio).mean().item(),
        "ratio": log_ratio.exp().mean().item(),
        "largest": log_ratio.abs().max().item(),
        "argmax": (trained.argmax(-1) != sampling.argmax(-1)).double().mean().item(),
    }


def measure(
    policy: Policy, base: Any, text: Tensor, args: argparse.Namespace
) -> list[dict[str, float]]:
    """The mismatch and the reward before the first update and after each."""
    server = copy_in(base, policy.model.lm_head.weight.dtype)
    found = []
    for update in range(args.updates + 1):
        torch.manual_seed(update)
        starts = torch.randint(len(text) - PROMPT, (args.prompts, 1)).repeat_interleave(GROUP, 0)
        prompts = text[starts + torch.arange(PROMPT)]
        tokens, drawn_with, differs = roll_out(policy, server, prompts, args.written)
        rewards = (tokens[:, PROMPT:] % 2 == 0).float().mean(1).view(-1, GROUP)
        found.append(differs | {"reward": rewards.mean().item()})
        if update < args.updates:
            advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std() + 1e-6)
            log_ratio = (
                scores(policy.model, tokens).gather(2, tokens[:, PROMPT:, None]) - drawn_with
            )
            policy.optimizer.zero_grad()
            (-log_ratio.exp() * advantages.view(-1, 1, 1)).mean().backward()
            policy.optimizer.step()
    return found


def prose() -> Tensor:
    """English, one token per byte."""
    return torch.tensor(list("\n".join(topics.topics.values()).encode("ascii", "replace")))


def small(steps: int) -> tuple[Any, Tensor]:
    """A Llama that was pretrained on English for so many steps, one token per byte, and
    that text.
    """
    torch.manual_seed(0)
    text = prose()
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model: Any = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=128, eos_token_id=None, **sizes)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        batch = text[torch.randint(len(text) - 64, (16, 1)) + torch.arange(64)]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return model, text


def large() -> tuple[Any, Tensor]:
    """SmolLM2-135M's shape with random weights, and the text of the small Llama: tokens
    are bytes.
    """
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
    }
    sizes |= {"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192}
    config = transformers.LlamaConfig(tie_word_embeddings=True, eos_token_id=None, **sizes)
    return transformers.LlamaForCausalLM(config), prose()


def read(path: Path) -> tuple[Any, Tensor]:
    """A causal model of transformers, in float32, and the same text in its tokens."""
    where: Any = {"pretrained_model_name_or_path": path}
    if path.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return model, torch.tensor(tokenizer("\n".join(topics.topics.values()))["input_ids"])


def short(number: float) -> str:
    """Two significant digits; 0 and 1 without decimals."""
    if number in (0, 1):
        return str(int(number))
    return (
        f"{number:.1e}".replace("e-0", "e-")
        if number < 0.01
        else f"{number:.4f}"
        if number > 0.99
        else f"{number:.2g}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", type=Path, help="a folder of save_pretrained or a .gguf file; else a small Llama"
    )
    parser.add_argument(
        "--large",
        action="store_true",
        help="SmolLM2-135M's shape with random weights; takes minutes",
    )
    parser.add_argument("--updates", type=int, default=20, help="of the policy")
    parser.add_argument(
        "--prompts", type=int, default=8, help="an update, each written on from 8 times"
    )
    parser.add_argument("--written", type=int, default=32, help="tokens after each prompt of 16")
    parser.add_argument("--lr", type=float, default=1e-4, help="of every optimizer")
    parser.add_argument(
        "--reading", type=int, default=300, help="steps that the small Llama reads before"
    )
    add_form_options(parser)
    add_option(parser)
    args = parser.parse_args()
    if least := next(
        (name for name in ("updates", "prompts", "written") if getattr(args, name) < 1), None
    ):
        parser.error(f"--{least} {getattr(args, least)}: at least 1")
    if args.large and (args.model or args.record):
        parser.error(
            "--large goes with neither --model nor --record, which writes the table of the small "
            "one"
        )
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    base, text = (
        large() if args.large else small(args.reading) if args.model is None else read(args.model)
    )
    base.eval()
    ways = LARGE if args.large else WAYS
    found = {name: measure(make(base, args.lr), base, text, args) for name, make in ways.items()}
    if args.json:
        print(json.dumps(found, indent=1))
        return
    columns = [
        "weights in training, and at the server",
        "k3 KL before",
        "after 1",
        f"after {args.updates}",
    ]
    columns += ["argmax", "ratio", "log r at most"]
    rows: list[tuple[str, ...]] = []
    for name, at in found.items():
        last = at[-1]
        numbers = (
            at[0]["k3"],
            at[1]["k3"],
            *(last[key] for key in ("k3", "argmax", "ratio", "largest")),
        )
        rows.append((name, *map(short, numbers)))
    print(text_table([columns, *rows], ("---", *["---:"] * 6), args.markdown))
    if args.record:
        record("", columns, rows, packages=("transformers",))


if __name__ == "__main__":
    main()
