"""What every generation engine does, and what it may rely on. `native.py` is the simplest honest implementation.

    prompt tokens + one Sampling a completion -> Engine -> one Completion each

Left out: retries, slots of the training loop and rewards; those belong to whoever calls.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from plaudit.runtime.coroutines import together
from plaudit.types import Completion, Sampling

if TYPE_CHECKING:
    from torch import Tensor


class Engine(Protocol):
    """Samples completions of one policy version at a time.

    The caller promises: prompts of at least one token that leave room for one more in the model's context; no `sleep`
    while a `generate` is unanswered; `load` after the weights it speaks of are complete, with a number of their own;
    one event loop at a time.
    The implementer promises: what is drawn for a Sampling depends on its seed, the prompt and the weights, not on other
    requests; log-probs are those of the distribution drawn from (`Sampling` says which); every token carries the
    version that `load` had last announced when it was drawn; an error reaches every caller that waits; a cancelled
    `generate` gives its place back.
    """

    @property
    def busy(self) -> bool:
        """Some request is waiting or being decoded."""
        ...

    async def generate(self, prompt_tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Completion]:
        """One completion of the prompt for each entry of the plan, in its order; the prompt is computed once."""
        ...

    async def drain(self) -> None:
        """Return once no sequence is under way, so that `load` interrupts none. What is not begun yet waits for it."""
        ...

    def load(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """From now on sample with these weights as `version`: all parameters by their Hugging Face names
        (`LanguageModel.hf_tensors`), or None where the engine shares them and they have changed in place."""
        ...

    def sleep(self) -> None:
        """Give up device memory that `wake` can make again."""
        ...

    def wake(self) -> None:
        """Be ready for `generate` again."""
        ...

    def close(self) -> None:
        """Refuse whatever still waits and release everything."""
        ...


class TextDecoder(Protocol):
    """The one thing engines need of a tokenizer; those of transformers have it."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any: ...


def end_tokens(*sources: object) -> frozenset[int]:
    """The ids that end a completion, from anything with an `eos_token_id`: a tokenizer, a generation config."""
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple, set, frozenset)) else [] if ids is None else [ids])
    return frozenset(found)


def check_request(prompt_tokens: Sequence[int], plan: Sequence[Sampling], max_length: int) -> None:
    """Refuse what no engine could answer, before it takes a slot."""
    if not prompt_tokens:
        raise ValueError("The prompt has no tokens; give it at least one, such as the tokenizer's BOS or EOS.")
    if len(prompt_tokens) >= max_length:
        raise ValueError(
            f"The prompt has {len(prompt_tokens)} tokens and the context {max_length}: there is no room for an answer. "
            f"Give at most {max_length - 1} tokens, or raise the engine's max_length if the model allows it."
        )
    for sampling in plan:
        if sampling.max_tokens < 1:
            raise ValueError(f"max_tokens={sampling.max_tokens}: a completion has at least one token. Give 1 or more.")
        if not 0 <= sampling.temperature < math.inf:
            raise ValueError(f"temperature={sampling.temperature} is no number from 0 on. Give 0 (greedy) or more.")
        if not 0.0 < sampling.top_p <= 1.0:
            raise ValueError(f"top_p={sampling.top_p} is outside (0, 1]. Give 1 to keep every token.")
        if sampling.top_k < 0:
            raise ValueError(f"top_k={sampling.top_k} is negative. Give 0 to keep every token.")
        if "" in sampling.stop:
            raise ValueError("A stop string is empty and would stop at once. Remove it.")


def cut_at_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text in front of the earliest stop string, or None if none of them appears."""
    found = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return text[: min(found)] if found else None


def text_before_stop(decode: Callable[[list[int]], str], tokens: list[int], sampling: Sampling) -> str | None:
    """The text in front of a stop string that the newest token completed (or, at min_tokens, any token so far)."""
    if not sampling.stop or len(tokens) < sampling.min_tokens:
        return None
    # A token adds at least a byte, so a stop string spans no more tokens than its bytes; the few before them are for
    # tokenizers that treat the start of a text differently.
    window = max(len(stop.encode()) for stop in sampling.stop) + 4
    if len(tokens) > sampling.min_tokens and cut_at_stop(decode(tokens[-window:]), sampling.stop) is None:
        return None
    return cut_at_stop(decode(tokens), sampling.stop)


def generate_all(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    plan: Sequence[Sampling],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[Completion]]:
    """Answer many prompts from plain code: one list of completions for each prompt, in order.

    `progress(done, total)` is called as prompts finish. Not to be called from inside a running event loop; there,
    await `engine.generate`. The plan is the same for every prompt: where samples of different prompts must not share
    their random numbers, give each prompt its own seeds through `generate`.
    """
    done = 0

    async def one(tokens: Sequence[int]) -> list[Completion]:
        nonlocal done
        completions = await engine.generate(tokens, plan)
        done += 1
        if progress is not None:
            progress(done, len(prompts))
        return completions

    return asyncio.run(together(one(tokens) for tokens in prompts))
