"""Where a run's processes are and how they share the work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from plaudit.support.fields import Section, leaves, nearest, setting

STAGES = {"replicate": 0, "zero1": 1, "zero2": 2, "fsdp": 3}
"""How a training step is spread over ranks, and the stage of ZeRO that it is."""
OFFLOADS = ("reference", "optimizer", "weights")
"""What may wait in host memory."""
WEIGHTS = ("store", "collective")
"""How new weights reach rollout workers."""
BACKENDS = ("auto", "gloo", "nccl")
"""Libraries for collectives of training ranks and of weights."""
ROLLOUT_TENSOR = "rollout_tensor"
AXES, LATER = ("data", "tensor", "pipeline", "spans", "replicas", ROLLOUT_TENSOR), ("context",)
"""Axes of a mesh, and those that only `plaudit layout` computes so far."""
OF_RANKS = ("num_training_workers", "mesh", "strategy")
"""What only ray follows, and weights depend on."""
OF_RAY = (
    *OF_RANKS,
    "address",
    "resources_per_worker",
    "resources_per_rollout_worker",
    "weights",
    "backend",
    "object_store_mb",
    "start_timeout",
    "collective_timeout",
    "heartbeat_timeout",
    "max_failures_per_hour",
)
"""Settings that only runtime=ray reads."""
NO_SHARDS = (
    "runtime.backend=gloo cannot shard models over GPUs (runtime.strategy=fsdp): gloo gathers and scatters in the "
    "CPU's memory only. Take nccl, or runtime.strategy=replicate"
)
NO_STAGES = (
    "runtime.mesh.pipeline sends hidden states by gloo only: NCCL's sends and receives of two ranks wait for each "
    "other. Set runtime.backend=gloo"
)
SHARED = (
    "runtime.backend=nccl cannot send weights to rollout workers that share a rank's GPU (rollout.share_devices): "
    "set runtime.weights=store, or runtime.backend=gloo"
)


@dataclass
class RuntimeSettings(Section):
    """Where the processes of a run are. `runtime=ray` is short for `runtime.kind=ray`."""

    kind: str = setting("local", choices=("local", "ray"))
    """local: everything in this process; ray: training ranks and rollout workers in separate processes."""
    address: str | None = None
    """ray: a running cluster (host:port, or auto); null starts one on this machine for the length of the run."""
    num_training_workers: int = setting(1, least=1)
    """ray: data-parallel training workers, each of which is as many ranks as `runtime.mesh` has."""
    mesh: dict[str, int] = setting(dict, least=1)
    """ray: ranks by axis, such as {tensor: 2} for ranks that share each matrix (docs/sharding.md); data multiplies
    runtime.num_training_workers, and replicas multiplies both: copies of what these hold in shards. pipeline is the
    number of stages of layers, with spans of layers on each (1). rollout_tensor is the number of processes that share
    each matrix of a rollout worker."""
    resources_per_worker: dict[str, float] = setting(dict, least=0)
    """ray: what a training rank reserves, such as {CPU: 4, GPU: 1}; empty takes an equal share."""
    resources_per_rollout_worker: dict[str, float] = setting(dict, least=0)
    """ray: likewise for each process of a rollout worker."""
    strategy: str = setting("replicate", choices=tuple(STAGES))
    """ray: replicate keeps the whole model on every training rank; fsdp shards weights, gradients and moments (ZeRO 3).
    zero2 gathers weights once a step, zero1 sums gradients once a step too: more memory, less traffic."""
    offload: list[str] = setting(list, choices=OFFLOADS)
    """On GPUs, what waits in host memory: the reference, which is on the device while it computes a step's log-probs;
    the optimizer's moments and masters, whose step is computed there; weights, with the gradients and moments of their
    shards (fsdp)."""
    weights: str = setting("store", choices=WEIGHTS)
    """ray: how new weights reach rollout workers: through the object store or by a collective."""
    backend: str = setting("auto", choices=BACKENDS)
    """ray: library for collectives of ranks and of weights; auto: NCCL between GPUs, gloo between CPUs."""
    object_store_mb: int = setting(512, least=80, unit="MB")
    """ray: memory for objects that processes exchange, on a cluster that the run starts."""
    start_timeout: float = setting(300.0, above=0, infinite=True, unit="seconds")
    """Longest time that placing a worker may take, and that its start may take."""
    collective_timeout: float = setting(120.0, above=0, unit="seconds")
    """Longest time that training ranks wait for each other, and rollout workers for weights by a collective."""
    heartbeat_timeout: float = setting(10.0, above=0, unit="seconds")
    """A worker that gives no sign for this long counts as lost. It is asked four times in this time."""
    max_failures_per_hour: int = setting(3, least=-1)
    """Lost workers that are replaced within any hour. One more ends the run with the reasons; -1 sets no limit."""

    @property
    def sharded(self) -> bool:
        """True if ranks hold parts of models."""
        return self.stage > 0

    @property
    def stage(self) -> int:
        """What is in shards (ZeRO): 1 moments; 2 gradients too; 3 weights too; 0 nothing."""
        return STAGES.get(self.strategy, 0)

    @property
    def offloaded(self) -> bool:
        """True if these parts stay in the CPU's memory."""
        return "weights" in self.offload

    @property
    def width(self) -> int:
        """Ranks that hold parts of the same matrices."""
        return self.mesh.get("tensor", 1)

    @property
    def pipeline(self) -> int:
        """Stages of layers."""
        return self.mesh.get("pipeline", 1)

    @property
    def cuts(self) -> dict[str, int]:
        """What cuts the ranks' models, as axes of `models.mesh.Mesh`."""
        return {"tensor": self.width, "pipeline": self.pipeline, "spans": self.mesh.get("spans", 1)}

    @property
    def rollout_width(self) -> int:
        """Processes that hold parts of one rollout worker's model."""
        return self.mesh.get(ROLLOUT_TENSOR, 1)

    @property
    def replicas(self) -> int:
        """Copies of everything that is sharded."""
        return self.mesh.get("replicas", 1)

    @property
    def workers(self) -> int:
        """Data-parallel workers: what batches are split over."""
        return self.num_training_workers * self.mesh.get("data", 1) * self.replicas

    @property
    def ranks(self) -> int:
        return self.workers * self.width * self.pipeline

    def contradictions(self) -> Iterator[str]:
        for axis, size in self.mesh.items():
            if axis in LATER and size > 1:
                yield f"mesh has {axis}={size}, an axis that does not exist yet: take {', '.join(AXES)}"
            elif axis not in (*AXES, *LATER):
                yield f"mesh has no axis {axis!r}{nearest(axis, AXES)}"
        if self.pipeline > 1 and self.sharded:
            yield (
                f"mesh has pipeline={self.pipeline}, whose stages hold whole layers, and strategy={self.strategy} has "
                "them in shards: set strategy=replicate, and more stages or tensor for less memory"
            )
        if (spans := self.cuts["spans"]) > 1 and self.pipeline == 1:
            yield f"mesh has spans={spans}, those of layers on a stage of a pipeline: set pipeline=2, or leave it out"
        if self.offloaded and self.stage < 3:
            yield f"offload={self.offload} takes shards of weights: set strategy=fsdp, or take optimizer"
        if self.replicas > 1 and (not self.sharded or self.workers == self.replicas):
            yield (
                f"mesh has replicas={self.replicas}, copies of what ranks share, and none share anything: set "
                "strategy=fsdp and a number of ranks by num_training_workers or data"
            )
        for key, given in self._reserved().items():
            if "CPU" in given and not any(given.values()):
                yield f"{key}={given} reserves nothing: give a part of a CPU, such as 0.1"
        if self.kind == "ray" and self.address is not None:
            where = f"has no effect on the cluster at runtime.address={self.address}, which runs already: leave it out"
            yield from (f"{told} {where}" for told in self._changed(("object_store_mb",)))

    def unread(self, *, replays: bool) -> list[str]:
        """Return settings that have no effect in a local run. A replay may keep those of the recorded run's ranks."""
        keys = () if self.kind == "ray" else OF_RANKS if replays else OF_RAY
        return [f"{told} needs runtime=ray" for told in self._changed(keys)]

    def about_backend(self, *, device: str, samples: bool, shared: bool) -> list[str]:
        """Return what the backend cannot do on the run's devices, as far as settings show; ranks check the rest.
        `samples`: there are rollout workers; `shared`: on the ranks' devices."""
        gpus = device.startswith("cuda") or (device == "auto" and self.resources_per_worker.get("GPU", 0.0) > 0)
        if self.pipeline > 1 and (self.backend == "nccl" or (self.backend == "auto" and gpus)):
            return [NO_STAGES]
        if self.backend == "gloo" and self.sharded and gpus:
            return [NO_SHARDS]
        if self.backend != "nccl" or self.kind == "local":
            return []
        if device == "cpu":
            return ["runtime.backend=nccl needs GPUs, and device=cpu keeps to CPUs: take gloo, or another device"]
        sent = samples and self.weights == "collective"
        if sent and shared:
            return [SHARED]
        asked = self._reserved() if sent else {"resources_per_worker": self.resources_per_worker}
        lacking = [key for key, given in asked.items() if given.get("GPU", 0.0) < 1]
        return [f"runtime.backend=nccl needs a GPU for each process: set runtime.{key}={{GPU: 1}}" for key in lacking]

    def _changed(self, keys: Iterable[str]) -> list[str]:
        """Return those of the keys that differ from their defaults, as key=value."""
        pairs = zip(leaves(self), leaves(RuntimeSettings), strict=True)
        changed = {given.key: given.value for given, default in pairs if given.value != default.value}
        return [f"{key}={changed[key]}" for key in keys if key in changed]

    def _reserved(self) -> dict[str, dict[str, float]]:
        return {
            "resources_per_worker": self.resources_per_worker,
            "resources_per_rollout_worker": self.resources_per_rollout_worker,
        }
