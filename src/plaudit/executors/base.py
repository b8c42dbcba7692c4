"""The interface of an executor: it gives a worker group for each call, and publishes weights to the engine.

generate -> engine     judge -> judge     train, reference, critic -> models
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from plaudit.environments.workers import EnvironmentWorkers
from plaudit.loop.copies import Away
from plaudit.loop.models import Models
from plaudit.loop.progress import Remembered
from plaudit.models.settings import Longest
from plaudit.rewards.base import Reward
from plaudit.rewards.judge import JudgeReward
from plaudit.rewards.settings import RewardSettings
from plaudit.rollout.engine import Sampler
from plaudit.runtime.worker import Doing
from plaudit.types import Group, Stats

Result = TypeVar("Result")


@dataclass(frozen=True)
class Plan:
    """What ranks need besides the settings: where checkpoints are, which to load, the run's steps and longest row."""

    checkpoints: Path
    resume: str | None
    total_steps: int
    longest: Longest
    passes: tuple[int, int] | None = None
    """Tokens of a pass with and without gradients; None: as in the settings."""
    as_chat: bool | None = None
    """True if prompts are rendered as chats for the policy; its checkpoints keep this. None if unknown."""
    mirrors: bool = False
    """True if restarted ranks load the state that their mirrors hold, if it is newer than the checkpoint `resume`."""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process of a run, as its page shows it."""

    name: str
    place: str
    """Node and process id, as text."""
    state: str
    lost: bool = False


class Executor(Protocol):
    """The workers of one run. The caller promises to close the executor."""

    threads: int
    """CPU threads of a rank."""
    back: Remembered | None
    """The step that restarted ranks loaded from their mirrors; None: they loaded the plan's checkpoint."""

    def sampler(self, doing: Doing) -> Sampler:
        """Return the sampler of an online method. `doing(worker, phase)` is active while a worker samples."""
        ...

    def models(self) -> Models:
        """Return handles of trained models and of a reference. By default all are on the training ranks."""
        ...

    def judge(self, reward: RewardSettings, tokenizer: Any) -> JudgeReward:
        """Return the judge of a reward, for answers whose tokens are `tokenizer`'s."""
        ...

    def function(self, reward: RewardSettings, here: Reward) -> Reward:
        """Return a reward that calls the function in this process (`here`), or in its own processes."""
        ...

    def environment(self) -> EnvironmentWorkers | None:
        """Return the processes of the run's environment; None if it runs in this one."""
        ...

    def training(self) -> AbstractAsyncContextManager[None]:
        """While active, only learners use the devices: an engine on the same devices sleeps and takes no requests."""
        ...

    async def watched(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work` and return its result. Raises WorkerLost once a rank process is lost, and cancels the work."""
        ...

    async def pinned(self, groups: Sequence[Group]) -> Sequence[int]:
        """Let ranks hold the groups' answers, so that the step survives the loss of other nodes. Return the indices (in
        `groups`) of groups whose answers are lost."""
        ...

    async def publish(self, version: int) -> Stats:
        """Give the policy's weights to the engine as `version`. Return figures of bytes sent to other processes."""
        ...

    async def save(self, role: str, folder: Path) -> None:
        """Save a role's model to the folder: write all but the weights, and copy these for `written` to write later."""
        ...

    async def written(self, folders: Mapping[str, Path], commit: Callable[[], None], away: Away | None) -> None:
        """Write the copies of models and optimizers into folders of a checkpoint, by role or STATE, while training
        continues. Then `commit` it in the run's folder, unless ranks on other disks commit it to `away`."""
        ...

    async def mirror(self, remembered: Remembered) -> None:
        """Begin to copy the ranks' state after a step to processes on other nodes, if the run has mirrors."""
        ...

    async def form_again(self, plan: Plan) -> bool:
        """Restart all ranks from the plan's checkpoint. Return False if a new executor must be opened instead."""
        ...

    def processes(self) -> Sequence[ProcessStatus]:
        """Return the status of every process, then of the workers that were lost last."""
        ...

    def close(self) -> None: ...
