"""A run that is saved after each of its 50 steps has the same bits when it is resumed.

It is resumed from every third file, from another third in each combination; the slow
tests take every one.
"""

import copy
import math
from functools import cache

import pytest
import torch
from family_cases import NAMES, OPTIONS, VALID, make
from optimizer_cases import (
    bits_of,
    frozen,
    grid_weight,
    normal,
    put_gradients,
    stored_weight,
    through_disk,
)
from torch import nn

from fp8manifold.optim import anneal

STEPS = 50
#: Steps that are taken from every ninth file; one is taken from all others.
AHEAD = 4
#: A run is resumed from every third file.
INTERVAL = 3

by_name = pytest.mark.parametrize("name", NAMES)


@cache
def weights_of(seed):
    """Return seven small parameters of different kinds, of which copies are trained.

    They are the same for all seeds once a state has been loaded.
    """
    scale = torch.tensor([[2.0**-5], [2.0**-4]])
    of_blocks = {"granularity": "block", "headroom": 1.0, "factors": True}
    return nn.ParameterList(
        [
            stored_weight("E4M3", (2, 9), seed=seed + 1, keep_remainder=True),
            stored_weight("E5M2", (5,), seed=seed + 2, dtype=torch.bfloat16),
            stored_weight("E4M3", (3, 32), seed=seed + 3, **of_blocks),
            grid_weight("E4M3", (2, 3), scale, "stochastic", seed=seed + 4),
            grid_weight("E4M3", (3, 2), seed=seed + 5),
            nn.Parameter(normal(4, 3, seed=seed + 6).t()),
            nn.Parameter(normal(3, seed=seed + 7).bfloat16()),
        ]
    )


class Run:
    """A module, its optimizer and perhaps a scheduler: all that a training script saves."""

    def __init__(self, make_optimizer, make_scheduler=None, seed=0):
        self.module = copy.deepcopy(weights_of(seed))
        self.optimizer = make_optimizer(list(self.module))
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler else None

    def step(self, t):
        weights = list(self.module)
        put_gradients(weights, t, 0.3)
        weights[t % 3].grad = None
        if t == 17:
            weights[5].grad[0, 0] = math.nan
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def parts(self):
        states = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.scheduler is not None:
            states["scheduler"] = self.scheduler.state_dict()
        return states

    def load(self, parts):
        self.module.load_state_dict(parts["module"])
        self.optimizer.load_state_dict(parts["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(parts["scheduler"])

    def state_bits(self):
        states = self.parts()
        del states["module"]
        return {"weights": [bits_of(p) for p in self.module], **frozen(states)}


def resume(label, begin, interval=INTERVAL):
    """Resume from files in a new module and optimizer, and compare with the whole run."""
    whole = begin(0)
    files, trajectory = [], []
    for t in range(STEPS + AHEAD):
        whole.step(t)
        files.append(through_disk(whole.parts()))
        trajectory.append(whole.state_bits())
    # Weights move in most steps: there is something to get wrong.
    assert len({str(bits["weights"]) for bits in trajectory}) > STEPS / 2
    # Labels of several lengths begin at other files.
    for t in range(len(label) % interval, STEPS, interval):
        resumed = begin(100)
        resumed.load(files[t])
        assert resumed.state_bits() == trajectory[t], f"{label}: loaded after step {t}"
        # More from one of the files of each nine steps.
        steps = AHEAD if t % 9 >= 9 - interval else 1
        for later in range(t + 1, t + 1 + steps):
            resumed.step(later)
            message = f"{label}: saved after step {t}, differs after {later}"
            assert resumed.state_bits() == trajectory[later], message
    return whole


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    ("name", "writeback", "moments"), VALID, ids=["-".join(combination) for combination in VALID]
)
@pytest.mark.parametrize("interval", [INTERVAL, pytest.param(1, marks=pytest.mark.slow)])
def test_every_combination_resumes(name, writeback, moments, interval):
    """S_ref is renewed every 7 steps, scales are widened, and one step is left out."""
    options = {
        "writeback": writeback,
        "moments": moments,
        "refresh_every": 7,
        "weight_decay": 0.01,
        "seed": 3,
    }
    label = f"{name}-{writeback}-{moments}-{interval}"
    whole = resume(label, lambda seed: Run(lambda p: make(name, p, **options), seed=seed), interval)
    assert whole.optimizer.skipped_steps == 1


SCHEDULERS = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 30),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, [g["lr"] * 2 for g in o.param_groups], total_steps=60, cycle_momentum=False
    ),
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 9, 0.5),
}


@pytest.mark.covering(1)
@by_name
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_runs_with_schedules_groups_and_resets_resume(name, schedule):
    annealed = (
        {"stiffness": anneal(1.0, 0.0, 40)}
        if "stiffness" in options_of(name)
        else {"damping": 0.25}
    )
    lr = OPTIONS[name]["lr"]

    def groups(parameters):
        first = {
            "params": parameters[:3],
            "writeback": "residual8",
            "moments": "8bit",
            "reset_every": 13,
            **annealed,
        }
        rest = {
            "lr": torch.tensor(lr / 2),
            "stabilize_every": 11,
            "maximize": True,
            "refresh_every": 3,
        }
        return [
            first,
            {"params": parameters[3:], "writeback": "stochastic", "moments": "bfloat16", **rest},
        ]

    def begin(seed):
        return Run(lambda p: make(name, groups(p), refresh_every=7), SCHEDULERS[schedule], seed)

    whole = resume(f"{name}-{schedule}", begin)
    assert any(isinstance(group["lr"], torch.Tensor) for group in whole.optimizer.param_groups)


def options_of(name):
    return make(name, [stored_weight("E4M3", (2, 9))]).defaults


@by_name
def test_a_run_loads_into_its_own_past_and_a_file_is_not_changed(name):
    """Nothing of what came later is left over.

    The state of the optimizer is loaded before or after the weights.
    """
    run = Run(lambda p: make(name, p, moments="8bit", writeback="residual8", refresh_every=7))
    states, trajectory = [], []
    for t in range(20):
        run.step(t)
        states.append(copy.deepcopy(run.parts()))
        trajectory.append(run.state_bits())
    for t in (16, 3, 12, 0):
        saved_bits = frozen(states[t])
        loads = [(run.module, states[t]["module"]), (run.optimizer, states[t]["optimizer"])]
        for taker, state in loads[:: 1 if t % 2 else -1]:
            taker.load_state_dict(state)
        for later in range(t + 1, t + 3):
            run.step(later)
            assert run.state_bits() == trajectory[later], f"back to {t}, differs after {later}"
        assert frozen(states[t]) == saved_bits, t


@by_name
def test_weights_loaded_in_the_middle_of_a_run_are_stepped_with_their_own_scales(name):
    """The running optimizer goes on as one that was made for them, scales included."""
    options = {"moments": "8bit", "writeback": "nearest", "refresh_every": 1, "seed": 1}
    runs = []
    for fresh in (False, True):
        torch.manual_seed(0)  # of which the weight takes its seed
        p = stored_weight("E4M3", (4, 320), seed=1)
        optimizer = make(name, [p], **options)
        put_gradients([p], 0)
        optimizer.step()
        p.data.copy_(stored_weight("E4M3", (4, 320), seed=2, headroom=1024.0))
        if fresh:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = make(name, [p], **options)
            optimizer.load_state_dict(state)
        for t in range(1, 4):
            put_gradients([p], t)
            optimizer.step()
        runs.append((bits_of(p), frozen(optimizer.state_dict())))
    assert runs[0] == runs[1]
