"""Marks that show where a rendered chat has what its author wrote: an answer's text, tools and their calls.

A mark is one character for private use (Unicode, planes 15 and 16) that stands in none of the texts. A template copies
it like any other character, so what stands between two marks is what it made of the text between them. Looking for the
text itself would find "e" within `<|im_end|>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from plaudit.data.fields import THOUGHTS, DataError, Message, tool_inner, tool_name

THOUGHT_TAGS = {
    **{f"<{name}>": f"</{name}>" for name in ("think", "thinking", "thought", "reasoning", "seed:think", "mm:think")},
    "<|START_THINKING|>": "<|END_THINKING|>",
    "[THINK]": "[/THINK]",
    "<|channel>thought": "<channel|>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
}
"""{tag that opens a thought: tag that closes it}."""
TAG = re.compile("|".join(re.escape(tag) for pair in THOUGHT_TAGS.items() for tag in pair))
PLANES = ("[\U000f0000-\U000ffffd]", "[\U00100000-\U0010fffd]")
WORD = "zqprobe"
NUMBER = 739_000_001
"""First of the rare numbers that `Probes` puts in place of a call's own numbers."""


def unused(text: str) -> re.Pattern[str]:
    """Return a pattern of the marks of a plane that this text does not use. Raises DataError if it uses both planes."""
    plane = next((plane for plane in PLANES if not re.search(plane, text)), None)
    if plane is None:
        raise DataError("it has characters for private use of both planes 15 and 16; leave out those of one.")
    return re.compile(plane)


def _mark(marks: re.Pattern[str], number: int) -> str:
    return chr(ord(marks.pattern[1]) + number)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer's text, as tags of thoughts divide it, without outer whitespace."""

    key: str
    """The key of the answer's turn that holds it: "content", or that of its thoughts."""
    start: int
    text: str


def pieces_of(answer: Message) -> list[Piece]:
    found = []
    for key in (THOUGHTS[0], "content"):
        text, start = str(answer.get(key, "")), 0
        for end, after in (*(tag.span() for tag in TAG.finditer(text)), (len(text), 0)):
            between = text[start:end]
            if said := between.strip():
                found.append(Piece(key, start + between.index(said), said))
            start = after
    return found


def marked(answer: Message, pieces: Sequence[Piece], marks: re.Pattern[str]) -> Message:
    """Return the turn with mark 2i before piece i and mark 2i + 1 after it."""
    written = dict(answer)
    for i, piece in reversed([*enumerate(pieces)]):
        text, end = written[piece.key], piece.start + len(piece.text)
        inside = _mark(marks, 2 * i) + piece.text + _mark(marks, 2 * i + 1)
        written[piece.key] = text[: piece.start] + inside + text[end:]
    return written


def places(shown: str, marks: re.Pattern[str]) -> dict[int, int]:
    """Return {number of a mark: its last position}; positions are indices into the text without marks."""
    first = ord(marks.pattern[1])
    return {ord(found[0]) - first: found.start() - i for i, found in enumerate(marks.finditer(shown))}


@dataclass(frozen=True, slots=True)
class Probe:
    """A word that a rendered text must contain, and what the text leaves out if it does not."""

    text: str
    what: str


class Probes:
    """Puts words that `text` does not have, and rare numbers, into the values of calls and tools, and collects them in
    `wanted`. Words are plain letters and digits, since some templates write other characters as escapes."""

    def __init__(self, text: str) -> None:
        self._word = WORD
        while self._word in text:
            self._word += "q"
        self._numbers: Iterator[int] = count()
        self.wanted: list[Probe] = []

    def missing(self, text: str) -> str:
        """Name the first probe that is absent from a rendered text; "" if none is."""
        return next((probe.what for probe in self.wanted if probe.text not in text), "")

    def text(self, value: str, what: str) -> str:
        word = f"{self._word}{next(self._numbers)}x"
        self.wanted.append(Probe(word, what))
        return word + value

    def call(self, call: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Return the call with a probe in each text and number; without any, it gets an argument `probe`."""
        what = f"{what} {tool_name(call)!r}"
        before = len(self.wanted)
        arguments = self._value(call["function"]["arguments"], what)
        if isinstance(arguments, Mapping) and len(self.wanted) == before:
            arguments = {**arguments, "probe": self.text("", what)}
        self.wanted.append(Probe(tool_name(call), what))
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tool with probes in its name, its description and the names of its parameters."""
        inner, what = dict(tool_inner(tool)), f"the tool {tool_name(tool)!r}"
        for key, words in (("name", what), ("description", f"the description of {what}")):
            if isinstance(inner.get(key), str) and inner[key]:
                inner[key] = self.text(inner[key], words)
        for key in ("parameters", "input_schema"):
            if isinstance(inner.get(key), Mapping):
                inner[key] = self._schema(inner[key], what)
        return {**tool, "function": inner} if "function" in tool else inner

    def _schema(self, schema: Mapping[str, Any], what: str) -> dict[str, Any]:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return dict(schema)
        names = {name: self.text(str(name), f"the parameter {name!r} of {what}") for name in properties}
        renamed: dict[str, Any] = {"properties": {names[name]: value for name, value in properties.items()}}
        if isinstance(schema.get("required"), list):
            renamed["required"] = [names.get(name, name) for name in schema["required"]]
        return {**schema, **renamed}

    def _value(self, value: Any, what: str) -> Any:
        if isinstance(value, str):
            return value + self.text("", what)  # at the end: the value may hold a token at which rendering is cut
        if isinstance(value, Mapping):
            return {name: self._value(entry, what) for name, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(entry, what) for entry in value]
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        number = NUMBER + next(self._numbers) + (0.5 if isinstance(value, float) else 0)
        self.wanted.append(Probe(str(number), what))
        return number
