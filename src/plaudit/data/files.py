"""Files to raw rows: JSON, JSONL, CSV and Parquet, and the first three packed by gzip, bzip2 or xz.

    path -> (where, dict row), (where, dict row), ...

A row that cannot be read is yielded as a `DataError`, which the caller may skip. A file that cannot be read raises one.
Leaves out which files a source has (`read.py`) and what columns mean (`formats.py`).
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from plaudit.data.fields import DataError, shown, table_row
from plaudit.data.json_list import PIECE, JsonList

Scanned = tuple[str, "dict[str, Any] | DataError"]
Note = Callable[[str, str], None]
"""Receives (what was odd, an example of it) for the data report, which counts it."""
Reader = Callable[[str, Path, Note], Iterator[Scanned]]

LIST_KEYS = ("data", "rows", "examples", "instances", "train")
OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
LONGEST_LINE, LARGEST_OBJECT = 1 << 26, 1 << 30
"""Largest size of a row or line, and of a file of JSON that is one object, in bytes. What is larger is refused before
it is in memory, since a small packed file may hold very much."""
POINTER = b"version https://git-lfs"
KEY_TWICE = "objects with a key twice, of which the last value is read"


def ignore(what: str, example: str) -> None:
    """A `Note` that reports nothing."""


def file_kind(name: str) -> str:
    """Return the ending that says how to read a file, such as ".jsonl" of "a.jsonl.gz"; "" if it cannot be read."""
    path = Path(name.lower())
    kind = Path(path.stem).suffix if path.suffix in OPENERS else path.suffix
    return kind if kind in READERS and not (kind == ".parquet" and path.suffix in OPENERS) else ""


def file_rows(source: str, path: Path, note: Note = ignore) -> Iterator[Scanned]:
    """Yield the rows of a file, which errors call `source`. Raises DataError if the file cannot be read."""
    kind = file_kind(path.name)
    if not kind:
        raise DataError(
            f"files that end in {''.join(path.suffixes[-2:]) or 'nothing'!r} are not read. Give a file that ends in "
            f"{', '.join(READERS)}, all but the last also with {', '.join(OPENERS)} after that; or write a function "
            "that reads yours (file.py:function).",
            source,
        )
    try:
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise DataError("it is only a Git LFS pointer; fetch the file itself (git lfs pull).", source)
        yield from READERS[kind](source, path, note)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"the file cannot be read: {error}", source) from error


def _opened(path: Path) -> IO[bytes]:
    opener = OPENERS.get(path.suffix.lower())
    file: IO[bytes] = opener(path) if opener else path.open("rb")
    return file


def _json_lines(source: str, path: Path, note: Note) -> Iterator[Scanned]:
    """Yield a row per line. A file that begins with "[" is read as a list of rows, despite its name."""
    with _opened(path) as lines:  # bytes: text mode would also split at U+2028, which JSON allows inside texts
        number = 0
        while line := lines.readline(LONGEST_LINE):
            number += 1
            if number == 1:
                line = _without_mark(line, source)
                if line.lstrip().startswith(b"["):  # no row of JSON lines does
                    yield from _json_file(source, path, note)
                    return
            where = f"{source}:{number}"
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                while (rest := lines.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                    continue
                yield where, _too_long(where)
            elif line.strip():
                yield _row(where, line.rstrip(), note)


def _too_long(where: str) -> DataError:
    return DataError(f"the line has more than {LONGEST_LINE >> 20} MiB.", where)


def _row(where: str, line: bytes, note: Note) -> Scanned:
    try:
        return where, as_row(parse_json(decode(line), lambda key: note(KEY_TWICE, f"{key!r} at {where}")))
    except DataError as error:
        return where, DataError(error.reason, where)


def _json_file(source: str, path: Path, note: Note) -> Iterator[Scanned]:
    """Yield the rows of a list, of an object that holds a list or is a row, or of JSON lines despite the name."""

    def twice(key: str) -> None:
        note(KEY_TWICE, f"{key!r} in {source}")

    with _opened(path) as file:
        head = _without_mark(file.read(PIECE), source)
        if head.lstrip().startswith(b"["):
            try:
                yield from numbered(source, JsonList(file, head, _decoder(twice), LONGEST_LINE))
            except (ValueError, RecursionError) as error:
                raise DataError(_json_fault(error), source) from None
            return
        first, _, rest = head.partition(b"\n")
        if first.strip().startswith(b"{") and first.strip().endswith(b"}") and (rest.strip() or len(head) == PIECE):
            with suppress(DataError):
                parse_json(decode(first))
                yield from _json_lines(source, path, note)
                return
        content = head + file.read(LARGEST_OBJECT)
    if len(content) > LARGEST_OBJECT:
        raise DataError(
            f"it is one object of more than {LARGEST_OBJECT >> 20} MiB. Write a list of rows, or a row a line.",
            source,
        )
    try:
        value = parse_json(decode(content), twice)
    except DataError as error:
        if first.strip().startswith(b"{") and first.strip().endswith(b"}"):
            yield from _json_lines(source, path, note)
            return
        raise DataError(error.reason, source) from None
    yield from numbered(source, _row_list(value, source))


def _row_list(value: Any, source: str) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        lists = [key for key, rows in value.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)]
        for key in LIST_KEYS:
            if isinstance(value.get(key), list):
                if len(lists) > 1:
                    raise DataError(f"it holds several lists of rows: {', '.join(lists)}. Give each a file.", source)
                return list(value[key])
        if value and not any(isinstance(entry, list) for entry in value.values()):
            return [value]  # one row, which is also a JSONL file of one line
    raise DataError(
        f"the file holds {shown(value)}; it must hold a list of rows, or an object with one in {', '.join(LIST_KEYS)}.",
        source,
    )


def _table(delimiter: str) -> Reader:
    def read(source: str, path: Path, note: Note) -> Iterator[Scanned]:
        """Yield a row for each record after the header: every cell is a text, an empty one is None."""
        csv.field_size_limit(LONGEST_LINE)  # a limit of the whole process, by default 128 KiB
        with _opened(path) as file:
            head = file.read(3)
            _without_mark(head, source)
            file.seek(0)
            # bytes that are not UTF-8 become half a surrogate pair, and reading the row refuses it
            text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
            rows = csv.reader(_bounded(source, text), delimiter=delimiter, strict=True)
            yield from _records(source, rows)

    return read


def _bounded(source: str, text: IO[str]) -> Iterator[str]:
    """Yield the lines of a text. Raises DataError for one that is too long, before all of it is in memory."""
    number = 0
    while line := text.readline(LONGEST_LINE):
        number += 1
        if len(line) == LONGEST_LINE and not line.endswith(("\n", "\r")):
            raise _too_long(f"{source}:{number}")
        yield line


def _records(source: str, rows: Any) -> Iterator[Scanned]:
    names: list[str] = []
    while True:
        where = f"{source}:{rows.line_num + 1}"
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield where, DataError(f"it is not valid CSV: {error}.", where)
            continue
        if not names:
            names = cells
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice or not names:
                raise DataError(
                    f"its header has the column {twice[0]!r} twice."
                    if twice
                    else "its first line is empty; it must name the columns.",
                    source,
                )
        elif len(cells) != len(names) and cells:
            reason = f"the row has {len(cells)} cells, and the header names {len(names)} columns."
            yield where, DataError(reason, where)
        elif cells:
            yield where, {name: cell or None for name, cell in zip(names, cells, strict=True)}


def _parquet(source: str, path: Path, note: Note) -> Iterator[Scanned]:
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, memory_map=True) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in _plain_rows(batch):
                    number += 1
                    where = f"{source}#{number}"
                    bad = DataError(f"a value cannot be read: {row}.", where)
                    yield where, bad if isinstance(row, str) else table_row(row)
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"it is not a readable Parquet file: {error}", source) from error


def _plain_rows(batch: Any) -> Iterator[dict[str, Any] | str]:
    """Yield rows in Python's types, or why one cannot be read: Parquet may hold invalid UTF-8, or times after 9999."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):
        for number in range(batch.num_rows):
            try:
                yield batch.slice(number, 1).to_pylist()[0]
            except (ValueError, OverflowError) as error:
                yield str(error)


