"""The house: which room may import from which, no circle of modules, short files, and a map from each to its tests."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from of_source import FOLDERS, ROOT, where_tested

import fp8manifold as fm

MOST_ROOMS = 26

#: from the ground up; what stands on one floor may import from its own and from those below
LIBRARY = """formats _geoopt_import | _base _ranks | random_bits scaling | _numerics | _triton | _native
| grid reference | _encoded manifolds | tensor fake_quant | parameter | _shards _published | nn
| ops averages distributed exchange | optim | huggingface | checkpoints"""
BENCH = """system | model checkpoint | config | data monitors | runs | setup failures | report | loop
| evaluation | sweep | commands"""
ABOVE = LIBRARY.count("|") + 1
FLOORS = {
    f"{package}.{name}": floor
    for package, floors, first in (("fp8manifold", LIBRARY, 0), ("nanogpt_bench", BENCH, ABOVE + 1))
    for floor, names in enumerate(floors.split("|"), first)
    for name in names.split()
} | {"fp8manifold": ABOVE, "nanogpt_bench.cli": 90, "nanogpt_bench": 90, "nanogpt_bench.__main__": 91}


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package in ("fp8manifold", "nanogpt_bench"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imported(module: str) -> frozenset[str]:
    names = set()
    for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if name in modules() else node.module for name in whole}
    return frozenset(names & modules().keys() - {module})


def room_of(module: str) -> str:
    parts = module.split(".")
    return next(name for i in range(len(parts), 0, -1) if (name := ".".join(parts[:i])) in FLOORS)


def test_modules_have_rooms_and_import_nothing_from_above() -> None:
    assert FLOORS.keys() == {room_of(m) for m in modules()}
    floor = {m: FLOORS[room_of(m)] for m in modules()}
    assert [f"{m} imports {t}" for m in modules() for t in imported(m) if floor[t] > floor[m]] == []
    doors = ("fp8manifold", "nanogpt_bench")
    assert [m for m in modules() if m not in doors and room_of(m) in doors] == []


def test_no_modules_import_each_other() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in sorted(imported(module)):
                visit(other, (*path, module))
            done.add(module)

    for module in sorted(modules()):
        visit(module, ())


def test_there_are_few_rooms() -> None:
    rooms = {path.parent for path in modules().values()}
    assert len(rooms) <= MOST_ROOMS


#: a docstring opens with the thing, and not with one of these
LEADS = {"How", "It", "Of", "That", "They", "Those", "What", "Where", "Whether", "Which", "Who"}


def test_docstrings_open_with_the_thing() -> None:
    folders = ("fp8manifold", "nanogpt_bench", "benchmarks", "docs", "study", "tests/library", "tests/reliability")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) else None
            assert not text or text.split()[0].rstrip(",") not in LEADS, f"{path}: {text}"


#: names of torch that are private and have no public way, each with what it is for; whoever adds one says why here
PRIVATE = {
    "torch.Tensor._make_wrapper_subclass": "a tensor around others: codes, scale, counter",
    "torch._C": "of the three below",
    "torch._C._current_graph_task_id": "whether a backward pass runs: what is decoded or refused in it",
    "torch._C._disabled_torch_function_impl": "a subclass that torch's documentation makes so",
    "torch._C._is_tracing": "torch.jit.trace, to which what is read would be a constant",
    "torch._C._set_throw_on_mutable_data_ptr": "C++ code that asks for an address where there is none fails",
    "torch._assert_async": "a verdict on a device without a wait",
    "torch._compile._disable_dynamo": "torch.compiler.disable that does not load the compiler",
    "torch._foreach_add_": "counts of many steps at once, as torch's own optimizers do it",
    "torch._int_mm": "products of INT8 on a card",
    "torch._scaled_mm": "products of FP8 on a card",
    "torch._subclasses.FakeTensor": "tensors without values, by their class",
    "torch.autograd.grad_mode._unsafe_preserve_version_counter": "FSDP's memory is filled anew, as FSDP fills its own",
    "torch.ops.aten._foreach_mul_": "what clipping runs, seen by a dispatch mode",
    "torch.ops.aten._foreach_norm": "the same",
    "torch.ops.aten._foreach_zero_": "the same",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": "the dtype in which a processor multiplies",
    "torch.ops.aten._unsafe_view": "a product in the shape of its layer's output, which is no view",
    "torch.utils._python_dispatch._disable_current_modes": "random bits under a mode",
    "torch.utils._pytree": "arguments of an operator, nested; public from a later release on",
    "torch.utils._pytree.tree_flatten": "the same",
    "torch.utils._pytree.tree_map_only": "the same",
}


def torch_names(tree: ast.AST) -> set[str]:
    """Dotted names of torch that a module imports, or reads attribute by attribute."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {f"{node.module}.{name.name}" for name in node.names}
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts, node = [node.attr, *parts], node.value
        if parts and isinstance(node, ast.Name) and node.id == "torch":
            found.add(".".join(["torch", *parts]))
    return found


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_private_names_of_torch_are_listed_with_their_reasons() -> None:
    """The library inspects no call stack either."""
    found = set()
    for name, path in modules().items():
        if name.startswith("fp8manifold"):
            text = path.read_text(encoding="utf-8")
            assert "_getframe" not in text, name
            assert "f_back" not in text, name
            found |= {each for each in torch_names(ast.parse(text)) if is_private(each)}
    overloads = {name for name in found if name.startswith("torch.ops.aten.") and name.count(".") > 3}
    assert found - overloads == PRIVATE.keys()


