"""The ranks of a run under Ray: those that train the policy, and those of models with processes of their own.

    settings -> RankGroup, ... -> a bundle for each rank -> started, joined -> a worker group of each

Left out: reserving their resources, and the loss of a rank (`ray.py`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from plaudit.executors.base import Plan
from plaudit.executors.collected import spread
from plaudit.executors.inside import SamplingRank
from plaudit.executors.together import Ranks, arrangement, divided, joined, levels, on, where
from plaudit.executors.trainer import RankProcess
from plaudit.runtime.coroutines import together
from plaudit.runtime.resources import Resources, reserved
from plaudit.runtime.settings import TRAIN, RuntimeSettings
from plaudit.runtime.worker import reason_of
from plaudit.settings.tree import Settings, to_plain
from plaudit.types import Role

if TYPE_CHECKING:
    from plaudit.runtime.ray import RayRuntime
    from plaudit.runtime.ray_worker import RayWorker
    from plaudit.runtime.ray_worker_group import RayWorkerGroup

Result = TypeVar("Result")


@dataclass(frozen=True)
class RankGroup:
    """The ranks of one mesh, and the roles whose models they hold."""

    name: str
    roles: tuple[Role, ...]
    settings: Settings

    @property
    def runtime(self) -> RuntimeSettings:
        return self.settings.runtime

    @property
    def reservations(self) -> list[Mapping[str, float]]:
        """For each rank, the resources that the settings reserve explicitly."""
        return [self.runtime.resources_per_worker] * self.runtime.ranks


def rank_groups(settings: Settings) -> list[RankGroup]:
    """Return the rank groups of a run: the training ranks first, then those of calls with their own processes."""
    hosts = {role: settings.runtime.host(role) for role in Role}
    runtimes = {TRAIN: settings.runtime, **settings.runtime.apart}
    return [
        RankGroup(
            "training" if call == TRAIN else call,
            tuple(role for role in Role if hosts[role] == call),
            replace(settings, runtime=runtime),
        )
        for call, runtime in runtimes.items()
    ]


class RankGroups:
    """All ranks of a run. The first worker group trains the policy."""

    def __init__(self, settings: Settings, runtime: RayRuntime, threads: Callable[[Mapping[str, float]], int]):
        self.rank_groups, self.runtime, self.threads = rank_groups(settings), runtime, threads
        self.worker_groups: list[RayWorkerGroup[RankProcess]] = []
        self.bundles: list[Resources] = []
        self.together: list[Ranks] = []
        """The ranks of each bundle of the placement group."""
        self.group: Any = None
        """The placement group, once it is reserved."""
        self._formed = asyncio.Event()

    @property
    def reservations(self) -> list[Mapping[str, float]]:
        return [one for group in self.rank_groups for one in group.reservations]

    def reserve(self, share: Resources) -> None:
        self.bundles = [reserved(one, share) for one in self.reservations]

    def arranged(self, beside: Sequence[Resources], sharers: Callable[[int], int]) -> list[Ranks]:
        """Return which ranks shall share a bundle, and with it a node. `beside`: what others reserve; `sharers`: the
        number of processes that share a rank's devices. A GPU that two processes share is a fraction to Ray, which
        might give both halves of one to two ranks of a bundle; so each rank has its own bundle then."""
        halves = any("GPU" in bundle and sharers(rank) > 1 for rank, bundle in enumerate(self.bundles))
        firsts = itertools.accumulate((group.runtime.ranks for group in self.rank_groups), initial=0)
        meshes = zip(self.rank_groups, firsts, strict=False)
        wanted = () if halves else (level for group, first in meshes for level in levels(group.runtime, first))
        return arrangement(self.runtime.nodes(), self.bundles, wanted, beside=beside)

    def reserve_together(self, together: list[Ranks]) -> None:
        """Reserve a bundle for each of these groups of ranks, in place of earlier ones."""
        if self.group is not None:
            self.runtime.give_back(self.group)
        self.together, self.group = together, self.runtime.reserve(joined(self.bundles, together))

    def place(self, number: int) -> dict[str, Any]:
        """Return where to spawn what uses the devices of a rank."""
        place = next(place for place, ranks in enumerate(self.together) if number in ranks)
        bundle = self.bundles[number]
        parts = len(self.together[place])
        return {"group": self.group, "place": place, "parts": parts, "threads": self.threads(bundle)}

    def placed(self) -> Iterator[str]:
        """Yield where the ranks are, if on several nodes, and a warning if ranks of one row are."""
        first = 0
        for ranks, worker_group in zip(self.rank_groups, self.worker_groups, strict=True):
            nodes, own = [worker.node for worker in worker_group.workers], self.bundles[first:][: ranks.runtime.width]
            what, key = f"{ranks.name} ranks", "runtime.resources_per_worker"
            if len({*nodes}) > 1:
                yield where(what, {rank: on([node]) for rank, node in enumerate(nodes)})
            if warning := divided(what, "runtime.mesh: tensor, context", nodes, own, key):
                yield warning
            first += ranks.runtime.ranks

    def __str__(self) -> str:
        return ", ".join(f"{group.runtime.ranks} {group.name}" for group in self.rank_groups)

    @property
    def training(self) -> RayWorkerGroup[RankProcess]:
        return self.worker_groups[0]

    @property
    def workers(self) -> list[RayWorker[RankProcess]]:
        return [worker for worker_group in self.worker_groups for worker in worker_group.workers]

    @property
    def nodes(self) -> list[RayWorker[RankProcess]]:
        """The first rank of each node."""
        return list({rank.node: rank for rank in reversed(self.workers)}.values())

    @property
    def apart(self) -> dict[str, RayWorkerGroup[RankProcess]]:
        """The worker groups of models that are not on the training ranks, by role."""
        pairs = zip(self.rank_groups[1:], self.worker_groups[1:], strict=False)
        return {role: worker_group for group, worker_group in pairs for role in group.roles}

    def of(self, role: str) -> RayWorkerGroup[RankProcess]:
        return self.apart.get(role, self.training)

    async def form(self, plan: Plan, sharers: Callable[[int], int]) -> None:
        """Start all ranks in the bundles of the placement group, and join the ranks of each worker group. `sharers`
        returns the number of processes that share the devices of a bundle."""
        from plaudit.runtime.ray_worker_group import RayWorkerGroup

        first, started = 0, []
        samples = self.rank_groups[0].settings.samples and self.rank_groups[0].runtime.inside
        for ranks in self.rank_groups:
            recipe = to_plain(ranks.settings) | {"resume": None}
            for number in range(ranks.runtime.ranks):
                common = self.place(first + number) | {"sharers": sharers(first + number)}
                kind = SamplingRank if samples and ranks is self.rank_groups[0] else RankProcess
                name = f"{ranks.name} rank {number}"
                started.append(self.runtime.spawn(kind, recipe, plan, ranks.roles, name=name, **common))
            first += ranks.runtime.ranks
        found = await asyncio.gather(*started)
        if plan.resume is not None:
            await spread(found, plan.checkpoints, plan.resume)
        ready = iter(found)
        worker_groups = [
            RayWorkerGroup(
                [next(ready) for _ in ranks.reservations],
                patience=ranks.runtime.collective_timeout,
                width=ranks.runtime.width,
                stages=ranks.runtime.pipeline,
            )
            for ranks in self.rank_groups
        ]
        await together(map(self.join, worker_groups))
        self.worker_groups = worker_groups
        self._formed.set()

    async def sampling(self, number: int) -> RayWorker[Any]:
        """Return training rank `number` as a rollout worker, for `Inside`. After a loss, wait until all ranks have been
        restarted."""
        while not self.worker_groups or not self.training.workers[number].alive:
            self._formed.clear()
            await self._formed.wait()
        return self.training.workers[number]

    async def join(self, group: RayWorkerGroup[RankProcess]) -> None:
        """Join the ranks of a worker group in a process group, and build their models."""
        address, timeout = await group.first.call(RankProcess.address), self.rank_groups[0].runtime.collective_timeout
        mine = [(address, number, group.world, timeout) for number in range(group.world)]
        await group.scatter(RankProcess.build, mine, starts=True)

    async def watched(self, work: Coroutine[Any, Any, Result], say: Callable[[str], None]) -> Result:
        """Takes: a run's work. Waits for: its end, or the first lost rank (while ranks are idle, no call would notice a
        loss). Woken by: either. Gives: the result; for a lost rank it raises WorkerLost, after cancelling the work and
        waiting for its end."""
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
        for group in self.rank_groups:
            self.runtime.end(name=f"{group.name} rank")
        self.worker_groups = []
