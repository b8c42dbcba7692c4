"""One rank and one engine in this process; the engine shares the rank's parameters unless samples may lag."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from plaudit.compute.products import slow_halves
from plaudit.executors.base import Plan, ProcessStatus
from plaudit.executors.processes import load_judge
from plaudit.executors.trainer import Trainer
from plaudit.loop.copies import Away
from plaudit.loop.models import Models
from plaudit.loop.progress import Remembered
from plaudit.rewards.base import Reward
from plaudit.rewards.judge import JudgeReward
from plaudit.rewards.settings import RewardSettings
from plaudit.rollout.build import build_engine
from plaudit.rollout.engine import Engine, Sampler
from plaudit.runtime.local import LocalWorkerGroup
from plaudit.runtime.worker import Doing
from plaudit.settings.tree import Settings
from plaudit.types import Completion, Group, Role, Sampling, Stats

Result = TypeVar("Result")


class Timed:
    """A sampler that enters `doing(turn=...)` during each request, so that its time is recorded."""

    def __init__(self, sampler: Sampler, doing: Doing):
        self.sampler, self.doing = sampler, doing

    @property
    def busy(self) -> bool:
        return self.sampler.busy

    async def generate(self, prompt_tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Completion]:
        with self.doing(turn=bool(plan) and plan[0].episode is not None):
            return await self.sampler.generate(prompt_tokens, plan)


class LocalExecutor:
    """Executor of a local run: one rank, the engine and the judges, all in this process."""

    back: Remembered | None = None

    def __init__(self, settings: Settings, plan: Plan, say: Callable[[str], None]):
        self.settings = settings
        self.trainer = Trainer(settings, plan)
        if settings.learn.precision == "bfloat16" and self.trainer.device == "cpu" and slow_halves():
            say("this processor has no products of bfloat16: learn.precision=bfloat16 saves memory here, but no time")
        self.engine: Engine | None = None
        rollout = settings.rollout
        self.copies = rollout.max_lag > 0 or rollout.engine == "vllm"
        self.version = 0
        self.threads = torch.get_num_threads()
        if settings.samples:
            policy = self.trainer.models[Role.POLICY]
            tokenizer = self.trainer.tokenizer
            self.engine = build_engine(
                policy,
                tokenizer,
                slots=rollout.slots,
                copy=rollout.max_lag > 0,
                vllm=rollout.for_vllm(longest_prompt=settings.asked_tokens, sleeps=settings.runtime.shares),
                say=lambda text: say(f"this process {text}"),
            )

    def sampler(self, doing: Doing) -> Sampler:
        assert self.engine is not None
        return Timed(self.engine, partial(doing, "this process", "samples"))

    def models(self) -> Models:
        return Models.together(LocalWorkerGroup(self.trainer), self.settings.objective, self.settings.reference.ema)

    def judge(self, reward: RewardSettings, tokenizer: Any) -> JudgeReward:
        """Return the judge. It scores while the engine is idle, since both compute in this process."""
        engine = self.engine
        assert engine is not None
        as_chat = self.settings.data.as_chat
        return load_judge(self.settings, reward.path).reward(tokenizer, busy=lambda: engine.busy, as_chat=as_chat)

    def function(self, reward: RewardSettings, here: Reward) -> Reward:
        return here

    def environment(self) -> None:
        return None

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        if self.engine is None or not self.settings.runtime.shares:
            yield
            return
        self.engine.sleep()
        self.trainer.onload()
        yield  # if this fails the run ends: the engine could not wake without that memory
        self.trainer.offload()
        self.engine.wake()

    async def watched(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the work's result. It never raises WorkerLost: there are no other processes."""
        return await work

    async def pinned(self, groups: Sequence[Group]) -> Sequence[int]:
        return ()

    async def publish(self, version: int) -> Stats:
        """Give the policy's weights to the engine: a copy, or only the version if the engine shares the parameters."""
        if self.engine is not None and version != self.version:
            if not self.settings.rollout.interrupt:
                await self.engine.drain()
            self.engine.load(self.trainer.weights() if self.copies else None, version)
            self.version = version
        return {}

    async def save(self, role: str, folder: Path) -> None:
        self.trainer.save(role, folder)

    async def written(self, folders: Mapping[str, Path], commit: Callable[[], None], away: Away | None) -> None:
        await asyncio.to_thread(self.trainer.pending.write, list(folders.values()))
        await asyncio.to_thread(commit)

    async def mirror(self, remembered: Remembered) -> None:
        """Do nothing: the only rank is in the driver's process."""

    async def form_again(self, plan: Plan) -> bool:
        return False

    def processes(self) -> list[ProcessStatus]:
        does = "learns" if self.engine is None else "learns and samples"
        return [ProcessStatus("this process", f"{socket.gethostname()}, process {os.getpid()}", does)]

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
