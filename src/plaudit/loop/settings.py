"""Settings of the loop: how long, how often to save and evaluate."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from plaudit.support.address import Address, AddressError
from plaudit.support.fields import Section, setting, shown

INTERVAL = re.compile(r"(\d+(?:\.\d+)?) (step|epoch|second|minute|hour)s?")
SECONDS = {"second": 1, "minute": 60, "hour": 3600}


@dataclass(frozen=True, kw_only=True)
class Every:
    """How often something happens: whichever of these intervals ends first. All None: never."""

    steps: int | None = None
    epochs: float | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, value: Any) -> Every:
        """Read `100`, "100 steps", "0.5 epochs", "10 minutes", a list of these, or None. Raises ValueError."""
        found: dict[str, Any] = {}
        for one in value if isinstance(value, list | tuple) else [] if value is None else [value]:
            text = f"{one} steps" if isinstance(one, int) and not isinstance(one, bool) else str(one)
            match = INTERVAL.fullmatch(text)
            number, unit = (float(match[1]), match[2]) if match else (0.0, "")
            if not number or (unit == "step" and number % 1):
                raise ValueError(
                    f'{shown(one)} must be a number of steps, or as "100 steps", "0.5 epochs", "30 seconds", "1 hour"'
                )
            found |= {"seconds": number * SECONDS[unit]} if unit in SECONDS else {f"{unit}s": number}
        return cls(**found)


@dataclass
class EverySettings(Section):
    """How often something happens."""

    every: Any = None
    """Time between two evaluations: a number of training steps, "0.5 epochs", "30 seconds", "10 minutes", "1 hour", or
    a list of these, of which the first that is due counts. Null: only at the run's end."""

    @property
    def interval(self) -> Every:
        return Every.of(self.every)

    def contradictions(self) -> Iterator[str]:
        try:
            Every.of(self.every)
        except ValueError as error:
            yield f"every={error}"


@dataclass
class TrainSettings:
    """How long a run is, and how it is cut into steps."""

    steps: int | None = setting(None, least=1)
    """Training steps; null lets `epochs` decide."""
    epochs: float = setting(1.0, above=0)
    """Passes over the data. An online run's last step is always a whole one, so it may begin the next pass."""
    batch_size: int = setting(32, least=1)
    """Offline methods: demonstrations of one step, or prompts with all their pairs."""
    log_every: int = setting(10, least=1)
    """Steps between two lines on the terminal."""


@dataclass
class SaveSettings(EverySettings):
    """Checkpoints. One is always written at the end."""

    every: Any = "10 minutes"
    """Time between two checkpoints, the most that an interrupted run repeats: a number of training steps, "0.5 epochs",
    "10 minutes", or a list of these, of which the first that is due counts. Null: only the run's end is saved."""
    keep: int = setting(2, least=0)
    """Number of checkpoints to keep, the newest ones; 0 keeps all."""
    to: str | None = None
    """An fsspec address to which checkpoints are copied, such as s3://bucket/runs; each run gets a folder of its name
    there. A resume fetches what the run's own folder lacks. Null: checkpoints are in the run's folder only."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.to is not None:
            try:
                Address(self.to)
            except AddressError as error:
                yield f"to={error}"


@dataclass
class EvaluateSettings(EverySettings):
    """Evaluation on the validation data during training."""

    limit: int = setting(256, least=1)
    """Evaluate on this many validation items at most, the first of the data."""
    best: str | None = None
    """Figure of an evaluation (loss, accuracy, reward/mean) whose best checkpoint is kept and is the run's model."""
    patience: int | None = setting(None, least=1)
    """End the run after this many evaluations in a row without a better one."""
