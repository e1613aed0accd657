"""Filling in what a configuration leaves null, and refusing what makes no sense.

`resolve` fills in, in this order: sizes of the model, formats, constraint, what the
rule means, the codes of a published model. Then the conflicts are refused, and the
layers get their specifications.
"""

import math
from pathlib import Path
from typing import Any

from nanogpt_bench.config.conflicts import refuse_as_given, refuse_conflicts, refuse_disagreement
from nanogpt_bench.config.keys import keys_where
from nanogpt_bench.config.rules import RULES, Rule, check_available, unit
from nanogpt_bench.config.schema import (
    DECODED,
    MANIFOLDS,
    NO_FORMAT,
    OPTIONS,
    OWN_OPTIMIZERS,
    ROUNDED,
    Config,
    ModelConfig,
    OptimizerName,
    Precision,
    Storage,
    Task,
)
from nanogpt_bench.config.settings import Resolved, load_config
from nanogpt_bench.model.gpt import GPT_SIZES, GPTShape
from nanogpt_bench.setup.formats import fill_formats, format_name, read_layers
from nanogpt_bench.setup.surgery import check_constrained_layers, fill_constraint, fill_rates
from nanogpt_bench.system.errors import BenchError

#: defaults of a run without a rule
_NO_RULE = Rule(storage=Storage.FLOAT32.value, optimizer=OptimizerName.ADAMW.value, lr=1e-3)


def resolve(config: Config, start: GPTShape | None = None) -> Resolved:
    """Return the configuration with its null keys filled in.

    Values come from the rule, the model's size, formats and defaults. `start` is the
    shape of the model of `model.init_from`, where that checkpoint is gone.

    Raises:
        TypeError: `config` is resolved already.
    """
    if isinstance(config, Resolved):
        raise TypeError("this configuration is resolved already")
    # Without validation: `config` was checked when it was made.
    config = Resolved.model_construct(
        **dict(config.model_copy(deep=True)), layers={}, initial_shape=start
    )
    if config.rule is not None:
        check_available(config.rule)
    preset = RULES[config.rule] if config.rule is not None else _NO_RULE
    refuse_as_given(config)
    if config.task == Task.CLASSIFY:
        config.model.tie_weights = False
    _fill_sizes(config.model, start)
    formats = fill_formats(config.model)
    _canonical_format(config.model, "embeddings", "model.embeddings")
    if config.model.pretrained and config.model.tie_weights and formats:
        _fill(config.model, tied="leave")
    fill_constraint(config)
    _fill_rule(config, preset)
    is_stored = False
    if config.model.pretrained:
        from nanogpt_bench.setup.pretrained import fill_stored, stored_layers

        is_stored = fill_stored(config.model)
    refuse_conflicts(config)
    _canonical_format(config.monitor, "activation_format", "monitor.activation_format")
    _canonical_format(config.monitor, "gradient_format", "monitor.gradient_format")
    if is_stored:
        config.layers = stored_layers(config.model)
    elif formats:
        config.layers = dict(read_layers(config.model, formats))
    check_constrained_layers(config)
    return config


def resolve_for(config: Config, run_dir: Path, *, resume: bool) -> Resolved:
    """Return a configuration resolved for the run in `run_dir`.

    A resumed run starts from the weights it began with.
    """
    if isinstance(config, Resolved):
        return config
    path = run_dir / "config.yaml"
    if not resume or not config.model.init_from or not path.is_file():
        return resolve(config)
    from nanogpt_bench.setup.start import resumed_settings

    return resolve(*resumed_settings(config, load_config(path), run_dir))


def _fill(section: Any, **values: Any) -> None:
    for name, value in values.items():
        if getattr(section, name) is None:
            setattr(section, name, value)


def _fill_sizes(model: ModelConfig, start: GPTShape | None) -> None:
    if model.pretrained:
        shape = _pretrained_shape(model)
    elif model.init_from:
        shape = _checkpoint_shape(model, start)
    else:
        _fill(model, size="0.8M")
        shape = GPT_SIZES[model.size or ""]
    _fill(model, **{name: getattr(shape, name) for name in _SHAPED})
    width, heads = model.n_embd, model.n_head
    assert width is not None
    assert heads is not None
    if width % heads:
        next_multiple = math.ceil(width / heads) * heads
        raise BenchError(
            f"model.n_embd: {width} is not a multiple of model.n_head {heads}; give a multiple of "
            f"{heads}, such as {next_multiple}"
        )


#: settings that a named size or a checkpoint fills in
_SHAPED = ("n_layer", "n_head", "n_embd", "block_size", "bias", "tie_weights", "gelu")


def _checkpoint_shape(model: ModelConfig, start: GPTShape | None) -> GPTShape:
    """Return the shape of the checkpoint to start from; refuse settings of another.

    `model.init_from` is set to this checkpoint, and `model.size` is dropped.
    """
    from nanogpt_bench.setup.start import newest_checkpoint, start_shape

    assert model.init_from is not None
    model.init_from = newest_checkpoint(model.init_from)
    shape = start or start_shape(model.init_from)
    _check_named_size(model, shape)
    _check_shape(model, shape, f"the checkpoint {model.init_from!r}")
    if model.tie_weights and not shape.tie_weights:
        raise BenchError(
            f"model.tie_weights: the checkpoint {model.init_from!r} has its own lm_head weight; "
            "give false"
        )
    return shape


