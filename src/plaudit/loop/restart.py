"""Choose the checkpoint where a run begins, and where it begins again after a failure.

    a rank is lost          -> the newest checkpoint, or the step before if ranks have mirrors
    a rank's memory ran out -> the same, with smaller passes
    values are not finite   -> the newest checkpoint before, with lower learning rates; once, then the run ends

Each is the same as a resume from that checkpoint. Without any checkpoint the run begins again at its start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from plaudit.loop.checkpoint import CheckpointError, Store
from plaudit.loop.finite import NonFiniteError
from plaudit.loop.progress import Progress
from plaudit.runtime.memory import RankOutOfMemory
from plaudit.runtime.worker import AnswersLost, WorkerLost
from plaudit.support.errors import Ended

ROLLBACKS = 1
"""A run whose values are not finite again, at the lower rate, needs a person: one more would only cost time."""


class Restart:
    """Decide where a run continues after a failure. `resume` names the checkpoint to begin from; None: the start."""

    def __init__(
        self,
        store: Store,
        resume: str | None,
        *,
        passes: tuple[int, int],
        longest: int,
        rollback_rate: float | None,
        say: Callable[[str], None],
        mirrors: bool = False,
    ):
        """`passes`: tokens of a pass with gradients, and without. `longest`: tokens of the longest row; if passes that
        small run out of memory, the run ends. `rollback_rate`: factor of learning rates after a rollback; None: no
        rollbacks. `mirrors`: True if other nodes keep copies of the ranks' state."""
        self.store, self.resume, self.longest = store, resume, longest
        self.rollback_rate, self.say = rollback_rate, say
        self.micro_tokens, self.score_tokens = passes
        self.mirrors, self.mirrored = mirrors, False
        """`mirrored` is True if ranks go on from what their mirrors have."""
        self.restored = False
        """True once the run has continued from `resume`: later checkpoints are from this process."""
        self._now = Progress()

    def begun(self, progress: Progress) -> Progress:
        """Return the counters to continue with, from those of the checkpoint; rollbacks since then stay counted."""
        if progress.rollbacks < self._now.rollbacks:
            progress = replace(progress, rollbacks=self._now.rollbacks, rate=self._now.rate, skipped=0)
        self._now = progress
        self.restored = self.restored or self.resume is not None
        return progress

    def after(self, error: Exception, failures: Callable[[WorkerLost], None]) -> None:
        """Choose and report where the run continues after an error of GOES_BACK. Raises the error that ends the run, if
        one does, with a note that names the newest checkpoint. `failures` counts lost ranks and may raise."""
        before = error.suspect if isinstance(error, NonFiniteError) else None
        try:
            how = self._changed(error, failures)
            self.store.sweep()
            if self.resume is None or self.restored:  # until then, `resume` is the checkpoint that the user named
                self.resume = self.store.latest(before=before)[0] if self.store.names() else None
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
        """Change passes or learning rates if the error asks for it; return text about it. Raises what ends the run."""
        if isinstance(error, WorkerLost):
            if not isinstance(error, AnswersLost):
                failures(error)
            return ""
        if isinstance(error, RankOutOfMemory):
            if error.micro_tokens <= self.longest:
                raise error
            self.micro_tokens, self.score_tokens = error.micro_tokens // 2, max(1, error.score_tokens // 2)
            return f" with learn.micro_tokens={self.micro_tokens}, and passes without gradients of {self.score_tokens}"
        if self.rollback_rate is None or self._now.rollbacks >= ROLLBACKS:
            raise error
        self._now = replace(self._now, rollbacks=self._now.rollbacks + 1, rate=self._now.rate * self.rollback_rate)
        return f" with learning rates times {self._now.rate:g} (learn.rollback_rate)"
