"""Why a process ended, in one line for people: its signal or exit code, where it was, and what it last said.

    a worker's stderr, a file on its node -> last_lines -> `reason`, with Ray's message -> text

A process that is killed can say nothing itself, and Ray's message is the same for every signal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

READ = 16 << 10
"""Bytes at the end of the file that are read: Python's own report of a crash lists each loaded library."""
SAID = 3
"""Lines that are repeated."""
LONGEST = 200
"""Characters of each."""
SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
"""Signals that Python's faulthandler reports, by its names for them."""
FATAL = "Fatal Python error: "
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_RAYS = re.compile(r":(job_id|actor_name|task_name):|\[[\d-]+ [\d:,.]+ [A-Z] \d+ \d+\]|\*\*\* SIG\w+|PC: @|\s+@ +0x")
"""Lines of Ray's own, and of its C++."""


def stderr_path() -> str:
    """Return the path of the file to which this process's stderr goes; "" if it is none, or cannot be known."""
    try:
        path = Path("/proc/self/fd/2").readlink()
        return str(path) if path.is_file() else ""
    except OSError:
        return ""


def last_lines(path: str) -> list[str]:
    """Return the last lines of a file; [] if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def reason(lines: Sequence[str], message: str) -> str:
    """Return why a process ended, from the last lines of its stderr and Ray's message about its end."""
    fatal = next((at for at in reversed(range(len(lines))) if lines[at].startswith(FATAL)), len(lines))
    said = [line.strip()[:LONGEST] for line in lines[:fatal] if line.strip() and not _RAYS.match(line)][-SAID:]
    code = re.search(r"exit code (\d+)", message)
    if fatal < len(lines):
        name = lines[fatal].removeprefix(FATAL)
        frames = [f"{name} ({Path(path).name}:{line})" for path, line, name in map(_found, lines[fatal:]) if path][:2]
        found = f"ended by {SIGNALS.get(name, name)}" + (" in " + ", called by ".join(frames) if frames else "")
    elif code is not None:
        found = f"ended with exit code {code[1]}"
    else:
        found = "ended at once, as by SIGKILL (the kernel's too, if memory ran out: see dmesg) or os._exit"
    return found + ("; its stderr ends: " + " | ".join(said) if said else "")


def _found(line: str) -> tuple[str, str, str]:
    frame = _FRAME.fullmatch(line)
    return (frame[1], frame[2], frame[3]) if frame else ("", "", "")
