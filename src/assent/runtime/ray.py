"""Workers as Ray actors: the only file that imports ray.

    RayRuntime.start -> a cluster of our own, or the one at runtime.address
    reserve          -> a placement group, refused at once with the sum if it can never fit
    spawn            -> a process with a plain worker inside -> RayWorker.call

A worker's plain methods run one after another in one thread, its coroutines on the process's event loop, so that it can
always answer a heartbeat. A process that gives no sign in time is killed and counts as lost. Ray's own restarts and
retries are off: a restarted actor has lost its state, and a retried call may run twice.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import exceptions
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from assent.runtime import stage
from assent.runtime.resources import Resources, ResourcesError, added, check_room, part_of, shown
from assent.runtime.settings import RuntimeSettings
from assent.runtime.worker import NodeLost, SenderLost, WorkerLost, reason_of

LOST = (
    exceptions.ActorDiedError,
    exceptions.ActorUnavailableError,
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
)
GONE = (*LOST, exceptions.ObjectLostError, exceptions.OwnerDiedError)
"""What a call fails with where something that it was handed by reference is gone."""


class Host:
    """The actor around a plain worker."""

    def __init__(self, folder: str, make: Callable[..., Any], *arguments: Any):
        if Path(folder).is_dir():
            os.chdir(folder)  # so that relative paths in settings mean what they mean to the driver
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        self._make = partial(make, *arguments)
        self._worker: Any = None

    async def build(self) -> tuple[int, str]:
        """Make the worker, in the thread that its methods will run in. Returns this process's id and node."""
        self._worker = await asyncio.get_running_loop().run_in_executor(self._thread, self._make)
        return await self.ping()

    async def stage(self) -> str:
        return stage.now()

    async def ping(self) -> tuple[int, str]:
        return os.getpid(), ray.get_runtime_context().get_node_id()

    async def call(self, method: str, *arguments: Any) -> Any:
        function = getattr(self._worker, method)
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *arguments))


