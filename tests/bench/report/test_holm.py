"""Holm's method against statsmodels, to the last bit."""

import numpy as np
import pytest

from nanogpt_bench.report.holm import holm


@pytest.mark.parametrize("number", [1, 2, 3, 10, 200])
@pytest.mark.parametrize("spread", ["small", "any", "ties"])
def test_adjusted_p_values_are_those_of_statsmodels(number, spread):
    from statsmodels.stats.multitest import multipletests

    generator = np.random.default_rng(number)
    p_values = generator.random(number)
    if spread == "small":
        p_values = p_values**8
    if spread == "ties":
        p_values = np.round(p_values, 1)
    expected = multipletests(p_values, method="holm")[1]
    assert holm(p_values.tolist()) == expected.tolist()


def test_a_family_without_tests_is_empty():
    assert holm([]) == []
