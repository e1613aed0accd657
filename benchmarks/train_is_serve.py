"""Distance between the policy that samples, with weights in FP8, and the trained one.

    python benchmarks/train_is_serve.py [--model FOLDER_OR_GGUF | --large]
                                        [--updates 20] [--prompts 8] [--written 32]
                                        [--lr 1e-4] [--reading 300]
                                        [--json | --markdown] [--record]

A language model learns by policy gradients (rewards minus their mean over 8 samples of
one prompt) to write tokens with even numbers. Before the first update, after it and
after the last, sequences are sampled from the weights that a server would have. Both
policies score them in one pass of the same arithmetic, so that only the weights differ.
With r the trained policy's probability of a sampled token over that of the sampling
one:

    k3 KL    mean(r - 1 - log r)
    ratio    mean(r)
    argmax   the share of places whose likeliest token differs

A server has E4M3 codes, at scales of the largest weight of 128 x 128, or of a row, over
448. In place, StiffnessAdamW or StiffnessMuon trains the codes of such a folder, which
are written as they are. Other weights are trained by AdamW and rounded for the server.
A server's weights are decoded by hand, as code times scale.

Without a model a Llama of 1.4M weights is pretrained on some prose. ``--large`` takes
SmolLM2-135M's shape with random weights, in three ways.
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
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from _forms import add_form_options, check_at_least, text_table
from _record import add_option, record
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fp8manifold as fm

#: rows and columns of the weights that share a scale; None for those of a row
BlockSides = tuple[int, int] | None
SQUARES: Final = (128, 128)
#: samples of one prompt
ANSWERS_OF_PROMPT: Final = 8
#: tokens of a prompt
PROMPT: Final = 16
E4M3: Final = torch.float8_e4m3fn
#: the largest number of E4M3
LARGEST_E4M3: Final = 448


class Rounded(NamedTuple):
    """A float matrix as codes, with a scale for each block."""

    codes: Tensor
    scale: Tensor


def rounded_to_codes(weight: Tensor, block: BlockSides) -> Rounded:
    """Round a float matrix to codes."""
    rows, columns = block or (1, weight.shape[1])
    padded = F.pad(weight.float(), (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    scale = blocks.abs().amax((1, 3)) / LARGEST_E4M3
    codes = (blocks / scale[:, None, :, None]).to(E4M3).view_as(padded)
    return Rounded(codes[: weight.shape[0], : weight.shape[1]], scale)


def decoded_codes(codes: Tensor, scale: Tensor, block: BlockSides) -> Tensor:
    """Return the values of codes: code times scale, in float32."""
    rows, columns = block or (1, codes.shape[1])
    scale = scale.view(-1, scale.shape[-1])
    scale = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return codes.float() * scale[: codes.shape[0], : codes.shape[1]]


def copy_in(base: Any, dtype: torch.dtype) -> Any:
    """Return a copy with its parameters in a dtype.

    Rotary frequencies stay in float32, as after ``from_pretrained``.
    """
    model = copy.deepcopy(base)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers by name, without the head."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            layers[name] = module
    return layers


class RoundedInTraining(nn.Module):
    """A parametrisation: the rounded weight forward, and its gradient straight through."""

    def __init__(self, block: BlockSides) -> None:
        super().__init__()
        self.block = block

    def forward(self, weight: Tensor) -> Tensor:
        """Return the rounded weight."""
        values = decoded_codes(*rounded_to_codes(weight.detach(), self.block), self.block)
        return _StraightThrough.apply(weight, values)  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


@dataclass
class Policy:
    """A model in training, and the weights that a server gets."""

    model: Any
    optimizer: torch.optim.Optimizer
    #: returns the server's weights, a state that a copy of the first model loads
    served: Callable[[], dict[str, Tensor]]


#: the settings of a folder with a scale for each row
ROWS_SETTINGS: Final = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
        }
    },
    "ignore": ["lm_head"],
}


def write_fp8(model: Any, folder: Path, block: BlockSides, dtype: torch.dtype) -> None:
    """Write a float model as models are published in FP8, other tensors in a dtype."""
    scale_suffix = _scale_suffix(block)
    tensors = {name: p.detach().to(dtype) for name, p in model.named_parameters()}
    for name, layer in linear_layers(model).items():
        codes, scale = rounded_to_codes(layer.weight.detach(), block)
        tensors[f"{name}.weight"] = codes
        tensors[f"{name}.weight{scale_suffix}"] = scale
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors")
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if block:
        config.quantization_config = {"quant_method": "fp8", "weight_block_size": block}
    else:
        config.quantization_config = dict(ROWS_SETTINGS)
    config.save_pretrained(folder)


def _scale_suffix(block: BlockSides) -> str:
    """Return what follows the name of a weight in that of its scales."""
    return "_scale_inv" if block else "_scale"


def in_place(
    base: Any,
    lr: float,
    block: BlockSides,
    dtype: torch.dtype = torch.float32,
    muon: bool = False,
) -> Policy:
    """Return the policy of a published folder's codes: trained, written, read by hand."""
    with tempfile.TemporaryDirectory() as folder:
        write_fp8(base, Path(folder), block, dtype)
        model = fm.load(folder, dtype=dtype).eval()

    def served() -> dict[str, Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            fm.save(model, folder)
            tensors = load_file(Path(folder) / "model.safetensors")
        for name in [name for name, tensor in tensors.items() if tensor.dtype is E4M3]:
            scale = tensors.pop(f"{name}{_scale_suffix(block)}")
            tensors[name] = decoded_codes(tensors[name], scale, block).to(dtype)
        return tensors

    if muon:
        optimizer: torch.optim.Optimizer = fm.optim.StiffnessMuon.for_model(
            model, lr=lr, other_lr=lr, weight_decay=0.0, moments="8bit"
        )
    else:
        optimizer = fm.optim.StiffnessAdamW(
            model.parameters(), lr, (0.9, 0.95), weight_decay=0.0, moments="8bit"
        )
    return Policy(model, optimizer, served)


def from_master(
    base: Any,
    lr: float,
    block: BlockSides,
    dtype: torch.dtype = torch.float32,
    trained_rounded: bool = False,
    copied_in: torch.dtype | None = None,
) -> Policy:
    """Return the policy of float weights, of which a copy is rounded for the server.

    They are trained as they are, or rounded in the forward pass. The copy is rounded
    from the dtype ``copied_in``, by default the one of training.
    """
    model = copy_in(base, dtype)
    layers = linear_layers(model)
    masters = {name: layer.weight for name, layer in layers.items()}
    if trained_rounded:
        for layer in layers.values():
            parametrize.register_parametrization(layer, "weight", RoundedInTraining(block))

    def served() -> dict[str, Tensor]:
        tensors = {}
        for name, parameter in model.named_parameters():
            if ".parametrizations." not in name:
                tensors[name] = parameter.detach()
        for name, weight in masters.items():
            codes, scale = rounded_to_codes(weight.detach().to(copied_in or dtype), block)
            tensors[f"{name}.weight"] = decoded_codes(codes, scale, block).to(dtype)
        return tensors

    return Policy(model, torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0), served)


