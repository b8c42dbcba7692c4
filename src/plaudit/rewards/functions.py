"""A reward from a Python function, whatever of prompt and completion it wants to see.

    def reward(prompt, completion): ...                          two texts, by name or as the first two parameters,
                                                                 whatever those are called, but for FOREIGN names
    def reward(question: Prompt, answer): ...                    the Prompt itself, by its annotation
    async def reward(completion, answer, *, folder): ...         any of ARGUMENTS by name; the rest from `options`

It returns a number or bool; a dict with the key "reward", whose other numbers become parts; or None: not scorable.
What it raises, and a value that is no finite number, is a Score without value and with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import difflib
import inspect
import math
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from plaudit.runtime.coroutines import raise_in
from plaudit.types import Completion, Finish, Prompt, Score

ARGUMENTS: Mapping[str, Callable[[Prompt, Completion], Any]] = {
    "prompt": lambda prompt, completion: prompt.text,
    "prompt_text": lambda prompt, completion: prompt.text,
    "completion": lambda prompt, completion: completion.text,
    "completion_text": lambda prompt, completion: completion.text,
    "text": lambda prompt, completion: completion.text,
    "answer": lambda prompt, completion: prompt.answer,
    "messages": lambda prompt, completion: prompt.messages,
    "extra": lambda prompt, completion: prompt.extra,
    "tokens": lambda prompt, completion: completion.tokens,
    "finished": lambda prompt, completion: completion.finish is not Finish.LENGTH,
}
"""What a function may ask for by the name of a parameter. `tokens` are those of the completion, its end included."""
OF_PROMPT, OF_COMPLETION = ("prompt", "prompt_text"), ("completion", "completion_text", "text")

FOREIGN: Mapping[str, str] = {
    **dict.fromkeys(("prompts", "completions", "completion_ids"), "a batch at once, as TRL calls its functions"),
    **dict.fromkeys(("queries", "labels"), "a batch at once, as OpenRLHF calls its functions"),
    **dict.fromkeys(
        ("data_source", "solution_str", "ground_truth", "extra_info"), "what verl calls its functions with"
    ),
}
"""Parameters of functions written for other systems. Taken by their place they would get what they do not mean."""
PATIENCE = 0.2
"""Seconds after which calls that run inline let others run, before the next one."""
THREADS = 32
"""Most calls of one reward that run at once in threads."""


class FunctionReward:
    """Calls a function once per completion.

    Sync functions run inline, one after the other: fastest and deterministic, but nothing else runs during a call. A
    call is interrupted after `deadline` seconds (Python code at once, other code when it returns): by SIGALRM in the
    process's main thread, by a thread that waits in others, where a notebook's runs are. With `thread` they run in
    threads, async ones as tasks: completions at once, each with `deadline` seconds from the start of its call. A thread
    that outlives its deadline cannot be stopped: its result is dropped, it holds up neither other calls nor the end of
    the process.
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
            raise TypeError(f"A reward must be a function; {function!r} is a {type(function).__name__}.")
        self.function = function
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.deadline = deadline
        self.options = dict(options or {})
        self.asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - the method itself: objects with an async __call__
        )
        self.thread = thread and not self.asynchronous
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self.arguments = _bindings(function, self.name, self.options)

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        if self.asynchronous or self.thread:
            return list(await asyncio.gather(*(self._awaited(prompt, completion) for completion in completions)))
        scores: list[Score] = []
        began = time.monotonic()
        for completion in completions:
            if time.monotonic() > began + PATIENCE:
                await asyncio.sleep(0)
                began = time.monotonic()
            scores.append(self._inline(prompt, completion))
        return scores

    def _inline(self, prompt: Prompt, completion: Completion) -> Score:
        try:
            with _interrupted_after(self.deadline):
                return as_score(self._call(prompt, completion))
        except _Late:
            return Score(value=None, reason=f"no answer within {self.deadline:g} s")
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - whatever a user function raises
            return _failure(error)

    async def _awaited(self, prompt: Prompt, completion: Completion) -> Score:
        if not self.thread:
            return await self._within_deadline(lambda: self._call(prompt, completion))
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = (loop, asyncio.Semaphore(THREADS))
        async with self._places[1]:
            return await self._within_deadline(lambda: _in_thread(lambda: self._call(prompt, completion)))

    async def _within_deadline(self, call: Callable[[], Awaitable[Any]]) -> Score:
        limit = asyncio.timeout(self.deadline)
        try:
            async with limit:
                return as_score(await call())
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # it was meant for whoever asks
                raise
            return _failure(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a user function raises is a failed score
            if isinstance(error, TimeoutError) and limit.expired():
                return Score(value=None, reason=f"no answer within {self.deadline:g} s")
            return _failure(error)

    def _call(self, prompt: Prompt, completion: Completion) -> Any:
        positional = [get(prompt, completion) for name, get in self.arguments if not name]
        named = {name: get(prompt, completion) for name, get in self.arguments if name}
        return self.function(*positional, **named, **self.options)


class _Late(BaseException):
    """Not an Exception: functions that catch those are interrupted too."""


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """_Late is raised inside once so many seconds are over. A function that sets the timer itself has it."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        with _WATCH.interrupting(seconds):
            yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class _Watch:
    """A thread that raises _Late in others whose calls are over their time. It ends where none has called for a while;
    one for every call would take longer than most calls do."""

    EVERY, IDLE = 0.05, 20
    """Seconds between two looks, and looks without a call before it ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[int, float] = {}  # by thread
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def interrupting(self, seconds: float) -> Iterator[None]:
        here = threading.get_ident()
        with self._lock:
            self._until[here] = time.monotonic() + seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:  # what is raised here is raised before it is left
                self._until.pop(here, None)

    def _look(self) -> None:
        idle = 0
        while True:
            time.sleep(self.EVERY)
            with self._lock:
                idle = 0 if self._until else idle + 1
                if idle > self.IDLE:
                    self._thread = None
                    return
                now = time.monotonic()
                for thread in [thread for thread, until in self._until.items() if until <= now]:
                    del self._until[thread]
                    raise_in(thread, _Late)


_WATCH = _Watch()


async def _in_thread(call: Callable[[], Any]) -> Any:
    """In a thread of its own that the process does not wait for: one of asyncio's pool, which has few, would block
    others' calls and the end of the run for as long as it hangs."""
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
        except StopIteration as error:  # a future takes any error but this one
            failure = RuntimeError(f"StopIteration: {error}")
        except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True).start()
    return await future


