"""
Under Hugging Face accelerate
=============================

``Accelerator.prepare`` takes a quantised model and its optimizer as it takes any other.
Mixed precision (bfloat16), gradient accumulation and clipping work on weights of one
byte each. A small MLP learns scikit-learn's digits. ``save_state`` writes these weights
as plain tensors, and a training that goes on after ``load_state`` ends with the same
bits.

Needs accelerate and scikit-learn (``pip install 'fp8manifold[examples]'``).

Expected output::

    before: loss 2.306, accuracy 0.078
    after:  loss 0.115, accuracy 0.969
    the weights are still FP8Parameter, codes torch.uint8
    resumed half-way: the same codes, scales and averages
"""

import tempfile

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fp8manifold as fm


def data() -> tuple[DataLoader, Tensor, Tensor]:
    """Return shuffled batches to train on, and the images and labels of the test."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    batches = DataLoader(TensorDataset(x[train], y[train]), batch_size=32, shuffle=True)
    return batches, x[test], y[test]


@torch.no_grad()
def report(when: str, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Print loss and accuracy on the test images."""
    logits = model(x).float()
    loss = nn.functional.cross_entropy(logits, y).item()
    accuracy = (logits.argmax(1) == y).float().mean().item()
    print(f"{when:<8}loss {loss:.3f}, accuracy {accuracy:.3f}")


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


def state_numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """Return every number of the model and of the optimizer's averages."""
    tensors = list(model.state_dict().values())
    for state in optimizer.state_dict()["state"].values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return [tensor.double().flatten().tolist() for tensor in tensors]


def main() -> None:
    """Train for ten epochs, then repeat the last five from the saved state."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = fm.quantize_model(model, "E4M3", storage="codes")
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
        uninterrupted = state_numbers(model, optimizer)
        accelerator.load_state(folder)
    train(accelerator, model, optimizer, loader)
    same = "the same" if state_numbers(model, optimizer) == uninterrupted else "other"
    print(f"resumed half-way: {same} codes, scales and averages")


if __name__ == "__main__":
    main()
