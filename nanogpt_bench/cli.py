"""The command `nanogpt-bench` and its commands; what one of them needs is imported when it runs."""

from __future__ import annotations

import argparse
import io
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from nanogpt_bench.commands.arguments import Tokenizers, positive, refuse_repeated
from nanogpt_bench.commands.evaluate import add_evaluate
from nanogpt_bench.commands.studies import (
    add_compare,
    add_finetune,
    add_results,
    add_sample,
    add_sweep,
)
from nanogpt_bench.system.errors import BenchError, DiskError, disk_failure, nearest
from nanogpt_bench.system.ranks import as_rank, is_worker, joined

#: what a wrong command line or setting ends with
USAGE_ERROR = 2
#: and what a signal ends it with, with the signal's number, where nothing can be gone on with
INTERRUPTED = 128
FAILED = 1
TOKENIZER_CHOICES = Tokenizers(("byte", "char", "gpt2", "bpe-N"))
SOURCES = ("stdlib", "eurlex", "hub", "text")
PREPARED = ("text", "labels")
#: commands that take the settings of a run as `--section.key VALUE`
TAKE_SETTINGS = ("run", "evaluate", "sample", "finetune", "compare", "sweep")
#: the options of `run` that are no settings
RUN_OPTIONS = ("--name", "--resume", "--allow-config-change")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the nearest valid spelling."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})
        #: makes the end of the help when it is shown, where that takes slow imports
        self.make_epilog: Callable[[], str] | None = None

    def format_help(self) -> str:
        if self.make_epilog is not None:
            self.epilog = self.make_epilog()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise BenchError(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            guess = nearest(str(value), choices)
            hint = f"; did you mean {guess!r}?" if guess else ";"
            name = "/".join(action.option_strings) or action.metavar or action.dest
            raise BenchError(f"{name}: {value!r} is not known{hint} allowed: {', '.join(choices)}")

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """Raise for the first leftover argument, naming the nearest option of this parser."""
        if not words:
            return
        options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        guess = nearest(words[0].partition("=")[0], options) if words[0].startswith("-") else None
        hint = f"; did you mean {guess!r}?" if guess else f"; allowed: {', '.join(options)}"
        raise BenchError(f"unknown argument {words[0]!r}{hint}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    0 done, 1 the run failed or the disk ended it, 2 wrong use, 75 ended by a signal and to be gone on with, 128
    and a signal's number ended by it for good (130 SIGINT, 143 SIGTERM).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal has no letters for is shown by its number
            stream.reconfigure(errors="backslashreplace")
    # geoopt scripts one helper at import; nothing a user of this command can change.
    warnings.filterwarnings("ignore", message="`torch.jit.script`")
    return as_rank(lambda: _guarded(words)) if is_worker() else _guarded(words)


def _guarded(words: list[str]) -> int:
    """Run one command line; what ends it is said in one line, by one of several processes."""
    say = joined().say_once
    try:
        return _dispatch(words)
    except BenchError as error:
        say(f"nanogpt-bench: error: {error}")
        return FAILED if isinstance(error, DiskError) else USAGE_ERROR
    except KeyboardInterrupt as error:
        number = signal.Signals(error.args[0] if error.args else signal.SIGINT)
        say("nanogpt-bench: interrupted" if number == signal.SIGINT else f"nanogpt-bench: ended by {number.name}")
        return INTERRUPTED + number
    except OSError as error:
        why = disk_failure(error)
        where = f"{error.filename!r}: " if error.filename is not None else ""  # a path that no file can have, say
        say(f"nanogpt-bench: error: {BenchError(why or f'{where}{error.strerror or error}')}")
        return USAGE_ERROR if why is None else FAILED


def _dispatch(words: list[str]) -> int:
    if words and words[0] in TAKE_SETTINGS and _helped(words):
        return 0
    words, overrides = split_overrides(words)
    parser, commands = build_parser()
    args, unknown_words = parser.parse_known_args(words)
    if args.command is None:
        parser.print_help()
        return 0
    commands[args.command].refuse_unknown(unknown_words)
    refuse_repeated(words)
    args.overrides = overrides
    if is_worker() and args.command != "run":
        raise BenchError(f"torchrun is for run: {args.command} works in one process; start it without")
    _require_packages()
    signal.signal(signal.SIGTERM, _interrupt)  # so that a terminated preparation removes what it had begun
    handler: Callable[[argparse.Namespace], int] = args.handler
    return handler(args)


def _helped(words: Sequence[str]) -> bool:
    """Print the help on the topic that is asked for, if one is."""
    if "--help" not in words and "-h" not in words:
        return False
    _require_packages()
    from nanogpt_bench.commands.help_topics import text_on, topic_of

    topic = topic_of(words)
    if topic is not None:
        print(text_on(topic))
    return topic is not None


def _require_packages() -> None:
    """Refuse to begin what a missing package would end halfway: the library alone installs without them."""
    missing = [name for name in ("pydantic", "rich", "vl_convert", "yaml") if find_spec(name) is None]
    if missing:
        raise BenchError(f"not installed: {', '.join(missing)}; get them with pip install 'fp8manifold[bench]'")


def _interrupt(number: int, _: Any) -> NoReturn:
    raise KeyboardInterrupt(number)


def split_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words argparse should see and, for commands that take them, the `--section.key value` settings apart.

    >>> split_overrides(["run", "--seed", "3", "e4m3.yaml", "--name=a"])
    (['run', 'e4m3.yaml', '--name=a'], ['--seed', '3'])
    >>> split_overrides(["run", "e4m3.yaml", "--resume", "--train.max_seconds", "60"])
    (['run', 'e4m3.yaml', '--resume'], ['--train.max_seconds', '60'])
    >>> split_overrides(["sweep", "lr.yaml", "--lr-limits", "--train.max_steps", "50"])
    (['sweep', 'lr.yaml', '--lr-limits'], ['--train.max_steps', '50'])
    """
    if not words or words[0] not in TAKE_SETTINGS:
        return words, []
    plain, overrides, queue = words[:1], [], words[1:]
    while queue:
        word = queue.pop(0)
        if not _is_setting(words[0], word):
            plain += [word, *_value(word, queue)] if word == "--name" else [word]
        else:
            overrides += [word, *_value(word, queue)]
    return plain, overrides


def _is_setting(command: str, word: str) -> bool:
    """Whether a word is a setting of the run: any long option of `run` but its own, a dotted one elsewhere."""
    option = word.partition("=")[0]
    if not option.startswith("--") or option == "--help":
        return False
    if command == "run":
        return option not in RUN_OPTIONS
    if command == "compare" and option in ("--data.dir", "--rule"):  # its own; and --rules is what was meant
        return False
    return "." in option or (option in ("--rule", "--seed", "--task") and command != "sample")


def _value(word: str, queue: list[str]) -> list[str]:
    return [] if "=" in word or not queue else [queue.pop(0)]


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser and the parsers of its commands."""
    parser = Parser(
        prog="nanogpt-bench",
        description="Train small GPTs with 8-bit weights and see which format works where, and why others fail.",
        epilog="examples:\n  nanogpt-bench compare\n  nanogpt-bench prepare stdlib\n  nanogpt-bench run e4m3.yaml\n\n"
        "nanogpt-bench COMMAND --help shows a command's options and examples.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    parsers = {
        "prepare": _add_prepare(commands),
        "run": _add_run(commands),
        "evaluate": add_evaluate(commands),
        "sample": add_sample(commands),
        "finetune": add_finetune(commands),
        "compare": add_compare(commands),
        "sweep": add_sweep(commands),
        "report": _add_report(commands),
        "results": add_results(commands),
        "verify": _add_verify(commands),
    }
    return parser, parsers


def _add_prepare(commands: Any) -> Parser:
    parser: Parser = commands.add_parser(
        "prepare",
        help="turn a text into train.bin, val.bin and meta.json",
        description="Turn a text into train.bin, val.bin (uint16 tokens) and meta.json.",
        epilog="examples:\n  nanogpt-bench prepare stdlib\n"
        "  nanogpt-bench prepare text --input book.txt --tokenizer char --out data/book\n"
        "  nanogpt-bench prepare eurlex --tokenizer gpt2 --limit-tokens 10000000\n"
        "  nanogpt-bench prepare eurlex --data-dir lex_glue --out data/eurlex\n"
        "  nanogpt-bench prepare eurlex --task labels\n"
        "  nanogpt-bench prepare hub --dataset Salesforce/wikitext --config wikitext-2-raw-v1 --column text",
    )
    parser.add_argument(
        "source",
        choices=SOURCES,
        metavar="{" + ",".join(SOURCES) + "}",
        help="stdlib: the help topics and docstrings of the Python standard library; eurlex: English EU legislation; "
        "hub: any text data set of the Hugging Face hub; text: any UTF-8 file",
    )
    _add_source_options(parser)
    parser.add_argument(
        "--limit-tokens", type=positive, metavar="N", help="stop after N tokens for training, N/10 for validation"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder to write (default: data/ and the text's name)",
    )
    parser.add_argument(
        "--tokenizer",
        choices=TOKENIZER_CHOICES,
        default="byte",
        metavar="{byte,char,gpt2,bpe-N,MODEL}",
        help="byte: 256 bytes and an end of text; char: the text's own characters; gpt2: GPT-2's 50257 byte pairs; "
        "bpe-N: N tokens of the text's own byte pairs, such as bpe-4096; "
        "folder/of/a_model, model.gguf or an id on the hub: that model's own tokens (default: byte)",
    )
    parser.set_defaults(handler=_prepare)
    return parser


def _add_source_options(parser: Parser) -> None:
    """Where the text comes from; which option goes with which source is checked when the command runs."""
    parser.add_argument(
        "--task",
        choices=PREPARED,
        help="eurlex: text; labels: documents with their EUROVOC labels (default: text)",
    )
    parser.add_argument("--input", type=Path, metavar="FILE", help="the UTF-8 file (text)")
    parser.add_argument("--dataset", metavar="ID", help="the data set's id on the hub, such as OWNER/NAME (hub)")
    parser.add_argument("--config", metavar="C", help="its configuration (hub; default: its only one)")
    parser.add_argument("--column", metavar="COL", help="its column of text (hub)")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit on the hub (eurlex, hub)")
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="read DIR/CONFIG/SPLIT-*.parquet or DIR/SPLIT-*.parquet, a local copy, instead (eurlex, hub)",
    )


def _add_run(commands: Any) -> Parser:
    parser: Parser = commands.add_parser(
        "run",
        help="train one model",
        usage="nanogpt-bench run CONFIG.yaml [--name NAME] [--resume] [--section.key VALUE ...]",
        description="Train one model as CONFIG.yaml says; every setting can be overridden on the command line.",
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="a file, or the name of a shipped one (see below)")
    parser.add_argument("--name", help="results go to runs/NAME (default: the config's name, numbered)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest whole checkpoint of runs/NAME (default: the latest run of that config), with the "
        "same numbers as without the interruption; without a checkpoint, begin",
    )
    parser.add_argument(
        "--allow-config-change",
        action="store_true",
        help="--resume: go on with settings or a corpus that change the numbers",
    )
    parser.set_defaults(handler=_run)
    parser.make_epilog = _run_epilog
    return parser


def _run_epilog() -> str:
    """Return the end of `run --help`: examples, the shipped configurations' names and the topics of the settings."""
    from nanogpt_bench.commands.help_topics import overview
    from nanogpt_bench.config.settings import shipped_configs

    return (
        "examples:\n  nanogpt-bench run e4m3.yaml --train.max_steps 500\n"
        "  nanogpt-bench run bf16_baseline.yaml --rule stiffness-anneal --model.format E7M0 --name e7m0\n"
        '  nanogpt-bench run my.yaml --data.dir data/book --model.formats "{attn: E4M3, mlp: E3M4}"\n\n'
        f"shipped configs: {', '.join(shipped_configs())}\n\n{overview()}"
    )


def _add_report(commands: Any) -> Parser:
    parser: Parser = commands.add_parser(
        "report",
        help="rebuild the page, figures and tables from runs on disk",
        description="Rebuild the report of runs on disk: report.html, figures, results.csv and tables.",
        epilog="examples:\n  nanogpt-bench report runs/compare-20260101-120000 --out report\n"
        "  nanogpt-bench report runs/bf16_baseline runs/e4m3 --out report\n"
        "  nanogpt-bench report runs/book --out report --baseline fp32",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUNS", help="run folders, folders of them at any depth, or results files"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        *("--reference", "--baseline"),
        dest="baseline",
        metavar="ROW",
        help="row to measure against (default: the BF16 autocast row)",
    )
    parser.set_defaults(handler=_report)
    return parser


def _add_verify(commands: Any) -> Parser:
    parser: Parser = commands.add_parser(
        "verify",
        help="check that run folders are whole",
        description="Check run folders: every byte of every checkpoint, records of every step, settings and summary.\n"
        "The exit code is 1 if anything is wrong. What an interruption leaves is noted and nothing wrong.",
        epilog="examples:\n  nanogpt-bench verify runs/e4m3\n  nanogpt-bench verify runs/compare-20260101-120000",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders of them at any depth"
    )
    parser.set_defaults(handler=_verify)
    return parser


def _prepare(args: argparse.Namespace) -> int:
    from nanogpt_bench.commands.prepare import main_prepare

    return main_prepare(args)


def _run(args: argparse.Namespace) -> int:
    from nanogpt_bench.commands.run import run_command

    options = {"resume": args.resume, "allow_config_change": args.allow_config_change}
    return run_command(args.config, args.name, args.overrides, **options)


def _report(args: argparse.Namespace) -> int:
    from nanogpt_bench.report import main_report

    return main_report(args)


def _verify(args: argparse.Namespace) -> int:
    from nanogpt_bench.commands.verify import verify_command

    return verify_command(args.runs)


if __name__ == "__main__":
    sys.exit(main())
