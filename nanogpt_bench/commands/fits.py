"""`nanogpt-bench fits`: the memory that training a model takes, by way of training."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from nanogpt_bench.commands import above_0, positive
from nanogpt_bench.system import untrusted
from nanogpt_bench.system.errors import BenchError, one_line, refusals, unknown

DEFAULT_TOKENS: Final = 2048
DEFAULT_CARD: Final = 24.0
#: those of this library whose lines can be asked for, by the names of `fm.memory_needed`
OPTIMIZERS: Final = ("adafactor", "lion", "muon", "adamw")
#: settings of a config.json that the memory of some kind of model depends on, and the
#: heads of a GPT-2, on which it does not
SETTINGS: Final = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "decoder_sparse_step",
    "n_embd",
    "n_layer",
    "n_head",
    "n_inner",
    "n_positions",
)
#: of a folder that `fm.save` wrote
SIDE_FILE: Final = "fp8manifold.grids"

TEXTS = {
    "usage": "nanogpt-bench fits MODEL [--tokens N] [--sequences N] [--card GB] [--optimizer NAME]",
    "description": (
        "Compute the memory of a training step over all weights of a model, for each way of "
        "training,\nleast first: its parts at the moment when their sum is largest, and whether a "
        "card has that much. Below\nthe table are the lines of code for the way that takes least, "
        "or that takes least with one optimizer.\nNo weight is read."
    ),
    "epilog": (
        "examples:\n"
        "  nanogpt-bench fits meta-llama/Llama-3.1-8B --card 16\n"
        "  nanogpt-bench fits meta-llama/Llama-3.1-8B --optimizer muon\n"
        "  nanogpt-bench fits models/smollm2 --tokens 1024 --sequences 4\n"
        "  nanogpt-bench fits hidden_size=2048,intermediate_size=8192,num_hidden_layers=24,"
        "num_attention_heads=32,vocab_size=49152"
    ),
}


def add_options(parser: Any) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="an id on the hub, a folder, a .gguf file, a config.json, or its settings with commas "
        "between them (of a Llama, unless model_type is given)",
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        default=DEFAULT_TOKENS,
        metavar="N",
        help="tokens in a sequence (default: 2048)",
    )
    parser.add_argument(
        "--sequences",
        type=positive,
        default=1,
        metavar="N",
        help="sequences in a step (default: 1)",
    )
    parser.add_argument(
        "--card",
        type=above_0,
        default=DEFAULT_CARD,
        metavar="GB",
        help="memory of the card as it is sold, such as 12, 16 or 24, counted in GiB (default: 24)",
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        metavar="NAME",
        help="print the lines of code for the way that takes least with this optimizer: "
        f"{', '.join(OPTIMIZERS)} (default: with any)",
    )
    parser.add_argument(
        "--no-checkpointing",
        action="store_true",
        help="store all activations; otherwise those of each block are computed again in the "
        "backward pass",
    )


def main(args: argparse.Namespace) -> int:
    """Print the table, and the lines of code for the least."""
    from nanogpt_bench.setup.fits import best_first, smallest_measured, smallest_of_ours, ways

    config = read_config(args.model)
    sizes = {
        "tokens": args.tokens,
        "sequences": args.sequences,
        "checkpointing": not args.no_checkpointing,
    }
    try:
        fits = best_first(config, ways(), **sizes)
    except (TypeError, ValueError) as error:
        raise BenchError(f"model {args.model!r}: {one_line(error)}") from None
    parameters = fits[0].needed.parameters
    print(
        f"{args.model}: {parameters / 1e9:.3g} billion parameters; a step of {args.sequences} x "
        f"{args.tokens:,} tokens; sizes in GB of 10^9 bytes"
    )
    print(table(fits, args.card))
    smallest = smallest_of_ours(fits, args.card, args.optimizer)
    if smallest is None:
        by = f" with {args.optimizer}" if args.optimizer else ""
        print(f"\nNo way of training{by} in this library fits on a card of {args.card:g} GiB.")
        return 0
    if not smallest.way.has_measured_loss:
        print(f"\n{_warning(smallest.way, smallest_measured(fits, args.card), args.optimizer)}")
    print(f"\n{_advice(smallest.way, args, config)}")
    return 0


def _warning(smallest: Any, measured: Any, optimizer: str | None) -> str:
    """Return what is not known about the way of least memory, and a way that is known better.

    With an `optimizer` it is the least of that optimizer's ways.
    """
    from nanogpt_bench.setup.fits import LARGEST_MEASURED

    largest = f"{LARGEST_MEASURED:g} million weights"
    scale = "not measured"
    if smallest.measured_millions:
        scale = f"measured with {smallest.measured_millions:g} million weights only"
    least = f"Of the ways with {optimizer}, that below" if optimizer else "The way below"
    text = (
        f"{least} takes least. Its loss in fine-tuning was {scale}, and its learning rate is "
        "a first guess."
    )
    if measured is None:
        return text
    peak = measured.needed.peak / 1e9
    return (
        f"{text}\nOf the ways measured with {largest}, the one that takes least is "
        f"{way_name(measured.way)} ({peak:.2f} GB); --optimizer "
        f"{measured.way.options['optimizer']} prints its lines."
    )


def _advice(way: Any, args: argparse.Namespace, config: Any) -> str:
    """Return the lines of code of a way, under its name."""
    from nanogpt_bench.setup.fits import lines_of_code

    # Settings alone are of no model with weights.
    has_weights = not isinstance(config, dict)
    is_in_codes = _has_codes(args.model) if has_weights else "quantization_config" in config
    code = lines_of_code(
        way,
        args.model if has_weights else "MODEL",
        experts=bool(_setting(config, "num_experts_per_tok")),
        checkpointing=not args.no_checkpointing,
        is_in_codes=is_in_codes,
        dtype=_dtype_of_codes(config) if is_in_codes else "bfloat16",
    )
    text = f"{way_name(way)}:\n\n{code}"
    if is_in_codes:
        text = (
            "This model is stored in codes already; the table is for the same model in "
            f"floats.\n\n{text}"
        )
    return text


def _has_codes(name: str) -> bool:
    """Return whether the files of a model have codes, or were saved with their formats."""
    from nanogpt_bench.model.causal import stored_of

    return (Path(name) / SIDE_FILE).is_file() or bool(stored_of(name))


def _dtype_of_codes(settings: Any) -> str:
    """Return a dtype that holds what stays float in the files."""
    dtype = _setting(settings, "dtype") or _setting(settings, "torch_dtype")
    return "float32" if str(dtype).removeprefix("torch.") == "float32" else "bfloat16"


def read_config(name: str) -> Any:
    """Return the settings of a model by its name, or those that are written out."""
    if "=" in name and not Path(name).exists():
        return _written_out(name)
    if name.endswith(".json"):
        return _read_json(Path(name))
    from nanogpt_bench.model.causal import pretrained_config

    return pretrained_config(name)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise BenchError(f"model {str(path)!r} does not exist")
    with refusals(f"model {str(path)!r}", ValueError, OSError):
        settings = untrusted.read_json(path)
    if not isinstance(settings, dict):
        raise BenchError(f"model {str(path)!r} holds a {type(settings).__name__}, not settings")
    return settings


def _written_out(text: str) -> dict[str, Any]:
    """Return settings with commas between them.

    >>> _written_out("hidden_size=64, model_type=qwen3, tie_word_embeddings=true")
    {'hidden_size': 64, 'model_type': 'qwen3', 'tie_word_embeddings': True}
    """
    settings: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not name or not equals or not value:
            raise BenchError(
                f"model {part!r} is not a setting; give NAME=VALUE, such as hidden_size=64"
            )
        if name not in SETTINGS:
            raise unknown("setting", name, SETTINGS)
        if name in settings:
            raise BenchError(f"model: {name} is given twice; keep one")
        if value.lower() in ("true", "false"):
            settings[name] = value.lower() == "true"
        else:
            settings[name] = int(value) if value.isdecimal() else value
    return settings


def _setting(config: Any, name: str) -> Any:
    if isinstance(config, dict):
        return config.get(name)
    return getattr(config, name, None)


def way_name(way: Any) -> str:
    """Return the name of a way of training, with its loss."""
    return f"{way.name}, loss in chunks" if way.chunked else str(way.name)


PARTS: Final = ("weights", "state", "gradients", "activations", "logits", "workspace", "peak")


def table(fits: Sequence[Any], card: float) -> str:
    """Return the lines of the table, in columns."""
    rows = [["way of training", *PARTS, f"{card:g} GiB"]]
    for fit in fits:
        sizes = [f"{getattr(fit.needed, part) / 1e9:.2f}" for part in PARTS]
        rows.append([way_name(fit.way), *sizes, "fits" if fit.fits(card) else "-"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]))
    return "\n".join(lines)
