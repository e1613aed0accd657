"""What a step on a GPU asks of the card and of the host, counted without one, and what becomes of failures."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from optimizer_cases import normal
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold._numerics.blocks import BLOCK, block_on
from fp8manifold._triton import launch
from fp8manifold.optim import _agreement, _backends, _state, _triton_step
from fp8manifold.optim._backends import blocks_of, exact_options
from fp8manifold.optim._checks import restore_dtypes
from fp8manifold.optim._slot import Slot

MOST_LAUNCHES = 12
VIEWS = ("view", "detach", "alias", "slice", "select", "unsqueeze", "expand", "t", "transpose", "reshape", "as_strided")
WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_to_copy", "item")


class Kernel:
    """Stands for one of Triton's: it counts its launches and does nothing."""

    def __init__(self, name: str, counts: Counter[str]) -> None:
        self.name, self.counts = name, counts

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert grid[0] > 0
        return lambda *_, **__: self.counts.update(["launches", self.name])


class Watch(TorchDispatchMode):
    """Counts operators over memory that would be the card's: launches, and those that the host waits for."""

    def __init__(self, host: set[int], counts: Counter[str]) -> None:
        super().__init__()
        self.host, self.counts = host, counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(self._place(x) not in self.host for x in inputs) and name not in VIEWS:
            self.counts.update(["waits" if name in WAITS else "launches", name])
        if not inputs and name in ("zeros", "full", "ones"):
            self.counts.update(["launches", name])
        if inputs and all(self._place(x) in self.host for x in inputs):
            self.host |= {
                self._place(x) for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)
            }
        return result

    @staticmethod
    def _place(x: torch.Tensor) -> int:
        return x.untyped_storage().data_ptr() if type(x) in (torch.Tensor, torch.nn.Parameter) else 0


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Steps go the way that they go on a GPU, to kernels that count."""
    counts: Counter[str] = Counter()
    monkeypatch.setattr(_agreement, "on_gpu", lambda device: True)
    monkeypatch.setattr(_agreement, "is_triton", lambda slot: True)
    monkeypatch.setattr(launch, "_kernels", lambda: (Kernel("step", counts), Kernel("verdict", counts)))
    monkeypatch.setattr(launch, "options", dict)
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: (counts.update(["waits"]), tolist(x))[1])  # no operator
    return counts


def parameters(count: int) -> list[fm.FP8Parameter]:
    """Of one kind and three shapes."""
    return [fm.FP8Parameter(normal(4, 256 * (1 + i % 3), seed=i), "E4M3", seed=i) for i in range(count)]


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("writeback", ["stochastic", "residual8"])
def test_a_steady_step_is_a_few_launches_and_one_wait(moments: Any, writeback: Any, on_a_card: Counter[str]) -> None:
    """Of 290 parameters; the host waits at the end, for the verdict and for weights at the end of their range."""
    weights = parameters(290)
    optimizer = optim.StiffnessAdamW(weights, 1e-3, moments=moments, writeback=writeback)
    for p in weights:
        p.grad = torch.ones(p.shape)
    optimizer.step()
    optimizer.step()
    on_a_card.clear()
    host = {state["step"].untyped_storage().data_ptr() for state in optimizer.state.values()}
    host |= {state["grid"].untyped_storage().data_ptr() for state in optimizer.state.values()}
    with Watch(host, on_a_card):
        optimizer.step()
    assert on_a_card["step"] == 1
    assert on_a_card["verdict"] == 1
    assert on_a_card["launches"] <= MOST_LAUNCHES, on_a_card
    assert on_a_card["waits"] == 1, on_a_card
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}


@pytest.mark.parametrize("due", ["first", "refresh", "remainder", "observer", "compile"])
def test_steps_that_plan_more_have_their_verdict_first(due: str, on_a_card: Counter[str]) -> None:
    p = fm.FP8Parameter(normal(4, 256), "E4M3", seed=1)
    options: dict[str, Any] = {"refresh_every": 1} if due == "refresh" else {}
    optimizer = optim.StiffnessAdamW([p], 1e-3, compile=False if due == "compile" else None, **options)
    p.grad = torch.ones(p.shape)
    assert not _agreement.is_steady(optimizer, optimizer._slots())
    if due == "first":
        return
    optimizer.step()
    if due == "observer":
        optimizer.observer = lambda view: None
    if due == "remainder":
        p.remainder = torch.zeros(p.shape, dtype=torch.int8)
    assert not _agreement.is_steady(optimizer, optimizer._slots())


@pytest.mark.parametrize("kind", ["StiffnessMuon", "RiemannianAdam", "FisherNaturalGradient"])
def test_optimizers_that_do_more_have_their_verdict_first(kind: str) -> None:
    assert not _agreement._is_ordinary(getattr(optim, kind))
    assert _agreement._is_ordinary(optim.StiffnessAdamW)


def stepped(p: Any, **options: Any) -> list[Slot]:
    """The slot of a step that is not taken."""
    optimizer = optim.StiffnessAdamW([p], 1e-3, **options)
    p.grad = torch.ones(p.shape)
    slots: list[Slot] = []
    optimizer._take = slots.extend  # type: ignore[method-assign]
    optimizer.step()
    return slots


# ------------------------------------------------------------------------------------------------------- other devices
def test_inductor_is_asked_for_exact_arithmetic_on_other_devices() -> None:
    """And for nothing on the CPU, whose code is exact."""
    from torch._inductor import config

    known = config.get_config_copy()
    options = exact_options("cuda")
    assert exact_options("cpu") is None
    assert options
    assert set(options) == {name for name in _backends._EXACT if name in known}
    assert all(options.values())


def test_out_of_memory_is_no_failure_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any, **__: Any) -> Any:
        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        return fail

    monkeypatch.setattr(_backends, "_functions", {})
    monkeypatch.setattr(torch, "compile", no_memory)
    p = torch.nn.Parameter(normal(3, 5))
    p.grad = torch.ones(3, 5)
    optimizer = optim.StiffnessAdamW([p], 1e-3, compile=True)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert not _backends._failed


def test_eager_blocks_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """124M weights are a thousand blocks on a CPU, and two on a card."""
    assert block_on(torch.device("cpu")) == BLOCK
    assert 124_000_000 / block_on(torch.device("cuda")) <= 2
    (slot,) = stepped(fm.FP8Parameter(normal(600, 512), "E4M3", seed=1))
    assert len(list(blocks_of(slot))) == 3
    monkeypatch.setattr("fp8manifold.optim._backends.block_on", lambda device: block_on(torch.device("cuda")))
    assert len(list(blocks_of(slot))) == 1


def test_counts_stay_on_the_host_wherever_a_state_is_loaded_to() -> None:
    """A step on the card is a synchronisation a parameter."""
    p = torch.nn.Parameter(normal(3))
    p.grad = torch.ones(3)
    optimizer = optim.StiffnessAdamW([p], 1e-3)
    optimizer.step()
    saved = optimizer.state_dict()
    with FakeTensorMode(allow_non_fake_inputs=True):
        saved["state"][0]["step"] = torch.ones((), device="cuda")
        restore_dtypes(optimizer, saved)
    assert optimizer.state[p]["step"].device.type == "cpu"


def test_products_longer_than_31_bits_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(1000, dtype=torch.float64)
    whole = _agreement._sum_of_squares(x)
    monkeypatch.setattr(_agreement, "_DOT", 7)
    torch.testing.assert_close(_agreement._sum_of_squares(x), whole)
    x[999] = torch.inf
    assert not _agreement._sum_of_squares(x).isfinite()


def test_a_first_step_waits_once_for_the_word_of_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not once a block."""
    counts: Counter[str] = Counter()
    x = normal(5 * BLOCK // 2).double()
    expected = _state.content_word(x, (1, 2, 3))
    monkeypatch.setattr(_state, "block_on", lambda device: BLOCK // 4)
    with Watch(set(), counts):
        assert _state.content_word(x, (1, 2, 3)) == expected
    assert counts["_local_scalar_dense"] == 1


def test_no_cuda_graph_records_a_step() -> None:
    assert torch.Tag.cudagraph_unsafe in torch.ops.fp8manifold.optimizer_step.default.tags


# ------------------------------------------------------------------------------------------------------------ failures
class Failing:
    """A kernel that cannot be compiled."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def warmup(self, *_: Any, **__: Any) -> None:
        raise self.error


def test_a_kernel_that_can_not_be_compiled_is_told_apart_from_a_card_without_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "options", dict)
    table: Any = SimpleNamespace(device=torch.device("cuda"))
    chunks = torch.zeros(1, 2)
    with pytest.raises(launch.KernelsUnavailableError, match="RuntimeError: no C compiler"):
        launch._compile(table, [(Failing(RuntimeError("no C compiler")), chunks, (chunks,))])
    with pytest.raises(torch.OutOfMemoryError):
        launch._compile(table, [(Failing(torch.OutOfMemoryError("full")), chunks, (chunks,))])


def test_without_kernels_steps_are_taken_otherwise_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        raise launch.KernelsUnavailableError("ImportError: libcuda.so.1")

    monkeypatch.setattr(launch, "_kernels", none)
    monkeypatch.setattr(_triton_step, "_given_up", [])
    p, other = (fm.FP8Parameter(normal(4, 256), "E4M3", seed=1) for _ in range(2))
    optimizers = [optim.StiffnessAdamW([each], 1e-3) for each in (p, other)]
    for _ in range(2):
        p.grad = other.grad = torch.ones(p.shape)
        [each.step() for each in optimizers]
    monkeypatch.setattr(_agreement, "on_gpu", lambda device: True)
    monkeypatch.setattr(_agreement, "is_triton", lambda slot: not _triton_step._given_up)
    with pytest.warns(optim.CompileUnavailableWarning, match=r"libcuda\.so\.1"):
        optimizers[0].step()
    monkeypatch.setattr(_agreement, "on_gpu", lambda device: False)
    optimizers[1].step()
    assert torch.equal(p.codes, other.codes)
    monkeypatch.setattr(_agreement, "on_gpu", lambda device: True)
    optimizers[0].step()
    assert int(optimizers[0].state[p]["step"]) == 4


def test_an_installed_triton_is_not_imported_on_a_cpu() -> None:
    import subprocess
    import sys

    program = (
        "import sys, torch, fp8manifold as fm\n"
        "p = fm.FP8Parameter(torch.ones(2, 3), 'E4M3', seed=1); p.grad = torch.ones(2, 3)\n"
        "fm.optim.StiffnessAdamW([p], 1e-3).step(); p.dequantize()\n"
        "print([m for m in sys.modules if m.startswith('fp8manifold._triton.') and m.split('.')[-1] in "
        "('step', 'arrays', 'format', 'chart', 'stages')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
