"""What every public docstring says: parameters, examples, errors, equations, and what becomes of NaN, Inf and -0."""

import ast
import doctest
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
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
FIRST = re.compile(r"[A-Z`0-9|(\[].*[.:](\n|$)")
#: values at the edge, of which everything that computes has to speak
EDGES = (r"NaN", r"Inf|infinite", r"-0", r"empty")


def plain_function(value: Any) -> Any:
    """The function behind a static or class method or a property; anything else as it is."""
    for attribute in ("__func__", "fget", "func"):
        value = getattr(value, attribute, value)
    return value


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


def overrides(owner: type, method: str) -> bool:
    """Whether a method is that of a class of another library, where its arguments are described."""
    bases = [base for base in owner.__mro__[1:] if not base.__module__.startswith("fp8manifold")]
    return any(method in vars(base) for base in bases)


def missing_in_methods(owner: type) -> Iterator[str]:
    """What the docstrings lack of the public methods that our own source defines."""
    for name, value in vars(owner).items():
        function = plain_function(value)
        ours = inspect.isfunction(function) and function.__module__.startswith("fp8manifold")
        if name.startswith("_") or not ours:
            continue
        text = inspect.getdoc(function) or ""
        if not FIRST.match(text):
            yield f"{name}: the first line is no sentence"
        if not isinstance(value, property) and not overrides(owner, name):
            yield from (f"{name}: {p}" for p in parameters(function) if not re.search(rf"\b{p}\b", text))
        if own_raises(function) and not section(text, "Raises"):
            yield f"{name}: Raises"


def missing(name: str) -> Iterator[str]:
    """What the docstring of a public function or class lacks."""
    thing = PUBLIC[name]
    text = inspect.getdoc(thing) or ""
    if not FIRST.match(text):
        yield "the first line is no sentence"
    if isinstance(thing, type):
        yield from missing_in_methods(thing)
    else:
        signature = inspect.signature(thing)
        bare = [p.name for p in signature.parameters.values() if p.annotation is inspect.Parameter.empty]
        yield from (f"{each}: an annotation" for each in bare)
        if signature.return_annotation is inspect.Signature.empty:
            yield "what it returns: an annotation"
    if is_plain_record(thing):
        body = definition(thing).body[1:]
        for field, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and not isinstance(after, ast.Expr):
                yield f"{ast.unparse(field.target)} is not described"
        return
    if isinstance(thing, type) and issubclass(thing, Warning):
        return
    yield from sorted(set(parameters(thing)) - described(text))
    if not section(text, "Raises"):
        yield "Raises"
    finder = doctest.DocTestFinder(recurse=False)  # to run them is what pytest's --doctest-modules is for
    (found,) = [test for test in finder.find(thing, module=sys.modules[thing.__module__]) if test.examples]
    if not any(example.want for example in found.examples):
        yield "an example that shows something"
    computes = takes_tensors(thing) or is_optimizer(thing) or name.endswith((".FloatFormat", ".random_bits"))
    if computes and not re.search(r"\.\. math::|Source:", text):
        yield "an equation or a source"
    if takes_tensors(thing):
        yield from (each for each in EDGES if not re.search(rf"(?<!\w)({each})(?!\w)", text))


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_docstring_says_everything(name: str) -> None:
    assert list(missing(name)) == []
