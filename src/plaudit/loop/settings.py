"""Settings of the loop: how long, how often to save and evaluate."""

from __future__ import annotations

from dataclasses import dataclass

from plaudit.support.fields import setting


@dataclass
class EverySettings:
    """How often something happens; whichever is due first. All null: only at the run's end."""

    steps: int | None = setting(None, least=1)
    """Training steps from one to the next."""
    epochs: int | None = setting(None, least=1)
    """Passes over the data from one to the next."""
    seconds: float | None = setting(None, above=0, infinite=True)
    """Time from one to the next."""


@dataclass
class TrainSettings:
    """How long a run is, and how it is cut into steps."""

    steps: int | None = setting(None, least=1)
    """Training steps; null lets `epochs` decide."""
    epochs: float = setting(1.0, above=0)
    """Passes over the data, to their end: online the last step, which is a whole one, may begin the next pass."""
    batch_size: int = setting(32, least=1)
    """Offline methods: demonstrations, or prompts with all their pairs, of one step."""
    log_every: int = setting(10, least=1)
    """Steps between two lines on the terminal."""


@dataclass
class SaveSettings(EverySettings):
    """Checkpoints. One is always written at the end."""

    seconds: float | None = setting(600.0, above=0, infinite=True)
    """What a run that ends before its time must do again, at most; null leaves it to `steps` and `epochs`."""
    keep: int = setting(2, least=0)
    """The newest this many stay; 0 keeps all."""


@dataclass
class EvaluateSettings(EverySettings):
    """Evaluation on the validation data during training."""

    limit: int = setting(256, least=1)
    """At most this many validation items, the first ones."""
    best: str | None = None
    """Figure of an evaluation (loss, accuracy, reward/mean) whose best checkpoint is kept and is the run's model."""
    patience: int | None = setting(None, least=1)
    """Evaluations in a row without a better one after which the run ends."""
