"""Which ranks share a bundle of the placement group, and so a node. Plain data, no Ray calls.

    meshes -> groups of ranks that communicate most -> as many groups as fit on the nodes, a bundle each

Left out: reserving the bundles (`ranks.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from plaudit.runtime.resources import Resources, added, packed
from plaudit.runtime.settings import RuntimeSettings

Ranks = tuple[int, ...]


def levels(runtime: RuntimeSettings, first: int = 0) -> Iterator[list[Ranks]]:
    """Yield groups of a mesh's ranks, numbered from `first`, that are better on one node, the largest groups first: the
    shards of each copy (HSDP), all ranks of each data-parallel worker, its ranks on each pipeline stage."""
    width, workers = runtime.width, runtime.workers
    rows = [tuple(range(first + at, first + at + width)) for at in range(0, runtime.ranks, width)]
    if runtime.replicas > 1:
        size = workers // runtime.replicas
        yield [sum(rows[at : at + size], ()) for at in range(0, len(rows), size)]
    if runtime.pipeline > 1:
        yield [sum(rows[worker::workers], ()) for worker in range(workers)]
    yield rows


def arrangement(
    nodes: Sequence[Resources],
    bundles: Sequence[Mapping[str, float]],
    wanted: Iterable[Sequence[Ranks]],
    *,
    beside: Sequence[Resources] = (),
) -> list[Ranks]:
    """Return the ranks of each bundle: of each level in `wanted`, as many groups as fit on the nodes in one piece, the
    rest smaller. `bundles`: what each rank reserves; `beside`: what others reserve."""
    together: list[Ranks] = []

    def whole(more: Sequence[Ranks]) -> list[Ranks]:
        parts = [*together, *more]
        seen = {rank for part in parts for rank in part}
        return sorted([*parts, *((rank,) for rank in range(len(bundles)) if rank not in seen)])

    for level in wanted:
        free = [group for group in level if len(group) > 1 and not any({*group} & {*part} for part in together)]
        most = bisect_left(
            range(1, len(free) + 1),
            True,
            key=lambda count: not packed(nodes, [*joined(bundles, whole(free[:count])), *beside]),
        )
        together += free[:most]
    return whole(())


def joined(bundles: Sequence[Mapping[str, float]], parts: Sequence[Ranks]) -> list[Resources]:
    """Return the sum of the ranks' bundles in each part, in Ray's unit of 1/10,000."""
    sums = (added([dict(bundles[rank]) for rank in part]) for part in parts)
    return [{name: round(amount, 4) for name, amount in one.items()} for one in sums]


def where(name: str, nodes: Sequence[str]) -> str:
    """Return which ranks of a mesh are on which node, as text. `nodes`: the node of each rank."""
    runs: list[tuple[int, int]] = []
    for rank, node in enumerate(nodes):
        if runs and nodes[runs[-1][0]] == node:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    said = (f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
    return f"{name} ranks " + ", ".join(
        f"{ranks} on node {nodes[first][:8]}" for ranks, (first, _) in zip(said, runs, strict=True)
    )


def split(width: int, nodes: Sequence[str]) -> int:
    """Return how many groups of `width` ranks are on more than one node. `nodes`: the node of each rank."""
    return sum(len({*nodes[first : first + width]}) > 1 for first in range(0, len(nodes), width))
