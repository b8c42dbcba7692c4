"""Games of the package textarena for one player.

    environment: {function: "plaudit.adapters.textarena:Game", options: {game: GuessTheNumber-v0}}

The policy reads what the game says since its last move. Left out: games of several players, and those that want a word
list from the internet (Wordle, Hangman, WordSearch) or a language model of their own (TwentyQuestions, GuessWho).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import textarena

from plaudit.environments.base import Turn

_LOCK = threading.Lock()


class Game:
    """One game; `options` are those of its class. The reward is the game's own, between -1 and 1; an invalid move is
    answered with the game's reason, and a second one in a row ends most games."""

    def __init__(self, game: str, **options: Any):
        raw = f"{game}-raw"  # says only what is new
        known = textarena.envs.registration.ENV_REGISTRY
        if game not in known:
            near = [name for name in known if name.startswith(game.partition("-")[0])]
            raise ValueError(f"textarena has no game {game!r}: {', '.join(near[:8]) or 'see its README'}")
        self._state: Any = None
        self._game = self._alone(lambda: textarena.make(raw if raw in known else game, **options))

    def reset(self, seed: int) -> str:
        """Return the rules. All episodes of a group play the same game."""
        self._alone(lambda: self._game.reset(num_players=1, seed=seed))
        return self._heard()

    def step(self, message: dict[str, Any]) -> Turn:
        """Make the move that the message says."""
        done, _ = self._alone(lambda: self._game.step(message["content"]))
        if not done:
            return Turn(messages=[{"role": "user", "content": self._heard()}])
        rewards, about = self._game.close()
        parts = {name: float(value) for name, value in about[0].items() if isinstance(value, bool | int | float)}
        return Turn(done=True, reward=float(rewards[0]), parts=parts)

    def get_reward(self) -> float:
        """Return 0, which a game adds that no move has ended."""
        return 0.0

    def _heard(self) -> str:
        _, said = self._game.get_observation()
        if isinstance(said, str):
            return said
        moves = textarena.ObservationType.PLAYER_ACTION
        texts = (part for one in said if moves not in one for part in one if type(part) is str)
        return "\n".join(texts).strip() or "Your move."

    def _alone(self, call: Callable[[], Any]) -> Any:
        """Call with this game's own state of Python's random numbers, which games draw from."""
        with _LOCK:
            before = random.getstate()
            if self._state is not None:
                random.setstate(self._state)
            try:
                return call()
            finally:
                self._state = random.getstate()
                random.setstate(before)
