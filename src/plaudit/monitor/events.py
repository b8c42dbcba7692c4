"""Record what each worker of a run does when: `events.jsonl`, one line a stretch of time.

    {"worker": "rollout worker 1", "phase": "samples", "begin": 1764000000.12, "end": 1764000003.4, "version": 7}

Times are seconds since 1970, also after a resume. What a worker does for several requests at once is one stretch. Of
episodes it also has `turns`: when turns of the policy ended, in seconds after `begin`, to a tenth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from plaudit.monitor.sinks import JsonLines

LEAST = 0.005
"""Shortest recorded stretch in seconds; shorter ones are joined until they last this long together."""


@dataclass(slots=True)
class Lane:
    """A phase of one worker that is under way: when it began, how many requests are in it, and when turns ended."""

    begin: float
    version: int
    requests: int = 0
    turns: list[float] = field(default_factory=list)


class Events(JsonLines):
    """Append a run's stretches of time to events.jsonl. `version`: the present version of the weights."""

    def __init__(self, path: Path, *, version: int = 0, clock: Callable[[], float] = time.time):
        super().__init__(path)
        self.version, self.clock = version, clock
        self._lanes, self._short = dict[tuple[str, str], Lane](), dict[tuple[str, str], float]()
        self._spent = {"samples": 0.0, "scores": 0.0}
        self._counted = clock()

    def add(self, worker: str, phase: str, begin: float, end: float, version: int, turns: Sequence[float] = ()) -> None:
        begin -= self._short.pop((worker, phase), 0.0)
        if end - begin < LEAST:
            self._short[worker, phase] = end - begin
        else:
            times = {"begin": round(begin, 3), "end": round(end, 3)}
            marks = {"turns": sorted({round(turn - begin, 1) for turn in turns})} if turns else {}
            self.write({"worker": worker, "phase": phase, **times, "version": version, **marks})

    @contextmanager
    def doing(self, worker: str, phase: str, turn: bool = False) -> Iterator[None]:
        """Record a stretch while the block runs (a `Doing`). Overlapping ones of a worker and phase are one stretch.
        `turn`: the block is a turn of an episode."""
        self._count()
        lane = self._lanes.setdefault((worker, phase), Lane(self.clock(), self.version))
        lane.requests += 1
        try:
            yield
        finally:
            self._count()
            lane.requests -= 1
            lane.turns += [self.clock()] * turn
            if not lane.requests:
                del self._lanes[worker, phase]
                self.add(worker, phase, lane.begin, self.clock(), lane.version, lane.turns)

    def _count(self) -> None:
        """Count the time since the last call as sampling if anything samples, else as rewards; not in evaluation."""
        now, phases = self.clock(), {phase for _, phase in self._lanes}
        phase = next((one for one in self._spent if one in phases and "evaluates" not in phases), None)
        if phase is not None:
            self._spent[phase] += now - self._counted
        self._counted = now

    def spent(self) -> dict[str, float]:
        """Seconds since the last call in which answers were sampled, and in which only rewards were; {} if none."""
        self._count()
        found, self._spent = self._spent, dict.fromkeys(self._spent, 0.0)
        return {"time/generate": found["samples"], "time/rewards": found["scores"]} if any(found.values()) else {}

    def cut(self, version: int) -> None:
        """End every open stretch and begin it again, since the weights are now of `version`."""
        now, self.version = self.clock(), version
        for (worker, phase), lane in self._lanes.items():
            self.add(worker, phase, lane.begin, now, lane.version, lane.turns)
            lane.begin, lane.version, lane.turns = now, version, []
