"""What an environment is: a class of the user's, of which each episode gets an instance; or tools alone.

    class Guess:
        def reset(self, **row): ...          -> a first question (a text, or messages) after the row's prompt, or None
        def guess(self, number: int): ...    a tool: its type hints and docstring make the schema that the policy reads
        def step(self, message): ...         -> Turn, or a text: what answers a message that calls no tool
        def get_reward(self): ...            -> what the episode earned at its end, beside the rewards of Turns
        def close(self): ...                 called at the end of every episode, also of one that failed

Every method may be async, and all are optional, but for one tool or `step`. The shape is that of TRL's environments,
with `step` and Turn added. Without `step`, a message that calls no tool ends the episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from plaudit.environments.settings import EnvironmentSettings
from plaudit.rewards.base import Turns
from plaudit.rewards.functions import THREADS, as_score, in_thread
from plaudit.support.plugins import load_object
from plaudit.types import Score

Message = dict[str, Any]
OWN = ("reset", "step", "get_reward", "close")
"""Methods that are no tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What an environment says to a message: `messages` for the policy to read next, or `done`. `reward` is what this
    message earned; an episode's reward is their sum. `parts` are the episode's; those of a later turn replace them."""

    messages: Sequence[Message] = ()
    done: bool = False
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


class EpisodeError(RuntimeError):
    """An environment failed in an episode: it raised, took too long, or returned what it must not."""


class LateError(EpisodeError):
    """A call took more than environment.timeout."""


class LostError(EpisodeError):
    """The process of an episode's environment or agent was lost."""


class World:
    """The environment that settings name, of which `begin` gives each episode its own instance. `schemas` are those of
    the tools, as chat templates read them, and `shown` those that prompts show; `needed` names the arguments that reset
    cannot do without.

    Raises ValueError if it cannot be made, or for a tool whose type hints or docstring make no schema."""

    def __init__(self, settings: EnvironmentSettings):
        self.settings, self.turns = settings, Turns(THREADS)
        try:
            self._class = load_object(settings.function) if settings.function else None
            self._functions = {name.rpartition(":")[2]: load_object(name) for name in settings.tools}
            first = self._around(self._made())
        except Exception as error:
            raise ValueError(f"environment: {explained(error)}") from error
        if len(first.tools) < len(settings.tools) + len(first.methods):
            raise ValueError(f"environment.tools={settings.tools}: two tools have one name")
        self.schemas = [_schema(name, tool) for name, tool in first.tools.items()]
        self.shown = [] if settings.renderer else self.schemas
        self.needed = first.needed

    async def begin(self) -> Environment:
        """Return a new episode's environment. Raises EpisodeError if it cannot be made."""
        try:
            return self._around(await timed("the class", self._made, {}, self.settings.timeout, self.turns))
        except EpisodeError:
            raise
        except Exception as error:
            raise EpisodeError(f"it cannot be made: {explained(error)}") from error

    def _made(self) -> Any:
        return None if self._class is None else self._class(**copy.deepcopy(self.settings.options))

    def _around(self, own: Any) -> Environment:
        return Environment(own, self._functions, self.settings.timeout, self.turns)


