"""The floors of rounding that a run in floats has recorded, by kind of layer and format."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanogpt_bench.monitors.floor import FLOOR
from nanogpt_bench.runs.load import Run

#: the name of the line of sums over all kinds
ALL_LAYERS = "all layers"


@dataclass(frozen=True)
class FloorMap:
    """The floors of one run in nats: `floors[kind][format]`, sums under `ALL_LAYERS`."""

    floors: Mapping[str, Mapping[str, float]]

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats, from the lowest floor of all layers to the highest."""
        sums = self.floors[ALL_LAYERS]
        return tuple(sorted(sums, key=lambda fmt: sums[fmt]))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of layers in the order of the run, then `ALL_LAYERS`."""
        names = [kind for kind in self.floors if kind != ALL_LAYERS]
        return (*names, ALL_LAYERS)

    def content(self) -> dict[str, Any]:
        """Return the map for a file, as sensitivity.json has its gaps."""
        rows = []
        for kind in self.kinds:
            rows.append([self.floors[kind].get(fmt) for fmt in self.formats])
        return {"kinds": list(self.kinds), "formats": list(self.formats), "floor": rows}

    def table(self) -> str:
        """Return the map as a Markdown table."""
        lines = [
            f"| floor, nats | {' | '.join(self.formats)} |",
            "|---|" + "---:|" * len(self.formats),
        ]
        for kind in self.kinds:
            cells = []
            for fmt in self.formats:
                value = self.floors[kind].get(fmt)
                cells.append("-" if value is None else f"{value:.4f}")
            lines.append(f"| {kind} | {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"


def floor_map(run: Run) -> FloorMap | None:
    """Return the floors at the last step of a run; None if it has recorded none."""
    floors: dict[str, dict[str, float]] = {}
    for name in run.metrics.names:
        fmt, _, kind = name.removeprefix(f"{FLOOR.name}/").partition("/")
        if not name.startswith(f"{FLOOR.name}/"):
            continue
        values = run.metrics.curve(name)[1]
        value = values[-1] if values else None
        if value is not None:
            floors.setdefault(kind or ALL_LAYERS, {})[fmt] = value
    return FloorMap(floors) if ALL_LAYERS in floors else None
