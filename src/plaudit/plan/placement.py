"""Where the calls of a run can be today: what its settings may say of processes, and the usual ways to choose.

settings, devices -> Placement, ... -> the same settings, placed
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from plaudit.models.config import DecoderConfig
from plaudit.models.mesh import Mesh, faults
from plaudit.settings.tree import Settings

WIDTHS = (1, 2, 4, 8, 16)
"""Ranks that may share each matrix."""


@dataclass(frozen=True, order=True)
class Placement:
    """Processes of a run. Train, reference and critic are on the same ranks."""

    ray: bool = False
    ranks: int = 1
    """Data-parallel training workers."""
    tensor: int = 1
    """Ranks of each that share matrices, and"""
    context: int = 1
    """those that share tokens."""
    sharded: bool = False
    workers: int = 1
    """Rollout workers."""
    shared: bool = False
    """Rollout workers are where ranks are, in turn with them."""
    lag: int = 0
    threads: int = 1
    """Of a process, on CPUs."""

    def overrides(self) -> dict[str, Any]:
        """The settings that say it."""
        found: dict[str, Any] = {"runtime.kind": "ray" if self.ray else "local", "rollout.max_lag": self.lag}
        if self.ray:
            found |= {"runtime.num_training_workers": self.ranks, "rollout.workers": self.workers}
            found |= {"runtime.mesh": self.mesh} if self.mesh else {}
            found |= {"runtime.strategy": "fsdp"} if self.sharded else {}
            found |= {"rollout.share_devices": True} if self.shared else {}
        return found | {"threads": self.threads}

    def words(self) -> list[str]:
        """As overrides of the command line."""
        return [f"{key}={value}".replace("'", "").lower() for key, value in self.overrides().items()]

    def placed(self, s: Settings) -> Settings:
        """The same run, so placed."""
        strategy = "fsdp" if self.sharded else "replicate"
        kind, mesh = "ray" if self.ray else "local", self.mesh
        runtime = replace(s.runtime, kind=kind, num_training_workers=self.ranks, mesh=mesh, strategy=strategy)
        rollout = replace(s.rollout, max_lag=self.lag, workers=self.workers, share_devices=self.shared)
        return replace(s, runtime=runtime, rollout=rollout, threads=self.threads)

    @property
    def mesh(self) -> dict[str, int]:
        axes = {"context": self.context, "tensor": self.tensor}
        return {axis: size for axis, size in axes.items() if size > 1}

    @property
    def width(self) -> int:
        """Ranks that share each row."""
        return self.tensor * self.context

    @property
    def shards(self) -> int:
        """Ranks with other rows of each weight, if sharded, and whose gradients are summed."""
        return self.ranks * self.context

    @property
    def trains_on(self) -> int:
        """Ranks in all."""
        return self.ranks * self.width

    def __str__(self) -> str:
        ranks = f"{self.trains_on} rank{'s'[: self.trains_on > 1]}"
        beside = f", {self.workers} rollout worker{'s'[: self.workers > 1]}" if self.workers else ""
        where = f"{ranks}{beside}{' on the same devices' * self.shared}" if self.ray else "one process"
        mesh = "".join(f", {axis}={size}" for axis, size in self.mesh.items()) + ", sharded" * self.sharded
        return f"{where}{mesh}, threads={self.threads}" + f", lag {self.lag}" * (self.lag > 0)


def placement_of(s: Settings, cores: int, *, gpu: bool) -> Placement:
    """What the settings say now."""
    runtime, ray = s.runtime, s.runtime.kind == "ray"
    workers = s.rollout.workers_range[0] if s.samples else 0
    shared = ray and s.samples and s.rollout.share_devices
    ranks = runtime.workers if ray else 1
    tensor, context = (runtime.tensor, runtime.context) if ray else (1, 1)
    processes = 1 if not ray else ranks * tensor * context + (0 if shared else workers)
    threads = 1 if gpu else s.threads or max(1, cores // processes)
    return Placement(
        ray=ray,
        ranks=ranks,
        tensor=tensor,
        context=context,
        sharded=ray and runtime.sharded,
        workers=workers,
        shared=shared,
        lag=s.rollout.max_lag if s.samples else 0,
        threads=threads,
    )


def placements(
    s: Settings, config: DecoderConfig, devices: int, *, gpu: bool, lags: tuple[int, ...]
) -> Iterator[Placement]:
    """Everything that the settings can say on this many devices, with their context axis. A process has one GPU, or an
    equal share of the cores."""
    context = s.runtime.context
    for lag in lags if s.samples else (0,):
        if not gpu or devices == 1:
            for threads in sorted({1, devices} if not gpu else {1}):
                yield Placement(workers=int(s.samples), lag=lag, threads=threads)
        for tensor in WIDTHS:
            if faults(config, Mesh(tensor=tensor, context=context)):
                continue
            for ranks in counts(devices // tensor // context):
                for sharded in (False, True) if ranks * context > 1 else (False,):
                    mesh = Placement(ray=True, ranks=ranks, tensor=tensor, context=context, sharded=sharded, lag=lag)
                    yield from _beside(s, devices, mesh, gpu=gpu)


def counts(most: int) -> list[int]:
    """Numbers of ranks that are tried: all few, and of many those of at most three binary digits."""
    return [n for n in range(1, most + 1) if n <= 16 or n.bit_count() <= 2 or n == most]


def _beside(s: Settings, devices: int, mesh: Placement, *, gpu: bool) -> Iterator[Placement]:
    """Ranks, and rollout workers on what they leave, or with them."""
    trained = mesh.trains_on

    def threads(processes: int) -> int:
        return 1 if gpu else max(1, devices // processes)

    if not s.samples:
        if trained > 1:
            yield replace(mesh, workers=0, threads=threads(trained))
        return
    if mesh.lag == 0 and (trained > 1 or not gpu):
        yield replace(mesh, workers=trained, shared=True, threads=threads(trained))
    if rest := devices - trained:
        for workers in {rest, 1} if gpu else range(1, rest + 1):
            yield replace(mesh, workers=workers, threads=threads(trained + workers))


def symmetric(found: list[Placement], now: Placement) -> Placement | None:
    """All calls on all devices in turn, in one mesh: of ranks that rollout workers share, those with most data."""
    alike = [one for one in found if one.ray and (one.shared or not one.workers) and one.lag == 0]
    return max(alike, key=lambda one: (one.trains_on, one.ranks, not one.sharded), default=None)


def heuristic(found: list[Placement], now: Placement) -> Placement | None:
    """What people choose by hand: half of the devices learn, half generate, one step ahead if the recipe allows lag."""
    apart = [one for one in found if one.ray and one.workers and not one.shared and one.lag <= now.lag]
    return max(
        apart, key=lambda one: (-abs(one.trains_on - one.workers), one.lag, one.workers, one.ranks), default=None
    )