def _pretrained_shape(model: ModelConfig) -> GPTShape:
    """Return the shape of a pretrained model; refuse settings of another shape.

    A null `model.block_size` is filled in.
    """
    for name in ("init_from", "size"):
        value = getattr(model, name)
        if value is not None:
            raise BenchError(
                f"model.{name}: {value!r} can't be used with model.pretrained; add "
                f"--model.{name} null"
            )
    from nanogpt_bench.setup.pretrained import outlined_shape

    shape = outlined_shape(model.pretrained or "")
    _fill(model, block_size=min(256, shape.block_size))
    _check_shape(model, shape, f"{model.pretrained!r}")
    if model.tie_weights not in (None, shape.tie_weights):
        raise BenchError(
            f"model.tie_weights: {model.tie_weights} contradicts {model.pretrained!r}, which has "
            f"{shape.tie_weights}; leave it out; for formats of a tied lm_head give model.tied"
        )
    return shape


def _check_shape(model: ModelConfig, shape: GPTShape, source: str) -> None:
    for name in ("n_layer", "n_head", "n_embd", "bias", "gelu"):
        value, expected = getattr(model, name), getattr(shape, name)
        if value not in (None, expected):
            raise BenchError(
                f"model.{name}: {value!r} contradicts {source}, which has {expected!r}"
            )
    if model.block_size is not None and model.block_size > shape.block_size:
        raise BenchError(
            f"model.block_size: {model.block_size} is more than the {shape.block_size} positions "
            f"of {source}"
        )


def _check_named_size(model: ModelConfig, shape: GPTShape) -> None:
    """Refuse a `model.size` that is not the checkpoint's.

    The setting is then dropped, since the shape says what it said.
    """
    named = GPT_SIZES[model.size] if model.size else shape
    for name in ("n_layer", "n_head", "n_embd"):
        if getattr(model, name) is None and getattr(named, name) != getattr(shape, name):
            raise BenchError(
                f"model.size: {model.size!r} can't be used with model.init_from "
                f"{model.init_from!r}, whose checkpoint gives the size; add --model.size null"
            )
    model.size = None


def _fill_rule(config: Config, preset: Rule) -> None:
    """Fill in what a rule, or the optimizer, says about weights and steps."""
    model, optimizer = config.model, config.optimizer
    if config.rule:
        refuse_disagreement(config, preset)
    _fill(model, storage=preset.storage if config.rule else _default_storage(config))
    if model.products == DECODED:
        model.products = None
    _fill(model, torchao_float8=preset.torchao_float8, products=preset.products)
    if model.storage == Storage.PEER:
        _fill(model, peer=preset.peer)
    # Products of torchao's int8 weights take operands of one dtype.
    takes_one_dtype = model.peer == "torchao-int8"
    _fill(config.train, precision=Precision.FLOAT32.value if takes_one_dtype else preset.precision)
    _fill(optimizer, name=preset.optimizer)
    if model.storage in ROUNDED:
        _fill(optimizer, writeback=preset.writeback or "stochastic")
    if model.storage in MANIFOLDS or preset.moments:
        _fill(optimizer, moments=preset.moments or "float32")
    _fill(optimizer, stiffness=preset.stiffness, stiffness_end=preset.stiffness_end)
    _fill_options(config)


def _fill_options(config: Config) -> None:
    """Fill in the optimizer's options.

    Learning rates come last: they depend on the rule that the others amount to.
    """
    optimizer = config.optimizer
    name = optimizer.name or ""
    options = OPTIONS[name]
    rates = keys_where("is_rate")
    fill_rates(config)
    for option, value in options.items():
        if f"optimizer.{option}" not in rates:
            _fill(optimizer, **{option: value})
    steps_as_adamw = unit(name) == unit(OptimizerName.ADAMW)
    if config.model.pretrained and "float_lr" in options and steps_as_adamw:
        # One rate for all: embeddings are not learnt from nothing.
        _fill(optimizer, float_lr=optimizer.lr)
    rule = RULES.get(rule_name(config))
    if rule is not None:
        # Also where the settings of a rule were given one by one.
        _fill(optimizer, lr=rule.lr, float_lr=rule.float_lr)
    _fill(optimizer, **options)


def _default_storage(config: Config) -> str:
    """Return the storage of a run without a rule, by formats and optimizer."""
    if config.model.peer:
        return Storage.PEER.value
    if not config.model.formats:
        return Storage.FLOAT32.value
    has_codes = config.optimizer.name in OWN_OPTIMIZERS
    return Storage.CODES.value if has_codes else Storage.MASTER.value


def _canonical_format(section: Any, name: str, key: str) -> None:
    """Give a format its canonical name; "none" becomes None."""
    value = getattr(section, name)
    if value is not None:
        canonical = format_name(value, key)
        setattr(section, name, None if canonical == NO_FORMAT else canonical)


def rule_name(config: Config) -> str:
    """Return the rule of a resolved configuration.

    It is the one that the configuration names, one with the same settings, or "custom".
    """
    if config.rule:
        return config.rule
    matches = (name for name, rule in RULES.items() if _follows(config, rule))
    return next(matches, "custom")


def _follows(config: Config, rule: Rule) -> bool:
    optimizer, storage = config.optimizer, config.model.storage
    # codes and grid hold the same values.
    same_storage = storage == rule.storage or (storage in ROUNDED and rule.storage in ROUNDED)
    # Rules that don't store float32 allow any precision.
    same_precision = rule.storage != Storage.FLOAT32 or config.train.precision == rule.precision
    return (
        same_storage
        and same_precision
        and optimizer.name == rule.optimizer
        and config.model.torchao_float8 == rule.torchao_float8
        and config.model.products == rule.products
        and optimizer.writeback == rule.writeback
        and optimizer.writeback_end is None
        and (optimizer.moments or "float32") == (rule.moments or "float32")
        and optimizer.stiffness == rule.stiffness
        and optimizer.stiffness_end == rule.stiffness_end
        and (optimizer.stiffness_schedule or "linear") == "linear"
    )
