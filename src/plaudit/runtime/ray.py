"""A cluster of Ray for a run: room for its processes, and the processes themselves.

    RayRuntime.start -> a cluster of our own, or the one at runtime.address
    reserve          -> a placement group, refused at once with the sum if it can never fit
    spawn            -> a process with a plain worker inside -> RayWorker

With `ray_worker.py` the only file that imports ray. Ray's own restarts and retries are off: a restarted actor has lost
its state, and a retried call may run twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import exceptions
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from plaudit.runtime.head import AGAIN, PATIENCE, HeadWatch, parting
from plaudit.runtime.ray_worker import HEART, Host, RayWorker
from plaudit.runtime.resources import Resources, ResourcesError, added, check_room, part_of, shown
from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.worker import NodeLost, WorkerLost

CONNECT = 5.0
"""Seconds in which a cluster's head must take a connection."""


class RayRuntime:
    """A cluster for the length of a run."""

    def __init__(self, settings: RuntimeSettings, say: Callable[[str], None] = lambda text: None):
        self.settings, self._say = settings, say
        self._watch: HeadWatch | None = None
        self._told_of_leaving = False
        self._begun = False
        self._patience = float(os.environ.get(PATIENCE, "60"))
        self._groups: list[Any] = []
        self._workers: list[RayWorker] = []

    def start(self) -> str:
        """Connect, or start a cluster on this machine. Returns what there is, for people. Raises ValueError where this
        process has a connection that is not ours, which would be gone after the run."""
        settings = self.settings
        if ray.is_initialized():
            raise ValueError(
                "runtime=ray: this process uses Ray already (ray.init). Call ray.shutdown() before the run, or start "
                "it in a process of its own; runtime.address names a cluster that runs"
            )
        self._begun = True
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Ray would start a process for each core now, which has not our variables and is never used.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        page = ""
        common: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "runtime_env": _environment()}
        if settings.address is not None:
            try:
                _answering(settings.address)
                with _sigterm_left_alone():
                    ray.init(address=settings.address, **common)  # of `auto` it looks for the token too
            except (ConnectionError, ValueError, exceptions.RayError) as error:
                raise _not_let_in(settings.address, error) from error
        else:
            utilities: Any = ray._private.utils
            memory = utilities.get_system_memory() >> 20  # on every system, and within a container's limit
            if settings.object_store_mb > memory:
                given = f"runtime.object_store_mb={settings.object_store_mb}"
                raise ValueError(f"{given} is more than this machine's memory, {memory} MiB")
            lean = contextlib.nullcontext() if settings.dashboard else _nothing_unused()
            try:
                with _sigterm_left_alone(), _processes_apart(), lean:
                    started = ray.init(
                        address="local",
                        include_dashboard=settings.dashboard,
                        object_store_memory=settings.object_store_mb << 20,
                        **common,
                    )
            except OSError as error:
                raise ValueError(
                    f"Ray cannot start here ({error}). Its logs and sockets lie in /tmp/ray, or in `ray` of the folder "
                    "that RAY_TMPDIR names: one that you may write to, on a disk with room, of 38 letters at most"
                ) from error
            if settings.dashboard:
                page = f"; its page is http://{started.dashboard_url}, which asks for the token in RAY_AUTH_TOKEN"
        self._watch = HeadWatch(
            self.nodes,  # none where the head did not answer in time
            timeout=settings.heartbeat_timeout,
            patience=self._patience,
            say=self._say,
            again=AGAIN if settings.address is None else f"start a cluster again, and {AGAIN}",
        )
        nodes = len(self.nodes())
        return f"Ray {ray.__version__}, {nodes} node{'s' * (nodes > 1)}: {shown(self.resources())}{page}"

    def resources(self) -> Resources:
        """Everything that the cluster has, used or not."""
        found: Resources = _state().cluster_resources()
        return found

    def nodes(self) -> list[Resources]:
        """What each living node has, used or not."""
        return [node["Resources"] for node in _state().nodes() if node["Alive"]]

    def leaving(self) -> set[str]:
        """Nodes that are to end as soon as nobody uses them any more: an autoscaler takes them back, for one."""
        try:
            return set(ray._private.state.state.get_draining_nodes())
        except AttributeError:  # not of Ray's public functions: another version may have none
            if not self._told_of_leaving:
                self._say(
                    f"Ray {ray.__version__} does not tell which nodes are to end: workers there will count as lost"
                )
            self._told_of_leaving = True
            return set()

    def check(self, bundles: Sequence[Resources], *, what: str) -> None:
        """Raises ResourcesError with the sums where the nodes can never hold the bundles as they are."""
        check_room(self.nodes(), bundles, what=what)

    def reserve(self, bundles: Sequence[Resources]) -> Any:
        """Ask for one bundle a worker, side by side where they fit. Ray's autoscaler sees what is asked; where a node
        is lost, Ray looks for room on the others."""
        group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
        self._groups.append(group)
        return group

    def give_back(self, group: Any) -> None:
        """Others may have what was reserved; Ray ends whoever is in it."""
        self._groups.remove(group)
        remove_placement_group(group)

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
            f"{what}: {shown(added(bundles))} asked for did not become free within "
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
        variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        # Threads that wait by spinning, as torch's do for a while, take cores from others unless these are their own.
        if sharers > 1 or threads > bundle.get("CPU", 0.0):
            variables["OMP_WAIT_POLICY"] = "PASSIVE"
        # A user's word counts; last bits go by whether there are kernels.
        variables |= {name: os.environ[name] for name in ("OMP_WAIT_POLICY", "PLAUDIT_KERNELS") if name in os.environ}
        options = {
            "num_cpus": part_of(bundle, "CPU", sharers),
            "num_gpus": part_of(bundle, "GPU", sharers),
            "max_concurrency": 1000,
            "max_restarts": 0,
            "max_task_retries": 0,
            "runtime_env": {"env_vars": variables},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
        }
        hosting: Any = ray.remote(concurrency_groups={HEART: 8})(Host)  # type: ignore[call-overload]
        actor = hosting.options(**options).remote(str(Path.cwd()), make, *arguments)
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
        with parting(self._patience, self._say):
            self.end_workers()
            if self._watch is not None:
                self._watch.close()
            if self._begun:
                ray.shutdown()


