"""Settings that exclude each other, as tables.

A function of `CONFLICT_TABLES` yields a `Conflict` for each setting that may be excluded: the
setting, whether it is refused beside the others, and why. No setting is dropped
silently: the error names the flag that makes the settings agree.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nanogpt_bench.config.endings import FailureClass
from nanogpt_bench.config.keys import FIELDS, get, keys_where
from nanogpt_bench.config.metrics import TREND
from nanogpt_bench.config.rules import (
    RULES,
    Rule,
    contradicting,
    has_moments,
    meaning,
    optimizer_of,
    unit,
)
from nanogpt_bench.config.schema import (
    MANIFOLDS,
    NO_FORMAT,
    ON_FLOATS,
    OPTION_NAMES,
    OPTIONS,
    OWN_OPTIMIZERS,
    PEER_WEIGHTS,
    PEERS,
    RIEMANNIAN,
    TORCH_OPTIMIZERS,
    TORCHAO_INT8,
    WITHOUT_FORMATS,
    Config,
    OptimizerName,
    Precision,
    Storage,
    Task,
)
from nanogpt_bench.system.errors import BenchError


class Conflict(NamedTuple):
    """A setting that may exclude others."""

    key: str
    #: whether the setting is refused, if it has a value
    is_refused: bool
    #: the error's text after `KEY: VALUE`. After a semicolon it says what to do. To a
    #: text without a semicolon the flag is added that takes the setting away
    reason: str


#: the weights, in words, under a storage that takes no format of the library
_WEIGHTS_IN_WORDS: dict[str, str] = {Storage.FLOAT32: "floats", Storage.PEER: "another package's"}
#: settings that can't be used under `task: classify`, and why
_NOT_CLASSIFY = {
    "model.pretrained": "since such a model brings a head for the next token",
    "model.tie_weights": "since its lm_head has another size than the embedding",
    "data.train_tokens": "which trains on whole documents (prepare --limit-tokens limits them)",
    "eval.also": "since another text does not have its labels",
    "train.parallel": "since its losses are per document",
}


def refuse_new_meanings(
    file: Mapping[str, Any], merged: Mapping[str, Any], overrides: Mapping[str, Any]
) -> None:
    """Refuse settings of a file whose meaning the command line's settings change.

    A learning rate is in the unit of its optimizer, and formats of single layers win
    over one for all layers. `merged` are the file's settings with the overrides.
    """
    file_optimizer, optimizer = optimizer_of(file), optimizer_of(merged)
    if unit(file_optimizer) != unit(optimizer):
        for key in keys_where("is_rate"):
            if key not in overrides and file.get(key) is not None:
                raise BenchError(
                    f"{key}: {file[key]!r} in the file is a rate of {file_optimizer}, but "
                    f"{optimizer} takes rates in another unit ({unit(optimizer)}); add "
                    f"{without(key)} for its default rate, or give --{key}"
                )
    formats = file.get("model.formats")
    if overrides.get("model.format") is not None and formats and "model.formats" not in overrides:
        raise BenchError(
            f"model.formats: {formats!r} in the file would override --model.format "
            f"{overrides['model.format']}; add {without('model.formats')}"
        )


def refuse_disagreement(config: Config, rule: Rule) -> None:
    """Refuse a setting that contradicts the rule: the run would have the wrong name."""
    rule_settings = meaning(rule)
    # The first one is enough for a message.
    for key, value in contradicting(lambda key: get(config, key), rule_settings).items():
        wanted = rule_settings | {key: value}
        names = [name for name, candidate in RULES.items() if meaning(candidate) == wanted]
        if names:
            remedy = f"--rule {names[0]}"
        else:
            flags = [f"--{name} {word}" for name, word in wanted.items() if word is not None]
            remedy = f"--rule null {' '.join(flags)}"
        raise BenchError(
            f"{key}: {value!r} contradicts rule {config.rule!r}, which sets "
            f"{rule_settings[key]!r}; add {without(key)}, or give {remedy}"
        )


def refuse_as_given(config: Config) -> None:
    """Refuse settings that mean nothing under the task.

    Called before null settings are filled in.
    """
    if config.task == Task.CLASSIFY:
        for key, reason in _NOT_CLASSIFY.items():
            _refuse(config, Conflict(key, True, f"can't be used with task 'classify', {reason}"))


def refuse_conflicts(config: Config) -> None:
    """Refuse settings that exclude others or do nothing, once all are filled in."""
    for table in CONFLICT_TABLES:
        for conflict in table(config):
            _refuse(config, conflict)


def _refuse(config: Config, conflict: Conflict) -> None:
    key, reason = conflict.key, conflict.reason
    value = get(config, key)
    is_off = value is None or value is False or value in (NO_FORMAT, [], {})
    if is_off or not conflict.is_refused:
        return
    if ";" in reason:
        raise BenchError(f"{key}: {value!r} {reason}")
    # null may mean true, by the model's size
    flag = f"--{key} false" if value is True else without(key)
    raise BenchError(f"{key}: {value!r} {reason}; add {flag}")


def without(key: str) -> str:
    """Return the flag that takes a setting away.

    >>> without("optimizer.lr"), without("shadow.enabled"), without("model.formats")
    ('--optimizer.lr null', '--shadow.enabled false', '--model.formats {}')
    """
    setting = FIELDS[key]
    value = "null" if setting.optional else str(setting.default).lower()
    return f"--{key} {value}"


def _storage_facts(config: Config) -> Iterator[Conflict]:
    """Settings that mean something under some storages only."""
    model = config.model
    multiplies_codes = config.rule is not None and model.products is not None
    yield Conflict(
        "model.storage",
        multiplies_codes and model.storage == Storage.GRID,
        f"can't be used with rule {config.rule!r}, which multiplies codes; give codes",
    )
    for key in keys_where("storages"):
        storages = FIELDS[key].facts["storages"]
        yield Conflict(
            key,
            model.storage not in storages,
            f"needs model.storage {_alternatives(storages)}, not {model.storage!r}",
        )


def _options(config: Config) -> Iterator[Conflict]:
    """Options that the optimizer would ignore."""
    name = config.optimizer.name
    for option in OPTION_NAMES:
        optimizers = [optimizer for optimizer, options in OPTIONS.items() if option in options]
        yield Conflict(
            f"optimizer.{option}",
            name not in optimizers,
            f"is not an option of {name}, only of {', '.join(optimizers)}",
        )


def _storage(config: Config) -> Iterator[Conflict]:
    model, storage = config.model, config.model.storage
    has_formats = storage not in WITHOUT_FORMATS
    is_pure = config.train.precision == Precision.BF16_PURE
    cause = f"rule {config.rule!r}" if config.rule else f"storage {storage}"
    weights = _WEIGHTS_IN_WORDS.get(storage or "", "")
    yield Conflict(
        "model.tied",
        not (model.tie_weights and model.formats),
        "needs model.tie_weights and a format",
    )
    rules = [name for name, rule in RULES.items() if rule.storage not in WITHOUT_FORMATS]
    yield Conflict(
        "model.formats",
        not has_formats,
        f"can't be used with {cause}, whose weights are {weights}; add --model.format null "
        f"--model.formats {{}}, or give another --rule: {', '.join(rules)}",
    )
    yield Conflict(
        "model.granularity",
        not has_formats,
        f"has no effect with {cause}, whose weights are {weights}",
    )
    for key in ("rule", "model.storage"):
        yield Conflict(
            key,
            has_formats and not model.formats,
            "needs a format for the weights; give --model.format E4M3 or model.formats",
        )
    yield Conflict(
        "train.precision",
        storage != Storage.FLOAT32 and is_pure,
        f"can't be used with model.storage {storage!r}; allowed: float32, bf16-mixed",
    )
    yield Conflict(
        "model.torchao_float8",
        storage != Storage.FLOAT32,
        f"can't be used with model.storage {storage!r}",
    )
    yield Conflict(
        "model.torchao_float8", is_pure, "can't be used with train.precision 'bf16-pure'"
    )


def _peer(config: Config) -> Iterator[Conflict]:
    """Settings that another package's weights or optimizers exclude."""
    storage, peer, name = config.model.storage, config.model.peer, config.optimizer.name or ""
    is_peer = storage == Storage.PEER
    yield Conflict("model.peer", not is_peer, f"needs model.storage peer, not {storage!r}")
    yield Conflict(
        "model.storage",
        is_peer and not peer,
        f"needs model.peer {_alternatives([*PEER_WEIGHTS])}",
    )
    optimizers = PEER_WEIGHTS.get(peer or "", ())
    yield Conflict(
        "optimizer.name",
        bool(optimizers) and name not in optimizers,
        f"can't step the weights of model.peer {peer!r}; allowed: {', '.join(optimizers)}",
    )
    excluded = (
        "model.tie_weights",
        "model.pretrained",
        "model.constraint",
        "shadow.enabled",
        "runtime.compile",
    )
    for key in excluded:
        yield Conflict(key, is_peer, f"can't be used with model.peer {peer!r}")
    yield Conflict(
        "train.precision",
        peer == TORCHAO_INT8 and config.train.precision != Precision.FLOAT32,
        f"can't be used with model.peer {peer!r}, whose products need one dtype; give float32",
    )


