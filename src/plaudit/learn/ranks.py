"""Communication between the ranks of a training worker group: gradients are summed, figures merged, counts agreed on.

    Alone     one process: nothing to communicate
    Together  one of several, in a torch.distributed process group (gloo or NCCL)

Everything is a sum, never a mean: a batch's weights already are shares of the whole optimizer step. Figures travel as
JSON in plain tensors; nothing is pickled. Every collective has the group's time-out, after which it raises.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from plaudit.algorithms.figures import merge_stats
from plaudit.runtime.network import let_gloo_be_reached, let_nccl_raise, listening
from plaudit.types import Stats

BUCKET_ELEMENTS = 1 << 24
"""Gradients travel in flat buckets of about this size, since one call a parameter would cost more than the copy."""


class Ranks(Protocol):
    """Collectives among the ranks of a worker group. All ranks must make the same calls in the same order."""

    rank: int
    world: int
    alike: int
    """Number of neighbouring ranks that get the same rows, and so have the same figures."""
    group: dist.ProcessGroup | None
    """The torch.distributed group of these ranks; None for the default group."""

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over ranks, with equal bits on all ranks."""
        ...

    def merge(self, stats: Stats) -> Stats:
        """Return the merged figures of all ranks, equal on each."""
        ...

    def most(self, count: int) -> int:
        """Return the largest count of any rank."""
        ...

    def total(self, value: float) -> float:
        """Return the sum over ranks, equal on each."""
        ...

    def tell(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. A value must be JSON-serialisable."""
        ...

    def gather(self, tensor: Tensor, *, everyone: bool = False) -> list[Tensor]:
        """Return the tensors of all ranks, of equal shapes, in rank order; [] on ranks above 0, unless `everyone`."""
        ...


class Alone:
    """The only rank of its worker group: each collective returns this rank's own values."""

    rank, world, alike = 0, 1, 1
    group: dist.ProcessGroup | None = None

    def sum(self, tensors: Iterable[Tensor]) -> None:
        return None

    def merge(self, stats: Stats) -> Stats:
        return stats

    def most(self, count: int) -> int:
        return count

    def total(self, value: float) -> float:
        return value

    def tell(self, value: Any) -> list[Any]:
        return [value]

    def gather(self, tensor: Tensor, *, everyone: bool = False) -> list[Tensor]:
        return [tensor]


class Together:
    """One of several ranks of a process group: the default group, which `join` makes, or a part of it. Gloo sums GPU
    tensors but gathers only CPU tensors: with gloo, `device` is the CPU for all but `sum`. Figures of `alike`
    neighbours count once."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None, *, alike: int = 1):
        self.rank, self.world, self.group = dist.get_rank(group), dist.get_world_size(group), group
        self.alike = alike
        self.device = torch.device("cpu") if dist.get_backend(group) == "gloo" else device

    def sum(self, tensors: Iterable[Tensor]) -> None:
        for bucket in buckets(tensors):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                dist.all_reduce(bucket[0], group=self.group)
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat, group=self.group)
            for tensor, summed in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(summed.view_as(tensor))

    def merge(self, stats: Stats) -> Stats:
        return merge_stats(self.tell(stats)[:: self.alike])

    def tell(self, value: Any) -> list[Any]:
        words = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        longest = self.most(len(words))
        mine = torch.full((longest,), ord(" "), dtype=torch.uint8)
        mine[: len(words)] = words
        all_words = torch.empty(self.world * longest, dtype=torch.uint8, device=self.device)
        dist.all_gather_into_tensor(all_words, mine.to(self.device), group=self.group)
        texts = (bytes(part.tolist()) for part in torch.split(all_words.cpu(), longest))
        return [json.loads(text) for text in texts]

    def most(self, count: int) -> int:
        found = torch.tensor(count, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return int(found)

    def total(self, value: float) -> float:
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, group=self.group)
        return float(found)

    def gather(self, tensor: Tensor, *, everyone: bool = False) -> list[Tensor]:
        mine = tensor.to(self.device)
        parts = [torch.empty_like(mine) for _ in range(self.world)] if everyone or self.rank == 0 else []
        if everyone:
            dist.all_gather(parts, mine, group=self.group)
        else:
            dist.gather(mine, parts or None, group=self.group, group_dst=0)
        return parts

    def spread(self, tensor: Tensor, source: int) -> Tensor:
        """Broadcast the tensor of rank `source` and return it. Other ranks pass one of its shape, which may change."""
        tensor = tensor.to(self.device).contiguous()
        dist.broadcast(tensor, group=self.group, group_src=source)
        return tensor

    def exchange(self, tensor: Tensor, other: int) -> Tensor:
        """Send the tensor to rank `other`, and return the tensor of equal shape that `other` sends to this rank."""
        mine = tensor.to(self.device).contiguous()
        theirs = torch.empty_like(mine)
        pairs = ((dist.isend, mine), (dist.irecv, theirs))
        both = [dist.P2POp(kind, one, group=self.group, group_peer=other) for kind, one in pairs]
        for handle in dist.batch_isend_irecv(both):
            handle.wait()
        return theirs.to(tensor.device)


def begun(work: Callable[[], None], first: bool, most: Callable[[int], int]) -> bool:
    """Run `work` on the rank where `first` is True, while others wait in the collective `most` (`Ranks.most`). If it
    fails, raise its error on that rank and return False on the others; otherwise return True on all."""
    failed: Exception | None = None
    if first:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # the others wait
            failed = error
    broken = most(failed is not None)
    if failed is not None:
        raise failed
    return not broken


def buckets(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Yield lists of neighbouring tensors of one dtype, at most BUCKET_ELEMENTS numbers each; a larger one is alone."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.numel() > BUCKET_ELEMENTS):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def join(
    address: str,
    rank: int,
    world: int,
    *,
    device: torch.device,
    timeout: float,
    always: bool = False,
    backend: str = "auto",
) -> Together | Alone:
    """Join the process group that meets at `address` (rank 0's `free_address`). Its collectives raise after `timeout`
    seconds. Return Alone if `world` is 1, unless `always`. Raises ValueError if backend nccl is set without a GPU."""
    if backend == "nccl" and device.type != "cuda":
        raise ValueError(
            f"runtime.backend=nccl: this rank computes on {device}, which is no GPU. Set runtime.backend=gloo"
        )
    if world == 1 and not always:
        return Alone()
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    let_gloo_be_reached()
    if backend == "nccl":
        let_nccl_raise()
    host, _, port = address.rpartition(":")
    patience = timedelta(seconds=timeout)
    where: Any = {"master_listen_fd": listening(host, int(port))} if rank == 0 else {}
    store = TCPStore(host, int(port), world, is_master=rank == 0, timeout=patience, wait_for_workers=False, **where)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
    return Together(device)
