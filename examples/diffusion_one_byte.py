"""
A diffusion transformer in one byte per weight
==============================================

A small DiT of diffusers with random weights learns to remove noise from handwritten
digits, given the digit's class. First AdamW trains it in float32. Then Muon trains it
with the weights of its linear layers in one byte each, and their momentum in another
byte. Muon steps in the backward pass: each gradient is used and freed before the next
is computed, and clipped by the norm of the step before. Losses are the mean squared
error of the predicted noise, on images that were not trained on.

Needs diffusers and scikit-learn (``pip install 'fp8manifold[examples]'``).

Expected output::

    before training          1.516
    AdamW, float32           0.362
    Muon, one byte           0.411
    bytes per linear weight  2.05
"""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fp8manifold as fm

STEPS, BATCH, LR = 150, 32, 4e-3
TRAINING_IMAGES = 1500
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
classes = torch.tensor(digits.target)
scheduler = DDPMScheduler(num_train_timesteps=100)


def initial_model() -> nn.Module:
    """Return two blocks on patches of 2 x 2 pixels, with the same weights every time."""
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=1,
        num_layers=2,
        dropout=0.0,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    return model.train()


def denoising_loss(
    model: nn.Module, x: Tensor, labels: Tensor, generator: torch.Generator
) -> Tensor:
    """Return the mean squared error of the predicted noise, at random times."""
    noise = torch.randn(x.shape, generator=generator)
    times = torch.randint(100, (len(x),), generator=generator)
    noisy = scheduler.add_noise(x, noise, times)
    return nn.functional.mse_loss(model(noisy, times, labels).sample, noise)


@torch.no_grad()
def report(name: str, model: nn.Module) -> None:
    """Print the loss on the images that were not trained on."""
    model.eval()
    loss = denoising_loss(
        model,
        images[TRAINING_IMAGES:],
        classes[TRAINING_IMAGES:],
        torch.Generator().manual_seed(2),
    )
    model.train()
    print(f"{name:<25}{float(loss):.3f}")


def train(model: nn.Module, optimizer: Any, clip: Callable[[], object] = lambda: None) -> None:
    """Train on random images, at a rate that falls to zero."""
    generator = torch.Generator().manual_seed(1)
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step in range(STEPS):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * (1 - step / STEPS)
        batch = torch.randint(TRAINING_IMAGES, (BATCH,), generator=generator)
        optimizer.zero_grad()
        denoising_loss(model, images[batch], classes[batch], generator).backward()
        clip()
        optimizer.step()


def bytes_per_linear_weight(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes of codes and state per weight that Muon steps."""
    total, count = 0, 0
    for layer in model.modules():
        if not isinstance(layer, fm.QuantizedLinear):
            continue
        state = optimizer.state[layer.weight]
        if "momentum_buffer" in state:
            total += layer.weight.codes.nbytes
            total += sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
            count += layer.weight.numel()
    return total / count


model = initial_model()
report("before training", model)
train(
    model,
    torch.optim.AdamW(model.parameters(), LR),
    clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
)
report("AdamW, float32", model)

model = fm.quantize_model(initial_model(), "E4M3", storage="codes")
optimizer = fm.optim.StiffnessMuon.for_model(model, LR, moments="8bit")
fm.optim.step_in_backward(optimizer, clip="previous", max_norm=1.0, first="measure")
train(model, optimizer)
report("Muon, one byte", model)
print(f"{'bytes per linear weight':<25}{bytes_per_linear_weight(model, optimizer):.2f}")
