"""Losses of MXFP4 and MXFP8 weights trained in place under Muon.

    python benchmarks/mxfp4_training.py [--steps 100] [--seeds 3] [--lr 1e-3]
                                        [--reading 200] [--weights MXFP4 MXFP8]
                                        [--json | --markdown] [--record]

A Llama of 1.4M weights is pretrained on English, one token per byte, and published by
compressed-tensors: E2M1 or E4M3 at a power of two for each 32 of a row. StiffnessMuon
then trains it on Python's sources, with each write-back, and its decoded values in
float32 with the same batches. Losses are on other sources, in nats per byte, and of the
codes alone, because a served model has no residual. After +- is half of the 95%
interval over seeds.
"""

import argparse
import inspect
import json
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import transformers
from _forms import add_form_options, text_table
from _record import add_option, record
from torch import Tensor, nn
from train_is_serve import small

import fp8manifold as fm

SCHEMES: Final = {"MXFP4": "MXFP4A16", "MXFP8": "MXFP8A16"}
WRITEBACKS: Final = ("float32", "residual8", "stochastic")
#: the modules whose sources are trained on
TRAINING_MODULES: Final = (
    "argparse",
    "typing",
    "inspect",
    "subprocess",
    "logging",
    "zipfile",
    "tarfile",
    "doctest",
    "optparse",
)
TEST_MODULES: Final = ("pickle", "configparser", "difflib")
LENGTH, BATCH, TEST_WINDOWS = 64, 16, 128
#: quantiles of Student's t for 95% intervals, by the number of values
STUDENT: Final = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


def write_compressed(base: Any, folder: Path, scheme: str) -> None:
    """Write a float model in bfloat16 as compressed-tensors does.

    Its scales are those of each group's range.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    preset = preset_name_to_scheme(SCHEMES[scheme], ["Linear"])
    preset.input_activations = None
    model = type(base)(base.config).to(torch.bfloat16)
    model.load_state_dict(base.state_dict())
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group_0": preset}, ignore=["lm_head"])
    )
    for layer in model.modules():
        layer_scheme = getattr(layer, "quantization_scheme", None)
        if layer_scheme is not None:
            weights = layer_scheme.weights
            groups = layer.weight.detach().unflatten(-1, (-1, weights.group_size))
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), weights)
            layer.weight_scale.data = scale
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def read_folder(folder: Path, writeback: str) -> Any:
    """Return the folder's model with weights in codes, or decoded by compressed-tensors."""
    if writeback != "float32":
        return fm.load(folder, dtype=torch.float32)
    decode = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=decode
    )
    for parameter in model.parameters():
        parameter.requires_grad_()
    return model


def sources(modules: tuple[str, ...]) -> Tensor:
    """Return the code of Python's modules, one token per byte."""
    text = "\n".join(inspect.getsource(import_module(name)) for name in modules)
    return torch.tensor(list(text.encode("ascii", "replace")))


def loss_of_text(model: nn.Module, text: Tensor) -> float:
    """Return the loss over windows that are spread evenly."""
    starts = torch.linspace(0, len(text) - LENGTH - 1, TEST_WINDOWS).long()[:, None]
    tokens = text[starts + torch.arange(LENGTH)]
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens, use_cache=False).loss)


class Losses(NamedTuple):
    """The losses of a training on text that is not trained on."""

    before: float
    after: float


def train_folder(folder: Path, writeback: str, lr: float, seed: int, steps: int) -> Losses:
    """Train the folder's model at a rate that rises for ten steps and falls at the end."""
    model = read_folder(folder, writeback).eval()
    text, test_text = sources(TRAINING_MODULES), sources(TEST_MODULES)
    options: dict[str, Any] = {}
    if writeback != "float32":
        options = {"writeback": writeback, "seed": seed}
    optimizer = fm.optim.StiffnessMuon.for_model(model, lr=lr, weight_decay=0.0, **options)
    first_loss = loss_of_text(model, test_text)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 10, 2 * (steps - step) / steps)
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        tokens = text[starts + torch.arange(LENGTH)]
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
    return Losses(first_loss, loss_of_text(model, test_text))


@dataclass(frozen=True)
class MeasuredTrainings:
    """The trainings of one row, a seed each."""

    weights: str
    lr: float
    writeback: str
    losses: list[Losses]

    @property
    def final_losses(self) -> list[float]:
        """The losses after training, by seed."""
        return [losses.after for losses in self.losses]


def measure_trainings(
    args: Namespace, base: Any
) -> Iterator[tuple[MeasuredTrainings, MeasuredTrainings]]:
    """Yield each row, with that of float32 weights at the same rate."""
    for scheme in args.weights:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_compressed(base, folder, scheme)
            for lr in args.lr:
                rows: list[MeasuredTrainings] = []
                for writeback in WRITEBACKS:
                    seeds = range(args.seeds)
                    losses = [
                        train_folder(folder, writeback, lr, seed, args.steps) for seed in seeds
                    ]
                    rows.append(MeasuredTrainings(scheme, lr, writeback, losses))
                    print(asdict(rows[-1]), file=sys.stderr, flush=True)
                    # float32 is the first of the write-backs.
                    yield rows[-1], rows[0]


def table_row(row: MeasuredTrainings, reference: MeasuredTrainings) -> tuple[str, ...]:
    """Return a row as text, with its difference to float32 weights."""
    difference = ""
    if row is not reference:
        pairs = zip(row.final_losses, reference.final_losses, strict=True)
        difference = interval_text([loss - reference_loss for loss, reference_loss in pairs])
    return (
        row.weights,
        f"{row.lr:g}",
        row.writeback,
        f"{row.losses[0].before:.3f}",
        interval_text(row.final_losses),
        difference.replace("-0.000", "0.000"),
    )


def interval_text(values: list[float]) -> str:
    """Return the mean, and half of its 95% interval."""
    half = STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


def main() -> None:
    """Train every row, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--weights", nargs="+", choices=tuple(SCHEMES), default=["MXFP4"], help="what is published"
    )
    parser.add_argument("--steps", type=int, default=100, help="of each training")
    parser.add_argument("--seeds", type=int, default=3, choices=tuple(STUDENT), help="how many")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3], help="rates, of everything")
    parser.add_argument(
        "--reading", type=int, default=200, help="steps that the model reads before"
    )
    add_form_options(parser)
    add_option(parser)
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    base, _ = small(args.reading)
    measured = list(measure_trainings(args, base))
    rows = [table_row(row, reference) for row, reference in measured]
    columns = ["weights", "lr", "writeback", "before", f"after {args.steps} steps", "minus float32"]
    if args.json:
        print(json.dumps([asdict(row) for row, _ in measured], indent=1))
        return
    print(text_table([columns, *rows], ("---", "---:", "---", *["---:"] * 3), args.markdown))
    if args.record:
        record("", columns, rows, packages=("transformers", "compressed-tensors"))


if __name__ == "__main__":
    main()
