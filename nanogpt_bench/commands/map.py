"""`nanogpt-bench map`: where which format would cost, from one training in floats.

The training is that of FILE.yaml, or of `finetune --model`, with float weights in place
of codes. It records the floor of rounding (`monitors.floor`, law 1 of docs/laws.md) for
every kind of layer and format, and the map is printed and written to map.json.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nanogpt_bench.commands import parse_names
from nanogpt_bench.commands.finetune import FINETUNE_CONFIG
from nanogpt_bench.commands.run import add_resume, check_options, exit_code, trained
from nanogpt_bench.config.keys import get
from nanogpt_bench.config.rules import reference_settings
from nanogpt_bench.config.schema import Config, Storage
from nanogpt_bench.config.settings import (
    build_config,
    find_config,
    parse_overrides,
    read_settings_file,
)
from nanogpt_bench.system.errors import BenchError

MAP_FILE: Final = "map.json"
FORMATS_KEY: Final = "monitor.floor_formats"
DEFAULT_FORMATS: Final = ("E2M5", "E4M3", "E5M2", "E7M0")
#: the rule of float weights that takes the same steps as an optimizer of codes
FLOAT_RULES: Final = {
    "adamw": "fp32",
    "stiffness_adamw": "fp32",
    "stiffness_muon": "muon",
    "stiffness_adafactor": "adafactor",
    "sgd": "sgd",
}
#: what a rule of float weights takes over from the rule of codes
KEPT: Final = (
    "optimizer.lr",
    "optimizer.float_lr",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.momentum",
    "optimizer.weight_decay",
)

TEXTS = {
    "usage": (
        "nanogpt-bench map FILE.yaml [--formats A,B] [--name NAME] [--resume] "
        "[--section.key VALUE ...]\n"
        "       nanogpt-bench map --model PATH --data.dir DIR [--formats A,B] [--name NAME] "
        "[--section.key VALUE ...]"
    ),
    "description": (
        "Train once in floats and predict what each format would cost in each kind of layer: the "
        "floor\n1/4 sum |m| S of stochastic rounding, from the averaged gradient m and the "
        "spacing S. The map ranks layers\nand formats under Muon; a training of any length "
        "reaches only a part of the floor. To round finished weights\nonce and measure their "
        "loss, use evaluate --sensitivity. To measure the map, with one training for every\ncell, "
        "use sweep --sensitivity."
    ),
    "epilog": (
        "examples:\n"
        "  nanogpt-bench map e4m3.yaml --rule muon-stochastic\n"
        "  nanogpt-bench map my.yaml --formats E4M3,E5M2,E2M5 --train.max_steps 1000\n"
        "  nanogpt-bench map --model models/smollm2 --data.dir data/law --train.max_steps 200"
    ),
}


def add_options(parser: Any) -> None:
    parser.add_argument(
        "config",
        nargs="?",
        metavar="FILE.yaml",
        help="settings of the training: a file, or the name of a shipped one",
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="pretrained model to train, as finetune does: a folder, a .gguf file, or an id on the "
        "hub",
    )
    parser.add_argument(
        "--formats",
        type=parse_names,
        metavar="A,B",
        help=f"formats of the map (default: {','.join(DEFAULT_FORMATS)})",
    )
    parser.add_argument(
        "--name", help="results go to runs/NAME (default: map and the config's name, numbered)"
    )
    add_resume(parser)


def main(args: argparse.Namespace) -> int:
    """Train in floats, then print and write the map."""
    check_options(args)
    if (args.config is None) == (args.model is None):
        raise BenchError("map needs either FILE.yaml or --model PATH")
    path = FINETUNE_CONFIG if args.model is not None else find_config(args.config)
    overrides = list(args.overrides)
    if args.model is not None:
        overrides += ["--model.pretrained", args.model]
    settings = parse_overrides(overrides, read_settings_file(path))
    config = float_twin(settings, args.formats)
    options = {"resume": args.resume, "allow_config_change": args.allow_config_change}
    summary, run_dir = trained(config, f"map-{path.stem}", args.name, **options)
    code = exit_code(summary)
    if code == 0:
        _write_map(run_dir)
    return code


def float_twin(settings: Mapping[str, Any], formats: list[str] | None) -> Config:
    """Return the same training with float weights, which records floors.

    Settings of the weights' codes are left out. `formats` replaces the default ones,
    unless the settings name some.
    """
    # not at the top: it imports torch, which takes seconds
    from nanogpt_bench.setup.resolve import resolve

    if formats is not None and settings.get(FORMATS_KEY):
        raise BenchError(
            f"--formats and {FORMATS_KEY} both set the formats of the map; leave one of them out"
        )
    named = dict(settings)
    named[FORMATS_KEY] = formats or settings.get(FORMATS_KEY) or list(DEFAULT_FORMATS)
    given = resolve(build_config(settings))
    if given.model.storage == Storage.FLOAT32:
        return build_config(named)
    optimizer = given.optimizer.name
    if optimizer not in FLOAT_RULES:
        raise BenchError(
            f"map trains in floats, and {optimizer} with model.storage {given.model.storage} has "
            f"no rule of float weights that takes the same steps; give --rule "
            f"{' or '.join(dict.fromkeys(FLOAT_RULES.values()))}"
        )
    for key in ("optimizer.stiffness", "optimizer.stiffness_end"):
        if get(given, key):
            raise BenchError(
                f"map trains in floats, where {key} {get(given, key)} has no effect; give 0, or a "
                "rule without it"
            )
    twin: dict[str, Any] = {"rule": FLOAT_RULES[optimizer]}
    for key in KEPT:
        if get(given, key) is not None:
            twin[key] = get(given, key)
    return build_config(reference_settings(named, twin))


def _write_map(run_dir: Path) -> None:
    """Print the map of a finished run, and write it beside the run's records."""
    from nanogpt_bench.report.floors import floor_map
    from nanogpt_bench.runs.load import load_run
    from nanogpt_bench.system.files import write_text

    floors = floor_map(load_run(run_dir))
    if floors is None:
        raise BenchError(f"{str(run_dir)!r} recorded no floors, since its last quarter has no step")
    path = write_text(run_dir / MAP_FILE, json.dumps(floors.content(), indent=1) + "\n")
    print(floors.table())
    print(path)