class RayWorker:
    """A `Worker` over there. `start` makes it ready and begins to listen for its heart."""

    def __init__(
        self, name: str, actor: Any, settings: RuntimeSettings, *, say: Callable[[str], None] = lambda text: None
    ):
        self.name, self._actor, self._say = name, actor, say
        self._heartbeat_timeout, self._call_timeout = settings.heartbeat_timeout, settings.call_timeout
        self._start_timeout = settings.start_timeout
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._heart: asyncio.Task[None] | None = None
        self.pid, self.node = 0, ""

    async def start(self, timeout: float) -> None:
        telling = asyncio.get_running_loop().create_task(self._tell())
        try:
            self.pid, self.node = await asyncio.wait_for(_plain(self._actor.build.remote()), timeout)
        except TimeoutError:
            self.kill()
            raise WorkerLost(self.name, f"was not ready within {timeout:g} s (runtime.start_timeout)") from None
        except LOST as error:
            raise WorkerLost(self.name, _cause(error)) from error
        finally:
            telling.cancel()
        self._heart = asyncio.get_running_loop().create_task(self._listen())

    async def _tell(self) -> None:
        """Say what it does until it is ready, where it tells."""
        told = ""
        with contextlib.suppress(*LOST):
            while True:
                if (now := await _plain(self._actor.stage.remote())) != told:
                    self._say(f"{self.name} {now}")
                    told = now
                await asyncio.sleep(1.0)

    async def _listen(self) -> None:
        """A sign every quarter of the time allowed."""
        while await self.found() is None:
            await asyncio.sleep(self._heartbeat_timeout / 4)

    def _silent(self) -> str:
        return f"gave no sign for {self._heartbeat_timeout:g} s (runtime.heartbeat_timeout)"

    def _end(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)
        self._kill()

    async def call(self, method: str, *arguments: Any) -> Any:
        return await self._answer(method, arguments, self._call_timeout, "runtime.call_timeout")

    async def begin(self, method: str, *arguments: Any) -> Any:
        """A call that is a part of starting, and has the time for that."""
        return await self._answer(method, arguments, self._start_timeout, "runtime.start_timeout")

    async def _answer(self, method: str, arguments: Sequence[Any], timeout: float, setting: str) -> Any:
        if self._lost.done():
            raise WorkerLost(self.name, self._lost.result())
        answer = asyncio.ensure_future(_plain(self._actor.call.remote(method, *arguments)))
        both, first = (answer, self._lost), asyncio.FIRST_COMPLETED
        try:
            done, _ = await asyncio.wait(both, timeout=timeout, return_when=first)
        finally:
            answer.cancel()  # does nothing to what is done
        if not done:
            self._end(f"did not end {method} within {timeout:g} s ({setting})")
        if not answer.done():
            raise WorkerLost(self.name, self._lost.result())
        try:
            return answer.result()
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, GONE):
                raise SenderLost("a sender", reason_of(error.cause)) from error
            raise error.cause from error  # the worker's own exception
        except LOST as error:
            self._end(_cause(error))
            raise WorkerLost(self.name, _cause(error)) from error
        except GONE as error:
            raise SenderLost("a sender", reason_of(error)) from error

    async def found(self) -> WorkerLost | None:
        """Ask for a sign now. Returns how the worker was lost, if it was."""
        if not self._lost.done():
            try:
                await self._sign()
            except TimeoutError:
                self._end(self._silent())
            except LOST as error:
                self._end(_cause(error))
        return WorkerLost(self.name, self._lost.result()) if self._lost.done() else None

    async def _sign(self) -> None:
        """Raises TimeoutError where none comes. Where this process itself stood still meanwhile, it asks again."""
        loop, timeout = asyncio.get_running_loop(), self._heartbeat_timeout
        begun = loop.time()
        try:
            await asyncio.wait_for(_plain(self._actor.ping.remote()), timeout)
        except TimeoutError:
            if loop.time() - begun < 1.25 * timeout:
                raise
            await asyncio.wait_for(_plain(self._actor.ping.remote()), timeout)

    def references(self, method: str, *arguments: Any, parts: int) -> list[Any]:
        """Call a method that returns a tuple, and get a reference to each of its parts: handed to other workers' calls,
        they go there directly."""
        found: list[Any] = self._actor.call.options(num_returns=parts).remote(method, *arguments)
        return found

    async def fetched(self, reference: Any) -> Any:
        """What a reference from here stands for."""
        timeout = self._call_timeout
        try:
            return await asyncio.wait_for(_plain(reference), timeout)
        except TimeoutError:
            self._end(f"made nothing within {timeout:g} s (runtime.call_timeout)")
        except exceptions.RayTaskError as error:
            raise error.cause from error
        except LOST as error:
            self._end(_cause(error))
        raise WorkerLost(self.name, self._lost.result())

    async def keep(self, method: str, *arguments: Any) -> tuple[Any, Any]:
        """Call a method that returns a pair: a reference to the first, which stays there, and the second itself."""
        first, second = self.references(method, *arguments, parts=2)
        return first, await self.fetched(second)

    @property
    def alive(self) -> bool:
        """As far as is known."""
        return not self._lost.done()

    def kill(self) -> None:
        self._end("was ended")

    def _kill(self) -> None:
        if self._heart is not None and self._heart is not _current_task():
            self._heart.cancel()
        with contextlib.suppress(Exception):  # whatever is wrong with it, it is being ended
            ray.kill(self._actor)
        if self.pid:  # a stopped process hears no request
            _kill_process(self.pid, self.node)


