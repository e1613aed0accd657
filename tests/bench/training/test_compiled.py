"""runtime.compile: the same losses, monitors that still see the layers, and an error in one line."""

from unittest.mock import Mock

import pytest
import torch
from bench_runs import records_of, refusal, train, trainer_of

from nanogpt_bench.model.gpt import GPTShape, build_model
from nanogpt_bench.setup.runtime import CompiledLoss

TOKENS = torch.arange(12).view(2, 6) % 11


def compiling_with(backend, monkeypatch):
    """Have torch.compile use a backend of the test's."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, backend=backend, **options))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


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
    seen = []
    handle = model.lm_head.register_forward_hook(lambda *parts: seen.append(parts[-1].shape))
    assert torch.equal(loss(TOKENS, TOKENS), expected)
    assert (len(runs), len(seen)) == (1, 1)
    handle.remove()
    loss(TOKENS, TOKENS)
    assert (len(runs), len(seen)) == (2, 1)


def test_a_compiler_that_fails_is_one_line(monkeypatch):
    compiling_with(Mock(side_effect=RuntimeError("no compiler\nanywhere")), monkeypatch)
    model = build_model(GPTShape(1, 2, 8, 16, vocab_size=11), seed=0)
    with refusal(r"runtime\.compile: the model can't be compiled: .*no compiler"):
        CompiledLoss(model)(TOKENS, TOKENS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # what the compiler looks into
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
    plain, compiled = (trainer_of(tiny(**settings, runtime__compile=on)) for on in (False, True))
    assert train(compiled, 4) == pytest.approx(train(plain, 4), abs=2e-2)
    assert compiled.validate() == pytest.approx(plain.validate(), abs=2e-2)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:The .grad attribute")
def test_a_compiled_run_is_watched_like_any_other(tiny, monkeypatch, tmp_path):
    compiling_with("aot_eager", monkeypatch)
    settings = {"rule": "master", "model__format": "E4M3", "train__precision": "float32"}
    records = [records_of(tiny(**settings, runtime__compile=on), tmp_path / str(on)) for on in (False, True)]
    plain, watched = records
    assert [sorted(record) for record in watched] == [sorted(record) for record in plain]
    for name in ("train/loss", "val/loss", "quant/amax/activation/blocks.0.mlp.fc", "quant/amax/gradient"):
        seen = [[record.get(name) for record in run_records] for run_records in records]
        assert any(value is not None for value in seen[0]), name
        assert seen[1] == pytest.approx(seen[0], abs=1e-4), name
