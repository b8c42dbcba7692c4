"""A pool of real rollout workers with native engines, in this process: handles that can be lost at will."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import Letters, played, prompts
from waiting import eventually

from plaudit.models.decoder import Decoder
from plaudit.rollout.native import NativeEngine
from plaudit.rollout.pool import Pool
from plaudit.rollout.worker import OutOfDateError, RolloutWorker
from plaudit.runtime.worker import NoWorkersError, SenderLost, Worker, WorkerLost
from plaudit.types import Sampling
from plaudit.weights.changes import changes
from plaudit.weights.packed import PackedWeights, pack
from plaudit.weights.pieces import WeightsError
from plaudit.weights.transport import Holder, Stored

PLAN = [Sampling(max_tokens=12, seed=4), Sampling(max_tokens=12, seed=5)]
QUESTIONS = prompts(3, 7, 5, 4)


class Here:
    """A `Worker` in this process, whose process can be lost."""

    def __init__(self, name: str, worker: RolloutWorker):
        self.name, self.worker, self.lost = name, worker, False
        self.calls: list[str] = []
        self.processes: tuple[Here, ...] = (self,)

    async def call(self, method: Any, *arguments: Any) -> Any:
        self.calls.append(method.__name__)
        if self.lost:
            raise WorkerLost(self.name, "its process ended")
        if method is Holder.load and isinstance(arguments[1], str):
            raise SenderLost("a sender", "the weights are gone")
        answer = await getattr(self.worker, method.__name__)(*arguments)
        if self.lost:
            raise WorkerLost(self.name, "its process ended")
        return answer

    async def gone(self) -> WorkerLost:
        """Nobody hears of it but who calls."""
        return await asyncio.get_running_loop().create_future()

    def kill(self, reason: str = "was ended") -> None:
        self.lost = True


class Case:
    """A pool whose workers start when there is room for them."""

    def __init__(self, model: Decoder, count: int, *, most: int = 0, room: int = 99, patience: float = 60.0):
        self.model, self.room = model, room
        self.started: list[Here] = []
        self.failures: list[WorkerLost] = []
        self.pool = Pool(self._start, count, most=most, patience=patience, failures=self.failures.append)

    async def _start(self, number: int) -> Worker:
        while sum(not here.lost for here in self.started) >= self.room:
            await asyncio.sleep(0.01)
        engine = NativeEngine(deepcopy(self.model), Letters(), slots=4)
        self.started.append(Here(f"worker {number}", RolloutWorker(engine)))
        return self.started[-1]

    def pack_part(self, version: int) -> PackedWeights:
        return pack(dict(self.model.hf_tensors()), version)

    async def publish(self, version: int) -> bool:
        packed = self.pack_part(version)
        return await self.pool.publish(Stored((packed,), version, packed.digest))

    async def answers(self) -> list[list[tuple[int, ...]]]:
        found = await asyncio.gather(*(self.pool.generate(question, PLAN) for question in QUESTIONS))
        return [[completion.tokens for completion in group] for group in found]


@pytest.fixture
def do(pairs: Any) -> Callable[..., Any]:
    """do(test, count, ...): run a coroutine function on a fresh case."""
    model, _ = pairs("gpt2")

    def run(test: Callable[[Case], Awaitable[None]], count: int, **more: Any) -> None:
        async def whole() -> None:
            case = Case(model, count, **more)
            await case.pool.open()
            await test(case)
            case.pool.close()

        asyncio.run(whole())

    return run


class Along(RolloutWorker):
    """A further process of a worker: it is given what all processes are."""

    def __init__(self, model: Decoder):
        super().__init__(NativeEngine(model, Letters()))
        self.refuses = False

    async def load(self, attempt: int, *sent: Any) -> tuple[int, str]:
        if self.refuses:
            raise WeightsError("they changed in transit")
        return await super().load(attempt, *sent)


def test_every_process_of_a_worker_confirms_weights_and_one_that_does_not_costs_the_worker(
    do: Callable[..., Any],
) -> None:
    async def steps(case: Case) -> None:
        (worker,) = case.started
        along = Along(deepcopy(case.model))
        worker.processes = (worker, Here("its other process", along))
        assert not await case.publish(1)
        await case.pool.begin(2)
        assert not await case.publish(1)
        await case.answers()
        assert worker.processes[1].calls == ["load", "begin", "load"]
        assert (along.attempt, along.engine.version) == (2, 1)  # type: ignore[attr-defined]
        along.refuses = True
        assert await case.publish(2)
        assert worker.lost
        assert [lost.reason for lost in case.failures] == ["does not hold the newest weights: they changed in transit"]
        await case.pool.supervisor.free()
        assert len(case.started) == 2

    do(steps, 1)


def test_answers_are_those_of_one_worker_whoever_is_lost(do: Callable[..., Any]) -> None:
    found = []

    async def steps(case: Case) -> None:
        await case.publish(1)
        asking = asyncio.ensure_future(case.answers())
        await asyncio.sleep(0)
        if len(case.started) > 1:
            case.started[0].kill()
        found.append(await asking)
        if len(case.started) > 1:
            await eventually(lambda: len(case.started) == 3 and case.started[2].calls)
            assert [lost.name for lost in case.failures] == ["worker 0"]
            assert [here.name for here in case.started] == ["worker 0", "worker 1", "worker 0"]
            assert case.started[2].calls[0] == "load", "it confirmed the newest weights before it answers"
            assert case.started[2].worker.engine.version == 1  # type: ignore[attr-defined]

    do(steps, 1)
    do(steps, 2)
    assert found[0] == found[1]


@pytest.mark.parametrize("loses", [False, True])
def test_a_later_turn_asks_the_worker_of_the_one_before_or_any_other_if_it_is_lost(
    kernels: None, loses: bool, do: Callable[..., Any]
) -> None:
    found, kept = [], []

    async def steps(case: Case) -> None:
        await case.publish(1)
        playing = [asyncio.ensure_future(played(case.pool, QUESTIONS[0], seed)) for seed in range(6)]
        while loses and len(case.started) > 1 and not case.started[0].worker.engine.decoding.kept.turns:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        if loses and len(case.started) > 1:
            case.started[0].kill()
        found.append(await asyncio.gather(*playing))
        kept.append([list(here.worker.engine.decoding.kept.turns) for here in case.started])  # type: ignore[attr-defined]

    do(steps, 1)
    do(steps, 2)
    assert found[0] == found[1]
    assert max(map(len, found[0])) > 2
    if not loses:
        first, second = kept[1]
        assert first and second and not set(first) & set(second), "an episode stays with a worker"


def lose(case: Case, place: Any) -> None:
    worker = place.worker
    worker.kill()
    case.pool.supervisor.lose(place, worker, WorkerLost(worker.name, "its process ended"))


@pytest.mark.parametrize("turns", range(6))
def test_a_worker_may_be_lost_while_somebody_is_about_to_ask_it(turns: int, do: Callable[..., Any]) -> None:
    """So many turns of the event loop after a question came, or after the worker that it waited for was ready."""

    async def steps(case: Case) -> None:
        await case.publish(1)
        (place,) = case.pool.supervisor.all
        for waits in (False, True):
            if waits:
                case.room = 0
                lose(case, place)
            asking = asyncio.ensure_future(case.pool.generate(QUESTIONS[0], PLAN))
            while waits and place.worker is None:
                case.room = 99
                await asyncio.sleep(0)
            for _ in range(turns):
                await asyncio.sleep(0)
            lose(case, place)
            assert len(await asking) == len(PLAN)

    do(steps, 1)


def test_a_new_attempt_drops_what_runs_and_takes_older_versions(do: Callable[..., Any]) -> None:
    async def steps(case: Case) -> None:
        await case.publish(5)
        asked = asyncio.ensure_future(case.started[0].call(RolloutWorker.generate, 0, QUESTIONS[0], PLAN))
        await asyncio.sleep(0)
        await case.pool.begin(1)
        with pytest.raises(OutOfDateError, match=r"attempt 0 .*attempt 1"):
            await asked
        assert not case.started[0].worker.engine.busy
        await case.publish(4)
        with pytest.raises(OutOfDateError, match=r"attempt 0 .*attempt 1"):
            await case.started[0].call(RolloutWorker.load, 0, case.pack_part(6))
        (first, *_) = await case.pool.generate(QUESTIONS[0], PLAN)
        assert set(first.versions) == {4}

    do(steps, 1)


def flipped(packed: PackedWeights) -> PackedWeights:
    """With one bit of its last tensor changed."""
    buckets = [bucket.clone() for bucket in packed.buckets]
    entry = packed.entries[-1]
    buckets[entry.bucket][entry.start] ^= 1
    return replace(packed, buckets=tuple(buckets))


def of_another_version(loads: Any) -> Any:
    async def load(worker: RolloutWorker, attempt: int, packed: PackedWeights) -> tuple[int, str]:
        _, digest = await loads(worker, attempt, packed)
        return packed.version - 1, digest

    return load


def changed_on_the_way(loads: Any) -> Any:
    return lambda worker, attempt, packed: loads(worker, attempt, flipped(packed))


@pytest.mark.parametrize(
    ("fault", "said"),
    [(of_another_version, r"\(1, '.*'\).*\(2, '.*'\)"), (changed_on_the_way, "version 2 .*digest")],
)
def test_a_worker_without_the_newest_weights_is_replaced_at_once(
    fault: Callable[[Any], Any], said: str, do: Callable[..., Any]
) -> None:
    async def steps(case: Case) -> None:
        await case.publish(1)
        loads = RolloutWorker.load

        async def first_alone(worker: RolloutWorker, *arguments: Any) -> tuple[int, str]:
            mine = fault(loads) if worker is case.started[0].worker else loads
            return await mine(worker, *arguments)  # type: ignore[no-any-return]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RolloutWorker, "load", first_alone)
            assert await case.publish(2), "what was sent may be damaged"
        assert [here.lost for here in case.started[:2]] == [True, False]
        (lost,) = case.failures
        assert re.search(rf"^worker 0: .*{said}", str(lost))
        while len(case.pool.workers) < 2:
            await asyncio.sleep(0.01)
        assert [completion.versions[0] for completion in await case.pool.generate(QUESTIONS[0], PLAN)] == [2, 2]
        assert not await case.publish(3)

    do(steps, 2)


def test_weights_that_changed_where_they_lie_are_packed_again(do: Callable[..., Any]) -> None:
    """All refuse them, and so would those that come in their place."""

    async def steps(case: Case) -> None:
        await case.publish(1)
        packed = case.pack_part(2)
        assert await case.pool.publish(Stored((flipped(packed),), 2, packed.digest))
        assert not await case.publish(2)
        while len(case.pool.workers) < 2:
            await asyncio.sleep(0.01)
        assert len(case.failures) == 2

    do(steps, 2)


def test_a_worker_that_comes_between_changes_is_sent_all_and_ends_with_the_same_bits(do: Callable[..., Any]) -> None:
    async def steps(case: Case) -> None:
        case.model, asked, last = deepcopy(case.model).bfloat16(), list[int](), case.pack_part(0)
        for version in range(5):
            with torch.no_grad():
                next(case.model.parameters()).view(-1)[version] += 1.0
            whole = case.pack_part(version)

            async def wholes(packed: PackedWeights = whole) -> tuple[list[PackedWeights], None]:
                asked.append(packed.version)
                return [packed], None

            sent = changes(last, whole) if version else whole
            assert not await case.pool.publish(Stored([sent], version, whole.digest, wholes=wholes))
            if version == 2:
                lose(case, case.pool.supervisor.all[0])
                while len(case.pool.workers) < 2:
                    await asyncio.sleep(0.01)
            for here in (one for one in case.started if not one.lost):
                held = dict(here.worker.engine.model.hf_tensors())  # type: ignore[attr-defined]
                assert all(torch.equal(one, held[name]) for name, one in case.model.hf_tensors())
            last = whole
        assert asked == [2], "of the worker that came then"
        assert len(case.started) == 3

    do(steps, 2)


def test_workers_beyond_the_count_come_and_go_without_failing(do: Callable[..., Any]) -> None:
    async def steps(case: Case) -> None:
        await case.publish(1)
        assert len(case.pool.workers) == 1, "there is room for one"
        case.room = 2
        await eventually(lambda: len(case.pool.workers) == 2)
        case.room = 1
        case.started[1].kill()
        await case.answers()
        assert len(case.pool.workers) == 1
        assert case.failures == []
        assert case.pool.supervisor.lost == 1

    do(steps, 1, most=2, room=1)


def test_one_that_joins_and_holds_other_weights_is_ended_and_ends_nothing(do: Callable[..., Any]) -> None:
    async def steps(case: Case) -> None:
        await case.publish(1)
        whole = RolloutWorker.load

        async def other(worker: RolloutWorker, *arguments: Any) -> tuple[int, str]:
            version, _ = await whole(worker, *arguments)
            return version, "another digest"

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RolloutWorker, "load", other)
            case.room = 2
            while len(case.started) < 2 or not case.started[1].lost:
                await asyncio.sleep(0.01)
            assert len(await case.answers()) == len(QUESTIONS)
            assert len(case.pool.workers) == 1  # a second after its loss it joins again, and may be sound by then
        assert case.failures == []

    do(steps, 1, most=2, room=1)


def test_one_gives_way_but_never_the_last(do: Callable[..., Any]) -> None:
    async def steps(case: Case) -> None:
        await case.publish(1)
        case.room = 1
        assert case.pool.supervisor.give_way(["worker 7"]) is None
        assert case.pool.supervisor.give_way() == 1
        assert case.pool.supervisor.give_way() is None
        await case.answers()
        case.room = 2
        await eventually(lambda: [worker.name for worker in case.pool.workers] == ["worker 0", "worker 1"])
        assert case.failures == []

    do(steps, 2)


def test_without_any_worker_requests_wait_a_while_and_no_longer(do: Callable[..., Any]) -> None:
    async def steps(case: Case) -> None:
        await case.publish(1)
        case.room = 0
        case.started[0].kill()
        with pytest.raises(NoWorkersError, match=r"0\.3 s"):
            await case.pool.generate(QUESTIONS[0], PLAN)

    do(steps, 1, patience=0.3)


def test_weights_that_are_gone_are_not_the_workers_fault(do: Callable[..., Any]) -> None:
    async def steps(case: Case) -> None:
        await case.publish(1)
        with pytest.raises(SenderLost):
            await case.pool.publish(Stored(("gone",), 2, ""))
        assert len(case.pool.workers) == 2
        assert case.failures == []

    do(steps, 2)


def test_a_pool_at_rest_gives_memory_up_and_answers_as_before(do: Callable[..., Any]) -> None:
    """A worker that comes in place of a lost one while the others sleep does so too, and wakes with them."""

    async def steps(case: Case) -> None:
        await case.publish(1)
        before = await case.answers()
        engines = [here.worker.engine for here in case.started]
        assert all(engine.table is not None for engine in engines)  # type: ignore[attr-defined]
        await case.pool.sleep()
        assert all(engine.table is None for engine in engines)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="asleep"):
            await case.pool.generate(QUESTIONS[0], PLAN)
        case.started[0].kill()
        await case.pool.sleep()  # finds the loss
        for _ in range(50):
            await asyncio.sleep(0.01)
            if len(case.pool.workers) == 2:
                break
        assert case.started[2].calls == ["load", "sleep"]
        await case.pool.wake()
        await case.publish(2)
        assert await case.answers() == before

    do(steps, 2)


@pytest.mark.parametrize("first", ["wake", "sleep"])
def test_a_worker_that_becomes_ready_while_others_fall_asleep_or_wake(do: Callable[..., Any], first: str) -> None:
    async def steps(case: Case) -> None:
        await case.publish(1)
        await getattr(case.pool, first)()
        case.started[0].kill()
        await getattr(case.pool, first)()
        late = case.pool.wake if first == "sleep" else case.pool.sleep
        while len(case.started) < 3:
            await asyncio.sleep(0)
        await late()
        while len(case.pool.workers) < 2:
            await asyncio.sleep(0.01)
        asleep = [here.worker.engine._asleep for here in case.started[1:]]  # type: ignore[attr-defined]
        assert asleep == [first == "wake"] * 2

    do(steps, 2)


@pytest.mark.slow
def test_nobody_wakes_beside_a_worker_that_takes_memory(do: Callable[..., Any]) -> None:
    """Its start has begun when the others are to sleep: that is complete once it sleeps too, or takes too long."""

    async def steps(case: Case) -> None:
        go, start = asyncio.Event(), case.pool._start

        async def slowly(number: int) -> Worker:
            with case.pool.joining():
                await go.wait()
                return await start(number)

        case.pool._start = slowly
        await case.publish(1)
        lose(case, case.pool.supervisor.all[0])
        await asyncio.sleep(0.01)
        sleeping = asyncio.ensure_future(case.pool.sleep())
        await asyncio.sleep(0.1)
        assert not sleeping.done()
        go.set()
        await sleeping
        assert case.started[2].calls == ["load", "sleep"]
        await case.pool.wake()
        assert len(await case.answers()) == len(QUESTIONS)

        go.clear()
        lose(case, case.pool.supervisor.all[0])
        await asyncio.sleep(0.01)
        await case.pool.sleep()  # no longer than `patience`
        assert len(case.started) == 3

    do(steps, 2, patience=2.0)
