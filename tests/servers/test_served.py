"""Steps by parameter servers among workers that are lost, late or new. Real learners and servers, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import GPT2

from plaudit.algorithms import SFT
from plaudit.algorithms.pairs import pair_figures
from plaudit.batch import Batch
from plaudit.learn.learner import Learner
from plaudit.learn.settings import LearnSettings, OptimizerSettings
from plaudit.models.load import fresh_model
from plaudit.runtime.ray_worker_group import RayWorkerGroup
from plaudit.runtime.settings import Servers
from plaudit.runtime.supervisor import Supervisor
from plaudit.runtime.worker import Failures, WorkerLost
from plaudit.servers.part import ServerPart
from plaudit.servers.pusher import Pusher
from plaudit.servers.served import Served
from plaudit.servers.team import PUSHING, Team
from plaudit.types import Role, Row

OPTIMIZER = OptimizerSettings(learning_rate=0.01, schedule="constant", eps=1e-3)


class Process:
    """A worker behind a handle as Ray's, but in this process: calls take turns, and `delay` is the time of a pass."""

    def __init__(self, name: str, parts: dict[str, Any]):
        self.name, self.parts, self.alive, self.delay = name, parts, True, 0.0
        self.calls: list[str] = []
        self.turn = asyncio.Lock()
        self.lost = asyncio.get_running_loop().create_future()

    def kill(self, reason: str = "was ended") -> None:
        if self.alive:
            self.alive = False
            self.lost.set_result(WorkerLost(self.name, reason))

    async def gone(self) -> WorkerLost:
        return await asyncio.shield(self.lost)

    async def do(self, part: str, method: str, arguments: Sequence[Any], *, starts: bool = False) -> Any:
        async with self.turn:
            if method == "prepare" and self.delay:
                await asyncio.wait([self.lost], timeout=self.delay)
            if not self.alive:
                raise WorkerLost(self.name, "its process ended")
            self.calls.append(method)
            return getattr(self.parts[part], method)(*arguments)

    def references(self, method: Callable[..., Any], *arguments: Any, parts: int, part: str) -> list[Any]:
        if not self.alive:
            return [WorkerLost(self.name, "its process ended")] * parts
        self.calls.append(method.__name__)
        found = list(getattr(self.parts[part], method.__name__)(*arguments))
        assert len(found) == parts
        return found

    async def fetched(self, reference: Any) -> Any:
        await asyncio.sleep(0)
        if isinstance(reference, WorkerLost):
            raise reference
        return reference


class Island:
    """A handle on one process, as on a worker of several."""

    def __init__(self, process: Process):
        self.name, self.worker_group = process.name, RayWorkerGroup([process])  # type: ignore[list-item]
        self.gone, self.kill = process.gone, process.kill
        self.processes = (self,)


def learner() -> Learner:
    model = fresh_model(GPT2, vocab_size=50, seed=0)
    settings = LearnSettings()
    return Learner(
        model, Role.POLICY, SFT().losses()[Role.POLICY], optimizer=OPTIMIZER, settings=settings, total_steps=99
    )


def weights(of: Learner) -> torch.Tensor:
    return torch.cat([p.detach().view(-1) for p in of.model.parameters()])


class House:
    """So many workers, and their servers."""

    def __init__(self, workers: int, **servers: Any):
        self.settings, self.processes = Servers(**servers), list[Process]()
        self.failures, self.may_start = Failures(-1), asyncio.Event()
        self.may_start.set()
        how: dict[str, Any] = {"work": "units", "patience": 60.0, "none": "none", "failures": self.failures}
        self.supervisor: Supervisor[Any] = Supervisor(self.start, workers, **how)
        parts = [ServerPart(OPTIMIZER, self.settings) for _ in range(self.settings.count)]
        self.servers = [Process(f"server {n}", {Role.POLICY: part}) for n, part in enumerate(parts)]

    async def start(self, number: int) -> Any:
        await self.may_start.wait()
        made = learner()
        pusher = Pusher(made, self.settings)
        self.processes.append(Process(f"rank {number}", {Role.POLICY: made, PUSHING + Role.POLICY: pusher}))
        return Island(self.processes[-1])

    async def __aenter__(self) -> Served:
        self.supervisor.open()
        await self.supervisor.counted()
        self.team: Team[Any] = Team(self.supervisor, RayWorkerGroup(self.servers), self.settings)  # type: ignore[arg-type]
        await self.team.begin(Role.POLICY)
        await self.team.refresh()
        self.served = Served(self.team, Role.POLICY, lambda stats: None)
        return self.served

    async def __aexit__(self, *error: object) -> None:
        self.supervisor.close("the test")
        self.team.close()
        await asyncio.sleep(0)

    @property
    def learners(self) -> list[Any]:
        return [process.parts[Role.POLICY] for process in self.processes]

    async def step(self, batch: Batch, step: int = 0) -> dict[str, float]:
        stats = await self.served.prepare(batch, step, 1.0)
        await self.served.apply(not stats["skipped"])
        return stats


