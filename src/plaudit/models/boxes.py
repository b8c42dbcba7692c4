"""Boxes of tensors in safetensors files, read and written in place, a bucket at a time.

    files -> stored_in -> Stored -> read_box -> pieces of the box's rows
    names, dtypes, shapes -> laid_out -> create: files of their final size -> write_boxes, by any process: flushed
                                                                           -> Pending: copied now, written later

Files are read and not mapped: mapped pages would count as memory of the process, and a network would carry all of them.
What several processes write is byte for byte what safetensors itself would write of the whole tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plaudit.models.layout import Box
from plaudit.models.parts import Shape
from plaudit.support.paths import flush

BUCKET_BYTES = 1 << 24
"""Most bytes that reading or writing holds at once besides the tensors themselves."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SPARED, EACH = 1 << 30, 16
"""A box is copied only if SPARED bytes plus EACH times its own size are free, since other ranks copy too."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies in a file, and its dtype and whole shape."""

    path: Path
    dtype: torch.dtype
    shape: Shape
    start: int
    """Offset of its first byte in the file."""


def stored_in(files: Iterable[Path]) -> dict[str, Stored]:
    """Return the tensors of safetensors files by name. Raises ValueError for a damaged file or an unknown dtype."""
    found: dict[str, Stored] = {}
    for path in files:
        header, start = _header(path)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{path}: {name} is {entry['dtype']}, not one of {', '.join(DTYPES)}. Convert it.")
            found[name] = Stored(path, DTYPES[entry["dtype"]], tuple(entry["shape"]), start + entry["data_offsets"][0])
    return found


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a file's header and the offset of its data. Raises ValueError if safetensors finds the file damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}). Copy or save it again.") from error
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size)), 8 + size


def read_box(stored: Stored, box: Box) -> Iterator[tuple[int, Tensor]]:
    """Yield (number of the first row within the box, rows), a bucket of rows at a time."""
    width = math.prod(stored.shape[1:])
    row = width * stored.dtype.itemsize
    (first, last), *columns = box or ((0, 1),)
    with stored.path.open("rb", buffering=0) as file:
        for begin, end in _runs(first, last, row):
            read = bytearray((end - begin) * row)
            view, at = memoryview(read), 0
            while at < len(read):
                count = os.preadv(file.fileno(), [view[at:]], stored.start + begin * row + at)
                if not count:
                    raise ValueError(f"{stored.path} ends within a tensor. Copy or save it again.")
                at += count
            rows = torch.frombuffer(read, dtype=stored.dtype).view(end - begin, *stored.shape[1:])
            yield begin - first, rows[(slice(None), *(slice(*one) for one in columns))]


def laid_out(
    folder: Path, tensors: Mapping[str, tuple[torch.dtype, Shape]], *, name: str = "model", most: float = math.inf
) -> tuple[dict[str, Stored], dict[Path, bytes]]:
    """Plan files for whole tensors, of at most `most` bytes each (a larger tensor has its own). Return where each of
    the tensors will lie, and each file's header. Pure: processes with equal arguments get equal plans."""
    groups: list[list[str]] = [[]]
    size = 0.0
    for one, spec in tensors.items():
        if groups[-1] and size + _bytes(spec) > most:
            groups.append([])
            size = 0
        groups[-1].append(one)
        size += _bytes(spec)
    places: dict[str, Stored] = {}
    headers: dict[Path, bytes] = {}
    for number, group in enumerate(groups, start=1):
        part = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        path = folder / f"{name}{part}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for one in sorted(group, key=lambda one: (-tensors[one][0].itemsize, one)):  # as safetensors does
            dtype, shape = tensors[one]
            end = offset + _bytes(tensors[one])
            header[one] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            places[one] = Stored(path, dtype, shape, offset)
            offset = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        headers[path] = len(text).to_bytes(8, "little") + text
        for one in group:
            place = places[one]
            places[one] = Stored(place.path, place.dtype, place.shape, place.start + 8 + len(text))
    return places, headers


