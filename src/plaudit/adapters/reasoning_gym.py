"""Questions of the package reasoning-gym with several tries: after a wrong answer the policy may answer again.

data: {train: "reasoning_gym:chain_sum", as_chat: true}
environment: {function: "plaudit.adapters.reasoning_gym:Tries", options: {tries: 3}}
"""

from __future__ import annotations

from typing import Any

from plaudit.environments.base import Turn
from plaudit.support import gym


class Tries:
    """A question, and `hint` after each wrong answer but the last. The reward is the scorer's of the last answer, times
    `discount` for each try before it; an answer that scores 1 is the last."""

    def __init__(self, tries: int = 3, hint: str = "That is not right. Try again.", discount: float = 0.5):
        self._left, self._hint, self._discount, self._worth = tries, hint, discount, 1.0

    def reset(self, answer: str, reasoning_gym: str, index: int) -> None:
        """Take the row's question, which the prompt asks."""
        self._row: dict[str, Any] = {"answer": answer, "reasoning_gym": reasoning_gym, "index": index}

    def step(self, message: dict[str, Any]) -> Turn:
        score = gym.score(message["content"], **self._row)
        self._left -= 1
        if score >= 1 or not self._left:
            first = float(self._worth == 1.0 and score >= 1)
            return Turn(done=True, reward=score * self._worth, parts={"solved": float(score >= 1), "at_first": first})
        self._worth *= self._discount
        return Turn(messages=[{"role": "user", "content": self._hint}])