@pytest.fixture
def batch() -> Batch:
    torch.manual_seed(0)
    sizes = [3, 16, 5, 9, 4, 12, 7, 7, 15, 6, 8, 8]
    rows = [
        Row(tokens=tuple(torch.randint(50, (n,)).tolist()), trainable=(False, *(True,) * (n - 1)), group=number)
        for number, n in enumerate(sizes)
    ]
    return SFT().weigh(Batch.of(rows))


def alone(batch: Batch, steps: int) -> torch.Tensor:
    one = learner()
    for step in range(steps):
        one.step(batch, step)
    return weights(one)


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def within(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


def test_a_share_of_the_step_is_rounded_once_it_is_whole(batch: Batch) -> None:
    """Three workers that are right with all of their thirds are right with all: 1, not the 0.999999 of 3 x 0.333333."""

    def right(loss: Any, output: Any, part: Batch) -> Any:
        assert part.row_weight is not None
        value, figures = loss(output, part)
        return value, figures | pair_figures(torch.ones(len(part)), part.row_weight)

    async def go() -> None:
        house = House(3)
        async with house:
            for one in house.learners:
                one.loss = partial(right, one.loss)
            assert (await house.step(batch))["accuracy"] == 1.0

    within(go())


def test_workers_learn_what_one_does_and_its_figures_are_the_steps(batch: Batch) -> None:
    async def go() -> None:
        house = House(3, count=2)
        async with house as served:
            stats = [await house.step(batch, step) for step in range(3)]
            one = learner()
            mine = [one.step(batch, step) for step in range(3)]
            for theirs, other in zip(stats, mine, strict=True):
                for name in other:
                    assert theirs[name] == pytest.approx(other[name], rel=1e-4), name
            assert all(far(weights(each), weights(one)) < 1e-6 for each in house.learners)
            size = 4 * weights(one).numel()
            assert stats[1]["servers/bytes/policy"] == 3 * 2 * size, "three push and three pull"
            assert stats[1]["servers/workers/policy"] == 3
            assert stats[1]["servers/late/policy/max"] == 0
            assert served.moves == 3
            whole = await served.evaluate(batch)
            assert whole["loss/policy"] == pytest.approx(one.evaluate(batch)["loss/policy"], rel=1e-5)
            assert await served.sound(whole=True)

    within(go())


@pytest.mark.parametrize("when", ["prepare", "push", "pull"])
def test_a_lost_workers_units_are_cut_again_and_a_new_one_joins(when: str, batch: Batch) -> None:
    """No step is lost or repeated: weights are those of one rank after as many steps."""

    async def go() -> None:
        house = House(3)
        async with house:
            await house.step(batch, 0)
            house.may_start.clear()
            victim = house.processes[1]
            if when == "prepare":
                victim.delay = 60.0
                asyncio.get_running_loop().call_later(0.05, victim.kill)
            else:
                _dies_at(victim, when)
            stats = await house.step(batch, 1)
            assert not victim.alive
            assert stats["servers/workers/policy"] == (2 if when != "pull" else 3)
            here = [one for one in house.processes if one.alive]
            assert all(far(weights(one.parts[Role.POLICY]), alone(batch, 2)) < 1e-6 for one in here)
            house.may_start.set()
            while len(house.processes) < 4 or len(house.supervisor.workers) < 3:
                await asyncio.sleep(0.01)
            stats = await house.step(batch, 2)
            assert stats["servers/workers/policy"] == 3
            assert far(weights(house.learners[3]), alone(batch, 3)) < 1e-6
            assert len(house.failures.lost) == 1

    within(go())


def _dies_at(victim: Process, method: str) -> None:
    """At its next call of this method."""
    do, references = victim.do, victim.references

    async def doing(part: str, name: str, arguments: Sequence[Any], *, starts: bool = False) -> Any:
        if name == method:
            victim.kill("its process ended")
        return await do(part, name, arguments)

    def referring(asked: Callable[..., Any], *arguments: Any, parts: int, part: str) -> list[Any]:
        if asked.__name__ == method:
            victim.kill("its process ended")
        return references(asked, *arguments, parts=parts, part=part)

    victim.do, victim.references = doing, referring  # type: ignore[method-assign]


def test_all_workers_are_lost_and_the_servers_keep_what_was_learned(batch: Batch) -> None:
    async def go() -> None:
        house = House(2)
        async with house:
            await house.step(batch, 0)
            for one in house.processes:
                one.kill("its node is gone")
            await house.step(batch, 1)
            assert all(far(weights(one), alone(batch, 2)) < 1e-6 for one in house.learners[2:])

    within(go())


@pytest.mark.slow
def test_a_step_ends_at_the_quorum_and_the_late_push_counts_in_a_later_one(batch: Batch) -> None:
    async def go() -> None:
        house = House(3, quorum=2, max_stale=2)
        async with house as served:
            await house.step(batch, 0)
            slow = house.processes[2]
            slow.delay = 1.0
            turns = [await house.step(batch, step) for step in range(1, 3)]
            assert [stats["servers/workers/policy"] for stats in turns] == [2, 2]
            assert "prepare" not in slow.calls[2:], "still at it"
            third = await house.step(batch, 3)  # may be two steps late, and is waited for
            assert third["servers/workers/policy"] == 3
            assert third["servers/late/policy/max"] == 2
            assert third["loss/policy"] == pytest.approx(turns[1]["loss/policy"], rel=0.2), "a mean over tokens"
            assert not served.work
            slow.delay = 0.0
            assert (await house.step(batch, 4))["servers/workers/policy"] == 3
            assert len({weights(one).sum().item() for one in house.learners}) == 1, "all have the newest weights"

    within(go())


def test_within_the_grace_a_late_push_still_counts(batch: Batch) -> None:
    async def go() -> None:
        house = House(2, quorum=1, grace=30.0)
        async with house:
            house.processes[1].delay = 0.3
            assert (await house.step(batch, 0))["servers/workers/policy"] == 2
            assert far(weights(house.learners[0]), alone(batch, 1)) < 1e-6

    within(go())


def test_rounds_go_through_the_servers_and_bytes_shrink_by_them(batch: Batch) -> None:
    """Four steps a round, in int8: a 16th of a float32's bytes, but for the scales."""

    async def go() -> None:
        house = House(2, local_steps=4, push="int8")
        async with house:
            first = weights(house.learners[0])
            losses, sizes = [], []
            for step in range(13):
                stats = await house.step(batch, step)
                losses.append(stats["loss/policy"])
                sizes.append(stats["servers/bytes/policy"])
                assert torch.equal(weights(house.learners[0]), weights(house.learners[1]))
                if step < 3:
                    assert torch.equal(weights(house.learners[0]), first)
            numbers = len(first)
            messages = 2 * 2 * (numbers + 4 * -(-numbers // 256))
            assert sizes[1:] == [0, 0, 0, messages] * 3
            assert losses[-1] < 0.9 * losses[0]

    within(go())


@pytest.mark.slow
def test_in_rounds_a_slow_worker_comes_later_and_a_lost_one_never(batch: Batch) -> None:
    async def go() -> None:
        house = House(3, local_steps=2, quorum=2, max_stale=2, momentum=0.0)
        async with house as served:
            slow = house.processes[2]
            slow.delay = 0.5
            for step in range(4):
                await house.step(batch, step)
            assert "push" not in slow.calls, "two rounds without it"
            for step in range(4, 8):
                await house.step(batch, step)
            assert "push" in slow.calls, "it came, at the latest as stale as it may be"
            slow.kill("its node is gone")
            losses = [(await house.step(batch, step))["loss/policy"] for step in range(8, 14)]
            assert losses[-1] < losses[0]
            await served.team.idle()

    within(go())


def test_in_rounds_a_lost_workers_units_join_the_others_own_steps(batch: Batch) -> None:
    async def go() -> None:
        house = House(2, local_steps=2)
        async with house:
            victim = house.processes[1]
            victim.delay = 60.0
            asyncio.get_running_loop().call_later(0.05, victim.kill)
            await house.step(batch, 0)
            own = house.processes[0].parts[PUSHING + Role.POLICY].own
            assert far(own, alone(batch, 1)) < 1e-6, "one step on all units"
            assert house.team.islands[0].tokens[Role.POLICY] == pytest.approx(1.0)

    within(go())


def test_a_loss_that_is_not_finite_moves_nothing_and_is_not_carried_on(batch: Batch) -> None:
    async def go() -> None:
        house = House(2, push="int8")
        async with house:
            await house.step(batch, 0)
            before = weights(house.learners[0])
            assert batch.weight is not None
            broken = batch.with_columns(weight=batch.weight * float("inf"))
            stats = await house.step(broken, 1)
            assert stats["skipped"] == 1
            assert torch.equal(weights(house.learners[0]), before)
            assert not (await house.step(batch, 1))["skipped"]
            assert bool(weights(house.learners[0]).isfinite().all())

    within(go())


@pytest.mark.parametrize("servers", [{"push": "int8", "count": 2}, {"local_steps": 3}])
def test_a_checkpoint_goes_on_to_the_bit(servers: dict[str, Any], batch: Batch, tmp_path: Path) -> None:
    async def go() -> None:
        first, again = House(2, **servers), House(2, **servers)
        async with first as served:
            for step in range(4):
                await first.step(batch, step)
            values = await served.save(tmp_path / "policy.safetensors")
            model = {name: tensor.clone() for name, tensor in first.learners[0].model.state_dict().items()}
            for step in range(4, 7):
                await first.step(batch, step)
        again.start = partial(_begun, again, model)  # type: ignore[method-assign]
        again.supervisor._start = again.start
        async with again as served:
            await served.restore(tmp_path / "policy.safetensors", values)
            for step in range(4, 7):
                await again.step(batch, step)
        assert torch.equal(weights(first.learners[0]), weights(again.learners[0]))

    within(go())


async def _begun(house: House, model: dict[str, torch.Tensor], number: int) -> Any:
    island = await House.start(house, number)
    house.learners[-1].model.load_state_dict(model)
    return island
