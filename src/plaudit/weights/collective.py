"""Weights by broadcast, over gloo or NCCL: each giver sends its own buckets to all receivers, one call each.

    Sender.meet -> address -> Invitation to each member -> all arrive -> indexes, buckets -> PackedWeights per Receiver

Givers are the first members of a group, which lasts while its members stay the same. Givers send nothing to each other:
each has a process group of its own with the receivers, who take a bucket of each in turn, so that none waits for long.
These are not torch's default group, which ranks and vLLM use themselves. No member enters a collective before all have
arrived. Until then, waiting members can be released (`dissolve`), and missing members are known. `broadcast.py` chooses
the members and handles failures.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from plaudit.runtime.network import free_address, let_gloo_be_reached, let_nccl_raise, listening
from plaudit.runtime.worker import reason_of
from plaudit.weights.packed import Entry, PackedWeights

DISSOLVED = "dissolved"


class CollectiveError(RuntimeError):
    """The weights did not reach this member of the group; another group may deliver them."""


class AbsentError(CollectiveError):
    """Some members did not arrive in time. The only argument is a tuple of their ranks in the group."""


class NotHeldError(CollectiveError):
    """The sender does not hold the requested version."""


@dataclass(frozen=True)
class Invitation:
    """The values with which a member joins a group and its next broadcast."""

    address: str
    """Address of rank 0's store, where members meet."""
    group: int
    """A number that is different for every group."""
    rank: int
    world: int
    givers: int
    """Number of givers (members that send). They are ranks 0, 1, ... of the group."""
    version: int
    backend: str
    whole: bool
    """True to send all weights; False to send only changes since the last version, where these are known."""
    timeout: float
    """Seconds that members may take to arrive, and that a bucket may take."""

    @property
    def arrivals(self) -> dict[int, str]:
        """{rank: key under which it reports its arrival}, for all ranks but 0, which waits for all of them."""
        return {rank: f"{self.version} {rank}" for rank in range(1, self.world)}

    @property
    def go(self) -> str:
        """Key under which rank 0 then says that all are there."""
        return f"{self.version}"

    @property
    def indexes(self) -> list[str]:
        """Keys under which givers publish the index of their buckets, before members meet."""
        return [f"{self.version} index {rank}" for rank in range(self.givers)]


class _Member:
    """A member that keeps its connections to the last group until a collective fails or another group begins."""

    def __init__(self) -> None:
        self._number = -1
        self._kept: _Group | None = None

    def _group(self, invitation: Invitation) -> _Group | None:
        group = self._kept if invitation.group == self._number else None
        self._number, self._kept = invitation.group, None
        return group


class Sender(_Member):
    """A giver. It keeps its newest weights for receivers that join later. Members meet at the first giver's store."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: PackedWeights | None = None
        self.changes: PackedWeights | None = None
        """What is sent to receivers that hold the last version; None: whole weights."""
        self._meeting: Any = None

    async def meet(self) -> str:
        """Open the store of the next group and close the last one's. Return its address."""
        self._kept, self._meeting = None, None
        host, _, port = (address := free_address()).rpartition(":")
        where: Any = {"master_listen_fd": listening(host, int(port)), "wait_for_workers": False}
        self._meeting = await asyncio.to_thread(TCPStore, host, int(port), is_master=True, **where)
        return address

    async def send(self, invitation: Invitation) -> None:
        """Send the weights or their changes to all receivers. Raises NotHeldError for another version; AbsentError or
        CollectiveError, after which the group is unusable."""
        packed = self.packed
        if packed is None or packed.version != invitation.version:
            raise NotHeldError(f"version {invitation.version} is gone; the sender holds {packed and packed.version}")
        sent = packed if invitation.whole else self.changes or packed
        self._kept = await asyncio.to_thread(self._send, self._group(invitation), invitation, sent)

    def _send(self, group: _Group | None, invitation: Invitation, packed: PackedWeights) -> _Group:
        # The first one's time-out ends first and names the member at fault.
        group = group or _Group(invitation, invitation.timeout * (2 if invitation.rank else 1))
        group.give(invitation, index_of(packed))
        for bucket in filter(len, packed.buckets):
            group.broadcast(bucket, invitation.rank)
        return group

    async def dissolve(self, invitation: Invitation) -> None:
        """Let members that wait or arrive late raise CollectiveError. Do nothing if all have arrived."""
        meeting, self._meeting = self._meeting, None
        if meeting is None or meeting.compare_set(invitation.go, "", DISSOLVED) != DISSOLVED.encode():
            return  # all have arrived, so no member waits at this store any more
        self._meeting = meeting
        for key in invitation.arrivals.values():
            meeting.set(key, DISSOLVED)


