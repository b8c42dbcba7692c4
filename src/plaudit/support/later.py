"""Import classes without the heavy library that their methods use.

    with postponed("torch"):
        import plaudit.algorithms        torch is imported when one of its functions is called, if ever

`plaudit settings` and `plaudit check` read the methods' settings and answer before torch would have been loaded.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class Later(ModuleType):
    """Stands for a module or something in it, and asks the real one at each use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Later(f"{self.__name__}.{name}") if _waiting(self.__name__) else getattr(self._real(), name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._real()(*args, **named)

    def __instancecheck__(self, thing: object) -> bool:
        return isinstance(thing, self._real())

    def _real(self) -> Any:
        top, *path = self.__name__.split(".")
        found: Any = importlib.import_module(top)
        for name in path:
            found = getattr(found, name)
        return found


def _waiting(name: str) -> bool:
    return isinstance(sys.modules.get(name.partition(".")[0]), Later)


@contextmanager
def postponed(name: str) -> Iterator[None]:
    """Within, an import of this library or of a part of it gives a `Later`, unless it has been loaded already. What is
    imported within may not derive a class from the library's."""
    if name in sys.modules:
        yield
        return
    before = dict.fromkeys(sys.modules)
    finder = _Finder(name)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for module in sys.modules.keys() - before.keys():
            if isinstance(sys.modules[module], Later):
                del sys.modules[module]


class _Finder:
    """Gives a `Later` for a library and every part of it."""

    def __init__(self, name: str):
        self.name = name

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != self.name:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        return Later(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""
