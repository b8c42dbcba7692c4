"""Guess a number: an environment that answers the policy, until the number is found."""

import random
import re
from typing import Any

from plaudit import Turn


class Guess:
    """One game with a number from 1 to `highest`. The first guess can earn 1, every later one 1 / `highest` less."""

    def __init__(self, highest: int = 15):
        self.highest, self.guesses, self.found = highest, 0, False

    def reset(self, seed: int) -> str:
        self.number = random.Random(seed).randint(1, self.highest)  # the same one for all episodes of a group
        return f"Guess my number. It is from 1 to {self.highest}."

    def step(self, message: dict[str, Any]) -> str | Turn:
        self.guesses += 1
        guess = re.search(r"\d+", message["content"])
        if guess is None:
            return "Please say a number."
        self.found = int(guess[0]) == self.number
        if self.found:
            return Turn(done=True, reward=1 - (self.guesses - 1) / self.highest)
        return "It is higher." if int(guess[0]) < self.number else "It is lower."

    def get_reward(self) -> dict[str, float]:  # at the end, on top of what turns have earned
        return {"reward": 0.0, "found": float(self.found)}
