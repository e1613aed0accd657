"""A step or a whole training step that a user compiles: the optimizer runs eager there, to the same bits."""

from typing import Any

import pytest
import torch
import torch._dynamo
from family_cases import NAMES, make
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import optim

# the compiler's own, of a loss that lives on after the break
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

X = torch.linspace(-1, 1, 24).view(3, 8)


def optimizer_of(name: str, model: nn.Module) -> Any:
    if name == "StiffnessWrapper":
        return optim.StiffnessWrapper(torch.optim.SGD(model.parameters(), lr=1e-2), exponent=1.0)
    return make(name, model.parameters())


def trained(name: str, what: str) -> list[Tensor]:
    """Codes and values after three steps, with ``what`` of ``nothing``, ``step`` or ``all`` compiled."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model = fm.quantize_model(layers, "E4M3", storage="fp8")
    optimizer = optimizer_of(name, model)
    take = torch.compile(optimizer.step, backend="eager") if what == "step" else optimizer.step

    def train_step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        take()

    whole = torch.compile(train_step, backend="eager") if what == "all" else train_step
    for _ in range(3):
        whole(X)
    return [p.codes if isinstance(p, fm.FP8Parameter) else p.detach() for p in model.parameters()]


@pytest.mark.parametrize("name", [*NAMES, "StiffnessWrapper"])
def test_a_compiled_step_is_the_step(name: str) -> None:
    expected = trained(name, "nothing")
    for what in ("step", "all"):
        torch._dynamo.reset()
        assert all(torch.equal(a, b) for a, b in zip(trained(name, what), expected, strict=True)), what


def twins() -> list[tuple[nn.Module, Any]]:
    """A model and its optimizer, twice."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        model = fm.quantize_model(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), "E4M3", storage="fp8")
        made.append((model, optimizer_of("StiffnessAdamW", model)))
    torch._dynamo.reset()
    return made


def same(one: nn.Module, other: nn.Module) -> bool:
    codes = [[p.codes if isinstance(p, fm.FP8Parameter) else p for p in model.parameters()] for model in (one, other)]
    return all(map(torch.equal, *codes))


def test_a_step_breaks_the_graph() -> None:
    (model, optimizer), _ = twins()
    model(X).sum().backward()

    def step(x: Tensor) -> Tensor:
        optimizer.step()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(step, backend="eager", fullgraph=True)(X)
    assert not optimizer.state


def test_a_closure_runs_outside_the_graph() -> None:
    plain, compiled = twins()
    for model, optimizer in (plain, compiled):
        take = optimizer.step if model is plain[0] else torch.compile(optimizer.step, backend="aot_eager")

        def closure(model: nn.Module = model) -> Tensor:
            model.zero_grad()
            loss: Tensor = model(X).square().mean()
            loss.backward()
            return loss

        assert take(closure).item() > 0
    assert same(plain[0], compiled[0])


def test_a_rate_in_a_tensor_is_read_in_order() -> None:
    """The graph does not know that a step reads it."""
    moved = []
    for backend in (None, "aot_eager"):
        rate = torch.tensor(0.01)
        parameter = nn.Parameter(torch.ones(3))
        optimizer = optim.StiffnessAdamW([parameter], lr=rate)

        def step(lr: float, rate: Tensor = rate, optimizer: Any = optimizer) -> None:
            rate.fill_(lr)
            optimizer.step()

        take = step if backend is None else torch.compile(step, backend=backend)
        for lr in (0.1, 0.2):
            parameter.grad = torch.ones(3)
            take(lr)
        moved.append(parameter.detach().clone())
    assert torch.equal(*moved)


def test_steps_in_the_backward_pass_are_finished_outside_the_graph() -> None:
    plain, compiled = twins()
    for model, optimizer in (plain, compiled):
        optim.step_in_backward(optimizer)
        take = optimizer.step if model is plain[0] else torch.compile(optimizer.step, backend="aot_eager")
        for _ in range(3):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            take()
    assert same(plain[0], compiled[0])
