"""Read a file that is one JSON list, value by value: a small compressed file may hold more than memory does."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from json import JSONDecodeError, JSONDecoder
from typing import IO, Any

from plaudit.data.fields import DataError

PIECE = 1 << 20
"""Bytes that are read at a time, more if a value has more."""
BLANKS = re.compile(r"[ \t\n\r]*")


class JsonList:
    """Iterates over the list's values. `head`: bytes of the file that were read before. `most`: characters of a value.

    Raises DataError for bad JSON or a longer value, UnicodeDecodeError for bad UTF-8, and what `decoder` raises."""

    def __init__(self, file: IO[bytes], head: bytes, decoder: JSONDecoder, most: int):
        self._file, self._head, self._decoder, self._most = file, head, decoder, most
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at, self._ended = "", 0, False
        self._line, self._column = 1, 1
        """Line and column of the buffered text's beginning in the file, for errors."""

    def __iter__(self) -> Iterator[Any]:
        self._expect("[")
        if self._next() != "]":
            yield self._value()
            while self._next() != "]":
                self._expect(",")
                yield self._value()
        self._at += 1
        if self._next():
            raise self._refused("Extra data", self._at)

    def _expect(self, character: str) -> None:
        if self._next() != character:
            raise self._refused(f"Expecting {character!r} delimiter", self._at)
        self._at += 1

    def _next(self) -> str:
        """Go to the next character that is no blank, and return it; "" at the end of the file."""
        while True:
            self._at = BLANKS.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches everywhere
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read()

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except JSONDecodeError as error:
                if self._ended:
                    raise self._refused(error.msg, error.pos) from None
            else:
                if self._ended or self._text[end : end + 1] not in ("", ".", "e", "E"):  # else a number may continue
                    self._at = end
                    return value
            self._read()

    def _read(self) -> None:
        """Read another piece of the file, and drop the text that was passed. Raises DataError for a long value."""
        self._line, self._column = self._place(self._at)
        self._text, self._at = self._text[self._at :], 0
        if len(self._text) > self._most:
            raise DataError(f"the value in line {self._line} has more than {self._most >> 20} MiB.")
        read = self._head or self._file.read(max(PIECE, len(self._text)))
        self._head, self._ended = b"", not read
        self._text += self._utf8.decode(read, final=self._ended)

    def _place(self, at: int) -> tuple[int, int]:
        passed = self._text[:at]
        newline = passed.rfind("\n")
        return self._line + passed.count("\n"), self._column + at if newline < 0 else at - newline

    def _refused(self, what: str, at: int) -> DataError:
        return DataError("it is not valid JSON: {} at line {}, column {}.".format(what, *self._place(at)))
