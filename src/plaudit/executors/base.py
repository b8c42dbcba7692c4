"""The interface of an executor: a worker group for each call, and the way of new weights from learners to the engine.

generate -> engine     judge -> judge     train, reference, critic -> models
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from plaudit.loop.hooks import Remembered
from plaudit.loop.models import Models
from plaudit.monitor.events import Doing
from plaudit.monitor.page import ProcessStatus
from plaudit.rewards.base import Reward
from plaudit.rewards.judge import JudgeReward
from plaudit.rewards.settings import RewardSettings
from plaudit.rollout.engine import Sampler
from plaudit.settings.checks import Longest
from plaudit.types import Group, Stats

Result = TypeVar("Result")


@dataclass(frozen=True)
class Plan:
    """What a rank must know besides the settings."""

    checkpoints: Path
    resume: str | None
    total_steps: int
    longest: Longest
    passes: tuple[int, int] | None = None
    """Tokens of a pass with and without gradients; None: as in the settings."""
    as_chat: bool | None = None
    """True if the policy is asked with chats; its checkpoints keep this. None if unknown."""
    mirrors: bool = False
    """True if ranks that are formed again take what their mirrors have, if that is newer than `resume`."""


class Executor(Protocol):
    """The workers of one run. The caller promises to close the executor."""

    threads: int
    """CPU threads of a rank."""
    back: Remembered | None
    """The step that ranks took from their mirrors when they were formed again; None: they are from the checkpoint."""

    def sampler(self, doing: Doing) -> Sampler:
        """Return the sampler of an online method. `doing(worker, phase)` is active while a worker samples."""
        ...

    def models(self) -> Models:
        """The worker groups of models that are trained, and of a reference. By default all share the training ranks."""
        ...

    def judge(self, reward: RewardSettings, tokenizer: Any) -> JudgeReward:
        """The judge of a reward, for answers that `tokenizer` made."""
        ...

    def function(self, reward: RewardSettings, here: Reward) -> Reward:
        """The reward of a function: `here`, or its processes."""
        ...

    def training(self) -> AbstractAsyncContextManager[None]:
        """While active, only learners use the devices: if they are shared, the engine sleeps and must not be asked."""
        ...

    async def watched(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the work's result. Raises WorkerLost as soon as a rank is lost, whatever the work waits for."""
        ...

    async def pinned(self, groups: Sequence[Group]) -> Sequence[int]:
        """Keep groups' answers for a step that learns from them, whatever is lost beside ranks. Return the numbers of
        groups whose answers are lost."""
        ...

    async def publish(self, version: int) -> Stats:
        """Give the policy's weights to the engine, which confirms them. Return figures of what was sent to others."""
        ...

    async def save(self, role: str, folder: Path) -> None:
        """Copy what a checkpoint has of a role's model, to be written into the folder."""
        ...

    async def written(self, folders: Sequence[Path]) -> None:
        """Write into these folders what was copied, models and optimizers, while training goes on."""
        ...

    async def mirror(self, remembered: Remembered) -> None:
        """Begin to copy what ranks hold after a step to processes on other nodes, if there are any for it."""
        ...

    async def form_again(self, plan: Plan) -> bool:
        """Start the ranks again, from the plan's checkpoint. False if another executor must be opened for it."""
        ...

    def processes(self) -> Sequence[ProcessStatus]:
        """Every process, and the workers lost last."""
        ...

    def close(self) -> None: ...