def as_score(result: Any) -> Score:
    """What a reward function returned, as a Score; TypeError for what is neither number, dict nor None."""
    if result is None:
        return Score(value=None, reason="function returned None")
    if isinstance(result, Score):
        value, parts = result.value, _parts(result.parts)
        if value is None:
            return Score(value=None, parts=parts, reason=result.reason or "function returned a Score without a value")
        return _finite(_number(value, "the reward"), parts)
    if not isinstance(result, Mapping):
        return _finite(_number(result, "the reward"), {})
    if "reward" not in result:
        raise TypeError(f"function returned a dict without the key 'reward'; it has {sorted(map(str, result))}")
    parts = _parts({key: value for key, value in result.items() if key != "reward"})
    if result["reward"] is None:
        return Score(value=None, parts=parts, reason="function returned None as its 'reward'")
    return _finite(_number(result["reward"], "the reward"), parts)


def _finite(value: float, parts: Mapping[str, float]) -> Score:
    if not math.isfinite(value):
        return Score(value=None, parts=parts, reason=f"function returned {value}")
    return Score(value=value, parts=parts)


def _parts(given: Mapping[Any, Any]) -> dict[str, float]:
    return {str(key): _number(value, f"part {key!r}") for key, value in given.items()}


def _number(value: Any, what: str) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"{what} is a {type(value).__name__}, not a number: {value!r:.80}")
    return float(value)


def _failure(error: BaseException) -> Score:
    return Score(value=None, reason=f"{type(error).__name__}: {error}")


Getter = Callable[[Prompt, Completion], Any]


def _bindings(function: Callable[..., Any], name: str, options: Mapping[str, Any]) -> tuple[tuple[str, Getter], ...]:
    """Which parameter gets what; a parameter that can be passed by position only has the name ""."""
    parameters = list(inspect.signature(function).parameters.values())
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    unknown = [option for option in options if option not in {parameter.name for parameter in parameters}]
    if unknown and not open_ended:
        raise ValueError(
            f"options of reward {name!r} have {unknown[0]!r}, which its function does not take"
            f"{_nearest(unknown[0], [parameter.name for parameter in parameters])}."
        )
    found: list[tuple[str, Getter]] = []
    placed = _placed(parameters, options)
    for index, parameter in enumerate(parameters):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name in options:
            continue
        getter = _getter(parameter, index if placed else None)
        if getter is not None:
            found.append(("" if parameter.kind is parameter.POSITIONAL_ONLY else parameter.name, getter))
        elif parameter.default is parameter.empty:
            raise ValueError(
                f"Reward {name!r} asks for {parameter.name!r}, which is neither in its options nor one of "
                f"{', '.join(ARGUMENTS)}{_meant(parameter.name)}."
            )
    return tuple(found)


def _placed(parameters: Sequence[inspect.Parameter], options: Mapping[str, Any]) -> bool:
    """Whether the first two parameters are a prompt and a completion by their place, where their names do not say so.
    They are not where there is one alone, or either is an option, of FOREIGN, or means something else to us."""
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
        return f"; it is {FOREIGN[name]}, where docs/switching.md shows how to pass them on"
    return _nearest(name, list(ARGUMENTS))


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
    """Whether it is annotated as a Prompt, in a string under `from __future__ import annotations`."""
    return getattr(parameter.annotation, "__name__", str(parameter.annotation)).rpartition(".")[2] == "Prompt"


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; the nearest name is {close[0]!r}" if close else ""
