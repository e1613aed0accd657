"""Nothing is remembered from one step to the next but what the state shows.

An optimizer plans its first steps. Then it keeps a plan, by which later steps go without
being planned. Whatever a user edits between two steps either drops that plan or is read in
every step, so that an optimizer with such a plan and one that forgets everything agree bit
for bit.
"""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from edits_between_steps import (
    ALWAYS,
    EDITS,
    EDITS_THAT_ARE_READ,
    KINDS,
    OF_ADAMW,
    apply_edit,
    forget,
    make,
    optimizer_bits,
    put_gradients,
    take_steps,
)
from optimizer_cases import frozen, normal, parameters_of
from paths import PATHS, as_on_a_card, on_path
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold._triton import launch
from fp8manifold.optim import _plan, _steady
from fp8manifold.optim._plan import Plan
from fp8manifold.optim._triton_step import TritonStep

STEPS = 9


@pytest.fixture
def served(monkeypatch):
    """Return a list with a bool for each look-up of a plan: whether it could be used."""
    is_stale = Plan.is_stale
    answers: list[bool] = []

    def recorded(plan, optimizer, member=None):
        stale = is_stale(plan, optimizer, member)
        answers.append(not stale)
        return stale

    monkeypatch.setattr(Plan, "is_stale", recorded)
    return answers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granularity", ["channel", "tensor", "block", "square"])
@pytest.mark.parametrize("factors", [False, True])
def test_steps_have_the_bits_of_steps_that_are_planned(kind, granularity, factors, served):
    """With steps that are left out, a schedule of the lr, and scales that double."""
    steady, planned = (
        make(kind, granularity, factors=factors, keeps=keeps) for keeps in (True, False)
    )
    bad_entries = {4: torch.inf, 5: torch.inf, 7: 2.0**70}
    for t in range(STEPS):
        for optimizer in (steady, planned):
            put_gradients(optimizer, t, bad_entries.get(t))
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            optimizer.step()
        assert optimizer_bits(steady) == optimizer_bits(planned), t
        assert [p.filled is None for p in parameters_of(steady)[:2]] == [
            p.filled is None for p in parameters_of(planned)[:2]
        ], t
    assert steady.skipped_steps == planned.skipped_steps == len(bad_entries)
    # Of other scales native code reads copies, and a steady plan can't.
    is_read_in_place = granularity in ("channel", "tensor") or (granularity == "block" and factors)
    assert any(served) == is_read_in_place
    if kind in ("adamw", "muon", "riemannian") and is_read_in_place:
        assert served == [True] * (STEPS - 2)
    if kind == "adamw-8bit":
        assert steady.widened_scales > 0


#: Statements after which the next step is planned and refused, with its message.
FORGED = {
    "a moment of fewer elements": ("s[0]['exp_avg'].data = s[0]['exp_avg'].data[:2]", "of shape"),
    "a moment of another dtype": (
        "s[0]['exp_avg'].data = s[0]['exp_avg'].data.view(torch.int32)",
        "int32",
    ),
    "a moment of more bits": ("s[3]['exp_avg'] = s[3]['exp_avg'].double()", "float64"),
    "a moment elsewhere": (
        "s[3]['exp_avg'] = s[3]['exp_avg'].to('meta')",
        "on meta, but the parameter is on cpu",
    ),
    "lr below 0": ("groups[0]['lr'] = -1.0", "lr=-1.0"),
    "betas": ("groups[0]['betas'] = (2.0, 0.9)", "betas"),
    "write-back": ("groups[0]['writeback'] = 'none'", "writeback"),
}


def edits_and_kinds():
    """Yield every edit with the kinds of `ALWAYS`, and most of them with one more, in turn."""
    for edit in [*EDITS, *OF_ADAMW, *EDITS_THAT_ARE_READ]:
        yield edit, "adamw"
    others = [kind for kind in KINDS if kind not in ALWAYS]
    for i, edit in enumerate(EDITS | EDITS_THAT_ARE_READ):
        for kind in (*ALWAYS[1:], others[i % len(others)]):
            yield edit, kind


