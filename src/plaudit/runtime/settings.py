"""Where a run's processes are and how they share the work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from plaudit.support.fields import Section, complaints, leaves, nearest, setting, shown

STAGES = {"replicate": 0, "zero1": 1, "zero2": 2, "fsdp": 3}
"""{runtime.strategy: its ZeRO stage}."""
SERVER = "server"
"""The strategy in which parameter servers hold the optimizer."""
PUSHES = ("float32", "bfloat16", "int8")
OFFLOADS = ("reference", "optimizer", "weights")
"""Values that runtime.offload may list."""
WEIGHTS = ("store", "collective")
"""Values of runtime.weights: the object store, or a collective."""
BACKENDS = ("auto", "gloo", "nccl")
"""Values of runtime.backend: libraries for collectives."""
ROLLOUT_TENSOR, MIRRORS = "rollout_tensor", "mirrors"
AXES = ("data", "context", "tensor", "pipeline", "spans", "replicas", ROLLOUT_TENSOR, MIRRORS)
"""Keys that runtime.mesh may have."""
PARTS = ("context", "tensor", "pipeline", "replicas")
"""Axes of which an island (a worker of parameter servers) cannot have several ranks."""
OF_RANKS = ("num_training_workers", "mesh", "strategy", "servers")
"""Settings that only runtime=ray reads and on which the trained weights depend."""
TIMEOUTS = ("start_timeout", "nodes_timeout", "collective_timeout", "heartbeat_timeout")
OF_RAY = (
    *(*OF_RANKS, *TIMEOUTS, "address", "resources_per_worker", "resources_per_rollout_worker", "weights", "backend"),
    "max_failures_per_hour",
)
"""Settings that only runtime=ray reads."""
NO_RAY = "runtime=ray needs Ray, which is not installed: pip install -e '.[ray]' in Plaudit's folder"
NO_SHARDS = (
    "runtime.backend=gloo cannot shard models over GPUs (runtime.strategy=fsdp): gloo gathers and scatters in the "
    "CPU's memory only. Take nccl, or runtime.strategy=replicate"
)
SHARED = (
    "runtime.backend=nccl cannot send weights to rollout workers that share a rank's GPU (runtime.placement): "
    "set runtime.weights=store, or runtime.backend=gloo"
)
GENERATE, TRAIN = "generate", "train"
MODELS = ("reference", "critic")
"""Calls that can have ranks of their own."""
CALLS = (GENERATE, *MODELS)
ELSEWHERE = {TRAIN: "runtime.num_training_workers and runtime.mesh", "judge": "rewards.N.workers"}
"""Settings that say where other calls are."""
PLANNED = ("auto", "symmetric", "heuristic")
"""Placements that the command line chooses, by a profile of the machine."""
OF_MESH, OWN = ("data", "context", "tensor", "pipeline", "spans", "replicas"), ("workers", "mesh", "resources")
FORMS = {GENERATE: f"{{inside: {TRAIN}}} or {{shares: {TRAIN}}}"}
FORMS |= dict.fromkeys(MODELS, "such as {workers: 2, mesh: {tensor: 2}, resources: {CPU: 1}}, or {inside: CALL}")


@dataclass(frozen=True)
class Where:
    """Where one call (such as generate or reference) is computed: in another call's processes (`inside`); in its own
    processes, on another call's devices in turn with it (`shares`); or on devices of its own."""

    workers: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    inside: str = ""
    shares: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{name}: {value}" for name, value in vars(self).items() if value)


