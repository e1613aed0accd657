"""The common commands.

`nox --list` names them. Without arguments nox runs the ones that a change has to pass.
Sessions run in the environment that nox was started in, which needs the extra `dev`.
Only `package` makes others.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nox

sys.path.insert(0, str(Path(__file__).parent / "tests"))

from of_source import where_tested

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "tests", "docs"]
BENCHMARKS = (
    "round_to_grid",
    "optimizer_step",
    "linear_forward",
    "overhead",
    "fake_quantized_linear",
    "harness_overhead",
    "checkpoint",
)
#: tests of the session `first`: doctests, formats, layers, a step against its
#: definition, a run of the bench, and a report
FIRST = (
    "fp8manifold",
    "tests/library/formats/test_codec.py",
    "tests/library/formats/test_formats.py",
    "tests/library/formats/test_scaling.py",
    "tests/library/manifolds/test_manifold_laws.py",
    "tests/library/nn/test_quantized_linear.py",
    "tests/library/nn/test_surgery.py",
    "tests/library/tensor/test_tensor_storage.py",
    "tests/library/optim/test_step_oracle.py::test_options",
    "tests/library/optim/test_stiffness_adamw.py",
    "tests/library/optim/test_writebacks.py",
    "tests/bench/config/test_settings.py",
    "tests/bench/data/test_dataset.py",
    "tests/bench/failures/test_classify.py",
    "tests/bench/monitors/test_attention_and_zones.py",
    "tests/bench/report/test_tables.py",
    "tests/bench/training/test_train.py",
)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
#: environments in which torch, oneDNN, MKL and the C library behave as on older
#: processors, which have no products in bfloat16
OLDER_PROCESSORS = {
    "no AVX": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F",
    },
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
#: tests that fail in these environments on a processor with AMX: torch sees it and gives
#: oneDNN products of FP8, which oneDNN refuses
FAIL_WITH_AMX = (
    "tests/library/kernels/test_code_products.py::test_torchs_own_products_give_the_same_bits",
    "tests/test_gpu_benchmark.py::test_a_dry_run_goes_through_every_part",
)


@nox.session
def lint(session: nox.Session) -> None:
    """Check with ruff, its formatter and mypy."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the default tests.

    Source files after -- are replaced by their tests; other arguments go to pytest.
    """
    tests: list[str] = []
    options = []
    for argument in session.posargs:
        if argument.startswith(("fp8manifold/", "nanogpt_bench/")):
            tests += where_tested(argument)
        else:
            options.append(argument)
    # Two files may have the same tests.
    session.run("pytest", *dict.fromkeys(tests), *options, env=ONE_THREAD)


@nox.session
def first(session: nox.Session) -> None:
    """Run a sample of all tests, in about a minute, to see that the environment works."""
    session.run("pytest", *FIRST, *session.posargs, env=ONE_THREAD)


@nox.session
@nox.parametrize("processor", list(OLDER_PROCESSORS))
def baseline(session: nox.Session, processor: str) -> None:
    """Run the default tests as on an older processor, which uses other kernels."""
    deselected = [f"--deselect={test}" for test in FAIL_WITH_AMX]
    # Compiled kernels of another processor would end in a crash.
    with TemporaryDirectory() as cache:
        environment = ONE_THREAD | OLDER_PROCESSORS[processor]
        environment["TORCHINDUCTOR_CACHE_DIR"] = cache
        session.run("pytest", *deselected, *session.posargs, env=environment)


@nox.session
def slow(session: nox.Session) -> None:
    """Run the tests that take minutes."""
    session.run("pytest", "-m", "slow", *session.posargs, env=ONE_THREAD)


@nox.session
def reliability(session: nox.Session) -> None:
    """Run the tests of reliability with every fault instead of a sample: hours."""
    session.run("pytest", "tests/reliability", "--full", *session.posargs, env=ONE_THREAD)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into docs/_build without a warning, and test the code on its pages."""
    build = "sphinx-build -n -W --keep-going -b html docs docs/_build"
    session.run(*build.split(), env=ONE_THREAD)
    session.run("pytest", "tests/test_docs.py", env=ONE_THREAD)


@nox.session
def package(session: nox.Session) -> None:
    """Test wheel and sdist, each installed into an empty environment and imported."""
    session.run("pytest", "-m", "slow", "tests/test_package.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks of speed, one after another, on an otherwise idle machine.

    `-- --record` writes the site's files.
    """
    for name in BENCHMARKS:
        session.run("python", f"benchmarks/{name}.py", *session.posargs, env=ONE_THREAD)