def assert_equal_steps(optimizer, forgetful, steps, *, edit="", edited_step=-1, bad_at=-1):
    """Step both and compare them after every step; one forgets everything in between."""
    for t in range(steps):
        for stepping in (optimizer, forgetful):
            put_gradients(stepping, t, torch.nan if t == bad_at else None)
            if t == edited_step:
                apply_edit(edit, stepping)
            if stepping is forgetful:
                forget(forgetful)
            stepping.step()
        assert optimizer_bits(optimizer) == optimizer_bits(forgetful), t


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("edit", "kind"), list(edits_and_kinds()))
def test_the_next_step_starts_from_what_the_state_holds(edit, kind, path):
    """The bits are those of plain PyTorch in an optimizer that forgets everything."""
    # Roots of numbers below 0 have no definition: there both go by one path.
    plain = path if edit == "moments under other names" else "eager"
    optimizer, forgetful = make(kind, path=path), make(kind, path=plain, keeps=False)
    assert_equal_steps(
        optimizer, forgetful, 8, edit=(EDITS | OF_ADAMW | EDITS_THAT_ARE_READ)[edit], edited_step=4
    )
    skips = edit in ("a gradient that is not finite", "a gradient too large")
    assert optimizer.skipped_steps == skips


@pytest.mark.parametrize("edit", [*EDITS, *OF_ADAMW, *EDITS_THAT_ARE_READ])
def test_an_edit_drops_the_steady_plan_or_is_read(edit, served):
    optimizer = make()
    take_steps(optimizer, 4)
    put_gradients(optimizer, 4)
    apply_edit((EDITS | OF_ADAMW | EDITS_THAT_ARE_READ)[edit], optimizer)
    optimizer.step()
    # A dropped plan is refused when it is looked up, or is not there to be looked up.
    assert served in (
        [[True, True, True]] if edit in EDITS_THAT_ARE_READ else [[True, True, False], [True, True]]
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("edit", FORGED)
def test_what_cannot_be_stepped_is_refused_as_without_a_steady_plan(edit, path):
    statement, message = FORGED[edit]
    optimizer = make(path=path)
    take_steps(optimizer, 4)
    put_gradients(optimizer, 4)
    apply_edit(statement, optimizer)
    old_state = frozen([(p.detach(), optimizer.state[p]["step"]) for p in parameters_of(optimizer)])
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert (
        frozen([(p.detach(), optimizer.state[p]["step"]) for p in parameters_of(optimizer)])
        == old_state
    )


@pytest.mark.parametrize("path", PATHS)
def test_parameters_that_were_reset_at_other_times_have_other_numbers(path):
    """They are of one group, and equal in all else that the numbers of a step depend on."""
    pair = []
    for keeps in (True, False):
        parameters = [nn.Parameter(normal(4, 3, seed=i)) for i in (1, 2)]
        optimizer = on_path(path if keeps else "eager", optim.StiffnessAdamW(parameters, 1e-2))
        optimizer.keeps_plan = keeps
        pair.append(optimizer)
    for t in range(8):
        for optimizer in pair:
            put_gradients(optimizer, t)
            if t == 4:
                optimizer.state[parameters_of(optimizer)[1]]["since"] = 3
            optimizer.step()
        assert optimizer_bits(pair[0]) == optimizer_bits(pair[1]), t


PERIODS = {
    "stabilize and reset": {"stabilize_every": 3, "reset_every": 4},
    "schedule and refresh": {"stiffness": lambda t: 1 / (1 + t), "refresh_every": 5},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", PERIODS.values(), ids=PERIODS)
def test_what_is_due_is_done(options, path):
    optimizer = make(path=path, **options)
    forgetful = make(path="eager", keeps=False, **options)
    assert_equal_steps(optimizer, forgetful, 12, bad_at=2)


def test_a_steady_step_raises_under_on_nonfinite_raise():
    optimizer = make(on_nonfinite="raise")
    take_steps(optimizer, 3)
    old_bits = optimizer_bits(optimizer)
    put_gradients(optimizer, 3, torch.nan)
    with pytest.raises(FloatingPointError, match="is not finite"):
        optimizer.step()
    assert optimizer_bits(optimizer) == old_bits


RENEWED = {
    "adamw": lambda ps: optim.StiffnessAdamW(ps, 0.1, stiffness=1.0),
    "muon": lambda ps: optim.StiffnessMuon(ps, 10.0, weight_decay=0.0),
    "riemannian": lambda ps: optim.RiemannianAdam(ps, 4.0),
    "riemannian-sgd": lambda ps: optim.RiemannianSGD(ps, 4.0, momentum=0.5),
}


@pytest.mark.parametrize("kind", RENEWED)
def test_a_plan_ends_where_the_scale_of_a_whole_parameter_doubles(kind):
    """S_ref changes then, and with it charts, and numbers that two parameters shared."""
    values = normal(16, 16, std=0.3)
    optimizers = []
    for keeps in (True, False):
        twins = [fm.FP8Parameter(values, "E4M3", seed=i, granularity="tensor") for i in (1, 2)]
        optimizer = RENEWED[kind](twins)
        optimizer.keeps_plan = keeps
        optimizers.append(optimizer)
    for t in range(40):
        for optimizer in optimizers:
            first, second = parameters_of(optimizer)
            first.grad = -torch.ones(16, 16)
            second.grad = normal(16, 16, seed=t, std=0.1)
            optimizer.step()
        assert optimizer_bits(optimizers[0]) == optimizer_bits(optimizers[1]), t
    assert optimizers[0].widened_scales


@pytest.mark.parametrize("moves", [True, False])
def test_rows_that_a_step_leaves_at_zero_have_their_scale_fitted(moves, served):
    steady, planned = (
        make(weight_decay=1.0, stiffness=0.0, keeps=keeps) for keeps in (True, False)
    )
    for t in range(7):
        for optimizer in (steady, planned):
            put_gradients(optimizer, t)
            if t < 5 or not moves:
                parameters_of(optimizer)[0].grad[1] = 0.0
            for group in optimizer.param_groups:
                group["lr"] = 1.0 if t == 3 else 1e-3
            optimizer.step()
            if t == 3:
                assert not parameters_of(optimizer)[0][1].any(), t
        assert optimizer_bits(steady) == optimizer_bits(planned), t
    assert (steady.fitted_scales > 0) == moves
    assert served == [True, True, False]


def with_idle_kernels(monkeypatch):
    """Let a GPU's kernels do nothing."""
    idle = type("Idle", (), {"__getitem__": lambda self, grid: lambda *_, **__: None})
    monkeypatch.setattr(launch, "_kernels", lambda: (idle(),) * 3)
    monkeypatch.setattr(launch, "_factor_kernels", lambda: launch.FactorKernels(*[idle()] * 6))
    monkeypatch.setattr(launch, "options", dict)


def test_steps_of_several_processes_on_a_card_are_not_planned(served, monkeypatch):
    as_on_a_card(monkeypatch)
    with_idle_kernels(monkeypatch)
    optimizer = make()
    for t in range(4):
        for module in (_plan, _steady):
            monkeypatch.setattr(module, "is_distributed", lambda t=t: t == 3)
        put_gradients(optimizer, t)
        optimizer.step()
    assert served == [True, False]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("i", [0, 2])
def test_a_parameter_taken_out_is_let_go(i, path):
    optimizer = make("adamw-8bit", path=path)
    take_steps(optimizer, 4)
    p, plan = parameters_of(optimizer)[i], optimizer._plan
    parts = [p, p.grad, *optimizer.state[p].values(), *([p.codes, p.kept_scale] if i == 0 else [])]
    references = [weakref.ref(x) for x in parts if isinstance(x, Tensor)]
    optimizer.param_groups[0]["params"].pop(i)
    optimizer.state.pop(p)
    del p, parts
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert (plan is None) == (path == "eager")
    assert plan is None or plan.is_stale(optimizer)


def test_a_gradient_that_is_aligned_otherwise_is_planned(served, monkeypatch):
    as_on_a_card(monkeypatch)
    with_idle_kernels(monkeypatch)
    optimizer = make()
    for t in range(5):
        put_gradients(optimizer, t)
        if t == 4:
            p = parameters_of(optimizer)[0]
            p.grad = torch.cat([torch.zeros(1), p.grad.flatten()])[1:].view(p.shape)
        optimizer.step()
    assert served == [True, True, False]


def test_launches_of_other_shapes_have_another_signature(monkeypatch):
    """A graph's memory for statistics is of the size that its shapes need."""
    as_on_a_card(monkeypatch)
    with_idle_kernels(monkeypatch)
    signatures, make_step = [], TritonStep.__init__

    def keep(step, *args, **options):
        make_step(step, *args, **options)
        signatures.append(step.signature)

    monkeypatch.setattr(TritonStep, "__init__", keep)
    values = torch.ones(509 * 483)
    for shape in ((509, 483), (483, 509)):
        parameter = torch.nn.Parameter(values.view(shape))
        optimizer = optim.StiffnessAdafactor([parameter], lr=0.1)
        for _ in range(3):
            parameter.grad = torch.ones(shape)
            optimizer.step()
    *_, (_, addresses, words), (_, other_addresses, other_words) = signatures
    assert addresses == other_addresses
    assert words != other_words


OF_USERS = {
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "array": lambda: np.array([1.0, 2.0]),
    "list": lambda: [torch.ones(2), 3],
    "dict": lambda: {"deep": (np.ones(3),)},
    "shapes": lambda: torch.ones(torch.randint(2, 5, ()).item()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entry", OF_USERS)
def test_a_group_may_have_entries_that_are_not_compared(kind, entry):
    """Two tensors or arrays have no one truth value; a step used to raise."""
    with_entry, plain = make(kind), make(kind)
    for t in range(6):
        with_entry.param_groups[0]["mine"] = OF_USERS[entry]()
        for optimizer in (with_entry, plain):
            put_gradients(optimizer, t)
            optimizer.step()
    saved = copy.deepcopy(with_entry.state_dict())
    with_entry.defaults["mine"] = None
    with_entry.load_state_dict(saved)
    for group in with_entry.param_groups:
        group.pop("mine", None)
    assert optimizer_bits(with_entry) == optimizer_bits(plain)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["adamw", "muon", "riemannian"])
@pytest.mark.parametrize(
    "edit",
    [
        "for p in groups[0]['params'][:2]: p.rescale_(p.scale * 2**9)",
        "for g in groups: g['writeback'] = 'residual8'",
    ],
)
def test_a_step_that_is_left_out_after_an_edit_changes_nothing(kind, edit, path):
    """What the edit asks for, a new S_ref or a new entry of a state, waits for a step."""
    optimizer = make(kind, path=path)
    take_steps(optimizer, 4)
    apply_edit(edit, optimizer)
    before = optimizer_bits(optimizer)
    counts = optimizer.fitted_scales
    put_gradients(optimizer, 4, torch.nan)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    optimizer.skipped_steps = optimizer.skipped_in_row = 0
    assert optimizer_bits(optimizer) == before
    assert optimizer.fitted_scales == counts


def test_a_parameter_put_into_a_group_by_hand_is_checked():
    """Before anything changes, as where it is given to `add_param_group`."""
    weight, bias = fm.FP8Parameter(normal(8, 16), "E4M3"), nn.Parameter(torch.zeros(8))
    groups = [{"params": [weight]}, {"params": [bias], "direction": "adam"}]
    optimizer = optim.StiffnessMuon(groups, 1e-2)
    put_gradients(optimizer, 0)
    optimizer.step()
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
    before = optimizer_bits(optimizer)
    with pytest.raises(ValueError, match="is no matrix"):
        optimizer.step()
    assert optimizer_bits(optimizer) == before


def test_an_option_in_a_list_is_not_edited_where_it_lies():
    given = [3.4445, -4.775, 2.0315]
    optimizer = optim.StiffnessMuon([fm.FP8Parameter(normal(8, 16), "E4M3")], ns_coefficients=given)
    assert optimizer.param_groups[0]["ns_coefficients"] == tuple(given)
    put_gradients(optimizer, 0)
    optimizer.param_groups[0]["ns_coefficients"] = [2.0, -1.5, 0.5]
    optimizer.step()
    assert optimizer.param_groups[0]["ns_coefficients"] == (2.0, -1.5, 0.5)
