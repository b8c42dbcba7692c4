"""Read files that others made: ordinary files only, with bounds on size, length of lines and depth.

    path -> opened -> content, lines -> record          settings.yaml -> yaml_text -> a YAML parser

A folder of results may hold a FIFO that never answers, a device, a line or a YAML tree that fills the memory. Links are
followed, as DVC and git-annex keep files.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from plaudit.support.visible import visible

MOST = 256 << 20
"""Most bytes of a file that is read as a whole."""
LONGEST = 16 << 20
"""Most bytes of a line."""
SETTINGS_BYTES, EVENTS, DEPTH = 256 << 10, 20_000, 32
"""Most bytes of a run's settings, YAML events (a value is one, a list or a mapping two), and levels."""
_FLAGS = vars(os).get("O_NONBLOCK", 0) | vars(os).get("O_BINARY", 0)  # Unix has one, Windows the other


class UnreadableError(ValueError):
    """A file is refused. The message is one line, even if the file's name has line breaks."""

    def __init__(self, reason: str):
        super().__init__(visible(reason, line=True))


def opened(path: Path) -> BufferedReader:
    """Open an ordinary file, or a link to one, without waiting. Raises UnreadableError for anything else, and for a
    link that another user has set to a file that is not theirs."""
    found, link = path.stat(), path.lstat()
    _check_ordinary(path, found)  # checked before opening: a device may react to that
    if link.st_uid not in (0, found.st_uid) and link.st_uid != os.geteuid():
        raise UnreadableError(f"{path} is another user's link to a file that is not theirs: copy the file")
    file = os.fdopen(os.open(path, os.O_RDONLY | _FLAGS), "rb")
    try:
        _check_ordinary(path, os.fstat(file.fileno()))
    except UnreadableError:
        file.close()
        raise
    return file


def _check_ordinary(path: Path, found: os.stat_result) -> None:
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
    if (kind := stat.S_IFMT(found.st_mode)) != stat.S_IFREG:
        raise UnreadableError(f"{path} is a {kinds.get(kind, 'device')}: only ordinary files are read")


def content(path: Path, most: float = MOST) -> bytes:
    """Return a file's bytes. Raises UnreadableError if there are more than `most`."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise UnreadableError(f"{path} has {size:,} bytes: at most {most:,} are read")
        return file.read(size)


def lines(path: Path, begin: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of each whole line from `begin` on. Raises UnreadableError for a line of more than
    LONGEST bytes."""
    with opened(path) as file:
        file.seek(begin)
        while (line := file.readline(LONGEST + 1)).endswith(b"\n"):
            yield begin, line
            begin += len(line)
    if len(line) > LONGEST:
        raise UnreadableError(f"{path}: the line at byte {begin} is longer than {LONGEST:,} bytes")


def record(line: bytes) -> dict[str, Any]:
    """Parse a line as a JSON object. Raises ValueError if it is not one."""
    try:
        found = json.loads(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError(f"it is not a JSON object but {type(found).__name__}")
    return found


def parsed(line: bytes) -> dict[str, Any] | None:
    """Parse a line as a JSON object; None if it is not one. Part of an object never is, since its brace is missing."""
    try:
        return record(line)
    except ValueError:
        return None


def yaml_text(path: Path) -> str:
    """Return the text of a run's settings, after a check that a YAML parser reads it in bounded time and memory. Raises
    UnreadableError if not, and for anchors, aliases and tags, which no run writes."""
    import yaml

    loader = vars(yaml).get("CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        text = content(path, SETTINGS_BYTES).decode()
        for number, event in enumerate(yaml.parse(text, Loader=loader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.NodeEvent) and (event.anchor or vars(event).get("tag")):
                raise UnreadableError(f"{path} has an anchor, an alias or a tag, which no run writes")
            if depth > DEPTH or number > EVENTS:
                raise UnreadableError(f"{path} has more than {DEPTH} levels or {EVENTS // 2:,} values")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    return text
