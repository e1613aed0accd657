"""What the whole project promises: style, types, and the direction of dependencies."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fp8manifold as fm

ROOT = Path(__file__).parent.parent
LIBRARY = sorted((ROOT / "fp8manifold").rglob("*.py"))
BENCH = sorted((ROOT / "nanogpt_bench").rglob("*.py"))
SHIPPED = [*LIBRARY, *BENCH, *sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "docs").glob("*.py"))]
SHIPPED += sorted((ROOT / "study").glob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PARTS = {"optim": fm.optim, "ops": fm.ops, "reference": fm.reference}
NAMESPACES = {"fp8manifold": fm, **{f"fp8manifold.{name}": part for name, part in PARTS.items()}}
#: modules that run or unpickle whatever a file says
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.save", "os.system"}


def run_tool(*arguments: str) -> str:
    """Run a module of this Python in the root of the project and return what it printed; fail unless it succeeds."""
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` for a chain of attributes of a name, None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return None


def offences(source: ast.AST) -> list[str]:
    """Uses of what could run code found in a file."""
    found = [name for name, _ in imports(source) if name.split(".")[0] in FORBIDDEN_MODULES]
    for call in (node for node in ast.walk(source) if isinstance(node, ast.Call)):
        name = dotted(call.func)
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if name in FORBIDDEN_CALLS or (name == "torch.load" and not is_true(keywords.get("weights_only"))):
            found.append(f"{name} in line {call.lineno}")
        if is_true(keywords.get("allow_pickle")) or is_true(keywords.get("shell")):
            found.append(f"{name} in line {call.lineno}")
    return found


def is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def private_uses(source: ast.Module) -> list[str]:
    """What a file takes from fp8manifold beyond the public namespaces."""
    found = []
    for module, name in imports(source):
        if module.split(".")[0] != "fp8manifold":
            continue
        if module not in NAMESPACES or (name is not None and name not in NAMESPACES[module].__all__):
            found.append(f"{module}.{name}")
    aliases = library_aliases(source)
    for node in ast.walk(source):
        chain = dotted(node) if isinstance(node, ast.Attribute) else None
        if chain and chain.split(".")[0] in aliases:
            found += unresolved([aliases[chain.split(".")[0]], *chain.split(".")[1:]])
    return found


def library_aliases(source: ast.Module) -> dict[str, str]:
    """Local names of the library's public namespaces."""
    aliases = {}
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name in NAMESPACES}
        elif isinstance(node, ast.ImportFrom):
            full = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            aliases |= {name: module for name, module in full.items() if module in NAMESPACES}
    return aliases


def unresolved(parts: list[str]) -> list[str]:
    """The first name of `module.name...` that is not public, as a list of at most one."""
    module = NAMESPACES[parts[0]]
    if len(parts) == 1:
        return []
    if parts[1] not in module.__all__:
        return [".".join(parts[:2])]
    inner = f"{parts[0]}.{parts[1]}"
    return unresolved([inner, *parts[2:]]) if inner in NAMESPACES else []


#: what `pip install .` brings, and what the extra `bench` does
OF_LIBRARY = {"torch", "geoopt", "numpy"}
OF_BENCH = {"pydantic", "yaml", "rich", "safetensors", "scipy", "statsmodels", "vl_convert"}


def imported_at_once(source: ast.Module) -> Iterator[str]:
    """Modules that a file imports when it is imported itself, whatever is installed."""
    for node in source.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from {module for module, _ in imports(ast.Module([node], []))}


@pytest.mark.parametrize("path", [*LIBRARY, *BENCH], ids=relative)
def test_a_package_of_another_extra_is_imported_where_it_is_used(path: Path) -> None:
    known = {*sys.stdlib_module_names, "fp8manifold", "nanogpt_bench", *OF_LIBRARY}
    known |= OF_BENCH if path in BENCH else set()
    known |= {"triton"} if path.parent.name == "_triton" else set()
    found = set(imported_at_once(tree(path)))
    assert {module for module in found if module.split(".")[0] not in known} == set()
    assert "torch.utils.tensorboard" not in found  # needs tensorboard


def test_ruff_finds_nothing() -> None:
    run_tool("ruff", "check", ".")


def test_the_code_is_formatted() -> None:
    run_tool("ruff", "format", "--check", ".")


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="torch has had other types before")
def test_mypy_finds_nothing() -> None:
    assert PROJECT["tool"]["mypy"]["strict"] is True
    assert PROJECT["tool"]["mypy"]["files"] == ["fp8manifold", "nanogpt_bench"]
    assert "Success" in run_tool("mypy")


