"""Settings that exclude each other, as tables: a setting, whether it can't be used
beside the others, and why.

No setting is dropped silently: the error names the flag that makes the settings agree.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

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
    ON_FLOATS,
    OPTION_NAMES,
    OPTIONS,
    OWN_OPTIMIZERS,
    PEER_WEIGHTS,
    PEERS,
    RIEMANNIAN,
    WITHOUT_FORMATS,
    Config,
)
from nanogpt_bench.system.errors import BenchError

#: a setting, whether it is refused if it is given, and the error's text after
#: `KEY: VALUE`. After a semicolon the text says what to do; to a text without a
#: semicolon the flag is added that takes the setting away
Conflict = tuple[str, bool, str]

#: the weights, in words, under a storage that takes no format of the library
_STORED = {"float32": "floats", "peer": "another package's"}
#: settings that can't be used under `task: classify`, and why
_NOT_CLASSIFY = {
    "model.pretrained": "which brings a head for the next token",
    "model.tie_weights": "whose lm_head has another size than the embedding",
    "data.train_tokens": "which trains on documents: prepare --limit-tokens makes fewer",
    "eval.also": "whose labels another text does not have",
    "train.parallel": "whose losses are per document",
}


def refuse_new_meanings(
    file: Mapping[str, Any], merged: Mapping[str, Any], said: Mapping[str, Any]
) -> None:
    """Refuse settings of a file whose meaning the command line's settings change.

    A learning rate is in the unit of its optimizer, and formats of single layers win
    over one for all layers.
    """
    before, now = optimizer_of(file), optimizer_of(merged)
    for key in keys_where("is_rate"):
        if key not in said and file.get(key) is not None and unit(before) != unit(now):
            raise BenchError(
                f"{key}: {file[key]!r} is the file's for {before}, and {now} has another unit "
                f"({unit(now)}); add {without(key)} for its own, or give --{key}"
            )
    formats = file.get("model.formats")
    if said.get("model.format") is not None and formats and "model.formats" not in said:
        raise BenchError(
            f"model.formats: {formats!r} of the file stays beside --model.format "
            f"{said['model.format']}; add {without('model.formats')}"
        )


def refuse_disagreement(config: Config, rule: Rule) -> None:
    """Refuse a setting that contradicts the rule: the run would have the wrong name."""
    means = meaning(rule)
    for key, given in contradicting(lambda key: get(config, key), means).items():
        asked = means | {key: given}
        named = [name for name, other in RULES.items() if meaning(other) == asked]
        one_by_one = " ".join(
            f"--{key} {value}" for key, value in asked.items() if value is not None
        )
        remedy = f"--rule {named[0]}" if named else f"--rule null {one_by_one}"
        raise BenchError(
            f"{key}: {given!r} contradicts rule {config.rule!r}, which means {means[key]!r}; add "
            f"{without(key)}, or give {remedy}"
        )


def refuse_as_given(config: Config) -> None:
    """Refuse settings that mean nothing under the task, before null settings are filled
    in.
    """
    classify = config.task == "classify"
    _refuse(
        config,
        (
            (k, classify, f"can't be used with task 'classify', {why}")
            for k, why in _NOT_CLASSIFY.items()
        ),
    )


def refuse_conflicts(config: Config) -> None:
    """Refuse a setting of a filled-in configuration that can't be used beside the
    others or would be ignored.
    """
    for table in TABLES:
        _refuse(config, table(config))


def _refuse(config: Config, rows: Iterable[Conflict]) -> None:
    for key, refused, why in rows:
        value = get(config, key)
        if refused and value is not None and value is not False and value not in ("none", [], {}):
            away = (
                f"--{key} false" if value is True else without(key)
            )  # null may mean true, by the model's size
            raise BenchError(f"{key}: {value!r} {why}" + ("" if ";" in why else f"; add {away}"))


def without(key: str) -> str:
    """Return the flag that takes a setting away.

    >>> without("optimizer.lr"), without("shadow.enabled"), without("model.formats")
    ('--optimizer.lr null', '--shadow.enabled false', '--model.formats {}')
    """
    setting = FIELDS[key]
    return f"--{key} {'null' if setting.optional else str(setting.default).lower()}"


def _storages(config: Config) -> Iterator[Conflict]:
    """Settings that mean something under some storages only."""
    codes = (
        config.rule is not None
        and config.model.products is not None
        and config.model.storage == "grid"
    )
    yield (
        "model.storage",
        codes,
        f"can't be used with rule {config.rule!r}; give fp8, whose codes it multiplies",
    )
    for key in keys_where("storages"):
        storages, own = FIELDS[key].facts["storages"], config.model.storage
        yield key, own not in storages, f"needs model.storage {_either(storages)}, not {own!r}"


def _options(config: Config) -> Iterator[Conflict]:
    """Options that the optimizer would ignore."""
    name = config.optimizer.name
    for option in OPTION_NAMES:
        takers = [taker for taker, options in OPTIONS.items() if option in options]
        why = f"is not an option of {name}, but of {', '.join(takers)}"
        yield f"optimizer.{option}", name not in takers, why


def _storage(config: Config) -> Iterator[Conflict]:
    model, own = config.model, config.model.storage
    floats, impure = own in WITHOUT_FORMATS, config.train.precision == "bf16-pure"
    by, stored = (
        f"rule {config.rule!r}" if config.rule else f"storage {own}",
        _STORED.get(own or "", ""),
    )
    tied = bool(model.tie_weights and model.formats)
    yield "model.tied", not tied, "needs model.tie_weights and a format"
    rules = ", ".join(name for name, rule in RULES.items() if rule.storage not in WITHOUT_FORMATS)
    others = f"add --model.format null --model.formats {{}}, or give another --rule: {rules}"
    yield "model.formats", floats, f"can't be used with {by}, whose weights are {stored}; {others}"
    yield "model.granularity", floats, f"means nothing under {by}, whose weights are {stored}"
    for key in ("rule", "model.storage"):
        why = "needs a format for the weights; give --model.format E4M3 or model.formats"
        yield key, not floats and not model.formats, why
    why = f"can't be used with model.storage {own!r}; allowed: float32, bf16-mixed"
    yield "train.precision", own != "float32" and impure, why
    yield "model.torchao_float8", own != "float32", f"can't be used with model.storage {own!r}"
    yield "model.torchao_float8", impure, "can't be used with train.precision 'bf16-pure'"


def _peer(config: Config) -> Iterator[Conflict]:
    """Settings that another package's weights or optimizers exclude."""
    own, peer, name = config.model.storage, config.model.peer, config.optimizer.name or ""
    yield "model.peer", own != "peer", f"needs model.storage peer, not {own!r}"
    yield (
        "model.storage",
        own == "peer" and not peer,
        f"needs model.peer {_either([*PEER_WEIGHTS])}",
    )
    steppers = PEER_WEIGHTS.get(peer or "", ())
    why = f"can't step the weights of model.peer {peer!r}; allowed: {', '.join(steppers)}"
    yield "optimizer.name", bool(steppers) and name not in steppers, why
    why = f"steps SDNQ's own weights; it can't be used with model.storage {own!r}"
    yield "optimizer.name", not steppers and name.startswith("sdnq"), why
    for key in ("model.tie_weights", "model.pretrained", "model.constraint", "shadow.enabled"):
        yield key, own == "peer", f"can't be used with model.peer {peer!r}"
    yield "runtime.compile", own == "peer", f"can't be used with model.peer {peer!r}"
    mixed = peer == "torchao-int8" and config.train.precision != "float32"
    yield (
        "train.precision",
        mixed,
        f"can't be used with model.peer {peer!r}, of one dtype in products; give float32",
    )


