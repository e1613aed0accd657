"""The program `nanogpt-bench`: its commands, each a module of `nanogpt_bench.commands`,
and its exit codes.
"""

import argparse
import io
import signal
import sys
import warnings
from collections.abc import Collection, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

from nanogpt_bench.system.errors import (
    LONGEST_WORD,
    BenchError,
    DiskError,
    disk_failure,
    nearest,
    not_known,
    shortened,
)
from nanogpt_bench.system.ranks import as_rank, is_lost, is_worker, joined

#: exit code after a wrong command line or setting
USAGE_ERROR = 2
#: added to a signal's number: exit code where a signal ends a command that can't be
#: resumed
INTERRUPTED = 128
FAILED = 1
COMMANDS = {
    "prepare": "turn a text into train.bin, val.bin and meta.json",
    "run": "train one model",
    "evaluate": "validation loss of one set of weights in several formats, without training",
    "sample": "text that a run's weights write, as they are and rounded to formats",
    "finetune": "train all weights of a pretrained language model further",
    "compare": "train formats x rules on one corpus and report (the main job)",
    "sweep": "train over any settings: grid, random, tuned rates, sensitivity of layers",
    "report": "rebuild the page, figures and tables from runs on disk",
    "results": "results of a sweep as one small JSON file, and its tables",
    "verify": "check that run folders are whole",
}
#: commands that take the settings of a run as `--section.key VALUE`
TAKE_SETTINGS = ("run", "evaluate", "sample", "finetune", "compare", "sweep")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `BenchError`s, and which takes no abbreviated
    options.
    """

    def __init__(self, **options: object) -> None:
        given = {
            "formatter_class": argparse.RawDescriptionHelpFormatter,
            "allow_abbrev": False,
            **options,
        }
        super().__init__(**given)  # type: ignore[arg-type]  # as argparse gives them

    def error(self, message: str) -> NoReturn:
        raise BenchError(message)

    @property
    def options(self) -> dict[str, str]:
        """Each long option, with the first of its names."""
        named = (action.option_strings for action in self._actions)
        return {option: names[0] for names in named for option in names if option.startswith("--")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    0: done. 1: the run failed, or the disk ended it. 2: wrong use. 75: ended by a
    signal, and can be resumed. 128 plus a signal's number: ended by the signal, and
    can't be resumed (130 SIGINT, 143 SIGTERM).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # a character that the terminal can't show is printed by its number
            stream.reconfigure(errors="backslashreplace")
    # geoopt scripts one helper at import, which a user of this command can't change.
    warnings.filterwarnings("ignore", message="`torch.jit.script`")
    return as_rank(lambda: _guarded(words)) if is_worker() else _guarded(words)


def _guarded(words: list[str]) -> int:
    """Run one command line; an error is printed in one line, by one of several
    processes.
    """
    say = joined().say_once
    try:
        return _dispatch(words)
    except BenchError as error:
        say(f"nanogpt-bench: error: {error}")
        return FAILED if isinstance(error, DiskError) else USAGE_ERROR
    except KeyboardInterrupt as error:
        number = signal.Signals(error.args[0] if error.args else signal.SIGINT)
        say(
            "nanogpt-bench: interrupted"
            if number == signal.SIGINT
            else f"nanogpt-bench: ended by {number.name}"
        )
        return INTERRUPTED + number
    except UnicodeEncodeError as error:
        # Bytes that are not UTF-8 stand in arguments as halves of surrogate pairs.
        text = shortened(str(error.object), LONGEST_WORD)
        say(f"nanogpt-bench: error: {BenchError(f'{text!r} is not UTF-8; give a text that is')}")
        return USAGE_ERROR
    except OSError as error:
        why = disk_failure(error)
        where = (
            f"{error.filename!r}: " if error.filename is not None else ""
        )  # for example a path too long for a file
        say(f"nanogpt-bench: error: {BenchError(why or f'{where}{error.strerror or error}')}")
        return USAGE_ERROR if why is None else FAILED


def _dispatch(words: list[str]) -> int:
    name = words[0] if words else "--help"
    if name.startswith("-"):
        parser = build_parser()[0]
        parser.parse_args(words)  # with --help it exits here
        parser.print_help()
        return 0
    if name not in COMMANDS:
        raise BenchError(not_known(name, COMMANDS))
    # The library installs without these packages, and a command without them would fail
    # halfway.
    missing = [
        package
        for package in ("pydantic", "rich", "vl_convert", "yaml")
        if find_spec(package) is None
    ]
    if missing:
        raise BenchError(
            f"not installed: {', '.join(missing)}; get them with pip install 'fp8manifold[bench]'"
        )
    args = parse(words)
    if is_worker() and name != "run":
        raise BenchError(
            f"torchrun is for run: {name} works in one process; start it without torchrun"
        )
    signal.signal(
        signal.SIGTERM, _interrupt
    )  # so that a terminated prepare removes its unfinished files
    code: int = import_module(f"nanogpt_bench.commands.{name}").main(args)
    return code


def _interrupt(number: int, _: object) -> None:
    """End the command, unless it ends because it has lost a process: torchrun then
    signals the others too.
    """
    if not is_lost(sys.exc_info()[1]):
        raise KeyboardInterrupt(number)


def build_parser(loaded: Collection[str] = ()) -> tuple[Parser, dict[str, Parser]]:
    """Return the parser and those of the commands; only the commands in `loaded` get
    their arguments.
    """
    parser = Parser(
        prog="nanogpt-bench",
        description="Train small GPTs with 8-bit weights and see which format works where, and why "
        "others fail.",
        epilog="examples:\n  nanogpt-bench compare\n  nanogpt-bench prepare stdlib\n  "
        "nanogpt-bench run e4m3.yaml\n\nnanogpt-bench COMMAND --help shows a command's "
        "options and examples.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    parsers = {}
    for name, text in COMMANDS.items():
        module = import_module(f"nanogpt_bench.commands.{name}") if name in loaded else None
        parsers[name] = commands.add_parser(name, help=text, **(module.TEXTS if module else {}))
        if module:
            module.add_options(parsers[name])
    return parser, parsers


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command line, with the settings of a run in
    `overrides`.

    >>> parse(["run", "--seed", "3", "e4m3.yaml", "--name=a"]).overrides
    ['--seed', '3']
    """
    name, *queue = words
    parser, parsers = build_parser([name])
    known = parsers[name].options
    plain, overrides = [name], list[str]()
    while queue:
        word = queue.pop(0)
        if name in TAKE_SETTINGS and is_setting(word, known):
            overrides += [word, *(queue[:1] if "=" not in word else [])]
            queue = queue[1:] if "=" not in word else queue
        else:
            plain.append(word)
    given = [
        known.get(option, option)
        for word in plain
        if (option := word.partition("=")[0]).startswith("--")
    ]
    if twice := [option for option in given if given.count(option) > 1]:
        raise BenchError(f"{twice[0]} is given twice; keep one")
    _refuse_empty(plain)
    args, rest = parser.parse_known_args(plain)
    if rest:
        raise BenchError(_unknown(rest[0].partition("=")[0], known, settings=name in TAKE_SETTINGS))
    args.overrides = overrides
    return args


