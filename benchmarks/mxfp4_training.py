"""Losses of MXFP4 and MXFP8 weights trained in place under Muon, beside their decoded
values trained in float32.

    python benchmarks/mxfp4_training.py [--steps 100] [--seeds 3] [--lr 1e-3] [--reading
                                        200] [--weights MXFP4 MXFP8] [--json |
                                        --markdown] [--record]

A Llama of 1.4M weights is pretrained on English, one token per byte, and published by
compressed-tensors: E2M1 or E4M3 at a power of two for each 32 of a row. It is then
trained on Python's sources by StiffnessMuon, with each write-back, and so are its
decoded values in float32, with the same batches. Losses are on other sources, in nats
per byte, and of the codes alone, because a served model has no residual. After +- is
half of the 95% interval over seeds.
"""

import argparse
import inspect
import json
import statistics
import sys
import tempfile
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from _forms import add_form_options, text_table
from _record import add_option, record
from torch import Tensor, nn
from train_is_serve import small

import fp8manifold as fm

SCHEMES: Final = {"MXFP4": "MXFP4A16", "MXFP8": "MXFP8A16"}
WRITEBACKS: Final = ("float32", "residual8", "stochastic")
LEARNT: Final = (
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
HELD: Final = ("pickle", "configparser", "difflib")
LENGTH, BATCH, WINDOWS = 64, 16, 128
STUDENT: Final = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


def publish(base: Any, folder: Path, scheme: str) -> None:
    """Write a float model in bfloat16 as compressed-tensors does, its scales from each
    group's range.
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
        if (how := getattr(layer, "quantization_scheme", None)) is not None:
            parts = layer.weight.detach().unflatten(-1, (-1, how.weights.group_size))
            layer.weight_scale.data = calculate_qparams(
                parts.amin(-1), parts.amax(-1), how.weights
            )[0]
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def read(folder: Path, writeback: str) -> Any:
    """The folder's model with weights in codes, or decoded by compressed-tensors."""
    if writeback != "float32":
        return fm.load_fp8(folder, dtype=torch.float32)
    decode = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=decode
    )
    for parameter in model.parameters():
        parameter.requires_grad_()
    return model


def sources(modules: tuple[str, ...]) -> Tensor:
    """Python's own code, one token per byte."""
    text = "\n".join(inspect.getsource(import_module(name)) for name in modules)
    return torch.tensor(list(text.encode("ascii", "replace")))


def loss_of(model: nn.Module, text: Tensor) -> float:
    """The loss over windows that are spread evenly."""
    starts = torch.linspace(0, len(text) - LENGTH - 1, WINDOWS).long()[:, None]
    tokens = text[starts + torch.arange(LENGTH)]
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens, use_cache=False).loss)


def trained(
    folder: Path, writeback: str, lr: float, seed: int, args: Namespace
) -> tuple[float, float]:
    """The loss before the training and after it."""
    model, text, held = read(folder, writeback).eval(), sources(LEARNT), sources(HELD)
    rule: dict[str, Any] = {} if writeback == "float32" else {"writeback": writeback, "seed": seed}
    optimizer = fm.optim.StiffnessMuon.for_model(model, lr=lr, weight_decay=0.0, **rule)
    before = loss_of(model, held)
    drawn = torch.Generator().manual_seed(seed)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 10, 2 * (args.steps - step) / args.steps)
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=drawn)
        tokens = text[starts + torch.arange(LENGTH)]
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
    return before, loss_of(model, held)


def spread(values: list[float]) -> str:
    """The mean, and half of its 95% interval."""
    half = STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
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
    rows: list[tuple[str, ...]] = []
    found = []
    for scheme in args.weights:
        with tempfile.TemporaryDirectory() as place:
            publish(base, Path(place), scheme)
            for lr in args.lr:
                floats: list[float] = []
                for writeback in WRITEBACKS:
                    ends = [
                        trained(Path(place), writeback, lr, seed, args)
                        for seed in range(args.seeds)
                    ]
                    after = [end for _, end in ends]
                    floats = floats or after
                    less = [own - other for own, other in zip(after, floats, strict=True)]
                    found.append(
                        {"weights": scheme, "lr": lr, "writeback": writeback, "losses": ends}
                    )
                    difference = (
                        "" if writeback == "float32" else spread(less).replace("-0.000", "0.000")
                    )
                    print(found[-1], file=sys.stderr, flush=True)
                    rows.append(
                        (
                            scheme,
                            f"{lr:g}",
                            writeback,
                            f"{ends[0][0]:.3f}",
                            spread(after),
                            difference,
                        )
                    )
    columns = ["weights", "lr", "writeback", "before", f"after {args.steps} steps", "minus float32"]
    if args.json:
        print(json.dumps(found, indent=1))
        return
    print(text_table([columns, *rows], ("---", "---:", "---", *["---:"] * 3), args.markdown))
    if args.record:
        record("", columns, rows, packages=("transformers", "compressed-tensors"))


if __name__ == "__main__":
    main()
