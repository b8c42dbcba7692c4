"""An agent's episode: requests by OpenAI's protocol as turns of one or several chats with the policy.

    ChatRequest -> the Branch that it goes on with, or a new one -> engine -> reply
    branches, one after the other -> Completion, a further row (restart) for each

A request that goes on from a chat that the policy answered (the same messages, then others) is the next turn of that
chat: a branch. What was sampled stays as it was sampled, as in an episode of a class. Any other request begins a branch
of its own. The same request gets the same reply.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from plaudit.data.chat import Chats
from plaudit.data.fields import THOUGHTS, Message, template_arguments
from plaudit.environments.answers import Reads
from plaudit.environments.base import EpisodeError, LateError, LostError, explained
from plaudit.environments.episodes import hashed
from plaudit.environments.protocol import ChatRequest, RequestError
from plaudit.environments.rendered import transcript
from plaudit.environments.settings import EnvironmentSettings
from plaudit.environments.speaker import Speech
from plaudit.environments.transcript import Transcript
from plaudit.rewards.functions import as_score
from plaudit.rollout.engine import Sampler
from plaudit.types import Completion, Episode, Finish, Numbers, Prompt, Sampling, Score
from plaudit.types.distant import here

TICK = 1.0
"""Most seconds between two looks whether an agent is silent for too long."""
Asked = tuple[int, Sampling, Reads, "asyncio.Task[Completion]"]
"""Tokens of a request's prompt, how its answer is drawn and read, and the answer."""


