"""Parameter servers and training workers that come and go, as processes (`runtime.strategy=server`).

reserve room -> servers, islands -> team; an island is lost -> another in its place, while the others go on
             -> a server is lost -> all start again from a checkpoint, since it holds state
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from plaudit.executors.collected import collected, lacking
from plaudit.executors.ranks import RankGroups
from plaudit.executors.ray import RayExecutor
from plaudit.executors.trainer import RankProcess
from plaudit.learn.learner import Learner
from plaudit.learn.scorer import Scorer
from plaudit.learn.watched import Watched
from plaudit.loop.copies import Away
from plaudit.loop.models import Models
from plaudit.runtime.settings import Servers
from plaudit.runtime.supervisor import Supervisor
from plaudit.runtime.worker import Worker, WorkerLost
from plaudit.servers.part import ServerPart
from plaudit.servers.pusher import Pusher
from plaudit.servers.served import Served
from plaudit.servers.team import PUSHING, Team
from plaudit.settings.tree import Settings
from plaudit.types import Role, Stats

if TYPE_CHECKING:
    from plaudit.runtime.ray_worker import RayWorker

Result = TypeVar("Result")
SERVER = "parameter server"
NOMINAL = {"memory": float(1 << 20)}
"""Resources that a server reserves, only to be placed: it computes for a moment per step, while workers wait."""


def _served(settings: Settings) -> Servers:
    served = settings.runtime.served
    assert served is not None, "`Executors` opens an executor of servers for no other strategy"
    return served


class ServerProcess:
    """A parameter server in its process; `part(role)` yields its `ServerPart` of that role's model."""

    def __init__(self, recipe: Mapping[str, Any]):
        from plaudit.settings.recipes import load_settings

        settings = load_settings(recipe)
        how = settings.optimizer, _served(settings)
        self.parts = {role: ServerPart(*how) for role in settings.objective.losses()}

    @contextmanager
    def part(self, role: str) -> Iterator[ServerPart]:
        yield self.parts[Role(role)]


class ServedProcess(RankProcess):
    """A rank of an island (a training worker). Its part named `PUSHING + role` is the role's `Pusher`."""

    def build(self, address: str, rank: int, world: int, timeout: float) -> None:
        super().build(address, rank, world, timeout)
        served, members = _served(self.settings), self.members.items()
        self.pushers = {role: Pusher(one, served) for role, one in members if isinstance(one, Learner)}

    @contextmanager
    def part(self, role: str) -> Iterator[Scorer | Watched | Pusher]:  # type: ignore[override]
        name = role.removeprefix(PUSHING)
        with super().part(name) as found:
            yield found if name == role else self.pushers[Role(name)]


class ServedRankGroups(RankGroups):
    """Rank groups whose `workers` are the servers: `RayExecutor` watches them, and the loss of one ends the attempt."""

    supervisor: Supervisor[Any] | None = None
    team: Team[Any]
    servers: Sequence[RayWorker[Any]] = ()

    @property
    def workers(self) -> list[RayWorker[Any]]:
        return list(self.servers)

    @property
    def writers(self) -> list[RayWorker[RankProcess]]:
        """The ranks of living islands."""
        living = [island.worker.worker_group for island in self.team.islands if island.alive]
        return [rank for island in living for rank in island.workers]

    def end(self) -> None:
        if self.supervisor is not None:
            self.supervisor.close("the training workers")
            self.team.close()
        super().end()
        self.runtime.end(name=SERVER)


