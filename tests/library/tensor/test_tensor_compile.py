"""FP8Tensor under torch.compile: one graph, the same numbers, codes in and codes saved."""

import pytest
import torch
import torch._dynamo
from tensor_cases import INPUT, Net, decoded, loss_of, parameter
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fp8manifold as fm

pytestmark = pytest.mark.usefixtures("cpp_compiler")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("E4M3", {}),
        ("E7M0", {"granularity": "tensor"}),
        ("E1M6", {"granularity": "block", "keep_remainder": True}),
        ("E5M2FNUZ", {"dtype": torch.bfloat16}),
        ("E2M1", {"requires_grad": False}),
    ],
    ids=["channel", "tensor", "block with remainder", "bfloat16", "frozen"],
)
def test_forward_and_backward_in_one_graph(name, options) -> None:
    dtype = options.get("dtype", torch.float32)
    net, results = Net(name, **options).to(dtype), []
    for model in (net, torch.compile(net, fullgraph=True)):
        net.zero_grad()
        loss = loss_of(model, dtype)
        loss.backward()
        gradients = [p.grad for p in net.parameters() if p.requires_grad]
        assert all(type(gradient) is Tensor for gradient in gradients)
        assert all(p.grad is None for p in net.parameters() if not p.requires_grad)
        results.append([loss.detach(), *gradients])
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.01}
    )
    torch.testing.assert_close(*results, **tolerance)
    assert all(type(p) is fm.FP8Parameter for p in net.stored)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_frozen_model_compiles(mode) -> None:
    net = Net(requires_grad=False)
    net.requires_grad_(False)
    compiled = torch.compile(net, fullgraph=True)
    with mode():
        torch.testing.assert_close(compiled(INPUT), net(INPUT), rtol=1e-4, atol=1e-5)
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        torch._dynamo.reset()
        torch.testing.assert_close(
            torch.compile(net, fullgraph=True)(INPUT), net(INPUT), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E7M0", "E4M3FNUZ", "E2M3"])
def test_values_are_the_same_to_the_bit(name, dtype) -> None:
    fmt = fm.FloatFormat.from_string(name)
    codes = torch.arange(2 * fmt.sign_bit, dtype=torch.int32).to(torch.uint8)
    codes = codes[~fm.decode(codes, fmt).isinf()].expand(3, -1).contiguous()
    scale = torch.tensor([[2.0**-30], [1.0], [2.0**20]])
    p = fm.FP8Parameter.from_codes(codes, scale, fmt, dtype=dtype)
    values = torch.compile(lambda w: w * 1, fullgraph=True)(p)
    torch.testing.assert_close(values, p.dequantize(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(values.nan_to_num(0).double(), decoded(p).nan_to_num(0))


def test_taking_the_remainder_or_changing_scales_compiles_nothing_anew() -> None:
    net = Net(keep_remainder=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, fullgraph=True, backend=counter)
    compiled(INPUT)
    for p in net.stored:
        p.remainder = None
        p.rescale_(p.scale * 2)
    torch.testing.assert_close(compiled(INPUT), net(INPUT))
    assert counter.frame_count == 1


def test_blocks_of_different_seeds_share_one_graph() -> None:
    """More blocks than the compiler would specialise one function for."""
    counter = CompileCounterWithBackend("aot_eager")
    blocks = [
        nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        for _ in range(torch._dynamo.config.recompile_limit + 4)
    ]
    for seed, block in enumerate(blocks):
        block[0].weight = parameter(shape=(32, 32), seed=seed)
        block.compile(fullgraph=True, backend=counter)
    for block in blocks:
        expected = torch.relu(nn.functional.linear(INPUT, block[0].weight, block[0].bias))
        torch.testing.assert_close(block(INPUT), expected)
    assert counter.frame_count == 1


def saved_floats(compiled, x, weights) -> list[torch.dtype]:
    """Return dtypes of floats of a weight's shape that are saved for the backward pass."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = compiled(x)
    shapes = {tuple(p.shape) for p in weights} | {tuple(p.t().shape) for p in weights}
    dtypes = [t.dtype for t in saved if tuple(t.shape) in shapes]
    assert dtypes.count(torch.uint8) == len(weights)
    out.sum().backward()
    return [dtype for dtype in dtypes if dtype != torch.uint8]


@pytest.mark.parametrize("backend", ["inductor", "aot_eager", "aot_eager_decomp_partition"])
def test_the_compiled_backward_keeps_codes(backend) -> None:
    """Whatever divides the graph: weights are decoded in the backward pass itself."""
    net = Net()
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    assert saved_floats(compiled, INPUT[:4].clone().requires_grad_(), net.stored) == []


@pytest.mark.parametrize("case", ["trained", "frozen", "autocast"])
def test_a_compiled_layer_keeps_codes(case) -> None:
    layer = fm.QuantizedLinear(nn.Linear(32, 48), fm.LayerSpec("E4M3"), "codes")
    layer.weight.requires_grad_(case != "frozen")

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
            return torch.relu(layer(x.sin()))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager_decomp_partition")
    assert saved_floats(compiled, INPUT[:4].clone().requires_grad_(), [layer.weight]) == []


def test_nearest_writes_compile_and_stochastic_ones_do_not() -> None:
    """Their draws would be those of one moment for good."""

    def write(p: Tensor, g: Tensor) -> Tensor:
        p.mul_(0.9)
        p.add_(g, alpha=-0.01)
        p[1].zero_()
        p.t()[3].mul_(0.5)
        return p.sum()

    p, q = parameter(rounding="nearest"), parameter(rounding="nearest")
    g = torch.ones(4, 64)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(write, fullgraph=True)(p, g), write(q, g))
    assert torch.equal(p.codes, q.codes)
    with (
        torch.no_grad(),
        pytest.raises(Exception, match="take rounding='nearest', or step it with"),
    ):
        torch.compile(lambda p: p.mul_(0.9), fullgraph=True)(parameter())


VIEWS = {
    "row": lambda w, x: x @ w[1],
    "transpose": lambda w, x: x @ w.t(),
    "flat": lambda w, x: w.view(-1).square().sum() + x.sum(),
    "chunk": lambda w, x: x * w.chunk(2)[1],
    "twice": lambda w, x: x @ w[:2].T @ w[:2],
    "embedding": lambda w, x: nn.functional.embedding(torch.tensor([1, 3]), w) * x,
}


@pytest.mark.parametrize("call", VIEWS.values(), ids=VIEWS)
def test_views_compile(call) -> None:
    p, x = parameter(), INPUT[:2].repeat(1, 2)
    expected = call(p, x)
    (gradient,) = torch.autograd.grad(expected.sum(), p)
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(p, x)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), p)[0], gradient)


def test_a_view_that_is_taken_again_is_not_compiled_again() -> None:
    p, counter = parameter(), CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda w: w.square().sum(), fullgraph=True, backend=counter)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(p[1]), p.dequantize()[1].square().sum())
            p.mul_(0.9)
        assert counter.frame_count == 1
        torch.testing.assert_close(compiled(p[2]), p.dequantize()[2].square().sum())


@pytest.mark.skipif(
    torch.__version__ < (2, 9),
    reason="torch 2.8 refuses to move a module whose tensors compiled code refers to",
)
def test_a_compiled_module_can_be_moved() -> None:
    net = Net()
    compiled = torch.compile(net, fullgraph=True)
    loss_of(compiled).backward()
    net.zero_grad()
    net.to(torch.bfloat16)
    assert compiled(INPUT.bfloat16()).dtype == torch.bfloat16
