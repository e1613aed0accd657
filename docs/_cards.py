"""Tables of the memory that training a language model takes, by `fm.memory_needed`.

The ways of training are the bench's (`nanogpt-bench fits`). Each has its loss in chunks
of tokens where that takes less.

``python docs/_cards.py`` prints the tables of the pages on memory and fine-tuning.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from _compared import measured_against
from _markdown import markdown

import fp8manifold as fm
from nanogpt_bench.report.results import Result
from nanogpt_bench.report.results_file import read_export
from nanogpt_bench.setup.fits import ways

#: tokens of one sequence
TOKENS = 2048
MEASURED_FOLDER = Path(__file__).parent / "measured"
STUDY_RESULTS = Path(__file__).parent.parent / "study" / "results"
NO_BREAK = "\N{NO-BREAK SPACE}"

Settings = dict[str, Any]


def settings(
    kind: str,
    layers: int,
    width: int,
    inner: int,
    vocabulary: int,
    heads: int,
    keys: int,
    **more: Any,
) -> Settings:
    """Return the settings of a model as its config.json has them."""
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        **more,
    }


TIED = {"tie_word_embeddings": True}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MODELS = {
    "SmolLM2-135M": settings("llama", 30, 576, 1536, 49152, 9, 3, **TIED),
    "Llama-3.2-1B": settings("llama", 16, 2048, 8192, 128256, 32, 8, **TIED),
    "SmolLM2-1.7B": settings("llama", 24, 2048, 8192, 49152, 32, 32, **TIED),
    "Qwen2.5-3B": settings("qwen2", 36, 2048, 11008, 151936, 16, 2, **TIED),
    "Qwen3-4B": settings("qwen3", 36, 2560, 9728, 151936, 32, 8, **TIED),
    "Llama-2-7B": settings("llama", 32, 4096, 11008, 32000, 32, 32),
    "Llama-3.1-8B": settings("llama", 32, 4096, 14336, 128256, 32, 8),
    "Qwen3-8B": settings("qwen3", 36, 4096, 12288, 151936, 32, 8),
    "Qwen2.5-14B": settings("qwen2", 48, 5120, 13824, 152064, 40, 8),
    "Qwen3-30B-A3B": settings("qwen3_moe", 48, 2048, 6144, 151936, 32, 4, head_dim=128, **EXPERTS),
}


def needed(model: str, name: str) -> fm.MemoryNeeded:
    """Return the memory of a model under a way of training, in chunks if that is less."""
    sizes = [way.needed(MODELS[model], tokens=TOKENS) for way in ways() if way.name == name]
    return min(sizes, key=lambda size: size.peak)


def way_names() -> list[str]:
    """Return the names of the ways of training."""
    return list(dict.fromkeys(way.name for way in ways()))


def to_load(model: str) -> float:
    """Return the peak while a model is read into codes, embedding included.

    It holds the codes, the parameters in bfloat16, and the largest tensor.
    """
    size = MODELS[model]
    tensors = [size["vocab_size"] * size["hidden_size"]]
    if "num_experts" in size:
        tensors.append(
            2 * size["num_experts"] * size["moe_intermediate_size"] * size["hidden_size"]
        )
    return needed(model, RECIPE_WAY).weights + 2 * max(tensors)


def memory_table() -> str:
    """Return GB at the peak, and to read into codes, a line per model."""
    header = ("model", "parameters, billion", *way_names(), "to load")
    rows = []
    for model in MODELS:
        sizes = [needed(model, way).peak for way in way_names()]
        parameters = needed(model, RECIPE_WAY).parameters
        rows.append([model, f"{parameters / 1e9:.2f}", *map(gb, [*sizes, to_load(model)])])
    return markdown(header, rows)


#: README's models; its ways of training are in the order of the last one's memory
README_MODELS = ("SmolLM2-1.7B", "Qwen3-4B", "Llama-3.1-8B")


def best_first(model: str) -> list[str]:
    """Return the names of the ways of training, from the one that takes least on."""
    return sorted(way_names(), key=lambda way: needed(model, way).peak)


NOT_MEASURED = "not measured"
#: by the way of training: its row of `measured/eight_billion.json`, whose shape is said
#: where it is not that of the table
SPEED_ROWS = {
    "one byte, Muon, steps in backward": ("Llama-3.1-8B, one-byte Muon", ""),
    "one byte, AdamW, steps in backward": ("Llama-2-7B, one-byte AdamW", ", of Llama-2-7B"),
}


def speeds() -> dict[str, str]:
    """Return tokens per second of random weights on one H200, by way of training."""
    facts = json.loads((MEASURED_FOLDER / "eight_billion.json").read_text(encoding="utf-8"))
    rates: dict[str, int] = {}
    for name, *_, rate in facts["rows"]:
        rates.setdefault(name, rate)
    return {way: f"{rates[row]:,}{shape}" for way, (row, shape) in SPEED_ROWS.items()}


def readme_table() -> str:
    """Return memory, speed and loss of each way of training, a line per way.

    Memory is in GB of README's models: what is held all the time, and the peak.
    """
    figures = (speeds(), searched_loss_differences(), small_loss_differences())
    rows = []
    for way in best_first(README_MODELS[-1]):
        name = f"**{way}**" if way.startswith("one byte") else way
        sizes = [held_and_peak(model, way) for model in README_MODELS]
        rows.append([name, *sizes, *(figure.get(way, NOT_MEASURED) for figure in figures)])
    header = (
        "all weights trained",
        *README_MODELS,
        "tokens per second, 8B",
        "loss minus float32 AdamW's, 135M",
        "0.86M",
    )
    return markdown(header, rows)


def held_and_peak(model: str, way: str) -> str:
    """Return the GB of weights and state, and those at the peak."""
    size = needed(model, way)
    return f"{gb(size.weights + size.state)} / {gb(size.peak)}"


#: the model of README's code, and its way of training
RECIPE_MODEL = "SmolLM2-135M"
RECIPE_WAY = "one byte, AdamW, steps in backward"

#: by the way of `benchmarks/recipe.py`: the name on the pages, and the way of training
RECIPE_NAMES = {
    "float32": ("AdamW, float32", "float32, torch AdamW"),
    "bfloat16": ("AdamW, bfloat16", "bfloat16, torch AdamW"),
    "readme": ("the code above", RECIPE_WAY),
}
MUON_RULE, MUON_WAY = "muon-stochastic", "one byte, Muon, steps in backward"


def recipe_rows() -> dict[str, dict[str, Any]]:
    """Return the rows of the losses by the way of `benchmarks/recipe.py`."""
    facts = json.loads((MEASURED_FOLDER / "recipe.json").read_text(encoding="utf-8"))
    rows = [dict(zip(facts["columns"], row, strict=True)) for row in facts["rows"]]
    return {row["way"]: row for row in rows}


def final_losses(way: str) -> list[float]:
    """Return the final losses of a way, one for each seed."""
    return [value for name, value in recipe_rows()[way].items() if name.startswith("seed ")]


#: the ways of training of the rows of Q27, by their rules; one byte is E2M5 there
SEARCHED_WAYS = {
    "adafactor-stochastic": "one byte, Adafactor, steps in backward",
    "bf16-adafactor": "bfloat16 stochastic, Adafactor, steps in backward",
    "stochastic-8bit": RECIPE_WAY,
}
#: Q27's results: its float weights under AdamW, and the rows that are measured against them
SEARCHED_REFERENCE = "study_q27_mixed"
SEARCHED_ROWS = {
    "study_q27_smollm2": "bf16-adafactor",
    "study_q27_e2m5": "adafactor-stochastic",
    "study_q27_adamw": "stochastic-8bit",
}


def searched_loss_differences() -> dict[str, str]:
    """Return what fine-tuning SmolLM2-135M loses to float32 AdamW, by way of training.

    Rows have the best rate of their own search, but for Adafactor in one byte, which has
    that of bfloat16 (Q27 of the study).
    """
    file = read_export(STUDY_RESULTS / f"{SEARCHED_REFERENCE}.json")
    rows = [*file.rows]
    for name, rule in SEARCHED_ROWS.items():
        rows += [
            row for row in read_export(STUDY_RESULTS / f"{name}.json").rows if row.rule == rule
        ]
    results = measured_against(replace(file, rows=tuple(rows)), "bf16-mixed")
    return {"float32, torch AdamW": "0"} | differences_by_way(results, SEARCHED_WAYS)


#: the ways of training of the rows of Q26, by their rules
SMALL_WAYS = {
    "adafactor-stochastic": "one byte, Adafactor, steps in backward",
    "bf16-adafactor": "bfloat16 stochastic, Adafactor, steps in backward",
    "lion-stochastic": "one byte, Lion, steps in backward",
    "stochastic-8bit": RECIPE_WAY,
    "bf16-adamw8bit": "bfloat16, 8-bit AdamW, steps in backward",
    MUON_RULE: MUON_WAY,
}
#: Q26's rows with products in bfloat16 that have a way of training, by their files
SMALL_RIVALS = {"study_q26_bf16": "bf16-adafactor", "study_q26_8bit": "bf16-adamw8bit"}


def small_loss_differences() -> dict[str, str]:
    """Return what fine-tuning 0.86 million weights loses to float32 AdamW, by way of training.

    Every row has the best rate of its own search (Q26 of the study).
    """
    file = read_export(STUDY_RESULTS / "study_q26_adafactor.json")
    rows = [*file.rows, *read_export(STUDY_RESULTS / "study_q26_lion.json").rows]
    for name, rule in SMALL_RIVALS.items():
        rivals = read_export(STUDY_RESULTS / f"{name}.json").rows
        rows += [row for row in rivals if row.rule == rule]
    results = measured_against(replace(file, rows=tuple(rows)), "fp32")
    return {"float32, torch AdamW": "0"} | differences_by_way(results, SMALL_WAYS)


def differences_by_way(results: Iterable[Result], way_by_rule: dict[str, str]) -> dict[str, str]:
    """Return the differences of results with half of their intervals, by way of training."""
    differences = {}
    for result in results:
        way, difference = way_by_rule.get(result.row.rule or ""), result.difference
        if way is None or difference is None or difference.low is None or difference.high is None:
            continue
        half = (difference.high - difference.low) / 2
        differences[way] = f"{difference.mean:+.3f} ± {half:.3f}".replace(" ", NO_BREAK)
    return differences


def recipe_table() -> str:
    """Return loss and memory of README's recipe and of AdamW.

    Memory is given in bytes per parameter and in GB: of weights and state, and with
    gradients too, those of all parameters or the largest.
    """
    header = (
        "SmolLM2-135M, 200 steps",
        "loss, nats per token",
        "held, bytes per parameter",
        "at the peak, with gradients",
    )
    size = MODELS[RECIPE_MODEL]
    parameters = needed(RECIPE_MODEL, RECIPE_WAY).parameters
    gradients = {
        "float32": 4 * parameters,
        "bfloat16": 2 * parameters,
        "readme": 2 * size["vocab_size"] * size["hidden_size"],
    }
    rows = []
    for recipe_way, gradient in gradients.items():
        losses = final_losses(recipe_way)
        loss = sum(losses) / len(losses)
        name, way = RECIPE_NAMES[recipe_way]
        sizes = needed(RECIPE_MODEL, way)
        lasting = sizes.weights + sizes.state
        rows.append([name, f"{loss:.3f}", *map(_size_text, (lasting, lasting + gradient))])
    return markdown(header, rows)


#: measured MiB of SmolLM2-135M after a few steps: of weights and state, and with
#: gradients at the peak
MEASURED = {
    "float32 AdamW": (1539, 2053),
    "one-byte AdamW, clipped": (472, 985),
    "one-byte AdamW, step in backward": (472, 580),
    "one-byte Muon, step in backward": (368, 476),
}


def measured_table() -> str:
    """Return the sizes in MEASURED, in bytes per parameter and in GB."""
    rows = []
    for name, mebibytes in MEASURED.items():
        rows.append([name, *(_size_text(size * 2**20) for size in mebibytes)])
    return markdown(("SmolLM2-135M", "bytes per parameter", "at the peak, with gradients"), rows)


def _size_text(size: float) -> str:
    return f"{size / needed(RECIPE_MODEL, RECIPE_WAY).parameters:.1f} ({gb(size)} GB)"


def gb(size: float) -> str:
    """Return bytes as text in GB, 10^9 bytes, with three digits or so.

    >>> gb(4.96e8), gb(14.84e9), gb(177e9)
    ('0.50', '14.8', '177')
    """
    if size < 1e10:
        decimals = 2
    elif size < 1e11:
        decimals = 1
    else:
        decimals = 0
    return f"{size / 1e9:.{decimals}f}"


if __name__ == "__main__":
    print("\n".join([readme_table(), recipe_table(), memory_table(), measured_table()]))
