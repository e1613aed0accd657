"""Cases of FisherNaturalGradient: a small tagger with every kind of parameter, and its training."""

import pytest
import torch
import torch.nn.functional as F
from optimizer_cases import frozen
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.optim import FisherNaturalGradient

REPRESENTATIONS = ("diagonal", "kfac", "ekfac")
EVERY = pytest.mark.parametrize("representation", REPRESENTATIONS)
STORAGES = ("plain", "grid", "fp8")


class Tagger(nn.Module):
    """Tokens (B, T) to one of five tags each: an embedding, two linear layers on 3-D activations, a norm."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.hidden = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(torch.tanh(self.hidden(self.embedding(tokens)))))


def tagger(storage="fp8", fmt="E4M3", seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Tagger()
    return model if storage == "plain" else fm.quantize_model(model, fmt, storage=storage)


def batch(seed=0):
    tokens = torch.randint(0, 13, (6, 9), generator=torch.Generator().manual_seed(seed))
    return tokens, (tokens * 7 + 1) % 5


def optimizer_of(model, loader=None, **options):
    return FisherNaturalGradient(
        model.parameters(), model, loader or [batch(100)], **{"seed": 3, "stiffness": 1.0, **options}
    )


def put_gradients(model, seed=0):
    tokens, tags = batch(seed)
    model.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tags.flatten())
    loss.backward()
    return loss.item()


def values(parameters):
    return [(p.codes if isinstance(p, fm.FP8Tensor) else p.detach().as_subclass(Tensor)).clone() for p in parameters]


def snapshot(optimizer):
    parameters = values(p for group in optimizer.param_groups for p in group["params"])
    return {"parameters": frozen(parameters), "state": frozen(optimizer.state_dict())}


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        put_gradients(model, step)
        optimizer.step()


def counting(loader):
    """A loader that notes the steps at which it is asked for batches."""
    asked = []

    def batches(step):
        asked.append(step)
        return loader

    return asked, batches


def stretch_of(weight, low, high):
    """``S / S_ref`` written out."""
    scale = weight.expanded_scale() if isinstance(weight, fm.FP8Tensor) else weight.manifold.scale
    x = weight.dequantize() if isinstance(weight, fm.FP8Tensor) else weight.detach().as_subclass(Tensor)
    stiffness = fm.ulp(x / scale, "E4M3") * scale
    return (stiffness / stiffness.mean()).clamp(low, high)
