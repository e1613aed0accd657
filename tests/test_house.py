"""The house: which room may import from which, no circle of modules, and how many rooms there are."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_ROOMS = 28

#: from the ground up; what stands on one floor may import from its own and from those below
LIBRARY = (
    ("formats", "_geoopt_import"),
    ("_base", "_ranks"),
    ("random_bits", "scaling"),
    ("_numerics",),
    ("_triton",),
    ("_native",),
    ("grid", "reference"),
    ("_encoded", "manifolds"),
    ("tensor", "fake_quant"),
    ("parameter",),
    ("_shards",),
    ("nn", "export"),
    ("ops", "averages", "distributed", "exchange"),
    ("optim",),
    ("huggingface",),
)
BENCH = (
    ("system",),
    ("model", "checkpoint"),
    ("config",),
    ("data", "monitors"),
    ("runs",),
    ("setup", "failures"),
    ("training",),
    ("observers", "report"),
    ("loop",),
    ("evaluation",),
    ("workers",),
    ("sweep",),
    ("commands",),
)
FLOORS = {
    f"{package}.{name}": floor
    for package, floors, first in (("fp8manifold", LIBRARY, 0), ("nanogpt_bench", BENCH, len(LIBRARY) + 1))
    for floor, names in enumerate(floors, first)
    for name in names
} | {"fp8manifold": len(LIBRARY), "nanogpt_bench.cli": 90, "nanogpt_bench": 90, "nanogpt_bench.__main__": 91}


@cache
def modules() -> dict[str, Path]:
    """Every module of both packages by its name."""
    found = {}
    for package in ("fp8manifold", "nanogpt_bench"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imported(module: str) -> frozenset[str]:
    """The modules of ours that a module imports, for its annotations too."""
    names = set()
    for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if name in modules() else node.module for name in whole}
    return frozenset(names & modules().keys() - {module})


def room_of(module: str) -> str:
    """The longest name among the rooms that the module's begins with."""
    parts = module.split(".")
    return next(name for i in range(len(parts), 0, -1) if (name := ".".join(parts[:i])) in FLOORS)


@pytest.mark.parametrize("room", FLOORS)
def test_nothing_is_imported_from_above(room: str) -> None:
    own = [m for m in modules() if room_of(m) == room]
    assert own, f"{room} is in the drawing and not in the house"
    upwards = [f"{m} imports {t}" for m in own for t in imported(m) if FLOORS[room_of(t)] > FLOORS[room]]
    assert not upwards


@pytest.mark.parametrize("package", ["fp8manifold", "nanogpt_bench"])
def test_every_module_has_its_room(package: str) -> None:
    at_the_door = [m for m in modules() if m.startswith(f"{package}.") and room_of(m) == package]
    assert not at_the_door


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