@dataclass(frozen=True)
class Servers:
    """What `runtime.servers` may hold."""

    count: int = setting(1, least=1)
    """Server processes; each holds a part of the parameters and of the optimizer's state."""
    local_steps: int = setting(1, least=1)
    """Optimizer steps that a worker makes by itself before it pushes the sum of its changes (DiLoCo)."""
    push: str = setting("float32", choices=PUSHES)
    """Number format of what workers and servers send each other."""
    quorum: int = setting(0, least=0)
    """A step ends once this many workers have finished their part of it (or are free); 0: all of them."""
    grace: float = setting(0.0, least=0, unit="seconds")
    """Seconds for which a step still waits for other workers once the quorum is reached."""
    max_stale: int = setting(4, least=0)
    """Number of steps (with local_steps: rounds) by which a worker may be late; then steps wait for it."""
    rate: float = setting(0.7, above=0)
    """Learning rate of the servers' Nesterov step on the workers' mean change, with local_steps (DiLoCo)."""
    momentum: float = setting(0.9, least=0, below=1)
    """Momentum of the servers' Nesterov step, with local_steps."""


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
    """ray: ranks by axis (docs/sharding.md): {tensor: 2} splits each matrix over two ranks, {context: 2} the tokens of
    each pass, {pipeline: 2} the layers into stages (spans: groups of layers on each stage, by default 1). data
    multiplies runtime.num_training_workers; replicas multiplies both: each is a copy of what these hold in shards.
    rollout_tensor: processes that split a rollout worker's matrices. mirrors: copies of each rank's state (0)."""
    placement: Any = setting(dict)
    """Where calls are computed (docs/placement.md). {reference: {workers: 2, mesh: {tensor: 2}}} gives a reference, or
    critic, ranks of its own; {critic: {inside: reference}} puts it there too. {generate: {shares: train}} lets rollout
    workers and ranks take turns on the same devices; with {generate: {inside: train}}, ranks sample themselves. auto,
    symmetric and heuristic choose by a profile of the machine (docs/plan.md), also how many ranks and workers there
    are."""
    resources_per_worker: dict[str, float] = setting(dict, least=0)
    """ray: what a training rank reserves, such as {CPU: 4, GPU: 1}; empty takes an equal share."""
    resources_per_rollout_worker: dict[str, float] = setting(dict, least=0)
    """ray: what each process of a rollout worker reserves; empty takes an equal share."""
    strategy: str = setting("replicate", choices=(*STAGES, SERVER))
    """ray: replicate keeps the whole model on every training rank; fsdp shards weights, gradients and moments (ZeRO 3).
    zero2 gathers weights once a step, zero1 sums gradients once a step too: more memory, less traffic. server keeps the
    optimizer in processes of their own, and workers may come and go (docs/servers.md)."""
    servers: dict[str, Any] = setting(dict)
    """strategy=server: count, local_steps, push (float32, bfloat16, int8), quorum, grace, max_stale, rate, momentum."""
    offload: list[str] = setting(list, choices=OFFLOADS)
    """On GPUs, what waits in host memory: the reference, which is on the device while it computes a step's log-probs;
    the optimizer's moments and masters, whose step is computed there; weights, with the gradients and moments of their
    shards (fsdp)."""
    weights: str = setting("store", choices=WEIGHTS)
    """ray: how new weights reach rollout workers: through the object store or by a collective."""
    backend: str = setting("auto", choices=BACKENDS)
    """ray: library for collectives of ranks and of weights; auto: NCCL between GPUs, gloo between CPUs."""
    start_timeout: float = setting(300.0, above=0, infinite=True, unit="seconds")
    """Most time to find resources for a worker, and again for its start."""
    nodes_timeout: float = setting(0.0, least=0, unit="seconds")
    """ray: most time for an autoscaler to bring nodes (docs/distributed.md); 0 refuses what does not fit now."""
    collective_timeout: float = setting(120.0, above=0, unit="seconds")
    """Longest time that training ranks wait for each other, and rollout workers for weights by a collective."""
    heartbeat_timeout: float = setting(10.0, above=0, unit="seconds")
    """A worker without a heartbeat for this long counts as lost. It is asked four times in this time."""
    max_failures_per_hour: int = setting(3, least=-1)
    """Lost workers that are replaced within any hour. One more ends the run with the reasons; -1 sets no limit."""

    @property
    def sharded(self) -> bool:
        """True if ranks hold parts of models."""
        return self.stage > 0

    @property
    def stage(self) -> int:
        """The ZeRO stage, which says what is in shards: 1 moments; 2 gradients too; 3 weights too; 0 nothing."""
        return STAGES.get(self.strategy, 0)

    @property
    def offloaded(self) -> bool:
        """True if `offload` lists weights: they stay in the CPU's memory, with their gradients and moments."""
        return "weights" in self.offload

    @property
    def tensor(self) -> int:
        """Number of ranks that split each matrix (tensor parallel)."""
        return self.mesh.get("tensor", 1)

    @property
    def context(self) -> int:
        """Number of ranks that split the tokens of each pass (context parallel)."""
        return self.mesh.get("context", 1)

    @property
    def width(self) -> int:
        """Number of ranks that compute each row together: tensor times context, on one pipeline stage."""
        return self.context * self.tensor

    @property
    def pipeline(self) -> int:
        """Number of pipeline stages."""
        return self.mesh.get("pipeline", 1)

    @property
    def rollout_width(self) -> int:
        """Number of processes of a rollout worker, which split its model's matrices."""
        return self.mesh.get(ROLLOUT_TENSOR, 1)

    @property
    def replicas(self) -> int:
        """Number of copies of everything that is in shards."""
        return self.mesh.get("replicas", 1)

    @property
    def workers(self) -> int:
        """Number of data-parallel workers, over which batches are split."""
        return self.num_training_workers * self.mesh.get("data", 1) * self.replicas

    @property
    def axes(self) -> dict[str, int]:
        """Training ranks by axis, as `models.mesh.Mesh` names them; replicas count as data."""
        cuts = {axis: self.mesh.get(axis, 1) for axis in ("context", "tensor", "pipeline", "spans")}
        return {"data": self.workers} | cuts

    @property
    def ranks(self) -> int:
        return self.workers * self.width * self.pipeline

    @property
    def calls(self) -> dict[str, Where]:
        """{call: its place}, for calls that `placement` gives a place of their own."""
        return placed(self.placement)

    @property
    def shares(self) -> bool:
        """True if learner and engine take turns on the same devices: the learner's moments are in host memory while the
        engine works, and the engine frees its cache while the learner works. Needs max_lag=0."""
        return bool(self.calls.get(GENERATE, Where()).shares)

    @property
    def inside(self) -> bool:
        """True if training ranks sample too."""
        return self.calls.get(GENERATE, Where()).inside == TRAIN

    def host(self, call: str) -> str:
        """Return the call in whose processes `call` is computed: itself, another one, or `train`."""
        where = self.calls.get(call)
        return TRAIN if where is None else where.inside or call

    def trains(self, call: str) -> bool:
        """True if training ranks have the model of a call."""
        return self.host(call) == TRAIN

    @property
    def apart(self) -> dict[str, RuntimeSettings]:
        """{call: runtime settings of its own ranks}, for calls with ranks of their own."""
        own = {call: where for call, where in self.calls.items() if not (where.inside or where.shares)}
        common = replace(self, placement={})
        return {
            call: replace(
                common,
                num_training_workers=where.workers,
                mesh=dict(where.mesh),
                resources_per_worker=dict(where.resources) or self.resources_per_worker,
            )
            for call, where in own.items()
        }

    @property
    def served(self) -> Servers | None:
        """Settings of parameter servers, if there are any and nothing is wrong with them."""
        return Servers(**self.servers) if self.strategy == SERVER and not [*self._about_servers()] else None

    def contradictions(self) -> Iterator[str]:
        yield from (f"placement{why}" for why in faults(self.placement))
        for call, ranks in self.apart.items():
            yield from (f"placement.{call}.{why}" for why in ranks.contradictions() if why.startswith("mesh"))
        for axis in self.mesh:
            if axis not in AXES:
                yield f"mesh has no axis {axis!r}{nearest(axis, AXES)}"
        if self.pipeline > 1 and (self.inside or self.placement in PLANNED):
            yield (
                f"mesh has pipeline={self.pipeline}, and placement={shown(self.placement)} is for ranks with all "
                "layers: leave either out"
            )
        if (spans := self.axes["spans"]) > 1 and self.pipeline == 1:
            yield f"mesh has spans={spans}, those of layers on a stage of a pipeline: set pipeline=2, or leave it out"
        if self.offloaded and self.stage < 3:
            yield f"offload={self.offload} takes shards of weights: set strategy=fsdp, or take optimizer"
        if self.replicas > 1 and (not self.sharded or self.workers * self.context == self.replicas):
            yield (
                f"mesh has replicas={self.replicas}, copies of what ranks share, and none share anything: set "
                "strategy=fsdp and a number of ranks by num_training_workers or data"
            )
        yield from self._about_servers()
        if self.kind == "ray" and self.nodes_timeout and self.address is None:
            yield (
                f"nodes_timeout={self.nodes_timeout:g} waits for nodes of a cluster with an autoscaler, and this run "
                "starts a cluster of its own: set address, or leave it out"
            )
        for key, resources in self._reserved().items():
            if "CPU" in resources and not any(resources.values()):
                yield f"{key}={resources} reserves nothing: give a part of a CPU, such as 0.1"

    def _about_servers(self) -> Iterator[str]:
        known = [one.name for one in fields(Servers)]
        if unknown := [key for key in self.servers if key not in known]:
            yield from (f"servers has no {key!r}{nearest(key, known)}" for key in unknown)
            return
        servers = Servers(**self.servers)
        yield from complaints(servers, "servers.")
        if self.strategy != SERVER:
            yield from [f"servers={self.servers} needs strategy={SERVER}"] if self.servers else []
            return
        if servers.quorum > self.num_training_workers:
            yield f"servers.quorum={servers.quorum} is more than num_training_workers={self.num_training_workers}"
        if axes := [axis for axis, size in self.mesh.items() if (axis in PARTS and size > 1) or axis == MIRRORS]:
            yield f"mesh has {axes[0]}, and strategy={SERVER} has no workers of parts: leave it out, or take another"
        if "optimizer" in self.offload:
            yield f"offload={self.offload}: with strategy={SERVER} no rank has moments that could wait: leave it out"

    def unread(self, *, replays: bool) -> list[str]:
        """Return problems: settings that have no effect in a local run. A replay is only asked about OF_RANKS."""
        own = ["placement"] * any(not where.shares for where in self.calls.values())  # a local run can take turns too
        keys = () if self.kind == "ray" else OF_RANKS if replays else (*OF_RAY, *own)
        return [f"{key} needs runtime=ray" for key in self._changed(keys)]

    def about_backend(self, *, device: str, samples: bool, shared: bool) -> list[str]:
        """Return what the backend cannot do on the run's devices, as far as settings show; ranks check the rest.
        `samples`: there are rollout workers; `shared`: on the ranks' devices."""
        gpus = device.startswith("cuda") or (device == "auto" and self.resources_per_worker.get("GPU", 0.0) > 0)
        if self.backend == "gloo" and self.sharded and gpus:
            return [NO_SHARDS]
        if self.backend != "nccl" or self.kind == "local":
            return []
        if device == "cpu":
            return ["runtime.backend=nccl needs GPUs, and device=cpu keeps to CPUs: take gloo, or another device"]
        if (sent := samples and self.weights == "collective") and shared:
            return [SHARED]
        asked = self._reserved() if sent else {"resources_per_worker": self.resources_per_worker}
        lacking = [key for key, resources in asked.items() if resources.get("GPU", 0.0) < 1]
        return [f"runtime.backend=nccl needs a GPU for each process: set runtime.{key}={{GPU: 1}}" for key in lacking]

    def _changed(self, keys: Iterable[str]) -> list[str]:
        """Return key=value for those of `keys` whose values differ from their defaults."""
        pairs = zip(leaves(self), leaves(RuntimeSettings), strict=True)
        changed = {leaf.key: leaf.value for leaf, default in pairs if leaf.value != default.value}
        return [f"{key}={changed[key]}" for key in keys if key in changed]

    def _reserved(self) -> dict[str, dict[str, float]]:
        return {key: value for key, value in vars(self).items() if key.startswith("resources_per")}


