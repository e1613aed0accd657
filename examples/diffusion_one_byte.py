"""
A diffusion transformer in one byte per weight
==============================================

A small DiT of diffusers with random weights learns to remove noise from handwritten
digits, given the digit's class: by AdamW in float32, and with the weights of its linear
layers in one byte each by Muon, whose momentum takes another byte. There each gradient
is used and freed before the next is computed, and clipped by the norm of the step
before. Losses are the mean squared error of the predicted noise on images that were not
trained on.

Needs diffusers and scikit-learn (``pip install 'fp8manifold[examples]'``).

Expected output::

    before training          1.516
    AdamW, float32           0.362
    Muon, one byte           0.415
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
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
classes = torch.tensor(digits.target)
learnt, held_out = slice(0, 1500), slice(1500, None)
scheduler = DDPMScheduler(num_train_timesteps=100)


def model_of(seed: int = 0) -> nn.Module:
    """Two blocks on patches of 2 x 2 pixels."""
    torch.manual_seed(seed)
    sizes = {
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "num_layers": 2,
        "sample_size": 8,
        "patch_size": 2,
    }
    return DiTTransformer2DModel(
        **sizes, in_channels=1, num_embeds_ada_norm=10, dropout=0.0
    ).train()


def loss_of(model: nn.Module, x: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Mean squared distance of the predicted noise from the added one, at random times."""
    noise = torch.randn(x.shape, generator=generator)
    times = torch.randint(100, (len(x),), generator=generator)
    noisy = scheduler.add_noise(x, noise, times)
    return nn.functional.mse_loss(model(noisy, times, labels).sample, noise)


@torch.no_grad()
def report(name: str, model: nn.Module) -> None:
    """Print the loss on the images that were held out."""
    loss = loss_of(
        model.eval(), images[held_out], classes[held_out], torch.Generator().manual_seed(2)
    )
    model.train()
    print(f"{name:<25}{float(loss):.3f}")


def train(model: nn.Module, optimizer: Any, clip: Callable[[], object] = lambda: None) -> None:
    """Train on random images, at a rate that falls to zero."""
    generator, peaks = (
        torch.Generator().manual_seed(1),
        [group["lr"] for group in optimizer.param_groups],
    )
    for step in range(STEPS):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * (1 - step / STEPS)
        chosen = torch.randint(1500, (BATCH,), generator=generator)
        optimizer.zero_grad()
        loss_of(model, images[learnt][chosen], classes[learnt][chosen], generator).backward()
        clip()
        optimizer.step()


model = model_of()
report("before training", model)
train(
    model,
    torch.optim.AdamW(model.parameters(), LR),
    lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
)
report("AdamW, float32", model)

model = fm.quantize_model(model_of(), "E4M3", storage="fp8")
optimizer = fm.optim.StiffnessMuon.for_model(model, LR, moments="8bit")
fm.optim.step_in_backward(optimizer, clip="previous", max_norm=1.0, first="measure")
train(model, optimizer)
report("Muon, one byte", model)
layers = [module for module in model.modules() if isinstance(module, fm.QuantizedLinear)]
weights = [layer.weight for layer in layers if "momentum_buffer" in optimizer.state[layer.weight]]
state = [
    value
    for weight in weights
    for value in optimizer.state[weight].values()
    if isinstance(value, Tensor)
]
held = sum(weight.codes.nbytes for weight in weights) + sum(value.nbytes for value in state)
print(f"{'bytes per linear weight':<25}{held / sum(weight.numel() for weight in weights):.2f}")
