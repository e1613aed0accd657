"""Labels of a sweep's points: no two combinations have one, and formats stand where there are weights for them."""

import pytest

from nanogpt_bench.config.settings import build_config
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.sweep.plan import plan_sweep
from nanogpt_bench.system.errors import BenchError


def test_formats_of_all_layers_and_of_one_are_told_apart(write):
    axes = {
        "rule": ["fp32", "nearest"],
        "model.format": ["E4M3", "e7m0"],
        "model.formats.lm_head": ["none", "E5M2"],
        "model.formats.*.activation": ["none", "E5M2"],
    }
    planned = plan_sweep(read_sweep(write(axes=axes)))
    assert len({run.label for run in planned}) == len(planned) == 1 + 8
    assert {run.label for run in planned} >= {
        "E4M3 nearest lm_head=E5M2 activation=none",
        "E7M0 nearest lm_head=none activation=E5M2",
    }
    for run in planned[1:]:
        formats = resolve(build_config(run.settings)).model.formats
        assert run.label.startswith(formats["*"]["weight"])


def test_numbers_that_six_digits_do_not_tell_apart_are_written_in_full(write):
    axes = {"optimizer.lr": [0.001, 0.00100000001], "rule": ["fp32"]}
    labels = [run.label for run in plan_sweep(read_sweep(write(axes=axes)))]
    assert labels == ["fp32 lr=0.001", "fp32 lr=0.00100000001"]


def test_an_axis_of_formats_under_a_rule_without_any_is_refused(write):
    axes = {"model.format": ["E4M3", "E7M0"]}
    with pytest.raises(BenchError, match=r"axes\.model\.format: rule 'fp32' keeps float weights at every value"):
        plan_sweep(read_sweep(write(axes=axes, settings={"rule": "fp32"})))
