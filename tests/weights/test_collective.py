"""Weights by broadcast: real gloo groups whose members are all in this process, and what follows when one fails."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plaudit.compute.digest import digest
from plaudit.runtime.worker import SenderLost, WorkerLost
from plaudit.weights.broadcast import Collective
from plaudit.weights.changes import changes, completed
from plaudit.weights.collective import CollectiveError, Invitation, Receiver, Sender, _Group, of_index
from plaudit.weights.packed import PackedWeights, PackReport, pack, unpack
from plaudit.weights.pieces import Piece
from plaudit.weights.transport import Holder


class Training(Sender):
    """A training rank, as far as weights go: of `count`, each of which has some numbers of every tensor."""

    def __init__(self, rank: int = 0, count: int = 1, *, halves: bool = False):
        super().__init__()
        self.rank, self.count, self.halves = rank, count, halves

    async def hold(self, version: int, device: str) -> PackReport:
        weights = {f"w{i}": torch.randn(40 + i, generator=torch.Generator().manual_seed(version)) for i in range(5)}
        if self.halves:  # a number of each tensor is another one in each version
            weights = {name: torch.ones(len(one)).bfloat16() for name, one in weights.items()}
            for one in weights.values():
                one[0] = version
        pieces = []
        for name, whole in weights.items():
            first, last = (len(whole) * part // self.count for part in (self.rank, self.rank + 1))
            pieces.append(Piece(name, (len(whole),), (first,), whole[first:last], whole.dtype))
        last, sent = self.packed, pack(pieces, version, digest=digest(weights), bucket_bytes=400, device=device)
        self.packed, self.changes = sent, changes(last, sent) if self.halves and last is not None else None
        return PackReport(sent.digest, 1, (self.changes or sent).bytes, sent.bytes)


class Sampling:
    """A rollout worker, as far as weights go."""

    def __init__(self) -> None:
        self.receiver = Receiver()
        self.packed_parts: list[PackedWeights] = []
        self.may_come = asyncio.Event()
        self.may_come.set()

    async def load(self, attempt: int, invitation: Invitation) -> tuple[int, str]:
        await self.may_come.wait()
        self.packed_parts = completed(self.packed_parts, await self.receiver.receive(invitation))
        return self.packed_parts[0].version, digest(unpack(*self.packed_parts))


class Here:
    """A `Worker` in this process, whose process can be lost."""

    def __init__(self, name: str, target: Any):
        self.name, self.target = name, target
        self.calls = Counter[str]()
        self._lost, self.reason = asyncio.Event(), ""

    async def call(self, method: Any, *arguments: Any) -> Any:
        self.calls[method.__name__] += 1
        answer = asyncio.ensure_future(getattr(self.target, method.__name__)(*arguments))
        lost = asyncio.ensure_future(self._lost.wait())
        await asyncio.wait((answer, lost), return_when=asyncio.FIRST_COMPLETED)
        if self._lost.is_set():
            answer.cancel()
            raise WorkerLost(self.name, "its process ended")
        return answer.result()

    def kill(self, reason: str = "was ended") -> None:
        self.reason = reason
        self._lost.set()


class WorkerGroup:
    """Training ranks."""

    def __init__(self, *workers: Here):
        self.workers = workers

    async def each(self, method: Any, *arguments: Any) -> list[Any]:
        return [await worker.call(method, *arguments) for worker in self.workers]

    async def keep(self, method: Any, *arguments: Any) -> tuple[Any, Any]:
        raise NotImplementedError("of the object store")


class Case:
    """Some ranks and some workers."""

    def __init__(self, count: int, *, ranks: int = 1, timeout: float = 20.0, halves: bool = False):
        giving = [Training(number, ranks, halves=halves) for number in range(ranks)]
        self.ranks = [Here(f"training rank {number}", one) for number, one in enumerate(giving)]
        self.rank, *_ = self.ranks
        self.workers = [Here(f"rollout worker {number}", Sampling()) for number in range(count)]
        self.transport = Collective(backend="gloo", timeout=timeout)

    @property
    def groups(self) -> int:
        return self.rank.calls["meet"]

    def versions(self) -> list[int | None]:
        taken = [worker.target.packed_parts for worker in self.workers]
        return [packed_parts[0].version if packed_parts else None for packed_parts in taken]


@pytest.fixture
def do() -> Callable[..., None]:
    """do(test, count, ...): run a coroutine function on a fresh case."""

    def run(test: Callable[[Case], Awaitable[None]], count: int, **more: Any) -> None:
        async def whole() -> None:
            await test(Case(count, **more))

        asyncio.run(whole())

    return run


def test_every_worker_gets_the_bits_in_one_group_and_few_calls(do: Callable[..., None]) -> None:
    async def steps(case: Case) -> None:
        for version in (1, 2, 3):
            shipment = await case.transport.pack(WorkerGroup(case.rank), version)
            assert (shipment.version, shipment.digest) == (version, case.rank.target.packed.digest)
            assert await shipment.deliver(case.workers, 0) == [(version, shipment.digest)] * 3
        sent = case.rank.target.packed
        assert len(sent.buckets) == 3, "192 to 256 bytes each, at most 400 in a bucket"
        for worker in case.workers:
            (taken,) = worker.target.packed_parts
            assert [a.equal(b) for a, b in zip(taken.buckets, sent.buckets, strict=True)] == [True] * 3
        assert case.groups == 1

    do(steps, 3)


def test_one_that_is_lost_keeps_nobody_waiting_and_one_that_comes_later_is_sent_the_same(
    do: Callable[..., None],
) -> None:
    async def steps(case: Case) -> None:
        await (await case.transport.pack(WorkerGroup(case.rank), 1)).deliver(case.workers, 0)
        shipment = await case.transport.pack(WorkerGroup(case.rank), 2)
        case.workers[1].target.may_come.clear()
        delivery = asyncio.ensure_future(shipment.deliver(case.workers, 0))
        await asyncio.sleep(0.1)
        assert case.versions() == [1, 1, 1], "nobody has them before all have come"
        case.workers[1].kill()
        first, lost, last = await asyncio.wait_for(delivery, 15.0)
        assert first == last == (2, shipment.digest)
        assert isinstance(lost, WorkerLost)
        assert str(lost) == "rollout worker 1: its process ended"
        assert case.groups == 2
        case.workers[1] = Here("rollout worker 1", Sampling())
        assert await shipment.deliver(case.workers[1:2], 0) == [(2, shipment.digest)]
        third = await case.transport.pack(WorkerGroup(case.rank), 3)
        assert await third.deliver(case.workers, 0) == [(3, third.digest)] * 3
        assert case.groups == 4

    do(steps, 3)


def test_one_that_does_not_come_in_time_is_named_and_ended(do: Callable[..., None]) -> None:
    async def steps(case: Case) -> None:
        case.workers[0].target.may_come.clear()
        shipment = await case.transport.pack(WorkerGroup(case.rank), 1)
        late, other = await shipment.deliver(case.workers, 0)
        assert other == (1, shipment.digest)
        assert str(late) == ("rollout worker 0: did not come for the weights within 0.5 s (runtime.collective_timeout)")
        assert str(late).endswith(case.workers[0].reason), "whoever sees it end first says the same"
        with pytest.raises(WorkerLost):
            await case.workers[0].call(Holder.load, 0, None)

    do(steps, 2, timeout=0.5)


@pytest.mark.slow
def test_one_that_has_the_weights_may_end_its_answers_when_another_is_lost(do: Callable[..., None]) -> None:
    """As with rollout.interrupt=false, for longer than the broadcast may take."""

    async def steps(case: Case) -> None:
        holding: list[str] = []

        def answering(worker: Here) -> None:
            receive = worker.target.load

            async def then_end_answers(attempt: int, invitation: Invitation) -> tuple[int, str]:
                held: tuple[int, str] = await receive(attempt, invitation)
                holding.append(worker.name)
                await asyncio.sleep(1.5)
                return held

            worker.target.load = then_end_answers

        for worker in case.workers:
            answering(worker)
        shipment = await case.transport.pack(WorkerGroup(case.rank), 1)
        delivery = asyncio.ensure_future(shipment.deliver(case.workers, 0))
        while len(holding) < 2:
            await asyncio.sleep(0.01)
        case.workers[1].kill()
        well, lost = await asyncio.wait_for(delivery, 15.0)
        assert well == (1, shipment.digest)
        assert isinstance(lost, WorkerLost)

    do(steps, 2, timeout=0.5)


@pytest.mark.slow
def test_one_that_never_comes_keeps_nobody_waiting_when_another_fails_first(do: Callable[..., None]) -> None:
    async def steps(case: Case) -> None:
        receive = case.workers[1].target.load

        async def fail_once(attempt: int, invitation: Invitation) -> tuple[int, str]:
            case.workers[1].target.load = receive
            raise CollectiveError("the connection was reset")

        case.workers[0].target.may_come.clear()
        case.workers[1].target.load = fail_once
        shipment = await case.transport.pack(WorkerGroup(case.rank), 1)
        late, other = await asyncio.wait_for(shipment.deliver(case.workers, 0), 15.0)
        assert str(late) == ("rollout worker 0: did not come for the weights within 0.5 s (runtime.collective_timeout)")
        assert other == (1, shipment.digest)

    do(steps, 2, timeout=0.5)


def test_weights_that_are_gone_are_not_the_workers_fault(do: Callable[..., None]) -> None:
    async def steps(case: Case) -> None:
        old = await case.transport.pack(WorkerGroup(case.rank), 1)
        new = await case.transport.pack(WorkerGroup(case.rank), 2)
        with pytest.raises(SenderLost, match=r"version 1 .* 2"):
            await old.deliver(case.workers, 0)
        assert await new.deliver(case.workers, 0) == [(2, new.digest)] * 2
        case.workers[1].target.may_come.clear()
        newest = await case.transport.pack(WorkerGroup(case.rank), 3)
        delivery = asyncio.ensure_future(newest.deliver(case.workers, 0))
        await asyncio.sleep(0.1)
        case.rank.kill()
        with pytest.raises(SenderLost, match=r"rank 0: .*ended"):
            await delivery
        again = Here("training rank 0", Training())
        case.workers[1].target.may_come.set()
        third = await case.transport.pack(WorkerGroup(again), 3)
        assert await third.deliver(case.workers, 1) == [(3, third.digest)] * 2

    do(steps, 2)


def test_what_a_worker_refuses_is_told_after_the_others_have_theirs(do: Callable[..., None]) -> None:
    async def steps(case: Case) -> None:
        async def refuse(attempt: int, invitation: Invitation) -> tuple[int, str]:
            raise ValueError("another model's")

        case.workers[0].target.load = refuse
        shipment = await case.transport.pack(WorkerGroup(case.rank), 1)
        with pytest.raises(ValueError, match="another model's"):
            await shipment.deliver(case.workers, 0)

    do(steps, 2)


def test_each_rank_gives_its_part_and_takes_none(do: Callable[..., None]) -> None:
    async def steps(case: Case) -> None:
        worker_group = WorkerGroup(*case.ranks)
        for version in (1, 2):
            shipment = await case.transport.pack(worker_group, version)
            assert await shipment.deliver(case.workers, 0) == [(version, shipment.digest)] * 2
        packed_parts = [rank.target.packed for rank in case.ranks]
        assert [len(unpack(*worker.target.packed_parts)) for worker in case.workers] == [5, 5]
        numbers = [sum(entry.size // 4 for entry in packed.entries) for packed in packed_parts]
        assert sum(numbers) == 40 + 41 + 42 + 43 + 44
        assert max(numbers) - min(numbers) <= 5, "a number of each tensor at most"
        assert all(len(rank.target._kept._collectives) == 1 for rank in case.ranks)
        assert case.groups == 1
        joins = Here("rollout worker 2", Sampling())
        assert await shipment.deliver([joins], 0) == [(2, shipment.digest)], "it gets everything"

    do(steps, 2, ranks=3)


@pytest.mark.slow
def test_changes_are_sent_to_those_who_hold_the_last_version_and_all_to_others(do: Callable[..., None]) -> None:
    async def steps(case: Case) -> None:
        worker_group = WorkerGroup(*case.ranks)
        for version in (1, 2, 3):
            shipment = await case.transport.pack(worker_group, version)
            assert await shipment.deliver(case.workers, 0) == [(version, shipment.digest)] * 3
            assert sum(given.whole for given in shipment.reports) > 400
            assert (version == 1) == (sum(given.bytes for given in shipment.reports) > 50)
            if version == 2:
                case.workers[1] = Here("rollout worker 1", Sampling())
        joins = Here("rollout worker 3", Sampling())
        assert await shipment.deliver([joins], 0) == [(3, shipment.digest)]
        wholes = {tuple(packed.digest for packed in one.target.packed_parts) for one in (joins, *case.workers)}
        assert len(wholes) == 1

    do(steps, 3, ranks=2, halves=True)


def test_a_worker_that_is_lost_and_a_rank_that_is_lost_among_several(do: Callable[..., None]) -> None:
    async def steps(case: Case) -> None:
        worker_group = WorkerGroup(*case.ranks)
        shipment = await case.transport.pack(worker_group, 1)
        case.workers[0].target.may_come.clear()
        delivery = asyncio.ensure_future(shipment.deliver(case.workers, 0))
        await asyncio.sleep(0.1)
        case.workers[0].kill()
        lost, well = await asyncio.wait_for(delivery, 15.0)
        assert well == (1, shipment.digest)
        assert isinstance(lost, WorkerLost)
        case.workers = case.workers[1:]
        case.workers[0].target.may_come.clear()
        second = await case.transport.pack(worker_group, 2)
        delivery = asyncio.ensure_future(second.deliver(case.workers, 0))
        await asyncio.sleep(0.1)
        case.ranks[1].kill()
        case.workers[0].target.may_come.set()
        with pytest.raises(SenderLost, match="training rank 1: its process ended"):
            await asyncio.wait_for(delivery, 15.0)

    do(steps, 2, ranks=2)


def test_a_rank_that_does_not_come_is_named(do: Callable[..., None]) -> None:
    async def steps(case: Case) -> None:
        async def never(invitation: Invitation) -> None:
            await asyncio.sleep(30.0)

        case.ranks[1].target.send = never
        shipment = await case.transport.pack(WorkerGroup(*case.ranks), 1)
        with pytest.raises(SenderLost, match=r"rank 1: .* 0\.5 s"):
            await asyncio.wait_for(shipment.deliver(case.workers, 0), 15.0)

    do(steps, 2, ranks=2, timeout=0.5)


class Dying:
    """A `Worker` whose process is killed between two buckets."""

    name = "rollout worker 2"

    async def call(self, method: Any, attempt: int, invitation: Invitation) -> Any:
        process = multiprocessing.get_context("spawn").Process(target=_begin_and_die, args=(invitation,))
        process.start()
        await asyncio.to_thread(process.join)
        raise WorkerLost(self.name, f"its process ended with {process.exitcode}")

    def kill(self, reason: str = "was ended") -> None:
        raise NotImplementedError("it ends itself")


def _begin_and_die(invitation: Invitation) -> None:
    group = _Group(invitation, 20.0)
    (index,) = group.taken(invitation)
    group.broadcast(of_index(index).buckets[0], 0)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_one_that_is_killed_in_the_midst_of_it_keeps_nobody_waiting(do: Callable[..., None]) -> None:
    async def steps(case: Case) -> None:
        shipment = await case.transport.pack(WorkerGroup(case.rank), 1)
        *others, lost = await asyncio.wait_for(shipment.deliver([*case.workers, Dying()], 0), 60.0)
        assert others == [(1, shipment.digest)] * 2
        assert str(lost) == "rollout worker 2: its process ended with -9"

    do(steps, 2, timeout=120.0)


def test_nccls_part_of_a_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's builds for the CPU lack is played by gloo: its options have the time-out, tensors are made on the
    device, and a member waits for the device after each bucket, for NCCL's own wait is of the stream alone."""
    asked: list[timedelta] = []
    waited: list[torch.device] = []

    class Options:
        _timeout = timedelta(0)

    def group(meeting: Any, rank: int, world: int, options: Options) -> Any:
        asked.append(options._timeout)
        return dist.ProcessGroupGloo(meeting, rank, world, options._timeout)

    group.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", group, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")

    async def update() -> tuple[str, str]:
        sender, receiver = Training(), Receiver()
        sent = await sender.hold(3, "cpu")
        place = await sender.meet()
        invitations = [
            Invitation(
                address=place,
                group=0,
                rank=rank,
                world=2,
                givers=1,
                version=3,
                backend="nccl",
                whole=True,
                timeout=20.0,
            )
            for rank in range(2)
        ]
        _, packed_parts = await asyncio.gather(sender.send(invitations[0]), receiver.receive(invitations[1]))
        return sent.digest, digest(unpack(*packed_parts))

    sent, taken = asyncio.run(update())
    assert sent == taken
    assert asked == [timedelta(seconds=20)] * 2
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert len(waited) > 2
    assert set(waited) == {torch.device("cpu")}
