"""
Under Lightning
===============

A ``LightningModule`` around a quantised model trains with this library's optimizer as
with any other. A small MLP learns scikit-learn's digits for ten epochs, and once more
from the checkpoint of the fifth, to the same bits.

Needs lightning and scikit-learn (``pip install 'fp8manifold[examples]'``).

Expected output::

    before: loss 2.306, accuracy 0.078
    after:  loss 0.097, accuracy 0.981
    the weights are still FP8Parameter, codes torch.uint8
    gone on from the checkpoint half-way: the same codes, scales and averages
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
        layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)
        self.net = fm.quantize_model(nn.Sequential(*layers), "E4M3", storage="fp8")

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return fm.optim.StiffnessAdamW(
            self.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0, moments="8bit"
        )


def fit(
    model: Digits, loader: DataLoader, epochs: int, start: Path | None = None
) -> lightning.Trainer:
    """Train up to an epoch, from the beginning or from a checkpoint."""
    quiet = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    trainer = lightning.Trainer(
        accelerator="cpu", precision="bf16-mixed", max_epochs=epochs, **quiet
    )
    trainer.fit(model, loader, ckpt_path=start, weights_only=True)
    return trainer


@torch.no_grad()
def report(when: str, model: Digits, x: Tensor, y: Tensor) -> None:
    """Print the test loss and accuracy."""
    accuracy = (model.net(x).argmax(1) == y).float().mean()
    print(f"{when:<8}loss {model.training_step([x, y]).item():.3f}, accuracy {accuracy.item():.3f}")


def held(model: Digits, trainer: lightning.Trainer) -> list[list[float]]:
    """Every number of the model, and of the optimizer's averages."""
    tensors = model.state_dict()
    averages = [
        x
        for entry in trainer.optimizers[0].state.values()
        for x in entry.values()
        if isinstance(x, Tensor)
    ]
    return [x.double().flatten().tolist() for x in (*tensors.values(), *averages)]


def main() -> None:
    """Train for ten epochs, and once more from the checkpoint of the fifth."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")  # advice on loaders and logs
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    loader, model = DataLoader(TensorDataset(x[360:], y[360:]), batch_size=64), Digits()
    report("before:", model, x[:360], y[:360])
    with tempfile.TemporaryDirectory() as folder:
        fit(model, loader, 5).save_checkpoint(Path(folder) / "half.ckpt")
        again = fit(other := Digits(), loader, 10, Path(folder) / "half.ckpt")
    whole = fit(model := Digits(), loader, 10)
    report("after:", model, x[:360], y[:360])
    print(
        f"the weights are still {type(model.net[0].weight).__name__}, codes "
        f"{model.net[0].weight.codes.dtype}"
    )
    same = "the same" if held(model, whole) == held(other, again) else "other"
    print(f"gone on from the checkpoint half-way: {same} codes, scales and averages")


if __name__ == "__main__":
    main()
