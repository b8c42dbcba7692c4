"""What an answer of several turns has beside its tokens.

tokens of an episode -> sequences -> one (prefix, tokens after it) for each that the policy was asked with
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plaudit.types.score import Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The policy's turns and, between them, what its environment said."""

    sampled: Sequence[int]
    """1 for each token of the answer that the policy sampled, 0 for one of the environment, which is never trained."""
    restarts: tuple[tuple[int, Sequence[int]], ...] = ()
    """(index, prefix) pairs: the policy was asked for what follows from token `index` on with this prefix, in place of
    the prompt and earlier tokens, as the environment or the chat template changed these."""
    messages: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    """The chat after those turns of the prompt that the environment did not change."""
    counts: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Figures by name, such as the numbers of turns and of calls of tools."""
    earned: Score | None = field(default=None, hash=False)
    """What the environment says that the episode is worth. Replayed episodes have none."""

    @property
    def ends(self) -> list[int]:
        """Index of the last token of each of the policy's turns."""
        whole, starts = [*self.sampled, 0], {start for start, _ in self.restarts}
        ends = (not after or place + 1 in starts for place, after in enumerate(whole[1:]))
        return [place for place, (one, end) in enumerate(zip(self.sampled, ends, strict=True)) if one and end]

    @property
    def failure(self) -> Score | None:
        """Return why the environment failed, if it did."""
        return self.earned if self.earned is not None and self.earned.failed else None

    def sequences(self, prompt: Sequence[int]) -> Iterator[tuple[Sequence[int], slice]]:
        """Yield each sequence that was sampled, as (prefix, which tokens come after it): one, and one a restart."""
        begins = [*([] if self.restarts and not self.restarts[0][0] else [(0, prompt)]), *self.restarts]
        ends = [*(start for start, _ in begins[1:]), len(self.sampled)]
        for (start, prefix), end in zip(begins, ends, strict=True):
            yield prefix, slice(start, end)
