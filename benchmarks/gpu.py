"""Everything that a card has to say, in ten minutes: whether its bits are the CPU's first, and then times.

    python benchmarks/gpu.py [--out gpu.json] [--only exact_steps ...] [--record]
    TRITON_INTERPRET=1 python benchmarks/gpu.py --dry        the same from end to end, tiny, on a CPU

Parts run in the order of their worth, each for 90 seconds at most, and any of them may fail alone: the file is written
after every part.  Times are medians of single calls with the cache flushed between them, by the card's own
clock.  `--record` writes the table of the page on performance too, unless bits differ.  It needs torch with Triton, and
geoopt; torchao and bitsandbytes are left out where they are not installed.
"""

import argparse
import contextlib
import copy
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from _record import record
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.optim import _backends, _steady, _triton_step

SECONDS: Final = 90.0
PEAK: Final = 989e12  # products of bfloat16 an H100 SXM adds up in a second, by its data sheet
WAYS: Final = (
    ("stochastic", "8bit"),
    ("stochastic", "float32"),
    ("stochastic", "bfloat16"),
    ("residual8", "8bit"),
    ("nearest", "8bit"),
)
FORMATS: Final = ("E4M3", "E5M2", "E3M4", "E2M5", "E7M0", "E4M3FNUZ")


