"""Random edits between steps that a GPU decides on: `test_triton_interpreted.py` runs them.

The optimizer with a plan steps by Triton's kernels, interpreted where there is no GPU. The
other one forgets everything before each step, and steps in plain PyTorch.
"""

import pytest
from paths import as_on_a_card
from test_random_edits import assert_random_edits_are_seen
from triton_twins import CARD

from fp8manifold.optim import _plan

pytestmark = pytest.mark.skipif(CARD.type != "cpu", reason="the edits are made on the CPU")

#: Optimizers whose steps a GPU decides on.
DECIDED = (
    *("adamw", "adamw-8bit", "adamw-residual8", "annealed", "sgd-8bit", "lion", "muon-8bit"),
    *("adafactor", "adafactor-8bit", "riemannian-codes", "riemannian-sgd-codes"),
)


def assert_steps_of_a_card_have_the_bits(kind, seed, monkeypatch):
    """Compare both optimizers, of which one steps by kernels, more than once."""
    as_on_a_card(monkeypatch)
    launched = []
    launch = _plan.Plan._launch

    def launch_and_count(plan, optimizer, snapshot):
        launched.append(plan)
        return launch(plan, optimizer, snapshot)

    monkeypatch.setattr(_plan.Plan, "_launch", launch_and_count)
    assert_random_edits_are_seen(kind, "native", seed)
    assert len(launched) > len(set(map(id, launched))) > 0


@pytest.mark.parametrize("kind", DECIDED)
def test_a_plan_on_a_card_has_the_bits_of_steps_that_forget(kind, monkeypatch):
    assert_steps_of_a_card_have_the_bits(kind, 0, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 20))
@pytest.mark.parametrize("kind", DECIDED)
def test_many_more_edits_on_a_card(kind, seed, monkeypatch):
    assert_steps_of_a_card_have_the_bits(kind, seed, monkeypatch)
