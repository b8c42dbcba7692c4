"""Warn when a run's figures look wrong: what was seen, what it usually means, and what to try.

    metrics of a step -> history (the first and the latest figures) -> every rule -> alarms

A rule looks for one sign of trouble. It warns when its severity reaches 1; then only at twice that severity, or after
the sign went away. `Ledger` joins all warnings of a sign, with its first and last step, and knows which words are new.
Left out: stopping or changing a run, which is the user's decision.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from plaudit.monitor.advice import advised, named
from plaudit.monitor.rules import BEGIN, MEMORY, RECENT, RULES, History, Series

CALM, AWAY = 0.8, 20
"""A sign counts as gone after AWAY checks in a row with severities below CALM."""
WORSE = 2.0
"""A sign warns again when its severity is this many times that of its last warning."""
SLOWER = 1.25
"""A step that takes this many times its planned seconds is slow."""
NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?")
LOWERED = ("micro_tokens/min", "score_tokens/min")
"""Figures that exist only after a pass ran out of memory."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A warning: a sign of trouble (such as "clipping") whose rule warns at this step."""

    sign: str
    severity: float
    saw: str
    why: str
    advice: str
    numbers: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The warning as one line for a terminal."""
        return f"{self.saw} {self.why} {self.advice}"

    @property
    def record(self) -> dict[str, Any]:
        """The warning as a record for health.jsonl, without the step."""
        return asdict(self)


class Ledger:
    """Sums up the warnings in health.jsonl: one entry for each sign.

        {"step": 20, "last": 54, "count": 31, "sign": "clipping", "severity": 1.9, "saw": ..., "why": ..., ...}

    `step` and `last` are the first and the last step at which the sign was there, `count` the number of these steps.
    The words and numbers are those of its last warning, which was the worst one or came after the sign had gone away.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        self._words: set[str] = set()
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> bool:
        """Add a line of the file. Return True if its `saw` is new for the sign, numbers aside."""
        step, sign = record.get("step"), str(record.get("sign"))
        before = self.entries.get(sign)
        count = 1 if before is None else before["count"] + 1
        first = step if before is None else before["step"]
        self.entries[sign] = {**(before or {}), **record, "step": first, "last": step, "count": count}
        words = f"{sign}: {NUMBER.sub('#', str(record.get('saw', '')))}"
        new = bool(record.get("saw")) and words not in self._words
        self._words.add(words)
        return new

    def spans(self, step: int) -> list[str]:
        """Return a line for each sign, without those that first appeared at `step`."""
        return [f"{_span(one)}: {one.get('saw', '')}" for one in self.entries.values() if one["step"] != step]


def _span(entry: Mapping[str, Any]) -> str:
    first, last, count = entry["step"], entry["last"], entry["count"]
    if first == last:
        return f"step {first}"
    steps = last - first + 1
    return f"steps {first} to {last}{f' ({count} of {steps})' if count < steps else ''}"


@dataclass(slots=True)
class Shown:
    """State of a sign after a warning: the last warning's severity, and the calm checks in a row since."""

    severity: float
    calm: int = 0


