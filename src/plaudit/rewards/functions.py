"""A reward from a Python function. Its parameters say which inputs it gets.

    def reward(prompt, completion): ...                          two texts, by name, or by position as the first two
                                                                 parameters unless their names are in FOREIGN
    def reward(question: Prompt, answer): ...                    the Prompt itself, by its annotation
    async def reward(completion, answer, *, folder): ...         any of ARGUMENTS by name; others from `options`
    def reward(completion, level, unit="cm"): ...                or from the rows' columns of that name

    def reward(completions, level, **kwargs): ...                a batch at once, as TRL calls it: `batched.py`

It returns a number or bool; a dict with the key "reward", whose other numbers become parts; or None if it does not
apply. If it raises, or returns a value that is not finite, the Score has no value but a reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import math
import sysconfig
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, SupportsFloat

from plaudit.rewards.base import Turns
from plaudit.rewards.batched import ANSWERS, BATCH, batched, lacking, turns_of
from plaudit.rewards.deadlines import Late, interrupted_after
from plaudit.rewards.settings import refuse_options
from plaudit.support.plugins import name_of
from plaudit.types import LARGEST_SCORE, NOT_APPLICABLE, Completion, Finish, Prompt, Score
from plaudit.types.distant import here

ARGUMENTS: Mapping[str, Callable[[Prompt, Completion], Any]] = {
    "prompt": lambda prompt, completion: prompt.text,
    "prompt_text": lambda prompt, completion: prompt.text,
    "completion": lambda prompt, completion: completion.text,
    "completion_text": lambda prompt, completion: completion.text,
    "text": lambda prompt, completion: completion.text,
    "answer": lambda prompt, completion: prompt.answer,
    "messages": lambda prompt, completion: prompt.messages,
    "turns": lambda prompt, completion: turns_of(completion),
    "extra": lambda prompt, completion: prompt.extra,
    "tokens": lambda prompt, completion: tuple(completion.tokens),
    "turn_ends": lambda prompt, completion: completion.episode.ends if completion.episode else [completion.length - 1],
    "token_count": lambda prompt, completion: completion.length,
    "finished": lambda prompt, completion: completion.finished,
}
"""{parameter name: its value for an answer}. `tokens` are the completion's, with its end token; `turns` are the
messages of an episode, or the answer as one; `turn_ends` are the indices in `tokens` of the last ones of the policy's
turns, where process rewards may stand."""
OF_PROMPT, OF_COMPLETION = ("prompt", "prompt_text"), ("completion", "completion_text", "text")

FOREIGN: Mapping[str, str] = {
    **dict.fromkeys(("queries", "prompts", "labels"), "a batch at once, as OpenRLHF calls its functions"),
    **dict.fromkeys(
        ("data_source", "solution_str", "ground_truth", "extra_info"), "what verl calls its functions with"
    ),
}
"""Parameter names of reward functions for other systems. They mean other values, so they are not filled by position."""
PATIENCE = 0.2
"""After this many seconds of inline calls, other asyncio tasks get a turn."""
OURS, INSTALLED = str(Path(__file__).parents[1]), "site-packages"
_STANDARD = tuple(path for name, path in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib"))
"""Paths of code that is not the user's."""
TRIED = 5
"""Prompts for which a function is called before a run."""
THREADS = 32
"""Most calls of one reward in threads at the same time."""


