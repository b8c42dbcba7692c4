"""The base of engines in this process: prompts wait in one queue, and each step gives the answers more tokens.

    generate -> a Draft for each sample -> queue -> [step]* -> Completion

A subclass adds the step (`_advance`), and drops the state that it keeps between steps (`_forget`, `_withdraw`).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace

from plaudit.rollout.settings import DrawSettings
from plaudit.rollout.text import TextDecoder, text_before_stop, text_of
from plaudit.runtime.memory import OutOfMemory, recover_memory
from plaudit.runtime.queue import Queue
from plaudit.support.fields import leaves
from plaudit.types import Completion, Finish, Numbers, Sampling

log = logging.getLogger(__name__)

DIVERGED = "A sampled log-prob is not finite: the model's weights or logits overflowed."
DRAWN = tuple(leaves(DrawSettings))


@dataclass(eq=False, slots=True)
class Draft:
    """One completion while it is being sampled."""

    prompt: list[int]
    """The same list object as in the other samples of its prompt."""
    sampling: Sampling
    limit: int
    """Most tokens of the answer."""
    further: list[int] = field(default_factory=list)
    """Tokens of the prompt that are read one a step, after `prompt`."""
    read: int = 0
    """Number of `further` tokens that have been read, or are read by the next step."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probs that have left the device."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that drew each token; the newest tokens may lack theirs."""

    @property
    def length(self) -> int:
        """Tokens so far of prompt and answer."""
        return len(self.prompt) + self.read + len(self.tokens)

    @property
    def most(self) -> int:
        """Most tokens of prompt and answer."""
        return len(self.prompt) + len(self.further) + self.limit

    @property
    def given(self) -> int | None:
        """The next token if it is the prompt's, None if it is to be sampled."""
        return self.further[self.read] if self.read < len(self.further) else None

    def begun_by(self, version: int) -> bool:
        """True if the weights of `version` computed the prompt: they drew its first token, or none has a version."""
        return not self.versions or self.versions[0] == version

    def drawn_by(self, version: int) -> list[int]:
        """Give this version to tokens that lack theirs, and return `versions`."""
        self.versions += [version] * (len(self.tokens) - len(self.versions))
        return self.versions


