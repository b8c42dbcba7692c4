"""Loads an object that a user names in settings: "file.py:name" or "package.module:name".

Loading runs the named file, so trust a reference as much as the settings that hold it. Left out: checks of the object,
which the caller makes.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from plaudit.support.fields import nearest
from plaudit.support.paths import at_home

_SOURCES: dict[str, bytes] = {}
"""{module name: source of the file, as it was run}."""
_SENT: dict[str, bytes] = {}
"""{module name: source to run in place of the file}, from `run_as_sent`."""


def load_object(reference: str) -> Any:
    """Return the object that `reference` names. A file is run at its first use, and again only if it has
    changed."""
    place, separator, name = reference.rpartition(":")
    if not separator or not place or not name:
        raise ValueError(f"{reference!r} names no object: write 'file.py:name' or 'package.module:name'.")
    module = load_file(place, reference) if place.endswith(".py") else _module_of_name(place, reference)
    found: Any = module
    for part in name.split("."):
        if part not in (there := dir(found)):
            public = [name for name in there if not name.startswith("_")]
            raise AttributeError(f"{reference!r}: {place} has no {part!r}{nearest(part, public)}")
        found = getattr(found, part)
    return found


def load_file(named: str, reference: str = "") -> ModuleType:
    """Run a Python file and return its module; errors call it `reference`. Raises FileNotFoundError, ImportError for a
    file that is not Python, and whatever the file itself raises."""
    path, reference = at_home(named).resolve(), reference or named
    module_name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if module_name not in _SENT and not path.is_file():
        raise FileNotFoundError(f"{reference!r}: there is no file {path}. Paths are relative to the current folder.")
    source = _SENT[module_name] if module_name in _SENT else path.read_bytes()
    if module_name in sys.modules and _SOURCES.get(module_name) == source:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{reference!r}: {path} cannot be loaded as a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before running it: dataclasses look their module up by name
    _SOURCES[module_name] = source
    try:  # not by the loader: it would use an outdated .pyc if the file's size and its time in seconds are equal
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        del sys.modules[module_name]
        if isinstance(error, SyntaxError):
            raise _unreadable(error, reference) from error
        raise
    return module


def _module_of_name(place: str, reference: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place == error.name or place.startswith(error.name + ".")):
            raise  # the module is there; something that it imports is not
        message = f"{reference!r}: there is no module {place!r}. A file is named with its ending: 'file.py:name'."
        raise ModuleNotFoundError(message, name=error.name) from error
    except SyntaxError as error:
        raise _unreadable(error, reference) from error


def _unreadable(error: SyntaxError, reference: str) -> ImportError:
    """Return an error that names the file that Python cannot read: the one named, or one that it imports."""
    place = error.filename or reference
    line = f", line {error.lineno}" if error.lineno else ""
    return ImportError(f"{reference!r}: Python cannot read {place}{line}: {error.msg}. Correct that line.")


def sources() -> dict[str, bytes]:
    """Return {path: source} of each file that was loaded, for `run_as_sent` in another process."""
    return dict(_SOURCES)


def run_as_sent(sources: Mapping[str, bytes]) -> None:
    """From now on, run these sources in place of the files, even if the files differ or do not exist here."""
    _SENT.update(sources)


class PluginError(ValueError):
    """A plugin file cannot be loaded, or registers something that is refused."""


def load_plugins(paths: Sequence[str]) -> None:
    """Run these plugin files. Raises PluginError, with file and line, for an ImportError, OSError or
    ValueError; other exceptions pass through."""
    for path in paths:
        try:
            load_file(path)
        except (ImportError, OSError, ValueError) as error:
            file = str(at_home(path).resolve())
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
            within = f"{path!r}, line {lines[-1]}: " if lines else ""  # else the error names the file itself
            raise PluginError(f"{within}{error}") from error


def registered_again(thing: object, before: object) -> bool:
    """True if `thing` may replace `before` in a registry. Both must be of one module and either have one qualified
    name (a notebook cell was rerun), or `before` is no longer defined because its file was reloaded."""
    (module, name), (older, called) = _place(thing), _place(before)
    if thing is before or module is None or name is None or called is None or module != older:
        return thing is before
    gone = module in _SOURCES and called.isidentifier() and called not in dir(sys.modules.get(module))
    return name == called or gone


def name_of(thing: object) -> str:
    """Return the name of a function or class, or else that of its class."""
    return str(getattr(thing, "__name__", type(thing).__name__))


def _place(thing: object) -> tuple[str | None, str | None]:
    while isinstance(thing, functools.partial):
        thing = thing.func
    return getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)


def known_here_alone(thing: object, plugins: Sequence[str]) -> bool:
    """True if another process that loads these plugin files would lack `thing`: a script or notebook defines it, or
    a module other than Plaudit's does and there are no plugin files."""
    module = _place(thing)[0] or ""
    return module == "__main__" or not (plugins or module.partition(".")[0] == "plaudit")
