"""Ranks, rollout workers, judges and reward functions in separate processes, on this machine or on a cluster.

    reserve resources -> start ranks, rollout workers, judges -> worker groups, pool; a process is lost -> start another

Left out: the cluster (`runtime/ray.py`), the processes of rewards (`scoring.py`), and the work of each process.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Container, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from plaudit.evaluate.judge import judge_reward
from plaudit.executors.base import Plan, ProcessStatus
from plaudit.executors.collected import Node, collected
from plaudit.executors.following import EMAReference
from plaudit.executors.inside import InProcess
from plaudit.executors.mirrors import Mirrors
from plaudit.executors.pinned import pinned
from plaudit.executors.processes import PROCESS, driven, load_judge, make_rollout_worker, rollout_group
from plaudit.executors.ranks import RankGroups
from plaudit.executors.scoring import Scoring, reserving, stays
from plaudit.executors.trainer import RankProcess
from plaudit.loop.models import Models
from plaudit.loop.progress import Remembered
from plaudit.models.described import end_ids, positions
from plaudit.models.load import load_tokenizer
from plaudit.rewards.base import Reward
from plaudit.rewards.judge import JudgeReward
from plaudit.rewards.settings import RewardSettings
from plaudit.rollout.engine import Sampler
from plaudit.rollout.pool import Pool
from plaudit.rollout.worker import RolloutWorker
from plaudit.runtime.coroutines import together
from plaudit.runtime.resources import Resources, check_gpus, check_memory, crowded, equal_share, reserved, small_store
from plaudit.runtime.settings import MIRRORS
from plaudit.runtime.supervisor import NODES, PAUSE
from plaudit.runtime.worker import Doing, Failures, NodeLost, Worker
from plaudit.settings.tree import Settings, to_plain
from plaudit.types import Group, Role, Stats
from plaudit.types.distant import LARGE
from plaudit.weights.broadcast import transport_of

if TYPE_CHECKING:
    from plaudit.runtime.ray import RayRuntime

Result = TypeVar("Result")

LATEST = 5
"""Number of lost workers that are shown."""
ROOM_AFTER = 3.0
"""Seconds after which ranks without room get a rollout worker's room."""


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
        self.attempt = 0
        self.ranks = self.kind(settings, runtime, self._threads)
        self.mirrors = Mirrors(runtime, self.ranks, settings.runtime.mesh.get(MIRRORS, 0), say)
        self.back: Remembered | None = None
        self.pool: Pool | None = None
        # Placing a worker may take start_timeout, and so may loading.
        self._patience = 2 * settings.runtime.start_timeout
        least, most = settings.rollout.workers_range
        rollout = least * settings.samples
        self.shares = rollout > 0 and settings.runtime.shares
        self.inside = rollout > 0 and settings.runtime.inside
        rollout *= not self.inside
        amounts = self.ranks.reservations
        self.width = settings.runtime.rollout_width
        amounts += [settings.runtime.resources_per_rollout_worker] * (0 if self.shares else rollout * self.width)
        amounts += [reward.resources for reward in reserving(settings)]
        beside = [dict(one) for one in amounts if "CPU" in one]
        gpus = settings.device in ("auto", "cuda")
        self.share = share = equal_share(runtime.nodes(), len(amounts) - len(beside), beside=beside, gpus=gpus)
        self.ranks.reserve(share)
        self.threads = self._threads(self.ranks.bundles[0])
        self.rollout_bundle = bundle = reserved(settings.runtime.resources_per_rollout_worker, share)
        # vLLM starts its processes itself, on what one of ours has reserved.
        self.drives = settings.rollout.engine == "vllm" and self.width > 1
        together = {name: amount * self.width for name, amount in bundle.items()}
        self.rollout_room = [together] if self.drives else [bundle] * self.width
        self.stays = stays(settings)
        if settings.samples:
            # What ranks inside lose is the run's loss, not the pool's, so none is counted there.
            self.pool = Pool(
                self._sampling_rank if self.inside else self._rollout_worker,
                rollout,
                most=settings.runtime.ranks if self.inside else most,
                patience=self._patience,
                failures=failures,
                say=say,
                stay=LARGE if self.stays else None,
            )
        bundles = (self.ranks.bundles[0], self.rollout_bundle)
        gpus = settings.device != "cpu" and not self.shares and all(bundle.get("GPU", 0.0) >= 1 for bundle in bundles)
        self.transport = InProcess() if self.inside else transport_of(settings.runtime, gpus=gpus)
        self._rollouts = rollout
        self._opened = False
        self.scoring = Scoring(settings, runtime, share, self._room_to_score, failures=failures, say=say)
        self._rooms: dict[tuple[str, int], Any] = {}
        self._ranks_have_room = asyncio.Event()
        self._ranks_have_room.set()
        self._ranks_formed = asyncio.Event()
        self._ranks_offloaded = asyncio.Event()
        self._ranks_offloaded.set()

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
        each = f" of {self.width} processes" if self.width > 1 else ""
        beside = "" if self.inside else f" and {self._rollouts} rollout"
        what = f"{self.ranks}{beside} workers{each}"
        apart = [] if self.shares else self.rollout_room * self._rollouts
        bundles = [*self.ranks.bundles, *apart, *self.scoring.bundles]
        scoring = len(self.scoring.bundles)
        self.runtime.check(bundles, what=f"{what} and {scoring} processes of rewards" if scoring else what)
        processes = len(self.ranks.bundles) + self._rollouts * self.width + scoring
        check_memory(self.runtime.nodes(), processes)
        if self.settings.device != "cpu" and self.settings.runtime.backend != "gloo":
            check_gpus(self.runtime.nodes(), self.ranks.bundles)
        if advice := crowded(self.runtime.nodes(), [self._threads(bundle) for bundle in bundles]):
            self.say(advice)
        self.rank_group = self.runtime.reserve(self.ranks.bundles)
        self.scoring.open()
        if self.pool is None:
            await self._form()
        elif self.shares and self.settings.rollout.engine == "vllm":
            await self._form()  # vLLM measures the devices' free memory, which ranks must not take or leave meanwhile
            await self.pool.open()
        else:
            await asyncio.gather(self._form(), self.pool.open())
        await self.mirrors.open()
        await self.scoring.ready()
        self._opened = True
        # The last bits of vLLM's answers may depend on what is decoded beside them, and so on their arrival; several
        # processes add in another order.
        exact = self.pool is None or (self.settings.rollout.engine != "vllm" and self.width == 1)
        exact &= all(one.tensor == 1 for one in self.settings.rewards)
        same = len(self.ranks.bundles) == len(self.ranks.worker_groups) and self.settings.rollout.max_lag == 0 and exact
        local = f"; a local run gives the same bits with threads={self.threads}" if same else ""
        self.say(f"{what} are ready{local}")
        if self.pool is not None and self.settings.runtime.weights == "store" and not self.inside:
            self._tell_of_store((await self.ranks.training.each(RankProcess.packed_bytes))[0])

    def _tell_of_store(self, size: int) -> None:
        if advice := small_store(self.runtime.nodes(), size):
            self.say(advice)

    async def form_again(self, plan: Plan) -> bool:
        self.plan, self.attempt = plan, self.attempt + 1
        self.ranks.end()
        await self.mirrors.settle()
        formed = [self._form()] if self.pool is None else [self._form(), self.pool.begin(self.attempt)]
        await asyncio.gather(*formed)
        if self.pool is not None and (self.shares or self.inside):
            await self._sampling(self.pool)  # a rank may have been lost within `training`
        self.back = await self.mirrors.back(plan)
        self.say(f"{len(self.ranks.bundles)} training workers are ready again")
        return True

    async def mirror(self, remembered: Remembered) -> None:
        await self.mirrors.take(remembered)

    # --- ranks

    async def _form(self) -> None:
        for nodes in itertools.count(1):
            await self._room_for_ranks()
            try:
                await self.ranks.form(self.plan, self.rank_group, lambda place: 1 + self._sharing(place))
                self._ranks_formed.set()
                break
            except NodeLost as lost:
                self.ranks.end()
                if nodes > NODES:
                    self.say(f"lost {lost}")
                    self.failures(lost)
                await asyncio.sleep(nodes * PAUSE)

    async def _room_for_ranks(self) -> None:
        """Wait for the ranks' resources. After a node is lost, rollout workers give up theirs, and wait for ranks."""
        loop, timeout = asyncio.get_running_loop(), self.settings.runtime.start_timeout
        until = loop.time() + timeout
        while not await self.runtime.placed(self.rank_group, within=min(ROOM_AFTER, timeout)):
            self._ranks_have_room.clear()
            gave = self._opened and self._vacated("gives way to the training workers")
            if not gave and loop.time() >= until:
                raise self.runtime.no_room(self.ranks.bundles, what=f"{len(self.ranks.bundles)} training workers")
        self._ranks_have_room.set()

    # --- rollout workers

    def _sharing(self, rank: int) -> int:
        """Return the number of rollout workers that share a rank's devices."""
        trained = self.settings.runtime.ranks
        return len(range(rank, self._rollouts, trained)) if self.shares and rank < trained else 0

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        if self.pool is None or not (self.shares or self.inside):
            yield
            return
        self._ranks_offloaded.clear()
        await self.pool.sleep()
        await self.ranks.training.each(RankProcess.onload)
        yield  # whatever fails here, ranks still hold the devices: `form_again` ends them and wakes rollout workers
        await self.ranks.training.each(RankProcess.offload)
        await self._sampling(self.pool)

    async def _sampling(self, pool: Pool) -> None:
        """Wake the rollout workers, now that ranks are offloaded, and allow others to start."""
        self._ranks_offloaded.set()
        await pool.wake()

    async def _rollout_worker(self, number: int) -> Worker[RolloutWorker]:
        """Start a place's worker in the pool. The run's first workers must get room in start_timeout; others wait."""
        bundle, name, place, sharers = self.rollout_bundle, f"rollout worker {number}", 0, 1
        alone: AbstractContextManager[None] = nullcontext()
        if self.shares:
            place = number % self.settings.runtime.ranks
            bundle, sharers, group = self.ranks.bundles[place], 1 + self._sharing(place), self.rank_group
            await self.runtime.placed(group, within=None)  # ranks wait for it too, and no longer than they may
            await self._ranks_offloaded.wait()  # ranks' calls have time-outs; then these are formed again, or all ends
            assert self.pool is not None
            alone = self.pool.joining()  # ranks wait for it
        else:
            counted = not self._opened and number < self._rollouts
            group = await self._room(name, ("rollout", number), self.rollout_room, in_time=counted)
        if self.width > 1 and not self.drives:
            how: dict[str, Any] = {"world": self.width, "group": group, "threads": self._threads(bundle)}
            patience = self.settings.runtime.collective_timeout
            return await rollout_group(self.runtime, self.recipe, name, patience=patience, **how)
        with alone:
            worker = await self.runtime.spawn(
                make_rollout_worker,
                self.recipe,
                name=name,
                group=group,
                place=place,
                threads=self._threads(bundle),
                sharers=sharers,
                say=self.say,
            )
            return driven(worker) if self.drives else worker

    async def _sampling_rank(self, number: int) -> Worker[RolloutWorker]:
        """Return the rank of this number, which samples. After a loss, first wait until all ranks are formed again."""
        while not (ranks := self.ranks.sampling) or not ranks[number].alive:
            self._ranks_formed.clear()
            await self._ranks_formed.wait()
        return ranks[number]

    # --- rewards

    def judge(self, reward: RewardSettings, tokenizer: Any) -> JudgeReward:
        """Return the judge. It scores answers as they come, without waiting for an idle engine, since rollout workers
        decode in other processes. A judge in this process computes in a thread, so that the event loop goes on."""
        as_chat = self.settings.data.as_chat
        if not reward.workers:
            here = load_judge(self.settings, reward.path)
            return here.reward(tokenizer, thread=True, pause=0.005, as_chat=as_chat)
        own, room, ends = load_tokenizer(reward.path), positions(reward.path), end_ids(reward.path)
        judges = self.scoring.judges(reward)
        return judge_reward(judges, own, tokenizer, ends=ends, longest=room, pause=0.005, as_chat=as_chat)

    def function(self, reward: RewardSettings, here: Reward) -> Reward:
        return self.scoring.function(reward, here)

    async def _room_to_score(self, name: str, key: tuple[str, int], bundles: Sequence[Resources]) -> dict[str, Any]:
        """Return name, placement group and threads for spawning a judge or function. The first worker of a place must
        get resources within start_timeout; its replacements wait, while other workers answer."""
        group = await self._room(name, key, bundles, in_time=key not in self._rooms)
        return {"name": name, "group": group, "threads": self._threads(bundles[0])}

    # --- room

    async def _room(
        self, name: str, key: tuple[str, int], bundles: Sequence[Mapping[str, float]], *, in_time: bool
    ) -> Any:
        """Return a placement group for a worker's processes and their successors. Without `in_time`, wait forever."""
        asked = [dict(bundle) for bundle in bundles]
        if key not in self._rooms:
            await self._ranks_have_room.wait()
            self._rooms[key] = self.runtime.reserve(asked)
        within = self.settings.runtime.start_timeout if in_time else None
        if not await self.runtime.placed(self._rooms[key], within=within):
            raise self.runtime.no_room(asked, what=name)
        return self._rooms[key]

    def _vacated(self, why: str, among: Container[str] | None = None) -> bool:
        """Let one rollout worker (of `among`, if given) give back its resources. Return False if none may."""
        if self.pool is None or self.shares or self.inside or (number := self.pool.supervisor.give_way(among)) is None:
            return False
        self.runtime.give_back(self._rooms.pop(("rollout", number)))
        self.say(f"rollout worker {number} {why}")
        return True

    def _threads(self, bundle: Mapping[str, float]) -> int:
        return self.settings.threads or max(1, int(bundle.get("CPU", 1.0)))

    # --- an executor

    def sampler(self, doing: Doing) -> Sampler:
        assert self.pool is not None
        self.pool.doing = doing
        return self.pool

    def models(self) -> Models:
        moving = self.settings.reference.ema
        models = Models.together(self.ranks.training, self.settings.objective, moving, self.ranks.apart)
        if moving and (home := self.ranks.apart.get(Role.REFERENCE)) is not None:
            models = replace(models, reference=EMAReference(home, self.ranks.training))
        return models

    def processes(self) -> list[ProcessStatus]:
        pool = self.pool
        samples = {} if pool is None else {one.name: f"samples with version {pool.version}" for one in pool.workers}
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
        # A rank's node that is lost takes the run back in any case, with all that was sampled on it.
        apart = self.stays and not (self.shares or self.inside)
        return await pinned(self.ranks.nodes, groups) if apart else ()

    async def publish(self, version: int) -> Stats:
        """Send weights from the ranks to the workers; the driver gets only version, digest and sizes. First end the
        rollout workers on nodes that are about to end."""
        if self.pool is None:
            return {}
        leaving = self.runtime.leaving()
        there = {worker.name.partition(PROCESS)[0] for worker in self.runtime.workers if worker.node in leaving}
        while self._vacated("leaves its node, which will end", there):
            pass
        shipment = await self.transport.pack(self.ranks.training, version)
        if await self.pool.publish(shipment):
            # The packed copy may have changed in memory since: replaced workers get a new copy.
            await self.pool.publish(await self.transport.pack(self.ranks.training, version))
        if not shipment.reports:
            return {}
        sent, whole = (sum(sizes) for sizes in zip(*((one.bytes, one.whole) for one in shipment.reports), strict=True))
        return {"publish/bytes": float(sent), "publish/share": sent / max(whole, 1)}

    async def save(self, role: str, folder: Path) -> None:
        await self.ranks.of(role).each(RankProcess.save, role, folder)

    async def written(self, folders: Sequence[Path]) -> None:
        """Let all ranks write their copies into the folders. Fetch files from ranks whose nodes have other disks."""
        await together(worker_group.each(Node.write, folders) for worker_group in self.ranks.worker_groups)
        for folder in folders:
            await collected(self.ranks.worker_groups, folder)

    def close(self) -> None:
        self.mirrors.close()
        if self.pool is not None:
            self.pool.close()
        self.scoring.close()
        self.runtime.end_workers()
