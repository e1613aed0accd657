"""Inventories of other projects' names, as far as the pages use them.

They stand in this repository, so that a build needs no network.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Project(NamedTuple):
    """The address of a project's pages, and their names by page."""

    address: str
    #: names as `KIND:NAME`, separated by blanks
    names: Mapping[str, str]


PROJECTS = {
    "python": Project(
        "https://docs.python.org/3",
        {
            "library/functions.html": "class:bool class:float class:int class:object",
            "library/stdtypes.html": "class:dict class:list class:str class:tuple",
            "library/constants.html": "data:None",
            "library/typing.html": "data:typing.Any data:typing.Literal",
            "library/collections.abc.html": "class:collections.abc.Callable "
            "class:collections.abc.Iterable "
            "class:collections.abc.Mapping "
            "class:collections.abc.Sequence",
            "library/pathlib.html": "class:pathlib.Path",
            "library/exceptions.html": "exception:TypeError exception:ValueError "
            "exception:FloatingPointError exception:UserWarning "
            "exception:RuntimeWarning exception:RuntimeError",
        },
    ),
    "torch": Project(
        "https://docs.pytorch.org/docs/stable",
        {
            "tensors.html": "class:torch.Tensor",
            "tensor_attributes.html": "class:torch.device class:torch.dtype",
            "optim.html": "class:torch.optim.Optimizer",
            "generated/torch.nn.Module.html": "class:torch.nn.Module",
            "generated/torch.nn.Linear.html": "class:torch.nn.Linear",
            "generated/torch.nn.parameter.Parameter.html": "class:torch.nn.parameter.Parameter",
            "generated/torch.optim.AdamW.html": "class:torch.optim.AdamW",
            "generated/torch.optim.SGD.html": "class:torch.optim.SGD",
            "generated/torch.compile.html": "function:torch.compile",
            "generated/torch.load.html": "function:torch.load",
        },
    ),
    "numpy": Project(
        "https://numpy.org/doc/stable",
        {
            "reference/generated/numpy.ndarray.html": "class:numpy.ndarray",
            "reference/generated/numpy.memmap.html": "class:numpy.memmap",
        },
    ),
    "geoopt": Project(
        "https://geoopt.readthedocs.io/en/latest",
        {
            "manifolds.html": "class:geoopt.manifolds.base.Manifold class:geoopt.manifolds.Stiefel",
            "tensors.html": "class:geoopt.tensor.ManifoldParameter "
            "class:geoopt.tensor.ManifoldTensor",
            "optimizers.html": "class:geoopt.optim.RiemannianAdam class:geoopt.optim.RiemannianSGD",
        },
    ),
}


def inventory(project: str) -> str:
    """Return an inventory in Sphinx's first format.

    It is plain text with a line `NAME KIND PAGE` for every name.
    """
    lines = ["# Sphinx inventory version 1", f"# Project: {project}", "# Version: 0"]
    for page, names in PROJECTS[project].names.items():
        for word in names.split():
            kind, _, name = word.partition(":")
            lines.append(f"{name} {kind} {page}")
    return "\n".join([*lines, ""])


def write_inventories(folder: Path) -> None:
    """Write every inventory into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for project in PROJECTS:
        (folder / f"{project}.inv").write_text(inventory(project), encoding="utf-8")


def intersphinx_mapping(folder: Path) -> dict[str, tuple[str, tuple[str | None, str]]]:
    """Return Sphinx's setting of the same name.

    An inventory is looked for on the project's site, then in the folder.
    """
    mapping: dict[str, tuple[str, tuple[str | None, str]]] = {}
    for name, project in PROJECTS.items():
        mapping[name] = (project.address, (None, str(folder / f"{name}.inv")))
    return mapping
