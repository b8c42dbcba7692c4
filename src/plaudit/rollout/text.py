"""The text of tokens, and where it ends: at an end token, or before a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from plaudit.support.limits import rust_errors
from plaudit.types import Sampling


class TextDecoder(Protocol):
    """The tokenizer method that engines call; transformers' tokenizers have it."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any: ...


def end_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the ids that end a completion: the tokenizer's EOS, or an empty set if it has none."""
    end = tokenizer.eos_token_id
    return frozenset() if end is None else frozenset([end])


def cut_at_stop(text: str, stops: Sequence[str]) -> str | None:
    """Return the text before the earliest stop string, or None if none appears."""
    found = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return text[: min(found)] if found else None


def text_of(decoder: TextDecoder, tokens: list[int], sampling: Sampling) -> str:
    """Decode tokens to text. Special tokens are left out unless `sampling.special_tokens` is set."""
    with rust_errors("the tokenizer"):
        return str(decoder.decode(tokens, skip_special_tokens=not sampling.special_tokens))


def text_before_stop(decoder: TextDecoder, tokens: list[int], sampling: Sampling) -> str | None:
    """Return the text before the earliest stop string if the newest token completed one, else None. Below min_tokens
    return None; at min_tokens any token may have completed it. Stop strings may hold special tokens."""
    if not sampling.stop or len(tokens) < sampling.min_tokens:
        return None

    def whole(part: list[int]) -> str:
        return str(decoder.decode(part, skip_special_tokens=False))

    # A token adds at least a byte, so a stop string spans no more tokens than its bytes; the few before them are for
    # tokenizers that treat the start of a text differently.
    window = max(len(stop.encode()) for stop in sampling.stop) + 4
    if len(tokens) > sampling.min_tokens and cut_at_stop(whole(tokens[-window:]), sampling.stop) is None:
        return None
    cut = cut_at_stop(whole(tokens), sampling.stop)
    if cut is None or sampling.special_tokens:
        return cut
    before = len(tokens)  # tokens that end before the stop string, which may begin within the next one
    while not cut.startswith(whole(tokens[:before])):
        before -= 1
    return text_of(decoder, tokens[:before], sampling) + cut[len(whole(tokens[:before])) :]
