"""A Ray cluster for a run: it reserves resources and starts processes.

    RayRuntime.start -> a cluster of our own, or the one at runtime.address
    reserve -> a placement group, refused at once with the sums if it can never fit
    spawn -> a process with a plain worker inside -> RayWorker

Only this file and those beside it named `ray_` import ray; `ray_private.py` has all that is not public. Ray's own
restarts and retries are off: a restarted actor has lost its state, and a retried call may run twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray import exceptions
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from plaudit.runtime.head import AGAIN, PATIENCE, HeadWatch, parting
from plaudit.runtime.hearts import Hearts
from plaudit.runtime.network import interface_of
from plaudit.runtime.ray_node import check_address, nodes_for
from plaudit.runtime.ray_private import draining, nothing_unused, on_loopback, processes_apart, sigterm_left_alone
from plaudit.runtime.ray_worker import HEART, Host, RayWorker
from plaudit.runtime.resources import Resources, ResourcesError, added, check_room, part_of, shown
from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.worker import NodeLost, WorkerLost

LONGEST_PAUSE = 2.0
"""Most seconds between two checks whether a placement group has been placed."""
Kind = TypeVar("Kind")


class RayRuntime:
    """A cluster for the length of a run."""

    def __init__(self, settings: RuntimeSettings, say: Callable[[str], None] = lambda text: None):
        self.settings, self._say = settings, say
        self._watch: HeadWatch | None = None
        self._begun = False
        self._patience = float(os.environ.get(PATIENCE, "60"))
        self._groups: list[Any] = []
        self._workers: list[RayWorker[Any]] = []
        self._hearts = Hearts()
        self._freed = asyncio.Event()
        """Set when a reservation is given back."""

    def start(self) -> str:
        """Connect to a cluster, or start one on this machine. Return its resources as text. Raises ValueError if this
        process has a Ray connection already, which the run would close."""
        settings = self.settings
        if ray.is_initialized():
            raise ValueError(
                "runtime=ray: this process uses Ray already (ray.init). Call ray.shutdown() before the run, or start "
                "it in a process of its own; runtime.address names a cluster that runs"
            )
        self._begun = True
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Otherwise Ray would start a process for each core now, without our variables, and never use it.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        common: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        common["runtime_env"] = _environment(here=settings.address is None)
        if settings.address is not None:
            check_address(settings.address)
            try:
                with sigterm_left_alone():
                    ray.init(address=settings.address, **common)  # with address=auto, it looks for the token too
            except (ConnectionError, ValueError, exceptions.RayError) as error:
                raise ValueError(
                    f"runtime.address={settings.address}: the cluster answers, and this run cannot join it ({error}). "
                    "If it asks for a token: export RAY_AUTH_MODE=token, with its token in ~/.ray/auth_token or "
                    "RAY_AUTH_TOKEN"
                ) from error
        else:
            try:
                with sigterm_left_alone(), processes_apart(), on_loopback(), nothing_unused():
                    ray.init(
                        address="local",
                        _temp_dir=str(_own_folder()),
                        include_dashboard=False,
                        **common,
                    )
            except OSError as error:
                raise ValueError(
                    f"Ray cannot start here ({error}). Its logs and sockets go to ray-UID in RAY_TMPDIR (/tmp). "
                    "Set RAY_TMPDIR to a folder that you may write to, on a disk with room, whose path has at most 27 "
                    "characters"
                ) from error
        self._watch = HeadWatch(
            self.nodes,  # [], so False, if the head did not answer in time
            timeout=settings.heartbeat_timeout,
            patience=self._patience,
            say=self._say,
            again=AGAIN if settings.address is None else f"start a cluster again, and {AGAIN}",
        )
        nodes = len(self.nodes())
        return f"Ray {ray.__version__}, {nodes} node{'s' * (nodes > 1)}: {shown(self.resources())}"

    def resources(self) -> Resources:
        """Return all resources of the cluster, used or not."""
        found: Resources = _state().cluster_resources()
        return found

    def nodes(self) -> list[Resources]:
        """Return all resources of each living node, used or not."""
        return [node["Resources"] for node in _state().nodes() if node["Alive"]]

    def leaving(self) -> set[str]:
        """Return ids of nodes that are about to end, such as an autoscaler takes back; none if this Ray cannot tell."""
        return draining()

    def nodes_for(self, bundles: Sequence[Resources], *, what: str) -> AbstractAsyncContextManager[None]:
        """Within, the nodes can hold the bundles (`ray_node.nodes_for`); an autoscaler has runtime.nodes_timeout."""
        check = partial(self._check, bundles, what)
        return nodes_for(bundles, check, timeout=self.settings.nodes_timeout, say=self._say)

    def _check(self, bundles: Sequence[Resources], what: str) -> None:
        check_room(self.nodes(), bundles, what=what)

    def reserve(self, bundles: Sequence[Resources]) -> Any:
        """Return a placement group, on one node if the bundles fit; a bundle always is on one. Ray's autoscaler sees
        the request; after the loss of a node, Ray looks for room on others."""
        group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
        self._groups.append(group)
        return group

    def give_back(self, group: Any) -> None:
        """Free a reservation; Ray ends the processes in it."""
        self._groups.remove(group)
        remove_placement_group(group)
        self._freed.set()
        self._freed = asyncio.Event()

    async def placed(self, group: Any, *, within: float | None) -> bool:
        """Wait until all bundles of a group are placed, at most `within` seconds. Return False if they are not, or if
        the group was given back. Ray is asked when this run frees resources, else less and less often."""
        loop = asyncio.get_running_loop()
        until = math.inf if within is None else loop.time() + within
        pause = 0.05
        while (state := placement_group_table(group)["state"]) != "CREATED":
            if state == "REMOVED" or loop.time() >= until:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause, until - loop.time())):
                    await self._freed.wait()
            pause = min(1.5 * pause, LONGEST_PAUSE)
        return True

    def no_room(self, bundles: Sequence[Resources], *, what: str) -> ResourcesError:
        """Return the error for a placement group that was not placed in time."""
        return ResourcesError(
            f"{what}: {shown(added(bundles))} did not become free within {self.settings.start_timeout:g} s "
            f"(runtime.start_timeout); now {shown(_state().available_resources())} is free. Free resources, ask for "
            "fewer, or wait longer"
        )

    async def spawn(
        self,
        make: Callable[..., Kind],
        *arguments: Any,
        name: str,
        group: Any,
        place: int,
        threads: int,
        sharers: int = 1,
        parts: int = 1,
        say: Callable[[str], None] = lambda text: None,
    ) -> RayWorker[Kind]:
        """Start a process with `make(*arguments)` inside, in bundle `place` of a reserved group, of whose `parts` equal
        parts `sharers` processes share one. Raises the error of `make`, WorkerLost, or NodeLost if its node is lost."""
        bundle, node = group.bundle_specs[place], placement_group_table(group)["bundles_to_node_id"].get(place)
        variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        # Threads that wait by spinning, as torch's do for a while, take cores from others unless these are their own.
        if sharers > 1 or threads > part_of(bundle, "CPU", parts):
            variables["OMP_WAIT_POLICY"] = "PASSIVE"
        # The user's setting applies there too: last bits depend on whether there are kernels.
        variables |= {
            name: os.environ[name]
            for name in ("OMP_WAIT_POLICY", "PLAUDIT_KERNELS", "PLAUDIT_CUDA_GRAPHS", "PLAUDIT_TORCH_COMPILE")
            if name in os.environ
        }
        options = {
            "num_cpus": part_of(bundle, "CPU", sharers * parts),
            "num_gpus": part_of(bundle, "GPU", sharers * parts),
            "runtime_env": {"env_vars": variables},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
        }
        try:
            return await self._host(name, options, say, make, *arguments)
        except WorkerLost as lost:
            if node in self._alive():
                raise
            raise NodeLost(name, lost.reason) from lost

    async def beside(self, make: Callable[[], Kind], *, name: str, node: str | None = None) -> RayWorker[Kind]:
        """Start a process without a reservation on `node`, by default on this process's node."""
        there = NodeAffinitySchedulingStrategy(node or ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}, "scheduling_strategy": there}
        return await self._host(name, options, self._say, make)

    async def _host(
        self, name: str, options: dict[str, Any], say: Callable[[str], None], make: Callable[..., Kind], *arguments: Any
    ) -> RayWorker[Kind]:
        options = {"max_concurrency": 1000, "max_restarts": 0, "max_task_retries": 0} | options
        hosting: Any = ray.remote(concurrency_groups={HEART: 8})(Host)  # type: ignore[call-overload]
        actor = hosting.options(**options).remote(str(Path.cwd()), make, *arguments)
        worker = RayWorker[Kind](name, actor, self.settings, say=say)
        self._workers.append(worker)
        try:
            await worker.start(self.settings.start_timeout)
        except exceptions.RayTaskError as error:
            worker.kill()
            raise error.cause from error
        self._hearts.add(worker)
        return worker

    def lasting(self) -> list[str]:
        """Return the sorted ids of living nodes that are not about to end."""
        return sorted(self._alive() - self.leaving())

    def _alive(self) -> set[str]:
        return {node["NodeID"] for node in _state().nodes() if node["Alive"]}

    @property
    def workers(self) -> list[RayWorker[Any]]:
        """Living workers in the order of their names."""
        return sorted((worker for worker in self._workers if worker.alive), key=lambda worker: worker.name)

    def end(self, *, name: str) -> None:
        """End the workers whose names begin with this; their reservations stay."""
        ended = [worker for worker in self._workers if worker.name.startswith(name)]
        for worker in ended:
            worker.kill()
        self._workers = [worker for worker in self._workers if worker not in ended]

    def end_workers(self) -> None:
        """End every worker and free all reservations."""
        for worker in self._workers:
            worker.kill()
        for group in self._groups:
            with contextlib.suppress(Exception):
                remove_placement_group(group)
        self._hearts.close()
        self._workers, self._groups, self._hearts = [], [], Hearts()

    def close(self) -> None:
        """End every worker, and the cluster if it is ours."""
        with parting(self._patience, self._say):
            self.end_workers()
            if self._watch is not None:
                self._watch.close()
            if self._begun:
                ray.shutdown()


def _state() -> Any:
    """Ray's functions about the cluster, which have no types."""
    return ray


def _own_folder() -> Path:
    """Return the folder for logs and sockets of our own cluster; make the one around it, closed to other users. Raises
    PermissionError if another user owns that one, or it is a link."""
    place = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    folder = Path(place, f"ray-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise PermissionError(f"{folder} is another user's")
    folder.chmod(0o700)
    return folder / "ray"  # Ray would open it to all users


def _environment(*, here: bool) -> dict[str, Any]:
    """Return Ray's runtime_env for workers: they import the same package, also from a source tree. `here`: all are on
    this machine, so gloo and NCCL use its loopback interface."""
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(dict.fromkeys([source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
    variables = {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    if here and (loopback := interface_of("127.0.0.1")) is not None:
        variables |= {name: os.environ.get(name, loopback) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    # Ray raises an error if `ray job submit` and this function both set a variable, unless RAY_OVERRIDE_JOB_RUNTIME_ENV
    # is 1. Then only the variables returned here count, so they include the job's own.
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("runtime_env") or {}
    os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    return {"env_vars": {**variables, **job.get("env_vars", {}), "PYTHONPATH": path}}
