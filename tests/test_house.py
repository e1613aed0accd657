"""Structure of the packages.

Which room may import from which, no circle of modules, and a map from files to tests.
"""

import ast
import re
import sys
from functools import cache
from graphlib import TopologicalSorter

from of_source import FOLDERS, ROOT, where_tested

import fp8manifold as fm

#: from the ground up; what stands on one floor may import from its own and from those
#: below
LIBRARY = """formats _interface | _base _ranks | _geoopt_import _memory random_bits scaling | _numerics | _triton | _native
| grid reference | _encoded manifolds | tensor fake_quant | parameter | _shards _published | nn
| ops averages distributed | optim | lost_updates | _doors | _chunked_loss _served | huggingface | files"""
BENCH = """system | model checkpoint | config | data monitors | runs | setup failures | report | loop
| evaluation | sweep | commands"""
#: the floor of the library's own module, below those of the bench; 90 and 91 are above
#: all of these
ABOVE = LIBRARY.count("|") + 1
FLOORS = {
    "fp8manifold": ABOVE,
    "nanogpt_bench.cli": 90,
    "nanogpt_bench": 90,
    "nanogpt_bench.__main__": 91,
}
for package, floors, first in (("fp8manifold", LIBRARY, 0), ("nanogpt_bench", BENCH, ABOVE + 1)):
    for floor, names in enumerate(floors.split("|"), first):
        FLOORS |= {f"{package}.{name}": floor for name in names.split()}


#: name, and its file
MODULES = {}
for package in ("fp8manifold", "nanogpt_bench"):
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        MODULES[name.removesuffix(".__init__")] = path


@cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(source):
    """Return (module, name) of every import.

    `import a.b` is ("a.b", None), `from a import b` is ("a", "b").
    """
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def imported(module):
    """The modules that one imports."""
    names = {
        f"{source}.{name}" if f"{source}.{name}" in MODULES else source
        for source, name in imports(tree(MODULES[module]))
    }
    return names & MODULES.keys() - {module}


def test_modules_have_rooms_and_import_nothing_from_above_and_not_each_other():
    packages_of = {m: [m.rsplit(".", i)[0] for i in range(m.count(".") + 1)] for m in MODULES}
    rooms = {m: next(name for name in names if name in FLOORS) for m, names in packages_of.items()}
    assert FLOORS.keys() == set(rooms.values())
    floor = {m: FLOORS[room] for m, room in rooms.items()}
    upwards = []
    for module in MODULES:
        above = [name for name in imported(module) if floor[name] > floor[module]]
        upwards += [f"{module} imports {name}" for name in above]
    assert upwards == []
    # A module that no floor names would count as the package's own, its door.
    doors = ("fp8manifold", "nanogpt_bench")
    assert [m for m, room in rooms.items() if m not in doors and room in doors] == []
    TopologicalSorter({m: imported(m) for m in MODULES}).prepare()  # which names a circle


