"""
The policy that samples is the policy that is trained
=====================================================

A small Llama learns by REINFORCE to write, after each token, the next one up. It begins
as an FP8 folder of the usual kind: codes of E4M3, and a scale for each 128 x 128
weights. Its samples come from a second model, which transformers reads from the folder
that the trainer has just written.

A trainer whose weights are the codes gives every sampled token the sampler's
probability, to the bit: importance ratios are exactly 1. The usual trainer has float32
weights and rounds a copy for each rollout, so its ratios are not 1. Tokens are sampled
in passes over whole sequences, so that both sides do the same arithmetic.

Needs transformers (``pip install 'fp8manifold[hf]'``).  Expected output::

                       reward first    last    log ratio, RMS in %
    codes in place                0.067   0.904                   0.00
    float32, rounded              0.067   0.911                   0.51
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM, logging

import fp8manifold as fm

TOKENS, LENGTH, SEQUENCES, UPDATES = 16, 8, 64, 60
#: the largest number of E4M3
LARGEST = 448


class Samples(NamedTuple):
    """Sampled sequences, and the log-probabilities that their tokens were drawn with."""

    tokens: Tensor
    log_probabilities: Tensor


def save_rounded(model: nn.Module, folder: Path) -> None:
    """Write a float model in E4M3 as published models are.

    Each square of 128 x 128 weights has the scale (its largest weight) / 448.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if not name.endswith("proj.weight"):
            tensors[name] = weight
            continue
        squares = weight.unflatten(0, (-1, 128)).unflatten(-1, (-1, 128))
        scale = squares.abs().amax((1, 3)) / LARGEST
        codes = (squares / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        tensors[name] = codes.view_as(weight)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = model.config.to_dict()
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    LlamaConfig(**settings).save_pretrained(folder)


@torch.no_grad()
def sample(folder: Path, generator: torch.Generator) -> Samples:
    """Sample from the model that transformers reads from the folder."""
    model = LlamaForCausalLM.from_pretrained(
        folder, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    )
    tokens = torch.randint(TOKENS, (SEQUENCES, LENGTH), generator=generator)
    log_probabilities = []
    for place in range(1, LENGTH):
        logits = model(input_ids=tokens, use_cache=False).logits[:, place - 1]
        distribution = logits.log_softmax(-1)
        drawn = torch.multinomial(distribution.exp(), 1, generator=generator)
        tokens[:, place : place + 1] = drawn
        log_probabilities.append(distribution.gather(1, drawn))
    return Samples(tokens, torch.cat(log_probabilities, 1))


def train(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    save: Callable[[nn.Module, Path], object],
    folder: Path,
) -> float:
    """Train on samples of the saved model and print the first and the last reward.

    Returns:
        The mean square of the log ratios of the two policies.
    """
    generator = torch.Generator().manual_seed(1)
    rewards = []
    mean_square = 0.0
    for _ in range(UPDATES):
        save(model, folder)
        samples = sample(folder, generator)
        current, following = samples.tokens[:, :-1], samples.tokens[:, 1:]
        is_next = (following == (current + 1) % TOKENS).float()
        logits = model(input_ids=samples.tokens, use_cache=False).logits[:, :-1]
        log_probabilities = logits.log_softmax(-1).gather(2, following[..., None])[..., 0]
        log_ratio = log_probabilities - samples.log_probabilities
        reward_to_go = is_next.flip(1).cumsum(1).flip(1)
        advantage = reward_to_go - reward_to_go.mean(0)
        optimizer.zero_grad()
        (-log_ratio.exp() * advantage).mean().backward()
        optimizer.step()
        rewards.append(is_next.mean().item())
        mean_square += log_ratio.square().mean().item() / UPDATES
    print(f"{name:<20}{rewards[0]:>15.3f}{rewards[-1]:>8.3f}{100 * mean_square**0.5:>23.2f}")
    return mean_square


if __name__ == "__main__":
    torch.manual_seed(0)
    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=TOKENS,
        architectures=["LlamaForCausalLM"],
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    floats = LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_rounded(floats, folder)
        codes = fm.load_fp8(folder, dtype=torch.float32)
        print(f"{'':<19}{'reward first':>16}{'last':>8}{'log ratio, RMS in %':>23}")

        optimizer = fm.optim.StiffnessAdamW(
            codes.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, moments="8bit"
        )
        assert train("codes in place", codes, optimizer, fm.save_fp8, folder) == 0

        optimizer = torch.optim.AdamW(floats.parameters(), lr=1e-3)
        train("float32, rounded", floats, optimizer, save_rounded, folder)
