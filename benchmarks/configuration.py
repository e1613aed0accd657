"""Calls and files between a configuration and the first codes, and the time that
planning a sweep takes.

    python benchmarks/configuration.py [--points 1000]

A YAML file with one format for one layer is read, resolved and applied to a model of
one block, whose layer then holds codes. Counted by a profiler are the files of the two
packages that this enters, their functions, their calls, and the calls that go to
another file; a second count leaves out what the first has cached. The plan is that of a
sweep of 4 formats, 5 rules, 5 learning rates and so many seeds that there are at least
``--points`` runs, with the check that corpus and layers exist, in process CPU time, the
least of three.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import nanogpt_bench.loop.train  # what `run` has imported when it begins
from nanogpt_bench.config.settings import load_config
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.model.gpt import GPT, GPTShape
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.surgery import quantize
from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.sweep.plan import check_inputs, plan_sweep

ROOT = Path(nanogpt_bench.__file__).parent.parent
PACKAGES = tuple(str(ROOT / name) for name in ("fp8manifold/", "nanogpt_bench/"))
CONFIG = "rule: nearest\nmodel: {n_layer: 1, formats: {attn.qkv: E4M3}}\n"
SWEEP = """
settings: {{train.max_steps: 100, data.dir: {data}}}
reference: {{rule: bf16-mixed}}
axes:
  model.format: [E4M3, E5M2, E3M4, E7M0]
  rule: [nearest, stochastic, residual8, stiffness, momentum]
  optimizer.lr: [0.0005, 0.001, 0.002, 0.004, 0.008]
  seed: {seeds}
"""


class Way:
    """Calls into the two packages, as a profiler counts them."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[Any] = set()
        self.calls = self.moves = 0
        self._last = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGES) and frame.f_code.co_name != "<module>":
            self.calls += 1
            self.moves += file != self._last
            self.files.add(file)
            self.functions.add(frame.f_code)
            self._last = file


def way_of(work: Callable[[], Any]) -> Way:
    """Count the calls while a function runs."""
    way = Way()
    sys.setprofile(way)
    try:
        work()
    finally:
        sys.setprofile(None)
    return way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=1000, help="runs of the sweep, at least")
    points = parser.parse_args().points
    with tempfile.TemporaryDirectory() as folder:
        config, sweep = Path(folder) / "a.yaml", Path(folder) / "b.yaml"
        config.write_text(CONFIG)
        (Path(folder) / "text").write_text("to be or not to be " * 1000)
        prepare_text(Path(folder) / "text", Path(folder) / "data", "char")
        sweep.write_text(
            SWEEP.format(seeds=list(range(-(-points // 100))), data=Path(folder) / "data")
        )
        for times in ("first", "second"):
            model = GPT(GPTShape(n_layer=1, n_head=4, n_embd=128, block_size=64))
            way = way_of(lambda model=model: quantize(model, resolve(load_config(config))))
            print(
                f"configuration to codes, {times} time: {len(way.files)} files, "
                f"{len(way.functions)} functions, {way.calls} calls, {way.moves} moves between "
                f"files"
            )
        spent = []
        for _ in range(3):
            begun = time.process_time()
            planned = plan_sweep(read_sweep(sweep))
            check_inputs(planned)
            spent.append(time.process_time() - begun)
        print(f"plan of {len(planned):,} runs: {min(spent):.2f} s")


if __name__ == "__main__":
    main()
