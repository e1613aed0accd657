"""The loss compiled, and products of bfloat16 matrices as float32's.

The latter are for processors without the instructions.
"""

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from bench_runs import records_of, refusal, train, trainer_of
from torch import nn

from nanogpt_bench.model.gpt import GPTShape, build_model
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.runtime import CompiledLoss, ProductsByFloat32, bfloat16_products

TOKENS = torch.arange(12).view(2, 6) % 11


def compiling_with(backend, monkeypatch):
    """Have torch.compile use a backend of the test's."""
    torch._dynamo.reset()
    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: real(function, backend=backend, **options)
    )


def test_what_is_compiled_is_the_loss_and_hooks_run_it_as_written(monkeypatch):
    runs = []

    def backend(graph, inputs):
        def called(*arguments):
            runs.append(len(arguments))
            return graph.forward(*arguments)

        return called

    compiling_with(backend, monkeypatch)
    model = build_model(GPTShape(1, 2, 8, 16, vocab_size=11), seed=0)
    loss = CompiledLoss(model)
    expected = model.loss(TOKENS, TOKENS)
    assert torch.equal(loss(TOKENS, TOKENS), expected)
    assert len(runs) == 1
    shapes = []
    handle = model.lm_head.register_forward_hook(lambda *parts: shapes.append(parts[-1].shape))
    assert torch.equal(loss(TOKENS, TOKENS), expected)
    assert (len(runs), len(shapes)) == (1, 1)
    handle.remove()
    loss(TOKENS, TOKENS)
    assert (len(runs), len(shapes)) == (2, 1)


def test_a_compiler_that_fails_is_one_line(monkeypatch):
    compiling_with(Mock(side_effect=RuntimeError("no compiler\nanywhere")), monkeypatch)
    model = build_model(GPTShape(1, 2, 8, 16, vocab_size=11), seed=0)
    with refusal(r"runtime\.compile: the model can't be compiled: .*no compiler"):
        CompiledLoss(model)(TOKENS, TOKENS)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:The .grad attribute"
)  # what the compiler looks into
@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "bf16-mixed"},
        {"rule": "stochastic", "model__format": "E4M3"},
        {"rule": "master", "model__format": "E4M3"},
        {"model__formats": "{'*': {weight: E4M3, activation: E4M3, gradient: E5M2}}"},
    ],
)
def test_compiled_runs_have_the_same_losses(tiny, settings):
    torch._dynamo.reset()
    plain, compiled = (
        trainer_of(tiny(**settings, runtime__compile=compiles)) for compiles in (False, True)
    )
    assert train(compiled, 4) == pytest.approx(train(plain, 4), abs=2e-2)
    assert compiled.validate() == pytest.approx(plain.validate(), abs=2e-2)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:The .grad attribute")
def test_a_compiled_run_is_watched_like_any_other(tiny, monkeypatch, tmp_path):
    compiling_with("aot_eager", monkeypatch)
    settings = {"rule": "master", "model__format": "E4M3", "train__precision": "float32"}
    records = [
        records_of(tiny(**settings, runtime__compile=compiles), tmp_path / str(compiles))
        for compiles in (False, True)
    ]
    plain, compiled = records
    assert [sorted(record) for record in compiled] == [sorted(record) for record in plain]
    for name in (
        "train/loss",
        "val/loss",
        "quant/amax/activation/blocks.0.mlp.fc",
        "quant/amax/gradient",
    ):
        figures = [[record.get(name) for record in run_records] for run_records in records]
        assert any(value is not None for value in figures[0]), name
        assert figures[1] == pytest.approx(figures[0], abs=1e-4), name


PRODUCTS = {
    "mm": lambda a, b: a @ b.T,
    "addmm": lambda a, b: nn.functional.linear(a, b, b[:, 0]),
    "bmm": lambda a, b: torch.bmm(a[None], b.T[None]),
    "baddbmm": lambda a, b: torch.baddbmm(b.new_ones(()), a[None], b.T[None]),
}


