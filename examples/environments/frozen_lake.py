"""A world of gymnasium in words: FrozenLake, seen as it prints itself."""

from typing import Any

import gymnasium

from plaudit import Turn

MOVES = ("left", "down", "right", "up")


class FrozenLake:
    """A walk over ice from S to G, past the holes H. Any environment that prints itself can be played so."""

    def reset(self, seed: int) -> str:
        self._lake = gymnasium.make("FrozenLake-v1", render_mode="ansi", is_slippery=False)
        self._lake.reset(seed=seed)
        return f"Say one of {', '.join(MOVES)}.\n{self._lake.render()}"

    def step(self, message: dict[str, Any]) -> str | Turn:
        said = [move for move in MOVES if move in message["content"].lower()]
        if len(said) != 1:
            return f"Say one of {', '.join(MOVES)}."
        _, reward, ended, _, _ = self._lake.step(MOVES.index(said[0]))
        return Turn(done=True, reward=float(reward)) if ended else str(self._lake.render())

    def get_reward(self) -> float:  # of a walk that nothing has ended
        return 0.0
