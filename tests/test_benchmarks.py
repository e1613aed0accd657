"""The benchmarks run from end to end at a tiny size.

They measure what they say, and report what goes wrong.
"""

import argparse
import ast
import importlib
import itertools
import json
import math
import os
import random
import re
import runpy
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import torch
from torch import nn

import fp8manifold as fm
from fp8manifold.formats import as_format
from nanogpt_bench.data.batches import load_corpus
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.loop.outcome import Progress

ROOT = Path(__file__).parent.parent
#: benchmarks of the product, and those that the study alone runs
FOLDERS = (ROOT / "benchmarks", ROOT / "study" / "benchmarks")
NAMES = (
    "_forms",
    "_timing",
    "_contenders",
    "_write_back",
    "optimizer_step",
    "harness_overhead",
    "write_back_noise",
)
NAMES += ("moment_formats", "arrived_share", "draws", "train_is_serve")
NAMES += ("checkpoint", "import_time", "sizes")
SIZES = ("--model.n_layer=1", "--model.n_head=1", "--model.n_embd=8", "--model.block_size=8")


def path_of(script):
    """Return the path of a benchmark by its file name."""
    (path,) = [folder / script for folder in FOLDERS if (folder / script).exists()]
    return path


def run(script, *words, codes=(0,)):
    """Return the output of a benchmark that runs without the compiler.

    Fail unless it ends with one of the codes.
    """
    environment = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    process = forked_run([sys.executable, str(path_of(script)), *map(str, words)], env=environment)
    assert process.returncode in codes, process.stdout
    return process.stdout


def rows_of(script, *words, opening="[", codes=(0,)):
    """What a benchmark prints of JSON."""
    printed = run(script, *words, "--json", codes=codes)
    return json.loads(
        printed[printed.rindex(opening) if opening[0] == "\n" else printed.index(opening) :]
    )


def forked_run(command, env, **_):
    """Stand in for ``subprocess.run`` of a benchmark.

    Its processes are forked from here and need not import torch.
    """

    def benchmark():
        os.environ.update(env)
        sys.path[:0] = map(str, FOLDERS)
        sys.argv = command[1:]
        warnings.resetwarnings()
        subprocess.run = forked_run
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0

    with tempfile.TemporaryDirectory() as folder:
        code = forked.finish(forked.start(Path(folder), benchmark))
        printed = forked.output_of(Path(folder))
        return subprocess.CompletedProcess(command, code, printed, printed)


SCRIPTS = {}
for folder in FOLDERS:
    SCRIPTS |= {path.stem: path for path in sorted(folder.glob("*.py"))}


