"""Fast calls with small plain values: arguments and result are one pickle each.

    @plain method, arguments -> dumps -> bytes -> loads -> the worker -> result -> dumps -> bytes -> loads

Ray would serialize each argument by itself, and Python's own way to pickle frozen dataclasses with slots takes several
times as long. Only what a run's own processes sent is ever read. Left out: references, and large tensors.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])
_PLAIN: set[str] = set()


def plain(method: Method) -> Method:
    """Decorator of a method whose arguments and result are plain values and hold no references."""
    _PLAIN.add(method.__qualname__)
    return method


def is_plain(method: Callable[..., Any]) -> bool:
    return method.__qualname__ in _PLAIN


def dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def loads(sent: bytes) -> Any:
    return pickle.loads(sent)


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        kind: Any = type(thing)
        values = _values(kind)
        return NotImplemented if values is None else (_made, (kind, values(thing)))


@cache
def _values(kind: Any) -> Callable[[Any], Any] | None:
    """Return a getter of all field values of a slotted dataclass with two or more fields; None for other classes."""
    slots = kind.__dict__.get("__slots__", ()) if is_dataclass(kind) else ()
    return attrgetter(*slots) if len(slots) > 1 and [*slots] == [one.name for one in fields(kind)] else None


def _made(kind: Any, values: tuple[Any, ...]) -> Any:
    made, put = object.__new__(kind), object.__setattr__
    for name, value in zip(kind.__slots__, values, strict=True):
        put(made, name, value)
    return made