class Receiver(_Member):
    """A member that receives."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.device = device

    async def receive(self, invitation: Invitation) -> list[PackedWeights]:
        """Receive and return the givers' packed weights, in a thread beside other work. Raises CollectiveError."""
        packed_parts, self._kept = await asyncio.to_thread(self._receive, self._group(invitation), invitation)
        return packed_parts

    def _receive(self, group: _Group | None, invitation: Invitation) -> tuple[list[PackedWeights], _Group]:
        group = group or _Group(invitation, 2 * invitation.timeout)
        device = self.device if group.nccl else "cpu"
        packed_parts = [of_index(index, device=device) for index in group.taken(invitation)]
        for buckets in itertools.zip_longest(*(packed.buckets for packed in packed_parts)):
            for giver, bucket in enumerate(buckets):
                if bucket is not None and len(bucket):
                    group.broadcast(bucket, giver)
        return packed_parts, group


class _Group:
    """One member's connections in a group: the store where all meet, and a process group per giver."""

    def __init__(self, invitation: Invitation, patience: float):
        self.nccl, self._rank = invitation.backend == "nccl", invitation.rank
        self._givers, self._takers = invitation.givers, invitation.world - invitation.givers
        self._timeout, self._patience = timedelta(seconds=invitation.timeout), timedelta(seconds=patience)
        host, _, port = invitation.address.rpartition(":")
        self._meeting: Any = None
        self._collectives: dict[int, Any] = {}
        with self._failing():
            self._meeting = TCPStore(host, int(port), is_master=False, timeout=self._patience)

    def give(self, invitation: Invitation, index: str) -> None:
        """Publish this giver's index and wait for all members; the first giver (rank 0) then lets all begin."""
        with self._failing():
            self._meeting.set(invitation.indexes[self._rank], index)
        if self._rank:
            self._arrive(invitation)
            return
        arrivals = invitation.arrivals
        try:
            self._meeting.wait(list(arrivals.values()), self._patience)
        except RuntimeError as error:
            with self._failing():
                absent = tuple(rank for rank, key in arrivals.items() if not self._meeting.check([key]))
            raise AbsentError(absent) from error
        with self._failing():
            self._undissolved(self._meeting.compare_set(invitation.go, "", "go"))

    def taken(self, invitation: Invitation) -> list[str]:
        """Wait until all have arrived. Return the givers' indexes."""
        self._arrive(invitation)
        with self._failing():
            return [self._meeting.get(key).decode() for key in invitation.indexes]

    def _arrive(self, invitation: Invitation) -> None:
        """Report this member's arrival and wait until rank 0 says that all have arrived."""
        with self._failing():
            self._meeting.set(invitation.arrivals[self._rank], "here")
            self._undissolved(self._meeting.get(invitation.go))

    def _undissolved(self, said: bytes) -> None:
        if said == DISSOLVED.encode():
            raise CollectiveError("a member was lost before all had arrived")

    def broadcast(self, tensor: Tensor, giver: int) -> None:
        with self._failing():
            if giver not in self._collectives:
                self._collectives[giver] = self._made(giver)
            self._collectives[giver].broadcast(tensor, 0).wait()
            if self.nccl:
                torch.cuda.synchronize(tensor.device)

    def _made(self, giver: int) -> Any:
        """Return a process group of a giver (rank 0 in it) and all receivers. It is made from torch's classes, as
        torch's functions make groups only of members of the one default group."""
        meeting = PrefixStore(f"group {giver}", self._meeting)
        rank = 0 if self._rank == giver else self._rank - self._givers + 1
        if not self.nccl:
            let_gloo_be_reached()
            return dist.ProcessGroupGloo(meeting, rank, 1 + self._takers, self._timeout)
        let_nccl_raise()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(meeting, rank, 1 + self._takers, options)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn a RuntimeError inside into CollectiveError, and close this member's connections, so that others need not
        wait for their time-out."""
        try:
            yield
        except RuntimeError as error:
            self._meeting, self._collectives = None, {}
            raise CollectiveError(reason_of(error)) from error


def index_of(packed: PackedWeights) -> str:
    """Return packed weights as JSON without the buckets' content, but with their sizes."""
    header = {key: value for key, value in vars(packed).items() if key not in ("entries", "buckets")}
    sizes = [len(bucket) for bucket in packed.buckets]
    return json.dumps([header, [list(asdict(entry).values()) for entry in packed.entries], sizes])


def of_index(index: str, *, device: torch.device | str = "cpu") -> PackedWeights:
    """Return packed weights as an `index_of` string describes them, with uninitialised buckets to receive into."""
    header, entries, sizes = json.loads(index)
    buckets = tuple(torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
    found = tuple(
        Entry(name, dtype, tuple(sizes), bucket, start, size, tuple(shape), tuple(at))
        for name, dtype, sizes, bucket, start, size, shape, at in entries
    )
    return PackedWeights(entries=found, buckets=buckets, **header)
