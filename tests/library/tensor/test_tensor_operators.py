"""FP8Tensor under torch's operators: reads, writes, views, draws, saturation."""

import warnings

import geoopt
import pytest
import torch
import torch.nn.functional as F
from optimizer_cases import normal, step_from
from tensor_cases import (
    Net,
    decoded,
    every_format,
    every_granularity,
    loss_of,
    parameter,
    same_store,
    train,
)
from torch import Tensor, nn, optim

import fp8manifold as fm
from fp8manifold import SaturationWarning
from fp8manifold.random_bits import named_word

READS = {
    "add": lambda w: w + 1,
    "matmul": lambda w: w @ w.t(),
    "sum": lambda w: w.sum(1),
    "where": lambda w: torch.where(w > 0, w, 0.0),
    "cat": lambda w: torch.cat([w, w]),
    "iterate": lambda w: torch.stack(list(w)),
    "expand": lambda w: w.expand(3, 4, 64) + 0,
    "index": lambda w: w[torch.tensor([2, 0, 2])],
    "mask": lambda w: w[w > 0],
    "embedding": lambda w: nn.functional.embedding(torch.tensor([[1, 3], [0, 1]]), w),
    "conv": lambda w: nn.functional.conv1d(torch.ones(1, 2, 40), w.view(4, 2, 32)),
    "foreach-norm": lambda w: torch.stack(torch._foreach_norm([w, w])),
    "equal": lambda w: torch.tensor(torch.equal(w, w)),
    "to-float64": lambda w: w.double(),
    "to-int": lambda w: (w * 100).int(),
    "ulp": lambda w: fm.ulp(w, "E4M3"),
    "round": lambda w: fm.round_to_grid(w, "E5M2"),
    "encode": lambda w: fm.encode(w, "E5M2"),
    "chart": lambda w: fm.to_chart(w, "E4M3"),
}


@every_granularity
@pytest.mark.parametrize("operation", READS.values(), ids=READS)
def test_reading_gives_plain_tensors_of_the_values(operation, granularity) -> None:
    p = parameter(granularity=granularity)
    codes = p.codes.clone()
    result = operation(p)
    assert type(result) is Tensor
    assert torch.equal(result, operation(p.dequantize()))
    assert torch.equal(p.codes, codes)


VIEWS = {
    "row": lambda w: w[1],
    "item": lambda w: w[1, 2],
    "slice": lambda w: w[1:3, ::2],
    "column": lambda w: w[:, 40],
    "columns": lambda w: w[:, 8:40],
    "split": lambda w: w.split(16, 1)[2],
    "unbind": lambda w: w.unbind(1)[5],
    "transpose": lambda w: w.t(),
    "permute": lambda w: w.view(2, 2, 64).permute(2, 0, 1),
    "view": lambda w: w.view(-1),
    "unsqueeze": lambda w: w[None, ..., None],
    "diagonal": lambda w: w.diagonal(),
    "chunk": lambda w: w.chunk(2, 0)[1],
    "unfold": lambda w: w.unfold(1, 4, 4),
    "detach": lambda w: w[1].detach(),
    "nested": lambda w: w.t()[3:9].view(2, 3, 4)[1],
}


@every_granularity
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_reads_the_values_and_writes_into_the_codes(view, granularity) -> None:
    p = parameter(granularity=granularity)
    plain = p.dequantize()
    with torch.no_grad():
        part = view(p)
        assert part.shape == view(plain).shape
        assert part.dtype == p.dtype
        assert part.tolist() == view(plain).tolist()
        assert torch.equal(part + 0, view(plain))
        part.neg_()
        view(plain).neg_()
        assert torch.equal(p.dequantize(), plain)
        assert torch.equal(part + 0, view(plain))  # the view goes on following