class Environment:
    """One episode's instance of a user's class, and tools. Raises EpisodeError for whatever goes wrong in the class."""

    def __init__(self, own: Any, tools: Mapping[str, Callable[..., Any]], timeout: float, turns: Turns):
        self._own, self._timeout, self._turns = own, timeout, turns
        public = [] if own is None else [name for name in dir(type(own)) if not name.startswith("_")]
        public = [name for name in public if callable(getattr(type(own), name))]
        self.methods = [name for name in public if name not in OWN]
        """Names of the tools that are methods."""
        self.tools = {**tools, **{name: getattr(own, name) for name in self.methods}}
        self.steps = "step" in public
        self._reward: float | None = None
        self._parts: dict[str, float] = {}
        if not self.tools and not self.steps:
            raise EpisodeError(f"{type(own).__name__} has neither a method step(message) nor a public method as a tool")

    @property
    def needed(self) -> list[str]:
        """Names of the arguments that reset cannot do without."""
        if (reset := getattr(self._own, "reset", None)) is None:
            return []
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = inspect.signature(reset).parameters.values()
        return [one.name for one in named if one.default is one.empty and one.kind in kinds]

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Begin the episode of a row; return its first question, [] for none. It gets the entries that it names as
        parameters, or all of them."""
        if (reset := getattr(self._own, "reset", None)) is None:
            return []
        named = inspect.signature(reset).parameters
        every = any(one.kind is one.VAR_KEYWORD for one in named.values())
        given = {name: one for name, one in row.items() if every or name in named}
        found = await self._called("reset", reset, given)
        return [] if found is None else _messages("reset", [user(found)] if isinstance(found, str) else found)

    async def step(self, message: Message) -> Turn:
        """Give the environment a message of the policy that calls no tool; without a step, that ends the episode."""
        if not self.steps:
            return Turn(done=True)
        found = await self._called("step", self._own.step, {"message": message})
        return self._turn("step", Turn(messages=[user(found)]) if isinstance(found, str) else found)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[Turn, bool]:
        """Call a tool. Return what it says, and whether it worked. A tool that raises, that does not exist, or that
        does not take these arguments, says so to the policy; one that takes too long fails the episode."""
        try:
            if name not in self.tools:
                raise EpisodeError(f"there is no tool {name!r}, but {', '.join(self.tools)}")
            inspect.signature(self.tools[name]).bind(**arguments)
            found = await timed(name, self.tools[name], arguments, self._timeout, self._turns)
            said = found if isinstance(found, Turn) else Turn(messages=[user(str(found))])
        except LateError:
            raise
        except Exception as error:  # noqa: BLE001 - a tool is any function
            return Turn(messages=_messages(name, [user(f"error: {explained(error)}")])), False
        return self._turn(name, said), True

    async def score(self) -> Score:
        """Return the episode's reward: its turns' rewards and get_reward's in all; not applicable without any."""
        value = None
        if (reward := getattr(self._own, "get_reward", None)) is not None:
            value = await self._called("get_reward", reward, {})
        try:
            score = as_score(value)
            if score.process:
                raise ValueError("get_reward knows no tokens: let Turns have rewards in place of `process`")
            if self._reward is not None and (score.value is not None or not score.failed):
                score = replace(score, value=self._reward + (score.value or 0.0), reason=None)
            return replace(score, parts={**as_score({**self._parts, "reward": 0}).parts, **score.parts})
        except Exception as error:
            raise EpisodeError(f"the episode's reward: {explained(error)}") from error

    async def close(self) -> None:
        """End the environment; what that raises is no failure of the episode, which is over."""
        if (close := getattr(self._own, "close", None)) is not None:
            with contextlib.suppress(EpisodeError):
                await self._called("close", close, {})

    def _turn(self, name: str, turn: Any) -> Turn:
        if not isinstance(turn, Turn):
            raise EpisodeError(f"{name} returned a {type(turn).__name__}: return a Turn, or a text to go on")
        messages = _messages(name, turn.messages)
        if not turn.done and not messages:
            raise EpisodeError(f"{name} returned neither messages nor done=True, so the policy has nothing to answer")
        if not isinstance(turn.parts, Mapping):
            raise EpisodeError(f"{name} returned the parts {turn.parts!r:.80}: give a dict of named numbers")
        self._parts |= turn.parts
        if turn.reward is None:
            return replace(turn, messages=messages)
        earned, parts = _earned(name, turn.reward)
        self._reward = (self._reward or 0.0) + earned
        self._parts |= parts
        return replace(turn, messages=messages, reward=earned)

    async def _called(self, name: str, call: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        try:
            return await timed(name, call, arguments, self._timeout, self._turns)
        except EpisodeError:
            raise
        except Exception as error:
            raise EpisodeError(f"{name}: {explained(error)}") from error


async def timed(name: str, call: Callable[..., Any], arguments: Mapping[str, Any], timeout: float, turns: Turns) -> Any:
    """Return what a call of the user's code returns: a sync one in a thread, of which `turns` limits the number. Raises
    what it raises, SystemExit as a RuntimeError, and LateError if it takes more than `timeout` seconds."""

    async def made() -> tuple[Any, BaseException | None]:
        try:
            whole = partial(call, **copy.deepcopy(dict(arguments)))
            found = whole() if inspect.iscoroutinefunction(call) else await in_thread(whole)
            return (await found if inspect.isawaitable(found) else found), None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - raised below
            return None, error
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return None, error  # of its own making

    async with contextlib.nullcontext() if inspect.iscoroutinefunction(call) else turns():
        try:
            found, error = await asyncio.wait_for(made(), timeout)
        except TimeoutError:
            raise LateError(f"{name} took more than {timeout:g} s (environment.timeout)") from None
    if error is not None:
        raise error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__} {error}".strip())
    return found


def _earned(name: str, reward: Any) -> tuple[float, Mapping[str, float]]:
    """Return a turn's reward, and its parts."""
    try:
        score = as_score(reward)
    except Exception as error:
        raise EpisodeError(f"{name} returned the reward {reward!r:.80}: {explained(error)}") from error
    if score.value is None:
        raise EpisodeError(f"{name} returned the reward {reward!r:.80}: {score.reason}")
    return score.value, score.parts


def explained(error: BaseException) -> str:
    return str(error) if isinstance(error, EpisodeError) else f"{type(error).__name__}: {error!s:.200}"


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def _messages(name: str, found: Any) -> list[Message]:
    """Return copies of messages; what is no Unicode in them, half of a surrogate pair, becomes a question mark."""
    whole = isinstance(found, list | tuple) and all(
        isinstance(one, Mapping) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in found
    )
    if not whole:
        raise EpisodeError(
            f"{name} returned {found!r:.80}: messages are a list of dicts with role and content, two texts"
        )
    return [{**one, "content": one["content"].encode("utf-8", "replace").decode()} for one in found]


def _schema(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:
        raise ValueError(
            f"environment: no schema can be made of the tool {name}: {error} Give it type hints, and a docstring that "
            "describes each argument in a paragraph 'Args:' (or begin the name of a method that is no tool with _)"
        ) from error
    schema["function"]["name"] = name
    return schema