class Health:
    """Watch the figures of one run. `alarms` takes the metrics of a step and returns new alarms."""

    def __init__(
        self,
        left_out: Collection[str] = (),
        *,
        truths: Sequence[str] = ("reward/gold",),
        planned: Mapping[str, float] | None = None,
        rewards: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        """`left_out`: signs that do not apply to this run, or that its user dismissed. `truths`: figures of rewards
        that are not trained on. `planned`: planned seconds of `step`, `generate`, `rewards` and `learn`, if there is a
        plan. `rewards`: {name of a trained reward: its kind}. `settings`: the run's settings by dotted key, to which
        advice is fitted."""
        self.planned, self._left_out = planned or {}, frozenset(left_out)
        self._rewards, self._settings = rewards or {}, settings
        self.present: dict[str, float] = {}
        """{sign: severity} of the signs present at the last step, also of those that warned before."""
        self._history = History()
        self._history.truths = tuple(truths)
        self._shown: dict[str, Shown] = {}

    def alarms(self, metrics: Mapping[str, Any]) -> list[Alarm]:
        figures = {name: value for name, value in metrics.items() if name not in ("step", "epoch", "time")}
        for name, value in figures.items():
            if value is not None and math.isfinite(value):
                self._history.setdefault(name, Series()).add(float(value))
        signs = [alarm for alarm in self._signs(figures) if alarm.sign not in self._left_out]
        self.present = {alarm.sign: alarm.severity for alarm in signs if alarm.severity >= 1}
        return [alarm for alarm in signs if self._newly(alarm.sign, alarm.severity)]

    def resume(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Read the records of earlier steps, whose alarms were already shown."""
        for record in [*records[:BEGIN], *records[BEGIN:][-2 * MEMORY :]]:
            self.alarms(record)

    def _signs(self, figures: Mapping[str, Any]) -> Iterator[Alarm]:
        yield _not_finite(figures)
        yield _memory(figures)
        if self.planned:
            yield _misplanned(self._history, self.planned)
        for rule in RULES:
            severity, numbers = rule(self._history)
            if severity < 1:
                yield Alarm(rule.name, severity, "", "", "", numbers)
                continue
            why = rule.why.replace("{rewards}", named(self._rewards))
            advice = advised(rule.advice, self._settings, self._rewards)
            yield Alarm(rule.name, severity, rule.saw.format(**numbers), why, advice, numbers)

    def _newly(self, name: str, severity: float) -> bool:
        shown = self._shown.get(name)
        if shown is not None:
            shown.calm = shown.calm + 1 if severity < CALM else 0
            if shown.calm >= AWAY:
                del self._shown[name]
        if severity < 1 or (shown is not None and severity < WORSE * shown.severity):
            return False
        self._shown[name] = Shown(severity)
        return True


def _not_finite(figures: Mapping[str, Any]) -> Alarm:
    bad = [f"{name} is {value}" for name, value in figures.items() if value is None or not math.isfinite(value)]
    return Alarm(
        "not finite",
        float(bool(bad)),
        f"{', '.join(bad)}.",
        "A loss or gradient has overflowed, or a reward divided by zero.",
        "Resume from the last good checkpoint with a lower learning rate or a smaller gradient norm limit, and look at "
        "the rewards of this step.",
    )


def _memory(figures: Mapping[str, Any]) -> Alarm:
    lowered = {name.removesuffix("/min"): value for name, value in figures.items() if name in LOWERED}
    asked = ", ".join(f"{name}={value:.0f}" for name, value in lowered.items())
    return Alarm(
        "memory",
        float(bool(lowered)),
        f"a pass of the size in the settings did not fit in memory; the run continues with smaller passes ({asked}).",
        "The step was repeated in smaller passes with the same gradient.",
        "Lower learn.micro_tokens to start with it.",
        lowered,
    )


def _misplanned(history: History, planned: Mapping[str, float]) -> Alarm:
    """Warn if steps take longer than planned, and name the part with the largest excess. The first step, which warms
    up, is left out."""
    step = history["time/step"]
    now, part, more = (median(step.latest[-RECENT:]) if step.count > RECENT else 0.0), "", 0.0
    for name in ("generate", "rewards", "learn"):
        seconds = history[f"time/{name}"].latest[-RECENT:]
        if seconds and median(seconds) - planned.get(name, 0.0) > more:
            part, more = name, median(seconds) - planned.get(name, 0.0)
    words = {"generate": "generation takes", "rewards": "rewards take", "learn": "learning takes"}
    slowest = f": {words[part]} {more:.3g} s more than profiled" if part else ""
    return Alarm(
        "misplanned",
        now / (SLOWER * planned["step"]),
        f"a step takes {now:.3g} s, planned {planned['step']:.3g} s{slowest}.",
        "Another program may keep the machine busy, answers may have become longer, or the profile is old.",
        "Measure again with `plaudit profile`, and look at the alternatives that `plaudit plan` prints.",
        {"now": now, "planned": planned["step"], "part": part, "more": more},
    )