def is_setting(word: str, options: Collection[str]) -> bool:
    """Return whether a word of a command line is a setting and not one of a command's
    own options.

    >>> [is_setting(word, ["--data.dir"]) for word in ("--train.max_steps=3", "--seed", "--data.dir", "a.yaml")]
    [True, True, False, False]
    """
    from nanogpt_bench.config.keys import FIELDS

    option = word.partition("=")[0]
    return (
        option.startswith("--")
        and option not in options
        and ("." in option or option[2:] in FIELDS)
    )


#: options that take an empty text
MAY_BE_EMPTY = ("--prompt",)


def _refuse_empty(words: Sequence[str]) -> None:
    """Refuse an empty argument, such as that of a variable that a shell does not have.

    It would stand for the default of an option, or for the working folder.
    """
    before = ""
    for word in words:
        option, equals, text = word.partition("=")
        if option.startswith("--") and equals:
            value = text
        else:
            option, value = before, word
        if not value.strip() and option not in MAY_BE_EMPTY:
            where = f"{option} " if option.startswith("--") else "argument "
            raise BenchError(f"{where}{value!r} is not allowed; give a value, or leave it out")
        before = word


def _unknown(word: str, options: Collection[str], *, settings: bool) -> str:
    """The message about an argument that is neither an option of the command nor a
    setting.
    """
    from nanogpt_bench.config.keys import FIELDS

    last = {key.rpartition(".")[2]: f"--{key}" for key in FIELDS} if settings else {}
    guess = (nearest(word, options) if word.startswith("-") else None) or last.get(word.lstrip("-"))
    return f"unknown argument {word!r}" + (
        f"; did you mean {guess!r}?" if guess else f"; allowed: {', '.join(options)}"
    )
