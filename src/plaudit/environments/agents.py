"""Agents from outside: a function asks the policy by OpenAI's protocol, and its requests are an episode's turns.

prompt -> key -> function(base_url, api_key, **row), in a thread -> requests -> server.py -> Session -> replies
       -> what the function returns, and the session's branches (sessions.py) -> Completion
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from plaudit.data.chat import Chats
from plaudit.environments import protocol
from plaudit.environments.base import EpisodeError, LostError, World, explained
from plaudit.environments.episodes import Player, row_of
from plaudit.environments.protocol import ChatRequest, RequestError
from plaudit.environments.rendered import forms_of, renderer_of
from plaudit.environments.server import NO_EPISODE, application
from plaudit.environments.sessions import Session
from plaudit.environments.settings import EnvironmentSettings
from plaudit.environments.speaker import Speech
from plaudit.environments.workers import AT_ONCE, EnvironmentWorkers
from plaudit.rewards.base import Turns
from plaudit.rewards.functions import in_thread
from plaudit.rollout.engine import Sampler
from plaudit.runtime.coroutines import together
from plaudit.runtime.network import own_address
from plaudit.support.plugins import load_object
from plaudit.types import Completion, Prompt, Sampling, Score

OURS = ("client", "base_url", "api_key", "model", "messages")
"""Arguments of an agent's function that are no columns of its row."""
NAME = "policy"
"""What the policy's model is called; requests may call it otherwise."""
PLAIN: dict[str, Any] = {"trust_env": False, "verify": False, "timeout": None}
"""How a client connects: not by proxies, which would get the requests, and without loading certificates."""


class Agents:
    """The function that `environment.kind: agent` names. Raises ValueError if there is none, or if it wants a client
    and the package openai is missing."""

    schemas: Sequence[dict[str, Any]] = ()
    shown: Sequence[dict[str, Any]] = ()

    def __init__(self, settings: EnvironmentSettings):
        self.settings, self._turns = settings, Turns(AT_ONCE)
        self.sessions: dict[str, Session] = {}
        """Those of agents' calls that are under way, by their keys."""
        self._listens: tuple[asyncio.AbstractEventLoop, asyncio.Task[None], str] | None = None
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

    async def start(self, row: Mapping[str, Any], about: Mapping[str, str]) -> asyncio.Future[Any]:
        """Call the function: a sync one in a thread of its own, an async one in the event loop that all agents share,
        so that nothing that they do keeps the run waiting. `about`: base_url, api_key. Wait first until fewer than
        AT_ONCE are under way."""
        given = {**copy.deepcopy(dict(row)), **about, "model": NAME}
        given = {name: one for name, one in given.items() if self._every or name in self._named}
        places, loop = self._turns(), asyncio.get_running_loop()
        await places.acquire()

        def release(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(places.release)

        call = self._function
        if inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__):
            work = asyncio.run_coroutine_threadsafe(self._awaited(given, about), _agents_loop())
            work.add_done_callback(release)
            return asyncio.wrap_future(work)

        def called() -> Any:
            try:
                return self._called(given, about)
            finally:
                release(None)

        return asyncio.ensure_future(in_thread(called))

    @contextlib.asynccontextmanager
    async def agent(self, row: Mapping[str, Any], about: Mapping[str, str]) -> AsyncIterator[asyncio.Future[Any]]:
        """Give a call of the function, which has begun. As `EnvironmentWorkers.agent`, in this process."""
        yield await self.start(row, about)

    async def repeated(self, attempt: Callable[[], Awaitable[Score]], progress: Callable[[], int]) -> Score:
        return await attempt()

    def speech(self, request: ChatRequest, key: str) -> Speech:
        """Begin to answer a request of the session with this key. Raises RequestError for one that is refused."""
        if (session := self.sessions.get(key)) is None:
            raise RequestError(NO_EPISODE, status=401)
        return session.speech(request)

    def url(self, host: str) -> str:
        """Return the address where requests of agents are answered, from now on if they were not yet in this event
        loop. It lasts as long as the loop."""
        loop = asyncio.get_running_loop()
        if self._listens is None or self._listens[0] is not loop:
            listening = socket.create_server((host, 0), backlog=512)
            app = application(self, model=NAME, names=(host,), most=protocol.LARGEST, knows=self.sessions.__contains__)
            task = loop.create_task(_listening(app, listening))
            self._listens = loop, task, f"http://{host}:{listening.getsockname()[1]}/v1"
        return self._listens[2]

    async def _awaited(self, given: Mapping[str, Any], about: Mapping[str, Any]) -> Any:
        async with contextlib.AsyncExitStack() as stack:
            if "client" in self._named:
                import openai

                client = openai.AsyncOpenAI(**about, timeout=None, http_client=openai.DefaultAsyncHttpxClient(**PLAIN))
                given = {**given, "client": await stack.enter_async_context(client)}
            try:
                return await self._function(**given)
            except asyncio.CancelledError as error:
                if (task := asyncio.current_task()) and task.cancelling():  # by us, who read no result
                    raise
                raise RuntimeError(f"CancelledError {error}".strip()) from error

    def _called(self, given: Mapping[str, Any], about: Mapping[str, Any]) -> Any:
        with contextlib.ExitStack() as stack:
            if "client" in self._named:
                import openai

                client = openai.OpenAI(**about, timeout=None, http_client=openai.DefaultHttpxClient(**PLAIN))
                given = {**given, "client": stack.enter_context(client)}
            found = self._function(**given)
            if inspect.isawaitable(found):  # of an async function inside another one
                return asyncio.run_coroutine_threadsafe(_result(found), _agents_loop()).result()
            return found


