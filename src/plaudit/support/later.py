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
    """A stand-in for a module or something in it. Calling, extending or testing against it imports the real one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        if name == "__version__":
            return getattr(self._real(), name)
        return Later(f"{self.__name__}.{name}") if _waiting(self.__name__) else getattr(self._real(), name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._real()(*args, **named)

    def __instancecheck__(self, thing: object) -> bool:
        return isinstance(thing, self._real())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real(),)

    def _real(self) -> Any:
        top, *path = self.__name__.split(".")
        if _waiting(top):
            _no_longer(top)
        found: Any = importlib.import_module(top)
        for name in path:
            found = getattr(found, name)
        return found


def _waiting(name: str) -> bool:
    return isinstance(sys.modules.get(name.partition(".")[0]), Later)


@contextmanager
def postponed(name: str) -> Iterator[None]:
    """While active, importing this library or its submodules gives a `Later`, unless the library is loaded already."""
    if name in sys.modules:
        yield
        return
    sys.meta_path.insert(0, _Finder(name))
    try:
        yield
    finally:
        _no_longer(name)


def _no_longer(name: str) -> None:
    """Stop postponing a library: its next import loads it."""
    sys.meta_path[:] = [one for one in sys.meta_path if not (isinstance(one, _Finder) and one.name == name)]
    for module in [module for module, there in sys.modules.items() if isinstance(there, Later)]:
        if module.partition(".")[0] == name:
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
        """Do nothing: the stand-in has no code to run."""
