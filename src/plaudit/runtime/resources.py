"""Resources that processes reserve, by name and amount, and errors if they are missing. No Ray calls here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

Resources = dict[str, float]
TINY = 1e-6
"""Tolerance of sums of amounts."""
CROWDED = 4.0
"""Warn above this many threads a CPU; some threads are always waiting for others."""


LEAST_SHARE = 0.05
"""Least part of a CPU in an equal share: with less, a process takes minutes to start, and gives no sign in time."""
LEAST_MEMORY = 250 << 20
"""Bytes that a process takes before it has a model: Python with torch and Ray (260 MiB measured)."""


class ResourcesError(ValueError):
    """The run asks for more than the cluster has."""


def added(bundles: Sequence[Resources]) -> Resources:
    asked: Resources = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            asked[name] = asked.get(name, 0.0) + amount
    return asked


def shown(resources: Resources) -> str:
    """Return resources as text, memory in GiB; leave out Ray's node and group markers and the object store."""
    parts = []
    for name, amount in sorted(resources.items()):
        if name.startswith("node:") or "_group_" in name or name == "object_store_memory":
            continue
        parts.append(f"{amount / 2**30:.1f} GiB memory" if name == "memory" else f"{amount:g} {name}")
    return ", ".join(parts) or "nothing"