class Session:
    """Where to run, how large, and how long a part may still take."""

    def __init__(self, dry: bool) -> None:
        self.dry, self.device = dry, torch.device("cpu" if dry else "cuda")
        self.weights = (2**13,) if dry else (124_000_000, 1_000_000_000)
        self.begun = time.monotonic()

    @property
    def has_time(self) -> bool:
        return time.monotonic() - self.begun < SECONDS

    def milliseconds(self, call: Callable[[], object], repeats: int = 20) -> float:
        """The median of single calls."""
        if self.dry:
            begun = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begun)
        cache, times = torch.empty(2**27, dtype=torch.uint8, device=self.device), []
        for _ in range(3):
            call()
        while len(times) < 3 or (len(times) < repeats and self.has_time):
            cache.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times)[len(times) // 2]

    def busy(self, call: Callable[[], object]) -> float:
        """Milliseconds that kernels run for in one call: what is left of a call where the host runs ahead."""
        if self.dry:
            return 0.0
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        return sum(event.self_device_time_total for event in profile.key_averages()) / 1e3


@contextlib.contextmanager
def on_card(session: Session) -> Iterator[None]:
    """Steps by kernels; of a dry run by Triton's interpreter, on the CPU."""
    if not session.dry:
        yield
        return
    kept = _steady.on_gpu, _steady.is_triton, _backends.is_native, _backends.is_triton
    _steady.on_gpu = lambda device: True  # type: ignore[assignment]
    _steady.is_triton = _backends.is_triton = lambda slot: True  # type: ignore[assignment]
    _backends.is_native = lambda slot: False  # type: ignore[assignment]
    try:
        yield
    finally:
        _steady.on_gpu, _steady.is_triton, _backends.is_native, _backends.is_triton = kept


def bits(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def exact_steps(session: Session) -> dict[str, Any]:
    """Bytes of weights and state in which five steps of the card differ from native code's."""
    found: dict[str, Any] = {}
    for fmt in FORMATS[: 1 if session.dry else None]:
        for writeback, moments in WAYS[: 2 if session.dry else None]:
            if not session.has_time:
                return found
            here = [fm.FP8Parameter(torch.randn(24, 256, generator=seeded(i)) * 0.1, fmt, seed=i) for i in range(3)]
            there = [nn.Parameter(p.detach().clone().to(session.device)) for p in here]
            made = [
                fm.optim.StiffnessAdamW(p, 1e-2, weight_decay=0.1, writeback=writeback, moments=moments)  # type: ignore[arg-type]
                for p in (here, there)
            ]
            for step in range(5):
                for i, (p, q) in enumerate(zip(here, there, strict=True)):
                    p.grad = torch.randn(24, 256, generator=seeded(100 * step + i))
                    q.grad = p.grad.to(session.device)
                made[0].step()
                with on_card(session):
                    made[1].step()
            pairs = [(p.codes, q.codes) for p, q in zip(here, there, strict=True)]  # type: ignore[attr-defined]
            for p, q in zip(here, there, strict=True):
                ours, theirs = made[0].state[p], made[1].state[q]
                pairs += [(value, theirs[name]) for name, value in ours.items() if isinstance(value, Tensor)]
            found[f"{fmt} {writeback} {moments}"] = sum(int((bits(a) != bits(b)).sum()) for a, b in pairs)
    return found


def exact_arrays(session: Session) -> dict[str, Any]:
    """Elements in which decoding, rounding and encoding differ."""
    found = {}
    for fmt in FORMATS:
        x = torch.randn(100_003, generator=seeded(1)) * torch.exp2(torch.randn(100_003, generator=seeded(2)) * 4)
        y, stochastic = x.to(session.device), {"rounding": "stochastic", "seed": 3}
        codes = fm.encode(x, fmt)
        pairs = [
            (codes, fm.encode(y, fmt)),
            (fm.round_to_grid(x, fmt, **stochastic), fm.round_to_grid(y, fmt, **stochastic)),  # type: ignore[arg-type]
            (fm.decode(codes, fmt), fm.decode(codes.to(session.device), fmt)),
        ]
        found[fmt] = sum(int((bits(a) != bits(b)).sum()) for a, b in pairs)
    return found


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weights(session: Session, count: int, one_byte: bool) -> list[Any]:
    """Rows of 4096 in tensors of 16M at most, with gradients."""
    width = 256 if session.dry else 4096
    made: list[Any] = []
    while count > 0:
        rows = max(min(count // width, 4096), 1)
        x = torch.randn(rows, width, device=session.device) * 0.02
        made.append(fm.FP8Parameter(x, "E4M3", seed=len(made)) if one_byte else nn.Parameter(x))
        made[-1].grad = torch.randn(rows, width, device=session.device)
        count -= rows * width
    return made


def step_times(session: Session) -> dict[str, Any]:
    """Milliseconds a step, and the bytes a weight that torch has allocated for it, at each size."""
    found: dict[str, Any] = {}
    for count in session.weights:
        for writeback, moments in WAYS:
            if session.has_time:
                with on_card(session):
                    options: Any = {"writeback": writeback, "moments": moments}
                    found[f"{millions(count)}, {writeback}, {moments} moments"] = timed(
                        session, count, True, lambda p, o=options: fm.optim.StiffnessAdamW(p, 1e-3, **o)
                    )
        found[f"{millions(count)}, torch's fused AdamW"] = timed(
            session, count, False, lambda p: torch.optim.AdamW(p, fused=not session.dry)
        )
    return found


def millions(count: int) -> str:
    return f"{count // 10**6:,}M weights"


def muon(session: Session) -> dict[str, Any]:
    """The same of Muon, whose products are most of a step."""
    count = session.weights[0]
    with on_card(session):
        ours = timed(session, count, True, lambda p: fm.optim.StiffnessMuon(p, 1e-3))
    theirs = timed(session, count, False, lambda p: torch.optim.Muon(p, 1e-3))
    return {f"{millions(count)}, StiffnessMuon": ours, f"{millions(count)}, torch Muon": theirs}


def timed(session: Session, count: int, one_byte: bool, make: Callable[[Any], Any]) -> dict[str, float]:
    before = 0 if session.dry else torch.cuda.memory_allocated()
    parameters = weights(session, count, one_byte)
    optimizer = make(parameters)
    optimizer.step()
    used = 0 if session.dry else torch.cuda.memory_allocated() - before
    times = {"ms": session.milliseconds(optimizer.step), "kernels ms": session.busy(optimizer.step)}
    return times | {"bytes": used / count}


def rivals(session: Session) -> dict[str, Any]:
    """Other optimizers of 8-bit state over 124M float32 weights."""
    found: dict[str, Any] = {}
    for package, name in (
        ("torchao.optim", "AdamW8bit"),
        ("torchao.optim", "AdamWFp8"),
        ("bitsandbytes.optim", "AdamW8bit"),
    ):
        label = f"{millions(session.weights[0])}, {package}.{name}"
        try:
            kind = getattr(__import__(package, fromlist=[name]), name)
        except Exception as error:
            found[label] = f"not installed: {type(error).__name__}"
            continue
        if session.dry:
            found[label] = "dry"
            continue
        found[label] = timed(session, session.weights[0], False, kind)
    return found


def decoding(session: Session) -> dict[str, Any]:
    """Milliseconds to decode a matrix to bfloat16, and of a layer's product with 8192 rows."""
    found: dict[str, Any] = {}
    for d in (256,) if session.dry else (1024, 4096, 8192):
        dense = nn.Linear(d, d, bias=False, device=session.device, dtype=torch.bfloat16)
        layer = fm.quantize_model(nn.Sequential(copy.deepcopy(dense)), "E4M3", storage="fp8")[0]  # type: ignore[index]
        x = torch.randn(8 if session.dry else 8192, d, device=session.device, dtype=torch.bfloat16)
        calls = {
            "decoding": layer.weight.dequantize,
            "nn.Linear": partial(dense, x),
            "one-byte layer": partial(layer, x),
        }
        found[f"{d} x {d}"] = {
            f"{name}, {unit}": measured(call)
            for name, call in calls.items()
            for unit, measured in (("ms", session.milliseconds), ("kernels ms", session.busy))
        }
    return found


def block(d: int) -> list[nn.Module]:
    """Matrices as a block of GPT-2 has them."""
    return [nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.LayerNorm(d), *(nn.Linear(d, d) for _ in range(4))]


def training(session: Session) -> dict[str, Any]:
    """Tokens a second, peak memory and the share of the card's products, of blocks as GPT-2's 124M has them."""
    d, layers, vocabulary, tokens = (32, 1, 64, 16) if session.dry else (768, 12, 50_304, 8192)
    found: dict[str, Any] = {}
    for label in ("float32", "bfloat16", "one byte", "bfloat16, compiled", "one byte, compiled"):
        if not session.has_time:
            break
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Embedding(vocabulary, d), *(m for _ in range(layers) for m in block(d)))
        model = model.append(nn.Linear(d, vocabulary)).to(session.device)  # type: ignore[operator]
        if "one byte" in label:
            model = fm.quantize_model(model, "E4M3", storage="fp8")
            optimizer: Any = fm.optim.StiffnessAdamW(model.parameters(), 1e-3, moments="8bit")
        else:
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=not session.dry)
        text = torch.randint(0, vocabulary, (tokens,), device=session.device)
        forward = torch.compile(model) if "compiled" in label and not session.dry else model

        def step(model: Any = forward, optimizer: Any = optimizer, text: Tensor = text, label: str = label) -> None:
            with torch.autocast(session.device.type, torch.bfloat16, enabled=label != "float32"):
                loss = nn.functional.cross_entropy(model(text).float(), text)
            loss.backward()
            with on_card(session):
                optimizer.step()
            optimizer.zero_grad()

        if not session.dry:
            torch.cuda.reset_peak_memory_stats()
        ms = session.milliseconds(step, repeats=8)
        products = 6 * tokens * sum(p.numel() for p in model.parameters() if p.dim() == 2)
        found[label] = {"tokens/s": 1e3 * tokens / ms, "MFU": products / (PEAK * ms / 1e3)}
        found[label] |= {"ms": ms, "kernels ms": session.busy(step)}
        found[label]["peak GB"] = 0 if session.dry else torch.cuda.max_memory_allocated() / 1e9
        del model, forward, optimizer, step
    return found


def launches(session: Session) -> dict[str, Any]:
    """What the driver was called for in a steady step of 290 parameters.

    Events are waited for that belong to the step before: its verdict, and its uploads.
    """
    count = 3 if session.dry else 290
    parameters = [fm.FP8Parameter(torch.randn(8, 256, device=session.device), "E4M3", seed=i) for i in range(count)]
    optimizer = fm.optim.StiffnessAdamW(parameters, 1e-3, moments="8bit")
    for p in parameters:
        p.grad = torch.randn(8, 256, device=session.device)
    with on_card(session):
        optimizer.step()
        optimizer.step()
        if session.dry:
            optimizer.step()
            return {"steps": int(optimizer.state[parameters[0]]["step"])}
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        optimizer.step()
    events = profile.key_averages()
    wanted = {"launches": "LaunchKernel", "waits": "StreamSynchronize", "events": "EventSynchronize"}
    wanted["copies"] = "MemcpyAsync"
    return {name: sum(e.count for e in events if key in e.key) for name, key in wanted.items()}


PARTS: Final = (exact_steps, exact_arrays, step_times, launches, decoding, rivals, muon, training)


def run(session: Session, only: list[str], out: Path) -> dict[str, Any]:
    """All parts, with the file written after each."""
    device = "dry" if session.dry else torch.cuda.get_device_name()
    result: dict[str, Any] = {"device": device, "torch": torch.__version__, "python": platform.python_version()}
    result["parts"] = {}
    for part in PARTS:
        if only and part.__name__ not in only:
            continue
        session.begun = time.monotonic()
        try:
            figures: Any = part(session)
        except Exception as error:
            figures = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2000:]}
        seconds = round(time.monotonic() - session.begun, 1)
        result["parts"][part.__name__] = {"seconds": seconds, "figures": figures}
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"{part.__name__} ({seconds} s): {json.dumps(figures)[:2000]}", flush=True)
        if not session.dry:
            torch.cuda.empty_cache()
    return result


