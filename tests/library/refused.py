"""Calls that are refused, written as text: the error, the words that it has to say, and
what it leaves as it was.
"""

import builtins
import re

import pytest
import torch
from optimizer_cases import frozen
from torch import Tensor, nn

import fp8manifold as fm

#: what a call may name without more ado: torch's and the library's public names
NAMES = {
    **{name: getattr(torch, name) for name in torch.__all__},
    **{name: getattr(house, name) for house in (fm.optim, fm) for name in house.__all__},
    "nn": nn,
    "SGD": torch.optim.SGD,
    "nan": torch.nan,
    "inf": torch.inf,
    **{
        str(kind).removeprefix("torch."): kind
        for kind in vars(torch).values()
        if isinstance(kind, torch.dtype)
    },
}


def named(error, given, more=""):
    """Options, apart by ``;``, each of which is refused with its own words, and more."""
    return {each: f"{error}: {each}{more}" for each in given.split("; ")}


def held(x):
    if isinstance(x, Tensor):
        return x.shape if x.is_meta else frozen(x)
    if isinstance(x, nn.Module):
        tensors = [
            *x.named_parameters(remove_duplicate=False),
            *x.named_buffers(remove_duplicate=False),
        ]
        modules = [(name, id(module), type(module)) for name, module in x.named_modules()]
        return modules, [(name, id(tensor), held(tensor)) for name, tensor in tensors]
    if isinstance(x, torch.optim.Optimizer):
        return frozen(x.state_dict()), [
            [held(p) for p in group["params"]] for group in x.param_groups
        ]
    return frozen(x.state_dict() if hasattr(x, "state_dict") else x)


def check_refused(call, expected, subjects, **more):
    """Make the call, which raises `ERROR: words & words` in one line; the subjects that
    it names are as before.

    Return what was said.
    """
    error, _, words = expected.partition(": ")
    made = {name: make() for name, make in subjects.items() if re.search(rf"\b{name}\b", call)}
    before = {name: held(x) for name, x in made.items()}
    with torch.no_grad(), pytest.raises(getattr(builtins, error)) as caught:
        eval(call, {**NAMES, **more, **made})
    said = str(caught.value)
    assert words
    assert type(caught.value).__name__ == error
    assert [part for part in words.split(" & ") if part not in said] == [], said
    assert "\n" not in said or said.startswith("Error(s) in loading state_dict"), said
    assert {name: held(x) for name, x in made.items()} == before
    return said
