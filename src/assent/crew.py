"""Who does the work of a run, and where: training ranks, an engine that samples, and how new weights get from one to
the other.

LocalCrew   one rank and one engine in this process; the engine shares the rank's parameters unless samples may lag
RayCrew     ranks and rollout workers in processes of their own, on this machine or on a cluster

The loop, the algorithms and the learner are the same under both.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from assent.algorithms.base import Algorithm
from assent.loop.checkpoint import Writer
from assent.models.load import load_tokenizer
from assent.rollout.build import build_engine
from assent.rollout.engine import Engine
from assent.rollout.pool import Pool
from assent.rollout.worker import RolloutWorker
from assent.runtime.gang import Gang
from assent.runtime.local import LocalGang
from assent.runtime.settings import RuntimeSettings
from assent.runtime.token import prepare
from assent.runtime.worker import TooManyFailures, WorkerLost
from assent.settings import Settings, to_plain
from assent.trainer import Plan, RankProcess, Trainer, device_of, initial_model
from assent.types import Role

if TYPE_CHECKING:
    from assent.runtime.ray import RayRuntime, RayWorker


class Crew(Protocol):
    """Workers of one run. The caller promises to close it."""

    gang: Gang
    """Training ranks; `do` reaches a role on each."""
    engine: Engine | None
    """What samples, for online methods."""
    apart: bool
    """The engine is in other processes: nothing here decodes."""

    async def publish(self, version: int) -> None:
        """Make the policy's weights known to the engine, which confirms them."""
        ...

    async def writer(self, role: str, staging: Path) -> Writer:
        """What writes a role's model into a folder of a checkpoint. `staging` is a folder it may use meanwhile."""
        ...

    def close(self) -> None: ...


class LocalCrew:
    """Everything in this process."""

    apart = False

    def __init__(self, settings: Settings, plan: Plan):
        self.settings = settings
        self.trainer = Trainer(settings, plan)
        self.gang: Gang = LocalGang(self.trainer)
        self.engine: Engine | None = None
        rollout = settings.rollout
        self.copies = rollout.max_lag > 0 or rollout.engine == "vllm"
        if isinstance(settings.algorithm, Algorithm):
            vllm = rollout.vllm if rollout.engine == "vllm" else None
            policy = self.trainer.models[Role.POLICY]
            tokenizer = self.trainer.tokenizer
            self.engine = build_engine(policy, tokenizer, slots=rollout.slots, copy=rollout.max_lag > 0, vllm=vllm)

    async def publish(self, version: int) -> None:
        """Nothing moves where the engine shares the parameters."""
        if self.engine is not None:
            self.engine.load(self.trainer.weights() if self.copies else None, version)

    async def writer(self, role: str, staging: Path) -> Writer:
        return partial(self.trainer.save, role)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


class Crews:
    """Opens the crews of a run, one after another where ranks are lost; the cluster stays between them."""

    def __init__(self, settings: Settings, say: Callable[[str], None]):
        self.settings, self.say = settings, say
        self.failures = Failures(settings.runtime.max_failures)
        self._runtime: RayRuntime | None = None

    async def open(self, plan: Plan) -> Crew:
        """Ready workers. Raises what keeps them from being so."""
        if self.settings.runtime.kind == "local":
            return LocalCrew(self.settings, plan)
        if self._runtime is None:
            prepare(self.settings.runtime)
            from assent.runtime.ray import RayRuntime

            self._runtime = RayRuntime(self.settings.runtime)
            self.say(self._runtime.start())
        return await RayCrew.open(self.settings, plan, self._runtime, self.failures, self.say)

    def __enter__(self) -> Crews:
        return self

    def __exit__(self, *error: object) -> None:
        if self._runtime is not None:
            self._runtime.close()


class Failures:
    """Counts lost workers over a whole run, restarts of its gang included."""

    def __init__(self, most: int):
        self.most, self.lost = most, list[WorkerLost]()

    def __call__(self, lost: WorkerLost) -> None:
        """Raises TooManyFailures where one is too many."""
        self.lost.append(lost)
        if 0 <= self.most < len(self.lost):
            reasons = "; ".join(str(lost) for lost in self.lost[-3:])
            raise TooManyFailures(
                f"{len(self.lost)} workers were lost, runtime.max_failures={self.most} are allowed: {reasons}. "
                "Nothing that was committed is lost: resume=latest goes on"
            ) from lost


