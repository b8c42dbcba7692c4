"""What a crew is to a run: training ranks, an engine that samples, and a way for new weights from one to the other."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from plaudit.loop.checkpoint import Writer
from plaudit.rewards.settings import RewardSettings
from plaudit.rewards.workers import JudgeWorkers
from plaudit.rollout.engine import Engine
from plaudit.runtime.gang import Gang

Result = TypeVar("Result")


class Crew(Protocol):
    """Workers of one run. The caller promises to close it."""

    engine: Engine | None
    """What samples, for online methods."""
    threads: int
    """CPU threads of a rank."""
    apart: bool
    """The engine is in other processes: nothing here decodes."""

    @property
    def gang(self) -> Gang:
        """Training ranks; `do` reaches a role on each."""
        ...

    def training(self) -> AbstractAsyncContextManager[None]:
        """Within it devices are the learners': where it shares them, the engine sleeps, and nobody may ask it."""
        ...

    async def watched(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The work's result. Raises WorkerLost once a rank is lost, whatever the work waits for then."""
        ...

    async def publish(self, version: int) -> None:
        """Make the policy's weights known to the engine, which confirms them."""
        ...

    async def writer(self, role: str, staging: Path) -> Writer:
        """What writes a role's model into a folder of a checkpoint. `staging` is a folder it may use meanwhile."""
        ...

    def judges(self, reward: RewardSettings) -> JudgeWorkers:
        """Processes that hold the judge of a reward."""
        ...

    def close(self) -> None: ...
