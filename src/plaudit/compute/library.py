"""Compile `kernels.cpp` for this processor, once, and keep the library for later processes.

It needs only a C++ compiler with OpenMP ($CXX, c++ or g++). Without one, or with PLAUDIT_KERNELS=off, torch's
operations do the same work more slowly. The library is in the folder `kernels` of PLAUDIT_CACHE,
$XDG_CACHE_HOME/plaudit or ~/.cache/plaudit. Its name depends on the source, the compiler and the processor. If nothing
can be kept or run there, each process compiles its own.

A library is code. It is loaded only from a folder to which no other user can write, and only if size and digest are
those written beside it. A new library first runs a self-test in another process: if the processor lacks one of its
instructions, only that process dies, and a smaller instruction set is tried.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

from plaudit.compute.declarations import symbols
from plaudit.support.paths import cache_folder, flush, written_whole

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared")
NATIVE = ("-march=native",)
X86 = ("x86_64", "amd64")
FEWER = {**dict.fromkeys(X86, ("-mavx2", "-mfma")), **dict.fromkeys(("aarch64", "arm64"), ())}
"""Compiler flags of a smaller instruction set, by machine, to try if -march=native fails. Others use torch."""
OFF = ("off", "0", "false", "no")
PATIENCE = 120.0
"""Seconds that the compiler may take; it needs 5 to 15."""
PROBE = "import ctypes, sys; sys.exit(None if ctypes.CDLL(sys.argv[1]).sound_here() else 'its sums are wrong')"


@functools.cache
def number(name: str) -> int:
    """Return a constant of the compiled kernels: `page_positions`, `register_numbers` or `parts_of_sums`; or 1 or 0,
    whether the kernels use AVX512_BF16 (`pairs_of_halves`) or AMX (`matrices_of_halves`)."""
    found = library()
    assert found is not None
    function = found[name]
    function.restype = ctypes.c_int64
    return int(function())


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None if there are none; the reason is logged once."""
    if os.environ.get("PLAUDIT_KERNELS", "on").lower() in OFF:
        return None
    errors = []
    for compiler in _compilers():
        try:
            return _compiled(compiler)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home folder
            errors.append(f"{shlex.join(compiler)}: {_said(error)}")
    if errors:
        failed = "Plaudit's kernels could not be compiled; torch's operations are used instead: %s"
        log.warning(failed, "; ".join(errors))
    else:
        log.info("no C++ compiler ($CXX, c++, g++): torch's own operations take the place of Plaudit's kernels")
    return None


def _compilers() -> list[tuple[str, ...]]:
    """Return the commands of existing compilers, $CXX (which may have arguments) first; [] if there are none."""
    found: dict[tuple[str, ...], tuple[str, ...]] = {}  # by the program's real path: c++ is often a link to g++
    chosen = os.environ.get("CXX", "")
    for command in (chosen, "c++", "g++"):
        name, *arguments = shlex.split(command) or [""]
        if path := shutil.which(name):
            found.setdefault((os.path.realpath(path), *arguments), (path, *arguments))
        elif command and command is chosen:
            log.warning("CXX=%s is not a program here: trying c++ and g++", chosen)
    return list(found.values())


def _compiled(compiler: tuple[str, ...]) -> ctypes.CDLL:
    """Return the kernels from the cache folder; compile them if they are not there or cannot be kept there."""
    cached = cache_folder() / "kernels" / f"{_name(compiler)}.so"
    try:
        with contextlib.suppress(OSError):  # the folder may exist all the same, made by another process
            cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _private(cached.parent.stat()):
            log.warning(
                "%s belongs to another user, or others may write to it: kernels are not loaded from there, and each "
                "process compiles its own. Remove it, or set PLAUDIT_CACHE to another folder",
                cached.parent,
            )
            return _made(compiler, None)
        with contextlib.suppress(OSError):
            return _opened(cached)
        with FileLock(cached.with_suffix(".lock"), timeout=PATIENCE):  # if many processes start at once, one compiles
            try:
                return _opened(cached)
            except FileNotFoundError:
                pass
            except OSError as error:
                log.warning("%s: compiled again", error)
            return _made(compiler, cached)
    except (OSError, subprocess.CalledProcessError) as error:  # the storage is full, or forbids running code
        log.info("Plaudit's kernels cannot be kept in %s: %s", cached.parent, _said(error))
    return _made(compiler, None)


