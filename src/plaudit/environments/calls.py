"""How a model writes calls of tools, read off its chat template.

    template, a probe of one call -> CallForm -> parsed(text) -> the text before the calls, the calls

Templates of most families write a call as JSON between two tags, with the keys name and arguments (or parameters), or
as a list of such objects. Left out: calls that are no JSON, such as tags for each argument.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plaudit.data.chat import Chats
from plaudit.data.fields import DataError

Message = dict[str, Any]
Call = tuple[str, dict[str, Any]]
"""A tool's name and its arguments."""
NAME, KEY, VALUE = "zqprobename", "zqprobekey", "zqprobevalue"
QUESTION: Message = {"role": "user", "content": "zqprobequestion"}
_JSON = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call as the template writes it: `opening`, then JSON of an object with these keys, or a list of such objects.
    Without an opening, an answer is a call if all of it is such JSON."""

    opening: str
    name: str
    arguments: str

    def parsed(self, text: str) -> tuple[str, list[Call], int]:
        """Return the text before the first call (all of it if there is none), each call's (name, arguments), and the
        number of calls that cannot be read."""
        if not self.opening:
            calls, wrong = self._calls(text.strip()) if text.lstrip().startswith(("{", "[{")) else ([], 0)
            return ("" if calls else text), calls, wrong
        before, *parts = text.split(self.opening)
        found = [self._calls(part.strip()) for part in parts]
        calls, wrong = [call for calls, _ in found for call in calls], sum(wrong for _, wrong in found)
        return (before if calls else text), calls, wrong

    def before(self, text: str) -> str:
        """Return the beginning of an unfinished answer's text that is no call, nor part of one, whatever follows."""
        if not self.opening:
            return "" if text.lstrip()[:1] in ("", "{", "[") else text
        place = text.find(self.opening)
        return text[: len(text) - overlap(text, self.opening)] if place < 0 else text[:place]

    def _calls(self, text: str) -> tuple[list[Call], int]:
        try:
            found = _JSON.raw_decode(text)[0]
        except (ValueError, RecursionError):
            return [], 1
        calls, wrong = [], 0
        for one in found if isinstance(found, list) else [found]:
            name, arguments = (
                (one.get(self.name), one.get(self.arguments, {})) if isinstance(one, Mapping) else ("", "")
            )
            if isinstance(arguments, str):
                arguments = _object(arguments)
            if isinstance(name, str) and name and isinstance(arguments, dict):
                calls.append((name, arguments))
            else:
                wrong += 1
        return calls, wrong


def call_form(chats: Chats) -> CallForm:
    """Read off how this template writes a call. Raises DataError if it shows none, or writes none as JSON."""
    call = as_messages([(NAME, {KEY: VALUE})], first=0)
    try:
        text = chats.completion(chats.prompt([QUESTION], {}), [QUESTION], {**call, "content": ""}, {})
    except DataError as error:
        raise DataError(
            f"the chat template shows no calls of tools; set data.chat_template=default. {error}"
        ) from error
    place = text.find(NAME)
    starts = [at for at in range(place) if text[at] == "{"]
    for start in starts:
        try:
            found = _JSON.raw_decode(text, start)[0]
        except ValueError:
            continue
        keys = {_kind(value): key for key, value in found.items()}
        if {"name", "arguments"} <= keys.keys():
            opening = text[:start].rstrip().removesuffix("[").split()
            return CallForm(opening[-1] if opening else "", keys["name"], keys["arguments"])
    raise DataError(
        f"the chat template writes a tool call as {text[:80]!r}, which is not JSON with a name and arguments, so calls "
        "cannot be read. Set data.chat_template=default, or a template that writes JSON."
    )


def as_messages(calls: Sequence[Call], *, first: int) -> Message:
    """Return an assistant's turn without content that makes these calls; their ids, of nine characters as Mistral's
    template wants, count from `first` on."""
    made = [
        {"type": "function", "id": f"call{first + i:05d}", "function": {"name": name, "arguments": dict(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "tool_calls": made}


def overlap(text: str, mark: str) -> int:
    """Return the number of characters at the text's end with which the mark begins."""
    return next((count for count in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:count])), 0)


def _kind(value: Any) -> str:
    if value == NAME:
        return "name"
    return "arguments" if (_object(value) if isinstance(value, str) else value) == {KEY: VALUE} else ""


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
