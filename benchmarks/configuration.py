"""The way from a configuration to the first codes, and the time to plan a sweep.

    python benchmarks/configuration.py [--points 1000]

A YAML file with one format for one layer is read, resolved and applied to a model of
one block, whose layer then holds codes. A profiler counts the files of the two packages
that this enters, their functions, their calls, and the calls that go to another file. A
second count leaves out what the first has cached.

The plan is that of a sweep of 4 formats, 5 rules, 5 learning rates and so many seeds
that there are at least ``--points`` runs. It includes the check that corpus and layers
exist. The time is process CPU time, the least of three.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

# The bench's `run` is a function of this module: importing it is not counted.
import nanogpt_bench.loop.train
from nanogpt_bench.config.settings import load_config
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.model.gpt import GPT, GPTShape
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.surgery import quantize
from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.sweep.plan import check_inputs, plan_sweep

PACKAGES_ROOT = Path(nanogpt_bench.__file__).parent.parent
PACKAGE_FOLDERS = tuple(str(PACKAGES_ROOT / name) for name in ("fp8manifold/", "nanogpt_bench/"))
CONFIG = "rule: nearest\nmodel: {n_layer: 1, formats: {attn.qkv: E4M3}}\n"
SWEEP_TEXT = """
settings: {{train.max_steps: 100, data.dir: {data}}}
reference: {{rule: bf16-mixed}}
axes:
  model.format: [E4M3, E5M2, E3M4, E7M0]
  rule: [nearest, stochastic, residual8, stiffness, momentum]
  optimizer.lr: [0.0005, 0.001, 0.002, 0.004, 0.008]
  seed: {seeds}
"""


class CallCounter:
    """A profiler that counts calls into the two packages."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[Any] = set()
        self.calls = 0
        #: calls that go to another file than the call before
        self.moves = 0
        self._last_file = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        file = code.co_filename
        if event == "call" and file.startswith(PACKAGE_FOLDERS) and code.co_name != "<module>":
            self.calls += 1
            self.moves += file != self._last_file
            self.files.add(file)
            self.functions.add(code)
            self._last_file = file


def count_calls(work: Callable[[], Any]) -> CallCounter:
    """Count the calls while a function runs."""
    counter = CallCounter()
    sys.setprofile(counter)
    try:
        work()
    finally:
        sys.setprofile(None)
    return counter


def quantize_by_file(config: Path, model: GPT) -> None:
    """Read a configuration and quantise a model as it says."""
    quantize(model, resolve(load_config(config)))


def main() -> None:
    """Count, and print the counts and the time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=1000, help="runs of the sweep, at least")
    points = parser.parse_args().points
    # 4 formats, 5 rules and 5 rates are 100 runs for each seed.
    seeds = list(range(-(-points // 100)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, sweep = folder / "config.yaml", folder / "sweep.yaml"
        config.write_text(CONFIG)
        (folder / "text").write_text("to be or not to be " * 1000)
        prepare_text(folder / "text", folder / "data", "char")
        sweep.write_text(SWEEP_TEXT.format(seeds=seeds, data=folder / "data"))
        for turn in ("first", "second"):
            model = GPT(GPTShape(n_layer=1, n_head=4, n_embd=128, block_size=64))
            counter = count_calls(partial(quantize_by_file, config, model))
            print(
                f"configuration to codes, {turn} time: {len(counter.files)} files, "
                f"{len(counter.functions)} functions, {counter.calls} calls, "
                f"{counter.moves} moves between files"
            )
        seconds = []
        for _ in range(3):
            begin = time.process_time()
            planned = plan_sweep(read_sweep(sweep))
            check_inputs(planned)
            seconds.append(time.process_time() - begin)
        print(f"plan of {len(planned):,} runs: {min(seconds):.2f} s")


if __name__ == "__main__":
    main()
