"""Columns that a role adds to a batch, and how batches and columns travel between processes.

Batch, Annotations -> numpy arrays -> pickled -> Batch, Annotations
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plaudit.algorithms.base import Output
from plaudit.batch import Batch
from plaudit.types import Role
from plaudit.types.distant import Source, packed, unpacked


class Annotations(dict[str, Tensor]):
    """Columns that a pass adds to a batch, by name."""


def _arrays(columns: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: column.detach().cpu().numpy() for name, column in columns.items()}


def _tensors(arrays: Mapping[str, Any]) -> Annotations:
    return Annotations({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})


def _batch(unit: int, arrays: dict[str, Any], runs: Any = None, sources: Sequence[Source] = ()) -> Batch:
    arrays = unpacked(arrays, runs) if sources else arrays
    return Batch(unit=unit, sources=tuple(sources), **_tensors(arrays))


def _travelling(batch: Batch) -> tuple[Any, ...]:
    arrays = _arrays(batch.columns())
    return _batch, (batch.unit, *(packed(arrays, batch.sources) if batch.sources else (arrays,)))


# Batches and columns travel as numpy arrays: torch would copy each tensor several times.
copyreg.pickle(Batch, _travelling)
copyreg.pickle(Annotations, lambda columns: (_tensors, (_arrays(columns),)))

COLUMNS: Mapping[Role, Callable[[Output], dict[str, Tensor | None]]] = {
    Role.POLICY: lambda output: {"proximal": output.logprobs},
    Role.REFERENCE: lambda output: {"reference": output.logprobs},
    Role.CRITIC: lambda output: {"values": output.values, "bootstrap": output.scores},
}
"""The batch columns that a role fills, from its output."""
