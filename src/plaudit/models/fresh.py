"""Random numbers for fresh parameters, drawn on the CPU: a seed gives the same numbers whatever the model's device."""

from __future__ import annotations

import torch
from torch import Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def draw_normal(parameter: Tensor, std: float, source: torch.Generator) -> None:
    """Fill the parameter from a normal distribution of mean 0 and deviation `std`, in place."""
    parameter.copy_(_here(parameter).normal_(0.0, std, generator=source))


def _here(parameter: Tensor) -> Tensor:
    """Return the tensor itself if it is on the CPU, else an uninitialised CPU tensor like it."""
    return parameter if parameter.device.type == "cpu" else torch.empty_like(parameter, device="cpu")
