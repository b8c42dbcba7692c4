"""Choose the checkpoint where a run begins, and where it begins again after a failure.

    a rank is lost          -> the newest checkpoint, or the step before if ranks have mirrors
    a rank's memory ran out -> the same, with smaller passes
    values are not finite   -> the newest checkpoint before, with lower learning rates; once, then the run ends

Each is the same as a resume from that checkpoint. Without any checkpoint the run begins again at its start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from plaudit.learn.settings import LearnSettings
from plaudit.loop.checkpoint import CheckpointError, Store
from plaudit.loop.copies import STATE
from plaudit.loop.finite import NonFiniteError
from plaudit.loop.hooks import RunState
from plaudit.loop.models import Models
from plaudit.loop.progress import Progress, Remembered
from plaudit.runtime.memory import RankOutOfMemory
from plaudit.runtime.settings import MIRRORS, RuntimeSettings
from plaudit.runtime.worker import AnswersLost, WorkerLost
from plaudit.support.errors import Ended

ROLLBACKS = 1
"""Most rollbacks of a run. If values are not finite again at the lower rate, a person should look at it."""


class Restart:
    """Decide where a run continues after a failure. `resume` names the checkpoint to begin from; None: the start."""

    def __init__(
        self,
        store: Store,
        resume: str | None,
        learn: LearnSettings,
        runtime: RuntimeSettings,
        *,
        longest: int,
        steps: int,
        say: Callable[[str], None],
    ):
        """`longest`: tokens of the longest row; if passes that small run out of memory, the run ends. `steps`: the
        run's number of steps, for messages."""
        self.store, self.resume, self.longest, self.steps, self.say = store, resume, longest, steps, say
        self.rollback_rate, self.passes = learn.rollback_rate, (learn.micro_tokens, learn.score_tokens)
        """`passes`: most tokens of a pass with gradients, and of one without."""
        self.mirrors, self.mirrored = MIRRORS in runtime.mesh, False
        """`mirrors`: other nodes keep copies of the ranks' state. `mirrored`: the next start tries these first."""
        self.restored = False
        """True once the run has continued from `resume`: later checkpoints are from this process."""
        self._now = Progress()

    async def begin(
        self, back: Remembered | None, models: Models, state: RunState, ended: Callable[[Progress], bool]
    ) -> Progress:
        """Restore `back`, the step that ranks took from their mirrors, or else the checkpoint to resume, if any. Return
        the counters to continue with; rollbacks since the checkpoint stay counted. Models already have its weights."""
        progress = Progress()
        if back is not None:
            progress = state.restore(back.values, back.rng)
            self.say(f"the ranks' mirrors had step {progress.step} of {self.steps}")
        elif (name := self.resume) is not None:
            tensors, values = self.store.read(name)
            folder = self.store.model(STATE, name).resolve()
            for role, actor in models.trained.items():
                await actor.restore(folder / f"{role}.safetensors", values["actors"][role])
            self.store.drop_after(name)  # later ones are damaged, or belong to the process that this one replaces
            progress = state.restore(values, tensors["rng"])
            left = "; the run is finished" if ended(progress) else ""
            self.say(f"resumed {name}: step {progress.step} of {self.steps}{left}")
        if progress.rollbacks < self._now.rollbacks:
            progress = replace(progress, rollbacks=self._now.rollbacks, rate=self._now.rate, skipped=0)
        self._now = progress
        self.restored = self.restored or self.resume is not None
        return progress

    def after(self, error: Exception, failures: Callable[[WorkerLost], None]) -> None:
        """Choose and report where the run continues after an error of `train.GOES_BACK`. If it cannot continue, raise
        an error with a note that names the newest checkpoint. `failures` counts lost ranks and may raise."""
        before = error.suspect if isinstance(error, NonFiniteError) else None
        try:
            how = self._changed(error, failures)
            self.store.sweep()
            if self.resume is None or self.restored:  # until then, `resume` is the checkpoint that the user named
                self.resume = self.store.latest(before=before)[0] if self.store.known() else None
        except CheckpointError:
            error.add_note(self.store.left(before=before))
            raise error from None
        except Ended as ended:
            ended.add_note(self.store.left(before=before))
            raise
        self.mirrored = self.mirrors and before is None
        mirrored = "the ranks' mirrors, or else " if self.mirrored else ""
        what = f"lost {error}" if isinstance(error, WorkerLost) else str(error).rstrip(".")
        self.say(f"{what}; continuing from {mirrored}{self.resume or 'the start'}{how}")

    def _changed(self, error: Exception, failures: Callable[[WorkerLost], None]) -> str:
        """Halve pass sizes or lower learning rates, as the error needs; return text about it. Raise to end the run."""
        if isinstance(error, WorkerLost):
            if not isinstance(error, AnswersLost):
                failures(error)
            return ""
        if isinstance(error, RankOutOfMemory):
            if error.micro_tokens <= self.longest:
                raise error
            self.passes = error.micro_tokens // 2, max(1, error.score_tokens // 2)
            return " with learn.micro_tokens={}, and passes without gradients of {}".format(*self.passes)
        if self.rollback_rate is None or self._now.rollbacks >= ROLLBACKS:
            raise error
        self._now = replace(self._now, rollbacks=self._now.rollbacks + 1, rate=self._now.rate * self.rollback_rate)
        return f" with learning rates times {self._now.rate:g} (learn.rollback_rate)"
