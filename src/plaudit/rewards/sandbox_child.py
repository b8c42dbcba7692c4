"""The script of a sandbox process, which `sandbox.py` starts: it locks itself in, then runs untrusted code.

    fd 0: length of the job, job as JSON, standard input   fd 2: "ready" once locked in, or the reason why it cannot be
    job -> modules -> namespaces, an empty root, limits, no rights, allowed system calls -> the code -> fd 1
    exit status: 0 if the code ended with 0, else 1, reported by a process outside the namespaces

It imports only the standard library and runs with `python -I -S`. The code can read the standard library's files, but
no other file, and it has no network or environment and sees no other process. It cannot start a process or thread, and
no allowed system call reaches outside. It needs Linux on x86-64 or ARM64. Elsewhere, and if the kernel or a container
does not let a user create namespaces, `lock` raises OSError.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import importlib
import io
import json
import os
import platform
import resource
import site
import struct
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

NEW_NAMESPACES = 0x10000000 | 0x20000 | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000 | 0x2000000
"""User, mounts, processes, network, IPC, host name, control groups: CLONE_NEW... of <sched.h>."""
READ_ONLY, NO_SUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH = 2
NO_NEW_PRIVILEGES, SET_SECCOMP, DEATH_SIGNAL, FILTER, SIGKILL = 38, 22, 1, 2, 9
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000
"""Results of a filter: allow the call; fail it with EPERM; kill the process."""
ARCHITECTURES = {"x86_64": (0xC000003E, 155, 126), "aarch64": (0xC00000B7, 41, 91)}
"""Numbers by architecture: its id in a filter, and the system calls pivot_root and capset."""
CALLS = {
    "x86_64": "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 17 19 20 21 23 24 25 28 32 33 35 39 60 79 89 96 97 98 "
    "100 102 104 107 108 131 186 201 202 204 217 219 228 229 230 231 234 257 262 267 270 271 273 318 332 "
    "334 439",
    "aarch64": "17 23 24 48 56 57 61 62 63 64 65 66 67 72 73 78 79 80 93 94 98 99 101 113 114 115 123 124 128 "
    "131 132 134 135 139 153 163 165 169 172 174 175 176 177 178 214 215 216 222 226 233 278 291 293 "
    "439",
}
"""Allowed system calls: read, write, close, stat, seek, poll, memory, own signals, clocks, and open (below an empty
root). None creates a process, thread, socket or mount, or sees another process."""
COMMANDS = (0, 1, 2, 3, 1030), (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)
"""Allowed second arguments of fcntl (F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC) and of ioctl (TCGETS,
TIOCGWINSZ, FIONREAD, FIONCLEX, FIOCLEX). Others set owners and signals, leases, locks and notifications, which reach
other processes."""
COMMANDED = {"x86_64": (72, 16), "aarch64": (25, 29)}
"""Numbers of fcntl and ioctl."""
MODULES = (
    "array base64 binascii bisect calendar cmath collections collections.abc contextlib copy csv dataclasses "
    "datetime decimal difflib enum fractions functools hashlib heapq html io itertools json keyword locale "
    "math numbers operator pprint queue random re secrets statistics string struct sys textwrap time traceback "
    "types typing unicodedata uuid zlib"
).split()
"""Modules imported before the process is locked in, since their shared libraries could not be loaded later."""
MOST_CALLS, LONGEST = 100_000, 1 << 20
"""Most calls that tests may make of the answer's functions, and most bytes of one call or result."""
SIGNALS = (StopIteration, StopAsyncIteration)
"""Errors that end an iteration in silence, also in `all` and `zip`: a test must not get them from an answer."""

libc = ctypes.CDLL(None, use_errno=True)


def called(name: str, *arguments: Any) -> None:
    """Call a function of the C library; raise OSError if it fails."""
    function = libc[name]
    function.restype = ctypes.c_long
    if function(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)) != 0:
        number = ctypes.get_errno()
        raise OSError(f"{name}: {os.strerror(number)}")


