"""`nanogpt-bench finetune`: training all weights of a pretrained model further.

A training is that of `run` with the settings of finetune.yaml. With `--save` the
newest weights are written as transformers reads them.
"""

import argparse
import copy
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, Literal

from nanogpt_bench.commands import braced, one_of
from nanogpt_bench.commands.run import add_resume, check_options, exit_code, trained
from nanogpt_bench.config.schema import NO_FORMAT
from nanogpt_bench.config.settings import CONFIGS_FOLDER, Resolved, build_config, load_config
from nanogpt_bench.system.errors import BenchError, one_line, refusals, refused
from nanogpt_bench.system.files import LOCK, check_place, is_unused, locked

SaveLayout = Literal["compressed-tensors", "torchao", "fp8"]
FINETUNE_CONFIG = CONFIGS_FOLDER / "finetune.yaml"
FLOAT: Final = "float"
#: the layout of a published model that was trained in the codes of its files
PUBLISHED: Final = "its own"
LAYOUTS = (FLOAT, "compressed-tensors", "torchao", "fp8")
#: bytes per parameter of float32 AdamW: weight, two averages and gradient, four bytes
#: each
ADAMW_BYTES = 16
_MIB = 2**20

TEXTS = {
    "usage": (
        "nanogpt-bench finetune --model PATH --data.dir DIR [--rule RULE] [--name NAME] "
        "[--resume] [--save DIR] [--layout LAYOUT] [--section.key VALUE ...]"
    ),
    "description": (
        "Fine-tune all weights of a causal language model of transformers, with the settings "
        "of\nfinetune.yaml; every setting of run can be overridden. Loop, checkpoints, monitors "
        "and report are those\nof run."
    ),
    "epilog": (
        "examples:\n"
        "  nanogpt-bench prepare text --input law.txt --tokenizer models/smollm2 --out data/law\n"
        "  nanogpt-bench finetune --model models/smollm2 --data.dir data/law --rule "
        "muon-stochastic\n"
        "  nanogpt-bench finetune --model models/smollm2 --data.dir data/law "
        "--train.step_in_backward true --optimizer.clip_by previous --train.recompute true "
        "--train.precision bf16-mixed --save models/law"
    ),
}


def add_options(parser: Any) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        help="model to train: a folder (floats, or published in FP8), a .gguf file, or an id on "
        "the hub",
    )
    parser.add_argument("--name", help="results go to runs/NAME (default: finetune, numbered)")
    add_resume(parser)
    parser.add_argument(
        "--save",
        type=Path,
        metavar="DIR",
        help="write the trained model to DIR, as save_pretrained does; a model published in FP8 "
        "keeps its layout",
    )
    parser.add_argument(
        "--layout",
        type=one_of(LAYOUTS),
        metavar=braced(LAYOUTS),
        help="layout of --save: float (default, unless the model was published in FP8), "
        "compressed-tensors or torchao (codes and scales as these store them), or fp8 (as "
        "DeepSeek-V3 stores them, in squares of 128 x 128)",
    )


def main(args: argparse.Namespace) -> int:
    """Train, print the memory that it took, and with `--save` write the model."""
    check_options(args)
    layout: Any = args.layout
    if args.layout is not None and args.save is None:
        raise BenchError("--layout needs --save DIR: it is the layout in which DIR is written")
    if args.save is not None:
        check_place("--save", args.save)
        if not is_unused(args.save):
            raise BenchError(f"--save {str(args.save)!r} is in use; give a new folder")
    config = load_config(FINETUNE_CONFIG, [*args.overrides, "--model.pretrained", args.model])
    if args.save is not None:
        # not at the top: it imports torch, which takes seconds
        from nanogpt_bench.setup.resolve import resolve

        # Resolved here already, and not again for the training.
        config = resolved = resolve(config)
        layout = check_save(resolved, args.save, layout)
    options = {"resume": args.resume, "allow_config_change": args.allow_config_change}
    with nullcontext() if args.save is None else locked(args.save, "--save"):
        summary, run_dir = trained(config, FINETUNE_CONFIG.stem, args.name, **options)
        print(memory_line(summary))
        if args.save is not None and exit_code(summary) == 0:
            with _naming_weights(run_dir, args.save):
                save_model(run_dir, args.save, layout)
            print(args.save)
    return exit_code(summary)


def check_save(config: Resolved, out: Path, layout: SaveLayout | Literal["float"] | None) -> str:
    """Return the layout that `--save` will write, or refuse it, before the training.

    No weight is read.
    """
    from nanogpt_bench.checkpoint import check_room
    from nanogpt_bench.model.causal import outline
    from nanogpt_bench.setup.pretrained import trains_stored

    files, trains_codes = outline(config.model.pretrained or ""), trains_stored(config.model)
    if not config.checkpoint.last:
        raise BenchError(
            "--save writes the weights of the last checkpoint, so it needs one; leave "
            "--checkpoint.last false out"
        )
    if trains_codes and layout not in (None, FLOAT):
        raise BenchError(
            f"--layout {layout}: {config.model.pretrained!r} is saved in its own layout; leave "
            "--layout out"
        )
    if layout is not None and layout != FLOAT:
        check_save_layout(config, layout)
    if trains_codes and layout is None:
        check_room(out, files.stored_bytes, "--save")
        return PUBLISHED
    check_room(out, 4 * files.parameters, "--save")
    return layout or FLOAT


