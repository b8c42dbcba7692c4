"""Which weights an engine with a copy of its own takes: newer ones, of its own model, as they were sent; and whether it
has them afterwards.

Knows no engine and no way that weights travel: both hand over what arrived.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from plaudit.models.digest import digest


class WeightsError(RuntimeError):
    """Weights that are older than the engine's, not the model's, or not those that were sent."""


@runtime_checkable
class Ordered(Protocol):
    """Refuses older weights than it has."""

    def go_back(self) -> None:
        """The run went back to a checkpoint: take the next weights whatever their version."""
        ...


class Accepted:
    """The version, names and shapes of the weights that were taken last; `version` is None before the first."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}

    def check(self, weights: Mapping[str, Tensor], version: int, *, sent: str | None) -> None:
        """Raise WeightsError if the engine should keep what it has. `sent` is the sender's `digest` of the weights."""
        shapes = _shapes(weights)
        if self.version is not None and version < self.version:
            raise WeightsError(f"These weights are version {version}, the engine has {self.version} already.")
        if self._shapes and shapes != self._shapes:
            odd = sorted(f"{name} {shape}" for name, shape in shapes.items() ^ self._shapes.items())
            raise WeightsError(f"These are not the model's weights: sent or held alone are {', '.join(odd[:6])}.")
        if sent is not None and (found := digest(weights)) != sent:
            raise WeightsError(
                f"The weights of version {version} have digest {found}, but were sent with {sent}: they changed on "
                f"their way. The engine keeps version {self.version}; send them again."
            )

    def take(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.version, self._shapes = version, _shapes(weights)

    def go_back(self) -> None:
        """Take the next weights of the same model, whatever their version."""
        self.version = None


def check_names(weights: Mapping[str, Tensor], own: Collection[str]) -> None:
    """Raise ValueError if these are not tensors of the model, whose own names are given."""
    if set(weights) != set(own):
        unknown, missing = sorted(set(weights) - set(own)), sorted(set(own) - set(weights))
        raise ValueError(f"These are not the model's weights: unknown {unknown[:5]}, missing {missing[:5]}.")


def check_held(held: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Raise WeightsError if what the model holds now is not what it was given, in its own precision."""
    odd = [name for name, tensor in held.items() if not _same(tensor.detach(), weights[name])]
    if odd:
        raise WeightsError(
            f"The engine's {', '.join(odd[:3])} ({len(odd)} of {len(held)} tensors) are not what was copied into them: "
            "its memory, or that of what was sent, changed meanwhile."
        )


def _same(tensor: Tensor, given: Tensor) -> bool:
    """To the bit; where a precision was given up, by value."""
    if tensor.dtype == given.dtype:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        return torch.equal(tensor.view(bits), given.detach().to(tensor.device).view(bits))
    return bool(torch.isclose(tensor, given.detach().to(tensor), rtol=0.0, atol=0.0, equal_nan=True).all())


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}
