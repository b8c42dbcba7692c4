"""The ranks of a run under Ray: those that train the policy, and those of models with processes of their own.

    settings -> Post, ... -> a bundle for each rank -> started, joined -> a gang for each post

Left out: room for them, and what follows a loss (`ray.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from plaudit.crew.base import Plan
from plaudit.crew.collected import spread
from plaudit.crew.inside import SamplingRank
from plaudit.crew.trainer import RankProcess
from plaudit.runtime.coroutines import together
from plaudit.runtime.resources import Resources, reserved
from plaudit.runtime.settings import TRAIN, RuntimeSettings
from plaudit.runtime.worker import reason_of
from plaudit.settings.tree import Settings, to_plain
from plaudit.types import Role

if TYPE_CHECKING:
    from plaudit.runtime.ray import RayRuntime
    from plaudit.runtime.ray_gang import RayGang
    from plaudit.runtime.ray_worker import RayWorker

Result = TypeVar("Result")


@dataclass(frozen=True)
class Post:
    """Ranks of one mesh, and the models that they have."""

    name: str
    roles: tuple[Role, ...]
    settings: Settings

    @property
    def runtime(self) -> RuntimeSettings:
        return self.settings.runtime

    @property
    def told(self) -> list[Mapping[str, float]]:
        """What its ranks reserve, as far as settings say."""
        return [self.runtime.resources_per_worker] * self.runtime.ranks


def posts(settings: Settings) -> list[Post]:
    """The training ranks first, then those of calls with processes of their own."""
    hosts = {role: settings.runtime.host(role) for role in Role}
    given = {TRAIN: settings.runtime, **settings.runtime.apart}
    return [
        Post(
            "training" if call == TRAIN else call,
            tuple(role for role in Role if hosts[role] == call),
            replace(settings, runtime=runtime),
        )
        for call, runtime in given.items()
    ]


class Ranks:
    """All ranks of a run. The first gang trains the policy."""

    def __init__(self, settings: Settings, runtime: RayRuntime, threads: Callable[[Mapping[str, float]], int]):
        self.posts, self.runtime, self._threads = posts(settings), runtime, threads
        self.gangs: list[RayGang[RankProcess]] = []
        self.bundles: list[Resources] = []

    @property
    def told(self) -> list[Mapping[str, float]]:
        return [one for post in self.posts for one in post.told]

    def reserve(self, share: Resources) -> None:
        self.bundles = [reserved(one, share) for one in self.told]

    def __str__(self) -> str:
        return ", ".join(f"{post.runtime.ranks} {post.name}" for post in self.posts)

    @property
    def training(self) -> RayGang[RankProcess]:
        return self.gangs[0]

    @property
    def sampling(self) -> list[RayWorker[Any]]:
        """The training ranks, if they sample."""
        return list(self.training.workers) if self.gangs else []

    @property
    def workers(self) -> list[RayWorker[RankProcess]]:
        return [worker for gang in self.gangs for worker in gang.workers]

    @property
    def nodes(self) -> list[RayWorker[RankProcess]]:
        """A rank of each node."""
        return list({rank.node: rank for rank in reversed(self.workers)}.values())

    @property
    def apart(self) -> dict[str, RayGang[RankProcess]]:
        """The gangs of models that are not on the training ranks, by role."""
        pairs = zip(self.posts[1:], self.gangs[1:], strict=False)
        return {role: gang for post, gang in pairs for role in post.roles}

    def of(self, role: str) -> RayGang[RankProcess]:
        return self.apart.get(role, self.training)

    async def form(self, plan: Plan, group: Any, sharers: Callable[[int], int]) -> None:
        """Start all ranks in the places of a group, and join those of each gang. `sharers`: processes on a training
        rank's devices."""
        from plaudit.runtime.ray_gang import RayGang

        place, started = 0, []
        samples = self.posts[0].settings.samples and self.posts[0].runtime.inside
        for post in self.posts:
            recipe = to_plain(post.settings) | {"resume": None}
            for number in range(post.runtime.ranks):
                common: dict[str, Any] = {"name": f"{post.name} rank {number}", "group": group, "place": place}
                common |= {"threads": self._threads(self.bundles[place]), "sharers": sharers(place)}
                kind = SamplingRank if samples and post is self.posts[0] else RankProcess
                started.append(self.runtime.spawn(kind, recipe, plan, post.roles, **common))
                place += 1
        found = await asyncio.gather(*started)
        if plan.resume is not None:
            await spread(found, plan.checkpoints, plan.resume)
        ready = iter(found)
        gangs = [
            RayGang(
                [next(ready) for _ in post.told],
                patience=post.runtime.collective_timeout,
                width=post.runtime.width,
                stages=post.runtime.pipeline,
            )
            for post in self.posts
        ]
        await together(map(self.join, gangs))
        self.gangs = gangs

    async def join(self, gang: RayGang[RankProcess]) -> None:
        """Let the ranks of a gang meet, and make their models."""
        address, timeout = await gang.first.call(RankProcess.address), self.posts[0].runtime.collective_timeout
        mine = [(address, number, gang.world, timeout) for number in range(gang.world)]
        await gang.scatter(RankProcess.build, mine, starts=True)

    async def watched(self, work: Coroutine[Any, Any, Result], say: Callable[[str], None]) -> Result:
        """Takes: a run's work. Waits for: its end, or the first lost rank, which no call may find while rollout workers
        wait for its weights. Woken by: either. Gives: the result; for a lost rank WorkerLost, after the work was
        cancelled and has ended."""
        working = asyncio.ensure_future(work)
        gone = [asyncio.ensure_future(rank.gone()) for rank in self.workers]
        try:
            await asyncio.wait((working, *gone), return_when=asyncio.FIRST_COMPLETED)
            lost = None if working.done() else next(one.result() for one in gone if one.done())
        finally:
            for one in (working, *gone):
                one.cancel()
            await asyncio.wait((working, *gone))
        if lost is None:
            return working.result()
        if not working.cancelled() and (error := working.exception()) is not None:
            say(f"the current work ended with {type(error).__name__}: {reason_of(error)}")
        raise lost

    def end(self) -> None:
        for post in self.posts:
            self.runtime.end(name=f"{post.name} rank")
        self.gangs = []
