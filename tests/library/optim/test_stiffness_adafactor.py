"""StiffnessAdafactor against torch's Adafactor, and against a loop in float64.

Its statistics, its sums, and the bytes of weights and state.
"""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from optimizer_cases import (
    bits_of,
    free_weight,
    frozen,
    grid_weight,
    normal,
    put_gradients,
    stored_weight,
    take_steps,
    through_disk,
    value_of,
)
from paths import on_path
from torch import nn

import fp8manifold as fm
from fp8manifold.optim import StiffnessAdafactor, _factored
from fp8manifold.optim._factors import Factors, matrices_of, sum_of_runs, sum_of_tiles

SHAPES = [(), (7,), (1, 9), (70, 1), (70, 33), (40, 600), (3, 5, 6), (2, 3, 3, 3)]
OPTIONS = {
    "default": {},
    "decay": {"weight_decay": 0.1},
    "maximize": {"maximize": True},
    "long steps": {"lr": 0.5, "d": 1.5},
    "eps": {"eps": (1e-2, 1e-2)},
    "beta2_decay": {"beta2_decay": -0.3},
}


def gradient_at(shape, step):
    """Return a gradient; of a matrix one row and one column are zeros in every step."""
    gradient = normal(*shape, seed=100 + step, std=10.0 ** (step % 3 - 1))
    if len(shape) > 1 and shape[-2] > 1:
        gradient[..., 0, :] = 0
    if len(shape) > 1 and shape[-1] > 1:
        gradient[..., :, 0] = 0
    return gradient


def steps(optimizer, parameter, count):
    for t in range(count):
        parameter.grad = gradient_at(parameter.shape, t).to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_and_state_of_float32_parameters_are_torchs_to_rounding(shape, options):
    start = normal(*shape, std=0.1)
    ours, torchs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = StiffnessAdafactor([ours], **options)
    oracle = torch.optim.Adafactor([torchs], **options)
    steps(optimizer, ours, 6)
    steps(oracle, torchs, 6)
    assert (torchs - start).norm() > 1e-3 * start.norm()
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)
    for name, value in oracle.state[torchs].items():
        torch.testing.assert_close(optimizer.state[ours][name], value, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("shape", [(7,), (70, 33), (3, 5, 6)], ids=str)
def test_steps_of_float64_parameters_are_torchs(shape):
    ours, torchs = (nn.Parameter(normal(*shape, dtype=torch.float64, std=0.1)) for _ in "ab")
    steps(StiffnessAdafactor([ours], lr=0.1), ours, 5)
    steps(torch.optim.Adafactor([torchs], lr=0.1), torchs, 5)
    torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-14)


def oracle_in_float64(weight, gradients, *, lr, momentum, decay=-0.8, eps=2.0**-23, matrices=None):
    """Return weights after steps, by loops over rows and columns in float64."""
    w = weight.double().numpy().reshape(matrices or weight.shape)
    n, m = w.shape
    rows, columns = np.zeros(n), np.zeros(m)
    average = np.zeros((n, m))
    for t, g in enumerate(gradients, 1):
        g = g.double().numpy().reshape(n, m)
        gain = t**decay
        for i in range(n):
            rows[i] = (1 - gain) * rows[i] + gain * sum(x * x for x in g[i]) / m
        for j in range(m):
            columns[j] = (1 - gain) * columns[j] + gain * sum(x * x for x in g[:, j]) / n
        v = np.outer(rows, columns) / max(rows.mean(), eps)
        u = g / np.sqrt(np.maximum(v, eps * eps))
        u = u / max(1.0, math.sqrt((u * u).mean()))
        average = momentum * average + (1 - momentum) * u
        size = max(1e-3, math.sqrt((w * w).mean()))
        w = w - min(lr, t**-0.5) * size * average
    return torch.from_numpy(w).reshape(weight.shape)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("shape", "matrix_shape", "matrices"),
    [((20, 30), "auto", (20, 30)), ((6, 2, 3, 3), "flatten", (6, 18))],
    ids=["matrix", "kernel"],
)
def test_steps_are_those_of_a_loop_in_float64(shape, matrix_shape, matrices, momentum):
    weight = nn.Parameter(normal(*shape, std=0.1))
    start = weight.detach().clone()
    optimizer = StiffnessAdafactor([weight], lr=0.05, momentum=momentum, matrix_shape=matrix_shape)
    gradients = [gradient_at(shape, t) for t in range(5)]
    steps(optimizer, weight, 5)
    expected = oracle_in_float64(start, gradients, lr=0.05, momentum=momentum, matrices=matrices)
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_experts_are_stepped_each_like_a_matrix_but_for_the_size_of_the_step():
    """The statistics of each are its own; sizes are those of the whole parameter."""
    experts = nn.Parameter(normal(3, 8, 5, std=0.1))
    alone = [nn.Parameter(x.clone()) for x in experts.detach()]
    steps(StiffnessAdafactor([experts]), experts, 1)
    optimizer = StiffnessAdafactor(alone)
    for x, gradient in zip(alone, gradient_at((3, 8, 5), 0), strict=True):
        x.grad = gradient
    optimizer.step()
    shared = StiffnessAdafactor([experts])
    steps(shared, experts, 1)
    for i, x in enumerate(alone):
        for name in ("row_var", "col_var"):
            assert torch.equal(shared.state[experts][name][i], optimizer.state[x][name])


