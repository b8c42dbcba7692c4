"""A contender's end of a measurement: it counts steps and lets the parent say when the next segment may run.

    warm-up steps -> {"segment"} -> waits for "go" -> steps -> {"segment": seconds, tokens} -> waits ... -> {"done"}

So that contenders can take turns on the same cores: one waits in a read, at no cost, while another computes. Messages
are JSON lines on what was stdout; whatever else the process prints goes to stderr. Standard library only.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any, NoReturn


class Gate:
    """Takes stdout for its messages. Peers import it too, so it knows nothing of torch."""

    def __init__(self, *, steps: int, repeats: int):
        self.steps, self.total = steps, steps * (repeats + 1)
        self.done = 0
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._tokens = 0
        self._peak = 0.0
        self._restart()

    def passed(self, tokens: int) -> None:
        """A step ended that processed so many tokens that are not padding. Between segments this blocks."""
        self.done += 1
        self._tokens += tokens
        if self.done == 1:
            self.say("first_step")
        if self.done % self.steps == 0:
            seconds, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
            self._peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            self.say("segment", seconds=seconds, cpu=cpu, tokens=self._tokens, peak_mib=self._peak)
            self.wait()  # after the last one too: what a run does at its end must not disturb another's segment
            self._restart()

    def wait(self) -> None:
        """Until the parent says go."""
        if not sys.stdin.readline():
            sys.exit("the benchmark ended before this contender's turn")

    def finish(self, **figures: Any) -> None:
        """The last message: memory at most during the steps, versions, and figures by which contenders are compared."""
        assert self.done == self.total, (self.done, self.total)
        self.say("done", peak_mib=self._peak, **figures)

    def refuse(self, reason: str) -> NoReturn:
        """This contender cannot do the line; the reason goes into the report."""
        self.say("refused", reason=reason)
        sys.exit(reason)

    def say(self, event: str, **content: Any) -> None:
        self._out.write(json.dumps({"event": event, **content}) + "\n")
        self._out.flush()

    def _restart(self) -> None:
        self._tokens = 0
        self._wall, self._cpu = time.perf_counter(), time.process_time()
