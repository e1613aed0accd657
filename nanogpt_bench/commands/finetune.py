"""`nanogpt-bench finetune --model PATH`: all weights of a pretrained language model, trained further."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import fp8manifold as fm
from nanogpt_bench.commands.run import exit_code, trained
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.data.batches import open_corpus
from nanogpt_bench.model.causal import find_model, reading
from nanogpt_bench.model.weights import fill
from nanogpt_bench.runs.trained import choose, load
from nanogpt_bench.step.resolve import resolve
from nanogpt_bench.step.runtime import runtime
from nanogpt_bench.step.trainer import Trainer
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.lock import is_unused

CONFIG = "finetune.yaml"
#: of float32 AdamW: a weight, two averages and a gradient, four bytes each
ADAMW_BYTES = 16
_MIB = 2**20


def main_finetune(args: argparse.Namespace) -> int:
    """The command line's entry: train, say what memory it took, and write the model where one is asked for.

    Raises:
        BenchError: a model, a text or settings that can't be used.
    """
    if args.save is not None and not is_unused(args.save):
        raise BenchError(f"--save {str(args.save)!r} is in use; give a new folder")
    if args.save is not None and any(word.startswith("--model.lora_rank") for word in args.overrides):
        raise BenchError("--save writes a model whose own weights were trained, and model.lora_rank freezes them")
    overrides = [*args.overrides, "--model.pretrained", args.model]
    summary, run_dir = trained(CONFIG, args.name, overrides, resume=args.resume)
    print(memory_line(summary))
    if args.save is not None and exit_code(summary) == 0:
        save_model(run_dir, args.save)
        print(args.save)
    return exit_code(summary)


def memory_line(summary: dict[str, Any]) -> str:
    """Return what a run held, measured, beside what float32 AdamW holds, by arithmetic.

    >>> memory_line({"parameters": 2**20, "held_bytes": 3 * 2**20, "gradient_peak_bytes": None})
    'memory: weights and state 3.0 MiB, gradients not measured; float32 AdamW by arithmetic: 16.0 MiB'
    """
    held, peak = summary["held_bytes"], summary["gradient_peak_bytes"]
    parts = ["weights and state " + (f"{held / _MIB:,.1f} MiB" if held else "not measured")]
    parts.append("gradients " + (f"at most {peak / _MIB:,.1f} MiB at once" if peak else "not measured"))
    if held and peak:
        parts.append(f"together {(held + peak) / _MIB:,.1f} MiB")
    theirs = f"float32 AdamW by arithmetic: {ADAMW_BYTES * summary['parameters'] / _MIB:,.1f} MiB"
    return f"memory: {', '.join(parts)}; {theirs}"


def save_model(run_dir: Path, out: Path) -> None:
    """Write the newest weights of a fine-tuning as transformers reads them: their values, as floats, and the tokenizer.

    Raises:
        BenchError: no checkpoint, or one of something else.
    """
    found = load(choose(run_dir))
    config = resolve(build_config(dict(found.settings)))
    name = config.model.pretrained or ""
    with runtime(config) as device:
        trainer = Trainer(config, open_corpus(config), device)
    fill(trainer.model, found.tensors, found.metadata, f"checkpoint {str(found.folder)!r}")
    model: Any = fm.dequantize_model(trainer.model)
    head = model.get_output_embeddings()
    settings = model.config = copy.deepcopy(model.config)
    settings.use_cache = True
    settings.tie_word_embeddings = head is not None and head.weight is model.get_input_embeddings().weight
    with reading(name) as transformers:
        model.save_pretrained(out)
        transformers.AutoTokenizer.from_pretrained(**find_model(name)).save_pretrained(out)
