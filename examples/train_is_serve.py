"""
The policy that samples is the policy that is trained
=====================================================

A small Llama learns by REINFORCE to write, after each token, the next one up. It begins
as an FP8 folder of the usual kind: codes of E4M3, and a scale for 128 x 128 weights.
Its samples come from a second model, which transformers reads from the folder that the
trainer has just written.

A trainer whose weights are the codes gives every sampled token the sampler's
probability, to the bit: importance ratios are exactly 1. The usual trainer has float32
weights and rounds a copy for each rollout; its ratios are not 1. Tokens are sampled in
passes over whole sequences, so that both sides do the same arithmetic.

Needs transformers (``pip install 'fp8manifold[hf]'``).  Expected output::

                       reward first    last    log ratio, RMS in %
    codes in place                0.067   0.911                   0.00
    float32, rounded              0.067   0.913                   0.63
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM, logging

import fp8manifold as fm

TOKENS, LENGTH, SEQUENCES, UPDATES = 16, 8, 64, 60


def save_rounded(model: nn.Module, folder: Path) -> None:
    """Write a float model in E4M3, with the scale (largest weight) / 448 for each
    square, as published models do.
    """
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        squares = tensors[name].unflatten(0, (-1, 128)).unflatten(-1, (-1, 128))
        tensors[f"{name}_scale_inv"] = scale = squares.abs().amax((1, 3)) / 448
        tensors[name] = (
            (squares / scale[:, None, :, None]).to(torch.float8_e4m3fn).view_as(tensors[name])
        )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    how = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    LlamaConfig(**model.config.to_dict() | how).save_pretrained(folder)


@torch.no_grad()
def sample(folder: Path, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences of the model that transformers reads, and the log-probability that each
    token was drawn with.
    """
    decoded = FineGrainedFP8Config(dequantize=True)
    model = LlamaForCausalLM.from_pretrained(
        folder, quantization_config=decoded, dtype=torch.float32
    )
    tokens, drawn_with = torch.randint(TOKENS, (SEQUENCES, LENGTH), generator=generator), []
    for place in range(1, LENGTH):
        each = model(input_ids=tokens, use_cache=False).logits[:, place - 1].log_softmax(-1)
        tokens[:, place : place + 1] = torch.multinomial(each.exp(), 1, generator=generator)
        drawn_with.append(each.gather(1, tokens[:, place : place + 1]))
    return tokens, torch.cat(drawn_with, 1)


def train(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    save: Callable[..., None],
    to: Path,
) -> float:
    """Train on samples of what is saved, print the rewards, and return the mean square
    of the log ratios.
    """
    generator, rewards, mean_square = torch.Generator().manual_seed(1), [], 0.0
    for _ in range(UPDATES):
        save(model, to)
        tokens, drawn_with = sample(to, generator)
        right = (tokens[:, 1:] == (tokens[:, :-1] + 1) % TOKENS).float()
        each = model(input_ids=tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
        log_ratio = each.gather(2, tokens[:, 1:, None])[..., 0] - drawn_with
        to_come = right.flip(1).cumsum(1).flip(1)
        optimizer.zero_grad()
        (-log_ratio.exp() * (to_come - to_come.mean(0))).mean().backward()
        optimizer.step()
        rewards.append(right.mean().item())
        mean_square += log_ratio.square().mean().item() / UPDATES
    print(f"{name:<20}{rewards[0]:>15.3f}{rewards[-1]:>8.3f}{100 * mean_square**0.5:>23.2f}")
    return mean_square


if __name__ == "__main__":
    torch.manual_seed(0)
    logging.disable_progress_bar()
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    floats = LlamaForCausalLM(
        LlamaConfig(vocab_size=TOKENS, architectures=["LlamaForCausalLM"], **sizes)
    )
    with tempfile.TemporaryDirectory() as folder:
        save_rounded(floats, Path(folder))
        codes = fm.load_fp8(folder, dtype=torch.float32)
        print(f"{'':<19}{'reward first':>16}{'last':>8}{'log ratio, RMS in %':>23}")
        adam = fm.optim.StiffnessAdamW(
            codes.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, moments="8bit"
        )
        assert train("codes in place", codes, adam, fm.save_fp8, Path(folder)) == 0
        adam = torch.optim.AdamW(floats.parameters(), lr=1e-3)
        train("float32, rounded", floats, adam, save_rounded, Path(folder))