READERS: dict[str, Reader] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_file,
    ".csv": _table(","),
    ".tsv": _table("\t"),
    ".parquet": _parquet,
}


def numbered(source: str, rows: Any) -> Iterator[Scanned]:
    """Yield ("SOURCE#NUMBER", row), numbered from 1; a row that is not a dict becomes a DataError."""
    for number, row in enumerate(rows, start=1):
        where = f"{source}#{number}"
        try:
            yield where, as_row(row)
        except DataError as error:
            yield where, DataError(error.reason, where)


def as_row(value: Any) -> dict[str, Any]:
    """Return the row, or raise DataError if it is not a dict."""
    if not isinstance(value, dict):
        raise DataError(f'the row is {shown(value)}; it must be an object with columns, {{"prompt": ..., ...}}.')
    return value


def _without_mark(content: bytes, source: str) -> bytes:
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError("it is UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8).", source)
    return content.removeprefix(codecs.BOM_UTF8)


def decode(content: bytes) -> str:
    """Decode UTF-8, or raise DataError with the first wrong byte."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"byte {error.start + 1} is {content[error.start]:#04x}, which is not UTF-8; convert the file "
            "(for example iconv -f LATIN1 -t UTF-8)."
        ) from None


def parse_json(text: str, twice: Callable[[str], None] = lambda key: None) -> Any:
    """Parse strict JSON: NaN and Infinity, which Python would accept, are refused. `twice` receives a key that an
    object has more than once."""

    try:
        return _decoder(twice).decode(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise DataError(f"it is not valid JSON: {error.msg} at {at}.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(_json_fault(error)) from None


def _decoder(twice: Callable[[str], None]) -> json.JSONDecoder:
    def as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(pairs)
        if len(row) < len(pairs):
            keys = [key for key, _ in pairs]
            twice(next(key for key in row if keys.count(key) > 1))
        return row

    return json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=as_dict)


def _json_fault(error: Exception) -> str:
    if isinstance(error, DataError):
        return error.reason
    if isinstance(error, UnicodeDecodeError):
        return (
            f"it has the byte {error.object[error.start]:#04x}, which is not UTF-8; convert the file (for example "
            "iconv -f LATIN1 -t UTF-8)."
        )
    nested = isinstance(error, RecursionError)
    return "it is JSON nested too deeply to read." if nested else f"it is not valid JSON: {error}"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value; write null or leave the column out.")
