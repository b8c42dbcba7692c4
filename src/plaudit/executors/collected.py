"""Move checkpoint files between the driver, an address, and nodes that do not share the driver's disk.

    a rank on another disk than rank 0's writes its part to files there -> pieces with data -> merged into one file here
    the same, with an address -> merged on one node -> sealed -> the address; the driver has references and digests only
    a checkpoint here -> pieces -> the same folder on each node that does not see this disk

If several ranks write parts of a file, each rank's file is zero elsewhere, so the bitwise or of them is the whole file.
Nodes that see the run's folder send no pieces.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from plaudit.loop.checkpoint import sealed
from plaudit.loop.copies import STATE, Copies
from plaudit.models.boxes import Pending, beside
from plaudit.runtime.coroutines import together
from plaudit.support.address import MANIFEST, AddressError

if TYPE_CHECKING:
    from plaudit.runtime.ray_worker import RayWorker

    Rank = RayWorker["Node"]
    Kept = Mapping[str, tuple[Rank, Path]]  # by role or STATE: a folder of a checkpoint, and the rank that copies it

PIECE_BYTES = 1 << 26
"""Most bytes of file content that one call transfers."""
Piece = tuple[str, int, int, bytes]
"""(a file's name in its folder, the file's size, offset of these bytes in it, the bytes)."""


class Node:
    """The methods of a rank that write, send and receive checkpoint files."""

    pending: Pending
    _giving: Mapping[Path, Iterator[Piece]] = {}

    async def write(self, folders: Sequence[Path]) -> None:
        """Write this rank's pending copies of boxes to these folders, in a thread, while its other work goes on."""
        await asyncio.to_thread(self.pending.write, folders)

    async def sees(self, mark: Path) -> bool:
        return mark.exists()

    async def begin_giving(self, folder: Path, mark: str) -> None:
        """Prepare to send files on another disk than `mark`: those of the folder, and this rank's own beside it."""
        elsewhere = folder.is_dir() and not (folder / mark).exists()
        own = _given([*([folder] if elsewhere else []), beside(folder, own=True)])
        self._giving = {**self._giving, folder: own}

    async def give(self, folder: Path) -> tuple[list[Piece], bool]:
        """Return the next pieces, in a thread beside other work, and if there are any. Sent files are removed here."""
        pieces = await asyncio.to_thread(_some, self._giving[folder])
        return pieces, bool(pieces)

    async def take(self, folder: Path, pieces: Sequence[Piece]) -> None:
        await asyncio.to_thread(merge, folder, pieces)

    async def remove(self, path: Path) -> None:
        """Remove a file, or a folder if there is one."""
        await asyncio.to_thread(shutil.rmtree, path) if path.is_dir() else path.unlink(missing_ok=True)

    async def seal(self, folder: Path) -> str:
        return await asyncio.to_thread(sealed, folder)

    async def publish(self, folder: Path, address: str, role: str, name: str) -> None:
        await asyncio.to_thread(Copies(address).publish, folder, role, name)


async def collected(ranks: Iterable[Rank], folder: Path, to: Rank | None = None) -> None:
    """Merge the files that ranks wrote for a folder on other disks: here, or on the node of `to`, sent directly."""

    async def asked(method: Callable[..., Any], *arguments: Any) -> None:
        await (method(Node(), *arguments) if to is None else to.call(method, *arguments))

    mark = f".{secrets.token_hex(8)}"
    await asked(Node.take, folder, [(mark, 0, 0, b"")])
    for rank in ranks:
        await rank.call(Node.begin_giving, folder, mark)
        while (given := await rank.call_apart(Node.give, folder))[1]:
            pieces = given[0].reference
            await asked(Node.take, folder, await rank.fetched(pieces) if to is None else pieces)
    await asked(Node.remove, folder / mark)


async def merged(ranks: Sequence[Rank], kept: Kept, state: Callable[..., None]) -> None:
    """Merge the folders of a checkpoint on the nodes of the ranks that keep them, add what `state` writes, and seal."""
    await together(collected(ranks, folder, rank) for rank, folder in kept.values())
    rank, folder = kept[STATE]
    seals = {role: await one.call(Node.seal, there) for role, (one, there) in kept.items() if role != STATE}
    with TemporaryDirectory() as own:
        state(Path(own), seals)
        await rank.call(Node.take, folder, list(pieces_of(Path(own))))
    await rank.call(Node.seal, folder)


async def copied(kept: Kept, name: str, copies: Copies) -> None:
    """Let ranks copy the sealed folders of a checkpoint, the state's last. Raises CopyError or AddressError."""

    async def publish(role: str) -> None:
        rank, folder = kept[role]
        await rank.call(Node.publish, folder, copies.there.name, role, name)
        if MANIFEST not in await asyncio.to_thread(copies.found, role, name):
            raise AddressError(f"{copies.there.name} is another place for a rank")

    await asyncio.to_thread(copies.remove, name)  # remains of an interrupted copy
    await together(publish(role) for role in kept if role != STATE)
    await publish(STATE)


async def lacking(ranks: Iterable[Rank], folder: Path) -> list[Rank]:
    """Return the ranks that do not see what is beside the driver's folder."""
    mark = folder.with_name(f".{secrets.token_hex(8)}")
    mark.touch()
    found = [rank for rank in ranks if not await rank.call(Node.sees, mark)]
    mark.unlink()
    return found


async def spread(ranks: Sequence[Rank], checkpoints: Path, name: str) -> None:
    """Copy a checkpoint to each node that does not see the driver's folder of checkpoints."""
    takers = {rank.node: rank for rank in await lacking(ranks, checkpoints)}.values()
    for folder in (path / name for path in checkpoints.iterdir() if takers and (path / name).is_dir()):
        for rank in takers:
            await rank.call(Node.remove, folder.parent)
        for piece in pieces_of(folder):
            for rank in takers:
                await rank.call(Node.take, folder, [piece])


def _some(giving: Iterator[Piece]) -> list[Piece]:
    found: list[Piece] = []
    while sum(len(piece[-1]) for piece in found) < PIECE_BYTES // 2 and (piece := next(giving, None)):
        found.append(piece)
    return found


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
