"""Exceptions that end a run, and the name of its best checkpoint. Here, so that packages below `loop` can use them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import ClassVar

from plaudit.support.bounded import content, record


class Ended(RuntimeError):
    """A run ended before its last step, for a reason that the user can act on. Its notes say what is saved."""

    status: ClassVar[int] = 1
    """Exit status of the command."""

    def __str__(self) -> str:
        return " ".join((super().__str__(), *vars(self).get("__notes__", ())))


class Stopped(BaseException):
    """A signal stopped the run, which saved first. `code` is the exit status.

    It is no Exception, so that `except Exception` around a run does not swallow it. Inside a run only Stopped itself is
    raised. Its subclasses, Interrupted and Terminated, are for the caller of `run`: they are a KeyboardInterrupt and a
    SystemExit, after which asyncio leaves its loop at once."""

    def __init__(self, signum: int, step: int | None):
        """`step`: the step that was saved; None if the workers were not ready yet, so that nothing was saved."""
        when = "before its workers were ready" if step is None else f"after step {step}"
        super().__init__(f"stopped by {signal.Signals(signum).name} {when}; resume=latest continues from there")
        self.signum, self.step = signum, step
        self.code = 128 + signum

    def for_caller(self) -> Stopped:
        """Return the exception for the caller of `run`: Interrupted for SIGINT, else Terminated."""
        kind = Interrupted if self.signum == signal.SIGINT else Terminated
        return kind(self.signum, self.step)


class Interrupted(Stopped, KeyboardInterrupt):
    """Ctrl-C stopped the run."""


class Terminated(Stopped, SystemExit):  # type: ignore[misc]  # SystemExit's `code` may be more than a number
    """SIGTERM or SIGHUP stopped the run. A script that does not catch it ends with the status of that signal."""


def best_checkpoint(state: Path) -> str | None:
    """Return the name of the run's checkpoint with the best evaluation, as this `state` folder has it; None if
    evaluations were not compared (`evaluate.best`)."""
    values = state / "values.json"
    best = record(content(values)).get("best") if values.exists() else None
    return None if best is None else best["checkpoint"]
