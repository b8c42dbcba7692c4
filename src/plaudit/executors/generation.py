"""Where a run generates: on devices apart from the ranks', in turn with the ranks on theirs, or inside the ranks.

    settings -> generation_of -> reservations, a pool of rollout workers, a transport for their weights

Left out: reserving resources and publishing (`ray.py`), and the work of a rollout worker (`rollout/worker.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from plaudit.executors.inside import InProcess
from plaudit.executors.processes import driven, make_rollout_worker, rollout_group
from plaudit.executors.ranks import RankGroups
from plaudit.executors.scoring import stays
from plaudit.executors.together import Located
from plaudit.executors.trainer import RankProcess
from plaudit.rollout.pool import Pool
from plaudit.rollout.worker import RolloutWorker
from plaudit.runtime.resources import Resources, reserved
from plaudit.runtime.settings import ROLLOUT_TENSOR
from plaudit.runtime.worker import Failures, Worker
from plaudit.settings.tree import Settings
from plaudit.types.distant import LARGE
from plaudit.weights.broadcast import transport_of
from plaudit.weights.transport import Transport

if TYPE_CHECKING:
    from plaudit.runtime.ray import RayRuntime


@dataclass
class Generation:
    """Base of the three ways to place generation (`Apart`, `Sharing`, `Inside`). Without sampling the pool is empty."""

    settings: Settings
    recipe: Mapping[str, Any]
    runtime: RayRuntime
    ranks: RankGroups
    room: Callable[..., Awaitable[dict[str, Any]]]
    """Returns name, placement group and threads for spawning a worker, as `RayExecutor._room`."""
    failures: Failures
    say: Callable[[str], None]
    reservations: Sequence[Mapping[str, float]] = ()
    """For each process of the run's first workers, the resources that the settings reserve explicitly."""
    bundles: Sequence[Resources] = ()
    """Resource bundles that the run's first workers reserve; empty if they use those of the ranks."""
    opened: bool = False
    """True once all processes of the run have become ready."""

    def __post_init__(self) -> None:
        self.width, self.vllm = self.settings.runtime.rollout_width, self.settings.rollout.engine == "vllm"
        # The last bits of vLLM's answers may depend on what is decoded beside them, and so on their arrival; several
        # processes add in another order.
        self.exact = not self.settings.samples or (not self.vllm and self.width == 1)
        self.stays, (self.count, most) = stays(self.settings), self.workers_range
        # Placing a worker may take start_timeout, and so may loading.
        patience = 2 * self.settings.runtime.start_timeout
        how: dict[str, Any] = {"patience": patience, "failures": self.failures, "say": self.say}
        self.pool = Pool(self.start, self.count, most=most, stay=LARGE if self.stays else None, **how)

    @property
    def workers_range(self) -> tuple[int, int]:
        """Return (least, most): the rollout workers that a run starts with, and the most that it uses."""
        return self.settings.rollout.workers_range if self.settings.samples else (0, 0)

    def __str__(self) -> str:
        return f" and {self.count} rollout"

    def reserve(self, share: Resources) -> None:
        """Set `bundles` and the transport. `share`: an equal share of the CPUs, for settings that reserve none."""
        self.transport: Transport = transport_of(self.settings.runtime, gpus=False)

    def sharers(self, rank: int) -> int:
        """Return how many processes use a rank's devices, the rank included."""
        return 1

    async def open(self, ranks: Awaitable[None]) -> None:
        """Start the workers, while `ranks` starts the ranks."""
        await asyncio.gather(ranks, self.pool.open())

    async def start(self, number: int) -> Worker[RolloutWorker]:
        """Start and return a worker for place `number` of the pool."""
        raise NotImplementedError

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """As `Executor.training`."""
        yield

    async def sampling(self) -> None:
        """Wake the workers that slept while ranks trained; ranks have been offloaded."""


