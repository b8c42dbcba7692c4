"""Pack the policy's weights that a rank sends to rollout workers: its boxes of stored tensors, or adapters.

    Placement -> boxes that this rank gives (`Moves`, planned once), digest of all ranks' boxes -> PackedWeights by part

A rank's memory holds its share of the weights and one packed part of it. Ranks with the same boxes share the sending.
Left out: how they travel (`weights/`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from plaudit.learn.ranks import Ranks
from plaudit.learn.sharding import Placement, local
from plaudit.models.base import LanguageModel
from plaudit.models.layout import Layout
from plaudit.models.lora import adapter_names
from plaudit.models.moves import Move, Moves
from plaudit.models.share import Share
from plaudit.rollout.content import digest_beneath
from plaudit.weights.changes import changes
from plaudit.weights.collective import NotHeldError
from plaudit.weights.packed import PackedWeights, PackReport, pack
from plaudit.weights.pieces import Piece, digest_of_pieces, grouped


class Publisher:
    """Packs a rank's share of the weights to publish, in parts. The caller promises that all ranks make the same calls:
    `begin`, then `pack_part` for each part, before the weights change."""

    def __init__(
        self,
        model: LanguageModel,
        place: Placement,
        ranks: Ranks,
        *,
        dtype: torch.dtype,
        device: str,
        changes: bool = True,
    ):
        """`ranks`: all of the worker group; they sum digests on `device`. `dtype`: the precision of the model.
        `changes`: send only the numbers that differ from the last version, where possible (bfloat16)."""
        self.model, self.place, self.ranks, self.changes = model, place, ranks, changes
        self.dtype, self.device = dtype, device
        self.adapters = adapter_names(model)
        self.version, self.digest, self.beneath = 0, "", ""
        self.parts: list[list[Piece]] = []
        """Pieces that this rank sends, by part; views of its weights where possible. Over all ranks they are all stored
        tensors; with LoRA only the adapters, by our names, since samplers have the base model."""
        self._held: dict[int, PackedWeights] = {}
        """The newest whole weights of each part, in bfloat16 only: the next version is sent as its changes."""
        self._moves: list[Move] | None = None

    def begin(self, version: int) -> None:
        self.version = version
        if self.adapters:
            self.beneath = self.beneath or digest_beneath(self._share, self._total)
            pieces = self._from_first(self.place.parameters(self.adapters))
        elif (share := self.place.share()) is not None:
            stored = {name: (share.dtype, shape) for name, shape in share.layout.stored.items()}
            pieces = self._pieces(share)
            self.digest = digest_of_pieces(pieces, stored, self._total)
        else:  # a model that runs through transformers
            whole = self.place.whole()
            pieces = self._from_first({} if whole is None else dict(whole.hf_tensors()))
        self.parts = grouped(pieces)

    def pack_part(self, part: int) -> PackedWeights | None:
        """Pack and return a part, or its changes if the last version is held; None if this rank has no such part. The
        last part drops the views of weights that `begin` took."""
        if part >= len(self.parts):
            return None
        found = pack(self.parts[part], self.version, digest=self.digest, beneath=self.beneath)
        if part == len(self.parts) - 1:
            self.parts = [[] for _ in self.parts]
        return self._changes(part, found)

    def all(self, device: str) -> tuple[PackedWeights, PackedWeights] | None:
        """Pack all parts together. Return (whole weights, changes or the whole again); None if there are no parts."""
        pieces, self.parts = [piece for part in self.parts for piece in part], []
        if not pieces:
            return None
        whole = pack(pieces, self.version, digest=self.digest, beneath=self.beneath, device=device)
        return whole, self._changes(0, whole)

    def _changes(self, part: int, whole: PackedWeights) -> PackedWeights:
        """Return changes to the last held version, else `whole`, as for a version sent again: it may be damaged."""
        if not (whole.halves and self.changes):
            return whole
        last, self._held[part] = self._held.get(part), whole
        return whole if last is None or last.version >= whole.version else changes(last, whole)

    def whole(self, version: int, part: int) -> PackedWeights | None:
        """Return a part's whole weights; None without such a part. Raises NotHeldError for any but the held version."""
        if part >= len(self.parts):
            return None
        held = self._held.get(part)
        if held is None or held.version != version:
            raise NotHeldError(f"version {version} is gone: this rank publishes {self.version}")
        return held

    def report(self, part: int, sent: PackedWeights | None) -> PackReport:
        """Return for the driver the digest of all weights, the number of parts, and a part's sizes in bytes."""
        whole = self._held.get(part, sent)
        return PackReport(self.digest, len(self.parts), sent.bytes if sent else 0, whole.bytes if whole else 0)

    def _from_first(self, tensors: Mapping[str, Tensor]) -> list[Piece]:
        """Return whole tensors as pieces on the first rank, [] on others."""
        pieces = [Piece.whole(name, tensor) for name, tensor in tensors.items()]
        self.digest = digest_of_pieces(pieces)
        return pieces

    def _pieces(self, share: Share) -> list[Piece]:
        if self._moves is None:
            whole = Layout(share.layout.config, share.layout.head)  # one rank holds all, as in a rollout worker
            self._moves = Moves(share.layout, whole, apart=True).sent_by(share.rank)
        views = share.boxes((move.name, move.box) for move in self._moves)
        return [
            Piece(name, share.layout.stored[name], tuple(start for start, _ in box), values, share.dtype)
            for (name, box, *_), values in zip(self._moves, views, strict=True)
        ]

    @property
    def _share(self) -> Share:
        share = self.place.share()
        assert share is not None, "only native decoders have adapters"
        return share

    def _total(self, sums: Tensor) -> None:
        there = sums.to(self.device)
        self.ranks.sum([there])
        sums.copy_(there)

    def bytes(self) -> int:
        """Return the bytes of all ranks' whole weights together."""
        sent = {name: local(one) for name, one in self.model.named_parameters() if name in (self.adapters or [name])}
        mine = {name: (one.dtype, self.place.within(name, one).shape) for name, one in sent.items()}
        return sum(math.prod(shape) for _, shape in self.place.specs(mine).values()) * self.dtype.itemsize
