"""Sources to raw rows: JSON, JSONL and Parquet files, folders, names that `datasets` loads, and functions in a file.

    source name -> (where, dict row), (where, dict row), ...

A row that cannot be read is handed on as a `DataError` value, so that the caller may skip it under a budget; a source
that cannot be read raises one. Leaves out what the columns mean (`formats.py`).
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from plaudit.data.fields import DataError, shown
from plaudit.paths import at_home
from plaudit.plugins import load_file

Scanned = tuple[str, "dict[str, Any] | DataError"]

FUNCTION = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")
HUB_NAME = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[\w.-]+))?")
LIST_KEYS = ("data", "rows", "examples", "instances", "train")
SPLITS = {
    word: split
    for split, words in {
        "train": ("train", "training"),
        "validation": ("validation", "valid", "val", "dev"),
        "test": ("test", "testing", "eval", "evaluation"),
    }.items()
    for word in words
}
"""Words in names of files that tell a split, and which one."""
SHARD = re.compile(r"-\d{5}-of-\d{5}")
SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")
DESCRIPTIONS = ("config.json", "dataset_infos.json")
OTHER_DATA = (".csv", ".tsv", ".arrow", ".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
KNOWN = "a .jsonl, .json or .parquet file, a folder, a name that `datasets` loads, or file.py:function"


def read_rows(source: str, *, split: str = "train") -> Iterator[tuple[str, dict[str, Any]]]:
    """All rows of a source with their place; the first bad row raises."""
    for where, row in scan_rows(source, split=split):
        if isinstance(row, DataError):
            raise row
        yield where, row


def scan_rows(source: str, *, split: str = "train") -> Iterator[Scanned]:
    """All rows of a source with their place; a bad row is a `DataError` in place of the row."""
    function = FUNCTION.fullmatch(source)
    path = at_home(source)
    if function:
        rows: Iterator[Scanned] = _of_function(source, at_home(function["path"]), function["name"])
    elif path.is_dir():
        rows = _of_folder(source, path, split)
    elif path.is_file():
        rows = _of_file(source, path)
    else:
        rows = _of_hub(source, split)
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise DataError("there are no rows in it.", source)


def _of_file(source: str, path: Path) -> Iterator[Scanned]:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"files that end in {path.suffix or 'nothing'!r} are not read. A source is {KNOWN}; a function of your own "
            "reads anything else.",
            source,
        )
    return reader(source, path)


def _json_lines(source: str, path: Path) -> Iterator[Scanned]:
    """One row a line, or a list of rows under the wrong name."""
    with path.open("rb") as lines:  # bytes: text mode would also split at U+2028, which JSON allows inside texts
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = _without_mark(line, source)
                if line.lstrip().startswith(b"["):  # no row does
                    yield from _json_file(source, path)
                    return
            if line.strip():
                yield _row(f"{source}:{number}", line.rstrip())


def _row(where: str, line: bytes) -> Scanned:
    try:
        return where, _as_row(parse_json(decode(line)))
    except DataError as error:
        return where, DataError(error.reason, where)


def _json_file(source: str, path: Path) -> Iterator[Scanned]:
    """A list of rows, an object that holds one, or lines of JSON under the wrong name."""
    content = _without_mark(path.read_bytes(), source)
    try:
        value = parse_json(decode(content))
    except DataError as error:
        first = content.split(b"\n", 1)[0].strip()
        if first.startswith(b"{") and first.endswith(b"}"):
            yield from _json_lines(source, path)
            return
        raise DataError(error.reason, source) from None
    for number, row in enumerate(_row_list(value, source), start=1):
        where = f"{source}#{number}"
        try:
            yield where, _as_row(row)
        except DataError as error:
            yield where, DataError(error.reason, where)


def _row_list(value: Any, source: str) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        lists = [key for key, rows in value.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)]
        for key in LIST_KEYS:
            if isinstance(value.get(key), list):
                if len(lists) > 1:
                    raise DataError(
                        f"there are several lists of rows in it: {', '.join(lists)}. Give each its file.", source
                    )
                return list(value[key])
        if value and not any(isinstance(entry, list) for entry in value.values()):
            return [value]  # one row alone, which is also a JSONL file of one line
    raise DataError(
        f"the file holds {shown(value)}; it must hold a list of rows, or an object with one in {', '.join(LIST_KEYS)}.",
        source,
    )


def _parquet(source: str, path: Path) -> Iterator[Scanned]:
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in _plain_rows(batch):
                    number += 1
                    where = f"{source}#{number}"
                    yield where, DataError(f"a value cannot be read: {row}.", where) if isinstance(row, str) else row
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"it is no readable Parquet file: {error}", source) from error


def _plain_rows(batch: Any) -> Iterator[dict[str, Any] | str]:
    """Rows in Python's types, or why one is none: Parquet may hold texts that are no UTF-8, and times after 9999."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):
        for number in range(batch.num_rows):
            try:
                yield batch.slice(number, 1).to_pylist()[0]
            except (ValueError, OverflowError) as error:
                yield str(error)


