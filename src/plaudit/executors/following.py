"""An EMA reference on its own ranks, which get the policy's weights after each step, as rollout workers do.

training ranks -> packed weights, whole, by the object store -> the reference's ranks: each moves its boxes towards them
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plaudit.executors.publisher import Publisher
from plaudit.learn.scorer import Scorer
from plaudit.learn.sharding import Placement
from plaudit.loop.models import Scorers
from plaudit.models.base import LanguageModel
from plaudit.models.share import Share, narrowed
from plaudit.rollout.accepted import box_of
from plaudit.settings.tree import Settings, SettingsError
from plaudit.types import Role
from plaudit.weights.packed import PackedWeights, PackReport, pieces_of, unpack
from plaudit.weights.pieces import WeightsError, digest_of_pieces
from plaudit.weights.transport import Store

if TYPE_CHECKING:
    from plaudit.learn.ranks import Ranks
    from plaudit.runtime.ray_worker_group import RayWorkerGroup


class Followed:
    """The methods by which a rank sends its policy, or moves its EMA reference towards the policy."""

    settings: Settings
    models: dict[Role, LanguageModel]
    placements: dict[Role, Placement]
    members: dict[Role, Scorer]
    ranks: Ranks
    device: str

    def check_follows(self) -> None:
        """Raise SettingsError for an EMA reference on its own ranks that runs through transformers."""
        ema = self.settings.reference.ema
        if ema and self.models.keys() == {Role.REFERENCE} and self.placements[Role.REFERENCE].share() is None:
            raise SettingsError(
                f"runtime.placement.reference cannot be used with reference.ema={ema}: this model runs through "
                "transformers, and moves only beside its policy. Leave the placement out, or set reference.ema=0"
            )

    @cached_property
    def _followed(self) -> Publisher:
        policy = self.models[Role.POLICY]
        place = self.placements[Role.POLICY]
        return Publisher(policy, place, self.ranks, dtype=policy.dtype, device=self.device, changes=False)

    def followed(self, version: int, part: int) -> tuple[PackedWeights | None, PackReport]:
        """As `RankProcess.pack_part`, but always whole weights and never changes."""
        if part == 0:
            self._followed.begin(version)
        sent = self._followed.pack_part(part)
        return sent, self._followed.report(part, sent)

    def follow(self, way: float, *packed_parts: PackedWeights) -> None:
        """Move the reference by the share `way` towards the policy in these packed parts. Raises WeightsError."""
        share = self.placements[Role.REFERENCE].share()
        assert share is not None, "check_follows refuses it"
        weights = unpack(*packed_parts)
        if digest_of_pieces(pieces_of(weights)) != packed_parts[0].digest:
            raise WeightsError(
                "The policy's weights changed on their way to the reference: continue with resume=latest."
            )
        self.members[Role.REFERENCE].blend(lambda name: part_of(share, name, weights), way)


def part_of(share: Share, name: str, weights: Mapping[str, Tensor]) -> Tensor:
    """Return this rank's part of the parameter `name`, copied from whole stored tensors."""
    found = torch.empty_like(share.tensors[name])
    for one, _ in share.of(name):
        box = box_of(weights, one)
        narrowed(found, one.at, one.sizes).copy_(box.t() if one.transposed else box)
    return found


class EMAReference(Scorers):
    """Controller handle of an EMA reference on its own ranks. `follow` sends them the policy's weights."""

    def __init__(self, ranks: RayWorkerGroup[Any], policy: RayWorkerGroup[Any]):
        super().__init__(ranks.part(Scorer, Role.REFERENCE), ranks)
        self.ranks, self.policy = ranks, policy

    async def follow(self, share: float) -> None:
        self.moves += 1
        packed_parts, _ = await Store().collect(self.policy, Followed.followed, self.moves)
        await self.ranks.each(Followed.follow, share, *packed_parts)
