"""Running coroutines: from plain code to the end, several at once, and in the background while there is work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


def finished(work: Coroutine[Any, Any, Result]) -> Result:
    """The coroutine's result, for plain code; in a notebook, where an event loop runs already, from another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001 - raised again below, for whoever waits
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


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
