"""The map of gaps: each group of layers alone in each format, and the best mixture by it.

layer_groups            layers of a model -> groups, each with its keys in `model.formats`
GapMap.measure          a `Measurement.row` for each group and format, the cells of the map
GapMap.measure_mixture  the format of each group with which, by the map, the loss rises
                        least within a budget of bytes; measured as a row
"""

import math
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from torch import nn

import fp8manifold as fm
from nanogpt_bench.config.schema import NO_FORMAT
from nanogpt_bench.evaluation.budget import Choice, best_mixture, bytes_within
from nanogpt_bench.evaluation.measurement import EMBEDDINGS, Evaluation, Measurement
from nanogpt_bench.model.causal import is_linear
from nanogpt_bench.system.errors import BenchError, refusals, say

#: a layer's block, and its name inside the block
_IN_BLOCK = re.compile(r"(?P<block>.*?\.\d+)\.(?P<kind>.+)")


class LayerGroups(StrEnum):
    """The groups of layers in a map of gaps, as --sensitivity names them."""

    #: layers of the same name in all blocks
    KINDS = "kinds"
    #: all layers of a block
    BLOCKS = "blocks"
    #: every layer alone
    LAYERS = "layers"


class MapCell(NamedTuple):
    """A cell of a map of gaps: a group of layers quantised alone, and its format."""

    pattern: str
    format: str


def layer_groups(
    measurement: Measurement, grouping: LayerGroups, layer_formats: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Return the groups of a map of gaps, each with its keys in `model.formats`.

    Linear layers and embeddings are in one group each. Those that `layer_formats` names
    are in none.
    """
    layers_by_group: dict[str, list[str]] = {}
    for layer in measurement.layers:
        layers_by_group.setdefault(_group_of(layer, grouping), []).append(layer)
    named_layers = _named_layers(measurement.model, layer_formats)
    groups: dict[str, list[str]] = {}
    for group, layers in layers_by_group.items():
        rest = [layer for layer in layers if layer not in named_layers]
        if rest:
            # The name of a whole group is a pattern that matches all its layers.
            groups[group] = [group] if rest == layers else rest
    if EMBEDDINGS not in layer_formats:
        groups[EMBEDDINGS] = [EMBEDDINGS]
    if not groups:
        raise BenchError(
            "--sensitivity: model.formats sets every layer already; leave one of them out"
        )
    return groups


def _group_of(layer: str, grouping: LayerGroups) -> str:
    match = re.fullmatch(_IN_BLOCK, layer)
    if match is None or grouping == LayerGroups.LAYERS:
        return layer
    return match["block"] if grouping == LayerGroups.BLOCKS else match["kind"]


def _named_layers(model: nn.Module, layer_formats: Mapping[str, Any]) -> Any:
    """Return the linear layers that patterns of formats name."""
    # Which format makes no difference.
    patterns = {pattern: "E4M3" for pattern in layer_formats if pattern != EMBEDDINGS}
    if not patterns:
        return {}
    linear_layers = {name: (1, 1) for name, module in model.named_modules() if is_linear(module)}
    with refusals("model.formats", ValueError):
        return fm.files.check_formats(patterns, linear_layers, "codes")


class GapMap:
    """The map of gaps: each group of layers alone in each format."""

    def __init__(
        self,
        measurement: Measurement,
        floats: Evaluation,
        groups: dict[str, list[str]],
        names: list[str],
        scale: str,
        layer_formats: Mapping[str, Any],
    ) -> None:
        """Plan the map of `groups`, each with its keys in `model.formats`, by `names`.

        `layer_formats` hold in every cell, and `floats` is the row without formats.
        """
        self._measurement = measurement
        self._groups = groups
        self._names = names
        self._scale = scale
        self._layer_formats = layer_formats
        #: the row that gaps are to
        self._reference = floats
        self._cells: dict[MapCell, Evaluation] = {}

    def measure(self, tick: Callable[[str], None]) -> None:
        """Measure all cells."""
        losses = self._measurement.float_losses
        if any(value != NO_FORMAT for value in self._layer_formats.values()):
            # They hold in every cell, so its gap is to a row with these alone.
            self._reference = self._measurement.row(
                "given", self._layer_formats, self._scale, saves=False
            )
            # of that row, the last one that was measured
            losses = self._measurement.losses
        for pattern, keys in self._groups.items():
            for name in self._names:
                evaluation = self._measurement.row(
                    name,
                    {**dict.fromkeys(keys, name), **self._layer_formats},
                    self._scale,
                    saves=False,
                    reference_losses=losses,
                )
                self._cells[MapCell(pattern, name)] = evaluation
                tick(f"{pattern} in {name}: {evaluation.gap:+.4f}")

    def measure_mixture(self, budget: float) -> Evaluation | None:
        """Measure the best mixture of at most `budget` bytes per parameter.

        It is None, and a line says so, if no mixture is so small.
        """
        mixture = self._best_mixture(budget)
        if mixture is None:
            say(
                f"--budget {budget:g}: no mixture is that small; even the formats with the fewest "
                "bits need more"
            )
            return None
        formats: dict[str, Any] = {}
        for pattern, name in mixture.items():
            if name != NO_FORMAT:
                formats |= dict.fromkeys(self._groups[pattern], name)
        return self._measurement.row("mixture", {**formats, **self._layer_formats}, self._scale)

    def _best_mixture(self, budget: float) -> dict[str, str] | None:
        parameters = self._measurement.parameters
        reference_size = _bytes_of(self._reference, parameters)
        choices: dict[str, list[Choice]] = {}
        for cell, evaluation in self._cells.items():
            formats = choices.setdefault(cell.pattern, [Choice(NO_FORMAT, 0.0, 0)])
            gap = evaluation.gap or 0.0
            if math.isfinite(gap):
                size = _bytes_of(evaluation, parameters) - reference_size
                formats.append(Choice(cell.format, gap, size))
        return best_mixture(choices, bytes_within(budget, parameters) - reference_size)

    def content(self) -> dict[str, Any]:
        """Return the content of sensitivity.json."""
        gaps = []
        spreads = []
        for pattern in self._groups:
            evaluations = [self._cells[MapCell(pattern, name)] for name in self._names]
            gaps.append([evaluation.gap for evaluation in evaluations])
            spreads.append([evaluation.gap_se for evaluation in evaluations])
        weights = "in the formats given" if self._reference.formats else "as floats"
        return {
            "patterns": list(self._groups),
            "keys": self._groups,
            "given": dict(self._layer_formats),
            "formats": self._names,
            "operand": "weight",
            "seeds": [0],
            "rule": "",
            "reference": f"the same weights {weights}",
            "reference_loss": self._reference.val_loss,
            "of": self._measurement.name,
            "gap": gaps,
            "spread": spreads,
            "status": [[None] * len(self._names) for _ in self._groups],
        }


def _bytes_of(row: Evaluation, parameters: int) -> int:
    return round((row.bytes_per_parameter or 0.0) * parameters)
