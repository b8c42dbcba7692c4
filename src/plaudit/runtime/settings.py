"""Where a run's processes are and how they share the work: the file that `--dist_config` names.

    distributed.yaml -> DistributedSettings -> check -> settings of the run (`run_settings`)

`RuntimeSettings` is the `runtime` section of a recipe. The file says the same for all stages of a pipeline, in words of
its own; what the chosen runtime cannot do is refused by name, so that no key is read without an effect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

STRATEGIES = ("replicate", "fsdp")
"""How a training step is spread over ranks."""
WEIGHTS = ("store", "collective")
"""How new weights get to rollout workers."""
BACKENDS = ("auto", "gloo", "nccl")
"""What carries collectives: those of training ranks, and weights that travel by one."""
OF_RANKS = ("num_training_workers", "strategy")
"""What only ray follows, and weights depend on."""
OF_RAY = (
    *OF_RANKS,
    "address",
    "resources_per_worker",
    "resources_per_rollout_worker",
    "weights",
    "backend",
    "object_store_mb",
    "dashboard",
    "start_timeout",
    "collective_timeout",
    "heartbeat_timeout",
    "call_timeout",
    "max_failures",
)
"""What only ray follows."""
DASHBOARD = (
    *("aiohttp", "aiohttp_cors", "grpc", "opencensus", "opentelemetry.exporter.prometheus", "opentelemetry.proto"),
    *("prometheus_client", "pydantic"),
)
"""What Ray's page needs (its ray/dashboard/optional_deps.py), and Ray itself does without."""

NO_SHARDS = (
    "runtime.backend=gloo cannot shard models over GPUs (runtime.strategy=fsdp): gloo gathers and scatters in the "
    "CPU's memory alone. Take nccl, or runtime.strategy=replicate"
)

SHARED = (
    "runtime.backend=nccl cannot send weights to rollout workers that share a rank's GPU (rollout.share_devices): "
    "set runtime.weights=store, or runtime.backend=gloo"
)


@dataclass
class RuntimeSettings:
    """Where the processes of a run are. `runtime=ray` is short for `runtime.kind=ray`."""

    kind: str = "local"
    """local: everything in this process; ray: training ranks and rollout workers in processes of their own."""
    address: str | None = None
    """ray: a running cluster (host:port, or auto); null starts one on this machine for the length of the run."""
    num_training_workers: int = 1
    """ray: data-parallel training ranks."""
    resources_per_worker: dict[str, float] = field(default_factory=dict)
    """ray: what a training rank reserves, such as {CPU: 4, GPU: 1}; empty takes an equal share."""
    resources_per_rollout_worker: dict[str, float] = field(default_factory=dict)
    """ray: likewise for a rollout worker."""
    strategy: str = "replicate"
    """ray: replicate keeps the whole model on every training rank, fsdp shards weights, gradients and moments."""
    cpu_offload: bool = False
    """fsdp on GPUs: shards of weights, gradients and moments stay in the CPU's memory."""
    weights: str = "store"
    """ray: how new weights get to rollout workers, by the object store or by a collective."""
    backend: str = "auto"
    """ray: what carries collectives, of ranks and of weights; auto: NCCL between GPUs, gloo between CPUs."""
    object_store_mb: int = 512
    """ray: memory for what processes hand each other, where we start the cluster."""
    dashboard: bool = False
    """ray: Ray's own page, where we start the cluster; takes a RAY_AUTH_TOKEN that you know, and ray[default]."""
    start_timeout: float = 300.0
    """Seconds that workers may take to be placed and to be ready."""
    collective_timeout: float = 120.0
    """Seconds that training ranks wait for each other, and rollout workers for weights, before one counts as stuck."""
    heartbeat_timeout: float = 10.0
    """A worker that gives no sign for this many seconds counts as lost; it is asked four times as often."""
    call_timeout: float = 3600.0
    """Seconds that one call to a worker may take (a prompt's answers, an update's gradients, a save); one that does not
    end in time is stuck, and counts as lost."""
    max_failures: int = 3
    """Lost workers that are replaced before the run ends with the reason; -1 never gives up."""

    def problems(self, *, replays: bool = False) -> list[str]:
        """What is no value, or has no effect. A run that replays another may say how that one's processes were held."""
        found = []
        if self.kind not in ("local", "ray"):
            found.append(f"runtime.kind={self.kind} is not one of local, ray")
        if self.strategy not in STRATEGIES:
            found.append(f"runtime.strategy={self.strategy} is not one of {', '.join(STRATEGIES)}")
        if self.weights not in WEIGHTS:
            found.append(f"runtime.weights={self.weights} is not one of {', '.join(WEIGHTS)}")
        if self.backend not in BACKENDS:
            found.append(f"runtime.backend={self.backend} is not one of {', '.join(BACKENDS)}")
        if self.cpu_offload and self.strategy != "fsdp":
            found.append(f"runtime.cpu_offload=true needs runtime.strategy=fsdp, not {self.strategy}")
        if self.num_training_workers < 1:
            found.append(f"runtime.num_training_workers={self.num_training_workers} must be 1 or more")
        if self.max_failures < -1:
            found.append(f"runtime.max_failures={self.max_failures} must be 0 or more, or -1 for no limit")
        for key in ("start_timeout", "collective_timeout", "heartbeat_timeout", "call_timeout"):
            if not getattr(self, key) > 0:
                found.append(f"runtime.{key}={getattr(self, key)} must be above 0 seconds")
        for key in ("collective_timeout", "heartbeat_timeout"):
            if math.isinf(getattr(self, key)):
                found.append(f"runtime.{key}=inf must be a number of seconds: without an end, nobody would be missed")
        for key in ("resources_per_worker", "resources_per_rollout_worker"):
            bad = {name: amount for name, amount in getattr(self, key).items() if not amount >= 0}
            found += [f"runtime.{key}.{name}={amount} must be 0 or more" for name, amount in bad.items()]
            if "CPU" in getattr(self, key) and not any(getattr(self, key).values()):
                found.append(f"runtime.{key}={getattr(self, key)} reserves nothing: give a part of a CPU, such as 0.1")
        if self.object_store_mb < 80:
            found.append(f"runtime.object_store_mb={self.object_store_mb} is below Ray's least, 80")
        if self.kind == "local":
            found += [f"runtime.{key} needs runtime=ray" for key in self._changed(OF_RANKS if replays else OF_RAY)]
        elif self.address is not None:
            where = f"has no effect on the cluster at runtime.address={self.address}, which runs already: leave it out"
            found += [f"runtime.{key} {where}" for key in self._changed(("object_store_mb", "dashboard"))]
        return found

    def about_backend(self, *, device: str, samples: bool, shared: bool) -> list[str]:
        """What the backend cannot do where the run computes, as far as settings tell: a rank finds out the rest.
        `samples`: there are rollout workers; `shared`: on the ranks' devices."""
        gpus = device.startswith("cuda") or (device == "auto" and self.resources_per_worker.get("GPU", 0.0) > 0)
        if self.backend == "gloo" and self.strategy == "fsdp" and gpus:
            return [NO_SHARDS]
        if self.backend != "nccl" or self.kind == "local":
            return []
        if device == "cpu":
            return ["runtime.backend=nccl needs GPUs, and device=cpu keeps to CPUs: take gloo, or another device"]
        sent = samples and self.weights == "collective"
        if sent and shared:
            return [SHARED]
        keys = ["resources_per_worker"] + ["resources_per_rollout_worker"] * sent
        lacking = [key for key in keys if getattr(self, key).get("GPU", 0.0) < 1]
        return [f"runtime.backend=nccl needs a GPU for each process: set runtime.{key}={{GPU: 1}}" for key in lacking]

    def _changed(self, keys: Sequence[str]) -> list[str]:
        """Those that are not as they are by default, with their values."""
        plain = RuntimeSettings()
        return [f"{key}={getattr(self, key)}" for key in keys if getattr(self, key) != getattr(plain, key)]