class Apart(Generation):
    """Rollout workers with their own resources. Further ones join and leave with their nodes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # vLLM starts its processes itself, on what one of ours has reserved.
        self.drives = self.vllm and self.width > 1
        self.reservations = [self.settings.runtime.resources_per_rollout_worker] * (self.count * self.width)

    def reserve(self, share: Resources) -> None:
        bundle = reserved(self.settings.runtime.resources_per_rollout_worker, share)
        together = {name: amount * self.width for name, amount in bundle.items()}
        self.worker_bundles = [together] if self.drives else [bundle] * self.width
        self.bundles, self.threads = self.worker_bundles * self.count, self.ranks.threads(bundle)
        axes, key = f"runtime.mesh: {ROLLOUT_TENSOR}", "runtime.resources_per_rollout_worker"
        self.located = Located("rollout workers", axes, self.count, self.worker_bundles, key, self.say)
        gpus = all(one.get("GPU", 0.0) >= 1 for one in (self.ranks.bundles[0], bundle))
        self.transport = transport_of(self.settings.runtime, gpus=gpus and self.settings.device != "cpu")

    async def start(self, number: int) -> Worker[RolloutWorker]:
        """As `Generation.start`. The run's first workers must get resources within start_timeout; later ones wait."""
        in_time = not self.opened and number < self.count
        key, bundles = ("rollout", number), self.worker_bundles
        how = await self.room(f"rollout worker {number}", key, bundles, in_time=in_time) | {"threads": self.threads}
        if self.width > 1 and not self.drives:
            how |= {"patience": self.settings.runtime.collective_timeout}
            how |= {"placed": partial(self.located.started, number)}
            return await rollout_group(self.runtime, self.recipe, world=self.width, **how)
        worker = await self.runtime.spawn(make_rollout_worker, self.recipe, place=0, say=self.say, **how)
        return driven(worker) if self.drives else worker


class Sharing(Generation):
    """Rollout workers on the ranks' devices. They sleep while ranks train; ranks are offloaded while they sample."""

    def sharers(self, rank: int) -> int:
        return 1 + sum(number % self.settings.runtime.ranks == rank for number in range(self.count))

    async def open(self, ranks: Awaitable[None]) -> None:
        if self.vllm:
            await ranks  # vLLM measures the devices' free memory, which ranks must not take or leave meanwhile
            await self.pool.open()
        else:
            await super().open(ranks)

    async def start(self, number: int) -> Worker[RolloutWorker]:
        rank = number % self.settings.runtime.ranks
        while not await self.runtime.placed(self.ranks.group, within=None):  # ranks wait too, within their own limit
            pass  # it was replaced by another
        await self.pool.awake.wait()  # needs no limit: if a rank hangs, its calls time out
        how = self.ranks.place(rank) | {"name": f"rollout worker {number}", "sharers": self.sharers(rank)}
        with self.pool.joining():  # `training` waits for it
            return await self.runtime.spawn(make_rollout_worker, self.recipe, say=self.say, **how)

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        await self.pool.sleep()
        await self.ranks.training.each(RankProcess.onload)
        yield  # whatever fails here, ranks still hold the devices: `form_again` ends them and wakes rollout workers
        await self.ranks.training.each(RankProcess.offload)
        await self.sampling()

    async def sampling(self) -> None:
        await self.pool.wake()


class Inside(Sharing):
    """The training ranks as rollout workers. A lost rank restarts all ranks, so the pool counts no failures itself."""

    @property
    def workers_range(self) -> tuple[int, int]:
        return 0, self.settings.runtime.ranks

    def __str__(self) -> str:
        return ""

    def reserve(self, share: Resources) -> None:
        self.transport = InProcess()

    async def start(self, number: int) -> Worker[RolloutWorker]:
        return await self.ranks.sampling(number)


def generation_of(settings: Settings) -> type[Generation]:
    """Return the class for the placement of generation in the settings."""
    if settings.samples and settings.runtime.inside:
        return Inside
    return Sharing if settings.samples and settings.runtime.shares else Apart
