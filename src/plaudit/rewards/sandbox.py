"""The reward of kind `code`: runs code that a model wrote, each answer in its own processes (`sandbox_child.py`).

    completion -> the last ``` block -> cases:  program(stdin) -> stdout, compared here
                                        tests:  answer's process <- calls, literals -> tests' process -> letters

The answer's code cannot change its own verdict. Standard output is compared in this process, which that code cannot
reach, and counts only if the program ended by itself, with exit status 0. Tests run in another process, which it cannot
reach either, and get only literals from it. Left out: languages other than Python. On machines without user namespaces
a run with this reward does not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from plaudit.rewards.base import Turns
from plaudit.rewards.settings import options_of
from plaudit.runtime.coroutines import finished
from plaudit.support.fields import setting
from plaudit.types import Completion, Prompt, Score

CHILD = Path(__file__).with_name("sandbox_child.py")
START = 60
"""Most seconds until a process is locked in. They do not count towards the limits of the answer's code."""
_BLOCK = re.compile(r"```[\w+-]*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


class SandboxError(ValueError):
    """This machine cannot isolate a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeOptions:
    """The `options` of a reward of kind `code`."""

    tests: str = "tests"
    """Column with Python tests that call the answer's functions: one text or a list of them."""
    setup: str = "test_setup_code"
    """Column with code that is put before each test; rows may lack it."""
    entry: str = "entry_point"
    """Column with the name of the function that a test's `check(candidate)` takes; rows may lack it."""
    cases: str = "cases"
    """Column with a list of {input, output}, for programs that read standard input."""
    partial: bool = False
    """Score the share of tests that pass, instead of 1 if all do and 0 if not."""
    seconds: int = setting(10, least=1, most=2**20)
    """Most seconds of CPU time of a process."""
    wait: int = setting(20, least=1, most=2**20)
    """Seconds after which a process is killed, whether it computes or waits."""
    total: int = setting(120, least=1, most=2**20)
    """Seconds for all tests and cases of an answer. What has not ended by then has failed."""
    memory_mb: int = setting(512, least=1, most=2**20)
    output_kb: int = setting(256, least=1, most=2**20)
    """Largest output of a program; one that writes more is killed."""


class CodeReward:
    """1 if the answer's code passes all tests and cases of its row, else 0; with `partial`, the share that pass."""

    waits = True
    reads_tokens = False

    def __init__(self, name: str, options: Mapping[str, Any]):
        self.options = options_of(CodeOptions, name, options)
        self.name = name or "code"
        self._turns = Turns(os.cpu_count() or 1)
        check_sandbox()

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        return list(await asyncio.gather(*(self._scored(prompt, completion.text) for completion in completions)))

    async def _scored(self, prompt: Prompt, text: str) -> Score:
        """Score an answer. At most one answer per core is scored at a time, so that each gets its CPU time."""
        async with self._turns():
            try:
                passed, count = await self._passed(prompt.extra, code_of(text))
            except (SandboxError, OSError, ValueError) as error:
                return Score(value=None, reason=f"{type(error).__name__}: {error}")
        share = passed / count
        return Score(value=share if self.options.partial else float(passed == count), parts={"passed": share})

    async def _passed(self, row: Mapping[str, Any], code: str) -> tuple[int, int]:
        """Return the number of passed tests and of all tests. Raises ValueError for a row without tests, or with a test
        that cannot run."""
        own = self.options
        cases, tests = row.get(own.cases) or [], row.get(own.tests) or []
        if not cases and not tests:
            raise ValueError(f"the row has neither tests (column {own.tests!r}) nor cases (column {own.cases!r})")
        for case in cases:
            if not isinstance(case, Mapping) or not all(isinstance(case.get(key), str) for key in ("input", "output")):
                raise ValueError(f"{own.cases} must be a list of objects with the texts input and output")
        tests = [tests] if isinstance(tests, str) else list(tests)
        passed, count = 0, len(cases) + len(tests)
        now = asyncio.get_running_loop().time
        deadline = now() + own.total
        for done, case in enumerate(cases):
            if now() >= deadline or (passed < done and not own.partial):
                return passed, count
            job = {"role": "program", "code": code}
            written, ended = await _run(job, own, case["input"].encode(), deadline=deadline)
            passed += ended and _lines(written.decode(errors="replace")) == _lines(case["output"])
        if tests and now() < deadline and (passed == len(cases) or own.partial):
            setup, entry = str(row.get(own.setup) or ""), str(row.get(own.entry) or "")
            letters = await _tested(code, {"tests": tests, "setup": setup, "entry": entry}, own, deadline)
            if b"?" in letters:
                number = letters.index(b"?") + 1
                raise ValueError(
                    f"test {number} calls no function of the answer (or fails before it does), passes it an argument "
                    "that is not a literal of less than 1 MiB, or uses eval or exec"
                )
            passed += letters.count(b"p")
        return passed, count


def code_of(text: str) -> str:
    """Return the last ``` block of an answer, or the whole answer if it has none."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def _lines(text: str) -> list[str]:
    """Return the lines to compare, without trailing blanks and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


async def _tested(code: str, job: Mapping[str, Any], options: CodeOptions, deadline: float) -> bytes:
    """Run the tests of one answer; return a letter for each test that ended (`sandbox_child.tests`)."""
    to_answer, calls = os.pipe()
    to_tests, results = os.pipe()
    with contextlib.ExitStack() as pipes:
        for descriptor in (to_answer, calls, to_tests, results):
            pipes.callback(os.close, descriptor)
        answering = {"role": "answer", "code": code, "calls": to_answer, "results": results}
        testing = {"role": "tests", "calls": calls, "results": to_tests, **job}
        answer = asyncio.ensure_future(_run(answering, options, keep=(to_answer, results), deadline=deadline))
        tests = asyncio.ensure_future(_run(testing, options, keep=(calls, to_tests), deadline=deadline))
        try:
            await asyncio.wait({answer, tests}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done() and not tests.done():  # the answer ended its process: calls must fail, not wait
                answer.result()
                pipes.close()
            return (await tests)[0]
        finally:
            answer.cancel()
            tests.cancel()
            await asyncio.gather(answer, tests, return_exceptions=True)


async def _run(
    job: dict[str, Any], own: CodeOptions, stdin: bytes = b"", *, keep: Sequence[int] = (), deadline: float = math.inf
) -> tuple[bytes, bool]:
    """Run a job in a new sandbox process; return what it wrote, and whether it ended by itself with exit status 0.

    Raises SandboxError if the process could not be isolated. Then none of the code has run."""
    job["limits"] = {"memory": own.memory_mb << 20, "seconds": own.seconds}
    body = json.dumps(job).encode()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-X", "utf8", str(CHILD)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd="/",
        env={},
        pass_fds=keep,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    writing = asyncio.ensure_future(_written(process.stdin, len(body).to_bytes(8, "big") + body + stdin))
    written, state, status = bytearray(), b"", None
    try:
        async with asyncio.timeout(START) as limit:
            state = await process.stderr.read(300)
            if state == b"ready":
                limit.reschedule(min(asyncio.get_running_loop().time() + own.wait, deadline))
                while more := await process.stdout.read(1 << 16):
                    written += more
                    if len(written) > own.output_kb << 10:
                        break
                else:
                    status = await process.wait()
    except TimeoutError:
        state = state or b"locking it in took too long"
    finally:
        if status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        writing.cancel()
        transport: Any = process._transport  # type: ignore[attr-defined]  # nothing may wait here when a run ends
        transport.close()
        await process.wait()
    if state != b"ready":
        raise SandboxError(state.decode(errors="replace") or "its process ended before it was locked in")
    return bytes(written[: own.output_kb << 10]), status == 0


async def _written(stream: asyncio.StreamWriter, content: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # the process may end without reading its input
        stream.write(content)
        await stream.drain()
        stream.close()


@cache
def check_sandbox() -> None:
    """Raise SandboxError if this machine cannot isolate a process; code never runs without isolation."""
    try:
        written = finished(_run({"role": "program", "code": "print(6 * 7)"}, CodeOptions()))
    except SandboxError as error:
        raise SandboxError(
            f"a reward of kind 'code' cannot isolate code on this machine ({error}), so the run does not start. It "
            "needs Linux with user namespaces: sysctl user.max_user_namespaces above 0, "
            "kernel.apparmor_restrict_unprivileged_userns=0, and in a container the right to unshare (docker run "
            "--security-opt seccomp=unconfined --security-opt apparmor=unconfined)"
        ) from None
    if written != (b"42\n", True):
        raise SandboxError(f"a reward of kind 'code' cannot run code here: 6 * 7 gave {written!r:.80}")