@dataclass
class ClusterSettings:
    """Where processes run, and what each may use."""

    runtime: str | None = None
    """local: this process; ray: processes of their own; null: as the recipe says."""
    address: str | None = None
    """ray: a running cluster; null starts one on this machine."""
    num_workers: int | None = None
    """Training processes; null leaves the recipe's."""
    num_rollout_workers: int | None = None
    """Processes that sample, in the stages that do; null leaves the recipe's."""
    max_rollout_workers: int | None = None
    """ray: as many of them at most, while nodes have room; null leaves the recipe's."""
    cpus_per_worker: int | None = None
    """CPU threads of a process; null leaves the recipe's."""
    gpus_per_worker: int | None = None
    """0 keeps to the CPU, 1 takes a GPU for each process; null leaves the recipe's device."""


@dataclass
class StrategySettings:
    """How a training step is spread."""

    name: str | None = None
    """replicate: every rank holds the whole model, gradients are summed; ray: fsdp shards it over the ranks; null
    leaves the recipe's."""
    micro_tokens: int | None = None
    """Tokens in one forward and backward pass; null leaves the recipe's. Changes memory and speed, not the gradient."""


@dataclass
class FaultToleranceSettings:
    """What is kept against a loss, and what happens after one."""

    checkpoint_interval: int | None = None
    """Training steps between checkpoints; null leaves the recipe's."""
    resume: bool = False
    """Go on from the newest whole checkpoint where there is one, start afresh where there is none."""
    max_failures: int | None = None
    """ray: lost processes that are replaced before the run ends; null leaves the recipe's."""
    timeout: float | None = None
    """ray: seconds without a sign after which a process counts as lost; null leaves the recipe's."""


@dataclass
class CommunicationSettings:
    """How processes talk to each other."""

    backend: str = "auto"
    """ray: what carries collectives, gloo or nccl; auto: NCCL between GPUs, gloo between CPUs."""
    weights: str | None = None
    """ray: how new weights get to rollout workers, store or collective; null leaves the recipe's."""
    timeout: float | None = None
    """ray: seconds that a collective may take; null leaves the recipe's."""


