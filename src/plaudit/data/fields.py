"""Typed access to one raw row. A column may hold any JSON value, so every read checks it and raises `DataError`.

Leaves out which columns belong together: that is `dialects.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from plaudit.support.visible import rounded, visible

Message = dict[str, Any]
"""One turn of a chat: `role`, the text `content`, and keys of `KEPT`. `train` is False for an assistant's turn that is
not to be trained."""

ROLE_NAMES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant"),
}
SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")
IMAGES = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of images, video or audio, which a language model of text cannot read."""
KEPT = ("reasoning_content", "tool_calls", "name", "tool_call_id")
"""Keys that a turn may hold for the chat template, beside role and content."""
MARKS = ("weight", "train", "trainable", "loss", "loss_mask", "training")
"""Keys of a turn that say whether it is trained, as OpenAI, our own files, others and Axolotl write them."""
DETAIL = "train_detail"
"""Axolotl's key of the parts of a turn that are trained."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which data sets have a turn's thoughts. The first is the one used here."""
TURN = ("role", "content", "from", "value", "function_call", *KEPT, *THOUGHTS, *MARKS, DETAIL)
CALL = ("id", "type", "function")
TOOL = ("name", "description", "parameters", "input_schema", "type", "return")
"""Keys of turns, calls and tools that are read."""
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
"""Columns of a chat's row that are passed to the chat template."""
TEMPLATE_OWN = ("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize")
"""Template arguments that Plaudit passes itself, so that `chat_template_kwargs` may not set them."""


class DataError(ValueError):
    """Data that cannot be used. The message says where it is, what is wrong and what is allowed."""

    def __init__(self, reason: str, where: str = "") -> None:
        reason = visible(reason, line=True)  # names of columns and files may hold anything
        super().__init__(f"{visible(where, line=True)}: {reason}" if where else reason)
        self.reason = reason
        self.where = where


@dataclass(frozen=True, slots=True)
class Fields:
    """The columns of a row, and where the row is. A null counts as an absent column."""

    row: Mapping[str, Any]
    where: str

    def error(self, reason: str) -> DataError:
        return DataError(reason, self.where)

    def has(self, name: str) -> bool:
        return self.row.get(name) is not None

    def text(self, *names: str, empty: bool = True) -> str:
        """Return the text in the first of these columns that the row has. In `answer` a number counts as text."""
        name = self._present(names)
        value = self.row[name]
        if name == "answer" and isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        return self._checked_text(value, name, empty=empty)

    def optional_text(self, *names: str) -> str:
        return self.text(*names) if any(self.has(name) for name in names) else ""

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts, at least one and none of them empty."""
        values = self.row[self._present((name,))]
        if not isinstance(values, list | tuple):
            raise self.error(f"{name!r} is {shown(values)}; it must be a list of texts.")
        if not values:
            raise self.error(f"{name!r} is an empty list; it must hold at least one text.")
        return tuple(self._checked_text(value, f"{name}[{i}]", empty=False) for i, value in enumerate(values))

    def number(self, name: str) -> float:
        """Return a finite number; 0 if the column is absent."""
        return self._checked_number(self.row[name], name) if self.has(name) else 0.0

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return `count` numbers, from a list or one number for all of them; zeros if the column is absent."""
        value = self.row.get(name)
        if not isinstance(value, list | tuple):
            return (self.number(name),) * count
        if len(value) != count:
            raise self.error(f"{name!r} has {len(value)} entries for {count} pairs; give one for each.")
        return tuple(self._checked_number(entry, f"{name}[{i}]") for i, entry in enumerate(value))

    def is_chat(self, name: str) -> bool:
        return isinstance(self.row.get(name), list | tuple)

    def messages(self, *names: str) -> tuple[Message, ...]:
        """Return a chat's turns, at least one, from {"role", "content"} or {"from", "value"}. Their keys of `MARKS` say
        which are trained."""
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
        further = self._further(turn, name)
        if isinstance(role, str):
            role = ROLE_NAMES.get(role, role)
        if not isinstance(role, str) or role not in ROLES:
            raise self.error(f"{name} has the role {shown(role)}; allowed are {', '.join(ROLES)}.")
        if isinstance(content, list | tuple):
            content = self._joined_parts(content, name)
        if content is None and "tool_calls" in further:
            content = ""
        if role == "assistant" and not self._trained(turn, name):
            further["train"] = False
        return {"role": role, "content": self._checked_text(content, f"{name}.content"), **further}

    def _further(self, turn: Mapping[str, Any], name: str) -> Message:
        """Return a turn's entries under the keys of `KEPT`, that is, besides role and content."""
        if not blank(turn.get("function_call")):
            raise self.error(f"{name} has function_call, which is not read; write it as tool_calls.")
        found: Message = {}
        thoughts = [key for key in THOUGHTS if not blank(turn.get(key))]
        if thoughts:
            found[THOUGHTS[0]] = self._checked_text(turn[thoughts[0]], f"{name}.{thoughts[0]}")
        if not blank(turn.get("tool_calls")):
            found["tool_calls"] = [_call(call) for call in listed(turn["tool_calls"])]
            if None in found["tool_calls"]:
                raise self.error(
                    f'{name}.tool_calls must be a list of {{"function": {{"name": ..., "arguments": ...}}}}.'
                )
        for key in ("name", "tool_call_id"):
            if not blank(turn.get(key)):
                found[key] = self._checked_text(turn[key], f"{name}.{key}")
        return found

    def _trained(self, turn: Mapping[str, Any], name: str) -> bool:
        """False if one of a turn's keys says that it is not to be trained."""
        marks = {key: turn[key] for key in MARKS if turn.get(key) is not None}
        if not blank(parts := turn.get(DETAIL)):
            details = [part.get("train") if isinstance(part, Mapping) else None for part in listed(parts)]
            if len(set(details)) != 1:
                raise self.error(f"{name}.{DETAIL} trains parts of a turn, which is not supported; train all or none.")
            marks[DETAIL] = details[0]
        for key, value in marks.items():
            if not isinstance(value, int | float) or value not in (0, 1):
                raise self.error(f"{name}.{key} is {shown(value)}; it must be 0, 1, false or true.")
        return all(marks.values())

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
        if isinstance(value, str):  # a cell of a CSV file
            with suppress(ValueError):
                value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{name!r} is {shown(value)}; it must be a number.")
        if (isinstance(value, int) and abs(value) > 1e300) or not math.isfinite(value):
            raise self.error(f"{name!r} is {shown(value)}; it must be a finite number.")
        return float(value)


