"""How glibc's allocator treats freed memory.

By default it hands every block of some megabytes back to the kernel as it is freed. Tensors are such blocks, and a
training step frees and takes hundreds of them: the kernel then fills the same pages with zeros over and over.
"""

from __future__ import annotations

import ctypes
import os
import sys

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
"""Names of the parameters in malloc.h."""
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """From now on this process keeps what it frees, for itself. True where that was set.

    Nothing is done where the C library is not glibc, or where the environment names one of its variables: set
    MALLOC_TRIM_THRESHOLD_=131072 to keep glibc's own behaviour.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return False
    set_all = [mallopt(MMAP_THRESHOLD, 1 << 30), mallopt(TRIM_THRESHOLD, (1 << 31) - 1), mallopt(TOP_PAD, 1 << 26)]
    return all(set_all)


def release_freed_memory() -> None:
    """Hand what is free back to the kernel, once: after something large that will not come again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:
        trim(0)


def give_back_memory() -> None:
    """Leave what is free to other processes, on the host and, where torch has used one, on the GPU."""
    release_freed_memory()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