@dataclass
class DistributedSettings:
    """The whole file."""

    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    strategy: StrategySettings = field(default_factory=StrategySettings)
    fault_tolerance: FaultToleranceSettings = field(default_factory=FaultToleranceSettings)
    communication: CommunicationSettings = field(default_factory=CommunicationSettings)

    def check(self) -> None:
        """Raise ValueError with everything that this runtime cannot do, or that is no value at all."""
        problems = [*self._not_there(), *self._out_of_range()]
        if problems:
            lines = "\n".join(f"  - {problem}" for problem in problems)
            raise ValueError(f"the distributed settings cannot be followed:\n{lines}")

    def _not_there(self) -> list[str]:
        """Values that need the other runtime, or that there are not."""
        problems = []
        for key, value, allowed in (
            ("cluster.runtime", self.cluster.runtime, (None, "local", "ray")),
            ("strategy.name", self.strategy.name, (None, *STRATEGIES)),
            ("communication.backend", self.communication.backend, BACKENDS),
            ("communication.weights", self.communication.weights, (None, *WEIGHTS)),
        ):
            if value not in allowed:
                problems.append(f"{key}={value} is not one of {', '.join(filter(None, allowed))}")
        if self.cluster.runtime != "ray":
            of_ray = {
                ("cluster.address", self.cluster.address): None,
                ("cluster.num_workers", self.cluster.num_workers): 1,
                ("cluster.num_rollout_workers", self.cluster.num_rollout_workers): 1,
                ("cluster.max_rollout_workers", self.cluster.max_rollout_workers): None,
                ("strategy.name", self.strategy.name): "replicate",
                ("fault_tolerance.max_failures", self.fault_tolerance.max_failures): None,
                ("fault_tolerance.timeout", self.fault_tolerance.timeout): None,
                ("communication.backend", self.communication.backend): "auto",
                ("communication.weights", self.communication.weights): None,
                ("communication.timeout", self.communication.timeout): None,
            }
            problems += [
                f"{key}={value} needs cluster.runtime=ray"
                for (key, value), no in of_ray.items()
                if value not in (None, no)
            ]
        elif self.communication.backend == "nccl" and self.cluster.gpus_per_worker != 1:
            given = "null" if (count := self.cluster.gpus_per_worker) is None else count
            problems.append(f"communication.backend=nccl needs cluster.gpus_per_worker=1, not {given}")
        return problems

    def _out_of_range(self) -> list[str]:
        least_one = {
            "cluster.num_workers": self.cluster.num_workers,
            "cluster.num_rollout_workers": self.cluster.num_rollout_workers,
            "cluster.cpus_per_worker": self.cluster.cpus_per_worker,
            "strategy.micro_tokens": self.strategy.micro_tokens,
            "fault_tolerance.checkpoint_interval": self.fault_tolerance.checkpoint_interval,
        }
        problems = [f"{key}={n} must be at least 1, or null" for key, n in least_one.items() if n is not None and n < 1]
        least, most = self.cluster.num_rollout_workers, self.cluster.max_rollout_workers
        if least is not None and most is not None and most < least:
            problems.append(f"cluster.max_rollout_workers={most} is below cluster.num_rollout_workers={least}")
        if self.cluster.gpus_per_worker not in (None, 0, 1):
            problems.append(f"cluster.gpus_per_worker={self.cluster.gpus_per_worker} must be 0, 1 or null")
        return problems

    def run_settings(self) -> dict[str, Any]:
        """What the file sets of a run, as a nested mapping of the run's own keys. Call `check` before."""
        devices = {None: None, 0: "cpu", 1: "cuda"}
        given = {
            "threads": self.cluster.cpus_per_worker,
            "device": devices[self.cluster.gpus_per_worker],
            "learn": _without_none({"micro_tokens": self.strategy.micro_tokens}),
            "save": _without_none({"steps": self.fault_tolerance.checkpoint_interval}),
            "resume": "latest" if self.fault_tolerance.resume else None,
        }
        if self.cluster.runtime == "ray":
            count, most = self.cluster.num_rollout_workers, self.cluster.max_rollout_workers
            given |= {"rollout": _without_none({"workers": count, "workers_max": most}), "runtime": self._runtime()}
        elif self.cluster.runtime == "local":
            given |= {"runtime": {"kind": "local"}}
        return {key: value for key, value in _without_none(given).items() if value != {}}

    def _runtime(self) -> dict[str, Any]:
        reserved = {"CPU": self.cluster.cpus_per_worker, "GPU": self.cluster.gpus_per_worker}
        return {
            "kind": "ray",
            "resources_per_worker": _without_none(reserved),
            "resources_per_rollout_worker": _without_none(reserved),
            **_without_none(
                {
                    "address": self.cluster.address,
                    "num_training_workers": self.cluster.num_workers,
                    "strategy": self.strategy.name,
                    "max_failures": self.fault_tolerance.max_failures,
                    "heartbeat_timeout": self.fault_tolerance.timeout,
                    "backend": None if self.communication.backend == "auto" else self.communication.backend,
                    "weights": self.communication.weights,
                    "collective_timeout": self.communication.timeout,
                }
            ),
        }


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