BF16: Final = torch.bfloat16
POLICIES: Final[dict[str, Callable[[Any, float], Policy]]] = {
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
    """Return the log-probabilities of all tokens at each place that was written."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, PROMPT - 1 : -1]
    return logits.float().log_softmax(-1)  # type: ignore[no-any-return]


class Rollout(NamedTuple):
    """Samples of the server's weights."""

    tokens: Tensor
    #: log-probabilities of the written tokens under the server's weights
    log_probabilities: Tensor
    #: between the trained policy and the server's
    mismatch: dict[str, float]


def roll_out(policy: Policy, server: Any, prompts: Tensor, length: int) -> Rollout:
    """Let the server write so many tokens after each prompt."""
    server.load_state_dict(policy.served(), strict=False)
    sampling = transformers.GenerationConfig(
        do_sample=True, max_new_tokens=length, top_k=0, pad_token_id=0
    )
    with torch.no_grad():
        tokens = server.generate(prompts, sampling, attention_mask=torch.ones_like(prompts))
        server_scores = scores(server, tokens)
        trained_scores = scores(policy.model, tokens)
    drawn = tokens[:, PROMPT:, None]
    return Rollout(
        tokens, server_scores.gather(2, drawn), mismatch(trained_scores, server_scores, drawn)
    )


def mismatch(trained: Tensor, sampling: Tensor, drawn: Tensor) -> dict[str, float]:
    """Return the mismatch of two policies, over the tokens that one of them drew.

    Args:
        trained: log-probabilities of all tokens under the trained policy.
        sampling: the same under the policy that drew the tokens.
        drawn: the tokens.
    """
    log_ratio = (trained.gather(2, drawn) - sampling.gather(2, drawn)).double()
    return {
        "k3": (log_ratio.expm1() - log_ratio).mean().item(),
        "ratio": log_ratio.exp().mean().item(),
        "largest": log_ratio.abs().max().item(),
        "argmax": (trained.argmax(-1) != sampling.argmax(-1)).double().mean().item(),
    }


def measure_policy(
    policy: Policy, base: Any, text: Tensor, args: argparse.Namespace
) -> list[dict[str, float]]:
    """Return the mismatch and the reward before the first update and after each."""
    server = copy_in(base, policy.model.lm_head.weight.dtype)
    figures = []
    for update in range(args.updates + 1):
        torch.manual_seed(update)
        starts = torch.randint(len(text) - PROMPT, (args.prompts, 1)).repeat_interleave(
            ANSWERS_OF_PROMPT, 0
        )
        prompts = text[starts + torch.arange(PROMPT)]
        rollout = roll_out(policy, server, prompts, args.written)
        answers = rollout.tokens[:, PROMPT:]
        rewards = (answers % 2 == 0).float().mean(1).view(-1, ANSWERS_OF_PROMPT)
        figures.append(rollout.mismatch | {"reward": rewards.mean().item()})
        if update < args.updates:
            advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std() + 1e-6)
            log_probabilities = scores(policy.model, rollout.tokens).gather(2, answers[..., None])
            log_ratio = log_probabilities - rollout.log_probabilities
            policy.optimizer.zero_grad()
            (-log_ratio.exp() * advantages.view(-1, 1, 1)).mean().backward()
            policy.optimizer.step()
    return figures


