"""Free memory, errors when it runs out, what a run's processes take, and the handling of freed memory by glibc.

By default, glibc returns every freed block of some megabytes to the kernel. Tensors are such blocks, and a training
step frees and allocates hundreds of them: the kernel then fills the same pages with zeros again and again.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from plaudit.support.errors import Ended

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt, as numbered in malloc.h."""
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
PLENTY = 0.5
"""If at least this share of the host's memory is free, processes need not return theirs."""

WORKER = b"ray::Host"
"""How Ray calls a process that works for us."""
SAID = (
    "can't allocate memory",
    r"unable to mmap .* Cannot allocate memory",
    r"could not create a (primitive|memory object)(?! desc)",
)
"""Messages by which torch and oneDNN report lack of memory (except a primitive without a descriptor: unsupported)."""


class OutOfMemory(Ended):
    """The work does not fit in memory, even in its smallest parts."""

    status = 4


class RankOutOfMemory(OutOfMemory):
    """One of several ranks ran out of memory while others wait for it: all must begin again."""

    def __init__(self, message: str, micro_tokens: int, score_tokens: int):
        """`micro_tokens`, `score_tokens`: most tokens of a pass with and without gradients when memory ran out."""
        super().__init__(message)
        self.micro_tokens, self.score_tokens = micro_tokens, score_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.micro_tokens, self.score_tokens)


def out_of_memory(error: BaseException) -> bool:
    """True if an allocation failed: Python's MemoryError, torch's error on a GPU, or a plain RuntimeError of torch or
    oneDNN on the CPU."""
    is_memory_error = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    return is_memory_error or (isinstance(error, RuntimeError) and any(re.search(words, str(error)) for words in SAID))


@contextmanager
def memory_tried() -> Iterator[list[str]]:
    """Catch an out-of-memory error inside and append its message to the yielded list. The exception is dropped, and
    with it the stack frames that held the memory."""
    failed: list[str] = []
    try:
        yield failed
    except Exception as error:
        if not out_of_memory(error):
            raise
        failed.append(str(error))


def free_memory() -> float:
    """Return the bytes of memory that this machine (or this process's cgroup) has left; infinity if unknown."""
    return host_memory()[0]


def host_memory() -> tuple[float, float]:
    """Return the bytes of host memory that are left, as `free_memory`, and in all; infinity if unknown."""
    lines = dict(line.split(":") for line in _lines("/proc/meminfo"))
    ours = [tuple(float(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))] if lines else []
    most, used = (next(iter(_lines(f"/sys/fs/cgroup/memory.{name}")), "") for name in ("max", "current"))
    cached = [line.split()[1] for line in _lines("/sys/fs/cgroup/memory.stat") if line.startswith("inactive_file ")]
    if most.isdigit() and used.isdigit():
        ours.append((float(most) - float(used) + sum(map(float, cached)), float(most)))
    left, whole = min(ours, default=(float("inf"), float("inf")))
    return left, whole


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def keep_freed_memory() -> bool:
    """Let this process keep freed memory. Return True if this was set. Do nothing if the C library is not glibc, or if
    the environment has one of its variables: set MALLOC_TRIM_THRESHOLD_=131072 to keep glibc's behaviour."""
    if not _glibc() or any(name in os.environ for name in VARIABLES):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    set_all = [mallopt(MMAP_THRESHOLD, 1 << 30), mallopt(TRIM_THRESHOLD, (1 << 31) - 1), mallopt(TOP_PAD, 1 << 26)]
    return all(set_all)


def release_freed_memory() -> None:
    """Return free memory to the kernel once, after a large allocation that will not be repeated."""
    if _glibc():
        ctypes.CDLL(None).malloc_trim(0)


@cache
def _glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"


def make_room() -> None:
    """As `give_back_memory`, for processes that take turns on a device. If at least half of the host's memory is free,
    keep host memory: getting zeroed pages back would cost more than other processes gain."""
    free, whole = host_memory()
    give_back_memory(host=free < PLENTY * whole)


def give_back_memory(*, host: bool = True) -> None:
    """Return free memory to other processes, on the host and on a GPU that torch has used."""
    if host:
        release_freed_memory()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def recover_memory() -> None:
    """As `give_back_memory`, after an allocation failed: first collect reference cycles, such as torch.compile's."""
    gc.collect()
    give_back_memory()


def peaks(root: int) -> dict[int, float]:
    """Return the bytes that a run's own processes have taken at most: of the driver `root`, and of workers on Ray. What
    they share with others is left out."""
    found = {}
    for process in _descendants(root):
        path = Path(f"/proc/{process}")
        try:
            if process == root or (path / "cmdline").read_bytes().split(b"\0")[0] == WORKER:
                lines = dict(line.split(":", 1) for line in (path / "status").read_text().splitlines())
                most, shared = (float(lines.get(name, "0 kB").split()[0]) * 1024 for name in ("VmHWM", "RssShmem"))
                found[process] = most - shared
        except OSError:  # it has ended
            continue
    return found


def _descendants(root: int) -> Iterator[int]:
    """Yield a process and all that it started."""
    yield root
    try:
        tasks = [path.read_text().split() for path in Path(f"/proc/{root}/task").glob("*/children")]
    except OSError:
        return
    for child in (child for children in tasks for child in children):
        yield from _descendants(int(child))
