"""Optimizer steps by parameter servers, as the loop asks for them: the loop does not know who steps.

    prepare: units to free workers -> gradients -> servers: sum, norm;  apply: servers: step -> weights -> workers

With local steps, workers step by themselves in `apply`, and every so many steps a round goes through the servers. A
step ends without those who are late if `quorum` says so; what they push counts in a later step, by its tokens. A lost
worker's units are cut again, over the others.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.algorithms.figures import merge_stats
from plaudit.batch import Batch
from plaudit.crew.team import Island, Team
from plaudit.learn.learner import Learner
from plaudit.learn.pusher import Pusher
from plaudit.learn.server import OWN, ServerPart
from plaudit.loop.cast import Learners
from plaudit.runtime.worker import WorkerLost
from plaudit.types import Role, Stats

Pushed = tuple[list[Any], int]
"""References to the messages of a push, one a server, and their bytes."""


@dataclass(eq=False)
class Work:
    """Units that an island was asked to learn from."""

    island: Island
    units: Batch
    share: float
    """Of the whole step's tokens."""
    turn: int
    task: asyncio.Task[tuple[Stats, Pushed]]


class Served(Learners):
    """The learners of one role."""

    def __init__(self, team: Team[Any], role: Role, halt: Callable[[Stats], str | None]):
        super().__init__(team.part(Learner, role))
        self.team, self.role, self.halt, self.settings = team, role, halt, team.settings
        self.servers = team.servers.part(ServerPart, role)
        self.drifts = self.settings.local_steps > 1
        self.turn = self.since = 0
        self.work: list[Work] = []
        self.arrived: list[Work] = []
        self.rate = self.norm = 0.0

    async def prepare(self, batch: Batch, step: int, rate: float) -> Stats:
        self.turn += 1
        if self.drifts:
            await self._late_steps()
        self._ask(await self.team.refresh(), batch, step, rate)
        await self._collect(step, rate)
        total = sum(work.share for work in self.arrived)
        scale = 1.0 if abs(total - 1.0) < 1e-6 else 1.0 / total
        stats = merge_stats(work.task.result()[0] for work in self.arrived)
        if scale != 1.0:
            stats = {name: x if name.endswith(("max", "min")) else x * scale for name, x in stats.items()}
        figures = [work.task.result()[0] for work in self.arrived]
        self.rate = figures[0][f"learning_rate/{self.role}"]
        sound = not any(one["skipped"] for one in figures)
        local = [one[f"gradient_norm/{self.role}"] / w.share for one, w in zip(figures, self.arrived, strict=True)]
        self.norm = await self._summed(scale) if sound and not self.drifts else sum(local) / len(local)
        stats |= {f"gradient_norm/{self.role}": self.norm, f"learning_rate/{self.role}": self.rate}
        stats |= {"skipped": 0.0, "halted": 0.0}
        stats[f"servers/workers/{self.role}"] = float(len({work.island for work in self.arrived}))
        stats[f"servers/late/{self.role}/max"] = float(self.turn - min(work.turn for work in self.arrived))
        stats[f"servers/bytes/{self.role}"] = float(self.team.bytes.pop(self.role, 0))
        if not sound or not (math.isfinite(self.norm) and math.isfinite(stats[f"loss/{self.role}"])):
            stats["skipped"] = 1.0
        elif self.halt(stats) is not None:
            stats["halted"] = 1.0
        return stats

    def _ask(self, islands: Sequence[Island], units: Batch, step: int, rate: float) -> None:
        """Cut units over islands; without trained tokens nothing is asked."""
        shards = [(shard, _share(shard)) for shard in units.shards(len(islands))]
        some = [pair for pair in zip(islands, shards, strict=True) if pair[1][1] > 0] or [(islands[0], (units, 1.0))]
        for island, (shard, share) in some:
            task = island.does(self._learnt(island, shard, step, rate))
            self.work.append(Work(island, shard, share, self.turn, task))

    async def _learnt(self, island: Island, units: Batch, step: int, rate: float) -> tuple[Stats, Pushed]:
        async with island.turn:
            stats = (await island.pushers(self.role).split(Pusher.prepare, units, step, rate))[0]
            return stats, (([], 0) if self.drifts else await self._push(island))

    async def _push(self, island: Island) -> Pushed:
        *messages, size = island.references(Pusher.push, self.role, self.settings.count + 1)
        return messages, await island.worker.gang.first.fetched(size)

    async def _pushed(self, island: Island) -> Pushed | None:
        with suppress(WorkerLost):
            return await self._push(island)
        return None

    async def _collect(self, step: int, rate: float) -> None:
        """Takes: what is asked. Waits for: all, or for the quorum, the grace and those who are too late. Woken by: each
        end and each loss. Gives: `arrived`, in the order of asking."""
        clock, until = asyncio.get_running_loop().time, math.inf
        while True:
            await self._cut_again(step, rate)
            running = [work for work in self.work if not work.task.done()]
            busy = {work.island for work in running}
            too_late = any(self.turn - work.turn >= self.settings.max_stale for work in running)
            if len(busy) <= self._spare and not too_late and len(running) < len(self.work):
                until = min(until, clock() + self.settings.grace)
            if not running or clock() >= until:
                break
            left = None if until == math.inf else until - clock()
            await asyncio.wait([w.task for w in running], timeout=left, return_when=asyncio.FIRST_COMPLETED)
        self.arrived = [work for work in self.work if work.task.done()]
        self.work = [work for work in self.work if not work.task.done()]

    @property
    def _spare(self) -> int:
        """Islands that a step need not wait for."""
        there = sum(island.alive for island in self.team.islands)
        return max(0, there - self.settings.quorum) if self.settings.quorum else 0

    async def _cut_again(self, step: int, rate: float) -> None:
        """Give this step's units of lost workers to the others, and forget those of earlier steps."""
        for work in [work for work in self.work if work.task.done() and _lost(work.task)]:
            self.work.remove(work)
            if work.turn == self.turn:
                version = self.team.versions[self.role]
                left = [one for one in self.team.islands if one.alive and one.versions.get(self.role) == version]
                self._ask(left or await self.team.refresh(), work.units, step, rate)

    async def _summed(self, scale: float) -> float:
        """Let the servers sum what arrived. Return its norm."""
        pushes = [work.task.result()[1] for work in self.arrived]
        return await self._added([scale] * len(pushes), pushes)

    async def _added(self, shares: Sequence[float], pushes: Sequence[Pushed]) -> float:
        self.team.bytes[self.role] += sum(size for _, size in pushes)
        given = [(shares, *(messages[number] for messages, _ in pushes)) for number in range(self.settings.count)]
        return math.sqrt(sum(await self.servers.scatter(ServerPart.add, given)))

    async def apply(self, take: bool) -> None:
        self.moves += take
        if self.drifts:
            await asyncio.gather(*(self._own_step(work, take) for work in self.arrived))
            self.since += take
            if self.since >= self.settings.local_steps:
                await self._round()
        elif take:
            await self._step()
        else:
            await asyncio.gather(*(self._told(island) for island in {work.island for work in self.arrived}))
        self.arrived = []

    async def _own_step(self, work: Work, take: bool) -> None:
        with suppress(WorkerLost):  # its own steps since the last round are lost with it
            await work.island.pushers(self.role).each(Pusher.apply, take, work.share)
            tokens = work.island.tokens
            tokens[self.role] = tokens.get(self.role, 0.0) + take * work.share

    async def _late_steps(self) -> None:
        """Let those who were late take their own steps, before they are asked again."""
        late = [work for work in self.work if work.task.done() and not _lost(work.task)]
        self.work = [work for work in self.work if not work.task.done()]
        await asyncio.gather(*(self._own_step(work, not work.task.result()[0]["skipped"]) for work in late))

    async def _told(self, island: Island) -> None:
        with suppress(WorkerLost):
            await island.pushers(self.role).each(Pusher.settle, False)

    async def _step(self) -> None:
        """Let the servers step, and give the new weights to all who have the last ones and are free."""
        replies = [
            server.references(ServerPart.step, self.rate, self.norm, parts=2, part=self.role)
            for server in self.servers.workers  # type: ignore[attr-defined]
        ]
        messages, servers = [first for first, _ in replies], self.team.servers.workers
        size = sum([await server.fetched(one) for server, (_, one) in zip(servers, replies, strict=True)])
        before = self.team.versions[self.role]
        self.team.versions[self.role] += 1
        old = [island for island in self._resting if island.versions.get(self.role) == before]
        self.team.bytes[self.role] += size * len(old)
        await asyncio.gather(*(self._pull(island, messages, before + 1) for island in old))

    async def _pull(self, island: Island, messages: Sequence[Any], version: int) -> None:
        with suppress(WorkerLost):
            await island.pushers(self.role).each(Pusher.pull, *messages)
            island.versions[self.role] = version

    @property
    def _resting(self) -> list[Island]:
        """Free islands whose own steps, if they make any, are all taken."""
        prepared = {work.island for work in self.work} if self.drifts else set()
        return [island for island in self.team.free if island not in prepared]

    async def _round(self) -> None:
        """Average how far workers went, by their tokens. Those who are busy come to a later round."""
        self.since, role, most = 0, self.role, self.settings.max_stale
        late = [one for one in self.team.islands if one.alive and one.tasks and one.rounds.get(role, 0) >= most]
        if tasks := [task for island in late for task in island.tasks]:
            await asyncio.wait(tasks)
        came = [island for island in self._resting if island.tokens.get(role)]
        found = await asyncio.gather(*(self._pushed(island) for island in came))
        pairs = [(island, push) for island, push in zip(came, found, strict=True) if push is not None]
        for island in self.team.islands:
            island.rounds[role] = island.rounds.get(role, 0) + 1 if island.tokens.get(role) else 0
        total = sum(island.tokens[role] for island, _ in pairs)
        if not total:
            return
        await self._added([island.tokens[role] / total for island, _ in pairs], [push for _, push in pairs])
        for island, _ in pairs:
            island.tokens[role] = island.rounds[role] = 0
        await self._step()

    # --- checkpoints

    async def sound(self, *, whole: bool) -> bool:
        servers = await self.servers.each(ServerPart.sound) if whole else []
        return all(servers) and await super().sound(whole=whole)

    async def save(self, path: Path) -> dict[str, Any]:
        """Wait for those who are late, then let servers and workers write. What they pushed late is not saved."""
        await self.team.idle()
        islands = await self.team.refresh()
        values = [await self._saved(island, path, number) for number, island in enumerate(islands)]
        await self.team.servers.workers[0].do(self.role, ServerPart.begin.__name__, (path,))
        await self.servers.each(ServerPart.write, path)
        tokens = [island.tokens.get(self.role, 0.0) for island in islands]
        return {**values[0], "since": self.since, "tokens": tokens}

    async def _saved(self, island: Island, path: Path, number: int) -> dict[str, Any]:
        pushers: Any = island.pushers(self.role)
        return dict((await pushers.each(Pusher.save, path, number))[0])

    async def restore(self, path: Path, values: Mapping[str, Any]) -> None:
        """Also from a checkpoint of ranks, and with another number of workers and servers."""
        if not self.drifts or path.with_suffix(OWN).exists():
            await self.servers.each(ServerPart.restore, path)
        self.team.versions[self.role] += 1
        islands, tokens = await self.team.refresh(), values.get("tokens", [])
        plain = {"passes": values["passes"]} if "passes" in values else {}
        for number, island in enumerate(islands):
            await island.pushers(self.role).each(Pusher.restore, path, number, len(tokens), plain)
            island.tokens[self.role] = tokens[number] if number < len(tokens) and self.drifts else 0.0
        self.since = int(values.get("since", 0)) % self.settings.local_steps


def _share(units: Batch) -> float:
    """A batch's share of the trained tokens of its step."""
    assert units.token_share is not None, "a step's batch is weighed"
    return float(units.token_share.double().sum())


def _lost(task: asyncio.Task[Any]) -> bool:
    """True if a worker was lost in it. Raises any other error."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, WorkerLost):
        raise error
    return error is not None
