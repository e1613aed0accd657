"""`nanogpt-bench run`: one training, its progress, and a closing line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from nanogpt_bench.config.endings import RunStatus, StopKind
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import defaults_yaml, find_config, load_config, shipped_configs
from nanogpt_bench.system.errors import BenchError, counted, printable, say
from nanogpt_bench.system.files import new_folder
from nanogpt_bench.system.ranks import Ranks, joined
from nanogpt_bench.system.signals import RESUMABLE, SIGNALS, stop_requests, stop_requests_once

if TYPE_CHECKING:
    from nanogpt_bench.loop.outcome import Progress

RUNS = Path("runs")

TEXTS = {
    "usage": (
        "nanogpt-bench run CONFIG.yaml [--name NAME] [--resume] [--section.key VALUE ...]\n"
        "       nanogpt-bench run --defaults"
    ),
    "description": (
        "Train one model as CONFIG.yaml says; every setting can be overridden on the command "
        "line.\n"
        "nanogpt-bench run --defaults prints every setting, its default and what it takes."
    ),
    "epilog": "examples:\n  nanogpt-bench run e4m3.yaml --train.max_steps 500\n  nanogpt-bench run "
    "bf16_baseline.yaml --rule stiffness-anneal --model.format E7M0 --name e7m0\n"
    "  nanogpt-bench run my.yaml --data.dir data/book --model.formats "
    '"{attn: E4M3, mlp: E3M4}"\n\n'
    f"shipped configs: {', '.join(shipped_configs())}",
}


def add_options(parser: Any) -> None:
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG.yaml", help="a file, or the name of a shipped one"
    )
    parser.add_argument(
        "--defaults",
        action="store_true",
        help="print all settings with their defaults and meanings, as a file",
    )
    parser.add_argument(
        "--name", help="results go to runs/NAME (default: the config's name, numbered)"
    )
    add_resume(parser)


def add_resume(parser: Any) -> None:
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue runs/NAME (default: the config's latest run) from its newest complete "
        "checkpoint; without one, start at step 0",
    )
    parser.add_argument(
        "--allow-config-change",
        action="store_true",
        help="with --resume: accept settings or a corpus that change the numbers",
    )


def main(args: argparse.Namespace) -> int:
    """Train by a configuration file and overrides, or print all defaults."""
    if args.defaults:
        if any((args.config, args.overrides, args.name, args.resume, args.allow_config_change)):
            raise BenchError(
                "--defaults prints the defaults of all settings; leave everything else out"
            )
        print(defaults_yaml())
        return 0
    if args.config is None:
        raise BenchError(
            "run needs CONFIG.yaml, a file or the name of a shipped one, or --defaults"
        )
    check_options(args)
    path = find_config(args.config)
    config = load_config(path, args.overrides)
    options = {"resume": args.resume, "allow_config_change": args.allow_config_change}
    return exit_code(trained(config, path.stem, args.name, **options)[0])


def check_options(args: argparse.Namespace) -> None:
    """Refuse options of `add_options` that make no sense, before any file is read."""
    if args.allow_config_change and not args.resume:
        raise BenchError(
            "--allow-config-change needs --resume: a new run takes the settings that it is given"
        )
    _check_name(args.name)


def trained(
    config: Config,
    stem: str,
    name: str | None,
    *,
    resume: bool = False,
    allow_config_change: bool = False,
) -> tuple[dict[str, Any], Path]:
    """Train a configuration, resolved or not, and show the progress.

    Without a name its folder is numbered after `stem`. Return the run's summary and
    folder.
    """
    # not at the top, since they import torch, which takes seconds
    from nanogpt_bench.loop.prepared import prepare_run
    from nanogpt_bench.loop.train import train

    ranks = joined()
    folder = None if name is None else RUNS / name
    if resume:
        folder = Path(ranks.broadcast(str(folder or latest_name(stem))))
    with _folder(stem, folder, ranks) as run_dir:
        prepared = prepare_run(config, run_dir, resume=resume, ranks=ranks, make_default=True)
        # A second signal ends the command, but is ignored in a process of torchrun.
        with (
            stop_requests() if ranks.size == 1 else stop_requests_once(SIGNALS) as stop,
            _display(prepared.config, _warmup_warnings(prepared.config)) as show,
        ):
            summary = train(
                prepared,
                allow_config_change=allow_config_change,
                on_progress=show if ranks.first else None,
                stop=stop,
                say=say,
            )
    print(printable(_closing_line(summary, run_dir)))
    return summary, run_dir


def _check_name(name: str | None) -> None:
    if name is None:
        return
    is_one_folder = Path(name).name == name and name[:1] not in ("", ".")
    if not name.isprintable() or not is_one_folder:
        raise BenchError(
            f"--name {name!r} is not allowed; give the name of one folder, such as e4m3-lr2"
        )


def _warmup_warnings(config: Config) -> list[str]:
    """Return the warning about a warm-up that is longer than the run, if it is."""
    warmup_steps, max_steps = config.optimizer.warmup_steps or 0, config.train.max_steps
    if warmup_steps < max_steps:
        return []
    highest = (config.optimizer.lr or 0.0) * max_steps / (warmup_steps + 1)
    return [
        f"optimizer.warmup_steps: {counted(warmup_steps, 'step')} of warm-up in a run of "
        f"{max_steps}: the learning rate rises to {highest:.3g} and never reaches optimizer.lr; "
        f"give fewer"
    ]


def exit_code(summary: dict[str, Any]) -> int:
    """Return the exit code of `run` after a training with this summary."""
    if _stop_kind(summary) == StopKind.SIGNAL:
        return RESUMABLE
    is_lost = summary["status"] == RunStatus.FAILED or _stop_kind(summary) == StopKind.DISK
    return 1 if is_lost else 0


def _stop_kind(summary: dict[str, Any]) -> str | None:
    stop = summary["stop"] or {}
    return stop.get("kind")


@contextmanager
def _folder(stem: str, folder: Path | None, ranks: Ranks) -> Iterator[Path]:
    """Yield the folder of a run: `folder`, or a new one named after `stem`."""
    if folder is not None:
        yield folder
        return
    with new_folder(RUNS / stem) if ranks.first else nullcontext() as new:
        yield Path(ranks.broadcast(str(new)))


def latest_name(stem: str) -> Path:
    """Return the last of runs/STEM, runs/STEM-2, … that exists.

    runs/STEM if none does.
    """
    path, number = RUNS / stem, 2
    while (RUNS / f"{stem}-{number}").exists():
        path = RUNS / f"{stem}-{number}"
        number += 1
    return path


@contextmanager
def _display(config: Config, warnings: list[str]) -> Iterator[Any]:
    """Yield a callback that shows the progress of a run.

    It prints the warnings once, moves a bar on a terminal, and prints a line at every
    validation.
    """
    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    last_step = config.train.max_steps
    with Bar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=last_step)

        def show(progress: Progress) -> None:
            while warnings:
                line = printable(warnings.pop(0))
                console.print(line, highlight=False, markup=False, soft_wrap=True)
            loss = progress.train_loss or 0
            bar.update(task, completed=progress.step, description=f"train {loss:.3f}")
            for alert in progress.alerts:
                line = printable(f"{alert.level} {alert.message}")
                console.print(line, highlight=False, markup=False)
            if progress.step % config.eval.interval == 0 or progress.step == last_step:
                console.print(_line(progress), highlight=False)

        yield show


def _line(progress: Progress) -> str:
    parts = [f"step {progress.step:>6}"]
    if progress.train_loss is not None:
        parts.append(f"train {progress.train_loss:.4f}")
    if progress.val_loss is not None:
        parts.append(f"val {progress.val_loss:.4f}")
    if progress.stall is not None:
        parts.append(f"mean stall {progress.stall:.1%}")
    if progress.arrived is not None:
        parts.append(f"mean arrived {progress.arrived:.1%}")
    if progress.tokens_per_s:
        parts.append(f"{progress.tokens_per_s:,.0f} tokens/s")
    return "  ".join(parts)


def _closing_line(summary: dict[str, Any], run_dir: Path) -> str:
    if summary["status"] == RunStatus.FAILED:
        return f"failed: {summary['failure']['message']}; see {run_dir}"
    if _stop_kind(summary) == StopKind.DISK:
        return (
            f"stopped: {summary['stop']['message']}; make room, then continue with --resume; see "
            f"{run_dir}"
        )
    reason = f" ({summary['stop']['message']})" if summary["stop"] else ""
    shadow = ""
    if summary["shadow_overhead"] is not None:
        steps = f"{summary['shadow_overhead']:.2f} steps"
        shadow = f", a comparison with the float32 shadow takes as long as {steps}"
    return (
        f"{summary['status']}{reason} after {counted(summary['steps'], 'step')}: "
        f"val loss {_number(summary['final_val_loss'], '.4f')} "
        f"(best {_number(summary['best_val_loss'], '.4f')}), "
        f"{_number(summary['bytes_per_parameter'], '.2f')} bytes per parameter, "
        f"{_number(summary['tokens_per_s'], ',.0f')} tokens/s{shadow}; see {run_dir}"
    )


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
