"""A hook that prints lines of steps, and each health warning once.

figures of a step -> Health -> signs of trouble -> health.jsonl: every step with one; the terminal: new warnings
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from plaudit.loop.hooks import Sink, Track
from plaudit.loop.progress import Moment
from plaudit.monitor.console import ProgressBar, Reporter, step_line
from plaudit.monitor.health import Health, Ledger
from plaudit.types import Stats


class Speak:
    """Print a step's line every `every` steps and after an evaluation. Print each new health warning, and send it to
    trackers. Record every step with a sign of trouble (`monitor/health.py`); list the signs at the end."""

    def __init__(
        self,
        reporter: Reporter,
        bar: ProgressBar,
        health: Health,
        alarms: Sink,
        track: Track,
        *,
        every: int,
        earlier: Iterable[Mapping[str, Any]] = (),
    ):
        """`alarms` writes health.jsonl; `earlier` are its records of steps before a resume."""
        self.reporter, self.bar, self.health, self.alarms, self.every = reporter, bar, health, alarms, every
        self.track, self.ledger = track, Ledger(earlier)

    async def __call__(self, moment: Moment) -> Stats:
        self.bar.advance()
        step = moment.progress.step
        ends, evaluated = moment.last or moment.stopping, any(n.startswith("validation/") for n in moment.stats)
        if step % self.every == 0 or step == 1 or ends or evaluated:
            self.reporter.step(step_line(moment.stats, self.bar))
        texts = []
        for alarm in self.health.alarms(moment.stats):
            if self._noted({"step": step} | alarm.record):
                texts.append(alarm.text)
                self.reporter.say(f"health: Step {step}: {alarm.text}")
            self.health.present.pop(alarm.sign)
        for sign, severity in self.health.present.items():
            self._noted({"step": step, "sign": sign, "severity": severity})
        if texts:
            self.track.text(step, "health", "\n\n".join(texts))
        for line in self.ledger.spans(step) if ends else ():
            self.reporter.say(f"health: {line}")
        return {}

    def _noted(self, record: Mapping[str, Any]) -> bool:
        """Write a record to `alarms`. Return True if its warning is new."""
        self.alarms.write(record)
        return self.ledger.add(record)