#: names of torch that are private and have no public way, each with what it is for;
#: whoever adds one says why here
PRIVATE = {
    "torch.Tensor._make_wrapper_subclass": "a tensor around others: codes, scale, counter",
    "torch._C": "of the three below",
    "torch._C._current_graph_task_id": "whether a backward pass runs: what is decoded or refused "
    "in it",
    "torch._C._disabled_torch_function_impl": "a subclass that torch's documentation makes so",
    "torch._C._is_tracing": "torch.jit.trace, to which what is read would be a constant",
    "torch._C._set_throw_on_mutable_data_ptr": "C++ code that asks for an address where there is "
    "none fails",
    "torch._assert_async": "a verdict on a device without a wait",
    "torch._compile._disable_dynamo": "torch.compiler.disable that does not load the compiler",
    "torch._dynamo": "of the one below",
    "torch._dynamo.graph_break": "the reason for a break, which fullgraph=True raises",
    "torch.compiler._is_exporting_flag": "is_exporting(), which torch 2.8 has true for compilers",
    "torch._foreach_add_": "counts of many steps at once, as torch's own optimizers do it",
    "torch._int_mm": "products of INT8 on a card",
    "torch._scaled_mm": "products of FP8 on a card",
    "torch._subclasses.FakeTensor": "tensors without values, by their class",
    "torch.autograd.grad_mode._unsafe_preserve_version_counter": "FSDP's memory is filled anew, as "
    "FSDP fills its own",
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


def torch_names(tree):
    """Dotted names of torch that a module imports, or reads attribute by attribute."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {f"{node.module}.{name.name}" for name in node.names}
        parts = []
        while isinstance(node, ast.Attribute):
            parts, node = [node.attr, *parts], node.value
        if parts and isinstance(node, ast.Name) and node.id == "torch":
            names.add(".".join(["torch", *parts]))
    return names


def test_private_names_of_torch_are_listed_with_their_reasons():
    """The library inspects no call stack either."""
    names = set()
    for path in (path for name, path in MODULES.items() if name.startswith("fp8manifold")):
        assert not re.search("_getframe|f_back", path.read_text(encoding="utf-8")), path
        names |= {name for name in torch_names(tree(path)) if re.search(r"\._(?!_)", name)}
    overloads = {
        name for name in names if name.startswith("torch.ops.aten.") and name.count(".") > 3
    }
    assert names - overloads == PRIVATE.keys()


#: what the bench and the examples may use
PARTS = {
    "fp8manifold.optim": fm.optim,
    "fp8manifold.ops": fm.ops,
    "fp8manifold.reference": fm.reference,
}
NAMESPACES = {"fp8manifold": fm, **PARTS}


def private_uses(source):
    """Return the names of fp8manifold that a file uses beyond the public ones.

    Public namespaces are imported whole or by name.
    """
    of_ours = [
        (module, name) for module, name in imports(source) if module.split(".")[0] == "fp8manifold"
    ]
    known = {*NAMESPACES}
    for house, module in NAMESPACES.items():
        known.update(f"{house}.{name}" for name in module.__all__)
    used = [module if name is None else f"{module}.{name}" for module, name in of_ours]
    attributes = (
        re.findall(r"\bfm((?:\.\w+)+)", ast.unparse(source))
        if ("fp8manifold", None) in of_ours
        else []
    )
    for parts in (name.split(".")[1:] for name in attributes):
        depth = 2 if f"fp8manifold.{parts[0]}" in NAMESPACES else 1
        used.append(".".join(["fp8manifold", *parts[:depth]]))
    return sorted({*used} - known)


def test_the_library_imports_its_core_dependencies_only():
    allowed = {"fp8manifold", "torch", "geoopt", "numpy", "__future__"} | sys.stdlib_module_names
    for path in (ROOT / "fp8manifold").rglob("*.py"):
        extra = {"triton"} if path.parent.name == "_triton" else set()
        assert {name.split(".")[0] for name, _ in imports(tree(path))} <= allowed | extra, path


def test_only_the_public_surface_is_used_and_the_check_sees_private_names_alone():
    paths = [*(ROOT / "nanogpt_bench").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    uses = [(path.name, private_uses(tree(path))) for path in paths]
    assert [(name, private) for name, private in uses if private] == []
    codes = ["from fp8manifold.grid import encode", "import fp8manifold as fm\nfm.grid.encode(x)"]
    assert [code for code in codes if not private_uses(ast.parse(code))] == []
    code = "import fp8manifold as fm\nfm.optim.StiffnessAdamW.step\nfm.encode(x)\n"
    code += "from fp8manifold.optim import anneal"
    assert private_uses(ast.parse(code)) == []


def compiles(path):
    called = [node.func for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
    names = {name.id for name in called if isinstance(name, ast.Name)}
    return bool({"compile", "__import__"} & names)


def test_files_that_ship_compile_nothing():
    """Files that ship call neither `compile` nor `__import__`.

    ruff finds what unpickles or evaluates.
    """
    paths = [*MODULES.values()]
    for name in ("examples", "docs", "study"):
        paths += (ROOT / name).glob("*.py")
    assert [path for path in paths if compiles(path)] == []


#: functions of torch whose tensor is on the default device if no other is named
FACTORIES = {"tensor", "zeros", "ones", "empty", "full", "arange", "eye", "linspace"}
FACTORIES |= {"rand", "randn", "randint", "randperm", "scalar_tensor"}


def without_device(node, *, is_buffer=False):
    """Yield calls that make a tensor on the default device, apart from modules' buffers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            of_torch = ast.unparse(child.func.value) == "torch" and child.func.attr in FACTORIES
            is_named = any(keyword.arg in ("device", None) for keyword in child.keywords)
            if of_torch and not is_named and not is_buffer:
                yield child
            is_register = child.func.attr == "register_buffer"
            yield from without_device(child, is_buffer=is_buffer or is_register)
        else:
            yield from without_device(child, is_buffer=is_buffer)


def test_no_tensor_of_the_library_goes_to_the_default_device():
    planted = (
        "x.y(torch.zeros(3)); m.register_buffer('b', torch.ones(())); torch.full((2,), 1, device=d)"
    )
    assert [call.func.attr for call in without_device(ast.parse(planted))] == ["zeros"]
    # Native code would be given the address of another device's memory, or none.
    found = []
    for name, path in MODULES.items():
        if name.startswith("fp8manifold"):
            found += [f"{name}:{call.lineno}" for call in without_device(tree(path))]
    assert not found


def test_every_source_has_tests_and_every_test_a_source():
    for source in MODULES.values():
        *tests, itself = where_tested(source.relative_to(ROOT).as_posix())
        assert ROOT / itself == source
        assert tests, source
        assert [test for test in tests if not (ROOT / test).exists()] == [], source
    places = [ROOT / place for place in " ".join(FOLDERS.values()).split()]
    assert [place for place in places if not place.exists()] == []
    of_packages = [
        *(ROOT / "tests/library").rglob("test_*.py"),
        *(ROOT / "tests/bench").rglob("test_*.py"),
    ]
    assert [path.name for path in of_packages if not {path, *path.parents} & {*places}] == [
        "test_missing_packages.py"
    ]