#: files that ship, and those that a reader takes for examples
PACKAGES = [*(ROOT / "fp8manifold").rglob("*.py"), *(ROOT / "nanogpt_bench").rglob("*.py")]
SHIPPED = [*PACKAGES, *(path for name in ("examples", "docs", "study") for path in (ROOT / name).glob("*.py"))]
PARTS = {"optim": fm.optim, "ops": fm.ops, "reference": fm.reference}
NAMESPACES = {"fp8manifold": fm, **{f"fp8manifold.{name}": part for name, part in PARTS.items()}}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(source: ast.AST) -> Iterator[tuple[str, str | None]]:
    """(module, name) of every import: `import a.b` is ("a.b", None), `from a import b` is ("a", "b")."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def private_uses(source: ast.Module) -> list[str]:
    """Names that a file uses of fp8manifold beyond the public namespaces, which are imported whole or by name."""
    of_ours = [(module, name) for module, name in imports(source) if module.split(".")[0] == "fp8manifold"]
    known = {f"{house}.{name}" for house, module in NAMESPACES.items() for name in module.__all__} | {*NAMESPACES}
    found = [module if name is None else f"{module}.{name}" for module, name in of_ours]
    written = re.findall(r"\bfm((?:\.\w+)+)", ast.unparse(source)) if ("fp8manifold", None) in of_ours else []
    for parts in (name.split(".")[1:] for name in written):
        depth = 2 if f"fp8manifold.{parts[0]}" in NAMESPACES else 1
        found.append(".".join(["fp8manifold", *parts[:depth]]))
    return sorted({*found} - known)


def test_the_library_imports_its_core_dependencies_only() -> None:
    allowed = {"fp8manifold", "torch", "geoopt", "numpy", "__future__"} | sys.stdlib_module_names
    for path in (ROOT / "fp8manifold").rglob("*.py"):
        more = {"triton"} if path.parent.name == "_triton" else set()
        assert {name.split(".")[0] for name, _ in imports(tree(path))} <= allowed | more, path


def test_only_the_public_surface_is_used_and_the_check_sees_private_names_alone() -> None:
    paths = [
        path for path in SHIPPED if path.is_relative_to(ROOT / "nanogpt_bench") or path.parent == ROOT / "examples"
    ]
    assert {path.name: found for path in paths if (found := private_uses(tree(path)))} == {}
    codes = ["from fp8manifold.grid import encode", "from fp8manifold import _charts", "import fp8manifold.optim._slot"]
    codes += ["import fp8manifold as fm\nfm.grid.encode(x)", "import fp8manifold as fm\nfm.optim._optimizer"]
    assert [code for code in codes if not private_uses(ast.parse(code))] == []
    code = "import fp8manifold as fm\nfm.optim.StiffnessAdamW.step\nfm.encode(x)\nfrom fp8manifold.optim import anneal"
    assert private_uses(ast.parse(code)) == []


def test_files_are_short_and_compile_nothing() -> None:
    """Files that ship call neither `compile` nor `__import__`; ruff finds what unpickles or evaluates."""
    for path in SHIPPED:
        assert path.read_text(encoding="utf-8").count("\n") <= 500, path
        assert path.stem != "utils", path
        called = [node.func for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
        assert not {"compile", "__import__"} & {name.id for name in called if isinstance(name, ast.Name)}, path


SOURCES = [path for package in ("fp8manifold", "nanogpt_bench") for path in sorted((ROOT / package).rglob("*.py"))]


def test_every_source_has_tests_and_every_test_a_source() -> None:
    for source in SOURCES:
        itself, *tests = where_tested(source.relative_to(ROOT).as_posix())
        assert ROOT / itself == source
        assert tests, source
        assert [test for test in tests if not (ROOT / test).exists()] == [], source
    places = [ROOT / place for places in FOLDERS.values() for place in places.split()]
    assert [place for place in places if not place.exists()] == []
    of_packages = [path for folder in ("library", "bench") for path in (ROOT / "tests" / folder).rglob("test_*.py")]
    assert [path.name for path in of_packages if not {path, *path.parents} & {*places}] == ["test_missing_packages.py"]


@pytest.mark.parametrize("source", ["fp8manifold/optim/_slots.py", "LICENSE", "slot"])
def test_what_is_no_source_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=f"^source: '{source}'; allowed: a file below benchmarks/, "):
        where_tested(source)
