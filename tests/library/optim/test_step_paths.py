"""Native steps have the bits of eager ones.

With larger shapes, strides and positions, for which the scalar definition is too slow.
"""

import itertools
from functools import partial

import pytest
import torch
from optimizer_cases import free_weight, grid_weight, normal, snapshot, with_factors
from paths import PATHS, on_path
from torch import nn

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold.optim import _eager_step
from fp8manifold.optim._backends import run_all
from fp8manifold.optim._slot import View

#: Square, long, short and odd shapes.
SHAPES = ((5, 7), (64, 33), (2, 300), (96, 96))


def of_codes(name="E4M3", granularity="channel", shapes=SHAPES, **options):
    return [
        fm.FP8Parameter(
            normal(*shape, seed=i, std=0.1), name, granularity=granularity, **{"seed": i, **options}
        )
        for i, shape in enumerate(shapes)
    ]


def take(optimizer, t):
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        g = normal(*p.shape, seed=1000 * t + i) * torch.exp2(
            normal(*p.shape, seed=t).mul(2).round()
        )
        p.grad = torch.where(g.abs() < 0.05, 0.0, g).to(p.dtype)
    optimizer.step()


def same_steps(kind, make, options, factors, steps=4):
    weights = ([with_factors(p, factors) for p in make()] for _ in PATHS)
    native, eager = (
        on_path(path, getattr(optim, kind)(w, **options))
        for path, w in zip(PATHS, weights, strict=True)
    )
    first = snapshot(native)["parameters"]
    for t in range(steps):
        take(eager, t)
        take(native, t)
        expected, stepped = everything(eager), everything(native)
        different = [name for name in expected if expected[name] != stepped[name]]
        assert not different, f"step {t + 1}"
        assert expected.keys() == stepped.keys(), t
    assert all(a != b for a, b in zip(first, snapshot(native)["parameters"], strict=True))


def everything(optimizer):
    saved = snapshot(optimizer)
    entries = {(i, "weight"): bits for i, bits in enumerate(saved["parameters"])}
    for i, state in saved["state"]["state"].items():
        entries |= {(i, name): value for name, value in state.items()}
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        if isinstance(p, fm.FP8Tensor):
            entries[i, "codes"] = p.codes.numpy().tobytes()
    return entries


ADAMW, LION = "StiffnessAdamW", "StiffnessLion"
DECAY = {"weight_decay": 0.1, "seed": 7}
INJECTED = {"lr": 0.01, "writeback": "momentum", "moments": "bfloat16", "stiffness": 0.5}
DOUBLED = {"lr": 0.1, "momentum": 0.9, "moments": "8bit", "stiffness": 2.0}
in_blocks = partial(of_codes, "E4M3FNUZ", "block", ((3, 64), (5, 32), (64, 64)))
vectors = partial(of_codes, shapes=((7,), (64,), (1001,)))
odd = partial(of_codes, shapes=((5, 7), (3, 2, 11), (1, 70), (33, 1), (2, 2, 2, 2)))


def free():
    return [free_weight(normal(801, 97), "E4M3", 2.0**-5)]


CASES = {
    "adamw stochastic": (ADAMW, of_codes, {"lr": 0.01, **DECAY}),
    "adamw residual8, 8 bits": (
        ADAMW,
        of_codes,
        {"lr": 0.01, "writeback": "residual8", "moments": "8bit"},
    ),
    "adamw injected, bfloat16, k = 1/2": (
        ADAMW,
        partial(of_codes, granularity="tensor", shapes=SHAPES[1:3]),
        INJECTED,
    ),
    "adamw plain": (
        ADAMW,
        lambda: [nn.Parameter(normal(n, seed=n)) for n in (70_001, 31, 640)],
        {"lr": 0.01, **DECAY},
    ),
    "adamw free": (ADAMW, free, {"lr": 0.01, "stiffness": 0.37}),
    "adamw in E7M0": (ADAMW, lambda: of_codes("E7M0"), {"lr": 0.1, **DECAY}),
    "riemannian adam free": (
        "RiemannianAdam",
        free,
        {"lr": 1.7, "amsgrad": True, "weight_decay": 0.01},
    ),
    "adamw in blocks": (ADAMW, in_blocks, {"lr": 0.01, "stiffness": 2.0, "moments": "8bit"}),
    "adamw vectors": (ADAMW, vectors, {"lr": 0.01, "writeback": "residual8", "stiffness": 1.0}),
    "adamw bfloat16": (
        ADAMW,
        lambda: of_codes(dtype=torch.bfloat16),
        {"lr": 0.01, "moments": "bfloat16", **DECAY},
    ),
    "sgd, 8 bits": ("StiffnessSGD", of_codes, DOUBLED | DECAY),
    "lion, 8 bits": (LION, lambda: of_codes("E5M2FNUZ"), {"lr": 0.01, "moments": "8bit", **DECAY}),
    "riemannian adam, 8 bits": (
        "RiemannianAdam",
        of_codes,
        {"lr": 1.7, "writeback": "stochastic", "moments": "8bit"},
    ),
    "riemannian adam, euclidean retraction": (
        "RiemannianAdam",
        of_codes,
        {"lr": 1.7, "retraction": "euclidean", "moments": "8bit", **DECAY},
    ),
    "riemannian sgd on a grid, euclidean retraction": (
        "RiemannianSGD",
        lambda: [grid_weight("E5M2", (33, 5), 0.3)],
        {"lr": 5.0, "retraction": "euclidean", "momentum": 0.9},
    ),
    "riemannian adam free, euclidean retraction": (
        "RiemannianAdam",
        free,
        {"lr": 1.7, "retraction": "euclidean"},
    ),
    "axes beyond two and single rows": (ADAMW, odd, {"lr": 0.01, "writeback": "stochastic"}),
    "grid": (
        ADAMW,
        lambda: [grid_weight("E4M3", (33, 5), 0.3)],
        {"lr": 0.05, "stiffness": 1.0, **DECAY},
    ),
}


