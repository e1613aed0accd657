"""Runs that a results file has: a sweep takes them from there and trains the others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from nanogpt_bench.config.keys import get, keys_where
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.data.batches import load_corpus
from nanogpt_bench.report.results_file import read_export
from nanogpt_bench.runs.environment import DECIDING, MINOR, differing, machine, settings_of
from nanogpt_bench.runs.load import Run
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.start import start_facts
from nanogpt_bench.sweep.plan import PlannedRun
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.files import write_json, write_text

#: settings that the machine decides
_OF_MACHINE = ("runtime.threads", "runtime.device")
#: facts of the machine; where one differs, no run of the file is taken
_INSTALLED = {name: DECIDING[name] for name in ("torch", "GPU")}
_GIVEN = {name: keys for name, keys in DECIDING.items() if name not in _INSTALLED}


class Known:
    """The runs of a results file by their settings; `notes` says in words what of them was not taken, or may differ.

    Raises:
        BenchError: no results file, or its runs were made by another version of torch or on another GPU.
    """

    def __init__(self, path: Path) -> None:
        file = read_export(path)
        self.path, self.notes = path, dict[str, None]()
        self._runs = [run for row in (*file.rows, *file.trials) for run in row.runs]
        self._taken: set[int] = set()
        #: places of runs by their settings, which runs on several texts may share
        self._places: dict[str, list[int]] = {}
        here = machine()
        for place, run in enumerate(self._runs):
            self._places.setdefault(_settings(resolve(build_config(settings_of(run.config)))), []).append(place)
            for line in differing(run.environment, here, _INSTALLED):
                raise BenchError(f"--from {str(path)!r}: {line}; its runs are not those that would be made here")
            self.notes |= dict.fromkeys(differing(run.environment, here, MINOR))

    def write(self, planned: PlannedRun, folder: Path) -> bool:
        """Write the file's run of the same settings, text and first weights as that run's folder; False without one."""
        config = resolve(build_config(planned.settings))
        places = self._places.get(_settings(config), ())
        here = _here(config.data.dir, config.model.init_from) if places else {}
        other = {place: list(differing(self._runs[place].environment, here, _GIVEN)) for place in places}
        place = next((place for place in places if not other[place]), None)
        if place is None:
            # one of another text by its name is another run, and not worth a word
            named = [
                place for place in places if settings_of(self._runs[place].config).get("data.dir") == config.data.dir
            ]
            self.notes |= dict.fromkeys(f"{line}: not taken" for place in named for line in other[place])
            return False
        self._taken.add(place)
        _write(self._runs[place], folder, self.path)
        return True

    def told(self) -> Iterator[str]:
        """Yield what became of the file, in lines."""
        yield f"{len(self._taken)} of the {len(self._runs)} runs of {self.path} were taken from there"
        yield from (f"{self.path.name}: {note}" for note in self.notes)


def _settings(config: Config) -> str:
    """All settings that change the numbers of a run, those of the machine apart, as one text."""
    keys = (key for key in keys_where("changes_numbers") if key not in _OF_MACHINE)
    return json.dumps({key: get(config, key) for key in keys}, default=str, sort_keys=True)


@cache
def _here(data_dir: str, init_from: str | None) -> Mapping[str, Any]:
    """The facts that environment.json of a run here records of that text and those first weights."""
    config = Config()
    config.model.init_from = init_from
    return {"corpus": load_corpus(Path(data_dir), 0).meta, **start_facts(config)}


def _write(run: Run, folder: Path, source: Path) -> None:
    """Write a run of a results file as the folder that it was, as far as the file has it; the summary, which says that
    nothing is left to do, last.
    """
    records = {int(step): {"step": int(step), **look} for step, look in run.looks.items()}
    for record in run.metrics:
        known = {name: value for name, value in record.items() if value is not None}
        step = int(known["step"] or 0)
        records[step] = {**records.get(step, {}), **known, "step": step}
    folder.mkdir(parents=True)
    write_text(folder / "config.yaml", yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True))
    write_json(folder / "environment.json", dict(run.environment))
    write_text(folder / "metrics.jsonl", "".join(f"{json.dumps(records[step])}\n" for step in sorted(records)))
    write_json(folder / "summary.json", {**run.summary, "seed": run.seed, "taken_from": str(source)})
