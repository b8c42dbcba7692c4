"""What processes reserve, by name and amount, and what is said where it is not there. Knows no cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Resources = dict[str, float]


class ResourcesError(ValueError):
    """More is asked for than the cluster has."""


def added(bundles: Sequence[Resources]) -> Resources:
    asked: Resources = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            asked[name] = asked.get(name, 0.0) + amount
    return asked


def shown(resources: Resources) -> str:
    """Whole CPUs and GPUs, and memory in GiB; Ray's own markers of nodes are left out."""
    parts = []
    for name, amount in sorted(resources.items()):
        if name.startswith("node:") or name == "object_store_memory":
            continue
        parts.append(f"{amount / 2**30:.1f} GiB memory" if name == "memory" else f"{amount:g} {name}")
    return ", ".join(parts) or "nothing"


def equal_share(cpus: float, processes: int) -> float:
    """CPUs of one of so many equal processes, in hundredths."""
    share = cpus / processes
    return float(int(share)) if share >= 1 else max(int(share * 100) / 100, 0.01)


def reserved(given: Mapping[str, float], share: float) -> Resources:
    """A process's bundle: an equal share of the CPUs unless it was given others."""
    return {"CPU": share} | {name: float(amount) for name, amount in given.items()}


def part_of(bundle: Mapping[str, float], name: str, sharers: int) -> float:
    """What one of several processes in a bundle takes of it, in the ten-thousandths that Ray counts in."""
    return int(bundle.get(name, 0.0) / sharers * 10_000 + 1e-6) / 10_000
