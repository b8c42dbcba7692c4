"""Guess a number: an environment that answers the policy, until the number is found."""

import random
import re
from typing import Any

from plaudit import Turn


class Guess:
    """One game with a number from 1 to `highest`. Fewer guesses earn more."""

    def __init__(self, highest: int = 15):
        self.highest, self.guesses = highest, 0

    def reset(self, seed: int) -> str:
        self.number = random.Random(seed).randint(1, self.highest)  # the same one for all episodes of a group
        return f"Guess my number. It is from 1 to {self.highest}."

    def step(self, message: dict[str, Any]) -> str | Turn:
        self.guesses += 1
        guess = re.search(r"\d+", message["content"])
        if guess is None:
            return "Please say a number."
        if int(guess[0]) == self.number:
            return Turn(done=True, reward=1 / self.guesses, parts={"found": 1.0})
        return "It is higher." if int(guess[0]) < self.number else "It is lower."

    def get_reward(self) -> dict[str, float]:  # of an episode that no step has ended
        return {"reward": 0.0, "found": 0.0}
