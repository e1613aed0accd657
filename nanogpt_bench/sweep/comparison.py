"""A comparison: formats x rules on one corpus at the same seeds, the settings given to them, and compare.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nanogpt_bench.config.keys import FIELDS, get
from nanogpt_bench.config.rules import RULES, available_rules, check_available
from nanogpt_bench.config.schema import WITHOUT_FORMATS
from nanogpt_bench.config.settings import build_config, parse_overrides
from nanogpt_bench.data.batches import digests_of
from nanogpt_bench.report.rows import Row, find_reference, row_label
from nanogpt_bench.runs.earlier import plain
from nanogpt_bench.setup.formats import format_name
from nanogpt_bench.setup.parallel import refuse_parallel
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.plan import PlannedRun, applies
from nanogpt_bench.sweep.record import DATE, Record
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.files import write_text
from nanogpt_bench.system.lock import is_unused
from nanogpt_bench.system.untrusted import read_json

REFERENCE = "bf16-mixed"
# Rules tried on a format when only formats are asked for, and the format when only rules are.
DEFAULT_RULES = ("master", "nearest", "stochastic", "stiffness-anneal", "muon-stochastic", "muon-residual8")
DEFAULT_FORMATS = ("E4M3",)
MANIFEST = "compare.json"
#: the place of the corpus, which changes no number: its digests identify it
_PLACE = "data.dir"


@dataclass(frozen=True)
class Demonstration:
    """A GPT of about 0.8M parameters on the standard library's prose, long enough to tell the rules apart.

    `riemannian` is not among the rows: it leads after 300 steps and is behind after 2,000 (Q1 of study/study.md). Muon
    has its row in E2M5 as well, where one byte costs it least (Q2).
    """

    # (rule, format) of every row, in the order of the table; the first is the reference.
    rows: tuple[tuple[str, str], ...] = (
        (REFERENCE, "none"),
        ("fp32", "none"),
        ("muon", "none"),
        ("master", "E4M3"),
        ("nearest", "E4M3"),
        ("stochastic", "E4M3"),
        ("stochastic-8bit", "E4M3"),
        ("stiffness-anneal", "E4M3"),
        ("muon-stochastic", "E4M3"),
        ("muon-stochastic", "E2M5"),
        ("nearest", "E7M0"),
        ("stochastic", "E7M0"),
    )
    size: str = "0.8M"
    max_steps: int = 300
    batch_size: int = 12
    eval_batches: int = 20
    # Arithmetic of the rows with 8-bit weights. bfloat16 costs as much as float32 on a CPU that has it and a third
    # more on one that has not (AVX2 only), so that just the reference pays for it.
    quantized_precision: str = "float32"
    first_seed: int = 42
    workers: int = 2

    def settings(self, rule: str, fmt: str, *, seed: int, max_steps: int, data_dir: str) -> dict[str, Any]:
        """The configuration of one run as {dotted key: value}; learning rates are the rule's own."""
        chosen: dict[str, Any] = {
            "rule": rule,
            "seed": seed,
            "data.dir": data_dir,
            "model.size": self.size,
            "train.max_steps": max_steps,
            "train.batch_size": self.batch_size,
            "optimizer.warmup_steps": min(100, max_steps // 10),
            # About ten validations and twenty looks, however long the run; every layer has three or four of them.
            "eval.interval": max(1, max_steps // 10),
            "eval.batches": self.eval_batches,
            "monitor.interval": max(1, max_steps // 20),
            "monitor.turns": 16,
            "monitor.dead_interval": 5,
            "runtime.threads": 1,
        }
        quantized = {
            "model.format": fmt,
            "train.precision": self.quantized_precision,
            "shadow.enabled": True,
            "shadow.interval": max(1, max_steps // 3),
        }
        return chosen if fmt == "none" else chosen | quantized


def choose_rows(
    formats: Sequence[str] | None, rules: Sequence[str] | None, demonstration: Demonstration
) -> tuple[tuple[str, str], ...]:
    """(rule, format) of every row: the demonstration's, or the reference and all formats x rules asked for.

    Rules that keep float weights have no format and give one row each; `all` stands for every rule whose packages are
    installed.

    Raises:
        BenchError: a rule or format does not exist (names the nearest one), or a rule's package is missing.
    """
    if formats is None and rules is None:
        return demonstration.rows
    names = _chosen(rules or DEFAULT_RULES)
    grids = _canonical(formats) if formats is not None else list(DEFAULT_FORMATS)
    floats = [(name, "none") for name in names if RULES[name].storage in WITHOUT_FORMATS]
    crossed = [(name, fmt) for fmt in grids for name in names if RULES[name].storage not in WITHOUT_FORMATS]
    return tuple(dict.fromkeys([(REFERENCE, "none"), *floats, *crossed]))


def _chosen(rules: Sequence[str]) -> list[str]:
    named = [name for name in rules if name != "all"]
    for name in named:
        check_available(name)
    return available_rules() if len(named) < len(rules) else named


def _canonical(formats: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(format_name(name, "--formats") for name in formats))
    if "none" in names:
        raise BenchError("--formats: 'none' is no format to compare; the reference row is there already")
    return names


def plan_runs(
    rows: Sequence[tuple[str, str]],
    demonstration: Demonstration,
    *,
    seeds: int,
    max_steps: int,
    data_dir: Path,
    given: Mapping[str, Any] = MappingProxyType({}),
) -> list[PlannedRun]:
    """Every row at every seed, in the order of the table; rows share seeds and, through them, the order of the data.

    Of the settings `given` each row has those that mean something under its rule.
    """
    planned = []
    for place, (rule_name, fmt) in enumerate(rows, start=1):
        label = row_label(rule_name, fmt)
        for seed in range(demonstration.first_seed, demonstration.first_seed + seeds):
            name = f"{place:02d}-{label.replace(' ', '-')}" + (f"-seed{seed}" if seeds > 1 else "")
            settings = demonstration.settings(
                rule_name, fmt, seed=seed, max_steps=max_steps, data_dir=data_dir.as_posix()
            )
            planned.append(PlannedRun(label, rule_name, fmt, seed, name, put_into(settings, given)))
    return planned


def read_given(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a command line by dotted key.

    Raises:
        BenchError: no such setting, or one that the rows differ in.
    """
    if not words:
        return {}
    given = parse_overrides(words)
    for key in given:
        if key in FIELDS and (option := FIELDS[key].facts["rows_by"]):
            raise BenchError(f"--{key}: the rows of a comparison differ in it; give {option}")
    config = build_config(given)
    return {key: get(config, key) for key in given}  # 1e-3 is a number


def steps_of(given: dict[str, Any], asked: int | None) -> int | None:
    """Return the steps of every run, taken out of what was given, since other settings follow from them.

    Raises:
        BenchError: two numbers of them.
    """
    steps: int | None = given.pop("train.max_steps", None)
    if None not in (steps, asked) and steps != asked:
        raise BenchError(f"--train.max_steps {steps} and --max-steps {asked} are two numbers of steps; give one")
    return asked if steps is None else steps


def as_typed(words: Sequence[str]) -> dict[str, str]:
    """Return the options of a command line and their texts.

    >>> as_typed(["--optimizer.lr", "1e-3", "--seed=3"])
    {'--optimizer.lr': '1e-3', '--seed': '3'}
    """
    typed, queue = {}, list(words)
    while queue:
        option, equals, text = queue.pop(0).partition("=")
        typed[option] = text if equals else queue.pop(0)
    return typed


def put_into(settings: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's settings with those given that mean something for its rule."""
    rule = RULES[settings["rule"]]
    taken = {key: value for key, value in given.items() if applies(key, value, rule)}
    if taken.get("model.init_from") is not None:  # which has a size of its own
        settings = {key: value for key, value in settings.items() if key != "model.size"}
    return settings | taken


def check_given(given: Mapping[str, Any], planned: Sequence[PlannedRun], say: Callable[[str], None]) -> int:
    """Check every row's settings, say which rows a setting is for, and return the length of a block.

    Raises:
        BenchError: a setting that no row takes, or one that a row can't have; names the row.
    """
    rows = {run.label: run for run in planned}
    lines = list(_lines(given, rows))
    length = 0
    for label, run in rows.items():
        try:
            config = resolve(build_config(dict(run.settings)))
            refuse_parallel(config.train.parallel, "each row of a comparison")
            length = config.model.block_size or 0
        except BenchError as error:
            raise BenchError(f"{error} (in the row {label!r})") from None
    for line in lines:
        say(line)
    return length


def _lines(given: Mapping[str, Any], rows: Mapping[str, PlannedRun]) -> Iterator[str]:
    for key, value in given.items():
        takers = [label for label, run in rows.items() if applies(key, value, RULES[run.rule])]
        if not takers:
            raise BenchError(f"--{key} {value}: means nothing in any row ({', '.join(rows)}); leave it out")
        if key == "optimizer.lr":
            yield f"{key} {value} in every row, in the unit of its optimizer, in place of the rule's own"
        elif len(takers) < len(rows):
            yield f"{key} {value} in the rows that take it: {', '.join(takers)}"


class ComparisonRecord(Record):
    """The runs of a comparison and compare.json: what was asked for by option, and the settings of every run.

    `corpus` is where its text is, or will be: the standard library's prose is prepared there.

    Raises:
        BenchError: `folder` can't be used, or holds something else than this comparison.
    """

    def __init__(
        self,
        folder: Path,
        planned: Sequence[PlannedRun],
        corpus: Path,
        asked: Mapping[str, Any],
        baseline: str | None = None,
    ) -> None:
        super().__init__(folder, "nanogpt-bench compare", baseline)
        self.asked, self.corpus = asked, corpus
        before = read_earlier(folder)
        self._begins = before is None
        if before is not None:
            settings = {run.name: plain(run.settings) for run in planned}
            check_same(folder, before, asked, settings, self._corpus_digests())
            self.started = before.started

    def _corpus_digests(self) -> dict[str, Any] | None:
        """The SHA-256 of each split of the corpus, None until it is prepared.

        Raises:
            BenchError: a corpus whose meta.json can't be read.
        """
        if not self.corpus.exists():
            return None
        try:
            splits = read_json(self.corpus / "meta.json")["splits"]
            return {split: splits[split].get("sha256") for split in splits} | digests_of(splits)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchError(f"corpus {str(self.corpus)!r} can't be read: {one_line(error)}") from None

    def prepare(self, say: Callable[[str], None]) -> None:
        """Prepare the standard library's prose where there is no corpus; on any failure leave no folder behind."""
        if self.corpus.exists():
            return
        from nanogpt_bench.data import prepare_stdlib

        say("preparing the standard library's prose")
        try:
            prepare_stdlib(self.corpus)
        except BaseException:
            if self._begins and not any(self.run_dir(run).exists() for run in self.planned):
                shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.write_manifest()

    def write_manifest(self) -> None:
        """Write compare.json."""
        self._write_manifest(self.rows())

    def write_page(self) -> Path:
        """Write compare.json and what a record's `write_page` does; returns the page's path."""
        rows = self.rows()
        self._write_manifest(rows)
        return self._write_report(rows)

    def _write_manifest(self, rows: Sequence[Row]) -> None:
        reference = find_reference(rows, self.baseline)
        manifest = {
            **{name.lower(): text for name, text in self.facts(rows).items()},
            "baseline": reference.label if reference is not None else None,
            "rows": self._entries(rows),
            "asked": dict(self.asked),
            "corpus_sha256": self._corpus_digests(),
            "settings": {run.name: run.settings for run in self.planned},
        }
        write_text(self.folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")

    def _entries(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        return [
            {
                "label": row.label,
                "rule": row.rule,
                "format": row.format,
                "runs": [run.name for run in runs],
                "status": {run.path.name: run.status for run in row.runs},
            }
            for row, runs in zip(rows, self.by_row(), strict=True)
        ]


@dataclass(frozen=True)
class Earlier:
    """The earlier start that compare.json records: its options, the settings of its runs, the digests of its corpus.

    The digests are None before the corpus was prepared.
    """

    asked: Mapping[str, Any]
    settings: Mapping[str, Mapping[str, Any]]
    corpus: Mapping[str, Any] | None
    started: datetime


def read_earlier(folder: Path) -> Earlier | None:
    """Return what a comparison's folder says of its earlier start; None for a folder that is empty or not there.

    Raises:
        BenchError: the folder can't be used, or holds something else than a comparison that can be gone on with.
    """
    path = folder / MANIFEST
    try:
        if not path.exists():
            if not is_unused(folder):
                raise BenchError(f"--out {str(folder)!r} is not empty and holds no comparison; give a new folder")
            return None
        content = read_json(path, times=8)
    except OSError as error:
        raise BenchError(f"--out {str(folder)!r} can't be used: {error.strerror or error}") from None
    except BenchError:
        raise
    except ValueError as error:
        raise BenchError(f"{str(path)!r} can't be read ({one_line(error)}); give a new folder with --out") from None
    try:
        started = datetime.strptime(content["date"], DATE).replace(tzinfo=UTC)
        return Earlier(dict(content["asked"]), _by_name(content["settings"]), content["corpus_sha256"], started)
    except (KeyError, TypeError, ValueError):
        raise BenchError(f"{str(path)!r} does not say what was asked for; give a new folder with --out") from None


def _by_name(settings: Any) -> dict[str, dict[str, Any]]:
    return {str(name): dict(of_run) for name, of_run in settings.items()}


def check_same(
    folder: Path,
    before: Earlier,
    asked: Mapping[str, Any],
    settings: Mapping[str, Mapping[str, Any]],
    corpus: Mapping[str, Any] | None,
) -> None:
    """Refuse to mix two comparisons: the runs that an earlier start planned have to be those planned now.

    Raises:
        BenchError: names the options that differ; the settings of the runs where no option does.
    """
    differing = list(_settings(before.settings, settings))
    if differing:
        named = list(_options(before.asked, asked)) or differing
        raise BenchError(f"--out {str(folder)!r} holds another comparison: {', '.join(named)}; give a new folder")
    if corpus is not None and before.corpus is not None and corpus != before.corpus:
        raise BenchError(
            f"--out {str(folder)!r} holds a comparison on another corpus: --data.dir was "
            f"{_shown(before.asked.get('--data.dir'))}, and its sha256 differs; give a new folder"
        )


def _options(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for option in {**before, **now}:
        then, new = before.get(option), now.get(option)
        if then != new:
            yield f"{option} was {_shown(then)}, is {_shown(new)}"


def _shown(value: Any) -> str:
    return "not given" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _settings(before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name in {**before, **now}:
        if name not in before or name not in now:
            yield f"{name} was {'not ' if name not in before else ''}in it"
            continue
        for key in {**before[name], **now[name]}:
            then, new = before[name].get(key), now[name].get(key)
            if key != _PLACE and then != new:
                yield f"{key} of {name} was {then!r}, is {new!r}"
