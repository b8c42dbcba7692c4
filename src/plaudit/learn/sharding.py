"""Where a model's parameters are: whole on each rank that trains or runs it, or in shards.

    load -> Whole     every rank has the whole model; gradients are summed over ranks after the backward pass
         -> Waiting   the same for a frozen model in host memory, which is on the device only while it is used
         -> Sharded   FSDP2: a rank keeps its rows of weights, gradients and moments; a layer is gathered while it
                      computes, and its gradients are summed directly into shards

A placement also knows where a rank's tensors lie in whole ones, for checkpoints and samplers, and can gather these.
Parts of matrices are placed by `tensor.py`. Left out: pipeline parallelism.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from plaudit.learn.ranks import Alone, Ranks, begun, buckets
from plaudit.models.base import LanguageModel
from plaudit.models.layout import Box
from plaudit.models.mesh import Mesh
from plaudit.models.parts import Shape
from plaudit.models.share import Share


class Within(NamedTuple):
    """A rank's tensor as a part of a whole one."""

    shape: Shape
    """Of the whole tensor."""
    held: tuple[tuple[Box, Tensor], ...]
    """Boxes of it, and this rank's values of each."""
    mine: bool
    """True if this rank saves it: it is not empty, and no copy of another rank's."""


class Placement(Protocol):
    """The caller promises that every rank makes the same calls in the same order, and as many forward passes."""

    ranks: Ranks
    rounds: bool
    """True if parameters are kept in float32 and computed with in a lower precision."""
    meets: bool
    """True if ranks wait for each other within a pass, so that none can repeat one."""

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        ...

    def present(self) -> AbstractContextManager[None]:
        """While active, the model's parameters are on the device and it can be run."""
        ...

    def passes(self, count: int) -> int:
        """Number of forward passes that this rank must make if it needs `count`."""
        ...

    def settle(self) -> None:
        """Call after forward passes that no backward pass follows."""
        ...

    def sum(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum gradients, by their parameters' names, over ranks, unless the backward pass has done so."""
        ...

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Return the norm of the whole gradient, from this rank's part."""
        ...

    def within(self, key: str, tensor: Tensor) -> Within:
        """Return the place of this rank's tensor of a kind/parameter in the whole one."""
        ...

    def parameters(self, names: Iterable[str], *, everyone: bool = False) -> dict[str, Tensor]:
        """Gather these parameters, whole and in the model's precision. Only rank 0 gets them, unless `everyone`."""
        ...

    def share(self) -> Share | None:
        """Return what this rank holds of a model that is read and written in boxes; None for another model."""
        ...

    def begin(self, work: Callable[[], None]) -> bool:
        """Let rank 0 do what must be done before any rank writes its part. False for a rank that has nothing to write,
        and for all others if it failed at rank 0, which raises the error."""
        ...

    def whole(self) -> LanguageModel | None:
        """Return the model with all of its parameters, to be saved or sent if it has no boxes. Only for rank 0."""
        ...


class Whole:
    """Every rank has all of the model."""

    rounds = meets = False

    def __init__(self, model: Any, ranks: Ranks | None = None):
        self.model, self.ranks = model, ranks or Alone()

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    def present(self) -> AbstractContextManager[None]:
        return nullcontext()

    def passes(self, count: int) -> int:
        return count

    def settle(self) -> None:
        return None

    def sum(self, gradients: Mapping[str, Tensor]) -> None:
        self.ranks.sum(gradients.values())

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        return norm_of(gradients)

    def within(self, key: str, tensor: Tensor) -> Within:
        shape = tuple(tensor.shape)
        return Within(shape, ((tuple((0, size) for size in shape), tensor),), self.ranks.rank == 0)

    def parameters(self, names: Iterable[str], *, everyone: bool = False) -> dict[str, Tensor]:
        return {name: self.model.get_parameter(name) for name in names} if everyone or not self.ranks.rank else {}

    def share(self) -> Share | None:
        axis, own = self.model.axis, dict(self.model.named_parameters())
        mesh, rank = Mesh(replicas=self.ranks.world, tensor=axis.size), self.ranks.rank * axis.size + axis.rank
        return self.model.share(mesh, rank, own)  # type: ignore[no-any-return]

    def begin(self, work: Callable[[], None]) -> bool:
        if self.ranks.rank:
            return False
        work()
        return True

    def whole(self) -> LanguageModel | None:
        return None if self.ranks.rank else self.model


class Waiting(Whole):
    """Every rank has a whole frozen model in host memory. While it is used, its parameters have copies on the device.
    Buffers are small and always there."""

    def __init__(self, model: LanguageModel, ranks: Ranks | None = None, *, device: torch.device):
        super().__init__(model, ranks)
        self._device = device
        for parameter in model.parameters():
            parameter.data = in_host_memory(parameter.data)

    @property
    def device(self) -> torch.device:
        return self._device

    @contextmanager
    def present(self) -> Iterator[None]:
        waiting = [(parameter, parameter.data) for parameter in self.model.parameters()]
        try:
            for parameter, values in waiting:
                copy = torch.empty_like(values, device=self._device)
                parameter.data = copy.copy_(values, non_blocking=True)
            yield
        finally:
            for parameter, values in waiting:
                parameter.data = values


class Sharded:
    """Parameters in shards of rows, one a rank (FSDP2). In place: the model is sharded from here on. A model without
    values gets them here, each rank only its own.

    Trained parameters of a low precision become float32 and are computed with in the precision that they had; their
    gradients are summed in float32. `cpu_offload` keeps shards, gradients and moments in the CPU's memory.
    """

    meets = True

    def __init__(self, model: LanguageModel, ranks: Ranks, *, device: torch.device, cpu_offload: bool = False):
        self.model, self.ranks = model, ranks
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
        _shard(model, device, ranks.world, compute=compute, cpu_offload=cpu_offload, group=ranks.group)
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

    def settle(self) -> None:
        """Free what the last forward pass gathered: it would become stale, and takes memory."""
        self.model.reshard()  # type: ignore[operator]

    def sum(self, gradients: Mapping[str, Tensor]) -> None:
        return None

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        mine = norm_of(gradients)
        return math.sqrt(self.ranks.total(mine * mine))

    def _full(self, tensors: Mapping[str, Tensor], *, everyone: bool) -> dict[str, Tensor]:
        """Gather whole tensors on the CPU."""
        found: dict[str, Tensor] = {}
        keys = iter(tensors)
        for bucket in buckets(self._padded(key, tensor) for key, tensor in tensors.items()):
            shards = self.ranks.gather(torch.cat([tensor.reshape(-1) for tensor in bucket]), everyone=everyone)
            pieces = [torch.split(shard, [tensor.numel() for tensor in bucket]) for shard in shards]
            for number, tensor in enumerate(bucket):
                key = next(keys)
                if pieces:
                    whole = torch.cat([piece[number].view(tensor.shape) for piece in pieces])
                    found[key] = whole[: self.rows[key]].cpu()
        return found

    def within(self, key: str, tensor: Tensor) -> Within:
        """Return this rank's rows. A number that is equal on all ranks is saved by the first."""
        if tensor.dim() == 0:
            return Within((), (((), tensor),), self.ranks.rank == 0)
        name, others = key.rpartition("/")[2], tuple(tensor.shape[1:])
        first = self.ranks.rank * self._share(name)
        box = ((first, first + len(tensor)), *((0, size) for size in others))
        return Within((self.rows[name], *others), ((box, tensor),), len(tensor) > 0)

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
        axis = self.model.axis
        mesh, rank = Mesh(data=self.ranks.world, tensor=axis.size), self.ranks.rank * axis.size + axis.rank
        return self.empty.share(mesh, rank, mine)

    def begin(self, work: Callable[[], None]) -> bool:
        return begun(work, self.ranks.rank == 0, self.ranks.most)

    def _share(self, name: str) -> int:
        """Return the number of a parameter's rows on each rank; the last ranks may have fewer, or none."""
        return -(-self.rows[name] // self.ranks.world)

    def _padded(self, name: str, shard: Tensor) -> Tensor:
        """Return the shard with rows of zeros added, so that it is of equal size on all ranks."""
        lacking = self._share(name) - shard.shape[0]
        return shard if not lacking else torch.cat((shard, shard.new_zeros(lacking, *shard.shape[1:])))


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(list(gradients.values()), foreach=True))


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory: the tensor itself, or its local shard."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def finite(tensors: Iterable[Tensor]) -> bool:
    """True if all numbers are finite. Reads each once: the sum of squares shows it, with a second look if that
    overflows."""
    held = [tensor for tensor in tensors if tensor.numel()]
    if not held:
        return True
    norms = [norm.to(held[0].device, torch.float32) for norm in torch._foreach_norm(held)]
    found = torch.stack(norms).isfinite().tolist()  # the one wait for a GPU
    return all(sound or bool(one.isfinite().all()) for one, sound in zip(held, found, strict=True))


def apart(device: torch.device | str) -> bool:
    """True if the device's memory is not the host's, so that tensors can wait in host memory."""
    return torch.device(device).type != "cpu"


def in_host_memory(values: Tensor) -> Tensor:
    """Return a pinned host copy of a GPU tensor, copied asynchronously; return a CPU tensor unchanged."""
    if not apart(values.device):
        return values
    pinned = values.device.type == "cuda"
    return torch.empty_like(values, device="cpu", pin_memory=pinned).copy_(values)


def recompute_layers(model: LanguageModel) -> None:
    """Enable activation checkpointing in place (Chen et al. 2016, https://arxiv.org/abs/1604.06174): a layer keeps only
    its input and computes again in the backward pass."""
    if not model.blocks:
        raise ValueError(
            f"{type(model).__name__} does not say what its layers are: set learn.activation_checkpointing=false"
        )
    for block in model.blocks:
        block.forward = partial(_recomputed, block.forward)


def _recomputed(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **named)


def _shard(
    model: LanguageModel,
    device: torch.device,
    world: int,
    *,
    compute: torch.dtype | None,
    cpu_offload: bool,
    group: Any = None,
) -> None:
    """Shard the model: each layer is a unit, and embeddings, last norm and head are one. The latter stays gathered
    until its backward pass, since log-probs are read from the head's weight after `forward`.

    Raises ValueError if passes depend on the rows' lengths, or if parameters depend on the tokens and torch could not
    sum them.
    """
    if model.turn:
        raise ValueError(
            "runtime.strategy=fsdp cannot shard a model with rotary frequencies of two kinds (longrope): rows of "
            "either kind are computed apart, and ranks would wait for passes that others do not make. Set "
            "runtime.strategy=replicate"
        )
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
    mesh = init_device_mesh(device.type, (world,)) if group is None else DeviceMesh.from_group(group, device.type)
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=None if compute is None else torch.float32)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=precision, offload_policy=offload)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=precision, offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # sums, not means: a batch's weights are shares of the whole step
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if sums_unused:
                module.set_reduce_scatter_unused_params(True)


def _without_values(model: LanguageModel) -> LanguageModel:
    """Return the model without values, which takes no memory."""
    empty: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, empty)
