"""What every public docstring says: parameters, examples, errors, equations, and what becomes of NaN, Inf and -0."""

import ast
import doctest
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8manifold as fm

NAMESPACES = {
    "fp8manifold": fm,
    "fp8manifold.optim": fm.optim,
    "fp8manifold.ops": fm.ops,
    "fp8manifold.huggingface": fm.huggingface,
    "fp8manifold.reference": fm.reference,
}
ROOT = Path(__file__).parent.parent
BENCH = sorted((ROOT / "nanogpt_bench").rglob("*.py"))


def public_objects() -> dict[str, Any]:
    """Every public function and class of the library by qualified name."""
    names = ((prefix, module, name) for prefix, module in NAMESPACES.items() for name in module.__all__)
    found = {f"{prefix}.{name}": getattr(module, name) for prefix, module, name in names}
    return {name: thing for name, thing in found.items() if callable(thing)}


def is_plain_record(thing: Any) -> bool:
    """Whether it is a dataclass that takes whatever it is given: something to read, not to call."""
    return hasattr(thing, "__dataclass_fields__") and not {"__init__", "__post_init__"} & defined_in_source(thing)


def defined_in_source(thing: type) -> set[str]:
    """Names of the methods that a class's own source defines."""
    return {node.name for node in definition(thing).body if isinstance(node, ast.FunctionDef)}


def definition(thing: Any) -> Any:
    """The syntax tree of a class or function."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    return node


PUBLIC = public_objects()
CALLED = {
    name: thing
    for name, thing in PUBLIC.items()
    if not is_plain_record(thing) and not (isinstance(thing, type) and issubclass(thing, Warning))
}
RECORDS = {name: thing for name, thing in PUBLIC.items() if is_plain_record(thing)}


def plain_function(value: Any) -> Any:
    """The function behind a static or class method or a property; anything else as it is."""
    for attribute in ("__func__", "fget", "func"):
        value = getattr(value, attribute, value)
    return value


def methods() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods that our own source defines, by qualified name."""
    for name, thing in PUBLIC.items():
        for attribute, value in vars(thing).items() if isinstance(thing, type) else ():
            function = plain_function(value)
            ours = inspect.isfunction(function) and function.__module__.startswith("fp8manifold")
            if ours and not attribute.startswith("_"):
                yield f"{name}.{attribute}", function


METHODS = dict(methods())


def parameters(thing: Any) -> list[str]:
    """Names of what it is called with."""
    return [name for name in inspect.signature(thing).parameters if name not in ("self", "cls")]


def section(text: str, name: str) -> str:
    """The indented body of `Name:` in a docstring."""
    found = re.search(rf"^{name}:\n((?:[ ]{{4}}.*\n?|\n)+)", text, re.MULTILINE)
    return found[1] if found else ""


def described(text: str) -> set[str]:
    """The parameters that the section Args has a description of; several may share one."""
    # An entry stands four columns in; what goes on from the line before stands deeper.
    entries = re.sub(r"\n {8,}", " ", section(text, "Args"))
    heads = [line.split(":")[0] for line in entries.splitlines() if ":" in line]
    return {name for head in heads for name in re.findall(r"\w+", head)}


def is_optimizer(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, torch.optim.Optimizer)


def takes_tensors(thing: Any) -> bool:
    """Whether an argument of it, or of a method, is a tensor; optimizers take parameters, which is another thing."""
    if is_optimizer(thing):
        return False
    functions = [thing]
    if isinstance(thing, type):
        called = {"__init__", "__new__"}
        functions = [
            plain_function(vars(thing)[name]) for name in defined_in_source(thing) if name[0] != "_" or name in called
        ]
    hints = [hint for f in functions for name, hint in inspect.get_annotations(f).items() if name != "return"]
    return any(re.search(r"(^|[ .'])Tensor\b", str(hint)) and "[" not in str(hint) for hint in hints)


def own_raises(thing: Any) -> bool:
    """Whether its own source raises something, beyond saying that a subclass must do it."""
    nodes = [node for node in ast.walk(definition(thing)) if isinstance(node, ast.Raise)]
    return any("NotImplementedError" not in ast.dump(node) for node in nodes)


def overrides(name: str) -> bool:
    """Whether a method is that of a class of another library, where its arguments are described."""
    owner, _, method = name.rpartition(".")
    bases = [base for base in PUBLIC[owner].__mro__[1:] if not base.__module__.startswith("fp8manifold")]
    return any(method in vars(base) for base in bases)


