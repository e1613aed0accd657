"""The public surface as text: a change of a name, argument or default shows in a diff.

After a change that is meant: `python tests/test_public_signatures.py --write`.
"""

import argparse
import dataclasses
import difflib
import enum
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import fp8manifold as fm

SNAPSHOT = Path(__file__).with_name("public_signatures.txt")
NAMESPACES = {
    "fm": fm,
    "fm.distributed": fm.distributed,
    "fm.files": fm.files,
    "fm.huggingface": fm.huggingface,
    "fm.ops": fm.ops,
    "fm.optim": fm.optim,
    "fm.reference": fm.reference,
}


def signature_of(function: object) -> str:
    """Return the arguments of a callable with their defaults, without annotations."""
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    bare = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    # Addresses of functions that are defaults differ from run to run.
    return re.sub(r" at 0x[0-9a-f]+", "", str(bare))


def is_inherited_step(kind: type, value: object) -> bool:
    """Return whether a member is the step of a base class, which torch has hooked.

    torch puts it on the class of the first optimizer that is made.
    """
    is_hooked = getattr(value, "hooked", False)
    return is_hooked and not value.__qualname__.startswith(f"{kind.__qualname__}.")


def lines_of_class(name: str, kind: type) -> Iterator[str]:
    """Yield a line for a class and one for each of its own public members."""
    is_plain = issubclass(kind, enum.Enum | Warning)
    yield f"class {name}" if is_plain else f"class {name}{signature_of(kind)}"
    if dataclasses.is_dataclass(kind):
        fields = ", ".join(field.name for field in dataclasses.fields(kind))
        yield f"    fields: {fields}"
    for member, value in sorted(vars(kind).items()):
        if member.startswith("_") or is_inherited_step(kind, value):
            continue
        if isinstance(value, property):
            yield f"    .{member}"
        function = getattr(value, "__func__", value)
        if inspect.isfunction(function):
            yield f"    .{member}{signature_of(function)}"


def lines_of_namespace(name: str, namespace: ModuleType) -> Iterator[str]:
    """Yield the lines of all names that a namespace makes public."""
    for public in sorted(namespace.__all__):
        value = getattr(namespace, public)
        full_name = f"{name}.{public}"
        if inspect.ismodule(value):
            continue
        if isinstance(value, type):
            yield from lines_of_class(full_name, value)
        elif callable(value):
            yield f"{full_name}{signature_of(value)}"
        else:
            yield f"{full_name}: {type(value).__name__}"


def surface() -> str:
    """Return the public surface, a line for each name, argument list and member."""
    lines = []
    for name, namespace in NAMESPACES.items():
        lines += lines_of_namespace(name, namespace)
    return "\n".join(lines) + "\n"


def test_the_public_surface_is_the_one_that_is_recorded():
    recorded = SNAPSHOT.read_text(encoding="utf-8")
    diff = difflib.unified_diff(
        recorded.splitlines(), surface().splitlines(), "recorded", "now", lineterm="", n=0
    )
    changes = "\n".join(diff)
    assert not changes, f"if this is meant, run this file with --write:\n{changes}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="record the surface as it is")
    if parser.parse_args().write:
        SNAPSHOT.write_text(surface(), encoding="utf-8")
    else:
        print(surface(), end="")