def check_address(address: str) -> None:
    """Raises ValueError where no head answers."""
    try:
        _answering(address)
    except ConnectionError as error:
        raise _not_let_in(address, error) from error


def _answering(address: str) -> None:
    """Raises ConnectionError where no head answers. Ray itself would look for one there for a quarter of an hour."""
    if address == "auto":  # that of RAY_ADDRESS, or the one that was started last on this machine
        address = str(ray._private.services.canonicalize_bootstrap_address(address) or "")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConnectionError(f"{address or 'nothing'} is not host:port")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT).close()
    except (OSError, OverflowError) as error:  # the last: no port has such a number
        raise ConnectionError(f"{address}: {getattr(error, 'strerror', None) or error}") from error


def _not_let_in(address: str, error: Exception) -> ValueError:
    return ValueError(
        f"runtime.address={address}: no cluster lets us in there ({error}). Is one running (ray start --head)? If it "
        "asks for a token: export RAY_AUTH_MODE=token, with its token in ~/.ray/auth_token or RAY_AUTH_TOKEN"
    )


@contextlib.contextmanager
def _sigterm_left_alone() -> Iterator[None]:
    """Ray's own handler would end the run with a traceback while Ray starts, and unsaved later. Python is told of none;
    the one that Ray's C++ sets gives way again."""
    utilities: Any = ray._private.utils
    setter, utilities.set_sigterm_handler = utilities.set_sigterm_handler, lambda handler: None
    try:
        yield
    finally:
        utilities.set_sigterm_handler = setter
        with contextlib.suppress(ValueError):  # not in the main thread: then Ray has set none either
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


@contextlib.contextmanager
def _processes_apart() -> Iterator[None]:
    """What Ray starts meanwhile is a process group of its own. A SIGTERM to this one's group (timeout, many service
    managers) is then for this process alone, which saves and ends the others; Ray's own would end at once, and the run
    with them. Not where they end with this process by being of its group."""
    services: Any = ray._private.services
    popen = getattr(services, "ConsolePopen", None)
    utilities: Any = ray._private.utils
    if popen is None or sys.platform == "win32" or not utilities.detect_fate_sharing_support():
        yield
        return
    services.ConsolePopen = partial(popen, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = popen


@contextlib.contextmanager
def _nothing_unused() -> Iterator[None]:
    """What Ray starts meanwhile is without its autoscaler, its reader of workers' logs and the rest of its page: for a
    run on this machine they do nothing, but take seconds of its start and one of its end."""
    node: Any = ray._private.node.Node
    utilities: Any = ray._private.utils
    unused = ["start_monitor", "start_log_monitor"]
    lacking = getattr(utilities, "get_dashboard_dependency_error", lambda: None)
    if lacking() is not None:  # with ray[default] a node's agent would look for the page for ever
        unused.append("start_api_server")
    with contextlib.ExitStack() as before:
        for name in unused:
            if hasattr(node, name):  # not of Ray's public functions: another version may have none
                before.callback(setattr, node, name, getattr(node, name))
                setattr(node, name, lambda node, **more: None)
        yield


def _state() -> Any:
    """Ray's own functions about the cluster, which have no types."""
    return ray


def _environment() -> dict[str, Any]:
    """Workers import what this process imports: where the package lies in a source tree, they are told."""
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(dict.fromkeys([source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
    return {"env_vars": {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}}
