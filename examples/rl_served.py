"""
The policy that is served is the policy that is trained
=======================================================

A small Llama learns by GRPO to sort three digits: 24 prompts an update, 8 samples each.
The samples come from a server, which is brought up to date after each update, in one
of four ways:

- codes in place: E4M3 is trained, and the server gets the codes that have changed;
- float32, FP8 server: a float32 policy is sent in bfloat16, and the server rounds it at
  scales of (the largest of 128 x 128 weights) / 448;
- float32, bfloat16 server: it is sent in bfloat16 and served so;
- codes, bfloat16 wire: the codes are decoded, sent in bfloat16, and rounded again at
  such scales, although every value was one of E4M3 before.

k3 is the mean of r - 1 - log r, where r is the trained policy's probability of a sampled
token over the server's. Where codes are served as they are trained, it is 0, to the
bit: both sides do the same arithmetic, in passes over whole sequences. A sync takes the
bytes of the file that ``fm.write_changes`` makes of what has changed.

``--updates 200`` learns to sort. Needs transformers (``pip install
'fp8manifold[hf]'``).  Expected output::

    updates: 4, seed: 0           reward   k3 in 1e-6   kB a sync
    codes in place                 0.088         0.00       402.5
    float32, FP8 server            0.088        33.08       977.6
    float32, bfloat16 server       0.087         0.40       977.7
    codes, bfloat16 wire           0.088        38.95       618.6
"""

import argparse
import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM, logging

import fp8manifold as fm

DIGITS, SEPARATOR = 10, 10
PROMPTS, SAMPLES = 24, 8
#: updates whose mean reward is printed
LAST = 20
#: the largest number of E4M3
LARGEST = 448
Tensors = dict[str, Tensor]


class Rollout(NamedTuple):
    """Sequences of three digits, a separator and three answers."""

    tokens: Tensor
    #: of the answers, when they were drawn
    log_probabilities: Tensor
    reward: Tensor


def policy() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    config.architectures = ["LlamaForCausalLM"]
    return LlamaForCausalLM(config)


def log_probabilities_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the log-probabilities of all tokens at the places of the answers."""
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits[:, 3:6]
    return logits.log_softmax(-1)


@torch.no_grad()
def rollout(server: nn.Module, generator: torch.Generator) -> Rollout:
    prompts = torch.randint(DIGITS, (PROMPTS, 3), generator=generator)
    prompts = prompts.repeat_interleave(SAMPLES, 0)
    tokens = torch.full((len(prompts), 7), SEPARATOR)
    tokens[:, :3] = prompts
    drawn = []
    for place in range(3):
        log_probabilities = log_probabilities_of(server, tokens)[:, place]
        answer = torch.multinomial(log_probabilities.exp(), 1, generator=generator)
        tokens[:, 4 + place : 5 + place] = answer
        drawn.append(log_probabilities.gather(1, answer))
    is_right = tokens[:, 4:] == prompts.sort(1).values
    return Rollout(tokens, torch.cat(drawn, 1), is_right.float().mean(1))


def is_coded(name: str) -> bool:
    return name.endswith("proj.weight")


def rounded(weight: Tensor) -> Tensor:
    """Return a weight in E4M3, where a square has the scale (its largest) / 448."""
    squares = weight.unflatten(0, (-1, 128)).unflatten(-1, (-1, 128))
    scale = squares.abs().amax((1, 3), keepdim=True) / LARGEST
    codes = (squares / scale).to(torch.float8_e4m3fn)
    return (codes.float() * scale).reshape(weight.shape)


def decoded(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return floats of codes and scales, without this library."""
    floats = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        floats[name] = tensor.float()
        if is_coded(name):
            scale = tensors[f"{name}_scale_inv"].repeat_interleave(128, 0)
            floats[name] *= scale.repeat_interleave(128, 1)
    return floats


def in_bfloat16(model: nn.Module) -> Tensors:
    """Return what a trainer sends that knows floats only."""
    floats = {}
    for name, values in model.named_parameters():
        if isinstance(values, fm.FP8Tensor):
            values = values.dequantize()
        floats[name] = values.detach().bfloat16()
    return floats


def served(arm: str, wire: Mapping[str, Tensor]) -> Tensors:
    """Return the weights that a server computes with, of what it was sent."""
    if arm == "codes in place":
        return decoded(wire)
    floats = {name: values.float() for name, values in wire.items()}
    if arm == "float32, bfloat16 server":
        return floats
    return {name: rounded(x) if is_coded(name) else x for name, x in floats.items()}