def shared_count(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the number of equal entries at the beginning of two sequences."""
    for i, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return i
    return min(len(one), len(other))


def template_arguments(row: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return the chat template's arguments in a row: the columns `tools` and `chat_template_kwargs`, also as JSON."""
    found: dict[str, Any] = {}
    if not blank(tools := row.get("tools")):
        found["tools"] = listed(tools)
        if not found["tools"] or not all(isinstance(tool, Mapping) for tool in found["tools"]):
            raise DataError(f"'tools' is {shown(tools)}; it must be a list of objects, or JSON of one.", where)
    if not blank(text := row.get("chat_template_kwargs")):
        values = _parsed(text)
        if not isinstance(values, Mapping) or any(name in TEMPLATE_OWN for name in values):
            raise DataError(
                f"'chat_template_kwargs' is {shown(text)}; it must be an object without {', '.join(TEMPLATE_OWN)}.",
                where,
            )
        found |= values
    return found


def tool_inner(tool: Any) -> Mapping[str, Any]:
    """Return the object "function" in a tool or a call, or else the tool or call itself; {} if that is no object."""
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return inner if isinstance(inner, Mapping) else {}


def tool_name(tool: Any) -> str:
    """Return the name of a tool, or of the tool that a call calls; "" if it has none."""
    name = tool_inner(tool).get("name")
    return name if isinstance(name, str) else ""


def listed(value: Any) -> list[Any]:
    """Return a list, a NumPy array or JSON of a list as a list; [] for other values."""
    value = _parsed(value)
    return [*value] if isinstance(value, Iterable) and not isinstance(value, str | Mapping) else []


def _call(call: Any) -> dict[str, Any] | None:
    """Return a call as chat templates read it: arguments that are JSON of an object become it. None without a name."""
    if not tool_name(call):
        return None
    inner = {key: value for key, value in call.get("function", call).items() if value is not None}
    arguments = _parsed(inner.get("arguments"))
    inner["arguments"] = arguments if isinstance(arguments, Mapping) else inner.get("arguments") or {}
    outer = {key: value for key, value in call.items() if key == "id" and value is not None}
    return {**outer, "type": "function", "function": inner}


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def table_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's row without nulls inside its objects. Arrow adds these to give all objects of a column the same
    keys; an author's own nulls cannot be told from them."""
    return {str(name): _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _without_nulls(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(entry) for entry in value]
    return value


def unread_keys(turn: Any) -> Iterator[str]:
    """Yield keys of a chat's turn and its calls that are not read, such as "turns' id"; nothing for other values."""
    if not isinstance(turn, Mapping) or not ("role" in turn or "from" in turn):
        return
    for key, value in turn.items():
        if key not in TURN and not blank(value):
            yield f"turns' {key}"
    for call in listed(turn.get("tool_calls")):
        inner = call.get("function", call) if isinstance(call, Mapping) else {}
        for keys, known in ((call if inner is not call else {}, CALL), (inner, (*CALL, "name", "arguments"))):
            for key, value in keys.items() if isinstance(keys, Mapping) else ():
                if key not in known and not blank(value):
                    yield f"calls' {key}"


def blank(value: Any) -> bool:
    """True for empty values: null, NaN (a table's null), false, 0, an empty text or list, JSON of these, or an object
    with only empty values, of which false and 0 are none: a table pads objects with nulls."""
    if isinstance(value, str):
        return value.strip() in ("", "null", "[]", "{}")
    if isinstance(value, Mapping):
        return all(blank(one) and not (isinstance(one, int | float) and one == 0) for one in value.values())
    if isinstance(value, Sized):  # also for NumPy's arrays, which have no truth value
        return len(value) == 0
    return not value or value != value


def shown(value: Any) -> str:
    """Return a value as an error quotes it: its kind, and its beginning or its number of entries."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    kinds = {int: "the number", float: "the number", str: "the text", dict: "an object"}
    kind = kinds.get(type(value), "a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}")
    if isinstance(value, Mapping | list | tuple):
        return f"{kind} of {len(value)}"
    text = rounded(value, ".0f") if type(value) is int else repr(value)
    return f"{kind} {text if len(text) <= 40 else text[:37] + '...'}"
