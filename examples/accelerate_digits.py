"""
Under Hugging Face accelerate
=============================

``Accelerator.prepare`` takes a quantised model and its optimizer as it takes any other:
mixed precision (bfloat16), gradient accumulation and clipping work on weights of one
byte each. A small MLP learns scikit-learn's digits. ``save_state`` writes these weights
as plain tensors; what ``load_state`` reads goes on to the same bits.

Needs accelerate and scikit-learn (``pip install 'fp8manifold[examples]'``).

Expected output::

    before: loss 2.306, accuracy 0.078
    after:  loss 0.119, accuracy 0.964
    the weights are still FP8Parameter, codes torch.uint8
    gone on from what was saved half-way: the same codes, scales and averages
"""

import tempfile

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fp8manifold as fm


def data() -> tuple[DataLoader, Tensor, Tensor]:
    """Shuffled batches to train on, and the test images."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return (
        DataLoader(TensorDataset(x[train], y[train]), batch_size=32, shuffle=True),
        x[test],
        y[test],
    )


@torch.no_grad()
def report(when: str, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Print the test loss and accuracy."""
    logits = model(x).float()
    accuracy = (logits.argmax(1) == y).float().mean().item()
    print(
        f"{when:<8}loss {nn.functional.cross_entropy(logits, y).item():.3f}, accuracy "
        f"{accuracy:.3f}"
    )


def train(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> None:
    """Train for five epochs, two batches per step."""
    for _ in range(5):
        for x, y in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """Every number of the model, and of the optimizer's averages."""
    averages = [
        x
        for entry in optimizer.state_dict()["state"].values()
        for x in entry.values()
        if isinstance(x, Tensor)
    ]
    return [x.double().flatten().tolist() for x in (*model.state_dict().values(), *averages)]


def main() -> None:
    """Train for ten epochs, and once more for the last five, from the saved state."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = fm.quantize_model(model, "E4M3", storage="fp8")
    optimizer = fm.optim.StiffnessAdamW(
        model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0
    )
    loader, test_x, test_y = data()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    report("before:", model, test_x, test_y)
    train(accelerator, model, optimizer, loader)
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        train(accelerator, model, optimizer, loader)
        report("after:", model, test_x, test_y)
        weight = accelerator.unwrap_model(model)[0].weight
        print(f"the weights are still {type(weight).__name__}, codes {weight.codes.dtype}")
        ended = held(model, optimizer)
        accelerator.load_state(folder)
    train(accelerator, model, optimizer, loader)
    same = "the same" if held(model, optimizer) == ended else "other"
    print(f"gone on from what was saved half-way: {same} codes, scales and averages")


if __name__ == "__main__":
    main()
