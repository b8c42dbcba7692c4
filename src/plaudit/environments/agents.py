"""Agents from outside: a function asks the policy by OpenAI's protocol, and its requests are an episode's turns.

    prompt -> key -> function(base_url, api_key, **row) -> requests -> Session -> Branch -> engine -> replies
           -> what the function returns, and the branches one after the other -> Completion

A request that goes on from a chat that the policy answered (the same messages, then others) is the next turn of that
chat: a branch. What was sampled stays as it was sampled, as in an episode of a class. Any other request begins a branch
of its own, a further row of the episode. The same request gets the same reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import secrets
import socket
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import takewhile
from typing import Any

from plaudit.data.chat import Chats
from plaudit.data.fields import DataError, Message
from plaudit.data.reader import encode_texts
from plaudit.environments import protocol
from plaudit.environments.answers import Forms
from plaudit.environments.base import EpisodeError, LateError, World, explained
from plaudit.environments.calls import call_form
from plaudit.environments.episodes import Player, Transcript, hashed, row_of
from plaudit.environments.protocol import ChatRequest, RequestError
from plaudit.environments.server import application
from plaudit.environments.settings import EnvironmentSettings
from plaudit.environments.speaker import Speech
from plaudit.environments.turns import AnswerForm
from plaudit.rewards.base import Turns
from plaudit.rewards.functions import THREADS, as_score, in_thread
from plaudit.rollout.engine import Sampler
from plaudit.runtime.coroutines import together
from plaudit.support.plugins import load_object
from plaudit.types import Completion, Episode, Finish, Numbers, Prompt, Sampling, Score
from plaudit.types.distant import here

OURS = ("client", "base_url", "api_key", "model", "messages")
"""Arguments of an agent's function that are no columns of its row."""
NAME = "policy"
"""What the policy's model is called; requests may call it otherwise."""
TICK = 1.0
"""Most seconds between two looks whether an agent is silent for too long."""


class Agents:
    """The function that `environment.kind: agent` names. Raises ValueError if there is none, or if it wants a client
    and the package openai is missing."""

    schemas: Sequence[dict[str, Any]] = ()

    def __init__(self, settings: EnvironmentSettings):
        self.settings, self._turns = settings, Turns(THREADS)
        try:
            self._function = load_object(settings.function)
            parameters = inspect.signature(self._function).parameters.values()
        except Exception as error:
            raise ValueError(f"environment: {explained(error)}") from error
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self._every = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self._named = {one.name: one for one in parameters if one.kind in kinds}
        self.needed = [name for name, one in self._named.items() if one.default is one.empty and name not in OURS]
        if not self._named.keys() & {"client", "base_url"} and not self._every:
            raise ValueError(f"environment: {settings.function} asks nothing: give it a parameter client or base_url")
        if "client" in self._named and find_spec("openai") is None:
            reason = "asks for a client, and the package openai is missing: pip install openai, or take base_url"
            raise ValueError(f"environment: {settings.function} {reason}")

    async def solve(self, row: Mapping[str, Any], *, base_url: str, api_key: str) -> Score:
        """Call the function, a sync one in a thread, and return what it says that the episode is worth."""
        given = {**row, "base_url": base_url, "api_key": api_key, "model": NAME}
        given = {name: one for name, one in given.items() if self._every or name in self._named}
        sync = not inspect.iscoroutinefunction(self._function)
        async with contextlib.AsyncExitStack() as stack:
            if "client" in self._named:
                import openai

                made: Any = (openai.OpenAI if sync else openai.AsyncOpenAI)(
                    base_url=base_url, api_key=api_key, timeout=None
                )
                given["client"] = made
                stack.push_async_callback(in_thread, made.close) if sync else stack.push_async_callback(made.close)
            if sync:
                await stack.enter_async_context(self._turns())
                return as_score(await in_thread(lambda: self._function(**given)))
            return as_score(await self._function(**given))


