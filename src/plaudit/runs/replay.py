"""Replay a recorded run: its groups take the place of rollouts, and its figures are compared.

rollout.replay -> RecordedRun, the recorded threads -> Replay, a `Job` -> the same weights
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from plaudit.executors.base import Executor
from plaudit.executors.opening import Executors
from plaudit.loop.progress import BatchSource, Hook, Progress
from plaudit.loop.recorded import Compare, RecordedRun
from plaudit.runs.assemble import Job
from plaudit.runs.records import Run, open_record
from plaudit.settings.tree import Settings


class Replay(Job):
    """A run that takes its groups from a record. It neither samples nor evaluates, and ends where the record ends."""

    def __init__(self, record: RecordedRun, *given: Any):
        super().__init__(*given)
        self.record, self.held_out = record, ()
        self.last_step = min(self.total_steps, record.steps)

    def source(self, executor: Executor, stop: list[int]) -> tuple[BatchSource, None]:
        return self.online(executor, self.record), None

    async def train(self, executors: Executors, stop: list[int], further: Iterable[Hook] = ()) -> Progress:
        compare = Compare(Run(self.record.path.parent).metrics, self.reporter.say)
        return await super().train(executors, stop, (*further, compare))


def job_of(settings: Settings) -> tuple[Settings, Callable[..., Job]]:
    """Return (settings, factory of the run's `Job`). A replay gets a `Replay`, and the recorded run's number of threads
    in its settings. Raises SettingsError if the record cannot be replayed."""
    record = open_record(settings)
    return (settings, Job) if record is None else (replace(settings, threads=record.threads), partial(Replay, record))
