"""The project as pip builds it.

A wheel and an sdist install without extras, and the import is quick.
"""

import math
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: what `import fp8manifold` may take beyond torch's own import
SECONDS = 0.5
#: packages of the extra `bench`, without which the library has to work
NOT_WITHOUT_EXTRAS = ("pydantic", "rich", "vl_convert", "yaml")
WITHOUT_WARNINGS = ("-W", "error", "-W", "ignore:`torch.jit.script`")


def run(command, cwd, path=None):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1"
    }
    environment |= {} if path is None else {"PYTHONPATH": str(path)}
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )


def checked(command, cwd, path=None):
    process = run(command, cwd, path)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def modules_after(statement):
    code = f"{statement}\nimport sys\nprint(*sorted(sys.modules))"
    return set(checked([sys.executable, *WITHOUT_WARNINGS, "-c", code], ROOT, ROOT).split())


def test_imports_warn_of_nothing_and_bring_no_extras():
    """The command line begins without its packages.

    So it can say which are missing.
    """
    checked([sys.executable, "-W", "error", "-c", "import fp8manifold"], ROOT, ROOT)
    loaded = modules_after("import fp8manifold") - modules_after("import torch")
    unwanted = {*NOT_WITHOUT_EXTRAS, "geoopt", "nanogpt_bench", "scipy"}
    assert not {name.split(".")[0] for name in loaded} & unwanted
    assert not {"torch._dynamo", "torch._inductor"} & loaded
    assert not {name.split(".")[0] for name in modules_after("import nanogpt_bench.cli")} & {
        *NOT_WITHOUT_EXTRAS
    }


@pytest.mark.slow
def test_the_import_is_quick():
    """In CPU seconds of a process, the fewest of seven in turn: other work only ever adds."""
    statements = ("import torch", "import torch, fp8manifold")
    fewest = dict.fromkeys(statements, math.inf)
    for _ in range(7):
        for statement in statements:
            code = f"import time\nstart = time.process_time()\n{statement}\n"
            code += "print(time.process_time() - start)"
            seconds = float(checked([sys.executable, "-W", "ignore", "-c", code], ROOT, ROOT))
            fewest[statement] = min(fewest[statement], seconds)
    of_torch, of_both = fewest.values()
    assert of_both - of_torch < SECONDS


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the sdist, and the wheel that is made of it."""
    folder = tmp_path_factory.mktemp("dist")
    pytest.importorskip("build", reason="needs the package build (extra dev)")
    checked([sys.executable, "-m", "build", "--outdir", folder, ROOT], folder)
    return folder


def only(folder, pattern):
    (path,) = folder.glob(pattern)
    return path


@pytest.mark.slow
def test_sdist_and_wheel_have_what_they_need_and_nothing_else(built):
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = """docs/_generated.json docs/conf.py docs/figures/number-line.svg examples/geoopt_drop_in.py hatch_urls.py
        fp8manifold/__init__.py noxfile.py study/make.py study/results/study_q1.json study/study.md LICENSE
        study/sweeps/study_q1.yaml tests/test_package.py CHANGELOG.md CITATION.cff CONTRIBUTING.md SECURITY.md"""
    assert {*needed.split()} <= names
    archives = (
        "runs/",
        "data/",
        "docs/_build/",
        "docs/examples/",
        "docs/generated/",
    )  # also where the site was built
    assert [name for name in names if name.startswith(archives)] == []
    with zipfile.ZipFile(only(built, "*.whl")) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "fp8manifold",
        "nanogpt_bench",
    }
    shipped = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "nanogpt_bench").rglob("*.yaml")
    }
    assert shipped | {"fp8manifold/py.typed", "nanogpt_bench/report/page.js"} <= set(names)
    assert [
        name for name in names if "study_" in name
    ] == []  # the study's sweeps are in the repository alone


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["*.whl", "*.tar.gz"])
def test_it_installs_without_extras(built, tmp_path, pattern):
    """An environment with nothing in it but pip.

    The tests' environment lends torch, geoopt and numpy alone.
    """
    python = empty_environment(tmp_path / "env", tmp_path / "lent")
    # Without an index pip fails unless what the wheel asks for is lent. To build an
    # sdist it fetches hatchling.
    index = ["--no-index"] if pattern == "*.whl" else []
    checked([python, "-m", "pip", "install", "-q", *index, only(built, pattern)], tmp_path)
    passed = checked([python, *WITHOUT_WARNINGS, ROOT / "tests" / "smoke.py", "--native"], tmp_path)
    assert passed.startswith(str(tmp_path / "env"))
    bench = run([python.parent / "nanogpt-bench", "compare"], tmp_path)
    assert bench.returncode == 2
    assert bench.stderr.count("\n") == 1
    assert "pip install 'fp8manifold[bench]'" in bench.stderr


def empty_environment(folder, lent):
    """Make an environment that sees only the core dependencies, and return its Python.

    These are lent by the environment of the tests.
    """
    checked([sys.executable, "-m", "venv", folder], folder.parent)
    # Python 3.11 puts one there that is older than torch asks for; the lent one must
    # not be reached by this.
    checked(
        [folder / "bin" / "python", "-m", "pip", "uninstall", "-qy", "setuptools"], folder.parent
    )
    lent.mkdir()
    site_packages = Path(sysconfig.get_paths()["purelib"])
    for entry in site_packages.iterdir():
        if needed_by_core(entry.name):
            (lent / entry.name).symlink_to(entry)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(str(lent), encoding="utf-8")
    return folder / "bin" / "python"


def needed_by_core(name):
    """True for entries of site-packages that torch, geoopt or numpy need."""
    core = "torch geoopt numpy scipy sympy mpmath jinja2 markupsafe networkx fsspec filelock typing_extensions nvidia"
    words = [*core.split(), *["triton", "setuptools", "functorch", "torchgen", "cuda"]]
    return re.match(rf"({'|'.join(words)})([._-]|$)", name.lower()) is not None