class FunctionReward:
    """Calls a function once per completion, or once for all completions of a prompt if it takes a batch.

    - Sync functions run inline, one after the other. This is fastest and deterministic, but nothing else runs during
      a call. After `deadline` seconds a call is interrupted: Python code at once, other code when it returns. SIGALRM
      interrupts calls in the process's main thread; a watching thread interrupts calls in others (as in notebooks).
    - With `thread` sync functions run in threads, all completions at once. Each call has `deadline` seconds. A thread
      that takes longer cannot be stopped; its result is dropped, and neither other calls nor the process wait for it.
    - Async functions run as tasks, all completions at once, each with `deadline` seconds.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str = "",
        deadline: float = 60.0,
        thread: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(function):
            raise TypeError(f"A reward must be callable, but {function!r} is a {type(function).__name__}.")
        self.function = function
        self.name = name or name_of(function)
        self.deadline = deadline
        self.options = dict(options or {})
        self.asynchronous = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        self.thread = thread and not self.asynchronous
        self.waits = self.asynchronous or self.thread
        self.held = 0.0
        """Seconds for which inline calls have blocked this process's event loop."""
        self._turns = Turns(THREADS)
        self.batch = batched(function, self.name, self.options)
        self.columns: list[str] = self.batch.columns + self.batch.looked_up() if self.batch else []
        """Columns that the rows must have: the function's required parameters without another value."""
        self.arguments = () if self.batch else _bindings(function, self.name, self.options, self.columns)
        own = any(get is ARGUMENTS["tokens"] for _, get in self.arguments)
        self.reads_tokens = self.batch.reads_tokens if self.batch else own

    def lacking(self, prompts: Iterable[Prompt]) -> str:
        """Return why the function cannot be called for these prompts, such as a missing column; "" if it can."""
        looked_at = list(prompts)
        columns = {one for prompt in looked_at for one in prompt.extra} - ARGUMENTS.keys()
        for name, get in self.arguments:
            text = "prompt" if get is ARGUMENTS["prompt"] else "completion" if get is ARGUMENTS["completion"] else ""
            if text and name in columns:
                return (
                    f"the reward {self.name!r} gets the {text} as {name!r}, by its position, and {name!r} is also a "
                    f"column of the rows: call the parameter `{text}`, or let it follow a `*`"
                )
        known = (BATCH, ANSWERS) if self.batch else (ARGUMENTS,)
        return lacking(self.name, self.columns, looked_at, *known)

    def tried(self, prompts: Sequence[Prompt]) -> tuple[list[str], list[str]]:
        """Try the function on a few prompts, with the reference answer, or else the prompt, as the completion. Return
        errors and warnings. A call that exceeds the deadline ends the trial and is not reported."""
        if why := self.lacking(prompts):
            return [why], []
        asked = inspect.signature(self.function).parameters.get("answer")
        needed = self.batch is None and asked is not None and asked.default is asked.empty
        lacks = needed and "answer" not in self.options and not any(prompt.answer for prompt in prompts)
        none = f"{self.name} asks for `answer`, and no row has one of the first {len(prompts)}: it gets None"
        scores = asyncio.run(self._tries(prompts[:TRIED]))
        failed = [score for score in scores if score.value is None and score.reason != NOT_APPLICABLE]
        faults = [
            f"{self.name} fails for {len(failed)} of {len(scores)} prompts, with references as answers: {one.reason}"
            for one in failed[:1]
        ]
        sure = len(failed) == len(scores) and not any(score.transient for score in failed)
        return (faults, [none] * lacks) if sure else ([], [none] * lacks + faults)

    async def _tries(self, prompts: Sequence[Prompt]) -> list[Score]:
        scores: list[Score] = []
        for prompt in prompts:
            tokens, text, nothing = prompt.tokens, prompt.answer or prompt.text, (0,) * len(prompt.tokens)
            answer = Completion(tokens=tokens, logprobs=nothing, versions=nothing, text=text, finish=Finish.EOS)
            (score,) = await self.score(prompt, [answer])
            if score == _too_late(self.deadline):
                break
            scores.append(score)
        return scores

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        completions = here(completions) if self.reads_tokens else completions
        calls = self._calls(prompt, completions)
        if self.waits:
            return list(chain(*await asyncio.gather(*map(self._awaited, calls))))
        scores: list[Score] = []
        began = time.monotonic()
        for call in calls:
            if time.monotonic() > began + PATIENCE:
                await asyncio.sleep(0)
                began = time.monotonic()
            called = time.monotonic()
            scores += self._inline(call)
            self.held += time.monotonic() - called
        return scores

    def _calls(self, prompt: Prompt, completions: Sequence[Completion]) -> list[_Call]:
        """Return a call for each completion, or one call for all if the function takes a batch."""
        if self.batch is not None:
            call, read = self.batch.call(prompt, completions)
            return [_Call(call, lambda result: list(map(as_score, read(result))), len(completions))]
        calls = (functools.partial(self._call, prompt, one) for one in completions)
        return [_Call(call, lambda result: [as_score(result)], 1) for call in calls]

    def _inline(self, call: _Call) -> list[Score]:
        try:
            return interrupted_after(self.deadline, lambda: call.read(call.make()))
        except Late:
            failed = _too_late(self.deadline)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - whatever a user function raises
            failed = _failure(error)
        return [failed] * call.scores

    async def _awaited(self, call: _Call) -> list[Score]:
        if not self.thread:
            return await self._within_deadline(call, call.make)
        async with self._turns():
            return await self._within_deadline(call, lambda: in_thread(call.make))

    async def _within_deadline(self, call: _Call, make: Callable[[], Awaitable[Any]]) -> list[Score]:
        limit = asyncio.timeout(self.deadline)
        try:
            async with limit:
                return call.read(await make())
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the caller was cancelled
                raise
            failed = _failure(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a user function raises
            late = isinstance(error, TimeoutError) and limit.expired()
            failed = _too_late(self.deadline) if late else _failure(error)
        return [failed] * call.scores

    def _call(self, prompt: Prompt, completion: Completion) -> Any:
        positional = [get(prompt, completion) for name, get in self.arguments if not name]
        named = {name: get(prompt, completion) for name, get in self.arguments if name}
        return self.function(*positional, **named, **self.options)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the function: for one answer, or for all answers to a prompt. `read` turns its result into scores."""

    make: Callable[[], Any]
    read: Callable[[Any], list[Score]]
    scores: int
    """Number of answers that the call scores."""


async def in_thread(call: Callable[[], Any]) -> Any:
    """Run `call` in a daemon thread. In asyncio's small pool, a hanging call would block other calls and the end of the
    process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)

    def work() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = call()
        except StopIteration as error:  # a future does not take this exception
            failure = RuntimeError(f"StopIteration: {error}")
        except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True).start()
    return await future


