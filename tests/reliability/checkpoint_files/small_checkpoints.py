"""A checkpoint of three kilobytes, different at every step.

Also a look at what is in a folder.
"""

import torch

from nanogpt_bench.checkpoint import Contents


def small(step, size=24):
    random = torch.Generator().manual_seed(step)
    tensors = {
        "model": {
            "w": torch.randn(3, size, generator=random),
            "b": torch.randn(3, generator=random),
        },
        "optimizer": {
            "w/exp_avg": torch.randn(3, size, generator=random),
            "w/step": torch.tensor(float(step)),
        },
        "observers": {"ever": torch.randint(0, 2, (31,), generator=random).bool()},
        "random": {"cpu": torch.randint(0, 256, (64,), dtype=torch.uint8, generator=random)},
    }
    facts = {
        "best": False,
        "config": {"seed": 42, "model": {"format": "E4M3"}},
        "trackers": {"wandb": f"id{step}"},
    }
    return Contents(step, tensors, {"model": {"w": "E4M3"}}, facts)


def bytes_in(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