@contextmanager
def _naming_weights(run_dir: Path, out: Path) -> Iterator[None]:
    """If the model can't be written, remove its parts and say where the weights are."""
    try:
        yield
    except BenchError as error:
        for path in out.iterdir():
            if path.name == LOCK:
                continue
            if path.is_file():
                path.unlink()
            else:
                shutil.rmtree(path)
        raise type(error)(
            f"--save: {error}; the trained weights are still in {str(run_dir)!r}; to write them, "
            f"give the same command with --resume --name {run_dir.name} and --save DIR"
        ) from None


@contextmanager
def _writing_errors(out: Path) -> Iterator[None]:
    """Turn any error of writing a model into one line."""
    try:
        yield
    except BenchError:
        raise
    except OSError as error:
        raise refused(f"{str(out)!r} can't be written", error) from None
    except Exception as error:
        raise BenchError(
            f"{str(out)!r} can't be written: {type(error).__name__}: {one_line(error)}"
        ) from None


def memory_line(summary: dict[str, Any]) -> str:
    """Return a line with the memory of a run, and that of float32 AdamW by arithmetic.

    >>> sizes = {"held_bytes": 3 * 2**20, "gradient_peak_bytes": None}
    >>> memory_line({"parameters": 2**20, **sizes}).partition(";")[0]
    'memory: weights and state 3.0 MiB, gradients not measured'
    """
    held_bytes, gradient_peak = summary["held_bytes"], summary["gradient_peak_bytes"]
    state = f"{held_bytes / _MIB:,.1f} MiB" if held_bytes else "not measured"
    peak = f"at most {gradient_peak / _MIB:,.1f} MiB at once" if gradient_peak else "not measured"
    parts = [f"weights and state {state}", f"gradients {peak}"]
    if held_bytes and gradient_peak:
        parts.append(f"together {(held_bytes + gradient_peak) / _MIB:,.1f} MiB")
    adamw_bytes = ADAMW_BYTES * summary["parameters"]
    return (
        f"memory: {', '.join(parts)}; float32 AdamW would take {adamw_bytes / _MIB:,.1f} MiB, by "
        "arithmetic"
    )


def check_save_layout(config: Resolved, layout: SaveLayout) -> None:
    """Refuse a layout that can't store the model, before the training.

    No weight is read.
    """
    import fp8manifold as fm
    from nanogpt_bench.config.schema import Storage
    from nanogpt_bench.model.causal import skeleton

    specs: dict[str, Any] = {}
    for name, spec in config.layers.items():
        weight = spec.operand("weight")
        if weight:
            specs[name] = fm.LayerSpec(weight.format, granularity=weight.granularity)
    if not specs or config.model.storage == Storage.CONTINUOUS:
        raise BenchError(
            f"--layout {layout} stores quantised weights, but this run's weights are floats; give "
            f"--layout {FLOAT}"
        )
    # A trial without weights: what can't be quantised or exported raises here.
    model = skeleton(config.model.pretrained or "")
    with _layout_errors(layout):
        model = fm.quantize_model(model, {"*": NO_FORMAT, **specs}, "codes", tied="untie")
        fm.files.layout_state_dict(model, layout)


def save_model(
    run_dir: Path, out: Path, layout: SaveLayout | Literal["float", "its own"] = "float"
) -> None:
    """Write the newest weights of a fine-tuning, and the tokenizer.

    transformers reads them. `layout` is `float`, for their values, or one of
    `fm.save`, for codes and scales. `its own` is the layout of a published
    model that was trained in the codes of its files; the other files of that model are
    written, too.
    """
    import fp8manifold as fm
    from nanogpt_bench.data.batches import open_corpus
    from nanogpt_bench.loop.trainer import trained_model, trainer_inputs
    from nanogpt_bench.model.causal import find_model, quiet_transformers, without_codes
    from nanogpt_bench.model.weights import fill
    from nanogpt_bench.runs.trained import choose, load
    from nanogpt_bench.setup.memory import check_fits
    from nanogpt_bench.setup.resolve import resolve
    from nanogpt_bench.setup.runtime import runtime
    from nanogpt_bench.setup.task import model_shape

    checkpoint = load(choose(run_dir))
    config = resolve(build_config(dict(checkpoint.settings)))
    name = config.model.pretrained or ""
    corpus = open_corpus(config)
    # The training's batches and gradients are gone; the memory has to hold the model.
    check_fits(config, model_shape(config, corpus), trained=False)
    with runtime(config) as device:
        model: Any = trained_model(trainer_inputs(config, corpus, device))
    source = f"checkpoint {str(checkpoint.path)!r}"
    fill(model, checkpoint.tensors, checkpoint.metadata, source)
    # `quiet_transformers` yields transformers, silenced.
    with quiet_transformers(name) as transformers, _writing_errors(out):
        if layout == PUBLISHED:
            fm.save(model, out)
            return
        model = fm.dequantize_model(model) if layout == FLOAT else model
        head = model.get_output_embeddings()
        # The settings are written, too, and describe the model as it now is.
        settings = model.config = copy.deepcopy(model.config)
        without_codes(model)
        settings.use_cache = True
        settings.tie_word_embeddings = (
            head is not None and head.weight is model.get_input_embeddings().weight
        )
        if layout == FLOAT:
            model.save_pretrained(out)
        else:
            with _layout_errors(layout):
                fm.save(model, out, layout)
        transformers.AutoTokenizer.from_pretrained(**find_model(name)).save_pretrained(out)


def _layout_errors(layout: str) -> AbstractContextManager[None]:
    return refusals(f"--layout {layout}", ValueError, TypeError, ImportError)
