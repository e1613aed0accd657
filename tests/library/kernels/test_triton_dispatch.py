"""Launches and waits of a step on a GPU, counted without one, and failures of kernels."""

import contextlib
import copy
import dataclasses
import pickle
import subprocess
import sys
import warnings
from collections import Counter
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
import torch
from optimizer_cases import normal, step_from
from paths import as_on_a_card
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fp8manifold as fm
from fp8manifold import _triton, optim
from fp8manifold._base.blocks import BLOCK, block_on
from fp8manifold._triton import launch
from fp8manifold._triton.kinds import KernelSpec, as_constants, format_of
from fp8manifold.formats import as_format
from fp8manifold.optim import _finite, _graphed, _plan, _steady, _streams, _triton_step
from fp8manifold.optim._eager_step import blocks_of
from fp8manifold.optim._state import restore_dtypes

VIEWS = (
    "view",
    "detach",
    "alias",
    "slice",
    "select",
    "unsqueeze",
    "expand",
    "t",
    "transpose",
    "reshape",
    "as_strided",
)
WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_to_copy", "item")


class Kernel:
    """A stand-in for a kernel: it counts launches, and sets words of verdicts in `bad`."""

    #: places of words that the next verdict sets
    bad: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, name, counts):
        self.name, self.counts = name, counts

    def __getitem__(self, grid):
        assert grid[0] > 0
        return self._launch

    def _launch(self, table, chunks, words, *_, **__):
        self.counts.update(["launches", self.name])
        while self.name == "verdict" and self.bad:
            words[self.bad.pop()] = 1


def tensors_of(values):
    return [x for x in torch.utils._pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]


class Watch(TorchDispatchMode):
    """A count of operators over memory that would be the card's: launches, and waits."""

    def __init__(self, host, counts):
        super().__init__()
        self.host, self.counts = host, counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs, outputs = (
            set(map(self._place, tensors_of(values))) for values in ((args, kwargs), result)
        )
        if name == "lift_fresh":  # of NumPy's memory, or of numbers
            self.host |= outputs
        elif not inputs <= self.host and name not in VIEWS:
            self.counts.update(["waits" if name in WAITS else "launches", name])
        if not inputs and name in ("zeros", "full", "ones"):
            self.counts.update(["launches", name])
        if inputs and inputs <= self.host:
            self.host |= outputs
        return result

    @staticmethod
    def _place(x):
        return (
            x.untyped_storage().data_ptr() if type(x) in (torch.Tensor, torch.nn.Parameter) else 0
        )


@pytest.fixture
def on_a_card(monkeypatch):
    """Steps go the way that they go on a GPU, to kernels that count."""
    counts = Counter()
    as_on_a_card(monkeypatch)
    monkeypatch.setattr(Kernel, "bad", [])
    names = ("step", "verdict", "widen")
    monkeypatch.setattr(launch, "_kernels", lambda: tuple(Kernel(name, counts) for name in names))
    statistics = launch.FactorKernels
    before_steps = statistics(*[Kernel(name, counts) for name in statistics._fields])
    monkeypatch.setattr(launch, "_factor_kernels", lambda: before_steps)
    monkeypatch.setattr(launch, "options", dict)
    return counts


def was_read(verdict):
    return "values" in vars(verdict)


def parameters(count, **options):
    weights = [
        fm.FP8Parameter(normal(4, 256 * (1 + i % 3), seed=i), "E4M3", seed=i, **options)
        for i in range(count)
    ]
    for p in weights:
        p.grad = torch.ones(p.shape)
    return weights