def results(product, operands, context):
    """Return a product and the gradients of its operands."""
    a, b = (x.clone().requires_grad_() for x in operands)
    with context:
        outcome = product(a, b)
        outcome.backward(torch.ones_like(outcome))
    return [outcome.detach(), a.grad, b.grad]


def operands(dtype, *, whole):
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(size, 24, generator=generator) for size in (17, 9)]
    return [((x * 3).round() if whole else x).to(dtype) for x in drawn]


#: products whose sums are exact, and those of other dtypes, which are left alone
EXACT = [(name, torch.bfloat16) for name in PRODUCTS] + [
    ("addmm", torch.float32),
    ("addmm", torch.float64),
]


@pytest.mark.parametrize(("name", "dtype"), EXACT)
def test_sums_that_are_exact_and_other_dtypes_are_torch_s_own_to_the_bit(name, dtype):
    pair = operands(dtype, whole=dtype == torch.bfloat16)
    by_torch, by_float32 = (
        results(PRODUCTS[name], pair, context) for context in (nullcontext(), ProductsByFloat32())
    )
    for index, (expected, product) in enumerate(zip(by_torch, by_float32, strict=True)):
        assert product.dtype == expected.dtype == dtype, index
        assert torch.equal(product, expected), index


@pytest.mark.parametrize("name", PRODUCTS)
def test_other_sums_are_the_nearest_bfloat16_of_the_exact_one_or_its_neighbour(name):
    pair = operands(torch.bfloat16, whole=False)
    exact = results(PRODUCTS[name], (pair[0].double(), pair[1].double()), nullcontext())
    for value, true in zip(results(PRODUCTS[name], pair, ProductsByFloat32()), exact, strict=True):
        near = true.bfloat16()
        ulp = torch.nextafter(near.abs(), torch.tensor(torch.inf).bfloat16()) - near.abs()
        assert bool(((value - near).abs() <= ulp).all())
        assert float((value == near).double().mean()) > 0.99


@pytest.mark.parametrize(
    ("settings", "capability", "device", "expected"),
    [
        ({"rule": "bf16-mixed"}, "AVX2", "cpu", True),
        ({"rule": "bf16-mixed"}, "AVX512", "cpu", False),
        ({"rule": "bf16-mixed"}, "DEFAULT", "cpu", False),
        ({"rule": "fp32"}, "AVX2", "cpu", False),
        ({"rule": "bf16-mixed", "runtime__compile": True}, "AVX2", "cpu", False),
        ({"rule": "bf16-mixed"}, "AVX2", "cuda", False),
    ],
)
def test_it_is_chosen_where_torch_s_own_are_slow(
    tiny, monkeypatch, settings, capability, device, expected
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    context = bfloat16_products(resolve(tiny(**settings)), torch.device(device))
    assert isinstance(context, ProductsByFloat32) == expected


@pytest.mark.parametrize("rule", ["bf16-mixed", "bf16-pure"])
def test_a_training_ends_where_it_does_with_torch_s_own(tiny, monkeypatch, rule):
    losses, products_called = {}, []
    dispatch = ProductsByFloat32.__torch_dispatch__

    def counted(self, func, *args, **kwargs):
        products_called.append(func)
        return dispatch(self, func, *args, **kwargs)

    monkeypatch.setattr(ProductsByFloat32, "__torch_dispatch__", counted)
    config = resolve(tiny(rule=rule, train__max_steps=20, optimizer__lr=0.02))
    for capability in ("AVX2", "AVX512"):
        monkeypatch.setattr(
            torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability
        )
        products_called.clear()
        trainer = trainer_of(config)
        train(trainer, 20)
        losses[capability] = trainer.validate()
        assert bool(products_called) == (capability == "AVX2"), capability
    assert losses["AVX2"] < 3.0  # from 3.6
    assert losses["AVX2"] == pytest.approx(losses["AVX512"], abs=0.02)
