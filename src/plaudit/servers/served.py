"""Learners whose optimizer steps are done by parameter servers; the loop calls them as it calls others.

    prepare: units to free workers -> gradients -> servers: sum, norm;  apply: servers: step -> weights -> workers

With local steps, workers step by themselves in `apply`, and every `local_steps` steps the servers average their weights
in a round. A step may end without late workers (`quorum`); their pushes count in a later step, by their tokens. A lost
worker's units are split again over the other workers.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.algorithms.figures import merge_stats, whole_stats
from plaudit.learn.learner import Learner
from plaudit.loop.models import Learners
from plaudit.runtime.worker import WorkerLost
from plaudit.servers.part import ServerPart
from plaudit.servers.pusher import Pusher, Units, share
from plaudit.servers.team import PUSHING, Island, Result, Team
from plaudit.types import Role, Stats

Pushed = tuple[list[Any], int]
"""A push: (references to its messages, one per server; their bytes together)."""


@dataclass(eq=False)
class Work:
    """Units of a batch that an island was asked to compute gradients of."""

    island: Island
    units: Units
    share: float
    """The units' share of the whole step's trained tokens."""
    turn: int
    task: asyncio.Task[tuple[Stats, Pushed]]

    @property
    def stats(self) -> Stats:
        return self.task.result()[0]


class Served(Learners):
    """The `Learners` of one role whose gradients islands compute and whose steps parameter servers take."""

    def __init__(self, team: Team[Any], role: Role, halt: Callable[[Stats], str | None]):
        super().__init__(team.part(Learner, role))
        self.team, self.role, self.halt, self.settings = team, role, halt, team.settings
        self.servers = team.servers.part(ServerPart, role)
        self.drifts = self.settings.local_steps > 1
        self.turn = self.since = 0
        self.work: list[Work] = []
        """Work that islands were given and that is not part of a step yet."""
        self.arrived: list[Work] = []
        self.rate = self.norm = 0.0

    async def prepare(self, batch: Units, step: int, rate: float) -> Stats:
        self.turn += 1
        if self.drifts:
            await self._late_steps()
        self._ask(await self.team.refresh(), batch, step, rate)
        await self._collect(step, rate)
        role, arrived = self.role, self.arrived
        total = sum(work.share for work in arrived)
        scale = 1.0 if abs(total - 1.0) < 1e-6 else 1.0 / total
        stats = merge_stats(work.stats for work in arrived)
        if scale != 1.0:
            stats = {name: x if name.endswith(("max", "min")) else x * scale for name, x in stats.items()}
        stats = whole_stats([stats])
        self.rate = arrived[0].stats[f"learning_rate/{role}"]
        sound = not any(work.stats["skipped"] for work in arrived)
        self.norm = sum(work.stats[f"gradient_norm/{role}"] / work.share for work in arrived) / len(arrived)
        if sound and not self.drifts:
            self.norm = await self._added([scale] * len(arrived), [work.task.result()[1] for work in arrived])
        stats |= {f"gradient_norm/{role}": self.norm, f"learning_rate/{role}": self.rate, "skipped": 0.0, "halted": 0.0}
        stats[f"servers/workers/{role}"] = float(len({work.island for work in arrived}))
        stats[f"servers/late/{role}/max"] = float(self.turn - min(work.turn for work in arrived))
        stats[f"servers/bytes/{role}"] = float(self.team.bytes.pop(role, 0))
        if not sound or not (math.isfinite(self.norm) and math.isfinite(stats[f"loss/{role}"])):
            stats["skipped"] = 1.0
        elif self.halt(stats) is not None:
            stats["halted"] = 1.0
        return stats

    def _ask(self, islands: Sequence[Island], units: Units, step: int, rate: float) -> None:
        """Split units over islands and start the work. An island whose shard has no trained token is not asked."""
        pairs = [
            (island, shard, share(shard)) for island, shard in zip(islands, units.shards(len(islands)), strict=True)
        ]
        for island, shard, part in [one for one in pairs if one[2] > 0] or [(islands[0], units, 1.0)]:
            task = island.does(self._learnt(island, shard, step, rate))
            self.work.append(Work(island, shard, part, self.turn, task))

    async def _learnt(self, island: Island, units: Units, step: int, rate: float) -> tuple[Stats, Pushed]:
        async with island.turn:
            stats = (await island.pushers(self.role).split(Pusher.prepare, units, step, rate))[0]
            return stats, (([], 0) if self.drifts else await self._push(island))

    async def _push(self, island: Island) -> Pushed:
        *messages, size = island.references(Pusher.push, self.role, parts=self.settings.count + 1)
        return messages, await island.worker.worker_group.first.fetched(size)

    async def _collect(self, step: int, rate: float) -> None:
        """Takes: the work that was asked. Waits for: all of it; or for the quorum, the grace, and workers late by
        max_stale. Woken by: each end and each loss. Gives: `arrived`, in the order of asking."""
        clock, until, settings = asyncio.get_running_loop().time, math.inf, self.settings
        while True:
            await self._cut_again(step, rate)
            running = [work for work in self.work if not work.task.done()]
            there = sum(island.alive for island in self.team.islands)
            spare = there - settings.quorum if settings.quorum else 0
            too_late = any(self.turn - work.turn >= settings.max_stale for work in running)
            if len({work.island for work in running}) <= spare and not too_late and len(running) < len(self.work):
                until = min(until, clock() + settings.grace)
            if not running or clock() >= until:
                break
            left = None if until == math.inf else until - clock()
            await asyncio.wait([w.task for w in running], timeout=left, return_when=asyncio.FIRST_COMPLETED)
        self.arrived = [work for work in self.work if work.task.done()]
        self.work = [work for work in self.work if not work.task.done()]

    async def _cut_again(self, step: int, rate: float) -> None:
        """Split lost islands' units over the other islands if they are of this step; drop those of earlier steps."""
        for work in [work for work in self.work if work.task.done() and _lost(work.task)]:
            self.work.remove(work)
            if work.turn == self.turn:
                version = self.team.versions[self.role]
                left = [one for one in self.team.islands if one.alive and one.versions.get(self.role) == version]
                self._ask(left or await self.team.refresh(), work.units, step, rate)

    async def _added(self, shares: Sequence[float], pushes: Sequence[Pushed]) -> float:
        """Let the servers sum the pushes, each times its share. Return the norm of the sum."""
        self.team.bytes[self.role] += sum(size for _, size in pushes)
        arguments = [(shares, *(messages[number] for messages, _ in pushes)) for number in range(self.settings.count)]
        return math.sqrt(sum(await self.servers.scatter(ServerPart.add, arguments)))

    async def apply(self, take: bool) -> None:
        self.moves += take
        arrived, self.arrived = self.arrived, []
        if self.drifts:
            await self._own_steps(arrived, take)
            self.since += take
            if self.since >= self.settings.local_steps:
                await self._round()
        elif take:
            await self._step()
        else:
            await self._each({work.island for work in arrived}, lambda one: one.each(Pusher.settle, False))

    async def _each(self, islands: Iterable[Island], ask: Callable[[Any], Awaitable[Any]]) -> list[Island]:
        """Call `ask` with the pushers of each island. Return the islands that were not lost meanwhile."""
        islands = list(islands)
        found = await asyncio.gather(*(_unless_lost(ask(island.pushers(self.role))) for island in islands))
        return [island for island, one in zip(islands, found, strict=True) if one is not None]

    async def _own_steps(self, works: Iterable[Work], take: bool) -> None:
        """Let each island take or drop one step of its own on all of its units in `works`."""
        shares = Counter[Island]()
        for work in works:
            shares[work.island] += work.share  # type: ignore[assignment]

        async def step(island: Island, part: float) -> None:
            await self._each([island], lambda one: one.each(Pusher.apply, take, part))
            island.tokens[self.role] += take * part  # type: ignore[assignment]

        await asyncio.gather(*(step(island, part) for island, part in shares.items()))

    async def _late_steps(self) -> None:
        """Let islands that finished late take their own local steps (or drop skipped ones) before new units."""
        late = [work for work in self.work if work.task.done() and not _lost(work.task)]
        self.work = [work for work in self.work if not work.task.done()]
        for skipped in (0.0, 1.0):
            await self._own_steps((work for work in late if work.stats["skipped"] == skipped), not skipped)

    async def _step(self) -> None:
        """Let the servers step, and give the new weights to all free islands that have the version before."""
        replies, before = self.team.ask_servers(ServerPart.step, self.role, self.rate, self.norm), self.version
        size = await self.team.sizes(replies)
        self.team.versions[self.role] += 1
        old = [island for island in self._resting if island.versions.get(self.role) == before]
        self.team.bytes[self.role] += size * len(old)
        messages = [message for message, _ in replies]
        for island in await self._each(old, lambda one: one.each(Pusher.pull, *messages)):
            island.versions[self.role] = before + 1

    @property
    def version(self) -> int:
        return self.team.versions[self.role]

    @property
    def _resting(self) -> list[Island]:
        """Free islands that have no local step left to take."""
        prepared = {work.island for work in self.work} if self.drifts else set()
        return [island for island in self.team.free if island not in prepared]

    async def _round(self) -> None:
        """Average the workers' weight changes by their tokens, and step. Busy islands take part in a later round."""
        self.since, role = 0, self.role
        late = [one for one in self.team.islands if one.alive and one.missed[role] >= self.settings.max_stale]
        if tasks := [task for island in late for task in island.tasks]:
            await asyncio.wait(tasks)
        came = [island for island in self._resting if island.tokens[role]]
        found = await asyncio.gather(*(_unless_lost(self._push(island)) for island in came))
        pushes = {island: push for island, push in zip(came, found, strict=True) if push is not None}
        for island in self.team.islands:
            island.missed[role] += 1 if island.tokens[role] else 0
        if total := sum(island.tokens[role] for island in pushes):
            await self._added([island.tokens[role] / total for island in pushes], list(pushes.values()))
            for island in pushes:
                island.tokens[role] = island.missed[role] = 0
            await self._step()

    # --- checkpoints

    async def sound(self, *, whole: bool) -> bool:
        servers = await self.servers.each(ServerPart.sound) if whole else []
        return all(servers) and await super().sound(whole=whole)

    async def save(self, path: Path) -> dict[str, Any]:
        """Wait until all islands are idle, then let each write its state; the first also writes the servers'. Return
        the rest of the state. Pushes that came too late for the last step are not saved. If an island is lost
        meanwhile, the others write again. Raises a server's WorkerLost."""
        while True:
            try:
                return await self._saved(path)
            except WorkerLost:
                if not all(server.alive for server in self.team.servers.workers):
                    raise

    async def _saved(self, path: Path) -> dict[str, Any]:
        await self.team.idle()
        islands, values = await self.team.refresh(), list[dict[str, Any]]()
        replies = self.team.ask_servers(ServerPart.state, self.role)
        for number, island in enumerate(islands):
            servers = [] if number else [replies[0][1], *(states for states, _ in replies)]
            rank = island.worker.worker_group.first
            values.append(await rank.do(PUSHING + self.role, Pusher.save.__name__, (path, number, *servers)))
        return {**values[0], "since": self.since, "tokens": [island.tokens[self.role] for island in islands]}

    async def restore(self, path: Path, values: Mapping[str, Any]) -> None:
        """Restore servers and islands, also from a checkpoint of plain ranks, or of other numbers of processes."""
        await self.team.begin(self.role, path)
        islands, tokens = await self.team.refresh(), values.get("tokens", [])
        plain = {"passes": values["passes"]} if "passes" in values else {}
        for number, island in enumerate(islands):
            await island.pushers(self.role).each(Pusher.restore, path, number, len(tokens), plain)
            island.tokens[self.role] = tokens[number] if number < len(tokens) and self.drifts else 0
        self.since = int(values.get("since", 0)) % self.settings.local_steps


async def _unless_lost(work: Awaitable[Result]) -> Result | None:
    with suppress(WorkerLost):
        return await work
    return None


def _lost(task: asyncio.Task[Any]) -> bool:
    """Return True if a finished task ended with WorkerLost. Raises any other error of the task."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, WorkerLost):
        raise error
    return error is not None
