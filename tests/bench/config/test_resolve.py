"""Resolving: rules, named sizes, short forms, and the combinations refused."""

import pytest
from laws import each

from nanogpt_bench.config.rules import RULES, available_rules
from nanogpt_bench.config.schema import MANIFOLDS, OWN_OPTIMIZERS, ROUNDED, WITHOUT_FORMATS
from nanogpt_bench.config.settings import load_config, to_yaml
from nanogpt_bench.setup.resolve import resolve, rule_name


def arguments_of(rule: str) -> list[str]:
    quantised = RULES[rule].storage not in WITHOUT_FORMATS
    return ["--rule", rule, *(["--model.format", "E4M3"] if quantised else [])]


@each("rule", available_rules())
def test_a_rule_fills_in_what_it_stands_for(rule):
    config = resolve(load_config(None, arguments_of(rule)))
    entry = RULES[rule]
    assert config.model.storage == entry.storage
    assert config.optimizer.name == entry.optimizer
    assert config.optimizer.writeback == entry.writeback
    assert config.optimizer.moments == (entry.moments or ("float32" if entry.storage in MANIFOLDS else None))
    assert config.optimizer.lr == entry.lr
    assert config.train.precision == entry.precision
    assert (config.optimizer.stiffness, config.optimizer.stiffness_end) == (entry.stiffness, entry.stiffness_end)


@each("rule", available_rules())
def test_a_resolved_configuration_is_written_down_as_one_that_resolves_to_itself(rule, tmp_path):
    once, path = resolve(load_config(None, arguments_of(rule))), tmp_path / "config.yaml"
    path.write_text(to_yaml(once))
    again = resolve(load_config(path))
    assert again == once
    assert again.layers == once.layers
    with pytest.raises(TypeError, match="can't be resolved again"):
        resolve(once)


@each("rule", available_rules())
def test_the_rule_is_recognised_from_its_settings(rule):
    config = resolve(load_config(None, arguments_of(rule)))
    config.rule = None
    assert rule_name(config) == rule


def test_settings_of_one_s_own_are_called_custom():
    config = load_config(
        None, ["--model.format", "E4M3", "--optimizer.name", "StiffnessAdamW", "--optimizer.stiffness=2"]
    )
    assert rule_name(resolve(config)) == "custom"


@each("storage", ["grid", "fp8"])
def test_a_rule_keeps_its_name_where_one_byte_is_simulated_in_floats(storage):
    config = resolve(load_config(None, [*arguments_of("stiffness"), "--model.storage", storage]))
    assert config.model.storage == storage
    config.rule = None
    assert rule_name(config) == "stiffness"


@each("name", OWN_OPTIMIZERS)
def test_an_optimizer_alone_calls_for_a_grid_and_has_defaults(name):
    config = resolve(load_config(None, ["--model.format", "E4M3", "--optimizer.name", name]))
    optimizer = config.optimizer
    assert config.model.storage in ROUNDED
    assert (optimizer.writeback, optimizer.moments) == ("stochastic", "float32")
    assert optimizer.lr is not None
    assert (optimizer.stiffness is not None) is name.startswith(("stiffness", "fisher"))
    assert (optimizer.momentum is not None) is name.endswith(("sgd", "fisher", "muon"))


def test_formats_to_measure_against_take_their_own_spelling():
    config = resolve(load_config(None, ["--monitor.activation_format=e4m3", "--monitor.gradient_format=none"]))
    assert (config.monitor.activation_format, config.monitor.gradient_format) == ("E4M3", None)