class RayRuntime:
    """A cluster for the length of a run."""

    def __init__(self, settings: RuntimeSettings):
        self.settings = settings
        self._groups: list[Any] = []
        self._workers: list[RayWorker] = []

    def start(self) -> str:
        """Connect, or start a cluster on this machine. Returns what there is, for people."""
        settings = self.settings
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        on_sigterm = signal.getsignal(signal.SIGTERM)
        page = ""
        common: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "runtime_env": _environment()}
        if settings.address is not None:
            try:
                ray.init(address=settings.address, **common)
            except ConnectionError as error:
                raise ValueError(
                    f"runtime.address={settings.address}: no cluster lets us in there. Is one running (ray start "
                    "--head), and is its token in RAY_AUTH_TOKEN, with RAY_AUTH_MODE=token, if it asks for one?"
                ) from error
        else:
            started = ray.init(
                address="local",
                include_dashboard=settings.dashboard,
                object_store_memory=settings.object_store_mb << 20,
                **common,
            )
            if settings.dashboard:
                page = f"; its page is http://{started.dashboard_url}, which asks for the token in RAY_AUTH_TOKEN"
        with contextlib.suppress(ValueError):  # not in the main thread: then Ray has set none either
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own would end the run unsaved
        nodes = len(self.nodes())
        return f"Ray {ray.__version__}, {nodes} node{'s' * (nodes > 1)}: {shown(self.resources())}{page}"

    def resources(self) -> Resources:
        """Everything that the cluster has, used or not."""
        found: Resources = _state().cluster_resources()
        return found

    def nodes(self) -> list[Resources]:
        """What each living node has, used or not."""
        return [node["Resources"] for node in _state().nodes() if node["Alive"]]

    def check(self, bundles: Sequence[Resources], *, what: str) -> None:
        """Raises ResourcesError with the sums where the nodes can never hold the bundles as they are."""
        check_room(self.nodes(), bundles, what=what)

    def reserve(self, bundles: Sequence[Resources]) -> Any:
        """Ask for one bundle a worker, side by side where they fit. Ray's autoscaler sees what is asked; where a node
        is lost, Ray looks for room on the others."""
        group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
        self._groups.append(group)
        return group

    async def placed(self, group: Any, *, within: float | None) -> bool:
        """Wait until all of a group has its room, or for so many seconds. False where it has none then, or was given
        back."""
        loop = asyncio.get_running_loop()
        until = None if within is None else loop.time() + within
        while (state := placement_group_table(group)["state"]) != "CREATED":
            if state == "REMOVED" or (until is not None and loop.time() >= until):
                return False
            await asyncio.sleep(0.1)
        return True

    def no_room(self, bundles: Sequence[Resources], *, what: str) -> ResourcesError:
        """What to raise where a group was waited for in vain."""
        return ResourcesError(
            f"{what} ask for {shown(added(bundles))}, which did not become free within "
            f"{self.settings.start_timeout:g} s; free are {shown(_state().available_resources())}"
        )

    async def spawn(
        self,
        make: Callable[..., Any],
        *arguments: Any,
        name: str,
        group: Any,
        place: int,
        threads: int,
        sharers: int = 1,
        say: Callable[[str], None] = lambda text: None,
    ) -> RayWorker:
        """A process with `make(*arguments)` inside, in a place of a reserved group, which it may share with others.
        Raises what `make` raises, and NodeLost where the fault is the node's."""
        settings = self.settings
        bundle, node = group.bundle_specs[place], placement_group_table(group)["bundles_to_node_id"].get(place)
        # Threads that wait by spinning, as torch's do for a while, take the cores from the other processes of a node.
        wait = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
        variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": wait}
        options = {
            "num_cpus": part_of(bundle, "CPU", sharers),
            "num_gpus": part_of(bundle, "GPU", sharers),
            "max_concurrency": 1000,
            "max_restarts": 0,
            "max_task_retries": 0,
            "runtime_env": {"env_vars": variables},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
        }
        actor = ray.remote(Host).options(**options).remote(str(Path.cwd()), make, *arguments)
        worker = RayWorker(name, actor, settings, say=say)
        self._workers.append(worker)
        try:
            await worker.start(settings.start_timeout)
        except exceptions.RayTaskError as error:
            worker.kill()
            raise error.cause from error
        except WorkerLost as lost:
            if any(there["NodeID"] == node and there["Alive"] for there in _state().nodes()):
                raise
            raise NodeLost(name, lost.reason) from lost
        return worker

    @property
    def workers(self) -> list[RayWorker]:
        """Those that are not lost, by name."""
        return sorted((worker for worker in self._workers if worker.alive), key=lambda worker: worker.name)

    def end(self, *, name: str) -> None:
        """End the workers whose names begin so. What was reserved for them is kept."""
        ended = [worker for worker in self._workers if worker.name.startswith(name)]
        for worker in ended:
            worker.kill()
        self._workers = [worker for worker in self._workers if worker not in ended]

    def end_workers(self) -> None:
        """End every worker and give back what was reserved."""
        for worker in self._workers:
            worker.kill()
        for group in self._groups:
            with contextlib.suppress(Exception):
                remove_placement_group(group)
        self._workers, self._groups = [], []

    def close(self) -> None:
        """End every worker, and the cluster if it is ours."""
        self.end_workers()
        ray.shutdown()


def _state() -> Any:
    """Ray's own functions about the cluster, which have no types."""
    return ray


def _cause(error: Exception) -> str:
    """Ray's first line says the same of every loss; the last one says what became of a node."""
    told = str(error)
    return f"its node is gone ({told.rpartition(': ')[2].strip()})" if "its node has died" in told else reason_of(error)


async def _plain(reference: Any) -> Any:
    """A coroutine of what Ray gives, which is awaitable but not one."""
    return await reference


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs any more
        return None


def _environment() -> dict[str, Any]:
    """Workers import what this process imports: where the package lies in a source tree, they are told."""
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(dict.fromkeys([source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
    return {"env_vars": {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}}


def _kill_process(pid: int, node: str) -> None:
    with contextlib.suppress(Exception):  # gone already, or its node is
        if node == ray.get_runtime_context().get_node_id():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        ray.remote(os.kill).options(num_cpus=0, scheduling_strategy=there).remote(pid, signal.SIGKILL)
