"""Code that models write, locked in: what it computes counts, and nothing of what it tries beyond that."""
# ruff: noqa: E501 - a program a line

from __future__ import annotations

import asyncio
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from plaudit import load_settings, run
from plaudit.rewards import sandbox
from plaudit.rewards.sandbox import CodeOptions, CodeReward, SandboxError, check_sandbox, code_of
from plaudit.settings.tree import SettingsError
from plaudit.types import Completion, Finish, Prompt, Score

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]
SECRET = "a-secret-of-the-run-8431"

try:
    check_sandbox()
except SandboxError as error:
    pytest.skip(str(error), allow_module_level=True)


def scored(text: str, *, options: dict[str, Any] | None = None, **row: Any) -> Score:
    reward = CodeReward("code", {"seconds": 2, "wait": 10, **(options or {})})
    completion = Completion(tokens=(2,), logprobs=(0.0,), versions=(0,), text=text, finish=Finish.EOS)
    (score,) = asyncio.run(reward.score(Prompt(id="p", text="p", tokens=(1,), extra=row), [completion]))
    return score


# --- what counts


def test_tests_call_the_answers_functions() -> None:
    tests = ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]", "assert add('a', 'b') == 'ab'"]
    answer = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nThat is all."
    assert scored(answer, tests=tests) == Score(value=1.0, parts={"passed": 1.0})
    wrong = answer.replace("a + b", "a - b")
    assert scored(wrong, tests=tests) == Score(value=0.0, parts={"passed": 0.0})
    half = answer.replace("return a + b", "return a + b if a != 1 else 0")
    assert scored(half, tests=tests, options={"partial": True}).value == pytest.approx(2 / 3)
    assert scored(half, tests=tests).value == 0.0


def test_the_checks_of_human_eval() -> None:
    row = {"tests": "def check(candidate):\n    assert candidate([1, 2]) == [2, 1]\n", "entry_point": "turned"}
    assert scored("def turned(x):\n    return x[::-1]", **row).value == 1.0
    assert scored("def turned(x):\n    return x", **row).value == 0.0
    assert scored("def other(x):\n    return x[::-1]", **row).value == 0.0


@pytest.mark.parametrize(
    "value", ["1", "-2.5", "'a\\nb'", "(1, [2, {3: {4}}])", "None", "b'x'", "float('inf')", "True", "10**50", "1j"]
)
def test_values_go_both_ways_as_they_are(value: str) -> None:
    assert scored(
        "def same(x):\n    return x", tests=[f"y = {value}\nassert same(y) == y and type(same(y)) is type(y)"]
    )
    assert scored("def same(x):\n    return x", tests=[f"y = {value}\nassert same(y) == y"]).value == 1.0


def test_errors_are_results_too() -> None:
    tests = ["try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError"]
    assert scored("def f(x):\n    if x < 0:\n        raise ValueError(x)", tests=tests).value == 1.0
    assert scored("def f(x):\n    if x < 0:\n        raise KeyError(x)", tests=tests).value == 0.0
    assert scored("def f(x):\n    pass", tests=tests).value == 0.0


@pytest.mark.parametrize(
    "test",
    [
        "try: f(-1)\nexcept (KeyError, ValueError): pass\nelse: raise AssertionError",
        "import contextlib\nwith contextlib.suppress(ValueError): assert f(-1)",
        "import unittest\nunittest.TestCase().assertRaises(ValueError, f, -1)",
        "try: assert f(-1)\nexcept Exception as error: assert isinstance(error, ValueError)",
        "try: raise LookupError if f(-1) else KeyError\nexcept: pass",
        "expected = ValueError\ntry: assert f(-1)\nexcept expected: pass",
    ],
)
def test_errors_that_a_test_names_are_errors_that_it_expects(test: str) -> None:
    for error in ("ValueError(x)", "type('Own', (ValueError,), {})", "UnicodeTranslateError('a', 0, 1, 'b')"):
        assert scored(f"def f(x): raise {error}", tests=[test]).value == 1.0
    assert scored("def f(x): raise StopIteration", tests=[test]).value == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "print(int(input()) + 1)",
        "import sys\nsys.stdout.write('2')\nsys.exit(0)",
        "print(2)\nexit()",
        "import os\nprint(2, flush=True)\nos._exit(0)",
        "import os\nos.write(1, b'2')",
        "import atexit\natexit.register(print, 2)",
        "import sys\nprint('adding', file=sys.stderr, flush=True)\nprint(2)",
        "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\nprint(depth(2500) - 2498)",
        "import io, os, sys\nsys.stdout = io.TextIOWrapper(os.fdopen(os.dup(1), 'wb'))\nprint(1 + sys.stdin.isatty() + 1)",
        "if __name__ == '__main__': print(len(str(10**5000)) - 4999)",
        "try: raise KeyError\nexcept KeyError: print(2)",
    ],
)
def test_programs_that_end_by_themselves_pass(code: str) -> None:
    assert scored(code, cases=[{"input": "1\n", "output": "2\n"}]).value == 1.0


