"""The slice table: which box of which stored tensor each rank of a mesh holds. Plain data, without torch.

    configuration, Mesh -> Layout -> Slice: a stored tensor's box, and its place in the rank's own parameter

A rank's part of a parameter is found in two steps. The tensor axis takes rows (query, key, value, gate, up, the
vocabulary) or columns (the projections back into the residual stream), or copies (norms, biases of columns, learned
positions, a scalar head); adapters go with their projection. Then the data and context axes together take rows of what
is left, in equal chunks from the front, as FSDP2 does: the last chunks may be shorter, or empty. The pipeline axis
takes whole layers; replicas hold copies. The stored buffers of these families hold no weights, so no rank holds them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from plaudit.models.config import DecoderConfig, HeadKind
from plaudit.models.mesh import Mesh, Place, check_mesh
from plaudit.models.parts import Part, Shape, blocks, numbered, parts_of, shapes
from plaudit.models.settings import LoraSettings

Box = tuple[tuple[int, int], ...]
"""First and last (excluded) index in each dimension."""


ADAPTABLE = (".qkv.weight", ".output.weight", ".up.weight", ".down.weight")
"""Parameters that may have adapters."""


class Piece(NamedTuple):
    """A block of a parameter that a rank holds: its place in the whole parameter and in the rank's part."""

    start: tuple[int, ...]
    """Where the block begins in the whole parameter."""
    at: tuple[int, ...]
    """Where it begins in the rank's part of the parameter."""
    sizes: Shape

    @property
    def box(self) -> Box:
        return tuple((start, start + size) for start, size in zip(self.start, self.sizes, strict=True))


class Slice(NamedTuple):
    """A box of a stored tensor that a rank holds."""

    name: str
    box: Box
    ours: str
    """The name of our parameter that the box is a part of."""
    start: tuple[int, ...]
    """Where it begins in the whole parameter."""
    at: tuple[int, ...]
    """Where it begins in the rank's part of the parameter."""
    transposed: bool
    first: bool
    """False for a copy: of all ranks with this box, the first one saves it."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The box's shape in our parameter (transposed, if the stored tensor is)."""
        stored = tuple(stop - start for start, stop in self.box)
        return tuple(reversed(stored)) if self.transposed else stored


