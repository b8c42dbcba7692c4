"""One rank and one engine in this process; the engine shares the rank's parameters unless samples may lag."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from plaudit.loop.checkpoint import Writer
from plaudit.maths.products import slow_halves
from plaudit.rewards.settings import RewardSettings
from plaudit.rewards.workers import JudgeWorkers
from plaudit.rollout.build import build_engine
from plaudit.rollout.engine import Engine
from plaudit.runtime.gang import Gang
from plaudit.runtime.local import LocalGang
from plaudit.settings import Settings
from plaudit.trainer import Plan, Trainer
from plaudit.types import Role

Result = TypeVar("Result")


class LocalCrew:
    """Everything in this process."""

    apart = False

    def __init__(self, settings: Settings, plan: Plan, say: Callable[[str], None]):
        self.settings = settings
        self.trainer = Trainer(settings, plan)
        if settings.learn.precision == "bfloat16" and self.trainer.device == "cpu" and slow_halves():
            say("this processor multiplies no bfloat16: learn.precision=bfloat16 saves memory here, but no time")
        self.gang: Gang = LocalGang(self.trainer)
        self.engine: Engine | None = None
        rollout = settings.rollout
        self.copies = rollout.max_lag > 0 or rollout.engine == "vllm"
        self.threads = torch.get_num_threads()
        if settings.samples:
            policy = self.trainer.models[Role.POLICY]
            tokenizer = self.trainer.tokenizer
            self.engine = build_engine(
                policy,
                tokenizer,
                slots=rollout.slots,
                copy=rollout.max_lag > 0,
                cuda_graphs=rollout.cuda_graphs,
                vllm=rollout.for_vllm(),
                say=lambda text: say(f"this process {text}"),
            )

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        if self.engine is None or not self.settings.rollout.share_devices:
            yield
            return
        self.engine.sleep()
        self.trainer.rise()
        yield  # where it fails the run ends, and the engine has no room to wake in beside the trainer
        self.trainer.rest()
        self.engine.wake()

    async def watched(self, work: Coroutine[Any, Any, Result]) -> Result:
        """This process's own parts are not lost without it."""
        return await work

    async def publish(self, version: int) -> None:
        """Nothing moves where the engine shares the parameters."""
        if self.engine is not None:
            if not self.settings.rollout.interrupt:
                await self.engine.drain()
            self.engine.load(self.trainer.weights() if self.copies else None, version)

    async def writer(self, role: str, staging: Path) -> Writer:
        return partial(self.trainer.save, role)

    def judges(self, reward: RewardSettings) -> JudgeWorkers:
        raise NotImplementedError(f"rewards.workers={reward.workers} without runtime=ray, which settings refuse")

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
