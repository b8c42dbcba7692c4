"""What a rank gives rollout workers in other processes of the policy: its boxes of stored tensors, or adapters.

    Placement -> boxes that this rank gives (`Moves`, planned once), digest of all ranks' boxes -> a Parcel a part

No rank has more than its own share of the weights and a part of it, and ranks with the same boxes share the sending.
Left out: how parcels travel (`weights/`).
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
from plaudit.weights.parcel import Given, Parcel, pack
from plaudit.weights.pieces import Piece, digest_of_pieces, grouped


class Publisher:
    """One rank's part in publishing. The caller promises that all ranks make the same calls: `begin`, then `parcel` for
    each part, before the weights change."""

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
        """`ranks`: all of the worker group, on whose `device` they sum. `dtype`: the precision of the model. `changes`:
        send only these, where that is possible."""
        self.model, self.place, self.ranks, self.changes = model, place, ranks, changes
        self.dtype, self.device = dtype, device
        self.adapters = adapter_names(model)
        self.version, self.digest, self.beneath = 0, "", ""
        self.parts: list[list[Piece]] = []
        """What this rank gives, views of its weights if it can be. The parts of all ranks hold all stored tensors; or
        only the adapters by their parameters' names, as samplers have the base model."""
        self._held: dict[int, Parcel] = {}
        """The newest whole parcel of each part, in bfloat16 only: the next version is sent as its changes."""
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
        else:  # it runs through transformers
            whole = self.place.whole()
            pieces = self._from_first({} if whole is None else dict(whole.hf_tensors()))
        self.parts = grouped(pieces)

    def parcel(self, part: int) -> Parcel | None:
        """Copy a part, or its changes since the last version, where that was held; None if this rank has no such part.
        The last one ends what `begin` began."""
        if part >= len(self.parts):
            return None
        found = pack(self.parts[part], self.version, digest=self.digest, beneath=self.beneath)
        if part == len(self.parts) - 1:
            self.parts = [[] for _ in self.parts]
        return self._changes(part, found)

    def all(self, device: str) -> tuple[Parcel, Parcel] | None:
        """Copy all parts as one, whole and as `parcel` gives it."""
        pieces, self.parts = [piece for part in self.parts for piece in part], []
        if not pieces:
            return None
        whole = pack(pieces, self.version, digest=self.digest, beneath=self.beneath, device=device)
        return whole, self._changes(0, whole)

    def _changes(self, part: int, whole: Parcel) -> Parcel:
        """What a worker needs that holds the last version. The same version again is sent whole: it may be damaged."""
        if not (whole.halves and self.changes):
            return whole
        last, self._held[part] = self._held.get(part), whole
        return whole if last is None or last.version >= whole.version else changes(last, whole)

    def whole(self, version: int, part: int) -> Parcel | None:
        """The whole parcel of a part that `parcel` gave. Raises NotHeldError if there is a newer one."""
        if part >= len(self.parts):
            return None
        held = self._held.get(part)
        if held is None or held.version != version:
            raise NotHeldError(f"version {version} is gone: this rank publishes {self.version}")
        return held

    def told(self, part: int, sent: Parcel | None) -> Given:
        """What the driver knows of a parcel."""
        whole = self._held.get(part, sent)
        return Given(self.digest, len(self.parts), sent.bytes if sent else 0, whole.bytes if whole else 0)

    def _from_first(self, tensors: Mapping[str, Tensor]) -> list[Piece]:
        """Whole tensors, which only the first rank has."""
        pieces = [Piece.whole(name, tensor) for name, tensor in tensors.items()]
        self.digest = digest_of_pieces(pieces)
        return pieces

    def _pieces(self, share: Share) -> list[Piece]:
        if self._moves is None:
            whole = Layout(share.layout.config, share.layout.head)  # what a rollout worker has
            self._moves = Moves(share.layout, whole, apart=True).given(share.rank)
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
        """The size of all ranks' parcels."""
        sent = {name: local(one) for name, one in self.model.named_parameters() if name in (self.adapters or [name])}
        mine = {name: (one.dtype, self.place.within(name, one).shape) for name, one in sent.items()}
        return sum(math.prod(shape) for _, shape in self.place.specs(mine).values()) * self.dtype.itemsize
