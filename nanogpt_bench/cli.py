"""The program `nanogpt-bench`: its commands and its exit codes.

A command is a module of `nanogpt_bench.commands`. `main` runs one command line and
turns every error into one line. `parse` splits the line: words of the command's own
parser, and settings of a run, which any command of `TAKE_SETTINGS` takes.
"""

import argparse
import io
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

from nanogpt_bench.system.errors import (
    LONGEST_COMPARED_WORD,
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
#: added to a signal's number: the exit code of a command that the signal ended and that
#: can't be resumed
INTERRUPTED = 128
#: exit code after a failed run, or an error of the disk
FAILED = 1
COMMANDS = {
    "prepare": "turn a text into train.bin, val.bin and meta.json",
    "run": "train one model",
    "evaluate": "measure the validation loss of one set of weights in several formats",
    "sample": "let a run's weights write text, as they are and rounded to formats",
    "fits": "compute the memory that training a model takes, and whether a card has it",
    "finetune": "fine-tune all weights of a pretrained language model",
    "compare": "train formats x rules on one corpus and write a report (the main command)",
    "sweep": "train over any settings: grid, random, tuned rates, sensitivity of layers",
    "map": "predict what each format would cost in each layer, from one training in floats",
    "report": "rebuild page, figures and tables from runs on disk",
    "results": "write a sweep's results to one small JSON file, or print its tables",
    "verify": "check that run folders are complete and unchanged",
}
#: commands that take the settings of a run as `--section.key VALUE`
TAKE_SETTINGS = ("run", "evaluate", "sample", "finetune", "compare", "sweep", "map")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `BenchError`s.

    It takes no abbreviated options.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        raise BenchError(message)

    @property
    def options(self) -> dict[str, str]:
        """Each long option, with the first of its names."""
        first_names: dict[str, str] = {}
        for action in self._actions:
            for option in action.option_strings:
                if option.startswith("--"):
                    first_names[option] = action.option_strings[0]
        return first_names


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    0: done. 1: the run failed, or the disk ended it. 2: wrong use. 75: ended by a
    signal, and can be resumed. 128 plus a signal's number: ended by the signal, and
    can't be resumed (130 SIGINT, 143 SIGTERM).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal can't show is printed by its number.
            stream.reconfigure(errors="backslashreplace")
    # geoopt scripts one helper at import, which a user of this command can't change.
    warnings.filterwarnings("ignore", message="`torch.jit.script`")
    return as_rank(lambda: _guarded(words)) if is_worker() else _guarded(words)


def _guarded(words: list[str]) -> int:
    """Run one command line and print an error in one line, by one of the processes."""
    say = joined().say_once
    try:
        return _dispatch(words)
    except BenchError as error:
        say(f"nanogpt-bench: error: {error}")
        return FAILED if isinstance(error, DiskError) else USAGE_ERROR
    except KeyboardInterrupt as error:
        number = signal.Signals(error.args[0] if error.args else signal.SIGINT)
        ending = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
        say(f"nanogpt-bench: {ending}")
        return INTERRUPTED + number
    except UnicodeEncodeError as error:
        # Bytes that are not UTF-8 stand in arguments as halves of surrogate pairs.
        text = shortened(str(error.object), LONGEST_COMPARED_WORD)
        say(f"nanogpt-bench: error: {BenchError(f'{text!r} is not UTF-8; give UTF-8 text')}")
        return USAGE_ERROR
    except OSError as error:
        return _end_by(error, say)


def _end_by(error: OSError, say: Callable[[str], None]) -> int:
    """Print an error of the system in one line, and return its exit code."""
    if isinstance(error, BrokenPipeError) and _drop_unread_output():
        return INTERRUPTED + signal.SIGPIPE
    message = disk_failure(error)
    if message is not None:
        say(f"nanogpt-bench: error: {BenchError(message)}")
        return FAILED
    message = str(error.strerror or error)
    if error.filename is not None:
        # for example a path too long for a file
        message = f"{error.filename!r}: {message}"
    say(f"nanogpt-bench: error: {BenchError(message)}")
    return USAGE_ERROR


def _drop_unread_output() -> bool:
    """Return whether nobody reads the output any more, as after `head`.

    What is still to be written goes nowhere then: Python would complain of it at its end.
    """
    output = sys.stdout.fileno()
    poll = select.poll()
    # without events to wait for, only errors are told: of a pipe, that nobody reads it
    poll.register(output, 0)
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _dispatch(words: list[str]) -> int:
    name = words[0] if words else "--help"
    if name.startswith("-"):
        parser = build_parser()[0]
        # With --help it exits here.
        parser.parse_args(words)
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
            f"torchrun works with run only; {name} takes one process, so start it without torchrun"
        )
    # So that a terminated prepare removes its unfinished files.
    signal.signal(signal.SIGTERM, _interrupt)
    code: int = import_module(f"nanogpt_bench.commands.{name}").main(args)
    return code