def failures(result: dict[str, Any]) -> list[str]:
    """What bits differ, and which parts failed."""
    found = []
    for name, part in result["parts"].items():
        figures = part["figures"]
        if "error" in figures:
            found.append(f"{name}: {figures['error']}")
        elif name.startswith("exact"):
            found += [f"{name}: {case} differs in {n}" for case, n in figures.items() if n]
    return found


COLUMNS: Final = (
    "what",
    "a call, ms",
    "its kernels, ms",
    "bytes a weight",
    "tokens a second",
    "MFU",
    "peak GB",
    "count",
)


def row(
    what: str, figures: dict[str, float], times: tuple[str, str] = ("ms", "kernels ms")
) -> list[str | float | None]:
    """A row of the page's table, empty where nothing was measured."""
    found = [figures.get(name) for name in (*times, "bytes", "tokens/s", "MFU", "peak GB")]
    return [
        what,
        *(None if x is None else round(x, n) for x, n in zip(found, (3, 3, 2, None, 2, 1), strict=True)),
        None,
    ]


def rows(result: dict[str, Any]) -> list[list[str | float | None]]:
    """The table of the page: times are of one call of the step, of a layer, or of a whole step of training."""
    of = {name: part["figures"] for name, part in result["parts"].items()}
    made = [
        [f"bytes that differ from the CPU's, {part.removeprefix('exact_')}", *(None,) * 6, sum(of[part].values())]
        for part in ("exact_steps", "exact_arrays")
        if part in of
    ]
    for part in ("step_times", "rivals", "muon"):
        cases = of.get(part, {}).items()
        made += [row(what, figures) for what, figures in cases if isinstance(figures, dict)]
    for size, figures in of.get("decoding", {}).items():
        for what in dict.fromkeys(name.partition(",")[0] for name in figures):
            made.append(row(f"{size}, {what}", figures, (f"{what}, ms", f"{what}, kernels ms")))
    made += [row(f"training, {what}", figures) for what, figures in of.get("training", {}).items()]
    counted = of.get("launches", {}).items()
    return made + [[f"a steady step of 290 parameters: {what}", *(None,) * 6, count] for what, count in counted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="the file that is written after every part")
    parser.add_argument("--only", nargs="*", default=[], choices=[part.__name__ for part in PARTS], help="these parts")
    parser.add_argument("--dry", action="store_true", help="tiny, on a CPU, with TRITON_INTERPRET=1")
    parser.add_argument("--record", action="store_true", help="also write the table of the page on performance")
    asked = parser.parse_args()
    if not asked.dry and not torch.cuda.is_available():
        print("gpu.py: there is no GPU here: --dry runs it on a CPU", file=sys.stderr)
        return 2
    result = run(Session(asked.dry), asked.only, asked.out)
    found = failures(result) + [f"no kernels: {reason}" for reason in _triton_step._given_up]
    print("\n".join(found) or "every part ran, and every bit is the CPU's")
    if asked.record and not asked.dry and not found:
        record("", COLUMNS, rows(result), "cuda", ("triton", "torchao", "bitsandbytes"))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