def test_the_library_never_imports_the_bench() -> None:
    bad = [relative(path) for path in LIBRARY for name, _ in imports(tree(path)) if name.startswith("nanogpt_bench")]
    assert bad == []


def test_the_library_imports_its_core_dependencies_only() -> None:
    allowed = {"fp8manifold", "torch", "geoopt", "numpy", "__future__"} | sys.stdlib_module_names
    kernels = "fp8manifold/_triton/"  # imported where there is something to launch, which Triton is there for then
    files = {("safetensors", "fp8manifold/nn/_tensor_files.py")}  # imported where such a file is given
    found = {(name.split(".")[0], relative(path)) for path in LIBRARY for name, _ in imports(tree(path))}
    others = {(name, path) for name, path in found if name not in allowed}
    assert {(name, path) for name, path in others if name != "triton" or not path.startswith(kernels)} == files


@pytest.mark.parametrize("path", [*BENCH, *sorted((ROOT / "examples").glob("*.py"))], ids=relative)
def test_only_the_public_surface_is_used(path: Path) -> None:
    assert private_uses(tree(path)) == []


@pytest.mark.parametrize("path", SHIPPED, ids=relative)
def test_nothing_runs_code_from_data(path: Path) -> None:
    assert offences(tree(path)) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "exec('1')",
        "import yaml\nyaml.load(f)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "numpy.load(f, allow_pickle=True)",
        "subprocess.run('ls', shell=True)",
    ],
)
def test_the_check_sees_what_could_run_code(code: str) -> None:
    assert offences(ast.parse(code)) != []


@pytest.mark.parametrize("code", ["torch.load(f, weights_only=True)", "yaml.safe_load(f)", "model.eval()"])
def test_the_check_lets_the_rest_pass(code: str) -> None:
    assert offences(ast.parse(code)) == []


@pytest.mark.parametrize(
    "code",
    [
        "from fp8manifold.grid import encode",
        "from fp8manifold import _charts",
        "import fp8manifold.optim._optimizer",
        "import fp8manifold as fm\nfm.grid.encode(x)",
        "import fp8manifold as fm\nfm.optim._optimizer",
        "from fp8manifold import optim as o\no.riemannian.RiemannianAdam",
    ],
)
def test_the_check_sees_private_names(code: str) -> None:
    assert private_uses(ast.parse(code)) != []


def test_the_check_lets_public_names_pass() -> None:
    code = "import fp8manifold as fm\nfm.optim.StiffnessAdamW.step\nfm.encode(x)\nfrom fp8manifold.optim import anneal"
    assert private_uses(ast.parse(code)) == []


def test_every_public_name_exists_once() -> None:
    for prefix, module in NAMESPACES.items():
        assert sorted(set(module.__all__)) == sorted(module.__all__), prefix
        assert [name for name in module.__all__ if not hasattr(module, name)] == [], prefix


def test_doctests_of_the_library_are_part_of_the_tests() -> None:
    options = PROJECT["tool"]["pytest"]["ini_options"]
    assert "--doctest-modules" in options["addopts"]
    assert "fp8manifold" in options["testpaths"]
    assert options["filterwarnings"][0] == "error"


def test_files_are_short() -> None:
    lengths = {relative(path): path.read_text(encoding="utf-8").count("\n") for path in SHIPPED}
    assert {name: length for name, length in lengths.items() if length > 500} == {}
    assert [name for name in lengths if Path(name).stem == "utils"] == []


def test_functions_are_short() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for path in [*LIBRARY, *BENCH] for node in ast.walk(tree(path)) if isinstance(node, kinds)]
    lengths = sorted((node.end_lineno or 0) - body_start(node) + 1 for node in functions)
    assert lengths[len(lengths) // 2] < 15


def body_start(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """First line after the docstring."""
    has_docstring = ast.get_docstring(node) is not None and len(node.body) > 1
    return node.body[1 if has_docstring else 0].lineno


def test_extras_of_the_readme_exist() -> None:
    assert {"bench", "test", "docs"} <= PROJECT["project"]["optional-dependencies"].keys()
    assert PROJECT["project"]["scripts"]["nanogpt-bench"] == "nanogpt_bench.cli:main"


def test_the_package_is_typed() -> None:
    assert (ROOT / "fp8manifold" / "py.typed").exists()
