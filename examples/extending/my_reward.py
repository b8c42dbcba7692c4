"""Rewards of your own: one registered by name, one named by its place."""

from __future__ import annotations

from plaudit import register_reward
from plaudit.types import Prompt


@register_reward("varied")
def varied(completion: str, *, least: int = 4) -> dict[str, float] | None:
    """Share of different words; None, which leaves the others to decide, for answers too short to tell."""
    words = completion.split()
    if len(words) < least:
        return None
    share = len(set(words)) / len(words)
    return {"reward": share, "words": float(len(words))}


async def mentions_title(prompt: Prompt, completion: str, *, bonus: float = 1.0) -> float:
    """`bonus` for an answer that takes up a word of its prompt. Async: it could as well ask a server."""
    titles = {word for word in prompt.text.split() if word.istitle()}
    return bonus * any(word in titles for word in completion.split())
