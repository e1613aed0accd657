"""StiffnessMuon against torch's Muon, against its definition, and over all paths."""

import copy

import optimizer_cases as cases
import pytest
import torch
from family_cases import VALID
from optimizer_cases import grid_weight, normal, put_gradients, step_from, stored_weight
from paths import PATHS, on_path
from test_ranks_fsdp import stepped
from torch import nn

import fp8manifold as fm
from fp8manifold.optim import StiffnessAdamW, StiffnessMuon
from fp8manifold.optim._matrices import COEFFICIENTS, adjusted_rate, orthogonal_factor

SHAPES = ((16, 16), (24, 8), (8, 24), (7, 5))
torch_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


@torch_muon
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
def test_float_parameters_take_torchs_steps(nesterov, adjust):
    """Over 100 steps weights are equal to 1e-6, and momenta bit for bit."""
    parameters, twins = (
        [nn.Parameter(normal(*s, seed=i, std=0.05)) for i, s in enumerate(SHAPES)] for _ in "ab"
    )
    options = {"lr": 1e-3, "nesterov": nesterov, "adjust_lr_fn": adjust}
    muon = torch.optim.Muon(parameters, **options)
    stiffness_muon = StiffnessMuon(twins, **options, ns_dtype=torch.bfloat16)
    cases.take_steps((muon, stiffness_muon), (parameters, twins), range(100))
    for index, (p, q) in enumerate(zip(parameters, twins, strict=True)):
        assert torch.allclose(p, q, rtol=0, atol=1e-6), index
        momentum = stiffness_muon.state[q]["momentum_buffer"]
        assert torch.equal(muon.state[p]["momentum_buffer"], momentum), index


CYCLES = {
    "OneCycleLR": {"total_steps": 10},
    "CyclicLR": {"base_lr": 0.01, "step_size_up": 6},
}


@pytest.mark.parametrize("kind", CYCLES)
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_scheduler_that_cycles_what_muon_does_not_read_is_refused(kind, in_backward):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = StiffnessMuon.for_model(model, 1e-2)
    if in_backward:
        fm.optim.step_in_backward(optimizer)
    old_values = [p.detach().clone() for p in model.parameters()]

    def step():
        getattr(torch.optim.lr_scheduler, kind)(optimizer, max_lr=0.1, **CYCLES[kind])
        optimizer.zero_grad()
        model(torch.ones(1, 4)).square().sum().backward()
        optimizer.step()

    with pytest.raises(
        ValueError, match=r"cycle_momentum=True, .*: give the scheduler cycle_momentum=False$"
    ):
        step()
    assert all(map(torch.equal, old_values, [p.detach() for p in model.parameters()]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-8, 1.0, 1e3, 7e4, 1e6, 1e12])
@pytest.mark.parametrize("shape", [(64, 48), (3, 16, 96)])
def test_the_size_of_a_matrix_is_not_in_its_factor(shape, size, dtype):
    x = normal(*shape)
    exact = orthogonal_factor(x.double(), COEFFICIENTS, 5, 1e-12, torch.float64)
    factor = orthogonal_factor(x * size, COEFFICIENTS, 5, 1e-12, dtype)
    assert factor.dtype is dtype
    error = (factor.double() - exact).norm() / exact.norm()
    assert float(error) < {torch.float16: 0.01, torch.bfloat16: 0.06}[dtype]


def test_a_batch_is_its_matrices_one_by_one_and_a_kernel_is_one_matrix():
    experts, kernel = normal(3, 8, 12, std=0.05), normal(6, 3, 2, 2, std=0.05)
    batch, flat = nn.Parameter(experts.clone()), nn.Parameter(kernel.clone())
    matrices = [nn.Parameter(e.clone()) for e in experts]
    matrices.append(nn.Parameter(kernel.flatten(1).clone()))
    options = {"lr": 0.01, "ns_dtype": torch.float32}
    groups = [
        {"params": [batch], "matrix_shape": "batch"},
        {"params": [flat], "matrix_shape": "flatten"},
    ]
    optimizer, of_matrices = StiffnessMuon(groups, **options), StiffnessMuon(matrices, **options)
    for step in range(3):
        put_gradients([batch, flat], step)
        gradients = [*batch.grad, flat.grad.flatten(1)]
        for matrix, gradient in zip(matrices, gradients, strict=True):
            matrix.grad = gradient.clone()
        optimizer.step()
        of_matrices.step()
    assert torch.allclose(batch, torch.stack(matrices[:-1]), atol=1e-6)
    assert torch.equal(flat.flatten(1), matrices[-1])


@pytest.mark.parametrize("k", [0.0, 0.5, 1.0])
def test_a_step_in_the_chart_is_the_one_written_out(k):
    """The target is ``w - eta a F msign(F u)`` with ``F = (S / mean S)^k``, in float64."""
    weight, gradient = grid_weight("E4M3", (8, 12), 2.0**-5, std=0.1), normal(8, 12, seed=3)
    w = cases.value_of(weight).double()
    stiffness = fm.ulp(cases.value_of(weight) * 2**5, "E4M3").double() / 2**5
    factor = (stiffness / stiffness.mean()).clamp(2.0**-8, 2.0**4) ** k
    optimizer = StiffnessMuon(
        [weight], lr=0.01, weight_decay=0.5, stiffness=k, ns_dtype=torch.float32
    )
    views = cases.record(optimizer)
    step_from(optimizer, weight, gradient)
    # Nesterov: 1 - 0.95 of the gradient, and 0.95 of the first momentum.
    u = gradient.double() * (0.05 + 0.95 * 0.05)
    direction = factor * orthogonal_factor(factor * u, COEFFICIENTS, 5, 1e-7, torch.float64)
    expected = w * (1 - 0.01 * 0.5) - adjusted_rate(0.01, None, 8, 12) * direction
    assert torch.allclose(views[0].target.double(), expected, rtol=1e-4, atol=1e-6)
    assert cases.on_grid(weight)