class RayCrew:
    """Ranks and rollout workers as processes. `open` makes one."""

    apart = True

    def __init__(self, settings: Settings, plan: Plan, runtime: RayRuntime, failures: Failures):
        self.settings, self.plan, self.runtime, self.failures = settings, plan, runtime, failures
        self.recipe: Mapping[str, Any] = to_plain(settings) | {"resume": None}
        self.engine: Engine | None = None
        self.pool: Pool | None = None
        self.ranks: list[RayWorker] = []

    @classmethod
    async def open(
        cls, settings: Settings, plan: Plan, runtime: RayRuntime, failures: Failures, say: Callable[[str], None]
    ) -> RayCrew:
        """Reserve, start and join everything. Raises ResourcesError at once where it does not fit."""
        crew = cls(settings, plan, runtime, failures)
        try:
            await crew._open(say)
        except BaseException:
            crew.close()
            raise
        return crew

    async def _open(self, say: Callable[[str], None]) -> None:
        settings, runtime = self.settings.runtime, self.runtime
        training = settings.num_training_workers
        online = isinstance(self.settings.algorithm, Algorithm)
        rollout = self.settings.rollout.workers if online else 0
        share = _share(runtime.cpus(), training + rollout)
        bundles = [_reserved(settings.resources_per_worker, share)] * training
        bundles += [_reserved(settings.resources_per_rollout_worker, share)] * rollout
        what = f"{training} training and {rollout} rollout workers"
        group = await runtime.reserve(bundles, what=what)
        threads = [self.settings.threads or max(1, int(bundle.get("CPU", 1.0))) for bundle in bundles]

        async def rank(number: int) -> RayWorker:
            name = f"training rank {number}"
            place, mine = number, threads[number]
            return await runtime.spawn(
                RankProcess, self.recipe, self.plan, name=name, group=group, place=place, threads=mine
            )

        async def sampler(number: int) -> RayWorker:
            name, place = f"rollout worker {number}", training + number
            return await runtime.spawn(
                make_rollout_worker, self.recipe, name=name, group=group, place=place, threads=threads[place]
            )

        if rollout:
            self.engine = self.pool = Pool(sampler, rollout, failures=self.failures, say=say)
        self.gang, _ = await asyncio.gather(self._gang(rank, training, settings), self._pool_opened())
        say(f"{what} are ready")

    async def _gang(self, rank: Callable[[int], Any], world: int, settings: RuntimeSettings) -> Gang:
        from assent.runtime.ray import RayGang

        self.ranks = list(await asyncio.gather(*(rank(number) for number in range(world))))
        gang = RayGang(self.ranks)
        address = await gang.any("address")
        builds = [(address, number, world, settings.collective_timeout) for number in range(world)]
        await gang.scatter("build", builds)
        return gang

    async def _pool_opened(self) -> None:
        if self.pool is not None:
            await self.pool.open()

    async def publish(self, version: int) -> None:
        """The parcel goes from rank 0 to the workers through the object store; here come its version and digest."""
        if self.pool is None:
            return
        parcel, seal = self.ranks[0].references("parcel", version, parts=2)
        digest = await self.runtime.fetched(seal, self.ranks[0].name)
        await self.pool.publish(parcel, version, digest)

    async def writer(self, role: str, staging: Path) -> Writer:
        """Rank 0 writes beside the checkpoint's place, which it must be able to see."""
        shutil.rmtree(staging, ignore_errors=True)
        await self.gang.each("save", role, staging)
        if not staging.is_dir():
            raise FileNotFoundError(
                f"training rank 0 wrote {role} to {staging}, which this machine does not see: "
                "put `output` on storage that all nodes share"
            )
        return partial(_moved, staging)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.runtime.end_workers()


def make_rollout_worker(recipe: Mapping[str, Any]) -> RolloutWorker:
    """In its own process: an engine that waits for its first weights."""
    from assent.recipes import load_settings

    settings = load_settings(recipe)
    tokenizer = load_tokenizer(str(settings.model.tokenizer or settings.model.path))
    model = initial_model(settings, tokenizer, device_of(settings)).requires_grad_(False)
    rollout = settings.rollout
    vllm = rollout.vllm if rollout.engine == "vllm" else None
    return RolloutWorker(build_engine(model, tokenizer, slots=rollout.slots, vllm=vllm))


def _moved(staging: Path, folder: Path) -> None:
    for path in list(staging.iterdir()):
        path.rename(folder / path.name)
    staging.rmdir()


def _share(cpus: float, processes: int) -> float:
    """CPUs of one of so many equal processes, in hundredths."""
    share = cpus / processes
    return float(int(share)) if share >= 1 else max(int(share * 100) / 100, 0.01)


def _reserved(given: Mapping[str, float], share: float) -> dict[str, float]:
    return {"CPU": share} | {name: float(amount) for name, amount in given.items()}