def names_at_the_top(path):
    """Return the names that a module defines or imports."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        else:
            names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return names


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_benchmark_imports_from_another_is_there(script):
    """Most benchmarks take minutes, so that no quick test runs them."""
    for node in ast.walk(ast.parse(SCRIPTS[script].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in SCRIPTS:
            imported = {alias.name for alias in node.names}
            assert imported <= names_at_the_top(SCRIPTS[node.module])


@pytest.fixture
def modules(monkeypatch):
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))
    threads = torch.get_num_threads()
    yield {name: importlib.import_module(name) for name in NAMES}
    torch.set_num_threads(threads)
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("The quick brown fox. " * 400, encoding="utf-8")
    prepare_text(folder / "text.txt", folder / "data", "byte")
    return folder / "data"


TIMES = r"[\d.]+x \([\d.]+ \.\. [\d.]+\)"
LINEAR = "linear_forward.py --sizes 32x48 --tokens 3 --pairs 3 --seconds 0.01 --markdown --storage"
#: by command, patterns of lines that it prints, and how many lines each; CORPUS and TMP
#: are folders
RUNS = {
    "optimizer_step.py --elements 0.001 --pairs 2 --processes 1 --markdown --contenders sgd-fused": {
        rf"\| torch SGD .* \| 4\.00 \| {TIMES} \| [\d.]+ \|  \|": 1
    },
    **{
        f"{LINEAR} {storage}": {
            rf"\| 32x48 \| {mode} \| 3 \| .*{TIMES}.*": 1 for mode in ("eager", "compiled")
        }
        | {rf"decoding 32x48: {TIMES} clone": decodes}
        for storage, decodes in (("codes", 1), ("grid", 0), ("master", 0))
    },
    "round_to_grid.py --elements 4096 --repeats 1": {
        r".*round_to_grid E4M3 nearest.*": 2,
        r".*decode E4M3.*": 1,
    },
    "sparse_regression.py --steps 2 --seeds 2 --rates 2": {
        r"\| (Adam|SGD) +\| float32 +\| - .*": 2,
        r"\| Riemannian(Adam|SGD) +\| (metric|codes) +\| E\dM\d +\|.*": 16,
    },
    "study_steps.py --sweeps study_q14_size --data-dir CORPUS --steps 1 --turns 1 --smoke": {
        rf"study_q14_size {row}: \d+\.\d\d ms": 1 for row in ("fp32", "E2M5 muon-stochastic")
    },
    "checkpoint.py --elements 3000 --repeats 2 --folder TMP": {
        rf"  commit.* {TIMES}": 4,
        rf"  read.* {TIMES}": 2,
        r".*bytes / torch.save's +[\d.]+x of [\d,]+": 2,
    },
    "momentum_by_stiffness.py --max-steps 2 --formats E4M3 --seeds 1 --powers library,0,0.5 "
    "--data-dir CORPUS": {
        r"E4M3 seed 1 p (library|0.0|0.5) beta1 0.9: \d\.\d{4}": 3,
        r"E4M3 p 0.0: \d\.\d{4}, less p 0: \+0.0000": 1,
    },
}
SLOW = ("optimizer_step", "momentum")


@pytest.mark.parametrize(
    "command",
    [pytest.param(words, marks=[pytest.mark.slow] * words.startswith(SLOW)) for words in RUNS],
)
def test_a_run_prints_its_table(command, corpus, tmp_path):
    printed = run(
        *command.replace("CORPUS", str(corpus)).replace("TMP", str(tmp_path)).split()
    ).splitlines()
    counts = {
        pattern: sum(re.fullmatch(pattern, line) is not None for line in printed)
        for pattern in RUNS[command]
    }
    assert counts == RUNS[command], printed
    assert list(tmp_path.iterdir()) == []


#: optimizers whose steps are walked through
WALKED = ("StiffnessAdamW", "StiffnessSGD", "StiffnessLion", "StiffnessMuon", "RiemannianAdam")
#: the most files, functions, moves between files and calls that a later step enters on a
#: CPU, planned and by its plan
WALKS = {
    "later": {"files": 23, "functions": 156, "moves": 90, "calls": 380},
    "steady": {"files": 11, "functions": 63, "moves": 31, "calls": 97},
}


@pytest.fixture(scope="module")
def walks():
    """Return each step's walk by optimizer and step.

    They are made in a new process: other tests register hooks of an optimizer's step, and
    whether they have run decides what a step enters here.
    """
    words = []
    for optimizer in WALKED:
        words += ["--optimizer", optimizer]
    command = [sys.executable, str(path_of("walk_of_a_step.py")), "--json", *words]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {(record["optimizer"], record["step"]): record for record in json.loads(printed)}


@pytest.mark.parametrize("step", WALKS)
@pytest.mark.parametrize("optimizer", WALKED)
def test_the_way_of_a_step_is_short(optimizer, step, walks):
    """A step enters few files and functions, and none of Triton's."""
    record = walks[optimizer, step]
    beyond = {name: record[name] for name, limit in WALKS[step].items() if record[name] > limit}
    assert not beyond
    assert not [function for function in record["entered"] if "triton" in function]


