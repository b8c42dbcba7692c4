"""The device that a process computes on."""

from __future__ import annotations

import torch


def device_of(name: str) -> str:
    """The device that a setting names; `auto` is a GPU if there is one. Raises ValueError for a device that does not
    exist."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if gpus else "cpu"
    if name == "cpu":
        return name
    kind, _, number = name.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()):
        raise ValueError(f"device={name} is not one of auto, cpu, cuda, cuda:0, ...")
    if int(number or 0) >= gpus:
        raise ValueError(f"device={name}: torch {torch.__version__} sees {gpus} GPUs here. Set device=cpu or auto.")
    return name