class Session:
    """The branches of an episode, and the replies that its agent got."""

    def __init__(
        self,
        engine: Sampler,
        chats: Chats,
        forms: Callable[[Sequence[Any]], Reads],
        settings: EnvironmentSettings,
        prompt: Prompt,
        sampling: Sampling,
    ):
        self.chats, self.prompt, self.branches = chats, prompt, list[Branch]()
        self._engine, self._forms, self._settings, self._sampling = engine, forms, settings, sampling
        self._most = len(prompt.tokens) + settings.max_tokens
        self._defaults = {name: one for name, one in template_arguments(prompt.extra).items() if name != "tools"}
        self._replies: dict[str, Asked] = {}
        self._again = set[str]()
        """Replies that an agent got whose process was then lost, and that the next one did not ask for yet."""
        self._requests = self._refused = 0
        self._answers: list[Branch] = []
        """The branch of each answer, in the order in which they came."""
        self._limit: Finish | None = None
        """The limit for which a request was refused, if none was answered after it."""
        self._refusal = ""
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has what the engine raised."""

    async def watched(self, work: asyncio.Future[Any]) -> Score:
        """Return what the agent's call returns. Raises what the engine raised, whatever the agent made of it; else
        EpisodeError if the agent raises, gets no answer, or is silent for longer than `environment.timeout` while no
        request is open, and LostError if its process is lost. An agent that raises on a limit has earned 0."""
        timeout, silent, before = self._settings.timeout, 0.0, 0
        both: set[asyncio.Future[Any]] = {work, self._broken}
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # read, or asyncio would log it
        while not (await asyncio.wait(both, timeout=min(TICK, timeout), return_when=asyncio.FIRST_COMPLETED))[0]:
            busy = before != self._requests or any(not task.done() for *_, task in self._replies.values())
            silent, before = 0.0 if busy else silent + min(TICK, timeout), self._requests
            if silent >= timeout:
                work.cancel()
                raise LateError(f"the agent asked nothing for {timeout:g} s (environment.timeout)")
        if self._broken.done():
            self._broken.result()
        if isinstance(lost := work.exception(), LostError):
            raise lost
        if self._again:
            raise EpisodeError(
                f"the agent's process was lost, and in another one it did not ask {len(self._again)} of its requests "
                "again: let them depend on the row, `seed` and the replies alone"
            )
        if not self._answers:
            raised = work.exception()
            reason = self._refusal or ("it asked nothing" if raised is None else explained(raised))
            raise EpisodeError(f"no request of the agent was answered: {reason}")
        try:
            return as_score(work.result())
        except (Exception, SystemExit) as error:
            if self._limit is not None:
                return Score(value=0.0)
            raise EpisodeError(f"the agent: {explained(error)}") from error

    def begin_again(self) -> None:
        """Let another call of the agent make the requests again that a lost one made, and get the same replies."""
        self._requests, self._refused, self._limit = 0, 0, None
        self._again = set(self._replies)

    @property
    def replies(self) -> int:
        """How many different requests were made."""
        return len(self._replies)

    def speech(self, request: ChatRequest) -> Speech:
        """Begin to answer a request, or return the answer to one that was the same. Raises RequestError."""
        self._requests += 1
        request.chat_template_kwargs = {**self._defaults, **request.chat_template_kwargs}
        asked = [request.messages, request.arguments, request.max_tokens, request.stop, request.seed]
        key = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()
        try:
            if key in self._again:
                self._again.remove(key)
                self._limit = None
            elif key not in self._replies:
                self._replies[key] = self._asked(request, int(key[:16], 16))
            elif self._requests - len(self._replies) + len(self._again) - self._refused > self._settings.max_turns:
                raise RequestError("the same request gets the same reply: give another seed to draw another", "seed")
        except RequestError as error:
            self._refused, self._refusal = self._refused + 1, str(error)
            raise
        return _Reply(self, request, *self._replies[key])

    def _asked(self, request: ChatRequest, number: int) -> Asked:
        if request.n != 1:
            raise RequestError("n is above 1: send a request for each answer, each with another seed", "n")
        if len(self._replies) >= (turns := self._settings.max_turns):
            self._limit = Finish.TURNS
            raise RequestError(f"the episode has had its {turns} turns (environment.max_turns)", code="turn_limit")
        branch = self._continued(request) or self._begun(request)
        room = min(self._sampling.max_tokens, request.max_tokens, self._most - len(branch.text.context))
        stop = (*self._sampling.stop, *(one for one in request.stop if one not in self._sampling.stop))
        sampling = replace(self._sampling, seed=hashed(self._sampling.seed, number), max_tokens=room, stop=stop)
        sampling = replace(sampling, episode=branch.number, first=branch.text.first)
        task = asyncio.ensure_future(self._answered(branch, request, sampling))
        return len(branch.text.context), sampling, branch.text.forms, task

    def _continued(self, request: ChatRequest) -> Branch | None:
        """Return the branch that the request goes on with, with its further messages read; None if there is none."""
        going = [branch for branch in reversed(self._answers) if branch.goes_on(request)]
        if not going:
            return None
        branch = max(going, key=lambda one: (len(one.heard), one.thinks_as(request)))
        try:
            if not branch.text.observe(request.messages[len(branch.heard) :]):
                raise self._too_long()
        except EpisodeError:
            return None  # the template cannot show them after the answer, so a new branch begins
        branch.waits = True
        return branch

    def _begun(self, request: ChatRequest) -> Branch:
        try:
            forms = self._forms(request.tools)
            text, tokens = forms.opened(self.chats, request.messages, request.arguments)
        except (EpisodeError, ValueError) as error:
            raise RequestError(str(error), "messages") from error
        if len(tokens) >= self._most:
            raise self._too_long()
        extra = {"tools": request.tools, "chat_template_kwargs": request.chat_template_kwargs}
        asked = Prompt(id="", text=text, tokens=tuple(tokens), messages=tuple(request.messages), extra=extra)
        number = hashed(self._sampling.seed, *self.prompt.tokens, len(self.branches))
        begun = transcript(asked, self.chats, forms, most=self._most - len(tokens))
        begun.ask(())
        self.branches.append(Branch(begun, request, number))
        return self.branches[-1]

    def _too_long(self) -> RequestError:
        self._limit = Finish.LENGTH
        room = f"{self._most} tokens (environment.max_tokens after the row's prompt)"
        reason = f"the messages leave no room for an answer within {room}"
        return RequestError(reason, "messages", code="context_length_exceeded")

    async def _answered(self, branch: Branch, request: ChatRequest, sampling: Sampling) -> Completion:
        try:
            (answer,) = here(await self._engine.generate(tuple(branch.text.context), [sampling]))
        except Exception as error:
            if not self._broken.done():
                self._broken.set_exception(error)
            raise RequestError(f"the policy cannot answer: {explained(error)}", status=503) from error
        branch.text.answered(answer, sampling)
        said = {**branch.text.messages[-1], "content": branch.text.last}
        branch.heard, branch.waits = [_heard(one) for one in (*request.messages, said)], False
        self._answers.append(branch)
        self._limit = None
        return answer

    def close(self) -> None:
        """End what is under way."""
        for *_, task in self._replies.values():
            task.cancel()
        self._broken.cancel()

    def completion(self, earned: Score) -> Completion:
        """Return the episode as a completion: its branches one after the other, each with its own beginning."""
        tokens, logprobs, versions = Numbers("i"), Numbers("f"), Numbers("i")
        sampled, restarts = Numbers("b"), list[tuple[int, Sequence[int]]]()
        messages, counts = list[Message](map(dict, self.prompt.messages)), Counter[str](turns=0)
        for branch in self.branches:
            text, start = branch.text, len(tokens)
            end = max((place + 1 for place, one in enumerate(text.sampled) if one), default=0)
            counts.update(text.counts)
            if end:
                restarts.append((start, branch.began))
                restarts += [(start + place, prefix) for place, prefix in text.restarts if 0 < place < end]
            tokens.extend(text.tokens[:end])
            logprobs.extend(text.logprobs[:end])
            versions.extend(text.versions[:end])
            sampled.extend(text.sampled[:end])
            pairs = zip(map(_heard, text.messages), map(_heard, messages), strict=False)
            messages += text.messages[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]
        last = self._answers[-1].text if self._answers else None
        return Completion(
            tokens=tokens,
            logprobs=logprobs,
            versions=versions,
            text=last.last if last else "",
            finish=self._limit or (last.finish if last else Finish.EOS),
            episode=Episode(
                sampled=sampled,
                restarts=tuple(restarts),
                messages=tuple(messages[len(self.prompt.messages) :]),
                counts={**counts, "branches": float(len(self.branches)), "refused": float(self._refused)},
                earned=earned,
            ),
        )


class Branch:
    """A chat of an agent with the policy, turn by turn. `heard` are its messages so far as the agent knows them;
    `waits` is True while the policy answers."""

    def __init__(self, text: Transcript, request: ChatRequest, number: int):
        self.text, self.number = text, number
        self.began = tuple(text.context)
        self.arguments = request.arguments
        self.heard: list[Any] = []
        self.waits = True

    def goes_on(self, request: ChatRequest) -> bool:
        """True if the request has this branch's messages, then others, none of them the policy's."""
        if self.waits or self.arguments != request.arguments:
            return False
        count = len(self.heard)
        further = request.messages[count:]
        same = [*map(_heard, request.messages[:count])] == self.heard
        return same and bool(further) and all(one["role"] != "assistant" for one in further)

    def thinks_as(self, request: ChatRequest) -> bool:
        """True if the request has the thoughts of the branch's last answer too."""
        sent = request.messages[len(self.heard) - 1].get(THOUGHTS[0])
        return bool(sent) and sent == self.text.messages[-1].get(THOUGHTS[0])


class _Reply(Speech):
    """A session's answer to one request, as the server reads it. A stream of it is one piece."""

    def __init__(
        self,
        session: Session,
        request: ChatRequest,
        asked: int,
        sampling: Sampling,
        forms: Reads,
        task: asyncio.Task[Completion],
    ):
        self.request, self.prompt_tokens, self._drafts, self._task = request, asked, [], task
        self._tokenizer, self._sampling = session.chats.tokenizer, sampling
        self._forms = forms  # type: ignore[assignment]  # which has no drafts to settle
        self._first = sum(len(one.get("tool_calls", ())) for one in request.messages)

    async def completions(self) -> list[Completion]:
        try:
            return [await asyncio.shield(self._task)]
        except asyncio.CancelledError:
            if self._task.cancelled():
                raise RequestError("the episode has ended", status=401) from None
            raise


def _heard(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells two messages apart, however a client writes them: role, content, calls; of the policy's own,
    without the whitespace around the content and without thoughts, which many clients leave out."""
    content = str(message.get("content") or "")
    called = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(one["name"], _parsed(one["arguments"])) for one in called]
    return message["role"], content.strip() if message["role"] == "assistant" else content, calls


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
