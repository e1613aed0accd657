"""The runtime of a run: threads, seed, device, processes, compilation.

Old CPUs have no instructions for bfloat16 products: `bfloat16_products` takes them by
float32.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanogpt_bench.config.schema import Config, Precision
from nanogpt_bench.system.errors import BenchError, counted, one_line
from nanogpt_bench.system.ranks import ALONE, Ranks

CUDA = "cuda"


def check_device(wanted: str) -> None:
    """Refuse `cuda` where there is no GPU."""
    if wanted == CUDA and not torch.cuda.is_available():
        raise no_device("this machine")


def no_device(place: str) -> BenchError:
    """Return the error of `cuda` where there is no GPU."""
    return BenchError(f"runtime.device: {CUDA!r} is not available on {place}; allowed: auto, cpu")


def device_of(config: Config) -> torch.device:
    """Return the device that a configuration computes on; refuse one that is missing."""
    wanted = config.runtime.device
    check_device(wanted)
    return torch.device(CUDA if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def weight_dtype(config: Config) -> torch.dtype:
    """Return the dtype of the weights that a resolved configuration keeps as floats."""
    is_pure = config.train.precision == Precision.BF16_PURE
    return torch.bfloat16 if is_pure else torch.float32


@contextmanager
def runtime(config: Config) -> Iterator[torch.device]:
    """Set threads and seed as `threads_and_seed` does; yield the device."""
    device = device_of(config)
    with threads_and_seed(config):
        yield device


@contextmanager
def threads_and_seed(config: Config) -> Iterator[None]:
    """Set torch's threads and seed within the block. Both are restored."""
    threads = torch.get_num_threads()
    torch.set_num_threads(config.runtime.threads or threads)
    try:
        with torch.random.fork_rng():
            # Dropout draws from torch's generator.
            torch.manual_seed(config.seed)
            yield
    finally:
        torch.set_num_threads(threads)


#: torch's names of CPU capabilities with which its bfloat16 product takes ten times as
#: long as float32's
WITHOUT_BFLOAT16 = ("NO AVX", "AVX2")
_ATEN = torch.ops.aten
PRODUCT_OPS = (_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default)


def _is_bfloat16(operand: Any) -> bool:
    return type(operand) is torch.Tensor and operand.dtype is torch.bfloat16


class ProductsByFloat32(TorchDispatchMode):
    """Take products of bfloat16 matrices as float32 ones, rounded once at the end.

    A product of two bfloat16 numbers is exact in float32, and bfloat16 hardware sums in
    float32, too: only the order of summation differs. Other operations are left alone.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call one operation of torch."""
        operation: Callable[..., Any] = func
        options = kwargs or {}
        if func in PRODUCT_OPS and all(_is_bfloat16(operand) for operand in args):
            return operation(*(operand.float() for operand in args), **options).bfloat16()
        return operation(*args, **options)


def bfloat16_products(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a run's products of bfloat16 matrices are taken.

    It holds for the forward and the backward pass. It is a `ProductsByFloat32` where
    the run has such products and the processor no instructions for them, and otherwise
    does nothing. In compiled models it would be without effect.
    """
    has_products = config.train.precision in (Precision.BF16_MIXED, Precision.BF16_PURE)
    if not has_products or config.runtime.compile or device.type != "cpu":
        return nullcontext()
    if torch.backends.cpu.get_cpu_capability() in WITHOUT_BFLOAT16:
        return ProductsByFloat32()
    return nullcontext()


class CompiledLoss:
    """`model.loss`, compiled.

    It runs uncompiled while monitors have hooks in layers, which would force a new
    compilation.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._compiled = torch.compile(model.loss, dynamic=False)
        self._hooks_of_model = _count_hooks(model)

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats, as `GPT.loss` does."""
        if _count_hooks(self._model) != self._hooks_of_model:
            loss: Tensor = self._model.loss(tokens, targets)
            return loss
        try:
            loss = self._compiled(tokens, targets)
        except torch._dynamo.exc.TorchDynamoException as error:
            # The message ends with torch's traceback and advice.
            reason = one_line(str(error).partition("from user code")[0].partition("Set TORCH")[0])
            raise BenchError(f"runtime.compile: the model can't be compiled: {reason}") from None
        return loss


def _count_hooks(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    )


def check_ranks(config: Config, ranks: Ranks) -> None:
    """Refuse what the processes of a run can't do together.

    That is `train.parallel` without torchrun, torchrun without `train.parallel`, a
    batch that processes can't share evenly, and too few GPUs.
    """
    parallel = config.train.parallel
    if parallel is not None and ranks is ALONE:
        raise BenchError(
            f"train.parallel: {parallel!r} needs several processes; start them with torchrun "
            "--nproc-per-node 2 -m nanogpt_bench run, or give --train.parallel null"
        )
    if parallel is None and ranks is not ALONE:
        raise BenchError(
            "torchrun started this process, but train.parallel is null; give --train.parallel ddp"
        )
    size = ranks.size
    if config.train.batch_size % size:
        raise BenchError(
            f"train.batch_size: {counted(config.train.batch_size, 'sequence')} can't be divided "
            f"evenly among {size} processes; give a multiple of {size}"
        )
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    gpus = torch.cuda.device_count()
    if size > 1 and config.runtime.device != "cpu" and 0 < gpus < local_size:
        raise BenchError(
            f"runtime.device: {local_size} processes need a GPU each, but there are {gpus}; start "
            "fewer, or give --runtime.device cpu"
        )


def refuse_parallel(mode: str | None, subject: str) -> None:
    """Refuse `train.parallel` where `subject` trains in one process."""
    if mode is not None:
        raise BenchError(
            f"train.parallel: {mode!r} works only with torchrun -m nanogpt_bench run; {subject} "
            "trains in one process; add --train.parallel null"
        )


Loss = Callable[[Tensor, Tensor], Tensor]


def replicated(model: nn.Module, loss: Loss) -> Loss:
    """Return a loss whose backward pass leaves the processes' mean gradient in each."""
    wrapped: Loss = nn.parallel.DistributedDataParallel(_Loss(model, loss), init_sync=False)
    return wrapped


class _Loss(nn.Module):
    """A loss as a module that holds the model."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self._loss(tokens, targets)