def placed(placement: Any) -> dict[str, Where]:
    """Return {call: its place} of a placement; {} if it is wrong (see `faults`) or still to be chosen (auto)."""
    wrong = placement in PLANNED or next(faults(placement), None)
    return {} if wrong else {call: Where(**entry) for call, entry in placement.items()}


def faults(placement: Any) -> Iterator[str]:
    """Yield what is wrong with a placement, as ends of sentences that begin with its key."""
    if not isinstance(placement, Mapping):
        if placement not in PLANNED:
            yield (
                f"={shown(placement)} must be one of {', '.join(PLANNED)}, or a mapping of calls ({', '.join(CALLS)}), "
                "such as {reference: {workers: 2}}"
            )
        return
    for call, entry in placement.items():
        if call in ELSEWHERE:
            yield f" has {call}: {ELSEWHERE[call]} says where that is"
        elif call not in CALLS:
            yield f" has no call {call!r}{nearest(str(call), CALLS)}"
        elif not isinstance(entry, Mapping) or not entry:
            yield f".{call}={shown(entry)} must be {FORMS[call]}"
        else:
            yield from _of_call(call, entry, placement)


def _of_call(call: str, entry: Mapping[str, Any], placement: Mapping[str, Any]) -> Iterator[str]:
    with_others = ("inside", "shares") if call == GENERATE else ("inside",)
    known = with_others if call == GENERATE else (*OWN, *with_others)
    if unknown := [key for key in entry if key not in known]:
        yield f".{call} has no {unknown[0]!r}{nearest(str(unknown[0]), known)}. It must be {FORMS[call]}"
        return
    if (named := [key for key in with_others if key in entry]) and len(entry) > 1:
        yield f".{call}={shown(entry)} has more than {named[0]}: keep {FORMS[call]}"
        return
    hosts = [TRAIN, *(other for other in MODELS if call != GENERATE and other != call and _own(placement.get(other)))]
    for key in named:
        if entry[key] not in hosts:
            yield f".{call}.{key}={shown(entry[key])} has no processes of its own: take {' or '.join(hosts)}"
    yield from (f".{call}.{problem}" for problem in _own_ranks(entry))


def _own(entry: Any) -> bool:
    """True for a call with processes of its own."""
    return isinstance(entry, Mapping) and bool(entry) and "inside" not in entry


def _own_ranks(entry: Mapping[str, Any]) -> Iterator[str]:
    if not _counts(workers := entry.get("workers", 1)):
        yield f"workers={shown(workers)} must be a whole number of at least 1"
    mesh, resources = entry.get("mesh", {}), entry.get("resources", {})
    if not isinstance(mesh, Mapping) or not all(axis in OF_MESH and _counts(size) for axis, size in mesh.items()):
        yield f"mesh={shown(mesh)} must give ranks by axis ({', '.join(OF_MESH)}), such as {{tensor: 2}}"
    amounts = resources.values() if isinstance(resources, Mapping) else [None]
    if not all(isinstance(one, int | float) and 0 <= one < float("inf") for one in amounts):
        yield f"resources={shown(resources)} must be amounts by name, such as {{CPU: 4, GPU: 1}}"


def _counts(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= 2**32
