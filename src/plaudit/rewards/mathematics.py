"""The reward of kind `math`: an answer's last formula against the reference, compared by math-verify (an extra).

    completion, reference -> the answer within each -> compared in another process (`comparing.py`) -> 1 or 0

A text such as 10^10^10 can make the library compute for hours or take all memory. So a process has limits for both. An
answer whose comparison exceeds one gets 0, so that no answer can get itself left out of the loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plaudit.rewards.base import Turns
from plaudit.rewards.functions import in_thread
from plaudit.rewards.settings import options_of
from plaudit.support.fields import setting
from plaudit.types import Completion, Prompt, Score

SCRIPT = Path(__file__).with_name("comparing.py")
START = 120.0
"""Seconds that a process has to import the library, on a busy machine."""
WAIT = 12
"""Wait this many seconds for each allowed second of CPU time; after that the comparison fails transiently."""
LONGEST = 20_000
"""Most characters of an answer that are read, from its end."""
_SAID = re.compile(r"(?:####|\banswer(?:\s+is|:|\s*=))[ \t:*]*([^\n]+)", re.IGNORECASE)
_FORMULA = re.compile(r"\\boxed|\\fbox|\\\(|\\\[|\$[^$]+\$")
_WORD = re.compile(r"(?<![\\a-zA-Z])(?!(?:sqrt|pi|sin|cos|tan|log|ln|exp)\b)[a-zA-Z]{2,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MathOptions:
    """The `options` of a reward of kind `math`."""

    seconds: int = setting(5, least=1, most=2**20)
    """Most seconds of CPU time of one comparison; an answer that takes more gets 0."""
    memory_mb: int = setting(2048, least=512, most=2**20)
    """Most memory, in MB, of a process that compares."""


class MathReward:
    """1 if the answer equals the reference as mathematics, else 0."""

    waits = True
    reads_tokens = False

    def __init__(self, name: str, options: Mapping[str, object]):
        """Raises ValueError if math-verify is not installed, for unknown options and for wrong values of them."""
        self.options = options_of(MathOptions, name, options)
        self.name = name or "math"
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError(
                "a reward of kind 'math' needs math-verify, which is not installed: pip install -e '.[math]' in "
                "Plaudit's folder"
            )
        self._turns = Turns(os.cpu_count() or 1)
        self._idle: list[Comparing] = []
        weakref.finalize(self, _ended, self._idle)

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        try:
            reference = reference_of(prompt.answer)
        except ValueError as error:
            return [Score(value=None, reason=f"ValueError: {error}")] * len(completions)
        return list(await asyncio.gather(*(self._scored(reference, one.text) for one in completions)))

    async def _scored(self, reference: str, text: str) -> Score:
        async with self._turns():
            try:
                return Score(value=float(await in_thread(lambda: self._equal(reference, answer_of(text)))))
            except OSError as error:
                return Score(value=None, reason=f"{type(error).__name__}: {error}", transient=True)

    def _equal(self, reference: str, answer: str) -> bool:
        """Return the verdict, False beyond a limit. Raises OSError if a process does not start or answer in time."""
        line = json.dumps([reference, answer])
        for _ in range(2):  # a process may have ended for another reason
            process = self._idle.pop() if self._idle else Comparing(self.options)
            verdict = process.said(line, WAIT * self.options.seconds)
            if verdict:
                self._idle.append(process)
                return verdict == "1"
            if process.end() == -signal.SIGXCPU:
                break
        return False


class Comparing:
    """A process that compares answers (`comparing.py`). Raises OSError if it does not start."""

    def __init__(self, options: MathOptions):
        command = [sys.executable, "-P", str(SCRIPT), str(options.seconds), str(options.memory_mb << 20)]
        pipe, none = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=none, text=True, start_new_session=True
        )
        if self.said("", START) != "ready":
            raise OSError(f"the process that compares answers did not start (status {self.end()})")

    def said(self, line: str, seconds: float) -> str:
        """Send `line` unless it is "", and return the process's next line, or "" if it has ended. If no line comes in
        `seconds`, kill it and raise OSError: the machine is too busy, else its CPU limit would have ended it before."""
        assert self.process.stdin is not None and self.process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            self.process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        found = ""
        try:
            if line:
                self.process.stdin.write(f"{line}\n")
                self.process.stdin.flush()
            found = self.process.stdout.readline().strip()
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
            timer.join()
        if late.is_set():
            self.end()
            raise OSError(f"no verdict within {seconds:g} s")
        return found

    def end(self) -> int:
        """Kill the process, close its pipes and return its exit status."""
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        return self.process.wait()


def _ended(processes: list[Comparing]) -> None:
    for process in processes:
        process.end()


def reference_of(answer: str | None) -> str:
    """Return the part of a prompt's answer to compare with, boxed if it has no formula. Raises ValueError for none."""
    text = (answer or "").strip()
    text = "" if text.endswith("####") else text
    if not _FORMULA.search(text):
        text = _boxed(_said(text).replace("$", ""))
    if not re.search(r"\w", re.sub(r"\\(?:boxed|fbox|text|mathrm)\b", "", text)):
        raise ValueError(f"the prompt's answer holds nothing to compare with: {answer!r:.80}")
    return text


def answer_of(completion: str) -> str:
    """Return the text for math-verify to parse: the stated final answer, else the completion. A bare formula is put in
    a \\boxed{}, since outside of formulas math-verify finds only numbers: of "(7, 4)" the 4."""
    text = completion[-LONGEST:].strip()
    if "\\boxed" in text:
        return text
    said = _said(text)
    bare = not _FORMULA.search(said) and not _WORD.search(said)
    return _boxed(said) if bare else f"The final answer is {said}" if said != text else text


def _said(text: str) -> str:
    """Return what follows the last "####" or "answer is", up to the line's end; the whole text without either."""
    found = _SAID.findall(text)
    return str(found[-1]).strip(" *.") if found else text.rstrip(".")


def _boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"