@pytest.mark.parametrize(
    "value",
    [
        "eval('[' * 50 + ']' * 50)",
        "(), [()]",
        "{1, (2,)}",
        "set()",
        "True",
        "10**5000",
        "-1e999",
        "{None: b'x'}",
        "'\\udc80'",
    ],
)
def test_results_are_what_they_are_where_tests_run(value: str) -> None:
    made = repr(eval(value)) if "eval" in value else value
    test = f"y = {made}\nassert all(x == y and type(x) is type(y) for x in map(f, [y]))\nassert f(f(y)) == y"
    assert scored(f"def f(x):\n    assert x == ({value})\n    return ({value})", tests=[test]).value == 1.0
    assert scored("def f(x): return float('nan')", tests=["x = f(1)\nassert x != x"]).value == 1.0


def test_what_comes_after_a_failed_case_does_not_run() -> None:
    cases = [{"input": "", "output": "no"}] + [{"input": "", "output": "yes"}] * 3
    row = {"cases": cases, "tests": ["assert f(1)"]}
    code = "print('yes')\ndef f(x): return 1"
    assert scored(code, **row) == Score(value=0.0, parts={"passed": 0.0})
    assert scored(code, **row, options={"partial": True}) == Score(value=0.8, parts={"passed": 0.8})


def test_an_answer_has_so_much_time_in_all() -> None:
    code = "import time\nif input() == 'slow': time.sleep(1000)\nprint(1)"
    cases = [{"input": text, "output": "1"} for text in ("slow", "fast", "fast")]
    score = scored(code, cases=cases, options={"wait": 1000, "total": 1, "partial": True})
    assert score == Score(value=0.0, parts={"passed": 0.0})
    tests = ["assert f(1)", "assert f(2)"]
    code = "import time\ndef f(x): time.sleep(1000)"
    assert scored(code, tests=tests, options={"wait": 1000, "total": 1}).value == 0.0


def test_programs_read_and_write() -> None:
    cases = [{"input": "3 4\n", "output": "7\n"}, {"input": "1 1\n", "output": "2"}]
    answer = "a, b = map(int, input().split())\nprint(a + b, ' ')\n"
    assert scored(answer, cases=cases).value == 1.0
    assert scored(answer.replace("+", "*"), cases=cases) == Score(value=0.0, parts={"passed": 0.0})
    assert (
        scored("import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))", cases=cases).value == 1.0
    )
    long = "".join(f"{n}\n" for n in range(30000))
    assert scored("import sys\nprint(len(sys.stdin.read()))", cases=[{"input": long, "output": str(len(long))}]).value


def test_rows_that_test_nothing_are_failures_and_no_zeros() -> None:
    for row, told in (
        ({}, "neither tests"),
        ({"tests": ["assert True"]}, "calls no function"),
        ({"tests": ["assert f(1) =="]}, "fails before"),
        ({"tests": ["import numpy\nassert f(1) == 1"]}, "fails before"),
        ({"tests": ["assert f(1) == 1", "assert f(lambda: 1)"]}, "test 2"),
        ({"tests": ["assert f(f(1), lambda: 1)"]}, "literal"),
        ({"tests": ["x = 0\nfor _ in range(250): x = [x]\nassert f(x)"]}, "literal"),
        ({"tests": ["assert f('a' * (1 << 20))"]}, "1 MiB"),
        ({"tests": ["assert eval(f(1)) == 1"]}, "eval"),
        ({"tests": "def check(candidate):\n    assert candidate(1)"}, "calls no function"),
        ({"cases": ["3 4"]}, "cases must be a list of objects"),
    ):
        score = scored("def f(x):\n    return 1", **row)
        assert score.value is None
        assert told in str(score.reason)


