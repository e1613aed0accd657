"""Laws: a test of many formats, scales or classes is one case, which loops over them
and says at which it fails.
"""

import inspect
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest
from covering import covering

Case = dict[str, Any]


def each(
    names: str | Sequence[str], values: Iterable[Any], ids: Any = None
) -> Callable[[Any], Any]:
    """``pytest.mark.parametrize`` within one case; several of them loop over every
    combination.

    Under ``pytest.mark.covering`` the default run has a covering sample of these, and a
    slow case the rest. So it has of values that are marked slow.
    """
    names = (names,) if isinstance(names, str) else tuple(names)
    table = [
        value if hasattr(value, "marks") else pytest.param(*(value if len(names) > 1 else (value,)))
        for value in values
    ]
    known = [*map(ids, (value.values[0] for value in table))] if callable(ids) else list(ids or ())
    told = known or [value.id or ", ".join(map(repr, value.values)) for value in table]

    def decorate(test: Any) -> Any:
        function, loops = getattr(test, "law", (test, ()))

        def law(cases: Sequence[Case], **fixtures: Any) -> None:
            skipped: list[BaseException] = []
            for said, case in cases:
                try:
                    function(**fixtures, **case)
                except pytest.skip.Exception as reason:
                    skipped.append(reason)
                except BaseException as error:
                    error.add_note(f"at {said}")
                    raise
            if len(skipped) == len(cases) and skipped:
                raise skipped[0]

        own = [(names, table, told), *loops]
        looped = {name for loop in own for name in loop[0]}
        parameters = inspect.signature(function).parameters.values()
        others = [parameter for parameter in parameters if parameter.name not in looped]
        cases = inspect.Parameter("cases", inspect.Parameter.KEYWORD_ONLY)
        vars(law).update(vars(function) | vars(test))
        for name in ("hypothesis", "is_hypothesis_test", "__wrapped__"):
            vars(law).pop(name, None)
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(law, name, getattr(function, name))
        law.law = (function, own)  # type: ignore[attr-defined]
        law.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in others] + [cases]
        )
        return law

    return decorate


def loop_inside(metafunc: pytest.Metafunc) -> None:
    """Give a law its cases: those of the default run, and where there are others a slow
    case of the rest.
    """
    if not hasattr(metafunc.function, "law"):
        return
    _, loops = metafunc.function.law
    every: list[tuple[str, Case]] = []
    slow: set[int] = set()
    places: list[dict[str, Hashable]] = []
    for at, chosen in enumerate(itertools.product(*(range(len(table)) for _, table, _ in loops))):
        case: Case = {}
        for place, (names, table, _) in zip(chosen, loops, strict=True):
            case |= zip(names, table[place].values, strict=True)
            slow |= {at} if table[place].marks else set()
        places.append(
            {
                name: value if isinstance(value, str) else place
                for place, (names, table, _) in zip(chosen, loops, strict=True)
                for name, value in zip(names, table[place].values, strict=True)
            }
        )
        every.append(
            (
                ", ".join(said[place] for place, (_, _, said) in zip(chosen, loops, strict=True)),
                case,
            )
        )
    marker = metafunc.definition.get_closest_marker("covering")
    if marker and not metafunc.config.getoption("--full"):
        quick = [at for at in range(len(every)) if at not in slow]
        sample = (
            {quick[at] for at in covering([places[at] for at in quick], *marker.args)}
            if quick
            else set()
        )
        slow = {*range(len(every))} - sample
    tiers = {"each": [at for at in range(len(every)) if at not in slow], "rest": sorted(slow)}
    metafunc.parametrize(
        "cases",
        [
            pytest.param(
                [every[at] for at in chosen],
                id=tier,
                marks=[pytest.mark.slow] if tier == "rest" else [],
            )
            for tier, chosen in tiers.items()
            if chosen
        ],
    )