def as_score(result: Any) -> Score:
    """Turn a function's result into a Score. Raises TypeError if it is not a number, a dict or None."""
    parts: Mapping[Any, Any] = {}
    value, reason = result, NOT_APPLICABLE
    process: Any = ()
    if isinstance(result, Score):
        value, parts, process = result.value, result.parts, result.process
        reason = result.reason or "function returned a Score without a value"
    elif isinstance(result, Mapping):
        if "reward" not in result:
            raise TypeError(f"function returned a dict without the key 'reward'; it has {sorted(map(str, result))}")
        value, process = result["reward"], result.get("process", ())
        parts = {key: value for key, value in result.items() if key not in ("reward", "process")}
    figures = _parts(parts)
    if value is None:
        return Score(value=None, parts=figures, reason=reason)
    number = _number(value, "the reward")
    if not abs(number) <= LARGEST_SCORE:
        return Score(value=None, parts=figures, reason=f"function returned {number}{beyond(number)}")
    return Score(value=number, parts=figures, process=_process(process))


def _process(given: Any) -> tuple[tuple[int, float], ...]:
    """Return process rewards as (token, reward) pairs. Raises TypeError or ValueError for anything else."""
    try:
        pairs = [(int(place), float(reward)) for place, reward in dict(given).items()]
    except (TypeError, ValueError) as error:
        raise TypeError(f"process is {given!r:.80}: give {{index of a token: reward}}") from error
    if wrong := [reward for _, reward in pairs if not abs(reward) <= LARGEST_SCORE]:
        raise ValueError(f"a process reward is {wrong[0]}{beyond(wrong[0])}")
    return tuple(pairs)


def beyond(value: float) -> str:
    """Return a suffix for the error on a score beyond LARGEST_SCORE; "" if the score is infinite or NaN."""
    return f", beyond {LARGEST_SCORE:g}" if math.isfinite(value) else ""


def _parts(figures: Mapping[Any, Any]) -> dict[str, float]:
    parts = {str(key): _number(value, f"part {key!r}") for key, value in figures.items()}
    for name, value in parts.items():
        if LARGEST_SCORE < abs(value) < math.inf:
            raise ValueError(f"part {name!r} is {value}{beyond(value)}")
    return parts


def _number(value: Any, what: str) -> float:
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        raise TypeError(f"{what} is a {type(value).__name__}, not a number: {value!r:.80}")
    return float(value)