@pytest.mark.parametrize("eps", [None, 0.0])
def test_rows_and_columns_without_gradients_move_nothing_and_divide_nothing(eps):
    weight = nn.Parameter(normal(6, 4, std=0.1))
    start = weight.detach().clone()
    steps(StiffnessAdafactor([weight], eps=(eps, 1e-3)), weight, 3)
    assert weight.isfinite().all()
    assert torch.equal(weight[0], start[0])
    assert torch.equal(weight[:, 0], start[:, 0])


def test_a_gradient_of_zeros_divides_nothing():
    weight = nn.Parameter(normal(6, 4, std=0.1))
    weight.grad = torch.zeros(6, 4)
    StiffnessAdafactor([weight], eps=(0.0, 1e-3)).step()
    assert weight.isfinite().all()


def test_sums_that_overflow_leave_a_step_of_the_usual_size():
    weight = nn.Parameter(torch.ones(30, 40))
    optimizer = StiffnessAdafactor([weight], lr=0.1)
    for _ in range(3):
        weight.grad = torch.full((30, 40), 1.5e19)
        optimizer.step()
    assert optimizer.skipped_steps == 0
    assert (weight < 0.8).all()
    assert (weight > 0.6).all()


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 511, 512, 513, 1025, 40000])
def test_a_sum_is_that_of_tiles_by_halves_and_of_runs(length):
    """In scalar float32, one addition after the other."""
    x = normal(length, std=1.0).square()

    def runs(numbers):
        while len(numbers) > 1:
            sums = []
            for start in range(0, len(numbers), 32):
                total = numbers[start]
                for number in numbers[start + 1 : start + 32]:
                    total = np.float32(total + number)
                sums.append(total)
            numbers = sums
        return numbers[0]

    def halves(tile):
        tile = list(tile) + [np.float32(0)] * (512 - len(tile))
        while len(tile) > 1:
            half = len(tile) // 2
            tile = [np.float32(tile[i] + tile[half + i]) for i in range(half)]
        return tile[0]

    numbers = list(x.numpy())
    assert float(sum_of_runs(x, 0)) == float(runs(numbers))
    tiles = [halves(numbers[start : start + 512]) for start in range(0, length, 512)]
    assert float(sum_of_tiles(x)) == float(runs(tiles))


def test_a_multiplier_follows_from_row_column_and_cap():
    factors = Factors(
        row=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        column=torch.tensor([[1.0, 10.0, 100.0], [2.0, 20.0, 200.0]]),
        cap=torch.tensor(250.0),
        size=torch.tensor(1.0),
        rows=2,
    )
    whole = torch.tensor([[1.0, 10, 100], [2, 20, 200], [6, 60, 250], [8, 80, 250]])
    assert torch.equal(factors.multiplier(0, (4, 3)), whole)
    assert torch.equal(factors.multiplier(5, (4,)), whole.flatten()[5:9])
    assert matrices_of((2, 2, 3), "auto") == (2, 2, 3)


def every_storage():
    """Return parameters of every storage, in rows of less and of more than a tile or a run."""
    weights = []
    for i, granularity in enumerate(["tensor", "channel", "block"]):
        for factors in (False, True):
            weights.append(
                stored_weight("E4M3", (70, 640), seed=i, granularity=granularity, factors=factors)
            )
    return [
        *weights,
        stored_weight("E5M2", (3, 40, 64), seed=3, granularity="channel"),
        stored_weight("E4M3FNUZ", (34, 20), seed=11),
        stored_weight("E2M5", (1300,), seed=4),
        stored_weight("E4M3_B10", (5, 300), seed=13),
        nn.Parameter(normal(2100, 36, std=0.1, seed=5)),
        nn.Parameter(normal(3, 17000, std=0.1, seed=6)),
        nn.Parameter(normal(40000, std=0.1, seed=7)),
        nn.Parameter(normal(std=0.1, seed=8)),
        nn.Parameter(normal(4, 3, 3, 3, std=0.1, seed=9)),
        nn.Parameter(normal(33, 65, std=0.1, seed=10).bfloat16()),
        grid_weight("E4M3", (30, 70), 2.0**-5),
        free_weight(normal(60, seed=12, std=0.1), "E5M2", 2.0**-3),
    ]


