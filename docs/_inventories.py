"""Inventories of other projects' names, as far as the pages use them, so that a build
needs no network.
"""

from collections.abc import Mapping
from pathlib import Path

#: project -> (address of its pages, names by page)
PROJECTS: dict[str, tuple[str, Mapping[str, str]]] = {
    "python": (
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
    "torch": (
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
    "numpy": (
        "https://numpy.org/doc/stable",
        {
            "reference/generated/numpy.ndarray.html": "class:numpy.ndarray",
            "reference/generated/numpy.memmap.html": "class:numpy.memmap",
        },
    ),
    "geoopt": (
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
    """An inventory in Sphinx's first format, which is plain text: a line
    `NAME TYPE PAGE` for every name.
    """
    _, pages = PROJECTS[project]
    names = [
        (name.partition(":")[2], name.partition(":")[0], page)
        for page, text in pages.items()
        for name in text.split()
    ]
    lines = [f"{name} {kind} {page}" for name, kind, page in names]
    return "\n".join(
        ["# Sphinx inventory version 1", f"# Project: {project}", "# Version: 0", *lines, ""]
    )


def write_inventories(folder: Path) -> None:
    """Write every inventory into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for project in PROJECTS:
        (folder / f"{project}.inv").write_text(inventory(project), encoding="utf-8")


def intersphinx_mapping(folder: Path) -> dict[str, tuple[str, tuple[str | None, str]]]:
    """For each project the address of its pages, and where its inventory is looked for:
    there, then in the folder.
    """
    return {
        project: (pages, (None, str(folder / f"{project}.inv")))
        for project, (pages, _) in PROJECTS.items()
    }
