"""`plaudit layout`: compute which part of a recipe's models each rank of a mesh would hold, without loading them.

    recipe, overrides -> configurations by role; mesh -> Layout -> bytes per rank by part, and one rank's boxes

Left out: activations, KV caches, libraries, and models that only transformers can compute.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from plaudit.models.layout import Box, Layout
from plaudit.models.mesh import Mesh, MeshError, Place
from plaudit.models.moves import Moves
from plaudit.models.parts import numbered
from plaudit.preflight.held import GIB as GIB
from plaudit.preflight.held import PARTS, Model
from plaudit.support.fields import nearest
from plaudit.types import Role


def read_mesh(text: str) -> Mesh:
    """Parse `data=8 tensor=2`, with blanks or commas. Raises MeshError for another axis or size."""
    axes: dict[str, int] = {}
    for word in re.split(r"[\s,]+", text.strip()):
        name, _, size = word.partition("=")
        if name not in Mesh.__dataclass_fields__:
            raise MeshError(f"a mesh has no axis {name!r}{nearest(name, Mesh.__dataclass_fields__)}")
        if not size.isdecimal():
            raise MeshError(f"{word}: give the axis a whole number, such as {name}=2")
        axes[name] = int(size)
    return Mesh(**axes)


def amounts(models: Sequence[Model], place: Place) -> dict[str, int]:
    """Return bytes by part, over all models on a rank. Passes take turns, so only the largest `gathered` counts."""
    held = [model.held(place) for model in models]
    sums = {part: sum(one[part] for one in held) for part in PARTS}
    return sums | {"gathered": max(model.gathered(place.stage) for model in models)}


def extremes(models: Sequence[Model]) -> tuple[Place, Place]:
    """Return the ranks that hold most and least. Ranks along the tensor axis hold equal amounts; along data and
    context, the first rank holds the most."""
    mesh = models[0].layout.mesh
    front = [replace(mesh.place(0), stage=stage) for stage in range(mesh.pipeline)]
    back = [replace(place, data=mesh.data - 1, context=mesh.context - 1) for place in front]

    def total(place: Place) -> int:
        return sum(amounts(models, place).values())

    return max(front, key=total), min(back, key=total)


def report(models: Sequence[Model], rank: int) -> Iterator[str]:
    """Yield the lines that `plaudit layout` prints."""
    mesh = models[0].layout.mesh
    most, least = extremes(models)
    words = ("gathered", "sum")
    yield f"{mesh}: {mesh.world:,} ranks. GiB per rank by calculation, without activations, caches and libraries."
    yield f"{'':24}" + "".join(f"{word:>11}" for word in (*PARTS, *words))
    for model in models:
        what = "trained" if model.trained else "frozen"
        yield _row(f"{model.role}, {what}", model.held(most) | {"gathered": model.gathered(most.stage)})
    yield _row("rank with the most", amounts(models, most))
    yield _row("rank with the least", amounts(models, least))
    for model in models:
        config, numbers = model.layout.config, sum(map(math.prod, model.layout.parameters.values()))
        stored = len(model.layout.stored)
        yield f"\n{model.role}: {config.family}, {numbers / 1e9:,.3f} billion numbers in {stored:,} stored tensors"
        yield from boxes(model.layout, rank)


def _row(name: str, amounts: Mapping[str, int]) -> str:
    figures = (*amounts.values(), sum(amounts.values()))
    return f"{name:24}" + "".join(f"{figure / GIB:11.3f}" for figure in figures)


def sends(models: Sequence[Model], mesh: Mesh) -> Iterator[str]:
    """Describe what must be sent to move the models to another mesh on the same ranks, in the precision of forward
    passes. Boxes that a rank already has are not sent."""
    for model in models:
        other = Layout(model.layout.config, model.layout.head, mesh)
        yield f"\n{model.role} to {mesh}: {_sent(model, other, apart=False)}"


def publish(models: Sequence[Model]) -> Iterator[str]:
    """Describe what a rollout worker is sent of a policy's version; nothing for a policy with adapters."""
    for model in models:
        if model.role is Role.POLICY and not model.layout.lora.rank:
            whole = Layout(model.layout.config, model.layout.head)  # a worker's own layout
            yield f"\nto publish the policy: {_sent(model, whole, apart=True)}"


def _sent(model: Model, other: Layout, *, apart: bool) -> str:
    began = time.perf_counter()
    out: Counter[int] = Counter()
    into: Counter[int] = Counter()
    count = 0
    for names, sends in Moves(model.layout, other, apart=apart).alike:
        for box, source, target in sends:
            if apart or source != target:
                size = len(names) * model.bytes * math.prod(stop - start for start, stop in box)
                out[source] += size
                into[target] += size
                count += len(names)
    most, largest = (max(sizes.values(), default=0) / GIB for sizes in (out, into))
    return (
        f"{count:,} boxes are sent, {sum(out.values()) / GIB:,.3f} GiB in all, at most {most:,.3f} GiB from a rank and "
        f"{largest:,.3f} to one; planned in {time.perf_counter() - began:.1f} s"
    )


def boxes(layout: Layout, rank: int) -> Iterator[str]:
    """List the boxes that a rank holds. Layers with equal boxes share one line."""
    place = layout.mesh.place(rank)
    axes = ", ".join(f"{axis} {index}" for axis, index in asdict(place).items())
    layers: dict[tuple[str, Box, bool], list[int]] = {}
    for one in layout.slices(rank):
        number, pattern = numbered(one.name)
        layers.setdefault((pattern, one.box, one.first), []).extend([int(number)] if number else [])
    yield f"rank {rank} ({axes}) holds {len(layers):,} kinds of boxes:" if layers else f"rank {rank} holds nothing"
    for (pattern, box, first), numbers in layers.items():
        shape = layout.stored[pattern.replace("{}", str(numbers[0])) if numbers else pattern]
        name = pattern.replace("{}", _span(numbers))
        ranges = ", ".join(
            ":" if one == (0, size) else f"{one[0]}:{one[1]}" for one, size in zip(box, shape, strict=True)
        )
        yield f"  {name:52} {'x'.join(map(str, shape)):>16}  [{ranges}]{'' if first else '  copy'}"


def _span(numbers: Sequence[int]) -> str:
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    return f"{{{numbers[0]}-{numbers[-1]}}}"
