"""Optimizer and learning-rate schedule.

summed gradients -> collect -> gradient_norm -> step: AdamW on the masters -> parameters, rounded

Masters and moments may wait in host memory, where the step is then computed (ZeRO-Offload: Ren et al. 2021,
https://arxiv.org/abs/2101.06840): gradients go there and weights come back, a bucket at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from plaudit.learn.ranks import buckets
from plaudit.learn.settings import OptimizerSettings
from plaudit.learn.sharding import Placement, Whole, in_host_memory, local

MASTER = "master"
"""Kind of the tensors in `Optimizer.state` that are masters; the other kinds are AdamW's moments."""


def schedule(step: int, total: int, settings: OptimizerSettings) -> float:
    """Return the multiplier of the learning rate at `step` (0-based) of `total`: linear warm-up, then the decay.

    Pure, so that a resumed run needs nothing but its step number.
    """
    share = settings.warmup
    warmup = int(share.split()[0]) if isinstance(share, str) else round(share * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if settings.schedule == "constant" or total <= warmup:
        return 1.0
    done = min((step - warmup) / (total - warmup), 1.0)
    shape = 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.min_ratio + (1.0 - settings.min_ratio) * shape


class Optimizer:
    """AdamW in float32 on a model's trained parameters, whatever their precision; decay on matrices only.

    A parameter of lower precision has a master, a float32 copy. Updates change the master, and the parameter is its
    rounded value: in bfloat16, most steps of a small learning rate would round to nothing. Gradients of such a
    parameter are summed in float32 too, over its uses and over micro-batches. Sharded parameters are float32, and each
    rank updates its own rows.

    Torch's kernel is called directly, since `torch.optim` would load the compiler, for seconds, without using it.
    With `waits`, masters and moments are in host memory, and the step is computed there.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerSettings,
        placement: Placement | None = None,
        *,
        waits: bool = False,
    ):
        self.settings, self.rate, self.norm, self.waits = settings, settings.learning_rate, 0.0, waits
        self.placement = placement or Whole(model)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {
            name: local(p) if p.dtype.itemsize >= 4 else self._master(p) for name, p in self.parameters.items()
        }
        self.moments = {name: self.zeros(master) for name, master in self.masters.items()}
        self.collected: dict[str, Tensor] = {}
        for _, parameter in self.rounded:
            parameter.grad_dtype = torch.float32

    def collect(self) -> dict[str, Tensor]:
        """Return every trained parameter's gradient, zeros if no row used the parameter, and keep it for `step`."""
        self.collected = {name: _gradient(parameter) for name, parameter in self.parameters.items()}
        return self.collected

    def gradient_norm(self) -> float:
        """Return the norm of all collected gradients, and keep it: `step` clips by it."""
        self.norm = self.placement.norm(self.collected)
        return self.norm

    @torch.no_grad()
    def step(self) -> None:
        """Update masters and parameters by `rate`; scale down gradients above the norm limit. After `gradient_norm`."""
        limit = self.settings.max_gradient_norm
        excess = self.norm / limit if 0.0 < limit < self.norm else None
        matrices = [name for name in self.collected if self.masters[name].dim() >= 2]
        others = [name for name in self.collected if self.masters[name].dim() < 2]
        for names, decay in ((matrices, self.settings.weight_decay), (others, 0.0)):
            for some in self._runs(names):
                masters = [self.masters[name] for name in some]
                gradients = [self.collected[name] for name in some]
                here = [*map(in_host_memory, masters)] if self.waits else masters
                self._move(some, here, [*map(in_host_memory, gradients)] if self.waits else gradients, excess, decay)
                for master, moved in zip(masters, here, strict=True):
                    if moved is not master:
                        master.copy_(moved)
        self.round()

    def _runs(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Yield lists of names to update in one call of the kernel: one list of all, or with `waits` one per bucket."""
        keys, masters = iter(names), [self.masters[name] for name in names]
        for run in buckets(masters) if self.waits else [masters] * bool(names):
            yield [next(keys) for _ in run]

    def _move(
        self,
        names: Sequence[str],
        masters: list[Tensor],
        gradients: list[Tensor],
        excess: float | None,
        decay: float,
    ) -> None:
        first, second, steps = (
            [self.moments[name][kind] for name in names] for kind in ("exp_avg", "exp_avg_sq", "step")
        )
        torch._foreach_add_(steps, 1.0)
        # The kernel divides by grad_scale as it reads, which saves a pass over all gradients.
        torch._fused_adamw_(
            masters,
            gradients,
            first,
            second,
            [],
            steps,
            lr=self.rate,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            weight_decay=decay,
            eps=self.settings.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None if excess is None else torch.tensor(excess, device=masters[0].device),
        )
        torch.autograd.graph.increment_version(masters)  # the kernel does not; engines compare versions

    def offload(self) -> None:
        """Move moments and masters to host memory until `onload`, to free the device."""
        self._bring(lambda tensor, device: in_host_memory(tensor))

    def onload(self) -> None:
        """Move moments and masters back to the parameters' device, unless `waits` keeps them in host memory."""
        if not self.waits:
            self._bring(lambda tensor, device: tensor.to(device, non_blocking=True))

    def _bring(self, move: Callable[[Tensor, torch.device], Tensor]) -> None:
        for name, parameter in self.parameters.items():
            device, master = parameter.device, self.masters[name]
            if master.dtype != parameter.dtype:
                master.data = move(master.data, device)
            self.moments[name] = {kind: move(value, device) for kind, value in self.moments[name].items()}

    def clear(self) -> None:
        """Drop all gradients: the collected ones and those of the parameters."""
        self.collected = {}
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return moments, and masters if parameters are rounded, by kind/parameter; if sharded, this rank's rows."""
        moments = {f"{kind}/{name}": value for name, kinds in self.moments.items() for kind, value in kinds.items()}
        names = self.masters if self.placement.rounds else [name for name, _ in self.rounded]
        return moments | {f"{MASTER}/{name}": self.masters[name].detach() for name in names}

    @torch.no_grad()
    def restore(self, keys: Collection[str], read: Callable[[str, Tensor], None]) -> None:
        """Restore what `state` returned. `read(key, tensor)` fills this rank's tensor of a key. Raises ValueError if
        `keys` are those of another model or precision."""
        own = self.state()
        all_keys = self.placement.specs(
            {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in own.items()}
        ).keys()
        names = {key.split("/", 1)[1] for key in all_keys}
        unknown = sorted(key for key in keys if key.split("/", 1)[1] not in names)
        if unknown:
            raise ValueError(
                f"the optimizer state has {unknown[:3]}, parameters that this model lacks. Resume with the model that "
                "the run began with"
            )
        if differing := sorted(all_keys ^ set(keys)):
            raise ValueError(
                f"the optimizer state was saved under another learn.precision: {differing[:3]} is on one side only. "
                "Resume with the precision that the run began with"
            )
        for key, tensor in own.items():
            read(key, tensor)
        self.round()

    def _master(self, parameter: Tensor) -> Tensor:
        master = parameter.detach().float()
        return in_host_memory(master) if self.waits else master

    def zeros(self, master: Tensor) -> dict[str, Tensor]:
        device = "cpu" if self.waits else master.device
        zeros = {kind: torch.zeros_like(master, device=device) for kind in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), dtype=torch.float32, device=device)} | zeros

    @property
    def rounded(self) -> list[tuple[str, Tensor]]:
        """Names and parameters that have a separate float32 master."""
        return [(name, p) for name, p in self.parameters.items() if self.masters[name].dtype != p.dtype]

    @torch.no_grad()
    def round(self) -> None:
        for name, parameter in self.rounded:
            parameter.copy_(self.masters[name])


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(local(parameter), dtype=torch.promote_types(parameter.dtype, torch.float32))
    return local(parameter.grad)
