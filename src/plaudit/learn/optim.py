"""Optimizer and learning-rate schedule.

summed gradients -> collect -> gradient_norm -> step: AdamW on the masters -> parameters, rounded
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from plaudit.learn.settings import OptimizerSettings
from plaudit.learn.sharding import Placement, Whole, in_host_memory, local

MASTER = "master"
"""Kind of the tensors in `Optimizer.state` that are masters; the other kinds are AdamW's moments."""


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

    A parameter of lower precision has a master, a float32 copy. Updates change the master, and the parameter is its
    rounded value: in bfloat16, most steps of a small learning rate would round to nothing. Gradients of such a
    parameter are summed in float32 too, over its uses and over micro-batches. Sharded parameters are float32, and each
    rank updates its own rows.

    Torch's kernel is called directly, since `torch.optim` would load the compiler, for seconds, without using it.
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
        """Give the masters the gradients that autograd has summed."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad = local(parameter.grad)

    def gradients(self) -> dict[str, Tensor]:
        """Return the collected gradient of every trained parameter: zeros if no row used it."""
        found = {}
        for name, master in self.masters.items():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            found[name] = master.grad
        return found

    def gradient_norm(self) -> float:
        """Norm of all collected gradients; the next step is scaled by it."""
        gradients = {name: master.grad for name, master in self.masters.items() if master.grad is not None}
        self.norm = self.placement.norm(gradients)
        return self.norm

    @torch.no_grad()
    def step(self) -> None:
        """Update by `rate`. Gradients of a norm above the limit are scaled down to it. Call `gradient_norm` first."""
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
        # The kernel divides by grad_scale as it reads, which saves a pass over all gradients.
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
        """Move moments and masters to host memory until `rise`, to free the device."""
        self._bring(lambda tensor, device: in_host_memory(tensor))

    def rise(self) -> None:
        """Move moments and masters back to the parameters' device."""
        self._bring(lambda tensor, device: tensor.to(device, non_blocking=True))

    def _bring(self, move: Callable[[Tensor, torch.device], Tensor]) -> None:
        for name, parameter in self.parameters.items():
            device, master = parameter.device, self.masters[name]
            if master.dtype != parameter.dtype:
                master.data = move(master.data, device)
            self.moments[name] = {kind: move(value, device) for kind, value in self.moments[name].items()}

    def clear(self) -> None:
        """Drop the gradients."""
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return moments and masters by kind/parameter. Sharded parameters have this rank's rows."""
        moments = {f"{kind}/{name}": value for name, kinds in self.moments.items() for kind, value in kinds.items()}
        names = self.masters if self.placement.rounds else [name for name, _ in self._rounded()]
        return moments | {f"{MASTER}/{name}": self.masters[name].detach() for name in names}

    @torch.no_grad()
    def restore(self, keys: Collection[str], read: Callable[[str, Tensor], None]) -> None:
        """Restore `state`: `read` fills this rank's tensor of each key. Raises ValueError if the keys are those of
        another model or precision."""
        own = self.state()
        unknown = sorted(key for key in keys if key.split("/", 1)[1] not in self.masters)
        if unknown:
            raise ValueError(
                f"the optimizer state has {unknown[:3]}, parameters that this model lacks. Resume with the model that "
                "the run began with"
            )
        if differing := sorted(own.keys() ^ set(keys)):
            raise ValueError(
                f"the optimizer state was saved under another learn.precision: {differing[:3]} is on one side only. "
                "Resume with the precision that the run began with"
            )
        for key, tensor in own.items():
            read(key, tensor)
        self._round()

    def _rounded(self) -> list[tuple[str, Tensor]]:
        """Parameters with a separate master."""
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
