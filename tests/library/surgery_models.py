"""The model that is operated on."""

import copy
from itertools import product

import torch
import torch.nn.functional as F
from optimizer_cases import normal
from torch import nn

from fp8manifold import QuantizedLinear, quantize_model


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.proj(F.relu(self.qkv(x)[..., :8]))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(8), Attention()
        self.mlp = nn.ModuleDict({"fc": nn.Linear(8, 16), "out": nn.Linear(16, 8)})

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp["out"](F.relu(self.mlp["fc"](x)))


class Model(nn.Module):
    """Twelve blocks, so that blocks.1 and blocks.11 may be confused."""

    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.lm_head = nn.Linear(8, 10, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight
        for i, p in enumerate(self.parameters()):
            p.data = normal(*p.shape, seed=i, std=0.3)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


TOKENS = torch.arange(10).view(2, 5)
PARTS = ("attn.qkv", "attn.proj", "mlp.fc", "mlp.out")
LINEARS = [f"blocks.{i}.{part}" for i, part in product(range(12), PARTS)] + ["lm_head"]


def model_bits(model):
    state = copy.deepcopy(model).state_dict()
    tensors = {
        name: (str(x.dtype), x.contiguous().view(-1).view(torch.uint8).tolist())
        for name, x in state.items()
    }
    kinds = {
        name: (type(p).__name__, p.requires_grad)
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    described = [(repr(layer), layer.spec, layer.storage) for layer in layers]
    return {"tensors": tensors, "kinds": kinds, "layers": described}


def stored(name="E4M3", **options):
    return quantize_model(Model(), name, "codes", **options)


def layers(model):
    return [m for m in model.modules() if isinstance(m, QuantizedLinear)]
