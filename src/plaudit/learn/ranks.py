"""What the ranks of one training gang tell each other: gradients are summed, figures merged, counts agreed on.

Alone      one process: nothing to say
Together   one of several, in a torch.distributed process group (gloo or NCCL)

Everything is a sum, never a mean: a batch's weights are shares of the whole optimizer step already. Figures travel as
JSON in plain tensors: nothing is pickled. Every collective has the group's time-out, after which it raises.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from plaudit.runtime.network import let_gloo_be_reached, let_nccl_raise, own_address
from plaudit.types import Stats, merge_stats

BUCKET_ELEMENTS = 1 << 24
"""Gradients travel in flat runs of about this many elements: one call a parameter costs more than the copy."""


class Ranks(Protocol):
    """The caller promises that every rank makes the same calls in the same order."""

    rank: int
    world: int

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over ranks, bit for bit the same on all."""
        ...

    def merge(self, stats: Stats) -> Stats:
        """The figures of all ranks as one, the same on all."""
        ...

    def most(self, count: int) -> int:
        """The largest count of any rank."""
        ...

    def total(self, value: float) -> float:
        """A number's sum over ranks, the same on all."""
        ...

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which are alike in shape, in rank order; for rank 0 alone, the others get none."""
        ...


class Alone:
    """A gang of one."""

    rank, world = 0, 1

    def sum(self, tensors: Iterable[Tensor]) -> None:
        return None

    def merge(self, stats: Stats) -> Stats:
        return stats

    def most(self, count: int) -> int:
        return count

    def total(self, value: float) -> float:
        return value

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


class Together:
    """One of several ranks of the default process group, which `join` makes. Gloo sums tensors of GPUs, and gathers
    those of CPUs alone: figures are told on `device`, gradients lie where they are."""

    def __init__(self, device: torch.device):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cpu") if dist.get_backend() == "gloo" else device

    def sum(self, tensors: Iterable[Tensor]) -> None:
        for bucket in buckets(tensors):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                dist.all_reduce(bucket[0])
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat)
            for tensor, summed in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(summed.view_as(tensor))

    def merge(self, stats: Stats) -> Stats:
        words = torch.frombuffer(bytearray(json.dumps(stats).encode()), dtype=torch.uint8)
        longest = self.most(len(words))
        mine = torch.full((longest,), ord(" "), dtype=torch.uint8)
        mine[: len(words)] = words
        all_words = torch.empty(self.world * longest, dtype=torch.uint8, device=self.device)
        dist.all_gather_into_tensor(all_words, mine.to(self.device))
        texts = (bytes(part.tolist()) for part in torch.split(all_words.cpu(), longest))
        return merge_stats(json.loads(text) for text in texts)

    def most(self, count: int) -> int:
        found = torch.tensor(count, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)

    def total(self, value: float) -> float:
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(found)
        return float(found)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        mine = tensor.to(self.device)
        parts = [torch.empty_like(mine) for _ in range(self.world)] if self.rank == 0 else []
        dist.gather(mine, parts or None)
        return parts


def buckets(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Neighbours of one dtype, together at most BUCKET_ELEMENTS (a larger tensor goes alone)."""
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


def free_address() -> str:
    """Where this process could be met by others: its address in the network, and a port that is free now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = listener.getsockname()[1]
    return f"{own_address()}:{port}"


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
    """Meet the other ranks at `address` (`free_address` of rank 0). A collective may take `timeout` seconds. One rank
    alone has no group, unless `always`. Raises ValueError where the ranks' device is not for the backend."""
    if backend == "nccl" and device.type != "cuda":
        raise ValueError(f"runtime.backend=nccl: this rank computes on {device}, where there is no GPU. Take gloo")
    if world == 1 and not always:
        return Alone()
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    let_gloo_be_reached()
    if backend == "nccl":
        let_nccl_raise()
    dist.init_process_group(
        backend, init_method=f"tcp://{address}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    return Together(device)
