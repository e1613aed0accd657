"""Filling in what a configuration leaves null, and refusing combinations that make no
sense.
"""

from pathlib import Path
from typing import Any

from nanogpt_bench.config.conflicts import refuse_as_given, refuse_conflicts, refuse_disagreement
from nanogpt_bench.config.keys import keys_where
from nanogpt_bench.config.rules import RULES, Rule, check_available, unit
from nanogpt_bench.config.schema import (
    MANIFOLDS,
    OPTIONS,
    OWN_OPTIMIZERS,
    ROUNDED,
    Config,
    ModelConfig,
)
from nanogpt_bench.config.settings import Resolved, load_config
from nanogpt_bench.model.gpt import SIZES, GPTShape
from nanogpt_bench.setup.formats import fill_formats, format_name, read_layers
from nanogpt_bench.setup.surgery import check_constrained_layers, fill_constraint, fill_rates
from nanogpt_bench.system.errors import BenchError

#: defaults of a run without a rule
_NO_RULE = Rule(storage="float32", optimizer="adamw", lr=1e-3)


def resolve(config: Config, start: GPTShape | None = None) -> Resolved:
    """Return the configuration with its null keys filled in: from the rule, the model's
    size, formats and defaults.

    `start` is the shape of the model of `model.init_from`, given where that checkpoint
    is gone.

    Raises:
        TypeError: `config` is resolved already.
    """
    if isinstance(config, Resolved):
        raise TypeError("a resolved configuration can't be resolved again")
    config = Resolved.model_construct(
        **dict(config.model_copy(deep=True)), layers={}, initial_shape=start
    )
    if config.rule is not None:
        check_available(config.rule)
    preset = RULES[config.rule] if config.rule is not None else _NO_RULE
    refuse_as_given(config)
    if config.task == "classify":
        config.model.tie_weights = False
    _fill_sizes(config.model, start)
    formats = fill_formats(config.model)
    _read_format(config.model, "embeddings", "model.embeddings")
    if config.model.pretrained and config.model.tie_weights and formats:
        _fill(config.model, tied="leave")
    fill_constraint(config)
    _fill_rule(config, preset)
    stored = False
    if config.model.pretrained:
        from nanogpt_bench.setup.pretrained import fill_stored, stored_layers

        stored = fill_stored(config.model)
    refuse_conflicts(config)
    for key in ("activation_format", "gradient_format"):  # formats of monitors
        _read_format(config.monitor, key, f"monitor.{key}")
    if stored:
        config.layers = stored_layers(config.model)
    elif formats:
        config.layers = dict(read_layers(config.model, formats))
    check_constrained_layers(config)
    return config


def resolve_for(config: Config, run_dir: Path, *, resume: bool) -> Resolved:
    """Return a configuration resolved for the run in `run_dir`; a resumed one starts
    from the weights it began with.
    """
    if isinstance(config, Resolved):
        return config
    path = run_dir / "config.yaml"
    if not resume or not config.model.init_from or not path.is_file():
        return resolve(config)
    from nanogpt_bench.setup.start import as_begun

    return resolve(*as_begun(config, load_config(path), run_dir))


def _fill(section: Any, **values: Any) -> None:
    for name, value in values.items():
        if getattr(section, name) is None:
            setattr(section, name, value)


def _fill_sizes(model: ModelConfig, start: GPTShape | None) -> None:
    if model.pretrained:
        shape = _own_shape(model)
    elif model.init_from:
        shape = _checkpoint_shape(model, start)
    else:
        _fill(model, size="0.8M")
        shape = SIZES[model.size or ""]
    _fill(model, **{name: getattr(shape, name) for name in _SHAPED})
    assert model.n_embd is not None
    assert model.n_head is not None
    if model.n_embd % model.n_head:
        raise BenchError(
            f"model.n_embd: {model.n_embd} is not a multiple of model.n_head {model.n_head}; give "
            f"a multiple of {model.n_head}, such as "
            f"{-(-model.n_embd // model.n_head) * model.n_head}"
        )


#: settings that a named size or a checkpoint fills in
_SHAPED = ("n_layer", "n_head", "n_embd", "block_size", "bias", "tie_weights", "gelu")


def _checkpoint_shape(model: ModelConfig, start: GPTShape | None) -> GPTShape:
    """Return the shape of the checkpoint to start from; refuse settings of another
    shape.
    """
    from nanogpt_bench.setup.start import pinned, start_shape

    assert model.init_from is not None
    model.init_from = pinned(model.init_from)
    shape = start or start_shape(model.init_from)
    _check_named_size(model, shape)
    _check_shape(model, shape, f"the checkpoint {model.init_from!r}")
    if model.tie_weights and not shape.tie_weights:
        raise BenchError(
            f"model.tie_weights: the checkpoint {model.init_from!r} has an lm_head of its own; "
            f"give false"
        )
    return shape