def _bytes(spec: tuple[torch.dtype, Shape]) -> int:
    return math.prod(spec[1]) * spec[0].itemsize


def create(places: Mapping[str, Stored], headers: Mapping[Path, bytes]) -> None:
    """Write the headers and give each file its final size, filled with zeros."""
    ends = dict.fromkeys(headers, 0)
    for one in places.values():
        ends[one.path] = max(ends[one.path], one.start + _bytes((one.dtype, one.shape)))
    for path, header in headers.items():
        with path.open("wb") as file:
            file.write(header)
            file.truncate(max(ends[path], len(header)))


def beside(folder: Path, *, own: bool = False) -> Path:
    """Return `folder` if it exists here and `own` is False; else `<name>-<pid>` beside it, for this process only."""
    return folder if folder.is_dir() and not own else folder.with_name(f"{folder.name}-{os.getpid()}")


Filled = tuple[Stored, Box, Tensor]
"""A box of a stored tensor, and its values."""
Keep = Callable[[Iterable[Filled]], None]
"""Takes boxes and writes them to their files, at once (`write_boxes`) or later (`Pending.add`)."""


def write_boxes(boxes: Iterable[Filled]) -> None:
    """Write boxes and flush their files."""
    written = set()
    for stored, box, values in boxes:
        write_box(stored, box, values)
        written.add(stored.path)
    for path in written:  # flushed, so that other machines can read them
        flush(path)


class Pending:
    """Copies of boxes in host memory that wait to be written, while training changes the tensors.

    `left` returns the free bytes of host memory. A box that does not fit in them is written at once; training waits.
    """

    def __init__(self, left: Callable[[], float] = lambda: math.inf):
        self.left, self._boxes = left, list[Filled]()

    @torch.no_grad()
    def add(self, boxes: Iterable[Filled]) -> None:
        """Copy boxes to host memory in their stored dtype, or write at once those for which it has no room."""
        for stored, box, values in boxes:
            if SPARED + EACH * values.numel() * stored.dtype.itemsize > self.left():
                write_boxes([(stored, box, values)])
            else:
                self._boxes.append((stored, box, values.to(device="cpu", dtype=stored.dtype, copy=True)))

    def write(self, folders: Iterable[Path]) -> None:
        """Write the boxes added for these checkpoint folders, and free each copy; any thread may call it. Boxes added
        for other folders are dropped, since their checkpoint was abandoned."""
        there = {one for folder in folders for one in (folder, beside(folder, own=True))}
        boxes, self._boxes = [one for one in self._boxes[::-1] if one[0].path.parent in there], []
        write_boxes(boxes.pop() for _ in range(len(boxes)))


@torch.no_grad()
def write_box(stored: Stored, box: Box, values: Tensor) -> None:
    """Write a box of a tensor, rounded to its dtype, into its file. Only these bytes of the file change."""
    width = math.prod(stored.shape[1:]) * stored.dtype.itemsize
    (first, last), *columns = box or ((0, 1),)
    values = values.detach().view(last - first, *values.shape[1:])
    narrow = any(one != (0, size) for one, size in zip(columns, stored.shape[1:], strict=True))
    file = os.open(stored.path, os.O_WRONLY)
    try:
        for begin, end in _runs(first, last, width):
            piece = values[begin - first : end - first].to(device="cpu", dtype=stored.dtype).contiguous()
            # Columns of a matrix lie apart in the file: a write for each row.
            for number, rows in enumerate(torch.split(piece, 1) if narrow else [piece]):
                left = columns[0][0] * stored.dtype.itemsize if narrow else 0
                _write(file, rows, stored.start + (begin + number) * width + left)
    finally:
        os.close(file)


def _write(file: int, values: Tensor, offset: int) -> None:
    view = memoryview(values.reshape(-1).view(torch.uint8).numpy().data)
    while len(view):
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count


def _runs(first: int, last: int, row: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of buckets of the rows from `first` to `last` (excluded); each row has `row` bytes."""
    rows = max(1, BUCKET_BYTES // max(1, row))
    return ((begin, min(begin + rows, last)) for begin in range(first, last, rows))
