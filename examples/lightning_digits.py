"""
Under Lightning
===============

A ``LightningModule`` around a quantised model trains with this library's optimizer as
with any other. A small MLP learns scikit-learn's digits for ten epochs. A second
training goes on from the checkpoint of the fifth epoch and ends with the same bits.

Needs lightning and scikit-learn (``pip install 'fp8manifold[examples]'``).

Expected output::

    before: loss 2.306, accuracy 0.078
    after:  loss 0.101, accuracy 0.981
    the weights are still FP8Parameter, codes torch.uint8
    resumed half-way: the same codes, scales and averages
"""

import logging
import tempfile
import warnings
from pathlib import Path

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fp8manifold as fm


class Digits(lightning.LightningModule):
    """The model, its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.net = fm.quantize_model(net, "E4M3", storage="codes")

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss of a batch."""
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return fm.optim.StiffnessAdamW(
            self.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0, moments="8bit"
        )


def data() -> tuple[DataLoader, Tensor, Tensor]:
    """Return batches to train on, and the images and labels of the test."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels)[order]
    batches = DataLoader(TensorDataset(x[360:], y[360:]), batch_size=64)
    return batches, x[:360], y[:360]


def fit(
    model: Digits, loader: DataLoader, epochs: int, checkpoint: Path | None = None
) -> lightning.Trainer:
    """Train up to an epoch, from the beginning or from a checkpoint."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, loader, ckpt_path=checkpoint, weights_only=True)
    return trainer


@torch.no_grad()
def report(when: str, model: Digits, x: Tensor, y: Tensor) -> None:
    """Print loss and accuracy on the test images."""
    loss = model.training_step([x, y]).item()
    accuracy = (model.net(x).argmax(1) == y).float().mean().item()
    print(f"{when:<8}loss {loss:.3f}, accuracy {accuracy:.3f}")


def state_numbers(model: Digits, trainer: lightning.Trainer) -> list[list[float]]:
    """Return every number of the model and of the optimizer's averages."""
    tensors = list(model.state_dict().values())
    for state in trainer.optimizers[0].state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return [tensor.double().flatten().tolist() for tensor in tensors]


def main() -> None:
    """Train for ten epochs, and again from the checkpoint of the fifth."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # Lightning gives advice on loaders and logs.
    warnings.filterwarnings("ignore", module="lightning")
    loader, test_x, test_y = data()
    model = Digits()
    report("before:", model, test_x, test_y)
    resumed = Digits()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "half.ckpt"
        fit(model, loader, 5).save_checkpoint(checkpoint)
        resumed_trainer = fit(resumed, loader, 10, checkpoint)
    model = Digits()
    trainer = fit(model, loader, 10)
    report("after:", model, test_x, test_y)
    weight = model.net[0].weight
    print(f"the weights are still {type(weight).__name__}, codes {weight.codes.dtype}")
    same = state_numbers(model, trainer) == state_numbers(resumed, resumed_trainer)
    print(f"resumed half-way: {'the same' if same else 'other'} codes, scales and averages")


if __name__ == "__main__":
    main()
