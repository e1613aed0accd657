"""Change a module of another library once it has been imported, whoever imports it.

Importing such a library for that alone would take long. So a finder at the head of
``sys.meta_path`` waits for the module, finds it where the other finders do, and lets its
loader change the module after it has executed it.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["after_import", "when_imported"]


def when_imported(name: str, change: Callable[[ModuleType], None]) -> None:
    """Change a module now if it is imported, or once it is."""
    module = sys.modules.get(name)
    if module is not None:
        change(module)
    else:
        after_import(name, change)


def after_import(
    name: str, change: Callable[[ModuleType], None], *, ignored_warning: str | None = None
) -> None:
    """Change a module when it is imported, unless something waits for it already.

    Args:
        name: of the module.
        change: what to do with it. It is called at every execution of the module.
        ignored_warning: the beginning of warnings of the import that users can't act
            on, as a regular expression.
    """
    for finder in sys.meta_path:
        if isinstance(finder, _Finder) and finder.name == name:
            return
    sys.meta_path.insert(0, _Finder(name, change, ignored_warning))


class _Finder(MetaPathFinder):
    """Finds one module where other finders do."""

    def __init__(
        self, name: str, change: Callable[[ModuleType], None], ignored_warning: str | None
    ) -> None:
        self.name = name
        self._change = change
        self._ignored_warning = ignored_warning

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        # the finders before this one were asked already
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._change_after_execution(spec.loader)
                return spec
        return None

    def _change_after_execution(self, loader: Any) -> None:
        """Let a loader change the module once it has executed it."""
        execute = loader.exec_module

        @wraps(execute)
        def execute_and_change(module: ModuleType) -> None:
            with warnings.catch_warnings():
                if self._ignored_warning is not None:
                    warnings.filterwarnings("ignore", message=self._ignored_warning)
                execute(module)
            self._change(module)

        loader.exec_module = execute_and_change
