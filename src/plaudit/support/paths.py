"""Expand paths, write files atomically, and say why the system refuses a write."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"
"""Suffix of a file that will replace another."""

_FULL_OR_SHUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def at_home(path: str | Path) -> Path:
    """Return the path with `~` replaced by the home folder; unchanged if that home is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def is_here(path: str) -> bool:
    """True if a model's path is a folder or a GGUF file of this machine."""
    return at_home(path).is_dir() or (path.endswith(".gguf") and at_home(path).is_file())


def cache_folder() -> Path:
    """Return the folder for what can be made again: PLAUDIT_CACHE, $XDG_CACHE_HOME/plaudit or ~/.cache/plaudit."""
    home = os.environ.get("XDG_CACHE_HOME")
    folder = Path(os.environ.get("PLAUDIT_CACHE") or (Path(home) if home else Path.home() / ".cache") / "plaudit")
    return at_home(folder).absolute()  # absolute: dlopen would look for a bare name in the system's folders


@contextmanager
def written_whole(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`. After the block it replaces `path` atomically; if the block raises, it is
    deleted. `durable`: fsync it first, for a crash of the machine."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        yield temporary
        if durable:
            flush(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically: readers find the old text or the new one."""
    with written_whole(path) as part:
        part.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the storage."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(target: Path) -> None:
    """Raise OSError if `target`, or the folders to be made above it, cannot be written."""
    there = next(path for path in (target, *target.parents, Path.cwd()) if path.exists())
    if there != target and not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{there} is not a folder", str(target))
    if not os.access(there, os.W_OK):
        raise PermissionError(errno.EACCES, f"nothing can be written to {there}", str(target))


def error_number(error: Exception) -> int | None:
    """Return the system's number of an error, or None. Libraries in Rust give it only in their text."""
    match = re.search(r"\(os error (\d+)\)", str(error))
    if match:
        return int(match[1])
    return error.errno if isinstance(error, OSError) else None


def unwritable(error: Exception) -> str | None:
    """Return the system's words if storage is full or read-only, or None for other errors."""
    number = error_number(error)
    return os.strerror(number) if number in _FULL_OR_SHUT else None
