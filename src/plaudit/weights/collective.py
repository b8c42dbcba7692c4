"""Weights by broadcast, over gloo or NCCL: rank 0 of a group of processes sends its parcel's buckets, one call each.

    Sender.meet -> address -> Invitation to each member -> all arrive -> index, buckets -> Parcel at each Receiver

A group is made for its members and lasts while they stay the same; it is not torch's default group, which ranks and
vLLM have for themselves. Nobody enters a collective before all have arrived: until then whoever waits can be let go
(`dissolve`), and who is missing is known. Who is a member, and what follows a failure, is `transport.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from plaudit.runtime.network import let_gloo_be_reached, let_nccl_raise, own_address
from plaudit.runtime.worker import reason_of
from plaudit.weights.parcel import Parcel

DISSOLVED = "dissolved"


class CollectiveError(RuntimeError):
    """The weights did not reach this member of the group; another group may bring them."""


class AbsentError(CollectiveError):
    """Some members did not arrive in time. The argument: their numbers in the group."""


class NotHeldError(CollectiveError):
    """The sender has other weights by now."""


@dataclass(frozen=True)
class Invitation:
    """What a member of a group must know."""

    address: str
    """Where rank 0 keeps what members tell each other."""
    group: int
    """Another number for every group."""
    rank: int
    world: int
    version: int
    backend: str
    timeout: float
    """Seconds that members may take to arrive, and a bucket to be sent."""

    @property
    def arrivals(self) -> dict[int, str]:
        """Under which word each member says that it is there."""
        return {rank: f"{self.version} {rank}" for rank in range(1, self.world)}

    @property
    def told(self) -> str:
        """Under which word rank 0 then tells the parcel's index."""
        return f"{self.version}"


class Sender:
    """Rank 0 of every group. Holds the newest parcel, for whoever comes later."""

    def __init__(self) -> None:
        self.parcel: Parcel | None = None
        self._meeting: Any = None
        self._group: _Group | None = None

    async def meet(self) -> str:
        """Open the place where the next group meets, and close the last one's. Returns its address."""
        self._group, self._meeting = None, None
        host = own_address()
        self._meeting = await asyncio.to_thread(TCPStore, host, 0, is_master=True, wait_for_workers=False)
        return f"{host}:{self._meeting.port}"

    async def send(self, invitation: Invitation) -> None:
        """Raises AbsentError and CollectiveError, after which the group is of no use."""
        parcel = self.parcel
        if parcel is None or parcel.version != invitation.version:
            raise NotHeldError(f"version {invitation.version} is gone, there is {parcel and parcel.version}")
        group, self._group = self._group, None
        self._group = await asyncio.to_thread(self._send, group, invitation, parcel)

    def _send(self, group: _Group | None, invitation: Invitation, parcel: Parcel) -> _Group:
        group = group or _Group(invitation, invitation.timeout)
        group.tell(invitation, parcel.index())
        for bucket in parcel.buckets:
            group.broadcast(bucket)
        return group

    async def dissolve(self, invitation: Invitation) -> None:
        """Let go whoever waits for others, or comes late."""
        meeting, self._meeting = self._meeting, None
        if meeting is None or meeting.compare_set(invitation.told, "", DISSOLVED) != DISSOLVED.encode():
            return  # all are there, and lose the place where they would have waited for one
        self._meeting = meeting
        for key in invitation.arrivals.values():
            meeting.set(key, DISSOLVED)


class Receiver:
    """A member that is sent to."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self._number = -1
        self._group: _Group | None = None

    async def receive(self, invitation: Invitation) -> Parcel:
        """The sender's parcel, as it came. Raises CollectiveError. Meanwhile the process goes on with other things."""
        known = self._group if invitation.group == self._number else None
        self._group = None
        parcel, self._group = await asyncio.to_thread(self._receive, known, invitation)
        self._number = invitation.group
        return parcel

    def _receive(self, group: _Group | None, invitation: Invitation) -> tuple[Parcel, _Group]:
        group = group or _Group(invitation, 2 * invitation.timeout)  # the sender's ends first, and names the culprit
        parcel = Parcel.of_index(group.told(invitation), device=self.device if group.nccl else "cpu")
        for bucket in parcel.buckets:
            group.broadcast(bucket)
        return parcel, group


class _Group:
    """One member's end of a group."""

    def __init__(self, invitation: Invitation, patience: float):
        self.nccl, self._rank, self._world = invitation.backend == "nccl", invitation.rank, invitation.world
        self._timeout, self._patience = timedelta(seconds=invitation.timeout), timedelta(seconds=patience)
        host, _, port = invitation.address.rpartition(":")
        self._meeting: Any = None
        self._collective: Any = None
        with self._failing():
            self._meeting = TCPStore(host, int(port), is_master=False, timeout=self._patience)

    def tell(self, invitation: Invitation, index: str) -> None:
        """The index to all, once they are there."""
        arrivals = invitation.arrivals
        try:
            self._meeting.wait(list(arrivals.values()), self._patience)
        except RuntimeError as error:
            with self._failing():
                absent = tuple(rank for rank, key in arrivals.items() if not self._meeting.check([key]))
            raise AbsentError(absent) from error
        with self._failing():
            self._undissolved(self._meeting.compare_set(invitation.told, "", index))

    def told(self, invitation: Invitation) -> str:
        with self._failing():
            self._meeting.set(invitation.arrivals[self._rank], "here")
            return self._undissolved(self._meeting.get(invitation.told))

    def _undissolved(self, said: bytes) -> str:
        if said == DISSOLVED.encode():
            raise CollectiveError("somebody was lost before all had come")
        return said.decode()

    def broadcast(self, tensor: Tensor) -> None:
        with self._failing():
            self._collective = self._collective or self._made()
            self._collective.broadcast(tensor, 0).wait()
            if self.nccl:
                torch.cuda.synchronize(tensor.device)

    def _made(self) -> Any:
        """The classes themselves: torch's functions know but one default group, and make others of its members."""
        meeting = PrefixStore("group", self._meeting)
        if not self.nccl:
            let_gloo_be_reached()
            return dist.ProcessGroupGloo(meeting, self._rank, self._world, self._timeout)
        let_nccl_raise()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(meeting, self._rank, self._world, options)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Where one member fails, its connections end, and so the others need not wait until their time-out."""
        try:
            yield
        except RuntimeError as error:
            self._meeting = self._collective = None
            raise CollectiveError(reason_of(error)) from error
