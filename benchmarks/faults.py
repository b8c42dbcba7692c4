"""Ends real processes of a run at chosen moments, and notes when that was found and when the run went on.

    dealt kills -> Killer (a hook; sees every call that the driver sends) -> table
    python faults.py SETTINGS.yaml PHASE STEP -> a run whose driver ends itself at that moment

A moment is a call that the driver has just sent: the process is killed (or frozen) while the call is under way.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.token import prepare

prepare(RuntimeSettings(kind="ray"))  # before ray is imported, which reads its environment then
HEALTH = {"period_ms": "1000", "timeout_ms": "1000", "failure_threshold": "3"}
"""As docs/distributed.md has it for several nodes: one that is gone is given up in six seconds."""
for key, value in HEALTH.items():
    os.environ.setdefault(f"RAY_health_check_{key}", value)
from plaudit import Turn, load_settings, run  # noqa: E402
from plaudit.executors.ray import RayExecutor  # noqa: E402
from plaudit.loop.progress import Moment  # noqa: E402
from plaudit.runtime.ray_worker import RayWorker  # noqa: E402
from plaudit.types import Stats  # noqa: E402

if TYPE_CHECKING:  # workers import this file by its path, and find no other
    from partition import Island

PHASES = ("rollout", "reward", "update", "apply", "publish", "save")
"""What the driver has just asked for: answers, scores, gradients, the optimizer's step, new weights, a checkpoint."""
CALLS = {"generate": "rollout", "of_sequences": "reward", "of_distant": "reward", "load": "publish", "write": "save"}
"""The phase of a call to a worker; ranks' parts have their own."""
PARTS = {"prepare": "update", "push": "update", "apply": "apply", "step": "apply", "save": "save"}
WORKERS = {"rank": "training rank", "rollout": "rollout worker", "judge": "judge"}
"""What the runtime calls the workers of a role."""
APART = {"reference": "reference rank", "critic": "critic rank", "server": "parameter server"}
APART |= {"environment": "environment"}
"""Those of ranks with a placement of their own, of strategy=server, and of environments in processes of their own."""
NODES = ("node", "partition")
"""Roles where everything on a node is lost."""
SIGNALS = {signal.SIGKILL: "killed", signal.SIGSTOP: "frozen"}
NODE = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_log_monitor": False}
HEAD = {"num_cpus": 0, "object_store_memory": 100 << 20, "include_dashboard": False}
HEAD |= {"include_log_monitor": False, "no_monitor": True}
"""Of a cluster of `ray.cluster_utils`: without readers of logs and an autoscaler, which take seconds and do nothing."""
LONGEST = 60.0
"""Seconds in which a kill must be found."""


@dataclass
class Kill:
    """SIGKILL (or SIGSTOP) of a process of `role` at the next call of `phase`, once the run has done `step` steps."""

    role: str
    """rank, rollout, judge, server; node: every process of one's node; partition: one's node is cut off; driver: the
    run's own process."""
    phase: str
    step: int
    signal: signal.Signals = signal.SIGKILL
    which: int = 0
    """Of several of the role, counted round and round."""
    method: str = ""
    """What the run trains by, for the table."""
    victim: str = ""
    """The worker that it hit."""
    at: float | None = None
    found: float | None = None
    """Seconds until the driver knew."""
    next_step: float | None = None
    """Seconds until the run had done a further step."""
    back: float | None = None
    """Of these, seconds since the last new process was up."""
    reached: int = 0
    """Steps done when it was killed."""
    repeated: int = 0
    """Steps that had to be done again."""
    equal: bool | None = None
    """The run that it happened to ended with the weights of an undisturbed one, to the bit; None where samples may be
    old, and so no two runs are equal."""
    fine: bool = False
    """The run went on and ended as it should."""

    def row(self) -> str:
        figures = (f"{x:.1f}" if x is not None else "-" for x in (self.found, self.next_step))
        state = {None: "-", True: "yes", False: "NO"}[self.equal]
        return "{:6} {:9} {:8} {:7} {:10} {:>9} {:>13} {:>11} {:>6}".format(
            self.method, self.role, self.phase, self.what, self.reached, *figures, self.repeated, state
        )

    @property
    def what(self) -> str:
        return "cut off" if self.role == "partition" else SIGNALS[self.signal]

    @property
    def planned(self) -> tuple[object, ...]:
        """What is known before."""
        return self.method, self.role, self.phase, self.step, int(self.signal), self.which

    @property
    def survived(self) -> bool:
        return self.found is not None and self.next_step is not None


