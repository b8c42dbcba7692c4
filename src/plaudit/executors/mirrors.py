"""Copy the ranks' state to other nodes after each step, so that a lost rank costs one step and not all steps since the
newest checkpoint (`runtime.mesh.mirrors`).

    ranks -> arrays in their node's object store -> Holder on the next node, while the next step is computed
    a rank is lost -> all start again -> the newest step of which every part is somewhere -> ranks

The object store outlives its rank, and a holder outlives that rank's node. The mesh stays the same, so each rank gets
back its own state. Ranks with equal state share one copy. The driver keeps the rest of a step's state. Left out: state
that is lost in both places; the run then continues from its checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from plaudit.executors.mirrored import Holder, Key, Mirrored
from plaudit.loop.checkpoint import step_of
from plaudit.runtime.coroutines import together
from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.worker import SenderLost, WorkerLost

if TYPE_CHECKING:
    from plaudit.executors.base import Plan
    from plaudit.executors.ranks import RankGroups
    from plaudit.loop.progress import Remembered
    from plaudit.runtime.ray import RayRuntime
    from plaudit.runtime.ray_worker import RayWorker


class MirroredStep(NamedTuple):
    """A step's state: each rank's, on its node and with its holders, and the driver's part (`remembered`)."""

    remembered: Remembered
    states: Mapping[Key, Any]
    """References to objects in the stores of ranks' nodes."""
    holders: Mapping[Key, Sequence[RayWorker[Holder]]]

    @property
    def step(self) -> int:
        return self.remembered.progress.step