def _interrupt(number: int, _: object) -> None:
    """End the command, unless it is already handling the loss of another process.

    When one process ends with an error, torchrun sends SIGTERM to the others, too.
    """
    if not is_lost(sys.exc_info()[1]):
        raise KeyboardInterrupt(number)


def build_parser(loaded: Collection[str] = ()) -> tuple[Parser, dict[str, Parser]]:
    """Return the parser and those of the commands.

    Only the commands in `loaded` get their arguments.
    """
    parser = Parser(
        prog="nanogpt-bench",
        description=(
            "Train small GPTs with 8-bit weights and see which format works where, and why others "
            "fail."
        ),
        epilog=(
            "examples:\n"
            "  nanogpt-bench compare\n"
            "  nanogpt-bench prepare stdlib\n"
            "  nanogpt-bench run e4m3.yaml\n"
            "\n"
            "nanogpt-bench COMMAND --help shows a command's options and examples."
        ),
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    parsers = {}
    for name, text in COMMANDS.items():
        if name not in loaded:
            parsers[name] = commands.add_parser(name, help=text)
            continue
        module = import_module(f"nanogpt_bench.commands.{name}")
        parsers[name] = commands.add_parser(name, help=text, **module.TEXTS)
        module.add_options(parsers[name])
    return parser, parsers


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command line.

    Settings of a run are in `overrides`.

    >>> parse(["run", "--seed", "3", "e4m3.yaml", "--name=a"]).overrides
    ['--seed', '3']
    """
    name, *queue = words
    parser, parsers = build_parser([name])
    options = parsers[name].options
    takes_settings = name in TAKE_SETTINGS
    plain, overrides = [name], list[str]()
    while queue:
        word = queue.pop(0)
        if not takes_settings or not is_setting(word, options):
            plain.append(word)
            continue
        overrides.append(word)
        if "=" not in word and queue:
            overrides.append(queue.pop(0))
    _refuse_repeated(plain, options)
    _refuse_empty(plain)
    args, unparsed = parser.parse_known_args(plain)
    if unparsed:
        word = unparsed[0].partition("=")[0]
        raise BenchError(_unknown(word, options, settings=takes_settings))
    args.overrides = overrides
    return args


def _refuse_repeated(words: Sequence[str], options: Mapping[str, str]) -> None:
    """Refuse an option that is given twice, also by two of its names.

    `options` has the first name of each.
    """
    names = []
    for word in words:
        option = word.partition("=")[0]
        if option.startswith("--"):
            names.append(options.get(option, option))
    for name in names:
        if names.count(name) > 1:
            raise BenchError(f"{name} is given twice; keep one")


def is_setting(word: str, options: Collection[str]) -> bool:
    """Return whether a word of a command line is a setting of a run.

    It is none if it is one of the command's own options.

    >>> words = ("--train.max_steps=3", "--seed", "--data.dir", "a.yaml")
    >>> [is_setting(word, ["--data.dir"]) for word in words]
    [True, True, False, False]
    """
    from nanogpt_bench.config.keys import FIELDS

    option = word.partition("=")[0]
    if not option.startswith("--") or option in options:
        return False
    return "." in option or option[2:] in FIELDS


#: options that take an empty text
MAY_BE_EMPTY = ("--prompt",)


def _refuse_empty(words: Sequence[str]) -> None:
    """Refuse an empty argument, such as that of a variable that a shell does not have.

    It would stand for the default of an option, or for the working folder.
    """
    previous = ""
    for word in words:
        option, equals, text = word.partition("=")
        if option.startswith("--") and equals:
            value = text
        else:
            option, value = previous, word
        if not value.strip() and option not in MAY_BE_EMPTY:
            place = option if option.startswith("--") else "argument"
            raise BenchError(f"{place} {value!r} is not allowed; give a value, or leave it out")
        previous = word


def _unknown(word: str, options: Collection[str], *, settings: bool) -> str:
    """Return the message about an argument that is no option and no setting."""
    from nanogpt_bench.config.keys import FIELDS

    guess = nearest(word, options) if word.startswith("-") else None
    if guess is None and settings:
        # a setting without its section; of several the last one
        for key in FIELDS:
            if key.rpartition(".")[2] == word.lstrip("-"):
                guess = f"--{key}"
    if guess:
        return f"unknown argument {word!r}; did you mean {guess!r}?"
    return f"unknown argument {word!r}; allowed: {', '.join(options)}"
