"""Items as Arrow's record batches: in memory while they are few, beyond that mapped from a file.

    items -> Writer -> record batches of 1,024 items -> Items, a sequence that builds an item when it is asked for

A token takes four bytes, and only recently read pages of a file are in memory. The file has no name, so its room is
freed however the process ends. Leaves out in which order items are drawn (`cursor.py`).
"""

from __future__ import annotations

import json
import mmap
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import chain
from operator import attrgetter
from typing import IO, Any, Generic, Protocol, TypeVar, overload

import numpy as np
import numpy.typing as npt

from plaudit.data.fields import DataError
from plaudit.support.paths import cache_folder, unwritable
from plaudit.types import Prompt, Row

ItemT = TypeVar("ItemT")
View = Callable[[int], ItemT]
"""Builds the item with this index in its record batch."""
AT_ONCE = 1024
"""Number of items in a record batch."""
IN_MEMORY = 1 << 26
"""Largest size of the batches that are held without a file, in bytes."""
Integers = npt.NDArray[np.int64]


class Codec(Protocol[ItemT]):
    """Turns items into a record batch and back into items that are equal in every field."""

    def encode(self, items: Sequence[ItemT]) -> Any: ...

    def view(self, batch: Any) -> View[ItemT]: ...


class Items(Sequence[ItemT]):
    """Some of the stored items, in any order. Every access builds the item again."""

    def __init__(self, codec: Codec[ItemT], batches: Sequence[Any], numbers: Sequence[int] | Integers):
        self._codec, self._batches, self._numbers = codec, batches, numbers
        self._views: dict[int, View[ItemT]] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> ItemT: ...
    @overload
    def __getitem__(self, index: slice) -> Items[ItemT]: ...
    def __getitem__(self, index: int | slice) -> ItemT | Items[ItemT]:
        if isinstance(index, slice):
            return self.picked(self._numbers[index])
        batch, number = divmod(int(self._numbers[index]), AT_ONCE)
        view = self._views.get(batch)
        if view is None:
            view = self._views[batch] = self._codec.view(self._batches[batch])
        return view(number)

    def picked(self, numbers: Sequence[int] | Integers) -> Items[ItemT]:
        """Return the stored items with these numbers."""
        return Items(self._codec, self._batches, numbers)


class Writer(Generic[ItemT]):
    """Stores items in their order. Raises DataError if the disk has no room."""

    def __init__(self, codec: Codec[ItemT]):
        self.codec = codec
        self.count = 0
        """Number of items that were added."""
        self._waiting: list[ItemT] = []
        self._batches: list[Any] = []
        self._bytes = 0
        self._file: IO[bytes] | None = None
        self._sink: Any = None

    def add(self, items: Iterable[ItemT]) -> None:
        """Store these items after the earlier ones."""
        before = len(self._waiting)
        self._waiting += items
        self.count += len(self._waiting) - before
        while len(self._waiting) >= AT_ONCE:
            self._write(self._waiting[:AT_ONCE])
            del self._waiting[:AT_ONCE]

    def items(self) -> Items[ItemT]:
        """Return all items. None can be added afterwards."""
        if self._waiting:
            self._write(self._waiting)
        if self._file is not None:
            self._batches = self._mapped(self._file)
        return Items(self.codec, self._batches, range(self.count))

    def _write(self, items: Sequence[ItemT]) -> None:
        batch = self.codec.encode(items)
        self._bytes += batch.nbytes
        self._batches.append(batch)
        if self._file is None and self._bytes <= IN_MEMORY:
            return
        try:
            if self._file is None:
                self._open(batch.schema)
            for one in self._batches:
                self._sink.write_batch(one)
        except OSError as error:
            raise DataError(
                f"the tokens of the data do not fit into {cache_folder()}: {unwritable(error) or error}. Let "
                "PLAUDIT_CACHE name a folder with more room."
            ) from error
        self._batches.clear()

    def _open(self, schema: Any) -> None:
        import pyarrow as arrow

        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (it is read for as long as the items are)
        self._sink = arrow.ipc.new_file(arrow.PythonFile(self._file, "w"), schema)

    def _mapped(self, file: IO[bytes]) -> list[Any]:
        import pyarrow as arrow

        self._sink.close()
        file.flush()
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        reader = arrow.ipc.open_file(arrow.py_buffer(pages))
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]


KINDS: dict[str, tuple[type, Any]] = {"int": (int, np.int64), "float": (float, np.float64), "bool": (bool, np.uint8)}
FIGURES = {field.name: KINDS[field.type] for field in fields(Row) if field.type in KINDS}
"""Fields of `Row` that hold a single number, with (Python type, stored type)."""


class RowItems:
    """Token rows before any column is computed. An item's rows are of one group."""

    def encode(self, items: Sequence[tuple[Row, ...]]) -> Any:
        import pyarrow as arrow

        rows = [row for item in items for row in item]
        columns = {
            "tokens": _lists([row.tokens for row in rows], np.int32),
            "turns": _lists([_turns(row.trainable) for row in rows], np.int32),
            **{name: _column([*map(attrgetter(name), rows)], stored) for name, (_, stored) in FIGURES.items()},
            "end": _column(np.repeat(*_ends(items)), np.int32),
        }
        return arrow.RecordBatch.from_pydict(columns)

    def view(self, batch: Any) -> View[tuple[Row, ...]]:
        tokens, turns = (_of_lists(batch.column(name)) for name in ("tokens", "turns"))
        figures = {name: np.from_dlpack(batch.column(name)) for name in FIGURES}
        ends = np.unique(np.from_dlpack(batch.column("end")))

        def row(number: int) -> Row:
            ids = tokens(number)
            read: dict[str, Any] = {name: FIGURES[name][0](column[number]) for name, column in figures.items()}
            return Row(tokens=ids, trainable=_trainable(turns(number), len(ids)), **read)

        def item(number: int) -> tuple[Row, ...]:
            first = int(ends[number - 1]) if number else 0
            return tuple(map(row, range(first, int(ends[number]))))

        return item


