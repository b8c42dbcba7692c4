"""Which ranks share a bundle of the placement group, and so a node. Plain data, no Ray calls.

    meshes -> groups of ranks that communicate most -> as many groups as fit on the nodes, a bundle each

Left out: reserving the bundles (`ranks.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from plaudit.runtime.resources import Resources, added, packed, shown
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


def joined(bundles: Sequence[Mapping[str, float]], parts: Sequence[Sequence[int]]) -> list[Resources]:
    """Return the sum of the ranks' bundles in each part, in Ray's unit of 1/10,000."""
    sums = (added([dict(bundles[rank]) for rank in part]) for part in parts)
    return [{name: round(amount, 4) for name, amount in one.items()} for one in sums]


def where(name: str, nodes: Mapping[int, str]) -> str:
    """Return what is on which node, as text. `nodes`: the text of its node, by the number of a rank or worker."""
    runs: list[tuple[int, int]] = []
    for number, node in nodes.items():
        if runs and runs[-1][1] == number - 1 and nodes[runs[-1][0]] == node:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    said = (f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
    return f"{name} " + ", ".join(f"{one} on {nodes[first]}" for one, (first, _) in zip(said, runs, strict=True))


def on(nodes: Iterable[str]) -> str:
    """Return the text of a node, or of several."""
    names = [node[:8] for node in dict.fromkeys(nodes)]
    return f"node{'s' * (len(names) > 1)} {' and '.join(names)}"


def split(width: int, nodes: Sequence[str]) -> int:
    """Return how many groups of `width` ranks are on more than one node. `nodes`: the node of each rank."""
    return sum(len({*nodes[first : first + width]}) > 1 for first in range(0, len(nodes), width))


def divided(what: str, axes: str, nodes: Sequence[str], bundles: Sequence[Mapping[str, float]], key: str) -> str:
    """Return a warning if groups are on several nodes, else "". `bundles`: what each process of a group reserves;
    `key`: the setting that says so."""
    width = len(bundles)
    if not (count := split(width, nodes)):
        return ""
    room = shown(joined(bundles, [range(width)])[0])
    return (
        f"{count} of {len(nodes) // width} groups of {width} {what} that compute each row together ({axes}) are on "
        f"several nodes, and each layer waits for the network. A group needs {room} on one node: reserve less ({key}), "
        "or use larger nodes"
    )


@dataclass
class Located:
    """Says where workers of several processes are: of the first `count` once all have started, then of each that starts
    elsewhere. Nothing is said on one node, and no warning twice."""

    name: str
    axes: str
    count: int
    bundles: Sequence[Resources]
    """What each process of a worker reserves."""
    key: str
    """The setting that says so."""
    say: Callable[[str], None]
    nodes: dict[int, Sequence[str]] = field(default_factory=dict)
    """The node of each process, by the worker's number."""
    warned: set[str] = field(default_factory=set)

    def started(self, number: int, nodes: Sequence[str]) -> None:
        before, opened = self.nodes.get(number), len(self.nodes) >= self.count
        self.nodes[number] = nodes
        own = {one: self.nodes[one] for one in ([number] if opened else sorted(self.nodes))}
        alone = before is None and len({node for nodes in self.nodes.values() for node in nodes}) == 1
        if len(self.nodes) < self.count or before == nodes or alone:
            return
        self.say(where(self.name, {one: on(nodes) for one, nodes in own.items()}))
        what, every = f"processes of {self.name}", [node for nodes in own.values() for node in nodes]
        text = divided(what, self.axes, every, self.bundles, self.key)
        if text and text not in self.warned:
            self.warned.add(text)
            self.say(text)