def one(kind=optim.StiffnessAdamW, granularity="channel", **options):
    p = fm.FP8Parameter(normal(4, 256), "E4M3", seed=1, granularity=granularity)
    p.grad = torch.ones(p.shape)
    return p, kind([p], 1e-3, **options)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize(
    ("writeback", "granularity"),
    [("stochastic", "channel"), ("residual8", "channel"), ("residual8", "block")],
)
def test_a_steady_step_is_a_few_launches_and_no_wait(moments, writeback, granularity, on_a_card):
    """290 parameters; the host reads the flags of the step before."""
    weights = parameters(290, granularity=granularity)
    optimizer = optim.StiffnessAdamW(weights, 1e-3, moments=moments, writeback=writeback)
    for _ in range(2):
        optimizer.step()
    ((last_verdict, *_),) = optimizer._pending_verdicts
    on_the_host = [*(state["grid"] for state in optimizer.state.values()), last_verdict.x]
    on_a_card.clear()
    with Watch({x.untyped_storage().data_ptr() for x in on_the_host}, on_a_card):
        optimizer.step()
    assert on_a_card["step"] == on_a_card["verdict"] == on_a_card["widen"] == 1
    assert on_a_card["launches"] <= 12, on_a_card
    assert on_a_card["waits"] == 0, on_a_card
    assert was_read(last_verdict)
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}
    assert not was_read(optimizer._pending_verdicts[0][0])


MUONS_STEPS = {
    "float32 momentum": {"moments": "float32"},
    "8-bit momentum": {"moments": "8bit"},
    "8-bit momentum and residual": {"moments": "8bit", "writeback": "residual8"},
}


@pytest.mark.parametrize("count", [2, 48])
@pytest.mark.parametrize("options", MUONS_STEPS.values(), ids=MUONS_STEPS.keys())
def test_a_steady_step_of_muon_is_a_few_launches_and_no_wait(options, count, on_a_card):
    """Matrices of two shapes and Adam's vectors: launches do not depend on how many."""
    shapes = [(8, 64), (64, 8), (64,)]
    weights = []
    for i in range(count):
        weights += [fm.FP8Parameter(normal(*shape, seed=i), "E4M3", seed=i) for shape in shapes]
    for p in weights:
        p.grad = torch.ones(p.shape)
    groups = [
        {"params": [p for p in weights if p.dim() == 2]},
        {"params": [p for p in weights if p.dim() == 1], "direction": "adam"},
    ]
    optimizer = optim.StiffnessMuon(groups, 1e-3, ns_dtype=torch.float32, **options)
    for _ in range(2):
        optimizer.step()
    ((last_verdict, *_),) = optimizer._pending_verdicts
    on_the_host = [*(state["grid"] for state in optimizer.state.values()), last_verdict.x]
    on_a_card.clear()
    with Watch({x.untyped_storage().data_ptr() for x in on_the_host}, on_a_card):
        optimizer.step()
    # Adam's part, and for each shape the momentum and the weights
    assert on_a_card["step"] == 1 + 2 * 2
    assert on_a_card["verdict"] == 1
    # for each shape 5 iterations of 3 products, the norm, the copies
    assert on_a_card["launches"] <= 70, on_a_card
    assert on_a_card["waits"] == 0, on_a_card
    assert was_read(last_verdict)
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}


#: Options of an Adafactor step, and the kinds of its statistics: of codes and of floats.
ADAFACTORS_STEPS = {
    "without momentum": {},
    "8-bit momentum and residual": {"momentum": 0.9, "moments": "8bit", "writeback": "residual8"},
}


