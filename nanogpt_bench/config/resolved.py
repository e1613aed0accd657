"""A resolved configuration: with every key filled in that has a value in the run, and its formats read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanogpt_bench.config.schema import Config

if TYPE_CHECKING:
    from fp8manifold import LayerSpec
    from nanogpt_bench.model.gpt import GPTShape


class Resolved(Config):
    """What a run is made from; `step.resolve.resolve` alone makes it, once, and nothing in it is left to resolve.

    Its keys are those of `Config`: written down, they are a configuration that resolves to the same.
    """

    #: linear layer -> what is quantised in it; `model.formats` is how that is written down
    layers: Mapping[str, LayerSpec]
    #: shape of the model that a run began with whose `model.init_from` is gone since
    begun: GPTShape | None

    def __init__(self, *_: Any, **__: Any) -> None:
        """Refuse: `dataclasses.replace` would leave out what was resolved, and keep what no longer holds.

        Raises:
            TypeError: always; change the configuration that it was resolved from, and resolve that.
        """
        raise TypeError("a Resolved comes from resolve() alone; change the Config before, and resolve it again")

    @classmethod
    def filling(cls, config: Config, begun: GPTShape | None) -> Resolved:
        """Return a copy of a configuration, to be filled in."""
        made = cls.__new__(cls)
        vars(made).update({name: _copied(section) for name, section in vars(config).items()})
        made.layers, made.begun = {}, begun
        return made


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        made = copy.copy(value)
        held = {name: _copied(item) for name, item in vars(value).items() if isinstance(item, dict | list)}
        vars(made).update(held)
        return made
    return value