class Layout:
    """The slices of every rank. Raises MeshError for a mesh that does not fit the model. With `lora`, it also knows the
    adapters, which no stored tensor holds."""

    def __init__(
        self,
        config: DecoderConfig,
        head: HeadKind = "lm",
        mesh: Mesh | None = None,
        lora: LoraSettings | None = None,
    ):
        self.config, self.head, self.mesh, self.lora = config, head, mesh or Mesh(), lora or LoraSettings()
        check_mesh(config, self.mesh)
        self.parameters = shapes(config, head)
        """{our name of a parameter: its whole shape}."""
        self.parts = parts_of(config, head, self.parameters)
        """{name of a stored tensor: the `Part` of our parameter that it holds}."""
        self.adapted: dict[str, dict[str, Part]] = {}
        """{parameter with adapters: {adapter: the `Part` of the parameter that it changes}}."""
        self.adapters: dict[str, Shape] = {}
        """{our name of an adapter's matrix: its whole shape}."""
        for stored, part in self.parts.items() if self.lora.rank else ():
            if part.ours.endswith(ADAPTABLE) and (leaf := stored.split(".")[-2]) in (self.lora.targets or [leaf]):
                self.adapted.setdefault(part.ours, {})[leaf] = part
                (rows, columns), module = self.parameters[part.ours], part.ours.removesuffix(".weight")
                self.adapters[f"{module}.lora_a.{leaf}"] = (self.lora.rank, columns)
                self.adapters[f"{module}.lora_b.{leaf}"] = (part.size or rows, self.lora.rank)
        self._kinds = {ours: (numbered(ours)[1], self._split(ours)) for ours in self.parameters}
        self._stages = {ours: self._stages_of(ours) for ours in (*self.parameters, *self.adapters)}
        self._cuts: dict[tuple[str, int, int], list[tuple[int, Box, tuple[int, ...], tuple[int, ...]]]] = {}

    @cached_property
    def stored(self) -> dict[str, Shape]:
        """Stored tensors and their shapes."""
        found = {}
        for name, part in self.parts.items():
            shape = self.parameters[part.ours]
            ours = (part.size or shape[0], *shape[1:])
            found[name] = tuple(reversed(ours)) if part.transposed else ours
        return found

    @cached_property
    def _parts(self) -> dict[str, list[tuple[str, Part]]]:
        found: dict[str, list[tuple[str, Part]]] = {ours: [] for ours in self.parameters}
        for name, part in self.parts.items():
            found[part.ours].append((name, part))
        return found

    def stages(self, ours: str) -> tuple[int, ...]:
        """Return the pipeline stages that have a parameter: for a tied embedding the first and, as head, the last."""
        return self._stages[ours]

    def _stages_of(self, ours: str) -> tuple[int, ...]:
        last, (index, _) = self.mesh.pipeline - 1, numbered(ours)
        if index:
            return (self.mesh.span(int(index), self.config.layers) % self.mesh.pipeline,)
        if ours.startswith(("norm.", "head.")):
            return (last,)
        shared = ours == "embedding.weight" and self.head == "lm" and self.config.tied and last > 0
        return (0, last) if shared else (0,)

    def whole(self, ours: str) -> Shape:
        """Return the whole shape of a parameter or adapter."""
        return self.parameters[ours] if ours in self.parameters else self.adapters[ours]

    def shape(self, ours: str, place: Place) -> Shape:
        """Return the shape of a rank's part of a parameter or adapter."""
        first, last = self._chunk(ours, self._shard(place))
        columns = [stop - start for start, stop in self._columns(ours, place.tensor)]
        return (last - first, *columns)

    def copied(self, ours: str) -> bool:
        """True if every rank of the tensor axis holds the same copy of a parameter or adapter."""
        return self.mesh.tensor == 1 or self._split(ours) == "copied"

    def partial(self, ours: str) -> bool:
        """True if each tensor rank holds a copy but computes only a part of its gradient: it uses the copy for its own
        heads, rows or run of tokens. False for a scalar head: each rank computes it for all tokens."""
        return self.mesh.tensor > 1 and self.copied(ours) and ours != "head.weight"

    def slices(self, rank: int) -> Iterator[Slice]:
        """Yield the slices that a rank holds."""
        place = self.mesh.place(rank)
        for ours in self.parameters:
            if place.stage in self.stages(ours):
                yield from self.of(ours, place)

    def of(self, ours: str, place: Place) -> Iterator[Slice]:
        """Yield the slices of one parameter at `place`, whose stage must have the parameter."""
        pattern, split = self._kinds[ours]
        copied = place.replica or place.stage != self.stages(ours)[0]
        first = not (copied or (place.tensor and split == "copied"))
        key = (pattern, place.tensor, shard := self._shard(place))
        if key not in self._cuts:
            self._cuts[key] = list(self._cut(ours, place.tensor, shard))
        for which, box, start, at in self._cuts[key]:
            name, part = self._parts[ours][which]
            yield Slice(name, box, ours, start, at, part.transposed, first)

    def _cut(self, ours: str, tensor: int, shard: int) -> Iterator[tuple[int, Box, tuple[int, ...], tuple[int, ...]]]:
        """Yield for each slice (index of the parameter's part, box, start in the whole parameter, start in the rank's
        part). These are the same for this parameter of every layer."""
        for piece in self._held(ours, tensor, shard):
            (start, *left), (at, *others) = piece.start, piece.at
            for which, (_, part) in enumerate(self._parts[ours]):
                stop = part.start + (part.size or self.parameters[ours][0])
                first, last = max(part.start, start), min(stop, start + piece.sizes[0])
                if first < last:
                    box = ((first - part.start, last - part.start), *piece.box[1:])
                    begins = (first, *left), (first - start + at, *others)
                    yield which, tuple(reversed(box)) if part.transposed else box, *begins

    def pieces(self, ours: str, place: Place) -> list[Piece]:
        """Return the blocks that make up a rank's part of a parameter or adapter."""
        return list(self._held(ours, place.tensor, self._shard(place)))

    def _shard(self, place: Place) -> int:
        return place.data * self.mesh.context + place.context

    def _held(self, ours: str, tensor: int, shard: int) -> Iterator[Piece]:
        columns = self._columns(ours, tensor)
        begin, end = self._chunk(ours, shard)
        done = 0
        for start, size in self._pieces(ours, tensor):
            low, high = max(begin, done), min(end, done + size)
            if low < high:
                whole = (start + low - done, *(column for column, _ in columns))
                sizes = (high - low, *(stop - first for first, stop in columns))
                yield Piece(whole, (low - begin, *(0 for _ in columns)), sizes)
            done += size

    def _split(self, ours: str) -> str:
        """Return how the tensor axis divides a parameter or adapter: "rows", "columns" or "copied"."""
        if ours in self.adapters:
            module, half, _ = ours.rsplit(".", 2)
            of_weight = self._split(f"{module}.weight")
            return of_weight if (half == "lora_b") == (of_weight == "rows") else "copied"
        module, kind = ours.rsplit(".", 1)
        if module.endswith((".qkv", ".mlp.up")) or module == "embedding" or (module == "head" and self.head == "lm"):
            return "rows"
        return "columns" if module.endswith((".output", ".down")) and kind == "weight" else "copied"

    def _pieces(self, ours: str, tensor: int) -> list[tuple[int, int]]:
        """Return the runs of rows that a tensor rank's part joins, as (first row in the whole parameter, rows)."""
        rows = self.whole(ours)[0]
        if self.copied(ours) or self._split(ours) != "rows":
            return [(0, rows)]
        if ours in self.adapters:  # the projection's rows that the adapter changes
            module, _, leaf = ours.rsplit(".", 2)
            first = self.adapted[f"{module}.weight"][leaf].start
            inside = [
                (max(start, first), min(start + size, first + rows))
                for start, size in self._pieces(f"{module}.weight", tensor)
            ]
            return [(start - first, stop - start) for start, stop in inside if start < stop]
        sizes = blocks(self.config, ours.rsplit(".", 1)[0]) or [rows]
        starts = itertools.accumulate(sizes, initial=0)
        shares = [size // self.mesh.tensor for size in sizes]
        return [(start + tensor * share, share) for start, share in zip(starts, shares, strict=False)]

    def _columns(self, ours: str, tensor: int) -> Box:
        others = self.whole(ours)[1:]
        if self._split(ours) != "columns":
            return tuple((0, size) for size in others)
        (size,) = others
        share = size // self.mesh.tensor
        return ((tensor * share, (tensor + 1) * share),)

    def _chunk(self, ours: str, shard: int) -> tuple[int, int]:
        """Return the first and last (excluded) row that a shard takes of a tensor rank's part."""
        rows = sum(size for _, size in self._pieces(ours, 0))
        size = -(-rows // self.mesh.shards)
        return min(shard * size, rows), min((shard + 1) * size, rows)
