"""Training workers that come and go, with the newest weights of the parameter servers.

Supervisor -> refresh: free islands, given the newest weights -> Team, a worker group; a lost one's work goes to others
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from plaudit.runtime.settings import Servers
from plaudit.runtime.supervisor import Supervisor
from plaudit.runtime.worker import Arguments, Kind_co, WorkerLost
from plaudit.runtime.worker_group import WorkerGroup
from plaudit.servers.part import ServerPart
from plaudit.servers.pusher import Pusher

if TYPE_CHECKING:
    from plaudit.runtime.ray_worker import RayWorker
    from plaudit.runtime.ray_worker_group import GroupWorker, RayWorkerGroup

Result = TypeVar("Result")
PUSHING = "pusher of the "
"""PUSHING + role is the name of the part of a rank that is the role's `Pusher`."""
PAUSE = 0.02


@dataclass(eq=False)
class Island:
    """A training worker with a whole replica of the models: one rank, or several that use collectives."""

    worker: GroupWorker[Any]
    versions: dict[str, int] = field(default_factory=dict)
    """{role: version of the servers' weights that the island has}."""
    tokens: Counter[str] = field(default_factory=Counter)
    """{role: tokens that it took local steps on since its last push, as a sum of shares of steps}."""
    missed: Counter[str] = field(default_factory=Counter)
    """{role: rounds of averaging that it has missed since its last push}."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from the start of a pass over units to the end of their push, so that no other work comes in between."""

    @property
    def alive(self) -> bool:
        return all(rank.alive for rank in self.worker.worker_group.workers)

    def pushers(self, role: str) -> WorkerGroup[Pusher]:
        return self.worker.worker_group.part(Pusher, PUSHING + role)

    def references(self, method: Callable[..., Any], role: str, *arguments: Any, parts: int) -> list[Any]:
        """Call a method of the first rank's `Pusher` that returns `parts` values. Return a reference to each."""
        return self.worker.worker_group.first.references(method, *arguments, parts=parts, part=PUSHING + role)

    def does(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start `work` as a task and return it. The island counts as busy until the task ends."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


class Team(WorkerGroup[Kind_co]):
    """All ranks of the present islands as one worker group. Any island can do the work of another; their number
    changes in `refresh` and with every loss."""

    def __init__(self, supervisor: Supervisor[Any], servers: RayWorkerGroup[Any], settings: Servers):
        self.supervisor, self.servers, self.settings = supervisor, servers, settings
        self.islands: list[Island] = []
        self.versions: dict[str, int] = {}
        self.bytes = Counter[str]()
        """{role: bytes sent between workers and servers since the figure was last reported}."""

    async def begin(self, role: str, path: Path | None = None) -> None:
        """Load the servers with a free worker's weights of a role, or with the state that it reads at `path`."""
        worker: Any = (await self.supervisor.free())[0].worker
        *parts, _ = Island(worker).references(Pusher.begun, role, path, parts=self.settings.count + 1)
        await self.servers.part(ServerPart, role).scatter(ServerPart.load, [(part,) for part in parts])
        self.versions[role] = self.versions.get(role, -1) + 1

    async def refresh(self) -> list[Island]:
        """Takes: nothing. Waits for: any free worker. Woken by: joined workers, ended work. Gives: the free islands,
        with the newest weights."""
        while True:
            await self.supervisor.free()
            known = {island.worker: island for island in self.islands}
            here: list[Any] = [place.worker for place in self.supervisor.all if place.worker is not None]
            self.islands[:] = [known.get(worker) or Island(worker) for worker in here]
            await asyncio.gather(*(self._bring(island) for island in self.free))
            if found := self.current:
                return found
            await asyncio.sleep(PAUSE)

    async def _bring(self, island: Island) -> None:
        for role, version in list(self.versions.items()):
            if island.versions.get(role) != version:
                replies = self.ask_servers(ServerPart.whole, role)
                with suppress(WorkerLost):
                    await island.pushers(role).each(Pusher.load, *(whole for whole, _ in replies))
                    island.versions[role] = version
                    self.bytes[role] += await self.sizes(replies)

    def ask_servers(self, method: Callable[..., Any], role: str, *arguments: Any) -> list[list[Any]]:
        """Return references to the pair that each server returns."""
        servers = self.servers.workers
        return [server.references(method, *arguments, parts=2, part=role) for server in servers]

    async def sizes(self, replies: Sequence[Sequence[Any]]) -> int:
        """Return the sum of the sizes in bytes, the second value of each server's reply."""
        pairs = zip(self.servers.workers, replies, strict=True)
        return sum([await server.fetched(size) for server, (_, size) in pairs])

    @property
    def free(self) -> list[Island]:
        return [island for island in self.islands if island.alive and not island.tasks]

    @property
    def current(self) -> list[Island]:
        """Free islands that have the servers' newest weights of every role."""
        return [island for island in self.free if island.versions == self.versions]

    @property
    def _ranks(self) -> list[RayWorker[Any]]:
        return [rank for island in self.current for rank in island.worker.worker_group.workers]

    @property
    def world(self) -> int:  # type: ignore[override]
        return max(1, len(self._ranks))

    async def scatter(
        self, method: Callable[[Kind_co, *Arguments], Result], arguments: Sequence[tuple[*Arguments]]
    ) -> list[Result]:
        ranks: Sequence[RayWorker[Any] | None] = self._ranks or (None,)
        asked = (self._asked(ranks[n % len(ranks)], method, own) for n, own in enumerate(arguments))
        return list(await asyncio.gather(*asked))

    async def _asked(
        self, rank: RayWorker[Any] | None, method: Callable[..., Result], arguments: tuple[Any, ...]
    ) -> Result:
        while True:
            rank = rank or (await self.refresh())[0].worker.worker_group.first
            try:
                found: Result = await rank.do(self.name, method.__name__, arguments)
                return found
            except WorkerLost:
                rank = None

    async def idle(self) -> None:
        """Wait until no island has a task."""
        while tasks := [task for island in self.islands for task in island.tasks]:
            await asyncio.wait(tasks)

    def close(self) -> None:
        for task in [task for island in self.islands for task in island.tasks]:
            task.cancel()
