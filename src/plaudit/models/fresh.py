"""Random numbers for fresh parameters, the same for a seed on every device: a GPU's generator would draw others."""

from __future__ import annotations

import torch
from torch import Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def draw_normal(parameter: Tensor, std: float, source: torch.Generator) -> None:
    """N(0, std), in place."""
    parameter.copy_(_here(parameter).normal_(0.0, std, generator=source))


def _here(parameter: Tensor) -> Tensor:
    """Memory on the CPU for a tensor's values: the tensor itself if it is there."""
    return parameter if parameter.device.type == "cpu" else torch.empty_like(parameter, device="cpu")
