"""Nothing in packages, examples and pages unpickles, evaluates or hands text to a shell: every call is looked at."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for name in ("fp8manifold", "nanogpt_bench", "examples") for path in (ROOT / name).rglob("*.py"))
FILES += sorted((ROOT / "docs").glob("*.py"))
#: modules that run what they read
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "code", "jsonpickle"}
#: calls that run what they read, by the last part of their name
CALLS = {"eval", "exec", "compile", "__import__", "unsafe_load", "full_load", "unsafe_load_all", "full_load_all"}
#: calls by their whole name
DOTTED = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "yaml.load", "yaml.load_all"}


def offences(tree: ast.AST) -> Iterator[str]:
    """What a source must not contain, each as a few words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"import {item.name}" for item in node.names if item.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            yield from _imported(node)
        elif isinstance(node, ast.Call):
            yield from _called(node)


def _imported(node: ast.ImportFrom) -> Iterator[str]:
    module = node.module or ""
    if not node.level and module.partition(".")[0] in MODULES:
        yield f"from {module}"
    if module == "torch" and any(item.name == "load" for item in node.names):
        yield "from torch import load"
    yield from (f"from {module} import {n.name}" for n in node.names if f"{module}.{n.name}" in DOTTED)
    yield from (f"from {module} import {n.name}" for n in node.names if module == "yaml" and "unsafe" in n.name.lower())


def _called(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    given = {word.arg: word.value for word in node.keywords}
    if name in DOTTED or (isinstance(node.func, ast.Name) and name in CALLS) or name.startswith("builtins."):
        yield f"{name}()"
    if isinstance(node.func, ast.Attribute) and node.func.attr in CALLS - {"compile", "eval"}:
        yield f"{name}()"
    if name in ("torch.load", "torch.jit.load") and not _is(given.get("weights_only"), True):
        yield f"{name} without weights_only=True"
    if "allow_pickle" in given and not _is(given["allow_pickle"], False):
        yield f"{name} with allow_pickle"
    if "shell" in given and not _is(given["shell"], False):
        yield f"{name} with a shell"
    if any(isinstance(part, ast.Attribute) and part.attr in ("UnsafeLoader", "FullLoader") for part in ast.walk(node)):
        yield f"{name} with a loader that makes objects"


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_source_runs_what_it_reads(path: Path) -> None:
    assert list(offences(ast.parse(path.read_text(encoding="utf-8")))) == []


def test_everything_was_looked_at(tally: Callable[..., None]) -> None:
    names = {path.relative_to(ROOT).parts[0] for path in FILES}
    assert names == {"fp8manifold", "nanogpt_bench", "examples", "docs"}
    assert len(FILES) > 100
    tally("sources without pickle, eval, exec, unsafe YAML or shell", len(FILES))


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "import marshal",
        "from joblib import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "from torch import load",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "from yaml import load",
        "yaml.unsafe_load(text)",
        "f(text, yaml.FullLoader)",
        "eval('1')",
        "exec(text)",
        "builtins.exec(text)",
        "compile(text, 'a', 'exec')",
        "__import__(name)",
        "os.system('ls')",
        "subprocess.run('ls', shell=True)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_what_runs_is_found(text: str) -> None:
    assert list(offences(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "torch.compile(step)",
        "re.compile('a')",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=False)",
        "yaml.safe_load(text)",
        "json.load(file)",
        "subprocess.run(['ls'])",
    ],
)
def test_what_is_harmless_is_left_alone(text: str) -> None:
    assert not list(offences(ast.parse(text)))
