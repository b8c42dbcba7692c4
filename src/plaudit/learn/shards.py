"""Models in shards of rows, by FSDP2: a rank keeps its rows of weights, gradients and moments.

a layer is gathered while it computes, or (ZeRO 1 and 2) for the whole step; its gradients are summed into shards
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plaudit.learn.ranks import Alone, Ranks, begun, buckets
from plaudit.learn.sharding import InTurn, Within, local, norm_of
from plaudit.models.base import LanguageModel
from plaudit.models.share import Share


class Grid(NamedTuple):
    """The ranks of the data axis, arranged as replicas that are each sharded over several ranks (HSDP)."""

    shards: Ranks
    """The ranks of this replica; each has other rows of the weights."""
    copies: Ranks
    """The ranks, one of each replica, that have the same rows of the weights as this one."""
    numbers: Sequence[Sequence[int]]
    """Rank numbers of the data axis, one sequence for each replica; () if there is one replica."""

    def mesh(self, device: torch.device) -> Any:
        """Return this arrangement as the DeviceMesh that FSDP2 takes."""
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        shards, copies = self.shards.group, self.copies.group
        if copies is not None and shards is not None:
            names = ("replicas", "data")
            return DeviceMesh.from_group([copies, shards], device.type, self.numbers, mesh_dim_names=names)
        if shards is None:
            return init_device_mesh(device.type, (self.shards.world,))
        return DeviceMesh.from_group(shards, device.type)


class Sharded(InTurn):
    """Shards the model's parameters by rows over the ranks with FSDP2, in place. If the model has no values yet, each
    rank fills in its own rows.

    Trained parameters of a low precision are stored in float32 and cast to the low precision for passes; their
    gradients are summed in float32. `cpu_offload` keeps shards, gradients and moments in the CPU's memory.

    `stage` is the ZeRO stage (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054): what is sharded while a step
    is computed. 3: gradients and weights; a layer is gathered while it computes. 2: gradients; weights are gathered
    once a step. 1: neither; gradients are summed once a step. Between steps, everything is sharded.
    """

    def __init__(
        self,
        model: LanguageModel,
        ranks: Ranks,
        *,
        device: torch.device,
        cpu_offload: bool = False,
        stage: int = 3,
        grid: Grid | None = None,
    ):
        """`grid` arranges the ranks as replicas of shards; without it, they are one replica."""
        self.model, self.ranks, self.stage = model, ranks, stage
        self.shards, self.copies, _ = grid = grid or Grid(ranks, Alone(), ())
        self._device = device
        values, model.pending = model.pending, None
        self.empty = _without_values(model)
        self.dtypes = {name: p.dtype for name, p in model.named_parameters()}
        self.rows = {name: p.shape[0] for name, p in model.named_parameters()}
        trained = {p.dtype for p in model.parameters() if p.requires_grad}
        low = [dtype for dtype in trained if dtype.itemsize < 4]
        self.rounds = bool(low)
        for parameter in model.parameters():
            if parameter.requires_grad and self.rounds:
                parameter.data = parameter.data.float()
        compute = low[0] if low else None
        mesh = grid.mesh(device)
        self.units = _shard(model, mesh, compute=compute, cpu_offload=cpu_offload, whole=stage < 3)
        if values is not None:
            model.to_empty(device="cpu" if cpu_offload else device)
            model.tie()
            share = self.share()
            assert share is not None
            for fill in values:
                fill(share)

    @property
    def device(self) -> torch.device:
        return self._device

    def present(self) -> AbstractContextManager[None]:
        return nullcontext()

    def passes(self, count: int) -> int:
        """Return the largest count of any rank, since all ranks gather layers in every pass."""
        return self.ranks.most(count)

    def accumulate(self, more: bool) -> None:
        for unit in self.units if self.stage < 3 else ():
            unit.set_reshard_after_backward(not more, recurse=False)
            unit.set_requires_gradient_sync(self.stage > 1 or not more, recurse=False)

    def settle(self) -> None:
        """Free the weights that forward passes gathered: they take memory and would become stale."""
        for unit in self.units:
            unit.reshard()

    def sum(self, gradients: Mapping[str, Tensor]) -> None:
        return None

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        mine = norm_of(gradients)
        return math.sqrt(self.shards.total(mine * mine))

    def _full(self, tensors: Mapping[str, Tensor], *, everyone: bool) -> dict[str, Tensor]:
        """Gather whole tensors on the CPU and return them; {} on ranks above 0, unless `everyone`."""
        found: dict[str, Tensor] = {}
        if self.copies.rank and not everyone:
            return found
        keys = iter(tensors)
        for bucket in buckets(self._padded(key, tensor) for key, tensor in tensors.items()):
            shards = self.shards.gather(torch.cat([tensor.reshape(-1) for tensor in bucket]), everyone=everyone)
            pieces = [torch.split(shard, [tensor.numel() for tensor in bucket]) for shard in shards]
            for number, tensor in enumerate(bucket):
                key = next(keys)
                if pieces:
                    whole = torch.cat([piece[number].view(tensor.shape) for piece in pieces])
                    found[key] = whole[: self.rows[key]].cpu()
        return found

    def within(self, key: str, tensor: Tensor) -> Within:
        """Return where this rank's rows lie. Rank 0 saves a 0-dimensional tensor, which is equal on all ranks."""
        if tensor.dim() == 0:
            return Within((), (((), tensor),), self.ranks.rank == 0)
        name, others = key.rpartition("/")[2], tuple(tensor.shape[1:])
        first = self.shards.rank * self._share(name)
        box = ((first, first + len(tensor)), *((0, size) for size in others))
        return Within((self.rows[name], *others), ((box, tensor),), len(tensor) > 0 and not self.copies.rank)

    def parameters(self, names: Iterable[str], *, everyone: bool = False) -> dict[str, Tensor]:
        mine = {name: local(self.model.get_parameter(name)).to(self.dtypes[name]) for name in names}
        return self._full(mine, everyone=everyone)

    def whole(self) -> LanguageModel | None:
        tensors = self.parameters(self.dtypes)
        if not tensors:
            return None
        filled = {
            id(p): nn.Parameter(tensors[name], requires_grad=p.requires_grad)
            for name, p in self.empty.named_parameters()
        }
        return copy.deepcopy(self.empty, filled)

    def share(self) -> Share | None:
        mine = {name: local(parameter) for name, parameter in self.model.named_parameters()}
        mesh, rank = self.model.among(self.copies.world, self.ranks.rank, data=self.shards.world)
        return self.empty.share(mesh, rank, mine)

    writes = True

    def begin(self, work: Callable[[], None]) -> bool:
        return begun(work, self.ranks.rank == 0, self.ranks.most)

    def _share(self, name: str) -> int:
        """Return the number of a parameter's rows on each rank; the last ranks may have fewer, or none."""
        return -(-self.rows[name] // self.shards.world)

    def _padded(self, name: str, shard: Tensor) -> Tensor:
        """Return the shard with rows of zeros added, so that it is of equal size on all ranks."""
        lacking = self._share(name) - shard.shape[0]
        return shard if not lacking else torch.cat((shard, shard.new_zeros(lacking, *shard.shape[1:])))


def _shard(
    model: LanguageModel, mesh: Any, *, compute: torch.dtype | None, cpu_offload: bool, whole: bool = False
) -> list[Any]:
    """Shard the model in place and return its FSDP units: each layer is one; embeddings, last norm and head are
    another. The latter stays gathered until its backward pass, since log-probs are read from the head's weight after
    `forward`. With `whole`, layers stay gathered too.

    Raises ValueError if the number of passes depends on the rows' lengths (longrope), or for a model that runs through
    transformers if torch is older than 2.13, which cannot sum gradients that only some ranks have (experts).
    """
    if model.turn:
        raise ValueError(
            "runtime.strategy=fsdp cannot shard a model with rotary frequencies of two kinds (longrope): rows of "
            "either kind are computed apart, and ranks would wait for passes that others do not make. Set "
            "runtime.strategy=replicate"
        )
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    sums_unused = "set_reduce_scatter_unused_params" in vars(FSDPModule)  # from torch 2.13 on
    if not (sums_unused or model.caches):
        raise ValueError(
            f"runtime.strategy=fsdp with torch {torch.__version__} cannot shard a model that runs through "
            "transformers: if only some tokens use some of its parameters (experts), ranks would sum others' "
            "gradients. Take torch 2.13 or newer, or set runtime.strategy=replicate"
        )
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=None if compute is None else torch.float32)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=not whole, mp_policy=precision, offload_policy=offload)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=precision, offload_policy=offload)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:  # sums, not means: a batch's weights are shares of the whole step
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if sums_unused:
            unit.set_reduce_scatter_unused_params(True)
    return units


def _without_values(model: LanguageModel) -> LanguageModel:
    """Return a copy of the model whose parameters are on the meta device and take no memory."""
    empty: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, empty)
