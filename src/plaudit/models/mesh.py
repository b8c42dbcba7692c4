"""Arrange ranks by axis, and check whether a model can be cut that way. Plain data, without torch.

`layout.py` says what each rank then holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from plaudit.models.config import DecoderConfig


class MeshError(ValueError):
    """A mesh does not fit a model or the number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Numbers of ranks by axis. Ranks are numbered along `tensor` first, then context, data, replicas and pipeline:
    those that communicate most are neighbours."""

    replicas: int = 1
    """Number of copies of everything that the data axis shards (HSDP)."""
    data: int = 1
    """Number of shards into which rows of weights are cut, each of which takes other rows of the batch (FSDP2)."""
    context: int = 1
    """Number of ranks that share each pass's tokens; they also shard the weights, as `data` does."""
    tensor: int = 1
    """Number of ranks that share each matrix."""
    pipeline: int = 1
    """Number of pipeline stages."""
    spans: int = 1
    """Number of spans of layers on each stage (interleaved pipeline). It is not an axis: it adds no ranks."""

    def __post_init__(self) -> None:
        if low := [f"{axis.name}={value}" for axis in fields(self) if (value := getattr(self, axis.name)) < 1]:
            raise MeshError(f"{', '.join(low)}: an axis has at least 1 rank. Leave it out.")

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.replicas, self.data, self.context, self.tensor, self.pipeline)

    @property
    def shards(self) -> int:
        """Number of shards into which the rows of each weight are cut."""
        return self.data * self.context

    @property
    def world(self) -> int:
        return math.prod(self.sizes)

    def place(self, rank: int) -> Place:
        """Return a rank's index along each axis. Raises MeshError for a rank that does not exist."""
        if not 0 <= rank < self.world:
            raise MeshError(f"rank {rank} does not exist: {self} has ranks 0 to {self.world - 1}.")
        rank, tensor = divmod(rank, self.tensor)
        rank, context = divmod(rank, self.context)
        rank, data = divmod(rank, self.data)
        stage, replica = divmod(rank, self.replicas)
        return Place(replica=replica, data=data, context=context, tensor=tensor, stage=stage)

    def span(self, layer: int, layers: int) -> int:
        """Return the number of a layer's span among those of all stages; span s is on stage s % pipeline."""
        return layer * self.pipeline * self.spans // layers

    def __str__(self) -> str:
        axes = [f"{axis.name}={value}" for axis in fields(self) if (value := getattr(self, axis.name)) > 1]
        return " ".join(axes) or "data=1"


@dataclass(frozen=True, slots=True)
class Stage:
    """The pipeline stage of a rank; without a pipeline, the only stage."""

    number: int = 0
    mesh: Mesh = Mesh()

    @property
    def count(self) -> int:
        return self.mesh.pipeline

    @property
    def last(self) -> bool:
        return self.number == self.count - 1

    def layers(self, layers: int) -> list[list[int]]:
        """Return the numbers of this stage's layers, by span, for a model of `layers` layers."""
        mine = range(self.number, self.count * self.mesh.spans, self.count)
        return [[layer for layer in range(layers) if self.mesh.span(layer, layers) == span] for span in mine]


WHOLE = Stage()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's index along each axis."""

    replica: int
    data: int
    context: int
    tensor: int
    stage: int


def faults(config: DecoderConfig, mesh: Mesh) -> list[str]:
    """Return the reasons why a mesh cannot cut a model; [] if it can."""
    heads = mesh.tensor * mesh.context
    axes = f"tensor={mesh.tensor}" + (f" times context={mesh.context}" if mesh.context > 1 else "")
    spans = f" times spans={mesh.spans}" if mesh.spans > 1 else ""
    asked = [
        (axes, heads, config.heads, "attention heads"),
        (axes, heads, config.kv_heads, "key-value heads"),
        (f"tensor={mesh.tensor}", mesh.tensor, config.mlp_width, "channels of the MLP"),
        # With rows to spare on some ranks only, each product and log-prob of the vocabulary would need a mask.
        (f"tensor={mesh.tensor}", mesh.tensor, config.vocab_size, "tokens of the vocabulary"),
        (f"pipeline={mesh.pipeline}" + spans, mesh.pipeline * mesh.spans, config.layers, "layers"),
    ]
    return [f"{axis} does not divide {whole} {what}" for axis, by, whole, what in asked if whole % by]


def check_mesh(config: DecoderConfig, mesh: Mesh, world: int | None = None) -> None:
    """Raise MeshError, with the nearest mesh that fits, if `mesh` cannot cut the model or is not of `world` ranks."""
    world = world or mesh.world
    wrong = faults(config, mesh)
    if mesh.world != world:
        wrong.insert(0, f"it has {mesh.world} ranks, and there are {world}")
    if wrong:
        near = nearest_mesh(config, mesh, world)
        raise MeshError(f"{mesh} does not fit this {config.family}: {'; '.join(wrong)}. Take {near}.")


def check_tensor(config: DecoderConfig, mesh: Mesh) -> None:
    """Check as `check_mesh` does, but name the nearest tensor size: a rollout worker may have any number of ranks."""
    if not (wrong := faults(config, mesh)):
        return
    fitting = [size for size in range(1, config.kv_heads + 1) if not faults(config, Mesh(tensor=size))]
    near = min(fitting, key=lambda size: (abs(math.log(size / mesh.tensor)), size))
    raise MeshError(f"{mesh} does not fit this {config.family}: {'; '.join(wrong)}. Take {near}.")


def cut(config: DecoderConfig, tensor: int) -> DecoderConfig:
    """Return the configuration with the sizes of one rank of a tensor axis. Raises MeshError if it does not divide."""
    if tensor == 1:
        return config
    check_mesh(config, Mesh(tensor=tensor))
    heads, kv_heads = config.heads // tensor, config.kv_heads // tensor
    channels, tokens = config.mlp_width // tensor, config.vocab_size // tensor
    return replace(config, heads=heads, kv_heads=kv_heads, mlp_width=channels, vocab_size=tokens)


def nearest_mesh(config: DecoderConfig, mesh: Mesh, world: int) -> Mesh:
    """Return the fitting mesh of `world` ranks whose axes differ least from those of `mesh`, as ratios. One always
    fits: all ranks on the data axis."""
    spans = {1, mesh.spans}
    meshes = (replace(found, spans=n) for found in _meshes(world) for n in spans if n == 1 or found.pipeline > 1)
    fitting = (found for found in meshes if not faults(config, found))

    def distance(other: Mesh) -> float:
        return round(sum(abs(math.log(a / b)) for a, b in zip(mesh.sizes, other.sizes, strict=True)), 9)

    return min(
        fitting,
        key=lambda found: (
            distance(found),
            found.spans != mesh.spans,
            found.pipeline,
            found.tensor,
            found.context,
            found.replicas,
        ),
    )


def _meshes(world: int) -> Iterator[Mesh]:
    def factors(rest: int, count: int) -> Iterator[tuple[int, ...]]:
        if count == 1:
            yield (rest,)
            return
        for size in (size for size in range(1, rest + 1) if rest % size == 0):
            yield from ((size, *others) for others in factors(rest // size, count - 1))

    for replicas, data, context, tensor, pipeline in factors(world, 5):
        yield Mesh(replicas=replicas, data=data, context=context, tensor=tensor, pipeline=pipeline)