STEPS = {
    "default": {},
    "one byte": {"momentum": 0.9, "moments": "8bit"},
    "injected, decay": {"momentum": 0.9, "writeback": "momentum", "weight_decay": 0.1},
    "maximize": {"maximize": True},
    "residual, maximize": {"writeback": "residual8", "maximize": True, "stiffness": 1.0},
    "flatten, clipped": {"lr": 0.5, "matrix_shape": "flatten", "eps": (0.1, 1e-3)},
    "nearest": {"writeback": "nearest", "momentum": 0.5, "moments": "bfloat16"},
}


def test_pieces_of_any_size_have_the_bits_of_the_whole(monkeypatch):
    """PyTorch takes some rows, or some matrices, at a time."""
    results = []
    for size in (2**22, 700, 1):
        monkeypatch.setattr(_factored, "block_on", lambda device, size=size: size)
        weights = every_storage()[5:]
        optimizer = on_path("eager", StiffnessAdafactor(weights))
        take_steps([optimizer], [weights], range(2), 0.1)
        results.append([(bits_of(p), frozen(optimizer.state[p])) for p in weights])
    assert results[1] == results[0]
    assert results[2] == results[0]


@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_native_code_has_the_bits_of_pytorch_with_any_number_of_threads(options, monkeypatch):
    results = []
    for path, threads in (("eager", 1), ("native", 1), ("native", 3)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        weights = every_storage()
        optimizer = on_path(path, StiffnessAdafactor(weights, **options))
        for t in range(4):
            put_gradients(weights, t, 0.1)
            optimizer.step()
        results.append([(bits_of(p), frozen(optimizer.state[p])) for p in weights])
    eager, native, in_threads = results
    assert native == eager
    assert in_threads == eager


def is_in_place(p):
    if isinstance(p, fm.FP8Tensor):
        return p.kept_scale.dtype == torch.float32
    return not hasattr(p, "manifold")


@pytest.mark.parametrize("moments", ["none", "8bit"])
def test_a_planned_step_has_the_bits_of_one_that_is_not(moments):
    """A plan serves again for matrices and vectors of codes and of floats."""
    options = {} if moments == "none" else {"momentum": 0.9, "moments": moments}
    pairs = []
    for _ in "ab":
        # scales of blocks are decoded anew in each step
        weights = [p for p in every_storage() if p.dtype == torch.float32 and is_in_place(p)]
        pairs.append((weights, StiffnessAdafactor(weights, **options)))
    (weights, optimizer), (others, unplanned) = pairs
    unplanned.is_planned = False
    for t in range(6):
        take_steps((optimizer, unplanned), (weights, others), [t], 0.1)
        assert (optimizer._plan is not None) == (t > 0)
    assert unplanned._plan is None
    assert [bits_of(p) for p in weights] == [bits_of(p) for p in others]
    assert frozen(optimizer.state_dict()) == frozen(unplanned.state_dict())


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("eps", 1e-3, "eps=0.001 must be a pair"),
        ("eps", (None, None), r"eps\[1\]=None"),
        ("eps", (-1.0, 1e-3), r"eps\[0\]=-1.0"),
        ("d", 0.5, "d=0.5"),
        ("beta2_decay", 0.1, "beta2_decay=0.1"),
        ("matrix_shape", "rows", "matrix_shape='rows'"),
        ("moments", "8bit", "moments='8bit' needs momentum > 0"),
        ("writeback", "momentum", "writeback='momentum' needs momentum > 0"),
        ("foreach", True, "foreach=True is not supported"),
        ("beta_decay", -0.8, "unexpected keyword argument 'beta_decay'"),
    ],
)
def test_options_out_of_range_are_refused(option, value, message):
    with pytest.raises((TypeError, ValueError), match=message):
        StiffnessAdafactor([nn.Parameter(torch.ones(3))], **{option: value})