@pytest.mark.parametrize("stiffness", [0.0, 0.5])
def test_the_momentum_makes_up_for_rounding(stiffness):
    """It is less by a positive multiple of (target - stored) than that of "nearest"."""
    momenta, stored, start = {}, {}, grid_weight("E4M3", (16, 16), 2.0**-5, std=0.1)
    options = {"lr": 2e-3, "weight_decay": 0.0, "nesterov": False, "ns_dtype": torch.float32}
    for writeback in ("nearest", "momentum"):
        weight = copy.deepcopy(start)
        weight.grad = normal(16, 16, seed=9)
        optimizer = StiffnessMuon([weight], stiffness=stiffness, writeback=writeback, **options)
        optimizer.step()
        momenta[writeback] = optimizer.state[weight]["momentum_buffer"]
        stored[writeback] = cases.value_of(weight)
    exact = nn.Parameter(cases.value_of(start).clone())
    exact.grad = normal(16, 16, seed=9)
    StiffnessMuon([exact], **options).step()
    error = exact.detach() - stored["momentum"]
    injected = momenta["nearest"] - momenta["momentum"]
    # Without stiffness floats have the same targets, and all elements have one rate.
    if stiffness == 0.0:
        ratio = injected / error
        assert torch.allclose(ratio, ratio.median(), rtol=1e-2)
        assert ratio.median() > 0
    is_large = error.abs() > error.abs().median()
    assert (injected * error)[is_large].gt(0).float().mean() > 0.9


def test_adams_groups_are_stiffness_adamw():
    def weights():
        return [stored_weight(shape=(5, 33)), nn.Parameter(normal(7)), stored_weight(shape=(9,))]

    parameters, twins = weights(), weights()
    options = {"lr": 0.01, "weight_decay": 0.1, "stiffness": 1.0, "moments": "8bit", "seed": 4}
    muon = StiffnessMuon(parameters, direction="adam", **options)
    adamw = StiffnessAdamW(twins, betas=(0.9, 0.95), **options)
    cases.take_steps((muon, adamw), (parameters, twins), range(5))
    assert cases.same_bits(parameters, twins)


KINDS = {"tall": (24, 8), "wide": (8, 24), "square": (16, 16), "column": (33, 1), "row": (1, 33)}
KINDS |= {"batch": (3, 24, 8), "convolution": (24, 2, 2, 2)}
STORAGES = ("codes", "grid", "float32", "bfloat16")


def weight_of(storage, shape):
    if storage == "codes":
        return stored_weight(shape=shape, granularity="tensor")
    if storage == "grid":
        return grid_weight(shape=shape, rounding="stochastic")
    return nn.Parameter(normal(*shape, std=0.1).to(getattr(torch, storage)))


def muon(weight, shape, **options):
    group = {"params": [weight], "matrix_shape": "batch" if shape == "batch" else "flatten"}
    return StiffnessMuon([group], **{"lr": 0.02, "seed": 3, **options})


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    ("writeback", "moments"), [c[1:] for c in VALID if c[0] == "StiffnessMuon"]
)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", KINDS)
def test_native_steps_have_the_bits_of_eager_ones(products, shape, storage, writeback, moments):
    """Weights and state, for matrices of any shape in every storage."""
    results = []
    for path in PATHS:
        weight = weight_of(storage, KINDS[shape])
        optimizer = on_path(path, muon(weight, shape, writeback=writeback, moments=moments))
        for step in range(3):
            put_gradients([weight], step)
            optimizer.step()
        results.append((cases.bits_of(weight), cases.frozen(optimizer.state_dict()["state"])))
    assert results[0][0] != cases.bits_of(weight_of(storage, KINDS[shape]))
    assert results[0] == results[1]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", KINDS)
def test_a_step_goes_along_the_factor(products, shape, storage):
    """To a tenth of the factor in float64, the error of the write-back included."""
    weight, gradient = weight_of(storage, KINDS[shape]), normal(*KINDS[shape], seed=9)
    matrices = gradient.double() if shape == "batch" else gradient.double().flatten(1)
    factor = orthogonal_factor(matrices, COEFFICIENTS, 5, 1e-7, torch.float64)
    rate = adjusted_rate(1.0, None, *matrices.shape[-2:])
    old_values = weight.detach().clone().double()
    optimizer = muon(weight, shape, lr=1.0, momentum=0.0, weight_decay=0.0)
    step_from(optimizer, weight, gradient.to(weight.dtype))
    expected = rate * factor.view(weight.shape)
    error = (old_values - weight.detach().double() - expected).norm() / expected.norm()
    assert float(error) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", ["8bit", "bfloat16"])
def test_rows_are_stepped_as_the_whole(pair, moments, dtype):
    pair.run(
        stepped, "StiffnessMuon", "stochastic", moments, {"granularity": "channel"}, ns_dtype=dtype
    )


@pytest.mark.parametrize("fmt", ["E2M5", None])
def test_autocast_changes_no_product_of_a_step(fmt):
    def after_a_step(*, autocast):
        p = nn.Parameter(normal(32, 32))
        if fmt is not None:
            p = fm.FP8Parameter(normal(32, 32), fmt, seed=0)
        optimizer = StiffnessMuon([p], 1e-2, ns_dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            step_from(optimizer, p, normal(32, 32, seed=1))
        return p.detach().clone()

    assert torch.equal(after_a_step(autocast=True), after_a_step(autocast=False))
