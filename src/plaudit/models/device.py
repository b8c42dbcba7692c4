"""Choose the device on which a process computes."""

from __future__ import annotations

import torch


def device_of(name: str) -> str:
    """Return the torch device that a setting names: cpu, cuda or cuda:N; `auto` is cuda if there is a GPU, else cpu.
    Raises ValueError for another name, or for a GPU that does not exist."""
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
