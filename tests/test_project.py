"""What the whole project promises, beyond what ruff and mypy find: short files, and packages where they are due."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp8manifold as fm

ROOT = Path(__file__).parent.parent
LIBRARY = sorted((ROOT / "fp8manifold").rglob("*.py"))
BENCH = sorted((ROOT / "nanogpt_bench").rglob("*.py"))
SHIPPED = [*LIBRARY, *BENCH, *sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "docs").glob("*.py"))]
SHIPPED += sorted((ROOT / "study").glob("*.py"))
PARTS = {"optim": fm.optim, "ops": fm.ops, "reference": fm.reference}
NAMESPACES = {"fp8manifold": fm, **{f"fp8manifold.{name}": part for name, part in PARTS.items()}}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), relative(path))


def imports(source: ast.AST) -> Iterator[tuple[str, str | None]]:
    """(module, name) of every import: `import a.b` is ("a.b", None), `from a import b` is ("a", "b")."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def private_uses(source: ast.Module) -> list[str]:
    """What a file takes from fp8manifold beyond the public namespaces, which are imported whole or by name."""
    of_ours = [(module, name) for module, name in imports(source) if module.split(".")[0] == "fp8manifold"]
    known = {f"{house}.{name}" for house, module in NAMESPACES.items() for name in module.__all__} | {*NAMESPACES}
    found = [module if name is None else f"{module}.{name}" for module, name in of_ours]
    written = re.findall(r"\bfm((?:\.\w+)+)", ast.unparse(source)) if ("fp8manifold", None) in of_ours else []
    for parts in (name.split(".")[1:] for name in written):
        depth = 2 if f"fp8manifold.{parts[0]}" in NAMESPACES else 1
        found.append(".".join(["fp8manifold", *parts[:depth]]))
    return sorted({*found} - known)


#: what `pip install .` brings, and what the extra `bench` does
OF_LIBRARY = {"torch", "geoopt", "numpy"}
OF_BENCH = {"filelock", "pydantic", "yaml", "rich", "safetensors", "scipy", "statsmodels", "vl_convert"}


def imported_at_once(source: ast.Module) -> Iterator[str]:
    """Modules that a file imports when it is imported itself, whatever is installed."""
    for node in source.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from {module for module, _ in imports(ast.Module([node], []))}


def test_a_package_of_another_extra_is_imported_where_it_is_used() -> None:
    known = {*sys.stdlib_module_names, "fp8manifold", "nanogpt_bench", *OF_LIBRARY}
    for path in (*LIBRARY, *BENCH):
        found = set(imported_at_once(tree(path)))
        more = (OF_BENCH if path in BENCH else set()) | ({"triton"} if path.parent.name == "_triton" else set())
        assert {module for module in found if module.split(".")[0] not in known | more} == set(), path
        assert "torch.utils.tensorboard" not in found, path  # needs tensorboard


def test_the_library_imports_its_core_dependencies_only() -> None:
    allowed = {"fp8manifold", "torch", "geoopt", "numpy", "__future__"} | sys.stdlib_module_names
    for path in LIBRARY:  # kernels are imported where there is something to launch, which Triton is there for then
        more = {"triton"} if path.parent.name == "_triton" else set()
        assert {name.split(".")[0] for name, _ in imports(tree(path))} <= allowed | more, path


def test_only_the_public_surface_is_used() -> None:
    paths = [*BENCH, *(ROOT / "examples").glob("*.py")]
    assert {relative(path): found for path in paths if (found := private_uses(tree(path)))} == {}


def test_the_check_sees_private_names_alone() -> None:
    codes = ["from fp8manifold.grid import encode", "from fp8manifold import _charts", "import fp8manifold.optim._slot"]
    codes += ["import fp8manifold as fm\nfm.grid.encode(x)", "import fp8manifold as fm\nfm.optim._optimizer"]
    assert [code for code in codes if not private_uses(ast.parse(code))] == []
    code = "import fp8manifold as fm\nfm.optim.StiffnessAdamW.step\nfm.encode(x)\nfrom fp8manifold.optim import anneal"
    assert private_uses(ast.parse(code)) == []


@pytest.mark.parametrize("words", [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)], ids=" ".join)
def test_the_tools_of_the_code_find_nothing(words: tuple[str, ...]) -> None:
    """Ruff also holds that nothing is unpickled or evaluated (its rules are in pyproject.toml)."""
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_compiles_or_imports_what_it_reads() -> None:
    """What unpickles or evaluates ruff finds."""
    for path in SHIPPED:
        called = [node.func for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
        assert not {"compile", "__import__"} & {name.id for name in called if isinstance(name, ast.Name)}, path


def test_files_are_short() -> None:
    lengths = {relative(path): path.read_text(encoding="utf-8").count("\n") for path in SHIPPED}
    assert {name: length for name, length in lengths.items() if length > 500} == {}
    assert [name for name in lengths if Path(name).stem == "utils"] == []