def test_the_last_block_is_the_answer() -> None:
    assert code_of("```\nfirst\n```\n```python\nlast\n```") == "last\n"
    assert code_of("no block") == "no block"
    assert code_of("```py\ncut off") == "cut off"


# --- what does not

READ = "print(open({!r}).read())"
SYSCALL = "import ctypes\nlibc = ctypes.CDLL(None)\n"
ESCAPES = {
    "tcp": "import socket\ns = socket.create_connection(('127.0.0.1', PORT), 2)\ns.send(b'x')\nprint('ESCAPED')",
    "tcp elsewhere": "import socket\nsocket.create_connection(('192.0.2.1', 80), 1)\nprint('ESCAPED')",
    "udp": "import socket\ns = socket.socket(2, 2)\ns.sendto(b'x', ('127.0.0.1', PORT))\nprint('ESCAPED')",
    "ipv6": "import socket\ns = socket.socket(10, 1)\nprint('ESCAPED')",
    "unix socket": "import socket\ns = socket.socket(1, 1)\ns.connect(FOLDER + '/socket')\nprint('ESCAPED')",
    "abstract socket": "import socket\ns = socket.socket(1, 1)\ns.connect('\\0' + NAME)\nprint('ESCAPED')",
    "raw socket": "import socket\nsocket.socket(2, 3, 1)\nprint('ESCAPED')",
    "netlink": "import socket\nsocket.socket(16, 3, 0)\nprint('ESCAPED')",
    "listen": "import socket\nsocket.create_server(('', 0))\nprint('ESCAPED')",
    "socketpair": "import socket\nsocket.socketpair()\nprint('ESCAPED')",
    "socket by number": SYSCALL + "if libc.syscall(41, 2, 1, 0) >= 0: print('ESCAPED')",
    "name server": "import socket\nprint(socket.gethostbyname('localhost'), 'ESCAPED')",
    "page": "import urllib.request\nurllib.request.urlopen(f'http://127.0.0.1:{PORT}', timeout=2)\nprint('ESCAPED')",
    "file of the run": "print(open(FOLDER + '/secret').read())",
    "passwords": "print(open('/etc/passwd').read(), 'ESCAPED')",
    "home": "import os\nfor at, _, files in os.walk(HOME):\n    if files and 'lib/python3' not in at: print('ESCAPED')",
    "source": "print(open(SOURCE).read(), 'ESCAPED')",
    "above": "import os\nfor _ in range(20): os.chdir('..')\nprint(open('etc/passwd').read(), 'ESCAPED')",
    "old root": "import os\nif set(os.listdir('/')) & {'etc', 'proc', 'dev', 'home'}: print('ESCAPED')",
    "proc": "print(open('/proc/1/environ').read(), 'ESCAPED')",
    "own proc": "print(open('/proc/self/maps').read(), 'ESCAPED')",
    "devices": "print(open('/dev/urandom', 'rb').read(1), 'ESCAPED')",
    "shared memory": "open('/dev/shm/escaped', 'w').write('x')\nprint('ESCAPED')",
    "write in tmp": "open('/tmp/escaped-of-plaudit', 'w').write('x')\nprint('ESCAPED')",
    "write at root": "open('/escaped', 'w').write('x')\nprint('ESCAPED')",
    "write the library": "import os\nopen(os.__file__, 'a').write('#')\nprint('ESCAPED')",
    "write beside the library": "import os\nopen(os.__file__ + 'x', 'w').write('#')\nprint('ESCAPED')",
    "remove": "import os\nos.remove(os.__file__)\nprint('ESCAPED')",
    "change rights": "import os\nos.chmod(os.__file__, 0o777)\nprint('ESCAPED')",
    "folder": "import os\nos.mkdir('/x')\nprint('ESCAPED')",
    "link": "import os\nos.symlink('/etc', '/x')\nprint('ESCAPED')",
    "chroot": "import os\nos.chroot('/')\nprint('ESCAPED')",
    "mount": SYSCALL + "if libc.mount(b'none', b'/', b'tmpfs', 0, None) == 0: print('ESCAPED')",
    "writable again": SYSCALL + "if libc.mount(None, b'/', None, 32 | 4096, None) == 0: print('ESCAPED')",
    "unmount": SYSCALL + "if libc.umount2(b'/', 2) == 0: print('ESCAPED')",
    "memory file": "import os\nos.memfd_create('x')\nprint('ESCAPED')",
    "environment": "import os\nprint(dict(os.environ))\nif os.environ.get('SECRET'): print('ESCAPED')",
    "environment in memory": SYSCALL + "libc.getenv.restype = ctypes.c_char_p\nprint(libc.getenv(b'SECRET'))",
    "other descriptors": "import os\nfor fd in range(3, 64):\n    try: print(os.read(fd, 100), 'ESCAPED')\n    except OSError: pass",
    "folder by descriptor": "import os\nfor fd in range(64):\n    try: os.fchdir(fd); print('ESCAPED')\n    except OSError: pass",
    "arguments": "import sys\nif len(sys.orig_argv) > 6: print('ESCAPED')",
    "trace": SYSCALL + "if libc.ptrace(16, 1, 0, 0) == 0: print('ESCAPED')",
    "memory of others": SYSCALL + "if libc.syscall(310, 1, 0, 0, 0, 0, 0) >= 0: print('ESCAPED')",
    "kill": "import os\nos.kill(os.getppid() or 1, 0)\nprint('ESCAPED')",
    "kill all": "import os\nos.kill(-1, 9)\nprint('ESCAPED')",
    "see the parent": "import os\nif os.getpid() != 1: print('ESCAPED')",
    "keys": SYSCALL + "if libc.syscall(250, 0, -3, 1) >= 0: print('ESCAPED')",
    "kernel log": SYSCALL + "if libc.klogctl(10, 0, 0) >= 0: print('ESCAPED')",
    "fork": "import os\npid = os.fork()\nprint('ESCAPED')",
    "thread": "import threading\nt = threading.Thread(target=print, args=('ESCAPED',))\nt.start()",
    "subprocess": "import subprocess\nprint(subprocess.run(['/bin/echo', 'ESCAPED'], capture_output=True).stdout)",
    "system": "import os\nif os.system('true') == 0: print('ESCAPED')",
    "exec": "import os, sys\nos.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED'])",
    "processes": "import multiprocessing\nmultiprocessing.Process(target=print, args=('ESCAPED',)).start()",
    "daemon": "import os\nos.setsid()\nprint('ESCAPED')",
    "clone by number": SYSCALL + "if libc.syscall(56, 17, 0, 0, 0, 0) >= 0: print('ESCAPED')",
    "become root": "import os\nos.setuid(0)\nprint('ESCAPED')",
    "new namespace": SYSCALL + "if libc.unshare(0x10000000) == 0: print('ESCAPED')",
    "own limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nprint('ESCAPED')",
    "without filter": SYSCALL + "if libc.prctl(22, 0, 0, 0, 0) == 0: print('ESCAPED')",
    "packages": (
        "import os, sys\nfor name in ('site-packages', 'dist-packages'):\n"
        "    at = os.path.join(os.path.dirname(os.__file__), name)\n    sys.path += [at]\n"
        "    if os.path.isdir(at) and os.listdir(at): print('ESCAPED')\nimport pip\nprint('ESCAPED')"
    ),
    "signals to others": SYSCALL + "if libc.fcntl(0, 8, 1) == 0 or libc.fcntl(0, 10, 9) == 0: print('ESCAPED')",
    "signals by control": SYSCALL + "if libc.ioctl(0, 0x5452, b'\\1\\0\\0\\0') == 0: print('ESCAPED')",
    "asynchronous pipes": SYSCALL + "if libc.fcntl(0, 4, 0x2000) == 0: print('ESCAPED')",
    "lease": SYSCALL + "import os\nif libc.fcntl(os.open(os.__file__, 0), 1024, 0) == 0: print('ESCAPED')",
    "notifications": SYSCALL + "import os\nif libc.fcntl(os.open('/', 0), 1026, 2) == 0: print('ESCAPED')",
    "locks": SYSCALL + "import os\nif libc.fcntl(os.open(os.__file__, 0), 6, bytes(32)) == 0: print('ESCAPED')",
    "size of a pipe": SYSCALL + "if libc.fcntl(1, 1031, 1 << 20) > 0: print('ESCAPED')",
    "keystrokes": SYSCALL + "import os\nif os.isatty(0) or libc.ioctl(0, 0x5412, b'x') == 0: print('ESCAPED')",
    "commands with more bits": SYSCALL + "if libc.syscall(72, 0, ctypes.c_long(8 | 1 << 32), 1) == 0: print('ESCAPED')",
    "load of the machine": SYSCALL + "if libc.sysinfo(ctypes.create_string_buffer(512)) == 0: print('ESCAPED')",
    "io_uring": SYSCALL + "if libc.syscall(425, 8, bytes(120)) >= 0: print('ESCAPED')",
    "programs of the kernel": SYSCALL + "if libc.syscall(321, 0, 0, 0) >= 0: print('ESCAPED')",
    "memory": "x = bytearray(4 << 30)\nprint('ESCAPED')",
    "memory in pieces": "x = []\nwhile True:\n    x.append('a' * 10**7)\n    if len(x) > 100: print('ESCAPED'); break",
    "mapped memory": "import mmap\nmmap.mmap(-1, 4 << 30)\nprint('ESCAPED')",
    "32-bit calls": (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\n"
        "m.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')\n"
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\n"
        "if f() > 0: print('ESCAPED')"
    ),
}
PRINT = (
    "import os\nfor fd in range(3, 64):\n    try: os.write(fd, (\"{}\" + '\\n').encode() * 5)\n    except OSError: pass"
)
TESTS = [
    *(f"assert f({n}) == {n + 1}" for n in range(3)),
    "assert f(f(f(1)) * 2) == 7",
    "assert f(f(1)) == 3",
    "assert all(map(lambda n: f(n) == n + 1, range(3)))",
    "assert not any(map(lambda n: f(n) != n + 1, range(3)))",
    "for a, b in zip(map(f, range(3)), [1, 2, 3]): assert a == b",
    "assert sum(1 for _ in filter(lambda n: f(n) != n + 1, range(3))) == 0",
    "async def results():\n    for n in range(3): assert f(n) == n + 1\ntry: results().send(None)\nexcept StopIteration: pass",
    "class S:\n    def __getitem__(self, n):\n        if n > 2: [].pop()\n        assert f(n) == n + 1\nfor _ in S(): pass",
    "class A:\n    def __getattr__(self, name): return f(1)\nassert getattr(A(), 'x', 2) == 2",
    "try: assert f(1) == 2\nexcept ValueError: pass",
]
"""They pass if f adds 1. An answer whose errors or results these tests swallow must not pass any."""
FORGERIES = {
    "exit": "import sys\nsys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "exit in the function": "def f(x):\n    raise SystemExit(0)",
    "say it": "print('p' * 100)\ndef f(x):\n    print('p')",
    "write it everywhere": "import os\nfor fd in range(64):\n    try: os.write(fd, b'p' * 9)\n    except OSError: pass",
    "always equal": "class E:\n    def __eq__(self, other): return True\ndef f(x): return E()",
    "a number that is always equal": "class E(int):\n    def __eq__(self, other): return True\ndef f(x): return E(0)",
    "a text that lies": "class E(str):\n    def __repr__(self): return '__import__(\"os\")._exit(0)'\ndef f(x): return E()",
    "a class that lies": "class E:\n    __class__ = int\n    def __eq__(self, other): return True\ndef f(x): return E()",
    "builtins": "import builtins\nbuiltins.AssertionError = None\nbuiltins.isinstance = lambda *a: True\ndef f(x): return 0",
    "frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        frame.f_locals.update(verdict=b'p')\n        frame = frame.f_back",
    "the harness": "import __main__\nfor name in list(vars(__main__)):\n    setattr(__main__, name, lambda *a, **k: b'p')",
    "modules": "import sys\nfor name in list(sys.modules): sys.modules[name] = None",
    "at the end": "import atexit, os\natexit.register(lambda: os.write(1, b'p'))\ndef f(x): return 0",
    "read the tests": "import gc\ndef f(x):\n    for o in gc.get_objects():\n        if isinstance(o, str) and 'assert f' in o: return eval(o.split('==')[1])",
    "results before they are asked for": "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b\"['value', 0]\\n\" * 50)\n    except OSError: pass\ndef f(x): return 0",
    "code as a result": "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b\"['value', __import__('os').write(1, b'p')]\\n\")\n    except OSError: pass",
    "an error of the harness": "class Unsendable(Exception): pass\ndef f(x): raise Unsendable",
    "no words": "def f(x):\n    while True: pass",
    "endless words": "import os\nwhile True: os.write(1, b'p' * 65536)",
    "sleep": "import time\ndef f(x): time.sleep(1000)",
    "deaf": "import signal, time\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\nwhile True: pass",
    "crash": "import ctypes\ndef f(x): ctypes.string_at(0)",
    "deep": "def f(x):\n    y = []\n    for _ in range(10**6): y = [y]\n    return y",
    "large": "def f(x): return 'a' * (1 << 27)",
    "no function": "g = None",
    "end of an iteration": "def f(x): raise StopIteration",
    "end of an asynchronous iteration": "def f(x): raise StopAsyncIteration",
    "end of a generator": "def f(x): raise GeneratorExit",
    "an end of its own": "class E(StopIteration, ValueError): pass\ndef f(x): raise E",
    "end of a sequence": "def f(x): raise IndexError",
    "no such attribute": "def f(x): raise AttributeError",
    "an error with arguments": "def f(x): raise UnicodeTranslateError('a', 0, 1, 'b') if x > 99 else KeyError(x)",
    "print and hang": "import time\nprint('right', flush=True)\ntime.sleep(1000)",
    "print, close and hang": "import os, time\nprint('right', flush=True)\nos.close(1)\ntime.sleep(1000)",
    "print and compute": "print('right', flush=True)\nwhile True: pass",
    "print and raise": "print('right')\n1 / 0",
    "print and exit with 1": "import sys\nprint('right')\nsys.exit(1)",
    "print and exit with a text": "import sys\nprint('right')\nsys.exit('done')",
    "print and exit at once": "import os\nprint('right', flush=True)\nos._exit(256 + 3)",
    "print and crash": "import ctypes\nprint('right', flush=True)\nctypes.string_at(0)",
    "print and abort": "import os\nprint('right', flush=True)\nos.abort()",
    "print and kill itself": "import os\nprint('right', flush=True)\nos.kill(os.getpid(), 9)",
    "print and kill its parent": "import os\nprint('right', flush=True)\nos.kill(os.getppid(), 9)",
    "print and use all memory": "print('right', flush=True)\nx = []\nwhile True: x.append(bytearray(1 << 24))",
    "print too much": "print('right')\nfor _ in range(100): print('\\n' * 9999)",
    "print and recurse": "print('right', flush=True)\ndef f(x): return f(x)\nf(1)",
    "not a literal": "def f(x): return object()",
    "an ellipsis": "def f(x): return ...",
    "a text that cannot be written": "class E(str):\n    def __repr__(self): raise ValueError\ndef f(x): return E()",
    "a text that is no text": "class E(str):\n    def __repr__(self): return \"'\\udc80'\"\ndef f(x): return E()",
    "a lone surrogate": "def f(x): return '\\udc80' * 9",
    "as deep as can be read": "def f(x):\n    y = 0\n    for _ in range(199): y = [y]\n    return y",
    "long": "def f(x): return 'a' * (1 << 20)",
    "a large number": "def f(x): return 10**5000",
    "no number": "def f(x): return float('nan')",
    "an ellipsis as a result": PRINT.format("['value', ...]"),
    "a large number as a result": PRINT.format("['value', 0x\" + 'f' * 9999 + \"]"),
    "signs as a result": PRINT.format("['value', \" + '-' * 9999 + \"1]"),
    "no result": PRINT.format("['unwritable', 1]"),
    "half a result": PRINT.format("['value'"),
    "an error that is none": PRINT.format("['error', 'SystemExit']"),
    "an error without a name": PRINT.format("['error', ['ValueError']]"),
    "large beside the limit": "def f(x): return x if len(str(x)) > 9 else 'a' * (2**20 - 40)",
}
"""Each is worth 0: neither 1 nor a failure, which would leave it out of the loss."""