def lock(limits: dict[str, int]) -> None:
    """Lock the process in; the order of the steps matters. Returns in the child process, which then runs the code."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        raise OSError(f"there is no sandbox for {sys.platform} on {machine}: use Linux on x86-64 or ARM64")
    user, group = os.geteuid(), os.getegid()
    called("unshare", NEW_NAMESPACES)
    for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {user} 1"), ("gid_map", f"65534 {group} 1")):
        Path("/proc/self", name).write_text(text)
    _one_child()
    _empty_root(machine)
    for limit, most in _limits(limits):
        resource.setrlimit(limit, (most, most))
    os.umask(0o077)
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)  # no rights, of version 3
    called("syscall", ARCHITECTURES[machine][2], header, none)
    called("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _filter(machine)


def _limits(limits: dict[str, int]) -> Iterator[tuple[int, int]]:
    yield resource.RLIMIT_AS, limits["memory"]
    yield resource.RLIMIT_CPU, limits["seconds"]
    for none in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        yield none, 0
    yield resource.RLIMIT_NOFILE, 32
    yield resource.RLIMIT_NPROC, 1


def _one_child() -> None:
    """Continue in a child, the first process of the new namespace. This process waits for it and reports whether it
    ended with 0; each ends with the other."""
    child = os.fork()
    if child:
        for descriptor in range(256):
            with suppress(OSError):
                os.close(descriptor)
        os._exit(int(os.waitpid(child, 0)[1] != 0))
    called("prctl", DEATH_SIGNAL, SIGKILL, 0, 0, 0)


def _empty_root(machine: str) -> None:
    """Change to an empty read-only file system that has only the standard library, at its usual path."""
    library = Path(os.__file__).resolve().parent
    source = os.open(library, os.O_PATH | os.O_DIRECTORY)
    flags = NO_SUID | NO_DEVICES
    called("mount", None, b"/", None, RECURSIVE | PRIVATE, None)
    called("mount", b"none", b"/tmp", b"tmpfs", flags, b"size=64k,nr_inodes=64,mode=755")
    Path(f"/tmp{library}").mkdir(parents=True)
    place = f"/tmp{library}".encode()
    called("mount", f"/proc/self/fd/{source}".encode(), place, None, BIND | RECURSIVE, None)
    found = os.statvfs(place).f_flag
    locked = (found & (8 | 1024 | 2048)) | (1 << 21 if found & 4096 else 0)  # noexec and times of access are locked
    called("mount", None, place, None, BIND | REMOUNT | READ_ONLY | flags | locked, None)
    for packages in filter(os.path.isdir, (place + b"/site-packages", place + b"/dist-packages")):
        called("mount", b"none", packages, b"tmpfs", READ_ONLY | flags, b"size=4k,nr_inodes=2,mode=755")
    called("mount", None, b"/tmp", None, BIND | REMOUNT | READ_ONLY | flags, None)
    os.close(source)
    os.chdir("/tmp")
    called("syscall", ARCHITECTURES[machine][1], b".", b".")
    called("umount2", b".", DETACH)
    os.chdir("/")


def _filter(machine: str) -> None:
    """Allow only CALLS, and fcntl and ioctl with COMMANDS, and only by the numbers of this architecture."""
    number = ARCHITECTURES[machine][0]
    steps = [(0x20, 0, 0, 4), (0x15, 1, 0, number), (0x06, 0, 0, KILL), (0x20, 0, 0, 0)]
    for call in map(int, CALLS[machine].split()):
        steps += [(0x15, 0, 1, call), (0x06, 0, 0, ALLOW)]
    for call, commands in zip(COMMANDED[machine], COMMANDS, strict=True):
        steps += [(0x15, 0, 2 * len(commands) + 2, call), (0x20, 0, 0, 24)]  # the kernel reads 32 bits of it, too
        steps += [step for command in commands for step in ((0x15, 0, 1, command), (0x06, 0, 0, ALLOW))]
        steps.append((0x06, 0, 0, REFUSE))
    steps.append((0x06, 0, 0, REFUSE))
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    head = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program))
    called("prctl", SET_SECCOMP, FILTER, ctypes.c_char_p(head), 0, 0)


# What the process does once it is locked in


def program(job: dict[str, Any]) -> None:
    """Run a program that reads standard input and writes standard output."""
    namespace = {"__name__": "__main__", "__builtins__": builtins}
    exec(compile(job["code"], "answer.py", "exec"), namespace)


def answer(job: dict[str, Any]) -> None:
    """Run the answer's code, then serve calls of its functions. Each line of `calls` is one call,
    `[name, arguments, named]` as a Python literal; each line of `results` is a kind and a value."""
    calls, results = os.fdopen(job["calls"], "rb"), os.fdopen(job["results"], "wb", buffering=0)
    namespace: dict[str, Any] = {"__name__": "answer", "__builtins__": builtins}
    with redirect_stdout(io.StringIO()):
        with suppress(Exception):  # it may have defined functions before it failed
            exec(compile(job["code"], "answer.py", "exec"), namespace)
        while line := calls.readline(LONGEST):
            name, arguments, named = literal(line.decode())
            results.write(_reply(namespace.get(name), arguments, named) + b"\n")


def _reply(function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> bytes:
    """Return a function's result, or the first built-in class of its error. If there is no function, or its result is
    not a literal, return another kind, so that no test takes it for an error that it expects."""
    if function is None:
        return b"['missing', None]"
    try:
        reply = ["value", function(*arguments, **named)]
    except Exception as error:  # noqa: BLE001 - whatever the code raises is its result
        reply = ["error", next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")]
    with suppress(Exception):
        line = repr(reply).replace("\n", " ").encode()
        literal(line.decode())
        if len(line) < LONGEST:
            return line
    return b"['unwritable', None]"


def tests(job: dict[str, Any]) -> None:
    """Run the tests, which get the results of the answer's functions only as literals that this process parses: so `==`
    and `isinstance` are Python's own. Writes one letter per test: p passed, f failed, ? does not test the answer or
    cannot run this way, which no answer can cause."""
    calls, results = os.fdopen(job["calls"], "wb", buffering=0), os.fdopen(job["results"], "rb")
    made, first, fault = 0, 0, b""
    expected: tuple[type[Exception], ...] = ()

    def call(name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a function of the answer in its process. Unless the call returns, or raises an error that the test
        expects, the test cannot pass, even if it catches the error."""
        nonlocal made, fault
        made += 1
        before, fault = fault, fault or b"f"
        try:
            line = repr([name, arguments, named]).encode()
            literal(line.decode())
            if len(line) >= LONGEST:
                raise ValueError("a longer call than is allowed")
        except (ValueError, SyntaxError, RecursionError):
            fault = before or (b"?" if made == first or not plain([*arguments, named]) else b"f")
            raise
        if made > MOST_CALLS:  # an answer's results may make tests loop
            raise OverflowError
        calls.write(line + b"\n")
        line = results.readline(LONGEST)
        if not line.endswith(b"\n"):
            raise EOFError("the answer's process is gone")
        kind, value = literal(line.decode())
        if kind == "value":
            fault = before
            return value
        known = vars(builtins).get(value) if kind == "error" and isinstance(value, str) else None
        if isinstance(known, type) and issubclass(known, expected) and not issubclass(known, SIGNALS):
            fault = before
            raise known.__new__(known)
        raise RuntimeError

    for test in job["tests"]:
        verdict, first, fault = b"f", made + 1, b""
        try:
            with redirect_stdout(io.StringIO()):
                tree = ast.parse(f"{job['setup']}\n{test}")
                code, expected = compile(tree, "tests.py", "exec"), errors(tree)
                namespace: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
                for name in names(code) - set(dir(builtins)):
                    namespace[name] = Remote(name, call)
                if not any(isinstance(node, ast.Name) and node.id in ("eval", "exec") for node in ast.walk(tree)):
                    exec(code, namespace)
                    if isinstance(check := namespace.get("check"), types.FunctionType) and job["entry"]:
                        check(Remote(job["entry"], call))
                    verdict = b"p"
        except Exception as error:  # noqa: BLE001 - whatever the test raises
            if isinstance(error, MemoryError):  # results of earlier tests may have filled memory: the answer fails
                fault = b"f"
        os.write(1, fault or (verdict if made >= first else b"?"))