@pytest.mark.parametrize("count", [1, 48])
@pytest.mark.parametrize("options", ADAFACTORS_STEPS.values(), ids=ADAFACTORS_STEPS.keys())
def test_a_steady_step_of_adafactor_is_a_few_launches_and_no_wait(options, count, on_a_card):
    """Matrices of two widths, experts and vectors: launches do not depend on how many."""
    weights = []
    for i in range(count):
        for shape in ((8, 1024), (3, 4, 2048)):
            weights.append(fm.FP8Parameter(normal(*shape, seed=i), "E4M3", seed=i))
        weights.append(torch.nn.Parameter(normal(640, seed=i)))
    for p in weights:
        p.grad = torch.ones(p.shape)
    optimizer = optim.StiffnessAdafactor(weights, 1e-3, **options)
    for _ in range(2):
        optimizer.step()
    ((last_verdict, *_),) = optimizer._pending_verdicts
    grids = [state["grid"] for state in optimizer.state.values() if "grid" in state]
    on_the_host = [*grids, last_verdict.x]
    on_a_card.clear()
    with Watch({x.untyped_storage().data_ptr() for x in on_the_host}, on_a_card):
        optimizer.step()
    # of codes and of floats
    assert on_a_card["square"] == on_a_card["direction"] == 2
    assert (on_a_card["column"], on_a_card["row"], on_a_card["mean"], on_a_card["clip"]) == (
        *(1, 2, 1, 1),
    )
    assert on_a_card["verdict"] == on_a_card["widen"] == 1
    assert on_a_card["launches"] <= 24, on_a_card
    assert on_a_card["waits"] == 0, on_a_card
    assert was_read(last_verdict)
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}
    assert not was_read(optimizer._pending_verdicts[0][0])


def test_a_step_in_backward_waits_for_no_parameter(on_a_card):
    """The flag is that of the same parameter's last step, a whole pass ago."""
    weights = parameters(5)
    optimizer = optim.StiffnessAdamW(weights, 1e-3)
    optimizer.zero_grad()
    with optim.step_in_backward(optimizer):
        for step in range(4):
            last_verdicts = [verdict for verdict, *_ in optimizer._pending_verdicts]
            optimizer.zero_grad()
            sum(p.square().sum() for p in weights).backward()
            assert all(map(was_read, last_verdicts)), step
            assert not any(was_read(verdict) for verdict, *_ in optimizer._pending_verdicts), step
            assert len(optimizer._pending_verdicts) == (len(weights) if step else 0), step
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}


def loaded(optimizer):
    copied = optim.StiffnessAdamW([*optimizer.state], 1e-3)
    copied.load_state_dict(optimizer.state_dict())
    return copied


VIEWERS = {
    "itself": lambda o: o,
    "loaded": loaded,
    "deepcopy": copy.deepcopy,
    "pickle": lambda o: pickle.loads(pickle.dumps(o)),
}


@pytest.mark.parametrize("count", ["skipped_steps", "skipped_in_row", "widened_scales"])
@pytest.mark.parametrize("viewer", VIEWERS)
def test_whoever_looks_sees_a_step_that_the_card_has_left_out(viewer, count, on_a_card):
    p, optimizer = one()
    for step in range(3):
        Kernel.bad += [(0, 0)] * (step == 2)
        optimizer.step()
    viewed = VIEWERS[viewer](optimizer)
    (state,) = viewed.state.values()
    assert int(state["step"]) == 2
    assert getattr(viewed, count) == (count != "widened_scales")  # whichever of them is read first
    assert (viewed.skipped_steps, viewed.skipped_in_row) == (1, 1)
    optimizer.step()
    assert (optimizer.skipped_in_row, int(optimizer.state[p]["step"])) == (0, 3)


@pytest.mark.parametrize("refused", [False, True])
def test_the_next_step_goes_on_from_the_count_that_there_is(refused, on_a_card):
    """A count that somebody has written or replaced is read again."""
    p, optimizer = one()
    for step in range(3):
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict())
        Kernel.bad += [(0, 0)] * (refused and step == 2)
        optimizer.step()
    expected = 2 if refused else 3
    with Watch(set(), on_a_card):
        assert optimizer._slots()[0].steps_done == expected
    assert on_a_card["waits"] == 0
    optimizer.state[p]["step"].fill_(7)
    assert optimizer._slots()[0].steps_done == 7
    optimizer.state[p]["step"] = torch.tensor(5.0)
    assert optimizer._slots()[0].steps_done == 5
    optimizer.step()
    assert int(optimizer.state[p]["step"]) == optimizer._slots()[0].steps_done == 6
    Kernel.bad += [(0, 0)]
    optimizer.step()
    optimizer.load_state_dict(saved)
    assert int(optimizer.state[p]["step"]) == 2
    assert optimizer.skipped_steps == 0