def _failure(error: BaseException) -> Score:
    """Return a failed score. It is transient for errors of the system (connections, time-outs), RuntimeErrors and
    exceptions that are not built in. Others, such as TypeError or KeyError, count as mistakes in the function."""
    kind = type(error)
    transient = isinstance(error, OSError) or kind is RuntimeError or kind.__module__ != "builtins"
    return Score(value=None, reason=f"{kind.__name__}: {error}{_raised_at(error)}", transient=transient)


def _raised_at(error: BaseException) -> str:
    """Return the last place in the user's own code in a traceback, " (rewards.py, line 12)"; "" if there is none."""
    files = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    theirs = [place for place in files if not place[0].startswith((OURS, *_STANDARD)) or INSTALLED in place[0]]
    own = [place for place in theirs if INSTALLED not in place[0]] or theirs
    return f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""


def _too_late(deadline: float) -> Score:
    return Score(value=None, reason=f"no answer within {deadline:g} s", transient=True)


Getter = Callable[[Prompt, Completion], Any]


def _bindings(
    function: Callable[..., Any], name: str, options: Mapping[str, Any], columns: list[str]
) -> tuple[tuple[str, Getter], ...]:
    """Return (parameter's name, function that gets its value) pairs; the name is "" for one passed by position. A name
    that is no known input is a column of the rows; such columns without a default are added to `columns`."""
    parameters = list(inspect.signature(function).parameters.values())
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    refuse_options(name, () if open_ended else options, [parameter.name for parameter in parameters])
    found: list[tuple[str, Getter]] = []
    placed = _placed(parameters, options)
    for index, parameter in enumerate(parameters):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name in options:
            continue
        getter, needed = _getter(parameter, index if placed else None), parameter.default is parameter.empty
        if getter is None and needed and (parameter.name in FOREIGN or parameter.kind is parameter.POSITIONAL_ONLY):
            raise ValueError(
                f"reward {name!r} asks for {parameter.name!r}, which is neither in its options nor one of "
                f"{', '.join(ARGUMENTS)}{_meant(parameter.name)}"
            )
        if getter is None:
            columns += [parameter.name] * (needed or parameter.name in ANSWERS)  # it may mean the reference answer
            getter = functools.partial(_column, parameter.name, None if needed else parameter.default)
        found.append(("" if parameter.kind is parameter.POSITIONAL_ONLY else parameter.name, getter))
    return tuple(found)


def _placed(parameters: Sequence[inspect.Parameter], options: Mapping[str, Any]) -> bool:
    """True if the first two parameters should receive prompt and completion positionally.

    False if there is only one, or if either is an option, in FOREIGN, or the name of something else in ARGUMENTS."""
    first_two = parameters[:2]
    if len(first_two) < 2 or _wants_whole(first_two[1]):
        return False
    return all(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.name not in FOREIGN
        and parameter.name not in options
        and (parameter.name in names or parameter.name not in ARGUMENTS)
        for parameter, names in zip(first_two, (OF_PROMPT, OF_COMPLETION), strict=True)
    )


def _meant(name: str) -> str:
    if name in FOREIGN:
        return f"; it is {FOREIGN[name]}. docs/switching.md shows how to pass them on"
    return ". Another parameter is a column of the rows if it can be passed by name"


def _column(name: str, default: Any, prompt: Prompt, completion: Completion) -> Any:
    return prompt.extra.get(name, default)


def _getter(parameter: inspect.Parameter, index: int | None) -> Getter | None:
    meaning = parameter.name
    if _wants_whole(parameter) and (meaning not in ARGUMENTS or meaning in OF_PROMPT):
        return lambda prompt, completion: prompt
    if meaning not in ARGUMENTS:
        if index is None or index >= 2:
            return None
        meaning = ("prompt", "completion")[index]
    return ARGUMENTS[meaning]


def _wants_whole(parameter: inspect.Parameter) -> bool:
    """True if it is annotated as a Prompt, or as "Prompt" under `from __future__ import annotations`."""
    kind = parameter.annotation
    return (kind.__name__ if isinstance(kind, type) else str(kind)).rpartition(".")[2] == "Prompt"