HEADER = "run    role      phase    what    after step  found, s  next step, s  steps again  equal"


def dealt(
    seed: int,
    count: int,
    *,
    first: int = 0,
    roles: Sequence[str] = tuple(WORKERS),
    phases: Sequence[str] = PHASES,
    cold: int | None = 0,
    apart: int = 1,
) -> list[Kill]:
    """So many kills of a run, `apart` steps one after the other at least, from the `first` of an endless row: every
    role in every one of the phases, in an order by the seed, before any comes again. One in six is a freeze, another
    one in each such deck, `cold` being where that begins (None: kills alone)."""
    cards = list(itertools.product(roles, phases))
    kills = []
    for number in range(count):
        deck, place = divmod(first + number, len(cards))
        generator = random.Random(f"{seed} {deck}")
        card = generator.sample(range(len(cards)), len(cards))[place]
        freezes = cold is not None and (card + deck + cold) % 6 == 0
        which = random.Random(f"{seed} {deck} {card}").randrange(4)
        sent = signal.SIGSTOP if freezes else signal.SIGKILL
        kills.append(Kill(*cards[card], step=1 + number * apart, signal=sent, which=which))
    return kills


@dataclass
class Killer:
    """Carries out kills in their order, one after the other was survived. Add `hook` to the run's hooks."""

    kills: Sequence[Kill]
    steps: int = 0
    """Steps done."""
    workers: list[RayWorker] = field(default_factory=list)
    cluster: Any = None
    """Of `ray.cluster_utils`, where nodes are killed: each is replaced at once."""
    expected: int = 0
    """Workers of the whole run, where nodes are lost: the next is when all are there again."""
    islands: list[Island] = field(default_factory=list)
    """Where nodes are cut off: always the last one, and another one like it joins at once."""
    publishing: bool = False
    up: float = 0.0
    """When a process was last begun."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def current(self) -> Kill | None:
        return next((kill for kill in self.kills if kill.next_step is None), None)

    @property
    def survived(self) -> bool:
        return all(kill.survived for kill in self.kills)

    async def hook(self, moment: Moment) -> Stats:
        step, before = moment.progress.step, self.steps
        self.steps = step
        kill = self.current
        if kill is None or kill.at is None or kill.role == "driver":
            return {}
        if step <= before:
            kill.repeated = before + 1 - step
        if step > kill.reached:
            seconds = time.monotonic() - kill.at
            while kill.found is None and time.monotonic() < kill.at + LONGEST:  # the run got on without it
                await asyncio.sleep(0.05)
            while kill.role in NODES and not self.whole() and time.monotonic() < kill.at + LONGEST:
                await asyncio.sleep(0.05)
            if kill.role == "partition":
                self.islands[-2].heal()
            kill.back = max(0.0, kill.at + seconds - self.up)
            kill.next_step = seconds  # not before: a rank that is lost ends this, and the next hook goes on with it
        return {}

    def sent(self, part: str | None, method: str) -> None:
        kill = self.current
        if kill is None or kill.at is not None or self.steps < kill.step or self.phase(part, method) != kill.phase:
            return
        if kill.role == "driver":
            kill.at, kill.reached = time.monotonic(), self.steps
            os.kill(os.getpid(), kill.signal)
            return
        name = (WORKERS | APART).get(kill.role, "")
        if kill.role in NODES and not self.whole():
            return
        of_role = [worker for worker in self.workers if worker.name.startswith(name) and alive(worker)]
        if kill.role == "partition":
            of_role = [worker for worker in of_role if worker.node == self.node_at(self.islands[-1].address)]
        if victims := sorted(of_role, key=lambda worker: worker.name):
            victim = victims[kill.which % len(victims)]
            kill.at, kill.reached, kill.victim = time.monotonic(), self.steps, victim.name
            if kill.role == "node":
                self.end_node(victim.node)
            elif kill.role == "partition":
                self.islands[-1].cut()
                self.islands.append(self.islands[-1].another())
            else:
                os.kill(victim.pid, kill.signal)

    def phase(self, part: str | None, method: str) -> str | None:
        if part is not None:
            return PARTS.get(method)
        return CALLS.get(method, "publish" if self.publishing else None)

    def whole(self) -> bool:
        """The node that took the last one's place is there, and used."""
        return len([worker for worker in self.workers if alive(worker)]) == self.expected

    def node_at(self, address: str) -> str:
        nodes = self.cluster.global_state.node_table()
        return next((node["NodeID"] for node in nodes if node["NodeManagerAddress"] == address), "")

    def end_node(self, number: str) -> None:
        """Kill its raylet and every process that this one started; another node joins."""
        node = next(node for node in self.cluster.worker_nodes if node.node_id == number)
        raylet = node.all_processes["raylet"][0].process.pid
        for pid in (raylet, *descendants(raylet)):
            os.kill(pid, signal.SIGKILL)

        async def replace() -> None:
            await asyncio.to_thread(self.cluster.remove_node, node, allow_graceful=False)
            self.cluster.add_node(**NODE, wait=False)  # in the main thread: it sets signal handlers

        self.tasks.append(asyncio.get_running_loop().create_task(replace()))

    def lost(self) -> None:
        kill = self.current
        if kill is not None and kill.at is not None and kill.found is None:
            kill.found = time.monotonic() - kill.at

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Every call of the driver passes by here."""
        start, do, end, refer = RayWorker.start, RayWorker.do, RayWorker._end, RayWorker.references
        publish = RayExecutor.publish
        killer = self

        async def started(worker: RayWorker, timeout: float) -> None:
            await start(worker, timeout)
            killer.workers.append(worker)
            killer.up = time.monotonic()

        async def called(worker: RayWorker[Any], part: str | None, method: str, *arguments: Any, **more: Any) -> Any:
            answer = do(worker, part, method, *arguments, **more)
            killer.sent(part, method)
            return await answer

        def referred(worker: RayWorker[Any], method: Any, *arguments: Any, **more: Any) -> list[Any]:
            found = refer(worker, method, *arguments, **more)
            killer.sent(more.get("part"), method.__name__)
            return found

        def ended(worker: RayWorker, reason: str) -> None:
            if reason != "was ended":
                killer.lost()
            end(worker, reason)

        async def published(executor: RayExecutor, version: int) -> Stats:
            killer.publishing = True
            try:
                return await publish(executor, version)
            finally:
                killer.publishing = False

        RayWorker.start, RayWorker.do, RayWorker._end = started, called, ended  # type: ignore[method-assign]
        RayWorker.references, RayExecutor.publish = referred, published  # type: ignore[method-assign]
        try:
            yield
        finally:
            RayWorker.start, RayWorker.do, RayWorker._end = start, do, end  # type: ignore[method-assign]
            RayWorker.references, RayExecutor.publish = refer, publish  # type: ignore[method-assign]

    def table(self) -> str:
        return "\n".join([HEADER, *(kill.row() for kill in self.kills)])


class Letters:
    """An environment that says three times how long an answer was, and pays by it."""

    def reset(self) -> None:
        self.said = list[int]()

    def step(self, message: dict[str, str]) -> Turn:
        self.said.append(len(message["content"]))
        if len(self.said) == 3:
            return Turn(done=True, reward=sum(self.said) % 11 / 5 - 1)
        return Turn(messages=[{"role": "user", "content": f"That has {self.said[-1]} letters."}])


def varied(completion: str) -> float:
    """A reward from -1 to 1, by no reason that a model could learn in a few steps."""
    return sum(completion.encode()) % 11 / 5 - 1


def alive(worker: RayWorker) -> bool:
    return not worker._lost.done()


def descendants(pid: int) -> set[int]:
    """Processes that this one started, and those started by them."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found, more = set[int](), {pid}
    while more:
        more = {child for child, parent in parents.items() if parent in more} - found
        found |= more
    return found


def running(pids: set[int]) -> set[int]:
    """Those that have not ended."""

    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    return {pid for pid in pids if runs(pid)}


def main() -> None:
    settings, phase, step = sys.argv[1:]
    killer = Killer([Kill("driver", phase, int(step))])
    with killer.at_work():
        run(load_settings(settings), hooks=[killer.hook])


if __name__ == "__main__":
    main()