def test_parameters_at_fault_are_named_though_their_gradients_are_gone(on_a_card):
    weights = parameters(3)
    optimizer = optim.StiffnessAdamW(
        [("a", weights[0]), ("b", weights[1]), ("c", weights[2])], 1e-3
    )
    optimizer.warn_after = 1
    optimizer.step()
    Kernel.bad += [(0, 0), (2, 2)]  # a gradient of the second is not finite
    optimizer.step()
    optimizer.zero_grad()
    with pytest.warns(
        RuntimeWarning, match=r"parameter 1 of group 0 \('b', shape \(4, 512\)\) is not finite"
    ):
        assert optimizer.skipped_steps == 1


def test_a_backward_pass_that_the_card_has_left_steps_out_of_is_counted_once(on_a_card):
    """Its verdicts come late, one for each parameter."""
    weights = [fm.FP8Parameter(normal(4, 256, seed=i), "E4M3", seed=i) for i in range(3)]
    refused = set()

    def refuse(parameter):
        Kernel.bad += [(0, 0), (1, 2)] * (id(parameter) in refused)

    for p in weights:
        p.register_post_accumulate_grad_hook(refuse)  # before the step's own
    optimizer = optim.StiffnessAdamW(weights, 1e-3)
    optim.step_in_backward(optimizer)

    def backward(*parameters):
        refused.clear()
        refused.update(map(id, parameters))
        optimizer.zero_grad()
        sum(p.square().sum() for p in weights).backward()
        optimizer.step()

    backward()
    backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backward(*weights[:2])
        backward(weights[2])
        assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (2, 2)
    assert (
        len([warning for warning in caught if "its step was skipped" in str(warning.message)]) == 2
    )
    backward()
    assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (2, 0)


@pytest.mark.parametrize(
    ("on_nonfinite", "granularity", "waits"),
    [("raise", "channel", True), ("skip", "tensor", True), ("skip", "channel", False)],
)
def test_what_would_be_known_too_late_is_waited_for(on_nonfinite, granularity, waits, on_a_card):
    _, optimizer = one(granularity=granularity, on_nonfinite=on_nonfinite)
    optimizer.step()
    optimizer.step()
    assert was_read(optimizer._pending_verdicts[0][0]) == waits


def test_parameters_of_every_storage_step_steadily(on_a_card):
    """Nearly every model has ordinary ones, too: biases, norms and embeddings."""
    layer = fm.quantize_model(torch.nn.Linear(32, 8), "E4M3", storage="grid")
    everyone = [
        *layer.parameters(),
        fm.FP8Parameter(normal(4, 32), "E4M3", seed=1),
        torch.nn.Parameter(normal(7)),
    ]
    optimizer = optim.StiffnessAdamW(everyone, 1e-3)
    for p in everyone:
        p.grad = torch.ones(p.shape)
    optimizer.step()
    optimizer.step()
    assert len(optimizer._pending_verdicts) == 1


@pytest.mark.parametrize("cause", ["first", "refresh", "remainder", "observer"])
def test_steps_that_plan_more_have_their_verdict_first(cause, on_a_card):
    p, optimizer = one(**({"refresh_every": 1} if cause == "refresh" else {}))
    assert not _steady.is_steady(optimizer, optimizer._slots())
    if cause == "first":
        return
    optimizer.step()
    if cause == "observer":
        optimizer.observer = lambda view: None
    if cause == "remainder":
        p.remainder = torch.zeros(p.shape, dtype=torch.int8)
    assert not _steady.is_steady(optimizer, optimizer._slots())


class Preparing:
    def _prepare(self, slot):
        super()._prepare(slot)