def _opened(cached: Path) -> ctypes.CDLL:
    """Load kernels from the cache. Raises OSError with the reason if they are absent, changed or writable by others."""
    found = cached.lstat()
    if not (stat.S_ISREG(found.st_mode) and _private(found)):
        raise OSError(f"{cached} is not a file, belongs to another user, or others may write to it")
    beside = cached.with_suffix(".sum")
    if not beside.exists() or beside.read_bytes() != _sum(cached):
        raise OSError(f"{cached} differs in size or digest from what was written")
    return _loaded(cached)


def _loaded(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    try:
        for name in symbols():
            found[name]
    except AttributeError as error:
        raise OSError(f"{path} lacks a kernel: {error}") from error
    return found


def _made(compiler: tuple[str, ...], cached: Path | None) -> ctypes.CDLL:
    """Compile the kernels, load them and, with `cached`, copy the library and its digest there."""
    with tempfile.TemporaryDirectory(dir=None if cached is None else cached.parent) as folder:
        log.info("compiling Plaudit's kernels for this processor, once: a few seconds")
        made, found = _tried(compiler, Path(folder))
        if cached is not None:
            beside = made.with_suffix(".sum")
            beside.write_bytes(_sum(made))
            for file in (made, beside):
                with written_whole(cached.with_suffix(file.suffix), durable=True) as part:
                    shutil.copyfile(file, part)
                    part.chmod(0o700)  # whatever the umask allows others
            flush(cached.parent)
    return found


def _tried(compiler: tuple[str, ...], folder: Path) -> tuple[Path, ctypes.CDLL]:
    """Compile for this processor, or for a smaller instruction set if that fails. Return the file and the library."""

    def compiled(name: str, instructions: tuple[str, ...]) -> tuple[Path, ctypes.CDLL]:
        made = folder / name
        _asked(*compiler, *FLAGS, *instructions, "-o", str(made), str(SOURCE))
        found = _loaded(made)
        _asked(sys.executable, "-I", "-S", "-c", PROBE, str(made))
        return made, found

    try:
        return compiled("native.so", NATIVE)
    except subprocess.CalledProcessError as error:
        if (fewer := FEWER.get(platform.machine().lower())) is None:
            raise
        log.info("trying fewer instructions than this processor's: %s", _said(error))
        return compiled("fewer.so", fewer)


def _sum(file: Path) -> bytes:
    content = file.read_bytes()
    return f"{len(content)} {hashlib.sha256(content).hexdigest()}".encode()


def _asked(*command: str) -> str:
    """Run a program and return its stdout. Raises CalledProcessError, or TimeoutExpired after PATIENCE seconds."""
    answer = subprocess.run(
        command, check=True, capture_output=True, timeout=PATIENCE, encoding="utf-8", errors="backslashreplace"
    )
    return answer.stdout


def _said(error: Exception) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError | subprocess.TimeoutExpired) else None
    return said if isinstance(said, str) and said else str(error)  # after a time-out stderr is bytes


def _private(found: os.stat_result) -> bool:
    """True if only this user or root could have written it."""
    return sys.platform == "win32" or (found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022)


def _name(compiler: tuple[str, ...]) -> str:
    """Return a name for the library that depends on source, compiler, flags and processor."""
    version = _asked(*compiler, "--version")
    parts = (SOURCE.read_text(), *compiler[1:], *FLAGS, *NATIVE, str(FEWER), version, _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Return the processor's features that `-march=native` uses, as text."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.split(":")[0].strip() in wanted))