def equal_share(
    nodes: Sequence[Resources], processes: int, *, beside: Sequence[Resources] = (), gpus: bool = False
) -> Resources:
    """Return the equal share that each process reserves: the largest number of whole CPUs with which all processes fit
    on the nodes, besides the explicit reservations (`beside`). With more processes than CPUs, it is in hundredths of a
    CPU.

    `gpus`: each process also reserves one GPU, if the nodes have enough for all processes and `beside`. Raises
    ResourcesError if the share is below LEAST_SHARE.
    """
    hundredths = [int(node.get("CPU", 0.0) * 100 + 1e-6) for node in nodes]
    places = [int(node.get("GPU", 0.0)) for node in nodes]
    own = gpus and sum(places) >= processes + len(beside)
    gpu = {"GPU": 1.0} if own else {}
    if not processes:
        return {"CPU": 1.0} | gpu

    def fits(share: int) -> bool:
        if beside:
            alike = [{"CPU": share / 100} | gpu] * processes
            return packed(nodes, [*(reserved(bundle, gpu) for bundle in beside), *alike])
        rooms = [cpus // share for cpus in hundredths]
        return sum(map(min, rooms, places) if own else rooms) >= processes

    left = sum(hundredths) - int(100 * added(beside).get("CPU", 0.0))
    most = max(0, left) // processes
    whole = range(most // 100 * 100, 0, -100)
    cpus = next(filter(fits, (*whole, *range(min(most, 99), 0, -1))), 1) / 100
    if most > 0 and cpus < LEAST_SHARE:
        raise ResourcesError(
            f"{processes} processes would have {cpus:g} CPU each of the {left / 100:g} CPU that are left for them, and "
            f"need {LEAST_SHARE:g} at least: lower runtime.num_training_workers, rollout.workers, rewards.N.workers or "
            "environment.workers, or add nodes"
        )
    return {"CPU": cpus} | gpu


def reserved(resources: Mapping[str, float], share: Resources) -> Resources:
    """Return a process's bundle: the equal share, overridden by its explicit reservation name by name."""
    return share | {name: float(amount) for name, amount in resources.items()}


def check_room(nodes: Sequence[Resources], bundles: Sequence[Resources], *, what: str) -> None:
    """Raise ResourcesError with the sums if the nodes can never hold all bundles together."""
    asked, there = added(bundles), added(nodes)
    lower = "lower runtime.num_training_workers, rollout.workers or what each reserves, or add nodes"
    if any(amount > there.get(name, 0.0) + TINY for name, amount in asked.items()):
        raise ResourcesError(f"{what} ask for {shown(asked)} in all, the cluster has {shown(there)}: {lower}")
    if not packed(nodes, bundles):
        alike = Counter(shown({name: node.get(name, 0.0) for name in asked}) for node in nodes)
        sums = "; ".join(f"{count} with {sum}" for sum, count in alike.items())
        each = "; ".join(f"{count} for {sum}" for sum, count in Counter(map(shown, bundles)).items())
        raise ResourcesError(
            f"{what} ask for {shown(asked)} in all ({each}). They do not fit, since each must be on one node and the "
            f"cluster's have {sums}: {lower}"
        )


def check_memory(nodes: Sequence[Resources], processes: int) -> None:
    """Raise ResourcesError if the nodes' memory is less than the processes need before they have a model. A node that
    does not report its memory counts as unlimited."""
    there = sum(node.get("memory", math.inf) for node in nodes)
    if processes * LEAST_MEMORY > there:
        asked, has = (shown({"memory": amount}) for amount in (processes * LEAST_MEMORY, there))
        raise ResourcesError(
            f"{processes} processes take {asked} in all, {LEAST_MEMORY >> 20} MiB each before they have a model, the "
            f"cluster has {has}: lower rollout.workers, runtime.num_training_workers, rewards.N.workers or "
            "environment.workers, or add nodes"
        )


def check_gpus(nodes: Sequence[Resources], ranks: Sequence[Resources]) -> None:
    """Raise ResourcesError if several ranks would share a GPU, which NCCL refuses."""
    gpus = added(nodes).get("GPU", 0.0)
    if len(ranks) > 1 and gpus and any(rank.get("GPU", 0.0) < 1 for rank in ranks):
        raise ResourcesError(
            f"{len(ranks)} training workers would share a GPU, which NCCL refuses: they reserve none of the cluster's "
            f"{gpus:g}. Set runtime.resources_per_worker={{GPU: 1}}; or lower the number of processes until each can "
            "have one, which it then reserves by itself; or set runtime.backend=gloo or device=cpu"
        )


def small_store(nodes: Sequence[Resources], size: int) -> str:
    """Return a warning if a node's object store cannot hold two versions of `size` bytes, old and new, else ""."""
    least = min((node.get("object_store_memory", 0.0) for node in nodes), default=math.inf)
    if 2 * size <= least:
        return ""
    return (
        f"an object store of {least / 2**20:.0f} MiB has no room for two versions of weights of {size / 2**20:.0f} "
        f"MiB: Ray puts them on disk, and updates take longer. Give /dev/shm {-(-5 * size // 2**21)} MiB (docker "
        "--shm-size; of a cluster that runs: ray start --object-store-memory), or set runtime.weights=collective"
    )


def crowded(nodes: Sequence[Resources], threads: Sequence[int]) -> str:
    """Return a warning if processes with these numbers of threads would slow each other down, else ""."""
    cpus = added(nodes).get("CPU", 0.0)
    if sum(threads) <= CROWDED * cpus:
        return ""
    return (
        f"{len(threads)} processes have {sum(threads)} threads in all, the cluster has {cpus:g} CPU: a step takes "
        "longer than with fewer, and so does the start. Lower rollout.workers, runtime.num_training_workers or threads"
    )


def packed(nodes: Sequence[Resources], bundles: Sequence[Resources]) -> bool:
    """True if the bundles fit on the nodes, by first-fit decreasing: first bundles that few nodes can hold, then the
    largest. With very unequal bundles it may miss a solution."""
    there, left = added(nodes), [dict(node) for node in nodes]

    def size(bundle: Resources) -> float:
        return max((amount / there[name] for name, amount in bundle.items() if there.get(name)), default=0.0)

    for bundle in sorted(bundles, key=lambda bundle: (sum(_holds(node, bundle) for node in nodes), -size(bundle))):
        node = next((node for node in left if _holds(node, bundle)), None)
        if node is None:
            return False
        node.update({name: node.get(name, 0.0) - amount for name, amount in bundle.items()})
    return True


def _holds(node: Resources, bundle: Resources) -> bool:
    return all(amount <= node.get(name, 0.0) + TINY for name, amount in bundle.items())


def part_of(bundle: Mapping[str, float], name: str, sharers: int) -> float:
    """Return a bundle's amount of a resource per sharing process, rounded down to Ray's unit of 1/10,000."""
    return int(bundle.get(name, 0.0) / sharers * 10_000 + 1e-6) / 10_000
