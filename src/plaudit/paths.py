"""Paths as people write them in files, and what the system says where they cannot be written."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

_FULL_OR_SHUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def at_home(path: str | Path) -> Path:
    """With the home folder in the place of `~`, which a shell leaves to us in a file; unknown homes as they stand."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def error_number(error: Exception) -> int | None:
    """The system's number of an error, if it is one of the system; libraries in Rust tell it within their text."""
    told = re.search(r"\(os error (\d+)\)", str(error))
    return int(told[1]) if told else getattr(error, "errno", None)


def unwritable(error: Exception) -> str | None:
    """What the system said, if it is that storage is full, or may not be written to."""
    number = error_number(error)
    return os.strerror(number) if number in _FULL_OR_SHUT else None
