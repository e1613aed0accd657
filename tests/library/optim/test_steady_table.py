"""The table of a steady step: the bits of steps without it, and none after anything it was made from has changed."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_cases import frozen, normal, with_factors
from torch import Tensor

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold._base import reading
from fp8manifold._numerics.records import JOB
from fp8manifold._triton import launch
from fp8manifold._triton.kinds import WIDENED
from fp8manifold.optim import _steady
from fp8manifold.optim._steady import Table

STEPS = 9
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (optim.StiffnessAdamW, {"lr": 1e-2, "weight_decay": 0.1, "stiffness": 0.5}),
    "adamw-8bit": (optim.StiffnessAdamW, {"lr": 3.0, "moments": "8bit", "draws": "dither"}),
    "adamw-residual8": (optim.StiffnessAdamW, {"lr": 1e-2, "writeback": "residual8", "moments": "bfloat16"}),
    "annealed": (optim.StiffnessAdamW, {"lr": 1e-2, "stiffness": optim.anneal(1.0, 0.0, 6), "reset_every": 4}),
    "sgd": (optim.StiffnessSGD, {"lr": 1e-1, "dampening": 0.5, "writeback": "momentum"}),
    "lion": (optim.StiffnessLion, {"lr": 1e-3, "moments": "8bit"}),
    "madam": (optim.Madam, {"lr": 1e-2, "weight_decay": 0.1}),
}


def weights(granularity: Any = "channel", factors: bool = False) -> list[Any]:
    """Two of one byte, one of which soon reaches its end, a vector and an ordinary matrix, in two groups."""
    options: dict[str, Any] = {"granularity": granularity, "headroom": 1.0}
    stored = [
        with_factors(fm.FP8Parameter(normal(4, 64, seed=i), fmt, seed=i, **options), factors)
        for i, fmt in enumerate(("E4M3", "E5M2"))
    ]
    return [*stored, torch.nn.Parameter(normal(33, seed=3)), torch.nn.Parameter(normal(4, 3, seed=4))]


def made(
    kind: str = "adamw", granularity: Any = "channel", *, factors: bool = False, keeps: bool = True, **options: Any
) -> Any:
    """An optimizer, with a table or without."""
    parameters, (cls, given) = weights(granularity, factors), KINDS[kind]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": given["lr"] / 2}]
    optimizer = cls(groups, **{"refresh_every": 1000, **given, **options})
    optimizer.keeps_table = keeps
    return optimizer


def everyone(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def put(optimizer: Any, t: int, bad: float | None = None) -> None:
    for i, p in enumerate(everyone(optimizer)):
        p.grad = normal(*p.shape, seed=100 * t + i)
        if bad is not None and i == 1:
            p.grad[0, 0] = bad


def bits(optimizer: Any) -> Any:
    """Weights, scales, all of the state, and what is counted."""
    parts = [
        (p.codes, p.scale, p.filled is None) if isinstance(p, fm.FP8Tensor) else p.detach() for p in everyone(optimizer)
    ]
    return frozen([parts, optimizer.state_dict()])


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each table that was looked over served."""
    own, found = Table.serves, list[bool]()

    def serves(table: Table, optimizer: Any) -> bool:
        found.append(own(table, optimizer))
        return found[-1]

    monkeypatch.setattr(Table, "serves", serves)
    return found