def _optimizer(config: Config) -> Iterator[Conflict]:
    optimizer, name, storage = config.optimizer, config.optimizer.name, config.model.storage
    on_manifolds = storage in MANIFOLDS
    steps_floats = name in ON_FLOATS or (bool(config.model.constraint) and name in RIEMANNIAN)
    yield Conflict(
        "optimizer.name",
        not on_manifolds and name in OWN_OPTIMIZERS and not steps_floats,
        f"needs model.storage {_alternatives(MANIFOLDS)}, not {storage!r}; "
        f"allowed with {storage!r}: {', '.join((*TORCH_OPTIMIZERS, *ON_FLOATS))}",
    )
    yield Conflict(
        "optimizer.name",
        name in PEERS and on_manifolds,
        f"steps float weights; it can't be used with model.storage {storage!r}",
    )
    yield Conflict(
        "optimizer.moments",
        not has_moments(storage, name),
        f"needs model.storage {_alternatives(MANIFOLDS)}, not {storage!r}, or optimizer.name "
        f"{_alternatives(ON_FLOATS)}",
    )
    for key in ("optimizer.stiffness", "optimizer.stiffness_end"):
        yield Conflict(
            key,
            not on_manifolds and name in ON_FLOATS and bool(get(config, key)),
            f"has no effect with model.storage {storage!r}, whose weights have no stiffness; "
            "give 0",
        )
    writebacks = {optimizer.writeback, optimizer.writeback_end or optimizer.writeback}
    yield Conflict(
        "optimizer.draws",
        optimizer.draws == "dither" and writebacks == {"nearest"},
        "has no effect with optimizer.writeback 'nearest', which draws nothing",
    )
    yield Conflict(
        "optimizer.stiffness_schedule",
        optimizer.stiffness_end is None,
        "needs optimizer.stiffness_end, the last value of k",
    )
    yield Conflict(
        "optimizer.name",
        config.task == Task.CLASSIFY and name == OptimizerName.FISHER,
        "can't be used with task 'classify', whose loss has no softmax over labels; give another "
        "rule",
    )