class AgentPlayer:
    """Lets an agent play an episode for each entry of a plan, as `Player` does an environment. It listens on this
    machine's loopback while its event loop runs."""

    def __init__(self, engine: Sampler, chats: Chats, agents: Agents):
        self.engine, self.chats, self.agents = engine, chats, agents
        self.form = AnswerForm.of(chats)
        self._sessions: dict[str, Session] = {}
        self._listens: tuple[asyncio.AbstractEventLoop, asyncio.Task[None], str] | None = None

    async def play(self, prompt: Prompt, plan: Sequence[Sampling]) -> list[Completion]:
        """Return an episode for each entry. Each depends on its seed, the prompt, the weights and the agent."""
        return await together(self._played(prompt, sampling, plan[0].seed) for sampling in plan)

    async def _played(self, prompt: Prompt, sampling: Sampling, seed: int) -> Completion:
        session, key = Session(self, prompt, sampling), secrets.token_urlsafe(16)
        self._sessions[key] = session
        row = {**row_of(prompt, seed), "messages": [dict(turn) for turn in prompt.messages]}
        try:
            earned = await session.watched(self.agents.solve(row, base_url=self._url(), api_key=key))
            if not any(branch.text.tokens for branch in session.branches):
                raise EpisodeError("no request of the agent was answered")
        except EpisodeError as error:
            earned = Score(value=None, reason=str(error))
        finally:
            del self._sessions[key]
            session.close()
        return session.completion(earned)

    def speech(self, request: ChatRequest, key: str) -> Speech:
        """Begin to answer a request of the session with this key. Raises RequestError for one that is refused."""
        if (session := self._sessions.get(key)) is None:
            raise RequestError("this api key is of no episode, or of one that has ended", status=401)
        return session.speech(request)

    def _url(self) -> str:
        """Return the address where this player listens, from now on if it did not yet in this event loop."""
        loop = asyncio.get_running_loop()
        if self._listens is None or self._listens[0] is not loop:
            listening = socket.create_server(("127.0.0.1", 0), backlog=512)
            app = application(self, model="", names=(), most=protocol.LARGEST)
            task = loop.create_task(_listening(app, listening))
            self._listens = loop, task, f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        return self._listens[2]


async def _listening(app: Any, listening: socket.socket) -> None:
    """Serve until the event loop ends, which cancels this."""
    import uvicorn

    how: dict[str, Any] = {"lifespan": "off", "log_level": "warning", "access_log": False, "server_header": False}
    server = uvicorn.Server(uvicorn.Config(app, http="h11", ws="none", timeout_keep_alive=600, **how))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    with listening:
        await server.serve(sockets=[listening])


