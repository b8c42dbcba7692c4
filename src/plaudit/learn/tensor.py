"""Place a model that is cut along the tensor axis (`compute/axis.py`): each rank has a part of each matrix.

    Whole, Waiting or Sharded, over the ranks of the data axis with the same part -> Cut

`Cut` combines the parts of one replica's ranks, for gradients, their norm, checkpoints and samplers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plaudit.compute.axis import ALONE, Axis
from plaudit.learn.ranks import Alone, Ranks, Together, begun, buckets
from plaudit.learn.sharding import Around, Placement, Within
from plaudit.learn.shards import Grid
from plaudit.models.base import LanguageModel
from plaudit.models.decoder import Decoder
from plaudit.models.layout import Layout
from plaudit.models.lora import whole_model
from plaudit.models.mesh import WHOLE, Mesh, Stage
from plaudit.models.share import Share, narrowed


@dataclass(frozen=True)
class Axes:
    """The ranks that this rank communicates with, by axis of the mesh."""

    data: Ranks
    """Ranks with the same part of each model, and other rows of a batch or other tokens of its rows."""
    grid: Grid
    """The ranks of `data`, arranged as replicas that are each sharded."""
    tensor: Ranks
    """Ranks with the same rows, and other parts of each matrix."""
    axis: Axis
    """The ranks of `tensor`, in the form that models take."""
    context: Axis
    """Ranks with the same rows and the same part of each matrix, and other tokens of these rows."""
    line: Ranks
    """Ranks with the same rows, and other layers: the stages of this pipeline."""
    stage: Stage
    """This rank's place in `line`, in the form that models take: which layers it has."""

    @classmethod
    def along(cls, ranks: Ranks, cuts: Mesh, *, device: torch.device, timeout: float, replicas: int = 1) -> Axes:
        """Make the process groups of all axes; all ranks must call it. `cuts` has the sizes of the tensor, context and
        pipeline axes. Rank numbers run fastest along tensor, then context, data, replicas, and last pipeline."""

        def joined(groups: Tensor, alike: int = 1) -> Together:
            patience = timedelta(seconds=timeout)
            mine, _ = dist.new_subgroups_by_enumeration(groups.tolist(), timeout=patience)  # type: ignore[no-untyped-call]
            return Together(device, mine, alike=alike)

        tensor, context, pipeline = cuts.tensor, cuts.context, cuts.pipeline
        numbers = torch.arange(ranks.world).view(pipeline, replicas, -1, tensor)
        alike = numbers.flatten(1, 2).transpose(1, 2).flatten(0, 1)  # (stages * tensor parts, ranks of the data axis)
        data, axis, beside, stage = ranks, ALONE, ALONE, WHOLE
        parts: Ranks = Alone()
        line: Ranks = Alone()
        if tensor > 1:
            parts = joined(numbers.view(-1, tensor))
            axis = Axis(parts.rank, tensor, parts.group, spread=True)
        if context > 1:
            others = joined(numbers.view(-1, context, tensor).transpose(1, 2).reshape(-1, context))
            beside = Axis(others.rank, context, others.group)
            data = Together(device, ranks.group, alike=context)
        if pipeline > 1:
            line = joined(numbers.view(pipeline, -1).t())
            stage = Stage(line.rank, Mesh(pipeline=pipeline, spans=cuts.spans))
        if len(alike) > 1:
            data = joined(alike, context) if alike.shape[1] > 1 else Alone()
        grid = Grid(data, Alone(), ())
        if replicas > 1:
            shards = joined(numbers.transpose(2, 3).flatten(0, 2))
            copies = joined(numbers.flatten(2).transpose(1, 2).flatten(0, 1))
            mine = numbers[ranks.rank // (ranks.world // pipeline)]
            grid = Grid(shards, copies, mine[:, :, ranks.rank % tensor].tolist())
        return cls(data, grid, parts, axis, beside, line, stage)


class Cut(Around):
    """Placement of a rank's part of each matrix. `inner` places it on the data axis; `tensor`: ranks of all parts."""

    def __init__(self, inner: Placement, model: Decoder, tensor: Ranks):
        super().__init__(inner)
        self.model, self.tensor = model, tensor
        self.layout = Layout(model.config, model.head_kind, Mesh(tensor=tensor.world), model.lora)

    def sum(self, gradients: Mapping[str, Tensor]) -> None:
        self.tensor.sum(gradient for name, gradient in gradients.items() if self.layout.partial(name))
        self.inner.sum(gradients)

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Return the norm of the whole gradient; a parameter that every tensor rank copies counts once."""
        copied = {name: gradient for name, gradient in gradients.items() if self.layout.copied(name)}
        parts = {name: gradient for name, gradient in gradients.items() if name not in copied}
        return math.hypot(self.inner.norm(copied), math.sqrt(self.tensor.total(self.inner.norm(parts) ** 2)))

    def within(self, key: str, tensor: Tensor) -> Within:
        share, first = self._share(), not self.tensor.rank
        if tensor.dim() == 0:
            return Within((), (((), tensor),), first and not self.ranks.rank)
        name = key.rpartition("/")[2]
        held = tuple((piece.box, narrowed(tensor, piece.at, piece.sizes)) for piece in share.pieces(name))
        mine = not share.layout.mesh.place(share.rank).replica and (first or not share.layout.copied(name))
        return Within(share.layout.whole(name), held, mine)

    def parameters(self, names: Iterable[str], *, everyone: bool = False) -> dict[str, Tensor]:
        mine = self.inner.parameters(names, everyone=everyone)
        found: dict[str, Tensor] = {}
        parts = [name for name in mine if not self.layout.copied(name)]
        keys = iter(parts)
        for bucket in buckets(mine[name] for name in parts):
            gathered = self.tensor.gather(torch.cat([tensor.reshape(-1) for tensor in bucket]), everyone=everyone)
            pieces = [torch.split(flat, [tensor.numel() for tensor in bucket]) for flat in gathered]
            for number, tensor in enumerate(bucket):
                name = next(keys)
                if pieces:
                    found[name] = self._joined(name, [one[number].view(tensor.shape) for one in pieces])
        return {name: found.get(name, mine[name]) for name in mine} if everyone or not self.tensor.rank else {}

    @torch.no_grad()
    def _joined(self, name: str, parts: Iterable[Tensor]) -> Tensor:
        """Return the whole parameter on the CPU, from its parts in rank order."""
        parts = list(parts)
        whole = parts[0].new_empty(self.layout.whole(name), device="cpu")
        for rank, part in enumerate(parts):
            for piece in self.layout.pieces(name, self.layout.mesh.place(rank)):
                narrowed(whole, piece.start, piece.sizes).copy_(narrowed(part, piece.at, piece.sizes))
        return whole

    def whole(self) -> LanguageModel | None:
        return put_together(self, self.model)

    def _share(self) -> Share:
        share = self.share()
        assert share is not None, "only models that lie in boxes are cut"
        return share

    def begin(self, work: Callable[[], None]) -> bool:
        first = not (self.tensor.rank or self.ranks.rank)
        whole = begun(work, first, lambda failed: self.ranks.most(self.tensor.most(failed)))
        return whole and self.writes


def put_together(place: Placement, model: Decoder) -> LanguageModel | None:
    """Return the whole model, from the parts of all ranks, which must all call it; None on ranks above 0."""
    empty = whole_model(model)
    empty.pending = None
    names = dict(empty.named_parameters())
    tensors = place.parameters(names)
    filled = {id(p): nn.Parameter(tensors[name], requires_grad=False) for name, p in names.items() if tensors}
    return copy.deepcopy(empty, filled) if filled else None
