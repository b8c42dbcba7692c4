"""How a completion is drawn, and why it ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Finish(StrEnum):
    """Why a completion ended."""

    EOS = "eos"
    """The model emitted an end token, which is the completion's last token."""
    STOP = "stop"
    """A stop string appeared; the text is cut before it, the tokens are kept as sampled."""
    LENGTH = "length"
    """`max_tokens` or the model's context was reached: the answer is unfinished."""
    TURNS = "turns"
    """An episode reached its limit of turns: it is unfinished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one completion is drawn. `temperature=0` is greedy. `top_k=0` and `top_p=1` keep the whole distribution.
    Log-probs are of the distribution that tokens are drawn from, after temperature, top-k, top-p and `min_tokens`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    special_tokens: bool = False
    """True if the completion's text shows special tokens, but never the end token."""
    seed: int = 0
    """Seed of this completion: the sample does not depend on the engine's other work."""
    episode: int | None = None
    """Number of the episode of which this is a turn. The KV cache of its last turn is used again, if it is kept."""
    first: int = 0
    """Of an episode's turn: number of the prompt's first tokens that are computed in one pass, always the same. Later
    ones are computed a token a step, as sampled ones were, so that a lost cache can be made again bit for bit."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
