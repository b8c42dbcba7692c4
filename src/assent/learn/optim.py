"""Optimizer and learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from assent.learn.settings import OptimizerSettings


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


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW with decay on matrices only; one fused kernel a step where the device has it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )
