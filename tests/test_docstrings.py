"""Every public docstring has parameters, examples, errors, equations, and what becomes of NaN, Inf and -0."""

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

HOUSES = (fm, fm.optim, fm.ops, fm.huggingface, fm.reference)
PUBLIC = {f"{house.__name__}.{name}": getattr(house, name) for house in HOUSES for name in house.__all__}
PUBLIC = {name: thing for name, thing in PUBLIC.items() if callable(thing)}
FIRST = re.compile(r"[A-Z`0-9|(\[].*[.:](\n|$)")
#: values at the edge, of which everything that computes has to speak
EDGES = (r"NaN", r"Inf|infinite", r"-0", r"empty")


def definition(thing: Any) -> Any:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    return node


def own_methods(thing: type) -> dict[str, Any]:
    """The functions that a class's own source defines, of its properties too."""
    names = [node.name for node in definition(thing).body if isinstance(node, ast.FunctionDef)]
    found = {}
    for name in names:
        found[name] = vars(thing)[name]
        for attribute in ("__func__", "fget", "func"):
            found[name] = getattr(found[name], attribute, found[name])
    return found


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


def takes_tensors(thing: Any) -> bool:
    """True where it, or a method, takes a tensor; optimizers take parameters, which is another thing."""
    functions = [thing]
    if isinstance(thing, type):
        if issubclass(thing, torch.optim.Optimizer):
            return False
        called = ("__init__", "__new__")
        functions = [function for name, function in own_methods(thing).items() if name[0] != "_" or name in called]
    hints = [hint for f in functions for name, hint in inspect.get_annotations(f).items() if name != "return"]
    return any(re.search(r"(^|[ .'])Tensor\b", str(hint)) and "[" not in str(hint) for hint in hints)


def raises(function: Any) -> bool:
    nodes = [node for node in ast.walk(definition(function)) if isinstance(node, ast.Raise)]
    return any("NotImplementedError" not in ast.dump(node) for node in nodes)


def missing(name: str) -> Iterator[str]:
    thing = PUBLIC[name]
    text = inspect.getdoc(thing) or ""
    methods = own_methods(thing) if isinstance(thing, type) else {}
    for method, function in methods.items():
        if not method.startswith("_"):
            said = inspect.getdoc(function) or ""
            yield from [] if FIRST.match(said) else [f"{method}: the first line is no sentence"]
            yield from [f"{method}: Raises"] if raises(function) and not section(said, "Raises") else []
    if not FIRST.match(text):
        yield "the first line is no sentence"
    record = hasattr(thing, "__dataclass_fields__") and not {"__init__", "__post_init__"} & methods.keys()
    if record or (isinstance(thing, type) and issubclass(thing, Warning)):  # something to read, not to call
        return
    yield from sorted({p for p in inspect.signature(thing).parameters if p not in ("self", "cls")} - described(text))
    if not section(text, "Raises"):
        yield "Raises"
    finder = doctest.DocTestFinder(recurse=False)  # to run them is what pytest's --doctest-modules is for
    (found,) = [test for test in finder.find(thing, module=sys.modules[thing.__module__]) if test.examples]
    if not any(example.want for example in found.examples):
        yield "an example that shows something"
    optimizes = isinstance(thing, type) and issubclass(thing, torch.optim.Optimizer)
    computes = takes_tensors(thing) or optimizes or name.endswith((".FloatFormat", ".random_bits"))
    if computes and not re.search(r"\.\. math::|Source:", text):
        yield "an equation or a source"
    if takes_tensors(thing):
        yield from (each for each in EDGES if not re.search(rf"(?<!\w)({each})(?!\w)", text))


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_docstring_says_everything(name: str) -> None:
    assert list(missing(name)) == []