class QueuedEngine(ABC):
    """The part of an `Engine` that queues requests and makes completions. Subclasses add steps and weights."""

    def __init__(self, tokenizer: TextDecoder, *, slots: int, max_length: int, ends: Collection[int]):
        self.tokenizer, self.slots, self.max_length, self.ends = tokenizer, slots, max_length, frozenset(ends)
        self.version = 0
        self._queue: Queue[Draft, Completion] = Queue(self._drive, withdrawn=self._withdraw, failed=self._failed)
        self._asleep = False

    @property
    def busy(self) -> bool:
        return self._queue.busy

    async def generate(self, prompt_tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Completion]:
        return await self.answered(self.drafts(prompt_tokens, plan))

    def drafts(self, prompt_tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Draft]:
        """Return a draft for each entry of the plan. While `answered` waits, their `tokens` grow."""
        if self._asleep:
            raise RuntimeError("The engine is asleep or closed. Call wake() before generate().")
        check_request(prompt_tokens, plan, self.max_length)
        prompt, room = list(prompt_tokens), self.max_length - len(prompt_tokens)
        return [self._draft(prompt, one, min(one.max_tokens, room)) for one in plan]

    async def answered(self, drafts: Sequence[Draft]) -> list[Completion]:
        return await self._queue.ask(drafts, ahead=any(draft.further for draft in drafts))

    def _draft(self, prompt: list[int], sampling: Sampling, limit: int) -> Draft:
        """Return the draft of an answer; `prompt` is the same object in all of a call."""
        return Draft(prompt, sampling, limit)

    async def drain(self) -> None:
        await self._queue.drain()

    def _loaded(self, version: int) -> None:
        """Set the version of the weights; earlier tokens keep the old one. Let a drained queue go on."""
        for draft in self._queue.unanswered:
            draft.drawn_by(self.version)
        self.version = version
        self._queue.go_on()

    def sleep(self) -> None:
        if self.busy:
            raise RuntimeError("sleep() would lose unanswered requests. Await them first.")
        self._forget()
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def close(self) -> None:
        self._queue.fail(RuntimeError("The engine was closed before this request was answered."))
        self._asleep = True

    # What steps are made of

    async def _drive(self) -> None:
        """Takes: drafts, until none is left. Waits for: nothing, but other tasks run between steps. Gives: answers."""
        while self._queue.under_way or self._queue.open:
            self._advance()
            await asyncio.sleep(0)

    @abstractmethod
    def _advance(self) -> None:
        """Take a step: sample one or more tokens for each running draft, and for waiting ones that get a slot."""

    @abstractmethod
    def _forget(self) -> None:
        """Drop all state that is kept between steps: no draft is running any more."""

    @abstractmethod
    def _withdraw(self, drafts: Collection[Draft]) -> None:
        """Drop these drafts, since their calls were cancelled."""

    def _failed(self, error: BaseException | None) -> None:
        """Clean up after `error` was raised in every waiting call; None: all calls were cancelled."""
        self._forget()

    def _begin_again(self, used: int) -> None:
        """After memory ran out with `used` slots, decode all running drafts from their start with half as many slots.
        Raises OutOfMemory if `used` was 1."""
        self._forget()
        for draft in self._queue.again():
            draft.read, draft.tokens, draft.logprobs, draft.versions = 0, [], [], []
        self.slots = fewer_slots(used)

    def _ending(self, draft: Draft, *, ended: bool, full: bool) -> tuple[Finish, str] | None:
        """Return (why the draft ends with its newest token, its text); None if it continues. `ended`: that token is an
        end token. `full`: no further token is allowed."""
        tokens, sampling = draft.tokens, draft.sampling
        if ended:
            return Finish.EOS, text_of(self.tokenizer, tokens[:-1], sampling)
        if (text := text_before_stop(self.tokenizer, tokens, sampling)) is not None:
            return Finish.STOP, text
        return (Finish.LENGTH, text_of(self.tokenizer, tokens, sampling)) if full else None

    def _answer(self, draft: Draft, finish: Finish, text: str) -> None:
        completion = Completion(
            tokens=Numbers("i", draft.tokens),
            logprobs=Numbers("f", draft.logprobs),
            versions=Numbers("i", draft.drawn_by(self.version)),
            text=text,
            finish=finish,
        )
        self._queue.answer(draft, completion)


def check_request(prompt_tokens: Sequence[int], plan: Sequence[Sampling], max_length: int) -> None:
    """Raise ValueError for a request that cannot be answered: no tokens, no room for an answer, or wrong sampling."""
    if not prompt_tokens:
        raise ValueError("The prompt has no tokens: give at least one, such as the tokenizer's BOS or EOS.")
    if len(prompt_tokens) >= max_length:
        raise ValueError(
            f"The prompt has {len(prompt_tokens)} tokens and the context {max_length}, so no answer fits. "
            f"Give at most {max_length - 1} tokens, or raise the engine's max_length if the model allows it."
        )
    for sampling in plan:
        values = asdict(sampling)
        for leaf in DRAWN:
            if not leaf.rule.takes(values[leaf.key]):
                raise ValueError(replace(leaf, value=values[leaf.key]).complaint())
        if sampling.episode is not None and not 1 <= sampling.first <= len(prompt_tokens):
            raise ValueError(f"first={sampling.first} must be from 1 to the {len(prompt_tokens)} tokens of the prompt")
        if "" in sampling.stop:
            raise ValueError("stop has an empty string, which would stop at once: remove it")


def fewer_slots(used: int) -> int:
    """Free memory and return half of the `used` slots, which did not fit in it. Raises OutOfMemory if `used` was 1."""
    recover_memory()
    if used <= 1:
        raise OutOfMemory(
            "memory does not hold one answer while it is decoded: lower rollout.max_tokens or data.max_prompt_tokens, "
            "or give the engine a machine with more memory"
        )
    log.warning("Memory ran out while %d answers were decoded. Now %d are: set rollout.slots.", used, used // 2)
    return used // 2
