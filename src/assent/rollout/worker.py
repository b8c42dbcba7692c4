"""A rollout worker: an engine with a copy of the policy, in a process of its own.

    driver's pool -> generate, load (parcel) -> engine

Every method is a coroutine, so that the process goes on decoding while it answers. Weights are taken only if version,
names and digest are as sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from assent.rollout.accepted import Accepted
from assent.rollout.engine import Engine
from assent.types import Completion, Sampling
from assent.weights.parcel import Parcel, unpack


class RolloutWorker:
    """Answers for one engine."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._accepted = Accepted()

    async def generate(self, prompt_tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Completion]:
        return await self.engine.generate(prompt_tokens, plan)

    async def load(self, parcel: Parcel) -> tuple[int, str]:
        """Sample with these weights from now on, sequences under way included. Returns their version and digest.

        Raises WeightsError, with the engine as it was, where they are old, another model's, or changed on their way.
        """
        weights = unpack(parcel)
        self._accepted.check(weights, parcel.version, sent=parcel.digest)
        self.engine.load(weights, parcel.version)
        self._accepted.take(weights, parcel.version)
        return parcel.version, parcel.digest