def _watching(config: Config) -> Iterator[Conflict]:
    watched = config.monitor.watch
    is_followed = TREND in watched
    missing = f"needs {TREND!r} in monitor.watch; add --monitor.watch {','.join([*watched, TREND])}"
    for reason in (FailureClass.DIVERGENCE.value, FailureClass.PLATEAU.value):
        if reason in config.train.stop_on and not is_followed:
            # Not a `Conflict`: the message names one word of the list, not the list.
            raise BenchError(f"train.stop_on: {reason!r} {missing}")
    yield Conflict("alerts.baseline", not is_followed, missing)


def _pretrained(config: Config) -> Iterator[Conflict]:
    """Settings that need the GPT's own modules, or a model of transformers."""
    is_pretrained = config.model.pretrained is not None
    for key in ("shadow.enabled", "runtime.compile", "model.torchao_float8", "model.dropout"):
        # A dropout of 0.0 is off, too, which `_refuse` would take for a value.
        is_set = get(config, key) != 0
        yield Conflict(key, is_pretrained and is_set, "can't be used with model.pretrained")
    given_weights = "model.pretrained" if is_pretrained else "model.init_from"
    yield Conflict(
        "model.init_std",
        is_pretrained or config.model.init_from is not None,
        f"can't be used with {given_weights}, whose weights are the initial ones",
    )
    yield Conflict(
        "train.recompute",
        not is_pretrained,
        "needs model.pretrained; the bench's own GPT always stores its activations",
    )


