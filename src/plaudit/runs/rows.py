"""Write the rows that a script or notebook passes to a run into a file, since a run reads only files.

    list, generator, DataFrame, datasets' own -> plain rows -> OUTPUT/.passed/data-DIGEST.jsonl
    dict or DatasetDict                       -> its splits `train` and `validation`

Left out: the meaning of columns, which `data` reads from the file.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

from plaudit.data.fields import table_row
from plaudit.data.write import write_rows
from plaudit.settings.tree import SettingsError

SPLITS = ("train", "validation")
FORMS = (
    "a list or an iterable of dicts, a pandas.DataFrame, an object of datasets, a dict of the splits train and "
    "validation, or a source's name"
)
TOLD = 100_000
"""While an iterable is read, the number of rows is reported each time it has grown by this many."""
NO_VALUE = ("NAType", "NaTType")
"""pandas' types of a missing cell, beside NaN."""


def splits_of(data: Any, validation: Any) -> dict[str, Any]:
    """Return {"train": rows, "validation": rows} without those that are None. Raises SettingsError for other splits."""
    if isinstance(validation, Mapping):
        name = _held_out(validation)
        raise SettingsError(f"validation has {_listed(validation)}: give one of them: validation=splits[{name!r}]")
    if isinstance(data, Mapping):
        _check_splits(data)
        if data.get("validation") is not None and validation is not None:
            raise SettingsError("data has the split validation, and validation= is given too: leave one of them out")
        data, validation = data["train"], data.get("validation", validation)
    return {name: rows for name, rows in zip(SPLITS, (data, validation), strict=True) if rows is not None}


def _check_splits(data: Mapping[Any, Any]) -> None:
    others = [name for name in data if name not in SPLITS]
    if data.get("train") is not None and not others:
        return
    first = next(iter(data.values()), None)
    if "train" not in data and isinstance(first, list | tuple) and not isinstance(next(iter(first), None), Mapping):
        raise SettingsError(
            f"data is a dict of the columns {', '.join(map(str, data))}: give rows, as pandas.DataFrame(data) or "
            "datasets.Dataset.from_dict(data)"
        )
    train = "train" if "train" in data else next(iter(others), "train")
    raise SettingsError(
        f"data has {_listed(data)}: a run reads train and validation. Choose: data=splits[{train!r}], "
        f"validation=splits[{_held_out(data)!r}]"
    )


def _held_out(splits: Mapping[Any, Any]) -> Any:
    """Return the split to suggest for validation: the first besides "train"; "validation" if it exists or none does."""
    there = [name for name in ("validation", *splits) if name in splits and name != "train"]
    return there[0] if there else "validation"


def _listed(splits: Mapping[Any, Any]) -> str:
    return f"the splits {', '.join(map(str, splits))}" if splits else "no splits"


def stored_rows(rows: Any, name: str, folder: Path, say: Callable[[str], None]) -> str:
    """Write rows to data-DIGEST.jsonl in `folder`; return its path. Return a source's name (str, Path) as a str."""
    if isinstance(rows, str | Path):
        return str(rows)
    counted = [0]
    found = _plain_rows(rows, name, say, counted)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as temporary:
        made = write_rows(Path(temporary) / "rows.jsonl", found)
        if not counted[0]:
            raise SettingsError(f"data ({name}) has no rows. A generator has them once: make a new one for each run")
        with made.open("rb") as file:
            target = folder / f"data-{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}.jsonl"
        if not target.exists():
            made.rename(target)
    return str(target)


def _plain_rows(rows: Any, name: str, say: Callable[[str], None], counted: list[int]) -> Iterator[Mapping[str, Any]]:
    """Yield rows for JSON without NaN cells; `counted[0]` is their number. SettingsError if JSON cannot hold one."""
    for number, row in enumerate(_rows_of(rows, name)):
        if not isinstance(row, Mapping):
            raise SettingsError(f"data ({name}), row {number} is a {type(row).__name__}: rows are dicts of columns")
        row = {key: value for key, cell in row.items() if not _is_nan(value := _plain(cell))}
        try:
            json.dumps(row)
        except (TypeError, ValueError) as error:
            raise SettingsError(f"data ({name}), row {number} cannot be written as JSON: {error}") from error
        counted[0] = number + 1
        if not isinstance(rows, Sized) and counted[0] % TOLD == 0:
            say(f"data ({name}): {counted[0]:,} rows read so far")
        yield row


def _rows_of(rows: Any, name: str) -> Iterable[Any]:
    if callable(rows) and not isinstance(rows, Iterable):
        called = getattr(rows, "__name__", "rows")
        raise SettingsError(f"data ({name}) is the function {called}: give what it returns: {called}()")
    if {"itertuples", "columns", "iloc"} <= set(dir(rows)):
        return _rows_of_frame(rows, name)
    if isinstance(rows, Mapping | bytes) or not isinstance(rows, Iterable):
        kind = _listed(rows) if isinstance(rows, Mapping) else f"a {type(rows).__name__}"
        raise SettingsError(f"data ({name}) is {kind}: give {FORMS}")
    return map(table_row, rows) if "features" in dir(rows) else rows  # `datasets` stores rows as a table


def _rows_of_frame(frame: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a pandas.DataFrame, without missing cells and without its index."""
    names = list(map(str, frame.columns))
    if twice := [one for one in names if names.count(one) > 1]:
        raise SettingsError(f"data ({name}) has two columns {twice[0]!r}: rename one of them")
    whole = [_counts(frame.iloc[:, number]) for number in range(len(names))]
    for cells in frame.itertuples(index=False, name=None):
        found = zip(names, map(_plain, cells), whole, strict=True)
        row = {key: int(cell) if counts else cell for key, cell, counts in found if not _is_nan(cell, or_none=True)}
        yield table_row(row)


def _counts(column: Any) -> bool:
    """True for a column of whole numbers that pandas stored as floats because cells are missing."""
    there = column.dropna()
    floats = getattr(column.dtype, "kind", "") == "f"
    return bool(floats and 0 < len(there) < len(column) and (there % 1 == 0).all())


def _is_nan(value: Any, *, or_none: bool = False) -> bool:
    """True for NaN, which is a table's missing cell; with `or_none`, also for None."""
    return (or_none and value is None) or (isinstance(value, float) and value != value)


def _plain(value: Any) -> Any:
    """Convert a value for JSON: NumPy to numbers and lists, dates and times to ISO text, pandas' NA to NaN."""
    if type(value).__name__ in NO_VALUE:
        return float("nan")
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    names = dir(value) if type(value).__module__ != "builtins" else ()
    if "tolist" in names:
        return _plain(value.tolist())
    return value.isoformat() if "isoformat" in names else value
