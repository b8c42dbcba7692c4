"""Open the crew that a run's settings ask for, and its cluster, and keep both over restarts of ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

from plaudit.crew.base import Crew, Plan
from plaudit.crew.local import LocalCrew
from plaudit.crew.ray import RayCrew
from plaudit.crew.servers import ServerCrew
from plaudit.runtime.token import prepare
from plaudit.runtime.worker import Failures
from plaudit.settings.tree import Settings

if TYPE_CHECKING:
    from plaudit.runtime.ray import RayRuntime


class Crews:
    """Open the crew of a run. After the loss of a rank, open it again and keep what still works."""

    def __init__(self, settings: Settings, say: Callable[[str], None]):
        self.settings, self.say = settings, say
        self.failures = Failures(settings.runtime.max_failures_per_hour)
        self._runtime: RayRuntime | None = None
        self._crew: Crew | None = None

    async def open(self, plan: Plan) -> Crew:
        """Return ready workers. Raises the error that prevents it."""
        if self._crew is not None:
            if await self._crew.form_again(plan):
                return self._crew
            self.dismiss()
            gc.collect()  # its memory is needed
        local = self.settings.runtime.kind == "local"
        crew = LocalCrew(self.settings, plan, self.say) if local else await self._ray_crew(plan)
        self._crew = crew
        return crew

    async def _ray_crew(self, plan: Plan) -> RayCrew:
        kind = RayCrew if self.settings.runtime.served is None else ServerCrew
        return await kind.open(self.settings, plan, self._cluster(), self.failures, self.say)

    def _cluster(self) -> RayRuntime:
        if self._runtime is None:
            prepare(self.settings.runtime)
            from plaudit.runtime.ray import RayRuntime

            self._runtime = RayRuntime(self.settings.runtime, self.say)
            self.say(self._runtime.start())
        return self._runtime

    def dismiss(self) -> None:
        """End all workers; to be called in the event loop that opened them."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None

    def __enter__(self) -> Crews:
        return self

    def __exit__(self, *error: object) -> None:
        if self._runtime is not None:
            self._runtime.close()
