"""The peaks of real steps, beside `fm.memory_needed`, which says them by arithmetic.

    python benchmarks/fits.py [--models llama,qwen2,gpt2] [--ways one_byte_adamw,...]
                              [--markdown | --json] [--record]

For each model and way of training a fresh process makes a model of random weights on
the CPU and takes three steps over one sequence. Blocks are computed again in the
backward pass. Shown is the largest resident set of that process meanwhile (``VmHWM`` of
Linux, reset once the model is made), minus the resident set before the model was made.
By then the process has taken such steps with a model of one block, so that code and
buffers of products are there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from typing import Any, Final, NamedTuple

from _forms import add_form_options, text_table
from _record import Cell, add_option, record
from loading import check_linux, forget_peak, resident_bytes


class FittedModel(NamedTuple):
    """A model that is made on the spot."""

    #: the name of its class of settings in transformers
    kind: str
    settings: dict[str, Any]
    #: the setting with the number of its blocks
    blocks: str = "num_hidden_layers"


MODELS: Final = {
    "llama": FittedModel(
        "Llama",
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 6,
            "vocab_size": 16384,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": FittedModel(
        "Qwen2",
        {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 8,
            "vocab_size": 24576,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
    ),
    "gpt2": FittedModel(
        "GPT2",
        {
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "vocab_size": 50257,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        blocks="n_layer",
    ),
}


class FittedWay(NamedTuple):
    """A way of training, as options of `fm.memory_needed`."""

    name: str
    options: dict[str, Any]
    tokens: int = 256


def _floats(optimizer: str, dtype: str) -> dict[str, Any]:
    return {"optimizer": optimizer, "storage": "float", "dtype": dtype, "in_backward": False}


WAYS: Final = {
    "one_byte_adamw": FittedWay("one byte, AdamW, steps in backward", {"optimizer": "adamw"}),
    "one_byte_muon": FittedWay(
        "one byte, Muon, steps in backward, loss in chunks", {"optimizer": "muon", "chunk": 64}
    ),
    "one_byte_lion": FittedWay(
        "one byte, Lion, steps in backward, loss in chunks", {"optimizer": "lion", "chunk": 64}
    ),
    "one_byte_adafactor": FittedWay(
        "one byte, Adafactor, steps in backward, loss in chunks",
        {"optimizer": "adafactor", "chunk": 64},
    ),
    "one_byte_float32": FittedWay(
        "one byte, float32 products, AdamW, steps in backward",
        {"optimizer": "adamw", "dtype": "float32"},
    ),
    "one_byte_all_gradients": FittedWay(
        "one byte, AdamW, all gradients", {"optimizer": "adamw", "in_backward": False}
    ),
    "all_activations": FittedWay(
        "one byte, AdamW, steps in backward, all activations",
        {"optimizer": "adamw", "checkpointing": False},
    ),
    "adamw8bit": FittedWay("bfloat16, torchao's AdamW8bit", _floats("adamw8bit", "bfloat16")),
    "float32": FittedWay("float32, torch's AdamW", _floats("torch_adamw", "float32")),
}


def make_model(model: FittedModel, options: dict[str, Any], **settings: Any) -> Any:
    """Return a model of random weights, in codes if the options say so."""
    import torch
    import transformers

    import fp8manifold as fm

    config = getattr(transformers, f"{model.kind}Config")(**model.settings | settings)
    dtype = getattr(torch, options.get("dtype", "bfloat16"))
    torch.set_default_dtype(dtype)
    made = transformers.AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    if options.get("storage", "codes") == "codes":
        fm.quantize_model(made, "E4M3", embeddings="E4M3")
    return made.train()


def make_optimizer(model: Any, name: str) -> Any:
    """Return the optimizer of that name in `fm.memory_needed`."""
    import torch

    import fp8manifold as fm

    if name == "muon":
        # all iterations take the same memory
        return fm.optim.StiffnessMuon.for_model(model, 1e-3, moments="8bit", ns_steps=2)
    if name == "lion":
        return fm.optim.StiffnessLion(model.parameters(), 1e-4, moments="8bit")
    if name == "adafactor":
        return fm.optim.StiffnessAdafactor(model.parameters(), 1e-3)
    if name == "torch_adamw":
        return torch.optim.AdamW(model.parameters(), 1e-4)
    if name == "adamw8bit":
        from torchao.optim import AdamW8bit

        return AdamW8bit(model.parameters(), 1e-4)
    return fm.optim.StiffnessAdamW(model.parameters(), 1e-4, moments="8bit")


def take_steps(model: Any, way: FittedWay) -> None:
    """Take three steps; the first pass only measures a norm where steps are in backward."""
    import torch

    import fp8manifold as fm

    if way.options.get("checkpointing", True):
        model.gradient_checkpointing_enable()
    if "chunk" in way.options:
        fm.huggingface.chunked_loss(model, way.options["chunk"])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (1, way.tokens), generator=generator)
    optimizer = make_optimizer(model, way.options["optimizer"])
    in_backward = way.options.get("in_backward", True)
    if in_backward:
        fm.optim.step_in_backward(optimizer, clip="previous", max_norm=1.0, first="measure")
    for _ in range(3):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        if not in_backward:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def measure_in_this_process(model: FittedModel, way: FittedWay) -> int:
    """Return the bytes that training takes at its peak, the model among them."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    take_steps(make_model(model, way.options, **{model.blocks: 1}), way)
    gc.collect()
    empty = resident_bytes("VmRSS")
    trained = make_model(model, way.options)
    gc.collect()
    forget_peak()
    take_steps(trained, way)
    return resident_bytes("VmHWM") - empty


def measured_bytes(model: str, way: str) -> int:
    """Return what a fresh process measures."""
    # glibc gives every block of 64 kB and more back at once, so that none counts twice.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**16)}
    command = [sys.executable, __file__, "--child", model, way]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if process.returncode:
        raise SystemExit(f"{model}, {way} failed:\n{process.stdout}{process.stderr}")
    return int(process.stdout.splitlines()[-1])


def predicted(model: FittedModel, way: FittedWay) -> Any:
    """Return what `fm.memory_needed` says of it."""
    import fp8manifold as fm

    settings = {"model_type": model.kind.lower(), **model.settings}
    return fm.memory_needed(settings, **way.options, tokens=way.tokens, device="cpu")


COLUMNS: Final = (
    "model",
    "parameters, million",
    "training",
    "MB measured",
    "MB by arithmetic",
    "ratio",
    "moment of the peak",
)


def rows_of(models: list[str], ways: list[str]) -> list[list[Cell]]:
    """Measure each model in each way, and return the rows of the table."""
    rows: list[list[Cell]] = []
    for model in models:
        for way in ways:
            needed = predicted(MODELS[model], WAYS[way])
            measured = measured_bytes(model, way)
            rows.append(
                [
                    MODELS[model].kind,
                    round(needed.parameters / 1e6, 1),
                    WAYS[way].name,
                    round(measured / 1e6, 1),
                    round(needed.peak / 1e6, 1),
                    round(needed.peak / measured, 3),
                    needed.moment,
                ]
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    parser.add_argument("--ways", default=",".join(WAYS), help="separated by commas")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    add_form_options(parser)
    add_option(parser)
    args = parser.parse_args()
    check_linux()
    if args.child:
        model, way = args.child
        print(measure_in_this_process(MODELS[model], WAYS[way]))
        return
    models = args.models.split(",")
    ways = args.ways.split(",")
    for option, names, known in (("--models", models, MODELS), ("--ways", ways, WAYS)):
        for name in names:
            if name not in known:
                raise SystemExit(f"{option}: {name!r} is unknown; give some of {', '.join(known)}")
    rows = rows_of(models, ways)
    if args.json:
        print(json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in rows], indent=1))
    else:
        lines = [tuple(map(str, row)) for row in rows]
        rules = ("---", "---:", "---", "---:", "---:", "---:", "---")
        print(text_table([COLUMNS, *lines], rules, args.markdown))
    if args.record:
        record("", COLUMNS, rows, packages=("transformers", "torchao"))


if __name__ == "__main__":
    main()