def errors(tree: ast.AST) -> tuple[type[Exception], ...]:
    """Return the built-in errors that a test names. A bare `except` names all of them."""
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if any(isinstance(node, ast.ExceptHandler) and node.type is None for node in ast.walk(tree)):
        named.add("Exception")
    kinds = [Exception if name == "BaseException" else vars(builtins).get(name) for name in named]
    return tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception))


def plain(value: Any) -> bool:
    """True if a value has only types that results have, so that it may be one."""
    if type(value) in (list, tuple, set, dict):
        return all(map(plain, [*value, *value.values()] if type(value) is dict else value))
    return type(value) in (int, float, complex, str, bytes, bool, type(None), type(...))


class Remote:
    """Stands for one of the answer's functions in a test."""

    def __init__(self, name: str, call: Callable[..., Any]):
        self.name, self.call = name, call

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.call(self.name, arguments, named)


def names(code: types.CodeType) -> set[str]:
    """Return all global and attribute names in code, also in the functions within it."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= names(constant)
    return found


class _Infinite(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node


def literal(text: str) -> Any:
    """`ast.literal_eval` that also reads inf and nan as repr writes them."""
    return ast.literal_eval(_Infinite().visit(ast.parse(text.strip(), mode="eval")))


ROLES: dict[str, Callable[[dict[str, Any]], None]] = {"program": program, "answer": answer, "tests": tests}


def main() -> None:
    called("prctl", DEATH_SIGNAL, SIGKILL, 0, 0, 0)
    size = int.from_bytes(_read(8), "big")
    job = json.loads(_read(size))
    for module in (*MODULES, "encodings.idna"):
        importlib.import_module(module)
    sys.setrecursionlimit(3000)
    sys.set_int_max_str_digits(0)
    site.setquit()  # `exit()`, which programs use, is not defined with -S
    nowhere = os.open("/dev/null", os.O_WRONLY)
    try:
        lock(job["limits"])
    except OSError as error:
        os.write(2, str(error).encode())
        os._exit(1)
    os.write(2, b"ready")
    os.dup2(nowhere, 2)
    os.close(nowhere)
    ROLES[job["role"]](job)


def _read(count: int) -> bytes:
    found = b""
    while len(found) < count and (more := os.read(0, count - len(found))):
        found += more
    return found


if __name__ == "__main__":
    main()
