"""A step under torch.compile: one node of the graph, the same bits, whatever the compiler keeps copies of."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import optim

# the compiler's own, of the loss that lives on after the break at backward()
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

NODE = "fp8manifold.optimizer_step"
BATCHES = [torch.randn(5, 8, generator=torch.Generator().manual_seed(i)) for i in range(5)]
BUILDS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda m: optim.StiffnessAdamW(m.parameters(), lr=1e-2, weight_decay=0.1),
    "adamw-8bit": lambda m: optim.StiffnessAdamW(m.parameters(), lr=1e-2, moments="8bit", writeback="residual8"),
    "madam": lambda m: optim.Madam(m.parameters(), lr=1e-2),
    "muon": lambda m: optim.StiffnessMuon.for_model(m, lr=1e-2),
    "riemannian": lambda m: optim.RiemannianAdam(m.parameters(), lr=1.0, float_lr=1e-3),
}


def build(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 4))
    fm.quantize_model(model, "E4M3", storage="fp8", seed=1)
    return model, BUILDS[name](model)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def train(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def everything(model: nn.Module, optimizer: Any) -> list[Tensor]:
    weights = [p.codes if isinstance(p, fm.FP8Tensor) else p.detach() for p in model.parameters()]
    scales = [p.scale for p in model.parameters() if isinstance(p, fm.FP8Tensor)]
    entries = [optimizer.state[p] for p in model.parameters()]
    return [*weights, *scales, *(entry[k] for entry in entries for k in sorted(entry) if torch.is_tensor(entry[k]))]


def check_same(first: tuple[nn.Module, Any], second: tuple[nn.Module, Any]) -> None:
    for a, b in zip(everything(*first), everything(*second), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch.compiler.reset()


class Graphs:
    """A backend that runs graphs as they are and keeps them."""

    def __init__(self) -> None:
        self.made: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.made.append(graph)
        return graph.forward

    @property
    def nodes(self) -> list[list[str]]:
        """By graph, the names of our operators that change something."""
        return [[str(n.target) for n in g.graph.nodes if NODE in str(n.target)] for g in self.made]


@pytest.mark.parametrize("name", BUILDS)
def test_a_compiled_training_step_holds_ours_as_one_node(name: str) -> None:
    plain, compiled = build(name), build(name)
    graphs = Graphs()
    step = torch.compile(train, backend=graphs)
    for x in BATCHES:
        train(*plain, x)
        step(*compiled, x)
    check_same(plain, compiled)
    assert graphs.nodes == [[], [NODE]]  # the forward pass, and everything after the backward pass


@pytest.mark.parametrize(("name", "backend"), [("adamw", "inductor"), ("riemannian", "aot_eager")])
def test_a_step_by_itself_is_one_graph(name: str, backend: str) -> None:
    plain, compiled = build(name), build(name)
    step = torch.compile(compiled[1].step, backend=backend, fullgraph=True)
    for x in BATCHES:
        for model, optimizer in (plain, compiled):
            optimizer.zero_grad()
            loss_of(model, x).backward()
        plain[1].step()
        step()
        compiled[1].param_groups[0]["lr"] = plain[1].param_groups[0]["lr"] = plain[1].param_groups[0]["lr"] * 0.9
    check_same(plain, compiled)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_a_graph_does_before_and_after_the_step_is_in_order(backend: str) -> None:
    """The compiler keeps copies of what it changes: the step reads them and writes them."""
    plain, compiled = build("adamw"), build("adamw")

    @torch.no_grad()
    def around(model: nn.Module, optimizer: Any) -> Tensor:
        norm = model[1]
        assert isinstance(norm, nn.LayerNorm)
        norm.weight.mul_(0.5)
        assert norm.weight.grad is not None
        norm.weight.grad.mul_(3)
        optimizer.step()
        norm.weight.add_(1)
        return norm.weight * 2 + model[0].weight.sum()

    function = torch.compile(around, backend=backend, fullgraph=True)
    for x in BATCHES:
        for model, optimizer in (plain, compiled):
            optimizer.zero_grad()
            loss_of(model, x).backward()
        want, got = around(*plain), function(*compiled)
        torch.testing.assert_close(got, want)
    check_same(plain, compiled)


def test_gradients_come_and_go() -> None:
    plain, compiled = build("adamw"), build("adamw")
    step = torch.compile(compiled[1].step, backend="aot_eager", fullgraph=True)
    for i, x in enumerate(BATCHES):
        for model, optimizer in (plain, compiled):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            if i % 2:
                next(model.parameters()).grad = None
        plain[1].step()
        step()
        assert all(
            (p.grad is None) == (q.grad is None)
            for p, q in zip(plain[0].parameters(), compiled[0].parameters(), strict=True)
        )
    check_same(plain, compiled)


def test_a_gradient_that_is_not_finite_skips_the_step() -> None:
    model, optimizer = build("adamw")
    loss_of(model, BATCHES[0] * float("nan")).backward()
    before = [x.clone() for x in everything(model, optimizer)]
    torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, everything(model, optimizer), strict=True))


def test_a_closure_runs_outside_the_graph() -> None:
    plain, compiled = build("adamw"), build("adamw")
    for model, optimizer in (plain, compiled):
        take = optimizer.step if model is plain[0] else torch.compile(optimizer.step, backend="aot_eager")

        def closure(model: nn.Module = model) -> Tensor:
            model.zero_grad()
            loss = loss_of(model, BATCHES[0])
            loss.backward()
            return loss

        assert take(closure).item() > 0
    check_same(plain, compiled)


def test_a_rate_in_a_tensor_is_read_in_order() -> None:
    """The graph does not know that a step reads it: such a step is taken between two graphs."""
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
    plain, compiled = build("adamw"), build("adamw")
    for model, optimizer in (plain, compiled):
        optim.step_in_backward(optimizer)
        take = optimizer.step if model is plain[0] else torch.compile(optimizer.step, backend="aot_eager")
        for x in BATCHES:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            take()
    check_same(plain, compiled)


def test_a_copy_is_another_optimizer() -> None:
    model, optimizer = build("adamw")
    optimizer.warn_after = 3
    other_model, other = copy.deepcopy((model, optimizer))
    assert other.warn_after == 3
    for m, o in ((model, optimizer), (other_model, other)):
        loss_of(m, BATCHES[0]).backward()
        torch.compile(o.step, backend="aot_eager", fullgraph=True)()
    check_same((model, optimizer), (other_model, other))
    assert other.state[next(other_model.parameters())]["step"] == 1


def test_an_optimizer_that_is_gone_is_refused() -> None:
    model, optimizer = build("adamw")
    number = optimizer._number
    del optimizer
    gc.collect()
    with pytest.raises(RuntimeError, match="compiled for an optimizer that is gone"):
        torch.ops.fp8manifold.optimizer_step(number, [0], [next(model.parameters())], [torch.zeros(8, 8)])
