"""What the command line says and what a file says: where the two contradict, the file gives way, and it is told.

A file names a rule, or settings that go with one. Whoever says another rule, optimizer or format means that one, and
can't take a line out of a shipped file. What a file or a command line says against itself is left to `resolve`, which
refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nanogpt_bench.config.keys import FIELDS, keys_where
from nanogpt_bench.config.rules import RULES, Rule, contradicting, meaning, unit
from nanogpt_bench.config.schema import OPTION_NAMES, OPTIONS, RIEMANNIAN, ROUNDED, WITHOUT_FORMATS

Settings = dict[str, Any]
_TIED = (
    "model.tied: leave, since lm_head shares the embedding's weight and stays float with it; --model.tied untie "
    "quantises a copy"
)


def settle(file: Mapping[str, Any], said: Mapping[str, Any], merged: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """Return the settings that hold, and a line for whatever gave way or was decided.

    `file` and `said` are the settings of either by dotted key, `merged` those of both, entries of mappings merged.

    >>> file = {"optimizer.name": "adamw", "optimizer.lr": 0.1}
    >>> kept, lines = settle(file, {"rule": "riemannian"}, {**file, "rule": "riemannian"})
    >>> kept, lines
    ({'rule': 'riemannian'}, ["optimizer.name 'adamw', optimizer.lr 0.1 give way to --rule riemannian"])
    """
    weak = {key: value for key, value in file.items() if _says(value) and key not in said}
    if has_format(said):
        weak = {key: value for key, value in weak.items() if key not in ("model.format", "model.formats")}
    kept = _without_rule(weak, said, dict(merged))
    for contradicted in (_by_meaning, _options):  # in this order: which options there are, the optimizer says
        out = set(contradicted(file, said, kept))
        kept = {key: value for key, value in kept.items() if key not in out or key not in weak}
    gone = {key: value for key, value in weak.items() if key not in kept}
    lines = [_gave_way(gone, said)] if gone else []
    if _reaches_tied_head(weak, said, kept):
        kept["model.tied"] = "leave"
        lines.append(_TIED)
    return kept, lines


def _says(value: Any) -> bool:
    return value is not None and value is not False and value != {}


def _rule(settings: Mapping[str, Any]) -> Rule | None:
    name = settings.get("rule")
    return RULES.get(name) if isinstance(name, str) else None


def _without_rule(weak: Settings, said: Mapping[str, Any], kept: Settings) -> Settings:
    """Put what a file's rule implies in the rule's place where a part of it was said otherwise."""
    rule = _rule(weak)
    if rule is None:
        return kept
    means = meaning(rule)
    if rule.storage in WITHOUT_FORMATS and has_format(said):  # which leaves nothing to do for the rule's own weights
        return {key: value for key, value in kept.items() if key != "rule"}
    if not contradicting(said.get, means):
        return kept
    implied = {key: value for key, value in means.items() if value is not None}
    return implied | {key: value for key, value in kept.items() if key != "rule" and value is not None}


def _by_meaning(file: Mapping[str, Any], said: Mapping[str, Any], kept: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings that can't stand beside what was said."""
    rule = _rule(said)
    if rule is not None:
        means = meaning(rule) | _exponents(rule)
        yield from contradicting(file.get, means)
    if has_format(said) or (rule is not None and rule.storage != "peer"):
        yield "model.peer"
    if _keeps_floats(rule, said, kept):
        yield from keys_where("of_formats")
    elif rule is not None or has_format(said):
        yield "model.torchao_float8"
        yield from ("train.precision",) if kept.get("train.precision") == "bf16-pure" else ()
        one_byte = rule is not None and rule.storage in ROUNDED
        yield from ("shadow.of",) if one_byte and kept.get("shadow.of") == "master" else ()
    if said.get("model.constraint") is not None and _rule(kept) is None:  # nothing is stepped by ULPs, or decays
        yield "optimizer.weight_decay"
    if said.get("model.init_from") is not None:
        yield "model.size"
    if said.get("model.tie_weights") is False:
        yield "model.tied"


def _keeps_floats(rule: Rule | None, said: Mapping[str, Any], kept: Mapping[str, Any]) -> bool:
    """Whether it was said that weights are floats: by a rule, or by formats that are none."""
    if rule is not None:
        return rule.storage in WITHOUT_FORMATS
    return any(key in said for key in ("model.format", "model.formats")) and not has_format(kept)


def _exponents(rule: Rule) -> Settings:
    if rule.stiffness is None:
        return {}
    return {"optimizer.stiffness": rule.stiffness, "optimizer.stiffness_end": rule.stiffness_end}


def _options(file: Mapping[str, Any], _: Mapping[str, Any], kept: Mapping[str, Any]) -> Iterator[str]:
    """Yield what another optimizer than the file's does not take, and rates in another one's unit."""
    before, now = optimizer_of(file), optimizer_of(kept)
    if before == now or before not in OPTIONS or now not in OPTIONS:
        return
    yield from (f"optimizer.{option}" for option in OPTION_NAMES if option not in OPTIONS[now])
    yield from (key for key in keys_where("optimizers") if now not in FIELDS[key].facts["optimizers"])
    if unit(before) != unit(now):
        yield from keys_where("is_rate")


def optimizer_of(settings: Mapping[str, Any]) -> str:
    """Return the optimizer that settings call for, by its name or by that of a rule, or by a constraint.

    >>> optimizer_of({"rule": "madam"}), optimizer_of({})
    ('madam', 'adamw')
    """
    rule = _rule(settings)
    called_for = RIEMANNIAN[0] if settings.get("model.constraint") else "adamw"
    return str(settings.get("optimizer.name") or (rule.optimizer if rule else called_for))


def _reaches_tied_head(weak: Mapping[str, Any], said: Mapping[str, Any], kept: Mapping[str, Any]) -> bool:
    """Whether a format said for all layers reaches an lm_head that a file ties, and nobody says what becomes of it."""
    patterns = _patterns(kept)
    undecided = weak.get("model.tie_weights") and kept.get("model.tied") is None and "lm_head" not in patterns
    return bool(undecided and has_format(said) and _is_format(patterns.get("*")))


def _patterns(settings: Mapping[str, Any]) -> Settings:
    formats, short = settings.get("model.formats"), settings.get("model.format")
    patterns = dict(formats) if isinstance(formats, Mapping) else {}
    return patterns if short is None else {**patterns, "*": short}


def _is_format(value: Any) -> bool:
    return value is not None and str(value).lower() != "none"


def has_format(settings: Mapping[str, Any]) -> bool:
    """Whether settings give a layer a format.

    >>> has_format({"model.format": "none"}), has_format({"model.formats": {"attn": "E4M3"}})
    (False, True)
    """
    return any(map(_is_format, _patterns(settings).values()))


def _gave_way(gone: Mapping[str, Any], said: Mapping[str, Any]) -> str:
    """The line that tells what of the file does not hold, and by what."""
    what = ", ".join(f"{key} {value!r}" for key, value in gone.items())
    reasons = [key for key in said if key == "rule" or key.startswith(("model.", "optimizer.", "train.precision"))]
    by = " ".join(f"--{key} {said[key]}" for key in reasons)
    return f"{what} {'give' if len(gone) > 1 else 'gives'} way to {by}"