READERS = {".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json_file, ".parquet": _parquet}


def _of_folder(source: str, path: Path, split: str) -> Iterator[Scanned]:
    """A folder of data files, one that `datasets` saved, or one in any other layout that it knows."""
    names = _names_of_split(source, path, split)
    if names:
        return (row for name in names for row in _of_file(str(Path(source, name)), path / name))
    return _numbered(source, _by_datasets(source, path, split))


def _names_of_split(source: str, path: Path, split: str) -> list[str]:
    """The folder's data files of a split, all where no name tells one; none where `datasets` is to read it: what it
    saved or cut into shards, what a README lists, no files of ours. Raises for files that neither would read."""
    names = _files_within(path)
    ours = [name for name in names if Path(name).suffix.lower() in READERS and Path(name).name not in DESCRIPTIONS]
    readme = path / "README.md"
    if (
        split not in SPLITS
        or not ours
        or any((path / name).is_file() for name in SAVED)
        or any(SHARD.search(name) for name in names)
        or (readme.is_file() and b"\nconfigs:" in readme.read_bytes())
    ):
        return []
    for name in names:
        if Path(name).suffix.lower() in OTHER_DATA:
            raise DataError(f"{name} is not read beside {ours[0]}; move it elsewhere, or list the files.", source)
    splits = {name: _split_told(name) for name in ours}
    told = sorted({one for one in splits.values() if one})
    if not told:
        return ours
    for name, one in splits.items():
        if not one:
            raise DataError(
                f"the name of {name} tells no split, and others tell {', '.join(told)}; rename it, or list the files.",
                source,
            )
    if SPLITS[split] not in told:
        raise DataError(f"there is no split {split!r}; it has {', '.join(told)}.", source)
    return [name for name, one in splits.items() if one == SPLITS[split]]


def _files_within(path: Path) -> list[str]:
    """Paths from a folder to all files in it, but for hidden ones, in order of their names."""
    return sorted(
        name
        for folder, _, files in os.walk(path, followlinks=True)
        for file in files
        for name in [(Path(folder) / file).relative_to(path).as_posix()]
        if not name.startswith(".") and "/." not in name
    )


def _split_told(name: str) -> str:
    """The split that a path tells by a word of its own, as `datasets` takes them; the last one counts."""
    words = re.split(r"[\W\d_]+", name.lower())
    return next((SPLITS[word] for word in reversed(words) if word in SPLITS), "")


def _by_datasets(source: str, path: Path, split: str) -> Any:
    import datasets

    try:
        if not any((path / name).is_file() for name in SAVED):
            return datasets.load_dataset(str(path), split=split)
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise DataError(f"there is no split {split!r}; it has {', '.join(saved)}.", source)
            saved = saved[split]
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        why = f"{error} {error.__cause__ or ''}".rstrip()
        raise DataError(f"`datasets` cannot load the split {split!r} of this folder: {why}", source) from error
    return saved


def _of_hub(source: str, split: str) -> Iterator[Scanned]:
    match = HUB_NAME.fullmatch(source)
    suffix = Path(source).suffix.lower()
    if match is None or suffix in (".json", ".jsonl", ".ndjson", ".parquet", ".txt", ".csv", ".py"):
        raise DataError(f"there is no such file or folder. A source is {KNOWN}.", source)
    import datasets

    try:
        loaded = datasets.load_dataset(match["name"], match["config"], split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"there is no file or folder of this name here, and `datasets` cannot load the split {split!r} of a "
            f"data set of this name: {error} Check the spelling, the split and the network; without one, load the data "
            "set elsewhere, save it with save_to_disk and name that folder.",
            source,
        ) from error
    return _numbered(source, loaded)


def _of_function(source: str, path: Path, name: str) -> Iterator[Scanned]:
    return _numbered(source, _function(source, path, name)())


def _function(source: str, path: Path, name: str) -> Callable[[], Iterable[Any]]:
    if not path.is_file():
        raise DataError(f"there is no file {path}.", source)
    module = load_file(str(path))  # errors in it are the user's own and surface with their traceback
    found = getattr(module, name, None)
    if not callable(found):
        there = ", ".join(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise DataError(f"{path} has no function {name!r}; it has {there or 'none'}.", source)
    return found  # type: ignore[no-any-return]


def _numbered(source: str, rows: Any) -> Iterator[Scanned]:
    if isinstance(rows, str | bytes | dict) or not isinstance(rows, Iterable):
        raise DataError(f"it gives {shown(rows)}; it must give rows, one dict each.", source)
    for number, row in enumerate(rows, start=1):
        where = f"{source}#{number}"
        try:
            yield where, _as_row(row)
        except DataError as error:
            yield where, DataError(error.reason, where)


def _as_row(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f'the row is {shown(value)}; it must be an object with columns, {{"prompt": ..., ...}}.')
    return value


def _without_mark(content: bytes, source: str) -> bytes:
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError("it is UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8).", source)
    return content.removeprefix(codecs.BOM_UTF8)


def decode(content: bytes) -> str:
    """UTF-8 text, or a `DataError` that says where it is not."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"byte {error.start + 1} is {content[error.start]:#04x}, which is no UTF-8; convert the file "
            "(iconv -f LATIN1 -t UTF-8, or from whatever it is in)."
        ) from None


def parse_json(text: str) -> Any:
    """JSON by the letter: NaN and Infinity, which Python would accept, are refused."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise DataError(f"it is not valid JSON: {error.msg} at {at}.") from None
    except RecursionError:
        raise DataError("it is JSON nested too deeply to read.") from None
    except ValueError as error:
        raise DataError(f"it is not valid JSON: {error}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value; write null or leave the column out.")