def test_there_are_more_than_sixty() -> None:
    assert len(ESCAPES) >= 60
    assert len(FORGERIES) >= 60
    assert scored("def f(x): return x + 1", tests=TESTS).value == 1.0


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What there is to reach: a server, sockets, a file, and a secret in the environment."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "secret").write_text(SECRET)
    (folder / "secret").chmod(0o644)
    os.environ["SECRET"] = SECRET
    name = f"plaudit-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        udp.bind(("127.0.0.1", tcp.getsockname()[1]))
        unix.bind(str(folder / "socket")[-100:] if len(str(folder)) > 90 else str(folder / "socket"))
        abstract.bind("\0" + name)
        unix.listen()
        abstract.listen()
        found = {"PORT": tcp.getsockname()[1], "FOLDER": str(folder), "NAME": name, "HOME": str(Path.home())}
        yield found | {"SOURCE": __file__, "doors": (tcp, udp, unix, abstract)}
    del os.environ["SECRET"]


def written(code: str, outside: dict[str, Any], **options: Any) -> str:
    head = "".join(f"{name} = {value!r}\n" for name, value in outside.items() if name != "doors")
    job = {"role": "program", "code": f"{head}print('began', flush=True)\n{code}"}
    told, _ = asyncio.run(sandbox._run(job, CodeOptions(seconds=2, wait=10, **options)))
    return told.decode(errors="replace")


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_is_reached(name: str, outside: dict[str, Any]) -> None:
    if name in ("32-bit calls", "commands with more bits") and platform.machine() != "x86_64":
        pytest.skip("of another processor")
    told = written(ESCAPES[name], outside)
    assert told.startswith("began\n")
    assert "ESCAPED" not in told
    assert SECRET not in told
    for door in outside["doors"]:
        door.setblocking(False)
        with pytest.raises(BlockingIOError):
            door.recv(1) if door.type == socket.SOCK_DGRAM else door.accept()
    assert not Path("/tmp/escaped-of-plaudit").exists()
    assert not Path("/dev/shm/escaped").exists()