class ServerExecutor(RayExecutor):
    """An executor with parameter servers. The first free island publishes weights and saves models."""

    kind = ServedRankGroups
    ranks: ServedRankGroups
    seeing: set[str]
    """The nodes that see the run's folder."""

    async def _form(self) -> None:
        from plaudit.runtime.ray_worker_group import RayWorkerGroup

        self.seeing = set()
        await self._room_for_ranks()
        served = _served(self.settings)
        count = served.count
        group = (await self._room(f"{count} parameter servers", (SERVER, 0), [NOMINAL] * count, in_time=True))["group"]
        starts = (
            self.runtime.spawn(ServerProcess, self.recipe, name=f"{SERVER} {n}", group=group, place=n, threads=1)
            for n in range(count)
        )
        self.ranks.supervisor = supervisor = Supervisor(
            self._island,
            self.settings.runtime.num_training_workers,
            work="units",
            patience=2 * self.settings.runtime.start_timeout,
            none="no training worker is left, and none could be started within {patience:g} s",
            failures=self.failures,
            say=self.say,
        )
        team = Team[Any](supervisor, RayWorkerGroup([]), served)
        self.ranks.team = team
        supervisor.open()
        servers: list[Any] = list(await asyncio.gather(*starts))
        await supervisor.counted()
        self.ranks.servers, team.servers = servers, RayWorkerGroup(servers)
        for role in self.settings.objective.losses():
            await team.begin(role)
        await team.refresh()
        self.plan = replace(self.plan, resume=None)  # later workers take their weights from the servers
        self.ranks.worker_groups = [team.islands[0].worker.worker_group]

    async def _island(self, number: int) -> Worker[ServedProcess]:
        """Start the ranks of a training worker, join them and return them as one worker."""
        from plaudit.runtime.ray_worker_group import GroupWorker, RayWorkerGroup

        settings = self.settings.runtime
        size = len(self.ranks.bundles) // settings.num_training_workers
        await self.runtime.placed(self.ranks.group, within=None)
        numbers = range(number * size, (number + 1) * size)
        names = [f"training rank {one}" for one in numbers]
        try:
            ranks = await asyncio.gather(*(self._served_rank(one) for one in numbers))
            worker_group = RayWorkerGroup(ranks, patience=settings.collective_timeout)
            await self.ranks.join(worker_group)
            blind = await lacking(ranks, self.plan.checkpoints)
            self.seeing |= {rank.node for rank in ranks} - {rank.node for rank in blind}
        except BaseException:
            for worker in self.runtime.workers:
                if worker.name in names:
                    worker.kill()
            raise
        return GroupWorker(names[0] if size == 1 else f"island {number}", worker_group)

    async def _served_rank(self, number: int) -> Any:
        where = self.ranks.place(number) | {"name": f"training rank {number}"}
        return await self.runtime.spawn(ServedProcess, self.recipe, self.plan, self.ranks.rank_groups[0].roles, **where)

    def models(self) -> Models:
        objective = self.settings.objective
        models = Models.together(self.ranks.team, objective, 0.0)
        halts: dict[Role, Callable[[Stats], str | None]] = {Role.POLICY: objective.halt}
        trained = {role: Served(self.ranks.team, role, halts.get(role, lambda stats: None)) for role in models.trained}
        return replace(models, trained=trained)

    async def publish(self, version: int) -> Stats:
        return await self._by_one(lambda: super(ServerExecutor, self).publish(version))

    async def save(self, role: str, folder: Path) -> None:
        await self._by_one(lambda: super(ServerExecutor, self).save(role, folder))

    async def written(self, folders: Mapping[str, Path], commit: Callable[[], None], away: Away | None) -> None:
        """Commit what islands wrote in `save`, after fetching it from disks of their own, since an island may be lost
        later. Then let islands that see the run's folder copy it to the address; without any, the driver does."""
        for folder in folders.values():
            await collected([rank for rank in self.ranks.writers if rank.node not in self.seeing], folder)
        await asyncio.to_thread(commit)
        while away and (ranks := [rank for rank in reversed(self.ranks.writers) if rank.node in self.seeing]):
            (copies, name, _), nodes = away, {rank.node: rank for rank in ranks}.values()
            pairs = zip(folders, cycle(nodes), strict=False)
            with suppress(WorkerLost):  # then another island copies
                kept = {role: (rank, self.plan.checkpoints / role / name) for role, rank in pairs}
                await self._copied(kept, name, copies)
                return

    async def _by_one(self, ask: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Return the result of `ask` by a free island; if that is lost, try another. Raises a server's WorkerLost."""
        while True:
            self.ranks.worker_groups = [(await self.ranks.team.refresh())[0].worker.worker_group]
            try:
                return await ask()
            except WorkerLost:
                if not all(server.alive for server in self.ranks.servers):
                    raise

    def close(self) -> None:
        self.ranks.end()
        super().close()
