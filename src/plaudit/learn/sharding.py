"""Where a model's parameters are: whole on each rank that trains or runs it, or in shards.

    load -> Whole     every rank has the whole model; gradients are summed over ranks after the backward pass
         -> Waiting   the same for a frozen model in host memory, which is on the device only while it is used
         -> Sharded   FSDP2: a rank keeps its rows of weights, gradients and moments; a layer is gathered while it
                      computes, and its gradients are summed directly into shards

A placement also gathers whole tensors for checkpoints and samplers, and splits them again. Left out: tensor and
pipeline parallelism.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plaudit.learn.ranks import Alone, Ranks, buckets
from plaudit.models.base import LanguageModel
from plaudit.models.layout import Mesh
from plaudit.models.share import Share


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

    def sum(self, gradients: Iterable[Tensor]) -> None:
        """Sum gradients over ranks, unless the backward pass has done so."""
        ...

    def norm(self, mine: float) -> float:
        """Return the norm of the whole gradient, from the norm of this rank's part."""
        ...

    def full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather whole tensors, by kind/parameter, on the CPU (the process that saves them may have no GPU). Only rank
        0 gets them."""
        ...

    def part(self, key: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor of that kind/parameter."""
        ...

    def parameters(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Gather these parameters, whole and in the model's precision. Only rank 0 gets them."""
        ...

    def whole(self) -> LanguageModel | None:
        """Return the model with all of its parameters, to be saved or sent. Only for rank 0."""
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

    def sum(self, gradients: Iterable[Tensor]) -> None:
        self.ranks.sum(gradients)

    def norm(self, mine: float) -> float:
        return mine

    def full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {} if self.ranks.rank else {key: tensor.cpu() for key, tensor in tensors.items()}

    def part(self, key: str, tensor: Tensor) -> Tensor:
        return tensor

    def parameters(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {} if self.ranks.rank else {name: self.model.get_parameter(name) for name in names}

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
        _shard(model, device, ranks.world, compute=low[0] if low else None, cpu_offload=cpu_offload)
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
        """As many as any other: in each the ranks put layers together."""
        return self.ranks.most(count)

    def settle(self) -> None:
        """Free what the last forward pass gathered: it would become stale, and takes memory."""
        self.model.reshard()  # type: ignore[operator]

    def sum(self, gradients: Iterable[Tensor]) -> None:
        for _ in gradients:  # parameters that no row touched get their zeros
            pass

    def norm(self, mine: float) -> float:
        return math.sqrt(self.ranks.total(mine * mine))

    def full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {key: tensor.cpu() for key, tensor in tensors.items() if tensor.dim() == 0 and self.ranks.rank == 0}
        split = [key for key, tensor in tensors.items() if tensor.dim() > 0]
        keys = iter(split)
        for bucket in buckets(self._padded(key, tensors[key]) for key in split):
            shards = self.ranks.gather(torch.cat([tensor.reshape(-1) for tensor in bucket]))
            pieces = [torch.split(shard, [tensor.numel() for tensor in bucket]) for shard in shards]
            for number, tensor in enumerate(bucket):
                key = next(keys)
                if pieces:
                    whole = torch.cat([piece[number].view(tensor.shape) for piece in pieces])
                    found[key] = whole[: self.rows[_parameter(key)]].cpu()
        return {key: found[key] for key in tensors if key in found}

    def part(self, key: str, tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            return tensor
        size = self._share(key)
        return tensor[self.ranks.rank * size : (self.ranks.rank + 1) * size]

    def parameters(self, names: Iterable[str]) -> dict[str, Tensor]:
        return self.full({name: local(self.model.get_parameter(name)).to(self.dtypes[name]) for name in names})

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
        return self.model.share(Mesh(data=self.ranks.world), self.ranks.rank, mine)

    def _share(self, key: str) -> int:
        """Return a rank's rows; the last ranks may have fewer, or none."""
        return -(-self.rows[_parameter(key)] // self.ranks.world)

    def _padded(self, key: str, shard: Tensor) -> Tensor:
        """As many rows as on every other rank."""
        lacking = self._share(key) - shard.shape[0]
        return shard if not lacking else torch.cat((shard, shard.new_zeros(lacking, *shard.shape[1:])))


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
    model: LanguageModel, device: torch.device, world: int, *, compute: torch.dtype | None, cpu_offload: bool
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
    from torch.distributed.device_mesh import init_device_mesh
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
    mesh = init_device_mesh(device.type, (world,))
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


def _parameter(key: str) -> str:
    """Return the parameter's name, from kind/parameter or from the name itself."""
    return key.rpartition("/")[2]
