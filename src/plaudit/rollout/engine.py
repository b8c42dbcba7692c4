"""The interface of generation engines: what each must do and may rely on. `native.py` implements it.

    prompt tokens, one Sampling a completion -> Sampler -> one Completion each
    weights of a version -> Loadable -> all later samples

Left out: retries, slots of the training loop and rewards, which belong to the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from plaudit.runtime.coroutines import together
from plaudit.types import Completion, Sampling

if TYPE_CHECKING:
    from torch import Tensor


class Sampler(Protocol):
    """Samples completions of one policy version at a time.

    The caller promises: prompts of at least one token that leave room for one more in the model's context; one event
    loop at a time.
    The implementer promises: a sample depends on its seed, the prompt and the weights, not on other requests;
    log-probs are those of the distribution drawn from (`Sampling` says which); every token carries the version of the
    weights that drew it; an error is raised in every waiting call; a cancelled `generate` frees its slots.
    """

    @property
    def busy(self) -> bool:
        """True if a request is waiting or being decoded."""
        ...

    async def generate(self, prompt_tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Completion]:
        """Return a completion for each entry of the plan, in its order. The prompt is computed once."""
        ...


class Loadable(Protocol):
    """Loads weights, and frees device memory while others (such as the learner) use it.

    The caller promises: no `sleep` while a `generate` is unanswered; `load` only with complete weights, under their
    own version.
    """

    async def drain(self) -> None:
        """Return once no sequence is being decoded, so that `load` interrupts none. Later requests wait for `load`."""
        ...

    def load(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Sample with these weights as `version` from now on: all parameters by their Hugging Face names
        (`LanguageModel.hf_tensors`), or None if the engine shares them and they have changed in place."""
        ...

    def sleep(self) -> None:
        """Free device memory that `wake` can allocate again."""
        ...

    def wake(self) -> None:
        """Allocate that memory again, so that `generate` can be called."""
        ...

    def close(self) -> None:
        """Refuse all waiting requests and release everything."""
        ...


class Engine(Sampler, Loadable, Protocol):
    """Samples with weights that its owner loads."""


def generate_all(
    engine: Sampler,
    prompts: Sequence[Sequence[int]],
    plan: Sequence[Sampling],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[Completion]]:
    """Answer many prompts from plain code: one list of completions for each prompt, in order.

    `progress(done, total)` is called as prompts finish. Inside a running event loop, await `engine.generate` instead.
    All prompts have the same plan, hence the same random numbers: for different ones call `generate` with own seeds.
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