def test_the_same_code_would_escape_outside(outside: dict[str, Any]) -> None:
    """What is tried works where nothing is locked, so that the tests above say something."""
    head = "".join(f"{name} = {value!r}\n" for name, value in outside.items() if name != "doors")
    tried = (
        "tcp",
        "udp",
        "unix socket",
        "abstract socket",
        "socket by number",
        "file of the run",
        "source",
        "own proc",
        "signals to others",
        "notifications",
        "load of the machine",
    )
    for name in (*tried, "environment", "environment in memory", "fork", "thread", "subprocess", "memory file", "exec"):
        command = [sys.executable, "-I", "-c", head + ESCAPES[name]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert "ESCAPED" in done.stdout or SECRET in done.stdout, name + done.stderr
    for door in outside["doors"]:
        door.setblocking(False)
        door.recv(1) if door.type == socket.SOCK_DGRAM else door.accept()


@pytest.mark.parametrize("name", FORGERIES)
def test_no_verdict_is_forged(name: str) -> None:
    code = FORGERIES[name]
    row: dict[str, Any] = {"cases": [{"input": "1", "output": "right"}]} if "right" in code else {"tests": TESTS}
    score = scored(code, **row, options={"seconds": 1, "wait": 2, "partial": True})
    assert score == Score(value=0.0, parts={"passed": 0.0})


@pytest.mark.parametrize(
    "name", ["no function", "exit in the function", "not a literal", "crash", "large", "half a result"]
)
def test_a_test_that_catches_all_errors_needs_a_result(name: str) -> None:
    tests = ["try: f(1)\nexcept Exception: pass", "try: f(1)\nexcept: pass"]
    assert scored(FORGERIES[name], tests=tests, options={"partial": True}).value == 0.0
    assert scored("def f(x): raise OSError", tests=tests).value == 1.0, "as its row says"


def test_what_does_not_end_is_ended(outside: dict[str, Any]) -> None:
    began = time.monotonic()
    assert written("while True: pass", outside) == "began\n"
    assert time.monotonic() - began < 8, "by its CPU time"
    job = {"role": "program", "code": "import time\ntime.sleep(1000)"}
    began = time.monotonic()
    assert asyncio.run(sandbox._run(job, CodeOptions(wait=1))) == (b"", False)
    assert time.monotonic() - began < 8
    assert len(written("while True: print('a' * 10000)", outside, output_kb=64)) == 64 << 10


def test_nothing_is_left_behind() -> None:
    def sandboxes() -> list[str]:
        found = []
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = line.read_bytes()
            except OSError:
                continue
            if b"rewards/sandbox_child.py" in words:
                found.append(line.parent.name)
        return found

    before = sandboxes()
    scored(FORGERIES["deaf"], tests=["assert f(1)"], options={"seconds": 1, "wait": 2})
    scored(FORGERIES["sleep"], tests=["assert f(1)"], options={"seconds": 1, "wait": 2})
    until(lambda: set(sandboxes()) <= set(before), "what it started ends")
    code = (
        "import asyncio, os, threading\nfrom plaudit.rewards.sandbox import CodeOptions, _run\n"
        "threading.Timer(1.0, os._exit, (1,)).start()\n"
        "asyncio.run(_run({'role': 'program', 'code': 'import time\\ntime.sleep(1000)'}, CodeOptions()))"
    )
    subprocess.run([sys.executable, "-c", code], timeout=240, check=False)
    until(lambda: set(sandboxes()) <= set(before), "a run that is killed takes them with it")


# --- runs


def test_a_run_learns_from_it(make_recipe: Recipe, tmp_path: Path) -> None:
    recipe = make_recipe("grpo", tmp_path, rollout={"max_failed": 1.0}, train={"steps": 1})
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Write f.", "tests": ["assert f(1) == 2"]}\n' * 6)
    recipe["data"]["train"] = str(rows)
    done = run(load_settings(recipe | {"rewards": [{"kind": "code"}]}))
    assert [row["reward/failed"] for row in done.metrics] == [0.0]
    assert [row["reward/code"] for row in done.metrics] == [0.0]


def test_a_machine_that_cannot_lock_it_in_starts_no_run(environment: dict[str, str]) -> None:
    """Forbid more user namespaces to this process's children."""
    code = """
import ctypes
from plaudit.rewards import sandbox
from plaudit.rewards.sandbox import check_sandbox
import asyncio
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x10000000) == 0
open("/proc/sys/user/max_user_namespaces", "w").write("0")
try:
    check_sandbox()
except sandbox.SandboxError as error:
    print(error)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert "(unshare: " in done.stdout, done.stderr
    assert "user namespaces" in done.stdout


def test_settings_that_are_none(make_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe("grpo", tmp_path)
    for options, told in (({"second": 1}, "mean seconds"), ({"seconds": 0}, "options.seconds=0")):
        with pytest.raises(SettingsError, match=told):
            load_settings(recipe | {"rewards": [{"kind": "code", "options": options}]})

    def refused() -> None:
        raise SandboxError("no namespaces here")

    monkeypatch.setattr(sandbox, "check_sandbox", refused)
    with pytest.raises(SettingsError, match="no namespaces here"):
        load_settings(recipe | {"rewards": [{"kind": "code"}]})
