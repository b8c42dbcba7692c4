"""Running coroutines: from plain code to the end, several at once, and in the background while there is work."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


def finished(work: Coroutine[Any, Any, Result]) -> Result:
    """The coroutine's result, for plain code; in a notebook, where an event loop runs already, from another thread.
    What interrupts the wait for that thread, such as Ctrl-C, ends the work too before it is raised."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    loops: list[asyncio.AbstractEventLoop] = []
    results: list[Result] = []
    errors: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        try:
            with asyncio.Runner() as runner:
                loops.append(runner.get_loop())
                results.append(runner.run(work))
        except BaseException as error:  # noqa: BLE001 - raised again below, for whoever waits
            errors.append(error)
        finally:
            over.set()

    thread = threading.Thread(target=run)
    thread.start()
    interrupted: BaseException | None = None
    while thread.is_alive() and not over.is_set():
        try:
            over.wait(1.0)  # not join: one that is interrupted takes the thread to have ended (Python 3.11 and 3.12)
        except BaseException as error:  # noqa: BLE001 - raised again below, once nothing goes on behind the caller's back
            interrupted = error
            raise_in(thread.ident or 0, KeyboardInterrupt)
            for loop in loops:  # one that waits must wake up to hear of it
                with contextlib.suppress(RuntimeError):  # closed
                    loop.call_soon_threadsafe(lambda: None)
    if interrupted is not None:
        raise interrupted
    if errors:
        raise errors[0]
    return results[0]


def raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise `error` in another thread, wherever its Python code is; in other code, once that returns."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


async def together(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Everybody's result, in their order. What the first to fail raises is raised as it is; the others are cancelled
    and have ended then."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Background:
    """One task that does `work` whenever there is some. Nobody awaits it, so `ended` hears how it went wrong: with the
    error, or with None where it was cancelled."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], ended: Callable[[BaseException | None], None]):
        self._work, self._ended = work, ended
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """There is work."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())
            self._task.add_done_callback(self._settle)

    def _settle(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._ended(None)
        elif (error := task.exception()) is not None:
            self._ended(error)
