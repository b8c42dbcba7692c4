"""Training ranks that sample too, each with an engine in its process.

policy in parts -> boxes that ranks give each other (`Moves`, planned once) -> a whole model on each -> its engine
adapters in parts -> all of them on each rank, on the base model that it has whole -> its engine
policy whole on each rank -> an engine on that same model: nothing moves
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plaudit.compute.digest import digest
from plaudit.executors.initial import initial_model
from plaudit.executors.trainer import RankProcess
from plaudit.learn.ranks import Ranks, buckets
from plaudit.learn.sharding import Placement
from plaudit.models.base import LanguageModel
from plaudit.models.decoder import Decoder
from plaudit.models.lora import adapter_names, add_lora
from plaudit.models.mesh import Mesh
from plaudit.models.moves import Moves
from plaudit.models.settings import LoraSettings
from plaudit.models.share import Share
from plaudit.rollout.accepted import take_weights
from plaudit.rollout.build import build_engine
from plaudit.rollout.worker import RolloutWorker
from plaudit.runtime.ray_worker_group import RayWorkerGroup
from plaudit.settings.tree import SettingsError
from plaudit.types import Role
from plaudit.weights.collective import Invitation
from plaudit.weights.packed import PackedWeights, pieces_of
from plaudit.weights.pieces import digest_of_pieces
from plaudit.weights.transport import Shipment, Stored


class SamplingRank(RankProcess, RolloutWorker):
    """A training rank with an engine. Training methods run in a thread; the driver lets the engine sleep meanwhile."""

    moved: Reallocation | Adapted | None = None
    version, held, digest = 0, "", ""

    def build(self, address: str, rank: int, world: int, timeout: float) -> None:
        super().build(address, rank, world, timeout)
        settings = self.settings
        model: LanguageModel = self.models[Role.POLICY]
        if self._shards or self.axes.axis.size > 1:
            share = (place := self.placements[Role.POLICY]).share()
            whole = initial_model(settings, self.tokenizer, self.device).requires_grad_(False)
            if share is None or not isinstance(whole, Decoder):
                raise SettingsError(
                    "runtime.placement={generate: {inside: train}}: this model runs through transformers, and its "
                    "shards cannot become whole on each rank. Give rollout workers processes of their own"
                )
            lora = settings.model.lora
            self.moved = Adapted(place, whole, lora) if lora.rank else Reallocation(share, whole, self.ranks)
            model = whole
        engine = build_engine(model, self.tokenizer, slots=settings.rollout.slots)
        RolloutWorker.__init__(self, engine)

    def reallocate(self, version: int) -> str:
        """Copy the policy's current weights to this rank's engine and return their digest. All ranks must call it. If
        each rank has the whole policy, copy nothing and return ""."""
        self.version = version
        if self.moved is not None:
            self.moved.run()
            self.held = self.moved.digest()
            self.publisher.begin(version)
            self.digest, self.publisher.parts = self.publisher.digest + self.publisher.beneath, []
        return self.digest

    async def load(self, attempt: int, *sent: PackedWeights | Invitation) -> tuple[int, str]:
        """Sample with the weights of the last `reallocate`. Return their version and this rank's digest of them."""
        self._enter(attempt)
        self.engine.load(None, self.version)
        return self.version, self.held


class Reallocation:
    """Fills a whole model on each rank from the parts that all ranks train. Parameters that every rank trains whole, in
    the same dtype, are shared by both models and not copied."""

    @torch.no_grad()
    def __init__(self, share: Share, model: Decoder, ranks: Ranks):
        self.model, self.ranks, self.dtype = model, ranks, share.dtype
        for name, own in model.named_parameters() if share.layout.mesh.data == 1 else ():
            if share.layout.copied(name) and share.tensors[name].dtype == own.dtype:
                own.data = share.tensors[name].detach()
        whole = model.share(Mesh(replicas=ranks.world), ranks.rank, dict(model.named_parameters()))
        mine = share.rank
        moves = [move for move in Moves(share.layout, whole.layout) if mine in (move.source, move.target)]
        sends = [move for move in moves if move.source == mine]
        taken = [move for move in moves if move.target == mine]
        out = zip(sends, share.boxes((move.name, move.box) for move in sends), strict=True)
        into = zip(taken, whole.boxes((move.name, move.box) for move in taken), strict=True)
        self._out: dict[int, list[Tensor]] = {}
        self._into: dict[int, list[Tensor]] = {}
        for move, values in out:
            self._out.setdefault(move.target, []).append(values)
        for move, values in into:
            self._into.setdefault(move.source, []).append(values)
        here = zip(self._out.pop(mine, []), self._into.pop(mine, []), strict=True)
        self._kept = [(one, other) for one, other in here if one.data_ptr() != other.data_ptr()]
        self.bytes = sum(one.numel() * self.dtype.itemsize for views in self._into.values() for one in views)
        """Bytes that this rank receives from other ranks for each version of the weights."""

    @torch.no_grad()
    def run(self) -> None:
        """Copy own boxes, and exchange others a bucket per pair of ranks at a time. All ranks must call it."""
        for one, other in self._kept:
            other.copy_(one)
        where = "cpu" if dist.get_backend() == "gloo" else self.model.device
        out = zip_longest(*(self._buckets(rank, views) for rank, views in self._out.items()))
        into = zip_longest(*(self._buckets(rank, views) for rank, views in self._into.items()))
        for sending, receiving in zip_longest(out, into, fillvalue=()):
            asked, arriving = list[dist.P2POp](), list[tuple[Tensor, list[Tensor]]]()
            for rank, views in filter(None, sending):
                flat = torch.cat([view.reshape(-1).to(where, self.dtype) for view in views])
                asked.append(dist.P2POp(dist.isend, flat, rank))
            for rank, views in filter(None, receiving):
                flat = torch.empty(sum(view.numel() for view in views), dtype=self.dtype, device=where)
                asked.append(dist.P2POp(dist.irecv, flat, rank))
                arriving.append((flat, views))
            for work in dist.batch_isend_irecv(asked):
                work.wait()
            for flat, views in arriving:
                parts = torch.split(flat, [view.numel() for view in views])
                for view, values in zip(views, parts, strict=True):
                    view.copy_(values.view(view.shape))

    def digest(self) -> str:
        """Return the digest of the whole model."""
        return digest_of_pieces(pieces_of(dict(self.model.hf_tensors())))

    @staticmethod
    def _buckets(rank: int, views: list[Tensor]) -> list[tuple[int, list[Tensor]]]:
        return [(rank, some) for some in buckets(views)]


class Adapted:
    """Gathers the adapters that ranks train in parts into a whole model on each rank. That model has had the frozen
    base model since it was built."""

    def __init__(self, place: Placement, model: Decoder, lora: LoraSettings):
        self.model, self.place = add_lora(model, lora).requires_grad_(False), place

    def run(self) -> None:
        """Gather all adapters. All ranks must call it."""
        take_weights(self.model, self.place.parameters(adapter_names(self.model), everyone=True))

    def digest(self) -> str:
        """Return the digest of the adapters followed by that of the base model."""
        base = dict(self.model.named_parameters())
        adapters = {name: base.pop(name) for name in adapter_names(self.model)}
        return digest(adapters) + digest(base)


class InProcess:
    """A `Transport` to engines inside the ranks."""

    async def pack(self, ranks: RayWorkerGroup[Any], version: int) -> Shipment:
        return Stored((), version, (await ranks.each(SamplingRank.reallocate, version))[0])