class Mixed(Preparing, optim.StiffnessAdamW):
    """An optimizer that plans in another way."""


class Named(optim.StiffnessAdamW):
    defers_verdict = False


class Numbers(optim.StiffnessAdamW):
    def _numbers(self, slot):
        return super()._numbers(slot) | {"rate": 0.0}


@pytest.mark.parametrize("kind", [optim.FisherNaturalGradient, Mixed, Named])
def test_optimizers_that_do_more_defer_no_verdict_of_a_plan(kind):
    assert not (kind.defers_verdict and kind.is_planned)


@pytest.mark.parametrize(
    ("kind", "keeps_plan"),
    [(Mixed, False), (Numbers, False), (Named, True), (optim.StiffnessAdamW, True)],
)
def test_optimizers_that_do_more_keep_no_plan(kind, keeps_plan):
    """Those that plan or take steps in another way have no plan on a card."""
    assert kind.keeps_plan == keeps_plan


@pytest.mark.parametrize(
    ("kind", "is_steady"),
    [(Mixed, False), (Named, False), (Numbers, True), (optim.StiffnessAdamW, True)],
)
@pytest.mark.usefixtures("on_a_card")
def test_optimizers_that_do_more_have_their_verdict_first(kind, is_steady):
    _, optimizer = one(kind)
    optimizer.step()
    assert _steady.is_steady(optimizer, optimizer._slots()) == is_steady


@pytest.mark.parametrize(
    ("kind", "clip", "with_floats", "is_decided"),
    [
        (optim.RiemannianAdam, 2.0**4, False, True),
        (optim.RiemannianAdam, 2.0**4, True, False),
        (optim.RiemannianSGD, 2.0, False, True),
        (optim.RiemannianSGD, 2.0**40, False, False),
    ],
    ids=["unit of S", "geoopt's arithmetic", "bound below 1", "bound above 1"],
)
@pytest.mark.usefixtures("on_a_card")
def test_a_card_decides_on_riemannian_steps(kind, clip, with_floats, is_decided):
    """But where the host steps too, or the square of a gradient of codes may overflow."""
    weights = [fm.FP8Parameter(normal(4, 256), "E4M3", seed=1)]
    if with_floats:
        weights.append(torch.nn.Parameter(normal(7)))
    optimizer = kind(weights, 1e-3, float_lr=1e-3, clip=clip)
    for p in weights:
        p.grad = torch.ones(p.shape)
    optimizer.step()
    optimizer.step()
    assert len(optimizer._pending_verdicts) == is_decided


def test_eager_blocks_are_those_of_the_device(monkeypatch):
    """On a card moving a block takes longer than a launch, and temporaries stay small."""
    assert block_on(torch.device("cpu")) == BLOCK
    moved = 8 * block_on(torch.device("cuda"))  # bytes: a float32 read and another written
    assert moved / 3e12 > 5e-6
    assert moved < 2**26
    p, slots = fm.FP8Parameter(normal(600, 512), "E4M3", seed=1), []
    optimizer = optim.StiffnessAdamW([p], 1e-3)
    optimizer._take = slots.extend
    step_from(optimizer, p, torch.ones(p.shape))
    (slot,) = slots
    assert len(list(blocks_of(slot))) == 3
    monkeypatch.setattr(
        "fp8manifold.optim._eager_step.block_on", lambda device: block_on(torch.device("cuda"))
    )
    assert len(list(blocks_of(slot))) == 1


def test_counts_stay_on_the_host_wherever_a_state_is_loaded_to():
    p, optimizer = one()
    optimizer.step()
    saved = optimizer.state_dict()
    with FakeTensorMode(allow_non_fake_inputs=True):
        saved["state"][0]["step"] = torch.ones((), device="cuda")
        restore_dtypes(optimizer, saved)
    assert optimizer.state[p]["step"].device.type == "cpu"


