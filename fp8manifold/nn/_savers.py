"""Other libraries' ``save_pretrained``, which would write codes without saying so.

``save_pretrained`` of a class writes the module's ``state_dict()`` and settings that do
not mention codes. The methods of the classes in a quantised model are therefore put
behind a guard: it asks whether the model can be saved, and refuses it or prepares it.
Savers that only write the state (``torch.save``, ``safetensors.torch.save_model``,
Lightning, accelerate) need none: models with the same layers read it again, and others
refuse its shapes.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import nn

from fp8manifold.nn._parts import is_in_codes
from fp8manifold.nn._selection import adapters_of

_SAVER_IS_GUARDED: Final = "_fp8_is_guarded"
_FOLDER: Final = "save_directory"
"""What transformers calls the folder."""
Preparation = Callable[[Any, Mapping[str, Any]], None]
Saver = Callable[[Callable[..., Any], Any, Mapping[str, Any]], Any]
#: By the name of a class: what saves its models, given their own ``save_pretrained``
#: and its arguments by name.
_SAVERS: Final[dict[str, Saver]] = {}
#: By the name of a class: what makes its models ready to be saved, given the arguments
#: of ``save_pretrained`` by their names.
_PREPARE: Final[dict[str, Preparation]] = {}
# `_doors/quantizer.py` fills it and `_PREPARE` when it is imported.
_WHEN_GUARDED: Final[list[Callable[[nn.Module], None]]] = []


def prepare_with(kind: str, prepare: Preparation) -> None:
    """Let models of a class be saved with codes, after they are prepared."""
    _PREPARE[kind] = prepare


def save_with(kind: str, save: Saver) -> None:
    """Let models of a class be saved by a function."""
    _SAVERS[kind] = save


def when_guarded(act: Callable[[nn.Module], None]) -> None:
    """Call a function with every model whose savers are put behind the guard."""
    _WHEN_GUARDED.append(act)


def guard_savers(model: nn.Module) -> None:
    """Put ``save_pretrained`` of all classes in a model behind the guard, once."""
    for act in _WHEN_GUARDED:
        act(model)
    kinds: set[type[Any]] = set()
    for module in model.modules():
        kinds.update(type(module).__mro__)
    for kind in kinds:
        guard_saver(kind)


def guard_saver(kind: Any) -> None:
    """Put ``save_pretrained`` of a class behind the guard, once."""
    save = vars(kind).get("save_pretrained")
    if callable(save) and not hasattr(save, _SAVER_IS_GUARDED):
        # of the class: an attribute of the model would be a cycle
        kind.save_pretrained = _guarded(save)


def _guarded(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_pretrained(model: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(model, nn.Module):
            return save(model, *args, **options)
        arguments = _named(inspect.signature(save).bind_partial(model, *args, **options))
        saver = next(
            (_SAVERS[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in _SAVERS),
            None,
        )
        if saver is None:
            prepare(model, arguments)
        elif _FOLDER in arguments:
            return saver(save, model, arguments)
        # A class's own method with other names calls that of its base, which is guarded.
        return save(model, *args, **options)

    setattr(save_pretrained, _SAVER_IS_GUARDED, True)
    return save_pretrained


def _named(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return all arguments but the model by name; none that have no name."""
    named: dict[str, Any] = {}
    parameters = list(bound.signature.parameters.values())
    for parameter in parameters[1:]:
        if parameter.name not in bound.arguments:
            continue
        value = bound.arguments[parameter.name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            named[parameter.name] = value
    return named


def prepare(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Prepare a model for its ``save_pretrained``, or refuse it."""
    for kind in type(model).__mro__:
        if kind.__name__ in _PREPARE:
            _PREPARE[kind.__name__](model, arguments)
            return
    names = [name for name, parameter in model.named_parameters() if is_in_codes(parameter)]
    if any(kind.__name__ == "PeftModel" for kind in type(model).__mro__):
        names = _saved_by_peft(model, names)
    if names:
        library = type(model).__module__.partition(".")[0]
        raise RuntimeError(
            f"{names[0]!r} of this {type(model).__name__} is in codes, which save_pretrained of "
            f"{library} would write as numbers: save its state_dict() with "
            f"safetensors.torch.save_model or torch.save, or call fm.dequantize_model(model) first"
        )


def _saved_by_peft(model: nn.Module, names: list[str]) -> list[str]:
    """Return the parameters that PEFT writes: of adapters and ``modules_to_save``."""
    parts = adapters_of(model).keys()
    return [
        name
        for name in names
        if name.rpartition(".")[0] in parts or ".modules_to_save." in f".{name}"
    ]