MAKERS = {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "empty_like": torch.empty_like,
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "full_like": lambda p: torch.full_like(p, 2.0),
    "new_empty": lambda p: p.new_empty(4, 64),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_made_like_it_is_plain(make, dtype) -> None:
    p = parameter(dtype=dtype)
    x = make(p)
    assert type(x) is Tensor
    assert (x.shape, x.dtype, x.device, x.stride()) == (p.shape, dtype, p.device, p.stride())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_made_of_another_shape_is_plain(dtype) -> None:
    assert type(parameter(dtype=dtype).new_zeros(4, 32)) is Tensor


def test_zeros_with_its_columns_are_rows_as_fully_shard_makes_them() -> None:
    """They can be read. A write into them is refused, and the message names zeros_like."""
    zeros = parameter().new_zeros(3, 64)
    assert torch.equal(zeros + 0, torch.zeros(3, 64))
    with pytest.raises(
        RuntimeError, match=r"for plain zeros use torch\.zeros_like and not new_zeros"
    ):
        zeros.add_(1.0)


def test_repr_has_format_scale_shape_and_values() -> None:
    p = parameter("E5M2", (2, 3), scale=torch.tensor([[2.0**-12], [2.0**-9]]))
    text = repr(p)
    for part in (
        "FP8Parameter(",
        "format=E5M2",
        "scale=2^-12..2^-9",
        "shape=(2, 3)",
        "requires_grad=True",
    ):
        assert part in text, part
    assert repr(p.dequantize())[7:20] in text
    assert "scale=2^-3," in str(fm.FP8Tensor(torch.ones(2), "E4M3", scale=0.125))
    assert "device=meta" in repr(p.to("meta"))
    assert f"{p[0]}".startswith("View(tensor([")
    assert "[]" in repr(fm.FP8Tensor(torch.empty(0)))


def test_numbers_and_arrays() -> None:
    p = parameter()
    assert p.tolist() == p.dequantize().tolist()
    assert (p.numpy() == p.dequantize().numpy()).all()
    assert p[1, 2].item() == p.dequantize()[1, 2].item()
    assert len(p) == 4


WRITES = {
    "add": lambda w: w.add_(normal(4, 64, seed=5), alpha=0.01),
    "mul": lambda w: w.mul_(0.99),
    "addcdiv": lambda w: w.addcdiv_(normal(4, 64, seed=5), torch.full((4, 64), 3.0), value=-0.01),
    "lerp": lambda w: w.lerp_(normal(4, 64, seed=5), 0.01),
    "copy": lambda w: w.copy_(normal(4, 64, seed=5, std=0.1)),
    "fill": lambda w: w.fill_(0.0123),
    "clamp": lambda w: w.clamp_(-0.05, 0.05),
    "sub-row": lambda w: w[1].sub_(0.001),
    "index-put": lambda w: w.__setitem__((torch.tensor([0, 2]), torch.tensor([5, 6])), 0.0123),
    "mask": lambda w: w.__setitem__(w > 0, 0.0123),
    "out": lambda w: torch.mul(normal(4, 64, seed=5), 0.05, out=w),
    "foreach": lambda w: torch._foreach_mul_([w], 0.99),
    "foreach-addcmul": lambda w: torch._foreach_addcmul_(
        [w], [torch.ones(4, 64)], [torch.ones(4, 64)], 0.001
    ),
}


@every_granularity
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_rounds_the_result_to_nearest(write, granularity) -> None:
    p = parameter(granularity=granularity, rounding="nearest")
    plain = p.dequantize()
    with torch.no_grad():
        write(plain)
        write(p)
    assert torch.equal(
        p.dequantize(), fm.round_to_grid(plain / p.expanded_scale(), "E4M3") * p.expanded_scale()
    )
    assert int(p.counter) == 0


@every_format
def test_writing_rounds_stochastically_by_the_counter(name) -> None:
    """The draws are those of (seed, counter, operator): one count for every write."""
    p, word = parameter(name, seed=7), named_word("mul_")
    with torch.no_grad():
        for step in range(3):
            target = p.dequantize() * 0.97 / p.expanded_scale()
            expected = fm.encode(target, name, "stochastic", seed=7, step=step, stream=word)
            p.mul_(0.97)
            assert torch.equal(p.codes, expected), step
            assert int(p.counter) == step + 1, step


@every_format
def test_saturating_writes_warn(name) -> None:
    p = parameter(name)
    limit = (p.expanded_scale() * p.format.max).expand(p.shape).clone()
    with torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            p.copy_(limit)
        with pytest.warns(
            SaturationWarning, match=f"1 of 256 values .* {name} scale, and saturate.*adapt_scale_"
        ):
            p[1, 3].mul_(2)
    assert torch.equal(p.dequantize(), limit)


def test_writing_drops_the_remainder_for_all_that_share_it() -> None:
    p = parameter(keep_remainder=True)
    shared, copied = p.detach(), p.clone()
    assert shared.remainder is not None
    with torch.no_grad():
        p.mul_(0.9)
    assert p.remainder is None
    assert shared.remainder.count_nonzero() == 0
    assert copied.remainder.count_nonzero() > 0


def test_copying_one_into_another_is_exact() -> None:
    p, q = parameter(seed=1), parameter(seed=2)
    with torch.no_grad():
        p.mul_(0.9)
        p.rescale_(p.scale * 4)
        q.copy_(p)
    assert same_store(p, q)
    assert (q.seed, p.seed) == (2, 1)
    assert q.codes.data_ptr() != p.codes.data_ptr()


@pytest.mark.parametrize(
    ("finer", "coarser"), [("channel", "tensor"), ("block", "tensor"), ("block", "channel")]
)
def test_a_finer_scale_takes_a_coarser_one(finer, coarser) -> None:
    p, q = parameter(granularity=finer), parameter(granularity=coarser, seed=1)
    with torch.no_grad():
        p.copy_(q)
        assert torch.equal(p.dequantize(), q.dequantize())
        assert p.granularity == finer


def test_data_is_the_tensor_and_can_be_written() -> None:
    p = parameter(rounding="nearest")
    assert type(p.data) is fm.FP8Parameter
    assert p.data.codes.data_ptr() == p.codes.data_ptr()
    p.data = torch.full((4, 64), 0.0625)
    assert (p == 0.0625).all()
    p.data.zero_()
    assert (p == 0).all()
    with pytest.raises(TypeError, match=r"float32 or bfloat16, not torch\.float64"):
        p.data = torch.ones(4, 64, dtype=torch.float64)


@every_granularity
@pytest.mark.parametrize("shape", [(3, 70_016), (5003, 96)])
def test_large_tensors_are_decoded_in_pieces(shape, granularity) -> None:
    p = parameter(shape=shape, granularity=granularity)
    assert torch.equal(p.dequantize().double(), decoded(p))
    assert torch.equal(p.to(torch.bfloat16).dequantize().double(), decoded(p))


#: name: (make, largest share of the first loss that may be left after 40 steps)
OPTIMIZERS = {
    "Adam-amsgrad": (lambda p: optim.Adam(p, 1e-2, amsgrad=True, weight_decay=1e-3), 0.1),
    "AdamW-foreach": (lambda p: optim.AdamW(p, 1e-2, foreach=True), 0.1),
    "AdamW-fused": (lambda p: optim.AdamW(p, 1e-2, fused=True), 0.1),
    "SGD": (lambda p: optim.SGD(p, 0.1), 0.5),
    "SGD-momentum": (
        lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
        0.1,
    ),
    "SGD-fused": (lambda p: optim.SGD(p, 0.1, momentum=0.9, fused=True), 0.1),
    "Adafactor": (lambda p: optim.Adafactor(p, 5e-2), 0.7),
    "LBFGS-wolfe": (lambda p: optim.LBFGS(p, 1.0, max_iter=2, line_search_fn="strong_wolfe"), 0.1),
    "RMSprop": (lambda p: optim.RMSprop(p, 2e-3), 0.1),
    "NAdam": (lambda p: optim.NAdam(p, 1e-2), 0.1),
    "geoopt.RiemannianAdam": (lambda p: geoopt.optim.RiemannianAdam(in_ulps(p, 0.5, 1e-2)), 0.2),
    # Without momentum: geoopt starts it from the Euclidean gradient, no step in ULPs.
    "geoopt.RiemannianSGD": (
        lambda p: geoopt.optim.RiemannianSGD(in_ulps(p, 300.0, 0.1), lr=0.1, stabilize=7),
        0.7,
    ),
}
if hasattr(optim, "Muon"):  # since torch 2.9
    OPTIMIZERS["Muon"] = (lambda p: optim.Muon([x for x in p if x.dim() == 2], 2e-2), 0.5)


def in_ulps(params, lr, float_lr):
    params = list(params)
    return [
        {"params": [p for p in params if isinstance(p, fm.FP8Parameter)], "lr": lr},
        {"params": [p for p in params if not isinstance(p, fm.FP8Parameter)], "lr": float_lr},
    ]


@pytest.mark.parametrize(("make", "share"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_of_others_train_it(make, share) -> None:
    """The loss falls and codes move; class, scales and grid stay."""
    net = Net()
    first = loss_of(net).item()
    codes, scales = [p.codes.clone() for p in net.stored], [p.scale.clone() for p in net.stored]
    assert train(net, make(net.parameters())) < share * first
    for index, (p, old_codes, scale) in enumerate(zip(net.stored, codes, scales, strict=True)):
        assert type(p) is fm.FP8Parameter, index
        assert (p.codes != old_codes).float().mean() > 0.2, index
        assert torch.equal(p.scale, scale), index
        assert p.manifold.check_point_on_manifold(p), index
        assert int(p.counter) >= 40, index


def test_steps_are_the_operators_with_a_rounding_each() -> None:
    """AdamW decays (one rounding) and steps (another), with draws of counts 0 and 1."""
    p = parameter(seed=9)
    start = p.dequantize()
    p.grad = normal(4, 64, seed=1)
    optim.AdamW([p], lr=1e-2, weight_decay=0.1).step()
    scale = p.scale

    def rounded(x: Tensor, step: int, operator: str) -> Tensor:
        draws = {"seed": 9, "step": step, "stream": named_word(operator)}
        return fm.round_to_grid(x / scale, "E4M3", "stochastic", **draws) * scale

    decayed = rounded(start * (1 - 1e-3), 0, "mul_")
    stepped = decayed - 1e-2 * p.grad / (p.grad.abs() + 1e-8)
    expected = rounded(stepped, 1, "addcdiv_")
    # The last bits of the direction are torch's own.
    assert (p.dequantize() == expected).float().mean() > 0.99
    assert int(p.counter) == 2


def test_geoopt_steps_as_on_the_grid_of_floats() -> None:
    """Code for code it moves as a ManifoldParameter of floats on the same manifold."""
    p = parameter(seed=4)
    manifold = fm.FP8Manifold("E4M3", p.scale, "stochastic", seed=4)
    q = geoopt.ManifoldParameter(p.dequantize(), manifold=manifold)
    optimizers = [geoopt.optim.RiemannianAdam([x], lr=0.5) for x in (p, q)]
    for step in range(5):
        for x, optimizer in zip((p, q), optimizers, strict=True):
            step_from(optimizer, x, normal(4, 64, seed=step))
        # Copying into codes is a write as well, if one that moves nothing.
        manifold.counter += 1
        assert torch.equal(p.dequantize(), q.detach().as_subclass(Tensor)), step
    assert int(p.counter) == int(manifold.counter) == 10


CHANGED = "modified by an inplace operation"

CHANGES = {
    "add_": lambda p: p.add_(1.0),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "write": lambda p: p.write(torch.ones(p.shape)),
    "adopt": lambda p: p.adopt(parameter(seed=1)),
    "rescale_": lambda p: p.rescale_(p.scale * 2),
    "adapt_scale_": lambda p: p.adapt_scale_(),
    "set_scale_": lambda p: p.set_scale_(p.scale * 2),
    "data": lambda p: setattr(p, "data", torch.ones(p.shape)),
    "row": lambda p: p[0].add_(1.0),
    "write of a view": lambda p: p[:2].t().write(torch.ones(64, 2)),
    "detached": lambda p: p.detach().rescale_(p.scale * 2),
    "detached view": lambda p: torch._foreach_mul_([p.detach()[1]], 0.5),
}

STEPPERS = {
    "StiffnessAdamW": fm.optim.StiffnessAdamW,
    "RiemannianSGD": lambda ps: fm.optim.RiemannianSGD(ps, float_lr=0.01),
    "AdamW": lambda ps: torch.optim.AdamW(ps, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "geoopt": geoopt.optim.RiemannianAdam,
}


@pytest.mark.parametrize("use", [lambda p: p, lambda p: p[1:3]], ids=["whole", "view"])
@pytest.mark.parametrize("write", CHANGES.values(), ids=CHANGES)
def test_a_write_between_forward_and_backward_is_an_error(write, use) -> None:
    p, x = parameter(rounding="nearest", scale=1.0), normal(3, 64).requires_grad_()
    loss = F.linear(x, use(p)).sum()
    with torch.no_grad():
        write(p)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


def test_a_read_between_forward_and_backward_is_none() -> None:
    p, x = parameter(), normal(3, 64).requires_grad_()
    loss = F.linear(x, p).sum()
    p.clone().zero_()
    assert not p.adapt_scale_()
    p.detach(), p.largest(), p.dequantize().zero_(), repr(p), p.expanded_scale().sum()
    loss.backward()
    assert torch.equal(x.grad, p.dequantize().sum(0).expand(3, 64))


@pytest.mark.parametrize("activation", [None, "E5M2"])
@pytest.mark.parametrize("storage", ["grid", "codes"])
@pytest.mark.parametrize("make", STEPPERS.values(), ids=STEPPERS)
def test_a_step_between_forward_and_backward_is_an_error(make, storage, activation) -> None:
    """The first step, which is planned, and the next, which repeats it."""
    if make is STEPPERS["fused"] and storage == "grid":
        pytest.skip(
            "torch's own fused kernels say nothing of what they write into ordinary tensors"
        )
    spec = fm.LayerSpec("E4M3", activation=activation, gradient=activation)
    model = fm.quantize_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), spec, storage)
    optimizer = make(model.parameters())
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.ones(p.shape)
        loss = model(normal(3, 8)).square().sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()


def test_master_weights_have_the_gradient_of_the_forward_pass() -> None:
    """A product takes a tensor of its own there, which a step leaves alone."""
    model = fm.quantize_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "E4M3", "master")
    x, gradients = normal(3, 8), []
    for factor in (1.0, 2.0):
        model.zero_grad()
        loss = model(x).square().sum()
        with torch.no_grad():
            model[1].weight.mul_(factor)
        loss.backward()
        gradients.append(model[0].weight.grad)
    assert torch.equal(*gradients)


def test_inference_has_no_versions() -> None:
    with torch.inference_mode():
        p = parameter(rounding="nearest")
        p.mul_(0.5)
    assert isinstance(p, Tensor)
    assert p.is_inference()