def _in_backward(config: Config) -> Iterator[Conflict]:
    """Settings that need all gradients at once."""
    train, optimizer, storage = config.train, config.optimizer, config.model.storage
    name, in_backward = optimizer.name, train.step_in_backward
    steps_one_by_one = name != OptimizerName.FISHER and (storage in MANIFOLDS or name in ON_FLOATS)
    yield Conflict(
        "train.step_in_backward",
        not steps_one_by_one,
        f"needs an optimizer of the library that steps weights one by one, not {name!r} with "
        f"model.storage {storage!r}",
    )
    yield Conflict(
        "shadow.enabled",
        in_backward and config.shadow.enabled,
        "can't be used with train.step_in_backward",
    )
    yield Conflict(
        "optimizer.noise",
        in_backward,
        "can't be used with train.step_in_backward, which steps one weight at a time",
    )
    yield Conflict(
        "monitor.floor_formats",
        in_backward,
        "can't be used with train.step_in_backward, which keeps no gradients",
    )
    is_clipped = in_backward and train.accumulation == 1 and optimizer.grad_clip > 0
    has_clip_by = optimizer.clip_by is not None
    yield Conflict(
        "optimizer.grad_clip",
        is_clipped and not has_clip_by,
        "with train.step_in_backward needs optimizer.clip_by: previous (clips by the norm of the "
        "step before, one backward pass) or exact (two backward passes); or give 0 for no "
        "clipping",
    )
    yield Conflict(
        "optimizer.clip_by",
        has_clip_by and not is_clipped,
        "needs train.step_in_backward, optimizer.grad_clip above 0 and train.accumulation 1",
    )
    yield Conflict(
        "optimizer.clip_by",
        has_clip_by and config.runtime.compile,
        "can't be used with runtime.compile, whose graphs allow one backward pass; give "
        "optimizer.grad_clip 0",
    )


def _parallel(config: Config) -> Iterator[Conflict]:
    """Settings that need one process.

    They compare or measure gradients, or take whole matrices.
    """
    for key in ("shadow.enabled", "train.step_in_backward", "model.constraint", "model.peer"):
        yield Conflict(
            "train.parallel",
            bool(get(config, key)),
            f"can't be used with {key}; add {without(key)}",
        )
    yield Conflict(
        "train.parallel",
        config.optimizer.name == OptimizerName.FISHER,
        "can't be used with optimizer.name 'fisher'",
    )


def _constraint(config: Config) -> Iterator[Conflict]:
    """Settings that geoopt's manifolds exclude.

    Where no weight is stepped by ULPs, two rates or a decay are refused, too.
    """
    model, optimizer, name = config.model, config.optimizer, config.optimizer.name
    is_constrained = model.constraint is not None
    constraint = f"model.constraint {model.constraint!r}"
    yield Conflict(
        "optimizer.constrained_lr", not is_constrained, "needs model.constraint stiefel or sphere"
    )
    yield Conflict(
        "optimizer.name",
        is_constrained and name not in RIEMANNIAN,
        f"can't keep weights on a manifold ({constraint}); allowed: {', '.join(RIEMANNIAN)}",
    )
    for key in ("model.pretrained", "model.torchao_float8"):
        yield Conflict(key, is_constrained, f"can't be used with {constraint}")
    is_pure = config.train.precision == Precision.BF16_PURE
    yield Conflict(
        "train.precision", is_constrained and is_pure, f"can't be used with {constraint}"
    )
    yield Conflict(
        "model.n_embd",
        is_constrained and model.n_embd == 1,
        f"leaves no direction to move in under {constraint}; give 2 or more",
    )
    no_ulps = is_constrained and model.storage not in MANIFOLDS
    storage = f"model.storage {model.storage!r}"
    yield Conflict(
        "optimizer.lr",
        no_ulps and optimizer.lr != optimizer.float_lr,
        f"and optimizer.float_lr {optimizer.float_lr} are two rates for the same weights: with "
        f"{storage}, no weight is stepped in ULPs; give one of them",
    )
    yield Conflict(
        "optimizer.weight_decay",
        no_ulps and bool(optimizer.weight_decay),
        f"decays weights that {name} steps in ULPs, and with {storage} there are none",
    )


def _alternatives(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} or {names[-1]}"


CONFLICT_TABLES = (
    _storage_facts,
    _options,
    _storage,
    _peer,
    _optimizer,
    _watching,
    _pretrained,
    _in_backward,
    _parallel,
    _constraint,
)
