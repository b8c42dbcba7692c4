"""End commands: an error that the user can correct is one line, and a run that ends early has its own status."""

from __future__ import annotations

import errno
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import click

from plaudit.support.errors import Ended, Stopped
from plaudit.support.paths import at_home, check_writable, error_number, unwritable
from plaudit.support.visible import visible

USAGE_ERROR = 2
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)
"""errno values for a path that cannot be read or written."""


@contextmanager
def plain_errors(target: str | Path | None = None, plugins: Sequence[str] = ()) -> Iterator[None]:
    """Turn errors that the user can correct into one line on stderr and exit status 2. A run that ends early has its
    own status (`support.errors`; 143 after SIGTERM, 130 after Ctrl-C). Other errors keep their traceback. Before the
    work, check that the file `target` can be written at its end, and load `plugins`."""
    sys.excepthook = _traceback
    try:
        if target is not None:
            check_writable(at_home(target))
        if plugins:
            from plaudit.support.plugins import load_plugins

            load_plugins(plugins)
        yield
    except (ValueError, FloatingPointError, FileNotFoundError, ImportError) as error:
        if "--traceback" in sys.argv:
            raise
        _tell(f"error: {error}")
        raise SystemExit(USAGE_ERROR) from error
    except RuntimeError as error:
        limit = None if isinstance(error, Ended) else _of_limits(error)
        if "--traceback" in sys.argv or not (limit or type(error).__module__.startswith("plaudit.")):
            raise
        status, message = limit or (1, f"the run ended: {error}")
        _tell(message)
        raise SystemExit(error.status if isinstance(error, Ended) else status) from error
    except Stopped as stopped:
        _tell(str(stopped))
        raise SystemExit(stopped.code) from stopped
    except KeyboardInterrupt as error:
        _tell(" ".join(["stopped by SIGINT", *getattr(error, "__notes__", ())]))
        raise SystemExit(128 + signal.SIGINT) from error
    except Exception as error:
        limit, storage = _of_limits(error), _of_storage(error, target)
        if "--traceback" in sys.argv or not (limit or storage):
            raise
        status, message = limit or (USAGE_ERROR, f"error: {storage}")
        _tell(message)
        raise SystemExit(status) from error


def _traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback with visible control characters; Python's own prints an error's text as it is."""
    _tell("".join(traceback.format_exception(kind, error, trace)).rstrip())


def _tell(text: str) -> None:
    """Print to stderr, if it is open."""
    with suppress(OSError):
        click.echo(visible(text), err=True)


def _of_limits(error: Exception) -> tuple[int, str] | None:
    """Return exit status and a line for too many open files or too little memory; None for other errors."""
    from plaudit.runtime.memory import OutOfMemory, out_of_memory

    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return USAGE_ERROR, f"error: {error.strerror}: allow more of them (`ulimit -n 4096`)"
    if out_of_memory(error) or error_number(error) == errno.ENOMEM:
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else "no memory is left"
        return OutOfMemory.status, f"error: {reason}. Allow more memory (`ulimit -v`), or take a smaller model or batch"
    return None


def _of_storage(error: Exception, target: str | Path | None) -> str | None:
    """Return a line for an error of storage: the path and the system's reason. None for other errors."""
    of_system = error if isinstance(error, OSError) else None
    place = (of_system and of_system.filename) or target
    if why := unwritable(error):
        return f"{place or 'what is written'} cannot be written: {why}"
    forbidden = place and error_number(error) in FORBIDDEN
    return f"{place}: {(of_system and of_system.strerror) or error}" if forbidden else None
