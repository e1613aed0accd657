"""Calls that are refused, written as text.

The message of the error has certain words, and the objects that the call names stay as
they were.
"""

import builtins
import re

import pytest
import torch
from optimizer_cases import frozen
from torch import Tensor, nn

import fp8manifold as fm

#: Names that every call may use: the public ones of torch and of the library.
NAMES = {
    **{name: getattr(torch, name) for name in torch.__all__},
    **{name: getattr(fm.optim, name) for name in fm.optim.__all__},
    **{name: getattr(fm, name) for name in fm.__all__},
    # after torch's own: `unflatten` is ours
    **{name: getattr(fm.files, name) for name in fm.files.__all__},
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


def named(error, options, words=""):
    """Return expected errors of options in a text: each names its option, and has words."""
    return {option: f"{error}: {option}{words}" for option in options.split("; ")}


def calls(form, words_by_arguments, error=""):
    """Return expected errors of calls that differ in the arguments at `...` of a form."""
    return {
        form.replace("...", arguments): error + words
        for arguments, words in words_by_arguments.items()
    }


def contents(x):
    """Return all that a call could change of a tensor, module, optimizer or other object."""
    if isinstance(x, Tensor):
        return x.shape if x.is_meta else frozen(x)
    if isinstance(x, nn.Module):
        tensors = [
            *x.named_parameters(remove_duplicate=False),
            *x.named_buffers(remove_duplicate=False),
        ]
        modules = [(name, id(module), type(module)) for name, module in x.named_modules()]
        return modules, [(name, id(tensor), contents(tensor)) for name, tensor in tensors]
    if isinstance(x, torch.optim.Optimizer):
        groups = [list(map(contents, group["params"])) for group in x.param_groups]
        return frozen(x.state_dict()), groups
    return frozen(x.state_dict() if hasattr(x, "state_dict") else x)


def check_refused(call, expected, subjects, **helpers):
    """Make a call that is refused, and return the message of its error.

    Args:
        call: An expression over `NAMES`, `subjects` and `helpers`.
        expected: "ERROR: words & words": the message is one line and has all the words.
        subjects: Functions that make the objects which the call may name. These are after
            the call as they were before.
        **helpers: Further names.
    """
    error, _, words = expected.partition(": ")
    objects = {name: make() for name, make in subjects.items() if re.search(rf"\b{name}\b", call)}
    old_contents = {name: contents(x) for name, x in objects.items()}
    with torch.no_grad(), pytest.raises(getattr(builtins, error)) as caught:
        eval(call, {**NAMES, **helpers, **objects})
    message = str(caught.value)
    assert words
    assert type(caught.value).__name__ == error
    assert [part for part in words.split(" & ") if part not in message] == [], message
    assert "\n" not in message or message.startswith("Error(s) in loading state_dict"), message
    assert {name: contents(x) for name, x in objects.items()} == old_contents
    return message
