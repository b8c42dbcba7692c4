"""Optimizer state on disk: whole tensors by kind/parameter in one file, of which each rank writes and reads its boxes.

this rank's tensors -> filled -> ROLE.safetensors -> opened -> this rank's tensors, on any number of ranks
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from plaudit.learn.sharding import Placement
from plaudit.models.boxes import Filled, Stored, beside, create, laid_out, read_box, stored_in


def filled(placement: Placement, tensors: Mapping[str, Tensor], path: Path) -> list[Filled]:
    """Return the boxes that this rank must write to `path`, or []. All ranks must call it; rank 0 creates the file."""
    within = {key: placement.within(key, tensor) for key, tensor in tensors.items()}
    specs = placement.specs({key: (tensor.dtype, within[key].shape) for key, tensor in tensors.items()})
    places, headers = laid_out(path.parent, specs, name=path.stem)

    def begin() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        create(places, headers)

    if not placement.begin(begin):
        return []
    if not path.exists():  # rank 0 has another disk: the driver collects what is written here
        path = beside(path.parent) / path.name
        places, headers = laid_out(path.parent, specs, name=path.stem)
        begin()
    return [(places[key], box, values) for key, one in within.items() if one.mine for box, values in one.held]


def opened(placement: Placement, path: Path) -> tuple[Collection[str], Callable[[str, Tensor], None]]:
    """Return the file's keys (kind/parameter), and a function (key, tensor) that reads this rank's part of a key."""
    stored = stored_in([path])
    return stored, partial(_read, placement, stored)


@torch.no_grad()
def _read(placement: Placement, stored: Mapping[str, Stored], key: str, tensor: Tensor) -> None:
    """Fill this rank's tensor from the stored one. Raises ValueError if the stored shape is not the whole tensor's."""
    shape, held, _ = placement.within(key, tensor)
    if stored[key].shape != shape:
        raise ValueError(
            f"the optimizer state's {key} has shape {stored[key].shape}, the model's parameter {shape}. Resume with "
            "the model that the run began with"
        )
    for box, values in held:
        rows = values if values.dim() else values.view(1)
        if rows.numel():
            for first, piece in read_box(stored[key], box):
                rows[first : first + len(piece)] = piece.to(rows)