def test_a_state_of_other_matrices_is_refused():
    """And nothing has changed."""
    kernel = nn.Parameter(normal(4, 2, 3, std=0.1))
    optimizer = StiffnessAdafactor([kernel])
    steps(optimizer, kernel, 2)
    other = StiffnessAdafactor([nn.Parameter(kernel.detach().clone())], matrix_shape="flatten")
    state = optimizer.state_dict()
    state["param_groups"][0]["matrix_shape"] = "flatten"
    with pytest.raises(ValueError, match=r"row_var of shape \(4, 2, 1\).*needs \(4, 1\)"):
        other.load_state_dict(state)
    assert not other.state
    optimizer.param_groups[0]["matrix_shape"] = "flatten"
    before = kernel.detach().clone()
    with pytest.raises(ValueError, match="matrix_shape='flatten' needs"):
        steps(optimizer, kernel, 1)
    assert torch.equal(kernel, before)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_a_weight_that_is_nan_stays_and_counts_as_nothing(granularity):
    weight = stored_weight("E4M3", (4, 64), seed=1, granularity=granularity)
    twin = stored_weight("E4M3", (4, 64), seed=1, granularity=granularity)
    weight.codes[1, 2] = 0x7F
    twin.codes[1, 2] = 0
    optimizers = [StiffnessAdafactor([p], lr=0.1, writeback="nearest") for p in (weight, twin)]
    take_steps(optimizers, [[weight], [twin]], range(2))
    assert weight.codes[1, 2] == 0x7F
    twin.codes[1, 2] = 0x7F
    assert torch.equal(weight.codes, twin.codes)


def trained(kind, shapes, count, **options):
    weights = [nn.Parameter(normal(*shape, std=0.1, seed=i)) for i, shape in enumerate(shapes)]
    optimizer = kind(weights, lr=0.05, **options)
    take_steps([optimizer], [weights], range(count))
    return weights, optimizer


MIXED = [(7,), (20, 30), (3, 5, 6)]


def test_a_state_goes_to_torchs_adafactor_and_back():
    """Both go on where the other was, to rounding; averages are the same to the bit."""
    weights, ours = trained(StiffnessAdafactor, MIXED, 4)
    copies = [nn.Parameter(p.detach().clone()) for p in weights]
    torchs = torch.optim.Adafactor(copies, lr=1.0)
    torchs.load_state_dict(fm.optim.adafactor_state(through_disk(ours.state_dict())))
    assert torchs.param_groups[0]["lr"] == 0.05
    for p, copy in zip(weights, copies, strict=True):
        for name, value in torchs.state[copy].items():
            assert torch.equal(value, ours.state[p][name]), name
    take_steps([ours, torchs], [weights, copies], range(4, 7))
    for p, copy in zip(weights, copies, strict=True):
        torch.testing.assert_close(p, copy, rtol=1e-5, atol=1e-6)
    again = [nn.Parameter(p.detach().clone()) for p in copies]
    back = StiffnessAdafactor(again, lr=1.0)
    back.load_state_dict(fm.optim.adopted_state(through_disk(torchs.state_dict()), back))
    take_steps([back, torchs], [again, copies], range(7, 10))
    for p, copy in zip(again, copies, strict=True):
        torch.testing.assert_close(p, copy, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"row_var": torch.full((20, 1), -1.0)}, "row_var with values that no average"),
        ({"variance": torch.ones(20)}, "has variance, unlike Adafactor's"),
        ({"row_var": torch.ones(4, 1)}, r"row_var of shape \(4, 1\)"),
    ],
    ids=["negative", "unknown", "shape"],
)
def test_an_edited_state_of_adafactor_is_refused(edit, message):
    weights, torchs = trained(torch.optim.Adafactor, [(20, 30)], 2)
    state = torchs.state_dict()
    state["state"][0] |= edit
    optimizer = StiffnessAdafactor(weights)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(fm.optim.adopted_state(state, optimizer))
    assert not optimizer.state


def test_states_of_adafactor_go_into_no_other_optimizer():
    weights, torchs = trained(torch.optim.Adafactor, [(20, 30)], 2)
    with pytest.raises(ValueError, match="goes into StiffnessAdafactor only"):
        fm.optim.adopted_state(torchs.state_dict(), fm.optim.StiffnessAdamW(weights))
    flat = StiffnessAdafactor(weights, matrix_shape="flatten").state_dict()
    with pytest.raises(ValueError, match="matrix_shape='flatten'"):
        fm.optim.adafactor_state(flat)
    with pytest.raises(ValueError, match="not of StiffnessAdafactor"):
        fm.optim.adafactor_state(fm.optim.StiffnessAdamW(weights).state_dict())


