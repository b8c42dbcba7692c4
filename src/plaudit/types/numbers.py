"""Numbers of an answer: token ids, log-probs, versions, without an object for each."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any


class Numbers(array):  # type: ignore[type-arg]  # Python 3.11 takes none
    """A tuple of numbers without an object for each: "i" tokens and versions, "f" log-probs, "b" what is true."""

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        return Numbers(self.typecode, found) if isinstance(place, slice) else found

    def __add__(self, other: Any) -> Any:
        return (*self, *other)

    def __radd__(self, other: Any) -> Any:
        return (*other, *self)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence | array) else NotImplemented

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))