def _own_shape(model: ModelConfig) -> GPTShape:
    """Return the shape of a pretrained model; refuse settings of another shape."""
    for name in ("init_from", "size"):
        if getattr(model, name) is not None:
            raise BenchError(
                f"model.{name}: {getattr(model, name)!r} can't be used with model.pretrained; add "
                f"--model.{name} null"
            )
    from nanogpt_bench.setup.pretrained import outlined_shape

    shape = outlined_shape(model.pretrained or "")
    _fill(model, block_size=min(256, shape.block_size))
    _check_shape(model, shape, f"{model.pretrained!r}")
    if model.tie_weights not in (None, shape.tie_weights):
        raise BenchError(
            f"model.tie_weights: {model.pretrained!r} has {shape.tie_weights}; model.tied says "
            f"what formats do"
        )
    return shape


def _check_shape(model: ModelConfig, shape: GPTShape, called: str) -> None:
    for name in ("n_layer", "n_head", "n_embd", "bias", "gelu"):
        given, own = getattr(model, name), getattr(shape, name)
        if given not in (None, own):
            raise BenchError(f"model.{name}: {given!r} is not that of {called}: {own!r}")
    if model.block_size is not None and model.block_size > shape.block_size:
        raise BenchError(
            f"model.block_size: {model.block_size} exceeds the {shape.block_size} positions of "
            f"{called}"
        )


def _check_named_size(model: ModelConfig, shape: GPTShape) -> None:
    """Refuse a `model.size` that is not the checkpoint's; one that is gets dropped."""
    named = SIZES[model.size] if model.size else shape
    for name in ("n_layer", "n_head", "n_embd"):
        if getattr(model, name) is None and getattr(named, name) != getattr(shape, name):
            raise BenchError(
                f"model.size: {model.size!r} can't be used with model.init_from "
                f"{model.init_from!r}, "
                "whose checkpoint has a size of its own; add --model.size null"
            )
    model.size = None


def _fill_rule(config: Config, preset: Rule) -> None:
    optimizer = config.optimizer
    if config.rule:
        refuse_disagreement(config, preset)
    _fill(config.model, storage=preset.storage if config.rule else _default_storage(config))
    if config.model.products == "decoded":
        config.model.products = None
    _fill(config.model, torchao_float8=preset.torchao_float8, products=preset.products)
    if config.model.storage == "peer":
        _fill(config.model, peer=preset.peer)
    one_dtype = config.model.peer == "torchao-int8"  # its products take operands of one dtype
    _fill(config.train, precision="float32" if one_dtype else preset.precision)
    _fill(optimizer, name=preset.optimizer)
    if config.model.storage in ROUNDED:
        _fill(optimizer, writeback=preset.writeback or "stochastic")
    if config.model.storage in MANIFOLDS or preset.moments:
        _fill(optimizer, moments=preset.moments or "float32")
    _fill(optimizer, stiffness=preset.stiffness, stiffness_end=preset.stiffness_end)
    options = OPTIONS[optimizer.name or ""]
    rates = keys_where("is_rate")
    fill_rates(config)
    _fill(
        optimizer,
        **{name: value for name, value in options.items() if f"optimizer.{name}" not in rates},
    )
    if (
        config.model.pretrained
        and "float_lr" in options
        and unit(optimizer.name or "") == unit("adamw")
    ):
        _fill(
            optimizer, float_lr=optimizer.lr
        )  # one rate for all, not that of embeddings which are learnt from nothing
    if (
        name := rule_name(config)
    ) in RULES:  # also where the settings of a rule were given one by one
        _fill(optimizer, lr=RULES[name].lr, float_lr=RULES[name].float_lr)
    _fill(optimizer, **options)


def _default_storage(config: Config) -> str:
    """Return the storage of a run without a rule, from its formats and its optimizer."""
    if config.model.peer:
        return "peer"
    if not config.model.formats:
        return "float32"
    return "fp8" if config.optimizer.name in OWN_OPTIMIZERS else "master"


def _read_format(section: Any, name: str, key: str) -> None:
    """Give a format that is not of linear layers its canonical name; "none" becomes
    None.
    """
    if getattr(section, name) is not None:
        read = format_name(getattr(section, name), key)
        setattr(section, name, None if read == "none" else read)


def rule_name(config: Config) -> str:
    """Return the rule of a resolved configuration: the one it names, one with the same
    settings, or "custom".
    """
    return config.rule or next(
        (name for name, entry in RULES.items() if _follows(config, entry)), "custom"
    )


def _follows(config: Config, entry: Rule) -> bool:
    optimizer, storage = config.optimizer, config.model.storage
    return (
        (storage == entry.storage or {storage, entry.storage} <= set(ROUNDED))
        and optimizer.name == entry.optimizer
        and (
            entry.storage != "float32" or config.train.precision == entry.precision
        )  # other rules allow any precision
        and config.model.torchao_float8 == entry.torchao_float8
        and config.model.products == entry.products
        and (optimizer.writeback, optimizer.writeback_end) == (entry.writeback, None)
        and (optimizer.moments or "float32") == (entry.moments or "float32")
        and optimizer.stiffness == entry.stiffness
        and optimizer.stiffness_end == entry.stiffness_end
        and (optimizer.stiffness_schedule or "linear") == "linear"
    )
