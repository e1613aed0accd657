"""Resolving: rules, named sizes, short forms, and the combinations refused."""

import pytest
from bench_runs import resolved
from laws import each

from nanogpt_bench.config.rules import RULES, available_rules
from nanogpt_bench.config.schema import MANIFOLDS, OWN_OPTIMIZERS, ROUNDED, WITHOUT_FORMATS
from nanogpt_bench.config.settings import load_config, to_yaml
from nanogpt_bench.setup.resolve import resolve, rule_name


def arguments_of(rule: str) -> list[str]:
    quantised = RULES[rule].storage not in WITHOUT_FORMATS
    return ["--rule", rule, *(["--model.format", "E4M3"] if quantised else [])]


@each("rule", available_rules())
def test_a_rule_fills_in_what_it_stands_for_and_is_recognised_from_that(rule):
    config = resolved(arguments_of(rule))
    entry, optimizer = RULES[rule], config.optimizer
    assert (config.model.storage, config.train.precision) == (entry.storage, entry.precision)
    assert (optimizer.name, optimizer.lr, optimizer.writeback) == (entry.optimizer, entry.lr, entry.writeback)
    assert optimizer.moments == (entry.moments or ("float32" if entry.storage in MANIFOLDS else None))
    assert (optimizer.stiffness, optimizer.stiffness_end) == (entry.stiffness, entry.stiffness_end)
    config.rule = None
    assert rule_name(config) == rule


@each("rule", available_rules())
def test_a_resolved_configuration_is_written_down_as_one_that_resolves_to_itself(rule, tmp_path):
    once, path = resolved(arguments_of(rule)), tmp_path / "config.yaml"
    path.write_text(to_yaml(once))
    again = resolve(load_config(path))
    assert again == once
    assert again.layers == once.layers
    with pytest.raises(TypeError, match="can't be resolved again"):
        resolve(once)


@each(
    ("words", "name"),
    [
        ("--optimizer.name StiffnessAdamW --optimizer.stiffness=2", "custom"),
        *((f"--rule stiffness --model.storage {storage}", "stiffness") for storage in ("grid", "fp8")),
    ],
)
def test_one_byte_that_is_simulated_in_floats_has_its_rule_s_name_and_other_settings_are_custom(words, name):
    config = resolved(["--model.format", "E4M3", *words.split()])
    config.rule = None
    assert rule_name(config) == name


@each("name", OWN_OPTIMIZERS)
def test_an_optimizer_alone_calls_for_a_grid_and_has_defaults(name):
    config = resolved(["--model.format", "E4M3", "--optimizer.name", name])
    optimizer = config.optimizer
    assert config.model.storage in ROUNDED
    assert (optimizer.writeback, optimizer.moments) == ("stochastic", "float32")
    assert optimizer.lr is not None
    assert (optimizer.stiffness is not None) is name.startswith(("stiffness", "fisher"))
    assert (optimizer.momentum is not None) is name.endswith(("sgd", "fisher", "muon"))


def test_formats_to_measure_against_take_their_own_spelling():
    config = resolved(["--monitor.activation_format=e4m3", "--monitor.gradient_format=none"])
    assert (config.monitor.activation_format, config.monitor.gradient_format) == ("E4M3", None)