class Mirrors:
    """Sends ranks' states to holders and back. The caller promises to `settle` before ranks are formed again."""

    def __init__(self, runtime: RayRuntime, ranks: RankGroups, count: int, say: Callable[[str], None]):
        """`count`: number of holders of each state, each on another node (fewer, if there are fewer nodes); 0: none."""
        self.runtime, self.ranks, self.count, self.say = runtime, ranks, count, say
        self._homes: dict[str, list[str]] = {}
        """{node with ranks: the nodes whose holders keep the states of its ranks}."""
        self._holders: dict[str, RayWorker[Holder]] = {}
        self._started = 0
        self._mirrored: MirroredStep | None = None
        self._work: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the holders that are missing or lost. One that fails to start is tried again after a later step."""
        if not self.count:
            return
        for node, holder in [*self._holders.items()]:
            if not holder.alive:
                del self._holders[node]
                self._lost(await holder.gone())
        order = peers([rank.node for rank in self.ranks.workers], self.runtime.lasting())
        self._homes = {node: nodes[: self.count] for node, nodes in order.items()}
        wanted = {node for nodes in self._homes.values() for node in nodes}
        await together(map(self._start, sorted(wanted - self._holders.keys())))

    async def _start(self, node: str) -> None:
        self._started += 1
        try:
            self._holders[node] = await self.runtime.beside(Holder, name=f"mirror {self._started - 1}", node=node)
        except WorkerLost as lost:
            self._lost(lost)

    def _lost(self, lost: WorkerLost) -> None:
        self.say(f"lost {lost}; steps are mirrored again once another one has started")

    def _ready(self) -> bool:
        there = {node for node, holder in self._holders.items() if holder.alive}
        return all({*self._homes.get(rank.node, [""])} <= there for rank in self.ranks.workers)

    def _keys(self) -> list[tuple[RayWorker[Any], Key]]:
        """Return each rank with the key of its state; ranks with equal state have the same key."""
        worker_groups = enumerate(zip(self.ranks.rank_groups, self.ranks.worker_groups, strict=True))
        return [
            (rank, (number, first))
            for number, (ranks, worker_group) in worker_groups
            for rank, first in zip(worker_group.workers, alike(ranks.runtime), strict=True)
        ]

    async def take(self, remembered: Remembered) -> None:
        """Copy the ranks' state after a step into their object stores, and send it to holders in the background. While
        a holder starts, steps are not mirrored."""
        if not self.count or (not self._ready() and self._work is not None and not self._work.done()):
            return
        await self.settle()
        if not self._ready():
            self._work = asyncio.get_running_loop().create_task(self.open())
            return
        first = {key: rank for rank, key in reversed(self._keys())}
        copied = await together(rank.keep(Mirrored.state) for rank in first.values())
        states = {key: state for key, (state, _) in zip(first, copied, strict=True)}
        holders = {key: [self._holders[node] for node in self._homes[rank.node]] for key, rank in first.items()}
        self._work = asyncio.get_running_loop().create_task(self._send(MirroredStep(remembered, states, holders)))

    async def _send(self, mirrored: MirroredStep) -> None:
        """Takes: states on ranks' nodes. Waits for: every holder's copy. Woken by: the holders. Gives: nothing; the
        step becomes the one to go back to, unless a process was lost, which is noticed and handled elsewhere."""
        whole = -1 if self._mirrored is None else self._mirrored.step
        pairs = [(key, holder) for key, holders in mirrored.holders.items() for holder in holders]
        with suppress(WorkerLost):
            states = mirrored.states
            await together(holder.call(Holder.hold, key, mirrored.step, whole, states[key]) for key, holder in pairs)
            self._mirrored = mirrored

    async def settle(self) -> None:
        """Wait until a state that is being sent has arrived, or holders that are being started are ready."""
        if self._work is not None:
            await asyncio.wait((self._work,))  # cancelling the caller must not cancel the task
            self._work.result()

    async def back(self, plan: Plan) -> Remembered | None:
        """Load the newest mirrored step into new ranks and return what the driver keeps of it. Return None, with ranks
        unchanged, if no step is mirrored, `plan.resume` is as new, `plan.mirrors` is False, or a state is lost."""
        if not plan.mirrors:  # mirrored steps must not be used any more
            self._mirrored = None
        if (mirrored := self._mirrored) is None or (plan.resume is not None and step_of(plan.resume) >= mirrored.step):
            return None
        ranks = self._keys()
        try:
            await together(self._restore(rank, key, mirrored) for rank, key in ranks)
        except SenderLost as lost:
            self.say(f"the mirrors of step {mirrored.step} are not complete ({lost.reason})")
            self._mirrored = None
            return None
        await together(rank.call(Mirrored.put_back) for rank, _ in ranks)
        return mirrored.remembered

    async def _restore(self, rank: RayWorker[Any], key: Key, mirrored: MirroredStep) -> None:
        """Let a rank fetch its state from its old node's store, or a holder. Raises SenderLost if neither has it."""
        holders = iter(mirrored.holders[key])
        state = mirrored.states[key]
        while True:
            try:
                return await rank.call(Mirrored.receive, state)
            except SenderLost:
                if (holder := next((one for one in holders if one.alive), None)) is None:
                    raise
            state, _ = await holder.keep(Holder.give, key, mirrored.step)

    def close(self) -> None:
        if self._work is not None:
            self._work.cancel()


def alike(runtime: RuntimeSettings) -> list[int]:
    """Return for each rank of a mesh the first rank with equal state. With shards, replicas have equal state; without,
    all ranks with the same tensor-parallel part of the same pipeline stage."""
    stage = runtime.ranks // runtime.pipeline
    others = stage // (runtime.replicas if runtime.sharded else runtime.workers * runtime.context)
    return [rank - rank % stage + rank % stage % others for rank in range(runtime.ranks)]


def peers(nodes: Sequence[str], others: Sequence[str]) -> dict[str, list[str]]:
    """Return {node with ranks: nodes that may hold its copies, in order: the next nodes with ranks, then `others`}."""
    ring = list(dict.fromkeys(nodes))
    without = [node for node in others if node not in ring]
    return {node: [*ring[place + 1 :], *ring[:place], *without] for place, node in enumerate(ring)}
