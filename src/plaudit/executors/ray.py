"""Ranks, rollout workers, judges and reward functions in separate processes, on this machine or on a cluster.

    reserve resources -> start ranks, rollout workers, judges -> worker groups, pool; a process is lost -> start another

Left out: the cluster (`runtime/ray.py`), the processes of rewards and environments (`scoring.py`), the work of each.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from plaudit.evaluate.judge import judge_reward
from plaudit.executors.base import Plan, ProcessStatus
from plaudit.executors.collected import Node, collected, copied, lacking, merged
from plaudit.executors.following import EMAReference
from plaudit.executors.generation import generation_of
from plaudit.executors.mirrors import Mirrors
from plaudit.executors.pinned import pinned
from plaudit.executors.processes import PROCESS, load_judge
from plaudit.executors.ranks import RankGroups
from plaudit.executors.scoring import Scoring, judges_placed
from plaudit.executors.together import joined
from plaudit.executors.trainer import RankProcess
from plaudit.loop.copies import Away, Copies, CopyError
from plaudit.loop.models import Models
from plaudit.loop.progress import Remembered
from plaudit.models.described import end_ids, positions
from plaudit.models.load import load_tokenizer
from plaudit.rewards.judge import JudgeReward
from plaudit.rewards.settings import RewardSettings
from plaudit.rollout.engine import Sampler
from plaudit.runtime.coroutines import together
from plaudit.runtime.resources import (
    Resources,
    check_gpus,
    check_memory,
    crowded,
    equal_share,
    packed,
    small_store,
)
from plaudit.runtime.settings import MIRRORS
from plaudit.runtime.supervisor import NODES, PAUSE
from plaudit.runtime.worker import Doing, Failures, NodeLost
from plaudit.settings.tree import Settings, to_plain
from plaudit.support.address import AddressError
from plaudit.types import Group, Role, Stats

if TYPE_CHECKING:
    from plaudit.executors.collected import Kept
    from plaudit.runtime.ray import RayRuntime

Result = TypeVar("Result")

LATEST = 5
"""Number of lost workers in `processes`, the latest."""
ROOM_AFTER = 3.0
"""If ranks get no resources for this many seconds, a rollout worker is ended to free its own."""


class RayExecutor:
    """Ranks and rollout workers as processes; `open` makes an executor. The pool replaces a lost rollout worker. A lost
    rank breaks the collectives of other ranks: `form_again` starts all ranks again from a checkpoint, while rollout
    workers stay and wait for the weights of that checkpoint."""

    kind = RankGroups

    def __init__(
        self, settings: Settings, plan: Plan, runtime: RayRuntime, failures: Failures, say: Callable[[str], None]
    ):
        self.settings, self.plan, self.runtime, self.failures, self.say = settings, plan, runtime, failures, say
        self.recipe: Mapping[str, Any] = to_plain(settings) | {"resume": None}
        self.ranks = self.kind(settings, runtime, self._threads)
        self.mirrors = Mirrors(runtime, self.ranks, settings.runtime.mesh.get(MIRRORS, 0), say)
        self.back: Remembered | None = None
        generation = generation_of(settings)
        self.generation = generation(settings, self.recipe, runtime, self.ranks, self._room, failures, say)
        self.pool = self.generation.pool
        self.placed = judges_placed(settings, runtime.nodes(), here=torch.cuda.is_available())
        amounts = [*self.ranks.reservations, *self.generation.reservations]
        amounts += self.placed.reserving
        beside = [dict(one) for one in amounts if "CPU" in one]
        gpus = settings.device in ("auto", "cuda")
        if settings.runtime.nodes_timeout:
            share: Resources = {"CPU": 1.0}  # an equal share of nodes that are not there yet is unknown
        else:
            share = equal_share(runtime.nodes(), len(amounts) - len(beside), beside=beside, gpus=gpus)
        self.ranks.reserve(share)
        self.generation.reserve(share)
        self.threads = self._threads(self.ranks.bundles[0])
        self.scoring = Scoring(self.placed, runtime, share, self._room, failures=failures, say=say)
        # Methods of `Executor` that one of this executor's parts implements:
        self.mirror, self.function, self.training = self.mirrors.take, self.scoring.function, self.generation.training
        self.environment = self.scoring.environment
        self._rooms: dict[tuple[str, int], Any] = {}
        self._ranks_have_room = asyncio.Event()
        self._ranks_have_room.set()

    @classmethod
    async def open(
        cls, settings: Settings, plan: Plan, runtime: RayRuntime, failures: Failures, say: Callable[[str], None]
    ) -> RayExecutor:
        """Reserve resources and start all workers. Raises ResourcesError at once if the cluster is too small."""
        executor = cls(settings, plan, runtime, failures, say)
        try:
            await executor._open()
        except BaseException:
            executor.close()
            raise
        return executor

    async def _open(self) -> None:
        generation, runtime, width = self.generation, self.runtime, self.settings.runtime.rollout_width
        what = f"{self.ranks}{generation} workers" + (f" of {width} processes" if width > 1 else "")
        bundles = [*self.ranks.bundles, *generation.bundles, *self.scoring.bundles]
        scoring = len(self.scoring.bundles)
        async with runtime.nodes_for(
            bundles, what=f"{what} and {scoring} processes of rewards and environments" if scoring else what
        ):
            await self._start(what, bundles)

    async def _start(self, what: str, bundles: Sequence[Resources]) -> None:
        """Reserve the bundles on nodes that can hold them, and start all workers."""
        generation, runtime, scoring = self.generation, self.runtime, len(self.scoring.bundles)
        width = self.settings.runtime.rollout_width
        check_memory(runtime.nodes(), len(self.ranks.bundles) + generation.count * width + scoring)
        if self.settings.device != "cpu" and self.settings.runtime.backend != "gloo":
            check_gpus(runtime.nodes(), self.ranks.bundles)
        if advice := crowded(runtime.nodes(), [self._threads(bundle) for bundle in bundles]):
            self.say(advice)
        beside = [*generation.bundles, *self.scoring.bundles]
        self.ranks.reserve_together(self.ranks.arranged(beside, generation.sharers))
        for one, placed in zip(self.settings.rewards, self.placed.rewards, strict=True):
            if one is not placed:
                self.say(f"the judge {one.path} gets a process on a node with a GPU: this one has none")
        self.scoring.open()
        await generation.open(self._form())
        await self.mirrors.open()
        await self.scoring.ready()
        generation.opened = True
        exact = generation.exact and all(one.tensor == 1 for one in self.settings.rewards)
        same = len(self.ranks.bundles) == len(self.ranks.worker_groups) and self.settings.rollout.max_lag == 0 and exact
        local = f"; a local run gives the same bits with threads={self.threads}" if same else ""
        self.say(f"{what} are ready{local}")
        self._say_where()
        if generation.count and self.settings.runtime.weights == "store":
            size = (await self.ranks.training.each(RankProcess.packed_bytes))[0]
            if advice := small_store(runtime.nodes(), size):
                self.say(advice)

    async def form_again(self, plan: Plan) -> bool:
        self.plan = plan
        self.ranks.end()
        await self.mirrors.settle()
        await asyncio.gather(self._form(), self.pool.begin(self.pool.attempt + 1))
        await self.generation.sampling()  # a rank may have been lost within `training`
        self.back = await self.mirrors.back(plan)
        self.say(f"{len(self.ranks.bundles)} training workers are ready again")
        self._say_where()
        return True

    # --- ranks

    def _say_where(self) -> None:
        for line in self.ranks.placed():
            self.say(line)

    async def _form(self) -> None:
        for nodes in itertools.count(1):
            await self._room_for_ranks()
            try:
                await self.ranks.form(self.plan, self.generation.sharers)
                break
            except NodeLost as lost:
                self.ranks.end()
                if nodes > NODES:
                    self.say(f"lost {lost}")
                    self.failures(lost)
                await asyncio.sleep(nodes * PAUSE)

    async def _room_for_ranks(self) -> None:
        """Wait for the ranks' resources. After the loss of a node, end rollout workers to make room for ranks first."""
        loop, timeout = asyncio.get_running_loop(), self.settings.runtime.start_timeout
        until = loop.time() + timeout
        while not await self.runtime.placed(self.ranks.group, within=min(ROOM_AFTER, timeout)):
            self._ranks_have_room.clear()
            if self._rearranged():
                continue
            if not self._vacated("gives way to the training workers") and loop.time() >= until:
                raise self.runtime.no_room(self.ranks.bundles, what=f"{len(self.ranks.bundles)} training workers")
        self._ranks_have_room.set()

    def _rearranged(self) -> bool:
        """If the living nodes can hold the ranks only with fewer of them together, reserve that."""
        groups = self.ranks.arranged((), self.generation.sharers)
        smaller = len(groups) > len(self.ranks.together)
        if smaller and packed(self.runtime.nodes(), joined(self.ranks.bundles, groups)):
            self.ranks.reserve_together(groups)
            return True
        return False

    # --- rewards

    def judge(self, reward: RewardSettings, tokenizer: Any) -> JudgeReward:
        """Return the judge. It scores answers as they come, without waiting for an idle engine, since rollout workers
        decode in other processes. A judge in this process computes in a thread, so that the event loop goes on."""
        as_chat = self.settings.data.as_chat
        reward = next(new for old, new in zip(self.settings.rewards, self.placed.rewards, strict=True) if old is reward)
        if not reward.workers:
            here = load_judge(self.settings, reward.path)
            return here.reward(tokenizer, thread=True, pause=0.005, as_chat=as_chat)
        own, room, ends = load_tokenizer(reward.path), positions(reward.path), end_ids(reward.path)
        judges = self.scoring.judges(reward)
        return judge_reward(judges, own, tokenizer, ends=ends, longest=room, pause=0.005, as_chat=as_chat)

    # --- room

    async def _room(
        self, name: str, key: tuple[str, int], bundles: Sequence[Resources], *, in_time: bool | None = None
    ) -> dict[str, Any]:
        """Return name, placement group and threads for spawning a worker or its replacement. If `in_time`, by default
        for the first worker of a key, it must get resources within start_timeout; otherwise, wait forever."""
        if first := key not in self._rooms:
            await self._ranks_have_room.wait()
            self._rooms[key] = self.runtime.reserve(bundles)
        within = self.settings.runtime.start_timeout if in_time or (first and in_time is None) else None
        if not await self.runtime.placed(self._rooms[key], within=within):
            raise self.runtime.no_room(bundles, what=name)
        return {"name": name, "group": self._rooms[key], "threads": self._threads(bundles[0])}

    def _vacated(self, why: str, among: Container[str] | None = None) -> bool:
        """End one rollout worker (of those named in `among`, if given) to free its resources. False if none may end."""
        apart = self.generation.opened and self.generation.bundles
        if not apart or (number := self.pool.supervisor.give_way(among)) is None:
            return False
        self.runtime.give_back(self._rooms.pop(("rollout", number)))
        self.say(f"rollout worker {number} {why}")
        return True

    def _threads(self, bundle: Mapping[str, float]) -> int:
        return self.settings.threads or max(1, int(bundle.get("CPU", 1.0)))

    # --- an executor

    def sampler(self, doing: Doing) -> Sampler:
        self.pool.doing = doing
        return self.pool

    def models(self) -> Models:
        moving = self.settings.reference.ema
        models = Models.together(self.ranks.training, self.settings.objective, moving, self.ranks.apart)
        if moving and (home := self.ranks.apart.get(Role.REFERENCE)) is not None:
            models = replace(models, reference=EMAReference(home, self.ranks.training))
        return models

    def processes(self) -> list[ProcessStatus]:
        samples = {one.name: f"samples with version {self.pool.version}" for one in self.pool.workers}
        found = []
        for worker in self.runtime.workers:
            otherwise = "starts" if worker.name.startswith("rollout") else "is ready"
            state = samples.get(worker.name.partition(PROCESS)[0], otherwise)
            found.append(ProcessStatus(worker.name, f"node {worker.node[:8]}, process {worker.pid}", state))
        lost = self.failures.lost[-LATEST:]
        return found + [ProcessStatus(one.name, "", f"lost: {one.reason}", lost=True) for one in lost]

    async def watched(self, work: Coroutine[Any, Any, Result]) -> Result:
        return await self.ranks.watched(work, self.say)

    async def pinned(self, groups: Sequence[Group]) -> Sequence[int]:
        # If a rank's node is lost, the run goes back to a checkpoint anyway, whatever was sampled on that node.
        apart = self.generation.stays and self.generation.bundles
        return await pinned(self.ranks.nodes, groups) if apart else ()

    async def publish(self, version: int) -> Stats:
        """Send weights from ranks to rollout workers; the driver gets only version, digest and sizes. Before that, end
        rollout workers on nodes that will soon end."""
        if not self.settings.samples:
            return {}
        leaving = self.runtime.leaving()
        there = {worker.name.partition(PROCESS)[0] for worker in self.runtime.workers if worker.node in leaving}
        while self._vacated("leaves its node, which will end", there):
            pass
        shipment = await self.generation.transport.pack(self.ranks.training, version)
        if await self.pool.publish(shipment):
            # The packed copy in memory may be damaged: workers that replace the refusing ones get a new copy.
            await self.pool.publish(await self.generation.transport.pack(self.ranks.training, version))
        if not shipment.reports:
            return {}
        sent, whole = (sum(sizes) for sizes in zip(*((one.bytes, one.whole) for one in shipment.reports), strict=True))
        return {"publish/bytes": float(sent), "publish/share": sent / max(whole, 1)}

    async def save(self, role: str, folder: Path) -> None:
        await self.ranks.of(role).each(RankProcess.save, role, folder)

    async def written(self, folders: Mapping[str, Path], commit: Callable[[], None], away: Away | None) -> None:
        """Let all ranks write their copies, then copy the checkpoint to the address. If nodes have other disks, it is
        whole there only; without an address, or if ranks fail to copy, the driver fetches their files."""
        paths, ranks, checkpoints = list(folders.values()), self.ranks.workers, self.plan.checkpoints
        await together(worker_group.each(Node.write, paths) for worker_group in self.ranks.worker_groups)
        if away is not None:
            copies, name, state = away
            kept = dict(zip(folders, zip(itertools.cycle(self.ranks.nodes), paths, strict=False), strict=True))
            if apart := await lacking(self.ranks.nodes, checkpoints):
                await merged(ranks, kept, state)
            else:
                await asyncio.to_thread(commit)
                kept = {role: (rank, checkpoints / role / name) for role, (rank, _) in kept.items()}
            if await self._copied(kept, name, copies):
                await together(rank.call(Node.remove, folder) for rank, folder in kept.values() if apart)
                return
        if away is None or apart:
            await together(collected(ranks, folder) for folder in paths)
            await asyncio.to_thread(commit)

    async def _copied(self, kept: Kept, name: str, copies: Copies) -> bool:
        """Let ranks copy the sealed folders of a checkpoint to the address. Return False if the driver must do so."""
        try:
            await copied(kept, name, copies)
        except (CopyError, AddressError) as error:
            self.say(f"a rank could not copy to save.to, so the driver does: {error}")
            return False
        return True

    def close(self) -> None:
        self.mirrors.close()
        self.pool.close()
        self.scoring.close()
        self.runtime.end_workers()