@functools.cache
def _agents_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all async agents, in a thread of its own. Some libraries have locks that are bound to
    the first loop they see."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agents", daemon=True).start()
    return loop


async def _result(found: Any) -> Any:
    return await found


class AgentPlayer:
    """Lets an agent play an episode for each entry of a plan, as `Player` does an environment. Its requests come to
    this machine's loopback or, if agents may be on other nodes, to its address among them."""

    def __init__(self, engine: Sampler, chats: Chats, agents: Agents, workers: EnvironmentWorkers | None = None):
        """`workers`: the agents' processes; None: they run in this one."""
        self.engine, self.chats, self.agents, self._calls = engine, chats, agents, workers or agents
        self._host = own_address() if workers and agents.settings.resources else "127.0.0.1"
        renderer = renderer_of(agents.settings, chats)
        self._forms = lambda tools: forms_of(chats, tools, renderer)

    async def play(self, prompt: Prompt, plan: Sequence[Sampling]) -> list[Completion]:
        """Return an episode for each entry. Each depends on its seed, the prompt, the weights and the agent. Raises
        what the engine raises, whatever the agent makes of it."""
        return await together(self._played(prompt, sampling, plan[0].seed) for sampling in plan)

    async def _played(self, prompt: Prompt, sampling: Sampling, seed: int) -> Completion:
        row = {**row_of(prompt, seed), "messages": [dict(turn) for turn in prompt.messages]}
        session = Session(self.engine, self.chats, self._forms, self.agents.settings, prompt, sampling)

        async def attempt() -> Score:
            key = secrets.token_urlsafe(16)  # of this call: one that was given up may still ask
            self.agents.sessions[key] = session
            try:
                about = {"base_url": self.agents.url(self._host), "api_key": key}
                async with self._calls.agent(row, about) as work:
                    return await session.watched(work)
            except LostError:
                session.begin_again()
                raise
            finally:
                del self.agents.sessions[key]

        try:
            earned = await self._calls.repeated(attempt, lambda: session.replies)
        except EpisodeError as error:
            earned = Score(value=None, reason=str(error))
        finally:
            session.close()
        return session.completion(earned)


async def _listening(app: Any, listening: socket.socket) -> None:
    """Serve until the event loop ends, which cancels this. The process's signals and logging stay as they are."""
    import uvicorn

    how: dict[str, Any] = {"lifespan": "off", "log_config": None, "access_log": False, "server_header": False}
    server = uvicorn.Server(uvicorn.Config(app, http="h11", ws="none", timeout_keep_alive=600, **how))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    with listening:
        await server.serve(sockets=[listening])


def world_of(settings: EnvironmentSettings) -> World | Agents | None:
    """Return what the settings name; None without an environment. Raises ValueError if it cannot be made."""
    if not settings.on:
        return None
    return Agents(settings) if settings.kind == "agent" else World(settings)


def player_of(
    engine: Sampler, chats: Chats, world: World | Agents, workers: EnvironmentWorkers | None = None
) -> Player | AgentPlayer:
    """Return what plays the episodes, with environments or agents in the processes of `workers`, if there are any.
    Raises DataError for a chat template that cannot show their turns."""
    if isinstance(world, Agents):
        return AgentPlayer(engine, chats, world, workers)
    return Player(engine, chats, world, workers)