def bytes_of(optimizer):
    """Return the bytes of parameters and state, but for a count and a grid each."""
    total = 0
    for parameter, state in optimizer.state.items():
        parts = [parameter]
        if isinstance(parameter, fm.FP8Tensor):
            parts = [parameter.codes, parameter.kept_scale]
        parts += [x for name, x in state.items() if torch.is_tensor(x) and name != "grid"]
        total += sum(x.numel() * x.element_size() for x in parts)
    return total


#: of a thirtieth of SmolLM2-135M's weights: its embedding and a layer of each shape
SCALED = {"embedding": (8192, 192), "q": (192, 192), "k": (64, 192), "down": (192, 512)}


def test_weights_and_state_take_little_more_than_a_byte_a_weight():
    weights = [
        stored_weight("E4M3", shape, seed=i, granularity="tensor")
        for i, shape in enumerate(SCALED.values())
    ]
    norm = nn.Parameter(torch.ones(192))
    optimizer = StiffnessAdafactor([*weights, norm])
    take_steps([optimizer], [[*weights, norm]], range(1))
    numel = sum(p.numel() for p in optimizer.state)
    assert numel < bytes_of(optimizer) <= 1.05 * numel


PEAK_OF_A_STEP = """
import ctypes, resource, sys, torch, fp8manifold as fm

shapes = [(32768, 576), *6 * [(576, 576), (1536, 576), (576, 1536)]]
weights = [fm.FP8Parameter(torch.randn(s) * 0.02, "E4M3", seed=i) for i, s in enumerate(shapes)]
optimizer = fm.optim.StiffnessAdafactor(weights)
handle = fm.optim.step_in_backward(optimizer)

def backward():
    optimizer.zero_grad()
    loss = 0
    for weight in weights:
        loss = loss + Halved.apply(weight)
    loss.backward()

class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        ctx.shape = weight.shape
        return torch.zeros(())

    @staticmethod
    def backward(ctx, _):
        return torch.full(ctx.shape, 1e-3)

def now():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["VmHWM"].split()[0]) * 1024, int(fields["VmRSS"].split()[0]) * 1024

for _ in range(2):
    backward()
ctypes.CDLL(None).malloc_trim(0)
open("/proc/self/clear_refs", "w").write("5")
_, before = now()
backward()
peak, _ = now()
numel = sum(w.numel() for w in weights)
held = sum(w.codes.numel() + 4 * w.kept_scale.numel() for w in weights)
for state in optimizer.state.values():
    held += sum(4 * x.numel() for name, x in state.items() if name.endswith("_var"))
print((peak - before + held) / numel, 4 * max(w.numel() for w in weights) / numel, held / numel)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_a_step_in_the_backward_pass_takes_little_beside_the_largest_gradient():
    """At most 1.15 bytes per weight, and the largest gradient."""
    command = [sys.executable, "-W", "ignore", "-c", PEAK_OF_A_STEP]
    # all memory that is freed goes back at once
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    environment = os.environ | allocator | {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout
    peak, largest, held = map(float, output.split())
    assert held <= 1.05
    assert peak <= 1.15 + largest


def test_smollm2_135m_takes_at_most_1_05_bytes_a_weight():
    """By the sizes of its parameters: scales of rows, n + m numbers of a matrix."""
    hidden, inner, layers, vocabulary = 576, 1536, 30, 49152
    matrices = [(vocabulary, hidden)]
    matrices += layers * [(hidden, hidden), (192, hidden), (192, hidden), (hidden, hidden)]
    matrices += layers * [(inner, hidden), (inner, hidden), (hidden, inner)]
    vectors = (2 * layers + 1) * hidden
    numel = sum(n * m for n, m in matrices) + vectors
    # a byte a weight, a float32 scale a row, the statistics; a vector and its own
    size = sum(n * m + 4 * n + 4 * (n + m) for n, m in matrices) + 8 * vectors
    assert numel == 134_515_008
    assert size <= 1.05 * numel


def test_bfloat16_weights_move_on_average_as_those_in_float32():
    """Where rounding to nearest loses all steps."""
    start = (torch.rand(256, 256, generator=torch.Generator().manual_seed(0)) / 4 + 0.6).bfloat16()
    moved = {}
    for name, weight in (("half", start), ("float", start.float())):
        parameter = nn.Parameter(weight.clone())
        optimizer = StiffnessAdafactor([parameter], lr=1e-4)
        for _ in range(10):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        moved[name] = float((value_of(parameter).double() - start.double()).mean())
    assert moved["float"] < -5e-4
    assert abs(moved["half"] / moved["float"] - 1) < 0.05