def english() -> str:
    """Return the Python reference that comes with Python."""
    return "\n".join(topics.topics.values())


def english_bytes() -> Tensor:
    """Return English with one token per byte."""
    return torch.tensor(list(english().encode("ascii", "replace")))


def small(steps: int) -> tuple[Any, Tensor]:
    """Return a Llama that was pretrained on English for so many steps, and that text.

    Its tokens are bytes.
    """
    torch.manual_seed(0)
    text = english_bytes()
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=None,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        batch = text[torch.randint(len(text) - 64, (16, 1)) + torch.arange(64)]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return model, text


def large() -> tuple[Any, Tensor]:
    """Return SmolLM2-135M's shape with random weights, and the text of the small Llama.

    Tokens are bytes.
    """
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config), english_bytes()


def read_causal_model(path: Path) -> tuple[Any, Tensor]:
    """Return a causal model of transformers, in float32, and English in its tokens."""
    source: Any = {"pretrained_model_name_or_path": path}
    if path.suffix == ".gguf":
        source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    return model, torch.tensor(tokenizer(english())["input_ids"])


def short_text(number: float) -> str:
    """Return a number with two significant digits; 0 and 1 without decimals.

    >>> short_text(0.0), short_text(1.0), short_text(0.00123), short_text(0.1234)
    ('0', '1', '1.2e-3', '0.12')
    >>> short_text(0.99996), short_text(1.2)
    ('1.0000', '1.2000')
    """
    if number in (0, 1):
        return str(int(number))
    if number < 0.01:
        return f"{number:.1e}".replace("e-0", "e-")
    # ratios near 1
    if number > 0.99:
        return f"{number:.4f}"
    return f"{number:.2g}"


def policy_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    return parser


def main() -> None:
    """Train in every way, and print the table."""
    parser = policy_parser()
    args = parser.parse_args()
    check_at_least(parser, args, 1, "updates", "prompts", "written")
    if args.large and (args.model or args.record):
        parser.error(
            "--large goes with neither --model nor --record, which writes the table of the small "
            "one"
        )
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if args.large:
        base, text = large()
    elif args.model is None:
        base, text = small(args.reading)
    else:
        base, text = read_causal_model(args.model)
    base.eval()
    figures = {}
    for name, make_policy in (LARGE if args.large else POLICIES).items():
        figures[name] = measure_policy(make_policy(base, args.lr), base, text, args)
    if args.json:
        print(json.dumps(figures, indent=1))
        return
    columns = [
        "weights in training, and at the server",
        "k3 KL before",
        "after 1",
        f"after {args.updates}",
        "argmax",
        "ratio",
        "log r at most",
    ]
    rows: list[tuple[str, ...]] = []
    for name, by_update in figures.items():
        first, after_first, after_last = by_update[0], by_update[1], by_update[-1]
        numbers = [first["k3"], after_first["k3"]]
        numbers += [after_last[key] for key in ("k3", "argmax", "ratio", "largest")]
        rows.append((name, *map(short_text, numbers)))
    print(text_table([columns, *rows], ("---", *["---:"] * 6), args.markdown))
    if args.record:
        record("", columns, rows, packages=("transformers",))


if __name__ == "__main__":
    main()
