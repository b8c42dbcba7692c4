"""List the placements that a run's settings can express today, and choose the usual ones by hand.

settings, devices -> Placement, ... -> the same settings, placed
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from plaudit.models.config import DecoderConfig
from plaudit.models.mesh import Mesh, faults
from plaudit.settings.tree import Settings

SHARED: dict[str, Any] = {"generate": {"shares": "train"}}
"""The value of `runtime.placement` by which rollout workers and ranks take turns on the same devices."""
ONE: dict[str, Any] = {"context": 1, "stages": 1, "spans": 1, "apart": ()}
"""What ranks of their own for a model have not."""
WIDTHS = (1, 2, 4, 8, 16)
"""Sizes of the tensor axis that are tried."""


@dataclass(frozen=True, order=True)
class Apart:
    """Ranks of their own for some models (reference, critic), apart from the training ranks."""

    roles: tuple[str, ...]
    ranks: int = 1
    tensor: int = 1

    @property
    def name(self) -> str:
        return self.roles[0]

    def said(self) -> dict[str, Any]:
        """Return these roles' entries of `runtime.placement`."""
        mesh = {"mesh": {"tensor": self.tensor}} if self.tensor > 1 else {}
        own = {self.name: {"workers": self.ranks} | mesh}
        return own | {role: {"inside": self.name} for role in self.roles[1:]}


@dataclass(frozen=True, order=True)
class Placement:
    """Numbers of a run's processes. Reference and critic are on the training ranks unless `apart` lists them."""

    ray: bool = False
    ranks: int = 1
    """Data-parallel training workers."""
    tensor: int = 1
    """Ranks of each training worker that split each matrix."""
    context: int = 1
    """Ranks of each training worker that split the tokens of each pass."""
    stages: int = 1
    """Stages of each training worker, which have some of the layers each."""
    spans: int = 1
    """Spans of layers on each stage."""
    sharded: bool = False
    workers: int = 1
    """Rollout workers."""
    shared: bool = False
    """True if rollout workers are on the ranks' devices and take turns with them."""
    lag: int = 0
    threads: int = 1
    """Threads of each process, on CPUs."""
    apart: tuple[Apart, ...] = ()

    def overrides(self) -> dict[str, Any]:
        """Return the settings of this placement, by their keys."""
        found: dict[str, Any] = {"runtime.kind": "ray" if self.ray else "local", "rollout.max_lag": self.lag}
        if self.ray:
            found |= {"runtime.num_training_workers": self.ranks}
            found |= {"rollout.workers": self.workers} if self.workers else {}
            found |= {"runtime.mesh": self.mesh} if self.mesh else {}
            found |= {"runtime.strategy": "fsdp"} if self.sharded else {}
            found |= {"runtime.placement": where} if (where := self.where) else {}
        return found | {"threads": self.threads}

    def words(self) -> list[str]:
        """Return `overrides` as arguments of the command line."""
        return [f"{key}={str(value).replace(chr(39), '').lower()}" for key, value in self.overrides().items()]

    def placed(self, s: Settings) -> Settings:
        """Return the run's settings with this placement."""
        strategy = "fsdp" if self.sharded else "replicate"
        ranks: dict[str, Any] = {"num_training_workers": self.ranks, "mesh": self.mesh}
        runtime = replace(
            s.runtime, kind="ray" if self.ray else "local", placement=self.where, strategy=strategy, **ranks
        )
        rollout = replace(s.rollout, max_lag=self.lag, workers=self.workers or s.rollout.workers)
        return replace(s, runtime=runtime, rollout=rollout, threads=self.threads)

    @property
    def mesh(self) -> dict[str, int]:
        axes = {"context": self.context, "tensor": self.tensor, "pipeline": self.stages, "spans": self.spans}
        return {axis: size for axis, size in axes.items() if size > 1}

    @property
    def where(self) -> dict[str, Any]:
        """The value of `runtime.placement` that expresses this placement."""
        found: dict[str, Any] = {**SHARED} if self.shared else {}
        for one in self.apart:
            found |= one.said()
        return found

    def of(self, role: str) -> Placement:
        """Return the placement with the ranks of a role's model as training ranks; itself if the role is not apart."""
        own = next((one for one in self.apart if role in one.roles), None)
        return self if own is None else replace(self, ranks=own.ranks, tensor=own.tensor, **ONE)

    @property
    def width(self) -> int:
        """Ranks that share each row."""
        return self.tensor * self.context

    @property
    def shards(self) -> int:
        """Number of ranks whose gradients are summed; if sharded, each holds different rows of every weight."""
        return self.ranks * self.context

    @property
    def trains_on(self) -> int:
        """Number of all training ranks."""
        return self.ranks * self.width * self.stages

    @property
    def kinds(self) -> list[str]:
        """A name for the training ranks, or for those of each stage."""
        return ["rank"] if self.stages == 1 else [f"rank of stage {stage}" for stage in range(self.stages)]

    @property
    def counts(self) -> dict[str, int]:
        """{kind of process: number}, besides the run's own process."""
        own = {f"{one.name} rank": one.ranks * one.tensor for one in self.apart}
        return dict.fromkeys(self.kinds, self.ranks * self.width) | own | {"rollout worker": self.workers}

    @property
    def devices(self) -> int:
        """Number of devices that the processes take."""
        return sum(self.counts.values()) - self.workers * self.shared if self.ray else 1

    def __str__(self) -> str:
        ranks = f"{self.trains_on} rank{'s'[: self.trains_on > 1]}"
        beside = f", {self.workers} rollout worker{'s'[: self.workers > 1]}" if self.workers else ""
        where = f"{ranks}{beside}{' on the same devices' * self.shared}" if self.ray else "one process"
        where += "".join(f", {one.ranks * one.tensor} for {' and '.join(one.roles)}" for one in self.apart)
        mesh = "".join(f", {axis}={size}" for axis, size in self.mesh.items()) + ", sharded" * self.sharded
        return f"{where}{mesh}, threads={self.threads}" + f", lag {self.lag}" * (self.lag > 0)


