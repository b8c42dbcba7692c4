"""Where a model's parameters are: whole on each rank that trains or runs it, or in shards.

    load -> Whole     every rank has the whole model; gradients are summed over ranks after the backward pass
         -> Waiting   the same for a frozen model in host memory, which is on the device only while it is used
         -> Sharded   a rank has rows of weights, gradients and moments (`shards.py`)

A placement also knows where a rank's tensors lie in whole ones, for checkpoints and samplers, and can gather these.
Parts of matrices are placed by `tensor.py`, stages of layers by `stages.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from plaudit.compute.axis import RECOMPUTED
from plaudit.learn.passes import Cutting, TokenBudget
from plaudit.learn.ranks import Alone, Ranks
from plaudit.learn.readout import Work
from plaudit.models.base import LanguageModel
from plaudit.models.layout import Box
from plaudit.models.parts import Shape
from plaudit.models.share import Share
from plaudit.types import Stats

Result = TypeVar("Result")
Spec = tuple[torch.dtype, Shape]
"""Dtype and shape of a whole tensor."""


class Within(NamedTuple):
    """Where a rank's tensor lies in the whole tensor (of all ranks)."""

    shape: Shape
    """Shape of the whole tensor."""
    held: tuple[tuple[Box, Tensor], ...]
    """Pairs: a box of the whole tensor, and this rank's values in it."""
    mine: bool
    """True if this rank saves it: its part is not empty, and no other rank saves the same values."""


class Placement(Protocol):
    """Where a model's parameters are. All ranks must make the same calls in order, and equally many forward passes."""

    ranks: Ranks
    """The ranks that have the same part of the model as this one, and other rows of the batch."""
    rounds: bool
    """True if parameters are kept in float32 and computed with in a lower precision."""

    @property
    def meets(self) -> bool:
        """True if ranks wait for each other within a pass, so that no rank can repeat a pass by itself."""
        ...

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        ...

    def present(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters are on the device and the model can be run."""
        ...

    def passes(self, count: int) -> int:
        """Return how many forward passes this rank must make, at least the `count` that its own rows need."""
        ...

    def accumulate(self, more: bool) -> None:
        """Call before each pass with gradients; `more` is True if other passes of the same step follow."""
        ...

    def fit(self, budget: TokenBudget, cut: Cutting, work: Work[Result]) -> list[Result]:
        """Do the work on every part, as `TokenBudget.fit`. Return the results; [] on a pipeline stage but the last."""
        ...

    def merge(self, stats: Stats) -> Stats:
        """Return the merged figures of all ranks, equal on each."""
        ...

    def specs(self, mine: Mapping[str, Spec]) -> Mapping[str, Spec]:
        """Return {kind/parameter: spec} of all ranks' tensors, given those of this rank; all ranks must call it."""
        ...

    def settle(self) -> None:
        """Call after forward passes that no backward pass follows, to free weights that they gathered."""
        ...

    def sum(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum gradients (by parameter name) over ranks, in place, unless the backward pass has done so."""
        ...

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Return the norm of the whole gradient, of which `gradients` are this rank's part."""
        ...

    def within(self, key: str, tensor: Tensor) -> Within:
        """Return where this rank's tensor of `key` (kind/parameter) lies in the whole tensor."""
        ...

    def parameters(self, names: Iterable[str], *, everyone: bool = False) -> dict[str, Tensor]:
        """Gather the named parameters, whole and in the model's precision; {} on ranks above 0, unless `everyone`."""
        ...

    def share(self) -> Share | None:
        """Return this rank's share of the model; None if the model is not read and written in boxes."""
        ...

    @property
    def writes(self) -> bool:
        """True if this rank may have a part to write: not where all of its part is a copy of another rank's."""
        ...

    def begin(self, work: Callable[[], None]) -> bool:
        """Let rank 0 do `work` before any rank writes its part. Return True if this rank has a part to write. If the
        work fails, rank 0 raises its error, and all other ranks return False."""
        ...

    def whole(self) -> LanguageModel | None:
        """Return the model with all of its parameters, to save or send a model without boxes; None on ranks above 0."""
        ...


class InTurn:
    """Base of placements that make their passes one after another, without a pipeline."""

    ranks: Ranks

    @property
    def meets(self) -> bool:
        return True

    def accumulate(self, more: bool) -> None:
        return None

    def fit(self, budget: TokenBudget, cut: Cutting, work: Work[Result]) -> list[Result]:
        ahead = self.accumulate if work.trains else lambda more: None
        return budget.fit(cut, work, clear=work.clear, ahead=ahead, again=not self.meets)

    def merge(self, stats: Stats) -> Stats:
        return self.ranks.merge(stats)

    def specs(self, mine: Mapping[str, Spec]) -> Mapping[str, Spec]:
        return mine


class Around(InTurn):
    """Base of placements that cut a model into parts: `inner` places this rank's part among the ranks that share it."""

    def __init__(self, inner: Placement):
        self.inner, self.ranks, self.rounds = inner, inner.ranks, inner.rounds

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def present(self) -> AbstractContextManager[None]:
        return self.inner.present()

    def passes(self, count: int) -> int:
        return self.inner.passes(count)

    def accumulate(self, more: bool) -> None:
        self.inner.accumulate(more)

    def settle(self) -> None:
        self.inner.settle()

    @property
    def writes(self) -> bool:
        return self.inner.writes

    def share(self) -> Share | None:
        return self.inner.share()


class Whole(InTurn):
    """Every rank has the whole model, or the whole of its pipeline stage."""

    rounds = False

    def __init__(self, model: Any, ranks: Ranks | None = None):
        self.model, self.ranks = model, ranks or Alone()

    @property
    def meets(self) -> bool:
        return bool(self.model.context_axis.size > 1)

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
        mesh, rank = self.model.among(self.ranks.world, self.ranks.rank)
        return self.model.share(mesh, rank, dict(self.model.named_parameters()))  # type: ignore[no-any-return]

    @property
    def writes(self) -> bool:
        return not self.ranks.rank

    def begin(self, work: Callable[[], None]) -> bool:
        if self.writes:
            work()
        return self.writes

    def whole(self) -> LanguageModel | None:
        return None if self.ranks.rank else self.model


class Waiting(Whole):
    """Every rank has a whole frozen model in host memory; within `present`, its parameters are copies on the device.
    Buffers are small and are not moved."""

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


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(list(gradients.values()), foreach=True))


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory: the tensor itself, or its local shard."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _place(tensor: Tensor) -> str:
    return str(tensor.device)


@torch.no_grad()
def finite(tensors: Iterable[Tensor]) -> bool:
    """True if all numbers are finite. Each tensor is read once, for its norm, and again only if this is not finite,
    since a sum of finite squares can overflow."""
    held = sorted((one for one in tensors if one.numel()), key=_place, reverse=True)  # the GPU's before the host's
    if not held:
        return True
    each = [norm for _, some in groupby(held, _place) for norm in torch._foreach_norm(list(some))]
    norms = [norm.to(held[0].device, torch.float32) for norm in each]
    found = torch.stack(norms).isfinite().tolist()  # the only point that waits for a GPU
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
    its input and is computed again in the backward pass. Raises ValueError if the model has no `blocks`."""
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
    return checkpoint(_forgotten, forward, *arguments, use_reentrant=False, preserve_rng_state=False, **named)


def _forgotten(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    before = RECOMPUTED.set(True)
    try:
        return forward(*arguments, **named)
    finally:
        RECOMPUTED.reset(before)
