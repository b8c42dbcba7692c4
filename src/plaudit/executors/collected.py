"""Move checkpoint files between the driver and nodes that do not share its disk.

    a rank on another disk than rank 0's writes its part to files there -> pieces with data -> merged into one file here
    a checkpoint here -> pieces -> the same folder on each node that does not see this disk

If several ranks write parts of a file, each rank's file is zero elsewhere, so the bitwise or of them is the whole file.
Everything passes the driver, a piece at a time. Nodes that see the run's folder send nothing.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plaudit.models.boxes import Pending, beside

if TYPE_CHECKING:
    from plaudit.runtime.ray_worker import RayWorker
    from plaudit.runtime.ray_worker_group import RayWorkerGroup

PIECE_BYTES = 1 << 26
"""Most bytes of file content that one call transfers."""
Piece = tuple[str, int, int, bytes]
"""(a file's name in its folder, the file's size, offset of these bytes in it, the bytes)."""


class Node:
    """The methods of a rank that write, send and receive checkpoint files."""

    pending: Pending
    _giving: Iterator[Piece] = iter(())

    async def write(self, folders: Sequence[Path]) -> None:
        """Write this rank's pending copies of boxes to these folders, in a thread, while its other work goes on."""
        await asyncio.to_thread(self.pending.write, folders)

    def sees(self, mark: Path) -> bool:
        return mark.exists()

    async def begin_giving(self, folder: Path, mark: str, first: bool) -> None:
        """Prepare to send files that this rank wrote on another disk. `first`: also files of the folder itself."""
        elsewhere = first and folder.is_dir() and not (folder / mark).exists()
        self._giving = _given([*([folder] if elsewhere else []), beside(folder, own=True)])

    async def give(self) -> list[Piece]:
        """Return the next pieces, in a thread beside other work; [] at the end. Sent files are removed from here."""
        return await asyncio.to_thread(self._some)

    def _some(self) -> list[Piece]:
        found: list[Piece] = []
        while sum(len(piece[-1]) for piece in found) < PIECE_BYTES // 2 and (piece := next(self._giving, None)):
            found.append(piece)
        return found

    def take(self, folder: Path, pieces: Sequence[Piece]) -> None:
        """Write pieces to files of the folder. For no pieces, remove the folder's parent instead."""
        if not pieces:
            shutil.rmtree(folder.parent, ignore_errors=True)
        merge(folder, pieces)


async def collected(groups: Iterable[RayWorkerGroup[Any]], folder: Path) -> None:
    """Fetch the files that ranks wrote for a folder on other disks, and merge them into it here."""
    mark = f".{secrets.token_hex(8)}"
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    (folder / mark).touch()
    for rank, first in ((rank, rank is group.first) for group in groups for rank in group.workers):
        await rank.call(Node.begin_giving, folder, mark, first)
        while pieces := await rank.call(Node.give):
            await asyncio.to_thread(merge, folder, pieces)
    (folder / mark).unlink()


async def spread(ranks: Sequence[RayWorker[Node]], checkpoints: Path, name: str) -> None:
    """Copy a checkpoint to each node that does not see the driver's folder of checkpoints."""
    mark = checkpoints / f".{secrets.token_hex(8)}"
    mark.touch()
    lacking = {rank.node: rank for rank in ranks if not await rank.call(Node.sees, mark)}.values()
    mark.unlink()
    for folder in (path / name for path in checkpoints.iterdir() if lacking and (path / name).is_dir()):
        for rank in lacking:
            await rank.call(Node.take, folder, [])
        for piece in pieces_of(folder):
            for rank in lacking:
                await rank.call(Node.take, folder, [piece])


def _given(folders: Iterable[Path]) -> Iterator[Piece]:
    for folder in folders:
        if folder.is_dir():
            yield from pieces_of(folder)
            shutil.rmtree(folder)


def pieces_of(folder: Path) -> Iterator[Piece]:
    """Yield for each file an empty piece with its size, then the pieces of its ranges that have data."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, size = str(path.relative_to(folder)), path.stat().st_size
        yield name, size, 0, b""
        with path.open("rb", buffering=0) as file:
            for start, stop in _data(file.fileno(), size):
                yield name, size, start, os.pread(file.fileno(), stop - start, start)


def _data(file: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of ranges with data, at most PIECE_BYTES each; holes of sparse files are skipped."""
    start = 0
    while start < size:
        try:
            start = os.lseek(file, start, os.SEEK_DATA)
        except OSError:  # only a hole is left
            return
        stop = min(os.lseek(file, start, os.SEEK_HOLE), start + PIECE_BYTES)
        yield start, stop
        start = stop


def merge(folder: Path, pieces: Sequence[Piece]) -> None:
    """Write pieces into the files of a folder by bitwise or with the bytes that are there."""
    for name, size, start, data in pieces:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if os.fstat(file).st_size < size:
                os.truncate(file, size)
            there = np.frombuffer(os.pread(file, len(data), start), dtype=np.uint8)
            view = memoryview((there | np.frombuffer(data, dtype=np.uint8)).tobytes())
            while view:
                count = os.pwrite(file, view, start)
                view, start = view[count:], start + count
        finally:
            os.close(file)