def _optimizer(config: Config) -> Iterator[Conflict]:
    optimizer, name, own = config.optimizer, config.optimizer.name, config.model.storage
    on_floats = (*ON_FLOATS, *(RIEMANNIAN if config.model.constraint else ()))
    needs = own not in MANIFOLDS and name in OWN_OPTIMIZERS and name not in on_floats
    allowed = f"allowed with {own!r}: adamw, sgd, {', '.join(ON_FLOATS)}"
    yield (
        "optimizer.name",
        needs,
        f"needs model.storage {_either(MANIFOLDS)}, not {own!r}; {allowed}",
    )
    why = f"steps float weights; it can't be used with storage {own!r}"
    yield "optimizer.name", name in PEERS and own in MANIFOLDS, why
    kahan = name == "optimi_adamw" and config.train.precision != "bf16-pure"
    yield "optimizer.name", kahan, "sums up bfloat16 weights; give train.precision bf16-pure"
    why = f"needs model.storage {_either(MANIFOLDS)}, not {own!r}, or optimizer.name {_either(ON_FLOATS)}"
    yield "optimizer.moments", not has_moments(own, name), why
    why = f"means nothing with storage {own!r}, whose weights have no stiffness; give 0"
    yield (
        "optimizer.stiffness",
        own not in MANIFOLDS and name in ON_FLOATS and bool(optimizer.stiffness),
        why,
    )
    nowhere = optimizer.stiffness_end is None
    yield (
        "optimizer.stiffness_schedule",
        nowhere,
        "needs optimizer.stiffness_end, the value it leads to",
    )
    why = "can't be used with task 'classify', whose labels are not drawn from a softmax; give another rule"
    yield "optimizer.name", config.task == "classify" and name == "fisher", why


