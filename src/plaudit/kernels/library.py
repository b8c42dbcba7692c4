"""Compiles `kernels.cpp` for this processor, once, and keeps the library for the next process.

A C++ compiler with OpenMP (c++ or g++) is all it takes; without one, or with PLAUDIT_KERNELS=off, torch's own
operations do the same work in more time. The library lies in PLAUDIT_CACHE, $XDG_CACHE_HOME/plaudit or
~/.cache/plaudit, under a name that goes by the source, the compiler and the processor; where nothing can be kept, or
run from there, each process compiles its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.autograd import profiler

from plaudit.paths import at_home

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared")
OFF = ("off", "0", "false", "no")
PATIENCE = 120.0
"""Seconds that the compiler may take; it needs 5 to 15."""
SUFFIXES = {torch.float32: "float", torch.bfloat16: "bf16"}
"""What the kernels compute on, and how their names end."""


def usable(*tensors: Tensor) -> bool:
    """Whether the kernels take these: plain CPU tensors, all in one of their precisions, whose last dimension is
    contiguous. Tensors that only look like one (those of several ranks, fake ones) are left to torch."""
    dtype = tensors[0].dtype
    return all(
        type(x) in (Tensor, nn.Parameter)
        and x.dtype is dtype
        and x.device.type == "cpu"
        and (x.stride(-1) == 1 or x.shape[-1] == 1)
        for x in tensors
    ) and available(dtype)


def available(dtype: torch.dtype) -> bool:
    """Whether there are kernels for numbers of this kind."""
    return dtype in SUFFIXES and library() is not None


def run(name: str, dtype: torch.dtype | None, *arguments: Tensor | int | None) -> None:
    """Run the kernel of this name on numbers of this kind (None: there is one kind). Tensors are passed by address,
    None as none. A profile has it as `plaudit::name`."""
    numbers = [x.data_ptr() if isinstance(x, Tensor) else x or 0 for x in arguments]
    function = _kernel(name if dtype is None else f"{name}_{SUFFIXES[dtype]}", len(numbers))
    if profiler._is_profiler_enabled:
        with profiler.record_function(f"plaudit::{name}"):
            function(*numbers)
    else:
        function(*numbers)


@functools.cache
def number(name: str) -> int:
    """What the kernels were compiled for on this processor: `page_positions`, `register_numbers`, `parts_of_sums`, or 1
    for `pairs_of_halves` and `matrices_of_halves`."""
    found = library()
    assert found is not None
    function = getattr(found, name)
    function.restype = ctypes.c_int64
    return int(function())


@functools.cache
def _kernel(name: str, arguments: int) -> Callable[..., None]:
    found = library()
    assert found is not None, "a kernel was asked for without asking whether there are any"
    function = getattr(found, name)
    function.restype, function.argtypes = None, [ctypes.c_int64] * arguments  # addresses are as wide
    return function  # type: ignore[no-any-return]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there are none; why is logged once."""
    if os.environ.get("PLAUDIT_KERNELS", "on").lower() in OFF:
        return None
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        log.info("no C++ compiler (c++, g++): torch's own operations take the place of Plaudit's kernels")
        return None
    try:
        return _compiled(compiler)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: nobody has a home
        log.warning(
            "Plaudit's kernels could not be compiled, torch's own operations take their place: %s", _said(error)
        )
        return None


def _compiled(compiler: str) -> ctypes.CDLL:
    """The kernels, compiled where they are not there yet."""
    kept = _folder() / f"kernels-{_name(compiler)}.so"
    if found := _loaded(kept):
        return found
    if _writable(kept.parent):
        try:
            with FileLock(kept.with_suffix(".lock"), timeout=PATIENCE):  # of many processes at once, one compiles
                return _loaded(kept) or _made(compiler, kept)
        except (OSError, subprocess.CalledProcessError) as error:  # it is full, say, or nothing may be run from there
            log.info("Plaudit's kernels cannot be kept in %s: %s", kept.parent, _said(error))
    return _made(compiler, None)


def _loaded(kept: Path) -> ctypes.CDLL | None:
    with contextlib.suppress(OSError):  # it was cut off, say, or is another user's to read: compiled again
        if _trusted(kept):
            return ctypes.CDLL(str(kept))
    return None


def _made(compiler: str, kept: Path | None) -> ctypes.CDLL:
    """The kernels, compiled and, where there is a place for them, kept there."""
    with tempfile.TemporaryDirectory(dir=None if kept is None else kept.parent) as folder:
        made = Path(folder) / "kernels.so"
        log.info("compiling Plaudit's kernels for this processor, once: a few seconds")
        _asked(compiler, *FLAGS, "-o", str(made), str(SOURCE))
        found = ctypes.CDLL(str(made))
        if kept is not None:
            made.replace(kept)
    return found


def _asked(*command: str) -> str:
    """What a compiler answers, in whatever encoding."""
    answer = subprocess.run(
        command, check=True, capture_output=True, timeout=PATIENCE, encoding="utf-8", errors="backslashreplace"
    )
    return answer.stdout


def _said(error: Exception) -> str:
    said = getattr(error, "stderr", None)
    return said if isinstance(said, str) and said else str(error)  # what ran out of time has said bytes


def _trusted(library: Path) -> bool:
    """Whether it is there, and nobody else could have put it there."""
    if not library.exists():
        return False
    return not hasattr(os, "getuid") or library.stat().st_uid in (0, os.getuid())


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    folder = Path(os.environ.get("PLAUDIT_CACHE") or (Path(home) if home else Path.home() / ".cache") / "plaudit")
    return at_home(folder).absolute()  # a library's name without a folder is looked for in the system's


def _name(compiler: str) -> str:
    """Differs wherever the library would."""
    version = _asked(compiler, "--version")
    parts = (SOURCE.read_bytes(), " ".join(FLAGS).encode(), version.encode(), _processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """What `-march=native` looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.split(":")[0].strip() in wanted))
