"""Weights by broadcast, over gloo or NCCL: rank 0 of a group sends its parcel's buckets, one call each.

    Sender.meet -> address -> Invitation to each member -> all arrive -> index, buckets -> Parcel at each Receiver

A group lasts while its members stay the same. It is not torch's default group, which ranks and vLLM use themselves. No
member enters a collective before all have arrived. Until then, waiting members can be released (`dissolve`), and
missing members are known. `transport.py` chooses the members and handles failures.
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

from plaudit.runtime.network import free_address, let_gloo_be_reached, let_nccl_raise, listening
from plaudit.runtime.worker import reason_of
from plaudit.weights.parcel import Parcel

DISSOLVED = "dissolved"


class CollectiveError(RuntimeError):
    """The weights did not reach this member of the group; another group may deliver them."""


class AbsentError(CollectiveError):
    """Some members did not arrive in time. The argument: their numbers in the group."""


class NotHeldError(CollectiveError):
    """The sender now holds other weights."""


@dataclass(frozen=True)
class Invitation:
    """What a member of a group must know."""

    address: str
    """Address of rank 0's store, where members meet."""
    group: int
    """A number that is different for every group."""
    rank: int
    world: int
    version: int
    backend: str
    timeout: float
    """Seconds that members may take to arrive, and that a bucket may take."""

    @property
    def arrivals(self) -> dict[int, str]:
        """Key under which each member reports its arrival."""
        return {rank: f"{self.version} {rank}" for rank in range(1, self.world)}

    @property
    def index_key(self) -> str:
        """Key under which rank 0 then gives the parcel's index."""
        return f"{self.version}"


class Sender:
    """Rank 0 of every group. It keeps the newest parcel for members that join later."""

    def __init__(self) -> None:
        self.parcel: Parcel | None = None
        self._meeting: Any = None
        self._group: _Group | None = None

    async def meet(self) -> str:
        """Open the store of the next group and close the last one's. Return its address."""
        self._group, self._meeting = None, None
        host, _, port = (address := free_address()).rpartition(":")
        where: Any = {"master_listen_fd": listening(host, int(port)), "wait_for_workers": False}
        self._meeting = await asyncio.to_thread(TCPStore, host, int(port), is_master=True, **where)
        return address

    async def send(self, invitation: Invitation) -> None:
        """Send the parcel. Raises AbsentError or CollectiveError, after which the group is unusable."""
        parcel = self.parcel
        if parcel is None or parcel.version != invitation.version:
            raise NotHeldError(f"version {invitation.version} is gone; the sender holds {parcel and parcel.version}")
        group, self._group = self._group, None
        self._group = await asyncio.to_thread(self._send, group, invitation, parcel)

    def _send(self, group: _Group | None, invitation: Invitation, parcel: Parcel) -> _Group:
        group = group or _Group(invitation, invitation.timeout)
        group.tell(invitation, parcel.index())
        for bucket in parcel.buckets:
            group.broadcast(bucket)
        return group

    async def dissolve(self, invitation: Invitation) -> None:
        """Release members that wait or come late."""
        meeting, self._meeting = self._meeting, None
        if meeting is None or meeting.compare_set(invitation.index_key, "", DISSOLVED) != DISSOLVED.encode():
            return  # all have arrived, so no member waits at this store any more
        self._meeting = meeting
        for key in invitation.arrivals.values():
            meeting.set(key, DISSOLVED)


class Receiver:
    """A member that receives."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self._number = -1
        self._group: _Group | None = None

    async def receive(self, invitation: Invitation) -> Parcel:
        """Receive the sender's parcel. Raises CollectiveError. The process does other work meanwhile."""
        known = self._group if invitation.group == self._number else None
        self._group = None
        parcel, self._group = await asyncio.to_thread(self._receive, known, invitation)
        self._number = invitation.group
        return parcel

    def _receive(self, group: _Group | None, invitation: Invitation) -> tuple[Parcel, _Group]:
        # The sender's time-out ends first and names the member at fault.
        group = group or _Group(invitation, 2 * invitation.timeout)
        parcel = Parcel.of_index(group.index(invitation), device=self.device if group.nccl else "cpu")
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
        """Give the index to all, once they have arrived."""
        arrivals = invitation.arrivals
        try:
            self._meeting.wait(list(arrivals.values()), self._patience)
        except RuntimeError as error:
            with self._failing():
                absent = tuple(rank for rank, key in arrivals.items() if not self._meeting.check([key]))
            raise AbsentError(absent) from error
        with self._failing():
            self._undissolved(self._meeting.compare_set(invitation.index_key, "", index))

    def index(self, invitation: Invitation) -> str:
        """Report this member's arrival and wait for the index."""
        with self._failing():
            self._meeting.set(invitation.arrivals[self._rank], "here")
            return self._undissolved(self._meeting.get(invitation.index_key))

    def _undissolved(self, said: bytes) -> str:
        if said == DISSOLVED.encode():
            raise CollectiveError("a member was lost before all had arrived")
        return said.decode()

    def broadcast(self, tensor: Tensor) -> None:
        with self._failing():
            self._collective = self._collective or self._made()
            self._collective.broadcast(tensor, 0).wait()
            if self.nccl:
                torch.cuda.synchronize(tensor.device)

    def _made(self) -> Any:
        """Make the group from torch's classes: its functions know only one default group and make others from its
        members."""
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
        """End this member's connections on failure, so that others need not wait for their time-out."""
        try:
            yield
        except RuntimeError as error:
            self._meeting = self._collective = None
            raise CollectiveError(reason_of(error)) from error