def test_products_longer_than_31_bits_are_taken_in_parts(monkeypatch):
    x = normal(1000, dtype=torch.float64)
    whole = _finite._sum_of_squares(x)
    monkeypatch.setattr(_finite, "_DOT", 7)
    torch.testing.assert_close(_finite._sum_of_squares(x), whole)
    x[999] = torch.inf
    assert not _finite._sum_of_squares(x).isfinite()


def test_a_first_step_waits_once_for_the_word_of_its_values(monkeypatch):
    counts = Counter()
    x = normal(5 * BLOCK // 2).double()
    expected = _streams.content_word(x, (1, 2, 3))
    monkeypatch.setattr(_streams, "block_on", lambda device: BLOCK // 4)
    with Watch(set(), counts):
        assert _streams.content_word(x, (1, 2, 3)) == expected
    assert counts["_local_scalar_dense"] == 1


def test_every_nan_counts_alike_in_a_stream(monkeypatch):
    """A GPU's arithmetic gives other bits of it than a CPU's."""
    patterns = [0x7FC00000, 0x7FFFFFFF, 0x7F800001, -0x400000]
    x = [
        torch.tensor([1, bits, 0x7F800000], dtype=torch.int32).view(torch.float32)
        for bits in patterns
    ]
    native = {_streams.content_word(values, (1, 2, 3)) for values in x}
    monkeypatch.setattr(_streams, "content", lambda *_: None)
    assert native == {_streams.content_word(values, (1, 2, 3)) for values in x}
    assert len(native) == 1


@pytest.mark.parametrize(
    ("version", "can"), [("3.5.1", False), ("3.6.0", True), ("3.10rc1+git", True)]
)
def test_a_triton_that_flushes_subnormals_has_no_kernels(version, can, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_triton, "is_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    _triton._keeps_subnormals.cache_clear()
    try:
        with (
            contextlib.nullcontext()
            if can
            else pytest.warns(UserWarning, match=f"Triton {version} flushes")
        ):
            assert _triton.is_available() is can
        assert _triton.is_available() is can  # and not warned of again
    finally:
        _triton._keeps_subnormals.cache_clear()


def test_every_value_that_a_kernel_is_compiled_for_is_a_constant():
    """Triton below 3.8 takes a bare attribute for one of the GPU's."""
    language = pytest.importorskip("triton.language", reason="Triton is not installed")
    fmt = format_of(as_format("E4M3"))
    spec = KernelSpec(*["adam"] * 7, *[True] * 8, 0, True, "float32", "float32", fmt, fmt, True)
    known = as_constants(spec)
    assert as_constants(spec) is known
    for field in dataclasses.fields(spec):
        assert type(getattr(known, field.name)) is language.constexpr, field
    assert type(known.format.value.largest) is language.constexpr
    assert repr(known) == repr(spec)
    assert hash(known) == hash(spec)
    assert as_constants("float32") == "float32"


@pytest.mark.parametrize("in_backward", [False, True])
def test_to_record_a_step_is_refused_in_one_line(in_backward, monkeypatch):
    p = fm.FP8Parameter(normal(4, 8), "E4M3", seed=1)
    optimizer, codes = optim.StiffnessAdamW([p], 1e-3), p.codes.clone()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    if in_backward:
        optim.step_in_backward(optimizer)
        take = p.square().sum().backward
    else:
        p.square().sum().backward()
        take = optimizer.step
    with pytest.raises(RuntimeError, match="a CUDA graph can't record a step of StiffnessAdamW"):
        take()
    assert torch.equal(p.codes, codes)
    assert not optimizer.state


def in_backward(p):
    optimizer = optim.StiffnessSGD([p], 1.0)
    optim.step_in_backward(optimizer)
    return optimizer


OF_TORCH = "optimizer is a SGD: graphed takes those of fp8manifold.optim"


#: name: (a function that makes an optimizer of a parameter, its error, the message)
NOT_GRAPHED = {
    "of torch": (lambda p: torch.optim.SGD([p], 1.0), TypeError, OF_TORCH),
    "on a CPU": (
        lambda p: optim.StiffnessAdamW([p], 1.0),
        ValueError,
        "StiffnessAdamW are on cpu: a CUDA graph takes",
    ),
    "in backward": (in_backward, ValueError, "this StiffnessSGD steps in the backward pass"),
}


@pytest.mark.parametrize(("make", "error", "message"), NOT_GRAPHED.values(), ids=NOT_GRAPHED)
def test_what_no_graph_can_hold_is_refused(make, error, message):
    p = fm.FP8Parameter(normal(4, 8), "E4M3", seed=1)
    with pytest.raises(error, match=message):
        optim.graphed(lambda: None, make(p))


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("no C compiler"), launch.KernelsUnavailableError),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError),
    ],
    ids=["no compiler", "no memory"],
)
def test_a_kernel_that_can_not_be_compiled_is_told_apart_from_a_card_without_memory(
    error, raised, monkeypatch
):
    monkeypatch.setattr(launch, "options", dict)
    kernel = mock.Mock(**{"warmup.side_effect": error})
    with pytest.raises(raised, match=str(error)):
        launch._compile(launch.Call(kernel, torch.zeros(1, 2), ()), torch.device("cuda"))