@pytest.mark.parametrize("granularity", ["channel", "tensor", "block", "square"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factors", [False, True], ids=["", "factors"])
def test_steps_have_the_bits_of_steps_that_are_planned(
    factors: bool, kind: str, granularity: Any, served: list[bool]
) -> None:
    """With steps that are left out, a schedule of the learning rate, and scales that double."""
    ours, planned = (made(kind, granularity, factors=factors, keeps=keeps) for keeps in (True, False))
    for t in range(STEPS):
        for optimizer in (ours, planned):
            put(optimizer, t, torch.inf if t in (4, 5) else 2.0**70 if t == 7 else None)
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            optimizer.step()
        assert bits(ours) == bits(planned)
    assert ours.skipped_steps == planned.skipped_steps == 3
    read_in_place = ("channel", "tensor", "block" if factors else "")  # of others native code reads copies
    served_at_all = granularity in read_in_place
    assert any(served) == served_at_all
    if kind == "adamw" and served_at_all:
        assert served == [True] * (STEPS - 2)
    if kind == "adamw-8bit":
        assert ours.widened_scales > 0


def test_a_gradient_of_a_finite_square_is_stepped_though_the_sum_of_squares_is_not(served: list[bool]) -> None:
    ours, planned = made(), made(keeps=False)
    for t in range(4):
        for optimizer in (ours, planned):
            put(optimizer, t)
            if t == 3:
                for p in everyone(optimizer):
                    p.grad.fill_(2.0**63.5)
            optimizer.step()
    assert served == [True, True]
    assert bits(ours) == bits(planned)
    assert ours.skipped_steps == 0


def state_of(optimizer: Any, i: int = 0) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.state[everyone(optimizer)[i]]
    return state


def set_option(name: str, value: Any) -> Callable[[Any], None]:
    return lambda o: o.param_groups[0].__setitem__(name, value)


def swap_parameter(o: Any) -> None:
    other = torch.nn.Parameter(normal(4, 3, seed=77))
    other.grad = normal(4, 3, seed=78)
    o.state.pop(everyone(o)[3])
    o.param_groups[1]["params"][0] = other


def reload(o: Any) -> None:
    o.load_state_dict(copy.deepcopy(o.state_dict()))


def add_group(o: Any) -> None:
    other = torch.nn.Parameter(normal(5, seed=79))
    other.grad = normal(5, seed=80)
    o.add_param_group({"params": [other]})


def step_by_another(o: Any) -> None:
    other = optim.StiffnessAdamW(everyone(o)[:1], 1e-2)
    other.step()


def two_dtypes(o: Any) -> None:
    p = everyone(o)[3]
    p.grad_dtype = None
    p.grad = p.grad.bfloat16()


def by_own_method(o: Any) -> None:
    own = o._numbers
    o._numbers = lambda slot: own(slot) | {"rate": 0.0}


def strided(o: Any) -> None:
    p = everyone(o)[3]
    p.grad = p.grad.t().contiguous().t()


def replace_scale(o: Any) -> None:
    p = everyone(o)[0]
    p.scale = p.scale.clone() * 2


def data_of(name: str) -> Callable[[Any], None]:
    def change(o: Any) -> None:
        state_of(o)[name].data = state_of(o)[name].data.clone() * 0.5

    return change


def rename(o: Any) -> None:
    """The same values in the same order, under other names."""
    state = state_of(o)
    old = dict(state)
    state.clear()
    swapped = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
    state.update({swapped.get(name, name): value for name, value in old.items()})


def move_gradient(o: Any) -> None:
    everyone(o)[3].grad = None


def other_strides(o: Any) -> None:
    """In the same memory."""
    moment = state_of(o)["exp_avg"]
    moment.data = moment.data.view(64, 4).t()


def move_parameter(o: Any) -> None:
    """From one group to the next, so that their order is the same."""
    o.param_groups[1]["params"].insert(0, o.param_groups[0]["params"].pop())


def replace_gradient(change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    return lambda o: setattr(everyone(o)[3], "grad", change(everyone(o)[3].grad))


class Labelled(Tensor):
    """A gradient of another class."""


class Renamed(optim.StiffnessAdamW):
    """An optimizer of another class."""


def three_times(o: Any, *_: Any) -> None:
    everyone(o)[0].grad.mul_(3)


EDITS: dict[str, Callable[[Any], None]] = {
    "a moment written": lambda o: state_of(o)["exp_avg"].mul_(0.5),
    "a moment replaced": lambda o: state_of(o).__setitem__("exp_avg", state_of(o)["exp_avg"] * 0.5),
    "data of a moment": data_of("exp_avg"),
    "data of a step count": data_of("step"),
    "strides of a moment": other_strides,
    "moments under other names": rename,
    "a parameter in another group": move_parameter,
    "another class": lambda o: setattr(o, "__class__", Renamed),
    "a gradient that is a negative view": replace_gradient(torch._neg_view),
    "a gradient of another class": replace_gradient(lambda g: g.as_subclass(Labelled)),
    "rounding of a weight": lambda o: setattr(everyone(o)[0], "rounding", "nearest"),
    "draws of a weight": lambda o: setattr(everyone(o)[0], "draws", "dither"),
    "a state cleared": lambda o: o.state.pop(everyone(o)[0]),
    "a state replaced": lambda o: o.state.__setitem__(everyone(o)[0], {**state_of(o), "reference": 0.25}),
    "an entry more": lambda o: state_of(o).__setitem__("since", 1),
    "codes written": lambda o: everyone(o)[0].codes.bitwise_xor_(1),
    "codes replaced": lambda o: setattr(everyone(o)[0], "codes", everyone(o)[0].codes ^ 1),
    "zeros written": lambda o: everyone(o)[0].codes[1].zero_(),
    "weights written by an operator": lambda o: everyone(o)[0].detach().mul_(0.5),
    "an ordinary weight written": lambda o: everyone(o)[3].detach().mul_(0.5),
    "data of an ordinary weight": lambda o: setattr(everyone(o)[3], "data", everyone(o)[3].data * 0.5),
    "a scale doubled": lambda o: everyone(o)[0].kept_scale.mul_(2),
    "a scale replaced": replace_scale,
    "the step edited": lambda o: state_of(o)["step"].add_(7),
    "the step replaced": lambda o: state_of(o).__setitem__("step", torch.tensor(50.0)),
    "S_ref edited": lambda o: state_of(o).__setitem__("reference", 0.5),
    "the stream edited": lambda o: state_of(o).__setitem__("stream", 12345),
    "eps": set_option("eps", 1e-3),
    "weight_decay": set_option("weight_decay", 0.0),
    "damping": set_option("damping", 0.5),
    "seed": set_option("seed", 3),
    "maximize": set_option("maximize", True),
    "write-back": set_option("writeback", "nearest"),
    "stiffness": set_option("stiffness", 1.0),
    "draws": set_option("draws", "dither"),
    "refresh_every": set_option("refresh_every", 3),
    "betas": set_option("betas", (0.8, 0.9)),
    "a parameter in place of another": swap_parameter,
    "a parameter taken out": lambda o: o.state.pop(o.param_groups[0]["params"].pop()),
    "parameters in another order": lambda o: o.param_groups[0]["params"].reverse(),
    "a group more": add_group,
    "groups in another order": lambda o: o.param_groups.reverse(),
    "a group replaced": lambda o: o.param_groups.__setitem__(0, dict(o.param_groups[0], lr=1e-4)),
    "a state loaded": reload,
    "a step by another optimizer": step_by_another,
    "no gradient": move_gradient,
    "a gradient of another dtype": two_dtypes,
    "a gradient with strides": strided,
    "a remainder": lambda o: setattr(everyone(o)[0], "remainder", torch.zeros(4, 64, dtype=torch.int8)),
    "an observer": lambda o: setattr(o, "observer", lambda view: None),
    "a method of its own": by_own_method,
}
"""What drops a table."""


def forge(change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """Put other data into a moment, at the same address."""

    def edit(o: Any) -> None:
        moment = state_of(o)["exp_avg"]
        moment.data = change(moment.data)

    return edit


FORGED = {
    "a moment of fewer elements": forge(lambda x: x[:2]),
    "a moment of another dtype": forge(lambda x: x.view(torch.int32)),
}
"""What drops it, and is refused by the step that is planned then."""

KEPT: dict[str, Callable[[Any], None]] = {
    "lr": set_option("lr", 1e-4),
    "lr, a tensor": set_option("lr", torch.tensor(1e-4)),
    "gradients elsewhere": lambda o: [setattr(p, "grad", p.grad.clone()) for p in everyone(o)],
    "gradients written": lambda o: [p.grad.mul_(2) for p in everyone(o)],
    "a step hook": lambda o: o.register_step_pre_hook(three_times),
    "nothing": lambda o: None,
    "read": lambda o: [o.state_dict(), [p.detach().clone() for p in everyone(o)]],
}
"""What does not, as it is read in every step."""


@pytest.mark.parametrize("edit", [*EDITS, *KEPT])
def test_each_edit_drops_the_table_or_changes_nothing_of_it(edit: str, served: list[bool]) -> None:
    """A step after it has the bits of one that is planned."""
    ours, planned = made(), made(keeps=False)
    for t in range(6):
        for optimizer in (ours, planned):
            put(optimizer, t)
            if t == 4:
                (EDITS | KEPT)[edit](optimizer)
            optimizer.step()
        assert bits(ours) == bits(planned)
        if t == 4:
            assert served in ([True, True, edit in KEPT], [True, True] * (edit not in KEPT))


@pytest.mark.parametrize("edit", EDITS | FORGED)
def test_no_edit_that_drops_the_table_is_without_effect_or_cause(edit: str, served: list[bool]) -> None:
    """Each of them alone: without it the same table serves."""
    optimizer = made()
    for t in range(4):
        put(optimizer, t)
        optimizer.step()
    table = optimizer._table
    assert served == [True, True]
    put(optimizer, 4)
    (EDITS | FORGED)[edit](optimizer)
    assert optimizer._table is not table or not table.serves(optimizer)


def test_wrong_options_are_refused_as_they_are_without_a_table() -> None:
    for name, value in (("lr", -1.0), ("lr", "fast"), ("betas", (2.0, 0.9)), ("writeback", "none")):
        optimizer = made()
        for t in range(3):
            put(optimizer, t)
            optimizer.step()
        before = bits(optimizer)
        optimizer.param_groups[0][name] = value
        with pytest.raises((TypeError, ValueError), match=name):
            optimizer.step()
        optimizer.param_groups[0][name] = KINDS["adamw"][1].get(name, optimizer.defaults[name])
        assert bits(optimizer)[0] == before[0]


def test_it_raises_where_it_is_asked_to() -> None:
    optimizer = made(on_nonfinite="raise")
    for t in range(3):
        put(optimizer, t)
        optimizer.step()
    before = bits(optimizer)
    put(optimizer, 3, torch.nan)
    with pytest.raises(FloatingPointError, match="is not finite"):
        optimizer.step()
    assert bits(optimizer) == before


def test_a_step_that_is_due_is_planned(served: list[bool]) -> None:
    options = {"refresh_every": 5, "stabilize_every": 5}
    ours, planned = made(**options), made(keeps=False, **options)
    for t in range(10):
        for optimizer in (ours, planned):
            put(optimizer, t, torch.nan if t == 2 else None)
            optimizer.step()
        assert bits(ours) == bits(planned)
    assert served == [True, True, True, True, False, True, True]


@pytest.mark.parametrize("moves", [True, False])
def test_rows_that_a_step_leaves_at_zero_have_their_scale_fitted(moves: bool, served: list[bool]) -> None:
    ours, planned = made(weight_decay=1.0, stiffness=0.0), made(weight_decay=1.0, stiffness=0.0, keeps=False)
    for t in range(7):
        for optimizer in (ours, planned):
            put(optimizer, t)
            if t < 5 or not moves:
                everyone(optimizer)[0].grad[1] = 0.0
            for group in optimizer.param_groups:
                group["lr"] = 1.0 if t == 3 else 1e-3
            optimizer.step()
            if t == 3:
                assert not everyone(optimizer)[0][1].any()
        assert bits(ours) == bits(planned)
    assert (ours.fitted_scales > 0) == moves
    assert served == [True, True, False]


def test_steps_of_several_processes_are_planned(served: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = made()
    for t in range(4):
        monkeypatch.setattr(_steady, "are_several", lambda t=t: t == 3)
        put(optimizer, t)
        optimizer.step()
    assert served == [True, False]


def test_others_classes_are_planned(served: list[bool]) -> None:
    """With a method of their own, in a class or beside it; with none they have a table."""

    class Own:
        def _shared_numbers(self, slot: Any) -> dict[str, float]:
            return super()._shared_numbers(slot) | {"keep": 0.5}  # type: ignore[misc]

    class Mixed(Own, optim.StiffnessAdamW):
        pass

    class Named(optim.StiffnessAdamW):
        """Another name."""

    assert (optim.StiffnessAdamW.keeps_table, Mixed.keeps_table, Named.keeps_table) == (True, False, True)


def test_it_holds_no_tensor_between_steps() -> None:
    optimizer = made("adamw-8bit")
    for t in range(4):
        put(optimizer, t)
        optimizer.step()
    (p, *_), table = everyone(optimizer), optimizer._table
    assert table is not None
    dead = [
        weakref.ref(x)
        for x in (p, p.codes, p.kept_scale, p.grad, *optimizer.state[p].values())
        if isinstance(x, Tensor)
    ]
    optimizer.param_groups[0]["params"].pop(0)
    optimizer.state.pop(p)
    del p
    gc.collect()
    assert [ref() for ref in dead] == [None] * len(dead)
    assert not table.serves(optimizer)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_it_is_no_state(way: Callable[[Any], Any]) -> None:
    optimizer = made()
    for t in range(3):
        put(optimizer, t)
        optimizer.step()
    other = way(optimizer)
    assert other._table is None
    for each in (optimizer, other):
        put(each, 3)
        each.step()
    assert bits(optimizer) == bits(other)


# --------------------------------------------------------------------------------------------------------- on a card
@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tables that steps on a card upload; their kernels do nothing."""

    class Idle:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **__: None

    seen: list[Any] = []
    own = launch._uploaded
    monkeypatch.setattr(_steady, "on_gpu", lambda device: True)
    monkeypatch.setattr(_steady, "is_triton", lambda slot: True)
    monkeypatch.setattr(reading, "is_read_at_once", lambda x: False)
    monkeypatch.setattr(launch, "_kernels", lambda: (Idle(),) * 3)
    monkeypatch.setattr(launch, "options", dict)
    monkeypatch.setattr(launch, "_uploaded", lambda table, device: seen.append(table.copy()) or own(table, device))
    return seen


@pytest.mark.parametrize("granularity", ["channel", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_card_is_given_is_what_is_planned(
    kind: str, granularity: Any, uploads: list[Any], served: list[bool]
) -> None:
    """Records to the bit, but for addresses: those are of each optimizer's own tensors."""
    ours, planned = made(kind, granularity), made(kind, granularity, keeps=False)
    for t in range(7):
        tables = []
        for optimizer in (ours, planned):
            uploads.clear()
            put(optimizer, t)
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.step()
            tables.append(list(uploads))
            said = optimizer._unheard[0][0].x if optimizer._unheard else None
            if said is None:
                continue
            (jobs, widened), states = uploads, [optimizer.state[p] for p in everyone(optimizer)]
            for p, state, job in zip(everyone(optimizer), states, jobs.view(JOB).ravel(), strict=True):
                parts = [p.codes, p.grad, p.kept_scale] if isinstance(p, fm.FP8Tensor) else [p, p.grad]
                parts += [x for name, x in state.items() if name.startswith(("exp_", "mom", "avg_", "sq_", "resid"))]
                assert {int(place) for place in job["pointers"][:-1]} - {0} == {x.data_ptr() for x in parts}
                assert int(job["pointers"][-1]) in range(said[1].data_ptr(), said.data_ptr() + said.nbytes)
            for p, record in zip(everyone(optimizer), widened.view(WIDENED).ravel(), strict=False):
                assert int(record["pointers"][0]) == p.codes.data_ptr()
                assert int(record["pointers"][3]) == p.grad.data_ptr()
                assert int(record["pointers"][5]) in range(said[1].data_ptr(), said.data_ptr() + said.nbytes)
        for dtype, first, second in zip((JOB, WIDENED), *tables, strict=False):
            for name in set(dtype.names or ()) - {"pointers"}:
                assert first.view(dtype)[name].tobytes() == second.view(dtype)[name].tobytes()
    assert sum(served) >= 3
    assert [int(state["step"]) for state in ours.state.values()] == [7] * 4


def test_a_gradient_that_is_aligned_otherwise_is_planned(uploads: list[Any], served: list[bool]) -> None:
    """Its kernel may load by 128 bits."""
    optimizer = made()
    for t in range(5):
        put(optimizer, t)
        if t == 4:
            p = everyone(optimizer)[0]
            p.grad = torch.cat([torch.zeros(1), p.grad.flatten()])[1:].view(p.shape)
        optimizer.step()
    assert served == [True, True, False]
