"""The ranks that train: one in this process, or several under Ray, each in a process of its own.

    Adapters -> ThreadGroup
    RuntimeSettings -> resources -> an AdapterRank each, joined -> Ranks, which start again after a loss

Ranks of the data axis train on other rows of a request, ranks of the tensor axis have parts of each matrix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import torch

from plaudit.executors.processes import Part, worker_group
from plaudit.learn.ranks import join
from plaudit.learn.settings import LearnSettings
from plaudit.learn.sharding import Placement, Whole
from plaudit.learn.tensor import Axes, Cut
from plaudit.models.decoder import Decoder
from plaudit.models.device import device_of
from plaudit.models.mesh import Mesh
from plaudit.runtime.local import LocalWorkerGroup, do
from plaudit.runtime.memory import keep_freed_memory
from plaudit.runtime.resources import equal_share, reserved
from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.token import prepare
from plaudit.runtime.worker import Arguments, Failures, Result, WorkerLost, reason_of
from plaudit.runtime.worker_group import WorkerGroup
from plaudit.training_api.adapters import Adapters, base_model

if TYPE_CHECKING:
    from plaudit.runtime.ray import RayRuntime
    from plaudit.runtime.ray_worker_group import RayWorkerGroup


class ThreadGroup(LocalWorkerGroup[Adapters]):
    """One rank in this process, whose calls run in a thread, so that requests are answered meanwhile."""

    def __init__(self, worker: Adapters):
        super().__init__(worker)
        self._thread = ThreadPoolExecutor(1)

    async def scatter(
        self, method: Callable[[Adapters, *Arguments], Result], arguments: Sequence[tuple[*Arguments]]
    ) -> list[Result]:
        (mine,) = arguments
        call = partial(do, self.worker, self.name, method.__name__, *mine)
        return [await asyncio.get_running_loop().run_in_executor(self._thread, call)]

    async def form(self, lost: WorkerLost | None = None) -> None:
        """Do nothing: this rank is there, and is not lost alone."""

    def close(self) -> None:
        """Do nothing: this rank ends with the process."""


class AdapterRank(Part, Adapters):
    """The adapters of one rank; `build` joins the others and loads this rank's part of the base model."""

    def __init__(self, model: str, device: str, settings: LearnSettings, runtime: RuntimeSettings):
        self.path, self.device, self.settings, self.runtime = model, device, settings, runtime

    def build(self, address: str, number: int, world: int, timeout: float) -> None:
        keep_freed_memory()
        device, runtime = torch.device(device_of(self.device)), self.runtime
        ranks = join(address, number, world, device=device, timeout=timeout, backend=runtime.backend)
        self.axes = Axes.along(ranks, Mesh(**runtime.axes), device=device, timeout=timeout)
        base = base_model(self.path, device=self.device, dtype=self.settings.precision, axis=self.axes.axis)
        Adapters.__init__(self, base, self.settings)

    def placed(self, model: Decoder) -> Placement:
        whole = Whole(model, self.axes.data)
        return Cut(whole, model, self.axes.tensor) if model.axis.size > 1 else whole


class Ranks(WorkerGroup[Adapters]):
    """The ranks that `runtime` asks for. If a call fails on any of them, all are lost: others may wait within it."""

    def __init__(
        self, model: str, device: str, settings: LearnSettings, runtime: RuntimeSettings, say: Callable[[str], None]
    ):
        self.arguments, self.runtime, self.say = (model, device, settings, runtime), runtime, say
        self.world, self.width = runtime.ranks, runtime.width
        self.failures = Failures(runtime.max_failures_per_hour)
        self._cluster: RayRuntime | None = None
        self._ranks: RayWorkerGroup[AdapterRank] | None = None

    async def scatter(
        self, method: Callable[[Adapters, *Arguments], Result], arguments: Sequence[tuple[*Arguments]]
    ) -> list[Result]:
        """As `WorkerGroup.scatter`. Raises WorkerLost for all errors but ValueError, which all ranks raise together."""
        if self._ranks is None:
            raise WorkerLost("the ranks", "they did not start again")
        try:
            return await self._ranks.scatter(method, arguments)
        except (ValueError, WorkerLost):
            raise
        except Exception as error:
            raise WorkerLost("the ranks", f"they are out of step ({reason_of(error)})") from error

    async def form(self, lost: WorkerLost | None = None) -> None:
        """Start all ranks; after a loss, end those that are left first. They have no adapters then. Raises
        ResourcesError, WorkerLost, or TooManyFailures."""
        cluster, runtime, self._ranks = self._begun(), self.runtime, None
        cluster.end_workers()
        if lost is not None:
            self.failures(lost)
        nodes, each = cluster.nodes(), runtime.resources_per_worker
        given = [dict(each)] * runtime.ranks if "CPU" in each else []
        share = equal_share(nodes, runtime.ranks - len(given), beside=given, gpus=self.arguments[1] != "cpu")
        bundles, what = [reserved(each, share)] * runtime.ranks, f"{runtime.ranks} training ranks"
        async with cluster.nodes_for(bundles, what=what):
            group = cluster.reserve(bundles)
            if not await cluster.placed(group, within=runtime.start_timeout):
                raise cluster.no_room(bundles, what=what)
            self._ranks = await worker_group(
                cluster,
                AdapterRank,
                *self.arguments,
                name="training ranks",
                world=runtime.ranks,
                group=group,
                threads=max(1, int(bundles[0]["CPU"])),
                patience=runtime.collective_timeout,
            )
        self.say(f"{what} are ready{' again' if lost else ''}")

    def _begun(self) -> RayRuntime:
        if self._cluster is None:
            prepare(self.runtime)
            from plaudit.runtime.ray import RayRuntime

            self._cluster = RayRuntime(self.runtime, self.say)
            self.say(self._cluster.start())
        return self._cluster

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
