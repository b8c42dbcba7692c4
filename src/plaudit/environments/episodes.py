"""Episodes: the policy and an environment in turn, as tokens that are appended and never rendered again.

    prompt -> reset -> sampled turn -> tools or step -> the template's text between turns -> sampled turn -> Completion

A turn's tokens are those that were sampled. What stands between two turns are the tokens of the text that the template
writes there (`turns.py`); they are not trained, and have no log-probs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from plaudit.data.chat import Chats
from plaudit.data.fields import DataError, template_arguments
from plaudit.environments.answers import Forms
from plaudit.environments.base import Environment, EpisodeError, Message, Turn, World
from plaudit.environments.calls import as_messages, call_form
from plaudit.environments.turns import AnswerForm, between
from plaudit.rollout.engine import Sampler
from plaudit.runtime.coroutines import together
from plaudit.support.limits import rust_errors
from plaudit.types import Completion, Episode, Finish, Numbers, Prompt, Sampling, Score
from plaudit.types.distant import here

STEPPED = 256
"""Most tokens of an observation that are read a token a step, after the cache of the turn before. With a longer one the
whole context is computed in one pass."""
COUNTED = ("calls", "failed_calls", "unread_calls")
"""Figures of an episode with tools, beside its turns."""


def forms_of(chats: Chats, tools: Sequence[Any]) -> Forms:
    """Read both forms off the template. Raises DataError for one whose calls cannot be read, if there are tools."""
    return Forms(AnswerForm.of(chats), call_form(chats) if tools else None)


class Player:
    """Plays an episode for each entry of a plan. Raises DataError for a chat template that cannot show its turns."""

    def __init__(self, engine: Sampler, chats: Chats, world: World):
        self.engine, self.chats, self.world = engine, chats, world
        self.forms = forms_of(chats, world.schemas)

    async def play(self, prompt: Prompt, plan: Sequence[Sampling]) -> list[Completion]:
        """Return an episode for each entry. Each depends on its seed, the prompt, the weights and its environment,
        which has the same `seed` in all of them."""
        return await together(self._played(prompt, sampling, plan[0].seed) for sampling in plan)

    async def _played(self, prompt: Prompt, sampling: Sampling, seed: int) -> Completion:
        episode = Transcript(prompt, self.chats, self.forms, most=self.world.settings.max_tokens)
        number = hashed(sampling.seed, *prompt.tokens)
        try:
            environment = await self.world.begin()
            try:
                episode.ask(await environment.reset(row_of(prompt, seed)))
                await self._turns(episode, environment, replace(sampling, episode=number))
                earned = await environment.score()
            finally:
                await environment.close()
        except EpisodeError as error:
            earned = Score(value=None, reason=str(error))
        return episode.completion(earned)

    async def _turns(self, episode: Transcript, environment: Environment, sampling: Sampling) -> None:
        """Play turns until the environment says that it is done, or until a limit is reached."""
        for number in range(self.world.settings.max_turns):
            room = min(sampling.max_tokens, episode.room)
            seed = turn_seed(sampling.seed, number)
            own = replace(sampling, seed=seed, max_tokens=room, first=episode.first)
            (answer,) = here(await self.engine.generate(tuple(episode.context), [own]))
            episode.answered(answer, own)
            if not answer.finished:
                return
            turn = await said(environment, episode)
            if turn.reward is not None and not turn.done:
                episode.process.append((len(episode.tokens) - 1, float(turn.reward)))
            if turn.done:
                return
            if number + 1 == self.world.settings.max_turns:
                episode.finish = Finish.TURNS
            elif not episode.observe(turn.messages):
                episode.finish = Finish.LENGTH
                return


async def said(environment: Environment, episode: Transcript) -> Turn:
    """Return what the environment says to the policy's last message: its tools' results, or what its step returns."""
    message = episode.messages[-1]
    if not (calls := message.get("tool_calls")):
        return await environment.step({**message, "content": episode.last})
    results: list[Message] = []
    done, rewards = False, list[float]()
    for call in calls:
        name = call["function"]["name"]
        turn, worked = await environment.call(name, call["function"]["arguments"])
        episode.counts["failed_calls"] += not worked
        done = done or turn.done
        rewards += [] if turn.reward is None else [float(turn.reward)]
        results += [{**one, "role": "tool", "name": name, "tool_call_id": call["id"]} for one in turn.messages]
    return Turn(messages=results, done=done, reward=sum(rewards) if rewards else None)


class Transcript:
    """The tokens of an episode so far, and its chat."""

    def __init__(self, prompt: Prompt, chats: Chats, forms: Forms, *, most: int):
        self.prompt, self.chats, self.forms = prompt, chats, forms
        self.most = len(prompt.tokens) + most
        """Most tokens of a context."""
        self.same = len(prompt.messages)
        """Number of the first messages that are the prompt's."""
        self.messages: list[Message] = [dict(turn) for turn in prompt.messages]
        self.arguments = template_arguments(prompt.extra)
        self.context, self.text = list(prompt.tokens), prompt.text
        self.first = len(self.context)
        """Number of the context's first tokens that are computed in one pass."""
        self.last = ""
        """The content of the last answer, as others read it."""
        self.said, self.rest = "", ""
        """The context's text through the content of the last answer, and what was sampled after that."""
        self.tokens, self.logprobs = Numbers("i"), Numbers("f")
        self.versions, self.sampled = Numbers("i"), Numbers("b")
        self.restarts: list[tuple[int, Sequence[int]]] = []
        self.process: list[tuple[int, float]] = []
        """What turns before the last earned, as (last token of the turn, reward)."""
        self.counts = Counter[str](turns=0, **dict.fromkeys(COUNTED if forms.call else (), 0))
        self.finish = Finish.EOS

    @property
    def room(self) -> int:
        """Number of tokens that the episode may still grow by."""
        return self.most - len(self.context)

    def ask(self, question: Sequence[Message]) -> None:
        """Add a first question of the environment: a text to the last turn of the prompt, if that is a user's too."""
        if not question:
            return
        *before, last = self.messages
        first, *more = question
        if first["role"] == last["role"] == "user":
            self.messages = [*before, {**last, "content": f"{last['content']}\n{first['content']}".strip()}, *more]
            self.same = len(before)
        else:
            self.messages = [*self.messages, *question]
        try:
            self.text = self.chats.prompt(self.messages, self.arguments)
        except DataError as error:
            raise EpisodeError(f"the first question: {error}") from error
        self.context = self._encoded(self.text)
        self.first = len(self.context)
        self.restarts = [(0, tuple(self.context))]
        if self.room < 1:
            raise EpisodeError(
                "the first question leaves no room for an answer within environment.max_tokens: with it the prompt has "
                f"{len(self.context)} tokens, {len(self.prompt.tokens)} without it"
            )

    def answered(self, answer: Completion, sampling: Sampling) -> None:
        """Append the tokens of an answer, and its message with the calls that it makes."""
        whole = list(answer.tokens[:-1] if answer.finish is Finish.EOS else answer.tokens)
        found = self.forms.read(self.chats.tokenizer, whole, sampling, stopped=answer.finish is Finish.STOP)
        calls, message = found.calls, found.message
        made: Message = as_messages(calls, first=self.counts["calls"]) if calls else {"role": "assistant"}
        self.messages.append({**made, **message})
        self.last = found.last
        end = str(self.chats.tokenizer.decode(list(answer.tokens[len(whole) :]), skip_special_tokens=False))
        before = found.head + message["content"]
        self.said, self.rest = self.text + before, found.text[len(before) :] + end
        self._append(answer.tokens, answer.logprobs, answer.versions, sampled=1)
        self.counts.update(
            {"turns": 1, **({"calls": len(calls), "unread_calls": found.unread} if self.forms.call else {})}
        )
        self.finish = answer.finish

    def observe(self, messages: Sequence[Message]) -> bool:
        """Append the environment's messages, as the template writes them after an answer. Return False, with nothing
        appended, if no room would be left for an answer. Raises EpisodeError for messages that it cannot show."""
        try:
            found = between(self.chats, self.said, self.messages, messages, self.arguments, rest=self.rest)
        except DataError as error:
            raise EpisodeError(str(error)) from error
        tokens = self._encoded(found.text)
        context = self.context if found.prefix is None else self._encoded(found.prefix + found.end)
        if len(context) + len(tokens) >= self.most:
            return False
        if found.prefix is not None:
            self.context = context
            self.restarts.append((len(self.tokens), tuple(context)))
        self.text = (self.said if found.prefix is None else found.prefix) + found.end + found.text
        self.messages.extend(dict(message) for message in messages)
        self._append(tokens, [0.0] * len(tokens), [-1] * len(tokens), sampled=0)
        if found.prefix is not None or len(tokens) > STEPPED:
            self.first = len(self.context)
        return True

    def completion(self, earned: Score) -> Completion:
        """Return the episode as a completion, whose text is the policy's last message."""
        return Completion(
            tokens=self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            text=self.last,
            finish=self.finish,
            episode=Episode(
                sampled=self.sampled,
                restarts=tuple(self.restarts),
                messages=tuple(self.messages[self.same :]),
                counts={name: float(count) for name, count in self.counts.items()},
                earned=replace(earned, process=tuple(self.process)),
            ),
        )

    def _append(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], *, sampled: int
    ) -> None:
        self.context.extend(tokens)
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)
        self.sampled.extend([sampled] * len(tokens))

    def _encoded(self, text: str) -> list[int]:
        try:
            with rust_errors("the tokenizer"):
                return list(self.chats.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        except (TypeError, ValueError) as error:
            raise EpisodeError(f"{text[-40:]!r} cannot be tokenised: {error}") from error


def row_of(prompt: Prompt, seed: int) -> dict[str, Any]:
    """Return what an episode's reset may ask for: seed (of 32 bits), prompt, answer, and the row's other columns."""
    return {"seed": seed % (1 << 32), "prompt": prompt.text, "answer": prompt.answer, **prompt.extra}


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of an episode's turn; that of the first is the episode's own, as for an answer of one turn."""
    return hashed(seed, turn) if turn else seed


def hashed(*numbers: int) -> int:
    """Return 63 bits that depend on these numbers."""
    whole = "/".join(map(str, numbers))
    return int.from_bytes(hashlib.blake2b(whole.encode(), digest_size=8).digest(), "little") >> 1
