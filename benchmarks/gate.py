"""A contender's end of a measurement: it counts steps and lets the parent say when the next segment may run.

    warm-up steps -> {"segment"} -> waits for "go" -> steps -> {"segment": seconds, tokens} -> waits ... -> {"done"}

So that two contenders can take turns on the same cores: one waits in a read, at no cost, while the other computes.
Messages are JSON lines on what was stdout; whatever else the process prints goes to stderr. Standard library only.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any


class Gate:
    """Takes stdout for its messages. Peers import it too, so it knows nothing of torch."""

    def __init__(self, *, steps: int, repeats: int):
        self.steps, self.total = steps, steps * (repeats + 1)
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._done = self._tokens = 0
        self._restart()

    def passed(self, tokens: int) -> None:
        """A step ended that processed so many tokens that are not padding. Between segments this blocks."""
        self._done += 1
        self._tokens += tokens
        if self._done == 1:
            self._say("first_step")
        if self._done % self.steps == 0:
            seconds, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
            self._say("segment", seconds=seconds, cpu=cpu, tokens=self._tokens)
            if self._done < self.total and not sys.stdin.readline():
                sys.exit("the benchmark ended before this contender's turn")
            self._restart()

    def finish(self, **figures: Any) -> None:
        """The last message: peak memory, versions, and figures by which the contenders are seen to do the same."""
        assert self._done == self.total, (self._done, self.total)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self._say("done", peak_mib=peak, **figures)

    def _restart(self) -> None:
        self._tokens = 0
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def _say(self, event: str, **content: Any) -> None:
        self._out.write(json.dumps({"event": event, **content}) + "\n")
        self._out.flush()