@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize(("kind", "make", "options"), CASES.values(), ids=CASES)
def test_native_steps_have_the_bits_of_eager_ones(kind, make, options, factors):
    same_steps(kind, make, options, factors)


def strided(g, layout):
    """Return the gradient under other strides; if "expanded" every row is the first one."""
    if layout == "transposed":
        return g.t().contiguous().t()
    if layout == "sliced":
        return torch.stack([g, -g], -1).flatten(-2)[..., ::2]
    if layout == "shifted":
        return torch.cat([g.new_zeros(1), g.flatten()])[1:].view(g.shape)
    return g[:1].expand(g.shape) if layout == "expanded" else g


@pytest.mark.parametrize("moments", ["float32", "8bit"])
@pytest.mark.parametrize("skip", [0, 1])
def test_gradients_of_any_strides(moments, skip):
    """Without the first layout the plan begins from another one."""
    order = [
        "transposed",
        "",
        "transposed",
        "sliced",
        "shifted",
        "expanded",
        "",
        "expanded",
        "sliced",
    ]
    native, eager = (
        on_path(
            path,
            optim.StiffnessAdamW(of_codes(shapes=((64, 33), (31, 31))), lr=0.01, moments=moments),
        )
        for path in PATHS
    )
    for t, layout in enumerate(order[skip:]):
        for optimizer in (eager, native):
            for i, p in enumerate(optimizer.param_groups[0]["params"]):
                p.grad = strided(normal(*p.shape, seed=10 * t + i), layout)
            optimizer.step()
        assert everything(eager) == everything(native), (layout, t)


@pytest.fixture
def planned_slot(each_path):
    """Return what the third step of a parameter would be taken with."""
    p = fm.FP8Parameter(normal(9, 31, seed=3, std=0.1), "E4M3", seed=3)
    optimizer = optim.StiffnessAdamW(
        [p], 0.02, seed=2**40 + 1, writeback="residual8", moments="8bit"
    )
    for t in range(2):
        take(optimizer, t)
    slots = [optimizer._slot(optimizer.param_groups[0], p)]
    optimizer._apply_schedules(slots)
    return optimizer._begin(slots)[0]


def stepped_parts(slot, offset, ends):
    """Step the parts up to each of the ends, from a position of the first element."""
    whole = {name: x.clone() for name, x in slot.arrays.items()}
    for start, end in itertools.pairwise((0, *ends)):
        arrays = {
            name: x[start:end] if x.dim() and x.shape[0] == 9 else x for name, x in whole.items()
        }
        tensors = {
            name: x for name, x in arrays.items() if name not in ("scale", "lowest", "highest")
        }
        view = View((end - start, 31), (end - start, *slot.view.row_dims[1:]))
        run_all(
            [
                slot.replaced(
                    view=view,
                    tensors=tensors,
                    kept_scale=arrays["scale"],
                    offset=offset + 31 * start,
                )
            ]
        )
    return whole


@pytest.mark.parametrize("offset", [0, 2**32 - 100, 2**40])
def test_positions_beyond_32_bits(planned_slot, offset):
    """A parameter that is stepped in parts has the bits of the whole, also beyond 2^32."""
    whole = stepped_parts(planned_slot, offset, (9,))
    cut = stepped_parts(planned_slot, offset, (2, 4, 9))
    assert not [name for name, x in whole.items() if not torch.equal(x, cut[name])]


@pytest.mark.parametrize(("offset", "other"), [(0, 2**32 - 100), (0, 2**40), (2**32 - 100, 2**40)])
def test_other_positions_have_other_draws(planned_slot, offset, other):
    residual, other_residual = (
        stepped_parts(planned_slot, place, (9,))["residual"] for place in (offset, other)
    )
    assert not torch.equal(residual, other_residual)


@pytest.mark.parametrize("block", [1, 70])
@pytest.mark.parametrize(
    "case",
    [
        "adamw residual8, 8 bits",
        "sgd, 8 bits",
        "lion, 8 bits",
        "adamw in E7M0",
        "riemannian adam, 8 bits",
    ],
)
def test_the_blocks_in_which_eager_code_runs_are_not_seen(case, block, monkeypatch):
    """Eager steps take some rows at a time; their number does not change a bit."""
    monkeypatch.setattr(_eager_step, "block_on", lambda _: block)
    same_steps(*CASES[case], factors=False, steps=2)
