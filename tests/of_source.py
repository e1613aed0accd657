"""The tests of a source file.

They are the test modules named after the file, in the folders of tests that go with its
path. Without such a module they are these folders whole. Matrices that cover every file
below a path are run with each of its files.
"""

from pathlib import Path

ROOT = Path(__file__).parent.parent

#: the folders or modules of tests, separated by blanks, by the start of the source's
#: path; of several that fit, the longest counts
FOLDERS: dict[str, str] = {
    "fp8manifold/": "tests/library/formats tests/library/tensor",
    "fp8manifold/_doors/": "tests/library/published",
    "fp8manifold/_base/": "tests/library/formats",
    "fp8manifold/_chunked_loss.py": "tests/library/nn/test_chunked_loss.py",
    "fp8manifold/_encoded/": "tests/library/tensor tests/library/kernels",
    "fp8manifold/_encoded/dispatch.py": "tests/library/tensor",
    "fp8manifold/_geoopt_import.py": "tests/library/manifolds",
    "fp8manifold/_interface.py": "tests/library/kernels tests/library/optim",
    "fp8manifold/_memory/": "tests/library/formats/test_memory_needed.py",
    "fp8manifold/_native/": "tests/library/kernels",
    "fp8manifold/_numerics/": "tests/library/formats",
    "fp8manifold/_published/": "tests/library/published",
    "fp8manifold/_ranks.py": "tests/library/ranks",
    "fp8manifold/_served/": "tests/library/served",
    "fp8manifold/_shards.py": "tests/library/ranks",
    "fp8manifold/_triton/": "tests/library/kernels tests/gpu",
    "fp8manifold/averages.py": "tests/library/tensor/test_noise.py",
    "fp8manifold/distributed.py": "tests/library/ranks",
    "fp8manifold/files.py": "tests/library/published",
    "fp8manifold/huggingface.py": "tests/library/published",
    "fp8manifold/lost_updates.py": "tests/library/optim/test_lost_updates.py",
    "fp8manifold/manifolds.py": "tests/library/manifolds",
    "fp8manifold/nn/": "tests/library/nn",
    "fp8manifold/optim/": "tests/library/optim",
    "fp8manifold/optim/_native_step.py": "tests/library/kernels tests/library/optim",
    "fp8manifold/optim/_plan.py": "tests/library/kernels tests/library/optim",
    "fp8manifold/optim/_records.py": "tests/library/kernels tests/library/optim",
    "fp8manifold/optim/_steady.py": "tests/library/kernels tests/library/optim",
    "fp8manifold/optim/_step_numbers.py": "tests/library/kernels tests/library/optim",
    "fp8manifold/optim/_triton_factors.py": "tests/library/kernels tests/library/optim",
    "fp8manifold/optim/_triton_step.py": "tests/library/kernels tests/library/optim",
    "fp8manifold/reference.py": "tests/library/formats/test_chart.py "
    "tests/library/formats/test_grid_exact.py",
    "nanogpt_bench/": "tests/bench/commands",
    **{
        f"nanogpt_bench/{folder.name}/": f"tests/bench/{folder.name}"
        for folder in (ROOT / "tests/bench").glob("*/")
    },
    "nanogpt_bench/loop/": "tests/bench/training",
    "nanogpt_bench/system/": "tests/bench/runs tests/bench/data tests/bench/training",
    "benchmarks/": "tests/test_benchmarks.py tests/test_gpu_benchmark.py tests/test_generated.py",
    "docs/": "tests/test_docs.py tests/test_generated.py",
    "examples/": "tests/test_examples.py",
    "study/benchmarks/": "tests/test_benchmarks.py tests/test_generated.py",
    "study/": "tests/test_study.py tests/test_generated.py",
    "hatch_build.py": "tests/library/kernels/test_native.py tests/test_package.py",
    "hatch_urls.py": "tests/test_project.py tests/test_package.py",
    "pyproject.toml": "tests/test_project.py tests/test_house.py",
}

#: test modules, separated by blanks, that cover every file below a path
MATRICES: dict[str, str] = {
    "fp8manifold/optim/": "tests/library/optim/test_step_oracle.py "
    "tests/library/optim/test_every_optimizer.py "
    "tests/library/optim/test_every_state.py "
    "tests/library/optim/test_optimizer_refusals.py "
    "tests/library/optim/test_optimizer_resume.py "
    "tests/test_public_signatures.py",
    "fp8manifold/": "tests/test_public_signatures.py",
}


def where_tested(source: str) -> list[str]:
    """Return the arguments of pytest for a source file: its tests, and its doctests.

    The source comes last. Pytest imports it by its path, and its packages with it: where
    these are not imported yet, that makes a second module of a package, which lacks the
    submodules that tests patch by name.

    >>> where_tested("nanogpt_bench/monitors/zones.py")
    ['tests/bench/monitors/test_attention_and_zones.py', 'nanogpt_bench/monitors/zones.py']
    >>> where_tested("fp8manifold/optim/_slot.py")[:-1]
    ['tests/library/optim', 'tests/test_public_signatures.py']
    >>> tests = where_tested("fp8manifold/optim/stiffness.py")
    >>> "tests/library/optim/test_stiffness_adamw.py" in tests
    True
    >>> "tests/library/optim/test_step_oracle.py" in tests
    True
    """
    places = _most_specific(FOLDERS, source).split()
    if not places or not (ROOT / source).exists():
        raise ValueError(f"source: {source!r}; allowed: a file below {', '.join(sorted(FOLDERS))}")
    tests = _modules_named_after(source, places) or places
    for module in _most_specific(MATRICES, source).split():
        covered = any(module.startswith(test.removesuffix(".py")) for test in tests)
        if not covered:
            tests = [*tests, module]
    has_doctests = source.startswith(("fp8manifold/", "nanogpt_bench/"))
    return [*tests, source] if has_doctests else tests


def _most_specific(table: dict[str, str], source: str) -> str:
    """Return the value of the longest start of the path that the table has, or ""."""
    starts = [start for start in table if source.startswith(start)]
    return table[max(starts, key=len)] if starts else ""


def _modules_named_after(source: str, folders: list[str]) -> list[str]:
    """Return the test modules whose names contain that of the source file."""
    word = f"_{Path(source).stem.strip('_')}_"
    modules = []
    for folder in folders:
        for path in sorted((ROOT / folder).glob("test_*.py")):
            if word in f"{path.stem}_":
                modules.append(path.relative_to(ROOT).as_posix())
    return modules
