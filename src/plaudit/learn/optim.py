"""Optimizer and learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from plaudit.learn.settings import OptimizerSettings
from plaudit.learn.sharding import Placement, Whole, in_host_memory, local

MASTER = "master"
"""Kind of the tensors of `Optimizer.state` that hold masters, beside AdamW's moments."""


def schedule(step: int, total: int, settings: OptimizerSettings) -> float:
    """Multiplier of the learning rate at `step` (0-based) of `total`: linear warm-up, then the decay.

    Pure, so that a resumed run needs nothing but its step number.
    """
    warmup = round(settings.warmup * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if settings.schedule == "constant" or total <= warmup:
        return 1.0
    done = min((step - warmup) / (total - warmup), 1.0)
    shape = 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.min_ratio + (1.0 - settings.min_ratio) * shape


class Optimizer:
    """AdamW in float32 on a model's trained parameters, whatever their precision; decay on matrices only.

    A parameter of lower precision has a master, a float32 copy, which moves; the parameter is what it rounds to. In
    bfloat16 most steps of a small learning rate would round to nothing. Its gradients are added up in float32 too, over
    its uses and over micro-batches. Of sharded parameters, which are float32, a rank moves its own rows.

    Torch's kernel is called directly: its `torch.optim` loads the compiler, for seconds, to be passed over by it.
    """

    def __init__(self, model: nn.Module, settings: OptimizerSettings, placement: Placement | None = None):
        self.settings, self.rate, self.norm = settings, settings.learning_rate, 0.0
        self.placement = placement or Whole(model)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: local(p) if p.dtype.itemsize >= 4 else _master(p) for name, p in self.parameters.items()}
        self.moments = {name: _moments(master) for name, master in self.masters.items()}
        for _, parameter in self._rounded():
            parameter.grad_dtype = torch.float32

    def collect(self) -> None:
        """The masters have the gradients that autograd has added up by now."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad = local(parameter.grad)

    def gradients(self) -> Iterator[Tensor]:
        """What was collected for every trained parameter; one that no row touched has zeros."""
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            yield master.grad

    def gradient_norm(self) -> float:
        """Over everything collected; the next step is scaled by it."""
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        self.norm = self.placement.norm(float(torch.nn.utils.get_total_norm(gradients, foreach=True)))
        return self.norm

    @torch.no_grad()
    def step(self) -> None:
        """Move by `rate`; gradients of a norm beyond the limit are scaled down to it. Call `gradient_norm` before."""
        limit = self.settings.max_gradient_norm
        excess = self.norm / limit if 0.0 < limit < self.norm else None
        moving = [name for name, master in self.masters.items() if master.grad is not None]
        self._move([name for name in moving if self.masters[name].dim() >= 2], excess, self.settings.weight_decay)
        self._move([name for name in moving if self.masters[name].dim() < 2], excess, 0.0)
        self._round()

    def _move(self, names: Sequence[str], excess: float | None, decay: float) -> None:
        if not names:
            return
        masters = [self.masters[name] for name in names]
        first, second, steps = (
            [self.moments[name][kind] for name in names] for kind in ("exp_avg", "exp_avg_sq", "step")
        )
        torch._foreach_add_(steps, 1.0)
        # The kernel divides by grad_scale as it reads: a pass over all gradients less than scaling them before.
        torch._fused_adamw_(
            masters,
            [master.grad for master in masters if master.grad is not None],
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
        torch.autograd.graph.increment_version(masters)  # the kernel does not, and copies elsewhere go by it

    def rest(self) -> None:
        """Moments and masters wait in host memory until `rise`, and leave the device to others."""
        self._bring(lambda tensor, device: in_host_memory(tensor))

    def rise(self) -> None:
        """Back to where the parameters are."""
        self._bring(lambda tensor, device: tensor.to(device, non_blocking=True))

    def _bring(self, move: Callable[[Tensor, torch.device], Tensor]) -> None:
        for name, parameter in self.parameters.items():
            device, master = parameter.device, self.masters[name]
            if master.dtype != parameter.dtype:
                master.data = move(master.data, device)
            self.moments[name] = {kind: move(value, device) for kind, value in self.moments[name].items()}

    def clear(self) -> None:
        """Forget the gradients."""
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None

    def state(self) -> dict[str, Tensor]:
        """Moments and masters, as kind/parameter: this rank's rows of them, where parameters are sharded."""
        moments = {f"{kind}/{name}": value for name, kinds in self.moments.items() for kind, value in kinds.items()}
        names = self.masters if self.placement.rounds else [name for name, _ in self._rounded()]
        return moments | {f"{MASTER}/{name}": self.masters[name].detach() for name in names}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Back to `state`, from whole tensors. Raises ValueError if they are not this model's, or of another
        precision."""
        own = self.state()
        unknown = sorted(key for key in tensors if key.split("/", 1)[1] not in self.masters)
        if unknown:
            raise ValueError(f"the optimizer state has tensors of parameters this model lacks: {unknown[:3]}")
        if differing := sorted(own.keys() ^ tensors.keys()):
            raise ValueError(
                f"the optimizer state was saved under another learn.precision: {differing[:3]} is on one side only. "
                "Resume with the precision that the run began with"
            )
        for key, value in tensors.items():
            own[key].copy_(self.placement.part(key, value))
        self._round()

    def _rounded(self) -> list[tuple[str, Tensor]]:
        """The parameters that have a master apart."""
        return [(name, p) for name, p in self.parameters.items() if self.masters[name].dtype != p.dtype]

    @torch.no_grad()
    def _round(self) -> None:
        for name, parameter in self._rounded():
            parameter.copy_(self.masters[name])


def _master(parameter: Tensor) -> Tensor:
    return parameter.detach().float().requires_grad_()


def _moments(master: Tensor) -> dict[str, Tensor]:
    step = torch.zeros((), dtype=torch.float32, device=master.device)
    return {"step": step, "exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