@pytest.mark.parametrize("name", [*PUBLIC, *METHODS])
def test_the_first_line_is_a_sentence(name: str) -> None:
    text = inspect.getdoc(PUBLIC.get(name) or METHODS[name]) or ""
    assert text, "no docstring"
    assert re.match(r"[A-Z`0-9|(\[].*[.:]$", text.splitlines()[0])


@pytest.mark.parametrize("name", [name for name, thing in PUBLIC.items() if inspect.isfunction(thing)])
def test_functions_are_annotated(name: str) -> None:
    signature = inspect.signature(PUBLIC[name])
    assert signature.return_annotation is not inspect.Signature.empty
    assert [p for p in signature.parameters.values() if p.annotation is inspect.Parameter.empty] == []


@pytest.mark.parametrize("name", CALLED)
def test_every_parameter_is_described(name: str) -> None:
    assert set(parameters(CALLED[name])) - described(inspect.getdoc(CALLED[name]) or "") == set()


@pytest.mark.parametrize("name", [name for name in METHODS if not overrides(name)])
def test_parameters_of_methods_are_named(name: str) -> None:
    text = inspect.getdoc(METHODS[name]) or ""
    if isinstance(inspect.getattr_static(PUBLIC[name.rpartition(".")[0]], name.rpartition(".")[2]), property):
        return
    assert [p for p in parameters(METHODS[name]) if not re.search(rf"\b{p}\b", text)] == []


@pytest.mark.parametrize("name", RECORDS)
def test_every_field_of_a_record_is_described(name: str) -> None:
    body = definition(RECORDS[name]).body[1:]
    for field, text in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(text, ast.Expr), f"{ast.unparse(field.target)} is not described"


@pytest.mark.parametrize("name", CALLED)
def test_there_is_an_example_that_the_tests_run(name: str) -> None:
    """Running them is what pytest's --doctest-modules is for."""
    thing = CALLED[name]
    module = sys.modules[thing.__module__]
    (found,) = [test for test in doctest.DocTestFinder(recurse=False).find(thing, module=module) if test.examples]
    assert any(example.want for example in found.examples), "nothing is shown"


@pytest.mark.parametrize("name", CALLED)
def test_errors_are_listed(name: str) -> None:
    assert section(inspect.getdoc(CALLED[name]) or "", "Raises")


@pytest.mark.parametrize("name", [name for name, thing in METHODS.items() if own_raises(thing)])
def test_errors_of_methods_are_listed(name: str) -> None:
    assert section(inspect.getdoc(METHODS[name]) or "", "Raises")


COMPUTING = [name for name, thing in CALLED.items() if takes_tensors(thing)]
OPTIMIZERS = [f"fp8manifold.optim.{name}" for name, thing in vars(fm.optim).items() if is_optimizer(thing)]


@pytest.mark.parametrize("name", [*COMPUTING, *OPTIMIZERS, "fp8manifold.FloatFormat", "fp8manifold.random_bits"])
def test_what_computes_has_an_equation_or_a_source(name: str) -> None:
    text = inspect.getdoc(CALLED[name]) or ""
    assert ".. math::" in text or "Source:" in text


@pytest.mark.parametrize("name", COMPUTING)
@pytest.mark.parametrize("value", [r"NaN", r"Inf|infinite", r"-0", r"empty"])
def test_the_values_at_the_edge_are_spoken_of(name: str, value: str) -> None:
    assert re.search(rf"(?<!\w)({value})(?!\w)", inspect.getdoc(CALLED[name]) or ""), "not a word of it"


def functions_that_raise(path: Path) -> Iterator[tuple[str, str]]:
    """(name, docstring) of the documented public functions of a file whose own source raises something."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and (text := ast.get_docstring(node)):
            raised = [inner for inner in ast.walk(node) if isinstance(inner, ast.Raise) and inner.exc is not None]
            if any("NotImplementedError" not in ast.dump(inner) for inner in raised):
                yield f"{path.name}: {node.name}", text


@pytest.mark.parametrize("path", BENCH, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_functions_of_the_bench_say_that_they_raise(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), "no docstring"
    assert [name for name, text in functions_that_raise(path) if not re.search(r"[Rr]aise|[Rr]efuse", text)] == []


def test_the_checks_see_what_is_missing() -> None:
    text = "One.\n\nArgs:\n    a, b: two.\n        c: of the line before.\n    d: one.\n\nRaises:\n    ValueError: x.\n"
    assert described(text) == {"a", "b", "d"}
    assert section(text, "Raises").strip() == "ValueError: x."
    assert section(text, "Returns") == ""
    assert takes_tensors(fm.ulp)
    assert not takes_tensors(fm.random_bits)
    assert own_raises(fm.flatten_state_dict)
    assert not own_raises(fm.ulp)