def changed(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> list[fm.Patch]:
    """Return patches of floats, as ``ServedChanges`` makes them of codes."""
    patches = []
    for name, values in new.items():
        indices = (values != old[name]).view(-1).nonzero().view(-1)
        values_there = values.reshape(-1)[indices]
        patches.append(fm.Patch(name, tuple(values.shape), values.dtype, indices, values_there))
    return patches


class Wire:
    """The way from a trained policy to its server; counts the bytes."""

    def __init__(self, arm: str, model: nn.Module, folder: Path) -> None:
        self.arm, self.model, self.folder = arm, model, folder
        self.sizes: list[int] = []
        self.changes = None
        if arm == "codes in place":
            weights = fm.served_weights(model)
            self.changes = fm.ServedChanges(weights)
            self.at_server = {name: tensor.clone() for name, tensor in weights}
        else:
            self.at_server = {name: x.clone() for name, x in in_bfloat16(model).items()}

    def sync(self) -> Tensors:
        """Bring the server up to date; return the weights that it computes with."""
        if self.changes is None:
            patches = changed(in_bfloat16(self.model), self.at_server)
        else:
            patches = self.changes.since_last()
        fm.write_changes(self.folder, patches)
        self.sizes.append((self.folder / "changes.safetensors").stat().st_size)
        fm.apply_changes(self.at_server, fm.read_changes(self.folder))
        return served(self.arm, self.at_server)


def train(arm: str, floats: LlamaForCausalLM, updates: int, seed: int) -> list[float]:
    """Return the mean reward of the last updates, k3 in 1e-6, and kB a sync."""
    model, server = copy.deepcopy(floats), copy.deepcopy(floats)
    if arm.startswith("codes"):
        formats = {"*": "E4M3", "lm_head": "none"}
        fm.quantize_model(model, formats, granularity="square", tied="untie")
    betas = (0.9, 0.95)
    optimizer = fm.optim.StiffnessAdamW(model.parameters(), lr=1e-3, betas=betas, weight_decay=0)
    generator = torch.Generator().manual_seed(seed)
    rewards, k3 = [], []
    with tempfile.TemporaryDirectory() as name:
        wire = Wire(arm, model, Path(name))
        for _ in range(updates):
            server.load_state_dict(wire.sync(), strict=False)
            samples = rollout(server, generator)
            answers = samples.tokens[:, 4:, None]
            current = log_probabilities_of(model, samples.tokens).gather(2, answers)[..., 0]
            log_ratio = current - samples.log_probabilities
            by_prompt = samples.reward.view(PROMPTS, SAMPLES)
            spread = by_prompt.std(1, keepdim=True) + 1e-4
            advantage = ((by_prompt - by_prompt.mean(1, keepdim=True)) / spread).view(-1, 1)
            optimizer.zero_grad()
            (-log_ratio.exp() * advantage).mean().backward()
            optimizer.step()
            rewards.append(samples.reward.mean().item())
            k3.append((log_ratio.exp() - 1 - log_ratio).mean().item())
        if arm == "codes in place":
            check_folder(model, wire.sync(), Path(name))
    last = rewards[-LAST:]
    size = sum(wire.sizes[1:]) / max(len(wire.sizes) - 1, 1)
    return [sum(last) / len(last), 1e6 * sum(k3) / len(k3), size / 1000]


def check_folder(model: nn.Module, at_server: Tensors, folder: Path) -> None:
    """A folder of ``fm.save`` has the same weights, as transformers reads it."""
    fm.save(model, folder / "saved", "fp8")
    read = LlamaForCausalLM.from_pretrained(
        folder / "saved",
        quantization_config=FineGrainedFP8Config(dequantize=True),
        dtype=torch.float32,
    )
    for name, values in read.named_parameters():
        assert torch.equal(values, at_server[name]), name


ARMS = ("codes in place", "float32, FP8 server", "float32, bfloat16 server", "codes, bfloat16 wire")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable_progress_bar()
    torch.manual_seed(options.seed)
    start = policy()
    title = f"updates: {options.updates}, seed: {options.seed}"
    print(f"{title:<28}{'reward':>8}{'k3 in 1e-6':>13}{'kB a sync':>12}")
    for arm in ARMS:
        reward, k3, size = train(arm, start, options.updates, options.seed)
        print(f"{arm:<28}{reward:>8.3f}{k3:>13.2f}{size:>12.1f}", flush=True)
        assert k3 == 0 or arm != "codes in place"
