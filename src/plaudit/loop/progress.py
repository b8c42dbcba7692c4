"""A run's counters, what a source delivers for a step, and what hooks receive."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from plaudit.batch import Batch
from plaudit.types import Group, Row, Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What a source delivers to the loop: rows for one step and their origin."""

    batch: Batch | None
    """None if no group carried a signal: the step makes no update and is counted."""
    epoch: int
    """1-based."""
    epochs_done: float = 0.0
    """Passes over the data by the end of this delivery, with fractions; one delivery may complete several passes."""
    stats: Stats = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    """Online methods: every group whose rows are in the batch."""
    dropped: tuple[Group, ...] = ()
    """Groups without a signal that were replaced by others."""


def batch_of(rows: Sequence[Row], unit: int) -> Batch | None:
    """Return the batch of a delivery, or None if no token of its rows is trained."""
    batch = Batch.of(rows, unit=unit) if rows else None
    return batch if batch is not None and batch.trainable.any() else None


class BatchSource(Protocol):
    """The caller promises to call `done` for each delivery after its weights were published. The implementer promises
    deliveries in a fixed order for a seed, and that `restore(state())` continues after the last delivery."""

    async def next(self) -> Delivery: ...

    async def done(self, delivery: Delivery) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Counters of a run; all are saved with a checkpoint."""

    step: int = 0
    """Training steps done."""
    epoch: int = 1
    epoch_step: int = 0
    epochs_done: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    """Wall-clock seconds up to the end of this step's training, including earlier evaluations and saves, and the time
    before a resume."""
    skipped: int = 0
    """Steps in a row with an update skipped because a loss or gradient was not finite."""
    rollbacks: int = 0
    """Number of times that the run went back to a checkpoint because values were not finite."""
    rate: float = 1.0
    """Factor of all learning rates; each rollback lowers it."""

    def after(self, delivery: Delivery, *, seconds: float, skipped: bool) -> Progress:
        """Return the counters after a delivery was learned from."""
        same = delivery.epoch == self.epoch
        tokens = 0 if delivery.batch is None else int(delivery.batch.tokens.shape[0])
        return replace(
            self,
            step=self.step + 1,
            epoch=delivery.epoch,
            epoch_step=self.epoch_step + 1 if same else 1,
            epochs_done=delivery.epochs_done,
            tokens=self.tokens + tokens,
            seconds=self.seconds + seconds,
            skipped=self.skipped + 1 if skipped else 0,
        )

    @property
    def name(self) -> str:
        """Name of a checkpoint that is saved after this step."""
        return f"epoch{self.epoch}epochstep{self.epoch_step}globalstep{self.step}"

    def state(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What hooks receive after a step. `stats` grows: figures that a hook returns are merged for the hooks after it."""

    progress: Progress
    delivery: Delivery
    batch: Batch | None
    """The delivered batch with all its columns."""
    stats: Stats
    last: bool
    """True if the run ends after this step as planned."""
    stopping: bool = False
    """True if the run ends early after this step, by a signal or a failure: save, but record nothing that an
    undisturbed run would not."""
    failed: bool = False
    """True if something failed in this step: use no engine and no reward."""


class Hook(Protocol):
    def __call__(self, moment: Moment) -> Awaitable[Stats | None] | Stats | None:
        """Called after each step; return further figures of it, or None. An `async def` is awaited."""
        ...


def checked(hooks: Iterable[Hook]) -> tuple[Hook, ...]:
    """Return the hooks as a tuple, since the loop may begin several times. Raises TypeError for anything that is not a
    hook."""
    if not isinstance(hooks, Iterable):
        raise TypeError(f"hooks={hooks!r:.80} must be a list of hooks: [{getattr(hooks, '__name__', 'hook')}]")
    hooks = tuple(hooks)
    for hook in hooks:
        if not callable(hook):
            raise TypeError(f"hooks: {hook!r:.80} is not a hook: give a callable that takes a Moment")
        try:
            inspect.signature(hook).bind(None)
        except TypeError:
            raise TypeError(f"hooks: {hook!r:.80} cannot be called with one argument, the step's Moment") from None
        except ValueError:  # a callable without a signature
            pass
    return hooks


@dataclass(frozen=True)
class Remembered:
    """The state after a step that a checkpoint holds, except models and optimizers."""

    progress: Progress
    values: Mapping[str, Any]
    rng: Tensor
    moves: int
    """`Models.moves` at that time. While it is unchanged, the models are still those of this step."""