def test_without_kernels_steps_are_taken_otherwise_with_one_warning(monkeypatch):
    error = launch.KernelsUnavailableError("ImportError: libcuda.so.1")
    monkeypatch.setattr(launch, "_kernels", mock.Mock(side_effect=error))
    monkeypatch.setattr(_triton_step, "_given_up", [])
    p, q = (fm.FP8Parameter(normal(4, 256), "E4M3", seed=1) for _ in range(2))
    optimizers = [optim.StiffnessAdamW([weight], 1e-3) for weight in (p, q)]
    for _ in range(2):
        p.grad = q.grad = torch.ones(p.shape)
        for optimizer in optimizers:
            optimizer.step()
    monkeypatch.setattr(_plan, "on_gpu", lambda device: True)
    monkeypatch.setattr(_steady, "is_triton", lambda slot: not _triton_step._given_up)
    with pytest.warns(optim.CompileUnavailableWarning, match=r"libcuda\.so\.1"):
        optimizers[0].step()
    monkeypatch.setattr(_plan, "on_gpu", lambda device: False)
    optimizers[1].step()
    assert torch.equal(p.codes, q.codes)
    monkeypatch.setattr(_plan, "on_gpu", lambda device: True)
    optimizers[0].step()
    assert int(optimizers[0].state[p]["step"]) == 4


def test_an_installed_triton_is_not_imported_on_a_cpu():
    program = (
        "import sys, torch, fp8manifold as fm\np = fm.FP8Parameter(torch.ones(2, 3), 'E4M3', "
        "seed=1); p.grad = torch.ones(2, 3)\nfm.optim.StiffnessAdamW([p], 1e-3).step(); "
        "p.dequantize()\nprint([m for m in sys.modules if m.startswith('fp8manifold._triton.') and "
        "m.split('.')[-1] in ('step', 'arrays', 'format', 'factors', 'stages')])"
    )
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"


def test_recordings_share_a_pool_that_is_there_before_the_first(monkeypatch):
    """A graph of torch 2.11 has no pool to tell while it records."""
    recording, handle = mock.Mock(), mock.Mock(return_value=(0, 7))
    stand_ins = {
        "CUDAGraph": lambda: recording,
        "synchronize": mock.Mock(),
        "graph_pool_handle": handle,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    graphs = _graphed._Graphs()
    for _ in range(2):
        with graphs.recording():
            pass
    calls = recording.capture_begin.call_args_list
    assert [[*call.args, *call.kwargs.values()] for call in calls] == [[(0, 7)]] * 2