def _watching(config: Config) -> Iterator[Conflict]:
    watched = config.monitor.watch
    followed = TREND in watched
    why = f"needs {TREND!r} in monitor.watch; add --monitor.watch {','.join([*watched, TREND])}"
    for reason in ("divergence", "plateau"):
        if reason in config.train.stop_on and not followed:
            raise BenchError(f"train.stop_on: {reason!r} {why}")
    yield "alerts.baseline", not followed, why


def _pretrained(config: Config) -> Iterator[Conflict]:
    """Settings that need the GPT's own modules, or a model of transformers."""
    given = config.model.pretrained is not None
    for key in ("shadow.enabled", "runtime.compile", "model.torchao_float8", "model.dropout"):
        yield key, given and get(config, key) != 0, "can't be used with model.pretrained"
    yield "train.recompute", not given, "needs model.pretrained; the GPT here keeps its activations"


def _in_backward(config: Config) -> Iterator[Conflict]:
    """Settings that need all gradients at once."""
    train, name, own = config.train, config.optimizer.name, config.model.storage
    at_once = name == "fisher" or not (own in MANIFOLDS or name in ON_FLOATS)
    why = f"needs an optimizer of the library that steps weights one by one, not {name!r} with model.storage {own!r}"
    yield "train.step_in_backward", at_once, why
    within, several = train.step_in_backward, train.accumulation > 1
    yield (
        "shadow.enabled",
        within and config.shadow.enabled,
        "can't be used with train.step_in_backward",
    )
    optimizer, compiled = config.optimizer, config.runtime.compile
    why = (
        "with train.step_in_backward needs optimizer.clip_by previous (by the norm of the step "
        "before, one backward pass) or exact (two backward passes); or give 0"
    )
    asked = within and not several and optimizer.grad_clip > 0
    yield "optimizer.grad_clip", asked and optimizer.clip_by is None, why
    why = "needs train.step_in_backward, optimizer.grad_clip above 0 and train.accumulation 1"
    yield "optimizer.clip_by", optimizer.clip_by is not None and not asked, why
    why = "can't be used with runtime.compile, whose graphs take one backward pass; give optimizer.grad_clip 0"
    yield "optimizer.clip_by", optimizer.clip_by is not None and compiled, why


def _parallel(config: Config) -> Iterator[Conflict]:
    """Settings that need one process: they compare or measure gradients, or take whole
    matrices.
    """
    for key in ("shadow.enabled", "train.step_in_backward", "model.constraint", "model.peer"):
        yield (
            "train.parallel",
            bool(get(config, key)),
            f"can't be used with {key}; add {without(key)}",
        )
    fisher = config.optimizer.name == "fisher"
    yield "train.parallel", fisher, "can't be used with optimizer.name 'fisher'"


def _constraint(config: Config) -> Iterator[Conflict]:
    """Settings that geoopt's manifolds exclude; and two rates, or decay, where no
    weight is stepped by ULPs.
    """
    model, optimizer, given = config.model, config.optimizer, config.model.constraint is not None
    yield "optimizer.constrained_lr", not given, "needs model.constraint stiefel or sphere"
    called, name = f"model.constraint {model.constraint!r}", optimizer.name
    why = f"can't keep weights on a manifold ({called}); allowed: {', '.join(RIEMANNIAN)}"
    yield "optimizer.name", given and name not in RIEMANNIAN, why
    impure = config.train.precision == "bf16-pure"
    for key, beside in (
        ("model.pretrained", True),
        ("model.torchao_float8", True),
        ("train.precision", impure),
    ):
        yield key, given and beside, f"can't be used with {called}"
    yield (
        "model.n_embd",
        given and model.n_embd == 1,
        f"leaves nothing to turn under {called}; give 2 or more",
    )
    no_ulps, called = given and model.storage not in MANIFOLDS, f"model.storage {model.storage!r}"
    rates = f"and optimizer.float_lr {optimizer.float_lr} are two rates for the same weights"
    why = f"{rates}: none is stepped by ULPs with {called}; give one of them"
    yield "optimizer.lr", no_ulps and optimizer.lr != optimizer.float_lr, why
    why = f"is for weights that {name} steps by ULPs: there are none with {called}"
    yield "optimizer.weight_decay", no_ulps and bool(optimizer.weight_decay), why


def _either(names: Sequence[str]) -> str:
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


TABLES = (
    *(_storages, _options, _storage, _peer, _optimizer),
    *(_watching, _pretrained, _in_backward, _parallel, _constraint),
)