def placement_of(s: Settings, cores: int, *, gpu: bool) -> Placement:
    """Return the placement that the settings have now."""
    runtime, ray = s.runtime, s.runtime.kind == "ray"
    workers = s.rollout.workers_range[0] if s.samples else 0
    shared = ray and s.samples and (runtime.shares or runtime.inside)
    ranks = runtime.workers if ray else 1
    tensor, context, stages = (runtime.tensor, runtime.context, runtime.pipeline) if ray else (1, 1, 1)
    apart = tuple(
        Apart(
            tuple(sorted((call, *(c for c in runtime.calls if c != call and runtime.host(c) == call)))),
            one.workers,
            one.tensor,
        )
        for call, one in runtime.apart.items()
    )
    others = sum(one.ranks * one.tensor for one in apart)
    processes = 1 if not ray else ranks * tensor * context * stages + others + (0 if shared else workers)
    threads = 1 if gpu else s.threads or max(1, cores // processes)
    return Placement(
        ray=ray,
        ranks=ranks,
        tensor=tensor,
        context=context,
        stages=stages,
        spans=runtime.axes["spans"] if ray else 1,
        sharded=ray and runtime.sharded,
        workers=workers,
        shared=shared,
        lag=s.rollout.max_lag if s.samples else 0,
        threads=threads,
        apart=apart if ray else (),
    )


def placements(
    s: Settings, config: DecoderConfig, devices: int, *, gpu: bool, lags: tuple[int, ...]
) -> Iterator[Placement]:
    """Yield placements that settings can express on the devices, keeping the context axis, with the recipe's stages and
    without. A process has one GPU or an equal share of the cores."""
    context, axes = s.runtime.context, s.runtime.axes
    pipes = {(1, 1), (axes["pipeline"], axes["spans"])}
    for lag in lags if s.samples else (0,):
        if not gpu or devices == 1:
            for threads in sorted({1, devices} if not gpu else {1}):
                yield Placement(workers=int(s.samples), lag=lag, threads=threads)
        for tensor, (stages, spans) in product(WIDTHS, sorted(pipes)):
            cut = Placement(ray=True, tensor=tensor, context=context, stages=stages, spans=spans, lag=lag)
            if faults(config, Mesh(**cut.mesh)):
                continue
            for ranks in counts(devices // cut.trains_on):
                for sharded in (False, True) if ranks * context > 1 else (False,):
                    yield from _beside(s, devices, replace(cut, ranks=ranks, sharded=sharded), gpu=gpu)


def counts(most: int) -> list[int]:
    """Return the numbers of ranks to try: all up to 16, then those with at most two bits set, and `most`."""
    return [n for n in range(1, most + 1) if n <= 16 or n.bit_count() <= 2 or n == most]


def _beside(s: Settings, devices: int, mesh: Placement, *, gpu: bool) -> Iterator[Placement]:
    """Yield `mesh` with rollout workers on the devices that ranks leave, or on the ranks' devices."""
    trained = mesh.trains_on

    def threads(processes: int) -> int:
        return 1 if gpu else max(1, devices // processes)

    if not s.samples:
        if trained > 1:
            yield replace(mesh, workers=0, threads=threads(trained))
        return
    for apart in _apart(s, devices - trained):
        used, placed = trained + sum(one.ranks for one in apart), replace(mesh, apart=apart)
        if mesh.lag == 0 and (trained > 1 or not gpu or apart):
            yield replace(placed, workers=trained, shared=True, threads=threads(used))
        if rest := devices - used:
            for workers in {rest, 1} if gpu else range(1, rest + 1):
                yield replace(placed, workers=workers, threads=threads(used + workers))


def _apart(s: Settings, rest: int) -> Iterator[tuple[Apart, ...]]:
    """Yield the roles that leave the training ranks, for 1 to `rest` ranks: none, critic, reference, or both."""
    yield ()
    asks = {role.value for role in s.objective.asks}
    moves = {"critic"} if s.reference.ema else {"critic", "reference"}
    for roles in (("critic",), ("reference",), ("critic", "reference")):
        if {*roles} <= asks & moves:
            for ranks in sorted({1, rest // 4, rest // 2, rest} - {0}):
                if ranks <= rest:
                    yield (Apart(roles, ranks),)


def symmetric(found: list[Placement], now: Placement) -> Placement | None:
    """Return the placement where all calls take turns on shared devices, with most ranks; None if there is none."""
    alike = [one for one in found if one.ray and (one.shared or not one.workers) and not (one.lag or one.apart)]
    return max(alike, key=lambda one: (one.trains_on, one.ranks, not one.sharded), default=None)


def heuristic(found: list[Placement], now: Placement) -> Placement | None:
    """Choose the usual placement by hand: half of the devices learn, half generate, with the recipe's max_lag."""
    halves = [one for one in found if one.ray and one.workers and not (one.shared or one.apart) and one.lag <= now.lag]
    return max(
        halves, key=lambda one: (-abs(one.trains_on - one.workers), one.lag, one.workers, one.ranks), default=None
    )
