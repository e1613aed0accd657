"""What the page for authors of frameworks lists is what there is."""

import re
import shlex
from pathlib import Path

import pytest
import torch

import fp8manifold as fm

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "for-frameworks.md").read_text(encoding="utf-8")


def arguments_of_their_ci():
    block = re.search(r"```sh\n(pytest .*?)```", PAGE, flags=re.DOTALL)[1]
    arguments = shlex.split(block.replace("\\\n", " "))
    return [argument for argument in arguments if argument.startswith("tests/")]


def test_four_tests_are_listed_for_their_ci():
    assert len(arguments_of_their_ci()) == 4


@pytest.mark.parametrize("path", arguments_of_their_ci())
def test_a_test_for_their_ci_is_there(path):
    file, _, test = path.partition("::")
    source = (ROOT / file).read_text(encoding="utf-8")
    name, _, case = test.partition("[")
    assert f"def {name}" in source
    assert f'"{case.rstrip("]")}' in source


def test_all_names_that_torch_load_allows_are_listed():
    allowed = set()
    for entry in torch.serialization.get_safe_globals():
        # other libraries give some with another name, as pairs
        item = entry[0] if isinstance(entry, tuple) else entry
        if item.__module__.startswith("fp8manifold."):
            allowed.add(item.__name__)
    classes = {name for name in allowed if not name.startswith("_")}
    assert classes == {name for name in ("FP8Tensor", "FP8Parameter", "FP8Shard") if name in PAGE}
    assert len(allowed) == len(classes) + 1


def test_hooks_of_modules_are_those_that_are_listed():
    registries = torch.nn.modules.module
    numbers = {}
    for kind in ("module", "parameter", "buffer"):
        hooks = getattr(registries, f"_global_{kind}_registration_hooks").values()
        numbers[kind] = sum(hook.__module__.startswith(fm.__name__) for hook in hooks)
    assert numbers == {"module": 2, "parameter": 1, "buffer": 0}
