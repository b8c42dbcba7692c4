"""Settings of the loop: how long, how often to save and evaluate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EverySettings:
    """How often something happens; whichever is due first. All null: only at the run's end."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None


@dataclass
class TrainSettings:
    """How long a run is, and how it is cut into steps."""

    steps: int | None = None
    """Training steps; null lets `epochs` decide."""
    epochs: float = 1.0
    """Passes over the data, to their end: online the last step, which is a whole one, may begin the next pass."""
    batch_size: int = 32
    """Offline methods: demonstrations, or prompts with all their pairs, of one step."""
    log_every: int = 10
    """Steps between two lines on the terminal."""


@dataclass
class SaveSettings(EverySettings):
    """Checkpoints. One is always written at the end."""

    seconds: float | None = 600.0
    """What a run that ends before its time must do again, at most; null leaves it to `steps` and `epochs`."""
    keep: int = 2
    """The newest this many stay; 0 keeps all."""


@dataclass
class EvaluateSettings(EverySettings):
    """Evaluation on the validation data during training."""

    limit: int = 256
    """At most this many validation items, the first ones."""
    best: str | None = None
    """Figure of an evaluation (loss, accuracy, reward/mean) whose best checkpoint is kept and is the run's model."""
    patience: int | None = None
    """Evaluations in a row without a better one after which the run ends."""
