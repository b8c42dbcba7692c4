"""Items that are read again in every pass, for data that no disk can hold. One block is in memory at a time.

    sources -> items -> block -> shuffled within it -> draw 0, 1, 2, ...

Draw n is the same item in every run with the same seed. Asking for an earlier block, or resuming at a later one, reads
everything before it again. Leaves out data that can be stored (`store.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar, overload

import numpy as np

from plaudit.data.cursor import Cursor, permutation
from plaudit.data.fields import DataError
from plaudit.data.store import Codec, Items, Writer

ItemT = TypeVar("ItemT")
ENDLESS = 1 << 62
"""Number of draws in a stream's only epoch, which never ends."""
BLOCKS = 3
"""Key of the random stream that shuffles blocks; 0 and 1 are the cursor's, 2 is the split's."""


class InOrder(Cursor):
    """Draws a stream's items in the stream's own order: draw n is item n."""

    def __init__(self) -> None:
        super().__init__(ENDLESS, shuffle=False)

    def item(self, draw: int) -> int:
        return draw


class Stream(Sequence[ItemT]):
    """An endless sequence to be read forwards. `read` iterates over one pass. Raises DataError if a pass is empty."""

    def __init__(
        self, read: Callable[[], Iterator[ItemT]], codec: Codec[ItemT], *, block: int, seed: int, shuffle: bool
    ):
        self._read, self._codec = read, codec
        self._block, self._seed, self._shuffle = block, seed, shuffle
        self._restart()

    def __len__(self) -> int:
        return ENDLESS

    @overload
    def __getitem__(self, index: int) -> ItemT: ...
    @overload
    def __getitem__(self, index: slice) -> list[ItemT]: ...
    def __getitem__(self, index: int | slice) -> ItemT | list[ItemT]:
        if isinstance(index, slice):
            return [self[draw] for draw in range(*index.indices(ENDLESS))]
        if index < self._first:
            self._restart()
        while index >= self._first + len(self._items):
            self._advance()
        return self._items[index - self._first]

    def _restart(self) -> None:
        self._number, self._first = 0, 0
        self._items = self._begin()

    def _begin(self) -> Items[ItemT]:
        """Begin a pass and return its first block. Raises DataError if that is empty."""
        self._rows = self._read()
        items = self._block_of(self._rows)
        if not items:
            raise DataError(
                "data.stream: the sources leave nothing to train on. Give others, or see why their rows are dropped."
            )
        return items

    def _advance(self) -> None:
        self._first += len(self._items)
        self._number += 1
        self._items = self._block_of(self._rows) or self._begin()

    def _block_of(self, rows: Iterator[ItemT]) -> Items[ItemT]:
        """Return the next block of a pass, shuffled unless `shuffle` is false; empty when the pass is over."""
        writer = Writer(self._codec)
        writer.add(islice(rows, self._block))
        items = writer.items()
        order = permutation(len(items), BLOCKS, self._seed, self._number) if self._shuffle else np.arange(len(items))
        return items.picked(order)
