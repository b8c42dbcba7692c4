"""Open the executor that a run's settings ask for, and its cluster, and keep both over restarts of ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

from plaudit.executors.base import Executor, Plan
from plaudit.executors.local import LocalExecutor
from plaudit.executors.ray import RayExecutor
from plaudit.runtime.token import prepare
from plaudit.runtime.worker import Failures
from plaudit.settings.tree import Settings
from plaudit.support.rooms import optional

if TYPE_CHECKING:
    from plaudit.runtime.ray import RayRuntime


class Executors:
    """Open the executor of a run. After the loss of a rank, open it again and keep what still works."""

    def __init__(self, settings: Settings, say: Callable[[str], None]):
        self.settings, self.say = settings, say
        self.failures = Failures(settings.runtime.max_failures_per_hour)
        self._runtime: RayRuntime | None = None
        self._executor: Executor | None = None

    async def open(self, plan: Plan) -> Executor:
        """Return an executor with ready workers: the present one with new ranks if it can, else a new one."""
        if self._executor is not None:
            if await self._executor.form_again(plan):
                return self._executor
            self.dismiss()
            gc.collect()  # the new executor needs its memory
        local = self.settings.runtime.kind == "local"
        executor = LocalExecutor(self.settings, plan, self.say) if local else await self._ray_executor(plan)
        self._executor = executor
        return executor

    async def _ray_executor(self, plan: Plan) -> RayExecutor:
        servers = self.settings.runtime.served is not None
        kind = optional("servers", asked_by="runtime.servers").ServerExecutor if servers else RayExecutor
        executor: RayExecutor = await kind.open(self.settings, plan, self._cluster(), self.failures, self.say)
        return executor

    def _cluster(self) -> RayRuntime:
        if self._runtime is None:
            prepare(self.settings.runtime)
            from plaudit.runtime.ray import RayRuntime

            self._runtime = RayRuntime(self.settings.runtime, self.say)
            self.say(self._runtime.start())
        return self._runtime

    def dismiss(self) -> None:
        """End all workers, but not the cluster. Call this in the event loop that opened them."""
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    def __enter__(self) -> Executors:
        return self

    def __exit__(self, *error: object) -> None:
        if self._runtime is not None:
            self._runtime.close()
