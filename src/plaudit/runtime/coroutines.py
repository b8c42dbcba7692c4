"""Run coroutines: from sync code, and several at once."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


def finished(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine from sync code and return its result. If this thread has a running event loop (a notebook), run
    in another thread; an interruption of the wait, such as Ctrl-C, first ends the coroutine and is then raised."""
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
        except BaseException as error:  # noqa: BLE001 - raised again below, in the waiting thread
            errors.append(error)
        finally:
            over.set()

    thread = threading.Thread(target=run)
    thread.start()
    interrupted: BaseException | None = None
    while thread.is_alive() and not over.is_set():
        try:
            over.wait(1.0)  # not join: an interrupted join takes the thread for ended (Python 3.11, 3.12)
        except BaseException as error:  # noqa: BLE001 - raised again below, once nothing continues after the caller's back
            interrupted = error
            raise_in(thread.ident or 0, KeyboardInterrupt)
            for loop in loops:  # a waiting event loop must wake up to raise it
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(lambda: None)
    if interrupted is not None:
        raise interrupted
    if errors:
        raise errors[0]
    return results[0]


def raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise `error` in the thread with this id: at once in Python code, else when its call of C code returns."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


async def together(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run coroutines concurrently and return their results in order. If one raises, cancel the others, wait for their
    end and raise its exception unchanged."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