class PromptItems:
    """Prompts to answer. Further columns are stored as JSON; a prompt that JSON would change is kept in memory."""

    def __init__(self) -> None:
        self._kept: list[Prompt] = []

    def encode(self, items: Sequence[Prompt]) -> Any:
        import pyarrow as arrow

        columns = {
            "tokens": _lists([prompt.tokens for prompt in items], np.int32),
            "id": _strings([_bytes(prompt.id) for prompt in items]),
            "text": _strings([_bytes(prompt.text) for prompt in items]),
            "further": _strings([self._further(prompt) for prompt in items]),
        }
        return arrow.RecordBatch.from_pydict(columns)

    def view(self, batch: Any) -> View[Prompt]:
        tokens = _of_lists(batch.column("tokens"))
        columns = [batch.column(name) for name in ("id", "text", "further")]

        def item(number: int) -> Prompt:
            place, text, further = (column[number].as_py().decode("utf-8", "surrogatepass") for column in columns)
            fields = json.loads(further)
            if isinstance(fields, int):
                return self._kept[fields]
            fields["messages"] = tuple(fields["messages"])
            return Prompt(id=place, text=text, tokens=tokens(number), **fields)

        return item

    def _further(self, prompt: Prompt) -> bytes:
        """Return a prompt's other fields as JSON; if JSON changes them, its number among prompts kept in memory."""
        further = {
            "answer": prompt.answer,
            "source": prompt.source,
            "extra": prompt.extra,
            "messages": list(prompt.messages),
        }
        try:
            text = json.dumps(further)
            if json.loads(text) == further:
                return text.encode()
        except (TypeError, ValueError, RecursionError):
            pass
        self._kept.append(prompt)
        return b"%d" % (len(self._kept) - 1)


class References:
    """Reference log-probs of an item's rows, one for each token."""

    def encode(self, items: Sequence[tuple[Sequence[float], ...]]) -> Any:
        import pyarrow as arrow

        rows = [row for item in items for row in item]
        ends = _column(np.repeat(*_ends(items)), np.int32)
        return arrow.RecordBatch.from_pydict({"reference": _lists(rows, np.float32), "end": ends})

    def view(self, batch: Any) -> View[tuple[tuple[float, ...], ...]]:
        rows, ends = _of_lists(batch.column("reference")), np.unique(np.from_dlpack(batch.column("end")))
        return lambda number: tuple(map(rows, range(int(ends[number - 1]) if number else 0, int(ends[number]))))


def _ends(items: Sequence[Sequence[object]]) -> tuple[Integers, Integers]:
    """Return for each item the index after its last row, and its number of rows."""
    sizes = np.fromiter(map(len, items), np.int64, len(items))
    return sizes.cumsum(), sizes


def _lists(rows: Sequence[Sequence[Any]], kind: Any) -> Any:
    import pyarrow as arrow

    offsets, _ = _ends(rows)
    values = np.fromiter(chain.from_iterable(rows), kind, int(offsets[-1]) if len(offsets) else 0)
    return arrow.LargeListArray.from_arrays(_column(np.concatenate(([0], offsets)), np.int64), _column(values, kind))


def _column(values: Any, kind: Any) -> Any:
    """Return numbers as an Arrow array. `arrow.array` would import pandas if it is installed, which takes 50 MiB."""
    import pyarrow as arrow

    held = np.asarray(values, kind)
    return arrow.Array.from_buffers(arrow.from_numpy_dtype(held.dtype), len(held), [None, arrow.py_buffer(held)])


def _strings(values: Sequence[bytes]) -> Any:
    """Return byte strings as an Arrow array, without importing pandas."""
    import pyarrow as arrow

    offsets, text = np.concatenate(([0], _ends(values)[0])), b"".join(values)
    buffers = [None, arrow.py_buffer(offsets), arrow.py_buffer(text)]
    return arrow.Array.from_buffers(arrow.large_binary(), len(values), buffers)


def _of_lists(column: Any) -> Callable[[int], tuple[Any, ...]]:
    offsets, values = np.from_dlpack(column.offsets), np.from_dlpack(column.values)
    return lambda number: tuple(values[offsets[number] : offsets[number + 1]].tolist())


def _turns(trainable: Sequence[int]) -> Sequence[int]:
    """Return the indices at which `trainable` changes, beginning with the first trained token."""
    start = trainable.index(True) if True in trainable else len(trainable)
    if trainable.count(True) == len(trainable) - start:
        return (start,)
    return [i for i, (before, now) in enumerate(zip((False, *trainable), trainable, strict=False)) if before != now]


def _trainable(turns: Sequence[int], size: int) -> tuple[bool, ...]:
    flags: tuple[bool, ...] = ()
    for number, turn in enumerate((*turns, size)):
        flags += (number % 2 == 1,) * (turn - len(flags))
    return flags


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
