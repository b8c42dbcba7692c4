"""Typed access to one raw row. Any JSON value may stand in any column, so every read checks and raises `DataError`.

Leaves out which columns belong together: that is `dialects.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]
"""One turn of a chat: `role` and `content`."""

ROLE_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "developer": "system"}
ROLES = ("system", "user", "assistant", "tool")
UNREAD = {
    **dict.fromkeys(("tool_calls", "function_call"), "write the call into the content as text"),
    **dict.fromkeys(
        ("reasoning_content", "reasoning", "thinking"),
        "write the thoughts into the content, as the model is to answer, or leave them out",
    ),
}
"""What a turn may hold beside its content, and what to do: chat templates would show it, and it would be lost."""


class DataError(ValueError):
    """Data that cannot be used. The message holds where it stands, what is wrong and what is allowed."""

    def __init__(self, reason: str, where: str = "") -> None:
        # a column's name, quoted in it, may be no text that can be written
        reason = reason.encode("utf-8", "backslashreplace").decode()
        super().__init__(f"{where}: {reason}" if where else reason)
        self.reason = reason
        self.where = where


@dataclass(frozen=True, slots=True)
class Fields:
    """The columns of a row that hold something (a null is an absent column), and where the row stands."""

    row: Mapping[str, Any]
    where: str

    def error(self, reason: str) -> DataError:
        return DataError(reason, self.where)

    def has(self, name: str) -> bool:
        return self.row.get(name) is not None

    def text(self, *names: str, empty: bool = True) -> str:
        """The text in the first of these columns that is there; a number counts as text in `answer`."""
        name = self._present(names)
        value = self.row[name]
        if name == "answer" and isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        return self._checked_text(value, name, empty=empty)

    def optional_text(self, *names: str) -> str:
        return self.text(*names) if any(self.has(name) for name in names) else ""

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts, none of them empty."""
        values = self.row[self._present((name,))]
        if not isinstance(values, list | tuple):
            raise self.error(f"{name!r} is {shown(values)}; it must be a list of texts.")
        if not values:
            raise self.error(f"{name!r} is an empty list; it must hold at least one text.")
        return tuple(self._checked_text(value, f"{name}[{i}]", empty=False) for i, value in enumerate(values))

    def number(self, name: str, default: float = 0.0) -> float:
        """A finite number, or the default where the column is absent."""
        if not self.has(name):
            return default
        return self._checked_number(self.row[name], name)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """One number for all of `count`, or a list with one for each; zeros where the column is absent."""
        value = self.row.get(name)
        if not isinstance(value, list | tuple):
            return (self.number(name),) * count
        if len(value) != count:
            raise self.error(f"{name!r} has {len(value)} entries for {count} pairs; give one for each.")
        return tuple(self._checked_number(entry, f"{name}[{i}]") for i, entry in enumerate(value))

    def is_chat(self, name: str) -> bool:
        return isinstance(self.row.get(name), list | tuple)

    def messages(self, *names: str) -> tuple[Message, ...]:
        """A non-empty list of chat turns: {"role", "content"} or {"from", "value"}."""
        name = self._present(names)
        turns = self.row[name]
        if not isinstance(turns, list | tuple) or not turns:
            raise self.error(f'{name!r} is {shown(turns)}; it must be a list of {{"role": ..., "content": ...}}.')
        return tuple(self._message(turn, f"{name}[{i}]") for i, turn in enumerate(turns))

    def _present(self, names: Sequence[str]) -> str:
        for name in names:
            if self.has(name):
                return name
        wanted = " or ".join(repr(name) for name in names)
        nulls = sorted(str(name) for name, value in self.row.items() if value is None)
        there = sorted(str(name) for name, value in self.row.items() if value is not None)
        note = f" (null: {', '.join(nulls)})" if nulls else ""
        raise self.error(f"column {wanted} is missing; the row has {', '.join(there) or 'none'}{note}.")

    def _message(self, turn: Any, name: str) -> Message:
        if not isinstance(turn, Mapping):
            raise self.error(f'{name} is {shown(turn)}; it must be {{"role": ..., "content": ...}}.')
        role = turn.get("role", turn.get("from"))
        content = turn.get("content", turn.get("value"))
        if isinstance(role, str):
            role = ROLE_NAMES.get(role, role)
        if not isinstance(role, str) or role not in ROLES:
            raise self.error(f"{name} has the role {shown(role)}; allowed are {', '.join(ROLES)}.")
        for key, remedy in UNREAD.items():
            if not blank(turn.get(key)):
                raise self.error(f"{name} has {key}, which is not read; {remedy}.")
        if isinstance(content, list | tuple):
            content = self._joined_parts(content, name)
        return {"role": role, "content": self._checked_text(content, f"{name}.content")}

    def _joined_parts(self, parts: Sequence[Any], name: str) -> str:
        for part in parts:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise self.error(f'{name}.content has the part {shown(part)}; only {{"type": "text"}} parts are read.')
        return "".join(part["text"] for part in parts)

    def _checked_text(self, value: Any, name: str, *, empty: bool = True) -> str:
        if not isinstance(value, str):
            raise self.error(f"{name!r} is {shown(value)}; it must be text.")
        if not empty and not value.strip():
            raise self.error(f"{name!r} is empty; it must hold some text.")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise self.error(
                f"{name!r} has half a surrogate pair at character {error.start}, not valid text."
            ) from None
        return value

    def _checked_number(self, value: Any, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{name!r} is {shown(value)}; it must be a number.")
        if (isinstance(value, int) and abs(value) > 1e300) or not math.isfinite(value):
            raise self.error(f"{name!r} is {shown(value)}; it must be a finite number.")
        return float(value)


def blank(value: Any) -> bool:
    """Whether a further column or key says nothing: null, NaN (a table's null), an empty text or list, JSON of one, or
    an object of nothing else."""
    if isinstance(value, str):
        return value.strip() in ("", "null", "[]", "{}")
    if isinstance(value, Mapping):
        return all(map(blank, value.values()))
    if hasattr(value, "__len__"):  # NumPy's arrays too, which have no truth value
        return len(value) == 0
    return not value or value != value


def shown(value: Any) -> str:
    """A value as an error message quotes it: its kind and the beginning of it."""
    if value is None:
        return "null"
    kinds = {bool: "the truth value", int: "the number", float: "the number", str: "the text", dict: "an object"}
    kind = kinds.get(type(value), "a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}")
    if isinstance(value, Mapping | list | tuple):
        return f"{kind} of {len(value)}"
    text = repr(value)
    return f"{kind} {text if len(text) <= 40 else text[:37] + '...'}"
