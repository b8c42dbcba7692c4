"""What a reward says of an answer.

answer -> reward -> Score: a number with its parts, or the reason why there is none
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NOT_APPLICABLE = "not applicable"
"""Reason of a Score whose reward does not apply to the answer. This is not a failure."""
LARGEST_SCORE = 1e18
"""Scores and parts above this size are refused: float32 cannot hold their squares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward, or the reason why there is none. `value=None` masks the response; it is never read as 0."""

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    process: tuple[tuple[int, float], ...] = ()
    """Process rewards: (token, reward) pairs, the token by its index in the answer. They are part of `value`, of which
    the rest stands at the end."""
    reason: str | None = None
    transient: bool = False
    """True if it failed for a reason that may pass, such as a server that does not answer: it may be asked again."""

    @property
    def applicable(self) -> bool:
        return self.reason != NOT_APPLICABLE

    @property
    def failed(self) -> bool:
        return self.value is None and self.applicable
