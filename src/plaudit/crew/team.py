"""Training workers that come and go, with the newest weights of the parameter servers.

places -> refresh: who is here, with the newest weights -> Team, a gang; one is lost -> another does its part
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from plaudit.learn.pusher import Pusher
from plaudit.learn.server import ServerPart
from plaudit.runtime.gang import Gang, Shard, Shardable
from plaudit.runtime.places import Places
from plaudit.runtime.settings import Servers
from plaudit.runtime.worker import Arguments, Kind_co, WorkerLost

if TYPE_CHECKING:
    from plaudit.runtime.ray_gang import GangWorker, RayGang
    from plaudit.runtime.ray_worker import RayWorker

Result = TypeVar("Result")
PUSHING = "pusher of the "
"""Before a role: the part of a worker that is its `Pusher`."""
PAUSE = 0.02


@dataclass(eq=False)
class Island:
    """A worker: one rank, or several that meet in collectives."""

    worker: GangWorker[Any]
    versions: dict[str, int] = field(default_factory=dict)
    """Of the servers' weights that it has, by role."""
    tokens: dict[str, float] = field(default_factory=dict)
    """What it has trained on by itself since its last push, in shares of steps; by role."""
    rounds: dict[str, int] = field(default_factory=dict)
    """Rounds that it has missed with such tokens, by role."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Units and their push are one piece of work."""

    @property
    def alive(self) -> bool:
        return all(rank.alive for rank in self.worker.gang.workers)

    def pushers(self, role: str) -> Gang[Pusher]:
        return self.worker.gang.part(Pusher, PUSHING + role)

    def references(self, method: Callable[..., tuple[Any, ...]], role: str, parts: int) -> list[Any]:
        """Ask the first rank's `Pusher`."""
        return self.worker.gang.first.references(method, parts=parts, part=PUSHING + role)

    def does(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Work in the background; the island is busy until it ends."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


class Team(Gang[Kind_co]):
    """All ranks of free islands as one gang, of which each can do the work of another. Its number changes in `refresh`
    and with every loss."""

    def __init__(self, places: Places[Any], servers: RayGang[Any], settings: Servers):
        self.places, self.servers, self.settings = places, servers, settings
        self.islands: list[Island] = []
        self.versions: dict[str, int] = {}
        self.bytes = Counter[str]()
        """What has travelled since it was last asked for, by role."""

    async def begin(self, roles: Sequence[str]) -> None:
        """Let the servers begin with the weights of the first worker."""
        first = Island((await self.places.free())[0].worker)  # type: ignore[arg-type]
        for role in roles:
            *weights, table = first.references(Pusher.begun, role, self.settings.count + 1)
            parts = self.servers.part(ServerPart, role)
            await parts.scatter(ServerPart.load, [(table, one) for one in weights])
            self.versions[role] = 0
        await self.refresh()

    async def refresh(self) -> list[Island]:
        """Takes: nothing. Waits for: any free worker. Woken by: joined workers, ended work. Gives: the free islands,
        with the newest weights."""
        while True:
            await self.places.free()
            known = {island.worker: island for island in self.islands}
            here: list[Any] = [place.worker for place in self.places.all if place.worker is not None]
            self.islands[:] = [known.get(worker) or Island(worker) for worker in here]
            await asyncio.gather(*(self._bring(island) for island in self.free))
            if found := [island for island in self.free if island.versions == self.versions]:
                return found
            await asyncio.sleep(PAUSE)

    async def _bring(self, island: Island) -> None:
        for role, version in list(self.versions.items()):
            if island.versions.get(role) != version:
                servers = self.servers.workers
                replies = [server.references(ServerPart.whole, parts=2, part=role) for server in servers]
                with suppress(WorkerLost):
                    await island.pushers(role).each(Pusher.load, *(whole for whole, _ in replies))
                    island.versions[role] = version
                    for server, (_, size) in zip(servers, replies, strict=True):
                        self.bytes[role] += await server.fetched(size)

    @property
    def free(self) -> list[Island]:
        return [island for island in self.islands if island.alive and not island.tasks]

    @property
    def current(self) -> list[RayWorker[Any]]:
        """Ranks that can be asked now."""
        islands = [island for island in self.free if island.versions == self.versions]
        return [rank for island in islands for rank in island.worker.gang.workers]

    @property
    def world(self) -> int:  # type: ignore[override]
        return len(self.current)

    async def each(self, method: Callable[[Kind_co, *Arguments], Result], *arguments: *Arguments) -> list[Result]:
        await self._someone()
        return await super().each(method, *arguments)

    async def split(
        self, method: Callable[[Kind_co, Shard, *Arguments], Result], batch: Shardable[Shard], *arguments: *Arguments
    ) -> list[Result]:
        await self._someone()
        return await super().split(method, batch, *arguments)

    async def _someone(self) -> None:
        if not self.current:
            await self.refresh()

    async def scatter(
        self, method: Callable[[Kind_co, *Arguments], Result], arguments: Sequence[tuple[*Arguments]]
    ) -> list[Result]:
        ranks = self.current
        asked = (self._asked(ranks[n % len(ranks)], method, given) for n, given in enumerate(arguments))
        return list(await asyncio.gather(*asked))

    async def _asked(self, rank: RayWorker[Any], method: Callable[..., Result], given: tuple[Any, ...]) -> Result:
        while True:
            try:
                found: Result = await rank.do(self.name, method.__name__, given)
                return found
            except WorkerLost:
                rank = (await self.refresh())[0].worker.gang.first

    async def idle(self) -> None:
        """Wait until nobody works."""
        while tasks := [task for island in self.islands for task in island.tasks]:
            await asyncio.wait(tasks)

    def close(self) -> None:
        for island in self.islands:
            for task in island.tasks:
                task.cancel()
