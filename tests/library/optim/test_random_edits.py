"""Random edits between steps: what an optimizer remembers never shows in its bits.

Two optimizers take the same steps, with the same edits of parameters, states, groups and
gradients between them. One keeps its plan. The other forgets everything before each step,
and steps in plain PyTorch or by another path. After every step they agree bit for bit, or
have raised the same error.
"""

import random

import pytest
import torch
from edits_between_steps import (
    EDITS,
    EDITS_THAT_ARE_READ,
    KINDS,
    MOVES,
    OF_ADAMW,
    apply_edit,
    forget,
    make,
    put_gradients,
    take_steps,
)
from optimizer_cases import frozen, parameters_of
from paths import PATHS

import fp8manifold as fm

STEPS = 14
#: A root of a number below 0 has no definition that all paths share.
WITHOUT_DEFINITION = {"moments under other names"}
#: After these an optimizer never plans again, so that later edits would try little.
AT_THE_END = {"an observer", "a method of its own", "a remainder"}


def edits_of(kind, generator):
    """Return the edits before each step; None where there is none."""
    edits = dict(EDITS | EDITS_THAT_ARE_READ | MOVES | (OF_ADAMW if kind == "adamw" else {}))
    names = [name for name in edits if name not in WITHOUT_DEFINITION | AT_THE_END]
    # two steps are planned before a plan is there to be used
    chosen = [None, None, None]
    for _ in range(STEPS - 4):
        chosen.append(generator.choice(names) if generator.random() < 0.5 else None)
    chosen.append(generator.choice(sorted(AT_THE_END)))
    return [edits[name] if name else None for name in chosen], chosen


def edited(optimizer, edit):
    """Apply an edit. What it can't do any more, after others, it leaves out."""
    try:
        return apply_edit(edit, optimizer)
    except Exception:
        return optimizer


def error_of_a_step(optimizer):
    """Take a step, and return the error that it raises, if it does."""
    try:
        optimizer.step()
    except Exception as error:
        return type(error), str(error)
    return None


def everything(optimizer):
    """Return all values, states and counts as bytes.

    torch's ``state_dict`` raises where a parameter was taken out and its state was not.
    """
    parameters = parameters_of(optimizer)
    values = [(p.codes, p.scale) if isinstance(p, fm.FP8Tensor) else p.detach() for p in parameters]
    states = [dict(optimizer.state.get(p, {})) for p in parameters]
    return frozen([values, states, optimizer.skipped_steps, optimizer.widened_scales])


@pytest.mark.parametrize("edit", MOVES)
def test_an_edit_can_be_made(edit):
    """After others one may be impossible, and is left out. Alone each one does something."""
    optimizer = make()
    take_steps(optimizer, 4)
    put_gradients(optimizer, 4)
    apply_edit(MOVES[edit], optimizer).step()


def assert_random_edits_are_seen(kind, path, seed):
    generator = random.Random(f"{kind} {path} {seed}")
    granularity = generator.choice(["channel", "channel", "tensor", "block"])
    edits, names = edits_of(kind, generator)
    planned = make(kind, granularity, path=path)
    forgetful = make(kind, granularity, path="eager", keeps=False)
    for t, edit in enumerate(edits):
        outcomes = []
        pair = []
        for optimizer in (planned, forgetful):
            put_gradients(optimizer, t)
            if edit is not None:
                torch.manual_seed(t)
                optimizer = edited(optimizer, edit)
            pair.append(optimizer)
        planned, forgetful = pair
        forget(forgetful)
        forgetful.keeps_plan = False
        for optimizer in pair:
            outcomes.append((error_of_a_step(optimizer), everything(optimizer)))
        assert outcomes[0] == outcomes[1], (t, names)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_with_a_plan_has_the_bits_of_one_that_forgets(kind, path, seed):
    assert_random_edits_are_seen(kind, path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 90))
@pytest.mark.parametrize("kind", KINDS)
def test_many_more_edits(kind, seed):
    assert_random_edits_are_seen(kind, "native", seed)
