"""What every reward looks like: a prompt and its completions in, one Score each out.

    rules.py (Python functions), judge.py (a learned reward model), weighted.py (a sum of rewards)

Scale, shift, clip and the penalty for unfinished answers come after it, in `shaping.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from plaudit.types import Completion, Prompt, Score


class Reward(Protocol):
    """The caller passes completions of one prompt. The implementer returns one Score per completion, in order.

    What cannot be scored is a Score without a value and with the reason: it is never 0, and one bad completion never
    raises or takes the others with it. Raising is for what makes all scoring impossible, such as wrong settings.
    """

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]: ...