def test_imports_are_compared_in_a_process_and_files_without_what_they_import(modules, monkeypatch):
    script = modules["import_time"]
    traces = iter(
        (
            "import time:      9000 |       9000 | torch.fx\nafter torch\n"
            f"import time:      {microseconds} |       {microseconds} |   fp8manifold.grid\n"
            "import time:      1500 |       9999 | fp8manifold\n"
        )
        for microseconds in (3000, 2000)
    )
    facts = {"torch": (2.0, 1000), "fp8manifold": (0.5, 100), "geoopt": (1.0, 400)}

    def fresh_process(*arguments):
        if "importtime" in arguments:
            return SimpleNamespace(stderr=next(traces))
        return SimpleNamespace(stdout=json.dumps(facts))

    monkeypatch.setattr(script, "fresh_process", fresh_process)
    assert script.slowest(2, 2) == [("fp8manifold.grid", 2.0), ("fp8manifold", 1.5)]
    first = script.imports()
    facts["torch"] = (1.0, 1000)
    rows = script.rows_of([first, script.imports()])
    assert rows[1] == ["import fp8manifold", 100, 500.0, (0.375, 0.25, 0.5)]


def test_an_extra_has_the_size_of_what_it_adds(modules, monkeypatch, tmp_path):
    """An extra may name others, and one that is not installed has no size."""
    script = modules["sizes"]
    needs = {
        "library": [
            "numpy>=2",
            'old; python_version < "3"',
            'yaml; extra == "bench"',
            'library[bench]; extra == "all"',
            'gone; extra == "lost"',
        ],
        "numpy": ["A.Part"],
        "a-part": [],
        "yaml": ["library"],
    }
    for name in needs:
        (tmp_path / name).write_bytes(bytes(1000 * len(name)))

    def distribution(name):
        if name not in needs:
            raise script.metadata.PackageNotFoundError(name)
        file = SimpleNamespace(locate=lambda: tmp_path / name)
        return SimpleNamespace(requires=needs[name], files=[file])

    monkeypatch.setattr(script.metadata, "distribution", distribution)
    monkeypatch.setattr(script, "LIBRARY", "library")
    known = script.closure("library")
    assert known == {"library", "numpy", "a-part"}
    assert script.row_of_extra("bench", known) == ("`[bench]` adds", 4000, "")
    assert script.row_of_extra("all", known) == ("`[all]` adds", 4000, "")
    assert script.row_of_extra("lost", known) == (
        "`[lost]` adds",
        None,
        "gone is not installed here",
    )