class Session:
    """One episode of an agent: its branches, and the replies that it got."""

    def __init__(self, player: AgentPlayer, prompt: Prompt, sampling: Sampling):
        self.player, self.prompt, self.sampling = player, prompt, sampling
        self.settings = player.agents.settings
        self.most = len(prompt.tokens) + self.settings.max_tokens
        """Most tokens of a context."""
        self.branches: list[Branch] = []
        self._replies: dict[str, tuple[int, Sampling, Forms, asyncio.Task[Completion]]] = {}
        self._last: Branch | None = None
        """The branch of the last reply."""
        self._refused = 0
        self._limit: Finish | None = None
        """The limit that a request was refused for."""

    async def watched(self, work: Coroutine[Any, Any, Score]) -> Score:
        """Return what the agent returns. Raises EpisodeError if it raises, or is silent for longer than
        `environment.timeout` while no request is open. An agent that raises on a limit has earned 0."""
        task, silent, asked = asyncio.ensure_future(work), 0.0, 0
        try:
            while not (await asyncio.wait({task}, timeout=min(TICK, self.settings.timeout)))[0]:
                open_ = any(not reply.done() for *_, reply in self._replies.values())
                silent = 0.0 if open_ or asked != len(self._replies) else silent + min(TICK, self.settings.timeout)
                asked = len(self._replies)
                if silent >= self.settings.timeout:
                    raise LateError(f"the agent asked nothing for {self.settings.timeout:g} s (environment.timeout)")
            return task.result()
        except EpisodeError:
            raise
        except (Exception, SystemExit) as error:
            if self._limit is not None:
                return Score(value=0.0)
            raise EpisodeError(f"the agent: {explained(error)}") from error
        finally:
            task.cancel()

    def speech(self, request: ChatRequest) -> Speech:
        """Begin to answer a request, or return the answer to one that was the same. Raises RequestError."""
        asked = [request.messages, request.arguments, request.max_tokens, request.stop, request.seed]
        key = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()
        if key not in self._replies:
            try:
                self._replies[key] = self._asked(request, int(key[:16], 16))
            except RequestError:
                self._refused += 1
                raise
        return _Reply(self, request, *self._replies[key])

    def _asked(self, request: ChatRequest, number: int) -> tuple[int, Sampling, Forms, asyncio.Task[Completion]]:
        if request.n != 1:
            raise RequestError("n is above 1: send a request for each answer, each with another seed", "n")
        if len(self._replies) >= (turns := self.settings.max_turns):
            self._limit = Finish.TURNS
            raise RequestError(f"the episode has had its {turns} turns (environment.max_turns)", code="turn_limit")
        branch = self._continued(request) or self._begun(request)
        room = min(self.sampling.max_tokens, request.max_tokens, self.most - len(branch.text.context))
        stop = (*self.sampling.stop, *(one for one in request.stop if one not in self.sampling.stop))
        sampling = replace(self.sampling, seed=hashed(self.sampling.seed, number), max_tokens=room, stop=stop)
        sampling = replace(sampling, episode=branch.number, first=branch.text.first)
        task = asyncio.ensure_future(self._answered(branch, request, sampling))
        return len(branch.text.context), sampling, branch.text.forms, task

    def _continued(self, request: ChatRequest) -> Branch | None:
        """Return the branch that the request goes on with, with its further messages read; None if there is none."""
        going = [branch for branch in self.branches if branch.goes_on(request)]
        if not going:
            return None
        branch = max(going, key=lambda one: len(one.heard))
        try:
            if not branch.text.observe(request.messages[len(branch.heard) :]):
                raise self._too_long()
        except EpisodeError:
            return None  # the template cannot show them behind the answer: it writes the whole chat anew
        branch.waits = True
        return branch

    def _begun(self, request: ChatRequest) -> Branch:
        chats = self.player.chats
        try:
            text = chats.prompt(request.messages, request.arguments)
            tokens = encode_texts([text], chats.tokenizer)[0]
            forms = Forms(self.player.form, call_form(chats) if request.tools else None)
        except (DataError, TypeError, ValueError) as error:
            raise RequestError(str(error), "messages") from error
        if len(tokens) >= self.most:
            raise self._too_long()
        kwargs = json.dumps(request.chat_template_kwargs)
        extra = {"tools": request.tools, "chat_template_kwargs": kwargs}
        asked = Prompt(id="", text=text, tokens=tokens, messages=tuple(request.messages), extra=extra)
        number = hashed(self.sampling.seed, *self.prompt.tokens, len(self.branches))
        self.branches.append(Branch(Transcript(asked, chats, forms, most=self.most - len(tokens)), request, number))
        return self.branches[-1]

    def _too_long(self) -> RequestError:
        self._limit = Finish.LENGTH
        reason = f"the messages leave no room for an answer within {self.most} tokens (environment.max_tokens)"
        return RequestError(reason, "messages", code="context_length_exceeded")

    async def _answered(self, branch: Branch, request: ChatRequest, sampling: Sampling) -> Completion:
        (answer,) = here(await self.player.engine.generate(tuple(branch.text.context), [sampling]))
        branch.text.answered(answer, sampling)
        said = {**branch.text.messages[-1], "content": branch.text.last}
        branch.heard, branch.waits = [_heard(one) for one in (*request.messages, said)], False
        self._last = branch
        return answer

    def close(self) -> None:
        for *_, reply in self._replies.values():
            reply.cancel()

    def completion(self, earned: Score) -> Completion:
        """Return the episode as a completion: its branches one after the other, each with its own beginning."""
        tokens, logprobs, versions = Numbers("i"), Numbers("f"), Numbers("i")
        sampled, restarts, messages = Numbers("b"), list[tuple[int, Sequence[int]]](), list[Message]()
        counts = Counter[str]()
        for branch in self.branches:
            text, start = branch.text, len(tokens)
            end = max((place + 1 for place, one in enumerate(text.sampled) if one), default=0)
            counts.update(text.counts)
            if end:
                restarts.append((start, branch.began))
                restarts += [(start + place, prefix) for place, prefix in text.restarts if place < end]
            tokens.extend(text.tokens[:end])
            logprobs.extend(text.logprobs[:end])
            versions.extend(text.versions[:end])
            sampled.extend(text.sampled[:end])
            shared = takewhile(lambda pair: pair[0] == pair[1], zip(text.messages, messages, strict=False))
            messages += text.messages[sum(1 for _ in shared) :]
        last = self._last.text if self._last else None
        return Completion(
            tokens=tokens,
            logprobs=logprobs,
            versions=versions,
            text=last.last if last else "",
            finish=self._limit or (last.finish if last else Finish.EOS),
            episode=Episode(
                sampled=sampled,
                restarts=tuple(restarts),
                messages=tuple(messages),
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


class _Reply(Speech):
    """A session's answer to one request, as the server reads it. A stream of it is one piece."""

    def __init__(
        self,
        session: Session,
        request: ChatRequest,
        asked: int,
        sampling: Sampling,
        forms: Forms,
        task: asyncio.Task[Completion],
    ):
        self.request, self.prompt_tokens, self._drafts, self._task = request, asked, [], task
        self._tokenizer, self._sampling, self._forms = session.player.chats.tokenizer, sampling, forms
        self._first = sum(len(one.get("tool_calls", ())) for one in request.messages)

    async def completions(self) -> list[Completion]:
        return [await asyncio.shield(self._task)]


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


def world_of(settings: EnvironmentSettings) -> World | Agents | None:
    """Return what the settings name; None without an environment. Raises ValueError if it cannot be made."""
    if not settings.on:
        return None
    return Agents(settings) if settings.kind == "agent" else World(settings)


def player_of(engine: Sampler, chats: Chats, world: World | Agents) -> Player | AgentPlayer:
    """Return what plays the episodes. Raises DataError for a chat template that cannot show their turns."""
    return AgentPlayer(engine, chats, world) if isinstance(world, Agents) else Player(engine, chats, world)
