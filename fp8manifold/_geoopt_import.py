"""geoopt, which is imported when a manifold is first asked for.

Importing geoopt takes longer than importing this library, as it imports scipy.optimize
and scripts functions. Most users never ask for a manifold. So the classes of this
library that inherit from geoopt's begin with a stand-in as their base, and the import
of geoopt puts its class there::

    before    FP8Parameter(FP8Tensor, ParameterStandIn)
    after     FP8Parameter(FP8Tensor, geoopt.ManifoldParameter)

The same happens to ``GridParameter`` and ``StiffnessManifold``. Python asks for the
bases of a class whenever it needs them, so they change for the instances that there
are: a weight that was made before the import is a ``geoopt.ManifoldParameter`` after
it, for ``isinstance`` and for geoopt's optimizers, which step it on its manifold. The
classes are the same objects under the same names, before and after. Pickles, copies and
compiled code see no difference.

- ``follow_geoopt``: whoever imports geoopt, the bases change as its import ends
  (``after_import``). The import warns of nothing: geoopt
  scripts one helper with ``torch.jit.script``, which torch has deprecated, and users
  can't act on that.
- ``load_geoopt``: what needs geoopt imports it. These are the methods of the stand-ins:
  to make a manifold, and those that geoopt's parameters have.
- ``tensor_kind``: what a parameter on a manifold is an instance of. Without the import
  nobody has one of geoopt's own.
"""

import abc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self

from torch import nn

from fp8manifold._base.after_import import after_import

__all__ = [
    "PARAMETER_METHODS",
    "Manifold",
    "ManifoldParameter",
    "follow_geoopt",
    "load_geoopt",
    "tensor_kind",
]

PARAMETER_METHODS: Final = (
    "dist",
    "expmap",
    "expmap_transp",
    "inner",
    "logmap",
    "proj_",
    "proju",
    "retr",
    "retr_transp",
    "transp",
    "transp_follow_expmap",
    "transp_follow_retr",
    "unpack_tensor",
)
"""The public methods of ``geoopt.ManifoldTensor``. ``dist`` and ``inner`` hide torch's."""


class ManifoldStandIn(nn.Module, metaclass=abc.ABCMeta):
    """A base in the place of ``geoopt.Manifold``, until the first manifold is made."""

    # ``__new__`` would hide the signature of a manifold's ``__init__``
    def __init__(self) -> None:
        load_geoopt().Manifold.__init__(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        load_geoopt().Manifold.__setstate__(self, state)


class ParameterStandIn(nn.Parameter):
    """A base in the place of ``geoopt.ManifoldParameter``."""

    def __new__(cls: type[Self], *args: Any, **options: Any) -> Self:
        parameter: Self = load_geoopt().ManifoldParameter.__new__(cls, *args, **options)
        return parameter


def _method_of_geoopt(name: str) -> Callable[..., Any]:
    def method(self: ParameterStandIn, *args: Any, **options: Any) -> Any:
        return getattr(load_geoopt().ManifoldParameter, name)(self, *args, **options)

    method.__name__ = name
    method.__qualname__ = f"{ParameterStandIn.__name__}.{name}"
    return method


for _name in PARAMETER_METHODS:
    setattr(ParameterStandIn, _name, _method_of_geoopt(_name))

if TYPE_CHECKING:
    from geoopt import Manifold, ManifoldParameter
else:
    Manifold, ManifoldParameter = ManifoldStandIn, ParameterStandIn

tensor_kind: type[Any] = ParameterStandIn
"""``geoopt.ManifoldTensor`` once it is imported. Read it from this module."""


def load_geoopt() -> Any:
    """Import geoopt, and return it."""
    import geoopt

    # another finder may have come before ours
    _inherit_from(geoopt)
    return geoopt


def follow_geoopt() -> None:
    """Change the bases of the classes that there are, now or when geoopt is imported."""
    if sys.modules.get("geoopt") is not None:
        load_geoopt()
    else:
        after_import("geoopt", _inherit_from, ignored_warning="`torch.jit.script`")


def _inherit_from(geoopt: Any) -> None:
    """Put geoopt's classes in the place of the stand-ins."""
    global tensor_kind
    tensor_kind = geoopt.ManifoldTensor
    _replace_base(ManifoldStandIn, geoopt.Manifold)
    _replace_base(ParameterStandIn, geoopt.ManifoldParameter)


def _replace_base(stand_in: type, base: type) -> None:
    kinds: list[Any] = stand_in.__subclasses__()
    for kind in kinds:
        kind.__bases__ = tuple([base if old is stand_in else old for old in kind.__bases__])