def test_a_clone_is_counted_as_git_receives_it(modules, monkeypatch, tmp_path):
    script = modules["sizes"]
    origin = tmp_path / "origin"
    (origin / "docs").mkdir(parents=True)
    git = ["git", "-C", str(origin), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    for content in (random.Random(1).randbytes(2_000_000), b"short"):
        (origin / "docs" / "page").write_bytes(content)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", "a page"], check=True)
    monkeypatch.setattr(script, "ROOT", origin)
    shallow, whole = (
        script.clone(tmp_path / name, *options)
        for name, options in (("shallow", ["--depth", "1"]), ("whole", []))
    )
    assert shallow < 10_000 < 2_000_000 < whole
    (origin / "docs" / "page").write_bytes(bytes(2_000_000))
    (origin / "tests").mkdir()
    (origin / "tests" / "test").write_bytes(bytes(1_000_000))
    assert script.largest_folders(origin) == "docs 2.0, tests 1.0"


def test_bytes_are_counted_whole_gradients_that_an_optimizer_holds_too(modules, monkeypatch):
    class Hoarder(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.hoard = {p: p.grad for p in self.param_groups[0]["params"]}

    contenders, measure = modules["_contenders"], modules["optimizer_step"].measure_contender
    small, gpt2 = (
        contenders.Workload.sized(*size, torch.device("cpu"))
        for size in (("10M", 0.001), ("124M", 1.0))
    )
    assert gpt2.numel == 124_439_808
    # weights and two moments, and a step count of 4 bytes for each of 50 tensors
    assert measure("adamw-loop", small, 4)["bytes_per_parameter"] == 12 + 50 * 4 / small.numel
    assert measure("sgd-fused", small, 4)["bytes_per_parameter"] == 4
    monkeypatch.setitem(
        contenders.CONTENDERS, "sgd-fused", contenders.torch_optimizer("hoarder", Hoarder, lr=0.1)
    )
    assert measure("sgd-fused", small, 1)["bytes_per_parameter"] == 8


def test_a_goal_that_is_missed_says_so(modules):
    script = modules["optimizer_step"]
    options = script.contender_parser().parse_args([])
    ratios = (1.9, 1.5, 1.7)
    common = {
        "ratio_of_sums": 1.0,
        "step_ms": 2.0,
        "reference_ms": 1.0,
        "bytes_per_parameter": 9.0,
        "graphs": 3,
    }
    runs = [
        common | {"ratio": r, "first_step_s": r, "graphs_while_timed": 0, "warnings": []}
        for r in ratios
    ]
    line = script.contender_row("stiffness-adamw", runs, options)
    assert (line["ratio"], line["ratio_min"], line["ratio_max"], line["met"]) == (
        1.7,
        1.5,
        1.9,
        False,
    )
    assert script.cells(line)[1:] == (
        "9.00",
        "1.70x (1.50 .. 1.90)",
        "1.9, then 1.6",
        "<= 1.3x: NOT met",
    )
    elsewhere = script.contender_parser().parse_args(["--params", "124M"])
    assert script.contender_row("stiffness-adamw", runs, elsewhere)["met"] is None


def test_live_bytes_counts_each_storage_once_and_looks_into_subclasses(modules):
    live_bytes = modules["_timing"].live_bytes
    base = nn.Parameter(torch.zeros(100))
    base.grad = torch.zeros(100)
    assert live_bytes(base) == 400
    assert live_bytes([base, base.detach()[:10]], {"a": {base: (base,)}}) == 400
    holder = nn.Linear(3, 2)
    holder.extra = [torch.zeros(5, dtype=torch.uint8)]
    assert live_bytes(holder) == 4 * (6 + 2) + 5
    assert live_bytes([fm.FP8Tensor(torch.zeros(8, 4), "E4M3")]) == 32 + 32 + 8


@pytest.mark.parametrize("weights", ["E4M3", "float32"])
@pytest.mark.parametrize("elements", [3, 10, 25])
def test_a_checkpoint_of_the_benchmark_has_as_many_weights_as_asked_for(
    modules, monkeypatch, elements, weights
):
    checkpoint = modules["checkpoint"]
    monkeypatch.setattr(checkpoint, "LAYER", 10)
    tensors = checkpoint.state_of(elements, weights)
    suffix = "codes" if weights == "E4M3" else "weight"
    sizes = [x.numel() for name, x in tensors["model"].items() if name.endswith(suffix)]
    assert sum(sizes) == elements
    assert sum(x.numel() for x in tensors["optimizer"].values()) == 2 * elements


def test_overhead_from_end_to_end():
    pytest.importorskip("triton", reason="Triton is not installed")
    figures = rows_of("overhead.py", "--pairs", 2, "--calls", 1, opening="{")["figures"]
    assert [one["format"] for one in figures] == ["E4M3", "E4M3", "E2M5", *["E4M3"] * 22]
    assert all(
        one["ratio"] > 0 and one["pairs"][1] <= one["pairs"][0] <= one["pairs"][2]
        for one in figures
    )


@pytest.mark.filterwarnings("ignore")  # what torchao's import announces is its own business
def test_fake_quantized_linear_from_end_to_end():
    words = ("--sizes", "32x48", "--tokens", 16, "--pairs", 2)
    # at this size its goal says nothing
    rows = rows_of("fake_quantized_linear.py", *words, opening="{", codes=(0, 1))["rows"]
    assert [row["recipe"] for row in rows] == ["tensor", "channel"]
    assert rows[0]["difference"] < 1e-3


def test_muon_step_from_end_to_end():
    rows = rows_of("muon_step.py", "--sizes", "0.86M", "--pairs", 1, "--processes", 1, opening="[{")
    bytes_by_label = {row["label"]: row["bytes"] for row in rows}
    assert bytes_by_label["float32"] == pytest.approx(8.0, abs=0.01)
    assert bytes_by_label["E4M3 stochastic, 8-bit momentum"] < 2.1
    assert bytes_by_label["E4M3 residual8, 8-bit momentum"] < 3.1


@pytest.mark.slow
def test_mxfp4_training_from_end_to_end():
    rows = rows_of("mxfp4_training.py", "--steps", 1, "--seeds", 2, "--reading", 2, opening="\n[")
    assert [row["writeback"] for row in rows] == ["float32", "residual8", "stochastic"]
    losses = list(itertools.chain.from_iterable(row["losses"] for row in rows))
    # they begin with the same values, to the bit
    assert len({first for first, _ in losses}) == 1
    assert len({last for _, last in losses}) == 6


def test_train_is_serve_from_end_to_end():
    """Training in place, and rounding alike on both sides, is served to the bit.

    Nothing else is.
    """
    words = ("--reading", 2, "--prompts", 1, "--written", 4, "--updates", 1)
    mismatches = rows_of("train_is_serve.py", *words, opening="{")
    alike = {
        "codes in place, squares",
        "codes in place, rows",
        "codes in place, squares, products in bfloat16",
    }
    alike.add("float32 rounded in training, a copy in squares")
    assert {
        name
        for name, measures in mismatches.items()
        if all(m["k3"] == m["largest"] == 0 == m["ratio"] - 1 for m in measures)
    } == alike
    assert len(mismatches) == 8
    for name in mismatches.keys() - alike:
        assert all(m["k3"] > 0 < m["largest"] for m in mismatches[name]), name


def test_a_policy_that_is_served_one_update_late_is_found(modules):
    script = modules["train_is_serve"]
    base, text = script.small(2)
    options = argparse.Namespace(updates=1, prompts=1, written=4)
    policy = script.in_place(base, 1e-2, script.SQUARES)
    late = policy.served()
    policy.served = lambda: late
    first, second = script.measure_policy(policy, base, text, options)
    assert first["k3"] == 0 < second["k3"]


def test_the_mismatch_is_what_its_formulas_say(modules):
    trained, sampling = torch.randn(2, 2, 3, 5).log_softmax(-1)
    drawn = torch.randint(5, (2, 3, 1))
    places = [(i, j, int(drawn[i, j])) for i, j in itertools.product(range(2), range(3))]
    logs = [float(trained[place].double() - sampling[place].double()) for place in places]
    mismatch = modules["train_is_serve"].mismatch(trained, sampling, drawn)
    assert mismatch["k3"] == pytest.approx(sum(math.exp(log) - 1 - log for log in logs) / 6)
    assert mismatch["ratio"] == pytest.approx(sum(map(math.exp, logs)) / 6)
    assert mismatch["largest"] == pytest.approx(max(map(abs, logs)))
    differ = [int(trained[i, j].argmax()) != int(sampling[i, j].argmax()) for i, j, _ in places]
    assert mismatch["argmax"] == pytest.approx(sum(differ) / 6)


@pytest.mark.slow
def test_the_recipes_of_one_byte_take_less_than_eight_bits_of_moments_beside_bfloat16():
    """README's recipe and the same in a plain loop take less than what people use.

    Each runs in a process of its own.
    """
    words = [
        str(path_of("whole_step.py")),
        "--json",
        "--weights",
        "50M",
        "--recipes",
        "torchao,loop,backward,muon",
    ]
    process = subprocess.run(
        [sys.executable, *words], check=True, capture_output=True, text=True
    )  # torchao's is compiled
    torchao, loop, backward, muon = (row["bytes"] for row in json.loads(process.stdout))
    assert 5 < torchao < 7
    assert loop < 0.95 * torchao
    assert backward < 0.8 * torchao
    assert muon < backward


@pytest.mark.slow
def test_reading_into_codes_takes_less_than_one_and_a_half_bytes_a_weight():
    """277M bfloat16 weights in shards are read in processes of their own.

    What counts is memory beyond the largest tensor.
    """
    process = subprocess.run(
        [sys.executable, str(path_of("loading.py")), "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    rows = {row["way"]: row for row in json.loads(process.stdout)}
    assert rows["load of floats"]["beyond"] < 1.3
    assert rows["the same, dtype=torch.float32"]["beyond"] < 1.5
    assert rows["files.load_into, transformers' model on meta"]["beyond"] < 1.3
    assert rows["from_pretrained, bfloat16, then quantize_model"]["beyond"] > 2.5
    assert rows["load of an FP8 folder"]["bytes"] < 1.15
    assert rows["from_pretrained of the FP8 folder, bfloat16"]["bytes"] > 2


def test_harness_overhead_measures_what_a_step_takes(modules, monkeypatch, tmp_path):
    script = modules["harness_overhead"]
    clock = iter(range(10**6))
    monkeypatch.setattr(script.time, "process_time", lambda: float(next(clock)))

    def three_steps(config: object, folder: Path, on_progress):
        # Two are counted: after the warm-up, and before the last.
        for number in range(script.UNCOUNTED_STEPS + 4):
            next(clock)  # a unit of work of the run's own
            on_progress(
                Progress(number, script.UNCOUNTED_STEPS + 3, None, None, None, None, 0.0, 0.0, 0.0)
            )

    monkeypatch.setattr(script, "run", three_steps)
    # From leaving the callback to entering it: one reading and one unit of work; the
    # reference does three units.
    counted = range(script.UNCOUNTED_STEPS + 1, script.UNCOUNTED_STEPS + 3)
    times = script.paired(None, lambda: [next(clock) for _ in range(3)], counted)
    assert times == [(2.0, 4.0)] * 2
    one = script.figure("bench / plain loop", "float32", times)
    assert (one.ratio, one.median, one.steps, one.step_ms, one.reference_ms) == (
        2.0,
        2.0,
        2,
        2e3,
        4e3,
    )
    assert script.goal(one) == ">= 0.97, met"
    assert (
        script.goal(script.figure("bench / plain loop", "float32", [script.Pair(1.0, 0.9)]))
        == ">= 0.97, NOT met"
    )


def test_the_plain_loop_learns_and_the_step_alone_is_the_bench_s(modules, corpus):
    script = modules["harness_overhead"]
    config = script.run_config(
        corpus, 30, *SIZES, "--optimizer.lr=0.1", "--optimizer.warmup_steps=0"
    )
    opened = load_corpus(corpus, 8)
    loops = [script.step_alone(config, opened, checked=checked) for checked in (False, True)]
    curves = [[loop() for _ in range(30)] for loop in (script.plain_loop(config, opened), *loops)]
    for losses in curves:
        assert losses[0] == pytest.approx(math.log(257), abs=0.1)
        assert losses[-1] < losses[0] - 1.5
    assert curves[1] == curves[2]


@pytest.mark.parametrize("checked", [False, True], ids=["not checked", "checked"])
def test_a_step_alone_is_checked_if_asked(modules, monkeypatch, corpus, checked):
    script, calls = modules["harness_overhead"], []
    config = script.run_config(
        corpus, 30, *SIZES, "--optimizer.lr=0.1", "--optimizer.warmup_steps=0"
    )
    for name in ("copy_buffers", "check"):
        monkeypatch.setattr(script.Sentry, name, lambda self, *step, name=name: calls.append(name))
    script.step_alone(config, load_corpus(corpus, 8), checked=checked)()
    assert calls == ["copy_buffers", "check"] * checked


def rows_by_name(script, corpus, count):
    """The cells of the rows of both optimizers, by the row's name."""
    printed = run(script, "--data-dir", corpus, "--max-steps", 2, "--layers", 3)
    for optimizer in ("Muon (muon-stochastic)", "AdamW (stochastic)"):
        lines = printed.partition(f"{optimizer}:")[2].splitlines()[4 : 4 + count]
        rows = {name: cells for name, *cells in (line[2:].split(" | ") for line in lines)}
        assert len(rows) == count, optimizer
        yield optimizer, rows


def test_write_back_noise_from_end_to_end(corpus):
    for _, rows in rows_by_name("write_back_noise.py", corpus, 20):
        noise = {name: float(cells[1]) for name, cells in rows.items()}
        former = noise["E2M5, rows, room 2, every 100 steps"]
        assert former > noise["E2M5, rows, room 1, widened at once"] > 0
        assert former > noise["E2M5, rows, room 1, the library's step"] > 0
        assert former < noise["E4M3, rows, room 16, every 100 steps"]


def test_moment_formats_from_end_to_end(corpus):
    """After two steps a fitted even grid loses less than E4M3 under Muon.

    More bits lose less than fewer.
    """
    for optimizer, rows in rows_by_name("moment_formats.py", corpus, 10):
        moments = {name: float(cells[2]) for name, cells in rows.items()}
        default = "E2M5" if "Muon" in optimizer else "E4M3"
        fitted = [
            moments["bfloat16"],
            *(moments[f"{fmt}, fitted"] for fmt in ("E2M5", "E3M4", "E4M3", "E2M1")),
        ]
        assert fitted == sorted(set(fitted))
        by_library = moments[f"{default}, the library's"]
        assert by_library == pytest.approx(moments[f"{default}, fitted"], rel=0.2)


@pytest.mark.parametrize("rounding", ["nearest", "independent", "dither"])
@pytest.mark.parametrize("optimizer", ["Muon", "AdamW"])
def test_a_moment_is_right_on_average_by_independent_draws(modules, optimizer, rounding):
    """Under constant gradients the share that arrives is right in the mean.

    Most gradients are 0.003 of their block's largest.
    """
    script, gradient = modules["moment_formats"], torch.full((32, 128), 0.003)
    gradient[:, 0] = 1.0
    moment = script.StoredMoment(gradient.shape, optimizer, script.MomentWay("E2M5"), rounding, 1)
    ratio = torch.stack([moment.advance(gradient)[:, 1:] for _ in range(300)])[150:].mean() / 0.003
    if rounding == "independent":
        assert abs(ratio - 1) < 0.03
    else:
        # What is rounded to nearest stays where it is; a dithered draw is not
        # independent of what it rounds.
        assert abs(ratio - 1) > 0.035


@pytest.mark.parametrize("rounding", ["nearest", "independent", "dither"])
def test_values_of_a_fitted_grid_stay(modules, rounding):
    """Values on a block's grid are not changed, in blocks of zeros either."""
    script = modules["moment_formats"]
    ways = [way for way in script.MOMENT_WAYS if way.scale == "fitted" and way.fmt != "bfloat16"]
    assert ways
    for way in ways:
        fmt = as_format(way.fmt)
        values = torch.tensor(fmt.values).repeat(128)[: 64 * 128].view(-1, 128) / 2**20
        values[:, 0] = fmt.max / 2**20
        values[0] = 0.0
        stored = script.stored(values, torch.zeros(len(values), 1), way, rounding, 1, 1)
        assert torch.equal(stored, values), way


def test_scales_are_rounded_up_to_powers_of_two(modules):
    x = torch.tensor([0.75, 1.0, 1.0000001, 2.0**-30])
    assert modules["moment_formats"].power_above(x).tolist() == [1.0, 1.0, 2.0, 2.0**-30]


@pytest.mark.parametrize("span", ["subnormal", "normal"])
@pytest.mark.parametrize("fmt", ["E4M3", "E2M5", "E3M4", "E1M6"])
@pytest.mark.parametrize("writer", ["here", "here, dithered draws"])
def test_all_of_a_small_movement_arrives_here(modules, writer, fmt, span):
    options = argparse.Namespace(movement=2, rows=16, seed=1)
    share = modules["arrived_share"].share(writer, fmt, span, 0.3, options)
    assert share == pytest.approx(1.0, abs=0.1)


def test_draws_from_end_to_end(modules, monkeypatch):
    script = modules["draws"]
    monkeypatch.setattr(script, "PULLED_FORMATS", ("E5M2",))
    options = script.draws_parser().parse_args(["--steps", "200", "--rows", "50"])
    header, lines = ("format", "draws", *script.STREAMS), script.pull_rows(options)
    rows = {line[1]: dict(zip(header, line, strict=True)) for line in lines}
    assert list(rows) == ["independent", "dither"]
    pull, error = map(float, rows["dither"]["every fifth"].split(" ± "))
    assert pull < -2 * error < 0
    for _, _, *cells in lines:
        assert all(re.fullmatch(r"[+-]\d+\.\d ± \d+\.\d", cell) for cell in cells), cells


KEY = {"seed": 1, "stream": 0, "first": 1}


@pytest.mark.parametrize("residual_bits", [0, 2, 4, 8])
@pytest.mark.parametrize("draws", ["independent", "dither"])
def test_an_exact_write_back_leaves_no_error(residual_bits, modules, draws):
    """Weights on the grid of E2M5 with updates by whole steps of it stay exact.

    The grid ends at 7.875.
    """
    script, generator = modules["_write_back"], torch.Generator().manual_seed(3)
    start = torch.randint(-30, 31, (16, 128), generator=generator) * 0.125
    start[:, ::32] = 3.9375  # decides every scale
    moves = torch.randint(-1, 2, (10, 16, 128), generator=generator) * 0.125
    moves[:, :, ::32] = 0
    way = script.WriteBack("E2M5", room=2, residual_bits=residual_bits)
    code, exact = script.replayed(start, list(moves), way, draws, **KEY)
    assert torch.equal(code.double(), exact), residual_bits
    assert torch.equal(exact, (start + sum(moves)).double())


def test_a_write_back_is_right_on_average_while_scales_widen(modules):
    script, start = (
        modules["_write_back"],
        torch.randn(256, 128, generator=torch.Generator().manual_seed(1)),
    )
    updates = [start * 0.02 + 0.003] * 60  # more than twice as large in the end
    for way in (way for way in modules["write_back_noise"].WRITE_BACKS if way.every < 2):
        code, exact = script.replayed(start, updates, way, "independent", **KEY)
        for error in (code - exact, (code - exact) * start.sign()):
            assert abs(error.mean()) < 4 * error.std() / error.numel() ** 0.5, way
        # Where a weight is, and so which grid it is rounded to, depends on its dithered
        # draws.
        if way.pow2:
            keys = [KEY | {"seed": seed} for seed in range(8)]  # the bias by one seed is noise
            biases = [script.error_of(start, updates, way, "dither", **key).bias for key in keys]
            assert abs(sum(biases) / len(biases)) < 0.003, way
    fixed_scale = script.error_of(
        start[:64], [start[:64] * 0.02] * 60, script.WriteBack("E2M5", every=1000), "dither", **KEY
    )
    assert fixed_scale.bias < -0.05  # a scale that nobody widened cuts weights off
